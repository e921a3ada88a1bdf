"""Races between work-groups: what a counter or a flag in global memory orders, and which fence each order needs."""

from __future__ import annotations

import re

import pytest
import torch

from hipforge import emulator
from hipforge.cli.profile_subjects import SUBJECTS
from hipforge.errors import EmulatorFault

SOURCE = r"""
#include "hip.h"
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define WORKGROUP __HIP_MEMORY_SCOPE_WORKGROUP

enum Omit { kNothing, kCounter, kRelease, kWriteBack, kBarrier, kAcquire };

// Every work-group leaves 128 partial sums; the last one adds those of all.
template <int omit>
__device__ void last_group(int* out, int* partial, int* counter) {
  __shared__ bool last;
  partial[blockIdx.x * 128 + threadIdx.x] = blockIdx.x + threadIdx.x;
  if (omit != kBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    if (omit == kWriteBack) asm volatile("s_waitcnt vmcnt(0)" : : : "memory");
    else if (omit != kRelease) __threadfence();
    last = omit == kCounter ? blockIdx.x == gridDim.x - 1 : atomicAdd(counter, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  if (omit != kAcquire) __threadfence();
  int sum = 0;
  for (int g = 0; g < gridDim.x; ++g) sum += partial[g * 128 + threadIdx.x];
  out[threadIdx.x] = sum;
}
#define LAST(name, omit) \
  extern "C" __global__ void name(int* out, int* partial, int* counter) { last_group<omit>(out, partial, counter); }
LAST(complete, kNothing)
LAST(no_counter, kCounter)
LAST(no_release, kRelease)
LAST(no_write_back, kWriteBack)
LAST(no_barrier, kBarrier)
LAST(no_acquire, kAcquire)

extern "C" __global__ void every_wave_fences(int* out, int* partial, int* counter) {
  __shared__ bool last;
  partial[blockIdx.x * 128 + threadIdx.x] = blockIdx.x + threadIdx.x;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(counter, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  int sum = 0;
  for (int g = 0; g < gridDim.x; ++g) sum += partial[g * 128 + threadIdx.x];
  out[threadIdx.x] = sum;
}
// The waves of the group tell each other through LDS.
extern "C" __global__ void told_through_lds(int* out, int* partial, int* counter) {
  __shared__ int stored;
  if (threadIdx.x == 0) stored = 0;
  __syncthreads();
  partial[blockIdx.x * 128 + threadIdx.x] = blockIdx.x + threadIdx.x;
  if (threadIdx.x >= 64) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    if (threadIdx.x == 64) __hip_atomic_fetch_add(&stored, 1, __ATOMIC_RELAXED, WORKGROUP);
    return;
  }
  while (!__hip_atomic_load(&stored, __ATOMIC_RELAXED, WORKGROUP)) {}
  __threadfence();
  int ticket = 0;
  if (threadIdx.x == 0) ticket = atomicAdd(counter, 1);
  if (__builtin_amdgcn_readfirstlane(ticket) != gridDim.x - 1) return;
  __threadfence();
  for (int half = 0; half < 128; half += 64) {
    int sum = 0;
    for (int g = 0; g < gridDim.x; ++g) sum += partial[g * 128 + half + threadIdx.x];
    out[half + threadIdx.x] = sum;
  }
}
extern "C" __global__ void language_orders(int* out, int* partial, int* counter) {
  if (threadIdx.x) return;
  partial[blockIdx.x] = blockIdx.x;
  if (__hip_atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL, AGENT) == gridDim.x - 1) {
    int sum = 0;
    for (int g = 0; g < gridDim.x; ++g) sum += partial[g];
    out[0] = sum;
  }
}
extern "C" __global__ void relaxed(int* out, int* partial, int* counter) {
  if (threadIdx.x) return;
  partial[blockIdx.x] = blockIdx.x;
  if (__hip_atomic_fetch_add(counter, 1, __ATOMIC_RELAXED, AGENT) == gridDim.x - 1) {
    int sum = 0;
    for (int g = 0; g < gridDim.x; ++g) sum += partial[g];
    out[0] = sum;
  }
}
// A chain: each group adds to what the one before left and sets a flag of its own; the last also reads the first's.
extern "C" __global__ void chain(int* out, int* partial, int* flags) {
  if (threadIdx.x) return;
  const int g = blockIdx.x;
  int before = 0;
  if (g) {
    while (!__hip_atomic_load(&flags[g - 1], __ATOMIC_ACQUIRE, AGENT)) {}
    before = partial[g - 1];
  }
  partial[g] = before + g;
  if (g == gridDim.x - 1) out[0] = partial[0] + partial[g];
  __hip_atomic_store(&flags[g], 1, __ATOMIC_RELEASE, AGENT);
}
// The flag is a plain store.
extern "C" __global__ void plain_flag(int* out, int* partial, int* flags) {
  if (threadIdx.x) return;
  if (blockIdx.x && !flags[blockIdx.x - 1]) out[0] = -1;
  flags[blockIdx.x] = 1;
}
// Sums made by atomics, read by the last group.
extern "C" __global__ void sums_by_atomics(int* out, int* partial, int* counter) {
  atomicAdd(&partial[threadIdx.x], blockIdx.x);
  __syncthreads();
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(counter, 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (last) out[threadIdx.x] = partial[threadIdx.x];
}
extern "C" __global__ void sums_read_at_once(int* out, int* partial, int* counter) {
  atomicAdd(&partial[threadIdx.x], blockIdx.x);
  if (blockIdx.x == gridDim.x - 1) out[threadIdx.x] = partial[threadIdx.x];
}
// The last group overwrites what all have read.
extern "C" __global__ void overwrite(int* out, int* partial, int* counter) {
  if (threadIdx.x) return;
  out[1 + blockIdx.x] = partial[0];
  if (__hip_atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL, AGENT) == gridDim.x - 1) partial[0] = 9;
}
extern "C" __global__ void overwrite_unordered(int* out, int* partial, int* counter) {
  if (threadIdx.x) return;
  out[1 + blockIdx.x] = partial[0];
  if (blockIdx.x == gridDim.x - 1) partial[0] = 9;
}
extern "C" __global__ void own_value(int* out, int* partial, int* counter) { partial[0] = blockIdx.x; }
extern "C" __global__ void same_value(int* out, int* partial, int* counter) { partial[threadIdx.x] = 7; }
extern "C" __global__ void one_byte_each(int* out, int* partial, int* counter) {
  if (threadIdx.x == 0) reinterpret_cast<char*>(partial)[blockIdx.x] = blockIdx.x + 1;
}
"""

