"""What the tests of the browser share: the modules, node, Chromium, and small networks with their outputs."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unflip
from unflip.export.web.page import MODULES
from unflip.packing.file import Packed, write

ROOT = Path(__file__).parents[3]
WEB = ROOT / "src" / "unflip" / "export" / "web"
TRAINED = ROOT / "results" / "cifar10" / "network" / "resnet20-strongest.unflip"
RELAXED = "--experimental-wasm-relaxed-simd"  # older versions of node need it

Node = Callable[[str, Path], dict[str, Any]]


@pytest.fixture(scope="session")
def modules() -> Path:
    """The folder of the WebAssembly modules, if they were built from these sources."""
    built = [WEB / f"unflip-{name}.wasm" for name in MODULES]
    if not all(path.exists() for path in built):
        pytest.skip("needs the WebAssembly modules: make web")
    sources = [
        path
        for folder in ("src", "web")
        for path in (ROOT / "native" / folder).rglob("*")
        if path.is_file()
    ]
    if max(path.stat().st_mtime for path in sources) > min(path.stat().st_mtime for path in built):
        pytest.skip("the WebAssembly modules are older than native/: make web")
    return WEB


@pytest.fixture(scope="session")
def chromium(modules: Path) -> Any:
    browser = runpy.run_path(str(Path(__file__).parent / "chromium.py"))
    if browser["find"]() is None:
        pytest.skip("needs Chromium (Debian: chromium)")
    return browser["Browser"]


@pytest.fixture(scope="session")
def node(modules: Path) -> Node:
    """``node(kernels, folder)`` runs check.mjs."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("needs node")

    def run(kernels: str, folder: Path) -> dict[str, Any]:
        flags = [RELAXED] if kernels == "relaxed" and _accepts(program, RELAXED) else []
        script = Path(__file__).parent / "check.mjs"
        words = [program, *flags, str(script), str(modules), kernels, str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def _accepts(program: str, flag: str) -> bool:
    return subprocess.run([program, flag, "-e", "0"], capture_output=True).returncode == 0


@pytest.fixture(scope="session")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every op, step and field of the format, and a trained network; each with an input."""
    folder = tmp_path_factory.mktemp("networks")
    found: dict[str, Packed] = dict(
        runpy.run_path(str(ROOT / "native" / "fuzz" / "seeds.py"))["seeds"]()
    )
    found |= runpy.run_path(str(ROOT / "tests" / "export" / "c_networks.py"))["networks"]()
    for name, packed in found.items():
        write(folder / f"{name}.unflip", packed)
    shutil.copy(TRAINED, folder)
    random = np.random.default_rng(0)
    for path in folder.glob("*.unflip"):
        shape = unflip.load(path).input_shape
        # Whole numbers too: sums of them are often halfway between two floats.
        x = random.normal(size=shape) if random.random() < 0.7 else random.integers(-1, 2, shape)
        x.astype(np.float32).tofile(path.with_suffix(".input"))
    return folder


@pytest.fixture(scope="session")
def expected(networks: Path) -> dict[str, list[int]]:
    """The bits that the native runtime computes."""
    found = {}
    for path in networks.glob("*.unflip"):
        model = unflip.load(path)
        x = np.fromfile(path.with_suffix(".input"), np.float32).reshape(model.input_shape)
        result = model(x)
        many = (
            list(result.values())
            if isinstance(result, dict)
            else result
            if isinstance(result, tuple)
            else [result]
        )
        found[path.stem] = np.concatenate([one.ravel() for one in many]).view(np.uint32).tolist()
    return found
