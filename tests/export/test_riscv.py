"""Networks as plain C for RISC-V, run by an emulator: the same bits as the runtime, with Zbb, without it, without FPU.

Needs riscv64-unknown-elf-gcc, qemu-riscv64 and qemu-riscv32 (Debian: gcc-riscv64-unknown-elf, qemu-user).
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unflip
from unflip.export.plain_c.check import scores_of
from unflip.export.plain_c.export import export_c
from unflip.networks import locate
from unflip.packing.file import write
from unflip.runtime.images import normalized

NETWORKS = runpy.run_path(str(Path(__file__).with_name("c_networks.py")))
GCC = "riscv64-unknown-elf-gcc"
# Instruction set, calling convention, emulator, its CPU, and whether the CPU counts bits.
CHIPS = {
    "rv64gc_zbb": ("lp64d", "qemu-riscv64", "rv64,zbb=true", True),
    "rv32imac_zbb": ("ilp32", "qemu-riscv32", "rv32,zbb=true", True),
    "rv32imac": ("ilp32", "qemu-riscv32", "rv32,zbb=false", False),
}
MISSING = [tool for tool in (GCC, "qemu-riscv64", "qemu-riscv32") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

START = """
#include <stddef.h>
#include <stdint.h>
static long call(long number, long a, long b, long c) {
  register long a0 __asm__("a0") = a, a1 __asm__("a1") = b, a2 __asm__("a2") = c, a7 __asm__("a7") = number;
  __asm__ volatile("ecall" : "+r"(a0) : "r"(a1), "r"(a2), "r"(a7) : "memory");
  return a0;
}
void *memcpy(void *to, const void *from, size_t count) {
  for (size_t i = 0; i < count; i++) ((volatile char *)to)[i] = ((const char *)from)[i];
  return to;
}
static float scores[4096];
static uint64_t arena[1 << 17];
"""
MAIN = """
void _start(void) {
  __asm__ volatile(".option push\\n.option norelax\\nla gp, __global_pointer$\\n.option pop");
%s  call(93, 0, 0, 0);
}
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], Any]:
    """A folder with all test networks as C, a main.c that runs each on one image, their names, the runtime's bits."""
    folder = tmp_path_factory.mktemp("riscv")
    for name, packed in NETWORKS["networks"]().items():
        write(folder / f"{name}.unflip", packed)
    shutil.copy(locate("digits-mcu"), folder / "digits.unflip")
    names, expected, head, body = [], [], [START], []
    random = np.random.default_rng(1)
    for path in sorted(folder.glob("*.unflip")):
        name, model = path.stem, unflip.load(path)
        files = export_c(path, folder, name)
        channels, height, width = model.input_shape
        pixels = random.integers(0, 256, (height, width, channels), dtype=np.uint8)
        x = normalized(pixels.transpose(2, 0, 1).astype(np.float32), model)
        bits = scores_of(model, x).view(np.uint32)
        assert files.arena <= 8 << 17
        assert len(bits) <= 4096
        numbers = ",".join(map(str, pixels.ravel()))
        head.append(f'#include "{name}.h"\nstatic const uint8_t pixels_{name}[] = {{{numbers}}};\n')
        body.append(f"  {name}_run(pixels_{name}, scores, arena);\n")
        body.append(f"  call(64, 1, (long)scores, {4 * len(bits)});\n")
        names.append(name)
        expected.append(bits)
    (folder / "main.c").write_text("".join(head) + MAIN % "".join(body))
    return folder, names, expected


@pytest.mark.parametrize("chip", CHIPS)
def test_the_same_bits(chip: str, sources: tuple[Path, list[str], Any], tmp_path: Path) -> None:
    folder, names, expected = sources
    convention, emulator, cpu, counts = CHIPS[chip]
    program = tmp_path / "program"
    flags = ("-O1", "-std=gnu99", "-ffreestanding", f"-I{folder}", "-c")
    files = [str(folder / f"{name}.c") for name in ("main", *names)]
    chosen = [GCC, f"-march={chip}", f"-mabi={convention}"]
    subprocess.run([*chosen, *flags, *files], check=True, cwd=tmp_path)
    # Debian's libgcc is found by the name of the instruction set without its extensions.
    chosen[1] = chosen[1].partition("_")[0]
    objects = [str(path) for path in tmp_path.glob("*.o")]
    where = ("-nostdlib", "-static", "-o", str(program), "-lgcc")
    subprocess.run([*chosen, *objects, *where], check=True)
    listing = subprocess.run(
        [GCC.replace("gcc", "objdump"), "-d", str(program)], capture_output=True, text=True
    ).stdout
    assert ("\tcpop" in listing) == counts
    done = subprocess.run([emulator, "-cpu", cpu, str(program)], capture_output=True, check=True)
    found = np.frombuffer(done.stdout, np.uint32)
    assert len(found) == sum(map(len, expected))
    parts = np.split(found, np.cumsum([len(bits) for bits in expected])[:-1])
    for name, bits, part in zip(names, expected, parts, strict=True):
        assert np.array_equal(bits, part), name
