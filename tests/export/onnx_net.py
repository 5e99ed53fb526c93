"""Small packed networks for the tests of exported files."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from unflip.packing.file import Packed


class Net:
    """Collects ops and tensors. ``exact``: numbers are small eighths, so that sums are exact and ties happen."""

    def __init__(self, shape: tuple[int, int, int], seed: int = 0, exact: bool = True) -> None:
        self.random = np.random.default_rng(seed)
        self.shape, self.exact = shape, exact
        self.ops: list[Any] = []
        self.tensors: dict[str, Any] = {}
        self.labels: Any = None
        self.preprocess: Any = None

    def numbers(self, *shape: int) -> Any:
        if not self.exact:
            return self.random.normal(size=shape).astype(np.float32)
        return (self.random.integers(-16, 17, shape) / 8).astype(np.float32)

    def tensor(self, *shape: int) -> str:
        return self.keep(self.numbers(*shape))

    def keep(self, array: Any) -> str:
        name = f"t{len(self.tensors)}"
        self.tensors[name] = array
        return name

    def op(self, kind: str, *inputs: int, **fields: Any) -> int:
        self.ops.append({"op": kind, "name": f"{kind}{len(self.ops)}", "inputs": inputs, **fields})
        return len(self.ops)

    def quantize(self, *inputs: int, steps: int = 1, channels: int = 1, **fields: Any) -> int:
        fields = {
            "strict": [False] * steps,
            "coding": "planes",
            "scales": [2.0],
            "offset": -1.0,
        } | fields
        return self.op("quantize", *inputs, thresholds=self.tensor(steps, channels), **fields)

    def to_bytes(self, x: int, scale: Any, shift: Any, zero: Any) -> int:
        arrays = {"scale": np.float32(scale), "shift": np.float32(shift), "zero": np.uint8(zero)}
        kept = {key: self.keep(np.atleast_1d(array)) for key, array in arrays.items()}
        return self.op("to_bytes", x, **kept)

    def byte_conv(self, x: int, shape: list[int], **fields: Any) -> int:
        """With 8-bit weights, of which a quarter are -127, 127 or 0."""
        weights = self.random.integers(-127, 128, shape)
        extreme = self.random.choice([-127, 127, 0], shape)
        whole = np.where(self.random.random(shape) < 0.25, extreme, weights).astype(np.int8)
        scales = fields.pop("scales", self.numbers(1, shape[0]) / 1000)
        fields |= {"bytes": self.keep(whole.view(np.uint8)), "scales": self.keep(scales)}
        defaults = {"stride": [1, 1], "dilation": [1, 1], "padding": [0] * 4, "groups": 1}
        return self.op("conv", x, shape=shape, **defaults | {"steps": []} | fields)

    def conv(
        self, x: int, shape: list[int], bases: int = 1, floats: bool = False, **fields: Any
    ) -> int:
        defaults = {
            "stride": [1, 1],
            "dilation": [1, 1],
            "padding": [0] * 4,
            "groups": 1,
            "steps": [],
        }
        if floats:
            return self.op("conv", x, shape=shape, weight=self.tensor(*shape), **defaults | fields)
        signs = self.random.integers(0, 2, bases * int(np.prod(shape)), dtype=np.uint8)
        bits = self.keep(np.packbits(signs, bitorder="little"))
        if "scales" not in fields:
            fields["scales"] = self.tensor(bases, shape[0])
        return self.op("conv", x, shape=shape, bits=bits, **defaults | fields)

    def packed(self) -> Packed:
        given = {"shape": list(self.shape), "preprocess": self.preprocess}
        graph = {"input": given, "ops": self.ops, "output": len(self.ops), "labels": self.labels}
        return Packed(json.loads(json.dumps(graph)), self.tensors)
