"""A plain implementation of every op of docs/format.md, which faster runtimes are compared with.

Values are float32. Sums of convolutions and means are computed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unflip.packing.file import Array, Packed, outputs_of

Fields = dict[str, Any]

Handler = Callable[[Fields, "_Tensors", list[Tensor], list[Tensor]], Tensor]
OPS: dict[str, Handler] = {}


def _op(function: Handler) -> Handler:
    """Decorator: implements the op of the function's name (without an underscore at its end)."""
    OPS[function.__name__.rstrip("_")] = function
    return function


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": F.elu,
    "mish": F.mish,
}


def evaluate(packed: Packed, x: Tensor) -> Tensor:
    """The output of a network with one output, N × C × H × W, for a batch of inputs (vectors may be N × F)."""
    found = evaluate_outputs(packed, x)
    if len(found) != 1:
        raise ValueError(
            f"the network has {len(found)} outputs ({', '.join(found)}); call evaluate_outputs"
        )
    return next(iter(found.values()))


def evaluate_outputs(packed: Packed, x: Tensor) -> dict[str, Tensor]:
    """All outputs by name. The output of a model that returned a single tensor is named "output"."""
    values = evaluate_all(packed, x)
    return {name: values[value] for name, value, _ in outputs_of(packed.graph)}


def evaluate_all(packed: Packed, x: Tensor) -> list[Tensor]:
    """Every value of the graph. A code is given as the float value it represents."""
    values = [x.to(torch.float32).reshape(len(x), *packed.graph["input"]["shape"])]
    for op in packed.graph["ops"]:
        values.append(run_op(op, packed.tensors, values))
    return values


def run_op(op: Fields, tensors: dict[str, Array], values: list[Tensor]) -> Tensor:
    """The value of one op, given the values before it."""
    inputs = [values[i] for i in op["inputs"]]
    return OPS[op["op"]](op, _Tensors(tensors), inputs, values)


