"""Several GPUs or machines: ``torchrun --nproc-per-node N -m unflip train ...``.

Every rank builds the same model and the same epoch plan, takes its share of each batch, and
DistributedDataParallel averages the gradients: ``batch_size`` is the size of the whole batch. Rank 0 writes.
When a rank dies, torchrun's elastic agent starts all of them again, and they go on from the last checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unflip.train.recipe import Recipe


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1


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
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        if on_gpu:
            local = int(os.environ["LOCAL_RANK"])
            torch.cuda.set_device(local)
            yield f"cuda:{local}"
        else:
            yield "cpu"
    finally:
        dist.destroy_process_group()


def wrap(objective: nn.Module, recipe: Recipe, device: torch.device) -> nn.Module:
    """The objective with gradients averaged over the ranks; as it is when there is one rank."""
    if not dist.is_initialized():
        return objective
    if recipe.batch_size % world_size():
        raise ValueError(
            f"batch_size={recipe.batch_size} should be a multiple of the {world_size()} processes"
        )
    if recipe.sync_batchnorm and device.type != "cuda":
        raise ValueError(
            "sync_batchnorm=true needs GPUs: torch has no synchronised BatchNorm on CPUs"
        )
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(objective, device_ids=ids)


def share(plan: Tensor) -> Tensor:
    """This rank's part of a batch."""
    if not dist.is_initialized():
        return plan
    return plan.chunk(world_size())[rank()]


def average(value: Tensor) -> Tensor:
    """The mean over the ranks."""
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= world_size()
    return value


@torch.no_grad()
def broadcast(tensor: Tensor) -> None:
    """Overwrite ``tensor`` with rank 0's."""
    if dist.is_initialized():
        value = tensor.contiguous()  # channels-last weights have no order a backend knows
        dist.broadcast(value, src=0)
        tensor.copy_(value)


def from_rank_0(value: Any) -> Any:
    """What rank 0 has: which checkpoint to resume from, whether to stop."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
