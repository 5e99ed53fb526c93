"""Losses for labels that are wrong at a known rate; LNS supervises its mapping networks with one of them.

All losses are element-wise functions of q̂, the prediction before the sign, and q̃ = ±1, the noisy label. A label that
should be +1 is −1 at the rate ρ₊, and a label that should be −1 is +1 at the rate ρ₋. A rate is a number, or a tensor
with a value per weight. ρ[q̃] is the rate for the label's own sign, ρ[−q̃] for the other; D = 1 − ρ₊ − ρ₋.

All losses but the first use probabilities: p = σ(k q̂) is the probability that the clean label is +1. With the margin
s = k q̂ q̃, the probability of the label itself is σ(s), and its cross entropy is c(s) = −log σ(s) = log(1 + e^(−s)).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from unflip.methods.base import can_be_read

Rate = float | Tensor


def check_rates(rho_plus: float, rho_minus: float) -> None:
    """Raise for rates at which the labels carry no information: the corrections divide by 1 − ρ₊ − ρ₋."""
    for name, rho in (("rho_plus", rho_plus), ("rho_minus", rho_minus)):
        if not 0 <= rho < 1:
            raise ValueError(f"{name}={rho} should be a probability, 0 <= {name} < 1")
    if not rho_plus + rho_minus < 1:
        raise ValueError(
            f"rho_plus={rho_plus} and rho_minus={rho_minus} add up to {rho_plus + rho_minus}; "
            "the loss is unbiased only for rho_plus + rho_minus < 1"
        )


def _rates(
    q_hat: Tensor, q_noisy: Tensor, rho_plus: Rate, rho_minus: Rate
) -> tuple[Tensor, Tensor]:
    """(ρ[q̃], ρ[−q̃])."""
    if not isinstance(rho_plus, Tensor) and not isinstance(rho_minus, Tensor):
        check_rates(rho_plus, rho_minus)
    elif q_hat.device.type == "cpu" and can_be_read(q_hat):  # a GPU would wait
        rates = (torch.as_tensor(rho, dtype=torch.float64) for rho in (rho_plus, rho_minus))
        plus, minus = torch.broadcast_tensors(*rates)
        worst = int((plus + minus).argmax())  # of one weight: the largest rates may be of two
        check_rates(float(plus.flatten()[worst]), float(minus.flatten()[worst]))
    # In the precision of q̂: where() with two Python numbers would round them to float32.
    positive = (q_noisy > 0).to(q_hat.dtype)
    same = positive * rho_plus + (1 - positive) * rho_minus
    other = positive * rho_minus + (1 - positive) * rho_plus
    return same, other


def unbiased_loss(q_hat: Tensor, q_noisy: Tensor, rho_plus: Rate, rho_minus: Rate) -> Tensor:
    """[(1 − ρ[−q̃]) (q̂ − q̃)² − ρ[q̃] (q̂ + q̃)²] / D: the loss of the LNS paper.

    Natarajan et al., Learning with Noisy Labels, NeurIPS 2013, on the squared loss. Its mean over flipped labels is
    (q̂ − q)² for the clean ones.
    """
    same, other = _rates(q_hat, q_noisy, rho_plus, rho_minus)
    agree, disagree = (q_hat - q_noisy) ** 2, (q_hat + q_noisy) ** 2
    return ((1 - other) * agree - same * disagree) / (1 - rho_plus - rho_minus)


def forward_loss(
    q_hat: Tensor, q_noisy: Tensor, rho_plus: Rate, rho_minus: Rate, sharpness: float
) -> Tensor:
    """−log p̃, p̃ = (1 − ρ[q̃]) σ(s) + ρ[−q̃] σ(−s): the probability of observing the label.

    Patrini et al., Making Deep Neural Networks Robust to Label Noise, CVPR 2017, arXiv:1609.03683. Disagreeing with
    a label costs at most −log ρ[−q̃], and the gradient vanishes there, so a wrong label can be ignored.
    """
    same, other = _rates(q_hat, q_noisy, rho_plus, rho_minus)
    margin = sharpness * q_hat * q_noisy
    kept = torch.log1p(-same) + F.logsigmoid(margin)
    flipped = torch.log(other) + F.logsigmoid(-margin)
    return -torch.logaddexp(kept, flipped)


def backward_loss(
    q_hat: Tensor, q_noisy: Tensor, rho_plus: Rate, rho_minus: Rate, sharpness: float
) -> Tensor:
    """[(1 − ρ[−q̃]) c(s) − ρ[q̃] c(−s)] / D = c(s) − ρ[q̃] s / D: the unbiased loss for cross entropy.

    Patrini et al., CVPR 2017. The second form follows from c(−s) = c(s) + s. The correction only pushes every q̂
    further in the direction of its label, and for ρ > 0 the loss has no lower bound.
    """
    same, _ = _rates(q_hat, q_noisy, rho_plus, rho_minus)
    margin = sharpness * q_hat * q_noisy
    return -F.logsigmoid(margin) - same * margin / (1 - rho_plus - rho_minus)


def generalized_cross_entropy(
    q_hat: Tensor, q_noisy: Tensor, sharpness: float, q: float = 0.7
) -> Tensor:
    """(1 − σ(s)^q) / q: cross entropy for q → 0, 1 − σ(s) (the mean absolute error) for q = 1.

    Zhang and Sabuncu, NeurIPS 2018, arXiv:1805.07836, without their truncation; q = 0.7 is theirs.
    """
    return -torch.expm1(q * F.logsigmoid(sharpness * q_hat * q_noisy)) / q


def symmetric_cross_entropy(
    q_hat: Tensor, q_noisy: Tensor, sharpness: float, alpha: float = 0.1, beta: float = 1.0
) -> Tensor:
    """α c(s) + 4 β σ(−s): cross entropy plus reverse cross entropy, with log 0 := −4 for a label of probability 0.

    Wang et al., Symmetric Cross Entropy for Robust Learning with Noisy Labels, ICCV 2019, arXiv:1908.06112. α and β
    are those of the released code for CIFAR-10, which has log 1e-4 instead of −4.
    """
    margin = sharpness * q_hat * q_noisy
    return -alpha * F.logsigmoid(margin) + 4 * beta * torch.sigmoid(-margin)


def smoothed_cross_entropy(
    q_hat: Tensor, q_noisy: Tensor, sharpness: float, smoothing: float = 0.1
) -> Tensor:
    """(1 − ε/2) c(s) + ε/2 c(−s) = c(s) + ε s / 2: the target probability of the label is 1 − ε/2, not 1.

    Szegedy et al., CVPR 2016, arXiv:1512.00567. The opposite of ``backward_loss``: it equals that loss with
    ρ / D = −ε/2 (Lukasik et al., ICML 2020, arXiv:2003.02819).
    """
    margin = sharpness * q_hat * q_noisy
    return -F.logsigmoid(margin) + smoothing / 2 * margin


def check_loss_options(
    sharpness: float, gce_q: float, sce_alpha: float, sce_beta: float, smoothing: float
) -> None:
    """Raise for a value with which one of the losses is not defined."""
    if not (sharpness > 0 and math.isfinite(sharpness)):
        raise ValueError(f"sharpness={sharpness} should be a finite number > 0")
    if not 0 < gce_q <= 1:
        raise ValueError(f"gce_q={gce_q} should be in 0 < gce_q <= 1")
    for name, value in (("sce_alpha", sce_alpha), ("sce_beta", sce_beta)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value} should be a finite number >= 0")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing={smoothing} should be in 0 <= smoothing < 1")