GROUPS = 6
RACE = (
    r"global race at 0x\w+ \(inside arg1 at offset \d+\): "
    r"this (read|write|atomic) and a (read|write) by work-group \d, wave \d, lane \d+ at pc 0x\w+ \((global_|s_load_)"
)


ARCHITECTURES = ("gfx950", "gfx942")


def launch(code: emulator.CodeObject, name: str, order: str = "forward", seed: int = 0) -> tuple[list[int], list[int]]:
    out, partial, counter = (torch.zeros(n, dtype=torch.int32) for n in (128, 128 * GROUPS, 64))
    settings = {"arch": code.arch, "wave_order": order, "seed": seed}
    with emulator.options(checks="memory", check_global_races=True, **settings):
        emulator.launch(code.kernels[name], GROUPS, 128, [out, partial, counter])
    return out.tolist(), partial.tolist()


ORDERS = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]
SUMS = [sum(g + item for g in range(GROUPS)) for item in range(128)]
TRIANGLE = sum(range(GROUPS))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("complete", SUMS),
        ("every_wave_fences", SUMS),
        ("told_through_lds", SUMS),
        ("language_orders", [TRIANGLE]),
        ("sums_by_atomics", [TRIANGLE] * 128),
    ],
)
def test_the_last_group_may_read_what_a_counter_covers(
    code: emulator.CodeObject, name: str, expected: list[int]
) -> None:
    for order in ORDERS:
        assert launch(code, name, *order)[0][: len(expected)] == expected


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_counter", "are not ordered\n"),
        ("no_release", r"did signal, but not after it had written back \(buffer_wbl2 sc1\) and waited for that write"),
        ("no_write_back", r"did signal, but not after it had written back"),
        ("no_barrier", r"did signal, but not after it had written back"),
        ("no_acquire", r"has been read, but no buffer_inv sc1 \(acquire fence\) has followed"),
        ("relaxed", r"did signal, but not after it had written back"),
        ("sums_read_at_once", "are not ordered\n"),
        ("overwrite_unordered", "are not ordered\n"),
        ("own_value", "this write and a write"),
    ],
)
def test_each_part_of_a_reduction_is_needed(code: emulator.CodeObject, name: str, reason: str) -> None:
    for order in ORDERS:
        with pytest.raises(EmulatorFault, match=RACE) as caught:
            launch(code, name, *order)
        assert re.search(reason, str(caught.value)), str(caught.value)


