"""BinaryConv2d and BinaryLinear: torch's layers with binary weights and inputs.

One file of more than 400 lines, because trained and frozen layers must share how they multiply.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unflip.methods.base import (
    BinaryWeight,
    InputBinarizer,
    Method,
    Numbers,
    WeightBinarizer,
    can_be_read,
    check_shapes,
)
from unflip.methods.registry import resolve

# Kernels that ``unflip.kernels`` attaches to the layers of a model while it trains on a GPU. The first two return None
# for layers they do not cover.
# (layer, input, ±1 weights) -> their product, with the sign of the input fused into it
FusedProduct = Callable[[Any, Tensor, Tensor], Tensor | None]
# (convolution, activation, BatchNorm, input, shortcut) -> the result of :func:`normalized`
FusedNorm = Callable[[Any, nn.Module, nn.Module, Tensor, Tensor | None], Tensor | None]
# (networks that predict weights, latent weights) of several layers -> their predictions
FusedPredict = Callable[[Sequence[Any], Sequence[Tensor]], Sequence[Tensor]]

MIN_SAMPLES = 64  # fewer inputs may have one sign by chance

# Torch's layers that multiply with weights, with or without a binary form here.
MULTIPLYING = (
    nn.modules.conv._ConvNd,
    nn.Linear,
    nn.Bilinear,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)

EXACT_IN_HALF = 2048  # every integer up to this is a float16; the next one is not


class BinaryLayer(nn.Module):
    """Base of BinaryConv2d and BinaryLinear. ``weight`` holds the latent (float) weights."""

    weight: Tensor
    bias: Tensor | None
    method: Method
    weight_binarizer: WeightBinarizer
    input_binarizer: InputBinarizer
    has_binary_weights: bool = True  # False: the method binarizes only the inputs
    path: str = ""  # where the layer sits in its model; set by binarize, used in messages
    inputs_seen: bool = False  # whether _warn_if_all_alike has checked an input
    # None: plain PyTorch. Neither copies nor pickles of a layer keep a kernel.
    fused_product: FusedProduct | None = None
    fused_norm: FusedNorm | None = None
    fused_predict: FusedPredict | None = None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[misc, unused-ignore]
        for kernel in ("fused_product", "fused_norm", "fused_predict"):
            state.pop(kernel, None)
        return state

    def set_method(self, method: str | Mapping[str, Any] | Method) -> None:
        self.method = resolve(method)
        self.weight_binarizer = self.method.weight_binarizer(self)
        self.input_binarizer = self.method.input_binarizer(self)
        self.has_binary_weights = self.weight_binarizer.binary
        self.weight_binarizer.made_by = self.method.name
        self.weight_binarizer.train(self.training)
        self.input_binarizer.train(self.training)

    def binary_weight(self) -> Tensor:
        """The weight the layer multiplies with; differentiable."""
        self._refuse_nan(self.weight, "weight")
        return self.weight_binarizer(self.weight)

    @torch.no_grad()
    def code(self) -> BinaryWeight:
        """The discrete weights: scales and signs, without gradients."""
        code = self.weight_binarizer.code(self.weight)
        if not torch.compiler.is_compiling():
            check_shapes(self.weight_binarizer.title, code, self.weight)
        return code._replace(scales=code.scales.detach())  # scales may be a view of a parameter

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _output_view(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self._refuse_nan(x, "input")
        if not torch.compiler.is_compiling() and not self.inputs_seen:  # no guard if compiled
            self._warn_if_all_alike(x)
        weight = self.binary_weight()
        branch = self.weight_binarizer.gradient_branch(x, self)
        if branch is None:
            return multiply_binary(self, x, weight)
        x, nothing = branch
        y = multiply_binary(self, x, weight)
        return y + nothing.to(y.dtype)

    def _refuse_nan(self, tensor: Tensor, what: str) -> None:
        """Raise for NaN, which has no sign. On a GPU or compiled, where a check would stall, NaN stays NaN."""
        if can_be_read(tensor) and tensor.device.type == "cpu" and _has_nan(tensor.detach()):
            raise ValueError(f"{what} of layer {self._where()} has NaN, which has no sign")

    @torch.no_grad()
    def _warn_if_all_alike(self, x: Tensor) -> None:
        """Warn once if all inputs have one sign, as after a ReLU: the rest of the network then sees no image."""
        if not can_be_read(x) or x.numel() < MIN_SAMPLES or _constant(x):
            return
        self.inputs_seen = True
        binary = self.input_binarizer.deployed()(x)  # without the noise of some methods
        value = binary.flatten()[0].item()
        # All zeros are no mistake: before training, inputs may be too small to round to 1.
        if value and _constant(binary):
            warnings.warn(
                f"every input of layer {self._where()} binarizes to {value:g}, whatever the image, so the layer "
                f"with method {self.method} passes no information on. A ReLU before the layer has this effect. Remove "
                "it, or put BatchNorm directly before the layer; or use dorefa or hwgq, which are made for inputs "
                "after a ReLU",
                stacklevel=4,
            )

    def _where(self) -> str:
        return f"{self.path!r} ({type(self).__name__})" if self.path else repr(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, method={self.method}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})["method"] = self.method.family

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Name the method that made a foreign state dict; torch would only list keys."""
        problem = self._foreign_state(state_dict, prefix, local_metadata)
        if problem:
            error_msgs.append(
                f"layer {prefix[:-1]!r} has method {self.method}, but the state dict {problem}. Build "
                "the model with that method, or take over its latent weights with unflip.load_twin."
            )
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        # load_state_dict(state, assign=True) moves a model off the meta device; numbers are not in the state dict
        if not self.weight.is_meta:
            for module in self.modules():
                if isinstance(module, Numbers):
                    module.leave_meta(self.weight.device)

    def _foreign_state(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
    ) -> str | None:
        """What is wrong with a state dict, or None. Without torch's metadata (safetensors has none) a method is
        recognized by the names of its binarizers' tensors, if it has any."""
        if prefix + "bits" in state_dict:
            return "is of a frozen model, which has no latent weights"
        made_with = local_metadata.get("method")
        if made_with is not None and made_with != self.method.family:
            return f"was made with method {made_with}"
        parts = tuple(prefix + part for part in BINARIZER_PARTS)
        found = {key.removeprefix(prefix) for key in state_dict if key.startswith(parts)}
        own = {key for key in self.state_dict() if key.startswith(BINARIZER_PARTS)}
        if found - own:
            return f"holds the state of another method ({', '.join(sorted(found - own)[:3])}, ...)"
        if own - found:
            return f"lacks what this method needs ({', '.join(sorted(own - found)[:3])}, ...)"
        return None


