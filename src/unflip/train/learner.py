"""One network in training: its objective, its optimizer, and a step that a CUDA graph can hold.

One file of more than 400 lines, because loss, optimizer state and step share the tensors that a graph captures.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unflip.data.feed import Inputs, first_inputs
from unflip.data.source import Source, StreamedSource, mix
from unflip.data.spec import InputSpec
from unflip.kernels import shared_predictions
from unflip.layers import (
    after_step,
    auxiliary_losses,
    before_step,
    binary_layers,
    inside_binarizer,
    start_epoch,
    state_restored,
)
from unflip.methods.base import Method
from unflip.recipes.schema import Distill, Optimizer, Recipe
from unflip.train import distributed
from unflip.train.distributed import ALONE, Ranks

# Multiplies the loss so that float16 gradients do not underflow; divided out before the optimizer.
LOSS_SCALE = 512.0
TEST_PIXELS = 5000 * 32 * 32  # in a batch without gradients
RANKED = 10  # classes from which on top-5 accuracy is measured


class Objective(nn.Module):
    """Cross entropy, mixed with a teacher's logits if there is a teacher, and the methods' own loss per layer.

    ``smoothing`` is the share of a label that is spread over all classes.
    """

    def __init__(
        self, model: nn.Module, distill: Distill | None = None, smoothing: float = 0.0
    ) -> None:
        super().__init__()
        self.model = model
        self.distill = distill
        self.smoothing = smoothing

    def forward(
        self, images: Tensor, labels: Tensor, teacher: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        with shared_predictions(self.model):
            logits = self.model(images)
            losses = auxiliary_losses(self.model)
        auxiliary = torch.stack(list(losses.values())) if losses else logits.new_zeros(0)
        precise = torch.promote_types(logits.dtype, torch.float32)  # half is not enough for a loss
        loss = self._loss(
            logits.to(precise), labels, None if teacher is None else teacher.to(precise)
        )
        return loss, auxiliary.to(precise)

    def _loss(self, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        if self.distill is None or teacher is None:
            return F.cross_entropy(logits, labels, label_smoothing=self.smoothing)
        soft = divergence(logits, teacher, self.distill.temperature)
        if self.distill.weight == 1:  # the labels are not used
            return soft
        hard = F.cross_entropy(logits, labels, label_smoothing=self.smoothing)
        return (1 - self.distill.weight) * hard + self.distill.weight * soft


def divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² · KL(softmax(teacher / T) ‖ softmax(logits / T)), the mean over a batch."""
    mine, theirs = (F.log_softmax(z / temperature, dim=1) for z in (logits, teacher))
    return temperature**2 * F.kl_div(mine, theirs, reduction="batchmean", log_target=True)


class Accuracy(NamedTuple):
    """In percent. ``top5``: the share of images whose class is among the five likeliest; None for few classes. Both are
    None in an epoch in which accuracy is not measured."""

    top1: float | None = None
    top5: float | None = None


def count_right(logits: Tensor, labels: Tensor, ranked: bool) -> Tensor:
    """How many labels are the likeliest class, and (if ``ranked``) how many are among the five likeliest."""
    first = (logits.argmax(1) == labels).sum()
    if not ranked:
        return torch.stack([first, first])
    return torch.stack([first, (logits.topk(5, 1).indices == labels[:, None]).sum()])


def in_half(recipe: Recipe, device: torch.device) -> bool:
    """Whether training is in half precision."""
    return device.type == "cuda" and recipe.precision == "float16"


