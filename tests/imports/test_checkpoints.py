"""``unflip import torch``: layouts of released checkpoints, with random weights under the authors' names."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unflip.imports import CannotImport
from unflip.imports.checkpoints import fit, load, read_state
from unflip.imports.layouts import LAYOUTS
from unflip.packing import Packed, read

State = dict[str, Tensor]
CIFAR_STAGES = ((16, 3), (32, 3), (64, 3))
RESNET18, RESNET34 = (2, 2, 2, 2), (3, 4, 6, 3)


class Writer:
    """A state dict with random values, none of them special."""

    def __init__(self) -> None:
        self.state: State = {}
        self.random = torch.Generator().manual_seed(0)

    def normal(self, name: str, *shape: int, scale: float = 1, shift: float = 0) -> None:
        self.state[name] = torch.randn(shape, generator=self.random) * scale + shift

    def norm(self, name: str, channels: int) -> None:
        self.normal(f"{name}.weight", channels, scale=0.2, shift=1)
        self.normal(f"{name}.bias", channels, scale=0.3)
        self.normal(f"{name}.running_mean", channels, scale=0.3)
        self.state[f"{name}.running_var"] = torch.rand(channels, generator=self.random) + 0.5
        self.state[f"{name}.num_batches_tracked"] = torch.tensor(7)


def convolutions(stages: Any) -> Iterator[tuple[str, int, int, int, int]]:
    """stage.block, n, channels in and out, stride of every convolution in a block."""
    c_in = stages[0][0]
    for stage, (channels, blocks) in enumerate(stages, 1):
        for block in range(blocks):
            for n in (1, 2):
                stride = 2 if stage > 1 and block == 0 and n == 1 else 1
                yield f"layer{stage}.{block}", n, c_in, channels, stride
                c_in = channels


def resnet20(method: str) -> State:
    """The names of AdaBin's, IR-Net's and ReCU's ResNet-20."""
    w = Writer()
    w.normal("conv1.weight", 16, 3, 3, 3, scale=0.3)
    w.norm("bn1", 16)
    if method == "adabin":
        w.normal("nonlinear1.neg_scale", 16)
        w.normal("nonlinear1.pos_scale", 16)
    for name, n, c_in, c_out, _ in convolutions(CIFAR_STAGES):
        w.normal(f"{name}.conv{n}.weight", c_out, c_in, 3, 3, scale=0.1)
        w.norm(f"{name}.bn{n}", c_out)
        if method == "adabin":
            w.normal(f"{name}.conv{n}.binary_a.alpha_a", scale=0.1, shift=1)
            w.normal(f"{name}.conv{n}.binary_a.beta_a", scale=0.3)
            w.normal(f"{name}.nonlinear{n}.neg_scale", c_out)
            w.normal(f"{name}.nonlinear{n}.pos_scale", c_out)
        if method == "recu":
            w.normal(f"{name}.conv{n}.alpha", c_out, 1, 1, scale=0.1, shift=0.1)
            w.state[f"{name}.conv{n}.tau"] = torch.tensor([0.99])
    w.norm("bn2", 64)
    w.normal("linear.weight", 10, 64)
    w.normal("linear.bias", 10)
    return w.state


def imagenet(method: str, blocks: tuple[int, ...], column: bool) -> State:
    """The names of Bi-Real Net and ReActNet: blocks of one convolution."""
    w = Writer()
    w.normal("conv1.weight", 64, 3, 7, 7, scale=0.1)
    w.norm("bn1", 64)
    stages = [(64 << i, count) for i, count in enumerate(blocks)]
    for name, n, c_in, c_out, stride in convolutions(stages):
        stage, block = name.split(".")
        place = f"{stage}.{2 * int(block) + n - 1}"
        shape = (c_out * c_in * 9, 1) if column else (c_out, c_in, 3, 3)
        w.normal(f"{place}.binary_conv.weight{'s' if column else ''}", *shape, scale=0.01)
        w.norm(f"{place}.bn1", c_out)
        if method == "reactnet":
            w.normal(f"{place}.move0.bias", 1, c_in, 1, 1, scale=0.3)
            for move in (1, 2):
                w.normal(f"{place}.move{move}.bias", 1, c_out, 1, 1, scale=0.3)
            w.normal(f"{place}.prelu.weight", c_out, scale=0.1, shift=0.25)
        if stride == 2:
            w.normal(f"{place}.downsample.1.weight", c_out, c_in, 1, 1, scale=0.1)
            w.norm(f"{place}.downsample.2", c_out)
    w.normal("fc.weight", 1000, 512, scale=0.05)
    w.normal("fc.bias", 1000)
    return w.state


