"""Timing and choosing: which blocks of a Triton kernel are the fastest, whether CUDA C++ is faster still, and how many
programs fill the device.

All three depend on how many networks train at the same time. The kernels of ``norm`` and ``mapping_conv`` are made
with this as those of ``sign_conv`` are, so it is a module of its own, which imports none of them. What was chosen is
one state of the process: ``side_by_side``, ``chosen_rows`` and ``PROGRAMS_PER_SM`` are read and changed as attributes
of this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unflip.kernels.sign_conv import cuda_kernels as sign_conv_cuda

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    triton = None

PROGRAMS_PER_SM = 4  # of the sign gradient: more of them are shorter, but leave more partial sums
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# Networks that are trained at the same time: :func:`unflip.kernels.sign_conv.operator.share_device`.
side_by_side = 1


def available() -> bool:
    """Whether the kernels can run here: Triton and a CUDA device, or Triton's interpreter."""
    return triton is not None and (INTERPRETED or torch.cuda.is_available())


# -------------------------------------------------------------------------------------------- blocks


def jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


def tuned(configs: list[Any], key: list[str], prune: Any) -> Callable[[Any], Any]:
    if triton is None:
        return lambda kernel: kernel
    return triton.autotune(
        configs=configs[:1] if INTERPRETED else configs,  # the interpreter cannot tune
        key=key,
        prune_configs_by={"early_config_prune": prune},
        do_bench=_time,
    )


def _time(call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    """Milliseconds a call, with as many at once as networks train side by side. The device sleeps while calls queue
    up, or launching is what would be timed."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    branches = [torch.cuda.Stream() for _ in range(min(side_by_side, 8))]
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
    return [min(times)] * len(quantiles)  # others on this GPU make it longer, never shorter


# ---------------------------------------------------------------------------------- CUDA C++ or Triton

# The number of rows with which the CUDA C++ kernel is faster than Triton's, or 0, by what, shape and kind.
chosen_rows: dict[tuple[Any, ...], int] = {}


def rows_for(
    key: tuple[Any, ...],
    choices: Sequence[int],
    by_cuda: Callable[[int], object],
    by_triton: Callable[[], object],
) -> int:
    """With which number of rows the CUDA C++ kernel is faster for ``key``, or 0. The first call times both."""
    if key not in chosen_rows and not torch.cuda.is_current_stream_capturing():
        times = _times(choices, by_cuda, by_triton)
        stable = key[0] == "wgrad"  # whose choice compiled code depends on
        chosen_rows[key] = _clearly_fastest(times) if stable else min(times, key=times.__getitem__)
    return chosen_rows.get(key, 0) if sign_conv_cuda.enabled() else 0


def _times(
    choices: Sequence[int], by_cuda: Callable[[int], object], by_triton: Callable[[], object]
) -> dict[int, float]:
    """Milliseconds by the number of rows; 0 rows is Triton, and nothing else where that is all there is."""
    if not sign_conv_cuda.enabled() or not choices:
        return {0: 0.0}
    try:
        times = {rows: _time(partial(by_cuda, rows), [0.5])[0] for rows in choices}
    except Exception as error:
        sign_conv_cuda.switch_off(f"they failed: {str(error).strip() or type(error).__name__}")
        return {0: 0.0}
    return {**times, 0: _time(by_triton, [0.5])[0]}


def _clearly_fastest(times: dict[int, float]) -> int:
    """The first choice that no other beats by a tenth: what noise decides would be compiled anew each time."""
    least = min(times.values())
    return next(rows for rows, time in times.items() if time <= least / 0.9)


def by_the_faster(
    key: tuple[Any, ...],
    height: int,
    by_cuda: Callable[[int], object],
    by_triton: Callable[[], object],
) -> None:
    rows = rows_for(key, sign_conv_cuda.choices(height), by_cuda, by_triton)
    if rows:
        by_cuda(rows)
    else:
        by_triton()


def choices() -> str:
    """What was chosen here and is in no graph: how many networks train, and which kernels add up the sign gradient."""
    rows = sorted((key, rows) for key, rows in chosen_rows.items() if key[0] == "wgrad")
    return f"{side_by_side} {rows if sign_conv_cuda.enabled() else 'Triton'}"


# ------------------------------------------------------------------------------------------ programs


def power(count: int, most: int) -> int:
    """The smallest power of two that covers ``count``, between 16 and ``most``."""
    return min(most, max(16, 1 << (count - 1).bit_length()))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def filling(x: Tensor, per_processor: int) -> int:
    """How many programs fill the device, or this network's part of it: others do the rest."""
    return cdiv(per_processor * _processors(x), min(side_by_side, PROGRAMS_PER_SM))


def _processors(x: Tensor) -> int:
    if x.device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count
