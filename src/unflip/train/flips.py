"""What an epoch has moved: signs that flipped, signs other than their latent weight's, how far latent weights went.

It takes some hundred small operations a network, most of them a launch and next to no work. Beside a captured step
they are captured too: many networks side by side would otherwise stand still for a tenth of the time.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unflip.binarize import signs
from unflip.kernels import shared_predictions
from unflip.layers import binary_layers
from unflip.ste import sign


class Counts(NamedTuple):
    """Of one epoch, over all binary layers."""

    flips: int
    off_sign: int  # binary weights that are not the sign of their own latent weight
    latent_change: (
        float  # Σ |W − W at the start| / Σ |W|: their speed, to compare methods at the same one
    )
    weights: int


class Moved:
    """Signs and latent weights at the epoch's start, by layer, and how they differ at its end."""

    # Of any network: a capture that fails can harm those after it (pytorch#180395).
    capture_failed = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.signs = signs(model)
        weights = {name: layer.weight.detach() for name, layer in binary_layers(model)}
        self.latent = {name: weight.clone() for name, weight in weights.items()}
        self.weights = sum(values.numel() for values in self.signs.values())
        self.captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        self.capture_next = False

    def since_the_start(self) -> Counts | None:
        """What has moved; from here on, the next epoch's start is now. None for a network without binary layers."""
        if not self.signs:
            return None
        if self.captured is not None:
            graph, counts = self.captured
            graph.replay()
        else:
            counts, now = self._count()
            if self.capture_next and not Moved.capture_failed:
                self._capture(counts)
            self.remember(now)
        flips, off_sign, latent_change = counts.tolist()  # a GPU is asked once
        return Counts(int(flips), int(off_sign), latent_change, self.weights)

    @torch.no_grad()
    def remember(self, now: dict[str, Tensor] | None = None) -> None:
        """The epoch starts here. ``now``: the signs, where they are known."""
        for name, values in (now or signs(self.model)).items():
            self.signs[name].copy_(values)
        for name, layer in binary_layers(self.model):
            self.latent[name].copy_(layer.weight)

    @torch.no_grad()
    def _count(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Flips, weights off their sign and the latent weights' change, in one tensor; and the signs now."""
        with shared_predictions(self.model):
            now = signs(self.model)
        layers = list(binary_layers(self.model))
        flips = [(self.signs[name] != now[name]).sum() for name, _ in layers]
        off_sign = [(now[name] != sign(layer.weight)).sum() for name, layer in layers]
        way = [(self.latent[name] - layer.weight).abs().sum() for name, layer in layers]
        size = [layer.weight.abs().sum() for _, layer in layers]
        flipped, off, moved, all_of_it = (
            torch.stack(parts).sum().double() for parts in (flips, off_sign, way, size)
        )
        return torch.stack([flipped, off, moved / all_of_it]), now

    def _capture(self, expected: Tensor) -> None:
        """Counting and remembering as one CUDA graph, which has to count what was just counted."""
        self.capture_next = False
        try:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            # torch.cuda.graph would collect garbage first, for each of many networks
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    counts, now = self._count()
                    self.remember(now)
                finally:
                    graph.capture_end()
            graph.replay()
            if not torch.equal(counts, expected):
                raise RuntimeError(f"it counts {counts.tolist()}, not {expected.tolist()}")
            self.captured = graph, counts
        except Exception as error:
            Moved.capture_failed = True
            reason = error.__context__ or error  # ending a capture that has failed raises, too
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            warnings.warn(f"counting flips without a CUDA graph: {reason}", stacklevel=2)