def images_per_batch(spec: InputSpec, pixels: int = TEST_PIXELS) -> int:
    """How many images are computed at once without gradients, so that memory does not grow with their size."""
    _, height, width = spec.shape
    return max(1, pixels // (height * width))


class Learner:
    """A seed's model, optimizer and running sums, all on one device.

    ``teacher`` gives the teacher's logits for a row of the plan and its images, if the recipe has a teacher
    (``teacher.py``). ``ranks`` are the processes that train this network together.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        source: Source,
        device: torch.device,
        teacher: Callable[[Tensor, Tensor], Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        if (recipe.distill is None) != (teacher is None):
            raise ValueError(
                f"recipe {recipe.name} has distill: {recipe.distill}, so it needs "
                f"{'no teacher' if recipe.distill is None else 'its teacher'} here"
            )
        self.recipe, self.source, self.device, self.teacher = recipe, source, device, teacher
        self.ranks = ranks
        self.images = recipe.batch_size // ranks.world  # per step, in this process
        self.model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.half = in_half(recipe, device)
        objective = Objective(self.model, recipe.distill, recipe.label_smoothing)
        self.objective = ranks.averaging(objective, recipe)
        with torch.no_grad():
            self.auxiliary_layers = list(auxiliary_losses(self.model))
        self.method = None if recipe.method == "float" else recipe.resolved_method()
        self.groups = _parameter_groups(self.model, recipe, self.method)
        self.optimizers = _make_optimizers(recipe, self.method, self.groups, device)
        steps = len(source) // recipe.batch_size
        if steps == 0:
            raise ValueError(
                f"batch_size={recipe.batch_size} is larger than the {len(source)} training images"
            )
        self.steps = steps
        # A real plan, not zeros: kernels are checked and captured with it before the first epoch starts.
        # Batches that are decoded on the host are planned there too.
        where = device if source.resident else torch.device("cpu")
        self.plan = source.plan(0, 0, recipe.batch_size).to(where)
        self.position = torch.zeros(1, dtype=torch.int64, device=where)
        self.epoch = 0  # the plan's
        # What a step on a streamed source reads; the engine fills it.
        self.inputs: Inputs | None = None
        if not source.resident:
            self.inputs = first_inputs(source, ranks.share(self.plan), device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.auxiliary_sum = torch.zeros(
            len(self.auxiliary_layers), dtype=torch.float64, device=device
        )
        self.losses: Callable[..., tuple[Tensor, Tensor]] = self.eager_losses
        self.random_stream = 0
        self.planned: tuple[int, int, Tensor] | None = None
        self.optimizer_keys = self._optimizer_state().keys()

    def draw_as_alone(self) -> None:
        """Seed dropout and random binarizers from (seed, epoch, step) alone, so that a run draws the same numbers
        when it is resumed or trained beside others.

        Every network is seeded, because any module may draw. On a CPU only: a GPU would have to wait for the position.
        """
        if self.device.type == "cpu":
            # torch.manual_seed would also seed GPUs, which takes 400 times longer
            torch.default_generator.manual_seed(mix(self.random_stream, int(self.position) + 1))

    def plan_ahead(self, seed: int, epoch: int) -> None:
        """Plan an epoch's batches while a GPU is still busy with the epoch before."""
        plan = self.source.plan(seed, epoch, self.recipe.batch_size)
        self.planned = (seed, epoch, plan)

    def start_epoch(self, seed: int, epoch: int, factor: float) -> None:
        self.random_stream = mix(mix(seed, epoch), self.ranks.rank)
        if self.planned is None or self.planned[:2] != (seed, epoch):
            self.plan_ahead(seed, epoch)
        assert self.planned is not None
        self.plan.copy_(self.planned[2])
        self.epoch = epoch
        self.position.zero_()
        self.loss_sum.zero_()
        self.auxiliary_sum.zero_()
        self.set_rates(factor)
        start_epoch(self.model, epoch, self.recipe.epochs)

    def set_rates(self, factor: float) -> None:
        for group in (g for o in self.optimizers for g in o.param_groups):
            if group.get("peak_lr") is None:
                continue
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["peak_lr"] * factor)
            else:
                group["lr"] = group["peak_lr"] * factor

    def next_inputs(self) -> tuple[Tensor, ...]:
        """The arguments of ``losses`` in the next step."""
        if self.inputs is not None:
            return self.inputs
        return (self.plan.index_select(0, self.position).squeeze(0),)

    @property
    def eager_losses(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The loss on the labels (and the teacher's logits) and the auxiliary losses, of :meth:`next_inputs`."""
        return self.planned_losses if self.inputs is None else self.fed_losses

    def planned_losses(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        mine = self.ranks.share(plan)
        return self._losses(mine, *self.source.batch(mine))

    def fed_losses(self, plan: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.source, StreamedSource):
            images = self.source.normalize(images)
        return self._losses(plan, images, labels)

    def _losses(self, plan: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        teacher = None if self.teacher is None else self.teacher(plan, images)
        with torch.autocast(
            self.device.type, torch.float16, enabled=self.half, cache_enabled=False
        ):
            return self.objective(images, labels, teacher)

    def backward(self) -> tuple[Tensor, Tensor]:
        """Gradients of the batch at ``position`` into ``.grad``; returns the two losses."""
        loss, auxiliary = self.losses(*self.next_inputs())
        total = loss + auxiliary.sum()
        self.zero_grad()
        (total * LOSS_SCALE if self.half else total).backward()
        if self.half:
            grads = [p.grad for g in self.groups for p in g["params"] if p.grad is not None]
            torch._foreach_mul_(grads, 1 / LOSS_SCALE)
        return loss.detach(), auxiliary.detach()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """One optimizer step, without a synchronization with the host."""
        loss, auxiliary = self.backward()
        before_step(self.model)
        for optimizer in self.optimizers:
            optimizer.step()
        after_step(self.model)
        # Averaged in each step, because rank 0 alone may save in the middle of an epoch.
        self.loss_sum += self.ranks.average(loss)
        self.auxiliary_sum += auxiliary
        if self.source.resident:  # otherwise the engine counts: a graph replays nothing on the host
            self.position += 1

    @torch.no_grad()
    def evaluate(self, *, exact: bool) -> Accuracy:
        """Test accuracy; ``exact``: in float32, as results are. On a GPU curves are in half precision."""
        self.ranks.agree_on_buffers(self.model)
        self.model.eval()
        right = torch.zeros(2, dtype=torch.int64, device=self.device)
        batch, ranked = images_per_batch(self.source.spec), len(self.source.spec.classes) >= RANKED
        half = self.half and not exact
        with (
            torch.autocast(self.device.type, torch.float16, enabled=half, cache_enabled=False),
            nullcontext() if exact else shared_predictions(self.model),
        ):
            for images, labels in self.source.test_batches(batch, self.ranks.part):
                right += count_right(self.model(images), labels, ranked)
        self.model.train()
        counts = self.ranks.total(right).tolist()
        top1, top5 = (100 * count / self.source.test_count for count in counts)
        return Accuracy(top1, top5 if ranked else None)

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, by name."""
        state = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        of_optimizers = self._optimizer_state()
        for name in of_optimizers.keys() - self.optimizer_keys:
            raise ValueError(
                f"method {self.method}: its optimizer made {name} during a step. It should make all its state in its "
                "constructor, as Bop does: otherwise a resumed run cannot restore it"
            )
        state |= of_optimizers
        state["sums.loss"] = self.loss_sum
        state["sums.auxiliary"] = self.auxiliary_sum
        return state

    def _optimizer_state(self) -> dict[str, Tensor]:
        state = {}
        names = {p: n for n, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for parameter, values in optimizer.state.items():
                for key, value in values.items():
                    state[f"optimizer.{names[parameter]}.{key}"] = value
                    if not isinstance(value, Tensor):
                        raise ValueError(
                            f"{type(optimizer).__name__}: its state {key!r} of {names[parameter]} is {value!r} and "
                            "must be a tensor, because checkpoints store only tensors"
                        )
        return state

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        """Copy a :meth:`state` into the existing tensors, so that a captured graph stays valid."""
        own = self.state()
        if own.keys() != state.keys():
            odd = sorted(own.keys() ^ state.keys())
            raise ValueError(f"the checkpoint does not fit the model: {', '.join(odd[:5])} differ")
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def take_from_rank_0(self) -> None:
        """Take over rank 0's state: only rank 0 reads checkpoints and prepares first weights."""
        for tensor in self.state().values():
            distributed.broadcast(tensor)
        if distributed.rank() > 0:
            state_restored(self.model)

    def snapshot(self) -> dict[str, Tensor]:
        return {k: v.detach().clone() for k, v in self.state().items()}


def _parameter_groups(
    model: nn.Module, recipe: Recipe, method: Method | None
) -> list[dict[str, Any]]:
    """Latent weights, the method's own groups, and the rest, each with its learning rate."""
    rates = recipe.optimizer
    latent = {id(layer.weight): layer.weight for _, layer in binary_layers(model)}
    own = method.parameter_groups(model) if method is not None else []
    taken = latent.keys() | {id(p) for group in own for p in group.parameters}
    groups: list[tuple[str, list[Any], float | None]] = [
        ("latent", [p for p in model.parameters() if id(p) in latent], rates.latent_lr),
        *((group.name, list(group.parameters), group.lr) for group in own),
        ("rest", [p for p in model.parameters() if id(p) not in taken], None),
    ]
    decayed = _decayed(model, rates)
    return [
        {"name": name, "params": part, "peak_lr": lr or rates.lr, "weight_decay": decay}
        for name, parameters, lr in groups
        for part, decay in (
            ([p for p in parameters if id(p) in decayed], rates.weight_decay),
            ([p for p in parameters if id(p) not in decayed], 0.0),
        )
        if part
    ]


def _decayed(model: nn.Module, rates: Optimizer) -> set[int]:
    """The ids of the parameters that weight decay is for."""
    if rates.decayed == "all":
        return {id(p) for p in model.parameters()}
    kind = nn.Conv2d if rates.decayed == "convolutions" else nn.Linear
    layers = (
        m for n, m in model.named_modules() if isinstance(m, kind) and not inside_binarizer(n)
    )
    return {id(layer.weight) for layer in layers}


def _make_optimizers(
    recipe: Recipe, method: Method | None, groups: list[dict[str, Any]], device: torch.device
) -> list[torch.optim.Optimizer]:
    """The recipe's optimizer, and the method's own for the latent weights if it has one.

    A method's own optimizer makes its state when it is made.
    """
    own = None
    latent = [p for group in groups if group["name"] == "latent" for p in group["params"]]
    if method is not None and latent:
        own = method.latent_optimizer(latent)
    for group in own.param_groups if own is not None else ():
        _follow_schedule(group, device)
    rest = [g for g in groups if g["name"] != "latent"] if own is not None else groups
    return [_make_optimizer(recipe, rest, device), *([own] if own is not None else [])]


def _follow_schedule(group: dict[str, Any], device: torch.device) -> None:
    """Let the group follow the recipe's schedule from the rate it was made with, as the recipe's own groups do.

    A group without ``lr``, or with a ``peak_lr`` of None, keeps its rate.
    """
    if "lr" not in group or group.setdefault("peak_lr", float(group["lr"])) is None:
        return
    if device.type == "cuda" and not isinstance(group["lr"], Tensor):
        group["lr"] = torch.tensor(group["lr"], device=device)  # a captured graph reads a tensor


def _make_optimizer(
    recipe: Recipe, groups: list[dict[str, Any]], device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer with its state made now, so that saving, resuming and capturing see one layout."""
    on_gpu = device.type == "cuda"
    for group in groups:
        # A captured graph reads the rate from a tensor; torch captures that only with fused kernels.
        group["lr"] = torch.tensor(group["peak_lr"], device=device) if on_gpu else group["peak_lr"]
    options = recipe.optimizer
    optimizer: torch.optim.Optimizer
    if options.name == "sgd":
        optimizer = torch.optim.SGD(
            groups,
            lr=groups[0]["lr"],
            momentum=options.momentum,
            fused=on_gpu,
        )
    else:
        optimizer = torch.optim.Adam(
            groups,
            lr=groups[0]["lr"],
            fused=on_gpu,
            capturable=on_gpu,
        )
    for group in groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = _initial_state(recipe, parameter, device)
    return optimizer


def _initial_state(recipe: Recipe, parameter: Tensor, device: torch.device) -> dict[str, Tensor]:
    if recipe.optimizer.name == "adam":
        step = torch.zeros((), device=device)
        return {
            "step": step,
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return {"momentum_buffer": torch.zeros_like(parameter)} if recipe.optimizer.momentum else {}
