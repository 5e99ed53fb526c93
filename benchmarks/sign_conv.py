"""Microseconds per call of the fused binary convolution and of cuDNN's, at ResNet-20's shapes.

    python benchmarks/sign_conv.py [--batch 128] [--inputs pm1|01] [--calls 50] [--sweep] [--json FILE]

Every time is the median of replays of a CUDA graph that holds many calls: the time of the GPU only, with operands in
the cache, as after a preceding layer. First each of our results is compared with float64.

    fprop    ours: one kernel             cuDNN: + one elementwise kernel for the sign
    dgrad    ours: one kernel             cuDNN: + one elementwise kernel for the mask
    wgrad    ours: one kernel and a sum   cuDNN: of the sign it already has

The sum and the two elementwise kernels are torch's own; torch.compile would fuse them with their neighbours.
The float first layer has a separate line: the same kernels with real values, and no gradient of the input.
``--sweep`` times the sign gradient for other numbers of programs, to choose ``PROGRAMS_PER_SM``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from unflip.kernels import tuning
from unflip.kernels.sign_conv import cuda_kernels
from unflip.kernels.sign_conv import operator as sign_conv
from unflip.kernels.sign_conv.cover import INPUTS

# channels in and out, height and width of the input, stride
SHAPES = [(16, 16, 32, 1), (16, 32, 32, 2), (32, 32, 16, 1), (32, 64, 16, 2), (64, 64, 8, 1)]
COUNTS = [6, 1, 5, 1, 5]  # of each in ResNet-20, whose first layer is not binary
PASSES = ["fprop", "dgrad", "wgrad"]
STEM = (3, 16, 32, 1)


def microseconds(call: Callable[[], Any], calls: int) -> float:
    """Of one call: the median over replays of a graph of ``calls`` of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / calls)
    return statistics.median(times[2:])


