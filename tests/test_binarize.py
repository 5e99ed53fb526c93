"""binarize: what is swapped, what stays, what is refused, and weights to and from the float twin.

One file of more than 400 lines, because it tests one function and its inverse, with the same models.
"""

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip.freeze import FrozenConv2d
from unflip.layers import BinaryConv2d, BinaryLinear, binary_layers


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))


class Net(nn.Module):
    """Layers registered at every depth; ``stem`` and ``fc`` are the first and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(Block(8), Block(8))
        self.layer2 = nn.ModuleDict({"a": Block(8), "down": nn.Conv2d(8, 8, 1)})
        self.hidden = nn.Linear(8, 6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.stem(x))
        x = self.layer2["a"](x) + self.layer2["down"](x)
        return self.fc(self.hidden(x.mean((2, 3))).relu())


INNER = [
    "layer1.0.conv1",
    "layer1.0.conv2",
    "layer1.1.conv1",
    "layer1.1.conv2",
    "layer2.a.conv1",
    "layer2.a.conv2",
    "layer2.down",
    "hidden",
]


def binary_names(model: nn.Module) -> list[str]:
    return [name for name, _ in binary_layers(model)]


def images() -> Tensor:
    return torch.randn(2, 3, 6, 6)


# --- what is swapped ------------------------------------------------------------------------------------


def test_all_but_the_first_convolution_and_the_last_linear_layer() -> None:
    model = Net()
    assert unflip.binarize(model, "dorefa", quiet=True) is model
    assert binary_names(model) == INNER
    assert type(model.stem) is nn.Conv2d
    assert type(model.fc) is nn.Linear
    assert type(model.hidden) is BinaryLinear
    assert type(model.layer2["down"]) is BinaryConv2d
    assert all(layer.path == name for name, layer in binary_layers(model))
    assert model(images()).shape == (2, 4)


def test_everything_when_asked() -> None:
    model = unflip.binarize(Net(), "dorefa", keep_first_and_last=False, quiet=True)
    assert binary_names(model) == ["stem", *INNER, "fc"]


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["hidden"], INNER[:-1]),
        (["layer1"], INNER[4:]),
        (["layer1.*"], INNER[4:]),
        (["layer?"], ["hidden"]),
        (
            ["*.conv2", "layer2.down"],
            ["layer1.0.conv1", "layer1.1.conv1", "layer2.a.conv1", "hidden"],
        ),
        (("layer1.0.conv1",), INNER[1:]),
        (iter(INNER[:6]), INNER[6:]),
        ({"fc"}, INNER),
    ],
    ids=lambda value: type(value).__name__,
)
def test_skip_by_name_or_pattern(skip: Any, left: list[str]) -> None:
    model = unflip.binarize(Net(), "dorefa", skip=skip, quiet=True)
    assert binary_names(model) == left


def test_a_name_is_not_a_prefix() -> None:
    model = nn.Sequential()
    for name in ("stem", "conv1", "conv10"):
        model.add_module(name, nn.Conv2d(3, 3, 3))
    assert binary_names(unflip.binarize(model, "dorefa", skip=["conv1"], quiet=True)) == ["conv10"]


def test_it_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    model = unflip.binarize(Net(), "lns", skip=["layer2"], alpha=2)
    out = capsys.readouterr().out
    assert (
        "binarized 5 layers (2,352 weights) with lns(base=dorefa, alpha=2): layer1.0.conv1" in out
    )
    assert (
        "kept float: stem, layer2.a.conv1, layer2.a.conv2, layer2.down, fc (1,456 weights)" in out
    )
    assert "mapping" not in out
    changes = unflip.summary(model)
    assert [c.name for c in changes if c.binary] == [*INNER[:4], "hidden"]
    assert [c.name for c in changes if not c.binary] == ["stem", *INNER[4:7], "fc"]
    assert changes[1].kind == "BinaryConv2d"
    assert changes[1].reason == "lns(base=dorefa, alpha=2)"
    assert changes[0].weights == 8 * 27
    unflip.binarize(Net(), "dorefa", quiet=True)
    assert capsys.readouterr().out == ""


def test_summary_of_a_frozen_model() -> None:
    model = unflip.binarize(Net(), "dorefa", quiet=True)
    frozen = unflip.summary(unflip.freeze(model))
    for before, after in zip(unflip.summary(model), frozen, strict=True):
        assert (before.name, before.binary, before.weights) == (
            after.name,
            after.binary,
            after.weights,
        )


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3), nn.Linear(3, 4)], ids=["conv", "linear"])
def test_a_model_that_is_one_layer(layer: nn.Module) -> None:
    binary = unflip.binarize(layer, "dorefa", keep_first_and_last=False, quiet=True)
    assert isinstance(binary, (BinaryConv2d, BinaryLinear))
    assert binary.weight is layer.weight
    x = torch.randn(2, 3, 5, 5) if isinstance(layer, nn.Conv2d) else torch.randn(2, 3)
    assert torch.equal(unflip.freeze(binary)(x), binary.eval()(x))


def test_methods_by_name_mapping_and_object() -> None:
    for method in (
        {"name": "dorefa", "inputs": "pm1"},
        unflip.methods.get("dorefa", inputs="pm1"),
    ):
        model = unflip.binarize(Net(), method, quiet=True)
        assert str(model.hidden.method) == "dorefa(inputs=pm1)"
    model = unflip.binarize(Net(), "dorefa", inputs="pm1", quiet=True)
    assert str(model.hidden.method) == "dorefa(inputs=pm1)"
    with pytest.raises(TypeError, match=r"options \['inputs'\] go with a method's name"):
        unflip.binarize(Net(), {"name": "dorefa"}, inputs="pm1")


# --- what is kept ---------------------------------------------------------------------------------------


def test_parameters_keep_their_identity_so_an_earlier_optimizer_works() -> None:
    model = Net()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unflip.binarize(model, "dorefa", quiet=True)
    now = dict(model.named_parameters())
    assert now.keys() == parameters.keys()
    assert all(now[k] is v for k, v in parameters.items())
    before = {k: v.detach().clone() for k, v in now.items()}
    model(images()).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(v, before[k]) for k, v in now.items() if k.endswith("weight"))


def test_settings_of_a_layer_are_kept() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Conv2d(4, 8, (3, 2), (2, 1), (1, 0), (1, 2), 2, False, "reflect", dtype=torch.float64),
    )
    model.eval()
    model[1].weight.requires_grad_(False)
    old = model[1]
    unflip.binarize(model, "lns", quiet=True)
    new = model[1]
    for name in ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"):
        assert getattr(new, name) == getattr(old, name)
    assert new.bias is None
    assert not new.training
    assert not any(m.training for m in new.modules())
    assert not new.weight.requires_grad
    assert new.weight_binarizer.mapping.conv1.weight.dtype == torch.float64


def test_hooks_survive() -> None:
    model = Net()
    seen: list[str] = []
    model.hidden.register_forward_hook(lambda m, i, o: seen.append(f"forward {type(m).__name__}"))
    model.hidden.register_forward_pre_hook(lambda m, i: seen.append("pre"))
    model.hidden.register_full_backward_hook(lambda m, i, o: seen.append("backward"))
    model.hidden.weight.register_hook(lambda grad: seen.append("gradient"))
    unflip.binarize(model, "dorefa", quiet=True)
    model(images()).sum().backward()
    assert sorted(seen) == ["backward", "forward BinaryLinear", "gradient", "pre"]
    seen.clear()
    unflip.freeze(model)(images())
    assert seen == ["pre", "forward FrozenLinear"]


class Shared(nn.Module):
    """One layer under two names in one module, and under a third elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        conv = nn.Conv2d(4, 4, 3, padding=1)
        self.a = conv
        self.b = conv
        self.deep = nn.ModuleList([nn.Sequential(conv)])

    def forward(self, x: Tensor) -> Tensor:
        return self.deep[0](self.b(self.a(self.stem(x))))


