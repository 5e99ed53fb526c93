"""Every kernel is compared with torch on the network at hand before it is used.

The layers are compared one by one, on their inputs in a training step: a whole binary network is chaotic, so two right
implementations soon differ. A comparison also tunes the kernels, which must happen before a CUDA graph is captured. A
:class:`Mismatch`, or any error of a kernel, means that the kernel is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unflip import layers
from unflip.kernels import stem_conv
from unflip.kernels.attach import attached
from unflip.kernels.mapping import predict_together
from unflip.layers import BinaryConv2d, binary_layers
from unflip.methods.mapping_network import MappingNetwork

State = dict[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """A network in training, and how to try a step with it."""

    model: nn.Module
    half: bool  # whether it trains in half precision
    family: (
        str  # networks (and inputs) of one family are the same for a kernel: one of them is checked
    )
    forward: Callable[[], object]  # a training forward pass
    snapshot: Callable[[], State]
    restore: Callable[[State], None]

    def run(self) -> None:
        """A forward pass that leaves nothing behind."""
        state = self.snapshot()
        try:
            self.forward()
        finally:
            self.restore(state)


class Mismatch(RuntimeError):
    """A kernel's result differs from torch's."""


def check_product(trial: Trial) -> None:
    """Compare the binary layers with their ``fused_product`` and without."""
    binary = dict(binary_layers(trial.model))
    for name, x in _inputs(trial, binary).items():
        fused = _values_and_gradients(binary[name], x.requires_grad_())
        with attached([binary[name]], fused_product=None):
            plain = _values_and_gradients(binary[name], x)
        _compare(name, fused, plain)


def check_stems(trial: Trial, networks: int) -> None:
    """Compare the first convolutions by our kernels and by cuDNN."""
    stems = stem_conv.stems(trial.model)
    for name, x in _inputs(trial, stems).items():
        with stem_conv.by_kernel([stems[name]], networks):
            ours = _values_and_gradients(stems[name], x)
        _compare(name, ours, _values_and_gradients(stems[name], x))


def check_norm(trial: Trial, kernel: layers.FusedNorm) -> None:
    """Compare the operations after each binary convolution by ``kernel`` and by torch."""
    calls, state = _calls_of_normalized(trial), trial.snapshot()
    try:
        for conv, *others in calls:
            with attached([conv], fused_norm=kernel):
                ours = _normalized_values(conv, *others)
            trial.restore(state)
            plain = _normalized_values(conv, *others)  # rounds to half in between
            _compare(f"the norm after {conv.path}", ours, plain, tolerance=0.03)
            trial.restore(state)
    finally:
        trial.restore(state)


def check_mapping(
    mapped: Mapping[str, Any],
    fused: layers.FusedPredict,
    forward: float = 3e-5,
    backward: float = 0.01,
    attempts: int = 4,
) -> None:
    """Compare predictions of layers by ``fused`` with :func:`predict_together`, in value and gradient.

    The value must have the precision of float32: TF32 would be off by ten times ``forward``. The gradient of a right
    kernel may be off: if a hidden value within rounding of zero falls on the other side of its ReLU, the gradients of a
    small layer change by 1 to 3 % (those of float32 against float64 too). Other attempts, with slightly different
    latent weights, tell the two cases apart: a wrong kernel is wrong there as well.
    """
    if not mapped:
        return
    names, weights = list(mapped), [layer.weight for layer in mapped.values()]
    mappings = [layer.weight_binarizer.mapping for layer in mapped.values()]
    wrong: dict[str, str] = {}
    for attempt in range(attempts):
        moved = _moved(weights, 0.01 * attempt)
        found = _differences(names, moved, mappings, fused, forward, backward)
        wrong = {name: what for name, what in found.items() if attempt == 0 or name in wrong}
        if not wrong:
            return
    raise Mismatch(next(iter(wrong.values())))


# ------------------------------------------------------------------------------------------- layers


def _inputs(trial: Trial, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The last input of each module in a training step. Modules that are not called have none."""
    inputs: dict[str, Tensor] = {}
    if not modules:
        return inputs

    def remember(name: str, x: Tensor) -> None:
        inputs[name] = x.detach().requires_grad_(x.requires_grad)

    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: remember(name, args[0]))
        for name, module in modules.items()
    ]
    try:
        trial.run()
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def _values_and_gradients(layer: Any, x: Tensor) -> dict[str, Tensor]:
    """A layer's output, and for a fixed probe the gradients of its weight and, if required, of its input."""
    with torch.autocast(x.device.type, torch.float16, cache_enabled=False):
        y = layer(x)
    leaves = {"weight's gradient": layer.weight}
    if x.requires_grad:
        leaves["input's gradient"] = x
    grads = torch.autograd.grad((y.float() * _probe(y)).sum(), list(leaves.values()))
    return {"output": y.detach(), **dict(zip(leaves, grads, strict=True))}


