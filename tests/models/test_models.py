"""Every registered network with methods of every kind, small; then what each network claims to be.

One file of more than 400 lines, because all tests share the table of small networks.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unflip
from unflip import models
from unflip.layers import binary_layers
from unflip.methods import names as method_names
from unflip.models.base import resolve_method, takes_signs
from unflip.models.resnet import Block, OptionA, Style

# Small forms: (model, options, height of the image)
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "resnet20": ("resnet20", {"width": 4}, 8),
    "resnet20 conv": ("resnet20", {"width": 4, "shortcut": "conv"}, 8),
    "resnet20 hardtanh": ("resnet20", {"width": 4, "order": "conv-bn-hardtanh"}, 9),
    "resnet20 irnet": (
        "resnet20",
        {"width": 5, "order": "conv-bn-hardtanh", "shortcut": "conv"},
        7,
    ),
    "resnet20 prelu": (
        "resnet20",
        {"width": 4, "order": "conv-bn-prelu", "shortcut": "conv", "pixels": "mean"},
        9,
    ),
    "resnet18": ("resnet18", {"width": 8}, 64),
    "resnet18 bireal": ("resnet18", {"width": 8, "variant": "bireal"}, 64),
    "resnet18 prelu": ("resnet18", {"width": 8, "variant": "bireal-prelu"}, 70),
    "resnet18 binary": ("resnet18", {"width": 8, "downsample": "binary"}, 64),
    "resnet18 adabin": ("resnet18", {"width": 8, "variant": "adabin"}, 64),
    "resnet18_cifar": ("resnet18_cifar", {"width": 4}, 8),
    "resnet18_cifar recu": (
        "resnet18_cifar",
        {"width": 4, "order": "conv-bn-hardtanh", "downsample": "binary"},
        9,
    ),
    "resnet18_cifar mean": (
        "resnet18_cifar",
        {"width": 4, "order": "adabin", "shortcut": "conv", "pixels": "mean"},
        8,
    ),
    "alexnet xnor": ("alexnet", {"width": 6, "image_size": 63, "layout": "xnor"}, 63),
    "alexnet": ("alexnet", {"width": 6, "image_size": 44, "layout": "dorefa"}, 44),
    "vgg_small": ("vgg_small", {"width": 8, "image_size": 16}, 16),
}
METHODS = ["float", *method_names(), {"name": "dorefa", "inputs": "pm1"}]
CLASSES = 5


def build(case: str, method: Any, **more: Any) -> nn.Module:
    name, options, _ = CASES[case]
    torch.manual_seed(0)
    return models.create(name, method, num_classes=CLASSES, in_channels=2, **options, **more)


def images(case: str, batch: int = 8) -> Tensor:
    size = CASES[case][2]
    return torch.randn(batch, 2, size, size, generator=torch.Generator().manual_seed(1))


def spread_norms(model: nn.Module) -> None:
    """Give BatchNorm and PReLU values a trained network might have: fresh ones hide mistakes."""
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
            nn.init.uniform_(module.bias, -0.3, 0.3, generator=generator)


def test_every_registered_model_is_tested() -> None:
    # resnet34 is resnet18 with other numbers of blocks
    assert {name for name, _, _ in CASES.values()} == set(models.names()) - {"resnet34"}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_model(case: str, method: Any) -> None:
    """Forward, backward, weights to and from the float twin, freezing."""
    model, x = build(case, method), images(case)
    spread_norms(model)
    logits = model(x)
    assert logits.shape == (len(x), CLASSES)

    labels = torch.arange(len(x)) % CLASSES
    loss = nn.functional.cross_entropy(logits, labels) + unflip.auxiliary_loss(model)
    loss.backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not dead

    twin = build(case, "float")
    if method == "float":
        assert not list(binary_layers(model))
        twin.load_state_dict(model.state_dict())
        return
    first, *_, last = unflip.summary(model)
    assert not first.binary
    assert not last.binary
    exchange_weights(model, twin, x)
    frozen = unflip.freeze(model)
    with torch.no_grad():
        assert torch.equal(frozen(x), model.eval()(x))


def exchange_weights(model: nn.Module, twin: nn.Module, x: Tensor) -> None:
    """Binary -> float -> binary, plainly where the method has no state of its own."""
    stateless = model.state_dict().keys() == twin.state_dict().keys()
    load = nn.Module.load_state_dict if stateless else unflip.load_twin
    model.eval()
    with torch.no_grad():
        before = model(x)
        load(twin, model.state_dict())
        for name, parameter in twin.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name))
        for name in [n for n, _ in twin.named_parameters()]:
            model.get_parameter(name).zero_()
        load(model, twin.state_dict())
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("method", [m for m in METHODS if m != "float"], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_no_binary_layer_sees_a_constant(case: str, method: Any) -> None:
    """sign(ReLU(x)) is +1 everywhere: such a network runs, trains and sees nothing."""
    if case == "alexnet" and takes_signs(resolve_method(method)):
        return  # in DoReFa-Net's layout the maximum of nine values is nearly always above 0 at first
    model = build(case, method)
    shares: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            shares[name] = (output == output.flatten()[0]).double().mean().item()

        return hook

    for name, layer in binary_layers(model):
        layer.input_binarizer.register_forward_hook(watch(name))
    model(images(case))
    assert shares
    assert max(shares.values()) < 1


@pytest.mark.parametrize("name", sorted({name for name, _, _ in CASES.values()}))
def test_one_seed_gives_every_method_the_same_weights(name: str) -> None:
    states = [dict(build(name, method).named_parameters()) for method in METHODS]
    for state in states[1:]:
        for key, parameter in states[0].items():
            assert torch.equal(parameter, state[key])


@pytest.mark.parametrize("method", ["float", "dorefa", "xnor", "lns"])
@pytest.mark.parametrize("name", models.names())
def test_the_published_size_takes_the_published_images(name: str, method: str) -> None:
    with torch.device("meta"):
        model = models.create(name, method, num_classes=7)
        assert model(torch.empty(2, *models.input_shape(name))).shape == (2, 7)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_parameter_counts() -> None:
    with torch.device("meta"):
        assert parameters(models.resnet18()) == 11_689_512
        # a slope for each of 4 × (64 + 128 + 256 + 512) channels more
        assert parameters(models.resnet18(variant="bireal-prelu")) == 11_689_512 + 3_840
        assert parameters(models.resnet18(variant="reactnet")) == 11_689_512 + 3_840
        # the stem's slopes, and BatchNorm over the means
        assert parameters(models.resnet18(variant="adabin")) == 11_689_512 + 3_840 + 64 + 2 * 512
        assert parameters(models.resnet34()) == 21_797_672  # torchvision's
        assert parameters(models.alexnet()) == 60_965_224
        # all biases but the classifier's 1,000 go; a stem of 12×12 has 96·3·(144 − 121) more; BatchNorm 2 × channels
        dorefa = 60_965_224 - 9_568 + 6_624 + 2 * (256 + 384 + 384 + 256 + 4_096 + 4_096)
        assert parameters(models.alexnet(layout="dorefa")) == dorefa == 60_981_224
        # without groups, convolutions 2, 4 and 5 are twice as large
        double = 25 * 48 * 256 + 9 * 192 * 384 + 9 * 192 * 256
        norms = 2 * (96 + 96 + 256 + 384 + 384 + 256 + 4_096 + 4_096)
        xnor = 60_965_224 - 9_568 + double + norms
        assert parameters(models.alexnet(layout="xnor")) == xnor == 62_388_104
        # Stem 3·16·9; stages 6·16·16·9, (16 + 5·32)·32·9, (32 + 5·64)·64·9: 267,696 weights, all but
        # the stem's 432 binary. Linear 64·10 + 10. BatchNorm 2 × (16 + 6·(16 + 32 + 64)) = 1,376.
        # PReLU 6·(16 + 32 + 64) = 672.
        assert parameters(models.resnet20()) == 267_696 + 650 + 1_376 + 672
        binary = [c.weights for c in unflip.summary(models.resnet20("dorefa")) if c.binary]
        assert sum(binary) == 267_264
        # IR-Net: no PReLU, BatchNorm over the 64 means
        assert parameters(models.resnet20(order="conv-bn-hardtanh")) == 267_696 + 650 + 1_376 + 128
        # torchvision's ResNet-18 with a stem of 3·64·9 instead of 3·64·49 and 10 classes; BatchNorm over 512 means
        small = 11_689_512 - 3 * 64 * (49 - 9) - 513 * (1_000 - 10)
        slopes = 4 * (64 + 128 + 256 + 512)
        assert parameters(models.resnet18_cifar()) == small + slopes
        plain = models.resnet18_cifar(order="conv-bn-hardtanh")
        assert parameters(plain) == small + 2 * 512 == 11_173_962 + 1_024
        # 9·(3·128 + 128·128 + 128·256 + 256·256 + 256·512 + 512·512), BatchNorm, 8,192·10 + 10
        assert parameters(models.vgg_small()) == 4_574_592 + 3_584 + 81_930


@pytest.mark.parametrize(
    ("name", "blocks"), [("resnet18", [2, 2, 2, 2]), ("resnet34", [3, 4, 6, 3])]
)
def test_resnets_have_torchvisions_names_in_every_variant(name: str, blocks: list[int]) -> None:
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {"conv1.weight", "fc.weight", "fc.bias"} | {f"bn1.{n}" for n in norm}
    for block in [f"layer{i}.{j}" for i, count in enumerate(blocks, 1) for j in range(count)]:
        for k in (1, 2):
            expected |= {f"{block}.conv{k}.weight"} | {f"{block}.bn{k}.{n}" for n in norm}
    for block in [f"layer{i}.0.downsample" for i in range(2, 5)]:
        expected |= {f"{block}.0.weight"} | {f"{block}.1.{n}" for n in norm}
    with torch.device("meta"):
        for variant in ("plain", "bireal", "bireal-prelu", "reactnet", "adabin"):
            keys = models.create(name, variant=variant).state_dict().keys()
            added = ("prelu", "after", "stem_activation", "head_norm")
            assert {k for k in keys if not any(part in k for part in added)} == expected


def test_option_a_by_hand() -> None:
    x = torch.arange(1.0, 19.0).view(1, 2, 3, 3)  # channels 1..9 and 10..18
    out = OptionA(2, 4, 2)(x)
    zero = [[0.0, 0.0], [0.0, 0.0]]
    assert out.tolist() == [[zero, [[1.0, 3.0], [7.0, 9.0]], [[10.0, 12.0], [16.0, 18.0]], zero]]
    mean = OptionA(2, 4, 2, "mean")(x)  # at an odd edge, of the pixels that are there
    assert mean.tolist() == [[zero, [[3.0, 4.5], [7.5, 9.0]], [[12.0, 13.5], [16.5, 18.0]], zero]]
    assert OptionA(2, 5, 2)(x)[0].abs().sum((1, 2)).gt(0).tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]


def silence(norm: nn.BatchNorm2d) -> None:
    nn.init.zeros_(norm.weight)
    nn.init.zeros_(norm.bias)


def test_a_shortcut_round_each_convolution() -> None:
    block = Block(4, 4, 1, Style("conv", prelu=True), nn.Identity()).eval()
    x = torch.randn(2, 4, 5, 5)
    silence(block.bn1)
    assert torch.equal(block(x), block.bn2(block.prelu2(block.conv2(x))) + x)
    silence(block.bn2)
    assert torch.equal(block(x), x)


def test_a_shortcut_round_the_block() -> None:
    block = Block(4, 4, 1, Style("block", prelu=True), nn.Identity()).eval()
    x = torch.randn(2, 4, 5, 5)
    silence(block.bn1)
    assert torch.equal(block(x), block.bn2(torch.zeros_like(x)) + x)
    silence(block.bn2)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize(
    ("build_model", "shortcut"),
    [
        (lambda: models.resnet20("bireal", shortcut="conv", width=4), "conv"),
        (lambda: models.resnet20("bireal", shortcut="block", width=4), "block"),
        (lambda: models.resnet18("bireal", variant="bireal", width=8), "conv"),
        (lambda: models.resnet18("bireal", variant="bireal-prelu", width=8), "conv"),
        (lambda: models.resnet18("bireal", variant="plain", width=8), "block"),
    ],
)
def test_the_shortcuts_of_whole_networks(build_model: Any, shortcut: str) -> None:
    """With every second BatchNorm silent, a block is the identity on what the first half gives."""
    for block in [m for m in build_model().modules() if isinstance(m, Block)]:
        block.eval()
        silence(block.bn2)
        x = torch.rand(2, block.conv1.in_channels, 6, 6)
        past = block.downsample(x)
        half = block.bn1(block.prelu1(block.conv1(block.before1(x))))
        expected = block.after1(half + past) if shortcut == "conv" else past
        assert torch.allclose(block(x), block.after2(expected), atol=1e-6)


def test_the_orders_of_resnet20() -> None:
    x = torch.randn(2, 3, 8, 8)
    fda = models.resnet20(width=4).eval()
    irnet = models.resnet20(width=4, order="conv-bn-hardtanh").eval()
    assert (fda.layer1(fda.bn1(fda.conv1(x))) < -1).any()  # nothing cuts the stream off
    assert irnet.layer1(irnet.stem_activation(irnet.bn1(irnet.conv1(x)))).abs().max() <= 1
    assert isinstance(fda.head_activation, nn.ReLU)
    assert isinstance(irnet.head_norm, nn.BatchNorm1d)
    assert fda.get_parameter("layer1.0.prelu1.weight").tolist() == [0.25] * 4


def test_prelu_comes_after_the_add_where_the_order_says_so() -> None:
    block = models.resnet20(width=4, order="conv-bn-prelu", shortcut="conv").eval().layer1[0]
    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        block.after1.weight.fill_(0.5)
        half = F.leaky_relu(block.bn1(block.conv1(x)) + x, 0.5)
        expected = F.leaky_relu(block.bn2(block.conv2(half)) + half, 0.25)
        assert torch.allclose(block(x), expected)


def test_down_sampling_is_as_the_method_says_unless_told() -> None:
    def binary(method: str, **options: Any) -> set[bool]:
        with torch.device("meta"):
            model = models.resnet18(method, **options)
        return {c.binary for c in unflip.summary(model) if "downsample" in c.name}

    assert binary("dorefa") == {False}
    assert binary("binarynet") == {True}
    assert binary("dorefa", downsample="binary") == {True}
    assert binary("binarynet", downsample="float") == {False}
    assert binary("bireal", variant="bireal", downsample="binary") == {True}
    assert binary("float", downsample="binary") == {False}


def test_the_activation_suits_the_methods_inputs() -> None:
    def kinds(method: Any, **options: Any) -> set[type[nn.Module]]:
        with torch.device("meta"):
            model = models.create("resnet18", method, **options)
        return {type(m) for m in model.modules()} & {nn.ReLU, nn.Hardtanh}

    assert kinds("float") == kinds("bwn") == kinds("dorefa") == kinds("lns") == {nn.ReLU}
    assert kinds("xnor") == kinds("binarynet") == kinds("bireal") == {nn.Hardtanh}
    assert kinds({"name": "dorefa", "inputs": "pm1"}) == {nn.Hardtanh}
    assert kinds({"name": "lns", "base": "bireal"}) == {nn.Hardtanh}
    assert kinds("xnor", activation="identity") == set()
    with pytest.raises(ValueError, match=r"activation='relu' gives .*always \+1 for method xnor"):
        models.create("resnet18", "xnor", activation="relu")


def test_bireals_float_twin_is_not_linear() -> None:
    """Its only non-linearity is the sign, so the twin has Bi-Real Net's clip in the same place."""

    def kinds(method: str) -> set[type[nn.Module]]:
        with torch.device("meta"):
            model = models.resnet18(method, variant="bireal")
        return {type(m) for m in model.modules()} & {nn.ReLU, nn.Hardtanh}

    assert kinds("float") == kinds("bwn") == {nn.Hardtanh}
    assert kinds("bireal") == kinds("dorefa") == set()