def test_a_shared_layer_is_swapped_once_and_stays_shared() -> None:
    model = Shared()
    expected = sum(p.numel() for p in model.parameters())
    unflip.binarize(model, "dorefa", quiet=True)
    assert type(model.a) is BinaryConv2d
    assert model.a is model.b is model.deep[0][0]
    assert sum(p.numel() for p in model.parameters()) == expected
    frozen = unflip.freeze(model)
    assert type(frozen.a) is FrozenConv2d
    assert frozen.a is frozen.b is frozen.deep[0][0]
    x = images()
    assert torch.equal(frozen(x), model.eval()(x))


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    unflip.binarize(model, "dorefa", quiet=True)
    assert model[0].weight is model[1].weight


def test_a_failed_binarize_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv1d(4, 4, 3))
    with pytest.raises(ValueError, match="cannot binarize '2'"):
        unflip.binarize(model, "dorefa")
    assert [type(m) for m in model] == [nn.Conv2d, nn.Conv2d, nn.Conv1d]


def test_the_meta_device() -> None:
    for method in unflip.methods.names():
        with torch.device("meta"):
            model = unflip.binarize(Net(), method, quiet=True)
            assert model(torch.empty(2, 3, 6, 6)).shape == (2, 4)


# --- what is refused ------------------------------------------------------------------------------------


