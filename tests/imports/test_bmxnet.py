"""``unflip import bmxnet`` on small files that the tests write, and on broken ones."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mxnet_writer import EPS, Small, params_bytes, words
from torch import Tensor

import unflip as package
from unflip.imports import CannotImport, bmxnet
from unflip.imports.mxnet_params import parse_params
from unflip.imports.mxnet_symbol import parse_symbol
from unflip.packing import read


def plain(small: Small, x: Tensor) -> Tensor:
    """The network of ``Small`` in plain torch, in float64."""

    def get(name: str) -> Tensor:
        return torch.from_numpy(small.arrays[name]).double()

    def norm(x: Tensor, name: str) -> Tensor:
        gamma = get(f"arg:{name}_gamma")
        gamma = torch.ones_like(gamma) if name == "bn_data" else gamma
        mean, variance = get(f"aux:{name}_moving_mean"), get(f"aux:{name}_moving_var")
        parts = (mean, variance, gamma, get(f"arg:{name}_beta"))
        mean, variance, gamma, beta = (part.view(1, -1, 1, 1) for part in parts)
        return (x - mean) / torch.sqrt(variance + float(EPS)) * gamma + beta

    def count(x: Tensor, name: str) -> Tensor:
        weight = torch.from_numpy(small.signs[name]).double()
        pad = weight.shape[-1] // 2
        signs = F.pad(torch.where(x >= 0, 1.0, -1.0).double(), [pad] * 4, value=1.0)
        return (weight[0].numel() + F.conv2d(signs, weight)) / 2

    x = F.conv2d(norm(x.double(), "bn_data"), get("arg:conv0_weight"), padding=1)
    inner = norm(x, "unit1_bn1")
    x = count(norm(count(inner, "unit1_conv1"), "unit1_bn2"), "unit1_conv2") + count(
        inner, "unit1_sc"
    )
    inner = norm(x, "unit2_bn1")
    x = count(norm(count(inner, "unit2_conv1"), "unit2_bn2"), "unit2_conv2") + x
    x = F.max_pool2d(norm(x, "bn1").relu(), 2).mean((2, 3))
    return F.linear(x, get("arg:fc1_weight"), get("arg:fc1_bias")).float()


@pytest.mark.parametrize("form", ["old", "int64", "dense"])
def test_the_network_equals_plain_torch(form):
    small = Small()
    arrays = parse_params(params_bytes(small.arrays, form), "small")
    nodes = parse_symbol(json.dumps(small.symbol()).encode(), "symbol")
    found = bmxnet.build(nodes, arrays, "small")
    assert (found.binary, found.fixed, found.classes, found.stem) == (5, 1, 10, 3)
    x = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(found.model(x), plain(small, x), rtol=1e-4, atol=1e-4)


def test_the_command_writes_where_a_network_comes_from(unflip, tmp_path):
    small = Small()
    source = small.write(tmp_path)
    out = tmp_path / "small.unflip"
    made = unflip("import", "bmxnet", source, "-o", out, "--size", "10")
    assert made.code == 0, made.err
    for text in (
        "5 binary convolutions count equal signs",
        "padding is +1",
        "softmax",
        "Apache-2.0",
    ):
        assert text in made.out
    graph = read(out).graph
    assert graph["labels"][3] == "cat"
    assert graph["input"]["preprocess"]["std"] == [1 / 255] * 3
    assert np.allclose(
        np.array(graph["input"]["preprocess"]["mean"]) * 255, [123.68, 116.779, 103.939]
    )
    assert graph["source"]["file SHA-256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert graph["source"]["graph"] == "small-symbol.json"
    shown = unflip("show", out)
    assert shown.code == 0, shown.err
    for text in (
        "source file: small-0003.params",
        "source license: Apache-2.0",
        "labels airplane",
        "0.485",
    ):
        assert text in shown.out
    try:
        network = package.load(out)
    except ImportError:
        pytest.skip("the native runtime is not built")
    x = torch.randn(8, 3, 10, 10, generator=torch.Generator().manual_seed(1)) * 60
    assert np.allclose(network(x.numpy()), plain(small, x).numpy(), rtol=1e-4, atol=1e-3)


# --- files that are refused -------------------------------------------------------------------------------

GOOD = Small()
DATA = params_bytes(GOOD.arrays)


@pytest.mark.parametrize("length", [0, 1, 15, 23, 24, 30, 100, len(DATA) // 2, len(DATA) - 1])
def test_a_cut_off_file_is_refused(length):
    with pytest.raises(CannotImport, match=r"small: cut off or damaged"):
        parse_params(DATA[:length], "small")


def patched(at: int, kind: str, value: int) -> bytes:
    return DATA[:at] + struct.pack(kind, value) + DATA[at + struct.calcsize(kind) :]


DAMAGED = {
    "magic": (patched(0, "<Q", 0x113), "not an MXNet .params file: it begins with 0x113"),
    "number of arrays": (patched(16, "<Q", 2**63), "announces 9,223,372,036,854,775,808 arrays"),
    "dims": (patched(24, "<I", 4_000_000), "array 0 has 4,000,000 dimensions"),
    "no dims": (patched(24, "<I", 0), "array 0 has 0 dimensions"),
    "size": (
        patched(28, "<I", 2**32 - 1),
        r"array 0 of shape \(4294967295,\) needs 17,179,869,180 bytes",
    ),
    "zero": (patched(28, "<I", 0), r"shape \(0,\); sizes start at 1"),
    "type": (patched(40, "<i", 99), "array 0 has the unknown type 99"),
    "sparse": (
        struct.pack("<QQQIi", 0x112, 0, 1, 0xF993FAC9, 1) + bytes(40),
        "array 0 is sparse; only dense arrays are read",
    ),
    "negative": (
        struct.pack("<QQQIIq", 0x112, 0, 1, 0xF993FAC8, 1, -5) + bytes(40),
        r"array 0 has the shape \(-5,\)",
    ),
    "overflow": (
        struct.pack("<QQQII4q", 0x112, 0, 1, 0xF993FAC8, 4, *[2**62] * 4) + bytes(40),
        "cut off or damaged",
    ),
    "more": (DATA + b"x", "1 bytes too many at its end"),
    "names": (
        params_bytes({"a": np.zeros(1, "<f4")})[:-17] + struct.pack("<Q", 0),
        "1 arrays but 0 names",
    ),
    "long name": (
        params_bytes({"a": np.zeros(1, "<f4")})[:-9] + struct.pack("<Q", 2**40) + b"a",
        "name 0 has 1,099,511,627,776 bytes",
    ),
    "text": (params_bytes({"a": np.zeros(1, "<f4")})[:-1] + b"\xff", "name 0 is not UTF-8"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused(case):
    data, message = DAMAGED[case]
    with pytest.raises(CannotImport, match=message):
        parse_params(data, "small")


def test_two_of_many_names_are_equal():
    """Looking for them took 8 seconds, and is no longer quadratic."""
    names = [f"{i:05}" for i in range(20_000)]
    data = params_bytes({name: np.zeros(1, "<f4") for name in names})
    began = time.perf_counter()
    with pytest.raises(CannotImport, match="two arrays have the name '19998'"):
        parse_params(data[:-5] + b"19998", "small")
    assert time.perf_counter() - began < 2


def test_random_bytes_never_crash():
    random = np.random.default_rng(0)
    for _ in range(2000):
        data = bytearray(DATA[: random.integers(40, 4000)])
        for at in random.integers(16, len(data), 3):
            data[at] = random.integers(256)
        with pytest.raises(CannotImport):
            parse_params(bytes(data), "small")


def changed(name: str, /, **fields: Any) -> bytes:
    """The symbol of the small network with other fields in the node ``name``."""
    symbol = Small().symbol()
    [node] = [node for node in symbol["nodes"] if node["name"] == name]
    for key, value in fields.items():
        if key in ("op", "inputs", "name", "subgraphs"):
            node[key] = value
        else:
            node.setdefault("attr", {})[key] = value
    return json.dumps(symbol).encode()


DEEP = b'{"nodes":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD_SYMBOLS = {
    "no JSON": (b"\x80\x04", "bad JSON"),
    "deep": (DEEP, "bad JSON|no list of nodes|not an object"),
    "a list": (b"[1]", "no list of nodes"),
    "no nodes": (b'{"nodes": []}', "no list of nodes"),
    "a number": (b'{"nodes": [3]}', "node 0 is not an object"),
    "cycle": (changed("conv0", inputs=[[40, 0, 0], [6, 0, 0]]), "the graph has a cycle"),
    "itself": (changed("conv0", inputs=[[7, 0, 0], [6, 0, 0]]), "the graph has a cycle"),
    "second output": (changed("conv0", inputs=[[5, 1, 0]]), "inputs should be a list"),
    "negative": (changed("conv0", inputs=[[-1, 0, 0]]), "inputs should be a list"),
    "name": (changed("conv0", name="../x"), "a name has only letters"),
    "twice": (changed("conv0", name="bn1"), "two nodes have the name 'bn1'"),
    "attribute": (changed("conv0", kernel=[3, 3]), "its attributes should be texts"),
    "subgraph": (changed("conv0", subgraphs=[]), "contains a graph"),
    "heads": (b'{"nodes": [{"op": "null", "name": "data"}], "heads": [[7, 0, 0]]}', "heads should"),
    "many": (json.dumps({"nodes": [0] * 6000}).encode(), "6,000 nodes"),
}


@pytest.mark.parametrize("case", BAD_SYMBOLS)
def test_a_bad_symbol_file_is_refused(case):
    data, message = BAD_SYMBOLS[case]
    with pytest.raises(CannotImport, match=message):
        parse_symbol(data, "symbol")


BAD_GRAPHS = {
    "unknown op": (
        changed("relu1", op="Custom"),
        "Custom 'relu1': this operation is not supported",
    ),
    "unknown attribute": (
        changed("conv0", scaling_factor="True"),
        "unknown attributes: scaling_factor",
    ),
    "activation": (changed("relu1", act_type="tanh"), "act_type='tanh' should be relu"),
    "kernel": (changed("conv0", kernel="(9999999, 9999999)"), "pad|needs"),
    "huge": (changed("conv0", num_filter="1048576"), "needs"),
    "too huge": (changed("conv0", num_filter="9" * 40), "num_filter='9+' should be a whole number"),
    "pad": (changed("conv0", pad="(9, 9)"), "pad is at most half of the kernel"),
    "stride": (changed("conv0", stride="(0, 1)"), "kernel and stride start at 1"),
    "code": (changed("conv0", kernel="__import__('os')"), "should be two whole numbers"),
    "groups": (changed("conv0", num_group="3"), "only dilate"),
    "bits": (changed("unit1_conv1", act_bit="2"), "only 1 bit"),
    "float weights": (changed("unit1_conv1", binarized_weights_only="False"), "not stored as bits"),
    "bias": (changed("unit1_conv1", no_bias="False"), "has a bias"),
    "filters": (
        changed("unit1_conv1", num_filter="128"),
        "are 73,728 bits, in an array of 576 float64",
    ),
    "eps": (changed("bn1", eps="nan"), "eps='nan' should be a number"),
    "flag": (changed("bn1", fix_gamma="maybe"), "fix_gamma='maybe' should be True or False"),
    "pool": (changed("pool", pool_type="sum"), "only max pools"),
    "forward": (changed("q0", backward_only="False"), "only act_bit=1 with backward_only=True"),
    "sum": (changed("_plus1", inputs=[[5, 0, 0], [7, 0, 0]]), "adds 3 and 64 channels"),
    "one value": (changed("_plus1", inputs=[[5, 0, 0]]), "should take 2 values"),
    "missing": (changed("conv0_weight", name="conv9_weight"), "not there: conv9_weight"),
    "no data": (changed("data", name="images"), "'data'"),
    "reserved": (changed("conv0", name="forward"), "'forward', which is reserved"),
}


@pytest.mark.parametrize("case", BAD_GRAPHS)
def test_a_bad_graph_is_refused(case):
    data, message = BAD_GRAPHS[case]
    with pytest.raises(CannotImport, match=message):
        bmxnet.build(parse_symbol(data, "symbol"), GOOD.arrays, "small")


BAD_ARRAYS = {
    "unknown name": ({"arg:other": np.zeros(3, "<f4")}, "nothing in the graph uses arg:other"),
    "shape": ({"arg:bn1_gamma": np.ones(5, "<f4")}, r"has shape \(5,\) of float32"),
    "type": ({"arg:bn1_gamma": np.ones(64, "<i4")}, "of int32"),
    "NaN": ({"arg:bn1_gamma": np.full(64, np.nan, "<f4")}, "contains NaN or infinity"),
    "variance": ({"aux:bn1_moving_var": -np.ones(64, "<f4")}, "negative"),
    "words": ({"arg:unit1_sc_weight": words(np.ones(128))}, "in an array of 2 float64"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays_are_refused(case):
    change, message = BAD_ARRAYS[case]
    nodes = parse_symbol(json.dumps(GOOD.symbol()).encode(), "symbol")
    with pytest.raises(CannotImport, match=message):
        bmxnet.build(nodes, GOOD.arrays | change, "small")


def test_nothing_is_written_for_a_file_that_is_refused(unflip, tmp_path):
    source, out = GOOD.write(tmp_path), tmp_path / "small.unflip"
    (tmp_path / "lonely-0001.params").write_bytes(DATA)
    lonely = unflip("import", "bmxnet", tmp_path / "lonely-0001.params", "-o", out)
    assert lonely.code == 1
    assert "lonely-symbol.json does not exist; name the graph" in lonely.err
    same = unflip("import", "bmxnet", source, "-o", source)
    assert same.code == 1
    assert "is the file to import" in same.err
    assert source.read_bytes() == DATA
    source.write_bytes(DATA[:-5])
    cut = unflip("import", "bmxnet", source, "-o", out)
    assert cut.code == 1
    assert "cut off or damaged" in cut.err
    assert "Traceback" not in cut.err
    assert sorted(path.name for path in tmp_path.glob("small*")) == [
        "small-0003.params",
        "small-symbol.json",
    ]


def test_class_names_come_from_a_file(tmp_path: Path):
    from unflip.imports.write import read_labels

    path = tmp_path / "classes.txt"
    path.write_text("n01440764 tench, Tinca tinca\nn01443537 goldfish\n")
    assert read_labels(path, 2) == ("tench", "goldfish")
    with pytest.raises(CannotImport, match="2 classes, but the network has 3 outputs"):
        read_labels(path, 3)
    path.write_text("n01443537 goldfish\nn01440764 tench\n")
    with pytest.raises(CannotImport, match="order of sorted WNIDs"):
        read_labels(path, 2)
