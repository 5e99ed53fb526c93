"""PReLU on a CPU with a vectorized gradient, for models whose authors wrote ``nn.PReLU``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from unflip.kernels.attach import attached
from unflip.vectorized import prelu


@contextmanager
def vectorized(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, every ``nn.PReLU`` of the models has this gradient, except one whose forward was replaced."""
    with ExitStack() as scope:
        for module in (m for model in models for m in model.modules()):
            if type(module) is nn.PReLU and "forward" not in vars(module):
                scope.enter_context(attached([module], forward=partial(_forward, module)))
        yield


def _forward(module: nn.PReLU, x: Tensor) -> Tensor:
    return prelu(x, module.weight)
