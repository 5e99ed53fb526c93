"""Inputs of several bits: every float becomes the level that the method rounds it to, with every instruction set."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import unflip
from unflip.layers import BinaryConv2d

WIDTH = 64
Levels = Callable[[int, Tensor], list[Tensor]]


@pytest.fixture(scope="module")
def levels(instruction_sets: list[str], tmp_path_factory: pytest.TempPathFactory) -> Levels:
    """Of inputs in rows of 64, by DoReFa with so many bits: those of each instruction set."""
    folder, loaded = tmp_path_factory.mktemp("levels"), {}
    with pytest.MonkeyPatch.context() as patch:
        for bits in range(2, 9):
            layer = BinaryConv2d(1, 1, 1, bias=False, method={"name": "dorefa", "input_bits": bits})
            layer.weight.data.fill_(2**bits - 1)  # an output is a level
            path = folder / f"{bits}.unflip"
            unflip.pack(layer.eval(), torch.rand(1, 1, 1, WIDTH), path)
            for isa in instruction_sets:
                patch.setenv("UNFLIP_ISA", isa)
                loaded[bits, isa] = unflip.load(path)
    return lambda bits, x: [
        torch.from_numpy(np.asarray(loaded[bits, isa](x.view(-1, 1, 1, WIDTH).numpy()))).view(-1)
        for isa in instruction_sets
    ]


def check(levels: Levels, bits: int, x: Tensor) -> None:
    x = torch.cat([x, x.new_zeros(-len(x) % WIDTH)])
    expected = torch.round(x.clamp(0, 1) * (2**bits - 1))
    for found in levels(bits, x):
        assert torch.equal(found.round(), expected)
        assert (found - expected).abs().max() < 1e-3


@pytest.mark.parametrize("bits", range(2, 9))
def test_at_every_step_and_the_floats_around_it(levels: Levels, bits: int) -> None:
    n = 2**bits - 1
    x = (torch.arange(n) + 0.5) / n
    near = [x]
    for end in (-math.inf, math.inf):
        for _ in range(4):
            near.append(near[-1].nextafter(torch.tensor(end)))
        near.append(x)
    check(levels, bits, torch.cat([*near, torch.arange(n + 1) / n]))


@settings(max_examples=100, deadline=None)
@given(
    bits=st.integers(2, 8),
    values=st.lists(
        st.floats(-0.25, 1.25, width=32)
        | st.floats(width=32, allow_nan=False, allow_infinity=False),
        min_size=1,
    ),
)
def test_at_any_float(levels: Levels, bits: int, values: list[float]) -> None:
    check(levels, bits, torch.tensor(values))
