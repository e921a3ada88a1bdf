"""The simulator on small kernels whose time follows from one parameter each: the cycles are exact."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch

from hipforge import emulator
from hipforge.emulator.timing import machines, model, report
from hipforge.emulator.timing.capture import Capture

SOURCE = r"""
#include "hip.h"
#define TAKEN "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", \
    "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31", "memory"
#define REPEAT(n, text) asm volatile(".rept " #n "\n" text "\n.endr" ::: TAKEN)
#define TWO(name, text) \
  __global__ void name##_100() { REPEAT(100, text); } \
  __global__ void name##_300() { REPEAT(300, text); }
TWO(vector, "v_add_u32 v1, v1, v2")
TWO(packed, "v_pk_fma_f32 v[2:3], v[4:5], v[6:7], v[8:9]")
TWO(root, "v_sqrt_f32 v1, v2")
TWO(wait, "s_nop 7")
TWO(matrix_apart, "v_mfma_f32_16x16x32_bf16 v[4:7], v[20:23], v[24:27], 0\n"
                  "v_mfma_f32_16x16x32_bf16 v[8:11], v[20:23], v[24:27], 0")
TWO(matrix_chain, "v_mfma_f32_16x16x32_bf16 v[4:7], v[20:23], v[24:27], v[4:7]")
TWO(matrix_read, "v_mfma_f32_16x16x32_bf16 v[4:7], v[20:23], v[24:27], 0\nv_add_u32 v1, v1, v4")
TWO(meet, "s_barrier")
TWO(lds_wide, "v_mov_b32 v1, 0\nds_read_b128 v[4:7], v1")
TWO(lds_alone, "v_mov_b32 v1, 0\nds_read_b32 v4, v1\ns_waitcnt lgkmcnt(0)")
__global__ void nothing() {}

// Loads of 1 KB each, 4 KB apart, that nothing waits for.
#define STREAM(n) \
  __global__ void stream_##n(const char* from) { \
    const uint64_t at = reinterpret_cast<uint64_t>(from) + threadIdx.x * 16; \
    asm volatile("v_mov_b32 v1, 0x1000\nv_mov_b32 v2, %0\nv_mov_b32 v3, %1\n" \
                 ".rept " #n "\nglobal_load_dwordx4 v[4:7], v[2:3], off\nv_add_co_u32 v2, vcc, v1, v2\n" \
                 "v_addc_co_u32 v3, vcc, 0, v3, vcc\n.endr\ns_waitcnt vmcnt(0)" \
                 :: "v"(uint32_t(at)), "v"(uint32_t(at >> 32)) : TAKEN, "vcc"); \
  }
STREAM(100)
STREAM(260)

