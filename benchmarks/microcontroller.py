"""Instructions, flash and RAM of a packed network in plain C on emulated Cortex-M boards, next to an int8 ResNet-8.

    python benchmarks/microcontroller.py MODEL.unflip [--int8-ends] [--int16 IMAGES] [--optimize=-Os]

With --int8-ends, the networks are also measured with an 8-bit first convolution and last linear layer. Their weights
are rounded, not trained again: only sizes and instructions count. With --int16, a folder of images, all networks are
also exported with shortcuts of 16 bits. Their scores must then be those of the same source on this machine.

Needs arm-none-eabi-gcc and qemu-system-arm. The int8 network has the shape of MLPerf Tiny's ResNet-8 (12.5 million
products) and random weights: only its instructions count. Its kernels are ours (benchmarks/int8_resnet8/int8.c), with
the DSP instructions of the Cortex-M4; its scores are compared with numpy.
"""

from __future__ import annotations

import argparse
import runpy
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import unflip
from int8_ends import with_int8_ends  # type: ignore[import-not-found]
from unflip.export.plain_c.check import Compiled
from unflip.export.plain_c.export import export_c
from unflip.export.plain_c.measure import export_int16
from unflip.export.plain_c.plan import make_plan
from unflip.packing.file import read
from unflip.runtime.images import normalized

HERE = Path(__file__).parent
BOARDS = runpy.run_path(
    str(HERE.parent / "examples" / "plain_c" / "bare_metal" / "run.py"), run_name="boards"
)
# channels, filters, size, kernel, stride
LAYERS = [
    (3, 16, 32, 3, 1),
    (16, 16, 32, 3, 1), (16, 16, 32, 3, 1),
    (16, 32, 32, 3, 2), (32, 32, 16, 3, 1), (16, 32, 32, 1, 2),
    (32, 64, 16, 3, 2), (64, 64, 8, 3, 1), (32, 64, 16, 1, 2),
    (64, 10, 1, 1, 1),
]  # fmt: skip
SHORTCUTS = (2, 4, 5, 7, 8)  # their values are added: no ReLU
SHIFT = 20
MLPERF_MS = 222  # published: int8 ResNet-8 by X-CUBE-AI on a Cortex-M4 of 120 MHz


