"""What hardware would hide: every checker of the emulator has a kernel that violates it and one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hipforge import emulator
from hipforge.errors import EmulatorFault, LaunchError

SOURCE = r"""
#include "hip.h"
typedef int v4i __attribute__((ext_vector_type(4)));

extern "C" __global__ void copy(int* y, const int* x, int n, int shift) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i + shift];
}
extern "C" __global__ void scalar_read(int* y, const int* x, long shift) { if (threadIdx.x == 0) y[0] = x[shift]; }
extern "C" __global__ void add_one(int* y) { atomicAdd(y, 1); }
extern "C" __global__ void write_through(const int* x) { const_cast<int*>(x)[threadIdx.x] = 1; }

extern "C" __global__ void stack(int* y, int depth) {
  volatile int local[64];
  for (int i = 0; i < 64; ++i) local[i] = i;
  y[threadIdx.x] = local[(threadIdx.x + depth) % 64 + (depth > 1000 ? depth : 0)];
}
extern "C" __global__ void shared_out_of_bounds(int* y, int beyond) {
  extern __shared__ int data[];
  data[threadIdx.x + beyond] = 1;
  __syncthreads();
  y[threadIdx.x] = data[threadIdx.x];
}

// --- undefined values
extern "C" __global__ void undefined_store(int* y) {
  int v;
  asm volatile("v_add_u32 %0, 1, v200" : "=v"(v) : : "v200");
  y[threadIdx.x] = v;
}
extern "C" __global__ void undefined_address(int* y) {
  int v;
  asm volatile("v_lshlrev_b32 %0, 2, v200" : "=v"(v) : : "v200");
  asm volatile("global_store_dword %0, %1, %2" : : "v"(v), "v"(1), "s"(y));
}
extern "C" __global__ void undefined_compare(int* y) {
  int v;
  asm volatile("v_cmp_gt_u32 vcc, 5, v200\n v_cndmask_b32 %0, 1, 2, vcc" : "=v"(v) : : "v200", "vcc");
  y[threadIdx.x] = v;
}
extern "C" __global__ void undefined_branch(int* y) {
  asm volatile("s_mov_b64 vcc, s[70:71]\n s_cbranch_vccnz 0" : : : "vcc", "s70", "s71");
  y[threadIdx.x] = 1;
}
// Only the low byte of a mask is ever written.
extern "C" __global__ void mask_within_exec(int* y) {
  asm volatile("s_mov_b64 s[72:73], exec\n s_mov_b64 exec, 0xff\n s_or_b64 s[70:71], s[70:71], exec\n"
               "s_and_b64 vcc, exec, s[70:71]\n s_cbranch_vccz 0\n s_and_saveexec_b64 s[74:75], s[70:71]\n"
               "s_andn2_b64 s[76:77], exec, s[70:71]\n s_cselect_b64 vcc, s[76:77], s[76:77]\n s_cbranch_vccnz 0\n"
               "s_mov_b64 exec, s[72:73]"
               : : : "vcc", "scc", "s70", "s71", "s72", "s73", "s74", "s75", "s76", "s77");
  y[threadIdx.x] = 1;
}
extern "C" __global__ void mask_beyond_exec(int* y) {
  asm volatile("s_mov_b64 s[72:73], exec\n s_mov_b64 exec, 0xff\n s_or_b64 s[70:71], s[70:71], exec\n"
               "s_or_saveexec_b64 s[74:75], s[70:71]\n s_mov_b64 exec, s[72:73]"
               : : : "scc", "s70", "s71", "s72", "s73", "s74", "s75");
  y[threadIdx.x] = 1;
}
extern "C" __global__ void undefined_lds(int* y) {
  __shared__ int data[128];
  data[threadIdx.x] = threadIdx.x;
  __syncthreads();
  y[threadIdx.x] = data[threadIdx.x + 1];
}
extern "C" __global__ void undefined_but_unused(int* y) {
  int v;
  asm volatile("v_add_u32 %0, 1, v200\n v_mov_b32 %0, 7" : "=v"(v) : : "v200");
  y[threadIdx.x] = v;
}

