"""The float twin in torch on the CPU: eager, and compiled."""

from __future__ import annotations

import copy
from functools import partial

import torch

from peers.base import Array, Engine, Network


def eager(network: Network, kind: str, batch: int, threads: int) -> Engine:
    return _engine("torch eager", network, kind, batch, threads, compiled=False)


def compiled(network: Network, kind: str, batch: int, threads: int) -> Engine:
    return _engine("torch.compile", network, kind, batch, threads, compiled=True)


def _engine(
    name: str, network: Network, kind: str, batch: int, threads: int, compiled: bool
) -> Engine:
    model = copy.deepcopy(network.models[kind]).to(memory_format=torch.channels_last)
    if compiled:
        model = torch.compile(model, options={"freezing": True})

    @torch.inference_mode()
    def run(x: Array) -> Array:
        return model(torch.from_numpy(x).to(memory_format=torch.channels_last)).numpy()

    before = partial(torch.set_num_threads, threads)
    before()
    run(network.input(batch))
    return Engine(name, kind, threads, batch, run, network.input(batch), before)
