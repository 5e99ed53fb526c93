"""What works without torch, without the native part, and from C."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import unflip
from unflip import hints, resize
from unflip.packing.file import Packed, write
from unflip.runtime import _native

Files = dict[str, Path]

MISSING = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
EXTRAS = (
    "torch",
    "yaml",
    "sklearn",
    "matplotlib",
    "onnx",
    "ray",
    "tensorboard",
    "pyarrow",
    "h5py",
    "huggingface_hub",
)


def python(script: str, *arguments: Any, flags: tuple[str, ...] = (), **environment: str) -> str:
    words = [sys.executable, *flags, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def base_install(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """The ``unflip`` command where only the base dependencies are installed: the packages of all extras are missing."""
    script = f"{MISSING.format(packages=EXTRAS)}\nfrom unflip.__main__ import main\nmain()"
    words = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_extras_are_named_as_pyproject_has_them(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert set(hints.EXTRAS) == {
        *EXTRAS,
        "pydantic",
    }  # typer needs pydantic, so it is always installed
    packages = {"yaml": "pyyaml", "sklearn": "scikit-learn"}
    for package, extra in hints.EXTRAS.items():
        listed = {name(line) for line in project["optional-dependencies"][extra]}
        assert packages.get(package, package) in listed
    base = {name(line) for line in project["dependencies"]}
    assert base == {"numpy", "safetensors", "typer", "rich", "pillow"}


def test_the_library_that_resizes_is_installed_too() -> None:
    """Without it Pillow resizes, and the tests that compare the two are skipped."""
    assert resize.has_library()


def test_no_package_is_left_out_of_the_wheel(root: Path) -> None:
    """A pattern without a leading slash matches at every depth, and the wheel leaves out what the sdist does."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    for pattern in project["tool"]["scikit-build"]["sdist"]["exclude"]:
        assert pattern.startswith("/")


def name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0]


def test_packed_networks_with_the_base_install(files: Files, tmp_path: Path) -> None:
    network = files["residual"]
    shown = base_install("show", network)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "(verified)" in shown.stdout
    timed = base_install("bench", network, "--runs", 1)
    assert (timed.returncode, timed.stderr) == (0, "")
    assert "median" in timed.stdout
    draw_images(tmp_path, unflip.load(network))
    predicted = base_install("predict", network, next(tmp_path.rglob("*.png")))
    assert (predicted.returncode, predicted.stderr) == (0, "")
    assert "cat" in predicted.stdout


