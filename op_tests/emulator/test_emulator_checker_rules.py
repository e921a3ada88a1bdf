"""Rules of the checkers that hand-written kernels ask for: repeated loads, strictness, scratch, the register file."""

from __future__ import annotations

import pytest
import torch

from hipforge import emulator
from hipforge.emulator.configuration import Checks
from hipforge.errors import ConfigError, EmulatorFault

SOURCE = r"""
#include "hip.h"
#define AGENT __HIP_MEMORY_SCOPE_AGENT

// A scalar load issued twice into one register, from the same place or from another one.
extern "C" __global__ void loaded_twice(int* y, const int* x) {
  int a;
  asm volatile("s_load_dword s20, %1, 0\n s_load_dword s20, %1, 0\n s_waitcnt lgkmcnt(0)\n s_mov_b32 %0, s20"
               : "=s"(a) : "s"(x) : "s20", "memory");
  y[threadIdx.x] = a;
}
extern "C" __global__ void loaded_over(int* y, const int* x) {
  int a;
  asm volatile("s_load_dword s20, %1, 0\n s_load_dword s20, %1, 4\n s_waitcnt lgkmcnt(0)\n s_mov_b32 %0, s20"
               : "=s"(a) : "s"(x) : "s20", "memory");
  y[threadIdx.x] = a;
}

// Polls by a scalar load past its cache, as hand-written kernels do.
template <bool glc>
__device__ void scalar_poll(int* y, int* flag) {
  if (blockIdx.x == 0) {
    y[threadIdx.x] = threadIdx.x;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) __hip_atomic_store(flag, 1, __ATOMIC_RELEASE, AGENT);
  } else {
    if (glc)
      asm volatile("1: s_load_dword s20, %0, 0 glc\n s_waitcnt lgkmcnt(0)\n s_cmp_eq_u32 s20, 1\n s_cbranch_scc0 1b"
                   : : "s"(flag) : "s20", "scc", "memory");
    else
      asm volatile("1: s_load_dword s20, %0, 0\n s_waitcnt lgkmcnt(0)\n s_cmp_eq_u32 s20, 1\n s_cbranch_scc0 1b"
                   : : "s"(flag) : "s20", "scc", "memory");
    __threadfence();
    y[64 + threadIdx.x] = y[threadIdx.x];
  }
}
extern "C" __global__ void scalar_poll_glc(int* y, int* flag) { scalar_poll<true>(y, flag); }
extern "C" __global__ void scalar_poll_cached(int* y, int* flag) { scalar_poll<false>(y, flag); }

// A private array of which only `n` elements are written.
extern "C" __global__ void private_array(int* y, int n, int at) {
  volatile int local[32];
  for (int i = 0; i < n; ++i) local[i] = i;
  y[threadIdx.x] = local[(at + threadIdx.x / 64) % 32];
}
// Undefined values that pass through scratch unused.
extern "C" __global__ void spilled(int* y, int n) {
  volatile int local[32];
  for (int i = 0; i < n; ++i) local[i] = i;
  int kept = local[31];
  y[threadIdx.x] = n > 31 ? kept : local[0];
}

// Two races at different instructions.
extern "C" __global__ void two_races(int* y) {
  extern __shared__ int slots[];
  slots[threadIdx.x] = 0;
  __syncthreads();
  slots[threadIdx.x] = threadIdx.x;
  slots[threadIdx.x ^ 64] += 1;
  y[threadIdx.x] = slots[threadIdx.x ^ 65];
}
"""


def ints(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


def run(
    code: emulator.CodeObject, name: str, *args: object, block: int = 64, checks: Checks = "all", **options: object
) -> None:
    with emulator.options(checks=checks, **options):
        emulator.launch(code.kernels[name], 2 if "poll" in name else 1, block, list(args), dynamic_lds=512)


def test_the_same_scalar_load_again_is_no_hazard(code: emulator.CodeObject) -> None:
    y = ints(64)
    run(code, "loaded_twice", y, torch.tensor([5, 6], dtype=torch.int32))
    assert y.tolist() == [5] * 64
    with pytest.raises(EmulatorFault, match="overwrites s20 before s_waitcnt lgkmcnt"):
        run(code, "loaded_over", ints(64), torch.tensor([5, 6], dtype=torch.int32))


def test_scalar_loads_past_the_cache_poll(code: emulator.CodeObject) -> None:
    for order in ("forward", "reverse"):
        y = ints(128)
        run(code, "scalar_poll_glc", y, ints(1), check_global_races=True, wave_order=order)
        assert y[64:].tolist() == list(range(64))
    with pytest.raises(EmulatorFault, match="global race"):
        run(code, "scalar_poll_cached", ints(128), ints(1), check_global_races=True)


def test_scratch_that_was_never_written(code: emulator.CodeObject) -> None:
    y = ints(64)
    run(code, "private_array", y, 32, 31)
    assert y.tolist() == [31] * 64
    with pytest.raises(EmulatorFault, match=r"the stored value depends on v\d+, whose value comes from .*scratch"):
        run(code, "private_array", ints(64), 31, 31)
    run(code, "private_array", ints(64), 31, 31, checks="memory")
    run(code, "spilled", ints(64), 8)


def test_several_reports_one_per_instruction(code: emulator.CodeObject) -> None:
    with pytest.raises(EmulatorFault) as one:
        run(code, "two_races", ints(128), block=128)
    assert str(one.value).count("LDS race") == 1
    with pytest.raises(EmulatorFault) as several:
        run(code, "two_races", ints(128), block=128, max_reports=10)
    text = str(several.value)
    places = [line.split("pc ")[1].split(":")[0] for line in text.splitlines() if line.startswith("  kernel")]
    assert len(places) >= 2
    assert len(set(places)) == len(places)
    with pytest.raises(EmulatorFault) as stopped:
        run(code, "two_races", ints(128), block=128, max_reports=2)
    assert stopped.value.args[0].startswith("2 reports")


def test_max_reports_has_a_range() -> None:
    with pytest.raises(ConfigError, match="max_reports"), emulator.options(max_reports=0):
        pass
