"""All steps from a model to a packed network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unflip.freeze import copied, freeze
from unflip.layers import BinaryLayer, warn_idle
from unflip.packing.batches import refuse_dependence
from unflip.packing.check import check
from unflip.packing.convert import Converter
from unflip.packing.emit import emit
from unflip.packing.file import Packed, from_bytes, to_bytes
from unflip.packing.ir import CannotPack, Graph, Shape, simplified
from unflip.packing.ops import HANDLERS
from unflip.packing.outputs import Structure, is_tensor, structure_of
from unflip.packing.trace import trace


def make(
    model: nn.Module,
    example_input: Tensor,
    labels: Sequence[str] | None,
    preprocess: Mapping[str, Sequence[float]] | None,
) -> Packed:
    """Freeze, trace, convert and simplify the model, then compare the result with the model."""
    example = _batch(example_input)
    shape = _input_shape(example)
    frozen = _deployable(model)
    answer = _answer(frozen, example)
    expected = structure_of(answer, is_tensor)
    traced = trace(frozen, example)
    graph, structure, outputs = Converter(traced, example, HANDLERS).convert()
    if structure != expected or not _same(outputs, expected.parts(answer)):
        raise CannotPack(
            "the traced model and the model itself give different outputs; the forward pass must not depend on the "
            "values of its input, and hooks must not change values"
        )
    graph = simplified(graph)
    _refuse_input(graph, structure)
    classes = _checked_labels(labels, outputs)
    prepared = _checked_preprocess(preprocess, shape[0])
    pixels = [output.shape[2:] == (1, 1) for output in outputs]
    packed = emit(graph, structure, shape, prepared, classes, pixels)
    packed = from_bytes(to_bytes(packed))
    check(packed, graph, structure, example, outputs)

    def traces_alike(batch: Tensor) -> bool:
        return _content(_deployable(model), batch) == _content(_deployable(model), example)

    refuse_dependence(_deployable(model), example, answer, traces_alike)
    warn_idle(traced.idle(), "the packed network does not contain them")
    return packed


def _content(frozen: nn.Module, batch: Tensor) -> bytes | None:
    """The packed network as bytes, or None if this batch cannot be packed."""
    try:
        graph, structure, _ = Converter(trace(frozen, batch), batch, HANDLERS).convert()
        return to_bytes(emit(simplified(graph), structure, _input_shape(batch), None, None))
    except CannotPack:
        return None


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
        for a, b in zip(found, expected, strict=True)
    )


def _refuse_input(graph: Graph, structure: Structure) -> None:
    if structure.kind == "tensor" and graph.outputs == [0]:
        raise CannotPack("the model returns its input, so there is nothing to pack")
    for place, value in zip(structure.places, graph.outputs, strict=True):
        if value == 0:
            raise CannotPack(f"the model's {place} is its input; remove it from the outputs")


def _answer(model: nn.Module, example: Tensor) -> Any:
    try:
        with torch.no_grad():
            return model(example.clone())  # it may change its input
    except Exception as error:
        raise CannotPack(
            f"the model cannot run on example_input of shape {tuple(example.shape)}: {type(error).__name__}: {error}"
        ) from error


def _deployable(model: nn.Module) -> nn.Module:
    """A frozen copy on the CPU in evaluation mode."""
    if isinstance(model, torch.jit.ScriptModule):
        raise CannotPack(
            "a ScriptModule cannot be packed; give the nn.Module that it was made from"
        )
    if any(isinstance(module, BinaryLayer) for module in model.modules()):
        frozen = freeze(model)
    else:
        frozen = copied(model)
    frozen = frozen.cpu().eval().requires_grad_(False)
    for name, tensor in [*frozen.named_parameters(), *frozen.named_buffers()]:
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise CannotPack(f"{name} is {tensor.dtype}; call .float() on the model first")
    return frozen


def _batch(example: Tensor) -> Tensor:
    """Two images: with one, the batch dim could not be distinguished from a dim of size 1."""
    if not isinstance(example, Tensor) or example.dim() not in (2, 4) or example.numel() == 0:
        found = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise CannotPack(
            f"example_input must be a batch (N, C, H, W) or (N, F) of floats, not {found}"
        )
    if example.layout != torch.strided or example.is_complex():
        raise CannotPack(
            f"example_input must be dense and of real numbers, not {example.dtype} in {example.layout}"
        )
    # In C order, as the runtime has its inputs: in channels_last contiguous() would be a copy.
    example = example.detach().cpu().to(torch.float32).contiguous()
    if not torch.isfinite(example).all():
        raise CannotPack("example_input contains NaN or infinity; give a batch of real inputs")
    example = example[:2] if len(example) > 1 else torch.cat([example, example.flip(-1)])
    return _varied(example) if (example == example.flatten()[0]).all() else example


def _varied(constant: Tensor) -> Tensor:
    """Noise instead of one value, which would hide mistakes: for zeros, x / len(x) is x. It keeps the value's sign."""
    share = torch.rand(constant.shape, generator=torch.Generator().manual_seed(0))
    return torch.where(constant == 0, 2 * share - 1, constant * (0.5 + share))


def _input_shape(example: Tensor) -> Shape:
    c, h, w = (*example.shape[1:], 1, 1)[:3]
    return c, h, w


def _checked_labels(labels: Sequence[str] | None, outputs: list[Tensor]) -> list[str] | None:
    """The labels as text. Some output must have as many channels as there are labels."""
    if labels is None:
        return None
    if isinstance(labels, str):  # a sequence of letters
        raise CannotPack(
            f"labels={labels!r} must be a list of strings, one per class, not a string"
        )
    names = [str(label) for label in labels]
    for name in names:
        if "\0" in name:
            raise CannotPack(f"the label {name!r} contains a NUL, which C strings cannot have")
    channels = [output.shape[1] for output in outputs]
    if len(names) in channels:
        return names
    if len(outputs) > 1:
        found = ", ".join(map(str, channels))
        raise CannotPack(
            f"{len(names)} labels for a network whose outputs have {found} channels; give as many as one has"
        )
    what = "outputs" if outputs[0][0].numel() == channels[0] else "output channels"
    raise CannotPack(
        f"{len(names)} labels for a network with {channels[0]} {what}; give one label per output channel"
    )


def _checked_preprocess(
    preprocess: Mapping[str, Sequence[float]] | None, channels: int
) -> dict[str, Any] | None:
    if preprocess is None:
        return None
    if not isinstance(preprocess, Mapping) or set(preprocess) != {"mean", "std"}:
        raise CannotPack(f"preprocess={preprocess!r} must be a dict with exactly 'mean' and 'std'")
    plain = {key: _per_channel(key, preprocess[key], channels) for key in ("mean", "std")}
    if not all(v > 0 for v in plain["std"]):
        raise CannotPack(f"preprocess: std={plain['std']} must be positive")
    return plain


def _per_channel(key: str, given: Any, channels: int) -> list[float]:
    try:
        values = [float(v) for v in given]
    except (TypeError, ValueError):  # for example one number for all channels
        values = []
    if len(values) != channels or not all(abs(v) < float("inf") for v in values):
        raise CannotPack(
            f"preprocess: {key}={values or given!r} must be {channels} finite numbers, one per channel"
        )
    return values