class Int8:
    """Random layers, as C and as numpy."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.layers: list[dict[str, Any]] = []
        for channels, filters, size, kernel, stride in LAYERS:
            depth = kernel * kernel * channels
            self.layers.append(
                {
                    "weights": random.integers(-127, 128, (filters, depth)),
                    "bias": random.integers(-1000, 1000, filters),
                    "factor": np.full(filters, round(2**SHIFT / (50 * depth**0.5))),
                    "shape": (channels, filters, size, kernel, stride),
                    "pad": kernel // 2 if stride == 1 else 0,  # as TensorFlow pads: at the end
                }
            )

    def header(self) -> str:
        """weights.h."""
        lines = [
            "struct layer {",
            "  int channels, filters, size, kernel, stride, pad, shift, low;",
            "  const int8_t *weights;",
            "  const int32_t *bias, *factor;",
            "};",
        ]
        rows = []
        for i, layer in enumerate(self.layers):
            for key, kind in (("weights", "int8_t"), ("bias", "int32_t"), ("factor", "int32_t")):
                numbers = self._stored(layer["weights"]) if key == "weights" else layer[key]
                text = ",".join(map(str, np.ravel(numbers)))
                lines.append(f"static const {kind} {key}{i}[] = {{{text}}};")
            low = -128 if i in SHORTCUTS else 0
            numbers = (*layer["shape"], layer["pad"], SHIFT, low)
            rows.append(f"{{{', '.join(map(str, numbers))}, weights{i}, bias{i}, factor{i}}}")
        lines.append(f"static const struct layer layers[] = {{{', '.join(rows)}}};")
        return "\n".join(lines) + "\n"

    def _stored(self, weights: Any) -> Any:
        """Places 0 2 1 3 of each four."""
        whole = weights.shape[1] // 4 * 4
        stored = weights.copy()
        if weights.shape[0] != 10:
            parts = weights[:, :whole].reshape(len(weights), -1, 4)
            stored[:, :whole] = parts[:, :, [0, 2, 1, 3]].reshape(len(weights), whole)
        return stored

    def _conv(self, i: int, x: Any) -> Any:
        layer = self.layers[i]
        channels, filters, size, kernel, stride = layer["shape"]
        before = layer["pad"]
        padded = np.zeros((size + kernel, size + kernel, channels), np.int64)
        padded[before : before + size, before : before + size] = x
        out = np.zeros((size // stride, size // stride, filters), np.int64)
        for y in range(size // stride):
            for z in range(size // stride):
                window = padded[y * stride : y * stride + kernel, z * stride : z * stride + kernel]
                out[y, z] = layer["weights"] @ window.ravel() + layer["bias"]
        out = (out * layer["factor"] + (1 << (SHIFT - 1))) >> SHIFT
        return out.clip(-128 if i in SHORTCUTS else 0, 127)

    def scores(self, pixels: Any) -> Any:
        a = self._conv(0, pixels.astype(np.int64) - 128)
        a = _added(a, self._conv(2, self._conv(1, a)))
        c = _added(self._conv(4, self._conv(3, a)), self._conv(5, a))
        b = _added(self._conv(7, self._conv(6, c)), self._conv(8, c))
        mean = (b.reshape(64, 64).sum(0) + 32) >> 6
        return (self.layers[9]["weights"] @ mean + self.layers[9]["bias"]).astype(np.float32)


def _added(a: Any, b: Any) -> Any:
    return ((a * 23170 + b * 30000 + (1 << 14)) >> 15).clip(0, 127)


def image(shape: tuple[int, int, int]) -> Any:
    channels, height, width = shape
    return np.random.default_rng(1).integers(0, 256, (height, width, channels), dtype=np.uint8)


def _with_int8_ends(path: Path, folder: Path) -> Path:
    pixels = image(unflip.load(path).input_shape).transpose(2, 0, 1)
    return with_int8_ends(path, pixels[None], folder)


def row(name: str, cpu: str, result: Any, products: int) -> None:
    print(
        f"{name:30} {cpu:11} {result.instructions:>12,} {result.instructions / products:>8.2f} "
        f"{result.flash:>9,} {result.ram + result.stack:>9,}"
    )


def measure_int8(folder: Path, cpu: str, optimize: str) -> int:
    network, pixels = Int8(), image((3, 32, 32))
    source = HERE / "int8_resnet8"
    for name in ("int8.c", "int8.h"):
        (folder / name).write_text((source / name).read_text())
    (folder / "weights.h").write_text(network.header())
    result = BOARDS["run_network"](
        folder / "int8.c", "int8", pixels.ravel(), cpu, optimize=optimize
    )
    if result.scores != network.scores(pixels).view(np.uint32).tolist():
        raise SystemExit("the int8 network computes other scores than numpy")
    products = sum(k * k * c * f * (s // t) ** 2 for c, f, s, k, t in LAYERS)
    row("int8 ResNet-8", cpu, result, products)
    return int(result.instructions)


def measure(path: Path, folder: Path, cpu: str, optimize: str) -> int:
    export_c(path, folder, "net", replace=True)
    model = unflip.load(path)
    pixels = image(model.input_shape)
    x = normalized(pixels.transpose(2, 0, 1).astype(np.float32), model)
    return _measured(path.stem, path, folder, cpu, optimize, np.ravel(model(x)))


def measure_int16(path: Path, images: Path, folder: Path, cpu: str, optimize: str) -> int:
    files, _ = export_int16(path, folder, "net", images, replace=True)
    pixels = image(unflip.load(path).input_shape)
    with Compiled(folder / "net.c", "net", files.arena) as compiled:
        expected = compiled.run(pixels, unflip.load(path).output_shape[0])
    return _measured(f"{path.stem}, int16", path, folder, cpu, optimize, expected)


def _measured(name: str, path: Path, folder: Path, cpu: str, optimize: str, expected: Any) -> int:
    pixels = image(unflip.load(path).input_shape)
    result = BOARDS["run_network"](folder / "net.c", "net", pixels.ravel(), cpu, optimize=optimize)
    if result.scores != expected.view(np.uint32).tolist():
        raise SystemExit(f"{name}: other scores than on this machine")
    tasks = make_plan(read(path)).tasks
    products = sum(int(np.prod(t.out)) * t.conv.depth for t in tasks if t.conv is not None)
    row(name, cpu, result, products)
    return int(result.instructions)


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE.parent)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="+", type=Path)
    parser.add_argument("--int8-ends", action="store_true", help="measures these ends too")
    parser.add_argument("--int16", type=Path, metavar="IMAGES", help="measures the ranges on them")
    parser.add_argument("--optimize", default="-O2", help="the compiler's option, such as -Os")
    given = parser.parse_args()
    if tools := BOARDS["missing"]():
        raise SystemExit(f"not found: {tools}; Debian has gcc-arm-none-eabi and qemu-system-arm")
    changed = "" if not _said("git", "status", "--porcelain", "src", "examples") else ", changed"
    print(f"commit {_said('git', 'rev-parse', '--short', 'HEAD')}{changed}")
    for tool in (BOARDS["COMPILER"], BOARDS["EMULATOR"]):
        print(_said(tool, "--version").splitlines()[0])
    print(
        f"gcc {given.optimize}; scores equal those of this machine; RAM is static memory and stack"
    )
    print(f"{'network':30} {'CPU':11} {'instructions':>12} {'/product':>8} {'flash':>9} {'RAM':>9}")
    with tempfile.TemporaryDirectory() as made:
        networks = given.networks
        if given.int8_ends:
            networks = networks + [_with_int8_ends(path, Path(made)) for path in networks]
        for cpu in BOARDS["CPUS"]:
            where = Path(made), cpu, given.optimize
            reference = measure_int8(*where)
            counts = {path.stem: measure(path, *where) for path in networks}
            if given.int16 is not None:
                for path in networks:
                    counts[f"{path.stem}, int16"] = measure_int16(path, given.int16, *where)
            if cpu != "cortex-m4" or given.optimize != "-O2":
                continue
            for name, count in counts.items():
                print(
                    f"estimate: if instructions take the same time in both, {name} takes "
                    f"{MLPERF_MS * count / reference:.0f} ms where the int8 ResNet-8 takes {MLPERF_MS} ms"
                )


if __name__ == "__main__":
    main()
