"""ABC-Net: Towards Accurate Binary Convolutional Neural Network.

Lin et al., NeurIPS 2017, arXiv:1711.11294.

Weights     Q = Σ_i α_i B_i, i = 1 .. M, B_i = sign(W − mean(W) + u_i · std(W)), u_i evenly spaced in [−1, 1]
            α = argmin ‖W − Σ_i α_i B_i‖² (linear regression)
            over the whole layer or, with scope="filter", for each filter
            ∂L/∂W = Σ_i α_i · ∂L/∂Q                         (straight through; α and std are not differentiated)
Inputs      x ≈ Σ_j β_j A_j, j = 1 .. N, A_j = 2 · 1[clip(x + v_j, 0, 1) ≥ ½] − 1, v and β learned
            ∂L/∂x = Σ_j β_j · ∂L/∂(Σ β A) · 1[0 ≤ x + v_j ≤ 1], the same for each v_j
            ∂L/∂β_j = ∂L/∂(Σ β A) · A_j

The sets where B_i = +1 are nested, so the normal equations need no products of bases:
mean(B_i B_j) = 1 − |mean(B_i) − mean(B_j)|. If bases coincide, α is not unique. A ridge of 1e-8 then gives them equal
shares, which is the least-squares solution of smallest norm.

Differences from the authors' code: we found no published code. Our choices where the paper says nothing: std divides
by n; M = 1 has u = 0; v_j starts at ½ − t_j with N thresholds t evenly spaced inside (−1, 1), and β_j starts at 1/N.
Training so begins with a staircase from −1 to 1. (If all v_j started at one value, all A_j would stay equal.)
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unflip.methods.base import BinaryWeight, InputBinarizer, InputCode, Method, WeightBinarizer
from unflip.methods.pieces import at_least_float32, check_whole, least_float
from unflip.methods.registry import register
from unflip.ste import sign, straight_through
from unflip.vectorized import clip

Scope = Literal["layer", "filter"]

RIDGE = 1e-8  # added to the diagonal of matrices whose diagonal is 1


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve matrix · x = right for (..., M, M) positive definite and (..., M), by elimination.

    ``torch.linalg.solve`` reads its result back to the host, which a CUDA graph cannot capture.
    """
    rows = torch.cat([matrix, right.unsqueeze(-1)], -1)
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for k in range(matrix.shape[-1]):
        pivot = rows[..., k, :] / rows[..., k, k, None]
        factors = rows[..., :, k] - one[k]
        rows = rows - factors.unsqueeze(-1) * pivot.unsqueeze(-2)
    return rows[..., -1]


class ShiftedSigns(WeightBinarizer):
    """M shifted signs with scales by least squares."""

    def __init__(self, bases: int, scope: Scope) -> None:
        super().__init__()
        self.bases = bases
        self.scope = scope

    def code(self, weight: Tensor) -> BinaryWeight:
        precise = at_least_float32(weight)
        groups = precise.flatten()[None] if self.scope == "layer" else precise.flatten(1)
        centered = groups - groups.mean(1, keepdim=True)
        std = centered.square().mean(1, keepdim=True).sqrt()
        shifts = (
            [2 * i / (self.bases - 1) - 1 for i in range(self.bases)] if self.bases > 1 else [0]
        )
        signs = torch.stack([sign(centered + u * std) for u in shifts])  # bases, groups, n

        means = signs.mean(2, dtype=torch.float64).T
        products = 1 - (means[:, :, None] - means[:, None, :]).abs()
        ridge = RIDGE * torch.eye(self.bases, dtype=torch.float64, device=weight.device)
        alpha = solve(products + ridge, (signs * groups).mean(2, dtype=torch.float64).T)
        scales = alpha.T.reshape(self.bases, -1, *[1] * (weight.dim() - 1))
        return BinaryWeight(signs.view(-1, *weight.shape).to(weight.dtype), scales.to(weight.dtype))

    def surrogate(self, weight: Tensor) -> Tensor:
        return self.code(weight.detach()).scales.sum(0) * weight


class ShiftedInputs(InputBinarizer):
    """N shifted signs with learned shifts and scales."""

    unit = False

    def __init__(self, bases: int, like: Tensor) -> None:
        super().__init__()
        self.bits = bases
        thresholds = [(2 * j + 1) / bases - 1 for j in range(bases)]
        self.shifts = nn.Parameter(like.new_tensor([0.5 - t for t in thresholds]))
        self.scales = nn.Parameter(like.new_full((bases,), 1 / bases))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for shift, scale in zip(self.shifts.unbind(), self.scales.unbind(), strict=True):
            clipped = clip(x + shift, 0, 1)
            total = total + scale * straight_through(sign(clipped - 0.5), clipped)
        return total

    def code(self) -> InputCode:
        shifts, scales = self.shifts[:, None], self.scales.tolist()
        steps = least_float(lambda x: (x + shifts).clamp(0, 1) - 0.5 >= 0, shifts)
        return InputCode(
            steps, tuple(2 * scale for scale in scales), -sum(scales), (False,) * len(scales)
        )


@register("abc")
@dataclass(frozen=True)
class ABCNet(Method):
    """Several shifted signs for weights (scales by least squares) and inputs (learned)."""

    weight_bases: int = 5
    input_bases: int = 5
    scope: Scope = "layer"

    def __post_init__(self) -> None:
        for name in ("weight_bases", "input_bases"):
            check_whole(self.name, name, getattr(self, name), 1, 8)
        super().__post_init__()

    @property
    def binary_downsample(self) -> bool:
        return True

    @property
    def unfit_for_lns(self) -> str | None:
        if self.weight_bases == 1:
            return None
        return (
            f"it writes a weight as {self.weight_bases} signs, and LNS predicts one; "
            "use weight_bases=1"
        )

    def weight_binarizer(self, layer: nn.Module) -> WeightBinarizer:
        return ShiftedSigns(self.weight_bases, self.scope)

    def input_binarizer(self, layer: nn.Module) -> InputBinarizer:
        assert isinstance(layer.weight, Tensor)
        return ShiftedInputs(self.input_bases, layer.weight)
