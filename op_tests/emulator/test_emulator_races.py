"""LDS races: what orders two waves, and what only seems to. Ordered kernels are clean, broken ones are caught."""

from __future__ import annotations

import re

import pytest
import torch

from hipforge import emulator
from hipforge.errors import EmulatorFault

SOURCE = r"""
#include "hip.h"
#define WORKGROUP __HIP_MEMORY_SCOPE_WORKGROUP
#define WAIT_LDS "s_waitcnt lgkmcnt(0)\n"

// LDS of every kernel: 64 data words, then flags. Data is touched by these, whose waits nobody but the kernel places.
constexpr int kFlags = 64 * 4;
__device__ inline int lane() { return threadIdx.x % 64; }
__device__ inline void put(int at, int value) {
  asm volatile("ds_write_b32 %0, %1" : : "v"(at), "v"(value) : "memory");
}
__device__ inline int get(int at) {
  int v;
  asm volatile("ds_read_b32 %0, %1" : "=v"(v) : "v"(at) : "memory");
  return v;
}
__device__ inline void drain() { asm volatile(WAIT_LDS : : : "memory"); }
__device__ inline int arrived(int v) {  // the value of a get, after its wait
  asm volatile(WAIT_LDS : "+v"(v) : : "memory");
  return v;
}
extern __shared__ int lds[];
__device__ inline int* flag(int i) { return lds + 64 + i; }
__device__ inline void clear_flags(int count) {
  if (threadIdx.x < count) *flag(threadIdx.x) = 0;
  __syncthreads();
}
__device__ inline void advance(int i) {
  if (lane() == 0) __hip_atomic_fetch_add(flag(i), 1, __ATOMIC_RELAXED, WORKGROUP);
}
__device__ inline void set(int i, int value) {
  if (lane() == 0) __hip_atomic_store(flag(i), value, __ATOMIC_RELAXED, WORKGROUP);
}
__device__ inline void wait_for(int i, int value) {
  while (__hip_atomic_load(flag(i), __ATOMIC_RELAXED, WORKGROUP) < value) __builtin_amdgcn_s_sleep(1);
  asm volatile("" : : : "memory");
}
__device__ inline void wait_by_atomic(int i, int value) {
  while (__hip_atomic_fetch_or(flag(i), 0, __ATOMIC_RELAXED, WORKGROUP) < value) {}
  asm volatile("" : : : "memory");
}

// Wave 1 hands 64 words to wave 0, `turns` times, through two flags.
enum Omit { kNothing, kWaitEmpty, kDrainWrites, kWaitFull, kDrainReads };
template <int omit, bool plain, bool spin_by_atomic = false>
__device__ void queue(int* y, int turns) {
  clear_flags(2);
  int sum = 0;
  const auto wait = [](int i, int value) { spin_by_atomic ? wait_by_atomic(i, value) : wait_for(i, value); };
  const auto signal = [](int i, int value) { plain ? set(i, value) : advance(i); };
  if (threadIdx.x >= 64) {
    for (int i = 0; i < turns; ++i) {
      if (omit != kWaitEmpty) wait(1, i);
      put(4 * lane(), i * 100 + lane());
      if (omit != kDrainWrites) drain();
      signal(0, i + 1);
    }
  } else {
    for (int i = 0; i < turns; ++i) {
      if (omit != kWaitFull) wait(0, i + 1);
      int v = get(4 * lane());
      if (omit != kDrainReads) v = arrived(v);
      signal(1, i + 1);
      sum += arrived(v);
    }
    y[lane()] = sum;
  }
}
#define QUEUE(name, ...) extern "C" __global__ void name(int* y, int turns) { queue<__VA_ARGS__>(y, turns); }
#define QUEUES(kind, plain)                       \
  QUEUE(kind##_complete, kNothing, plain)         \
  QUEUE(kind##_no_wait_empty, kWaitEmpty, plain)  \
  QUEUE(kind##_no_drain_writes, kDrainWrites, plain) \
  QUEUE(kind##_no_wait_full, kWaitFull, plain)    \
  QUEUE(kind##_no_drain_reads, kDrainReads, plain)
QUEUES(atomic, false)
QUEUES(plain, true)
QUEUE(spin_by_atomic, kNothing, false, true)

// One flag that both sides set by plain stores: 1 full, 0 empty.
extern "C" __global__ void mailbox(int* y, int turns) {
  clear_flags(1);
  const auto wait_until = [](int value) {
    while (__hip_atomic_load(flag(0), __ATOMIC_RELAXED, WORKGROUP) != value) __builtin_amdgcn_s_sleep(1);
    asm volatile("" : : : "memory");
  };
  int sum = 0;
  for (int i = 0; i < turns; ++i) {
    const bool producer = threadIdx.x >= 64;
    wait_until(producer ? 0 : 1);
    if (producer) put(4 * lane(), i * 100 + lane());
    else sum += arrived(get(4 * lane()));
    drain();
    set(0, producer ? 1 : 0);
  }
  y[threadIdx.x] = sum;
}

// What the language's own orders compile to.
extern "C" __global__ void language_orders(int* y, int plain) {
  clear_flags(65);
  if (threadIdx.x >= 64) {
    lds[lane()] = threadIdx.x;
    if (plain) {
      __hip_atomic_store(flag(1 + lane()), 1, __ATOMIC_RELEASE, WORKGROUP);
    } else {
      __hip_atomic_fetch_add(flag(0), 1, __ATOMIC_RELEASE, WORKGROUP);
    }
  } else {
    if (plain)
      while (__hip_atomic_load(flag(1 + lane()), __ATOMIC_ACQUIRE, WORKGROUP) != 1) {}
    else
      while (__hip_atomic_load(flag(0), __ATOMIC_ACQUIRE, WORKGROUP) != 64) {}
    y[lane()] = lds[lane()];
  }
}
extern "C" __global__ void volatile_flag(int* y, int which) {
  clear_flags(4);
  volatile int* f = flag(0);
  if (threadIdx.x >= 64) {
    lds[lane()] = threadIdx.x;
    __threadfence_block();
    if (lane() == 0) f[which] = 1;
  } else {
    while (f[which] != 1) {}
    __threadfence_block();
    y[lane()] = lds[lane()];
  }
}

// Wave 0 -> wave 1 -> wave 2 through two flags. Wave 2 uses what both wrote; the wrong flag is wave 0's.
extern "C" __global__ void pipeline(int* y, int wrong_flag) {
  clear_flags(2);
  const int wave = threadIdx.x / 64;
  if (wave == 0) {
    put(4 * lane(), lane());
    drain();
    advance(0);
  } else if (wave == 1) {
    wait_for(0, 1);
    const int v = arrived(get(4 * lane()));
    put(4 * (lane() + 80), v + 1);
    drain();
    advance(1);
  } else {
    wait_for(wrong_flag ? 0 : 1, 1);
    const int a = get(4 * lane()), b = get(4 * (lane() + 80));
    y[lane()] = arrived(a) + arrived(b);
  }
}
// Wave 0 has seen wave 1's flag; the data is wave 2's.
extern "C" __global__ void flag_of_another(int* y, int both) {
  clear_flags(2);
  const int wave = threadIdx.x / 64;
  if (wave == 2) {
    put(4 * lane(), lane());
    drain();
    advance(1);
  } else if (wave == 1) {
    drain();
    advance(0);
  } else {
    wait_for(0, 1);
    if (both) wait_for(1, 1);
    y[lane()] = arrived(get(4 * lane()));
  }
}
// Four waves leave a partial result; the last to take a ticket adds them.
template <bool complete>
__device__ void last_wave_adds(int* y) {
  clear_flags(1);
  const int wave = threadIdx.x / 64;
  if (lane() == 0) {
    put(4 * wave, wave + 1);
    if (complete) drain();
    if (__hip_atomic_fetch_add(flag(0), 1, __ATOMIC_RELAXED, WORKGROUP) == 3) {
      int sum = 0;
      for (int i = 0; i < 4; ++i) sum += arrived(get(4 * i));
      y[0] = sum;
    }
  }
}
extern "C" __global__ void last_wave(int* y) { last_wave_adds<true>(y); }
extern "C" __global__ void last_wave_no_drain(int* y) { last_wave_adds<false>(y); }

extern "C" __global__ void lock(int* y, int locked) {
  clear_flags(1);
  if (threadIdx.x == 0) lds[0] = 0;
  __syncthreads();
  if (lane() == 0) {
    for (int i = 0; i < 5; ++i) {
      int free;
      do {
        free = 0;
      } while (locked && !__hip_atomic_compare_exchange_strong(flag(0), &free, 1, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED,
                                                               WORKGROUP));
      put(0, arrived(get(0)) + 3);
      drain();
      if (locked) __hip_atomic_store(flag(0), 0, __ATOMIC_RELEASE, WORKGROUP);
    }
  }
  __syncthreads();
  y[threadIdx.x] = lds[0];
}
#define SPIN "v_cmp_ne_u32 vcc, 1, %0\n s_cbranch_vccnz 1b\n"
// The value is read before anybody waited for the flag that permits it.
extern "C" __global__ void early_read(int* y, int early) {
  clear_flags(1);
  if (threadIdx.x >= 64) {
    put(4 * lane(), lane());
    drain();
    advance(0);
  } else {
    int f, v;
    if (early)
      asm volatile("1: ds_read_b32 %0, %2\n ds_read_b32 %1, %3\n" WAIT_LDS SPIN
                   : "=&v"(f), "=&v"(v) : "v"(kFlags), "v"(4 * lane()) : "vcc", "memory");
    else
      asm volatile("1: ds_read_b32 %0, %2\n" WAIT_LDS SPIN "ds_read_b32 %1, %3\n" WAIT_LDS
                   : "=&v"(f), "=&v"(v) : "v"(kFlags), "v"(4 * lane()) : "vcc", "memory");
    y[lane()] = v;
  }
}
// Loaded by DMA, announced by a flag.
template <bool wait>
__device__ void dma_queue(int* y, const int* x) {
  clear_flags(1);
  if (threadIdx.x >= 64) {
    asm volatile("s_mov_b32 m0, 0\n s_nop 0\n global_load_lds_dword %0, %1"
                 : : "v"(4 * lane()), "s"(x) : "memory", "m0");
    if (wait) asm volatile("s_waitcnt vmcnt(0)" : : : "memory");
    drain();
    advance(0);
  } else {
    wait_for(0, 1);
    y[lane()] = arrived(get(4 * lane()));
  }
}
extern "C" __global__ void dma_flag(int* y, const int* x) { dma_queue<true>(y, x); }
extern "C" __global__ void dma_flag_no_wait(int* y, const int* x) { dma_queue<false>(y, x); }

// Waves 0, 1 and 2 read a word; wave 3 overwrites it after the first `known` of them have said so.
extern "C" __global__ void readers(int* y, int known) {
  clear_flags(3);
  if (threadIdx.x < 64) lds[lane()] = 1;
  __syncthreads();
  const int wave = threadIdx.x / 64;
  if (wave < 3) {
    const int v = arrived(get(4 * lane()));
    advance(wave);
    y[threadIdx.x] = v;
  } else {
    for (int i = 0; i < known; ++i) wait_for(i, 1);
    put(4 * lane(), 7);
  }
}
template <bool wait>
__device__ void read_before_barrier(int* y) {
  if (threadIdx.x < 64) lds[lane()] = 1;
  __syncthreads();
  int v = 0;
  if (threadIdx.x < 64) v = get(4 * lane());
  if (wait) v = arrived(v);
  asm volatile("s_barrier" : : : "memory");
  if (threadIdx.x >= 64) put(4 * lane(), 2);
  y[threadIdx.x] = arrived(v);
}
extern "C" __global__ void drained_read(int* y) { read_before_barrier<true>(y); }
extern "C" __global__ void undrained_read(int* y) { read_before_barrier<false>(y); }
// Waves 0 and 1 count; wave 2 resets the counter after the first `known` of them have said that they have counted.
extern "C" __global__ void reset_of_a_counter(int* y, int known) {
  clear_flags(3);
  const int wave = threadIdx.x / 64;
  if (wave < 2) {
    __hip_atomic_fetch_add(flag(2), 1, __ATOMIC_RELAXED, WORKGROUP);
    drain();
    advance(wave);
  } else {
    for (int i = 0; i < known; ++i) wait_for(i, 1);
    set(2, 0);
  }
  __syncthreads();
  y[threadIdx.x] = *flag(2);
}
// Every wave stores to the same words.
extern "C" __global__ void same_words(int* y, int factor, int barrier) {
  put(4 * lane(), 5 + factor * (threadIdx.x / 64));
  drain();
  if (barrier) __syncthreads();
  y[threadIdx.x] = arrived(get(4 * lane()));
}
// Wave 0 writes byte 0 of a word, wave 1 byte 1, then wave 1 reads byte `which`.
extern "C" __global__ void bytes(int* y, int which) {
  const int wave = threadIdx.x / 64;
  int v;
  asm volatile("ds_write_b8 %0, %1\n" WAIT_LDS : : "v"(4 * lane() + wave), "v"(wave + 1) : "memory");
  if (wave == 1) {
    asm volatile("ds_read_u8 %0, %1\n" WAIT_LDS : "=v"(v) : "v"(4 * lane() + which) : "memory");
    y[lane()] = v;
  }
}
"""

