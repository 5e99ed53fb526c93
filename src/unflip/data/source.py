"""Images on the device, and the batches of an epoch: order, crop and flip as one small plan.

Everything random about an epoch is drawn on the CPU from (seed, epoch) alone: a resumed run, another device
and every rank see the same batches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unflip.data import ImageSet


class Images:
    """A set of images on the device: uint8, channels last, with the crop's border around each."""

    def __init__(self, data: ImageSet, device: torch.device) -> None:
        self.size = data.train_images.shape[-1]
        if data.train_images.shape[-2] != self.size:
            raise ValueError(
                f"images should be square to be cropped, not {tuple(data.train_images.shape[-2:])}"
            )
        self.padding, self.flip = data.crop_padding, data.flip
        mean = torch.tensor(data.mean) * 255
        self.std = (torch.tensor(data.std) * 255).to(device)
        self.mean = mean.to(device)
        self.train_labels = data.train_labels.to(device)
        self.test_labels = data.test_labels.to(device)
        self.train = _channels_last(data.train_images, device)
        self.test = _channels_last(data.test_images, device)
        # Padding a normalised image with zeros, as everyone does, is padding the raw one with its mean;
        # uint8 has no such value, so the border is masked after normalising.
        p = self.padding
        self.train = F.pad(self.train, (0, 0, p, p, p, p))

    def __len__(self) -> int:
        return len(self.train_labels)

    def epoch_plan(self, seed: int, epoch: int, batch_size: int) -> Tensor:
        """(steps, batch, 4) of image, row, column and flip; the last partial batch is dropped."""
        generator = torch.Generator().manual_seed(mix(seed, epoch))
        count = len(self)
        steps = count // batch_size
        order = torch.randperm(count, generator=generator)
        shifts = torch.randint(0, 2 * self.padding + 1, (count, 2), generator=generator)
        flips = torch.randint(0, 2 if self.flip else 1, (count, 1), generator=generator)
        plan = torch.cat([order[:, None], shifts, flips], dim=1)
        return plan[: steps * batch_size].view(steps, batch_size, 4)

    def batch(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        """The planned images, cropped, flipped and normalised, and their labels."""
        index, top, left, flip = plan.unbind(-1)
        span = torch.arange(self.size, device=plan.device)
        rows = top[:, None] + span
        columns = left[:, None] + torch.where(flip[:, None] > 0, self.size - 1 - span, span)
        raw = self.train[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        inside = (
            _inside(rows, self.padding, self.size)[:, :, None]
            & _inside(columns, self.padding, self.size)[:, None, :]
        )
        images = (raw.float() - self.mean) / self.std * inside[..., None]
        return images.permute(0, 3, 1, 2), self.train_labels[index]

    def test_batch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        images = (self.test[start:stop].float() - self.mean) / self.std
        return images.permute(0, 3, 1, 2), self.test_labels[start:stop]


def _channels_last(images: Tensor, device: torch.device) -> Tensor:
    return images.to(device).permute(0, 2, 3, 1).contiguous()


def _inside(position: Tensor, padding: int, size: int) -> Tensor:
    return (position >= padding) & (position < padding + size)


def mix(seed: int, epoch: int) -> int:
    """A seed for a generator: neighbouring seeds and epochs must not share one (splitmix64's multipliers)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) & (2**63 - 1)
