"""Turn the layers of any model binary, and carry weights between a binary model and its float twin."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from unflip.freeze import FrozenLayer, frozen_layers
from unflip.layers import (
    MULTIPLYING,
    BinaryConv2d,
    BinaryLayer,
    BinaryLinear,
    become,
    binary_layers,
    inside_binarizer,
    twin_of,
)
from unflip.methods import Method, get, resolve

_BINARY_CLASS: dict[type[nn.Module], type[BinaryLayer]] = {
    nn.Conv2d: BinaryConv2d,
    nn.Linear: BinaryLinear,
}


_BASE = "weight_binarizer.base."  # where LNS keeps the weight binarizer of its base method


@dataclass(frozen=True)
class Change:
    """What happened to one layer."""

    name: str
    kind: str
    weights: int
    binary: bool
    reason: str


def binarize(
    model: nn.Module,
    method: str | Mapping[str, Any] | Method,
    skip: Iterable[str] = (),
    *,
    keep_first_and_last: bool = True,
    quiet: bool = False,
    **options: Any,
) -> nn.Module:
    """Turn every ``nn.Conv2d`` and ``nn.Linear`` of ``model`` into its binary layer, in place.

    The first convolution and the last linear layer (in the order they are registered) stay float unless
    ``keep_first_and_last=False``; so does every layer named in ``skip``, by its name or a pattern such
    as ``"layer1.*"``. Weights, bias, hooks and parameter objects are kept. ``options`` go to the method:
    ``binarize(model, "lns", base="dorefa", alpha=1)``.

    Returns the model and prints what became binary and what stayed float (``quiet=True``: does not;
    :func:`summary` says it again). Refuses, by name, layers it has no binary form for, unless they
    are in ``skip``.
    """
    chosen = get(method, **options) if isinstance(method, str) else resolve(method)
    if options and not isinstance(method, str):
        raise TypeError(f"options {sorted(options)} go with a method's name, not with {method!r}")
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r} should be a list of layer names or patterns: [{skip!r}]")
    targets = _targets(model, tuple(skip), keep_first_and_last)
    twins = [(module, _binary_twin(name, module, chosen)) for name, module in targets.items()]
    for module, twin in twins:  # once all of them could be made
        become(module, twin)
    _use_no_fast_path(model)
    chosen.adapt(model)
    if not quiet:
        print(_table(chosen, summary(model)))
    return model


def _targets(
    model: nn.Module, skip: tuple[str, ...], keep_first_and_last: bool
) -> dict[str, nn.Module]:
    """name -> layer, for the layers to turn."""
    _refuse_already_binary(model)
    if any(not isinstance(s, str) for s in skip):
        raise TypeError(f"skip={skip!r} should be a list of layer names or patterns")
    layers: dict[str, nn.Module] = {
        # those without a binary form too: left alone they would stay float without a word
        n: m
        for n, m in model.named_modules()
        if isinstance(m, MULTIPLYING)
    }
    for pattern in skip:
        if not any(_skipped(n, (pattern,)) for n, _ in model.named_modules()):
            raise ValueError(
                f"skip: {pattern!r} matches no layer. Layers: {', '.join(layers) or 'none'}"
            )
    ends = _first_and_last(model) if keep_first_and_last else []
    kept = {n for n, m in layers.items() if m in ends}
    targets = {n: m for n, m in layers.items() if n not in kept and not _skipped(n, skip)}
    inside = [n for n, m in layers.items() if isinstance(m, nn.MultiheadAttention)]
    for name, module in targets.items():
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue  # the attention around it is refused below
        _refuse_unsupported(name, module)
    if not targets:
        raise ValueError(
            f"nothing to binarize: {type(model).__name__} has {len(layers)} convolution and linear "
            f"layers ({', '.join(layers) or 'none'}) and all of them are to stay float "
            f"(first and last: {', '.join(sorted(kept)) or 'none'}; skip: {list(skip)})"
        )
    return targets


def _skipped(name: str, skip: tuple[str, ...]) -> bool:
    """A pattern also covers everything below the modules it names."""
    parts = name.split(".")
    above = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(module, p) for module in above for p in skip)


def _first_and_last(model: nn.Module) -> list[nn.Module]:
    """A layer that is used twice may be both in the middle and last."""
    modules = [m for _, m in model.named_modules(remove_duplicate=False)]
    convs = [m for m in modules if isinstance(m, nn.Conv2d)]
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    return [*convs[:1], *linears[-1:]]


def _refuse_already_binary(model: nn.Module) -> None:
    for name, layer in binary_layers(model):
        raise ValueError(
            f"layer {name!r} is binary already (method {layer.method}); binarize a float model, and "
            "take over weights with unflip.load_twin"
        )
    for name, _ in frozen_layers(model):
        raise ValueError(f"layer {name!r} is frozen: it has no latent weights to train")


def _refuse_unsupported(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    weight = getattr(module, "weight", None)
    if is_parametrized(module):
        reason = "its weight is computed by a parametrization; remove that first"
    elif isinstance(weight, Tensor) and is_lazy(weight):
        reason = "its shape is not known yet; run the model once first"
    elif type(module) not in _BINARY_CLASS:
        reason = "only nn.Conv2d and nn.Linear themselves have a binary form here"
        if isinstance(module, nn.Conv1d):
            size = module.kernel_size[0]
            reason += f" (on (N, C, 1, L) an nn.Conv2d with a kernel of (1, {size}) does the same)"
    elif not isinstance(module.weight, nn.Parameter) or "weight" not in module._parameters:
        reason = "its weight is not a parameter (weight_norm? pruning?); make it one first"
    elif "forward" in module.__dict__:
        reason = "its forward was replaced (by a wrapper?), which would go on computing in float; undo that first"
    elif not module.weight.is_floating_point():
        reason = f"its weight is {module.weight.dtype}, not floating-point"
    else:
        return
    raise ValueError(f"cannot binarize {name!r} ({kind}): {reason}; skip=[{name!r}] keeps it float")


def _binary_twin(name: str, module: nn.Module, method: Method) -> BinaryLayer:
    """A binary layer that shares the float one's parameters, buffers, hooks and settings."""
    twin = twin_of(module, _BINARY_CLASS[type(module)])
    twin._modules = dict(module._modules)
    twin.path = name
    try:
        twin.set_method(method)
    except ValueError as error:
        raise ValueError(f"cannot binarize {name!r}: {error}") from error
    return twin


