"""In-place operations on views and copies that an example cannot tell apart."""

import pytest
import torch
from torch import nn

from unflip.packing import CannotPack, make_packed
from unflip.packing.reference import evaluate

COPIES = {
    "channels": lambda x: (x[:, ::2], x[:, ::2].flatten(1).relu_()),
    "another copy": lambda x: (x, x.to(torch.float32, copy=True).relu_()),
    "no copy": lambda x: (x, x.to(torch.float32).relu_()),
    "in C order": lambda x: (x, x.contiguous().relu_()),
    "a slice in C order": lambda x: (half := x[:, :3], half.contiguous().relu_()),
    "halves": lambda x: (x[:, :3], x[:, 3:].relu_()),
}


class Copies(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        first, last = self.function(x * 1.0)
        return torch.cat([first.flatten(1), last.flatten(1)], 1)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", COPIES)
def test_in_place_on_copies_that_the_example_does_not_tell_from_views(name, memory_format):
    """A ReLU does nothing to positive images."""
    model, x = Copies(COPIES[name]), torch.randn(2, 6, 4, 5)
    packed = make_packed(model, (x.abs() + 0.1).to(memory_format=memory_format))
    assert torch.allclose(evaluate(packed, x).flatten(1), model(x))


VIEWS = {
    "slices that overlap": lambda x: (x[:, 1:], x[:, :2].relu_()),
    "a slice of a vector": lambda x: (x, x.flatten(1)[:, :20].relu_()),
}


@pytest.mark.parametrize("name", VIEWS)
def test_in_place_on_views_is_refused_whatever_the_example(name):
    with pytest.raises(CannotPack, match="changes a tensor in place while another view"):
        make_packed(Copies(VIEWS[name]), torch.rand(2, 6, 4, 5) + 0.1)
