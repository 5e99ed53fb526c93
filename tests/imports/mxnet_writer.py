"""Writes MXNet's .params and symbol files: a small network in BMXNet's form, for the tests."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"<f4": 0, "<f8": 1, "<f2": 2, "|u1": 3, "<i4": 4, "|i1": 5, "<i8": 6}
C = 64  # channels, so that a row of signs fills whole words
EPS = "2e-05"


def params_bytes(arrays: dict[str, Any], form: str = "old") -> bytes:
    """``form``: how shapes are written: "old" (uint32), "int64", or "dense" (with a storage type)."""
    parts = [struct.pack("<QQQ", 0x112, 0, len(arrays))]
    for array in arrays.values():
        dims = len(array.shape)
        if form == "old":
            parts.append(struct.pack(f"<{1 + dims}I", dims, *array.shape))
        else:
            mark = {"int64": (0xF993FAC8,), "dense": (0xF993FAC9, 0)}[form]
            parts.append(struct.pack(f"<{len(mark)}II{dims}q", *mark, dims, *array.shape))
        parts.append(struct.pack("<iii", 1, 0, TYPES[array.dtype.str]))
        parts.append(np.ascontiguousarray(array).tobytes())
    parts.append(struct.pack("<Q", len(arrays)))
    for name in arrays:
        parts.append(struct.pack("<Q", len(name.encode())) + name.encode())
    return b"".join(parts)


def words(signs: Any) -> Any:
    """±1 as float64 words of 64 bits, lowest bit first."""
    bits = (np.asarray(signs).ravel() > 0).astype(np.uint8)
    return np.frombuffer(np.packbits(bits, bitorder="little").tobytes(), "<f8")


class Small:
    """A stem, one unit with a binary shortcut, one without, and a linear layer; 10 classes."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.arrays: dict[str, Any] = {}
        self.signs: dict[str, Any] = {}
        self.nodes: list[dict[str, Any]] = []
        self.numbers: dict[str, int] = {}
        x = self.node("null", "data", [])
        x = self.norm("bn_data", x, 3, fix_gamma="True", eps=EPS, momentum="0.9")
        self.arrays["arg:conv0_weight"] = self.floats(C, 3, 3, 3) / 5
        x = self.conv("Convolution", "conv0", x, 3)
        for unit in (1, 2):
            inner = self.norm(f"unit{unit}_bn1", x, C, eps=EPS, fix_gamma="False")
            if unit == 2:
                inner = self.node("QActivation", "q0", [inner], act_bit="1", backward_only="True")
            shortcut = self.binary(f"unit{unit}_sc", inner, 1, 1) if unit == 1 else x
            y = self.binary(f"unit{unit}_conv1", inner, 3, 1)
            y = self.norm(f"unit{unit}_bn2", y, C, eps=EPS, fix_gamma="False")
            y = self.binary(f"unit{unit}_conv2", y, 3, 1)
            x = self.node("elemwise_add", f"_plus{unit}", [y, shortcut])
        x = self.norm("bn1", x, C, eps=EPS, fix_gamma="False")
        x = self.node("Activation", "relu1", [x], act_type="relu")
        x = self.node("Pooling", "pool", [x], kernel="(2, 2)", stride="(2, 2)", pool_type="max")
        x = self.node("Pooling", "pool1", [x], global_pool="True", kernel="(7, 7)", pool_type="avg")
        x = self.node("Flatten", "flatten0", [x])
        self.arrays |= {"arg:fc1_weight": self.floats(10, C), "arg:fc1_bias": self.floats(10)}
        both = [self.node("null", f"fc1_{part}", []) for part in ("weight", "bias")]
        x = self.node("FullyConnected", "fc1", [x, *both], num_hidden="10")
        label = self.node("null", "softmax_label", [])
        self.node("SoftmaxOutput", "softmax", [x, label])

    def floats(self, *shape: int) -> Any:
        return self.random.normal(size=shape).astype("<f4")

    def node(self, op: str, name: str, inputs: list[int], **attributes: str) -> int:
        entry = {"op": op, "name": name, "inputs": [[i, 0, 0] for i in inputs]}
        if attributes:
            entry["attr"] = attributes
        self.nodes.append(entry)
        self.numbers[name] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def norm(self, name: str, x: int, channels: int, **attributes: str) -> int:
        spread = 30 if name.endswith("bn2") or name == "unit2_bn1" else 1
        self.arrays |= {
            f"arg:{name}_gamma": 1 + self.floats(channels) / 5,
            f"arg:{name}_beta": self.floats(channels) / 5,
            f"aux:{name}_moving_mean": self.floats(channels)
            + (0 if name in ("bn_data", "unit1_bn1") else C * 9 / 2),
            f"aux:{name}_moving_var": spread**2 * (1 + self.floats(channels) ** 2),
        }
        parts = ("gamma", "beta", "moving_mean", "moving_var")
        rest = [self.node("null", f"{name}_{part}", []) for part in parts]
        return self.node("BatchNorm", name, [x, *rest], **attributes)

    def conv(self, op: str, name: str, x: int, kernel: int, **attributes: str) -> int:
        size, pad = f"({kernel}, {kernel})", f"({kernel // 2}, {kernel // 2})"
        weight = self.node("null", f"{name}_weight", [])
        sizes = {"kernel": size, "pad": pad, "stride": "(1, 1)", "num_filter": str(C)}
        return self.node(
            op, name, [x, weight], no_bias="True", workspace="256", **sizes, **attributes
        )

    def binary(self, name: str, x: int, kernel: int, stride: int) -> int:
        signs = self.random.integers(0, 2, (C, C, kernel, kernel)) * 2 - 1
        self.signs[name] = signs.astype(np.float32)
        self.arrays[f"arg:{name}_weight"] = words(signs)
        bits = {"act_bit": "1", "binarized_weights_only": "True"}
        return self.conv("QConvolution", name, x, kernel, **bits)

    def symbol(self) -> dict[str, Any]:
        return {"nodes": self.nodes, "heads": [[len(self.nodes) - 1, 0, 0]], "arg_nodes": []}

    def write(self, folder: Path, form: str = "old") -> Path:
        path = folder / "small-0003.params"
        path.write_bytes(params_bytes(self.arrays, form))
        (folder / "small-symbol.json").write_text(json.dumps(self.symbol()))
        return path
