"""The packed network in our own runtime."""

from __future__ import annotations

from peers.base import Array, Engine, Network


def engine(network: Network, kind: str, batch: int, threads: int) -> Engine:
    import unflip

    model = unflip.load(network.packed, threads=threads)

    def run(x: Array) -> Array:
        return model(x)

    return Engine("unflip", kind, threads, batch, run, network.input(batch))
