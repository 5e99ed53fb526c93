"""QONNX files that are refused: cut off, damaged, too large, or with what cannot be imported."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unflip.imports import CannotImport, qonnx
from unflip.imports.onnx_file import parse_onnx
from unflip.packing.ir import CannotPack

pytest.importorskip("onnx", reason="needs onnx: pip install 'unflip[onnx]'")

from onnx import TensorProto, helper, numpy_helper
from qonnx_writer import File


def small() -> File:
    file = File(4, 6, 6)
    file.sign()
    file.conv(4, 4, 3, 3)
    file.norm(4)
    return file


DATA = small().model().SerializeToString()


@pytest.mark.parametrize("length", [0, 1, 10, 100, len(DATA) // 3, len(DATA) // 2, len(DATA) - 1])
def test_a_cut_off_file_is_refused(length: int, tmp_path: Path, unflip: Any) -> None:
    source, out = tmp_path / "cut.onnx", tmp_path / "cut.unflip"
    source.write_bytes(DATA[:length])
    with pytest.raises(CannotImport, match=r"cut\.onnx: "):
        qonnx.load(source)
    if length == 100:
        assert unflip("import", "qonnx", source, "-o", out).code == 1
    assert not out.exists()


def test_damaged_bytes_are_refused_or_read() -> None:
    """Any changed byte: a named error or a network, and nothing else."""
    random = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(DATA)
        for place in random.integers(0, len(data), random.integers(1, 4)):
            data[place] = random.integers(0, 256)
        with contextlib.suppress(CannotImport, CannotPack):
            qonnx.build(parse_onnx(bytes(data), "file"))


def external(model: Any) -> None:
    tensor = model.graph.initializer[1]
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"


def cycle(model: Any) -> None:
    model.graph.node[0].input[0] = model.graph.node[-1].output[0]


def huge_input(model: Any) -> None:
    for dim in model.graph.input[0].type.tensor_type.shape.dim[1:]:
        dim.dim_value = 2**20


def huge_constant(model: Any) -> None:
    model.graph.initializer[1].dims[0] = 2**40


def empty_constant(model: Any) -> None:
    tensor = model.graph.initializer[1]
    tensor.raw_data = b""
    tensor.dims[:] = [0, 2**62, 2**62]


def too_wide(model: Any) -> None:
    """The numbers of small integers are stored as wider ones."""
    tensor = model.graph.initializer[1]
    tensor.raw_data, tensor.data_type = b"", TensorProto.UINT8
    tensor.dims[:] = [1]
    tensor.int32_data[:] = [300]


def growing(model: Any) -> None:
    """A scale that would make a weight of 2^40 numbers from two small constants."""
    tall = numpy_helper.from_array(np.ones((2**12, 1), np.float32), "tall")
    wide = numpy_helper.from_array(np.ones((1, 2**12), np.float32), "wide")
    model.graph.initializer.extend([tall, wide])
    node = next(n for n in model.graph.node if n.input[0] == "c1")
    node.input[:] = ["tall", "wide"]


def renamed(op: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.graph.node[-1].op_type = op

    return change


def attribute(name: str, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        node = next(n for n in model.graph.node if n.op_type == "Conv")
        node.attribute.append(helper.make_attribute(name, value))

    return change


def channels_last(model: Any) -> None:
    """The same operation on images whose channels are the last dimension."""
    model.graph.node[2].domain = "qonnx.custom_op.channels_last"


def numbers(place: int, value: float, dtype: Any = np.float32) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        old = model.graph.initializer[place]
        array = np.full(tuple(old.dims), value, dtype)
        old.CopyFrom(numpy_helper.from_array(array, old.name))

    return change


def no_binary(model: Any) -> None:
    for node in model.graph.node:
        if node.op_type == "Conv":
            node.input[1] = "c1"


def second_output(model: Any) -> None:
    model.graph.output.append(helper.make_tensor_value_info("v0", TensorProto.FLOAT, None))


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "external": (external, r"the constant 'c1' is in another file, which is not opened"),
    "cycle": (cycle, r"BipolarQuant .BipolarQuant_0. reads .v3., which no node before it makes"),
    "huge input": (huge_input, r"at most 1,048,576 channels|elements|cannot|channels"),
    "huge constant": (huge_constant, r"the constant 'c1' has the shape \(1099511627776"),
    "empty constant": (empty_constant, r"the constant 'c1' has the shape \(0, 4611686018427387904"),
    "too wide": (too_wide, r"the constant 'c1' has a number that does not fit its type"),
    "growing": (growing, r"do not broadcast to \(4096, 1\)"),
    "slice": (renamed("Slice"), r"its starts should be a few integers"),
    "unknown": (renamed("Loop"), r"Loop .*: this operation is not supported; remove it before"),
    "resize": (renamed("Resize"), r"Resize .BatchNormalization_3.: this operation is not supported"),
    "pool": (renamed("MaxPool"), r"MaxPool .* has no kernel_shape"),
    "channels last": (channels_last, r"Conv .Conv_2. is of the domain .qonnx.custom_op.channels_last."),
    "padding": (attribute("pads", [2**40] * 4), r"pads=\[1099511627776.* from 0 to 65,536"),
    "huge padding": (attribute("pads", [65536] * 4), r"at most|elements"),
    "stride": (attribute("strides", [0, 1]), r"strides=\[0, 1\] start at 1"),
    "groups": (attribute("group", 3), r"and 3 groups"),
    "auto": (attribute("auto_pad", "SAME_UPPER"), r"auto_pad=.SAME_UPPER. is not supported"),
    "text": (attribute("group", "many"), r"group=.many. should be a whole number"),
    "scale": (numbers(0, -1), r"BipolarQuant_0.: its scale is -1; it should be positive"),
    "nan": (numbers(0, np.nan), r"the constant .c0. contains NaN, infinity, or numbers"),
    "too large": (numbers(0, 1e300, np.float64), r"the constant .c0. .* too large for float32"),
    "variance": (numbers(6, -1), r"a variance plus epsilon is not positive"),
    "floats": (no_binary, r"there is nothing binary in it"),
    "outputs": (second_output, r"it has 2 outputs \(.v3., .v0.\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    model = small().model()
    change(model)
    path = tmp_path / "bad.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CannotImport, match=message) as error:
        qonnx.load(path)
    assert str(path) in str(error.value)


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    """Reading it would wait forever."""
    os.mkfifo(tmp_path / "pipe.onnx")
    for path in (tmp_path / "pipe.onnx", tmp_path):
        with pytest.raises(CannotImport, match="is not a file"):
            qonnx.load(path)


def test_a_missing_file_and_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotImport, match="cannot be read"):
        qonnx.load(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("hello, world" * 20)
    with pytest.raises(CannotImport, match="not an ONNX file"):
        qonnx.load(tmp_path / "text.onnx")
