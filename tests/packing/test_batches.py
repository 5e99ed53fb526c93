"""A forward pass that depends on the batch size is refused, for every way to ask for it."""

import pytest
import torch
from torch import nn

import unflip
from unflip.packing import CannotPack, make_packed
from unflip.packing.batches import refuse_dependence


class Pooled(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.function = function

    def forward(self, x):
        return self.head(self.function(self.conv(self.stem(x)).mean((2, 3))))


def binary(function):
    return unflip.binarize(Pooled(function), "dorefa", quiet=True)


DEPENDENT = {
    "one or many": lambda x: x * 2 if x.shape[0] > 1 else x,
    "three or more": lambda x: x * 2 if len(x) > 2 else x,
    "size": lambda x: x / x.size(0),
    "length": lambda x: x * len(x),
    "an operation more": lambda x: x.relu() if len(x) == 1 else x,
}


@pytest.mark.parametrize("name", DEPENDENT)
@pytest.mark.parametrize("images", [1, 2, 5])
def test_dependence_is_refused(name, images):
    with pytest.raises(
        CannotPack, match=r"depends on the batch size: .* between a batch of [13] and a batch of 2"
    ):
        make_packed(binary(DEPENDENT[name]), torch.randn(images, 3, 9, 9))


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_an_example_of_one_value_hides_nothing(value):
    class Divided(nn.Module):
        def forward(self, x):
            return (x - value) / len(x)

    with pytest.raises(CannotPack, match="depends on the batch size"):
        make_packed(Divided(), torch.full((1, 3, 6, 6), value))


def test_a_batch_that_fails_is_dependence_too():
    with pytest.raises(CannotPack, match="batch size: it fails for a batch of 1"):
        make_packed(binary(lambda x: x.view(2, 8)), torch.randn(2, 3, 9, 9))


def test_numbers_in_another_shape_are_dependence():
    """The numbers of three images in two rows."""

    class Two(nn.Module):
        def forward(self, x):
            return (x * 2).view(2, -1)

    with pytest.raises(CannotPack, match="between a batch of 1 and a batch of 2"):
        make_packed(Two(), torch.randn(2, 3, 8, 8))


INDEPENDENT = {
    "view": lambda x: x.view(x.size(0), -1),
    "reshape": lambda x: x.reshape(len(x), 8),
    "squeeze": lambda x: x[:, :, None, None].squeeze(),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_sizes_that_only_say_the_shape(name):
    make_packed(binary(INDEPENDENT[name]), torch.randn(2, 3, 9, 9))


def test_what_rounding_makes_of_a_batch_is_no_dependence():
    """Answers that differ decide nothing where every batch makes the same network."""
    asked = []

    def alike(batch):
        asked.append(len(batch))
        return True

    shifted = torch.zeros(2, 4)
    refuse_dependence(binary(nn.Identity()).eval(), torch.randn(2, 3, 9, 9), shifted, alike)
    assert asked == [1, 3]
