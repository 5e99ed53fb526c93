"""What is there without torch, without the native part, and for C programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unflip
from unflip.runtime import _native

Files = dict[str, Path]

NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
"""


def python(script: str, *arguments: Any, flags: tuple[str, ...] = (), **environment: str) -> str:
    words = [sys.executable, *flags, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_runs_where_there_is_no_torch(files: Files) -> None:
    script = """
    import numpy as np, unflip
    model = unflip.load(sys.argv[1])
    print(model(np.ones((2, *model.input_shape), np.float32)).shape, "load" in dir(unflip))
    try:
        unflip.binarize
    except ModuleNotFoundError as error:
        print(error.name)
    """
    out = python(NO_TORCH + textwrap.dedent(script), files["residual"])
    assert out.splitlines() == ["(2, 4) True", "torch"]


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
    # Labels are printed as JSON has them, so only those of ASCII are looked for.
    assert lines[list(np.argsort(-result)).index(0)].split()[1] == "cat"


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
