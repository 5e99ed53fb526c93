"""Random networks: torch against the packed file, in every instruction set, with one thread and with three.

One file of more than 400 lines, because the networks and what is compared of them belong together.

    python benchmarks/random_networks.py [--networks 10000] [--seed 0] [--log FILE]

Each network has a random shape (convolutions of all kinds, pools, shortcuts, gates, activations), a random method, and
float or 8-bit ends. For random images:

1. All instruction sets and numbers of threads give the same bits.
2. A copy of the network returns every float value of the graph, in the same bits as the network itself. Each op is
   computed again in plain torch, with float64 sums, from the values that the runtime has before it. The results agree
   within rounding.
3. Torch's values of every op are compared with the runtime's. Floats differ by no more than rounding and what the op
   makes of the differences before it. Where a bit differs, torch's value is at its threshold within rounding: this is a
   tie. It is printed with its op, its value and its threshold. Values after a tie are not compared with torch for that
   image; point 2 holds for them too.

Any other difference is an error: the program writes the network to a file and exits with 1.
Networks that cannot be packed are counted by reason.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import os
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.packing import CannotPack, make_packed
from unflip.packing.convert import Converter
from unflip.packing.file import Packed, write
from unflip.packing.ir import simplified
from unflip.packing.ops import HANDLERS
from unflip.packing.reference import conv_weight, run_op
from unflip.packing.trace import trace

IMAGES = 3
ROUNDING = 1e-5  # of the largest value inside an op, between the runtime and float64 sums
FLOAT32 = 1e-6  # the same, between the runtime and torch
PREPROCESS = {"mean": [0.5] * 3, "std": [0.25] * 3}
SETTINGS = [(isa, threads) for isa in ("avx512", "avx2", "neon", "portable") for threads in (1, 3)]
STEEPEST = 1.2  # the slope of all activations is below
CODES = ("quantize", "to_bytes")


class Difference(Exception):
    """The runtime and torch differ, and it is not a tie."""


# Networks


class Block(nn.Module):
    """norm -> layer -> norm -> activation, and a shortcut or a gate if its input has the same shape."""

    def __init__(
        self, before: nn.Module, layer: nn.Module, after: list[nn.Module], join: str
    ) -> None:
        super().__init__()
        self.before, self.layer, self.after, self.join = before, layer, nn.Sequential(*after), join

    def forward(self, x: Tensor) -> Tensor:
        y = self.after(self.layer(self.before(x)))
        if self.join == "add":
            return y + x
        return y * torch.sigmoid(x.mean((2, 3), keepdim=True)) if self.join == "gate" else y


def random_network(rng: random.Random, shape: tuple[int, int, int]) -> nn.Sequential:
    channels, height, width = shape
    size = (height, width)
    layers: list[nn.Module] = []
    for number in range(rng.randint(2, 6)):
        kind = "conv" if number == 0 else rng.choice(["conv"] * 5 + ["depthwise", "pool"])
        if kind == "pool":
            layers.append(random_pool(rng, size))
        elif kind == "depthwise":
            layers.append(random_conv(rng, channels, channels, size, channels))
        else:
            wider = rng.choice([channels, channels, rng.randint(2, 70), 8 * rng.randint(1, 8)])
            groups = rng.choice([1, 1, 1, 2, 4]) if number else 1
            groups = groups if channels % groups == 0 and wider % groups == 0 else 1
            layers.append(random_conv(rng, channels, wider, size, groups))
            channels = wider
        with torch.no_grad():
            size = layers[-1](torch.zeros(2, layers_in(layers[-1], channels), *size)).shape[2:]
    if rng.random() < 0.5:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    else:
        layers += [nn.Flatten()]
        channels *= size[0] * size[1]
    if rng.random() < 0.3 and channels < 400:
        wider = rng.randint(2, 40)
        layers += [nn.BatchNorm1d(channels), nn.Linear(channels, wider)]
        channels = wider
    return nn.Sequential(*layers, nn.Linear(channels, rng.randint(1, 20)))


def layers_in(layer: nn.Module, channels: int) -> int:
    return layer.layer.in_channels if isinstance(layer, Block) else channels


def random_conv(
    rng: random.Random, channels: int, filters: int, size: tuple[int, int], groups: int
) -> Block:
    kernel = [rng.choice([1, 3, 3, 3, 2, 4, 5, 7]) for _ in size]
    padding = [rng.choice([0, k // 2, k // 2, k // 2, k - 1]) for k in kernel]
    dilation = [rng.choice([1, 1, 1, 2, 3]) for _ in size]
    for i, side in enumerate(size):
        if side + 2 * padding[i] < dilation[i] * (kernel[i] - 1) + 1:
            kernel[i], padding[i], dilation[i] = 1, 0, 1
    stride = [rng.choice([1, 1, 1, 2, 3]) for _ in size]
    conv = nn.Conv2d(
        channels, filters, kernel, stride, padding, dilation, groups, bias=rng.random() < 0.3
    )
    before = nn.BatchNorm2d(channels) if rng.random() < 0.3 else nn.Identity()
    after = [nn.BatchNorm2d(filters)] if rng.random() < 0.8 else []
    after += random_activation(rng, filters)
    with torch.no_grad():
        same = conv(torch.zeros(1, channels, *size)).shape == (1, channels, *size)
    return Block(before, conv, after, rng.choice(["add", "add", "gate", ""]) if same else "")


def random_activation(rng: random.Random, channels: int) -> list[nn.Module]:
    return rng.choice(
        [[], [], [nn.PReLU(channels)], [nn.PReLU()], [nn.Hardtanh()], [nn.LeakyReLU(0.1)], [nn.ReLU6()],
         [nn.SiLU()], [nn.GELU()], [nn.Tanh()], [nn.ELU()]]
    )  # fmt: skip


def random_pool(rng: random.Random, size: tuple[int, int]) -> nn.Module:
    kernel = [min(rng.choice([2, 3]), side) for side in size]
    stride = [rng.choice([1, 2]) for _ in size]
    options: dict[str, Any] = {
        "padding": [rng.choice([0, k // 2]) for k in kernel],
        "ceil_mode": rng.random() < 0.3,
    }
    if rng.random() < 0.5:
        return nn.MaxPool2d(kernel, stride, **options)
    return nn.AvgPool2d(kernel, stride, count_include_pad=rng.random() < 0.5, **options)


@torch.no_grad()
def shake(model: nn.Module) -> None:
    """Norms, slopes and what methods learn get values as training leaves them, none of them special."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
    for name, parameter in model.named_parameters():
        if parameter.dim() <= 1 or "adapted" in name or "input_binarizer" in name:
            parameter.add_(0.2 * torch.randn_like(parameter))