def test_evaluate_with_the_base_install(networks: dict[str, Packed], tmp_path: Path) -> None:
    file = tmp_path / "network.unflip"
    networks["residual"].graph["labels"].sort()  # as folders are
    write(file, networks["residual"])
    model = unflip.load(file)
    draw_images(tmp_path, model)
    done = base_install("evaluate", file, "folder", "--data", tmp_path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["images"] == len(model.labels or ())


def draw_images(folder: Path, model: unflip.Model) -> None:
    """A data set of one image per class and part, in the model's size."""
    _, height, width = model.input_shape
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        for label in model.labels or ():
            pixels = random.integers(0, 256, size=(height, width, 3), dtype=np.uint8)
            (folder / part / label).mkdir(parents=True)
            Image.fromarray(pixels).save(folder / part / label / "0.png")


def test_doctor_with_the_base_install() -> None:
    done = base_install("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "training, packing: pip install 'unflip[train]'" in done.stdout
    assert "Training lacks torch" in done.stdout
    assert "pip install 'unflip[train]'" in base_install().stdout


def test_doctor_finds_a_runtime_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNFLIP_ISA", "pdp11")
    done = base_install("doctor")
    assert done.returncode == 1
    assert "UNFLIP_ISA is 'pdp11'" in done.stdout


def test_runs_with_the_base_install(tmp_path: Path) -> None:
    folder = tmp_path / "seed-0"
    folder.mkdir()
    recipe = {"name": "tiny", "epochs": 2, "data": {"name": "digits"}, "method": "float"}
    (folder / "recipe.json").write_text(json.dumps({"recipe": recipe, "seed": 0}))
    epoch = {"epoch": 1, "accuracy": 12.5, "loss": 2.0, "seconds": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(epoch) + "\n")
    done = base_install("runs", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].split()[1:] == [
        "tiny",
        "0",
        "interrupted",
        "1/2",
        "12.50",
        "%",
    ]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["train", "digits-dorefa"], "training needs torch, which is not installed. {train}"),
        (["demo"], "the demo needs torch, which is not installed. {train}"),
        (["study", "--help"], "a study needs torch, which is not installed. {train}"),
        (["recipes"], "reading recipes needs yaml, which is not installed. {train}"),
        (["report", "."], "a report needs yaml, which is not installed. {train}"),
        (["export", "x.unflip"], "writing ONNX files needs onnx, which is not installed. {onnx}"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_say_what_to_install(command: list[str], says: str) -> None:
    done = base_install(*command)
    install = {extra: f"pip install 'unflip[{extra}]'" for extra in ("train", "onnx")}
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"unflip: {says.format(**install)}\n"


def test_a_model_runs_where_there_is_no_torch(files: Files) -> None:
    script = """
    import numpy as np, unflip
    model = unflip.load(sys.argv[1])
    print(model(np.ones((2, *model.input_shape), np.float32)).shape, "load" in dir(unflip))
    try:
        unflip.binarize
    except ModuleNotFoundError as error:
        print(error.name, error)
    """
    missing = MISSING.format(packages=(*EXTRAS, "safetensors", "pydantic", "typer", "rich", "PIL"))
    out = python(missing + textwrap.dedent(script), files["residual"])
    says = "unflip.binarize needs torch, which is not installed. pip install 'unflip[train]'"
    assert out.splitlines() == ["(2, 4) True", f"torch {says}"]


def test_importing_unflip_imports_little() -> None:
    out = python("import sys, unflip; print([m for m in ('torch', 'numpy') if m in sys.modules])")
    assert out.strip() == "[]"


def test_names_are_functions_whatever_was_imported_first() -> None:
    """``unflip.freeze`` is a function, and the module it comes from has the same name."""
    script = """
    import unflip.freeze, unflip.cost
    from unflip.binarize import signs
    print(callable(unflip.freeze), callable(unflip.cost), callable(unflip.binarize))
    from unflip import *
    print(callable(freeze), callable(load), methods.names()[0] != "")
    """
    assert python(script).split() == ["True"] * 6


def test_every_name_is_there() -> None:
    for name in unflip.__all__:
        assert getattr(unflip, name) is not None
        assert name in dir(unflip)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        unflip.nothing  # noqa: B018


def test_the_source_tree_without_the_native_part(root: Path, files: Files) -> None:
    """PYTHONPATH=src, where nothing was built: all but the runtime works."""
    script = """
    import sys, torch, unflip
    from unflip.packing.file import read
    print(len(read(sys.argv[1]).graph["ops"]), callable(unflip.binarize), unflip.__file__)
    try:
        unflip.load(sys.argv[1])
    except ImportError as error:
        print(error)
    """
    packages = str(Path(np.__file__).parents[1])
    path = os.pathsep.join([str(root / "src"), packages])
    # -S: no .pth files, so that the installed native part is not found
    out = python(script, files["residual"], flags=("-S",), PYTHONPATH=path).splitlines()
    assert out[0] == f"6 True {root / 'src' / 'unflip' / '__init__.py'}"
    assert "native library cannot be loaded" in out[1]
    assert "pip install" in out[1]


def test_the_command_says_so_in_one_line(
    files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from unflip.cli.packed import _loaded

    monkeypatch.setitem(sys.modules, "unflip.runtime._native", None)
    monkeypatch.delattr("unflip.runtime._native")
    with pytest.raises(ValueError, match="native library cannot be loaded"):
        _loaded(files["residual"], 1)


def test_versions_agree() -> None:
    assert _native.version() == unflip.__version__


# --- C


@pytest.fixture(scope="module")
def classify(
    root: Path, tmp_path_factory: pytest.TempPathFactory, command: Callable[..., str]
) -> Path:
    """The example, compiled against the library that Python uses."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library = unflip.runtime.c_folder()
    program = tmp_path_factory.mktemp("c") / "classify"
    strict = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O1")
    where = (f"-I{library}", f"-L{library}", "-lunflip", f"-Wl,-rpath,{library}")
    command("gcc", *strict, root / "native/examples/classify.c", *where, "-o", program)
    return program


def test_the_c_example(
    classify: Path, files: Files, tmp_path: Path, command: Callable[..., str]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, size=(6, 6, 3), dtype=np.uint8)
    image = tmp_path / "image.ppm"
    image.write_bytes(b"P6\n# a comment\n6 6\n255\n" + pixels.tobytes())
    model = unflip.load(files["residual"])
    assert model.labels is not None
    x = (pixels / 255 - np.array([0.5, 0.4, 0.3])) / np.array([0.2, 0.2, 0.3])
    result = model(np.ascontiguousarray(x.transpose(2, 0, 1), dtype=np.float32))
    lines = command(classify, files["residual"], image).splitlines()
    assert len(lines) == 4
    values = [float(line.split()[0]) for line in lines]
    assert np.allclose(values, sorted(result, reverse=True), atol=1e-4)
    assert [line.split()[1] for line in lines] == [model.labels[i] for i in np.argsort(-result)]


@pytest.mark.parametrize(
    "content", [b"", b"P5\n6 6\n255\n", b"P6\n7 6\n255\n", b"P6\n6 6\n255\nshort"]
)
def test_the_c_example_refuses(
    classify: Path, files: Files, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "image.ppm").write_bytes(content)
    for model, image in ((files["residual"], tmp_path / "image.ppm"), (tmp_path, "x"), ("no", "x")):
        done = subprocess.run([classify, model, image], capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.startswith("classify: ")
