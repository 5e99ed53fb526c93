"""Build the WebAssembly modules of the native runtime, and the npm package: python tools/web.py

Needs zig, which ``pip install ziglang`` installs. The modules go into the Python package, where
``unflip export --html`` finds them. The npm package goes to build/npm.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "native"
WEB = ROOT / "src/unflip/export/web"
OBJECTS = ROOT / "build/web"
PACKAGE = ROOT / "build/npm"
MOST_BYTES = 300_000

# The same rounding as everywhere: no contraction.
FLAGS = [
    "--target=wasm32-wasi",
    "-std=c++17",
    "-DNDEBUG",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-ffunction-sections",
    "-Wall",
    "-Wextra",
]
SMALL = [
    *("-Oz", "-Xclang", "-Oz", "-mllvm", "-inline-threshold=2"),
    *("-fno-vectorize", "-fno-slp-vectorize"),
]
MODULES = {"scalar": [], "simd": ["-msimd128"], "relaxed": ["-msimd128", "-mrelaxed-simd"]}
LINK = ["-mexec-model=reactor", "-Wl,--gc-sections", "-Wl,--strip-all", "-Wl,-z,stack-size=1048576"]


def sources(name: str) -> list[Path]:
    """The library without files and threads, the module's own functions instead of them, and one set of kernels."""
    found = [path for folder in ("src", "src/engine") for path in (NATIVE / folder).glob("*.cpp")]
    skipped = {"model.cpp", "thread_pool.cpp", "fail.cpp"}
    skipped |= {"popcount_conv.cpp", "byte_pool_conv.cpp", "byte_gather.cpp"}
    found = [path for path in found if path.name not in skipped]
    kernels = (
        ["src/kernels/wasm.cpp", "web/only_wasm.cpp"]
        if MODULES[name]
        else ["src/kernels/portable.cpp"]
    )
    return sorted([*found, *(NATIVE / path for path in (*kernels, "web/module.cpp"))])


def optimization(source: Path) -> list[str]:
    """Small code everywhere; the kernels with vectors are inlined by their attributes."""
    return ["-Os"] if source.stem == "wasm" else SMALL


def zig(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "ziglang", "c++", *arguments], check=True)


def compile_module(name: str) -> Path:
    """One module: every source compiled with its flags, then linked."""
    folder = OBJECTS / name
    folder.mkdir(parents=True, exist_ok=True)
    include = ["-iquote", str(NATIVE / "src"), "-I", str(NATIVE / "include")]

    def compiled(source: Path) -> str:
        target = folder / f"{source.parent.name}-{source.stem}.o"
        zig(
            *FLAGS,
            *optimization(source),
            *MODULES[name],
            *include,
            "-c",
            str(source),
            "-o",
            str(target),
        )
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources(name)))
    target = WEB / f"unflip-{name}.wasm"
    link(MODULES[name], objects, target)
    return target


def link(flags: list[str], objects: list[str], target: Path) -> None:
    """zig knows the libraries, but does not pass two options to its linker. So it is asked for the linker's command.

    Our files come first, so that they replace functions of the C++ library. Addresses are shortened: 4 % of the module.
    """
    command = [sys.executable, "-m", "ziglang"]
    shown = subprocess.run(
        [*command, "c++", *FLAGS, *flags, *LINK, *objects, "-o", str(target)],
        env={**os.environ, "ZIG_VERBOSE_LINK": "1"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    words = next(
        (line.split() for line in shown.stderr.splitlines() if line.startswith("wasm-ld -")), None
    )
    if words is None:
        raise SystemExit(shown.stderr)
    linker, *others = (word for word in words if word not in objects)
    subprocess.run([*command, linker, *objects, *others, "--compress-relocations"], check=True)


def make_package() -> Path:
    """The npm package, with the version of the Python package."""
    about = json.loads((WEB / "package.json").read_text())
    found = re.search('__version__ = "(.*)"', (ROOT / "src/unflip/__init__.py").read_text())
    assert found is not None
    about["version"] = found[1]
    shutil.rmtree(PACKAGE, ignore_errors=True)
    PACKAGE.mkdir(parents=True)
    (PACKAGE / "package.json").write_text(json.dumps(about, indent=2) + "\n")
    for file in (*about["files"], "README.md"):
        shutil.copy(WEB / file, PACKAGE)
    shutil.copy(ROOT / "LICENSE", PACKAGE)
    return PACKAGE


def main() -> None:
    for name in MODULES:
        module = compile_module(name)
        size = module.stat().st_size
        print(f"{module.relative_to(ROOT)}: {size:,} bytes")
        if size > MOST_BYTES:
            raise SystemExit(f"{module.name} has more than {MOST_BYTES:,} bytes")
    print(
        f"{make_package().relative_to(ROOT)}: the npm package; 'npm pack' there makes its archive"
    )


if __name__ == "__main__":
    main()
