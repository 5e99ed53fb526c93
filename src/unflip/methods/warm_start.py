"""LNS: the mapping networks learn the noisy labels before anything else is trained (see ``lns.py``)."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from unflip.layers import FusedPredict, binary_layers
from unflip.methods.lns_options import LNSOptions
from unflip.methods.mapped_sign import MappedSign, mapped_layers
from unflip.methods.mapping_network import FilterNorm, MappingNetwork
from unflip.ste import sign

CHECK_EVERY = 20  # steps; comparing signs makes the host wait for the device
EAGER_STEPS = 3  # before a step is captured: allocations and lazy state come first
Predict = Callable[[Tensor], Tensor]  # W -> f(W)
# Options with no influence on what a warm start learns. Its steps, rate and agreement are arguments.
LATER_OPTIONS = ("alpha", "labels", "loss_on", "reduction", "gradient", "task_gradient", "lr")
ENOUGH_AGREEMENT = 0.999  # below this share of signs a warm start warns
Ended = Literal["agreement", "patience", "steps"]  # what ended the warm start of a layer
Progress = Callable[[str, float, Ended], None]  # layer, agreement reached, what ended it


class Limits(NamedTuple):
    """When the warm start of a layer ends: at the first of these."""

    steps: int
    agreement: float | None
    patience: int | None


class WarmStartLog:
    """A ``progress`` for :func:`warm_start`: counts what ended it, and says at most every ``every`` seconds how far
    it is."""

    def __init__(self, say: Callable[[str], None], every: float = 10.0) -> None:
        self.say, self.every, self.said = say, every, time.monotonic()
        self.agreements: list[float] = []
        self.ended: Counter[Ended] = Counter()

    def __call__(self, name: str, agreement: float, ended: Ended) -> None:
        self.agreements.append(agreement)
        self.ended[ended] += 1
        if time.monotonic() - self.said >= self.every:
            self.said = time.monotonic()
            self.say(
                f"warm start: finished layer {len(self.agreements)} ({name}); its signs agree on {agreement:.4%}"
            )

    def summary(self) -> str:
        meanings: dict[Ended, str] = {
            "agreement": "reached warm_agreement",
            "patience": "stopped improving",
            "steps": "took all warm_steps",
        }
        ends = [f"{self.ended[end]} {text}" for end, text in meanings.items() if self.ended[end]]
        return (
            f"warm start: signs agree on {min(self.agreements):.4%} or more in each of "
            f"{len(self.agreements)} layers; of these, {', '.join(ends)}"
        )


def warm_start(
    model: nn.Module,
    steps: int = LNSOptions.warm_steps,
    lr: float = LNSOptions.warm_lr,
    agreement: float | None = LNSOptions.warm_agreement,
    patience: int | None = LNSOptions.warm_patience,
    progress: Progress | None = None,
    memo: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Teach each mapping network the noisy labels, with everything else fixed.

    f reads only the weights, so no data are needed. A layer stops when its signs agree with the labels on a share
    ``agreement`` of its weights, when that share has not risen for ``patience`` steps, or after ``steps`` steps of
    Adam. The rate falls linearly from ``lr`` to 0 over ``steps``. Returns the agreement reached per layer;
    ``progress`` is called with it, and with what ended the layer's warm start, after each layer. ``memo`` can be
    shared by several models: a mapping network that starts exactly like an earlier one takes over its result.

    Frozen labels are taken again from the present weights: supervision begins here.
    """
    reached = {}
    layers: dict[str, Any] = dict(binary_layers(model))
    for name, weight, binarizer in mapped_layers(model):
        binarizer.latent_replaced(weight)
        predict = _prediction(binarizer.mapping, layers[name].fused_predict)
        limits = Limits(steps, agreement, patience)
        share, ended = _fit_mapping(weight.detach(), binarizer, predict, lr, limits, memo)
        reached[name] = share
        binarizer.untaught = False
        if progress:
            progress(name, share, ended)
    if any(layer.weight.is_cuda for layer in layers.values()):
        torch.cuda.empty_cache()  # the memory of captured steps
    enough = min(agreement or 1, ENOUGH_AGREEMENT)
    short = {name: share for name, share in reached.items() if not share >= enough}
    if short:
        shares = ", ".join(f"{name} {share:.3%}" for name, share in short.items())
        more = "steps (method.warm_steps)"
        more += " or patience (method.warm_patience)" if patience else ""
        warnings.warn(
            f"after at most {steps} steps of warm start the mapping agrees with too few labels: {shares}. "
            f"Use more {more}, or mapping='residual'.",
            stacklevel=2,
        )
    return reached


def _prediction(mapping: MappingNetwork, fused: FusedPredict | None) -> Predict:
    """f, by kernels if the layer has some."""
    return mapping if fused is None else lambda weight: fused([mapping], [weight])[0]