ORDERS = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2), ("random", 3)]
TURNS = 40
RACE = r"LDS race at 0x\w+: .*by wave \d, lane \d+ at pc 0x\w+ \(ds_"
UNDRAINED = r"wave \d did signal or reach a barrier, but without waiting for that {} before \(s_waitcnt {}\)"


ARCHITECTURES = ("gfx950", "gfx942")


def launch(
    code: emulator.CodeObject, name: str, waves: int, *args: object, checks: tuple[str, ...] = ("races",)
) -> dict[tuple[str, int], list[int] | str]:
    """Run a kernel in every order of waves; return what `y` became, or the fault's text."""
    found: dict[tuple[str, int], list[int] | str] = {}
    for order, seed in ORDERS:
        y = torch.full((64 * waves,), -1, dtype=torch.int32)
        chosen = {f"check_{check}": True for check in checks}
        settings = {"arch": code.arch, "wave_order": order, "seed": seed, "instruction_budget": 200_000}
        with emulator.options(checks="memory", **settings, **chosen):
            try:
                emulator.launch(code.kernels[name], 1, 64 * waves, [y, *args], dynamic_lds=1024)
                found[order, seed] = y.tolist()
            except EmulatorFault as fault:
                found[order, seed] = str(fault)
    return found


def assert_clean(results: dict[tuple[str, int], list[int] | str], expected: list[int]) -> None:
    for order, result in results.items():
        assert isinstance(result, list), f"{order}: {result}"
        assert result[: len(expected)] == expected, order