# --- plain forward passes, in the authors' names ----------------------------------------------------------


def sign(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def norm(s: State, x: Tensor, name: str) -> Tensor:
    parts = (s[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
    return F.batch_norm(x, *parts)


def weights_of(method: str, s: State, name: str) -> Tensor:
    weight = s[f"{name}.weight"]
    if method in ("bireal", "reactnet"):
        return sign(weight) * weight.abs().mean((1, 2, 3), keepdim=True)
    centered = weight - weight.mean((1, 2, 3), keepdim=True)
    if method == "adabin":
        spread = centered.square().mean((1, 2, 3), keepdim=True).sqrt()
        return sign(centered) * spread + weight.mean((1, 2, 3), keepdim=True)
    if method == "recu":
        return sign(centered) * s[f"{name}.alpha"][:, None]
    normal = centered / centered.std((1, 2, 3), keepdim=True)
    return sign(normal) * 2 ** normal.abs().mean((1, 2, 3), keepdim=True).log2().round()


def plain_resnet20(method: str, s: State, x: Tensor) -> Tensor:
    def activated(x: Tensor, name: str) -> Tensor:
        if method != "adabin":
            return F.hardtanh(x)
        up, down = (s[f"{name}.{part}_scale"].view(-1, 1, 1) for part in ("pos", "neg"))
        return torch.where(x > 0, up * x, down * x)

    x = activated(norm(s, F.conv2d(x, s["conv1.weight"], padding=1), "bn1"), "nonlinear1")
    for name, n, _, _, stride in convolutions(CIFAR_STAGES):
        conv = f"{name}.conv{n}"
        inputs = sign(x)
        if method == "adabin":
            alpha, beta = s[f"{conv}.binary_a.alpha_a"], s[f"{conv}.binary_a.beta_a"]
            inputs = alpha * (sign(x - beta) + beta)
        y = F.conv2d(inputs, weights_of(method, s, conv), stride=stride, padding=1)
        if stride == 2:
            side = x.shape[1] // 2
            x = F.avg_pool2d(x, 2) if method == "recu" else x[:, :, ::2, ::2]
            x = F.pad(x, (0, 0, 0, 0, side, side))
        x = activated(norm(s, y, f"{name}.bn{n}") + x, f"{name}.nonlinear{n}")
    return F.linear(norm(s, x.mean((2, 3)), "bn2"), s["linear.weight"], s["linear.bias"])


def plain_imagenet(method: str, s: State, x: Tensor, blocks: tuple[int, ...]) -> Tensor:
    x = F.max_pool2d(norm(s, F.conv2d(x, s["conv1.weight"], stride=2, padding=3), "bn1"), 3, 2, 1)
    for name, n, c_in, c_out, stride in convolutions([(64 << i, c) for i, c in enumerate(blocks)]):
        stage, block = name.split(".")
        place = f"{stage}.{2 * int(block) + n - 1}"
        shift = s.get(f"{place}.move0.bias", torch.zeros(1))
        flat = s.get(f"{place}.binary_conv.weights", s.get(f"{place}.binary_conv.weight"))
        assert flat is not None
        weight = weights_of(method, {"w.weight": flat.view(c_out, c_in, 3, 3)}, "w")
        y = norm(s, F.conv2d(sign(x + shift), weight, stride=stride, padding=1), f"{place}.bn1")
        if stride == 2:
            x = F.conv2d(F.avg_pool2d(x, 2), s[f"{place}.downsample.1.weight"])
            x = norm(s, x, f"{place}.downsample.2")
        x = y + x
        if method == "reactnet":
            x = F.prelu(x + s[f"{place}.move1.bias"], s[f"{place}.prelu.weight"])
            x = x + s[f"{place}.move2.bias"]
    return F.linear(x.mean((2, 3)), s["fc.weight"], s["fc.bias"])


CASES: dict[str, tuple[str, Callable[[], State], Callable[[State, Tensor], Tensor], int]] = {
    **{
        f"{m}-resnet20": (
            f"{m}-resnet20",
            lambda m=m: resnet20(m),
            lambda s, x, m=m: plain_resnet20(m, s, x),
            32,
        )
        for m in ("adabin", "irnet", "recu")
    },
    **{
        f"{m}-resnet{layers}{'-column' if column else ''}": (
            f"{m}-resnet{layers}",
            lambda m=m, b=blocks, c=column: imagenet(m, b, c),
            lambda s, x, m=m, b=blocks: plain_imagenet(m, s, x, b),
            64,
        )
        for m, layers, blocks, column in (
            ("bireal", 18, RESNET18, True),
            ("bireal", 34, RESNET34, True),
            ("reactnet", 18, RESNET18, False),
            ("reactnet", 18, RESNET18, True),
        )
    },
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_layout_equals_plain_torch(case):
    layout, make, plain, size = CASES[case]
    state = make()
    found = fit(state, LAYOUTS[layout], "x")
    x = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
    # Random weights: in float64, so that rounding decides no sign.
    double = {k: v.double() if v.is_floating_point() else v for k, v in state.items()}
    expected = plain(double, x.double())
    assert torch.allclose(found.model.double()(x.double()), expected, rtol=1e-6, atol=1e-6)


def test_adabins_resnet18_leaves_unused_names_out():
    layout = LAYOUTS["adabin-resnet18"]
    from unflip.imports.checkpoints import names
    from unflip.models import create

    own = create(layout.network, layout.method, **layout.options).state_dict()
    state = {theirs: own[ours].clone() for theirs, ours in names(layout).items()}
    assert set(names(layout).values()) == set(own)
    state |= {"nonlinear2.neg_scale": torch.ones(512), "bn3.weight": torch.ones(1000)}
    assert fit(state, layout, "x").ignored == ["bn3.weight", "nonlinear2.neg_scale"]


def test_the_command_writes_where_a_network_comes_from(unflip, tmp_path):
    wrapped = {f"module.{k}": v for k, v in resnet20("adabin").items()}
    source, out = tmp_path / "model.th", tmp_path / "model.unflip"
    torch.save({"state_dict": wrapped, "best_prec1": torch.tensor(88.0)}, source)
    made = unflip("import", "torch", source, "--layout", "adabin-resnet20", "-o", out)
    assert made.code == 0, made.err
    assert "sign(0) is +1" in made.out
    graph = read(out).graph
    assert graph["source"]["file"] == "model.th"
    assert graph["source"]["license"] == "MIT"
    assert graph["labels"][0] == "airplane"
    shown = unflip("show", out)
    assert "source format: PyTorch checkpoint, layout adabin-resnet20" in shown.out


def test_control_characters_are_not_printed(tmp_path, capsys):
    from unflip.cli.imports import _write
    from unflip.imports.write import cifar10

    bad = "\x1b[31m\u202e\r\x9b"
    source, out = tmp_path / f"{bad}.pth", tmp_path / f"{bad}.unflip"
    source.write_bytes(b"x")
    ops = [{"op": "map", "name": "", "inputs": [0], "steps": []}]
    graph = {"input": {"shape": [3, 32, 32]}, "ops": ops, "output": 1, "labels": None}
    origin = {"page": bad, "license": bad}
    _write(out, Packed(graph, {}), cifar10(), origin, [source], [f"left out: {bad}"], None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)
    assert sum("\\x1b[31m\\u202e\\r\\x9b" in line for line in lines) == 3


# --- files that are refused -------------------------------------------------------------------------------


def test_names_and_shapes_that_do_not_fit_are_listed():
    state = resnet20("irnet")
    state["extra.weight"] = torch.ones(3)
    del state["bn2.weight"]
    state["linear.bias"] = torch.ones(11)
    state["bn1.bias"] = torch.full((16,), float("nan"))
    state["bn1.weight"] = torch.ones(16, dtype=torch.int64)
    with pytest.raises(CannotImport) as caught:
        fit(state, LAYOUTS["irnet-resnet20"], "file does not fit")
    for text in (
        "unknown: extra.weight",
        "missing: bn2.weight",
        "linear.bias (torch.float32, (11,) instead of torch.float32, (10,))",
        "bn1.bias (NaN, infinity, or numbers too large for torch.float32)",
        "bn1.weight (torch.int64",
    ):
        assert text in str(caught.value)


class Command:
    """What a hostile pickle does: it runs a command when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_checkpoint_is_not_run(unflip, tmp_path):
    source, out, trap = (tmp_path / name for name in ("model.pth", "model.unflip", "trap"))
    for save in (torch.save, lambda what, path: path.write_bytes(pickle.dumps(what))):
        save({"state_dict": {"conv1.weight": Command(trap)}}, source)
        refused = unflip("import", "torch", source, "--layout", "adabin-resnet20", "-o", out)
        assert refused.code == 1
        assert "code in a checkpoint is never run" in refused.err
        assert "Traceback" not in refused.err
    assert not trap.exists()
    assert not out.exists()


BROKEN: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"hello"),
    "zip": lambda path: zipfile.ZipFile(path, "w").writestr("a/b", "c"),
    "number": lambda path: torch.save(3, path),
    "list": lambda path: torch.save([torch.ones(2)], path),
    "nothing": lambda path: torch.save({}, path),
    "strings": lambda path: torch.save({"a": "b"}, path),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"a": 1})),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_not_a_state_dict_is_refused(case, tmp_path):
    path = tmp_path / "model.pth"
    BROKEN[case](path)
    with pytest.raises(CannotImport, match=r"model\.pth"):
        read_state(path)


def test_a_cut_off_checkpoint_is_refused(tmp_path):
    path = tmp_path / "model.pth"
    torch.save(resnet20("irnet"), path)
    data = path.read_bytes()
    for length in (1, 10, 1000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CannotImport, match=r"model\.pth"):
            load(path, "irnet-resnet20")


def test_an_unknown_layout_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"unknown layout 'adabin'\..*Known: adabin-resnet18"):
        load(tmp_path / "x.pth", "adabin")


ODD_TENSORS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "only a shape": (lambda t: t.to("meta"), "on meta"),
    "nested": (lambda t: torch.nested.nested_tensor([t.flatten()]), "a nested tensor"),
    "sparse": (lambda t: t.to_sparse(), "sparse_coo on cpu"),
    "8 bits": (lambda t: t.to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "complex": (lambda t: t + 1j, "complex64"),
    "integers": (lambda t: t.int(), "int32"),
    "NaN": (lambda t: t * torch.nan, "NaN, infinity, or numbers too large"),
    "too large": (lambda t: torch.full_like(t, 1e300, dtype=torch.float64), "too large for torch"),
    "expanded": (lambda t: torch.zeros(1).expand(2**40), r"\(1099511627776,\) instead of"),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("case", ODD_TENSORS)
def test_tensors_of_other_kinds_are_refused(case, tmp_path):
    change, message = ODD_TENSORS[case]
    path, state = tmp_path / "model.pth", resnet20("irnet")
    state["conv1.weight"] = change(state["conv1.weight"])
    torch.save(state, path)
    with pytest.raises(CannotImport, match=rf"wrong: conv1\.weight \(.*{message}"):
        load(path, "irnet-resnet20")


def test_a_compressed_archive_is_refused(tmp_path):
    """Torch would allocate what a part announces: here 64 times as much as the file has."""
    path, bomb = tmp_path / "model.pth", tmp_path / "bomb.pth"
    torch.save({"a": torch.zeros(100_000)}, path)
    with (
        zipfile.ZipFile(path) as source,
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for part in source.infolist():
            target.writestr(part.filename, source.read(part))
    assert 64 * bomb.stat().st_size < path.stat().st_size
    with pytest.raises(CannotImport, match="its parts are larger than the file"):
        read_state(bomb)


def test_long_names_are_shortened(tmp_path):
    path = tmp_path / "model.pth"
    torch.save({"x" * 10**6: torch.ones(1)}, path)
    with pytest.raises(CannotImport, match=r"unknown: x{100}…") as caught:
        load(path, "irnet-resnet20")
    assert len(str(caught.value)) < 10_000