class Case(NamedTuple):
    text: str
    model: nn.Module
    images: Tensor
    preprocess: dict[str, list[float]] | None


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    int8 = rng.random() < 0.25
    shape = (3 if int8 else rng.choice([1, 3, 3, 8, 17]), rng.randint(1, 20), rng.randint(1, 20))
    model = random_network(rng, shape)
    method = rng.choice(methods.names())
    ends: dict[str, Any] = {"ends": "int8", "preprocess": PREPROCESS} if int8 else {}
    depthwise = [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Conv2d) and m.groups == m.in_channels > 1
    ]
    float_depthwise = depthwise if rng.random() < 0.5 else []
    unflip.binarize(model, method, skip=float_depthwise, quiet=True, **ends)
    pixels = torch.randint(0, 256, (IMAGES, *shape))
    images = (pixels / 255 - 0.5) / 0.25 if int8 else torch.randn(IMAGES, *shape)
    if int8:
        model.train()(images)  # the range of the last layer's inputs
    shake(model)
    text = f"seed {seed}: {method}{', 8-bit ends' if int8 else ''}, {'x'.join(map(str, shape))}"
    return Case(text, model.eval(), images, PREPROCESS if int8 else None)


# Comparisons


def run(path: Path, images: Tensor, isa: str, threads: int) -> Any:
    os.environ["UNFLIP_ISA"] = isa
    return unflip.load(path, threads=threads)(images)


def available() -> list[tuple[str, int]]:
    """The instruction sets of this CPU."""
    found = []
    for isa, threads in SETTINGS:
        os.environ["UNFLIP_ISA"] = isa
        with contextlib.suppress(Exception):
            unflip.load("resnet20-cifar10")
            found.append((isa, threads))
    return found


