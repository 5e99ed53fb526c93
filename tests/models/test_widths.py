"""The option ``widths``: channels, the unchanged network without it, cost, shortcuts, and what is refused."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import unflip
from unflip import models
from unflip.data import load
from unflip.models.base import scaled_channels
from unflip.models.resnet import OptionA
from unflip.recipes.build import build_model
from unflip.recipes.load import load_recipe

PUBLISHED = {
    "resnet20": [16, 32, 64],
    "resnet18": [64, 128, 256, 512],
    "vgg_small": [128, 128, 256, 256, 512, 512],
}
SMALL: dict[str, tuple[dict[str, Any], int]] = {
    "resnet20": ({"width": 8}, 9),
    "resnet18": ({"width": 8}, 64),
    "vgg_small": ({"width": 8, "image_size": 8}, 8),
}
every_model = pytest.mark.parametrize("name", PUBLISHED)


def channels(model: nn.Module) -> list[int]:
    """What each part (a stage, a convolution of VGG-small) puts out."""
    parts = [m for n, m in model.named_children() if n.startswith("layer")]
    return [[c.out_channels for c in p.modules() if isinstance(c, nn.Conv2d)][-1] for p in parts]


@every_model
def test_without_widths_it_is_the_published_network(name: str) -> None:
    with torch.device("meta"):
        assert channels(models.create(name)) == PUBLISHED[name]
        ones = [1] * models.width_parts(name)
        plain, scaled = models.create(name), models.create(name, widths=ones)
    assert len(ones) == len(PUBLISHED[name])
    shapes = [(k, v.shape) for k, v in plain.state_dict().items()]
    assert shapes == [(k, v.shape) for k, v in scaled.state_dict().items()]


@every_model
def test_none_draws_the_same_weights(name: str) -> None:
    options, _ = SMALL[name]
    states = []
    for more in ({}, {"widths": None}, {"widths": (1,) * models.width_parts(name)}):
        torch.manual_seed(0)
        states.append(models.create(name, "dorefa", **options, **more).state_dict())
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(v, state[k]) for k, v in states[0].items())


@every_model
@pytest.mark.parametrize("order", ["growing", "narrowing", "mixed"])
@pytest.mark.parametrize("method", ["float", "autobnn"])
def test_any_widths_run_and_learn(name: str, order: str, method: str) -> None:
    options, size = SMALL[name]
    parts = models.width_parts(name)
    widths = {
        "growing": [1 + 0.5 * i for i in range(parts)],
        "narrowing": [8 / 4**i for i in range(parts)],
        "mixed": [(0.5, 3, 1)[i % 3] for i in range(parts)],
    }[order]
    model = models.create(name, method, num_classes=5, widths=widths, **options)
    logits = model(torch.randn(4, 3, size, size))
    assert logits.shape == (4, 5)
    nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    if method != "float":
        x = torch.randn(2, 3, size, size)
        assert torch.equal(unflip.freeze(model)(x), model.eval()(x))


@pytest.mark.parametrize("variant", ["plain", "bireal", "bireal-prelu"])
def test_every_variant_of_resnet18_narrows(variant: str) -> None:
    model = models.create("resnet18", "autobnn", width=8, widths=[4, 1, 1, 0.1], variant=variant)
    assert channels(model) == [32, 16, 32, 8]
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 1000)


@pytest.mark.parametrize("order", ["conv-prelu-bn", "conv-bn-hardtanh", "conv-bn-prelu"])
@pytest.mark.parametrize("shortcut", ["block", "conv"])
def test_every_form_of_resnet20_narrows(order: str, shortcut: str) -> None:
    model = models.create("resnet20", widths=[4, 1, 0.25], order=order, shortcut=shortcut)
    assert channels(model) == [64, 32, 16]
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 10)


def test_a_narrower_shortcut_keeps_the_first_channels() -> None:
    x = torch.randn(2, 5, 7, 7)
    assert torch.equal(OptionA(5, 3, 2)(x), x[:, :3, ::2, ::2])
    assert torch.equal(OptionA(5, 5, 2)(x), x[:, :, ::2, ::2])


def test_channels_are_rounded_to_multiples_of_eight() -> None:
    assert scaled_channels("m", (16, 32), (0.74, 0.75), "stage") == [8, 24]
    assert scaled_channels("m", (16, 32), [0.75, 0.001], "stage") == [16, 8]
    assert scaled_channels("m", (4, 5), None, "stage") == [4, 5]


@every_model
def test_cost_grows_with_each_part(name: str) -> None:
    x = torch.empty(1, *models.input_shape(name), device="meta")
    parts = models.width_parts(name)

    def flops(widths: list[float] | None) -> float:
        with torch.device("meta"):
            return unflip.cost(models.create(name, "autobnn", widths=widths), x).flops

    plain = flops(None)
    assert flops([1] * parts) == plain
    for i in range(parts):
        assert flops([2 if i == j else 1 for j in range(parts)]) > plain
    # Twice the channels: four times a binary convolution, twice the stem and at most twice the rest.
    assert 2 * plain <= flops([2] * parts) <= 4 * plain


@every_model
@pytest.mark.parametrize(
    "wrong",
    [[1], [1] * 9, "1,1,1", 2, [1, 0, 1, 1, 1, 1], [-1] * 9, [True] * 3, [math.nan] * 6, ["1"] * 4],
    ids=str,
)
def test_bad_widths_are_refused_by_name(name: str, wrong: Any) -> None:
    count = models.width_parts(name)
    wrong = wrong[:count] if isinstance(wrong, list) and 0 in wrong else wrong
    with pytest.raises(ValueError, match=rf"{name}: widths=.* should be {count} numbers > 0"):
        models.create(name, widths=wrong)


def test_alexnet_has_no_widths() -> None:
    assert models.width_parts("alexnet") == 0
    with pytest.raises(ValueError, match="unknown option of model 'alexnet' 'widths'"):
        models.create("alexnet", widths=[1])


def test_a_list_in_a_recipe() -> None:
    recipe = load_recipe("digits-dorefa", ["model.widths=[2, 0.5, 1]"])
    assert channels(build_model(recipe, load("digits").spec, seed=0)) == [32, 16, 64]
