"""The options of LNS, and which values they may have. See ``lns.py`` for the formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from unflip.methods.base import Method
from unflip.methods.mapping_network import Output, Statistics
from unflip.methods.noisy_labels import check_loss_options, check_rates
from unflip.methods.registry import resolve


@dataclass(frozen=True)
class LNSOptions(Method):
    """Options of LNS, checked."""

    base: str | Mapping[str, Any] | Method = "dorefa"
    alpha: float = 1.0
    rho_plus: float = 0.005
    rho_minus: float = 0.005
    loss_on: Literal["before_sign", "after_sign"] = "before_sign"
    reduction: Literal["mean", "sum"] = "mean"
    labels: Literal["following", "frozen"] = "following"
    gradient: Literal["identity", "clipped"] = "identity"
    # which gradient of the task W and θ get; see lns.py
    task_gradient: Literal["through_f", "straight_through", "both"] = "through_f"
    mapping: Literal["plain", "residual"] = "plain"
    statistics: Statistics = "filters"
    output: Output = "linear"  # of f: q̂ itself, or tanh of it
    loss: Literal["unbiased", "forward", "backward", "gce", "sce", "smoothing"] = "unbiased"
    rates: Literal["given", "estimated"] = "given"
    sharpness: float = 2.0  # k of p = σ(k q̂), for every loss except "unbiased"
    gce_q: float = 0.7
    sce_alpha: float = 0.1
    sce_beta: float = 1.0
    smoothing: float = 0.1
    lr: float | None = (
        None  # peak learning rate of θ, times the recipe's schedule; None: the recipe's
    )
    warm_steps: int = 2000  # at most, per layer; 0: no warm start
    warm_lr: float = 1e-3
    # a layer's warm start ends when this share of its signs agrees; None: at no share
    warm_agreement: float | None = 0.9995
    # it also ends if the share has not risen for this many steps; None: it does not
    warm_patience: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rates(self.rho_plus, self.rho_minus)
        check_loss_options(
            self.sharpness, self.gce_q, self.sce_alpha, self.sce_beta, self.smoothing
        )
        if self.rates == "estimated" and self.loss not in ("unbiased", "forward", "backward"):
            raise ValueError(
                f"lns: loss={self.loss!r} does not use flip rates, but rates='estimated'; use rates='given'"
            )
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"lns: alpha={self.alpha!r} should be a finite number >= 0")
        self._check_training()
        self._check_base()

    def _check_training(self) -> None:
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(
                f"lns: lr={self.lr!r} should be a finite number > 0; leave it out to use the recipe's rate"
            )
        if self.warm_steps < 0:
            raise ValueError(
                f"lns: warm_steps={self.warm_steps!r} should be >= 0; 0 means no warm start"
            )
        if not 0 < self.warm_lr < math.inf:
            raise ValueError(
                f"lns: warm_lr={self.warm_lr!r} should be a finite number > 0; "
                "for no warm start set warm_steps=0"
            )
        if self.warm_agreement is not None and not 0.5 < self.warm_agreement <= 1:
            raise ValueError(
                f"lns: warm_agreement={self.warm_agreement!r} should be a share of signs, "
                "0.5 < warm_agreement <= 1, because chance alone gives 0.5; or null, to end at no share"
            )
        if self.warm_patience is not None and self.warm_patience < 1:
            raise ValueError(
                f"lns: warm_patience={self.warm_patience!r} should be a number of steps >= 1; "
                "leave it out to end only by warm_agreement or warm_steps"
            )

    def _check_base(self) -> None:
        object.__setattr__(self, "base", resolve(self.base))
        if isinstance(self.base, LNSOptions):
            raise ValueError(
                "lns: base='lns' would map a mapping; name the method that LNS corrects"
            )
        reason = self.base_method.unfit_for_lns
        if reason:
            raise ValueError(f"lns: base={self.base_method.name!r} does not work: {reason}")

    @property
    def base_method(self) -> Method:
        assert isinstance(self.base, Method)
        return self.base

    @property
    def family(self) -> str:
        """These options change the meaning of weights; all others affect training only."""
        meaning = [f"base={self.base_method.family}"]
        meaning += ["mapping=residual"] if self.mapping == "residual" else []
        meaning += ["statistics=fixed"] if self.statistics == "fixed" else []
        return f"lns({', '.join(meaning)})"
