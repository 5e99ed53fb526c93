"""Several GPUs or machines: ``torchrun --nproc-per-node N -m unflip train ...``.

Every rank builds the same model and the same epoch plan, takes its share of each batch, and
DistributedDataParallel averages the gradients while the backward pass still runs: ``batch_size`` is the size of the
whole batch. Every rank evaluates its part of the test images. Rank 0 writes.
When a rank dies, torchrun's elastic agent restarts all of them, and they resume from the last checkpoint.
"""

from __future__ import annotations

import gc
import os
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from unflip.kernels.attach import attached
from unflip.layers import become, twin_of
from unflip.recipes.schema import Recipe

# The other ranks wait while rank 0 prepares the first weights, which takes longer than the 10 minutes that NCCL waits
# by default. If a rank dies, torchrun ends the others at once.
LONGEST_WAIT = timedelta(hours=2)


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1


def speaks() -> bool:
    """Whether this process prints for all: rank 0 under torchrun, also before the group is made."""
    return int(os.environ.get("RANK", "0")) == 0


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def process_group(device: str | None) -> Iterator[str | None]:
    """Join the group torchrun made; yields this rank's device. Nothing happens without torchrun."""
    if not launched():
        yield device
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    store, number, processes = next(rendezvous("env://"))
    store = _fresh(store, number, processes)
    dist.init_process_group(
        _backend(on_gpu), store=store, rank=number, world_size=processes, timeout=LONGEST_WAIT
    )
    try:
        with warnings.catch_warnings():
            if number > 0:  # rank 0 speaks for all
                warnings.simplefilter("ignore")
            if on_gpu:
                local = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
                torch.cuda.set_device(local)
                yield f"cuda:{local}"
            else:
                yield "cpu"
    finally:
        # Reference cycles of DistributedDataParallel keep the group alive, and its threads would outlive the
        # interpreter: sometimes a process that had finished correctly ended with SIGABRT.
        gc.collect()
        dist.destroy_process_group()


def _backend(on_gpu: bool) -> str:
    """NCCL for GPUs, unless processes share one, which NCCL refuses."""
    if not on_gpu:
        return "gloo"
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if processes <= gpus:
        return "nccl"
    if speaks():
        warnings.warn(
            f"{processes} processes share {gpus} GPU(s) on this machine, and communicate through gloo, which is slow: "
            f"start torchrun with --nproc-per-node {gpus}",
            stacklevel=4,
        )
    return "gloo"


def _fresh(store: Any, number: int, processes: int) -> Any:
    """A part of torchrun's store that no process has written to before.

    torchrun keeps one store over its restarts, with the addresses of dead processes (pytorch issues 135712 and
    167288): a restarted process that reads one before it is overwritten never finds its peer. The number of
    restarts cannot serve as a name, because it differs between machines. So rank 0 picks a name and sends it to
    each process that says hello, until all have answered.
    """
    if number > 0:
        hello = uuid.uuid4().hex
        store.set(f"unflip/hello/{number}", hello)
        name = store.get(f"unflip/name-for/{hello}").decode()  # waits
        store.set(f"unflip/{name}/heard/{number}", "yes")
        return dist.PrefixStore(f"unflip/{name}", store)  # type: ignore[attr-defined]
    name = uuid.uuid4().hex
    silent = set(range(1, processes))
    while silent:
        for other in sorted(silent):
            if store.check([f"unflip/hello/{other}"]):  # perhaps from before a restart: ask again
                hello = store.get(f"unflip/hello/{other}").decode()
                store.set(f"unflip/name-for/{hello}", name)
            if store.check([f"unflip/{name}/heard/{other}"]):
                silent.remove(other)
        time.sleep(0.01)
    return dist.PrefixStore(f"unflip/{name}", store)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Ranks:
    """The processes that train one network together; ``Ranks()`` is a process alone."""

    rank: int = 0  # of this process
    world: int = 1

    @property
    def part(self) -> tuple[int, int]:
        """Which part of the test images is evaluated here, as :meth:`Source.test_batches` takes it."""
        return self.rank, self.world

    def averaging(self, objective: nn.Module, recipe: Recipe) -> nn.Module:
        """The objective with gradients averaged over the ranks during the backward pass; unchanged for one rank."""
        if self.world == 1:
            return objective
        if recipe.batch_size % self.world:
            raise ValueError(
                f"batch_size={recipe.batch_size} of recipe {recipe.name} cannot be shared equally by {self.world} "
                f"processes: it should be a multiple of {self.world}"
            )
        if recipe.sync_batchnorm:
            synchronize_norms(objective, self)
        averaged = DistributedDataParallel(objective)
        # Running statistics: only evaluation needs them, and it takes rank 0's (agree_on_buffers).
        averaged.broadcast_buffers = False
        return averaged

    def share(self, plan: Tensor) -> Tensor:
        """This rank's part of each batch: of one row (batch, columns), or of a whole plan (steps, batch, columns)."""
        if self.world == 1:
            return plan
        of_batch = plan.dim() - 2
        size = plan.shape[of_batch] // self.world
        return plan.narrow(of_batch, self.rank * size, size)

    def total(self, value: Tensor) -> Tensor:
        """The sum over the ranks; ``value`` is overwritten."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def average(self, value: Tensor) -> Tensor:
        """The mean over the ranks; ``value`` is overwritten."""
        return self.total(value).div_(self.world) if self.world > 1 else value

    def agree_on_buffers(self, model: nn.Module) -> None:
        """Take over rank 0's running statistics: all ranks then evaluate the network that rank 0 saves."""
        for buffer in model.buffers() if self.world > 1 else ():
            broadcast(buffer)

    def first_problem(self, problem: str | None) -> str | None:
        """The problem of the first rank that has one. All ranks have to ask, and all of them get the same.

        What one rank cannot do, none may do: ranks that ran different code would wait for each other forever.
        """
        if self.world == 1:
            return problem
        found: list[str | None] = [None] * self.world
        dist.all_gather_object(found, problem)
        return next((f"{text} (rank {i})" for i, text in enumerate(found) if text), None)


