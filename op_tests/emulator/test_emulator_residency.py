"""Work-groups that wait for each other, waves in lock-step, and the turns that both depend on."""

from __future__ import annotations

import time

import pytest
import torch

from hipforge import emulator
from hipforge.emulator.configuration import Checks
from hipforge.errors import ConfigError, EmulatorFault

SOURCE = r"""
#include "hip.h"
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define WORKGROUP __HIP_MEMORY_SCOPE_WORKGROUP

__device__ inline void wait_for(int* flag, int value, bool nap) {
  while (__hip_atomic_load(flag, __ATOMIC_ACQUIRE, AGENT) != value)
    if (nap) __builtin_amdgcn_s_sleep(2);
}

// Each group adds to what its neighbour left: the next one (step 1), or the one before (step -1).
template <bool fence>
__device__ void chain(int* data, int* flags, int step, int nap) {
  const int b = blockIdx.x, other = b + step;
  int sum = b + threadIdx.x;
  if (other >= 0 && other < gridDim.x) {
    if (threadIdx.x == 0) {
      if (fence) wait_for(flags + other, 1, nap);
      else while (__hip_atomic_load(flags + other, __ATOMIC_RELAXED, AGENT) != 1) {}
    }
    __syncthreads();
    sum += data[other * 128 + threadIdx.x];
  }
  data[b * 128 + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) __hip_atomic_store(flags + b, 1, __ATOMIC_RELEASE, AGENT);
}
extern "C" __global__ void chained(int* data, int* flags, int step, int nap) { chain<true>(data, flags, step, nap); }
extern "C" __global__ void chained_without_acquire(int* data, int* flags, int step, int nap) {
  chain<false>(data, flags, step, nap);
}

// A barrier of the whole grid, twice; work between them is read across groups.
extern "C" __global__ void grid_barriers(int* data, int* arrived) {
  for (int turn = 0; turn < 2; ++turn) {
    data[turn * gridDim.x * 64 + blockIdx.x * 64 + threadIdx.x] =
        turn == 0 ? blockIdx.x : data[(blockIdx.x + 1) % gridDim.x * 64 + threadIdx.x];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      atomicAdd(arrived, 1);
      while (__hip_atomic_load(arrived, __ATOMIC_ACQUIRE, AGENT) < (turn + 1) * gridDim.x) {}
    }
    __syncthreads();
  }
}

// A lock of all groups, taken by exchange.
extern "C" __global__ void locked(int* total, int* lock, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    if (threadIdx.x == 0) while (__hip_atomic_exchange(lock, 1, __ATOMIC_ACQUIRE, AGENT)) {}
    __syncthreads();
    total[threadIdx.x] += 1;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) __hip_atomic_store(lock, 0, __ATOMIC_RELEASE, AGENT);
  }
}

// Every group waits for a flag that only the other one of its pair would set.
extern "C" __global__ void circle(int* flags) {
  if (threadIdx.x == 0) wait_for(flags + (blockIdx.x ^ 1), 1, false);
  __syncthreads();
  if (threadIdx.x == 0) __hip_atomic_store(flags + blockIdx.x, 1, __ATOMIC_RELEASE, AGENT);
}

// Two waves in step: each stores, executes 24 instructions and reads what the other one stored. No barrier.
extern "C" __global__ void in_step(int* y) {
  extern __shared__ int slots[];
  slots[threadIdx.x] = -1;
  int at = 4 * threadIdx.x, other = 4 * (threadIdx.x ^ 64), value;
  asm volatile("s_barrier\n ds_write_b32 %1, %3\n s_waitcnt lgkmcnt(0)\n .rept 24\n s_nop 0\n .endr\n"
               "ds_read_b32 %0, %2\n s_waitcnt lgkmcnt(0)"
               : "=v"(value) : "v"(at), "v"(other), "v"(threadIdx.x) : "memory");
  y[threadIdx.x] = value;
}

// Ordered by barriers and by a flag in LDS: right in every schedule.
extern "C" __global__ void ordered(int* y) {
  __shared__ int slots[256], flag;
  if (threadIdx.x == 0) flag = 0;
  slots[threadIdx.x] = threadIdx.x;
  __syncthreads();
  for (int width = 128; width > 0; width /= 2) {
    if (threadIdx.x < width) slots[threadIdx.x] += slots[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x < 64) {
    slots[64 + threadIdx.x] = 3 * threadIdx.x + slots[0];
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    if (threadIdx.x == 0) __hip_atomic_store(&flag, 1, __ATOMIC_RELEASE, WORKGROUP);
  } else if (threadIdx.x < 128) {
    while (__hip_atomic_load(&flag, __ATOMIC_ACQUIRE, WORKGROUP) == 0) {}
    y[threadIdx.x] = slots[threadIdx.x];
  }
}
"""


ARCHITECTURES = ("gfx950", "gfx942")


