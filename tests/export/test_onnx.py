"""The ONNX file runs in onnxruntime to what the format's page says, for every op and step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_net import Net

from unflip.export.onnx import export, to_model
from unflip.packing.file import PackedFileError, write
from unflip.packing.reference import evaluate

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'unflip[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime to run what it wrote")


def run_onnx(model: Any, x: Any) -> Any:
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    return session(model).run(None, {"input": x})[0]


def session(model: Any, **options: Any) -> Any:
    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = chosen.inter_op_num_threads = 1
    for name, value in options.items():
        setattr(chosen, name, value)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), chosen, providers=["CPUExecutionProvider"]
    )


def check(net: Net, tolerance: float = 1e-5) -> Any:
    """onnxruntime and the plain evaluation agree on a batch of three."""
    packed, x = net.packed(), net.numbers(3, *net.shape)
    expected = evaluate(packed, torch.from_numpy(x)).numpy()
    if expected.shape[2:] == (1, 1):
        expected = expected[:, :, 0, 0]
    if net.shape[1:] == (1, 1):
        x = x[:, :, 0, 0]
    found = run_onnx(to_model(packed), x)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"strict": [True]},
        {"channels": 5},
        {"scales": [1.0], "offset": 0.0},
        {"scales": [0.7], "offset": -0.3},  # no common unit: the offset goes apart
        {"steps": 2, "coding": "levels", "scales": [1.0, 2.0], "offset": -1.0, "strict": [False, True]},
        {"steps": 3, "coding": "levels", "scales": [1 / 3, 2 / 3], "offset": 0.0, "channels": 5},
        {"steps": 3, "coding": "levels", "scales": [0.3, 0.6], "offset": 0.1},
        {"steps": 2, "scales": [1.0, 0.5], "offset": -0.5, "strict": [True, False]},
        {"steps": 3, "scales": [0.31, 0.17, 1.9], "offset": 0.23, "channels": 5},
    ],
)  # fmt: skip
@pytest.mark.parametrize("unit", [False, True])
def test_codes(fields: dict[str, Any], unit: bool) -> None:
    net = Net((5, 6, 7))
    inputs = [0, net.op("mean_abs", 0, over="sample")] if unit else [0]
    net.conv(net.quantize(*inputs, **fields), [4, 5, 3, 3], padding=[1, 1, 1, 1])
    check(net)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("steps", "offset"), [(8, 0.0), (100, -3.0), (255, 0.1)])
def test_many_steps(channels: int, strict: bool, steps: int, offset: float) -> None:
    """In no order, with ties; x is on a threshold more often than not."""
    net = Net((3, 4, 4))
    code = net.quantize(
        0,
        steps=steps,
        channels=channels,
        coding="levels",
        scales=[2.0**p for p in range(steps.bit_length())],
        offset=offset,
        strict=[strict] * steps,
    )
    net.conv(code, [3, 3, 1, 1])
    check(net)


@pytest.mark.parametrize("source", ["code", "codes with an offset", "floats"])
@pytest.mark.parametrize("bases", [1, 3])
@pytest.mark.parametrize("offset", [None, "one", "all"])
@pytest.mark.parametrize("groups", [1, 2])
def test_binary_weights(source: str, bases: int, offset: str | None, groups: int) -> None:
    net = Net((6, 7, 5))
    offsets = {"scales": [0.7], "offset": 0.1} if source == "codes with an offset" else {}
    x = 0 if source == "floats" else net.quantize(0, **offsets)
    fields: dict[str, Any] = {"scales": net.tensor(bases, 4 if groups == 1 else 1)}
    if offset:
        fields["offset"] = net.tensor(1 if offset == "one" else 4)
    net.conv(x, [4, 6 // groups, 3, 3], bases, padding=[2, 1, 0, 1], groups=groups, **fields)
    check(net)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_geometry(data: st.DataObject) -> None:
    """Any kernel, stride, dilation, padding, groups; bits that do not fill their last byte."""
    small = st.integers(1, 3)
    groups, kh, kw = data.draw(small), data.draw(small), data.draw(small)
    channels, filters = groups * data.draw(small), groups * data.draw(small)
    net = Net((channels, data.draw(st.integers(5, 9)), data.draw(st.integers(5, 9))))
    net.conv(
        net.quantize(0, channels=data.draw(st.sampled_from([1, channels]))),
        [filters, channels // groups, kh, kw],
        bases=data.draw(small),
        stride=[data.draw(small), data.draw(small)],
        dilation=[data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))],
        padding=[data.draw(st.integers(0, 2)) for _ in range(4)],
        groups=groups,
    )
    check(net)


def test_float_conv() -> None:
    net = Net((4, 9, 9))
    steps = [{"step": "affine", "scale": net.tensor(6), "shift": net.tensor(6)}]
    net.conv(
        0, [6, 2, 3, 3], floats=True, groups=2, stride=[2, 1], padding=[1, 0, 2, 1], steps=steps
    )
    check(net)


@pytest.mark.parametrize("channels", [1, 4])
def test_bytes(channels: int) -> None:
    """Ties, saturation on both sides, and padding."""
    net = Net((4, 9, 9))
    whole = net.random.integers(-127, 128, (6, 2, 3, 3)).astype(np.int8).view(np.uint8)
    code = net.op(
        "to_bytes",
        0,
        scale=net.keep(np.full(channels, 60.0, np.float32)),
        shift=net.keep(net.random.integers(0, 512, channels).astype(np.float32) / 2),
        zero=net.keep(net.random.integers(0, 256, channels).astype(np.uint8)),
    )
    net.op(
        "conv",
        code,
        shape=[6, 2, 3, 3],
        bytes=net.keep(whole),
        scales=net.tensor(1, 6),
        stride=[2, 1],
        dilation=[1, 1],
        padding=[1, 0, 2, 1],
        groups=2,
        steps=[{"step": "affine", "shift": net.tensor(6)}],
    )
    check(net)


def test_linear() -> None:
    net = Net((3, 4, 5))
    code = net.quantize(net.op("flatten", 0))
    hidden = net.conv(code, [7, 60, 1, 1], steps=[{"step": "clamp", "low": 0, "high": None}])
    net.conv(hidden, [5, 7, 1, 1], floats=True, steps=[{"step": "affine", "shift": net.tensor(5)}])
    assert check(net).shape == (3, 5)


def test_vectors() -> None:
    """Vectors have no height and width, neither on the way in nor on the way out."""
    net = Net((9, 1, 1))
    net.conv(0, [4, 9, 1, 1], floats=True)
    check(net)
    check(Net((9, 1, 1)))


@pytest.mark.parametrize(
    "step",
    [
        {"step": "affine", "scale": (6,), "shift": (6,)},
        {"step": "affine", "scale": (1,)},
        {"step": "affine", "shift": (1,)},
        {"step": "affine"},
        {"step": "prelu", "slope": (6,)},
        {"step": "prelu", "slope": (1,)},
        {"step": "clamp", "low": 0, "high": None},
        {"step": "clamp", "low": -1, "high": 1},
        {"step": "clamp", "low": None, "high": 0.5},
        {"step": "clamp", "low": 0.25, "high": None},
        {"step": "clamp", "low": None, "high": None},
        {"step": "add", "value": 0},
        {"step": "mul", "value": 0},
        {"step": "mul", "value": 1},
        {"step": "mul", "value": 2},
        {"step": "mul", "value": 3},
        {"step": "mul", "value": 4},
    ],
)
@pytest.mark.parametrize("op", ["map", "conv", "binary conv"])
def test_steps(step: dict[str, Any], op: str) -> None:
    net = Net((6, 4, 5))
    net.op("mean_abs", 0, over="channels", groups=1)
    net.op("mean_abs", 0, over="channels", groups=2)
    net.op("mean_abs", 0, over="channels", groups=6)
    net.op("mean", 0)
    steps = [{k: net.tensor(*v) if isinstance(v, tuple) else v for k, v in step.items()}]
    if op == "map":
        net.op("map", 0, steps=steps)
    elif op == "conv":
        net.conv(0, [6, 6, 1, 1], floats=True, steps=steps)
    else:
        net.conv(net.quantize(0), [6, 6, 1, 1], steps=steps)
    check(net)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pools(data: st.DataObject) -> None:
    pick = data.draw
    kernel = [pick(st.integers(1, 4)), pick(st.integers(1, 4))]
    fields: dict[str, Any] = {
        "kernel": kernel,
        "stride": [pick(st.integers(1, 5)), pick(st.integers(1, 5))],
        "padding": [pick(st.integers(0, k // 2)) for k in kernel],
        "ceil": pick(st.booleans()),
    }
    kind = pick(st.sampled_from(["max_pool", "avg_pool"]))
    if kind == "avg_pool":
        fields["count_padding"] = pick(st.booleans())
    net = Net((2, pick(st.integers(4, 9)), pick(st.integers(4, 9))))
    net.op(kind, 0, **fields)
    check(net)


@pytest.mark.parametrize(
    ("kind", "inputs", "fields"),
    [
        ("mean", [0], {}),
        ("mean_abs", [0], {"over": "sample"}),
        ("mean_abs", [0], {"over": "channels", "groups": 1}),
        ("mean_abs", [0], {"over": "channels", "groups": 3}),
        ("concat", [0, 1, 0], {}),
        ("concat", [0], {}),
        ("slice", [0], {"start": [1, 0, 2], "stop": [6, 5, 7], "step": [2, 1, 3]}),
        ("pad", [0], {"before": [1, 0, 2], "after": [0, 3, 1]}),
        ("flatten", [0], {}),
        ("softmax", [0], {}),
        ("log_softmax", [0], {}),
        ("curve", [0], {"function": "sigmoid"}),
        ("curve", [0], {"function": "tanh"}),
        ("curve", [0], {"function": "silu"}),
        ("curve", [0], {"function": "gelu"}),
        ("curve", [0], {"function": "gelu_tanh"}),
        ("curve", [0], {"function": "elu"}),
        ("curve", [0], {"function": "mish"}),
        ("normalize", [0], {"groups": 1, "epsilon": 1e-5}),
        ("normalize", [0], {"groups": 3, "epsilon": 0.1}),
        ("upsample", [0], {"factor": [2, 3]}),
        ("pixel_shuffle", [0], {"factor": [3, 2]}),
        ("channel_shuffle", [0], {"groups": 2}),
        ("resize", [0], {"size": [10, 21], "align_corners": False}),
        ("resize", [0], {"size": [10, 21], "align_corners": True}),
        ("resize", [0], {"size": [3, 9], "align_corners": False}),
        ("resize", [0], {"size": [1, 1], "align_corners": False}),
        ("resize", [0], {"size": [1, 4], "align_corners": True}),
    ],
)
def test_other_ops(kind: str, inputs: list[int], fields: dict[str, Any]) -> None:
    net = Net((6, 5, 7))
    net.op("map", 0, steps=[{"step": "clamp", "low": 0, "high": 1}])
    net.op(kind, *inputs, **fields)
    check(net)


def test_the_input_itself() -> None:
    check(Net((2, 3, 4)))


def test_sums_of_zero_stay_zero() -> None:
    """onnxruntime must not multiply scales into ±1: the rounding would decide the next sign."""
    net = Net((64, 8, 8))
    net.conv(
        net.quantize(0),
        [32, 64, 3, 3],
        scales=net.keep(net.random.uniform(0.1, 1, (1, 32)).astype(np.float32)),
        steps=[{"step": "affine", "scale": net.keep(np.full(32, 0.3, np.float32))}],
    )
    found = run_onnx(to_model(net.packed()), net.numbers(3, 64, 8, 8))
    scale = 0.3 * net.tensors["t1"][0][:, None, None]
    whole = found / scale
    assert (found == 0).sum() > 10
    np.testing.assert_allclose(whole, whole.round(), atol=1e-4)
    assert not ((found != 0) & (whole.round() == 0)).any()


@pytest.mark.parametrize("again", [{}, {"again": 1}])
def test_outputs_that_other_ops_read(again: dict[str, int]) -> None:
    """onnxruntime loads no file whose Pad reads a value that an Identity returns as an output."""
    net = Net((2, 6, 6))
    first = net.op("map", 0, steps=[{"step": "affine", "scale": net.tensor(2)}])
    window = {"kernel": [3, 3], "stride": [2, 2], "padding": [1, 1], "ceil": False}
    second = net.op("avg_pool", first, count_padding=True, **window)
    packed = net.packed()
    del packed.graph["output"]
    values = {"first": first, "second": second, "input itself": 0} | again
    outputs = [{"name": name, "value": value} for name, value in values.items()]
    packed.graph.update(outputs=outputs, structure="dict")
    x = net.numbers(3, 2, 6, 6)
    model = to_model(packed)
    onnx.checker.check_model(model, full_check=True)
    found = dict(zip(values, session(model).run(list(values), {"input": x}), strict=True))
    np.testing.assert_array_equal(found["input itself"], x)
    for name in ("first", *again):
        np.testing.assert_array_equal(found[name], x * net.tensors["t0"].reshape(-1, 1, 1))
    expected = evaluate(net.packed(), torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found["second"], expected, rtol=1e-5, atol=1e-5)


def test_bits_are_unpacked_once(tmp_path: Path) -> None:
    net = Net((16, 8, 8))
    net.conv(net.quantize(0), [16, 16, 3, 3])
    optimized = tmp_path / "optimized.onnx"
    session(to_model(net.packed()), optimized_model_filepath=str(optimized))
    kinds = {node.op_type for node in onnx.load(optimized).graph.node}
    assert not kinds & {"BitShift", "BitwiseAnd", "Cast", "Slice"}
    assert "Conv" in kinds


def test_file(tmp_path: Path) -> None:
    """Size, metadata, and a batch of any size."""
    net = Net((64, 8, 8))
    x, channels = 0, 64
    for _ in range(4):
        steps = [{"step": "affine", "scale": net.tensor(64), "shift": net.tensor(64)}]
        steps.append({"step": "add", "value": x})
        x = net.conv(net.quantize(x), [64, channels, 3, 3], padding=[1] * 4, steps=steps)
    net.labels, net.preprocess = ["Hündin"] * 64, {"mean": [0.5] * 64, "std": [0.2] * 64}
    size = write(tmp_path / "m.unflip", net.packed())
    written = export(tmp_path / "m.unflip", tmp_path / "m.onnx")
    assert written == (tmp_path / "m.onnx").stat().st_size
    assert abs(written - size) <= 0.1 * size
    model = onnx.load(tmp_path / "m.onnx")
    texts = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert texts == {"labels": net.labels, "preprocess": net.preprocess}
    runner = session(model)
    for batch in (1, 5):
        out = runner.run(None, {"input": net.numbers(batch, 64, 8, 8)})[0]
        assert out.shape == (batch, 64, 8, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "deconv"}, "unknown op; the known ones are "),
        ({"spin": 1}, "spin"),
        ({"groups": None, "drop": "groups"}, "groups"),
        ({"steps": [{"step": "tanh"}]}, "unknown step 'tanh'; the known ones are affine"),
        ({"steps": [{"step": "prelu", "slop": "t0"}]}, "slop"),
        ({"steps": [{"step": "add", "value": 1}]}, "value 1 is a code"),
        ({"bits": None}, "needs 'weight'"),
    ],
)
def test_refusals(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    net = Net((4, 5, 5))
    net.conv(net.quantize(0), [4, 4, 1, 1])
    net.ops[-1].update(change)
    if dropped := net.ops[-1].pop("drop", None):
        del net.ops[-1][dropped]
    with pytest.raises(PackedFileError, match=r"op 1 \(.* 'conv1'\): .*") as error:
        to_model(net.packed())
    assert message in str(error.value)


def test_without_the_onnx_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'unflip\[onnx\]'"):
        to_model(Net((4, 5, 5)).packed())
