"""ONNX and QONNX files of networks that ask for too much: they are refused, or written in little time and memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from onnx_net import Net

from unflip.export import builder
from unflip.packing import PackedFileError
from unflip.packing.file import Packed, write

pytest.importorskip("onnx", reason="needs onnx: pip install 'unflip[onnx]'")

from unflip.export import onnx, qonnx


@contextmanager
def memory_below(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def ones(net: Net, *shape: int) -> str:
    return net.keep(np.ones(shape, np.float32))


def test_weights_that_become_floats(tmp_path: Path) -> None:
    """A byte of the file became 200 in memory, without a limit."""
    net = Net((8192, 1, 1))
    net.conv(net.quantize(0), [5000, 8192, 1, 1], scales=ones(net, 1, 1))
    path, target = tmp_path / "large.unflip", tmp_path / "large.onnx"
    write(path, net.packed())
    with (
        memory_below(64 * 2**20),
        pytest.raises(
            PackedFileError,
            match=r"large\.unflip: op 1 .*need 1,3.* bytes .* limit is 1,073.*max_memory",
        ),
    ):
        qonnx.export(path, target)
    assert not target.exists()
    assert onnx.export(path, target) < 2 * path.stat().st_size


def test_memory_can_be_limited() -> None:
    net = Net((8, 4, 4))
    net.conv(net.quantize(0), [8, 8, 3, 3])
    for to_model in (qonnx.to_model, onnx.to_model):
        to_model(net.packed(), 2**20)
        with pytest.raises(PackedFileError, match=r"the limit is 100\. If you trust the network"):
            to_model(net.packed(), 100)


def test_nodes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 bases and 8 planes are 512 products, so a small file has millions of nodes."""
    monkeypatch.setattr(builder, "MOST_NODES", 400)
    net = Net((8, 1, 1))
    code = net.quantize(0, steps=8, scales=[1.2**-i for i in range(8)], offset=0.3)
    net.conv(code, [1, 8, 1, 1], bases=64)
    for to_model in (qonnx.to_model, onnx.to_model):
        with pytest.raises(PackedFileError, match=r"op 1 .*more than 400 ONNX nodes.*fewer"):
            to_model(net.packed())


def test_a_border_of_many_windows() -> None:
    """A table of 4,095 taps and 4,096 windows took 270 MB and seconds."""
    net = Net((1, 1, 4096))
    code = net.quantize(0, scales=[1.0], offset=0.3)
    net.conv(code, [1, 1, 1, 4095], padding=[0, 2047, 0, 2047], scales=ones(net, 1, 1))
    with memory_below(8 * 2**20):
        qonnx.to_model(net.packed())


def test_many_thresholds_of_a_whole_number() -> None:
    """255 thresholds were compared with all numbers of all channels at once: 300 MB."""
    net = Net((128, 1, 1))
    x = net.conv(net.quantize(0), [4096, 128, 1, 1])
    scales = [2.0**p for p in range(8)]
    strict = [False] * 255
    code = net.quantize(x, steps=255, coding="levels", scales=scales, offset=0.0, strict=strict)
    net.conv(code, [1, 4096, 1, 1])
    with memory_below(64 * 2**20):
        qonnx.to_model(net.packed())


def with_outputs(net: Net, values: list[int]) -> Packed:
    packed = net.packed()
    outputs = [{"name": f"o{i}", "value": value} for i, value in enumerate(values)]
    graph = {key: value for key, value in packed.graph.items() if key != "output"}
    return packed._replace(graph=graph | {"outputs": outputs, "structure": "tuple"})


def test_many_outputs() -> None:
    """The time grew with outputs times ops: 16 seconds for these, and hours for as many as a file may have."""
    net, shift = Net((4, 2, 2)), {"step": "affine"}
    shift["shift"] = ones(net, 1)
    for value in range(4000):
        net.op("map", value, steps=[shift])
    began = time.process_time()
    model = qonnx.to_model(with_outputs(net, list(range(1, 2001))))
    assert time.process_time() - began < 4
    made = {name for node in model.graph.node for name in node.output}
    assert {output.name for output in model.graph.output} <= made
    assert len(model.graph.node) == 2000


def test_outputs_of_one_value() -> None:
    net = Net((4, 2, 2))
    net.op("map", 0, steps=[{"step": "affine", "shift": ones(net, 1)}])
    model = qonnx.to_model(with_outputs(net, [1, 0, 1, 1]))
    made = [name for node in model.graph.node for name in node.output]
    assert sorted(made) == ["o0", "o1", "o2", "o3"]