def test_reactnets_order_is_conv_bn_add_rprelu() -> None:
    """RSign → conv → BN → add → RPReLU, as in the released ResNet-18; the stem has no activation."""
    model = models.resnet18("reactnet", variant="reactnet", width=8).eval()
    assert isinstance(model.stem_activation, nn.Identity)
    block = model.get_submodule("layer1.0")
    for parameter in block.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    x = torch.randn(2, 8, 6, 6)
    shift, slopes = block.conv1.input_binarizer.shift, block.after1
    with torch.no_grad():
        binary = torch.where(x + shift >= 0, 1.0, -1.0)
        y = block.bn1(F.conv2d(binary, block.conv1.binary_weight(), padding=1)) + x
        before, after = (s.view(-1, 1, 1) for s in (slopes.adapted.before, slopes.adapted.after))
        middle = F.prelu(y + before, slopes.weight) + after
        expected = block.after2(block.bn2(block.conv2(middle)) + middle)
        torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "resnet20",
            {"shortcut": "none"},
            "resnet20: shortcut='none' is not one of 'block', 'conv'",
        ),
        ("resnet20", {"order": "bn"}, "resnet20: order='bn' is not one of 'conv-prelu-bn'"),
        ("resnet20", {"width": 0}, "resnet20: width=0 should be a whole number >= 1"),
        ("resnet20", {"width": True}, "resnet20: width=True should be a whole number >= 1"),
        ("resnet18", {"variant": "Bireal"}, "resnet18: variant='Bireal' is not one of 'plain'"),
        ("resnet18", {"downsample": "1x1"}, "downsample='1x1' is not one of 'float', 'binary'"),
        ("resnet18", {"activation": "gelu"}, "activation='gelu' is not one of 'relu', 'hardtanh'"),
        ("resnet18", {"num_classes": 2.5}, "num_classes=2.5 should be a whole number"),
        ("resnet18", {"varaint": "plain"}, "option of model 'resnet18' 'varaint'.*'variant'"),
        (
            "alexnet",
            {"layout": "caffe"},
            "alexnet: layout='caffe' is not one of 'krizhevsky', 'xnor'",
        ),
        (
            "alexnet",
            {"method": "dorefa", "layout": "krizhevsky"},
            "layout='krizhevsky' is for method='float', and the method is dorefa: use 'xnor' or 'dorefa'",
        ),
        ("alexnet", {"width": 8}, "alexnet: width=8 should be a multiple of 6"),
        ("alexnet", {"image_size": 62}, "alexnet: image_size=62 is too small for its pools: 63 or"),
        (
            "alexnet",
            {"image_size": 43, "layout": "dorefa"},
            "image_size=43 is too small .* 44 or more",
        ),
        ("vgg_small", {"image_size": 7}, "vgg_small: image_size=7 is too small"),
        (
            "vgg_small",
            {"method": "dorefo"},
            "unknown method 'dorefo'. Did you mean 'dorefa'.*float",
        ),
        ("resnet", {}, "unknown model 'resnet'. Did you mean 'resnet"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.create(name, **options)


def test_the_registry() -> None:
    assert models.input_shape("resnet18") == (3, 224, 224)
    with pytest.raises(ValueError, match="unknown model 'lenet'"):
        models.input_shape("lenet")
    with pytest.raises(ValueError, match="model 'resnet20' is already registered"):
        models.register_model("resnet20", input_shape=(3, 32, 32))(models.resnet20)
    assert resolve_method("float") is resolve_method({"name": "float"}) is None