def _has_nan(x: Tensor) -> bool:
    """A sum is fast, and NaN if a value is. It is NaN for +inf and -inf too, so then every value is looked at."""
    return bool(x.sum().isnan()) and bool(x.isnan().any())


BINARIZER_PARTS = ("weight_binarizer.", "input_binarizer.")


def inside_binarizer(name: str) -> bool:
    """Whether a parameter or module of this name belongs to the method, not to the network: it is in a binarizer, in
    the ``adapted`` part of a module that ``Method.adapt`` has inserted, or in the ``byte_input`` of an 8-bit layer."""
    own = ("weight_binarizer", "input_binarizer", "adapted", "byte_input")
    return any(part in own for part in name.split("."))


def _constant(x: Tensor) -> bool:
    return bool((x == x.flatten()[:1]).all())


AnyLayer = TypeVar("AnyLayer", bound=nn.Module)


def twin_of(layer: nn.Module, kind: type[AnyLayer]) -> AnyLayer:
    """A layer of another kind that shares this one's parameters, buffers, hooks and settings."""
    twin = kind.__new__(kind)
    twin.__dict__.update(layer.__dict__)
    twin.__dict__.pop("_compiled_call_impl", None)  # compiled code of the old kind
    return twin


def become(layer: nn.Module, twin: nn.Module) -> None:
    """Turn a layer into its twin in place, so that every reference to the layer refers to the twin."""
    layer.__class__ = type(twin)
    object.__setattr__(layer, "__dict__", twin.__dict__)


