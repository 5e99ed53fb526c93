"""Builds an exported network for a Cortex-M and runs it on an emulated board, without hardware.

    unflip export model.unflip --c out --name net
    python examples/plain_c/bare_metal/run.py out net --cpu cortex-m4

Needs arm-none-eabi-gcc and qemu-system-arm (Debian: gcc-arm-none-eabi, qemu-system-arm). It prints the instructions of
one run (not cycles: the emulator has no pipeline), the sizes of flash and RAM, and the scores.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
COMPILER, EMULATOR, SIZE = "arm-none-eabi-gcc", "qemu-system-arm", "arm-none-eabi-size"
FLAGS = ("-mthumb", "-std=gnu99", "-Wall", "-Wextra", "-ffunction-sections", "-fdata-sections")


@dataclass(frozen=True)
class Cpu:
    """Flags of the compiler, the emulated board, and the frequency of its timer in Hz."""

    flags: tuple[str, ...]
    board: str
    timer: int = 25_000_000


CPUS = {
    "cortex-m3": Cpu(("-mcpu=cortex-m3", "-mfloat-abi=soft"), "mps2-an385"),
    "cortex-m4": Cpu(("-mcpu=cortex-m4", "-mfpu=fpv4-sp-d16", "-mfloat-abi=hard"), "mps2-an386"),
    "cortex-m7": Cpu(("-mcpu=cortex-m7", "-mfpu=fpv5-d16", "-mfloat-abi=hard"), "mps2-an500"),
    "cortex-m55": Cpu(("-mcpu=cortex-m55", "-mfloat-abi=hard"), "mps3-an547", 32_000_000),
}


@dataclass(frozen=True)
class Result:
    """Of one run. ``layers`` are the instructions of each layer, if they were asked for."""

    scores: list[int]  # the bits of floats
    instructions: int
    layers: list[int]
    flash: int
    ram: int  # static memory: arena, scores
    stack: int


def missing() -> str:
    """The tools that this machine lacks, or ''."""
    return ", ".join(tool for tool in (COMPILER, EMULATOR, SIZE) if shutil.which(tool) is None)


def run_network(
    source: Path, name: str, pixels: Iterable[int], cpu: str, layers: int = 0, optimize: str = "-O2"
) -> Result:
    """Run ``source`` (NAME.c, next to NAME.h) on one image. ``layers``: time each of so many layers."""
    chosen = CPUS[cpu]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "pixels.h").write_text(",".join(map(str, pixels)))
        (folder / "trace.h").write_text("void after_layer(int layer);\n")
        network = [optimize]
        main = ["-O1", f"-DNETWORK={name}", f"-DBIG={name.upper()}"]
        if layers:
            network += ["-DUNFLIP_AFTER=after_layer", "-include", str(folder / "trace.h")]
            main.append(f"-DLAYERS={layers}")
        common = (*chosen.flags, *FLAGS, f"-I{source.parent}", f"-I{folder}", f"-I{HERE}")
        startup = ["-O1", "-fno-tree-loop-distribute-patterns"]
        parts = [(source, network), (HERE / "main.c", main), (HERE / "startup.c", startup)]
        for part, flags in parts:
            _call(COMPILER, *common, *flags, "-c", str(part), "-o", str(folder / f"{part.stem}.o"))
        objects = [str(folder / f"{part.stem}.o") for part, _ in parts]
        program = str(folder / "program.elf")
        link = ("-nostdlib", "-Wl,--gc-sections", "-T", str(HERE / "mps.ld"))
        _call(COMPILER, *common, *link, *objects, "-lgcc", "-o", program)
        text, data, bss = map(int, _call(SIZE, program).splitlines()[1].split()[:3])
        return _emulated(program, chosen, text + data, data + bss)


def _emulated(program: str, cpu: Cpu, flash: int, ram: int) -> Result:
    output = _call(
        EMULATOR, "-M", cpu.board, "-nographic", "-monitor", "none", "-serial", "none",
        "-semihosting-config", "enable=on,target=native", "-icount", "shift=0", "-kernel", program,
    )  # fmt: skip
    found: dict[str, list[int]] = {"stack": [], "ticks": [], "layer": [], "score": []}
    for kind, number in re.findall(r"^(stack|ticks|layer|score) (\d+)$", output, re.M):
        found[kind].append(int(number))
    per_tick = 10**9 / cpu.timer  # with -icount shift=0 an instruction takes a nanosecond
    times = [round(ticks * per_tick) for ticks in (0, *found["layer"])]
    layers = [b - a for a, b in pairwise(times)]
    instructions = round(found["ticks"][0] * per_tick)
    return Result(found["score"], instructions, layers, flash, ram, found["stack"][0])


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout + done.stderr


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of NAME.c and NAME.h")
    parser.add_argument("name")
    parser.add_argument("--cpu", choices=CPUS, default="cortex-m4")
    given = parser.parse_args(arguments)
    if tools := missing():
        raise SystemExit(f"not found: {tools}; Debian has gcc-arm-none-eabi and qemu-system-arm")
    header = (given.folder / f"{given.name}.h").read_text()
    sizes = dict(re.findall(r"^#define \w+_(CHANNELS|HEIGHT|WIDTH) (\d+)", header, re.M))
    count = int(sizes["CHANNELS"]) * int(sizes["HEIGHT"]) * int(sizes["WIDTH"])
    pixels = [37 * i % 256 for i in range(count)]  # no image: only the time matters here
    result = run_network(given.folder / f"{given.name}.c", given.name, pixels, given.cpu)
    print(f"{given.cpu}: {result.instructions:,} instructions")
    print(f"flash {result.flash:,} bytes, RAM {result.ram:,} bytes, stack {result.stack:,} bytes")
    for bits in result.scores:
        print(f"score {struct.unpack('<f', struct.pack('<I', bits))[0]:.6g}")


if __name__ == "__main__":
    main()