class OddConv(nn.Conv2d):
    pass


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(nn.Conv2d(4, 4, 3))


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "Conv1d": (lambda: nn.Conv1d(4, 4, 3), r"nn.Conv2d with a kernel of \(1, 3\)"),
    "Conv3d": (lambda: nn.Conv3d(4, 4, 3), "only nn.Conv2d and nn.Linear"),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 4, 3), "only nn.Conv2d and nn.Linear"),
    "Bilinear": (lambda: nn.Bilinear(4, 4, 3), "only nn.Conv2d and nn.Linear"),
    "LSTM": (lambda: nn.LSTM(4, 4), "only nn.Conv2d and nn.Linear"),
    "GRUCell": (lambda: nn.GRUCell(4, 4), "only nn.Conv2d and nn.Linear"),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), "only nn.Conv2d and nn.Linear"),
    "OddConv": (lambda: OddConv(4, 4, 3), "only nn.Conv2d and nn.Linear"),
    "Conv2d": (old_weight_norm, r"not a parameter \(weight_norm\?"),
    "ParametrizedConv2d": (
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
        "parametrization; remove that first",
    ),
    "LazyConv2d": (lambda: nn.LazyConv2d(4, 3), "shape is not known yet; run the model once"),
    "LazyLinear": (lambda: nn.LazyLinear(4), "shape is not known yet; run the model once"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_layers_are_refused_by_name_and_may_be_skipped(kind: str) -> None:
    make, reason = UNSUPPORTED[kind]
    model = Net()
    model.layer2["odd"] = make()
    odd = model.layer2["odd"]
    with pytest.raises(
        ValueError,
        match=rf"cannot binarize 'layer2.odd' \({kind}\): .*{reason}.*skip=\['layer2.odd'\]",
    ):
        unflip.binarize(model, "dorefa")
    assert binary_names(model) == []
    unflip.binarize(model, "dorefa", skip=["layer2.odd"], quiet=True)
    assert binary_names(model) == INNER
    assert model.layer2["odd"] is odd


def test_a_lazy_layer_that_has_run_is_an_ordinary_one() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyConv2d(4, 3))
    model(images())
    assert binary_names(unflip.binarize(model, "dorefa", quiet=True)) == ["1"]


def test_nothing_to_binarize() -> None:
    with pytest.raises(ValueError, match=r"nothing to binarize: ReLU has 0 .*\(none\)"):
        unflip.binarize(nn.ReLU(), "dorefa")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(
        ValueError, match=r"nothing to binarize: Sequential has 2 .*\(0, 2\).*first and last: 0, 2"
    ):
        unflip.binarize(model, "dorefa")
    with pytest.raises(ValueError, match=r"nothing to binarize.*skip: \['0', '2'\]"):
        unflip.binarize(model, "dorefa", skip=["0", "2"], keep_first_and_last=False)
    with pytest.raises(ValueError, match="nothing to binarize: Linear"):
        unflip.binarize(nn.Linear(3, 4), "dorefa")


def test_binarize_twice() -> None:
    model = unflip.binarize(Net(), "dorefa", quiet=True)
    with pytest.raises(
        ValueError, match=r"'layer1.0.conv1' is binary already \(method dorefa\).*float.*load_twin"
    ):
        unflip.binarize(model, "xnor")
    with pytest.raises(ValueError, match=r"layer 'layer1.0.conv1' is frozen.*no latent weights"):
        unflip.binarize(unflip.freeze(model), "xnor")


def test_skip_that_matches_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"skip: 'layer9.\*' matches no layer. Layers: stem, layer1"
    ):
        unflip.binarize(Net(), "dorefa", skip=["layer1", "layer9.*"])


def test_skip_is_a_list() -> None:
    with pytest.raises(TypeError, match=r"skip='fc' should be a list .*\['fc'\]"):
        unflip.binarize(Net(), "dorefa", skip="fc")
    with pytest.raises(TypeError, match=r"skip=.*should be a list of layer names"):
        unflip.binarize(Net(), "dorefa", skip=[nn.Linear])  # type: ignore[list-item]


def test_unknown_method_and_option() -> None:
    with pytest.raises(
        ValueError, match=r"unknown method 'lsn'. Did you mean 'lns'\? Known: .*xnor"
    ):
        unflip.binarize(Net(), "lsn")
    with pytest.raises(
        ValueError,
        match=r"unknown option of method 'lns' 'rho'\. Known: alpha, .*rho_minus, rho_plus",
    ):
        unflip.binarize(Net(), "lns", rho=0.1)


