"""Arrays and structures as C constants. Equal arrays are written once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from unflip.packing.file import PackedFileError

Array = np.ndarray[Any, np.dtype[Any]]

TYPES = {
    "float32": "float",
    "uint8": "uint8_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "uint16": "uint16_t",
    "int32": "int32_t",
}
PER_LINE = {"float": 8, "uint8_t": 24, "int8_t": 24, "int16_t": 16, "uint16_t": 16, "int32_t": 12}


class Constants:
    """Collects definitions; ``bytes`` is their size on a 32-bit CPU."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.bytes = 0
        self._names: dict[tuple[str, bytes], str] = {}

    def array(self, array: Array) -> str:
        """The name of an array with this content."""
        flat = np.ascontiguousarray(array).ravel()
        kind = TYPES[str(flat.dtype)]
        key = kind, flat.tobytes()
        if key not in self._names:
            name = self._names[key] = f"c{len(self._names)}"
            texts = [c_float(v) if kind == "float" else str(int(v)) for v in flat]
            step = PER_LINE[kind]
            rows = [", ".join(texts[i : i + step]) for i in range(0, len(texts), step)]
            body = ",\n  ".join(rows)
            self.lines.append(f"static const {kind} {name}[{len(texts)}] = {{\n  {body}}};")
            self.bytes += -(-flat.nbytes // 4) * 4
        return self._names[key]

    def text(self, kind: str, count: str, body: str, size: int) -> str:
        """The name of a structure, or of an array of structures."""
        key = kind + count, body.encode()
        if key not in self._names:
            name = self._names[key] = f"c{len(self._names)}"
            self.lines.append(f"static const {kind} {name}{count} = {{{body}}};")
            self.bytes += size
        return self._names[key]


def c_float(value: Any) -> str:
    """An exact float constant."""
    if not math.isfinite(value):
        raise PackedFileError(
            f"a number of the network would be {value}, which C has no constant for"
        )
    text = float(value).hex()
    if text in ("0x0.0p+0", "-0x0.0p+0"):
        return "-0.0f" if text[0] == "-" else "0.0f"
    mantissa, exponent = text.split("p")
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}f"
