"""Transposed convolutions: as ordinary ones, against torch, for all options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import unflip
from unflip.packing import CannotPack, make_packed
from unflip.packing.describe import describe
from unflip.packing.transposed import axis, spread


def by_hand(
    x: Tensor, weight: Tensor, out: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """What the packed ops do, in torch."""
    sizes = zip(
        x.shape[2:], out.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
    )
    high, wide = (axis(*along) for along in sizes)
    assert min(high.before, high.after, wide.before, wide.after) >= 0
    padded = F.pad(x, (wide.before, wide.after, high.before, high.after))
    step = (high.dilation, wide.dilation)
    phases = F.conv2d(padded, spread(weight, groups, high, wide), None, 1, 0, step, groups)
    n, c, (h, w) = len(x), out.shape[1], phases.shape[2:]
    split = phases.view(n, c, high.stride, wide.stride, h, w).permute(0, 1, 4, 2, 5, 3)
    whole = split.reshape(n, c, h * high.stride, w * wide.stride)
    whole = whole[:, :, high.crop :, wide.crop :]
    return whole[:, :, : out.shape[2], : out.shape[3]]


@st.composite
def options(draw: Any) -> dict[str, Any]:
    def pair(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)) for _ in range(2)]

    found = {"kernel": pair(1, 5), "stride": pair(1, 4), "dilation": pair(1, 3), "size": pair(1, 6)}
    found["padding"] = pair(0, 5)
    room = [max(s, d) - 1 for s, d in zip(found["stride"], found["dilation"], strict=True)]
    return found | {
        "output_padding": [draw(st.integers(0, most)) for most in room],
        "groups": draw(st.sampled_from([1, 2])),
        "bias": draw(st.booleans()),
    }


def made(found: dict[str, Any]) -> tuple[nn.ConvTranspose2d, Tensor]:
    """The layer and an image."""
    named = {k: tuple(found[k]) for k in ("stride", "padding", "output_padding", "dilation")}
    layer = nn.ConvTranspose2d(
        4, 6, tuple(found["kernel"]), groups=found["groups"], bias=found["bias"], **named
    )
    x = torch.randn(2, 4, *found["size"])
    try:
        layer.double()(x.double())
    except RuntimeError:  # the padding leaves nothing of the output
        assume(False)
    return layer.float(), x


@settings(max_examples=400, deadline=None)
@given(found=options())
def test_the_phases_are_the_transposed_convolution(found: dict[str, Any]) -> None:
    layer, x = made({**found, "bias": False})
    with torch.no_grad():
        expected = layer.double()(x.double())
        numbers = (found[key] for key in ("stride", "padding", "dilation", "groups"))
        result = by_hand(x.double(), layer.weight, expected, *numbers)
    assert torch.allclose(result, expected, rtol=0, atol=1e-12)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(found=options())
def test_packed(found: dict[str, Any], agree: Callable[..., Any]) -> None:
    packed = agree(*made(found))
    assert {op["op"] for op in packed.graph["ops"]} <= {"conv", "pixel_shuffle", "slice"}


@pytest.mark.parametrize(
    ("kernel", "named", "kinds", "shape"),
    [
        (2, {"stride": 2}, "conv pixel_shuffle", [24, 4, 1, 1]),
        (3, {"stride": 2, "padding": 1, "output_padding": 1}, "conv pixel_shuffle", [24, 4, 2, 2]),
        (4, {"stride": 2, "padding": 1}, "conv pixel_shuffle slice", [24, 4, 2, 2]),
        (4, {"stride": 4}, "conv pixel_shuffle", [96, 4, 1, 1]),
        (3, {"padding": 1}, "conv", [6, 4, 3, 3]),
        (3, {"dilation": 2}, "conv", [6, 4, 3, 3]),
        (5, {"stride": (1, 2)}, "conv pixel_shuffle slice", [12, 4, 5, 3]),
        (2, {"stride": 2, "groups": 2}, "conv pixel_shuffle", [24, 2, 1, 1]),
    ],
)
def test_no_multiplication_is_wasted(
    agree: Callable[..., Any], kernel: int, named: dict[str, Any], kinds: str, shape: list[int]
) -> None:
    """Where the stride divides the kernel, there are as many weights as in the layer."""
    packed = agree(nn.ConvTranspose2d(4, 6, kernel, **named), torch.randn(3, 4, 5, 6))
    assert " ".join(op["op"] for op in packed.graph["ops"]) == kinds
    assert packed.graph["ops"][0]["shape"] == shape


def test_multiplications_are_as_many_as_cost_counts() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 6, 2, 2))
    x = torch.randn(1, 8, 5, 7)
    rows = describe(make_packed(model, x)).rows
    assert sum(row.float_macs for row in rows) == unflip.cost(model, x).flops


@pytest.mark.parametrize("kernel", [2, 4])  # the second one is cropped
def test_what_follows_is_done_by_the_convolution(
    agree: Callable[..., Any], lively: Callable[..., nn.Module], kernel: int
) -> None:
    up = nn.ConvTranspose2d(4, 6, kernel, 2, padding=kernel // 2 - 1)
    model = nn.Sequential(up, nn.BatchNorm2d(6), nn.PReLU(6), nn.Hardtanh())
    packed = agree(lively(model), torch.randn(3, 4, 5, 6))
    conv, *moved = packed.graph["ops"]
    assert [step["step"] for step in conv["steps"]] == ["affine", "prelu", "clamp"]
    assert {op["op"] for op in moved} <= {"pixel_shuffle", "slice"}


def test_what_others_read_stays_where_it_is(agree: Callable[..., Any]) -> None:
    class Two(nn.Module):
        """Its upsampled image is read twice, cut and whole."""

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 3, 2, 2)
            self.slope = nn.PReLU(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            factors = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
            return self.slope(y)[:, :, 1:] + y[:, :, 1:] * factors

    agree(Two(), torch.randn(2, 3, 4, 4))


def test_steps_behind_any_pixel_shuffle(agree: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.PixelShuffle(2), nn.PReLU(6))
    with torch.no_grad():
        model[2].weight.copy_(torch.linspace(-1, 1, 6))
    packed = agree(model, torch.randn(2, 3, 5, 6))
    assert [op["op"] for op in packed.graph["ops"]] == ["conv", "pixel_shuffle"]
    shuffled = nn.Sequential(
        nn.PixelShuffle(2), nn.ReLU()
    )  # of the input: nothing could take the step
    kinds = [op["op"] for op in agree(shuffled, torch.randn(2, 4, 5, 6)).graph["ops"]]
    assert kinds == ["pixel_shuffle", "map"]


@pytest.mark.parametrize("dims", [1, 3])
def test_other_dimensions_are_refused(dims: int) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = getattr(nn, f"ConvTranspose{dims}d")(4, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x.mean((2, 3)).view(len(x), 4, *[1] * dims))

    with pytest.raises(CannotPack, match=r"conv_transpose\dd at up .*nn\.ConvTranspose2d"):
        make_packed(Other(), torch.randn(2, 4, 3, 3))


def test_a_weight_of_the_image_is_refused() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv_transpose2d(x, torch.relu(x)[:, :, :1, :1].mean((2, 3), keepdim=True))

    with pytest.raises(CannotPack, match="its weight depends on the input"):
        make_packed(Own(), torch.randn(2, 2, 3, 3))
