"""8-bit ends in plain C: the bits of the runtime for random networks and at the ends of all ranges."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from c_library import Library
from onnx_net import Net
from PIL import Image

from unflip.export.plain_c import intervals
from unflip.export.plain_c.export import to_c
from unflip.export.plain_c.measure import export_int16
from unflip.export.plain_c.memory import Memory
from unflip.export.plain_c.plan import make_plan
from unflip.export.plain_c.sums import Whole
from unflip.packing import Packed
from unflip.packing.file import write

NETWORKS = runpy.run_path(str(Path(__file__).with_name("c_networks.py")))
affine, pixels_to_bytes = NETWORKS["affine"], NETWORKS["pixels_to_bytes"]
residual = NETWORKS["residual"]
SEEDS = 24

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def random_network(seed: int) -> Packed:
    """An 8-bit convolution, often on pixels; steps, perhaps a pool or bits; an 8-bit linear layer."""
    random = np.random.default_rng(seed)
    groups, per_group = int(random.choice([1, 1, 1, 3])), int(random.integers(1, 7))
    net = Net((3, *map(int, random.integers(5, 14, 2))), seed, exact=bool(seed % 2))
    image = pixels_to_bytes(net)
    if seed % 4 == 3:  # another range: pixels are converted to floats first
        image = net.to_bytes(0, 40 * net.numbers(3), 90, net.random.integers(0, 256, 1))
    filters, steps = groups * per_group, list[Any]()
    if random.integers(2):
        steps.append(affine(net, filters))
    if random.integers(2):
        steps.append({"step": "prelu", "slope": net.keep(np.abs(net.numbers(filters)))})
    if random.integers(2):
        steps.append({"step": "clamp", "low": -0.5, "high": float(random.choice([0.5, 3.0]))})
    x = net.byte_conv(
        image, [filters, 3 // groups, *map(int, random.integers(1, 4, 2))], groups=groups,
        stride=random.integers(1, 3, 2).tolist(), dilation=random.integers(1, 3, 2).tolist(),
        padding=random.integers(0, 3, 4).tolist(), steps=steps,
    )  # fmt: skip
    if random.integers(2):
        x = net.op("max_pool", x, kernel=[1, 1], stride=[1, 1], padding=[0, 0], ceil=False)
    if random.integers(3):
        levels = {} if random.integers(2) else NETWORKS["LEVELS"]
        code = net.quantize(x, channels=int(random.choice([1, filters])), **levels)
        x, filters = net.conv(code, [5, filters, 1, 1], steps=[affine(net, 5)]), 5
    numbers = net.to_bytes(net.op("mean", x), 60.0, 100.0, int(random.integers(0, 256)))
    logits = net.byte_conv(numbers, [int(random.integers(1, 12)), filters, 1, 1])
    net.op(str(random.choice(["softmax", "log_softmax"])), logits)
    return net.packed()


def linear(features: int, weight: int, zero: int) -> Packed:
    """All weights are equal; inputs above 0 become 255, others 0."""
    net = Net((features, 1, 1))
    numbers = net.to_bytes(0, 1e30, 0.0, zero)
    net.byte_conv(numbers, [3, features, 1, 1], scales=np.float32([[1.0, 0.0, -1e38]]))
    packed = net.packed()
    packed.tensors[packed.graph["ops"][-1]["bytes"]][:] = np.int8(weight).view(np.uint8)
    return packed


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    networks = {f"random{seed}": random_network(seed) for seed in range(SEEDS)}
    for weight in (-127, 127):
        for zero in (0, 255):
            networks[f"linear{weight % 256}_{zero}"] = linear(65_536, weight, zero)
    return Library(networks, tmp_path_factory.mktemp("bytes"))


def test_random_networks(library: Library) -> None:
    """Pixels, floats, and floats far outside all ranges. Many of the numbers are equal to thresholds."""
    random = np.random.default_rng(2)
    for seed in range(SEEDS):
        name = f"random{seed}"
        channels, height, width = shape = library.models[name].input_shape
        for pixels in (
            random.integers(0, 256, (height, width, channels)),
            np.full((height, width, channels), 255),
        ):
            assert library.differences(name, pixels.astype(np.uint8)) == 0, name
        for size in (1, 1e30):
            x = (random.normal(size=shape) * size).astype(np.float32)
            assert library.differences(name, x) == 0, name


def test_the_largest_sums(library: Library) -> None:
    """65,536 products of 255 and 127 nearly fill 32 bits; a scale of 0, and one that overflows."""
    for name in (name for name in library.packed if name.startswith("linear")):
        for sign in (-1, 0, 1):
            x = np.full((65_536, 1, 1), sign, np.float32)
            assert library.differences(name, x) == 0, name
    found = library.run("linear127_0", np.ones((65_536, 1, 1), np.float32))
    assert found.tolist() == [np.float32(65_536 * 255 * 127), 0, -np.inf]


def test_nan_becomes_0(library: Library) -> None:
    """The runtime refuses NaN as input, but not inside the network."""
    shape = library.models["random0"].input_shape
    found, expected = (
        library.run("random0", np.full(shape, v, np.float32)) for v in (np.nan, -1e30)
    )
    np.testing.assert_array_equal(found, expected)


def test_pixels_stay_bytes() -> None:
    """The first convolution reads the caller's pixels, if their whole numbers are the pixels."""
    assert Memory(make_plan(random_network(0)), {}).direct
    source = to_c(random_network(0), "net").source
    for name in ("u_convert(", "u_float_conv(", "u_gather("):
        assert name not in source
    assert "static const int8_t" in source
    assert not Memory(make_plan(random_network(3)), {}).direct


