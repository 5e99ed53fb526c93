"""Make the layers of any model binary, and copy weights between a binary model and its float twin."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from unflip.ends import (
    FrozenInt8Layer,
    Int8Layer,
    Kept,
    Twins,
    check_kept,
    end_twins,
    first_and_last,
    shortcut_twins,
)
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
from unflip.tables import Table, Tabular

_BINARY_CLASS: dict[type[nn.Module], type[BinaryLayer]] = {
    nn.Conv2d: BinaryConv2d,
    nn.Linear: BinaryLinear,
}

# Where a method that wraps another keeps the weight binarizer of that base method.
_BASE = "weight_binarizer.base."


@dataclass(frozen=True)
class LayerSummary:
    """One layer of a model. ``binary``: whether its weights are. ``reason``: the method that changed it, "int8" or
    "float"."""

    name: str
    kind: str
    weights: int
    binary: bool
    reason: str


class ModelSummary(Tabular, list[LayerSummary]):
    """The layers of a model in order. ``print`` shows a table, and so do rich and notebooks."""

    def table(self, title: str = "") -> Table:
        """One row per layer, and the totals."""
        rows = [
            (layer.name or "(model)", layer.kind, f"{layer.weights:,}", layer.reason)
            for layer in self
        ]
        binary = [layer.weights for layer in self if layer.binary]
        total = (
            f"{len(binary)} of {len(self)} layers are binary: {sum(binary):,} of "
            f"{sum(layer.weights for layer in self):,} weights"
        )
        columns = ("layer", "kind", "weights", "method")
        return Table(columns, rows, ("weights",), title, (total,))


def binarize(
    model: nn.Module,
    method: str | Mapping[str, Any] | Method,
    skip: Iterable[str] = (),
    *,
    keep_first_and_last: bool = True,
    ends: Kept = "float",
    shortcuts: Kept = "float",
    preprocess: Mapping[str, Sequence[float]] | None = None,
    quiet: bool = False,
    **options: Any,
) -> nn.Module:
    """Turn every ``nn.Conv2d`` and ``nn.Linear`` of ``model`` into a binary layer, in place. Returns the model.

    method               a method's name, its options as a mapping, or a method
    skip                 layers that stay float: names, or patterns such as ``"layer1.*"``
    keep_first_and_last  keep the first convolution and the last linear layer (in the order they are registered) float
    ends                 "int8": these two layers get 8-bit weights and inputs instead (see ``ends.py``)
    shortcuts            "int8": all other ``nn.Conv2d`` that stay float (``skip``) get 8-bit weights and inputs, for
                         example those in the shortcuts of a ResNet. Does not depend on ``ends``
    preprocess           for ``ends="int8"``: ``{"mean": ..., "std": ...}`` of the images, as for :func:`~unflip.pack`
    quiet                print nothing. Otherwise a report says which layers became binary and which stayed float;
                         :func:`summary` returns the same as a table. Errors and warnings are not silenced
    options              of the method: ``binarize(model, "dorefa", input_bits=2)``

    Weights, biases, hooks and parameter objects are kept. A layer without a binary form raises an error that names it,
    unless it is in ``skip``.
    """
    chosen = get(method, **options) if isinstance(method, str) else resolve(method)
    if options and not isinstance(method, str):
        raise TypeError(f"options {sorted(options)} go with a method's name, not with {method!r}")
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r} should be a list of layer names or patterns: [{skip!r}]")
    check_kept(ends, shortcuts, keep_first_and_last, preprocess)
    targets = _targets(model, tuple(skip), keep_first_and_last)
    twins: Twins = [(m, _binary_twin(name, m, chosen)) for name, m in targets.items()]
    if ends == "int8":
        twins += end_twins(model, preprocess)
    if shortcuts == "int8":
        twins += shortcut_twins(model, binary=targets.values())
    for module, twin in twins:  # once all of them could be made
        become(module, twin)
    _use_no_fast_path(model)
    chosen.adapt(model)
    if not quiet:
        print(_report(chosen, summary(model)))
    return model


def _targets(
    model: nn.Module, skip: tuple[str, ...], keep_first_and_last: bool
) -> dict[str, nn.Module]:
    """name -> layer, for the layers that become binary."""
    _refuse_already_binary(model)
    if any(not isinstance(s, str) for s in skip):
        raise TypeError(f"skip={skip!r} should be a list of layer names or patterns")
    layers: dict[str, nn.Module] = {
        # also those without a binary form: otherwise they would stay float silently
        n: m
        for n, m in model.named_modules()
        if isinstance(m, MULTIPLYING)
    }
    for pattern in skip:
        if not any(_skipped(n, (pattern,)) for n, _ in model.named_modules()):
            raise ValueError(
                f"skip: {pattern!r} matches no layer. Layers: {', '.join(layers) or 'none'}"
            )
    ends = first_and_last(model) if keep_first_and_last else []
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
            f"layers ({', '.join(layers) or 'none'}) and all of them stay float "
            f"(first and last: {', '.join(sorted(kept)) or 'none'}; skip: {list(skip)})"
        )
    return targets


def _skipped(name: str, skip: tuple[str, ...]) -> bool:
    """A pattern also covers all layers inside the modules it names."""
    parts = name.split(".")
    above = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(module, p) for module in above for p in skip)


def _refuse_already_binary(model: nn.Module) -> None:
    for name, layer in binary_layers(model):
        raise ValueError(
            f"layer {name!r} is binary already (method {layer.method}); binarize a float model, and "
            "copy weights with unflip.load_twin"
        )
    for name, _ in frozen_layers(model):
        raise ValueError(
            f"layer {name!r} is frozen: it has no latent weights to train. Binarize the float model instead"
        )


def _refuse_unsupported(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    weight = getattr(module, "weight", None)
    if is_parametrized(module):
        reason = "its weight is computed by a parametrization; remove that first"
    elif isinstance(weight, Tensor) and is_lazy(weight):
        reason = "its shape is not known yet; run the model once first"
    elif type(module) not in _BINARY_CLASS:
        reason = "only nn.Conv2d and nn.Linear, not their subclasses, can be binarized"
        if isinstance(module, nn.Conv1d):
            size = module.kernel_size[0]
            reason += f" (on (N, C, 1, L) an nn.Conv2d with a kernel of (1, {size}) does the same)"
    elif not isinstance(module.weight, nn.Parameter) or "weight" not in module._parameters:
        reason = "its weight is not a parameter (weight_norm? pruning?); make it one first"
    elif "forward" in module.__dict__:
        reason = "its forward was replaced (by a wrapper?) and would still compute in float; undo that first"
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
    """In evaluation mode torch's transformer layer passes the latent weights of its linear layers to a kernel."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(binary_layers(module)):
            module.activation_relu_or_gelu = 0  # only that path reads it


