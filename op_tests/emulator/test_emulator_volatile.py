"""Volatile accesses order nothing: data exchanged through them races, a flag that is waited for and fenced does not."""

from __future__ import annotations

import pytest
import torch

from hipforge import emulator
from hipforge.errors import EmulatorFault

SOURCE = r"""
#include "hip.h"

// --- waves of a group, through LDS
extern "C" __global__ void lds_data(int* y, int barrier) {
  __shared__ volatile int slots[128];
  slots[threadIdx.x] = 1;
  __syncthreads();
  slots[threadIdx.x] = threadIdx.x;
  if (barrier) __syncthreads();
  y[threadIdx.x] = slots[threadIdx.x ^ 64];
}
extern "C" __global__ void lds_data_in_a_loop(int* y, int barrier) {
  __shared__ volatile int slots[128];
  slots[threadIdx.x] = 1;
  __syncthreads();
  slots[threadIdx.x] = threadIdx.x;
  if (barrier) __syncthreads();
  int sum = 0;
#pragma nounroll
  for (int i = 0; i < 3; ++i) sum += slots[threadIdx.x ^ 64];
  y[threadIdx.x] = sum / 3;
}
// Wave 1 leaves data and raises a volatile flag, with a fence between them or without.
extern "C" __global__ void lds_flag(int* y, int fence) {
  __shared__ int data[64];
  __shared__ volatile int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x >= 64) {
    data[threadIdx.x - 64] = threadIdx.x;
    if (fence) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    else asm volatile("" : : : "memory");
    if (threadIdx.x == 64) flag = 1;
  } else {
    while (flag == 0) {}
    if (fence) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    y[threadIdx.x] = data[threadIdx.x];
  }
}

// --- groups, through global memory
extern "C" __global__ void global_data(int* y, int* shared) {
  volatile int* v = shared;
  v[blockIdx.x] = blockIdx.x + 1;
  y[blockIdx.x] = v[blockIdx.x ^ 1];
}
extern "C" __global__ void counter_looked_at(int* y, int* shared) {
  atomicAdd(shared, 1);
  y[blockIdx.x] = *(volatile int*)shared;
}
extern "C" __global__ void system_scope_acquire(int* y, int* shared) {
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) __hip_atomic_store(shared, 1, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
  } else if (__hip_atomic_load(shared, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM) == 1) {
    y[threadIdx.x] = 1;
  }
}
// A volatile flag; the data plain and fenced (0), plain only (1), volatile (2), volatile and read too early (3).
extern "C" __global__ void global_flag(int* y, int* shared, int how) {
  volatile int* flag = shared + 64;
  volatile int* v = shared;
  const int i = threadIdx.x;
  if (blockIdx.x == 0) {
    if (how < 2) shared[i] = i;
    else v[i] = i;
    if (how == 0) __threadfence();
    else asm volatile("" : : : "memory");
    if (i == 0) *flag = 1;
  } else {
    if (how == 3) y[i] = v[i];
    while (*flag == 0) {}
    if (how == 0) __threadfence();
    else asm volatile("" : : : "memory");
    y[i] = how < 2 ? shared[i] : v[i];
  }
}
"""


ARCHITECTURES = ("gfx950", "gfx942")


def ints(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


def run(code: emulator.CodeObject, name: str, grid: int, order: str, *args: object) -> list[int]:
    y = ints(128)
    options = {"arch": code.arch, "wave_order": order, "checks": "all", "check_global_races": grid > 1}
    with emulator.options(**options):
        emulator.launch(code.kernels[name], grid, 64 if grid > 1 else 128, [y, *args])
    return y.tolist()


ORDERS = pytest.mark.parametrize("order", ["forward", "reverse"])


@ORDERS
@pytest.mark.parametrize("name", ["lds_data", "lds_data_in_a_loop"])
def test_volatile_data_in_lds_needs_a_barrier(code: emulator.CodeObject, name: str, order: str) -> None:
    assert run(code, name, 1, order, 1) == [i ^ 64 for i in range(128)]
    with pytest.raises(EmulatorFault, match="LDS race"):
        run(code, name, 1, order, 0)


@ORDERS
def test_a_volatile_flag_in_lds_needs_a_fence(code: emulator.CodeObject, order: str) -> None:
    assert run(code, "lds_flag", 1, order, 1)[:64] == list(range(64, 128))
    with pytest.raises(EmulatorFault, match=r"LDS race|before wave 1 has waited"):
        run(code, "lds_flag", 1, order, 0)


@ORDERS
def test_volatile_data_of_groups_races(code: emulator.CodeObject, order: str) -> None:
    with pytest.raises(
        EmulatorFault, match=r"global race .*this (volatile read|write) and a (read|write) by work-group"
    ):
        run(code, "global_data", 2, order, ints(2))


@ORDERS
def test_a_counter_may_be_looked_at(code: emulator.CodeObject, order: str) -> None:
    run(code, "counter_looked_at", 3, order, ints(1))


@ORDERS
def test_an_acquire_at_system_scope_is_no_volatile_read(code: emulator.CodeObject, order: str) -> None:
    assert run(code, "system_scope_acquire", 2, order, ints(1))[0] == (order == "forward")


@ORDERS
def test_a_volatile_flag_between_groups_orders_what_is_fenced_or_goes_past_the_caches(
    code: emulator.CodeObject, order: str
) -> None:
    assert run(code, "global_flag", 2, order, ints(65), 0)[:64] == list(range(64))
    assert run(code, "global_flag", 2, order, ints(65), 2)[:64] == list(range(64))
    with pytest.raises(EmulatorFault, match="global race"):
        run(code, "global_flag", 2, order, ints(65), 1)
    with pytest.raises(EmulatorFault, match=r"global race .*(volatile read|read by work-group)"):
        run(code, "global_flag", 2, order, ints(65), 3)