def test_bits_follow_from_whole_numbers() -> None:
    """The sums of a first convolution have millions of values: thresholds are found by bisection."""
    net = Net((3, 8, 8), 1, exact=False)
    x = net.byte_conv(pixels_to_bytes(net), [16, 3, 3, 3], steps=[affine(net, 16)])
    net.conv(net.quantize(x, channels=16), [4, 16, 1, 1])
    source = to_c(net.packed(), "net").source
    assert "const int32_t *first = (const int32_t *)e->first" in source
    assert source.count("(float)x[") == 1  # only the scores are computed in floats


@pytest.mark.parametrize("seed", range(20))
def test_bisection_finds_what_trying_finds(seed: int) -> None:
    net = Net((4, 1, 1), seed, exact=True)
    slope = net.keep(np.abs(net.numbers(4)))
    steps = [affine(net, 4), {"step": "prelu", "slope": slope}, affine(net, 4)]
    steps.append({"step": "clamp", "low": -1.0, "high": 1.5})
    x = net.conv(0, [4, 4, 1, 1], floats=True, steps=steps)
    code = net.quantize(x, steps=3, channels=4, strict=[False, True, False], scales=[1.0, 0.5, 0.2])
    net.conv(code, [1, 4, 1, 1])
    [task, *_] = make_plan(net.packed()).tasks
    whole = Whole(net.numbers(4), 50)
    assert intervals._is_monotone(task, whole)
    bisected, tried = intervals._bisected(task, whole), intervals._tried(task, whole)
    assert tried is not None
    for a, b in zip(bisected, tried, strict=True):
        np.testing.assert_array_equal(a, b)


def test_shortcuts_of_16_bits(tmp_path: Path) -> None:
    path = tmp_path / "m.unflip"
    write(path, residual(int8_ends=True))
    noise = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "image.png")
    files, error = export_int16(path, tmp_path, "net", tmp_path / "image.png")
    assert "int16_t *out" in files.source
    assert files.arena < 0.75 * to_c(residual(int8_ends=True), "net").arena
    assert 0 < error.largest < 0.5 * error.scores


def test_sizes_and_commands(unflip: Any, tmp_path: Path) -> None:
    """8-bit weights need a quarter of the flash, and pixels no table; the commands include them."""
    floats, whole = (to_c(residual(int8_ends=ends), "net") for ends in (False, True))
    assert floats.flash - whole.flash == pytest.approx(3 * 8 * 27, abs=128)
    assert whole.arena <= floats.arena
    write(tmp_path / "m.unflip", residual(int8_ends=True))
    shown = unflip("show", tmp_path / "m.unflip", "--target", "cortex-m4")
    assert shown.code == 0, shown.err
    total = next(line.split() for line in shown.out.splitlines() if line.startswith("total"))
    assert total[1:3] == [f"{whole.flash:,}", f"{whole.arena:,}"]
    Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save(tmp_path / "image.png")
    command = ("export", tmp_path / "m.unflip", "--c", tmp_path / "c", "--check")
    done = unflip(*command, tmp_path / "image.png")
    assert done.code == 0, done.err
    assert "1 image: the same bits as in the runtime" in done.out