def ints(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


# --- groups that wait for groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize(("step", "nap"), [(1, 0), (-1, 1)])
def test_groups_may_wait_for_earlier_and_for_later_ones(
    code: emulator.CodeObject, step: int, nap: int, order: str, threads: int
) -> None:
    groups = 40
    data, flags = ints(groups * 128), ints(groups)
    with emulator.options(arch=code.arch, threads=threads, wave_order=order, seed=3):
        emulator.launch(code.kernels["chained"], groups, 128, [data, flags, step, nap])
    got = data.view(groups, 128)
    own = torch.arange(groups)[:, None] + torch.arange(128)
    want = own.cumsum(0) if step < 0 else own.flip(0).cumsum(0).flip(0)
    assert torch.equal(got.long(), want)


def test_waiting_groups_under_every_checker(code: emulator.CodeObject) -> None:
    for order in ("forward", "reverse"):
        options = {"arch": code.arch, "checks": "all", "check_global_races": True, "wave_order": order}
        with emulator.options(**options):
            emulator.launch(code.kernels["chained"], 12, 128, [ints(12 * 128), ints(12), 1, 0])
        with emulator.options(**options), pytest.raises(EmulatorFault, match=r"global race.*no buffer_inv sc1"):
            emulator.launch(code.kernels["chained_without_acquire"], 12, 128, [ints(12 * 128), ints(12), 1, 0])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_barrier_of_the_whole_grid(code: emulator.CodeObject, threads: int) -> None:
    groups = 24
    data = ints(2 * groups * 64)
    with emulator.options(arch=code.arch, threads=threads):
        emulator.launch(code.kernels["grid_barriers"], groups, 64, [data, ints(1)])
    assert data.view(2, groups, 64)[1, :, 0].tolist() == [*range(1, groups), 0]


def test_a_lock_that_all_groups_want(code: emulator.CodeObject) -> None:
    total = ints(64)
    with emulator.options(arch=code.arch, threads=2):
        emulator.launch(code.kernels["locked"], 16, 64, [total, ints(1), 20])
    assert total.tolist() == [320] * 64


@pytest.mark.parametrize("threads", [1, 2])
def test_a_deadlock_names_who_waits_for_what(code: emulator.CodeObject, threads: int) -> None:
    start = time.monotonic()
    with emulator.options(arch=code.arch, threads=threads), pytest.raises(EmulatorFault) as caught:
        emulator.launch(code.kernels["circle"], 2, 128, {"flags": ints(2)})
    text = str(caught.value)
    assert "of 2 work-groups 2 wait, 0 have ended, 0 have not started" in text
    assert "work-group (0, 0, 0)\n    wave 0: waits for 0x" in text
    assert "(inside flags at offset 4) to change from 0x00000000" in text
    assert "work-group (1, 0, 0)\n    wave 0: waits for 0x" in text
    assert "(inside flags at offset 0) to change" in text
    assert "wave 1: at a barrier that the other waves have not reached" in text
    assert time.monotonic() - start < 60


def test_no_more_groups_start_than_the_device_holds(code: emulator.CodeObject) -> None:
    with emulator.options(arch=code.arch, cu_count=1), pytest.raises(EmulatorFault) as caught:
        emulator.launch(code.kernels["grid_barriers"], 40, 64, [ints(2 * 40 * 64), ints(1)])
    text = "of 40 work-groups 32 wait, 0 have ended, 8 have not started (the device holds 32 at once)"
    assert text in str(caught.value)


# --- waves in turns ---------------------------------------------------------------------------------------------------


def stepped(code: emulator.CodeObject, checks: Checks = "memory", **options: object) -> bool:
    y = ints(128)
    with emulator.options(arch=code.arch, checks=checks, **options):
        emulator.launch(code.kernels["in_step"], 1, 128, [y], dynamic_lds=512)
    return y.tolist() == [i ^ 64 for i in range(128)]


def test_waves_in_lock_step_are_right_in_short_turns_only(code: emulator.CodeObject) -> None:
    for order in ("forward", "reverse"):
        assert stepped(code, wave_order=order)
        assert all(stepped(code, quantum=quantum, wave_order=order) for quantum in range(1, 17))
        assert not stepped(code, quantum=48, wave_order=order)


def test_what_lock_step_alone_orders_is_a_race(code: emulator.CodeObject) -> None:
    for quantum in (1, 16, 48):
        with pytest.raises(EmulatorFault, match=r"LDS race|reads LDS 0x\w+ before wave \d has waited"):
            stepped(code, quantum=quantum, checks="all")


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_ordered_kernels_do_not_see_the_turns(code: emulator.CodeObject, order: str) -> None:
    want = [0] * 64 + [3 * i + 32640 for i in range(64)] + [0] * 128
    for quantum in (1, 2, 3, 5, 8, 13, 16, 31, 48, 64):
        for seed in range(3 if order == "random" else 1):
            y = ints(256)
            with emulator.options(arch=code.arch, quantum=quantum, wave_order=order, seed=seed, checks="all"):
                emulator.launch(code.kernels["ordered"], 1, 256, [y])
            assert y.tolist() == want


@pytest.mark.parametrize("quantum", [0, -1, 4097, 1.5])
def test_turns_have_a_range(quantum: float) -> None:
    with pytest.raises(ConfigError, match="quantum"), emulator.options(quantum=quantum):
        pass