def warn_idle(names: list[str], so: str) -> None:
    """Warn of binary layers that the forward pass does not call; ``so`` is the consequence."""
    if names:
        warnings.warn(
            f"binary layers that the forward pass does not call: {', '.join(names)}; {so}. If it uses the weight of "
            "such a layer directly (F.conv2d(x, layer.weight)), training is not binary: call the layer instead",
            stacklevel=3,
        )


def multiply_binary(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    """Binary input times binary weight, times the method's output factor if it has one.

    Trained and frozen layers share this function, so they cannot differ. Under autocast to float16, products of −1, 0
    and +1 are exact. Other values (AdaBin's, those of several bits) are few, and each is rounded to float16 once: the
    same error for all images. Under autocast to bfloat16 the product is computed in full precision.
    """
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or not layer.has_binary_weights:
        return _multiply(layer, x, weight)
    half = in_half(x)
    with torch.autocast(device, enabled=False):
        scale = scale_of_units(layer, weight) if half else None
        if scale is not None:
            return _multiply_in_half(layer, x, weight, scale)
        return _multiply(layer, x.to(weight.dtype), weight, torch.float16 if half else None)


def in_half(x: Tensor) -> bool:
    """Whether autocast asks for products with ``x`` in float16."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16


def scale_of_units(layer: Any, weight: Tensor) -> Tensor | None:
    """The scale of the weights if the layer multiplies signs with −1, 0 and +1, which half precision holds; otherwise
    None."""
    if not layer.has_binary_weights:
        return None
    code = layer.code()
    exact = len(code.scales) == 1 and code.offset is None
    return code.scales[0] if exact and layer.input_binarizer.unit else None


def _multiply(layer: Any, x: Tensor, weight: Tensor, rounded: Any = None) -> Tensor:
    """The product of the binary values, which are rounded to another type first if one is given."""
    scale = layer.input_binarizer.output_scale(x, layer)
    factors: Any = layer.input_binarizer(x), weight, layer.bias
    if rounded is not None:
        factors = (None if value is None else value.to(rounded) for value in factors)
    binary, weight, bias = factors
    if scale is None:
        return layer._multiply(binary, weight, bias)
    y = layer._multiply(binary, weight, None) * scale.to(binary.dtype)
    return y if bias is None else y + layer._output_view(bias)


def _multiply_in_half(layer: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The product of signs, with the scale applied after it. The result has the type of that product."""
    product = product_of_units(layer, x, weight, scale)
    y = product * layer._output_view(scale.flatten())
    factor = layer.input_binarizer.output_scale(x.to(weight.dtype), layer)
    y = y if factor is None else y * factor
    y = y if layer.bias is None else y + layer._output_view(layer.bias)
    return y.to(product.dtype)


def product_of_units(layer: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A sum of values of −1, 0 and +1, exact: in float32 if there are too many for float16.

    The products are accumulated in float32. Weights are always binarized in full precision (half could change a
    sign).
    """
    unit = units(weight, scale)
    fused = layer.fused_product if isinstance(layer, BinaryLayer) else None
    y = fused(layer, x, unit) if fused is not None else None
    if y is None:
        holds = torch.float16 if weight[0].numel() <= EXACT_IN_HALF else torch.float32
        y = layer._multiply(layer.input_binarizer(x).to(holds), unit.to(holds), None)
    return y


def units(weight: Tensor, scale: Tensor) -> Tensor:
    """Q / E: exactly ±1, with the gradient of Q. In a filter of zeros E = 0; a learned E may be negative."""
    tiny = torch.finfo(scale.dtype).tiny
    return weight / scale.masked_fill(scale.abs() < tiny, tiny)


def normalized(
    conv: nn.Module,
    activation: nn.Module,
    norm: nn.Module,
    x: Tensor,
    shortcut: Tensor | None = None,
) -> Tensor:
    """``norm(activation(conv(x)))``, plus the shortcut if there is one."""
    fused = conv.fused_norm if isinstance(conv, BinaryLayer) else None
    y = None if fused is None else fused(conv, activation, norm, x, shortcut)
    if y is not None:
        return y
    y = norm(activation(conv(x)))
    return y if shortcut is None else y + shortcut


class ConvProduct:
    """How a convolution multiplies; shared by trained and frozen layers."""

    def _multiply(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, weight, bias)

    def _output_view(self, values: Tensor) -> Tensor:
        """One value per output channel, or one for all, in a shape that broadcasts over the output."""
        return values[:, None, None]


class LinearProduct:
    """How a linear layer multiplies; shared by trained and frozen layers."""

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight, bias)

    def _output_view(self, values: Tensor) -> Tensor:
        """One value per output, or one for all, in a shape that broadcasts over the output."""
        return values


class BinaryConv2d(ConvProduct, BinaryLayer, nn.Conv2d):
    """``nn.Conv2d`` with binary weights and inputs. Zero padding stays zero, not ±1."""

    def __init__(
        self, *args: Any, method: str | Mapping[str, Any] | Method = "dorefa", **kwargs: Any
    ) -> None:
        nn.Conv2d.__init__(self, *args, **kwargs)
        self.set_method(method)


class BinaryLinear(LinearProduct, BinaryLayer, nn.Linear):  # type: ignore[misc]
    """``nn.Linear`` with binary weights and inputs."""

    def __init__(
        self, *args: Any, method: str | Mapping[str, Any] | Method = "dorefa", **kwargs: Any
    ) -> None:
        nn.Linear.__init__(self, *args, **kwargs)
        self.set_method(method)


def binary_layers(model: nn.Module) -> Iterator[tuple[str, BinaryLayer]]:
    """(name, layer) of every trainable binary layer in the model."""
    for name, module in model.named_modules():
        if isinstance(module, BinaryLayer):
            yield name, module


def auxiliary_loss(model: nn.Module) -> Tensor:
    """The auxiliary loss of the methods, summed over the layers; zero if no layer has one."""
    losses = auxiliary_losses(model)
    if losses:
        return torch.stack(list(losses.values())).sum()
    parameter = next(model.parameters(), None)
    return torch.zeros((), device=None if parameter is None else parameter.device)


def auxiliary_losses(model: nn.Module) -> dict[str, Tensor]:
    """The auxiliary loss of each layer that has one."""
    losses = {n: m.weight_binarizer.auxiliary_loss(m.weight) for n, m in binary_layers(model)}
    return {name: loss for name, loss in losses.items() if loss is not None}


def start_epoch(model: nn.Module, epoch: int, epochs: int) -> None:
    """Call before epoch 0 .. epochs − 1, for methods with a schedule."""
    if not 0 <= epoch < epochs:
        raise ValueError(f"epoch={epoch} should be from 0 to epochs − 1, and epochs={epochs}")
    for _, layer in binary_layers(model):
        layer.weight_binarizer.start_epoch(epoch, epochs)
        layer.input_binarizer.start_epoch(epoch, epochs)


def before_step(model: nn.Module) -> None:
    """Call before every optimizer step, for methods that change the gradients of their latent weights."""
    for _, layer in binary_layers(model):
        layer.weight_binarizer.before_step(layer.weight)


def after_step(model: nn.Module) -> None:
    """Call after every optimizer step, for methods that clip or center their latent weights."""
    for _, layer in binary_layers(model):
        layer.weight_binarizer.after_step(layer.weight)


def state_restored(model: nn.Module) -> None:
    """Call after the model's tensors were filled in place from a checkpoint, without ``load_state_dict``."""
    for _, layer in binary_layers(model):
        layer.weight_binarizer.restored()