# --- weights to and from the float twin -----------------------------------------------------------------


def test_load_twin_takes_everything_and_must_fit() -> None:
    source = Net()
    source(images())
    model = unflip.binarize(Net(), "lns", quiet=True)
    unflip.load_twin(model, source.state_dict())
    state = model.state_dict()
    for key, value in source.state_dict().items():
        assert torch.equal(state[key], value), key
    missing = {k: v for k, v in source.state_dict().items() if k != "layer1.0.conv1.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key.*layer1.0.conv1.weight"):
        unflip.load_twin(model, missing)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*extra.weight"):
        unflip.load_twin(model, {**source.state_dict(), "extra.weight": torch.zeros(1)})


def test_load_twin_of_a_model_says_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"a model \(Net\); pass its state_dict\(\)"):
        unflip.load_twin(unflip.binarize(Net(), "lns", quiet=True), Net())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda state: {f"module.{k}": v for k, v in state.items()}, "DistributedDataParallel"),
        (lambda state: {f"_orig_mod.{k}": v for k, v in state.items()}, "which torch.compile adds"),
        (lambda state: {"epoch": 3, "model": state}, r"pass state_dict\['model'\]"),
        (lambda state: "checkpoint.pt", "state_dict is 'checkpoint.pt'; it should map names to"),
    ],
    ids=["parallel", "compiled", "nested", "path"],
)
def test_load_twin_of_a_checkpoint_says_what_to_give(wrap: Any, message: str) -> None:
    model = unflip.binarize(Net(), "dorefa", quiet=True)
    with pytest.raises((ValueError, TypeError), match=message):
        unflip.load_twin(model, wrap(Net().state_dict()))


def test_load_twin_takes_a_model_whose_own_part_is_called_module() -> None:
    model, twin = (nn.ModuleDict({"module": nn.Linear(4, 4)}) for _ in range(2))
    binary = unflip.binarize(model, "dorefa", keep_first_and_last=False, quiet=True)
    unflip.load_twin(binary, twin.state_dict())
    assert torch.equal(binary["module"].weight, twin["module"].weight)  # type: ignore[arg-type]


def test_load_twin_between_methods() -> None:
    source = unflip.binarize(Net(), "lns", quiet=True)
    for target in (Net(), unflip.binarize(Net(), "xnor", quiet=True)):
        unflip.load_twin(target, source.state_dict())
        for name, parameter in target.named_parameters():
            assert torch.equal(parameter, source.get_parameter(name))


# --- flips ----------------------------------------------------------------------------------------------


def test_flip_rate_is_the_share_of_flipped_signs() -> None:
    model = unflip.binarize(Net(), "dorefa", quiet=True)
    before = unflip.signs(model)
    assert list(before) == INNER
    assert all(s.dtype == torch.int8 for s in before.values())
    assert unflip.flip_rate(model, model) == 0
    with torch.no_grad():
        model.hidden.weight.neg_()  # 48 signs
        model.layer2["down"].weight[0, :3].neg_()  # and 3
        model.fc.weight.neg_()  # float: not counted
        model.layer1[0].conv1.weight.mul_(2)  # the same signs
    total = 6 * 576 + 64 + 48
    assert unflip.flip_rate(before, model) == pytest.approx(51 / total)
    assert unflip.flip_rate(before, model) == unflip.flip_rate(model, before)
    by_layer = unflip.flips_by_layer(before, model)
    assert by_layer["hidden"] == (48, 48)
    assert by_layer["layer2.down"] == (3, 64)
    assert by_layer["layer1.0.conv1"] == (0, 576)
    assert list(by_layer) == INNER


def test_flip_rate_of_frozen_models() -> None:
    model = unflip.binarize(Net(), "dorefa", quiet=True)
    frozen = unflip.freeze(model)
    assert unflip.flip_rate(model, frozen) == 0
    with torch.no_grad():
        model.hidden.weight.neg_()
    assert unflip.flips_by_layer(frozen, unflip.freeze(model))["hidden"] == (48, 48)