class _Tensors:
    """The file's tensors as torch tensors."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self.arrays = arrays

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(np.array(self.arrays[name]))


def _channels(vector: Tensor) -> Tensor:
    return vector.view(1, -1, 1, 1)


@_op
def quantize(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    """Count or collect the steps that are reached, then add the scaled bit planes."""
    x = inputs[0]
    reached = []
    for threshold, strict in zip(tensors[op["thresholds"]], op["strict"], strict=True):
        t = _channels(threshold)
        if len(inputs) == 2:
            t = t * inputs[1]
        reached.append(x > t if strict else x >= t)
    planes = reached
    if op["coding"] == "levels":
        level = torch.stack(reached).sum(0)
        planes = [(level >> p) & 1 for p in range(len(op["scales"]))]
    code = torch.full(x.shape, op["offset"], dtype=torch.float64)
    for scale, plane in zip(op["scales"], planes, strict=True):
        code += scale * plane.to(torch.float64)
    return code.to(torch.float32)


@_op
def to_bytes(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    """Whole numbers n - zero, n = 0 .. 255."""
    scale, shift, zero = (_channels(tensors[op[key]]) for key in ("scale", "shift", "zero"))
    place = (inputs[0] * scale + shift).nan_to_num(nan=0.0)
    return torch.round(place.clamp(0, 255)) - zero


def conv_weight(op: Fields, tensors: dict[str, Array]) -> Tensor:
    """The weight of a conv op, in float64; of one with bytes the whole numbers."""
    own = _Tensors(tensors)
    if "weight" in op:
        return own[op["weight"]].double()
    if "bytes" in op:
        return torch.from_numpy(tensors[op["bytes"]].view(np.int8).astype(np.float64))
    scales, shape = own[op["scales"]].double(), op["shape"]
    bases, filters = len(scales), shape[0]
    bits = np.unpackbits(tensors[op["bits"]], bitorder="little")[: bases * int(np.prod(shape))]
    signs = torch.from_numpy(bits.astype(np.float64) * 2 - 1).view(bases, *shape)
    weight = (scales.expand(bases, filters)[:, :, None, None, None] * signs).sum(0)
    if "offset" in op:
        weight = weight + own[op["offset"]].double().view(-1, 1, 1, 1)
    return weight


@_op
def conv(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    top, left, bottom, right = op["padding"]
    x = F.pad(inputs[0].double(), (left, right, top, bottom))
    weight = conv_weight(op, tensors.arrays)
    y = F.conv2d(x, weight, None, op["stride"], 0, op["dilation"], op["groups"])
    y = y.to(torch.float32)
    if "bytes" in op:
        y = y * _channels(tensors[op["scales"]])
    return apply_steps(op["steps"], tensors, y, values)


@_op
def map_(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    return apply_steps(op["steps"], tensors, inputs[0], values)


def apply_steps(steps: list[Fields], tensors: _Tensors, x: Tensor, values: list[Tensor]) -> Tensor:
    """Apply the steps in order, each in float32."""
    for step in steps:
        kind = step["step"]
        if kind == "affine":
            x = x * _channels(tensors[step["scale"]]) if "scale" in step else x
            x = x + _channels(tensors[step["shift"]]) if "shift" in step else x
        elif kind == "prelu":
            x = torch.where(x >= 0, x, _channels(tensors[step["slope"]]) * x)
        elif kind == "clamp":
            x = x if step["low"] is None else x.clamp(min=step["low"])
            x = x if step["high"] is None else x.clamp(max=step["high"])
        elif kind == "add":
            x = x + values[step["value"]]
        else:
            x = x * _spread(values[step["value"]], x.shape[1])
    return x


def _spread(factor: Tensor, channels: int) -> Tensor:
    """Repeat channel k of a factor for the k-th group of channels."""
    return factor.repeat_interleave(channels // factor.shape[1], 1)


@_op
def max_pool(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    return F.max_pool2d(inputs[0], op["kernel"], op["stride"], op["padding"], ceil_mode=op["ceil"])


@_op
def avg_pool(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    y = F.avg_pool2d(
        inputs[0].double(),
        op["kernel"],
        op["stride"],
        op["padding"],
        op["ceil"],
        op["count_padding"],
    )
    return y.to(torch.float32)


@_op
def mean(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    return inputs[0].double().mean((2, 3), keepdim=True).to(torch.float32)


@_op
def mean_abs(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    absolute = inputs[0].double().abs()
    if op["over"] == "sample":
        return absolute.mean((1, 2, 3), keepdim=True).to(torch.float32)
    return absolute.unflatten(1, (op["groups"], -1)).mean(2).to(torch.float32)


@_op
def concat(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    return torch.cat(inputs, 1)


@_op
def slice_(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    c, h, w = map(slice, op["start"], op["stop"], op["step"])
    return inputs[0][:, c, h, w]


@_op
def pad(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    (c0, h0, w0), (c1, h1, w1) = op["before"], op["after"]
    return F.pad(inputs[0], (w0, w1, h0, h1, c0, c1))


@_op
def flatten(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    return inputs[0].flatten(1)[:, :, None, None]


@_op
def softmax(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    return inputs[0].double().softmax(1).to(torch.float32)


@_op
def log_softmax(
    op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]
) -> Tensor:
    return inputs[0].double().log_softmax(1).to(torch.float32)


@_op
def curve(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    return ACTIVATIONS[op["function"]](inputs[0].double()).to(torch.float32)


@_op
def normalize(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    return F.group_norm(inputs[0].double(), op["groups"], eps=op["epsilon"]).to(torch.float32)


@_op
def upsample(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    high, wide = op["factor"]
    return inputs[0].repeat_interleave(high, 2).repeat_interleave(wide, 3)


@_op
def resize(op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]) -> Tensor:
    x, size, corners = inputs[0].double(), op["size"], op["align_corners"]
    y = F.interpolate(x, size, mode="bilinear", align_corners=corners)
    return y.to(torch.float32)


@_op
def pixel_shuffle(
    op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]
) -> Tensor:
    (n, c, h, w), (high, wide) = inputs[0].shape, op["factor"]
    parts = inputs[0].view(n, c // (high * wide), high, wide, h, w)
    return parts.permute(0, 1, 4, 2, 5, 3).reshape(n, -1, h * high, w * wide)


@_op
def channel_shuffle(
    op: Fields, tensors: _Tensors, inputs: list[Tensor], values: list[Tensor]
) -> Tensor:
    return inputs[0].unflatten(1, (op["groups"], -1)).transpose(1, 2).flatten(1, 2)
