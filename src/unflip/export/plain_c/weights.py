"""Float and 8-bit weights in the order in which the C code reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from unflip.export.plain_c.plan import Conv

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32


def dense_weights(conv: Conv) -> Array:
    """Float weights, (O, I, kh, kw). Binary ones are summed in float64 and rounded once, as in the runtime."""
    if conv.weight is not None:
        return conv.weight
    assert conv.signs is not None
    assert conv.scales is not None
    total = np.zeros(conv.shape)
    if conv.offset is not None:
        total += conv.offset.astype(np.float64)[:, None, None, None]
    for signs, scales in zip(conv.signs, conv.scales, strict=True):
        own = scales.astype(np.float64)[:, None, None, None]
        total = total + np.where(signs, own, -own)
    return total.astype(F32)


def blocked_weights(dense: Array, groups: int) -> Array:
    """Per group: blocks of eight filters, [tap][channel][8], then single filters, [tap][channel]."""
    places = dense.transpose(0, 2, 3, 1).reshape(len(dense), -1)
    parts: list[Array] = []
    for own in np.split(places, groups):
        whole = len(own) // 8 * 8
        parts += [own[i : i + 8].T.ravel() for i in range(0, whole, 8)]
        parts += list(own[whole:])
    return np.concatenate(parts)


def window_numbers(conv: Conv) -> int:
    """Numbers of a window of whole numbers, and zeros up to a multiple of four."""
    return -(-conv.depth // 4) * 4


def copied_numbers(conv: Conv) -> int:
    """Numbers of the copy of a window; or, if it is read in place, those that are read after its end."""
    pieces = conv.shape[2] * (1 if conv.dilation[1] == 1 else conv.shape[3])
    return window_numbers(conv) if pieces > 1 else 4


def byte_weights(conv: Conv) -> Array:
    """Per group: blocks of four filters, [four places][filter][4], then single filters, [four places][4].

    Of each four places, the order is 0 2 1 3: then sign extension in one instruction gives two adjacent ones.
    """
    assert conv.bytes is not None
    filters = len(conv.bytes)
    places = np.zeros((filters, window_numbers(conv)), np.int8)
    places[:, : conv.depth] = conv.bytes.transpose(0, 2, 3, 1).reshape(filters, -1)
    fours = places.reshape(filters, -1, 4)[:, :, [0, 2, 1, 3]]
    parts: list[Array] = []
    for own in np.split(fours, conv.groups):
        whole = len(own) // 4 * 4
        parts += [own[i : i + 4].swapaxes(0, 1).ravel() for i in range(0, whole, 4)]
        parts += [one.ravel() for one in own[whole:]]
    return np.concatenate(parts)


def stem_weights(dense: Array) -> Array:
    """The right factors of the 100 products per channel, in the order of use; computed in float64, rounded once."""
    columns = _stem_terms(dense.astype(np.float64))  # O, I, row, term
    both = _stem_terms(columns.swapaxes(2, 3)).swapaxes(2, 3)  # O, I, row term, column term
    first = (0, 3, 4, 7, 10)
    parts = []
    for kind in range(4):
        for column in range(4):
            part = both[:, :, first[kind] : first[kind + 1], first[column] : first[column + 1]]
            parts.append(part.transpose(0, 2, 3, 1).reshape(len(dense), -1))
    return np.concatenate(parts, 1).astype(F32)


def _stem_terms(taps: Array) -> Array:
    """Ten terms of the seven taps along the last axis."""
    a0, b0, a1, b1, a2, b2, a3 = np.moveaxis(taps, -1, 0)
    terms = [
        a0 + a1, a2 + a3, (b0 + b1 + b2) / 2, (b0 - b1 + b2) / 2, a0, a2, b0, a1, a3, b2,
    ]  # fmt: skip
    return np.stack(terms, -1)
