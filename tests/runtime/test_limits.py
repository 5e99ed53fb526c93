"""Limits on memory and work: they are computed before memory is allocated, they hold, and real networks pass.

More than 400 lines, because every way in which a small file asked for too much has its network here.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unflip
from unflip.models import create
from unflip.packing.file import Packed, to_bytes, write
from unflip.packing.reference import evaluate
from unflip.runtime._native import Network

F32 = np.float32


class Net:
    """A graph that grows op by op, with fields that the packing never writes."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.ops, self.tensors = list(shape), [], {}  # type: ignore[var-annotated]
        self.returned: dict[str, Any] = {}  # instead of the last value

    def keep(self, tensor: Any) -> str:
        self.tensors[f"t{len(self.tensors)}"] = np.asarray(tensor)
        return f"t{len(self.tensors) - 1}"

    def op(self, kind: str, *inputs: int, **fields: Any) -> int:
        self.ops.append({"op": kind, "name": f"{kind}{len(self.ops)}", "inputs": inputs, **fields})
        return len(self.ops)

    def quantize(self, x: int, planes: int = 1, offset: float = -1.0) -> int:
        thresholds = self.keep(np.linspace(-1, 1, planes, dtype=F32)[:, None])
        scales = [2.0 * 1.25**-p for p in range(planes)]
        fields = {"thresholds": thresholds, "strict": [False] * planes, "coding": "planes"}
        return self.op("quantize", x, **fields, scales=scales, offset=offset)

    def signs(self, count: int) -> str:
        bits = np.random.default_rng(0).integers(0, 2, count).astype(np.uint8)
        return self.keep(np.packbits(bits, bitorder="little"))

    def conv(self, x: int, shape: tuple[int, ...], **fields: Any) -> int:
        plain = {"stride": [1, 1], "dilation": [1, 1], "padding": [0, 0, 0, 0], "groups": 1}
        return self.op("conv", x, shape=shape, **{**plain, "steps": [], **fields})

    def packed(self) -> Packed:
        source = {"shape": self.shape, "preprocess": None}
        returned = self.returned or {"output": len(self.ops)}
        return Packed({"input": source, "ops": self.ops, "labels": None, **returned}, self.tensors)

    def data(self) -> bytes:
        return to_bytes(self.packed())


def refused(data: bytes, *limits: int) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        Network.from_bytes(data, 1, *limits)
    return str(caught.value)


# --- files that asked for too much


def many_bases(bases: int, planes: int) -> Net:
    net = Net(1, 2, 2)
    code = net.quantize(0, planes, 0.25)
    net.conv(code, (1, 1, 1, 1), bits=net.signs(bases), scales=net.keep(np.ones((bases, 1), F32)))
    return net


def small_groups_and_many_bases(bases: int, planes: int) -> Net:
    """With AVX-512 too, this is computed by look-up."""
    net = Net(16, 2, 3)
    code = net.quantize(0, planes, 0.0)
    fields = {"groups": 2, "padding": [0, 1, 0, 1]}
    scales = net.keep(np.ones((bases, 1), F32))
    net.conv(code, (16, 8, 1, 3), bits=net.signs(bases * 16 * 8 * 3), scales=scales, **fields)
    return net