def test_flags_order_a_chain_of_groups(code: emulator.CodeObject) -> None:
    out, partial = launch(code, "chain")
    assert (out[0], partial[GROUPS - 1]) == (TRIANGLE, TRIANGLE)


def test_a_plain_store_is_no_flag(code: emulator.CodeObject) -> None:
    with pytest.raises(EmulatorFault, match=r"this read and a write by work-group 0, wave 0, lane 0"):
        launch(code, "plain_flag")


def test_a_write_after_reads_needs_their_order_too(code: emulator.CodeObject) -> None:
    for order in ORDERS:
        out, partial = launch(code, "overwrite", *order)
        assert (out[1 : 1 + GROUPS], partial[0]) == ([0] * GROUPS, 9)


def test_groups_may_store_the_same_value_and_neighbouring_bytes(code: emulator.CodeObject) -> None:
    for order in ORDERS:
        assert launch(code, "same_value", *order)[1][:128] == [7] * 128
        assert launch(code, "one_byte_each", *order)[1][0] == 0x04030201


SMALL = {
    "mxfp8_gemv": (2, 256, 1024),
    "grouped_gemm_mxfp8": (4, 256, 512, 4, 2),
    "grouped_mxfp8_linear": (4, 256, 512, 4, 2),
    "mxfp4_gemm": (4, 256, 512),
    "fp8_quant_tensorwise": (64, 256),
    "residual_rms": (4, 2048),
    "swiglu_fp8": (4, 1024),
    "skinny_gemm": (8, 256, 1024),
    "decode_attention_fp8": (2, 512, 1, 8, 128),
    "decode_attention_splitk": (2, 512, 1, 8, 128),
    "fused_moe_mxfp8": (4, 256, 512, 4, 2),
    "mxfp8_gemm": (80, 256, 512),
    "mxfp8_linear": (2, 256, 1024),
    "mxfp4_linear": (4, 256, 512),
    "quantize_mxfp4_linear": (4, 256, 512),
    "mxfp8_quantize": (4, 1024),
    "mxfp4_quantize": (4, 1024),
    "rms_norm": (4, 2048),
    "rms_norm_fp8": (4, 2048),
    "rms_norm_mxfp8": (4, 2048),
    "residual_rms_mxfp8": (4, 2048),
    "swiglu_mxfp8": (4, 1024),
    "router_gemm": (4, 32, 1024),
    "topk_gating": (4, 128, 8),
    "argmax": (3, 9000),
    "moe_align_block_size": (8, 32, 4),
    "moe_combine": (4, 1024, 4),
    "rope_and_cache": (4, 8, 1, 128),
    "sparse_block_scores": (2, 512, 4, 128),
    "sparse_topk_blocks": (2, 40960, 4),
}


@pytest.mark.parametrize("op", sorted(SUBJECTS))
def test_the_ops_are_free_of_races(op: str) -> None:
    call = SUBJECTS[op].call(*SMALL.get(op, SUBJECTS[op].example))
    for order in ("forward", "random"):
        with emulator.options(checks="all", check_global_races=True, wave_order=order, seed=1):
            assert call() is not None