def summary(model: nn.Module) -> ModelSummary:
    """Which layers of a model are binary and which are float, in order. ``print`` shows it as a table."""
    layers = ModelSummary()
    for name, module in model.named_modules():
        if isinstance(module, (BinaryLayer, FrozenLayer)):
            binary = module.has_binary_weights
            layers.append(_layer_summary(name, module, binary, str(module.method)))
        elif isinstance(module, (Int8Layer, FrozenInt8Layer)):
            layers.append(_layer_summary(name, module, False, "int8"))
        elif isinstance(module, MULTIPLYING) and not inside_binarizer(name):
            layers.append(_layer_summary(name, module, False, "float"))
    return layers


def _layer_summary(name: str, module: nn.Module, binary: bool, reason: str) -> LayerSummary:
    return LayerSummary(name, type(module).__name__, _weights(module), binary, reason)


def _weights(module: nn.Module) -> int:
    """Attention and recurrent layers have several weights under other names; biases are vectors."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return 0 if is_lazy(weight) else weight.numel()  # not known yet
    return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)


def _report(method: Method, layers: ModelSummary) -> str:
    binary = [layer for layer in layers if layer.reason not in ("float", "int8")]
    lines = [
        f"binarized {len(binary)} layers ({sum(layer.weights for layer in binary):,} weights) with {method}: "
        + ", ".join(layer.name or layer.kind for layer in binary)
    ]
    for reason, words in (("int8", "8 bits"), ("float", "kept float")):
        kept = [layer for layer in layers if layer.reason == reason]
        if kept:
            lines.append(
                f"{words}: {', '.join(layer.name for layer in kept)} "
                f"({sum(layer.weights for layer in kept):,} weights)"
            )
    return "\n".join(lines)


def load_twin(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load the weights of a float twin, or of the same network binarized by another method.

    Works in both directions. All weights outside of the method's state are copied and must fit. Of the method's state:

    - weight binarizers (mapping networks, for instance) stay as they are, except what they name in ``carried``, and
      what starts from the weights (ReBNN's scales, SURGE's branches);
    - the state of inputs, activations and shortcuts (ReActNet's shifts) is copied if the other network has the same;
    - so is the learned state of a base method that another method wraps (ReCU's scales). The outer method does not
      train it, so a warning names what the other network lacks.
    """
    if isinstance(state_dict, nn.Module):
        raise TypeError(
            f"state_dict is a model ({type(state_dict).__name__}); pass its state_dict() instead"
        )
    _refuse_wrapped(model, state_dict)
    frozen = next(
        (k for k in state_dict if k.endswith("bits") and k[:-4] + "scales" in state_dict), None
    )
    if frozen:
        raise ValueError(
            f"the state dict is of a frozen model (it has {frozen!r}): its latent weights are gone. Load the state "
            "dict from before unflip.freeze"
        )
    state = {k: v for k, v in state_dict.items() if not inside_binarizer(k)}
    own = {k: v for k, v in model.state_dict().items() if inside_binarizer(k)}
    carried = {
        f"{name}.weight_binarizer.{part}".removeprefix(".")
        for name, layer in binary_layers(model)
        for part in layer.weight_binarizer.carried
    }
    found = {key: _in_twin(key, value, state_dict, carried) for key, value in own.items()}
    model.load_state_dict({**state, **own, **{k: v for k, v in found.items() if v is not None}})
    _warn_of_bases([key for key, value in found.items() if _BASE in key and value is None])
    for _, layer in binary_layers(model):
        layer.weight_binarizer.latent_replaced(layer.weight)
    tensors = model.state_dict()
    for key in carried:  # what was derived from the new weights gives way to the other network's
        value = found.get(key)
        if value is not None:
            tensors[key].copy_(value)


