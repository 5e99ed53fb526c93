"""Several GPUs or machines: ``torchrun --nproc-per-node N -m unflip train ...``.

Every rank builds the same model and the same epoch plan, takes its share of each batch, and
DistributedDataParallel averages the gradients: ``batch_size`` is the size of the whole batch. Rank 0 writes.
When a rank dies, torchrun's elastic agent restarts all of them, and they resume from the last checkpoint.
"""

from __future__ import annotations

import gc
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from unflip.recipes.schema import Recipe


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
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=processes)
    try:
        if on_gpu:
            local = int(os.environ["LOCAL_RANK"])
            torch.cuda.set_device(local)
            yield f"cuda:{local}"
        else:
            yield "cpu"
    finally:
        # Reference cycles of DistributedDataParallel keep the group alive, and its threads would outlive the
        # interpreter: sometimes a process that had finished correctly ended with SIGABRT.
        gc.collect()
        dist.destroy_process_group()


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


def wrap(objective: nn.Module, recipe: Recipe, device: torch.device) -> nn.Module:
    """The objective with gradients averaged over the ranks; unchanged for one rank."""
    if not dist.is_initialized():
        return objective
    if recipe.batch_size % world_size():
        raise ValueError(
            f"batch_size={recipe.batch_size} should be a multiple of the {world_size()} processes"
        )
    if recipe.sync_batchnorm and device.type != "cuda":
        raise ValueError(
            "sync_batchnorm=true needs GPUs: torch has no synchronized BatchNorm on CPUs"
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
    """The value that rank 0 has: which checkpoint to resume from, whether to stop."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
