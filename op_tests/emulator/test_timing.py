"""The model of time as a library and on the command line: ``timed``, ``estimate``, the tables of parameters."""

from __future__ import annotations

import ctypes
import json
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from helpers import hip_compile
from torch.utils import _pytree

import hipforge
from hipforge import devices, emulator, plots
from hipforge.cli import time
from hipforge.cli.main import cli
from hipforge.emulator import report as counted_report
from hipforge.emulator import runtime
from hipforge.emulator.timing import estimate, library, machine, machines, model, report
from hipforge.errors import ConfigError, GuardError
from hipforge.tuning import timing as timing_on_gpus

SOURCE = r"""
#include "hip.h"
__global__ void axpy(float* y, const float* x, float a, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}
"""
SIZE = 64 * 1024


@pytest.fixture(scope="module")
def axpy(tmp_path_factory: pytest.TempPathFactory) -> emulator.Kernel:
    return emulator.CodeObject(hip_compile.device_elf(SOURCE, tmp_path_factory.mktemp("timing"))).kernels["axpy"]


def run(axpy: emulator.Kernel, size: int = SIZE) -> torch.Tensor:
    y, x = torch.ones(size), torch.arange(size, dtype=torch.float32)
    emulator.launch(axpy, size // 256, 256, [y, x, 2.0, size])
    return y


def test_timing_leaves_the_results_alone(axpy: emulator.Kernel) -> None:
    with emulator.timed() as timed:
        y = run(axpy)
    assert torch.equal(y, 1 + 2 * torch.arange(SIZE, dtype=torch.float32))
    assert 2 < timed.result.kernel_us < 5  # little more than a launch: the smallest published times are 3.4 us


def test_a_replayed_kernel_starts_sooner(axpy: emulator.Kernel) -> None:
    with emulator.timed() as timed:
        run(axpy)
    gap = machines.MI355X["start_ns"] - machines.MI355X["replay_gap_ns"]
    assert timed.result.kernel_us - timed.result.replay_us == pytest.approx(gap / 1e3)


def test_operands_in_the_infinity_cache_are_sooner_there(axpy: emulator.Kernel) -> None:
    times = []
    for start in model.STARTS:
        with emulator.timed(start=start) as timed:
            run(axpy)
        times.append(timed.result.kernel_us)
    assert times[0] > times[1] > times[2]


def test_the_shares_of_the_waves_time_add_up_to_one(axpy: emulator.Kernel) -> None:
    with emulator.timed() as timed:
        run(axpy)
    assert sum(timed.result.stalls.values()) == pytest.approx(1)
    assert timed.result.bound in model.STALLS


def test_memory_traffic_is_what_the_kernel_touches(axpy: emulator.Kernel) -> None:
    with emulator.timed() as timed:
        run(axpy, 1 << 20)
    # y and x are read, y is written, 4 bytes each; code, arguments and the first lines of neighbours are the rest.
    assert timed.result.hbm_bytes == pytest.approx(3 * 4 * (1 << 20), rel=0.05)


def test_launches_of_a_block_add_up(axpy: emulator.Kernel) -> None:
    with emulator.timed(start="mall") as one:
        run(axpy)
    with emulator.timed(start="mall") as two:
        run(axpy)
        run(axpy)
    assert two.result.kernel_us == pytest.approx(2 * one.result.kernel_us, rel=0.02)


def test_a_block_that_launches_nothing_has_no_time() -> None:
    with emulator.timed() as timed:
        pass
    with pytest.raises(GuardError, match="launched nothing"):
        _ = timed.result


def test_code_for_another_architecture_is_refused(axpy: emulator.Kernel) -> None:
    with emulator.timed() as timed:
        run(axpy)
    with pytest.raises(GuardError, match="code for gfx950; the MI300X runs gfx942"):
        estimate(timed.capture, "MI300X")


def test_the_simulator_and_the_tables_name_the_same_parameters() -> None:
    names = library.load().hftime_parameter_names().decode().split()
    for table in machines.MACHINES.values():
        assert sorted(names) == sorted(table.parameters)


def test_fitted_parameters_are_few_and_plausible() -> None:
    fitted = {name: item for name, item in machines.MI355X.parameters.items() if item.fitted}
    assert len(fitted) <= 12
    for name, item in fitted.items():
        assert item.low <= item.value <= item.high, name
    for item in machines.MI355X.parameters.values():
        assert item.source.split(":")[0] in ("document", "microbenchmark", "assumption", "fitted"), item.source


def test_a_machine_can_have_fewer_compute_units() -> None:
    assert machine("MI300X").cu_count == 304
    assert machine("MI300X", 80).cu_count == 80
    with pytest.raises(ConfigError, match="cu_count=81"):
        machine("MI300X", 81)
    with pytest.raises(ConfigError, match="there are parameters for MI355X, MI300X"):
        machine("MI100")


def test_unknown_parameters_are_refused_and_values_are_frozen() -> None:
    with pytest.raises(ConfigError, match="unknown parameters hbm_tbps"):
        machines.MI355X.with_values({"hbm_tbps": 8})
    with pytest.raises(FrozenInstanceError):
        machines.MI355X.parameters["clock_ghz"].value = 3  # type: ignore[misc]


def test_the_report_says_modelled_and_lists_instructions(axpy: emulator.Kernel) -> None:
    with emulator.timed() as timed:
        run(axpy)
    text = report.text(timed.result, report.hottest(timed.capture, machines.MI355X))
    assert text.startswith("modelled on MI355X") and text.startswith(str(timed))
    assert "not measured" in text
    assert "global_load_dword" in text or "s_waitcnt vmcnt(0)" in text


def test_hot_instructions_name_their_source_lines(tmp_path: Path) -> None:
    code = emulator.CodeObject(hip_compile.device_elf(SOURCE, tmp_path, flags=["-gline-tables-only"]))
    kernel = code.kernels["axpy"]
    with emulator.timed() as timed:
        run(kernel)
    hot = report.hottest(timed.capture, machines.MI355X, kernels=[kernel])
    line = next(n for n, text in enumerate(SOURCE.splitlines(), 1) if "y[i] +=" in text)
    loads = [item for item in hot if item.text.startswith(("global_load", "s_waitcnt vmcnt"))]
    assert loads
    assert all(item.source.endswith(f":{line}") for item in loads)
    assert loads[0].source in report.text(timed.result, hot)
    assert not report.hottest(timed.capture, machines.MI355X)[0].source


def test_two_timings_side_by_side_are_a_tie_within_the_error(axpy: emulator.Kernel) -> None:
    times = []
    for size in (SIZE, 64 * SIZE):
        with emulator.timed() as timed:
            run(axpy, size)
        times.append(timed.result)
    small, large = times
    assert "a tie" in report.compare(("one", "other"), (small, small))
    assert "small is faster" in report.compare(("small", "large"), (small, large))
    assert "small is faster" in report.compare(("large", "small"), (large, small))


def test_the_roofline_counts_what_a_kernel_computes_and_has_it_below_the_roof(axpy: emulator.Kernel) -> None:
    with emulator.timed() as timed, emulator.counters() as counted:
        run(axpy, 64 * SIZE)
    found = counted_report.profile(counted.result, "gfx950")
    # A multiply-add per item; x and y read, y written: 12 bytes. Items are whole waves.
    assert (found.matrix_flop, found.vector_flop) == (0, 2 * 64 * SIZE)
    assert found.flop_per_byte == pytest.approx(2 / 12, rel=0.01)
    roof = found.flop_per_byte * machines.MI355X["hbm_gbps"] * 1e3  # FLOP in a microsecond
    assert 0 < found.vector_flop / timed.result.kernel_us < roof


def test_the_timeline_has_the_phases_of_every_wave_and_its_axes_say_modelled(
    axpy: emulator.Kernel, tmp_path: Path
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with emulator.timed() as timed, emulator.counters() as counted:
        run(axpy, 64 * SIZE)
    picture = tmp_path / "time.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plots.timeline(timed, machines.MI355X, "cold", counted.result, "axpy 1", picture)
    found = re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())
    assert {"issues", *report.PHASES, "8,000 GB/s  ", "axpy 1", "TFLOP/s (modelled)", "µs (modelled)"} <= set(found)


def test_the_command_draws_a_picture_and_compares(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "time.png"
    done = CliRunner().invoke(
        cli, ["time", "residual_rms", "4,1024", "--beside", "residual_rms", "64,4096", "--plot", str(picture)]
    )
    assert done.exit_code == 0, done.output
    assert "residual_rms 64,4096" in done.output and "not measured" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_models_an_op() -> None:
    done = CliRunner().invoke(cli, ["time", "residual_rms", "4,1024", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = json.loads(done.output[done.output.index("{") :])
    assert result["gpu"].startswith("MI355X")
    assert 2 < result["replay_us"] < result["kernel_us"] < 8


def test_on_a_gpu_the_command_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card is a stand-in that copies operands on the CPU and takes 4 us a call; gpu-test has the real one."""
    card = devices.Device("cuda", "sm_90")
    monkeypatch.setattr(time, "devices", SimpleNamespace(current=lambda: card))
    monkeypatch.setattr(time, "on_gpu", lambda value: _pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, value))
    monkeypatch.setattr(timing_on_gpus, "copies_for", lambda size: 3)
    monkeypatch.setattr(timing_on_gpus, "measured_source", lambda: "measured:a card")
    monkeypatch.setattr(timing_on_gpus, "microseconds_per_call", lambda call, copies: call(2).numel() / 1024 + copies)
    done = CliRunner().invoke(cli, ["time", "rms_norm", "4,1024"], catch_exceptions=False)
    assert "rms_norm 4,1024: 7.00 us measured, replayed in a graph, 3 copies of the operands in turn" in done.output
    assert "10240 bytes of operands, 1 GB/s; measured:a card" in done.output
    done = CliRunner().invoke(cli, ["time", "rms_norm", "4,1024", "--trace", "t.json"])
    assert done.exit_code == 1 and "set HIPFORGE_DEVICE=emulator" in done.output


def test_the_command_refuses_a_call_that_runs_no_kernel() -> None:
    done = CliRunner().invoke(cli, ["time", "mxfp8_gemv", "1,768,100"])
    assert done.exit_code == 1
    assert "Error" in done.output


def test_time_does_not_depend_on_where_operands_lie_nor_on_what_else_is_allocated() -> None:
    codes, scales = torch.full((48, 256), 0x38, dtype=torch.uint8), torch.full((48, 8), 127, dtype=torch.uint8)
    weights = codes.view(torch.float8_e4m3fn)
    hip = runtime.load().library
    times, addresses, held, allocated = set(), set(), [], []
    for size in (1, 17, 4096, 100_003, 1, 1, 1):
        x = weights[:2].clone()
        with emulator.timed() as timed:
            hipforge.mxfp8_gemm(x, scales[:2], weights, scales)
        times.add(timed.result.replay_us)
        addresses.add(x.data_ptr())
        held.append((x, torch.empty(size)))
        pointer = ctypes.c_void_p()
        assert hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(64)) == 0
        allocated.append(pointer)
    for pointer in allocated:
        assert hip.hipFree(pointer) == 0
    assert len(addresses) > 1
    assert len(times) == 1, times
