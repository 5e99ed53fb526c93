"""How fast packed networks run here, beside other engines on the same machine in the same minutes.

One file of more than 400 lines, because measuring, comparing and printing share one table of engines and networks.

    pip install -r benchmarks/requirements.txt      # the peers; each is optional
    python benchmarks/inference.py [--networks resnet18,resnet20] [--seconds 10] [--json FILE]

Time does not depend on what was learned, so weights are random; BatchNorm's statistics come from one pass over the
images, so that values have the sizes they have in a trained network. Every engine's outputs are compared with torch
in the same run. The binary network runs with float ends, and with 8-bit ends, which take the images as uint8. If it
has convolutions in its shortcuts, it also runs with 8-bit ends and shortcuts.

The float engines run two float networks, and goals are judged against the faster one:

same    ours with float layers: the same operations in the same places
plain   what one would deploy in float: convolution, BatchNorm, activation, which engines fuse into one

Other work on the machine disturbs all alike: in each round every engine runs for a short while, a ratio is taken
within its round, and the table shows the median over the rounds ("min" is the fastest run of all).
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import importlib
import json
import logging
import math
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import unflip
from peers.base import Array, Network
from unflip import models
from unflip.ends import quantize_ends, quantize_shortcuts, shortcuts
from unflip.packing.file import Packed, write

DOREFA = {"name": "dorefa", "inputs": "pm1"}
IMAGES = 64
MEAN, STD = 0.5, 0.25  # of the images, in every channel
BINARY = ("binary",)
TWINS = ("same", "plain")
ENDS, SHORTCUTS = "8-bit ends", "8-bit ends and shortcuts"

# name -> module and function, and the networks it runs
PEERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "unflip": ("peers.ours", "engine", BINARY),
    "unflip-int8": ("peers.ours", "engine", (ENDS,)),
    "unflip-int8-shortcuts": ("peers.ours", "engine", (SHORTCUTS,)),
    "torch": ("peers.pytorch", "eager", TWINS),
    "torch-compile": ("peers.pytorch", "compiled", TWINS),
    "ort": ("peers.ort", "floats", TWINS),
    "ort-int8": ("peers.ort", "int8", TWINS),
    "ort-export": ("peers.ort", "exported", BINARY),
    "openvino": ("peers.ov", "floats", TWINS),
    "openvino-int8": ("peers.ov", "int8", TWINS),
    "openvino-binary": ("peers.ov_binary", "engine", BINARY),
    "lce": ("peers.lce", "engine", BINARY),
}
INT8 = {ENDS: "unflip-int8", SHORTCUTS: "unflip-int8-shortcuts"}
OURS = ("unflip", *INT8.values())
NOT_BY_DEFAULT = ("torch-compile",)  # it takes minutes to get ready

# options of the binary network and of the plain float one
NETWORKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "resnet18": ({"variant": "bireal-prelu"}, {"variant": "plain"}),
    "resnet20": ({"order": "conv-prelu-bn"}, {"order": "conv-bn-hardtanh"}),
}
# what we want of 8-bit ends, with float or 8-bit shortcuts: with AVX2 alone, and with AVX-512
INT8_GOALS = [
    ("over ONNX Runtime float", (10.0, 13.0), ("ort",)),
    ("over the fastest int8", (5.0, 3.3), ("ort-int8", "openvino-int8")),
    ("over OpenVINO's binary kernels", (2.7, 1.9), ("openvino-binary",)),
]
# what decides how fast integers and bits are
FEATURES = {"avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_vpopcntdq", "gfni"}
# channels and size of the 3×3 convolutions that hold most of a network's work
LAYERS = {
    "resnet18": [(64, 56), (128, 28), (256, 14), (512, 7)],
    "resnet20": [(16, 32), (32, 16), (64, 8)],
}


@dataclass
class Row:
    """One engine on one network."""

    peer: str
    engine: str
    network: str
    kind: str
    batch: int
    threads: int
    problem: str = ""
    median_ms: float = float("nan")
    min_ms: float = float("nan")
    slower: float = float("nan")  # than ours with as many threads: median over the rounds
    # Compared with torch, see peers.base.Agreement; peers with the first number of threads only.
    difference: float = float("nan")
    equal: float = float("nan")
    same_class: float = float("nan")


# Networks


def build(name: str, folder: Path) -> Network:
    """The binary network with float and 8-bit layers, packed and frozen, its float twins, and images."""
    torch.manual_seed(0)
    binary_options, plain_options = NETWORKS[name]
    shape = models.input_shape(name)
    pixels = random_images(shape)
    images = (pixels / 255 - MEAN) / STD
    preprocess = {"mean": [MEAN] * shape[0], "std": [STD] * shape[0]}
    plain = models.create(name, DOREFA, **binary_options)
    binary = {"binary": plain, ENDS: quantize_ends(copy.deepcopy(plain), preprocess)}
    if shortcuts(plain):
        binary[SHORTCUTS] = quantize_shortcuts(copy.deepcopy(binary[ENDS]))
    found, paths = dict[str, nn.Module](), dict[str, Path]()
    for kind, model in binary.items():
        paths[kind] = folder / f"{name} {kind}.unflip"
        unflip.pack(calibrated(model, images), images[:1], paths[kind], preprocess=preprocess)
        found[kind] = unflip.freeze(model)
    for kind, options in (("same", binary_options), ("plain", plain_options)):
        found[kind] = calibrated(models.create(name, "float", **options), images)
    return Network(name, paths, found, pixels, images, folder)


def random_images(shape: tuple[int, int, int]) -> Tensor:
    """Coarse and fine noise, as uint8: neighbouring pixels belong together, as in photographs."""
    channels, height, width = shape
    coarse = torch.randn(IMAGES, channels, height // 8, width // 8)
    coarse = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    noise = coarse + 0.2 * torch.randn(IMAGES, *shape)
    return (255 * (noise * STD + MEAN)).round().clamp(0, 255).to(torch.uint8)


def calibrated(model: nn.Module, images: Tensor) -> nn.Module:
    """BatchNorm's statistics from one pass, and then weights of its own as after training."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.2)
    with torch.no_grad():
        model.train()(images[:16])
    return model.eval()