// --- waits
extern "C" __global__ void missing_vmcnt(int* y, const int* x) {
  int v;
  asm volatile("global_load_dword %0, %1, %2\n v_add_u32 %0, 1, %0\n s_waitcnt vmcnt(0)"
               : "=&v"(v) : "v"(threadIdx.x * 4), "s"(x));
  y[threadIdx.x] = v;
}
extern "C" __global__ void counted_vmcnt(int* y, const int* x, int* z) {
  int a, b;
  asm volatile("global_load_dword %0, %2, %3\n global_load_dword %1, %2, %3 offset:4\n s_waitcnt vmcnt(1)\n"
               "v_add_u32 %0, 1, %0\n s_waitcnt vmcnt(0)"
               : "=&v"(a), "=&v"(b) : "v"(threadIdx.x * 4), "s"(x));
  y[threadIdx.x] = a;
  z[threadIdx.x] = b;
}
extern "C" __global__ void counted_too_loosely(int* y, const int* x, int* z) {
  int a, b;
  asm volatile("global_load_dword %0, %2, %3\n global_load_dword %1, %2, %3 offset:4\n s_waitcnt vmcnt(1)\n"
               "v_add_u32 %1, 1, %1\n s_waitcnt vmcnt(0)"
               : "=&v"(a), "=&v"(b) : "v"(threadIdx.x * 4), "s"(x));
  y[threadIdx.x] = a;
  z[threadIdx.x] = b;
}
extern "C" __global__ void missing_lgkmcnt(int* y) {
  __shared__ int data[64];
  data[threadIdx.x] = threadIdx.x;
  int v;
  asm volatile("ds_read_b32 %0, %1\n v_add_u32 %0, 1, %0\n s_waitcnt lgkmcnt(0)"
               : "=&v"(v) : "v"(threadIdx.x * 4) : "memory");
  y[threadIdx.x] = v + data[0];
}
extern "C" __global__ void missing_scalar_wait(int* y, const int* x) {
  int s;
  asm volatile("s_load_dword %0, %1, 0x0\n s_add_u32 %0, %0, 1\n s_waitcnt lgkmcnt(0)" : "=&s"(s) : "s"(x) : "scc");
  y[threadIdx.x] = s;
}
extern "C" __global__ void overwrites_pending(int* y, const int* x) {
  int v;
  asm volatile("global_load_dword %0, %1, %2\n v_mov_b32 %0, 5\n s_waitcnt vmcnt(0)"
               : "=&v"(v) : "v"(threadIdx.x * 4), "s"(x));
  y[threadIdx.x] = v;
}
extern "C" __global__ void unwaited_lds_write(int* y) {
  extern __shared__ int data[];
  const int at = (threadIdx.x ^ 64) * 4;
  int v;
  asm volatile("ds_write_b32 %1, %2\n s_barrier\n ds_read_b32 %0, %3\n s_waitcnt lgkmcnt(0)"
               : "=&v"(v) : "v"(threadIdx.x * 4), "v"(threadIdx.x), "v"(at) : "memory");
  y[threadIdx.x] = v;
}
// Wave 1 signals through an LDS atomic; wave 0 polls it, or reads it behind a barrier that does not complete it.
extern "C" __global__ void lds_flag(int* y, int barrier) {
  extern __shared__ int data[];
  if (threadIdx.x == 0) data[0] = 0;
  __syncthreads();
  y[threadIdx.x] = barrier;  // the arguments are loaded, so that no wait for them completes the atomic
  if (threadIdx.x >= 64) asm volatile("ds_add_u32 %0, %1" : : "v"(0), "v"(1) : "memory");
  int seen = 0;
  if (barrier) {
    asm volatile("s_barrier\n ds_read_b32 %0, %1\n s_waitcnt lgkmcnt(0)" : "=&v"(seen) : "v"(0) : "memory");
  } else if (threadIdx.x < 64) {
    while (seen != 64)
      asm volatile("s_sleep 1\n ds_read_b32 %0, %1\n s_waitcnt lgkmcnt(0)" : "=&v"(seen) : "v"(0) : "memory");
  }
  y[threadIdx.x] = seen;
}
extern "C" __global__ void dma(int* y, const int* x, int wait) {
  __shared__ int data[64];
  const int base = __builtin_amdgcn_readfirstlane((int)(unsigned long)(__attribute__((address_space(3))) int*)data);
  asm volatile("s_mov_b32 m0, %0\n s_nop 0\n global_load_lds_dword %1, %2"
               : : "s"(base), "v"(threadIdx.x * 4), "s"(x) : "memory", "m0");
  if (wait) asm volatile("s_waitcnt vmcnt(0)" : : : "memory");
  y[threadIdx.x] = data[threadIdx.x ^ 1];
}

