"""The recipes for microcontrollers keep within their flash and RAM, and compute the bits of the runtime."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import unflip
from unflip.data import InputSpec
from unflip.export.plain_c.check import Compiled, differences, scores_of
from unflip.export.plain_c.export import CFiles, export_c
from unflip.packing import pack
from unflip.packing.images import pack_for
from unflip.recipes.build import build_model
from unflip.recipes.load import load_recipe
from unflip.runtime.images import normalized
from unflip.train import RunOptions, train

KB = 1024
GCC = shutil.which("arm-none-eabi-gcc")
CORTEX_M4 = ("-mcpu=cortex-m4", "-mthumb", "-mfpu=fpv4-sp-d16", "-mfloat-abi=hard")
STACK = 3000  # more than any of our networks uses on a board


def exported(recipe: str, folder: Path) -> CFiles:
    """The network of a recipe as C; sizes do not depend on the weights."""
    channels, size = (1, 8) if recipe.startswith("digits") else (3, 32)
    numbers = tuple("0123456789")
    inputs = InputSpec((channels, size, size), numbers, (0.3,) * channels, (0.25,) * channels)
    model = build_model(load_recipe(recipe), inputs, seed=0)
    with torch.no_grad():
        model.train()(torch.randn(4, *inputs.shape))
    pack_for(inputs, model.eval(), folder / "net.unflip")
    return export_c(folder / "net.unflip", folder, "net")


def flash(folder: Path, level: str) -> int:
    """Bytes of code and constants on a Cortex-M4."""
    assert GCC
    out = str(folder / "net.o")
    command = [GCC, *CORTEX_M4, level, "-std=c99", "-c", str(folder / "net.c"), "-o", out]
    subprocess.run(command, check=True)
    size = subprocess.run(
        [GCC.replace("gcc", "size"), out], check=True, capture_output=True, text=True
    )
    return int(size.stdout.splitlines()[1].split()[0])


@pytest.mark.parametrize(
    ("recipe", "level", "most_flash", "most_ram"),
    [("digits-mcu", "-Os", 16 * KB, 8 * KB), ("cifar10-resnet20-mcu", "-O2", 96 * KB, 64 * KB)],
)
def test_sizes(recipe: str, level: str, most_flash: int, most_ram: int, tmp_path: Path) -> None:
    files = exported(recipe, tmp_path)
    assert files.arena + STACK < most_ram
    assert files.flash < most_flash
    if GCC is None:
        pytest.skip("arm-none-eabi-gcc is not installed: the size of the code is not checked")
    assert files.flash < flash(tmp_path, level) < most_flash


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc")
def test_digits_are_trained_and_exported(tmp_path: Path) -> None:
    recipe = load_recipe("digits-mcu", ["epochs=3"])
    images = recipe.data.load(None)
    out = tmp_path / "run"
    train(recipe, images, out, options=RunOptions(device="cpu", quiet=True))
    path = tmp_path / "net.unflip"
    model = unflip.load_run(out, seed=0)
    statistics = {"mean": images.mean, "std": images.std}
    pack(model, torch.randn(1, 1, 8, 8), path, preprocess=statistics)
    files = export_c(path, tmp_path, "net")
    network = unflip.load(path)
    with Compiled(tmp_path / "net.c", "net", files.arena) as compiled:
        for image in images.test_images[:20]:
            x = normalized(image.astype(np.float32), network)
            pixels = np.ascontiguousarray(image.transpose(1, 2, 0))
            assert differences(compiled.run(pixels, 10), scores_of(network, x)) == 0