class Case:
    """One layer's tensors, and every way to compute with them."""

    def __init__(self, shape: tuple[int, int, int, int], batch: int, inputs: str) -> None:
        c, o, size, self.stride = shape
        self.zero_one, self.kind = inputs == "01", INPUTS.index(inputs)
        last = {"device": "cuda", "memory_format": torch.channels_last}
        torch.manual_seed(0)
        self.x = torch.randn(batch, c, size, size).half().to(**last)
        self.x[0, :, 0, 0], self.x[0, :, 1, 1] = 0.0, -0.0
        self.signs = torch.where(torch.randn(o, c, 3, 3) >= 0, 1.0, -1.0).to(**last)
        self.halves = self.signs.half()
        self.grad = (
            torch.randn(batch, o, size // self.stride, size // self.stride).half().to(**last)
        )
        if self.zero_one:
            self.binary, self.passes = self.x > 0.5, (self.x >= 0) & (self.x <= 1)
        else:
            self.binary = torch.where(self.x >= 0, 1.0, -1.0)
            self.passes = self.x.abs() <= 1
        self.binary = self.binary.half().contiguous(memory_format=torch.channels_last)
        self.one = torch.ones((), dtype=torch.float16, device="cuda")

    def options(self) -> tuple[int | bool, ...]:
        """Stride, padding, kind of inputs, one network on the device, and whether CUDA C++ may be used."""
        return self.stride, 1, self.kind, 1, cuda_kernels.allowed()

    def ours(self) -> dict[str, Callable[[], Tensor]]:
        ops, rest = torch.ops.unflip, self.options()
        return {
            "fprop": lambda: ops.sign_conv2d(self.x, self.signs, self.halves, *rest),
            "dgrad": lambda: ops.sign_conv2d_dgrad(self.grad, self.x, self.halves, *rest),
            "wgrad": lambda: (
                ops.sign_conv2d_wgrad(self.grad, self.x, 3, 3, *rest).sum(0).permute(0, 3, 1, 2)
            ),
        }

    def cudnn(self) -> dict[str, Callable[[], Tensor]]:
        """The convolutions alone."""
        return {
            "fprop": lambda: F.conv2d(self.binary, self.halves, stride=self.stride, padding=1),
            "dgrad": lambda: self.backward(self.binary, self.halves, self.grad, True),
            "wgrad": lambda: self.backward(self.binary, self.halves, self.grad, False),
        }

    def with_elementwise(self) -> dict[str, Callable[[], Tensor]]:
        """One elementwise kernel each: of the right cost, though not right at 0 and at ±1."""

        def binary() -> Tensor:
            return self.x.gt(0.5) if self.zero_one else torch.copysign(self.one, self.x)

        low = 0.0 if self.zero_one else -1.0
        alone = self.cudnn()
        return {
            "fprop": lambda: (binary(), alone["fprop"]())[1],
            "dgrad": lambda: torch.ops.aten.hardtanh_backward(alone["dgrad"](), self.x, low, 1.0),
            "wgrad": alone["wgrad"],
        }

    def exact(self) -> dict[str, Tensor]:
        binary, signs, grad = self.binary.double(), self.signs.double(), self.grad.double()
        return {
            "fprop": F.conv2d(binary, signs, stride=self.stride, padding=1),
            "dgrad": self.backward(binary, signs, grad, True) * self.passes,
            "wgrad": self.backward(binary, signs, grad, False),
        }

    def backward(self, x: Tensor, weight: Tensor, grad: Tensor, of_input: bool) -> Tensor:
        stride = [self.stride] * 2
        results = torch.ops.aten.convolution_backward(
            grad, x, weight, None, stride, [1, 1], [1, 1], False, [0, 0], 1,
            [of_input, not of_input, False],
        )  # fmt: skip
        return results[0 if of_input else 1]


class Stem(Case):
    """The first layer: real values times real weights."""

    def __init__(self, batch: int) -> None:
        super().__init__(STEM, batch, "given")
        self.binary = self.x
        self.halves = torch.randn_like(self.halves)
        self.signs = self.halves.float()

    def times(self, calls: int) -> dict[str, dict[str, float]]:
        ways = {"ours": self.ours(), "cuDNN": self.cudnn()}
        return {
            name: {column: microseconds(way[name], calls) for column, way in ways.items()}
            for name in ("fprop", "wgrad")
        }

    def errors(self) -> dict[str, float]:
        exact = self.exact()
        return {
            name: ((self.ours()[name]().double() - exact[name]).norm() / exact[name].norm()).item()
            for name in ("fprop", "wgrad")
        }


def check(case: Case) -> dict[str, float]:
    """Relative error of each of our results against float64; the output has to be exact."""
    exact, errors = case.exact(), {}
    for name, call in case.ours().items():
        difference = call().double() - exact[name]
        errors[name] = (difference.norm() / exact[name].norm()).item()
        limit = {"fprop": 0.0, "dgrad": 2e-3, "wgrad": 1e-5}[name]
        if not errors[name] <= limit:
            where = difference.abs().flatten().argmax().item()
            raise SystemExit(
                f"{name} is wrong: relative error {errors[name]:.3g}, limit {limit}; "
                f"largest at flat index {where}. Blocks: {sign_conv.tuned()[name]}"
            )
    return errors


def sweep(cases: dict[str, Case], calls: int) -> None:
    print("\nwgrad with its sum, µs, by PROGRAMS_PER_SM (chunks in brackets):")
    for label, case in cases.items():
        found = []
        for programs in (1, 2, 4, 8, 16):
            with mock.patch.object(tuning, "PROGRAMS_PER_SM", programs):
                rest = (3, 3, *case.options())
                chunks = torch.ops.unflip.sign_conv2d_wgrad(case.grad, case.x, *rest).shape[0]
                time_ = microseconds(case.ours()["wgrad"], calls)
            found.append(f"{programs}: {time_:.1f} [{chunks}]")
        print(f"  {label:18} " + "   ".join(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--inputs", choices=["pm1", "01"], default="pm1")
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not tuning.available() or tuning.INTERPRETED:
        sys.exit("This benchmark needs a CUDA device and Triton, without TRITON_INTERPRET.")
    torch.backends.cudnn.benchmark = True
    triton: Any = tuning.triton
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")

    began, cases, errors = time.perf_counter(), {}, {}
    for shape in SHAPES:
        label = f"{shape[0]}→{shape[1]} @{shape[2]}×{shape[2]} s{shape[3]}"
        cases[label] = Case(shape, options.batch, options.inputs)
        errors[label] = check(cases[label])
    print(f"compiled, tuned and correct after {time.perf_counter() - began:.0f} s\n")

    columns = ["ours", "cuDNN", "cuDNN + elementwise"]
    print(
        f"{'µs per call':18} "
        + " ".join(f"{name:>7} {'cuDNN':>7} {'+ elem':>7}" for name in PASSES)
    )
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for label, case in cases.items():
        ways = (case.ours(), case.cudnn(), case.with_elementwise())
        rows[label] = {
            name: {
                column: microseconds(way[name], options.calls)
                for column, way in zip(columns, ways, strict=True)
            }
            for name in PASSES
        }
        values = [rows[label][name][column] for name in PASSES for column in columns]
        print(f"{label:18} " + " ".join(f"{value:7.1f}" for value in values))
    totals = {
        column: sum(
            count * row[name][column]
            for count, row in zip(COUNTS, rows.values(), strict=True)
            for name in PASSES
        )
        for column in columns
    }
    print(
        f"\nall {sum(COUNTS)} layers of ResNet-20, µs: "
        + ", ".join(f"{k} {v:.0f}" for k, v in totals.items())
    )

    stem = Stem(options.batch)
    stem_errors, stem_times = stem.errors(), stem.times(options.calls)
    print(
        "float first layer 3→16 @32×32, µs: "
        + ", ".join(
            f"{name} {found['ours']:.1f} (cuDNN {found['cuDNN']:.1f}, error {stem_errors[name]:.1e})"
            for name, found in stem_times.items()
        )
    )

    print("\nrelative errors against float64 (fprop is exact):")
    for label, found in errors.items():
        print(f"  {label:18} dgrad {found['dgrad']:.1e}   wgrad {found['wgrad']:.1e}")
    print("\nblocks chosen, by (networks, pixels or images, H, W, C, O, kh, kw, stride, padding):")
    for name, choices in sign_conv.tuned().items():
        for key, config in choices.items():
            print(f"  {name} {key[:10]}  {config}")
    if options.sweep:
        sweep(cases, options.calls)
    print(f"\n{time.perf_counter() - began:.0f} s")
    if options.json:
        options.json.write_text(
            json.dumps(
                {"us": rows, "errors": errors, "totals": totals, "stem us": stem_times}, indent=1
            )
        )


if __name__ == "__main__":
    main()
