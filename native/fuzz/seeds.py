"""Small valid networks that together contain every op, step and field of the format.

    python native/fuzz/seeds.py FOLDER     writes them there, as a fuzzer's first inputs

The tests of the loader start from them too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from unflip.packing.file import Packed, to_bytes

Fields = dict[str, Any]


class Network:
    """A graph that grows op by op. Each call returns the new value's number."""

    def __init__(self, *shape: int, preprocess: Fields | None = None, seed: int = 0) -> None:
        self.input = {"shape": list(shape), "preprocess": preprocess}
        self.ops: list[Fields] = []
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}
        self.random = np.random.default_rng(seed)

    def tensor(self, *shape: int) -> str:
        return self.keep(self.random.normal(size=shape).astype(np.float32))

    def keep(self, values: np.ndarray[Any, Any]) -> str:
        name = f"t{len(self.tensors)}"
        self.tensors[name] = values
        return name

    def op(self, kind: str, *inputs: int, **fields: Any) -> int:
        name = f"{kind}{len(self.ops)}"
        self.ops.append({"op": kind, "name": name, "inputs": list(inputs), **fields})
        return len(self.ops)

    def signs(self, *inputs: int) -> int:
        zero = self.keep(np.zeros((1, 1), np.float32))
        return self.op(
            "quantize",
            *inputs,
            thresholds=zero,
            strict=[False],
            coding="planes",
            scales=[2.0],
            offset=-1.0,
        )

    def conv(self, x: int, *shape: int, steps: list[Fields] | None = None, **fields: Any) -> int:
        window = {"stride": [1, 1], "dilation": [1, 1], "padding": [0, 0, 0, 0], "groups": 1}
        return self.op("conv", x, shape=list(shape), **{**window, **fields}, steps=steps or [])

    def bits(self, *shape: int) -> str:
        signs = self.random.integers(0, 2, size=int(np.prod(shape)))
        return self.keep(np.packbits(signs.astype(np.uint8), bitorder="little"))

    def whole(self, *shape: int) -> str:
        numbers = self.random.integers(-127, 128, size=shape)
        return self.keep(numbers.astype(np.int8).view(np.uint8))

    def packed(
        self, labels: list[str] | None = None, structure: str = "", **outputs: int
    ) -> Packed:
        returned: Fields = {"output": len(self.ops)}
        if outputs:
            found = [{"name": name, "value": value} for name, value in outputs.items()]
            returned = {"outputs": found, "structure": structure}
        graph = {"input": self.input, "ops": self.ops, **returned, "labels": labels}
        return Packed(graph, self.tensors)


