"""Networks for microcontrollers keep within their flash and RAM, and compute the bits of the runtime.

CIFAR-10: the installed ResNet-20 with shortcuts of 16 bits. Digits: the installed network of the recipe digits-mcu.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import unflip
from unflip.export.plain_c.check import Compiled, differences, scores_of
from unflip.export.plain_c.export import CFiles, export_c
from unflip.export.plain_c.measure import export_int16
from unflip.networks import entries, locate
from unflip.packing import pack
from unflip.recipes.load import load_recipe
from unflip.runtime.images import normalized
from unflip.train import RunOptions, train

KB = 1024
GCC = shutil.which("arm-none-eabi-gcc")
CORTEX_M4 = ("-mcpu=cortex-m4", "-mthumb", "-mfpu=fpv4-sp-d16", "-mfloat-abi=hard")
STACK = 3000  # more than any of our networks uses on a board

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc")


def check_sizes(files: CFiles, folder: Path, level: str, most_flash: int, most_ram: int) -> None:
    """The macros of the header, and the object file for a Cortex-M4."""
    header = (folder / "net.h").read_text()
    macros = dict(re.findall(r"^#define NET_(ARENA|FLASH)_BYTES (\d+)", header, re.M))
    assert (int(macros["ARENA"]), int(macros["FLASH"])) == (files.arena, files.flash)
    assert files.arena + STACK < most_ram
    assert files.flash < most_flash
    if GCC is None:
        pytest.skip("arm-none-eabi-gcc is not installed: the size of the code is not checked")
    out = str(folder / "net.o")
    command = [GCC, *CORTEX_M4, level, "-std=c99", "-c", str(folder / "net.c"), "-o", out]
    subprocess.run(command, check=True)
    size = subprocess.run(
        [GCC.replace("gcc", "size"), out], check=True, capture_output=True, text=True
    )
    assert files.flash < int(size.stdout.splitlines()[1].split()[0]) < most_flash


@needs_cc
def test_cifar10_within_96_kb_of_flash_and_64_kb_of_ram(tmp_path: Path) -> None:
    """Sizes do not depend on the images that give the ranges. Above 87 %: results/microcontrollers/int16.log."""
    images = tmp_path / "images"
    images.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(images / f"{i}.png")
    files, _ = export_int16(locate("resnet20-cifar10"), tmp_path, "net", images)
    check_sizes(files, tmp_path, "-O2", 96 * KB, 64 * KB)


def test_digits_within_16_kb_of_flash(tmp_path: Path) -> None:
    files = export_c(locate("digits-mcu"), tmp_path, "net")
    check_sizes(files, tmp_path, "-Os", 16 * KB, 8 * KB)


@needs_cc
def test_digits_in_c_have_the_accuracy_of_the_catalog(tmp_path: Path) -> None:
    """All test images, with the bits of the runtime."""
    images = load_recipe("digits-mcu").data.load(None)
    path = locate("digits-mcu")
    assert check_bits(path, tmp_path, images.test_images, images.test_labels) == pytest.approx(
        entries()["digits-mcu"].accuracy, abs=0.005
    )


@needs_cc
def test_digits_are_trained_and_exported(tmp_path: Path) -> None:
    recipe = load_recipe("digits-mcu", ["epochs=3"])
    images = recipe.data.load(None)
    out = tmp_path / "run"
    train(recipe, images, out, options=RunOptions(device="cpu", quiet=True))
    path = tmp_path / "net.unflip"
    model = unflip.load_run(out, seed=0)
    statistics = {"mean": images.mean, "std": images.std}
    pack(model, torch.randn(1, 1, 8, 8), path, preprocess=statistics)
    check_bits(path, tmp_path, images.test_images[:20], images.test_labels[:20])


def check_bits(path: Path, folder: Path, images: Any, labels: Any) -> float:
    """Every score has the bits of the runtime. Returns the accuracy in percent."""
    files = export_c(path, folder, "net")
    network = unflip.load(path)
    right = 0
    with Compiled(folder / "net.c", "net", files.arena) as compiled:
        for image, label in zip(images, labels, strict=True):
            x = normalized(image.astype(np.float32), network)
            found = compiled.run(np.ascontiguousarray(image.transpose(1, 2, 0)), 10)
            assert differences(found, scores_of(network, x)) == 0
            right += int(found.argmax() == label)
    return 100 * right / len(labels)
