"""A binary convolution of a code as a sum of terms, coefficient times whole number, as the runtime computes it.

A code is offset + Σ scales[p] · plane[p]. Most codes are whole multiples of a unit: then there is one whole number per
base, and nothing is rounded before it is multiplied. native/src/engine/binary_sums.h has the same in C++; the order
and the rounding of all products must agree, or the last bits of results differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unflip.export.plain_c.plan import Conv

Array = np.ndarray[Any, np.dtype[Any]]

LARGEST_MULTIPLE = 4096
MOST_DIVISOR = 4
MOST_BYTE = 255
F32 = np.float32


@dataclass(frozen=True)
class Term:
    """scale[filter] · (signs_times · S + Σ over its planes of multiple · D).

    S and D are sums over the window: of the signs inside the image, and of signs · plane. For a term of the window,
    S is the number of places inside the image, and D the sum of the plane.
    """

    scale: Array
    base: int
    first_plane: int
    planes: int
    signs_times: int
    of_window: bool = False


@dataclass(frozen=True)
class Whole:
    """Results of a convolution that are whole numbers times a factor: scale[filter] · number."""

    scale: Array
    most: int  # the largest absolute number


@dataclass(frozen=True)
class Sums:
    """All terms, in the order of addition, and the factor of each plane."""

    terms: tuple[Term, ...]
    multiples: tuple[int, ...]
    largest: int  # the largest absolute value of a code, in units; 1 if there is no unit

    @property
    def one_term(self) -> bool:
        return len(self.terms) == 1 and self.terms[0].planes == 1 and len(self.multiples) == 1


def whole_numbers(conv: Conv, sums: Sums | None) -> Whole | None:
    """If the epilogue of a convolution gets whole numbers. ``sums``: of a binary one."""
    if sums is not None and sums.one_term:
        return Whole(sums.terms[0].scale, conv.depth * sums.largest)
    if conv.bytes is None:
        return None
    assert conv.scales is not None
    sizes = np.abs(conv.bytes.astype(np.int64)).reshape(len(conv.bytes), -1).sum(1)
    return Whole(conv.scales[0], MOST_BYTE * int(sizes.max()))


@dataclass(frozen=True)
class _Units:
    unit: np.float32
    scales: tuple[int, ...]
    offset: int

    @property
    def largest(self) -> int:
        return abs(self.offset) + sum(map(abs, self.scales))


def _as_multiple(value: Any, unit: Any) -> int | None:
    multiple = np.rint(value / unit)
    if not abs(multiple) <= LARGEST_MULTIPLE or multiple * unit != value:
        return None
    return int(multiple)


def _units(scales: Array, offset: Any) -> _Units | None:
    """The code in multiples of a unit, if there is one."""
    sizes = [abs(v) for v in (*scales, offset) if v != 0]
    smallest = min(sizes) if sizes else F32(1)
    for divisor in range(1, MOST_DIVISOR + 1):
        unit = F32(smallest / F32(divisor))
        if not unit >= np.finfo(F32).tiny:
            continue
        found = [_as_multiple(v, unit) for v in (*scales, offset)]
        if all(m is not None for m in found):
            *whole, last = [int(m) for m in found if m is not None]
            return _Units(unit, tuple(whole), last)
    return None


def binary_sums(
    weight_scales: Array,
    weight_offset: Array | None,
    code_scales: Any,
    code_offset: float,
    depth: int,
) -> Sums:
    """The terms for weights with scales (bases, filters) and an offset per filter; ``depth``: weights of a filter."""
    scales, offset = np.asarray(code_scales, F32), F32(code_offset)
    units = _units(scales, offset)
    if units is not None and depth * units.largest >= 2**30:
        units = None
    terms: list[Term] = []
    for base, own in enumerate(weight_scales):
        if units is not None:
            terms.append(Term(own * units.unit, base, 0, len(scales), units.offset))
            continue
        terms += [Term(own * s, base, p, 1, 0) for p, s in enumerate(scales)]
        if offset != 0:
            terms.append(Term(own * offset, base, 0, 0, 1))
    if weight_offset is not None and bool((weight_offset != 0).any()):
        if units is not None:
            terms.append(Term(weight_offset * units.unit, 0, 0, len(scales), units.offset, True))
        else:
            terms += [Term(weight_offset * s, 0, p, 1, 0, True) for p, s in enumerate(scales)]
            if offset != 0:
                terms.append(Term(weight_offset * offset, 0, 0, 0, 1, True))
    multiples = units.scales if units is not None else (1,) * len(scales)
    rounded = tuple(replace(t, scale=t.scale.astype(F32)) for t in terms)
    return Sums(rounded, multiples, units.largest if units is not None else 1)
