"""Broken and hostile files: each is refused with a reason; none crashes or gives a wrong result.

More than 400 lines: one table of everything that the loader must refuse.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unflip
from unflip.packing.file import Packed, PackedFileError, from_bytes, read, to_bytes
from unflip.packing.reference import evaluate_outputs
from unflip.runtime._native import Network

NETWORKS = ["residual", "pools", "levels", "pieces", "smooth", "vector", "several", "pair", "ends"]
Networks = dict[str, Packed]


def load(data: bytes) -> Network:
    return Network.from_bytes(data, 1)


def refused(data: bytes) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        load(data)
    return str(caught.value)


def with_right_hash(data: bytes) -> bytes:
    """What someone who means harm would do: the hash keeps out accidents, not people."""
    at = data.find(b'"sha256":"') + len(b'"sha256":"')
    blank = data[:at] + b"0" * 64 + data[at + 64 :]
    return data[:at] + hashlib.sha256(blank).hexdigest().encode() + data[at + 64 :]


def with_header(header: Any, tensors: bytes = b"") -> bytes:
    """A file with any header, as an object or as text; its hash is made right if it has one."""
    text = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    )
    data = struct.pack("<Q", len(text)) + text + tensors
    return with_right_hash(data) if b'"sha256":"' in data else data


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


# --- damage


@pytest.mark.parametrize("name", NETWORKS)
def test_cut_off_anywhere(networks: Networks, name: str) -> None:
    data = to_bytes(networks[name])
    for length in range(len(data)):
        refused(data[:length])
        if (
            length % 16 == 0 and length > 600
        ):  # with the hash made right again, other checks must see it
            refused(with_right_hash(data[:length]))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_flipped_bit_anywhere(networks: Networks, name: str) -> None:
    data = to_bytes(networks[name])
    for position in range(len(data)):
        refused(flipped(data, position, position % 8))


def flipped(data: bytes, position: int, bit: int) -> bytes:
    changed = data[position] ^ (1 << bit)
    return data[:position] + bytes([changed]) + data[position + 1 :]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_flipped_bit_and_a_right_hash(networks: Networks, name: str) -> None:
    """Refused, or another valid network: then it computes what the reference does."""
    data = to_bytes(networks[name])
    random = np.random.default_rng(0)
    accepted = 0
    for position in range(8, len(data)):
        mutant = with_right_hash(flipped(data, position, int(random.integers(8))))
        try:
            network = load(mutant)
        except ValueError:
            continue
        accepted += 1
        if accepted % 12 == 0:
            agrees_with_reference(network, from_bytes(mutant))
    assert accepted > 50  # the hash was right, so other checks were reached


def agrees_with_reference(network: Network, packed: Packed) -> None:
    x = np.random.default_rng(1).normal(size=(2, *network.input_shape)).astype(np.float32)
    expected = evaluate_outputs(packed, torch.from_numpy(x))
    found = {name: np.empty((2, *shape), np.float32) for name, shape in network.outputs}
    network.run(x, *found.values())
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        right = tensor.numpy()
        assert found[name].shape == right.shape
        if np.isfinite(right).all() and np.abs(right).max() < 1e6:
            size = max(1, np.abs(right).max())
            assert np.allclose(found[name], right, rtol=1e-3, atol=1e-3 * size)


# --- other files


def test_what_is_no_packed_network(tmp_path: Path) -> None:
    path = tmp_path / "model.unflip"

    def message(data: bytes) -> str:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"model\.unflip") as caught:
            unflip.load(path)
        return str(caught.value)

    assert "empty" in message(b"")
    assert "pickle" in message(pickle.dumps({"weight": [1.0] * 100}))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    assert "zip" in message(path.read_bytes())
    torch.save({"weight": torch.ones(3)}, path)
    assert "torch.save" in message(path.read_bytes())
    assert "unflip pack" in message(b"just a text file, nothing more\n")
    assert "unflip pack" in message(b"\x00" * 1000)
    assert "unflip pack" in message(b"abc")
    foreign = {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    assert "unflip pack" in message(with_header(foreign, bytes(4)))


AGAIN = "; copy it again, or pack the network again with 'unflip pack'"
MAKE = "; make a packed network with 'unflip pack'"
ACCIDENTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", f"the file is empty{AGAIN}"),
    "a byte more": (lambda data: data + b"\n", f"the file has 1 byte too many at its end{AGAIN}"),
    "two files": (lambda data: 2 * data, f"bytes too many at its end{AGAIN}"),
    "a byte less": (lambda data: data[:-1], f"the file is cut off by 1 byte{AGAIN}"),
    "five less": (lambda data: data[:-5], f"the file is cut off by 5 bytes{AGAIN}"),
    "half a header": (lambda data: data[:100], f"cut off within its header{AGAIN}"),
    "a changed byte": (lambda data: flipped(data, len(data) - 1, 0), f"the file was changed{AGAIN}"),
    "a PNG": (lambda data: b"\x89PNG\r\n\x1a\n" + data, f"(no safetensors header){MAKE}"),
    "a zip": (lambda data: b"PK\3\4" + data, f"but a zip file (torch.save writes one){MAKE}"),
    "a pickle": (lambda data: b"\x80\4" + data, f"not a packed network but a pickle{MAKE}"),
    "weights": (
        lambda data: data.replace(b'"format":"unflip"', b'"format":"numpy."'),
        f"a safetensors file, but not a packed network{MAKE}",
    ),
    "of tomorrow": (
        lambda data: data.replace(b'"version":"1"', b'"version":"2"'),
        "its format version is '2', but this unflip reads version '1'; install an unflip that",
    ),
}  # fmt: skip


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_both_readers_say_what_happened_to_a_file_and_what_to_do(
    networks: Networks, tmp_path: Path, accident: str
) -> None:
    """``unflip show`` and ``export`` read it by Python, all that runs it by the native library."""
    change, says = ACCIDENTS[accident]
    path = tmp_path / "model.unflip"
    path.write_bytes(change(to_bytes(networks["residual"])))
    for reader in (unflip.load, read):
        with pytest.raises(ValueError, match=r"model\.unflip") as caught:
            reader(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert says in str(caught.value)


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        unflip.load(tmp_path / "nothing.unflip")
    with pytest.raises(ValueError, match="folder"):
        unflip.load(tmp_path)
    with pytest.raises(ValueError, match="regular"):
        unflip.load("/dev/null")


# --- the container

Change = Callable[[dict[str, Any]], object]


def meta(key: str, value: Any) -> Change:
    return lambda header: header["__metadata__"].__setitem__(key, value)


def tensor(key: str, value: Any) -> Change:
    return lambda header: header["t0"].__setitem__(key, value)


CONTAINERS: list[tuple[str, Change]] = [
    ("not a packed network", meta("format", "other")),
    ("not a packed network", meta("format", 1)),
    ("not a packed network", lambda h: h.pop("__metadata__")),
    ("not a packed network", lambda h: h.__setitem__("__metadata__", [])),
    ("version is '2'", meta("version", "2")),
    ("'version' must be a string", meta("version", 1)),
    ("'version' is missing", lambda h: h["__metadata__"].pop("version")),
    ("'graph' is missing", lambda h: h["__metadata__"].pop("graph")),
    ("'graph' must be a string", meta("graph", {})),
    ("unknown field 'more'", meta("more", "x")),
    ("'sha256' is missing", lambda h: h["__metadata__"].pop("sha256")),
    ("dtype must be F32 or U8", tensor("dtype", "F64")),
    ("dtype must be F32 or U8", tensor("dtype", "I8")),
    ("unknown field 'more'", tensor("more", 1)),
    ("'shape' is missing", lambda h: h["t0"].pop("shape")),
    ("'shape' must be a list", tensor("shape", 8)),
    ("1 to 4 dimensions", tensor("shape", [])),
    ("1 to 4 dimensions", tensor("shape", [1, 1, 1, 1, 8])),
    ("a size of 0", tensor("shape", [0])),
    ("whole numbers", tensor("shape", [-8])),
    ("whole numbers", tensor("shape", [2.5])),
    ("whole numbers", tensor("shape", [8.0])),
    ("whole numbers", tensor("shape", ["8"])),
    ("whole numbers", tensor("shape", [1e300])),
    ("2^31 bytes", tensor("shape", [2**31])),
    ("2^31 bytes", tensor("shape", [2**16, 2**16, 2**16, 2**16])),
    ("its shape needs 36", tensor("shape", [9])),
    ("outside the file", tensor("data_offsets", [0, 2**31])),
    ("outside the file", tensor("data_offsets", [32, 0])),
    ("whole numbers", tensor("data_offsets", [0, 2**63])),
    ("whole numbers", tensor("data_offsets", [-4, 28])),
    ("[begin, end]", tensor("data_offsets", [0])),
    ("overlap or leave a gap", tensor("data_offsets", [4, 36])),
    ("overlap or leave a gap", lambda h: h["t1"].__setitem__("data_offsets", [0, 32])),
    ("must be an object", lambda h: h.__setitem__("t0", 1)),
    ("longer than 4,096", lambda h: h.__setitem__("n" * 5000, h.pop("t0"))),
]


@pytest.mark.parametrize(("message", "change"), CONTAINERS, ids=[m for m, _ in CONTAINERS])
def test_containers(networks: Networks, message: str, change: Change) -> None:
    header, tensors = header_of(to_bytes(networks["residual"]))
    change(header)
    assert message in refused(with_header(header, tensors))


def test_headers(networks: Networks) -> None:
    data = to_bytes(networks["residual"])
    end = 8 + int.from_bytes(data[:8], "little")
    header, tensors = data[8:end], data[end:]
    assert "wrong" in refused(data.replace(b'"strict', b'"strjct'))
    assert "SHA-256" in refused(data[:-1] + bytes([data[-1] ^ 1]))
    assert "64 lowercase" in refused(data.replace(b'"sha256":"', b'"sha256":"g', 1)[: len(data)])
    assert "bytes of tensors" in refused(with_header(header, tensors + b"more"))
    assert "twice" in refused(with_header(header[:-1].rstrip(b" }") + b'},"t0":1}', tensors))
    assert "bad JSON" in refused(with_header(b'{"a":' + b"[" * 100_000, tensors))
    assert "bad JSON" in refused(with_header(b'{"a":"\xff"}', tensors))
    assert "bad JSON" in refused(with_header(b"{" + b" " * 100, b""))
    for length in (2**63, 2**64 - 1, 0, 1):
        assert "not a packed network" in refused(struct.pack("<Q", length) + data[8:])
    for length in (len(data), len(data) - 7):
        assert "the file is cut off" in refused(struct.pack("<Q", length) + data[8:])


def test_a_small_file_cannot_ask_for_a_large_value(networks: Networks) -> None:
    after = [0, 65_000, 65_000]
    pad = {"op": "pad", "name": "p", "inputs": [0], "before": [0, 0, 0], "after": after}
    networks["residual"].graph["ops"].append(pad)
    assert "2^28 elements" in refused(to_bytes(networks["residual"]))


def test_a_small_file_cannot_ask_for_much_memory_at_once() -> None:
    """Each value is allowed, but a hundred of them would be alive together."""
    ops = [
        {
            "op": "pad",
            "name": str(i),
            "inputs": [0],
            "before": [0, 0, 0],
            "after": [0, 16_000, 16_000],
        }
        for i in range(100)
    ]
    ops.append({"op": "concat", "name": "all", "inputs": list(range(1, 101))})
    ops.append({"op": "mean", "name": "mean", "inputs": [101]})
    shape = {"shape": [1, 1, 1], "preprocess": None}
    message = refused(
        to_bytes(Packed({"input": shape, "ops": ops, "output": 102, "labels": None}, {}))
    )
    assert "2^28 elements" in message
    for i in range(1, 101):  # a chain of sums needs them all, one after the other
        ops[i - 1]["inputs"] = [0]
    ops[100:] = [
        {
            "op": "map",
            "name": "sum",
            "inputs": [1],
            "steps": [{"step": "add", "value": i} for i in range(2, 101)],
        }
    ]
    message = refused(
        to_bytes(Packed({"input": shape, "ops": ops, "output": 101, "labels": None}, {}))
    )
    assert "bytes of memory; the limit is 1,073,741,824" in message
    assert "max_memory" in message


def test_a_tensor_used_again_and_again() -> None:
    """Every op has a copy."""
    conv = {"op": "conv", "shape": [1024, 1024, 1, 1], "weight": "w", "groups": 1, "steps": []}
    conv |= {"stride": [1, 1], "dilation": [1, 1], "padding": [0, 0, 0, 0]}
    graph = {
        "input": {"shape": [1024, 1, 1], "preprocess": None},
        "ops": [{**conv, "name": str(i), "inputs": [i]} for i in range(600)],
        "output": 600,
        "labels": None,
    }
    assert "max_memory" in refused(
        to_bytes(Packed(graph, {"w": np.ones((1024, 1024, 1, 1), np.float32)}))
    )


def test_more_than_a_graph_may_have(networks: Networks) -> None:
    packed = networks["residual"]
    packed.graph["ops"] = [{}] * 100_001
    assert "100,000 ops" in refused(to_bytes(packed))
    packed.graph["ops"] = [[]] * 4_100_000
    assert "max_memory" in refused(to_bytes(packed))


# --- the graph

Edit = Callable[[dict[str, Any]], object]
Case = tuple[str, str, Edit]


def op(index: int, key: str, value: Any) -> Edit:
    return lambda graph: graph["ops"][index].__setitem__(key, value)


def without(index: int, key: str) -> Edit:
    return lambda graph: graph["ops"][index].pop(key)


def step(index: int, number: int, key: str, value: Any) -> Edit:
    return lambda graph: graph["ops"][index]["steps"][number].__setitem__(key, value)


def top(key: str, value: Any) -> Edit:
    return lambda graph: graph.__setitem__(key, value)


def inputs(key: str, value: Any) -> Edit:
    return lambda graph: graph["input"].__setitem__(key, value)


def output(index: int, key: str, value: Any) -> Edit:
    return lambda graph: graph["outputs"][index].__setitem__(key, value)


def floats_on_bytes(conv: dict[str, Any]) -> None:
    conv["weight"] = conv.pop("bytes")


# residual: 0 conv, 1 quantize, 2 conv, 3 mean, 4 conv, 5 softmax. pools: 0 conv, 1 max_pool, 2, 3 avg_pool, 4 concat,
# 5 flatten. levels: 0 mean_abs, 1 quantize, 2 mean_abs, 3 mean, 4 conv, 5 quantize, 6 conv. pieces: 0 slice, 1 pad,
# 2 conv, 3 map. smooth: 0 curve, 1 normalize, 2 upsample, 3 channel_shuffle, 4 quantize, 5 conv, 6 pixel_shuffle,
# 7, 8 resize. ends: 0 to_bytes, 1 conv, 2 max_pool, 3 quantize, 4 conv, 5 mean, 6 to_bytes, 7 conv.
GRAPHS: list[Case] = [
    ("residual", "graph: unknown field 'more'", top("more", 1)),
    ("residual", "'ops' must be a list", top("ops", {})),
    ("residual", "'output' must be a whole number 0 .. 6", top("output", 7)),
    ("residual", "'output' must be a whole number", top("output", -1)),
    ("residual", "'output' must be a whole number", top("output", 1.5)),
    ("residual", "'output' must be a whole number", top("output", 6.0)),  # show failed at it
    ("residual", "'output' must be a float value", top("output", 2)),
    ("residual", "'output' is missing", lambda g: g.pop("output")),
    ("residual", "'output' or 'outputs', not both", top("outputs", [{"name": "a", "value": 1}])),
    ("residual", "unknown field 'structure'", top("structure", "tuple")),
    ("several", "'output' or 'outputs', not both", top("output", 1)),
    ("several", "'outputs' must be a list of 1 .. 4096", top("outputs", [])),
    ("several", "'outputs' must be a list of 1 .. 4096", top("outputs", {"scores": 1})),
    ("several", "'outputs' must be a list of 1 .. 4096", top("outputs", [0] * 4097)),
    ("several", "output 0: must be an object, not 3", top("outputs", [3])),
    ("several", "'structure' is missing", lambda g: g.pop("structure")),
    ("several", '\'structure\' must be "tuple" or "dict"', top("structure", "list")),
    ("several", "output 1: 'name' must differ from those before it", output(1, "name", "scores")),
    ("several", "output 1: 'name' must be 1 .. 4,096 bytes", output(1, "name", "")),
    ("several", "output 1: 'name' must be 1 .. 4,096 bytes", output(1, "name", "a" * 4097)),
    ("several", "output 1: 'name' must be 1 .. 4,096 bytes", output(1, "name", "a\0b")),
    ("several", "output 1: 'name' must be a string", output(1, "name", 5)),
    ("several", "output 2: 'value' must be a whole number 0 .. 9", output(2, "value", 10)),
    ("several", "output 2: 'value' must be a whole number", output(2, "value", -1)),
    ("several", "output 2: 'value' must be a float value", output(2, "value", 2)),
    ("several", "output 2: unknown field 'more'", output(2, "more", 1)),
    ("several", "'value' is missing", lambda g: g["outputs"][0].pop("value")),
    ("several", "'labels' must be null or 5 or 4 or 8 or 8 or 8 or 4 str", top("labels", ["a"])),
    ("residual", "'labels' is missing", lambda g: g.pop("labels")),
    ("residual", "'labels' must be null or 4 strings", top("labels", ["a"])),
    ("residual", "'labels' must be null or 4 strings", top("labels", [1, 2, 3, 4])),
    ("residual", "a label must not contain a NUL", top("labels", ["a", "b", "c", "d\0"])),
    ("residual", "'source' must be an object of strings", top("source", ["a"])),
    ("residual", "'source' must be an object of strings", top("source", {"a": 1})),
    ("residual", "'source' must be an object of strings", top("source", {"a": "b" * 5000})),
    ("residual", "input: 'shape' must be [C, H, W]", inputs("shape", [3, 6])),
    ("residual", "input: 'shape' must be [C, H, W]", inputs("shape", [3, 0, 6])),
    ("residual", "input: 'shape' must be [C, H, W]", inputs("shape", [3, 65_537, 6])),
    ("residual", "2^28 elements", inputs("shape", [65_536, 65_536, 1])),
    ("residual", "'mean' must be 3 numbers", inputs("preprocess", {"mean": [0], "std": [1] * 3})),
    ("residual", "numbers above 0", inputs("preprocess", {"mean": [0] * 3, "std": [1, 0, 1]})),
    ("residual", "'std' is missing", inputs("preprocess", {"mean": [0] * 3})),
    ("residual", "preprocess: must be an object", inputs("preprocess", 5)),
    ("residual", "op 0: must be an object", lambda g: g["ops"].__setitem__(0, [])),
    ("residual", "op 0: 'op' must be one of quantize, conv", op(0, "op", "exec")),
    ("residual", "op 0: 'op' must be a string", op(0, "op", None)),
    ("residual", "op 0: the field 'name' is missing", without(0, "name")),
    ("residual", "longer than 4,096", op(0, "name", "n" * 4097)),
    ("residual", "NUL", op(0, "name", "a\0b")),
    ("residual", "op 0 (conv 'conv0'): unknown field 'bias'", op(0, "bias", "t0")),
    ("residual", "op 3 (mean 'mean3'): unknown field 'kernel'", op(3, "kernel", [1, 1])),
    # references: to itself, ahead, below zero, dangling
    ("residual", "'inputs' must be [x], a value before this op", op(2, "inputs", [3])),
    ("residual", "'inputs' must be [x], a value before this op", op(2, "inputs", [5])),
    ("residual", "'inputs' must be [x], a value before this op", op(2, "inputs", [-1])),
    ("residual", "'inputs' must be [x], a value before this op", op(2, "inputs", [2**31])),
    ("residual", "'inputs' must be [x], a value before this op", op(2, "inputs", [0, 1])),
    ("residual", "'inputs' must be [x], a value before this op", op(2, "inputs", [])),
    ("residual", "'inputs' must be [x], a value before this op", op(2, "inputs", ["0"])),
    ("residual", "'inputs' must be [x], a value before this op", op(2, "inputs", 0)),
    ("residual", "value 2 is a code", op(3, "inputs", [2])),
    ("residual", "op 2 (conv 'conv2'): step 1 (add): 'value'", step(2, 1, "value", 3)),
    ("residual", "this one is a code", step(2, 1, "value", 2)),
    ("residual", "a value of 8 x 6 x 6; it is 3 x 6 x 6", step(2, 1, "value", 0)),
    ("residual", "'weight' must be the name of a tensor in the file", op(0, "weight", "t99")),
    ("residual", "'weight' must be a tensor's name", op(0, "weight", 3)),
    # shapes that lie
    ("residual", "'shape' must be [O, 3, kh, kw]", op(0, "shape", [8, 4, 3, 3])),
    ("residual", "'weight' must have the shape (9, 3, 3, 3)", op(0, "shape", [9, 3, 3, 3])),
    ("residual", "whole numbers 1 .. 1048576", op(0, "shape", [8, 3, 0, 3])),
    ("residual", "'bits' must have the shape", op(2, "shape", [8, 8, 3, 2])),
    ("residual", "a filter has 34359738368 weights", op(2, "shape", [8, 8, 65_536, 65_536])),
    ("residual", "(1 .. 64, 9) or (1 .. 64, 1)", op(2, "shape", [9, 8, 3, 3])),
    ("residual", "'groups' must be a number that divides 3", op(0, "groups", 2)),
    ("residual", "'stride' must be [h, w]", op(0, "stride", [0, 1])),
    ("residual", "'stride' must be [h, w]", op(0, "stride", [1])),
    ("residual", "'dilation' must be [h, w]", op(0, "dilation", [1, 65_537])),
    ("residual", "'padding' must be [top, left, bottom, right]", op(0, "padding", [1, 1])),
    ("residual", "'padding' must be", op(0, "padding", [-1, 0, 0, 0])),
    ("residual", "the kernel is larger than the padded input", op(0, "dilation", [5, 5])),
    ("residual", "1 .. 65,536 is allowed", op(0, "padding", [65_536, 0, 65_536, 0])),
    ("residual", "'bits' must be a tensor of U8", op(2, "bits", "t0")),
    ("residual", "'weight' must be a tensor of F32", op(0, "weight", "t5")),
    ("residual", "needs exactly one of 'weight', 'bits'", without(0, "weight")),
    ("residual", "needs exactly one of 'weight', 'bits'", op(2, "weight", "t2")),
    ("residual", "unknown field 'scales'", op(0, "scales", "t5")),
    ("residual", "which needs 'bits'", op(4, "inputs", [2])),
    ("residual", "the field 'steps' is missing", without(0, "steps")),
    ("residual", "'steps' must be a list", op(0, "steps", {})),
    ("residual", "'step' must be one of affine", step(0, 0, "step", "relu")),
    ("residual", "the field 'step' is missing", lambda g: g["ops"][0]["steps"][0].pop("step")),
    ("residual", "step 0 (affine): unknown field 'bias'", step(0, 0, "bias", "t0")),
    ("levels", "'offset' must have the shape (4) or (1), not (3)", op(4, "offset", "t7")),
    (
        "residual",
        "step 2 (prelu): the field 'slope'",
        lambda g: g["ops"][2]["steps"][2].pop("slope"),
    ),
    ("residual", "nothing in the graph uses it", op(0, "steps", [])),
    ("residual", "more than 256 steps", op(3, "op", "map")),
    # quantize
    ("residual", "must be a list of 1 booleans", op(1, "strict", [])),
    ("residual", "must be a list of 1 booleans", op(1, "strict", [0])),
    ("residual", '"planes" or "levels"', op(1, "coding", "gray")),
    ("residual", "'scales' must be 1 numbers", op(1, "scales", [1.0, 2.0])),
    ("residual", "float32 can hold", op(1, "scales", [1e39])),
    ("residual", "'offset' must be a number", op(1, "offset", None)),
    ("levels", "a unit of 1 x 1 x 1", op(1, "inputs", [0, 0])),
    ("levels", "times 1, 2, 4", op(1, "scales", [0.5, 0.5])),
    ("levels", "'scales' must be 3 numbers", op(1, "coding", "planes")),
    ("levels", "'thresholds' must have the shape (1 .. 255, 4)", op(1, "thresholds", "t6")),
    ("levels", "'over' must be", op(0, "over", "batch")),
    ("levels", "unknown field 'groups'", op(0, "groups", 1)),
    ("levels", "'groups' must be a number that divides 4", op(2, "groups", 3)),
    ("levels", "a g that divides 4, or 4 x 1 x 1; it is 1 x 1 x 1", step(4, 0, "value", 1)),
    # the rest
    ("pools", "at most half the kernel", op(1, "padding", [2, 1])),
    ("pools", "larger than the padded input", op(1, "kernel", [60, 3])),
    ("pools", "'ceil' must be true or false", op(1, "ceil", 1)),
    ("pools", "unknown field 'count_padding'", op(1, "count_padding", True)),
    ("pools", "'count_padding' is missing", without(2, "count_padding")),
    ("pools", "values of one height and width", op(4, "inputs", [0, 2])),
    ("pools", "'inputs' must be a list of 1 .. 4096", op(4, "inputs", [])),
    ("pools", "'low' must be at most 'high'", step(0, 0, "high", -1)),
    ("pools", "'high' must be a number", step(0, 0, "high", "inf")),
    ("pieces", "'start' must be below 'stop'", op(0, "start", [3, 0, 0])),
    ("pieces", "'stop' must be at most the input's size", op(0, "stop", [3, 9, 8])),
    ("pieces", "'step' must be [c, h, w]", op(0, "step", [0, 1, 1])),
    ("pieces", "'before' must be [c, h, w]", op(1, "before", [-1, 0, 0])),
    ("pieces", "1 .. 65,536 is allowed", op(1, "after", [0, 65_536, 0])),
    ("smooth", "'function' must be one of sigmoid, tanh", op(0, "function", "sin")),
    ("smooth", "'groups' must be a number that divides 4", op(1, "groups", 3)),
    ("smooth", "'epsilon' must be a number above 0", op(1, "epsilon", 0)),
    ("smooth", "'factor' must be", op(2, "factor", [0, 1])),
    ("smooth", "1 .. 65,536 is allowed", op(2, "factor", [65_536, 1])),
    ("smooth", "'groups' must be a number that divides 4", op(3, "groups", 8)),
    ("smooth", "'factor' must be [h, w] whose product divides 12", op(6, "factor", [5, 1])),
    ("smooth", "'size' must be [h, w]", op(7, "size", [0, 5])),
    ("smooth", "'size' must be [h, w]", op(7, "size", [7, 65_537])),
    ("smooth", "'size' must be [h, w]", op(7, "size", 7)),
    ("smooth", "2^28 elements", op(7, "size", [65_536, 65_536])),
    ("smooth", "the field 'size' is missing", without(8, "size")),
    ("smooth", "'align_corners' must be", op(8, "align_corners", 1)),
    # whole numbers
    ("ends", "the field 'scale' is missing", without(0, "scale")),
    ("ends", "'shift' must be a tensor's name", op(0, "shift", 1.5)),
    ("ends", "'zero' must be a tensor of U8, not F32", op(0, "zero", "t0")),
    ("ends", "'scale' must be a tensor of F32, not U8", op(0, "scale", "t2")),
    ("ends", "'scale' must have the shape (3) or (1)", op(0, "scale", "t3")),
    ("ends", "'zero' must have the shape (8) or (1), not (3)", op(6, "zero", "t2")),
    ("ends", "unknown field 'offset'", op(0, "offset", 0)),
    ("ends", "value 1 is a code", op(2, "inputs", [1])),
    ("ends", "value 1 is a code", op(6, "inputs", [1])),
    ("ends", "'output' must be a float value", top("output", 7)),
    ("ends", "from to_bytes, which needs 'bytes'", lambda g: floats_on_bytes(g["ops"][1])),
    ("ends", "'bytes' need an input from to_bytes", op(1, "inputs", [0])),
    ("ends", "'bytes' need an input from to_bytes", op(7, "inputs", [4])),
    ("ends", "needs exactly one of", op(1, "bits", "t5")),
    ("ends", "the field 'scales' is missing", without(1, "scales")),
    ("ends", "unknown field 'offset'", op(1, "offset", "t3")),
    ("ends", "'bytes' must have the shape (9, 3, 3, 3)", op(1, "shape", [9, 3, 3, 3])),
    ("ends", "'bytes' must be a tensor of U8, not F32", op(1, "bytes", "t3")),
    ("ends", "a filter has 65538 weights; at most 65,536", op(1, "shape", [8, 3, 1, 21_846])),
    ("ends", "'bytes' must have the shape (8, 3, 1, 21845)", op(1, "shape", [8, 3, 1, 21_845])),
]


@pytest.mark.parametrize(
    ("name", "message", "edit"), GRAPHS, ids=[f"{i}-{m[:40]}" for i, (_, m, _) in enumerate(GRAPHS)]
)
def test_graphs(networks: Networks, name: str, message: str, edit: Edit) -> None:
    packed = networks[name]
    edit(packed.graph)
    if "256 steps" in message:
        packed.graph["ops"][3]["steps"] = [{"step": "clamp", "low": 0, "high": 1}] * 257
    assert message in refused(to_bytes(packed))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none(networks: Networks, value: float) -> None:
    for name, packed in networks.items():
        for key, tensor in packed.tensors.items():
            if tensor.dtype != np.float32:
                continue
            broken = tensor.copy()
            broken.flat[-1] = value
            message = refused(to_bytes(Packed(packed.graph, {**packed.tensors, key: broken})))
            assert f"a NaN or an infinity at position {broken.size - 1}" in message, (name, key)


def test_bits_left_over(networks: Networks) -> None:
    packed = networks["vector"]
    key = packed.graph["ops"][3]["bits"]  # 3 x 70 signs: two bits of the last byte
    packed.tensors[key] = packed.tensors[key] | np.uint8(0x80)
    assert "left over" in refused(to_bytes(packed))


def test_json_of_the_graph() -> None:
    def file(graph: str) -> bytes:
        metadata = {"format": "unflip", "version": "1", "sha256": "0" * 64, "graph": graph}
        return with_header({"__metadata__": metadata})

    assert "graph: bad JSON" in refused(file(""))
    assert "graph: bad JSON" in refused(file("{'a': 1}"))
    assert "graph: must be an object" in refused(file("[]"))
    assert "deep" in refused(file("[" * 10_000))
    assert "out of range" in refused(file('{"output": 1e999}'))
    assert "twice" in refused(file('{"output": 1, "output": 2}'))
    assert "surrogate" in refused(file('{"\\ud800": 1}'))
    assert "bad JSON" in refused(file('{"output": NaN}'))


def test_the_python_reader_refuses_damage_too(networks: Networks) -> None:
    data = to_bytes(networks["vector"])
    with pytest.raises(PackedFileError, match="SHA-256"):
        from_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_byte_that_is_not_a_weight(networks: Networks) -> None:
    """-128 has no positive twin, and two products of it would not fit 16 bits."""
    packed = networks["ends"]
    key = packed.graph["ops"][1]["bytes"]
    packed.tensors[key] = packed.tensors[key].copy()
    packed.tensors[key].flat[7] = 0x80
    assert "-128 is not allowed" in refused(to_bytes(packed))


def test_scales_of_bytes_have_one_row(networks: Networks) -> None:
    packed = networks["ends"]
    key = packed.graph["ops"][1]["scales"]
    packed.tensors[key] = np.ones((2, 8), np.float32)
    assert "'scales' must have the shape (1, 8) or (1, 1), not (2, 8)" in refused(to_bytes(packed))


def test_whole_numbers_with_a_huge_border_need_memory(networks: Networks) -> None:
    """The border is in memory, so it counts."""
    window = {"stride": [65_536, 65_536], "dilation": [1, 1], "padding": [30_000] * 4, "groups": 1}
    graph = networks["ends"].graph
    first, conv = graph["ops"][:2]
    ops = [first, {**conv, **window, "steps": []}]
    used = [value for op in ops for value in op.values()]
    tensors = {k: v for k, v in networks["ends"].tensors.items() if k in used}
    packed = Packed({**graph, "ops": ops, "output": 2, "labels": None}, tensors)
    assert "max_memory" in refused(to_bytes(packed))
