"""What the packing tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip.packing import Packed, make_packed
from unflip.packing.file import write
from unflip.packing.reference import evaluate

TOLERANCE = 1e-4


def _has_native() -> bool:
    try:
        unflip.load("no such file")
    except FileNotFoundError:
        return True
    except ImportError:
        return False
    raise AssertionError("a file that is not there was loaded")


HAS_NATIVE = _has_native()


@pytest.fixture
def lively() -> Callable[[nn.Module], nn.Module]:
    """Gives norms, slopes and what methods learn values as training leaves them, none of them special."""

    @torch.no_grad()
    def shake(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 1.5)
        for name, parameter in model.named_parameters():
            if parameter.dim() <= 1 or "adapted" in name or "input_binarizer" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
        return model.eval()

    return shake


@pytest.fixture
def native() -> None:
    """For tests of the runtime alone."""
    if not HAS_NATIVE:
        pytest.skip("the native runtime is not built")


@pytest.fixture
def agree(tmp_path: Path) -> Callable[..., Packed]:
    """Packs a model and compares reference and, where it is built, runtime with it on other images."""

    def compare(model: nn.Module, x: Tensor, *, exactly: bool = False) -> Packed:
        packed = make_packed(model, x[:1])
        with torch.no_grad():
            expected = model.eval()(x)
        _compare(evaluate(packed, x).reshape(expected.shape), expected, exactly)
        if HAS_NATIVE:
            write(tmp_path / "model.unflip", packed)
            found = unflip.load(tmp_path / "model.unflip")(x.contiguous())
            _compare(found.reshape(expected.shape), expected, exactly)
        return packed

    return compare


def _compare(found: Tensor, expected: Tensor, exactly: bool) -> None:
    if exactly:
        assert torch.equal(found, expected)
    else:
        assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
