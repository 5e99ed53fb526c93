"""What every data set provides on the host, in memory or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from unflip.data.spec import InputSpec

if TYPE_CHECKING:
    import torch

    from unflip.data.source import Source


class Dataset(Protocol):
    """What a registered loader returns. ``ImageSet`` is one; a set that is too large for memory is another."""

    @property
    def spec(self) -> InputSpec:
        """Shape, classes and normalization of the inputs."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """A short text for each of "training images", "test images" and "classes".

        It must change whenever these change. A run keeps it, and refuses to resume with other data.
        """

    def __len__(self) -> int:
        """The number of training images."""

    def split(self, validation: int) -> Self:
        """The same set with its last ``validation`` training images in place of the test images."""

    def source(self, device: torch.device, workers: int | None = None) -> Source:
        """The images as training reads them, on ``device``.

        ``workers`` is the number of processes that decode images, for sets that use such; None: one per CPU.
        """
