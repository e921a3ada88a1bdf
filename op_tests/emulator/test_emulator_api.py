"""hipforge.emulator as a library: launches on tensors, argument layout, counters, options, traces, reports."""

from __future__ import annotations

import gc
import json
import re
import struct
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from helpers import hip_compile

from hipforge import emulator
from hipforge.emulator import configuration, counting, report, runtime
from hipforge.errors import ConfigError, EmulatorFault, GuardError, LaunchError

SOURCE = r"""
#include "hip.h"
struct Pair { int a; double b; };

__global__ void axpy(float* y, const float* x, float a, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}
__global__ void widths(long* out, bool flag, signed char c, unsigned short u, long wide, double d, _Float16 h, Pair p,
                       const int* maybe) {
  out[0] = flag; out[1] = c; out[2] = u; out[3] = wide;
  out[4] = long(d * 4); out[5] = long(float(h) * 4); out[6] = p.a; out[7] = long(p.b * 4); out[8] = maybe == nullptr;
}
__global__ void geometry(unsigned* out) {
  const unsigned i = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (threadIdx.x + threadIdx.y + threadIdx.z == 0)
    out[i] = blockDim.x | blockDim.y << 8 | blockDim.z << 16 | gridDim.x << 24;
}
__global__ void through_lds(int* out) {
  extern __shared__ int s[];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}
__global__ void first_come(int* out, int* ticket) {
  if (threadIdx.x == 0) out[atomicAdd(ticket, 1)] = blockIdx.x;
}
template <int N> __global__ void twin(int* out) { out[0] = N; }
template __global__ void twin<1>(int*);
template __global__ void twin<2>(int*);
"""


