"""The network of a recipe: what the seed decides, what the images decide, and recipes that contradict them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import unflip
from unflip import models
from unflip.data import ImageSet, InputSpec
from unflip.layers import binary_layers
from unflip.methods.lns import MappedSign
from unflip.recipes import load_recipe
from unflip.recipes.build import build_model

VGG = ["model={name: vgg_small, width: 8}"]
CIFAR = InputSpec((3, 32, 32), tuple("abcdefghij"), (0.5,) * 3, (0.25,) * 3)


def test_the_seed_alone_decides_the_first_weights(digits: ImageSet) -> None:
    recipe = load_recipe("digits-lns")
    torch.manual_seed(5)
    first = build_model(recipe, digits.spec, seed=3).state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(6)
    again = build_model(recipe, digits.spec, seed=3).state_dict()
    other = build_model(recipe, digits.spec, seed=4).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn), "building a model should not draw from the caller's"


def test_the_mapping_recipe_has_mappings_without_supervision() -> None:
    model = build_model(load_recipe("cifar10-resnet20-mapping"), CIFAR, seed=0)
    binarizers = [layer.weight_binarizer for _, layer in binary_layers(model)]
    assert binarizers
    assert all(isinstance(b, MappedSign) for b in binarizers)
    losses = [
        layer.weight_binarizer.auxiliary_loss(layer.weight) for _, layer in binary_layers(model)
    ]
    assert all(loss is not None and loss.item() == 0 for loss in losses)


def test_8_bit_ends_and_shortcuts() -> None:
    resnet18 = "model={name: resnet18_cifar, width: 8}"
    recipe = load_recipe("cifar10-resnet20-dorefa", [resnet18, "ends=int8", "shortcuts=int8"])
    found = unflip.summary(build_model(recipe, CIFAR, seed=0))
    names = [layer.name for layer in found if layer.reason == "int8"]
    assert names == ["conv1", *(f"layer{i}.0.downsample.0" for i in (2, 3, 4)), "fc"]
    assert not [layer for layer in found if layer.reason == "float"]
    recipe = load_recipe("cifar10-resnet20-dorefa", ["shortcuts=int8"])
    with pytest.raises(ValueError, match=r"shortcuts='int8': CifarResNet has no float convolution"):
        build_model(recipe, CIFAR, seed=0)


@pytest.mark.parametrize(
    ("override", "right"),
    [("model.image_size=32", 8), ("model.num_classes=5", 10), ("model.in_channels=3", 1)],
)
def test_a_network_for_other_images(digits: ImageSet, override: str, right: int) -> None:
    with pytest.raises(ValueError, match=f"has {override}") as caught:
        build_model(load_recipe("digits-dorefa", [*VGG, override]), digits.spec, seed=0)
    assert "digits has 10 classes and images of 1×8×8" in str(caught.value)
    assert str(caught.value).endswith(f"leave it out, or give {right}")
    build_model(
        load_recipe("digits-dorefa", [*VGG, f"{override.partition('=')[0]}={right}"]),
        digits.spec,
        0,
    )


def test_more_classes_than_there_are(digits: ImageSet) -> None:
    with pytest.raises(ValueError, match=r"model\.num_classes=11, but digits has 10 classes"):
        build_model(load_recipe("digits-dorefa", ["model.num_classes=11"]), digits.spec, seed=0)


def test_a_network_with_a_linear_layer_for_each_pixel_wants_squares(digits: ImageSet) -> None:
    wide = replace(
        digits, train_images=digits.train_images[:, :, :4], test_images=digits.test_images[:, :, :4]
    )
    with pytest.raises(
        ValueError, match="vgg_small takes square images, and those of digits are 4×8"
    ):
        build_model(load_recipe("digits-dorefa", VGG), wide.spec, seed=0)
    build_model(load_recipe("digits-dorefa"), wide.spec, seed=0)  # a ResNet takes any


@pytest.mark.parametrize(
    "model",
    [
        "{name: vgg_small, width: 3000}",
        "{name: vgg_small, width: 1000000000}",
        "{name: resnet20, width: 1000000000000000000000}",
        "{name: resnet20, widths: [1.0e+300, 1.0e+300, 1.0e+308]}",
    ],
)
def test_a_network_of_too_many_weights_is_refused_before_it_is_allocated(monkeypatch, model):
    """One line of a recipe could take all memory."""

    def create(*arguments: Any, **options: Any) -> Any:
        if torch.empty(0).device.type != "meta":
            raise AssertionError("the weights would be allocated")
        return original(*arguments, **options)

    original = models.create
    monkeypatch.setattr("unflip.models.create", create)
    recipe = load_recipe("cifar10-resnet20-dorefa", [f"model={model}"])
    with pytest.raises(ValueError, match=r"width.* weights or more; at most 1,073,741,824"):
        build_model(recipe, CIFAR, seed=0)