def assert_caught(results: dict[tuple[str, int], list[int] | str], *patterns: str) -> None:
    for order, result in results.items():
        assert isinstance(result, str), f"{order}: nothing was reported"
        assert any(re.search(pattern, result) for pattern in patterns), f"{order}: {result}"


ALL = ("races", "waits", "uninit")


def handed_over(lane: int) -> int:
    return sum(100 * i + lane for i in range(TURNS))


@pytest.mark.parametrize("name", ["atomic_complete", "plain_complete", "spin_by_atomic", "mailbox"])
def test_a_queue_ordered_by_flags_is_clean(code: emulator.CodeObject, name: str) -> None:
    assert_clean(launch(code, name, 2, TURNS, checks=ALL), [handed_over(lane) for lane in range(64)])


@pytest.mark.parametrize("kind", ["atomic", "plain"])
@pytest.mark.parametrize(
    ("omitted", "reason"),
    [
        ("no_wait_empty", RACE),
        ("no_drain_writes", UNDRAINED.format("write", "lgkmcnt")),
        ("no_wait_full", RACE),
        ("no_drain_reads", UNDRAINED.format("read", "lgkmcnt")),
    ],
)
def test_each_wait_of_a_queue_is_needed(code: emulator.CodeObject, kind: str, omitted: str, reason: str) -> None:
    assert_caught(launch(code, f"{kind}_{omitted}", 2, TURNS), reason)


