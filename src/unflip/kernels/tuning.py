"""Choosing by measuring: the fastest blocks of a Triton kernel, CUDA C++ or Triton, and how many programs to launch.

All three depend on ``networks``, the number of networks that train side by side on the device. It is an argument of
every function and part of every key, so networks that train in different numbers never share a choice. What was
measured is kept for the life of the process. This module imports no kernel.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = None

PROGRAMS_PER_SM = 4  # of the sign gradient: more programs are shorter, but leave more partial sums
MOST_STREAMS = 8  # of calls that are timed at the same time
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def available() -> bool:
    """Whether the kernels can run here: Triton and a CUDA device, or Triton's interpreter."""
    return triton is not None and (INTERPRETED or torch.cuda.is_available())


def triton_version() -> str | None:
    return None if triton is None else str(triton.__version__)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels take tensors of this device. The interpreter takes those of the CPU."""
    return INTERPRETED or device.type == "cuda"


# -------------------------------------------------------------------------------------------- blocks


def jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


class Tuned:
    """A Triton kernel whose blocks are tuned at the first call for each key and number of networks."""

    def __init__(self, kernel: Any, configs: list[Any], key: list[str], prune: Any = None) -> None:
        self.kernel, self.configs, self.key, self.prune = kernel, configs, key, prune
        self.tuners: dict[int, Any] = {}  # a memo: number of networks -> tuner

    def beside(self, networks: int) -> Any:
        """The kernel for one of ``networks`` networks that share the device. Launch it as ``[grid](...)``."""
        if networks not in self.tuners:
            self.tuners[networks] = triton.autotune(
                configs=self.configs[:1] if INTERPRETED else self.configs,  # which cannot tune
                key=self.key,
                prune_configs_by={"early_config_prune": self.prune},
                **_kept_on_disk(networks),
                do_bench=partial(_time, networks=networks),
            )(self.kernel)
        return self.tuners[networks]

    def chosen(self) -> dict[tuple[Any, ...], str]:
        """The blocks that tuning chose: (number of networks, *key) -> configuration."""
        if INTERPRETED:
            return {}
        return {
            (networks, *key): str(config)
            for networks, tuner in self.tuners.items()
            for key, config in tuner.cache.items()
        }


def _kept_on_disk(networks: int) -> dict[str, bool]:
    """Let Triton keep what it measured for the next process, if this version can.

    Its cache does not know the number of networks, so it holds one of them only.
    """
    can = "cache_results" in inspect.signature(triton.autotune).parameters
    return {"cache_results": True} if can and networks == 1 and not INTERPRETED else {}


def make_configs(names: Sequence[str], blocks: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Triton's configurations of blocks. Each block holds the named values, num_warps and num_stages."""
    if triton is None:
        return []
    return [
        triton.Config(dict(zip(names, values, strict=True)), num_warps=warps, num_stages=stages)
        for *values, warps, stages in blocks
    ]


def _time(call: Callable[[], object], quantiles: Sequence[float], networks: int) -> list[float]:
    """Milliseconds per call, with as many calls at once as networks train side by side.

    The device sleeps while calls queue up, otherwise the launches would be timed.
    """
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    branches = [torch.cuda.Stream() for _ in range(min(networks, MOST_STREAMS))]
    calls = 10 if len(branches) == 1 else 4
    times = []
    for _ in range(5):
        torch.cuda._sleep(1_000_000 * (1 + len(branches)))
        start.record()
        for branch in branches:
            branch.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(branch):
                for _ in range(calls):
                    call()
        for branch in branches:
            torch.cuda.current_stream().wait_stream(branch)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / (calls * len(branches)))
    # The minimum: other programs on this GPU only make a call slower.
    return [min(times)] * len(quantiles)


# ---------------------------------------------------------------------------------- CUDA C++ or Triton

Key = tuple[
    Any, ...
]  # the pass, the shapes, the kind of inputs, the device, and the number of networks last

# A memo: the number of rows with which the CUDA C++ kernel is the fastest, or 0 where Triton's kernel is.
chosen_rows: dict[Key, int] = {}


def rows_for(
    key: Key,
    choices: Sequence[int],
    by_cuda: Callable[[int], object],
    by_triton: Callable[[], object],
) -> int:
    """With which number of rows the CUDA C++ kernel is faster for ``key``, or 0. The first call times both.

    Raises the error of a CUDA C++ kernel that cannot be compiled or launched.
    """
    if key not in chosen_rows and not torch.cuda.is_current_stream_capturing():
        times = _times(choices, by_cuda, by_triton, networks=key[-1])
        stable = key[0] == "wgrad"  # compiled code depends on this choice
        chosen_rows[key] = _clearly_fastest(times) if stable else min(times, key=times.__getitem__)
    return chosen_rows.get(key, 0)


def _times(
    choices: Sequence[int],
    by_cuda: Callable[[int], object],
    by_triton: Callable[[], object],
    networks: int,
) -> dict[int, float]:
    """Milliseconds by the number of rows; 0 rows is Triton's kernel."""
    if not choices:
        return {0: 0.0}
    times = {rows: _time(partial(by_cuda, rows), [0.5], networks)[0] for rows in choices}
    return {**times, 0: _time(by_triton, [0.5], networks)[0]}


def _clearly_fastest(times: dict[int, float]) -> int:
    """The first choice that no other beats by 10 %. If noise decided, each process would have to compile again."""
    least = min(times.values())
    return next(rows for rows, time in times.items() if time <= least / 0.9)


def by_the_faster(
    key: Key,
    choices: Sequence[int],
    by_cuda: Callable[[int], object],
    by_triton: Callable[[], object],
) -> None:
    rows = rows_for(key, choices, by_cuda, by_triton)
    if rows:
        by_cuda(rows)
    else:
        by_triton()


def graph_choices(networks: int) -> list[tuple[Key, int]]:
    """The choices that compiled code depends on and that its graph does not show: the kernels of the sign gradient."""
    return sorted(
        (key, rows)
        for key, rows in chosen_rows.items()
        if key[0] == "wgrad" and key[-1] == networks
    )


# ------------------------------------------------------------------------------------------ programs


def power(count: int, most: int) -> int:
    """The smallest power of two that covers ``count``, between 16 and ``most``."""
    return min(most, max(16, 1 << (count - 1).bit_length()))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def filling(x: Tensor, per_processor: int, networks: int) -> int:
    """How many programs fill one network's share of the device."""
    return cdiv(per_processor * _processors(x), min(networks, PROGRAMS_PER_SM))


def _processors(x: Tensor) -> int:
    if x.device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count