def residual() -> Packed:
    """±1 weights and inputs with a shortcut, as in most binary networks."""
    n = Network(3, 6, 6, preprocess={"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.3]})
    affine = {"step": "affine", "scale": n.tensor(8), "shift": n.tensor(8)}
    first = n.conv(0, 8, 3, 3, 3, weight=n.tensor(8, 3, 3, 3), padding=[1, 1, 1, 1], steps=[affine])
    code = n.signs(first)
    steps = [{"step": "affine", "shift": n.tensor(8)}, {"step": "add", "value": first}]
    second = n.conv(
        code,
        *(8, 8, 3, 3),
        bits=n.bits(1, 8, 8, 3, 3),
        scales=n.tensor(1, 8),
        padding=[1, 1, 1, 1],
        steps=[*steps, {"step": "prelu", "slope": n.tensor(8)}],
    )
    mean = n.op("mean", second)
    n.op("softmax", n.conv(mean, 4, 8, 1, 1, weight=n.tensor(4, 8, 1, 1)))
    return n.packed(["cat", "dog", "Käfer", "鳥"])


def pools() -> Packed:
    """Float convolutions and pools with many kinds of windows."""
    n = Network(4, 9, 7)
    clamp = {"step": "clamp", "low": 0.0, "high": None}
    x = n.conv(
        0,
        *(6, 2, 3, 2),
        weight=n.tensor(6, 2, 3, 2),
        groups=2,
        stride=[1, 2],
        dilation=[2, 1],
        padding=[2, 0, 1, 1],
        steps=[clamp, {"step": "affine", "scale": n.tensor(1)}],
    )
    window = {"kernel": [3, 3], "stride": [2, 2], "padding": [1, 1]}
    most = n.op("max_pool", x, **window, ceil=True)
    n.op(
        "avg_pool",
        most,
        kernel=[2, 1],
        stride=[2, 1],
        padding=[1, 0],
        ceil=True,
        count_padding=True,
    )
    n.op("avg_pool", x, **window, ceil=True, count_padding=False)
    n.op("flatten", n.op("concat", most, len(n.ops)))
    return n.packed()


def levels() -> Packed:
    """Codes of several bits, several bases, and scales that depend on the input."""
    n = Network(4, 5, 5)
    unit = n.op("mean_abs", 0, over="sample")
    code = n.op(
        "quantize",
        *(0, unit),
        thresholds=n.keep(np.array([[0.2], [0.5], [1.0]], np.float32)),
        strict=[False, True, True],
        coding="levels",
        scales=[0.5, 1.0],
        offset=-0.25,
    )
    gain = n.op("mean_abs", 0, over="channels", groups=2)
    gate = n.op("mean", 0)
    x = n.conv(
        code,
        *(4, 2, 3, 3),
        bits=n.bits(2, 4, 2, 3, 3),
        scales=n.tensor(2, 1),
        offset=n.tensor(1),
        groups=2,
        padding=[1, 1, 1, 1],
        steps=[{"step": "mul", "value": gain}, {"step": "mul", "value": gate}],
    )
    planes = n.op(
        "quantize",
        x,
        thresholds=n.tensor(2, 4),
        strict=[True, False],
        coding="planes",
        scales=[0.7, 0.3],
        offset=0.1,
    )
    n.conv(
        planes, 3, 4, 1, 1, bits=n.bits(1, 3, 4, 1, 1), scales=n.tensor(1, 3), offset=n.tensor(3)
    )
    return n.packed()


def even() -> Packed:
    """Codes of three bits with evenly spaced thresholds, shared by all channels and per channel."""
    n = Network(4, 3, 5)
    steps = np.arange(7, dtype=np.float32)[:, None]
    fields = {"strict": [False] * 7, "coding": "levels", "scales": [0.5, 1.0, 2.0], "offset": -1.75}
    x = n.op("quantize", 0, thresholds=n.keep(steps / 4 - 0.8), **fields)
    x = n.conv(x, 4, 4, 1, 1, bits=n.bits(1, 4, 4, 1, 1), scales=n.tensor(1, 1))
    own = np.array([0.1, 0.3, 1.0, 7.0], np.float32)
    x = n.op("quantize", x, thresholds=n.keep(steps * own - own), **fields)
    n.conv(x, 2, 4, 3, 3, bits=n.bits(1, 2, 4, 3, 3), scales=n.tensor(1, 2), padding=[1, 1, 1, 1])
    return n.packed()


def pieces() -> Packed:
    """Slices, padding, and binary weights on floats."""
    n = Network(3, 8, 8)
    part = n.op("slice", 0, start=[0, 0, 1], stop=[3, 8, 8], step=[2, 2, 3])
    grown = n.op("pad", part, before=[1, 0, 1], after=[0, 1, 0])
    x = n.conv(grown, 5, 3, 2, 2, bits=n.bits(1, 5, 3, 2, 2), scales=n.tensor(1, 5))
    steps = [{"step": "clamp", "low": -1, "high": 1}, {"step": "prelu", "slope": n.tensor(1)}]
    n.op("map", x, steps=steps)
    return n.packed(list("abcde"))


def smooth() -> Packed:
    """Activations, norms and shuffles, before and after a code."""
    n = Network(4, 5, 6)
    x = n.op("curve", 0, function="gelu")
    x = n.op("normalize", x, groups=2, epsilon=1e-5)
    x = n.op("channel_shuffle", n.op("upsample", x, factor=[2, 1]), groups=2)
    x = n.conv(n.signs(x), 12, 4, 3, 3, bits=n.bits(1, 12, 4, 3, 3), scales=n.tensor(1, 12))
    x = n.op("pixel_shuffle", x, factor=[1, 2])
    x = n.op("resize", x, size=[7, 5], align_corners=False)
    x = n.op("resize", x, size=[4, 6], align_corners=True)
    for function in ("mish", "silu", "elu", "gelu_tanh", "tanh"):
        x = n.op("curve", x, function=function)
    gate = n.op("curve", n.op("mean", x), function="sigmoid")
    n.op("log_softmax", n.op("map", x, steps=[{"step": "mul", "value": gate}]))
    return n.packed()


def several() -> Packed:
    """Final and intermediate outputs: one read by a quantizer, a map and a pool, another returned twice."""
    n = Network(3, 6, 6)
    affine = {"step": "affine", "scale": n.tensor(8), "shift": n.tensor(8)}
    features = n.conv(
        0, 8, 3, 3, 3, weight=n.tensor(8, 3, 3, 3), padding=[1, 1, 1, 1], steps=[affine]
    )
    bits, scales = n.bits(1, 8, 8, 3, 3), n.tensor(1, 8)
    window = {"bits": bits, "scales": scales, "padding": [1, 1, 1, 1]}
    x = n.conv(n.signs(features), 8, 8, 3, 3, **window, steps=[{"step": "add", "value": features}])
    gate = n.op("map", features, steps=[{"step": "clamp", "low": 0.0, "high": None}])
    least = n.op("max_pool", features, kernel=[2, 2], stride=[2, 2], padding=[0, 0], ceil=False)
    boxes = n.conv(x, 4, 8, 1, 1, weight=n.tensor(4, 8, 1, 1))
    scores = n.op("softmax", n.conv(n.op("mean", x), 5, 8, 1, 1, weight=n.tensor(5, 8, 1, 1)))
    parts = {"gate": gate, "features": features, "least": least, "again": boxes}
    return n.packed(list("abcde"), "dict", scores=scores, boxes=boxes, **parts)


def ends() -> Packed:
    """8-bit first and last layers around a binary one, with pixels as input."""
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
    n = Network(3, 9, 9, preprocess={"mean": mean, "std": std})
    scale, shift = (255 * np.array(values, np.float32) for values in (std, mean))
    zero = np.round(shift).astype(np.uint8)
    image = n.op("to_bytes", 0, scale=n.keep(scale), shift=n.keep(shift), zero=n.keep(zero))
    affine = {"step": "affine", "scale": n.tensor(8), "shift": n.tensor(8)}
    first = n.conv(
        image,
        *(8, 3, 3, 3),
        bytes=n.whole(8, 3, 3, 3),
        scales=n.tensor(1, 8),
        padding=[1, 1, 1, 1],
        steps=[affine],
    )
    x = n.op("max_pool", first, kernel=[3, 3], stride=[2, 2], padding=[1, 1], ceil=False)
    x = n.conv(n.signs(x), 8, 8, 3, 3, bits=n.bits(1, 8, 8, 3, 3), scales=n.tensor(1, 8))
    one = n.keep(np.array([20.0], np.float32))
    half = n.keep(np.array([128], np.uint8))
    features = n.op("to_bytes", n.op("mean", x), scale=one, shift=one, zero=half)
    n.conv(features, 5, 8, 1, 1, bytes=n.whole(5, 8, 1, 1), scales=n.tensor(1, 1))
    return n.packed(list("abcde"))


def vector() -> Packed:
    """A perceptron: features instead of pixels."""
    n = Network(20, 1, 1)
    code = n.signs(0)
    affine = {"step": "affine", "scale": n.tensor(70), "shift": n.tensor(70)}
    x = n.conv(code, 70, 20, 1, 1, bits=n.bits(1, 70, 20), scales=n.tensor(1, 1), steps=[affine])
    n.conv(n.signs(x), 3, 70, 1, 1, bits=n.bits(1, 3, 70), scales=n.tensor(1, 3))
    return n.packed(["x", "y", "z"])


def pair() -> Packed:
    """A tuple of vectors, the first of which is computed last."""
    n = Network(6, 1, 1)
    x = n.conv(n.signs(0), 9, 6, 1, 1, bits=n.bits(1, 9, 6), scales=n.tensor(1, 9))
    y = n.conv(n.signs(x), 2, 9, 1, 1, bits=n.bits(1, 2, 9), scales=n.tensor(1, 2))
    return n.packed(None, "tuple", **{"0": y, "1": x})


def seeds() -> dict[str, Packed]:
    makers = (residual, pools, levels, even, pieces, smooth, vector, several, pair, ends)
    return {make.__name__: make() for make in makers}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, packed in seeds().items():
        (folder / f"{name}.unflip").write_bytes(to_bytes(packed))