@pytest.mark.parametrize("made", [many_bases, small_groups_and_many_bases])
def test_bases(made: Any, instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With 65,536 bases an index overflowed, and loading 270 KB took half a minute."""
    assert "(1 .. 64" in refused(made(43_692, 8).data())
    net = made(64, 8)
    x = np.random.default_rng(1).normal(size=(2, *net.shape)).astype(F32)
    right = evaluate(net.packed(), torch.from_numpy(x)).numpy()
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        network = Network.from_bytes(net.data(), 1)
        found = np.empty((2, *network.outputs[0][1]), F32)
        network.run(x, found)
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4 * np.abs(right).max())


def test_sums_beyond_32_bits(instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiples of a unit that do not fit are added plane by plane. Such files were refused without a place."""
    net = Net(2**17, 1, 1)
    code = net.quantize(0, 8)
    net.ops[-1] |= {"scales": [4096.0] * 7 + [1.0], "offset": -4096.0}
    net.conv(code, (1, 2**17, 1, 1), bits=net.signs(2**17), scales=net.keep(np.ones((1, 1), F32)))
    x = np.random.default_rng(2).normal(size=(1, *net.shape)).astype(F32)
    right = evaluate(net.packed(), torch.from_numpy(x)).numpy()
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        found = np.empty((1, 1, 1, 1), F32)
        Network.from_bytes(net.data(), 1).run(x, found)
        np.testing.assert_allclose(found, right, rtol=1e-5)


def test_a_pool_of_2_to_the_32_pixels(
    instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of pixels overflowed; the answer was 1."""
    net = Net(1, 1, 1)
    fields = {"kernel": [65_536] * 2, "stride": [1, 1], "padding": [32_768] * 2}
    net.op("avg_pool", 0, **fields, ceil=False, count_padding=True)
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        network = Network.from_bytes(net.data(), 1)
        found = np.empty((1, *network.outputs[0][1]), F32)
        network.run(np.ones((1, 1, 1, 1), F32), found)
        assert (found == 2.0**-32).all()


def test_scales_whose_product_overflows(
    instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factor behind a convolution is multiplied into its scales. The product was infinite, and 0 times it NaN."""
    net = Net(2, 1, 1)
    affine = {"step": "affine", "scale": net.keep(np.full(1, 1e30, F32))}
    fields = {
        "bits": net.keep(np.array([1], np.uint8)),
        "scales": net.keep(np.full((1, 1), 1e30, F32)),
    }
    net.conv(net.quantize(0), (1, 2, 1, 1), **fields, steps=[affine])
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        found = np.empty((1, 1, 1, 1), F32)
        Network.from_bytes(net.data(), 1).run(np.ones((1, 2, 1, 1), F32), found)
        assert found == 0


def test_a_folded_factor_times_the_values_of_codes(
    instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product of scale and factor is finite, but not 16 times it: 0 was NaN."""
    net = Net(2, 1, 1)
    thresholds = net.keep(np.zeros((1, 1), F32))
    fields = {"thresholds": thresholds, "strict": [False], "coding": "planes"}
    code = net.op("quantize", 0, **fields, scales=[16.0], offset=-8.0)
    steps = [{"step": "affine", "scale": net.keep(np.full(1, 1e18, F32))}]
    fields = {"bits": net.keep(np.array([1], "u1")), "scales": net.keep(np.full((1, 1), 2e20, F32))}
    net.conv(code, (1, 2, 1, 1), **fields, steps=steps)
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        found = np.empty((1, 1, 1, 1), F32)
        Network.from_bytes(net.data(), 1).run(np.ones((1, 2, 1, 1), F32), found)
        assert found == 0


def test_scales_whose_product_loses_digits(
    instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product of the first two factors is below the normal floats, and lost digits."""
    net = Net(65_536, 1, 1)
    factors = [F32(2e-21), F32(3e-22), F32(1e20), F32(1e18)]
    steps = [{"step": "affine", "scale": net.keep(np.full(1, f, F32))} for f in factors[1:]]
    fields = {
        "bits": net.keep(np.full(8192, 255, np.uint8)),
        "scales": net.keep(np.full((1, 1), factors[0], F32)),
    }
    net.conv(net.quantize(0), (1, 65_536, 1, 1), **fields, steps=steps)
    right = 65_536 * np.prod(np.array(factors, np.float64))
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        found = np.empty((1, 1, 1, 1), F32)
        Network.from_bytes(net.data(), 1).run(np.ones((1, 65_536, 1, 1), F32), found)
        np.testing.assert_allclose(found, right, rtol=1e-6)


def test_a_scale_of_0_keeps_an_offset(
    instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of codes depends on whether there is an offset. The factor made it 0 after the layout was chosen, and
    the kernels read beyond the codes."""
    net = Net(16, 6, 6)
    filters = np.ones(16, F32)
    filters[0] = 0
    steps = [{"step": "affine", "scale": net.keep(filters)}]
    fields = {"bits": net.signs(16 * 8 * 9), "scales": net.keep(np.ones((1, 16), F32))}
    fields |= {"offset": net.keep(1 - filters), "groups": 2, "padding": [3] * 4, "steps": steps}
    net.conv(net.quantize(0), (16, 8, 3, 3), **fields)
    x = np.random.default_rng(1).normal(size=(1, *net.shape)).astype(F32)
    right = evaluate(net.packed(), torch.from_numpy(x)).numpy()
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        network = Network.from_bytes(net.data(), 1)
        found = np.empty((1, *network.outputs[0][1]), F32)
        network.run(x, found)
        np.testing.assert_array_equal(found, right, isa)


@pytest.mark.parametrize("function", ["silu", "gelu_tanh", "mish"])
def test_activations_of_large_numbers(
    function: str, instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest exponential is not 0; multiplied by -3e38 it gave -2 instead of 0."""
    x = np.array([-3e38, -1e30, -1e4, -100, -88, -80, 0, 80, 100, 1e30, 3e38], F32)
    net = Net(len(x), 1, 1)
    net.op("curve", 0, function=function)
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        found = np.empty((1, len(x), 1, 1), F32)
        Network.from_bytes(net.data(), 1).run(x.reshape(1, -1, 1, 1), found)
        np.testing.assert_allclose(found.ravel(), np.maximum(x, 0), rtol=1e-6, atol=1e-30)


def large_codes() -> Net:
    """Every binary convolution has a table of its pixels."""
    net = Net(1, 16_384, 16_384)
    bits, scales, value = net.signs(9), net.keep(np.ones((1, 1), F32)), 0
    for _ in range(4):
        code = net.quantize(value)
        value = net.conv(code, (1, 1, 3, 3), bits=bits, scales=scales, padding=[1, 1, 1, 1])
    return net


def dense_weights() -> Net:
    """Signs become floats in blocks of 16 filters: 512 bytes for each byte of the file."""
    net = Net(1, 1, 1)
    wide = net.op("pad", 0, before=[65_536, 0, 0], after=[65_535, 0, 0])
    fields = {"scales": net.keep(np.ones((1, 1), F32)), "groups": 65_536, "padding": [7, 7, 0, 0]}
    bits = net.signs(65_536 * 2 * 64)
    first, second = (net.conv(wide, (65_536, 2, 8, 8), bits=bits, **fields) for _ in range(2))
    net.op("map", first, steps=[{"step": "add", "value": second}])
    return net


def large_value() -> Net:
    net = Net(1, 1, 1)
    net.op("mean", net.op("upsample", 0, factor=[8192, 8192]))
    return net


def many_thresholds() -> Net:
    """One threshold for all channels becomes one per channel."""
    net = Net(16, 256, 256)
    flat = net.op("flatten", 0)
    thresholds = net.keep(np.linspace(-1, 1, 255, dtype=F32)[:, None])
    fields = {"strict": [False] * 255, "coding": "levels", "scales": [2.0**p for p in range(8)]}
    code = net.op("quantize", flat, thresholds=thresholds, **fields, offset=0.0)
    scales = net.keep(np.ones((1, 1), F32))
    net.conv(code, (1, 2**20, 1, 1), bits=net.signs(2**20), scales=scales)
    return net


def large_borders() -> Net:
    """One user of the code pads its rows, another its columns: the code has the border of both, 2 TB."""
    net = Net(4096, 16, 16)
    bits, scales, code = net.signs(4096), net.keep(np.ones((1, 1), F32)), net.quantize(0)
    fields = {"bits": bits, "scales": scales}
    tall = net.conv(code, (1, 4096, 1, 1), **fields, padding=[0, 0, 65_000, 0])
    wide = net.conv(code, (1, 4096, 1, 1), **fields, padding=[0, 0, 0, 65_000])
    net.op("concat", net.op("mean", tall), net.op("mean", wide))
    return net


def many_outputs() -> Net:
    """One value returned 60 times: 60 arrays of 64 MiB."""
    net = Net(1, 1, 1)
    value = net.op("upsample", 0, factor=[4096, 4096])
    net.returned = {"outputs": [{"name": str(i), "value": value} for i in range(60)]}
    net.returned["structure"] = "tuple"
    return net


@pytest.mark.parametrize(
    "made",
    [large_codes, dense_weights, large_value, many_thresholds, large_borders, many_outputs],
)
def test_memory_is_refused_before_it_is_allocated(made: Any, tmp_path: Path) -> None:
    path = tmp_path / "large.unflip"
    write(path, made().packed())
    out = in_a_process(MEASURED, path)
    assert "bytes of memory; the limit is 1,073,741,824" in out
    assert "max_memory" in out
    assert float(out.split()[0]) < 64 * 2**20


MEASURED = """
import sys, unflip
import numpy as np
from unflip.runtime import _native

def field(name):
    return 1024 * int(next(x for x in open("/proc/self/status") if x.startswith(name)).split()[1])

def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return field("VmRSS")

before = reset()
try:
    model = unflip.load(sys.argv[1], threads=int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    text, loading, kept = str(model.memory_needed), field("VmHWM") - before, field("VmRSS") - before
    x = np.ones((1, *model.input_shape), np.float32)
    before = reset() - x.nbytes
    outputs = model(x)
    peak = max(loading, kept + field("VmHWM") - before)
except ValueError as error:
    text, peak = str(error), field("VmHWM") - before
print(peak, text)
"""


def in_a_process(code: str, *arguments: Any) -> str:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux, to reset the peak of memory")
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_work() -> None:
    """A file of 16 KB, whose 20 convolutions would run for minutes."""
    net = Net(1, 1, 1)
    value = net.op("upsample", 0, factor=[2048, 2048])
    weight = net.keep(np.full((1, 1, 63, 63), 0.01, F32))
    for _ in range(20):
        value = net.conv(value, (1, 1, 63, 63), weight=weight, padding=[31] * 4)
    net.op("mean", value)
    message = refused(net.data())
    assert "running one sample may need" in message
    assert "units of work; the limit is 10,000,000,000" in message
    assert "max_work" in message


def test_work_of_loading() -> None:
    """Signs that many ops share are packed for each of them."""
    net = Net(2800, 1, 1)
    bits, scales = net.signs(2800 * 2800), net.keep(np.ones((1, 1), F32))
    ys = [net.conv(0, (2800, 2800, 1, 1), bits=bits, scales=scales) for _ in range(120)]
    net.op("map", ys[-1], steps=[{"step": "add", "value": y} for y in ys[:-1]])
    assert "loading the network may need" in refused(net.data(), 2**40)


def tall_images() -> Net:
    """The taps inside the image differ from row to row at both ends of 65,536 rows."""
    net = Net(1, 65_536, 1)
    bits, scales, code = net.signs(64), net.keep(np.ones((1, 1), F32)), net.quantize(0)
    fields = {"bits": bits, "scales": scales, "padding": [31, 0, 32, 0]}
    net.op(
        "concat", *[net.op("mean", net.conv(code, (1, 1, 64, 1), **fields)) for _ in range(2000)]
    )
    return net


def many_holes() -> Net:
    """Free places between values that are still needed, all too small for the values that follow."""
    net, count = Net(1, 1, 1), 24_576
    pairs = [[net.op("flatten", 0), net.op("flatten", 0)] for _ in range(count)]
    freed = [net.op("concat", *[b for _, b in pairs[i : i + 4096]]) for i in range(0, count, 4096)]
    value = net.op("pad", 0, before=[100, 0, 0], after=[0, 0, 0])
    for _ in range(count):
        value = net.op("flatten", value)
    kept = [net.op("concat", *[a for a, _ in pairs[i : i + 4096]]) for i in range(0, count, 4096)]
    net.op("concat", value, *freed, *kept)
    return net


def many_shortcuts() -> Net:
    """All steps are fused into the convolution. Each shortcut was looked up in all of them."""
    net = Net(1, 1, 1)
    value = net.op("map", 0, steps=[{"step": "clamp", "low": 0.0, "high": 1.0}])
    scales = net.keep(np.ones((1, 1), F32))
    net.conv(net.quantize(0), (1, 1, 1, 1), bits=net.signs(1), scales=scales)
    steps = [{"step": "add", "value": value}] * 250
    for _ in range(240):
        net.op("map", len(net.ops), steps=steps)
    net.op("map", len(net.ops), steps=[{"step": "mul", "value": value}])
    return net


@pytest.mark.parametrize("made", [tall_images, many_holes, many_shortcuts])
def test_loading_is_not_quadratic(made: Any) -> None:
    """These took 5, 4 and 5 seconds."""
    data = made().data()
    began = time.perf_counter()
    Network.from_bytes(data, 1, 0, 10**15)
    assert time.perf_counter() - began < 3


def test_shared_weights_are_checked_once() -> None:
    """They were checked again for each op, before the file was refused: 5 seconds, and minutes for more ops."""
    net = Net(4096, 1, 1)
    weight = net.keep(np.ones((1024, 4096, 1, 1), F32))
    for _ in range(2000):
        net.conv(0, (1024, 4096, 1, 1), weight=weight)
    data = net.data()
    began = time.process_time()
    assert "bytes of memory" in refused(data)
    assert time.process_time() - began < 2


SEED, FACTOR = 0xC70F6907, 0xC6A4A7935BD1E995  # of std::hash in libstdc++: MurmurHash64A


def names_of_one_hash(count: int) -> list[str]:
    """Texts of 16 characters: 8 random ones, then those that lead to the same hash, if they are ASCII."""
    factor, inverse = np.uint64(FACTOR), np.uint64(pow(FACTOR, -1, 2**64))
    start, wanted = np.uint64(SEED ^ 16 * FACTOR % 2**64), np.uint64(1)
    random = np.random.default_rng(0).integers(97, 123, (400 * count, 8)).astype(np.uint8)
    with np.errstate(over="ignore"):
        first = random.view(np.uint64).ravel() * factor
        first = (first ^ first >> np.uint64(47)) * factor
        second = (wanted ^ (start ^ first) * factor) * inverse
        second = (second ^ second >> np.uint64(47)) * inverse
    rest = second.view(np.uint8).reshape(-1, 8)
    ascii_only = (rest < 128).all(1)
    found = np.concatenate([random[ascii_only], rest[ascii_only]], 1)
    return sorted({row.tobytes().decode() for row in found})[:count]


def test_names_of_one_hash() -> None:
    """A hash table made loading quadratic: this file of 1 MB took 3 seconds, and one of 4 MB would take 40."""
    names = names_of_one_hash(10_000)
    net = Net(1, 1, 1)
    net.tensors = {name: np.zeros(1, F32) for name in names}
    for first in range(0, len(names), 250):
        steps = [{"step": "affine", "shift": name} for name in names[first : first + 250]]
        net.op("map", len(net.ops), steps=steps)
    data = net.data()
    assert len(names) == 10_000
    began = time.perf_counter()
    Network.from_bytes(data, 1)
    assert time.perf_counter() - began < 1


# --- time per unit of work


def far_apart() -> Net:
    """The ones of each window are counted, without the columns between its two taps."""
    net = Net(1, 192, 65_536)
    fields = {"bits": net.signs(256), "scales": net.keep(np.ones((1, 1), F32))}
    fields |= {"offset": net.keep(np.ones(1, F32)), "dilation": [1, 65_535]}
    code = net.quantize(0)
    net.op("concat", *[net.conv(code, (1, 1, 128, 2), **fields) for _ in range(3)])
    return net


def border_of_bytes() -> Net:
    net, one = Net(1, 1, 1), np.ones(1, F32)
    fields = {"scale": net.keep(one), "shift": net.keep(one), "zero": net.keep(np.zeros(1, "u1"))}
    whole = net.op("to_bytes", 0, **fields)
    fields = {"bytes": net.keep(np.ones((1, 1, 1, 1), np.uint8)), "scales": net.keep(one[:, None])}
    net.conv(whole, (1, 1, 1, 1), **fields, padding=[8192] * 4, stride=[256, 256])
    return net


def instance_norm() -> Net:
    """Each group is one channel, whose elements are on different pages. It reads them three times."""
    net = Net(1024, 64, 64)
    net.op("normalize", 0, groups=1024, epsilon=1e-5)
    return net


def blocks_of_filters() -> Net:
    """Look-up counts the ones of a window again for each block of 64 filters."""
    net = Net(1, 4100, 1)
    fields = {"bits": net.signs(4096 * 4000), "scales": net.keep(np.ones((1, 1), F32))}
    fields |= {"offset": net.keep(np.ones(1, F32))}
    net.conv(net.quantize(0, 1, 0.0), (4096, 1, 4000, 1), **fields)
    return net


def counted_channels() -> Net:
    """The bits of two channels, tap by tap, for each of 64 bases and 8 planes."""
    net = Net(2, 20, 20)
    fields = {"groups": 2, "padding": [7, 8, 7, 8], "bits": net.signs(64 * 2 * 255)}
    scales = net.keep(np.ones((64, 1), F32))
    net.conv(net.quantize(0, 8, 0.0), (2, 1, 15, 17), scales=scales, **fields)
    return net


MADE = [far_apart, border_of_bytes, instance_norm, blocks_of_filters, counted_channels]


@pytest.mark.parametrize("made", MADE)
def test_time_of_a_unit_of_work(
    made: Any, instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """About a nanosecond at most, except for portable code: these took two or three."""
    data = made().data()
    for isa in set(instruction_sets) - {"portable"}:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        network = Network.from_bytes(data, 1)
        x, found = (np.ones((1, *s), F32) for s in (network.input_shape, network.outputs[0][1]))
        times = []
        for _ in range(2):
            began = time.process_time()
            network.run(x, found)
            times.append(time.process_time() - began)
        assert min(times) < network.work_needed * 1.5e-9, isa


def test_tall_pools_on_many_threads() -> None:
    """Each job computes the rows of a convolution that its pool needs: 128 jobs took 21 times as long as one."""
    net = Net(8, 1024, 16)
    fields = {"weight": net.keep(np.ones((8, 8, 9, 9), F32)), "padding": [4] * 4}
    shape = {"kernel": [500, 1], "stride": [1, 1], "padding": [0, 0], "ceil": False}
    net.op("max_pool", net.conv(0, (8, 8, 9, 9), **fields), **shape)
    x, times, results = np.random.default_rng(3).normal(size=(1, *net.shape)).astype(F32), [], []
    for threads in (1, 64):
        network = Network.from_bytes(net.data(), threads)
        results.append(np.empty((1, *network.outputs[0][1]), F32))
        network.run(x, results[-1])
        began = time.process_time()
        for _ in range(5):
            network.run(x, results[-1])
        times.append(time.process_time() - began)
    assert times[1] < 4 * times[0]
    np.testing.assert_array_equal(*results)


# --- limits


def test_limits_are_exact(files: dict[str, Path]) -> None:
    for path in files.values():
        model = unflip.load(path)
        needs = model.memory_needed, model.work_needed
        assert 0 < needs[0] < 2**24
        assert 0 < needs[1] < 10**8
        unflip.load(path, max_memory=needs[0])
        with pytest.raises(ValueError, match=rf"the limit is {needs[0] - 1:,}\..*with max_memory"):
            unflip.load(path, max_memory=needs[0] - 1)
        with pytest.raises(ValueError, match=r"the limit is 1\. .*with max_work"):
            unflip.load(path, max_work=1)


def test_limits_that_are_none(files: dict[str, Path]) -> None:
    unflip.load(files["vector"], max_memory=None, max_work=10**30)
    for name in ("max_memory", "max_work"):
        for wrong in (0, -1, 1.5, "1", True):
            with pytest.raises(ValueError, match=f"{name} must be a whole number"):
                unflip.load(files["vector"], **{name: wrong})  # type: ignore[arg-type]


def test_a_file_larger_than_the_limit(files: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"the limit is 100\..*max_memory"):
        unflip.load(files["residual"], max_memory=100)


def test_memory_grows_with_threads(files: dict[str, Path]) -> None:
    one, many = (unflip.load(files["residual"], threads).memory_needed for threads in (1, 8))
    assert one < many


def code_of_many_pixels() -> Net:
    """Look-up pairs its rows."""
    net = Net(16, 600, 600)
    fields = {"bits": net.signs(16 * 16 * 9), "scales": net.keep(np.ones((1, 1), F32))}
    net.conv(net.quantize(0, 4, 0.3), (16, 16, 3, 3), **fields, padding=[1] * 4)
    return net


def windows_of_many_pixels() -> Net:
    """Look-up copies windows."""
    net = Net(16, 600, 600)
    fields = {"bits": net.signs(16 * 16 * 25), "scales": net.keep(np.ones((1, 1), F32))}
    net.conv(net.quantize(0, 2, 0.3), (16, 16, 5, 5), **fields, padding=[2] * 4)
    return net


def padded_image() -> Net:
    net = Net(16, 600, 600)
    net.conv(0, (16, 16, 3, 3), weight=net.keep(np.ones((16, 16, 3, 3), F32)), padding=[1] * 4)
    return net


def sums_of_signs() -> Net:
    """Of every corner of a large kernel, for 64 bases."""
    net = Net(1, 1, 1)
    fields = {"bits": net.signs(100 * 100 * 64), "scales": net.keep(np.ones((64, 1), F32))}
    net.conv(net.quantize(0), (1, 1, 100, 100), **fields, padding=[99, 99, 0, 0])
    return net


def many_channels() -> Net:
    net = Net(16, 128, 128)
    one = net.keep(np.ones(1, F32))
    steps = [{"step": "affine", "scale": one, "shift": one}, {"step": "prelu", "slope": one}]
    net.op("map", net.op("flatten", 0), steps=steps * 4)
    return net


SIZES = [code_of_many_pixels, windows_of_many_pixels, padded_image, sums_of_signs, many_channels]


@pytest.mark.parametrize("made", SIZES)
def test_memory_stays_below_what_was_computed(
    made: Any, tmp_path: Path, instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.unflip"
    write(path, made().packed())
    for isa in instruction_sets:
        monkeypatch.setenv("UNFLIP_ISA", isa)
        for threads in (1, 2):
            peak, computed = map(int, in_a_process(MEASURED, path, threads).split())
            assert peak <= computed < 6 * peak, isa


@pytest.mark.parametrize("method", ["abc", "bwn"])
def test_real_networks_stay_below_what_was_computed(method: str, tmp_path: Path) -> None:
    """Memory, and time: a unit of work takes at most about a nanosecond."""
    torch.manual_seed(0)
    path = tmp_path / "resnet.unflip"
    network = create("resnet18", method, num_classes=1000).eval()
    unflip.pack(network, torch.randn(1, 3, 224, 224), path)
    for threads in (1, 2):
        peak, computed = map(int, in_a_process(MEASURED, path, threads).split())
        assert peak <= computed
        assert computed < 256 * 2**20
    model = unflip.load(path)
    x = np.zeros((1, 3, 224, 224), F32)
    model(x)
    began = time.perf_counter()
    model(x)
    assert time.perf_counter() - began < model.work_needed * 2e-9


def test_memory_of_threads(tmp_path: Path) -> None:
    """128 threads share one large buffer, and each touches 7 to 17 KiB of stack; 4 KiB were counted."""
    net = Net(16, 1100, 1100)
    net.op("mean", net.op("map", 0, steps=[{"step": "clamp", "low": 0, "high": 1}]))
    path = tmp_path / "threads.unflip"
    write(path, net.packed())
    one, many = (np.array(in_a_process(MEASURED, path, n).split(), int) for n in (1, 128))
    peak, computed = many - one
    assert peak <= computed < 2**23


def test_signs_as_floats_stay_below_what_was_computed(tmp_path: Path) -> None:
    net = Net(4096, 1, 1)
    scales = net.keep(np.ones((1, 1), F32))
    net.conv(0, (4096, 4096, 1, 1), bits=net.signs(4096 * 4096), scales=scales)
    write(tmp_path / "dense.unflip", net.packed())
    peak, computed = map(int, in_a_process(MEASURED, tmp_path / "dense.unflip").split())
    assert 64 * 2**20 < peak <= computed < 80 * 2**20
