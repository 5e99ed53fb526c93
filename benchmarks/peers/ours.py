"""The packed networks in our own runtime."""

from __future__ import annotations

from peers.base import Array, Engine, Network


def engine(network: Network, kind: str, batch: int, threads: int) -> Engine:
    import unflip

    model = unflip.load(network.packed[kind], threads=threads)

    def run(x: Array) -> Array:
        return model(x)

    images = network.pixels[:batch].numpy() if model.takes_pixels else network.input(batch)
    return Engine(f"unflip {model.isa}", kind, threads, batch, run, images)
