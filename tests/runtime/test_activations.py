"""The sign of an activation near 0 is torch's, because a binary layer after it reads only the sign."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unflip
from unflip.layers import BinaryConv2d
from unflip.packing import make_packed
from unflip.packing.file import write

# Where torch's own result is 0 or not from one value to the next.
UNSTEADY = {
    "gelu": (-5.55, -5.48),
    "gelu_tanh": (-5.07, -5.05),
    "silu": (-88.8, -88.6),
    "mish": (-104.0, -102.0),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "tanh": torch.tanh,
}  # fmt: skip


class Signs(nn.Module):
    """One filter of one weight per sign: the signs of the activation themselves."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.binary = BinaryConv2d(1, 2, 1, bias=False, method="binarynet")

    def forward(self, x: Tensor) -> Tensor:
        return self.binary(self.function(x))


@pytest.mark.parametrize("isa", ["", "portable"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_signs_are_those_of_torch(
    name: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.cat([torch.linspace(-200, 200, 7919), torch.linspace(-8, 8, 8009)])
    low, high = UNSTEADY.get(name, (0.0, 0.0))
    x = x[(x < low) | (x > high)].view(1, 1, 1, -1)
    torch.manual_seed(0)
    model = Signs(ACTIVATIONS[name]).eval()
    write(tmp_path / "signs.unflip", make_packed(model, x))
    monkeypatch.setenv("UNFLIP_ISA", isa)
    with torch.no_grad():
        assert torch.equal(unflip.load(tmp_path / "signs.unflip")(x), model(x))
