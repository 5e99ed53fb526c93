"""Networks as plain C on emulated Cortex-M3, M4, M7 and M55: the same bits as the runtime on this machine."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unflip
from unflip.export.plain_c.check import scores_of
from unflip.export.plain_c.cost import estimate
from unflip.export.plain_c.export import export_c
from unflip.export.plain_c.plan import make_plan
from unflip.export.plain_c.source import make_source
from unflip.networks import locate
from unflip.packing import read
from unflip.packing.file import write
from unflip.runtime.images import normalized

ROOT = Path(__file__).parents[2]
BOARDS = runpy.run_path(str(ROOT / "examples" / "plain_c" / "bare_metal" / "run.py"))
NETWORKS = runpy.run_path(str(Path(__file__).with_name("c_networks.py")))
MISSING = BOARDS["missing"]()
WITH_FPU = [cpu for cpu in BOARDS["CPUS"] if cpu != "cortex-m3"]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")


def run(path: Path, folder: Path, cpu: str, **options: Any) -> tuple[Any, Any]:
    """The board's result, and the bits of the runtime's scores."""
    name = path.stem.replace("-", "_")
    export_c(path, folder, name)
    model = unflip.load(path)
    channels, height, width = model.input_shape
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, channels), dtype=np.uint8)
    x = normalized(pixels.transpose(2, 0, 1).astype(np.float32), model)
    result = BOARDS["run_network"](folder / f"{name}.c", name, pixels.ravel(), cpu, **options)
    return result, scores_of(model, x).view(np.uint32).tolist()


@pytest.mark.parametrize("cpu", WITH_FPU)
def test_the_same_bits(cpu: str, tmp_path: Path) -> None:
    """Every op, step and field of the format that plain C supports, and the installed network for digits."""
    networks = NETWORKS["networks"]()
    assert len(networks) > 20
    paths = [tmp_path / f"{name}.unflip" for name in networks]
    for path, packed in zip(paths, networks.values(), strict=True):
        write(path, packed)
    for path in (*paths, locate("digits-mcu")):
        result, expected = run(path, tmp_path, cpu)
        assert result.scores == expected, path.stem


@pytest.mark.parametrize("cpu", WITH_FPU)
def test_resnet20(cpu: str, tmp_path: Path) -> None:
    """The network of the results: bits, sizes, and on the M4 the estimated instructions."""
    path = ROOT / "results" / "cifar10" / "network" / "resnet20-strongest.unflip"
    plan = make_plan(read(path))
    source = make_source(plan, "net")
    result, expected = run(path, tmp_path, cpu, layers=len(source.layers))
    assert result.scores == expected
    assert result.ram < source.arena + 500
    assert result.stack < 3000
    assert result.flash < source.flash + 20_000
    if cpu == "cortex-m4":
        estimated = [one.instructions for one in estimate(plan, source)]
        assert sum(estimated) == pytest.approx(sum(result.layers), rel=0.15)
        assert estimated == pytest.approx(result.layers, rel=0.3)


def test_the_same_bits_without_fpu(tmp_path: Path) -> None:
    """On a Cortex-M3: floats by software, and one product at a time."""
    networks = {"byte_layers": NETWORKS["byte_layers"](), "residual": NETWORKS["residual"]()}
    for name, packed in networks.items():
        write(tmp_path / f"{name}.unflip", packed)
        result, expected = run(tmp_path / f"{name}.unflip", tmp_path, "cortex-m3")
        assert result.scores == expected, name


def test_estimates_of_8_bit_ends(tmp_path: Path) -> None:
    """A first convolution on pixels, a linear layer and a softmax."""
    net = NETWORKS["Net"]((3, 24, 32), 4, exact=False)
    image = NETWORKS["pixels_to_bytes"](net)
    x = net.op("mean", net.byte_conv(image, [16, 3, 3, 3], padding=[1, 1, 1, 1]))
    net.op("softmax", net.byte_conv(net.to_bytes(x, 20.0, 100.0, 100), [64, 16, 1, 1]))
    path = tmp_path / "net.unflip"
    write(path, net.packed())
    plan = make_plan(read(path))
    source = make_source(plan, "net")
    result, expected = run(path, tmp_path, "cortex-m4", layers=len(source.layers))
    assert result.scores == expected
    for one, measured in zip(estimate(plan, source), result.layers, strict=True):
        if one.layer.task.kind != "mean":  # its sums in double precision depend on the numbers
            assert one.instructions == pytest.approx(measured, rel=0.3)