WRAPPERS = {"module.": "DistributedDataParallel or DataParallel", "_orig_mod.": "torch.compile"}


def _refuse_wrapped(model: nn.Module, state_dict: object) -> None:
    """Refuse what custom checkpoints often hold instead of a state dict; torch would list every name twice."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict is {state_dict!r:.80}; it should map names to tensors, as torch.load(file, weights_only=True) "
            "or safetensors.torch.load_file(file) return them"
        )
    inside = [key for key, value in state_dict.items() if isinstance(value, Mapping)]
    if inside:
        which = " or ".join(f"state_dict[{key!r}]" for key in inside)
        raise ValueError(f"state_dict holds a state dict and more: pass {which}")
    for prefix, wrapper in WRAPPERS.items():
        every = bool(state_dict) and all(key.startswith(prefix) for key in state_dict)
        if every and not any(key.startswith(prefix) for key in model.state_dict()):
            raise ValueError(
                f"every name in state_dict begins with {prefix!r}, which {wrapper} adds: pass "
                f"{{k.removeprefix({prefix!r}): v for k, v in state_dict.items()}}"
            )


def _in_twin(
    key: str, own: Tensor, state_dict: Mapping[str, Tensor], carried: set[str]
) -> Tensor | None:
    """The twin's tensor for an entry of the method's state; None if the entry stays as it is."""
    if _BASE in key:  # the twin may be wrapped too, or have the base method alone
        places = [key, key.replace(_BASE, "weight_binarizer.")]
    else:
        stays = "weight_binarizer" in key.split(".") and key not in carried
        places = [] if stays else [key]
    fitting = (state_dict[p] for p in places if p in state_dict)
    return next((value for value in fitting if value.shape == own.shape), None)


def _warn_of_bases(keys: list[str]) -> None:
    if keys:
        warnings.warn(
            f"the state dict has nothing that fits {', '.join(keys)}: this state of the base method is learned, and "
            "the method around it does not train it, so it stays as it is. Load it from a network trained with the "
            "base method.",
            stacklevel=3,
        )


@torch.no_grad()
def signs(model: nn.Module) -> dict[str, Tensor]:
    """The signs of every layer with binary weights, as int8: :func:`flip_rate` compares them."""
    layers: list[tuple[str, BinaryLayer | FrozenLayer]] = []
    layers += ((name, layer) for name, layer in binary_layers(model) if layer.has_binary_weights)
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
    flipped = torch.stack(
        [(old[n] != new[n]).sum() for n in old]
    ).tolist()  # one transfer from a GPU
    return {n: (count, new[n].numel()) for n, count in zip(old, flipped, strict=True)}