// --- progress
extern "C" __global__ void spin(int* y, int wanted) {
  __shared__ int flag;
  volatile int* f = &flag;
  if (threadIdx.x == 0) *f = 0;
  __syncthreads();
  if (threadIdx.x >= 64) {
    if (threadIdx.x == 64) *f = wanted;
  } else {
    while (*f != 1) __builtin_amdgcn_s_sleep(1);
  }
  y[threadIdx.x] = 1;
}
extern "C" __global__ void forever(int* y) {
  while (((volatile int*)y)[0] == 0) {}
}
extern "C" __global__ void order(int* y) {
  __shared__ int tickets;
  if (threadIdx.x == 0) tickets = 0;
  __syncthreads();
  if (threadIdx.x % 64 == 0) y[threadIdx.x / 64] = atomicAdd(&tickets, 1);
}
"""


@pytest.fixture(autouse=True)
def only_what_a_test_asks_for() -> Iterator[None]:
    with emulator.options(checks="memory"):
        yield


def run(code: emulator.CodeObject, name: str, *args: object, grid: int = 1, block: int = 64, **options: object) -> None:
    lds = options.pop("dynamic_lds", 0)
    assert isinstance(lds, int)
    with emulator.options(**options):
        emulator.launch(
            code.kernels[name], grid, block, dict(zip("yxz", args, strict=False)) if _tensors(args) else args, lds
        )


def _tensors(args: tuple[object, ...]) -> bool:
    return all(isinstance(arg, torch.Tensor) for arg in args)


def ints(n: int, fill: int = 0) -> torch.Tensor:
    return torch.full((n,), fill, dtype=torch.int32)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_one_element_past_a_tensor_is_named_with_its_place(code: emulator.CodeObject) -> None:
    y, x = ints(64), ints(64)
    args = {"y": y, "x": x, "n": 64, "shift": 1}
    with pytest.raises(EmulatorFault) as caught:
        emulator.launch(code.kernels["copy"], 1, 64, args)
    text = str(caught.value)
    for part in (
        "read of 4 bytes", "0 bytes past the end of x", "256 bytes", "kernel copy", "lane 63", "work-group (0, 0, 0)",
        "global_load_dword", "-->",
    ):  # fmt: skip
        assert part in text, text
    assert isinstance(caught.value, LaunchError)
    emulator.launch(code.kernels["copy"], 1, 64, {**args, "shift": 0})  # a fault does not outlive its launch


def test_before_a_tensor_and_far_away(code: emulator.CodeObject) -> None:
    args = {"y": ints(64), "x": ints(64), "n": 64}
    with pytest.raises(EmulatorFault, match="4 bytes before the start of x"):
        emulator.launch(code.kernels["copy"], 1, 64, {**args, "shift": -1})
    with pytest.raises(EmulatorFault, match="outside every live allocation"):
        emulator.launch(code.kernels["copy"], 1, 64, {**args, "shift": 2**30})


def test_scalar_loads_are_checked(code: emulator.CodeObject) -> None:
    args = {"y": ints(1), "x": ints(64)}
    emulator.launch(code.kernels["scalar_read"], 1, 64, {**args, "shift": 63})
    with pytest.raises(EmulatorFault, match="past the end of x"):
        emulator.launch(code.kernels["scalar_read"], 1, 64, {**args, "shift": 64})


def test_atomics_are_checked(code: emulator.CodeObject) -> None:
    y = ints(2)
    run(code, "add_one", y, grid=3)
    assert y.tolist() == [192, 0]
    with pytest.raises(EmulatorFault, match="atomic update of 4 bytes"):
        emulator.launch(code.kernels["add_one"], 1, 64, [None])


def test_private_memory_is_checked(code: emulator.CodeObject) -> None:
    y = ints(64)
    emulator.launch(code.kernels["stack"], 1, 64, [y, 3])
    assert y.tolist() == [(i + 3) % 64 for i in range(64)]
    with pytest.raises(EmulatorFault, match=r"private \(scratch\) access of 4 bytes"):
        emulator.launch(code.kernels["stack"], 1, 64, [y, 5000])


def test_lds_is_bounded_by_the_dispatch(code: emulator.CodeObject) -> None:
    kernel = code.kernels["shared_out_of_bounds"]
    emulator.launch(kernel, 1, 64, [ints(64), 0], dynamic_lds=256)
    with pytest.raises(EmulatorFault, match="LDS access of 4 bytes at 0x100, but the work-group has 256 bytes"):
        emulator.launch(kernel, 1, 64, [ints(64), 1], dynamic_lds=256)
    with pytest.raises(LaunchError, match="LDS"):
        emulator.launch(kernel, 1, 64, [ints(64), 0], dynamic_lds=200 * 1024)


# --- undefined values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("undefined_store", "the stored value"),
        ("undefined_address", "the address"),
        ("undefined_compare", "the comparison"),
        ("undefined_branch", "the branch"),
        ("mask_beyond_exec", "EXEC"),
    ],
)
def test_registers_never_written(code: emulator.CodeObject, name: str, use: str) -> None:
    with pytest.raises(EmulatorFault, match=f"{use} depends on") as caught:
        run(code, name, ints(64), check_uninit=True)
    assert "never written" in str(caught.value)


def test_the_report_names_where_the_undefined_value_was_read(code: emulator.CodeObject) -> None:
    with pytest.raises(EmulatorFault, match=r"first read at pc 0x[0-9a-f]+ \(v_add_u32_e32 v\d+, 1, v200\)"):
        run(code, "undefined_store", ints(64), check_uninit=True)


def test_lds_never_written(code: emulator.CodeObject) -> None:
    with pytest.raises(EmulatorFault, match="register, LDS or scratch that was never written") as caught:
        run(code, "undefined_lds", ints(64), check_uninit=True)
    assert "lane 63" in str(caught.value)


def test_undefined_values_that_go_nowhere_are_no_fault(code: emulator.CodeObject) -> None:
    run(code, "undefined_but_unused", ints(64), check_uninit=True)


def test_logical_operations_remove_undefined_bits(code: emulator.CodeObject) -> None:
    run(code, "mask_within_exec", ints(64), check_uninit=True)


# --- waits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "counter"),
    [("missing_vmcnt", "vmcnt"), ("missing_scalar_wait", "lgkmcnt"), ("overwrites_pending", "vmcnt")],
)
def test_uses_before_the_wait(code: emulator.CodeObject, name: str, counter: str) -> None:
    verb = "overwrites" if name == "overwrites_pending" else "reads"
    with pytest.raises(
        EmulatorFault, match=rf"{verb} [sv]\d+ before s_waitcnt {counter} has waited for the load at pc"
    ):
        run(code, name, ints(64), ints(64), check_waits=True)
    run(code, name, ints(64), ints(64))


def test_lds_reads_before_the_wait(code: emulator.CodeObject) -> None:
    with pytest.raises(EmulatorFault, match="before s_waitcnt lgkmcnt has waited"):
        run(code, "missing_lgkmcnt", ints(64), check_waits=True)


def test_waits_count_loads_in_order(code: emulator.CodeObject) -> None:
    x = torch.arange(65, dtype=torch.int32)
    y, z = ints(64), ints(64)
    run(code, "counted_vmcnt", y, x, z, check_waits=True)
    assert (y.tolist(), z.tolist()) == (list(range(1, 65)), list(range(1, 65)))
    with pytest.raises(EmulatorFault, match="offset:4"):
        run(code, "counted_too_loosely", y, x, z, check_waits=True)


def test_another_wave_sees_an_lds_write_only_after_its_wait(code: emulator.CodeObject) -> None:
    with pytest.raises(EmulatorFault, match=r"reads LDS 0x\w+ before wave 1 has waited \(s_waitcnt lgkmcnt\)"):
        run(code, "unwaited_lds_write", ints(128), block=128, dynamic_lds=512, check_waits=True)


def test_a_polled_lds_flag_needs_no_wait_of_its_writer(code: emulator.CodeObject) -> None:
    y = ints(128)
    for order in ("forward", "reverse"):
        with emulator.options(check_waits=True, check_races=True, wave_order=order):
            emulator.launch(code.kernels["lds_flag"], grid=1, block=128, args=[y, 0], dynamic_lds=512)
        assert y[:64].tolist() == [64] * 64
    with emulator.options(check_waits=True), pytest.raises(EmulatorFault, match="before wave 1 has waited"):
        emulator.launch(code.kernels["lds_flag"], grid=1, block=128, args=[y, 1], dynamic_lds=512)


def test_lds_dma_lands_at_the_wait(code: emulator.CodeObject) -> None:
    x, y = torch.arange(64, dtype=torch.int32), ints(64)
    with emulator.options(check_waits=True):
        emulator.launch(code.kernels["dma"], 1, 64, [y, x, 1])
        assert y.tolist() == [i ^ 1 for i in range(64)]
        with pytest.raises(EmulatorFault, match=r"reads LDS 0x\w+ before wave 0 has waited \(s_waitcnt vmcnt\)"):
            emulator.launch(code.kernels["dma"], 1, 64, [y, x, 0])


# --- progress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_waves_that_wait_on_each_other_make_progress(code: emulator.CodeObject, order: str) -> None:
    y = ints(128)
    with emulator.options(wave_order=order, checks="all"):
        emulator.launch(code.kernels["spin"], 1, 128, [y, 1])
    assert y.tolist() == [1] * 128


def test_a_deadlock_ends_with_the_place_of_every_wave(code: emulator.CodeObject) -> None:
    with emulator.options(instruction_budget=20000), pytest.raises(EmulatorFault) as caught:
        emulator.launch(code.kernels["spin"], 1, 128, [ints(128), 2])
    text = str(caught.value)
    assert "instruction budget (20000" in text
    assert "wave 0: runs at pc 0x" in text
    assert "wave 1: ended" in text


def test_the_budget_covers_all_work_groups(code: emulator.CodeObject) -> None:
    with emulator.options(instruction_budget=5000), pytest.raises(EmulatorFault, match="budget"):
        emulator.launch(code.kernels["forever"], 1, 64, [ints(1)])
    with emulator.options(instruction_budget=5000), pytest.raises(EmulatorFault, match="budget"):
        run(code, "add_one", ints(1), grid=5000)


def test_wave_order_is_what_was_asked_for(code: emulator.CodeObject) -> None:
    tickets = {}
    for order in ("forward", "reverse"):
        y = ints(4)
        run(code, "order", y, block=256, wave_order=order)
        tickets[order] = y.tolist()
    assert tickets == {"forward": [0, 1, 2, 3], "reverse": [3, 2, 1, 0]}
    seen = set()
    for seed in range(8):
        y = ints(4)
        run(code, "order", y, block=256, wave_order="random", seed=seed)
        seen.add(tuple(y.tolist()))
    assert len(seen) > 2


def test_checks_change_no_result(code: emulator.CodeObject, tmp_path: Path) -> None:
    x = torch.randint(-99, 99, (4096,), dtype=torch.int32)
    results = []
    for checks in ("off", "memory", "all"):
        y = ints(4096)
        with emulator.options(checks=checks):
            emulator.launch(code.kernels["copy"], 64, 64, [y, x, 4096, 0])
        results.append(y)
    assert all(torch.equal(result, x) for result in results)
