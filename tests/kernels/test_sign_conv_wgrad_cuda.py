"""The CUDA kernel of the sign gradient, compiled for the CPU: fragments, borders, strips, copies and bank conflicts.

g++ compiles the kernel's own source against an emulator of a warp (warp_emulator.h). All values are small integers, so
that sums are exact whatever their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unflip.kernels import tuning
from unflip.kernels.sign_conv import cuda_kernels, triton_launch
from unflip.kernels.sign_conv import operator as sign_conv
from unflip.kernels.sign_conv.cover import INPUTS
from unflip.kernels.sign_conv.cuda_kernels import Strips

KINDS = {name: kind for kind, name in enumerate(INPUTS)}
# The kind is a constant on a device, but here one compilation serves all.
SOURCE = """
static int kind;
#define KIND kind
#include "sign_conv_wgrad.cu"
"""
RUN = """
extern "C" const char* run_{kind}(emulator::Launch& launch) {{
  kind = {kind};
  return emulator::emulate(sign_conv_wgrad, THREADS, launch);
}}
"""
Compile = Callable[[str], Callable[..., Any]]


def plan(
    c: int, h: int, w: int, kind: int, rows: int | None = None, warps: int = 4, tile: int = 32
) -> Strips:
    """By default as it is in training; other rows, warps and tiles have to be right as well."""
    rows = rows or cuda_kernels.strip_choices(c, h, w)[0]
    with mock.patch.multiple(cuda_kernels, STRIP_WARPS=warps, TILE=tile):
        return cuda_kernels.strips(1, c, h, w, kind, rows)


# ------------------------------------------------------------------------------------------ emulator


def run(
    emulated: Compile, made: Strips, g: Tensor, x: Tensor, chunks: int, **how: bool
) -> tuple[Tensor, Any]:
    """Partial sums (chunks, O, 3, 3, C) of NHWC halves, and what the emulator counted."""
    constants = {name: value for name, value in made.constants.items() if name != "KIND"}
    defines = [f"#define {name} {value}" for name, value in constants.items()]
    runs = [RUN.format(kind=kind) for kind in KINDS.values()]
    kernels = emulated("\n".join([*defines, SOURCE, *runs]))
    n, _, _, c = x.shape
    partial = torch.full((chunks, c, 3, 3, c), float("nan"))
    name, grid = f"run_{made.constants['KIND']}", (chunks, made.tiles, 1)
    counts = kernels(name, grid, made.threads, made.shared_bytes, [g, x, partial, n], **how)
    return partial, counts


# --------------------------------------------------------------------------------------------- values


def example(n: int, c: int, h: int, w: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """g and x, NHWC: small integers, and x with both zeros and both sides of 1/2."""
    draw = torch.Generator().manual_seed(seed)
    g = torch.randint(-3, 4, (n, h, w, c), generator=draw).half()
    values = torch.tensor([-2.0, -1.0, -0.0, 0.0, 0.5, 0.5 + 2**-11, 1.0, 2.0, 3.0]).half()
    x = values[torch.randint(len(values), (n, h, w, c), generator=draw)]
    return g.contiguous(), x.contiguous()


def binary(x: Tensor, kind: int) -> Tensor:
    if kind == KINDS["given"]:
        return x.double()
    return (x > 0.5).double() if kind == KINDS["01"] else torch.where(x >= 0, 1.0, -1.0).double()


def reference(g: Tensor, x: Tensor, kind: int) -> Tensor:
    h, w = x.shape[1:3]
    padded = F.pad(binary(x, kind), (0, 0, 1, 1, 1, 1))
    taps = [padded[:, kh : kh + h, kw : kw + w] for kh in range(3) for kw in range(3)]
    sums = [torch.einsum("nhwo,nhwc->oc", g.double(), tap) for tap in taps]
    return torch.stack(sums, 1).unflatten(1, (3, 3))


def check(emulated: Compile, made: Strips, images: int, chunks: int, **how: bool) -> Any:
    c, h, w, kind = (made.constants[name] for name in ("C", "H", "W", "KIND"))
    g, x = example(images, c, h, w, seed=images)
    partial, counts = run(emulated, made, g, x, chunks, **how)
    torch.testing.assert_close(partial.double().sum(0), reference(g, x, kind), rtol=0, atol=0)
    return counts


SIZES = [(8, 8), (16, 16), (5, 7), (3, 33), (9, 32), (1, 1)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("c", [16, 32, 64])
def test_equals_a_plain_sum(emulated: Compile, c: int, size: tuple[int, int]) -> None:
    trials = itertools.cycle(
        [(1, 1), (3, 2), (5, 7), (2, 5)]
    )  # the third has chunks without a strip
    for kind, late, backwards in itertools.product(KINDS.values(), [True, False], [True, False]):
        made = plan(c, *size, kind)
        check(emulated, made, *next(trials), late_copies=late, backwards=backwards)


# c, h, w, rows of a strip, warps, channels of a tile
LAYOUTS = [
    (16, 32, 32, 16, 4, 16),
    (16, 32, 32, 8, 4, 16),
    (16, 16, 32, 8, 8, 16),
    (16, 9, 32, 4, 4, 16),  # strips of 4, 4 and 1 rows
    (16, 5, 40, 2, 8, 16),  # two warps without columns
    (16, 3, 16, 1, 1, 16),
    (32, 16, 16, 8, 4, 32),
    (32, 7, 20, 3, 8, 32),
    (32, 9, 8, 4, 4, 16),  # tiles of 16: the grid's second axis
    (64, 8, 8, 4, 16, 64),
    (64, 6, 5, 4, 8, 32),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
def test_every_layout(emulated: Compile, layout: tuple[int, ...]) -> None:
    c, h, w, rows, warps, tile = layout
    made = plan(c, h, w, KINDS["pm1"], rows, warps, tile)
    for (images, chunks), late, backwards in itertools.product(
        [(1, 1), (3, 2), (2, 7)], [True, False], [True, False]
    ):
        check(emulated, made, images, chunks, late_copies=late, backwards=backwards)


def test_a_chunk_has_every_so_many_strips(emulated: Compile) -> None:
    made = plan(16, 8, 32, KINDS["pm1"], rows=4)
    g, x = example(3, 16, 8, 32)
    partial, _ = run(emulated, made, g, x, chunks=4)
    for chunk in range(4):
        only = torch.zeros_like(g)
        for strip in range(chunk, 6, 4):
            image, first = strip // 2, strip % 2 * 4
            only[image, first : first + 4] = g[image, first : first + 4]
        expected = reference(only, x, KINDS["pm1"])
        torch.testing.assert_close(partial[chunk].double(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [KINDS["pm1"], KINDS["01"]])
def test_a_nan_becomes_a_sign_or_zero(emulated: Compile, kind: int) -> None:
    made = plan(16, 5, 7, kind)
    g, x = example(2, 16, 5, 7)
    x[0, 2, 3] = float("nan")
    partial, _ = run(emulated, made, g, x, chunks=2)
    assert partial.isfinite().all()


@pytest.mark.parametrize(("c", "size"), [(16, 32), (32, 16), (64, 8)])
def test_no_bank_conflict_and_no_product_in_vain(emulated: Compile, c: int, size: int) -> None:
    images = 2
    counts = check(emulated, plan(c, size, size, KINDS["pm1"]), images, chunks=2)
    columns = images * size // 16 * (c // 16) ** 2  # of 16 pixels × 16 × 16 channels
    steps = columns * size
    assert counts.wavefronts == 4 * counts.ldmatrix
    assert counts.copy_conflicts == 0
    assert counts.mma == 18 * steps - 12 * columns  # two rows of taps meet only padding
    assert 4 * steps <= counts.ldmatrix < 5 * steps


def test_chunks_take_strips_in_even_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_processors", lambda x: 132)
    for networks in (1, 3, 15):
        for images, c, size in ((128, 16, 32), (128, 32, 16), (128, 64, 8), (1, 64, 8), (5, 16, 7)):
            x = torch.empty(images, c, size, size, device="meta")
            for rows in cuda_kernels.strip_choices(c, size, size):
                number = cuda_kernels.strips(images, c, size, size, 0, rows).number
                chunks = sign_conv._strip_chunks(x, 0, networks, rows)
                assert 1 <= chunks <= number
                assert chunks * 9 * c * c <= triton_launch.MOST_PARTIAL
                share = -(-number // chunks)
                assert (chunks - 1) * share < number  # no chunk is empty


def test_compiled_code_knows_how_many_partial_sums_there_will_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, grad = (torch.empty(128, 16, 32, 32, dtype=torch.half, device="meta") for _ in range(2))
    chunks = {"Triton": triton_launch.chunks(x, (32, 32), 144, 16, 1)}
    chunks["CUDA"] = sign_conv._strip_chunks(x, 0, 1, 8)
    assert chunks["CUDA"] != chunks["Triton"]

    def expected(kernel: int = 3, networks: int = 1, cuda: bool = True) -> int:
        op = torch.ops.unflip.sign_conv2d_wgrad
        return int(op(grad, x, kernel, kernel, 1, kernel // 2, 0, networks, cuda).shape[0])

    monkeypatch.setattr(tuning, "chosen_rows", {sign_conv._key("wgrad", x, 16, 0, 1): 8})
    assert expected() == chunks["CUDA"]
    assert expected(kernel=1) == triton_launch.chunks(x, (32, 32), 16, 16, 1)
    assert expected(cuda=False) == chunks["Triton"]
    assert expected(networks=3) == triton_launch.chunks(x, (32, 32), 144, 16, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("c", "size"), [(16, 32), (32, 16), (64, 8), (16, 7)])
def test_on_the_device_and_in_a_graph(c: int, size: int, kind: int) -> None:
    g, x = (values.cuda() for values in example(5, c, size, size))
    grad, images = (values.permute(0, 3, 1, 2) for values in (g, x))
    for rows in cuda_kernels.strip_choices(c, size, size):
        found = sign_conv._wgrad_by_cuda(grad, images, kind, 1, rows)
        assert torch.equal(found.double().sum(0), reference(g, x, kind))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = sign_conv._wgrad_by_cuda(grad, images, kind, 1, rows)
        graph.replay()
        assert torch.equal(found.double().sum(0), reference(g, x, kind))
