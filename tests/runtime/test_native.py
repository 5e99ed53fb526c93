"""The native part's own tests: under sanitizers, as fuzzing, and on ARM's instructions by emulation."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from unflip.packing.file import Packed, write

Build = Callable[..., Path]
Command = Callable[..., str]


@pytest.fixture(scope="module")
def sanitized(build: Build) -> Path:
    """Memory errors and undefined behaviour end a program with a message."""
    return build(
        "sanitized",
        [
            "engine_test",
            "loader_test",
            "arithmetic_test",
            "thread_pool_test",
            "resize_test",
            "fuzz_load",
        ],
        UNFLIP_SANITIZE="address,undefined",
        UNFLIP_OPTIMIZE="-O1",
        UNFLIP_TESTS="ON",
        UNFLIP_FUZZ="ON",
    )


def test_loader(sanitized: Path, command: Command) -> None:
    assert "all right" in command(sanitized / "loader_test")


def test_arithmetic(sanitized: Path, command: Command) -> None:
    assert "all right" in command(sanitized / "arithmetic_test")


def test_thread_pool(sanitized: Path, command: Command) -> None:
    assert "all right" in command(sanitized / "thread_pool_test")


def test_resize(sanitized: Path, command: Command) -> None:
    assert "all right" in command(sanitized / "resize_test")


def test_engine(sanitized: Path, command: Command) -> None:
    # Ten random graphs, from number 20 on: number 25 has a max pool behind BatchNorm of both signs.
    assert "graphs" in command(sanitized / "engine_test", 10, 20)


@pytest.mark.parametrize(
    ("seconds", "seed"),
    # CI fuzzes for a minute. At night, every day has another seed.
    [(60, 7), pytest.param(300, date.today().toordinal(), marks=pytest.mark.nightly)],
    ids=["short", "nightly"],
)
def test_fuzzing(
    seconds: int,
    seed: int,
    sanitized: Path,
    command: Command,
    networks: dict[str, Packed],
    tmp_path: Path,
) -> None:
    """What loads is run with all instruction sets, one thread and three; all agree. A long run is in results/fuzz."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, packed in networks.items():
        write(corpus / f"{name}.unflip", packed)
    limits = f"-max_total_time={seconds}", f"-seed={seed}"
    out = command(sanitized / "fuzz_load", corpus, *limits, cwd=tmp_path)
    found = re.search(r"(\d+) files, of which (\d+) were loaded and (\d+) run\n$", out)
    assert found is not None, out
    files, loaded, ran = map(int, found.groups())
    assert files > loaded == ran > 50


def test_thread_pool_has_no_races(root: Path, tmp_path: Path, command: Command) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    source = root / "native"
    files = (source / "tests/thread_pool_test.cpp", source / "src/thread_pool.cpp")
    flags = ("-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{source / 'src'}")
    command("g++", *flags, *files, "-o", tmp_path / "test")
    assert "all right" in command(tmp_path / "test")


def test_arm(build: Build, command: Command) -> None:
    """NEON kernels against the reference, emulated."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip(
            "needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)"
        )
    if platform.machine() == "aarch64":
        pytest.skip("this machine runs NEON itself: see test_engine")
    folder = build(
        "arm",
        ["engine_test", "loader_test", "arithmetic_test", "resize_test"],
        CMAKE_SYSTEM_NAME="Linux",
        CMAKE_SYSTEM_PROCESSOR="aarch64",
        CMAKE_C_COMPILER=compiler.replace("g++", "gcc"),
        CMAKE_CXX_COMPILER=compiler,
        CMAKE_EXE_LINKER_FLAGS="-static",
        CMAKE_CXX_FLAGS_RELEASE="-DNDEBUG",
        UNFLIP_OPTIMIZE="-O1",
        UNFLIP_TESTS="ON",
    )
    assert "all right" in command(emulator, folder / "loader_test")
    assert "all right" in command(emulator, folder / "arithmetic_test")
    assert "all right" in command(emulator, folder / "resize_test")
    out = command(emulator, folder / "engine_test", 15)
    assert "neon" in out.rsplit("Sets:", 1)[1]
