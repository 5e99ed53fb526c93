"""Shapes and positions: codes in memory, windows of convolutions, and pixels at the border."""

from __future__ import annotations

from dataclasses import dataclass

from unflip.export.plain_c.plan import Conv, Task
from unflip.packing.ir import Shape

STEM_TAPS, STEM_CHANNELS, STEM_LINE_BYTES = (
    7,
    4,
    64 << 10,
)  # of convolutions that the runtime treats specially


@dataclass(frozen=True)
class CodeLayout:
    """``packed``: bits of the channels of one pixel. Otherwise bits of pixels, in rows of whole bytes."""

    shape: Shape
    planes: int
    packed: bool

    @property
    def channel_bytes(self) -> int:
        return 0 if self.packed else self.shape[1] * -(-self.shape[2] // 8)

    @property
    def plane_bytes(self) -> int:
        if self.packed:
            return 4 * -(-self.shape[0] // 32)
        return self.shape[0] * self.channel_bytes

    @property
    def bytes(self) -> int:
        return self.planes * self.plane_bytes


def is_vector(task: Task) -> bool:
    """Whether a conv of one pixel is a linear layer: one tap is inside the image, all channels are read."""
    conv = task.conv
    assert conv is not None
    taps = [taps_inside(0, conv, side, 1) for side in (0, 1)]
    return (
        task.out[1:] == (1, 1)
        and conv.groups == 1
        and all(last - first == 1 for first, last in taps)
    )


def inside_tap(task: Task, conv: Conv) -> tuple[int, int]:
    return taps_inside(0, conv, 0, 1)[0], taps_inside(0, conv, 1, 1)[0]


def taps_inside(position: int, conv: Conv, side: int, size: int) -> tuple[int, int]:
    """Taps first .. last - 1 of a kernel's row (side 0) or column (side 1) are inside the image."""
    start = position * conv.stride[side] - conv.padding[side]
    kernel, dilation = conv.shape[2 + side], conv.dilation[side]
    first = min(-(start // dilation) if start < 0 else 0, kernel)
    last = 0 if start >= size else (size - 1 - start) // dilation + 1
    return first, max(min(last, kernel), first)


class Geometry:
    """How a binary convolution lays out its moved code, and its classes of border pixels."""

    def __init__(self, task: Task, conv: Conv, code: CodeLayout) -> None:
        _, height, width = task.out
        channels, in_height, in_width = code.shape
        kh, kw = conv.shape[2:]
        self.bytes = -(-width // 8)
        rows = (height - 1) * conv.stride[0] + (kh - 1) * conv.dilation[0] + 1
        self.phase_rows = -(-rows // conv.stride[0])
        self.channel_step = conv.stride[0] * self.phase_rows * self.bytes
        self.plane_step = (kw * channels + 1) * self.channel_step
        self.pixels = -(-height * self.bytes // 4) * 32
        self.row_taps, self.row_class, self.rows, row = _classes(conv, 0, height, in_height)
        self.column_taps, self.column_class, self.columns, column = _classes(
            conv, 1, width, in_width
        )
        self.classes = len(self.row_taps) * len(self.column_taps)
        self.most_taps = max(kh, kw, len(self.row_taps) - 1, len(self.column_taps) - 1)
        self.center = row * len(self.column_taps) + column


def _classes(
    conv: Conv, side: int, count: int, size: int
) -> tuple[list[tuple[int, int]], list[int], tuple[int, int], int]:
    """Different sets of taps, the set of each position, the positions with all taps, and the number of their set."""
    taps = [taps_inside(i, conv, side, size) for i in range(count)]
    different = list(dict.fromkeys(taps))
    whole = (0, conv.shape[2 + side])
    inside = [i for i, own in enumerate(taps) if own == whole]
    span = (inside[0], inside[-1] + 1) if inside else (count, count)
    center = different.index(whole) if inside else 0
    return different, [different.index(own) for own in taps], span, center


def is_stem(task: Task) -> bool:
    """Whether the runtime computes it with shared products."""
    conv = task.conv
    assert conv is not None
    line = -(-task.out[2] // 2) * 10 * conv.shape[1] * 4
    return (
        conv.shape[2:] == (STEM_TAPS, STEM_TAPS)
        and conv.stride == (2, 2)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.shape[1] <= STEM_CHANNELS
        and line <= STEM_LINE_BYTES
    )
