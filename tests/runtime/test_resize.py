"""Bilinear resizing against the formula in float64, with every instruction set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from unflip import load
from unflip.packing.file import Packed, write


@pytest.fixture(scope="module")
def resized(
    tmp_path_factory: pytest.TempPathFactory, instruction_sets: list[str]
) -> Callable[..., Any]:
    """Runs the op alone; checks that all instruction sets, and two threads, give the same bits."""
    path = tmp_path_factory.mktemp("resize") / "m.unflip"

    def run(x: torch.Tensor, size: list[int], align_corners: bool) -> torch.Tensor:
        op = {"op": "resize", "name": "up", "inputs": [0]}
        op |= {"size": size, "align_corners": align_corners}
        shape = {"shape": list(x.shape[1:]), "preprocess": None}
        write(path, Packed({"input": shape, "ops": [op], "output": 1, "labels": None}, {}))
        found = _with_every_set(path, x, instruction_sets)
        assert all(np.array_equal(found[0].numpy(), other.numpy()) for other in found[1:])
        # a 1 × 1 image comes out as a vector
        return found[0].reshape(*x.shape[:2], *size)

    return run


def _with_every_set(path: Path, x: torch.Tensor, sets: list[str]) -> list[torch.Tensor]:
    found = [load(path, threads=2)(x)]
    for isa in sets:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UNFLIP_ISA", isa)
            found.append(load(path)(x))
    return found


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_formula(data: st.DataObject, resized: Callable[..., Any]) -> None:
    batch, channels = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 20))
    x = torch.randn(batch, channels, *[data.draw(st.integers(1, 12)) for _ in range(2)])
    size, corners = [data.draw(st.integers(1, 40)) for _ in range(2)], data.draw(st.booleans())
    found = resized(x, size, corners)
    exact = F.interpolate(x.double(), size, mode="bilinear", align_corners=corners)
    largest = x.abs().max().item()
    assert (found - exact).abs().max().item() <= 4e-7 * largest
    torchs = F.interpolate(x, size, mode="bilinear", align_corners=corners)
    assert (found - torchs).abs().max().item() <= 1e-5 * largest  # its positions are float32


@pytest.mark.parametrize("align_corners", [False, True])
def test_what_is_exact(resized: Callable[..., Any], align_corners: bool) -> None:
    """One colour stays that colour; with corners aligned, a pixel that is met stays what it is."""
    plain = torch.full((1, 3, 5, 7), 0.1)
    assert (resized(plain, [13, 4], align_corners) == plain[0, 0, 0, 0]).all()
    x = torch.randn(2, 3, 4, 6)
    if align_corners:
        assert torch.equal(resized(x, [10, 16], True)[:, :, ::3, ::3], x)
    else:
        assert torch.equal(resized(x, [12, 18], False)[:, :, 1::3, 1::3], x)


def test_a_long_row(resized: Callable[..., Any]) -> None:
    """The last of 65,536 pixels lies as exactly as the first."""
    x = torch.randn(1, 1, 1, 1000)
    found = resized(x, [1, 65_536], False)
    exact = F.interpolate(x.double(), (1, 65_536), mode="bilinear")
    assert (found - exact).abs().max().item() <= 2e-6
