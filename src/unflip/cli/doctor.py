"""``unflip doctor``: what this machine can do, and what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from typing import NamedTuple

import typer

from unflip import __version__
from unflip.cli.app import app, installed, print_table
from unflip.tables import Table


class Finding(NamedTuple):
    """One line: what was looked for, what was found (empty: it is missing), and what it is for or how to get it."""

    what: str
    found: str
    note: str = ""


class Extra(NamedTuple):
    package: str  # as it is imported
    distribution: str  # as pip calls it
    extra: str
    use: str


EXTRAS = (
    Extra("torch", "torch", "train", "training, packing"),
    Extra("onnx", "onnx", "onnx", "ONNX and QONNX"),
    Extra("simplejpeg", "simplejpeg", "images", "faster JPEG decoding"),
    Extra("pyarrow", "pyarrow", "parquet", "image sets in Parquet files"),
    Extra("tensorboard", "tensorboard", "tensorboard", "unflip train --tensorboard"),
    Extra("ray", "ray", "ray", "studies on a cluster"),
    Extra("huggingface_hub", "huggingface_hub", "hub", "networks on the Hugging Face Hub"),
)
TRAINING = ("torch", "pydantic", "yaml", "sklearn", "matplotlib")
TINY = {"op": "mean", "name": "mean", "inputs": [0]}  # the smallest network


@app.command(epilog="Example: unflip doctor")
def doctor() -> None:
    """Check what this machine can do.

    It prints what is missing and how to get it. The exit code is 1 if packed networks cannot be run.
    """
    runtime = _runtime()
    findings = [
        Finding("unflip", __version__, f"Python {platform.python_version()}, {_system()}"),
        runtime,
        _resizing(),
        _compiler(),
        *(_extra(extra) for extra in EXTRAS),
        _gpu(),
    ]
    rows = [(line.what, line.found or "missing", line.note) for line in findings]
    print_table(Table(("part", "found", "note"), rows))
    if not runtime.found:
        raise typer.Exit(1)
    lacking = [package for package in TRAINING if not installed(package)]
    if lacking:
        print(
            f"\nPacked networks run. Training lacks {', '.join(lacking)}: pip install 'unflip[train]'"
        )
    else:
        print("\nReady to train and to run packed networks. Try 'unflip demo'.")


def _system() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.system()} {platform.machine()}, {cores} CPU cores"


def _runtime() -> Finding:
    """Loads and runs a network, so that a library for another CPU is noticed."""
    import numpy as np

    from unflip.packing.file import Packed, to_bytes

    try:
        from unflip.runtime import _native

        source = {"shape": [1, 2, 2], "preprocess": None}
        graph = {"input": source, "ops": [TINY], "output": 1, "labels": None}
        network = _native.Network.from_bytes(to_bytes(Packed(graph, {})), 1)
        result = np.empty((1, 1), np.float32)
        network.run(np.array([[[[1, 2], [3, 6]]]], np.float32), result)
    except ImportError as error:
        return Finding("runtime", "", f"{error}. Reinstall: pip install --force-reinstall unflip")
    except ValueError as error:
        return Finding("runtime", "", str(error))
    if result != 3:
        return Finding("runtime", "", f"it computes {result.item()} instead of 3. Report this")
    fast = {"portable": "slow: no kernels for this CPU"}
    return Finding("runtime", network.isa, fast.get(network.isa, "instruction set of the kernels"))


def _resizing() -> Finding:
    from unflip.resize import LIBRARY, has_library

    missing = f"{LIBRARY} does not fit; Pillow resizes, which is slower"
    return Finding(
        "resizing", "native" if has_library() else "Pillow", "" if has_library() else missing
    )


def _compiler() -> Finding:
    """Wheels do not need one."""
    found = [tool for tool in ("c++", "g++", "clang++") if shutil.which(tool)][:1]
    found += [tool for tool in ("cmake",) if shutil.which(tool)]
    note = "only to build unflip from source, and for C programs"
    return Finding("compiler", ", ".join(found) if len(found) == 2 else "", note)


def _extra(extra: Extra) -> Finding:
    if not installed(extra.package):
        return Finding(extra.package, "", f"{extra.use}: pip install 'unflip[{extra.extra}]'")
    try:
        version = importlib.metadata.version(extra.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "yes"
    return Finding(extra.package, version, extra.use)


def _gpu() -> Finding:
    if not installed("torch"):
        return Finding("GPU", "", "needs torch")
    import torch

    if torch.cuda.is_available():
        triton = "" if installed("triton") else "; without triton, steps are slower"
        return Finding("GPU", torch.cuda.get_device_name(0), f"CUDA {torch.version.cuda}{triton}")
    if torch.version.cuda is None:
        how = "this torch is built without CUDA; for a GPU see https://pytorch.org/get-started"
    else:
        how = "no NVIDIA GPU or no driver; training uses the CPU"
    return Finding("GPU", "", how)