ALONE = Ranks()


def together() -> Ranks:
    """All processes that torchrun started; one alone without torchrun."""
    return Ranks(rank(), world_size())


@contextmanager
def apart(objectives: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, forward and backward passes do not communicate: one rank may fail, or try more often than another.

    Only before the first step: in the forward pass after it, the ranks arrange their gradients together.
    """
    with ExitStack() as stack:
        for objective in objectives:
            if isinstance(objective, DistributedDataParallel):
                norms = [m for m in objective.modules() if isinstance(m, SynchronizedNorm)]
                stack.enter_context(attached(norms, ranks=ALONE))
                stack.enter_context(objective.no_sync())
        yield


# -------------------------------------------------------------------------------------------- BatchNorm


class SynchronizedNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm whose statistics in training are those of all ranks' images: what one process computes with the whole
    batch. Every rank must have equally many images.

    torch's ``SyncBatchNorm`` does not work on CPUs. Parameters and buffers have the names of BatchNorm's.
    """

    ranks = ALONE

    # BatchNorm1d, 2d and 3d differ only in this check.
    def _check_input_dim(self, x: Tensor) -> None: ...

    # Communication stays outside of compiled code: a compiler might order it differently on each rank.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        if self.ranks.world == 1 or not self.training:
            return super().forward(x)
        y, mean, var = _Normalize.apply(x, self.weight, self.bias, self.eps, self.ranks)
        if self.running_mean is not None:
            self._follow(mean, var, self.ranks.world * x.numel() // x.shape[1])
        return y

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Update the running mean and (unbiased) variance as BatchNorm does."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:  # a mean over all batches
            share = 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        unbiased = var * (count / max(1, count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class _Normalize(torch.autograd.Function):
    """(x − mean) / sqrt(var + eps) · weight + bias with the statistics of all ranks; also returns mean and var.

    Let h = (x − mean) / sqrt(var + eps) and g = weight · dy. With means over all images of all ranks,
    dx = (g − mean(g) − h · mean(g · h)) / sqrt(var + eps).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: Ranks
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = _moments(x, ranks)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps))
        ctx.ranks = ranks
        ctx.mark_non_differentiable(mean, var)
        w, b = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        return F.batch_norm(x, mean, var, w, b, training=False, eps=eps), mean, var

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        over, shape = _pixels(x)
        precise = dy.to(mean.dtype)
        h = (x.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        own = torch.stack([precise.sum(over), (precise * h).sum(over)])
        means = ctx.ranks.average(own / (x.numel() // x.shape[1]))
        dx = precise - means[0].view(shape) - h * means[1].view(shape)
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        dx = (dx * factor.view(shape)).to(x.dtype)
        if weight is None:
            return dx, None, None, None, None
        return dx, own[1].to(weight.dtype), own[0].to(weight.dtype), None, None


def _moments(x: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Mean and variance per channel over all ranks: those of the ranks combined, because squares of unshifted values
    would lose digits."""
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    var, mean = torch.var_mean(precise, _pixels(x)[0], correction=0)
    every = mean.new_zeros(ranks.world, 2, len(mean))
    every[ranks.rank] = torch.stack([mean, var])
    means, variances = ranks.total(every).unbind(1)
    mean = means.mean(0)
    return mean, variances.mean(0) + (means - mean).square().mean(0)


def _pixels(x: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions of one channel, and the shape in which a value per channel broadcasts over ``x``."""
    return [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)


def synchronize_norms(model: nn.Module, ranks: Ranks) -> None:
    """Turn every BatchNorm of the model into a :class:`SynchronizedNorm`, in place."""
    batch_norm = nn.modules.batchnorm._BatchNorm
    for name, module in model.named_modules():
        if not isinstance(module, batch_norm):
            continue
        if type(module).forward is not batch_norm.forward:
            raise ValueError(
                f"sync_batchnorm=true: {name} is a {type(module).__name__} with its own forward, which cannot be "
                "synchronized. Use nn.BatchNorm1d or nn.BatchNorm2d, or set sync_batchnorm=false"
            )
        become(module, twin_of(module, SynchronizedNorm))
        module.ranks = ranks  # type: ignore[assignment]


# ---------------------------------------------------------------------------------------- rank 0's values


@torch.no_grad()
def broadcast(tensor: Tensor) -> None:
    """Overwrite ``tensor`` with rank 0's."""
    if dist.is_initialized():
        value = tensor.contiguous()  # channels-last weights have no order a backend knows
        dist.broadcast(value, src=0)
        tensor.copy_(value)


def from_rank_0(value: Any) -> Any:
    """The value that rank 0 has: which checkpoint to resume from, whether to stop."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