def _calls_of_normalized(trial: Trial) -> list[tuple[Any, nn.Module, Any, Tensor, Tensor | None]]:
    """The modules and inputs of every call of ``layers.normalized`` with a binary convolution in a step."""
    calls = []

    def remember(conv: Any, activation: Any, batch_norm: Any, x: Tensor, shortcut: Any) -> None:
        leaf = x.detach().requires_grad_()
        carried = None if shortcut is None else shortcut.detach().requires_grad_()
        carried = leaf if shortcut is x else carried  # it matters whether they are the same tensor
        calls.append((conv, activation, batch_norm, leaf, carried))

    with attached(binary_convolutions(trial.model), fused_norm=remember):
        trial.run()
    return calls


def binary_convolutions(model: nn.Module) -> list[nn.Module]:
    return [layer for _, layer in binary_layers(model) if isinstance(layer, BinaryConv2d)]


def _normalized_values(
    conv: Any, activation: nn.Module, batch_norm: Any, x: Tensor, shortcut: Tensor | None
) -> dict[str, Tensor]:
    """Output, running statistics, and the gradients for a fixed probe."""
    with torch.autocast(x.device.type, torch.float16, cache_enabled=False):
        y = layers.normalized(conv, activation, batch_norm, x, shortcut)
    leaves = {
        "weight": conv.weight,
        "input": x,
        "BatchNorm": batch_norm.weight,
        "shift": batch_norm.bias,
    }
    leaves |= {"shortcut": shortcut} if shortcut is not None and shortcut is not x else {}
    parameters = dict(activation.named_parameters())
    # BatchNorm subtracts this shift again: its gradient is only rounding.
    parameters.pop("adapted.after", None)
    leaves |= {f"activation's {name}": parameter for name, parameter in parameters.items()}
    grads = torch.autograd.grad((y.float() * _probe(y)).sum(), list(leaves.values()))
    values = {"output": y, "mean": batch_norm.running_mean, "variance": batch_norm.running_var}
    values = {name: value.detach().clone() for name, value in values.items()}
    return values | {f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}


def _probe(y: Tensor) -> Tensor:
    return _noise([y], seed=0, dtype=torch.float32)[0]


def _compare(
    name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 0.01
) -> None:
    for what, b in expected.items():
        problem = _difference(found[what].float(), b.float(), tolerance)
        if problem is not None:
            raise Mismatch(f"{what} of {name} {problem}")


def _difference(found: Tensor, expected: Tensor, tolerance: float) -> str | None:
    error, norm = (found - expected).norm().item(), expected.norm().item()
    if error <= tolerance * norm:  # False for a NaN
        return None
    return f"is off by {error:.3g} (norm {norm:.3g})"


# ----------------------------------------------------------------------------------------- mappings


def _moved(weights: Sequence[Tensor], share: float) -> list[Tensor]:
    """Leaves near the weights, moved by a share of their standard deviation."""
    moved = []
    for weight, noise in zip(weights, _noise(weights, seed=1), strict=True):
        moved.append((weight.detach() + share * weight.detach().std() * noise).requires_grad_())
    return moved


def _differences(
    names: Sequence[str],
    weights: Sequence[Tensor],
    mappings: Sequence[MappingNetwork],
    fused: layers.FusedPredict,
    forward: float,
    backward: float,
) -> dict[str, str]:
    """The layers where the kernels differ from the plain path, and how."""
    ours = _predictions_and_gradients(fused(mappings, weights), mappings, weights)
    alone = [
        predict_together([mapping], [weight])[0]
        for mapping, weight in zip(mappings, weights, strict=True)
    ]
    plain = _predictions_and_gradients(alone, mappings, weights)
    different: dict[str, str] = {}
    for name, found, expected in zip(names, ours, plain, strict=True):
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            problem = _difference(a, b, backward if number else forward)
            if problem is not None:
                what = f"gradient {number}" if number else "prediction"
                different.setdefault(name, f"{what} of {name} {problem}")
    return different


def _predictions_and_gradients(
    predictions: Sequence[Tensor], mappings: Sequence[MappingNetwork], weights: Sequence[Tensor]
) -> list[list[Tensor]]:
    """For each layer: f(W), and the gradients of W and of the mapping's parameters for a fixed probe."""
    leaves = [[w, *m.parameters()] for w, m in zip(weights, mappings, strict=True)]
    probes = _noise(predictions, seed=0)
    total = sum((p * probe).sum() for p, probe in zip(predictions, probes, strict=True))
    assert isinstance(total, Tensor)
    grads = list(torch.autograd.grad(total, [leaf for group in leaves for leaf in group]))
    return [
        [p.detach(), *(grads.pop(0) for _ in group)]
        for p, group in zip(predictions, leaves, strict=True)
    ]


def _noise(like: Sequence[Tensor], seed: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The same in every run; torch's global generator is not used."""
    generator = torch.Generator(like[0].device).manual_seed(seed)
    return [
        torch.randn(t.shape, dtype=dtype or t.dtype, device=t.device, generator=generator)
        for t in like
    ]