def _use_no_fast_path(model: nn.Module) -> None:
    """In evaluation torch's transformer layer hands the weights of its linear layers to one kernel: the latent ones."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(binary_layers(module)):
            module.activation_relu_or_gelu = 0  # asked for by that path alone


def summary(model: nn.Module) -> list[Change]:
    """What is binary and what is float in a binarized model, in the order of its layers."""
    changes = []
    for name, module in model.named_modules():
        if isinstance(module, (BinaryLayer, FrozenLayer)):
            reason = str(module.method)
            changes.append(_change(name, module, True, reason))
        elif isinstance(module, MULTIPLYING) and not inside_binarizer(name):
            changes.append(_change(name, module, False, "float"))
    return changes


def _change(name: str, module: nn.Module, binary: bool, reason: str) -> Change:
    return Change(name, type(module).__name__, _weights(module), binary, reason)


def _weights(module: nn.Module) -> int:
    """Attention and recurrent layers have several weights, of their own names; biases are vectors."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return 0 if is_lazy(weight) else weight.numel()  # not known yet
    return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)


def _table(method: Method, changes: list[Change]) -> str:
    binary = [c for c in changes if c.binary]
    kept = [c for c in changes if not c.binary]
    lines = [
        f"binarized {len(binary)} layers ({sum(c.weights for c in binary):,} weights) with {method}: "
        + ", ".join(c.name or c.kind for c in binary)
    ]
    if kept:
        lines.append(
            f"kept float: {', '.join(c.name for c in kept)} ({sum(c.weights for c in kept):,} weights)"
        )
    return "\n".join(lines)


