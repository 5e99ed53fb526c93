"""The emulator of a warp: what it computes, and that it does not let mistakes pass.

Every mistake is a kernel of a few lines that a device would punish, or that would be right by luck there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

# in: 64 numbers, that may be read only; out: as many.
SOURCE = """
SHARED_MEMORY(unsigned char, bytes);

#define KERNEL(name, ...)                                                          \\
  static void name##_kernel(const float* in, float* out) { __VA_ARGS__ }           \\
  extern "C" const char* name(emulator::Launch& launch) {                          \\
    return emulator::emulate(name##_kernel, 64, launch);                           \\
  }

static float2* pairs(const void* at) { return (float2*)at; }
static float* numbers() { return (float*)bytes; }
static void sum_of_a_warp() {
  float sum[4] = {};
  const unsigned a[4] = {};
  mma(sum, a, 0, 0);
}

KERNEL(reverses, {
  numbers()[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = numbers()[63 - threadIdx.x];
})
KERNEL(copies, {
  if (threadIdx.x < 16) copy_async(shared_address(bytes + threadIdx.x * 16), in + threadIdx.x * 4, threadIdx.x % 2);
  wait_for_copies();
  __syncthreads();
  out[threadIdx.x] = numbers()[threadIdx.x];
})

KERNEL(lacks_a_barrier, {
  numbers()[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = numbers()[63 - threadIdx.x];
})
KERNEL(does_not_wait, { copy_async(shared_address(bytes), in, true); })
KERNEL(waits_for_itself_only, {
  if (threadIdx.x < 16) copy_async(shared_address(bytes + threadIdx.x * 16), in + threadIdx.x * 4, true);
  wait_for_copies();
  out[threadIdx.x] = numbers()[threadIdx.x];
})
KERNEL(leaves_others_waiting, { if (threadIdx.x < 63) __syncthreads(); })
KERNEL(meets_nobody, { threadIdx.x % 2 ? __syncthreads() : sum_of_a_warp(); })
KERNEL(reads_past_the_end, { *pairs(out) = pairs(in)[32]; })
KERNEL(reads_before_the_begin, { *pairs(out) = pairs(in)[-1]; })
KERNEL(reads_between_pairs, { *pairs(out) = *pairs(in + 1); })
KERNEL(writes_past_the_end, { pairs(out)[32] = float2{1, 2}; })
KERNEL(writes_its_input, { *pairs(in) = float2{1, 2}; })
KERNEL(writes_past_shared_memory, { pairs(bytes)[128] = float2{1, 2}; })
KERNEL(writes_a_byte_past_shared_memory, { bytes[1024] = 1; })
KERNEL(writes_a_byte_before_shared_memory, { bytes[-1] = 1; })
KERNEL(copies_from_outside, { copy_async(shared_address(bytes), in + 64, true); wait_for_copies(); })
KERNEL(copies_between_pieces, { copy_async(shared_address(bytes + 8), in, true); wait_for_copies(); })
KERNEL(loads_a_matrix_from_outside, {
  unsigned words[4];
  ldmatrix_x4_trans(words, shared_address(bytes + 1024));
})
"""
MISTAKES = {
    "does_not_wait": "a copy that nobody waited for",
    "leaves_others_waiting": "a thread has ended|wait for each other",
    "meets_nobody": "wait for each other in different instructions",
    "reads_past_the_end": "outside the arguments",
    "reads_before_the_begin": "outside the arguments",
    "reads_between_pairs": "global memory is not aligned",
    "writes_past_the_end": "outside the arguments",
    "writes_its_input": "a const argument is written to",
    "writes_past_shared_memory": "outside shared memory",
    "writes_a_byte_past_shared_memory": "a write outside shared memory",
    "writes_a_byte_before_shared_memory": "a write outside shared memory",
    "copies_from_outside": "outside the arguments",
    "copies_between_pieces": "shared memory is not aligned",
    "loads_a_matrix_from_outside": "outside shared memory",
}
Compile = Callable[[str], Callable[..., Any]]


def run(emulated: Compile, name: str, **how: bool) -> torch.Tensor:
    out = torch.zeros(64)
    emulated(SOURCE)(name, (1, 1, 1), 64, 1024, [torch.arange(64.0), out], **how)
    return out


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("late_copies", [False, True])
def test_what_is_right_passes(emulated: Compile, late_copies: bool, backwards: bool) -> None:
    how = {"late_copies": late_copies, "backwards": backwards}
    numbers = torch.arange(64.0)
    assert torch.equal(run(emulated, "reverses", **how), numbers.flip(0))
    assert torch.equal(run(emulated, "copies", **how), numbers * (numbers // 4 % 2))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_a_name(emulated: Compile, name: str) -> None:
    with pytest.raises(AssertionError, match=MISTAKES[name]):
        run(emulated, name)


@pytest.mark.parametrize("name", ["lacks_a_barrier", "waits_for_itself_only"])
def test_what_is_not_there_yet_is_nan(emulated: Compile, name: str) -> None:
    """In one order at least: in the other, it may be there by luck."""
    found = [run(emulated, name, backwards=backwards).isnan().any() for backwards in (False, True)]
    assert any(found)


def test_a_launch_of_another_size_is_refused(emulated: Compile) -> None:
    tensors = [torch.zeros(64), torch.zeros(64)]
    with pytest.raises(AssertionError, match="another size"):
        emulated(SOURCE)("reverses", (1, 1, 1), 32, 1024, tensors)
    with pytest.raises(AssertionError, match="more shared memory"):
        emulated(SOURCE)("reverses", (1, 1, 1), 64, 1 << 20, tensors)


HALVES = """
#define OF_EACH(name, ...)                                                           \\
  static void name##_kernel(const unsigned* a, const unsigned* b, unsigned* out) {   \\
    const unsigned i = blockIdx.x * 32 + threadIdx.x;                                \\
    out[i] = __VA_ARGS__;                                                            \\
  }                                                                                  \\
  extern "C" const char* name(emulator::Launch& launch) {                            \\
    return emulator::emulate(name##_kernel, 32, launch);                             \\
  }
OF_EACH(sum, add_halves(a[i], b[i]))
OF_EACH(product, multiply_add_saturated(a[i], b[i], a[i]))
OF_EACH(above, ones_above(a[i], b[i]))
OF_EACH(at_most, mask_at_most(a[i], b[i]))
"""


def test_halves(emulated: Compile) -> None:
    """All of them, and any other, against torch; sums and products are rounded once."""
    a = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    b = a[torch.randperm(len(a))]

    def found(name: str) -> torch.Tensor:
        out = torch.empty_like(a)
        emulated(HALVES)(name, (2**10, 1, 1), 32, 0, [a, b, out])
        return out

    c, d = a.double(), b.double()
    torch.testing.assert_close(found("sum"), (c + d).half(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found("product"), (c * d + c).nan_to_num(0, 2, -1).clamp(0, 1).half())
    assert torch.equal(found("above"), (a > b).half())
    assert torch.equal(found("at_most").view(torch.int16), -(a <= b).short())