# Engines


def prepare(
    names: list[str], network: Network, twins: list[str], batch: int, threads: list[int]
) -> tuple[list[tuple[Row, Any]], list[Row]]:
    """Engines that are ready, and rows for those that are not."""
    ready, failed = [], []
    for peer in names:
        module, function, kinds = PEERS[peer]
        for kind in kinds:
            if kind not in network.models or (kind in TWINS and kind not in twins):
                continue
            for count in threads:
                row = Row(peer, peer, network.name, kind, batch, count)
                try:
                    make = getattr(importlib.import_module(module), function)
                    engine = make(network, kind, batch, count)
                    row.engine = engine.name
                    if peer in OURS or count == threads[0]:
                        row.difference, row.equal, row.same_class = engine.agreement(network)
                    ready.append((row, engine))
                except Exception as error:  # a peer may fail in any way; ours may not
                    if peer in OURS:
                        raise
                    row.problem = f"{type(error).__name__}: {error}".splitlines()[0][:90]
                    failed.append(row)
    return ready, failed


def race(ready: list[tuple[Row, Any]], seconds: float, rounds: int) -> None:
    """Time all engines in turn, every second round in reverse, and fill in the rows."""
    medians: list[list[float]] = [[] for _ in ready]
    fastest = [float("inf")] * len(ready)
    for number in range(rounds):
        order = range(len(ready)) if number % 2 == 0 else reversed(range(len(ready)))
        for i in order:
            times = ready[i][1].burst(seconds / rounds)
            medians[i].append(statistics.median(times))
            fastest[i] = min(fastest[i], *times)
    ours = {row.threads: medians[i] for i, (row, _) in enumerate(ready) if row.peer == "unflip"}
    for i, (row, _) in enumerate(ready):
        row.median_ms = 1e3 * statistics.median(medians[i])
        row.min_ms = 1e3 * fastest[i]
        row.slower = median_ratio(medians[i], ours[row.threads])
    for peer in OURS:
        own = {row.threads: medians[i] for i, (row, _) in enumerate(ready) if row.peer == peer}
        if 1 in own and 2 in own:
            SCALING[(ready[0][0].network, ready[0][0].batch, peer)] = median_ratio(own[1], own[2])