def all_values(packed: Packed, path: Path) -> list[int]:
    """Write a copy of the network that returns every float value. Returns their numbers."""
    graph = copy.deepcopy(packed.graph)
    values = [i + 1 for i, op in enumerate(graph["ops"]) if op["op"] not in CODES]
    for field in ("output", "pixels", "outputs", "structure"):
        graph.pop(field, None)
    graph["labels"] = None
    graph["outputs"] = [{"name": str(value), "value": value} for value in values]
    graph["structure"] = "dict"
    write(path, Packed(graph, packed.tensors))
    return values


def check(case: Case, folder: Path, settings: list[tuple[str, int]]) -> list[str]:
    """Compare one network. Returns a line for each op with ties."""
    packed = make_packed(case.model, case.images, preprocess=case.preprocess)
    path, whole = folder / "network.unflip", folder / "values.unflip"
    write(path, packed)
    numbers = all_values(packed, whole)
    outputs = [run(path, case.images, *setting) for setting in settings]
    values = [run(whole, case.images, *setting) for setting in settings]
    for setting, output, found in zip(settings, outputs, values, strict=True):
        same = torch.equal(output, outputs[0]) and all(
            torch.equal(found[name], values[0][name]) for name in found
        )
        if not same:
            raise Difference(f"{setting} and {settings[0]} give different bits")
    last = values[0][str(packed.graph["output"])]
    if not torch.equal(last.reshape(outputs[0].shape), outputs[0]):
        raise Difference("the network gives other bits if it returns all values")
    runtime = runtime_values(packed, case.images, values[0], numbers)
    return compare_with_torch(packed, torch_values(case), runtime)


def image(value: Tensor) -> Tensor:
    return value.reshape(*value.shape, *[1] * (4 - value.dim()))


def runtime_values(
    packed: Packed, images: Tensor, found: dict[str, Tensor], numbers: list[int]
) -> list[Tensor]:
    """The value of every op. Floats are the runtime's, and agree with plain torch; codes follow from them."""
    values = [image(images)]
    for number, op in enumerate(packed.graph["ops"], 1):
        expected = run_op(op, packed.tensors, values)
        if number not in numbers:
            values.append(expected)
            continue
        value = found[str(number)].reshape(expected.shape)
        allowed = ROUNDING * largest_inside(op, packed, values, expected)
        difference = (value - expected).abs().max().item()
        if not difference <= allowed:
            raise Difference(
                f"{op['op']} {op['name']!r}: {difference:.3g} from plain torch, {allowed:.3g} allowed"
            )
        values.append(value)
    return values


def largest_inside(
    op: dict[str, Any], packed: Packed, values: list[Tensor], output: Tensor
) -> float:
    """A bound on the sums and products inside an op: they round, also where they cancel out."""
    inputs = max(values[i].abs().max().item() for i in reads(op))
    return max(output.abs().max().item(), inputs * gain(op, packed, values), 1e-20)


def reads(op: dict[str, Any]) -> list[int]:
    return [*op["inputs"], *(step["value"] for step in op.get("steps", ()) if "value" in step)]


def gain(op: dict[str, Any], packed: Packed, values: list[Tensor]) -> float:
    """The most that an op can enlarge its inputs, or differences of them."""
    most = STEEPEST if op["op"] == "curve" else 1.0
    if op["op"] == "conv":
        most = conv_weight(op, packed.tensors).abs().flatten(1).sum(1).max().item()
    if "bytes" in op:
        most *= float(np.abs(packed.tensors[op["scales"]]).max())
    for step in op.get("steps", ()):
        for key in ("scale", "slope"):
            if key in step:
                most *= max(1.0, float(np.abs(packed.tensors[step[key]]).max()))
        if step["step"] == "mul":
            factors = [values[step["value"]], values[op["inputs"][0]]]
            most *= max(1.0, *(factor.abs().max().item() for factor in factors))
    return max(most, 1.0)


def torch_values(case: Case) -> list[Tensor | None]:
    frozen = unflip.freeze(case.model).eval().requires_grad_(False)
    graph, _, _ = Converter(trace(frozen, case.images), case.images, HANDLERS).convert()
    return [image(case.images), *(op.value for op in simplified(graph).ops)]