def ints(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


# --- launches ---


def test_a_prompt_completes_every_public_name_before_its_first_use() -> None:
    code = "from hipforge import emulator\nprint(set(emulator.__all__) - set(dir(emulator)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_launch_on_tensors(code: emulator.CodeObject) -> None:
    x, y = torch.arange(300.0), torch.ones(300)
    done = emulator.launch(code.kernels["axpy"], grid=2, block=256, args=[y, x, 2.0, 300])
    assert torch.equal(y, 1 + 2 * torch.arange(300.0))
    assert (done.launches, done.workgroups, done.waves) == (1, 2, 8)


def test_grids_and_blocks_of_one_to_three_sizes(code: emulator.CodeObject) -> None:
    for grid, block in ((3, 64), ((3, 2), (8, 4)), ((3, 2, 2), (4, 2, 3))):
        g = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
        b = (*((block,) if isinstance(block, int) else block), 1, 1)[:3]
        out = ints(g[0] * g[1] * g[2])
        emulator.launch(code.kernels["geometry"], grid, block, [out])
        assert out.tolist() == [b[0] | b[1] << 8 | b[2] << 16 | g[0] << 24] * out.numel()


def test_every_width_of_argument(code: emulator.CodeObject) -> None:
    out = torch.zeros(9, dtype=torch.int64)
    pair = struct.pack("<ixxxxd", -3, 1.25)
    args = [out, True, -5, 65535, -(2**62), 2.5, -0.75, pair, None]
    emulator.launch(code.kernels["widths"], 1, 1, args)
    assert out.tolist() == [1, -5, 65535, -(2**62), 10, -3, -3, 5, 1]


def test_unsigned_values_fit_as_well_as_signed_ones(code: emulator.CodeObject) -> None:
    out = torch.zeros(9, dtype=torch.int64)
    emulator.launch(code.kernels["widths"], 1, 1, [out, 0, 255, -1, 2**63, 0.0, 0.0, bytes(16), out])
    assert out.tolist() == [0, -1, 65535, -(2**63), 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (1, 256, "256 does not fit 1 bytes"),
        (3, -32769, "-32769 does not fit 2 bytes"),
        (4, None, None),
        (3, None, "None for a parameter of 2 bytes; only pointers may be null"),
        (2, torch.zeros(1), "a tensor for a parameter of 1 bytes that is not a pointer"),
        (7, bytes(15), "15 bytes for a parameter of 16"),
        (7, 1.0, "a float for a parameter of 16 bytes"),
        (0, "text", "str is not accepted"),
        (0, torch.zeros(1, device="meta"), "a tensor on meta; the emulator takes CPU tensors"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(
    code: emulator.CodeObject, position: int, value: object, message: str | None
) -> None:
    args: list[object] = [torch.zeros(9, dtype=torch.int64), True, 0, 0, 0, 0.0, 0.0, bytes(16), None]
    args[position] = value
    if message is None:  # a null for a 64-bit integer is indistinguishable from a null pointer
        emulator.launch(code.kernels["widths"], 1, 1, args)
        return
    with pytest.raises(GuardError, match=re.escape(message)) as caught:
        emulator.launch(code.kernels["widths"], 1, 1, args)
    assert f"widths, argument arg{position}" in str(caught.value)


def test_a_wrong_number_of_arguments_lists_the_parameters(code: emulator.CodeObject) -> None:
    with pytest.raises(GuardError, match=r"axpy takes 4 arguments; got 2.*by_value of 4 bytes"):
        emulator.launch(code.kernels["axpy"], 1, 64, [None, None])


@pytest.mark.parametrize("grid", [0, (1, 0), (1, 1, 1, 1), (), -1, 2**32])
def test_bad_grids_are_refused(code: emulator.CodeObject, grid: object) -> None:
    with pytest.raises(GuardError, match="one to three sizes from 1"):
        emulator.launch(code.kernels["geometry"], grid, 64, [ints(1)])


def test_launches_that_the_device_cannot_run_are_launch_errors(code: emulator.CodeObject) -> None:
    with pytest.raises(LaunchError, match="at most 1024 per block") as caught:
        emulator.launch(code.kernels["geometry"], 1, 1025, [ints(1)])
    assert not isinstance(caught.value, EmulatorFault)
    with pytest.raises(LaunchError, match="163841 dynamic LDS bytes; gfx950 has 163840"):
        emulator.launch(code.kernels["through_lds"], 1, 64, [ints(64)], dynamic_lds=160 * 1024 + 1)


def test_dynamic_lds_has_the_size_that_was_asked_for(code: emulator.CodeObject) -> None:
    out = ints(64)
    counts = emulator.launch(code.kernels["through_lds"], 1, 64, [out], dynamic_lds=256)
    assert counts.kernels[0].lds_bytes == code.kernels["through_lds"].lds_bytes + 256
    assert torch.equal(out, torch.arange(64, dtype=torch.int32) ^ 1)
    with pytest.raises(EmulatorFault, match="through_lds"):
        emulator.launch(code.kernels["through_lds"], 1, 64, [out], dynamic_lds=252)


def test_kernels_by_plain_name_short_name_and_symbol(code: emulator.CodeObject) -> None:
    assert code.kernels["twin<2>"].name == "_Z4twinILi2EEvPi"
    assert code.kernels["_Z4twinILi1EEvPi"].short_name == "twin<1>"
    assert "axpy" in code.kernels
    assert "twin" not in code.kernels
    with pytest.raises(KeyError, match="names 2 kernels"):
        code.kernels["twin"]
    assert len(code.kernels) == 7


def test_a_disassembly_reads_like_objdumps(code: emulator.CodeObject) -> None:
    text = code.kernels["axpy"].disassembly()
    assert re.search(r"^\s*[0-9a-f]+: .*v_fmac_f32_e32 v\d+, s\d+, v\d+$|v_pk_fma|v_fmac_f32", text, re.MULTILINE)
    assert text.count("s_endpgm") >= 1
    assert len(text.splitlines()) > 10


def test_code_objects_are_unloaded_with_their_last_reference(tmp_path: Path) -> None:
    built = hip_compile.device_elf('#include "hip.h"\n__global__ void f(int* p) { *p = 7; }', tmp_path)
    own = emulator.CodeObject(built)
    kernel, handle = own.kernels["f"], own.handle
    del own
    gc.collect()
    out = ints(1)
    emulator.launch(kernel, 1, 1, [out])  # a kernel keeps its code object alive
    assert out.item() == 7
    del kernel
    gc.collect()
    assert runtime.load().library.hfemu_disassemble(handle, b"_Z1fPi") is None


# --- memory ---


def test_views_expose_only_their_own_bytes(code: emulator.CodeObject) -> None:
    base = torch.ones(400)
    emulator.launch(code.kernels["axpy"], 2, 256, [torch.zeros(300), base[50:350], 2.0, 300])
    with pytest.raises(EmulatorFault):
        emulator.launch(code.kernels["axpy"], 2, 256, [torch.zeros(300), base[50:349], 2.0, 300])
    assert base.eq(1).all()


def test_strided_tensors_reach_to_their_last_element(code: emulator.CodeObject) -> None:
    base = torch.ones(599)
    emulator.launch(code.kernels["axpy"], 2, 256, [torch.zeros(300), base[::2], 2.0, 300])
    assert base[::2].numel() == 300


@pytest.mark.parametrize(
    ("body", "service"), [('printf("%d", out[0]);', "printf"), ("out = new int[2]; out[0] = 1;", "malloc")]
)
def test_services_of_the_host_are_named_when_a_kernel_needs_them(body: str, service: str, tmp_path: Path) -> None:
    text = "#include <hip/hip_runtime.h>\n__global__ void f(int* out) { if (out[0] == 0) { " + body + " } out[1] = 5; }"
    own = emulator.CodeObject(hip_compile.device_elf(text, tmp_path))
    with pytest.raises(EmulatorFault, match=rf"^{service}.* in a kernel need.* not emulated\n"):
        emulator.launch(own.kernels["f"], 1, 1, [ints(2)])
    untouched = torch.tensor([1, 0], dtype=torch.int32)
    emulator.launch(own.kernels["f"], 1, 1, [untouched])
    assert untouched.tolist() == [1, 5]


# --- options ---


def test_options_hold_for_the_block_only() -> None:
    before = configuration.current()
    with emulator.options(checks="all", wave_order="random", seed=7, threads=1) as inside:
        assert configuration.current() == inside
        assert (inside.check_uninit, inside.check_waits, inside.check_races, inside.check_global_races) == (
            True, True, True, False,
        )  # fmt: skip
        assert (inside.wave_order, inside.seed, inside.threads) == ("random", 7, 1)
        with emulator.options(checks="off"):
            assert not configuration.current().check_memory
    assert configuration.current() == before


def test_of_overlapping_blocks_the_one_entered_last_decides() -> None:
    """Those of two threads or coroutines, which need not end in the reverse order."""
    before = configuration.current()
    first, second = emulator.options(checks="off", seed=1), emulator.options(seed=2)
    first.__enter__()
    inside = second.__enter__()
    first.__exit__(None, None, None)
    assert configuration.current() == inside
    second.__exit__(None, None, None)
    assert configuration.current() == before


def test_another_architecture_brings_its_cu_count() -> None:
    with emulator.options(arch="gfx942") as inside:
        assert inside.cu_count == 304
        with emulator.options(cu_count=16):
            assert configuration.current().cu_count == 16
            assert configuration.current().arch == "gfx942"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wave_order": "sideways"}, "accepted: forward, reverse, random"),
        ({"checks": "some"}, "accepted: 'off', 'memory', 'all'"),
        ({"arch": "gfx90a"}, "unknown architecture 'gfx90a'"),
        ({"threads": -1}, "threads -1"),
        ({"cu_count": 0}, "cu_count 0"),
        ({"nonsense": 1}, "unknown emulator option 'nonsense'"),
    ],
)
def test_bad_options_are_config_errors_and_change_nothing(changes: dict[str, object], message: str) -> None:
    before = configuration.current()
    with pytest.raises(ConfigError, match=re.escape(message)), emulator.options(**changes):
        pass
    assert configuration.current() == before


def test_options_for_one_launch(code: emulator.CodeObject) -> None:
    before = configuration.current()
    backwards = emulator.Options(arch="gfx950", cu_count=256, threads=1, wave_order="reverse")
    for options, expected in ((None, list(range(8))), (backwards, list(range(7, -1, -1)))):
        out, ticket = ints(8), ints(1)
        with emulator.options(threads=1):
            emulator.launch(code.kernels["first_come"], 8, 64, [out, ticket], options=options)
        assert out.tolist() == expected
    assert configuration.current() == before


def test_random_orders_are_seeded(code: emulator.CodeObject) -> None:
    def order(seed: int) -> list[int]:
        out, ticket = ints(32), ints(1)
        with emulator.options(threads=1, wave_order="random", seed=seed):
            emulator.launch(code.kernels["first_come"], 32, 64, [out, ticket])
        return out.tolist()

    assert order(1) == order(1)
    assert sorted(order(1)) == list(range(32))
    assert order(1) != order(2)


def test_a_code_object_for_the_other_architecture_runs_on_its_own(tmp_path: Path) -> None:
    built = hip_compile.device_elf(SOURCE, tmp_path, "gfx942")
    y = torch.zeros(64)
    other = emulator.CodeObject(built)
    assert other.arch == "gfx942"
    emulator.launch(other.kernels["axpy"], 1, 64, [y, torch.ones(64), 3.0, 64])
    assert y.eq(3).all()
    assert configuration.current().arch == "gfx950"


# --- counters ---


def test_counts_are_exact(code: emulator.CodeObject) -> None:
    x, y = torch.ones(300), torch.ones(300)
    done = emulator.launch(code.kernels["axpy"], 2, 256, {"y": y, "x": x, "a": 2.0, "n": 300})
    assert done.by_class["vmem_load"] == 2 * 5  # 300 items are 4 full waves and one of 44; the rest branches away
    assert done.by_class["vmem_store"] == 5
    assert done.tensors["x"].loaded == done.tensors["x"].unique_loaded == 1200
    assert (done.tensors["y"].loaded, done.tensors["y"].stored) == (1200, 1200)
    assert done.bytes_stored == 1200
    assert sum(done.by_class.values()) == sum(done.by_mnemonic.values()) == done.wave_instructions
    assert done.count("s_endpgm") == 8
    assert done.count("v_no_such_thing") == 0
    assert (done.kernels[0].grid, done.kernels[0].block) == ((2, 1, 1), (256, 1, 1))
    assert done.lines64.bytes == 3600


def test_counters_go_through_json_and_back(code: emulator.CodeObject) -> None:
    with emulator.counters(per_pc=True) as collected:
        emulator.launch(code.kernels["axpy"], 1, 64, [torch.ones(64), torch.ones(64), 1.0, 64])
    assert counting.from_json(json.dumps(collected.as_dict())) == collected.result


def test_a_collector_sums_over_launches_and_nests(code: emulator.CodeObject) -> None:
    x, y = torch.ones(64), torch.ones(64)
    with emulator.counters() as outer:
        first = emulator.launch(code.kernels["axpy"], 1, 64, [y, x, 1.0, 64])
        with emulator.counters() as inner:
            emulator.launch(code.kernels["axpy"], 1, 64, [y, x, 1.0, 64])
    assert outer.launches == 2
    assert inner.launches == 1
    assert outer.wave_instructions == 2 * first.wave_instructions == 2 * inner.wave_instructions


def test_a_collector_is_complete_only_after_its_block() -> None:
    with emulator.counters() as collected, pytest.raises(RuntimeError, match="when their `with` block has ended"):
        _ = collected.launches
    assert collected.launches == 0
    with pytest.raises(FrozenInstanceError):
        collected.result.launches = 1


def test_counts_per_instruction_add_up_and_make_a_listing(code: emulator.CodeObject) -> None:
    x, y = torch.ones(300), torch.ones(300)
    with emulator.counters(per_pc=True) as collected:
        emulator.launch(code.kernels["axpy"], 2, 256, [y, x, 1.0, 300])
    counts = collected.result
    assert sum(row.count for row in counts.per_pc) == counts.wave_instructions
    stores = [row for row in counts.per_pc if row.text.startswith("global_store")]
    assert [(row.count, row.lanes, row.bytes) for row in stores] == [(5, 300, 1200)]
    listing = report.listing(counts, "axpy")
    assert "global_store_dword" in listing
    rows = [line for line in listing.splitlines()[2:] if line.strip() != "..."]
    assert len(rows) == len(counts.per_pc)
    # Active lanes mean nothing where no lane takes part.
    assert all((row.split()[3] == "-") == (" s_" in row) for row in rows)
    with pytest.raises(ValueError, match="no counts per instruction for 'absent'"):
        report.listing(counts, "absent")


def test_collectors_of_different_threads_do_not_mix(code: emulator.CodeObject) -> None:
    seen: dict[int, int] = {}

    def work(launches: int) -> None:
        x, y = torch.ones(64), torch.ones(64)
        with emulator.counters() as collected:
            for _ in range(launches):
                emulator.launch(code.kernels["axpy"], 1, 64, [y, x, 1.0, 64])
        seen[launches] = collected.launches

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 5, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {1: 1, 5: 5, 9: 9}


def test_a_profile_names_what_is_modelled(code: emulator.CodeObject) -> None:
    x, y = torch.ones(300), torch.ones(300)
    counts = emulator.launch(code.kernels["axpy"], 2, 256, [y, x, 1.0, 300])
    found = report.profile(counts, "gfx950")
    assert found.memory_bytes == counts.unique_bytes >= 3600
    assert found.vector_cycles == 4 * counts.by_class["valu"] + 16 * counts.by_class["valu_trans"]
    assert found.modelled_memory_us == pytest.approx(found.memory_bytes / 8e6)
    assert found.bound in ("memory", "issue")
    text = report.text(found)
    assert str(counts) in text
    (launched,) = counts.kernels
    assert launched.workgroups_per_cu == 8 and launched.occupancy == 8.0
    assert "axpy" in text and f"{launched.vgprs} " in text
    assert text.index("counted") < text.index("modelled at peak rates")
    assert not re.search(r"\bus\b", text[: text.index("modelled")])
    with pytest.raises(ConfigError, match="unknown architecture"):
        report.profile(counts, "gfx90a")


# --- traces ---


def test_a_trace_shows_one_lane_of_one_wave(code: emulator.CodeObject) -> None:
    x, y = torch.full((128,), 3.0), torch.zeros(128)
    lines: list[str] = []
    with emulator.trace(lines.append, kernel="axpy", wave=1, lane=5):
        counts = emulator.launch(code.kernels["axpy"], 1, 128, [y, x, 2.0, 128])
    assert any("global_store_dword" in line for line in lines)
    assert any("s_endpgm" in line for line in lines)
    instructions = [line for line in lines if re.search(r"\b[sv]_\w+|global_\w+", line)]
    assert len(instructions) == counts.wave_instructions // 2  # two waves, one traced
    lines.clear()
    emulator.launch(code.kernels["axpy"], 1, 128, [y, x, 2.0, 128])
    with emulator.trace(lines.append, kernel="another"):
        emulator.launch(code.kernels["axpy"], 1, 128, [y, x, 2.0, 128])
    assert lines == []


# --- the package ---


def test_importing_the_emulator_needs_neither_torch_nor_a_compiler() -> None:
    program = (
        "import sys, hipforge.emulator as e; torch_graphs = {'Graph', 'capture'};"
        "[getattr(e, n) for n in set(e.__all__) - torch_graphs];"
        "print('torch' in sys.modules, 'triton' in sys.modules, callable(e.counters), callable(e.options))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PATH": ""})
    assert done.stdout.split() == ["False", "False", "True", "True"]


@pytest.mark.parametrize("change", [{"threads": "4"}, {"seed": 1.5}])
def test_an_option_of_another_kind_is_named(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"(threads|seed)=.*accepted: an integer"), emulator.options(**change):
        pass