# network, batch, ours -> how much faster it is with two threads than with one
SCALING: dict[tuple[str, int, str], float] = {}


def median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


# Single layers


def layer_rates(name: str, folder: Path, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Binary 3×3 convolutions alone, and the peak of float32 measured around each; one thread."""
    peak = fma_peak(folder)
    layers = [(c, s, *single_layer(c, s, folder)) for c, s in LAYERS[name]]
    samples: list[list[tuple[float, float, float]]] = [[] for _ in layers]
    for _ in range(rounds):
        for i, (channels, size, model, x) in enumerate(layers):
            before = peak(seconds / rounds / 4)
            alone, whole = conv_rates(model, x, 9 * (channels * size) ** 2, seconds / rounds / 2)
            after = peak(seconds / rounds / 4)
            samples[i].append((alone, whole, max(before, after)))
    return [
        {
            "network": name,
            "layer": f"{channels} @ {size}×{size}",
            "GMAC/s": statistics.median(alone for alone, _, _ in sample),
            "with signs": statistics.median(whole for _, whole, _ in sample),
            "peak": statistics.median(top for _, _, top in sample),
            "over peak": statistics.median(alone / top for alone, _, top in sample),
        }
        for (channels, size, _, _), sample in zip(layers, samples, strict=True)
    ]


def single_layer(channels: int, size: int, folder: Path) -> tuple[Any, Array]:
    """A packed network of one ±1 convolution."""
    random = np.random.default_rng(0)
    conv = {
        "op": "conv", "name": "conv", "inputs": [1], "shape": [channels, channels, 3, 3],
        "stride": [1, 1], "dilation": [1, 1], "padding": [1, 1, 1, 1], "groups": 1,
        "bits": "bits", "scales": "scales", "steps": [],
    }  # fmt: skip
    sign = {
        "op": "quantize", "name": "sign", "inputs": [0], "thresholds": "zero", "strict": [False],
        "coding": "planes", "scales": [2.0], "offset": -1.0,
    }  # fmt: skip
    graph = {
        "input": {"shape": [channels, size, size], "preprocess": None},
        "ops": [sign, conv],
        "output": 2,
        "labels": None,
    }
    tensors = {
        "bits": random.integers(0, 256, channels * channels * 9 // 8, dtype=np.uint8),
        "scales": random.uniform(0.1, 1, (1, channels)).astype(np.float32),
        "zero": np.zeros((1, 1), np.float32),
    }
    path = folder / f"layer-{channels}.unflip"
    write(path, Packed(graph, tensors))
    x = random.normal(size=(1, channels, size, size)).astype(np.float32)
    return unflip.load(path, threads=1), x


def conv_rates(model: Any, x: Array, macs: int, seconds: float) -> tuple[float, float]:
    """GMAC/s of the convolution alone, and with the op before it, which makes bits of its input."""
    profiles = [model.profile(x)]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        profiles.append(model.profile(x))
    alone = [next(row.seconds for row in p if row.kind == "conv") for p in profiles]
    whole = [p.seconds for p in profiles]
    return macs / statistics.median(alone) * 1e-9, macs / statistics.median(whole) * 1e-9


def fma_peak(folder: Path) -> Callable[[float], float]:
    """Compiles peak.c for this CPU."""
    library = folder / "peak.so"
    source = Path(__file__).with_name("peak.c")
    flags = ["-O2", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).fma_peak
    function.restype = ctypes.c_double
    return lambda seconds: function(ctypes.c_double(seconds), ctypes.byref(ctypes.c_float()))


# What is printed


def table(rows: list[Row]) -> str:
    lines = [
        "| network | batch | threads | engine | runs | median ms | min ms | × ours | "
        "differs | equal images | same class |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {row.network} | {row.batch} | {row.threads} | {row.engine} | {row.kind} | "
        if row.problem:
            lines.append(start + f"{row.problem} | | | | | |")
            continue
        line = start + f"{row.median_ms:.3f} | {row.min_ms:.3f} | {row.slower:.2f} | "
        if math.isnan(row.difference):
            line += "| | |"
        else:
            line += f"{row.difference:.0e} | {row.equal:.0%} | {row.same_class:.0%} |"
        lines.append(line)
    return "\n".join(lines)


def layer_table(layers: list[dict[str, Any]]) -> str:
    lines = [
        "| network | binary 3×3 layer | GMAC/s | with its signs | float32 peak | × peak |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {layer['network']} | {layer['layer']} | {layer['GMAC/s']:.0f} | "
        f"{layer['with signs']:.0f} | {layer['peak']:.1f} | {layer['over peak']:.1f} |"
        for layer in layers
    ]
    return "\n".join(lines)


def goals(
    rows: list[Row], layers: list[dict[str, Any]], sizes: dict[str, float]
) -> list[dict[str, Any]]:
    """What we want of a batch of one on one thread, and what was measured."""

    def fastest(
        network: str, *peers: str, ours: str = "unflip", at: tuple[int, int] = (1, 1)
    ) -> float | None:
        """How much slower than ours the fastest of these peers is, at this batch and number of threads."""
        there = {
            (row.peer, row.kind): row.slower
            for row in rows
            if (row.network, row.batch, row.threads) == (network, *at) and not row.problem
        }
        found = [slower for (peer, _), slower in there.items() if peer in peers]
        base = [slower for (peer, _), slower in there.items() if peer == ours]
        return min(found) / base[0] if found and base else None

    wide = any(row.engine == "unflip avx512" for row in rows)
    best = max((r["over peak"] for r in layers if r["network"] == "resnet18"), default=None)
    measured = [
        ("ResNet-18, over ONNX Runtime float", 6.5, fastest("resnet18", "ort")),
        ("ResNet-18, over the fastest int8", 3.2, fastest("resnet18", "ort-int8", "openvino-int8")),
        ("ResNet-18, over OpenVINO's binary kernels", 1.8, fastest("resnet18", "openvino-binary")),
        ("ResNet-18, over Larq Compute Engine", 4.0, fastest("resnet18", "lce")),
        ("ResNet-20, over ONNX Runtime float", 5.0, fastest("resnet20", "ort")),
        ("binary 3×3 layer, over the float32 peak", 14.0, best),
        *(
            (f"ResNet-18 with {kind}, {text}", goal[wide], fastest("resnet18", *peers, ours=ours))
            for kind, ours in INT8.items()
            for text, goal, peers in INT8_GOALS
        ),
        *(
            (
                f"ResNet-18 with {kind}, over OpenVINO's binary kernels, batch 32, two threads",
                1.8,
                fastest("resnet18", "openvino-binary", ours=ours, at=(32, 2)),
            )
            for kind, ours in INT8.items()
        ),
        ("ResNet-18, two threads over one", 1.7, SCALING.get(("resnet18", 1, "unflip"))),
        ("ResNet-20, two threads over one", 1.5, SCALING.get(("resnet20", 1, "unflip"))),
        (
            "ResNet-20 with 8-bit ends, two threads over one",
            1.5,
            SCALING.get(("resnet20", 1, INT8[ENDS])),
        ),
        ("ResNet-18, float weights over the file", 10.0, sizes.get("resnet18")),
    ]
    return [{"goal": text, "wanted": goal, "measured": value} for text, goal, value in measured]


def goal_table(found: list[dict[str, Any]]) -> str:
    lines = ["| batch 1, one thread | goal | measured | |", "|---|---|---|---|"]
    for row in found:
        value = row["measured"]
        shown = "not measured" if value is None else f"{value:.2f} ×"
        mark = "" if value is None else "reached" if value >= row["wanted"] else "missed"
        lines.append(f"| {row['goal']} | ≥ {row['wanted']} × | {shown} | {mark} |")
    return "\n".join(lines)


def compression(network: Network) -> dict[str, float]:
    """Bytes of the float twin's weights over those of each packed file."""
    floats = 4 * sum(p.numel() for p in network.models["same"].parameters())
    sizes = {kind: path.stat().st_size for kind, path in network.packed.items()}
    names = {kind: f", {kind}" if kind != "binary" else "" for kind in sizes}
    return {network.name + names[kind]: floats / size for kind, size in sizes.items()}


def machine() -> dict[str, Any]:
    versions = {}
    for package in ("unflip", "torch", "onnxruntime", "openvino", "nncf"):
        try:
            versions[package] = importlib.import_module(package).__version__
        except ImportError:
            versions[package] = None
    info = cpu_info()
    flags = sorted(FEATURES & set(info.get("flags", "").split()))
    cpu = info.get("model name", platform.processor())
    return {"cpu": cpu, "cores": os.cpu_count(), "with": " ".join(flags), **versions}


def cpu_info() -> dict[str, str]:
    """Linux's description of the first core."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().split("\n\n")[0].splitlines() if listing.exists() else []
    pairs = [line.partition(":") for line in lines]
    return {key.strip(): value.strip() for key, _, value in pairs}


def main() -> None:
    args = arguments()
    logging.getLogger().setLevel(logging.ERROR)  # the quantizers have much to say
    if args.lce:
        os.environ["LCE_PYTHON"] = args.lce
    here = machine()
    print(", ".join(f"{key} {value}" for key, value in here.items()), flush=True)
    rows: list[Row] = []
    layers: list[dict[str, Any]] = []
    sizes: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.networks:
            network = build(name, Path(folder))
            sizes |= compression(network)
            for kind, path in network.packed.items():
                print(f"{name}, {kind}: {8 * path.stat().st_size / 1e6:.2f} Mbit", flush=True)
            for batch in args.batches:
                ready, failed = prepare(args.peers, network, args.twins, batch, args.threads)
                race(ready, args.seconds, args.rounds)
                done = [row for row, _ in ready] + failed
                for _, engine in ready:
                    engine.close()
                del ready, engine
                gc.collect()
                print("\n" + table(done), flush=True)
                rows += done
            layers += layer_rates(name, Path(folder), args.seconds, args.rounds)
    found = goals(rows, layers, sizes)
    print("\n" + layer_table(layers) + "\n\n" + goal_table(found))
    for (name, batch, peer), ratio in SCALING.items():
        print(f"{peer}, {name}, batch {batch}: two threads are {ratio:.2f} times as fast as one")
    if args.json:
        scaling = [
            {"network": n, "batch": b, "peer": p, "ratio": r} for (n, b, p), r in SCALING.items()
        ]
        results = {
            "machine": here,
            "rows": [asdict(row) for row in rows],
            "layers": layers,
            "goals": found,
            "scaling": scaling,
            "compression": sizes,
        }
        args.json.write_text(json.dumps(results, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = [peer for peer in PEERS if peer not in NOT_BY_DEFAULT]
    parser.add_argument("--networks", type=chosen_from(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--peers", type=chosen_from(PEERS), default=default)
    parser.add_argument("--twins", type=chosen_from(TWINS), default=list(TWINS))
    parser.add_argument("--batches", type=integers, default=[1, 32])
    parser.add_argument("--threads", type=integers, default=[1, 2])
    parser.add_argument(
        "--seconds", type=float, default=10, help="of timing, each engine (default 10)"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--lce", help="a Python that has larq-compute-engine (see peers/lce.py)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if "unflip" not in args.peers:
        args.peers.insert(0, "unflip")  # what the others are compared with
    return args


def chosen_from(known: Any) -> Callable[[str], list[str]]:
    """For options that are lists of names; "all" is every one."""

    def names(text: str) -> list[str]:
        chosen = list(known) if text == "all" else text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return chosen

    return names


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