def test_flip_rate_of_models_that_do_not_match() -> None:
    model = unflip.binarize(Net(), "dorefa", quiet=True)
    fewer = unflip.binarize(Net(), "dorefa", skip=["hidden"], quiet=True)
    with pytest.raises(ValueError, match="same binary layers; these are in one only: hidden"):
        unflip.flip_rate(model, fewer)
    with pytest.raises(ValueError, match="same binary layers; neither has any"):
        unflip.flip_rate(Net(), Net())
    signs = unflip.signs(model)
    signs["hidden"] = signs["hidden"][:, :1]  # would broadcast
    with pytest.raises(
        ValueError, match=r"layer 'hidden' .*\(1, 6, 8\) before and \(1, 1, 8\) after"
    ):
        unflip.flip_rate(model, signs)


# --- the import -----------------------------------------------------------------------------------------


def test_import_needs_torch_numpy_and_safetensors_only() -> None:
    script = """
        import sys

        optional = ["sklearn", "pydantic", "typer", "rich", "matplotlib", "PIL", "yaml",
                    "tensorboard", "pandas", "scipy", "torchvision", "click", "onnx", "ray"]

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in optional:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Refuse())
        import torch
        before = set(sys.modules)
        import unflip
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        extra = new - {"unflip", "torch", "numpy", "safetensors"} - set(sys.stdlib_module_names)
        assert not extra, extra
        assert not set(optional) & {name.split(".")[0] for name in sys.modules}
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        unflip.freeze(unflip.binarize(model, "lns"))
        print("ok")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("ok\n")


def test_a_last_layer_that_is_used_twice_stays_float() -> None:
    shared = nn.Linear(8, 8)
    model = unflip.binarize(nn.Sequential(shared, nn.Linear(8, 8), shared), "dorefa", quiet=True)
    assert type(model[2]) is nn.Linear
    assert isinstance(model[1], BinaryLinear)


def test_latent_weights_cannot_come_from_a_frozen_model() -> None:
    frozen = unflip.freeze(unflip.BinaryLinear(4, 4))
    with pytest.raises(ValueError, match=r"of a frozen model .*latent weights are gone"):
        unflip.load_twin(nn.Linear(4, 4), frozen.state_dict())


class HeldInAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.steps = [self.stem, self.inner]  # a list, not a ModuleList

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def test_whoever_holds_a_layer_holds_the_binary_one() -> None:
    torch.manual_seed(0)
    model, x = HeldInAList().eval(), torch.randn(2, 3, 8, 8)
    layer, before = model.inner, model(x)
    unflip.binarize(model, "bireal", quiet=True)
    assert model.inner is layer
    assert not torch.allclose(model(x), before)
    frozen = unflip.freeze(model)
    assert isinstance(frozen.steps[1], FrozenConv2d)  # type: ignore[index]
    assert torch.equal(frozen(x), model(x))


def test_a_layer_whose_forward_was_replaced_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    float_forward = model[1].forward
    model[1].forward = lambda x: float_forward(x)
    with pytest.raises(ValueError, match=r"'1' \(Conv2d\): its forward was replaced"):
        unflip.binarize(model, "bireal", quiet=True)
    del model[1].forward
    unflip.binarize(model, "bireal", quiet=True)
    model[1].forward = lambda x: float_forward(x)
    with pytest.raises(ValueError, match="forward of layer '1' was replaced"):
        unflip.freeze(model)


def test_a_compiled_layer_does_not_go_on_as_it_was_compiled() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 8, 8)
    model[1].compile(backend="eager")
    before = model(x)
    assert not torch.allclose(unflip.binarize(model, "bireal", quiet=True)(x), before)


def test_transformer_layers_multiply_with_signs_in_evaluation_too() -> None:
    """torch has a fast path there that takes the weights from the layers by itself."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    options: dict[str, Any] = {"skip": ["*.self_attn"], "keep_first_and_last": False, "quiet": True}
    unflip.binarize(model, "hwgq", **options)
    x = torch.randn(3, 5, 8)
    slow = model(x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), slow.detach())
        assert torch.equal(unflip.freeze(model)(x), model(x))


def test_a_lazy_layer_that_stays_float() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    unflip.binarize(model, "dorefa")
    assert [c.weights for c in unflip.summary(model)] == [108, 144, 0]


def test_layers_without_a_binary_form_are_said_to_stay_float(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 2, 3))
    model.attention, model.rnn = nn.MultiheadAttention(4, 2), nn.GRU(4, 4)  # type: ignore[assignment]
    unflip.binarize(model, "dorefa", skip=["2", "attention", "rnn"])
    kept = {c.name: c.weights for c in unflip.summary(model) if not c.binary}
    assert kept == {"0": 108, "2": 72, "attention": 48, "attention.out_proj": 16, "rnn": 96}
    assert "kept float: 0, 2, attention, attention.out_proj, rnn (340" in capsys.readouterr().out