def _fit_mapping(
    weight: Tensor,
    binarizer: MappedSign,
    predict: Predict,
    lr: float,
    limits: Limits,
    memo: dict[str, Any] | None,
) -> tuple[float, Ended]:
    """Warm start of one layer, in float32, because half precision is too coarse for Adam."""
    mapping, dtype = binarizer.mapping, weight.dtype
    if dtype in (torch.float16, torch.bfloat16):
        mapping.float()
        weight = weight.float()
    labels = binarizer.noisy_labels(weight)
    ended: Ended
    if memo is None:
        ended = _teach(weight, labels, binarizer, predict, lr, limits)
    elif (key := _beginning(weight, labels, binarizer, lr, limits)) in memo:
        state, ended = memo[key]
        mapping.load_state_dict(state)
    else:
        ended = _teach(weight, labels, binarizer, predict, lr, limits)
        memo[key] = {name: t.clone() for name, t in mapping.state_dict().items()}, ended
    for norm in _norms(mapping):  # the last forward pass of _teach measured the "fixed" statistics
        norm.measuring = binarizer.config.statistics == "filters"
    mapping.to(dtype)
    share = (sign(mapping(weight.to(dtype)).detach()) == labels).double().mean().item()
    return share, ended


def _beginning(
    weight: Tensor, labels: Tensor, binarizer: MappedSign, lr: float, limits: Limits
) -> str:
    """A hash of everything that decides what a mapping network learns in its warm start."""
    config = {
        option: value
        for option, value in asdict(binarizer.config).items()
        if option not in LATER_OPTIONS and not option.startswith("warm_")
    }
    total = hashlib.sha256(
        repr((sorted(config.items()), lr, limits, weight.dtype, weight.device)).encode()
    )
    rates = binarizer.rho_plus, binarizer.rho_minus
    for tensor in (weight, labels, *rates, *binarizer.mapping.state_dict().values()):
        total.update(tensor.detach().cpu().double().numpy().tobytes())  # exact, also for bfloat16
    return total.hexdigest()


def _norms(mapping: nn.Module) -> list[FilterNorm]:
    return [m for m in mapping.modules() if isinstance(m, FilterNorm)]


def _teach(
    weight: Tensor,
    labels: Tensor,
    binarizer: MappedSign,
    predict: Predict,
    lr: float,
    limits: Limits,
) -> Ended:
    """Adam over θ alone, on the loss of the supervision before the sign."""
    mapping = binarizer.mapping
    for norm in _norms(mapping):
        norm.measuring = True
    lessons = _Lessons(weight, labels, binarizer, predict, lr)
    ended: Ended = "steps"
    best, best_step = 0.0, 0
    for step in range(limits.steps + 1):
        if step % CHECK_EVERY == 0 or step == limits.steps:
            share = lessons.share()
            if share > best:
                best, best_step = share, step
            if limits.agreement is not None and share >= limits.agreement:
                ended = "agreement"
                break
            if limits.patience is not None and step - best_step >= limits.patience:
                ended = "patience"
                break
        if step < limits.steps:
            lessons.step(lr * (1 - step / limits.steps))
    mapping.zero_grad(set_to_none=True)
    return ended


class _Lessons:
    """Steps of Adam for one mapping network. On a GPU they are a CUDA graph: a step has a hundred short kernels."""

    def __init__(
        self, weight: Tensor, labels: Tensor, binarizer: MappedSign, predict: Predict, lr: float
    ) -> None:
        self.weight, self.labels, self.binarizer, self.predict = weight, labels, binarizer, predict
        self.parameters = list(binarizer.mapping.parameters())
        self.on_gpu = weight.is_cuda
        rate = torch.tensor(lr, device=weight.device) if self.on_gpu else lr
        self.optimizer = torch.optim.Adam(
            self.parameters, lr=rate, capturable=self.on_gpu, fused=self.on_gpu or None
        )
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def share(self) -> float:
        """Of the labels with which the signs agree."""
        return (sign(self.predict(self.weight)) == self.labels).double().mean().item()

    def step(self, lr: float) -> None:
        self._set_rate(lr)
        if self.on_gpu and self.steps == EAGER_STEPS:
            self.graph = self._captured()
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()
        self.steps += 1

    def _set_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if self.on_gpu:
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _step(self) -> None:
        with torch.enable_grad():
            loss = self.binarizer.supervision(self.predict(self.weight), self.labels).mean()
        self.optimizer.zero_grad()
        loss.backward(
            inputs=self.parameters
        )  # into the layout of each parameter: fused Adam refuses others
        self.optimizer.step()

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
        except RuntimeError as error:
            torch.cuda.synchronize()
            reason = str(error).strip().splitlines()[0]
            warnings.warn(
                f"warm start without a CUDA graph, which takes longer, because capture failed: {reason}",
                stacklevel=2,
            )
            return None
        return graph
