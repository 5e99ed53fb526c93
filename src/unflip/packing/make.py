"""All the steps from a model to what is in the file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unflip.freeze import freeze
from unflip.layers import BinaryLayer, warn_idle
from unflip.packing.batches import refuse_dependence
from unflip.packing.check import check
from unflip.packing.convert import Converter
from unflip.packing.emit import emit
from unflip.packing.file import Packed, from_bytes, to_bytes
from unflip.packing.ir import CannotPack, Shape, simplified
from unflip.packing.ops import HANDLERS
from unflip.packing.trace import trace


def make(
    model: nn.Module,
    example_input: Tensor,
    labels: Sequence[str] | None,
    preprocess: Mapping[str, Sequence[float]] | None,
) -> Packed:
    """Freeze, trace, convert, simplify; then compare what was made with the model."""
    example = _batch(example_input)
    shape = _input_shape(example)
    frozen = _deployable(model)
    answer = _answer(frozen, example)
    traced = trace(frozen, example)
    graph, output = Converter(traced, example, HANDLERS).convert()
    if output.shape != answer.shape or not torch.allclose(
        output, answer, rtol=1e-5, atol=1e-6, equal_nan=True
    ):
        raise CannotPack(
            "the traced model answers differently from the model itself: does its forward pass depend on the values "
            "it sees, or do hooks change them?"
        )
    graph = simplified(graph)
    if graph.output == 0:
        raise CannotPack("the model returns its input: there is nothing to pack")
    classes = _checked_labels(labels, output)
    packed = emit(graph, shape, _checked_preprocess(preprocess, shape[0]), classes)
    packed = from_bytes(to_bytes(packed))
    check(packed, graph, example, output)

    def traces_alike(batch: Tensor) -> bool:
        return _content(_deployable(model), batch) == _content(_deployable(model), example)

    refuse_dependence(_deployable(model), example, answer, traces_alike)
    warn_idle(traced.idle(), "the packed network is without them")
    return packed


def _content(frozen: nn.Module, batch: Tensor) -> bytes | None:
    """The packed network as bytes; None where this batch cannot be packed."""
    try:
        graph, _ = Converter(trace(frozen, batch), batch, HANDLERS).convert()
        return to_bytes(emit(simplified(graph), _input_shape(batch), None, None))
    except CannotPack:
        return None


def _answer(model: nn.Module, example: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            answer = model(example)
    except (RuntimeError, TypeError) as error:  # TypeError: a second input, say
        raise CannotPack(
            f"the model cannot run on example_input of shape {tuple(example.shape)}: {error}"
        ) from error
    if not isinstance(answer, Tensor):
        raise CannotPack(
            f"the model returns a {type(answer).__name__}; a packed network has one tensor for output: join several "
            "with torch.cat(..., 1), and slice what the packed network returns"
        )
    return answer


def _deployable(model: nn.Module) -> nn.Module:
    """A frozen copy on the CPU in evaluation mode."""
    if any(isinstance(module, BinaryLayer) for module in model.modules()):
        frozen = freeze(model)
    else:
        frozen = copy.deepcopy(model)
    frozen = frozen.cpu().eval().requires_grad_(False)
    for name, tensor in [*frozen.named_parameters(), *frozen.named_buffers()]:
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise CannotPack(f"{name} is {tensor.dtype}; call .float() on the model first")
    return frozen


def _batch(example: Tensor) -> Tensor:
    """Two images: with one, a batch could not be told from a dimension of size 1."""
    if not isinstance(example, Tensor) or example.dim() not in (2, 4) or example.numel() == 0:
        found = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise CannotPack(
            f"example_input should be a batch (N, C, H, W) or (N, F) of floats, not {found}"
        )
    example = example.detach().cpu().to(torch.float32)
    if not torch.isfinite(example).all():
        raise CannotPack("example_input has NaN or infinity")
    return example[:2] if len(example) > 1 else torch.cat([example, example.flip(-1)])


def _input_shape(example: Tensor) -> Shape:
    c, h, w = (*example.shape[1:], 1, 1)[:3]
    return c, h, w


def _checked_labels(labels: Sequence[str] | None, output: Tensor) -> list[str] | None:
    if labels is None:
        return None
    names = [str(label) for label in labels]
    channels = output.shape[1]  # an image's labels are those of its pixels
    if len(names) != channels:
        what = "outputs" if output[0].numel() == channels else "output channels"
        raise CannotPack(f"{len(names)} labels for a network with {channels} {what}")
    return names


def _checked_preprocess(
    preprocess: Mapping[str, Sequence[float]] | None, channels: int
) -> dict[str, Any] | None:
    if preprocess is None:
        return None
    if not isinstance(preprocess, Mapping) or set(preprocess) != {"mean", "std"}:
        raise CannotPack(
            f"preprocess={preprocess!r} should have 'mean' and 'std', and nothing else"
        )
    plain = {key: _a_channel(key, preprocess[key], channels) for key in ("mean", "std")}
    if not all(v > 0 for v in plain["std"]):
        raise CannotPack(f"preprocess: std={plain['std']} should be positive")
    return plain


def _a_channel(key: str, given: Any, channels: int) -> list[float]:
    try:
        values = [float(v) for v in given]
    except (TypeError, ValueError):  # one number for all channels, say
        values = []
    if len(values) != channels or not all(abs(v) < float("inf") for v in values):
        raise CannotPack(
            f"preprocess: {key}={values or given!r} should be {channels} numbers, one a channel"
        )
    return values
