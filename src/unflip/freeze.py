"""Freeze: keep signs and scales, drop latent weights and everything that produced them."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.ends import freeze_int8, int8_layers
from unflip.layers import (
    BinaryConv2d,
    BinaryLayer,
    BinaryLinear,
    ConvProduct,
    LinearProduct,
    become,
    binary_layers,
    multiply_binary,
    twin_of,
)
from unflip.methods.base import BinaryWeight, InputBinarizer, Method


def pack_signs(signs: Tensor) -> Tensor:
    """±1 values -> bytes, eight signs per byte, first sign in the lowest bit, +1 as 1."""
    bits = (signs.flatten() > 0).to(torch.uint8)
    bits = F.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    return (bits << torch.arange(8, device=bits.device, dtype=torch.uint8)).sum(
        1, dtype=torch.uint8
    )


def unpack_signs(packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`pack_signs`."""
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    bits = ((packed[:, None] >> shifts) & 1).flatten()[: torch.Size(shape).numel()]
    return (bits.to(dtype) * 2 - 1).view(shape)


class FrozenLayer(nn.Module):
    """A binary layer as it is shipped: packed signs, scales, and the way to binarize the input."""

    bits: Tensor  # uint8, eight signs per byte
    scales: Tensor
    offset: Tensor | None
    method: Method
    input_binarizer: InputBinarizer
    signs_shape: tuple[int, ...]
    has_binary_weights: bool = True

    def code(self) -> BinaryWeight:
        """The discrete weights: scales and signs."""
        signs = unpack_signs(self.bits, self.signs_shape, self.scales.dtype)
        return BinaryWeight(signs, self.scales, self.offset)

    @property
    def weight(self) -> Tensor:
        """Scale times sign, computed from ``bits`` and ``scales``, which are stored."""
        return self.code().dense()

    def forward(self, x: Tensor) -> Tensor:
        return multiply_binary(self, x, self.weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, frozen, method={self.method}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})["method"] = self.method.family

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """The same bits mean another network under another method, so a state dict of another method is refused."""
        made_with = local_metadata.get("method")
        if made_with is not None and made_with != self.method.family:
            rest[-1].append(
                f"frozen layer {prefix[:-1]!r} has method {self.method}, but the state dict was made with "
                f"method {made_with}. Load it into a model that was binarized with {made_with}"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class FrozenConv2d(ConvProduct, FrozenLayer, nn.Conv2d):  # type: ignore[override]
    pass


class FrozenLinear(LinearProduct, FrozenLayer, nn.Linear):  # type: ignore[override]
    pass


_FROZEN_CLASS: dict[type[BinaryLayer], type[FrozenLayer]] = {
    BinaryConv2d: FrozenConv2d,
    BinaryLinear: FrozenLinear,
}


def frozen_layers(model: nn.Module) -> Iterator[tuple[str, FrozenLayer]]:
    """(name, layer) of every frozen layer in the model."""
    for name, module in model.named_modules():
        if isinstance(module, FrozenLayer):
            yield name, module


def freeze(model: nn.Module) -> nn.Module:
    """A copy of ``model`` in evaluation mode that has bits instead of latent weights.

    Its outputs equal those of ``model.eval()`` exactly. ``model`` itself is not changed.
    """
    for name, _ in frozen_layers(model):
        raise ValueError(f"the model is frozen already (layer {name!r}); freeze a trainable one")
    if not any(True for _ in binary_layers(model)):
        raise ValueError(
            f"{type(model).__name__} has no binary layer to freeze; call unflip.binarize first"
        )
    frozen = copied(model).eval()
    for name, layer in list(binary_layers(frozen)):
        become(layer, _frozen_twin(name, layer))
    for name, kept in list(int8_layers(frozen)):
        become(kept, freeze_int8(name, kept))
    return frozen


def copied(model: nn.Module) -> nn.Module:
    """A deep copy. What it would share with ``model``, or could not copy, is refused by name."""
    own = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules:
            raise ValueError(
                f"{_named(name, module)} was made by torch.compile; give the model inside it, model._orig_mod"
            )
        replaced = None if isinstance(module, BinaryLayer) else vars(module).get("forward")
        if _shared(replaced, lambda part: isinstance(part, nn.Module)):
            raise ValueError(
                f"the forward of {_named(name, module)} is a function that was put in its place, so a copy would still "
                "run the original. Undo that, or use types.MethodType(function, module)"
            )
        for key, value in _copied_state(module).items():
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                raise ValueError(
                    f"{key} of {_named(name, module)} is a tensor with a gradient, which torch cannot copy. Detach it; "
                    "if weight_norm, spectral_norm or pruning made it, remove that first"
                )
            if key != "forward" and _shared(value, lambda part: id(part) in own):
                raise ValueError(_uses_the_original(key, _named(name, module)))
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"{_uncopied(model)} cannot be copied: {error}. Remove it from the model first"
        ) from error