def compare_with_torch(
    packed: Packed, model: list[Tensor | None], runtime: list[Tensor]
) -> list[str]:
    """Returns a line for each op with ties. Values that only the packed network has are the runtime's."""
    ties = []
    tied = torch.zeros(IMAGES, dtype=torch.bool)
    model = [mine if m is None else image(m) for m, mine in zip(model, runtime, strict=True)]
    for number, op in enumerate(packed.graph["ops"], 1):
        mine, theirs = runtime[number], model[number]
        size = max(theirs.abs().max().item(), 1e-20)
        if op["op"] not in CODES:
            before = max(distance(runtime[i], model[i], tied) for i in reads(op))
            allowed = ROUNDING * size + gain(op, packed, model) * before
            allowed += FLOAT32 * largest_inside(op, packed, model, theirs)
            if distance(mine, theirs, tied) > allowed:
                raise Difference(f"{op['op']} {op['name']!r} differs from the model without a tie")
            continue
        other = ((mine - theirs).abs() > 1e-5 * size) & ~tied.view(-1, 1, 1, 1)
        rounding = sum(distance(runtime[i], model[i], tied) for i in op["inputs"]) + 1e-7 * size
        own = [tie(op, packed, model, place, rounding) for place in other.nonzero().tolist()]
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        ties += [own[0] + more] if own else []
        tied |= other.flatten(1).any(1)
    return ties


def distance(a: Tensor, b: Tensor, without: Tensor) -> float:
    """The largest difference, without some of the images."""
    return (a - b)[~without].abs().max().item() if not without.all() else 0.0


def tie(
    op: dict[str, Any], packed: Packed, model: list[Tensor], place: list[int], rounding: float
) -> str:
    """Raise Difference unless torch's value at this place is at a threshold within rounding."""
    value = model[op["inputs"][0]][tuple(place)].item()
    near = nearest_step(op, packed, model, value, place)
    if abs(value - near) > rounding:
        raise Difference(f"{op['name']!r} at {place}: {value!r} is not at its threshold {near!r}")
    return f"{op['name']} at {place}: {value:.9g}, threshold {near:.9g}"


def nearest_step(
    op: dict[str, Any], packed: Packed, model: list[Tensor], value: float, place: list[int]
) -> float:
    def of_channel(name: str) -> Any:
        array = packed.tensors[op[name]]
        return array[..., place[1] if array.shape[-1] > 1 else 0]

    if op["op"] == "to_bytes":
        scale, shift = float(of_channel("scale")), float(of_channel("shift"))
        level = np.floor(value * scale + shift) + 0.5
        return float((level - shift) / scale)
    unit = 1.0
    if len(op["inputs"]) == 2:
        unit = model[op["inputs"][1]][place[0]].flatten()[0].item()
    steps = [float(t) * unit for t in of_channel("thresholds")]
    return min(steps, key=lambda t: abs(t - value))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first network")
    parser.add_argument("--log", type=Path, help="also write the lines here")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    log = args.log.open("w") if args.log else None

    def say(line: str) -> None:
        print(line, flush=True)
        if log:
            print(line, file=log, flush=True)

    settings = available()
    say(f"unflip {unflip.__version__}, torch {torch.__version__}, {settings}")
    packed, ties, refused = 0, 0, collections.Counter[str]()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seed, args.seed + args.networks):
            try:
                case = make_case(seed)
                found = check(case, Path(folder), settings)
            except (CannotPack, ValueError) as reason:
                refused[type(reason).__name__ + ": " + str(reason).split(";")[0][:90]] += 1
                continue
            except Difference as difference:
                kept = Path(f"random-network-{seed}.unflip").resolve()
                (Path(folder) / "network.unflip").rename(kept)
                say(f"WRONG {case.text}: {difference}. The network: {kept.name}")
                return 1
            packed += 1
            ties += len(found)
            for line in found:
                say(f"tie, {case.text}: {line}")
            if (seed + 1) % 500 == 0:
                passed = time.monotonic() - start
                say(
                    f"{packed} agree, {ties} ops with ties, {refused.total()} not packed, {passed:.0f} s"
                )
    say(
        f"{packed} networks agree with torch; {ties} ops with ties; {refused.total()} could not be packed:"
    )
    for reason, count in refused.most_common():
        say(f"  {count} × {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
