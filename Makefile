# Two commands for a newcomer:  make demo   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The native library is part of the install: a change here rebuilds its changed files.
NATIVE := $(shell find native -type f)

.PHONY: demo test lint format web wheels release docs report clean

demo: $(VENV)/installed
	$(BIN)/unflip demo

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The native runtime for browsers: WebAssembly modules in src/unflip/export/web, and the npm package in build/npm.
web: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt ziglang
	$(BIN)/python tools/web.py

# The source archive, and one wheel per platform with the native library built in: they install without a compiler.
# PLATFORMS=linux-x86_64 builds only that one. The wheels for Linux are then tried in a new environment.
wheels: web
	$(BIN)/python -m pip install --quiet --constraint constraints.txt build ziglang auditwheel
	$(BIN)/python tools/wheels.py $(PLATFORMS)
	$(BIN)/python tools/try_wheels.py

# What must be true before a version is tagged. It uploads nothing.
release: test docs
	$(BIN)/python tools/release.py
	$(MAKE) wheels

# The site, in build/site. Any warning, such as a dead link, is an error.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html

# All studies on one page, build/report.html, made from the archives in results/.
CIFAR10 := readings ablation theta-rate replication-from-one sota controls corrections alpha rho first-controls first-alpha first-rho beyond final methods ends
IMAGENETTE := imagenette-resnet18
DIGITS := digits-mcu
report: $(VENV)/installed
	rm -rf build/results
	mkdir -p build/results
	for archive in results/*/*/raw.tar.xz; do $(BIN)/python -m tarfile --filter data --extract $$archive build/results || exit 1; done
	$(BIN)/unflip report $(CIFAR10:%=build/results/cifar10/%) $(IMAGENETTE:%=build/results/imagenette/%) $(DIGITS:%=build/results/digits/%) --out build/report.html

# Editable, so that the sources run. constraints.txt pins torch to a CPU build that is known to work.
# The build requirements come first: without isolation they are pinned too, and a second build is quick.
$(VENV)/installed: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch scikit-build-core
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[train,tensorboard,docs,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
