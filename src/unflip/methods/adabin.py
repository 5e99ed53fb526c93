"""AdaBin: Improving Binary Neural Networks with Adaptive Binary Sets.

Tu et al., ECCV 2022, arXiv:2208.08084.

The two values are not −1 and +1 but β − α and β + α: a center β and half of their distance, α.

Weights     Q = α · sign(Ŵ) + β, Ŵ = (W − β) / α;  β = mean(W), α = √mean((W − β)²) per filter
            ∂Q/∂Ŵ = α · max(1, t) · (1 − tanh²(t Ŵ)), ∂Q/∂α = sign(Ŵ), ∂Q/∂β = 1, and from there to W
            t = 10^(−3 + 4 · epoch / epochs)                     (IR-Net's estimator and schedule)
Inputs      B = α · sign(z) + β, z = (x − β) / α, with α and β learned per layer, starting at 1 and 0
            ∂B/∂x = a(z), ∂B/∂α = sign(z) − a(z) z, ∂B/∂β = 1 − a(z);  a(z) = max(0, 2 − 2|z|)
            center="scaled": B = α · (sign(z) + β) with the same z, as in the authors' code;
            ∂B/∂α = sign(z) + β − a(z) z, ∂B/∂β = α − a(z)
Activation  Maxout: y = γ₊ max(x, 0) + γ₋ min(x, 0) with slopes learned per channel, starting at γ₊ = 1, γ₋ = ¼.
            It replaces every nn.PReLU of the network, whose slopes become γ₋ (unless maxout=False)

In the discrete form β is the ``offset``: one number per filter, not a second bit per weight.

Differences from the authors' code: the center of inputs is β, as in the paper; their code has α (sign(z) + β), with
center αβ. center="scaled" is for their checkpoints. Their Maxout comes after BatchNorm and the addition of a shortcut.
Ours stands where the network has its PReLU, which is the same place in ``resnet18(variant="adabin")`` and
``resnet20(order="adabin", shortcut="conv")``; a network without PReLU gets no Maxout. γ₊ is state of the method, under
``adapted``. In a filter of equal weights α is nearly 0 and only the mean has a gradient; their code divides 0 by 0.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, InputCode, Method, WeightBinarizer
from unflip.methods.pieces import at_least_float32, one_step_code, parabolic_sign, replace_prelus
from unflip.methods.registry import register
from unflip.ste import sign, straight_through


class AdaptiveSet(WeightBinarizer):
    sharpness: Tensor  # t

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.hold("sharpness", 1e-3, like)

    def moments(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """β and α of each filter, in a shape that broadcasts over the weight.

        α² is at least the least normal number, so that nothing is divided by 0; below that its gradient is 0.
        """
        filters = at_least_float32(weight).flatten(1)
        beta = filters.mean(1, keepdim=True)
        variance = (filters - beta).square().mean(1, keepdim=True)
        alpha = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        shape = (-1, *[1] * (weight.dim() - 1))
        return beta.view(shape), alpha.view(shape)

    def code(self, weight: Tensor) -> BinaryWeight:
        beta, alpha = self.moments(weight)
        signs = sign(at_least_float32(weight) - beta).to(weight.dtype)
        return BinaryWeight(signs[None], alpha[None].to(weight.dtype), beta.to(weight.dtype))

    def surrogate(self, weight: Tensor) -> Tensor:
        beta, alpha = self.moments(weight)
        normal = (at_least_float32(weight) - beta) / alpha
        t = self.sharpness.to(normal.dtype)
        slope = (t.clamp_min(1) * (1 - torch.tanh(t * normal) ** 2)).detach()
        through = alpha.detach() * slope * normal + alpha * sign(normal).detach() + beta
        return through.to(weight.dtype)

    def start_epoch(self, epoch: int, epochs: int) -> None:
        self.set_number("sharpness", 10 ** (-3 + 4 * epoch / epochs))


class AdaptiveInputs(InputBinarizer):
    unit = False

    def __init__(self, like: Tensor, scaled: bool = False) -> None:
        super().__init__()
        self.scaled = scaled
        self.distance = nn.Parameter(like.new_tensor(1.0))
        self.centre = nn.Parameter(like.new_tensor(0.0))  # its name is part of saved state dicts

    def forward(self, x: Tensor) -> Tensor:
        alpha, beta = at_least_float32(self.distance), at_least_float32(self.centre)
        z = (at_least_float32(x) - beta) / alpha
        binary = straight_through(sign(z), parabolic_sign(z))
        both = alpha * (binary + beta) if self.scaled else alpha * binary + beta
        return both.to(x.dtype)

    def code(self) -> InputCode:
        return one_step_code(self)


class PositiveSlopes(nn.Module):
    """Maxout's γ₊."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.positive = nn.Parameter(torch.ones_like(slopes))


class Maxout(nn.PReLU):
    """PReLU with learned slopes on both sides; ``weight`` holds the negative ones, as in nn.PReLU."""

    def __init__(self, prelu: nn.PReLU) -> None:
        slopes = prelu.weight
        super().__init__(prelu.num_parameters, device=slopes.device, dtype=slopes.dtype)
        self.weight = slopes  # the same parameter: hooks and optimizers that hold it stay valid
        self.adapted = PositiveSlopes(slopes)
        self.train(prelu.training)

    def forward(self, x: Tensor) -> Tensor:
        view = (-1, *[1] * (x.dim() - 2))  # channels are dimension 1, as for nn.PReLU
        return self.adapted.positive.view(view) * x.relu() - self.weight.view(view) * (-x).relu()


@register("adabin")
@dataclass(frozen=True)
class AdaBin(Method):
    """Two free values per filter (from its mean and deviation) and per layer's inputs (learned)."""

    maxout: bool = True
    center: Literal["free", "scaled"] = "free"

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        assert isinstance(layer.weight, Tensor)
        return AdaptiveSet(layer.weight)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        assert isinstance(layer.weight, Tensor)
        return AdaptiveInputs(layer.weight, self.center == "scaled")

    def adapt(self, model: nn.Module) -> None:
        if self.maxout:
            replace_prelus(model, Maxout)
