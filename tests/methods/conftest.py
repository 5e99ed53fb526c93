"""What the tests of the methods share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_seed_and_one_thread() -> Iterator[None]:
    """The tensors here are tiny: threads would only wait for each other."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