_COPIED_HOOKS = ("_forward_hooks", "_forward_pre_hooks")  # the others do not change outputs


def _copied_state(module: nn.Module) -> dict[str, Any]:
    """The attributes that a copy gets: no compiled code, no kernels."""
    state = module.__getstate__()  # type: ignore[no-untyped-call, unused-ignore]
    state = state if isinstance(state, dict) else vars(module)
    return {k: v for k, v in state.items() if not k.endswith("_hooks") or k in _COPIED_HOOKS}


def _uses_the_original(key: str, where: str) -> str:
    """Why a model cannot be copied that has a function which keeps a part of it."""
    if key in _COPIED_HOOKS:
        return (
            f"a forward hook of {where} keeps a part of the model, so in a copy it would use the original's part. "
            "Remove the hook"
        )
    return (
        f"{key} of {where} has a function that keeps a part of the model (a lambda that uses self?), so a copy would "
        "still use the original's part. Make it a method"
    )


def _shared(value: Any, counts: Callable[[Any], bool]) -> bool:
    """Whether a function in ``value`` keeps something that counts. A copy has new objects, but the same functions."""
    stack, seen = [(value, False)], set[tuple[int, bool]]()
    while stack:
        part, shared = stack.pop()
        if shared and counts(part):
            return True
        if (id(part), shared) not in seen:
            seen.add((id(part), shared))
            shared = shared or isinstance(part, types.FunctionType)
            stack += [(inner, shared) for inner in _parts(part)]
    return False


def _parts(value: Any) -> list[Any]:
    """What a function or container keeps. The attributes of objects are not looked at."""
    if isinstance(value, types.FunctionType):
        kept = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable without a value yet
                kept.append(cell.cell_contents)
        return kept
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple | set) else []


def _uncopied(model: nn.Module) -> str:
    """The first attribute that cannot be copied."""
    for name, module in model.named_modules():
        for key, value in _copied_state(module).items():
            try:
                copy.deepcopy(value if key != "_modules" else None)
            except Exception:
                return f"{key} of {_named(name, module)}"
    return _named("", model)


def _named(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def _no_sign(name: str, layer: BinaryLayer) -> str:
    """Why a layer whose signs are not all ±1 cannot be frozen."""
    if torch.isnan(layer.weight).any():
        return f"layer {name!r} cannot be frozen: it has NaN weights, which have no sign. Load an earlier checkpoint"
    return (
        f"layer {name!r} cannot be frozen: {layer.weight_binarizer.title} gives signs that are NaN or 0; it must "
        "give +1 or -1 (torch.sign(0) is 0, unflip.ste.sign(0) is +1)"
    )


def _frozen_twin(name: str, layer: BinaryLayer) -> FrozenLayer:
    if not layer.has_binary_weights:
        raise ValueError(
            f"layer {name!r} cannot be frozen: method {layer.method} leaves its weights float. Train the next step "
            "first: a network with binary weights that starts from this one"
        )
    code = layer.code()
    if not (code.signs.abs() == 1).all():
        raise ValueError(_no_sign(name, layer))
    if "forward" in layer.__dict__:
        raise ValueError(
            f"the forward of layer {name!r} was replaced (by a wrapper?) and would still compute with latent weights: "
            "undo that before freezing"
        )
    if type(layer) not in _FROZEN_CLASS:
        raise ValueError(
            f"layer {name!r} ({type(layer).__name__}) cannot be frozen: only BinaryConv2d and BinaryLinear can, not "
            "their subclasses or layers with a parametrization. Put what it adds into a module around it"
        )
    twin = twin_of(layer, _FROZEN_CLASS[type(layer)])
    twin._parameters = {k: v for k, v in layer._parameters.items() if k != "weight"}
    twin._modules = {"input_binarizer": layer.input_binarizer.deployed().eval()}
    twin._buffers = dict(layer._buffers)
    twin.signs_shape = tuple(code.signs.shape)
    twin.register_buffer("bits", pack_signs(code.signs))
    twin.register_buffer("scales", code.scales.clone())
    twin.register_buffer("offset", None if code.offset is None else code.offset.clone())
    return twin