@pytest.mark.parametrize("plain", [0, 1])
def test_the_orders_of_the_language_are_understood(code: emulator.CodeObject, plain: int) -> None:
    assert_clean(launch(code, "language_orders", 2, plain, checks=ALL), list(range(64, 128)))


def test_volatile_flags_through_flat_accesses(code: emulator.CodeObject) -> None:
    assert_clean(launch(code, "volatile_flag", 2, 2, checks=ALL), list(range(64, 128)))


def test_order_is_transitive_and_a_flag_orders_only_what_it_covers(code: emulator.CodeObject) -> None:
    assert_clean(launch(code, "pipeline", 3, 0, checks=ALL), [2 * lane + 1 for lane in range(64)])
    assert_caught(launch(code, "pipeline", 3, 1), RACE)
    assert_clean(launch(code, "flag_of_another", 3, 1, checks=ALL), list(range(64)))
    assert_caught(launch(code, "flag_of_another", 3, 0), RACE)


def test_a_returned_ticket_acquires(code: emulator.CodeObject) -> None:
    assert_clean(launch(code, "last_wave", 4, checks=ALL), [10])
    assert_caught(launch(code, "last_wave_no_drain", 4), UNDRAINED.format("write", "lgkmcnt"))


def test_a_lock_orders_its_owners(code: emulator.CodeObject) -> None:
    assert_clean(launch(code, "lock", 3, 1, checks=ALL), [45] * 192)
    assert_caught(launch(code, "lock", 3, 0), RACE)