template <int n> __device__ void chase(int* out, const int* in) {
  int at = 0;
  for (int i = 0; i < n; ++i) at = __builtin_nontemporal_load(in + at + (threadIdx.x >> 6));
  out[threadIdx.x] = at;
}
__global__ void chase_8(int* out, const int* in) { chase<8>(out, in); }
__global__ void chase_40(int* out, const int* in) { chase<40>(out, in); }
typedef float float4_ __attribute__((ext_vector_type(4)));
__global__ void copy(float4_* out, const float4_* in, int per_group, int stores) {
  float4_ sum = {};
  for (int i = 0; i < per_group; i += 256) {
    const float4_ x = in[uint64_t(blockIdx.x) * per_group + i + threadIdx.x];
    if (stores) out[uint64_t(blockIdx.x) * per_group + i + threadIdx.x] = x;
    sum += x;
  }
  if (!stores) out[blockIdx.x * 256 + threadIdx.x] = sum;
}
__global__ void write_between(float4_* out, const float4_* in, int loads, int stores) {
  float4_ sum = {};
  for (int i = 0; i < loads; ++i) sum += in[i * 256 + threadIdx.x];
  for (int i = 0; i < stores; ++i) out[i * 256 + threadIdx.x] = sum;
  for (int i = 0; i < loads; ++i) sum += in[i * 256 + threadIdx.x];
  out[threadIdx.x] = sum;
}
"""

STILL: Mapping[str, float] = {"fetch_ns": 0, "start_ns": 0, "dispatch_ns": 0, "matrix_extra_cycles": 0}


def record(code: emulator.CodeObject, name: str, grid: int, block: int, *args: object, lds: int = 0) -> Capture:
    capture = Capture()
    # The kernels read LDS that nothing has written: only their time matters.
    with emulator.options(checks="memory"), capture.recording():
        emulator.launch(code.kernels[name], grid, block, list(args), dynamic_lds=lds)
    return capture


def cycles(capture: Capture, **values: float) -> float:
    of = machines.MI355X.with_values({**STILL, **values})
    return float(model.simulate(capture, 0, of)["cycles"])


def per_repeat(code: emulator.CodeObject, name: str, *, waves: int = 1, grid: int = 1, **values: float) -> float:
    """Cycles of one repetition: the difference between 300 and 100 of them."""
    short, long = (record(code, f"{name}_{n}", grid, 64 * waves, lds=4096) for n in (100, 300))
    return (cycles(long, **values) - cycles(short, **values)) / 200


def test_one_wave_issues_a_vector_instruction_every_four_cycles(code: emulator.CodeObject) -> None:
    assert per_repeat(code, "vector") == 4
    assert per_repeat(code, "packed") == 4
    assert per_repeat(code, "vector", issue_cycles=5) == 5


def test_transcendental_instructions_take_four_passes(code: emulator.CodeObject) -> None:
    assert per_repeat(code, "root") == machines.MI355X["transcendental_cycles"]


def test_waves_of_one_simd_share_its_vector_pipe_and_those_of_four_do_not(code: emulator.CodeObject) -> None:
    assert per_repeat(code, "vector", waves=4) == 4
    assert per_repeat(code, "vector", waves=8) == 8
    assert per_repeat(code, "vector", waves=16) == 16


def test_work_groups_on_one_compute_unit_share_it_too(code: emulator.CodeObject) -> None:
    # 256 work-groups of 4 waves fill one slot of every CU, 512 two.
    assert per_repeat(code, "vector", waves=4, grid=256) == 4
    assert per_repeat(code, "vector", waves=4, grid=512) == 8


def test_s_nop_waits_as_long_as_it_says(code: emulator.CodeObject) -> None:
    assert per_repeat(code, "wait") == 8 * 4


def test_independent_matrix_instructions_take_their_passes(code: emulator.CodeObject) -> None:
    assert per_repeat(code, "matrix_apart") == 2 * 16
    assert per_repeat(code, "matrix_apart", matrix_extra_cycles=2) == 2 * 18


def test_a_chain_of_matrix_instructions_waits_for_each_result(code: emulator.CodeObject) -> None:
    assert per_repeat(code, "matrix_chain") == 16 + 4


def test_a_vector_instruction_waits_longer_for_a_matrix_result(code: emulator.CodeObject) -> None:
    result = machines.MI355X["matrix_result_cycles"]
    assert per_repeat(code, "matrix_read") == 16 + 4 + result + 4


def test_barriers_of_waves_in_step_cost_their_own_time(code: emulator.CodeObject) -> None:
    assert per_repeat(code, "meet", waves=4) == 4 + machines.MI355X["barrier_cycles"]


def test_wide_lds_reads_are_bound_by_its_bandwidth(code: emulator.CodeObject) -> None:
    # All lanes read one address, so that there are no conflicts; 64 lanes of 16 bytes.
    assert per_repeat(code, "lds_wide") == pytest.approx(64 * 16 / machines.MI355X["lds_bytes_per_cycle"])
    assert per_repeat(code, "lds_wide", lds_bytes_per_cycle=64) == pytest.approx(16)


def test_a_wait_for_lds_shows_its_latency(code: emulator.CodeObject) -> None:
    latency = machines.MI355X["lds_latency_cycles"]
    more = per_repeat(code, "lds_alone", lds_latency_cycles=latency + 10) - per_repeat(code, "lds_alone")
    assert more == 10


@functools.cache
def chain(code: emulator.CodeObject, length: int) -> Capture:
    """Dependent loads, each from its own cache line: 41 of them 4 KB apart."""
    steps = torch.zeros(41 * 1024, dtype=torch.int32)
    steps[::1024] = torch.arange(1, 42, dtype=torch.int32) * 1024
    return record(code, f"chase_{length}", 1, 64, torch.zeros(64, dtype=torch.int32), steps)


@pytest.mark.parametrize(
    ("start", "parameter"), [("cold", "hbm_latency_ns"), ("mall", "hbm_latency_ns"), ("l2", "l2_latency_ns")]
)
def test_dependent_loads_show_the_latency_of_their_level(
    code: emulator.CodeObject, start: model.Start, parameter: str
) -> None:
    def per_load(more_ns: float) -> float:
        of = machines.MI355X.with_values({**STILL, parameter: machines.MI355X[parameter] + more_ns})
        long, short = (model.simulate(chain(code, n), 0, of, start)["cycles"] for n in (40, 8))
        return float(long - short) / 32

    # 100 ns more on every load are 240 cycles.
    assert per_load(100) - per_load(0) == pytest.approx(240)


@pytest.mark.parametrize(("l1_bytes", "loads"), [(32 << 10, 32), (16 << 10, 16)])
def test_a_compute_unit_has_no_more_in_flight_than_its_l1_holds(
    code: emulator.CodeObject, l1_bytes: int, loads: int
) -> None:
    memory = torch.zeros(301 * 1024, dtype=torch.int32)
    short, long = (record(code, f"stream_{n}", 1, 64, memory) for n in (100, 260))

    def per_load(more_ns: float) -> float:
        values = {"hbm_latency_ns": machines.MI355X["hbm_latency_ns"] + more_ns, "l1_bytes": l1_bytes}
        return (cycles(long, **values) - cycles(short, **values)) / 160  # a multiple of both numbers of loads

    # A wave alone may have 62 loads under way; their lines fill L1 sooner, and 1000 ns are 2400 cycles.
    assert per_load(1000) - per_load(0) == pytest.approx(2400 / loads)


def big_copy(code: emulator.CodeObject, groups: int, per_group: int, *, stores: bool) -> Capture:
    size = groups * per_group * 4
    out = torch.empty(size if stores else groups * 1024)
    return record(code, "copy", groups, 256, out, torch.empty(size), per_group, int(stores))


def test_reading_much_data_is_bound_by_hbm(code: emulator.CodeObject) -> None:
    capture = big_copy(code, 2048, 2048, stores=False)  # 64 MB
    fast = {"fabric_gbps_per_xcd": 1e6, "l2_bytes_per_cycle": 1e6, "store_gbps": 1e6}
    slow, quick = (cycles(capture, hbm_gbps=gbps, **fast) / 2.4 for gbps in (1000.0, 2000.0))  # ns
    # 4 KB at a time go through one channel: what is read at once is not spread evenly, which costs up to a third.
    assert 1.0 < slow / (2048 * 2048 * 16 / 1000) < 1.33
    assert slow / quick == pytest.approx(2, rel=0.05)


def test_writing_much_data_is_bound_by_the_store_path(code: emulator.CodeObject) -> None:
    capture = big_copy(code, 1024, 2048, stores=True)  # 32 MB
    took = cycles(capture, store_gbps=1000, hbm_gbps=1e6, fabric_gbps_per_xcd=1e6) / 2.4
    assert took == pytest.approx(1024 * 2048 * 16 / 1000, rel=0.1)


def test_a_wave_ends_when_its_stores_have_left_l2(code: emulator.CodeObject) -> None:
    capture = big_copy(code, 256, 2048, stores=True)  # 8 MB
    done = model.simulate(capture, 0, machines.MI355X.with_values({**STILL, "store_gbps": 1000}))
    # Nothing is left to write after the last wave: the next work-group of its compute unit cannot start before that.
    assert done["stalls"][model.STALLS.index("tail")] == 0
    assert done["cycles"] > 256 * 2048 * 16 / 1000 * 2.4


def test_what_is_only_written_leaves_l2_before_what_is_read(code: emulator.CodeObject) -> None:
    loads, stores = 64, 1536  # of 4 KB: 256 KB, more than L1 holds, and 6 MB, more than L2
    memory = torch.empty(stores * 1024), torch.empty(loads * 1024)
    done = model.simulate(record(code, "write_between", 1, 256, *memory, loads, stores), 0, machines.MI355X)
    # The second half of the loads finds its lines in L2. Scalar loads of the arguments are one line or two more.
    assert done["l2_hits"] == pytest.approx(loads * 32, abs=2)
    assert done["l2_lines"] == pytest.approx(2 * loads * 32, abs=2)


def test_dispatch_takes_its_interval_on_every_xcd(code: emulator.CodeObject) -> None:
    few, many = (record(code, "nothing", grid, 64) for grid in (8 * 100, 8 * 300))
    took = cycles(many, dispatch_ns=100) - cycles(few, dispatch_ns=100)
    assert took == pytest.approx(200 * 100 * 2.4)


def test_one_xcd_stands_for_all_of_them(code: emulator.CodeObject) -> None:
    capture = big_copy(code, 512, 1024, stores=False)
    one, all_of_them = (model.simulate(capture, 0, machines.MI355X, all_xcds=flag)["cycles"] for flag in (False, True))
    # One XCD has an eighth of the channels, over which its data falls otherwise: up to 8 groups of 4 KB more or less on
    # the fullest of 16 channels, which hold 128 of them. How many depends on where the tensor lies.
    assert one == pytest.approx(all_of_them, rel=8 / 128)


def test_a_sample_of_rounds_and_iterations_gives_the_whole_time(code: emulator.CodeObject) -> None:
    capture = big_copy(code, 28672, 1024, stores=False)
    sampled = model.launch_time(capture, 0, machines.MI355X)
    whole = model.launch_time(capture, 0, machines.MI355X, sampling=model.WHOLE_LAUNCH)
    assert sampled.simulation["rounds"] < whole.simulation["rounds"]
    assert sampled.cycles == pytest.approx(whole.cycles, rel=0.02)


def test_stalls_add_up_to_the_waves_time(code: emulator.CodeObject) -> None:
    capture = big_copy(code, 8, 1024, stores=False)
    done = model.simulate(capture, 0, machines.MI355X.with_values(STILL), detail=True)
    waves = sum(end - begin for _simd, _group, _wave, begin, end in done["spans"])
    # One work-group on XCD 0; what is missing is the end, where waves wait for their stores to be acknowledged.
    assert sum(done["stalls"][:-1]) == pytest.approx(waves, rel=0.15)
    # Phases are what the waves of one compute unit wait for: none outside its wave, none over another.
    by_wave = {(group, wave): [(begin, end)] for _simd, group, wave, begin, end in done["spans"]}
    assert done["phases"]
    for _simd, group, wave, begin, end, reason in done["phases"]:
        spans = by_wave[group, wave]
        assert spans[0][0] <= begin < end <= spans[0][1] + 1e-6 and 0 <= reason < len(model.STALLS)
        assert len(spans) == 1 or spans[-1][1] <= begin + 1e-6
        spans.append((begin, end))
    events = report.chrome_trace(capture, machines.MI355X.with_values(STILL))["traceEvents"]
    slots = {event["tid"] for event in events if event["name"] == "thread_name"}
    drawn = [event for event in events if event["ph"] == "X"]
    assert slots == {event["tid"] for event in drawn} and all(event["dur"] > 0 for event in drawn)


def test_an_unknown_level_is_refused(code: emulator.CodeObject) -> None:
    with pytest.raises(model.GuardError, match="accepted: cold, mall, l2"):
        model.simulate(chain(code, 8), 0, machines.MI355X, "warm")  # type: ignore[arg-type]
