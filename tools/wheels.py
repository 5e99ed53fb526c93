"""Builds the source archive and one wheel per platform, on one Linux machine: ``make wheels``.

zig, which is a clang with the headers of all platforms, compiles the native libraries. Python loads them with ctypes,
so a wheel fits every version of Python. Wheels for Linux need glibc 2.17 (of 2012) or later. Those for macOS and
Windows are built, but cannot be run here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import ziglang

ROOT = Path(__file__).parent.parent
ZIG = Path(ziglang.__file__).parent / "zig"
WRAPPERS = ROOT / "build" / "zig"


@dataclass(frozen=True)
class Platform:
    """A target of zig, what CMake calls it, and the tag of its wheels."""

    target: str
    system: str
    processor: str
    tag: str


PLATFORMS = {
    "linux-x86_64": Platform(
        "x86_64-linux-gnu.2.17", "Linux", "x86_64", "manylinux_2_17_x86_64.manylinux2014_x86_64"
    ),
    "linux-aarch64": Platform(
        "aarch64-linux-gnu.2.17", "Linux", "aarch64", "manylinux_2_17_aarch64.manylinux2014_aarch64"
    ),
    "macos-arm64": Platform("aarch64-macos.11.0", "Darwin", "arm64", "macosx_11_0_arm64"),
    "macos-x86_64": Platform("x86_64-macos.11.0", "Darwin", "x86_64", "macosx_11_0_x86_64"),
    "windows-x86_64": Platform("x86_64-windows-gnu", "Windows", "AMD64", "win_amd64"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("platforms", nargs="*", default=[*PLATFORMS], metavar="PLATFORM")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.platforms) - set(PLATFORMS))
    if unknown:
        sys.exit(f"wheels: unknown platform {unknown[0]!r}. Known: {', '.join(PLATFORMS)}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    for old in (*chosen.out.glob("unflip-*.whl"), *chosen.out.glob("unflip-*.tar.gz")):
        old.unlink()
    report(build("sdist", chosen.out, {}, {}))
    for name in chosen.platforms:
        wheel = build_wheel(name, PLATFORMS[name], chosen.out)
        check_tag(wheel, PLATFORMS[name])
        report(wheel)


def build_wheel(name: str, platform: Platform, out: Path) -> Path:
    tools = wrappers(name, platform.target)
    cmake = {
        "CMAKE_SYSTEM_NAME": platform.system,
        "CMAKE_SYSTEM_PROCESSOR": platform.processor,
        "CMAKE_AR": str(tools / "ar"),
        "CMAKE_RANLIB": str(tools / "ranlib"),
    }
    settings = {
        "wheel.tags": ";".join(f"py3-none-{tag}" for tag in [platform.tag]),
        "build-dir": str(ROOT / "build" / f"wheel-{name}"),
        "cmake.args": ";".join(f"-D{key}={value}" for key, value in cmake.items()),
        "install.strip": "false",  # the linker has done it
    }
    environment = {
        "CC": str(tools / "cc"),
        "CXX": str(tools / "c++"),
        "CFLAGS": "-g0",
        "CXXFLAGS": "-g0",
        "LDFLAGS": "-s",
    }
    return build("wheel", out, settings, environment)


def wrappers(name: str, target: str) -> Path:
    """CMake wants programs without arguments."""
    folder = WRAPPERS / name
    folder.mkdir(parents=True, exist_ok=True)
    for tool in ("cc", "c++", "ar", "ranlib"):
        flags = f"-target {target}" if tool in ("cc", "c++") else ""
        path = folder / tool
        path.write_text(f'#!/bin/sh\nexec "{ZIG}" {tool} {flags} "$@"\n')
        path.chmod(0o755)
    return folder


def build(kind: str, out: Path, settings: dict[str, str], environment: dict[str, str]) -> Path:
    before = set(out.iterdir())
    words = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out)]
    options = [f"-C{key}={value}" for key, value in settings.items()]
    run([*words, *options, str(ROOT)], environment)
    [made] = set(out.iterdir()) - before
    return made


def run(words: list[str], environment: dict[str, str] | None = None) -> str:
    """The output is shown only if the command fails."""
    done = subprocess.run(
        words,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nwheels: failed: {' '.join(words)}")
    return done.stdout


def check_tag(wheel: Path, platform: Platform) -> None:
    """auditwheel reads the symbols of the libraries: they must not need a newer glibc than the tag says."""
    if platform.system != "Linux":
        return
    shown = run([sys.executable, "-m", "auditwheel", "show", str(wheel)])
    if platform.tag.partition(".")[0] not in re.sub(r"\s+", " ", shown):
        sys.exit(f"{shown}\nwheels: {wheel.name} does not deserve its tag")


def report(path: Path) -> None:
    size = path.stat().st_size
    text = f"{path.name}: {size / 1e6:.2f} MB"
    if path.suffix == ".whl":
        files = zipfile.ZipFile(path).infolist()
        text += f", {sum(file.file_size for file in files) / 1e6:.2f} MB installed"
    print(text, flush=True)


if __name__ == "__main__":
    main()
