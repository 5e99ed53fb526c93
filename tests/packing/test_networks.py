"""Every method in every network, packed, against the network itself."""

import pytest
import torch
from torch import nn

from unflip import binarize, freeze, load, load_run, methods, models, summary
from unflip.data import load as load_data
from unflip.packing import make_packed, pack, read
from unflip.packing.describe import describe, value_shapes
from unflip.packing.file import to_bytes
from unflip.packing.reference import evaluate, evaluate_all
from unflip.recipes.load import load_recipe
from unflip.train.job import RunOptions
from unflip.train.loop import train

# resnet34 is resnet18 with other numbers of blocks
NETWORKS = {
    "resnet20": ({"width": 4, "in_channels": 1}, 8),
    "resnet18": ({"width": 4, "num_classes": 5}, 16),
    "vgg_small": ({"width": 4, "image_size": 8}, 8),
    "alexnet": ({"width": 6, "image_size": 67, "num_classes": 5, "layout": "dorefa"}, 67),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", methods.names())
@pytest.mark.parametrize("network", NETWORKS)
def test_every_method_in_every_network(network, method, agree, lively):
    options, size = NETWORKS[network]
    model = lively(models.create(network, method, **options))
    packed = agree(model, torch.randn(3, options.get("in_channels", 3), size, size))
    kinds = [op["op"] for op in packed.graph["ops"]]
    assert sum("bits" in op for op in packed.graph["ops"]) == sum(
        one.binary for one in summary(model)
    )
    if network == "resnet20" and method != "bbg":  # a gate is a map of its own
        assert "map" not in kinds


VARIANTS = [
    ("resnet20", {"order": "conv-bn-hardtanh", "shortcut": "conv"}),
    ("resnet20", {"order": "conv-bn-prelu", "shortcut": "conv", "pixels": "mean"}),
    ("resnet20", {"shortcut": "conv", "widths": [1, 0.5, 0.5]}),
    ("resnet18", {"variant": "bireal"}),
    ("resnet18", {"variant": "bireal-prelu"}),
    ("resnet18", {"variant": "bireal-prelu", "downsample": "binary"}),
    ("resnet18", {"variant": "reactnet"}),
    ("resnet18", {"variant": "adabin"}),
    ("alexnet", {"layout": "xnor"}),
]


@pytest.mark.parametrize(("network", "more"), VARIANTS, ids=str)
def test_variants(network, more, agree, lively):
    options, size = NETWORKS[network]
    options = {**options, **more}
    x = torch.randn(2, options.get("in_channels", 3), size, size + 1)
    agree(lively(models.create(network, "bbg", **options)), x)
    agree(lively(models.create(network, "float", **options)), x)


def test_one_quantizer_for_two_convolutions_of_one_input(lively):
    model = lively(models.create("resnet18", "binarynet", width=4, num_classes=5))
    packed = make_packed(model, torch.randn(1, 3, 16, 16))
    convs = {op["name"]: op for op in packed.graph["ops"] if op["op"] == "conv"}
    assert convs["layer2.0.conv1"]["inputs"] == convs["layer2.0.downsample.0"]["inputs"]


def test_residual_adds_are_steps_of_the_convolution(lively):
    model = lively(models.create("resnet18", "bireal", variant="bireal-prelu", width=4))
    packed = make_packed(model, torch.randn(1, 3, 16, 16))
    convs = {op["name"]: op for op in packed.graph["ops"] if op["op"] == "conv"}
    assert [s["step"] for s in convs["layer1.0.conv1"]["steps"]] == ["prelu", "affine", "add"]
    assert [s["step"] for s in convs["layer2.0.downsample.0"]["steps"]] == ["affine"]


def test_packing_twice_gives_the_same_bytes(lively):
    model = lively(models.create("resnet20", "xnor", width=4, in_channels=1))
    x = torch.randn(2, 1, 8, 8)
    assert to_bytes(make_packed(model, x)) == to_bytes(make_packed(model, x))
    assert to_bytes(make_packed(model, x)) == to_bytes(make_packed(model, torch.randn(1, 1, 8, 8)))


def test_the_model_is_left_as_it_is():
    model = models.create("resnet20", "lns", width=4, in_channels=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    make_packed(model, torch.randn(2, 1, 8, 8))
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    frozen = freeze(model)
    make_packed(frozen, torch.randn(2, 1, 8, 8))
    assert frozen(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_resnet18_on_disk(tmp_path, lively):
    method = {"name": "dorefa", "inputs": "pm1"}
    model = lively(models.create("resnet18", method, variant="bireal-prelu"))
    size = pack(model, torch.randn(1, 3, 224, 224), tmp_path / "resnet18.unflip")
    assert size == (tmp_path / "resnet18.unflip").stat().st_size
    assert 33.5e6 < 8 * size <= 34.5e6  # counted as papers do it is 33.64


def test_descriptions_are_of_what_is_there(lively):
    model = lively(models.create("resnet20", "tbn", width=4, in_channels=1))
    x = torch.randn(1, 1, 9, 8)
    packed = make_packed(model, x)
    shapes = [tuple(value.shape[1:]) for value in evaluate_all(packed, x)]
    assert shapes == value_shapes(packed.graph)
    found = describe(packed)
    assert sum(row.bytes for row in found.rows) == sum(t.nbytes for t in packed.tensors.values())
    conv = next(row for row in found.rows if (row.op, row.name) == ("conv", "layer1.0.conv1"))
    assert (conv.weight_bits, conv.binary_macs, conv.float_macs) == (1, 2 * 4 * 4 * 9 * 72, 0)


def test_the_same_answers_on_all_test_digits(tmp_path):
    data = load_data("digits", None)
    recipe = load_recipe("digits-dorefa", ["epochs=3", "model.width=8", "allow_no_flips=true"])
    train(recipe, data, tmp_path / "run", options=RunOptions(device="cpu"))
    model = load_run(tmp_path / "run")
    x = (torch.from_numpy(data.test_images) / 255 - data.mean[0]) / data.std[0]
    pack(model, x[:2], tmp_path / "digits.unflip")
    with torch.no_grad():
        expected = model(x)
    assert expected.argmax(1).unique().numel() > 5
    found = evaluate(read(tmp_path / "digits.unflip"), x).flatten(1)
    assert torch.equal(found.argmax(1), expected.argmax(1))


def test_the_runtime_gives_the_references_answers(native, tmp_path, lively):
    model = lively(models.create("resnet20", "xnor", width=8, in_channels=1))
    pack(model, torch.randn(1, 1, 8, 8), tmp_path / "model.unflip")
    x = torch.randn(50, 1, 8, 8)
    reference = evaluate(read(tmp_path / "model.unflip"), x).flatten(1)
    for threads in (1, 2):
        found = load(tmp_path / "model.unflip", threads=threads)(x)
        assert (found - reference).abs().max() <= 1e-4 * reference.abs().max()


def test_networks_of_vectors(agree, lively):
    layers = [
        nn.Linear(20, 16),
        nn.BatchNorm1d(16),
        nn.Linear(16, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 3),
    ]
    model = binarize(nn.Sequential(*layers), "xnor", quiet=True)
    agree(lively(model), torch.randn(4, 20))