def load_twin(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load the weights of a float twin, or of the same network binarized by another method.

    Everything but the method's own state is taken over and must fit. Works in both directions. Of the
    method's own state, weight binarizers (LNS's mapping networks, say) stay as they are; what belongs to inputs,
    activations and shortcuts (ReActNet's shifts) is taken over where the other network has the same. So is what the
    base method under LNS has learned (ReCU's scales): LNS does not train it, so a warning names what the other
    network lacks.
    """
    if isinstance(state_dict, nn.Module):
        raise TypeError(
            f"state_dict is a model ({type(state_dict).__name__}); give its state_dict() instead"
        )
    _refuse_wrapped(model, state_dict)
    frozen = next(
        (k for k in state_dict if k.endswith("bits") and k[:-4] + "scales" in state_dict), None
    )
    if frozen:
        raise ValueError(
            f"the state dict is of a frozen model (it has {frozen!r}): its latent weights are gone"
        )
    state = {k: v for k, v in state_dict.items() if not inside_binarizer(k)}
    own = {k: v for k, v in model.state_dict().items() if inside_binarizer(k)}
    found = {key: _in_twin(key, value, state_dict) for key, value in own.items()}
    model.load_state_dict({**state, **own, **{k: v for k, v in found.items() if v is not None}})
    _warn_of_bases([key for key, value in found.items() if _BASE in key and value is None])
    for _, layer in binary_layers(model):
        layer.weight_binarizer.latent_replaced(layer.weight)


WRAPPERS = {"module.": "DistributedDataParallel or DataParallel", "_orig_mod.": "torch.compile"}


def _refuse_wrapped(model: nn.Module, state_dict: object) -> None:
    """What a checkpoint of someone's own often is instead of a state dict; torch would list every name twice."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict is {state_dict!r:.80} and should be names and tensors, as torch.load(file, weights_only=True) "
            "or safetensors.torch.load_file(file) reads them"
        )
    inside = [key for key, value in state_dict.items() if isinstance(value, Mapping)]
    if inside:
        which = " or ".join(f"state_dict[{key!r}]" for key in inside)
        raise ValueError(f"state_dict holds a state dict and more: give {which}")
    for prefix, wrapper in WRAPPERS.items():
        every = bool(state_dict) and all(key.startswith(prefix) for key in state_dict)
        if every and not any(key.startswith(prefix) for key in model.state_dict()):
            raise ValueError(
                f"every name in state_dict begins with {prefix!r}, as {wrapper} has them: give "
                f"{{k.removeprefix({prefix!r}): v for k, v in state_dict.items()}}"
            )


def _in_twin(key: str, own: Tensor, state_dict: Mapping[str, Tensor]) -> Tensor | None:
    """What the twin has for a part of the method's own state; None where that stays as it is."""
    if _BASE in key:  # of another LNS, or of the base method by itself
        places = [key, key.replace(_BASE, "weight_binarizer.")]
    else:
        places = [] if "weight_binarizer" in key.split(".") else [key]
    fitting = (state_dict[p] for p in places if p in state_dict)
    return next((value for value in fitting if value.shape == own.shape), None)


def _warn_of_bases(keys: list[str]) -> None:
    if keys:
        warnings.warn(
            f"the state dict has nothing that fits {', '.join(keys)}: the base method under LNS has learned state that "
            "LNS does not train, and it stays as it is. Take it from a network trained with the base method.",
            stacklevel=3,
        )


@torch.no_grad()
def signs(model: nn.Module) -> dict[str, Tensor]:
    """The signs of every binary layer, as int8; what :func:`flip_rate` compares."""
    layers: list[tuple[str, BinaryLayer | FrozenLayer]] = []
    layers += binary_layers(model)
    layers += frozen_layers(model)
    return {name: layer.code().signs.to(torch.int8) for name, layer in layers}


def flip_rate(
    before: nn.Module | Mapping[str, Tensor], after: nn.Module | Mapping[str, Tensor]
) -> float:
    """Share of binary weights whose sign differs between two models (or two :func:`signs`)."""
    flips, total = 0, 0
    for flipped, count in flips_by_layer(before, after).values():
        flips, total = flips + flipped, total + count
    return flips / total


def flips_by_layer(
    before: nn.Module | Mapping[str, Tensor], after: nn.Module | Mapping[str, Tensor]
) -> dict[str, tuple[int, int]]:
    """layer -> (signs that differ, signs)."""
    old = signs(before) if isinstance(before, nn.Module) else before
    new = signs(after) if isinstance(after, nn.Module) else after
    if old.keys() != new.keys() or not old:
        odd = sorted(old.keys() ^ new.keys())
        raise ValueError(
            "before and after should have the same binary layers; "
            + (f"these are in one only: {', '.join(odd)}" if odd else "neither has any")
        )
    for name in old:
        if old[name].shape != new[name].shape:
            raise ValueError(
                f"layer {name!r} has signs of shape {tuple(old[name].shape)} before and "
                f"{tuple(new[name].shape)} after; both should be the same network"
            )
    flipped = torch.stack([(old[n] != new[n]).sum() for n in old]).tolist()  # a GPU is asked once
    return {n: (count, new[n].numel()) for n, count in zip(old, flipped, strict=True)}
