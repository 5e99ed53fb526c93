"""What changed in an epoch: signs that flipped, signs that differ from their latent weight's, how far latent weights
moved.

Counting takes about a hundred small operations per network, most of them a launch with almost no work. Beside a
captured step they are captured too: otherwise many networks side by side would idle for a tenth of the time.
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
    """Counts of one epoch, over all binary layers."""

    flips: int
    off_sign: int  # binary weights that are not the sign of their own latent weight
    latent_change: float  # Σ |W − W at the start| / Σ |W|: the speed of the latent weights
    weights: int


class Flips:
    """Signs and latent weights at the epoch's start, by layer, and how they differ at its end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.signs = signs(model)
        # Layers with float weights have neither signs nor latent weights.
        self.latent = {
            name: layer.weight.detach().clone()
            for name, layer in binary_layers(model)
            if name in self.signs
        }
        self.weights = sum(values.numel() for values in self.signs.values())
        self.captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        self.capture_next = False
        self.capture_failed = False

    def since_the_start(self) -> Counts | None:
        """The counts; the next epoch starts now. None for a network without binary weights."""
        if not self.signs:
            return None
        if self.captured is not None:
            graph, counts = self.captured
            graph.replay()
        else:
            counts, now = self._count()
            if self.capture_next:
                self._capture(counts)
            self.remember(now)
        flips, off_sign, latent_change = counts.tolist()  # a GPU is asked once
        return Counts(int(flips), int(off_sign), latent_change, self.weights)

    @torch.no_grad()
    def remember(self, now: dict[str, Tensor] | None = None) -> None:
        """The epoch starts here. ``now`` are the signs, if they are known."""
        for name, values in (now or signs(self.model)).items():
            self.signs[name].copy_(values)
        for name, latent in self.latent.items():
            latent.copy_(self.model.get_submodule(name).weight)  # type: ignore[arg-type]

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
        """Capture counting and remembering as one CUDA graph; its first counts must equal ``expected``."""
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
            self.capture_failed = True
            reason = error.__context__ or error  # ending a failed capture raises too
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            warnings.warn(f"counting flips without a CUDA graph: {reason}", stacklevel=2)