def test_a_flag_counts_from_its_wait_on(code: emulator.CodeObject) -> None:
    assert_clean(launch(code, "early_read", 2, 0, checks=ALL), list(range(64)))
    assert_caught(launch(code, "early_read", 2, 1), RACE)


def test_dma_is_covered_by_vmcnt_only(code: emulator.CodeObject) -> None:
    x = torch.arange(64, dtype=torch.int32) * 3
    assert_clean(launch(code, "dma_flag", 2, x, checks=ALL), x.tolist())
    assert_caught(launch(code, "dma_flag_no_wait", 2, x), UNDRAINED.format("write", "vmcnt"))


def test_every_reader_must_be_known_to_a_writer(code: emulator.CodeObject) -> None:
    assert_clean(launch(code, "readers", 4, 3, checks=ALL), [1] * 192)
    caught = launch(code, "readers", 4, 2)
    assert_caught(caught, r"this write and a read by wave 2, lane 0", r"this read and a write by wave 3, lane 0")
    assert any("by wave 2" in text for text in caught.values()), "no order has the reads come first"


def test_every_atomic_must_be_known_to_a_plain_write(code: emulator.CodeObject) -> None:
    assert_clean(launch(code, "reset_of_a_counter", 3, 2, checks=ALL), [0] * 192)
    assert_caught(launch(code, "reset_of_a_counter", 3, 1), RACE)


def test_a_barrier_covers_what_was_waited_for(code: emulator.CodeObject) -> None:
    assert_clean(launch(code, "drained_read", 2, checks=ALL), [1] * 64)
    assert_caught(launch(code, "undrained_read", 2, checks=("races", "strict")), UNDRAINED.format("read", "lgkmcnt"))
    assert_clean(launch(code, "undrained_read", 2), [1] * 64)  # a race to the strict level only


def test_waves_may_store_the_same_value_but_readers_wait(code: emulator.CodeObject) -> None:
    assert_clean(launch(code, "same_words", 4, 0, 1, checks=ALL), [5] * 256)
    assert_caught(launch(code, "same_words", 4, 1, 1), RACE)
    assert_caught(launch(code, "same_words", 4, 0, 0), RACE)


def test_bytes_of_one_word_are_told_apart(code: emulator.CodeObject) -> None:
    assert_clean(launch(code, "bytes", 2, 1, checks=ALL), [2] * 64)
    assert_caught(launch(code, "bytes", 2, 0), RACE)
