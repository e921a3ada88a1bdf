"""The skinny GEMM's tuner: a search that leaves out what cannot win, the MI300X in the model, roles in a work-group."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import hipforge
from hipforge import devices, explain
from hipforge.cli.main import cli
from hipforge.cli.tune import command_of
from hipforge.emulator.timing.context import gpu_of
from hipforge.emulator.timing.machines import MACHINES as GPUS
from hipforge.ops.core.tuned import read_rows
from hipforge.ops.fp8_skinny_gemm.family import FAMILY
from hipforge.ops.fp8_skinny_gemm.family import TABLE as FP8_SKINNY_GEMM
from hipforge.ops.fp8_skinny_gemm.kernels import QUEUE, queue, wave_split
from hipforge.ops.fp8_skinny_gemm.raw import FORMATS
from hipforge.ops.fp8_skinny_gemm.space import Configuration, refusal
from hipforge.ops.reference.skinny import skinny_gemm as reference
from hipforge.tuning import model, timing
from hipforge.tuning.cases import Cell
from hipforge.tuning.families import fp8_skinny_gemm as skinny_gemm_fp8
from hipforge.tuning.search import Candidate, search
from hipforge.tuning.tuner import MACHINES, Modelled, relative_error

pytestmark = pytest.mark.gfx942("bound_is or command_writes")

ARCH = devices.current().default_arch

# 304 work-groups of 10 waves, 6 of which stream, 2 of which multiply.
WORK = model.Work(
    workgroups=304,
    waves_per_workgroup=10,
    vector_instructions=304 * 10 * 100,
    instructions=304 * 10 * 150,
    matrix_cycles=304 * 20_000,
    loaded_bytes=80_000_000,
    unique_bytes=80_000_000,
    streamed_bytes=80_000_000,
    occupancy=4,
    in_flight_bytes=2400,
    matrix_waves=2,
)


# ---- the model -------------------------------------------------------------------------------------------------------


def test_both_gpus_have_their_own_rates_and_versions():
    fast, slow = model.estimate(WORK, model.MI355X), model.estimate(WORK, model.MI300X)
    # One work-group of 10 waves fits a compute unit. In flight are 304 x 10 x 2400 bytes = 7.3 MB per 0.8 us, more than
    # 5.3 TB/s take; and 256 x 10 x 2400 = 6.1 MB, not quite 8 TB/s.
    assert slow.memory == pytest.approx(80_000_000 / 5.3e12) and slow.bound == "memory"
    assert fast.memory == pytest.approx(80_000_000 / (256 * 10 * 2400 / 0.8e-6))
    assert (model.MI355X.source, model.MI300X.source) == ("model:cdna4-counts-1", "model:cdna3-counts-1")


def test_matrix_cycles_fall_on_the_waves_that_have_them():
    alone = dataclasses.replace(WORK, vector_instructions=0, instructions=0)
    assert model.estimate(alone, model.MI300X).issue == pytest.approx(20_000 / 2 / 2.1e9)
    # Spread over all ten, three of which share a SIMD: its pipe is the bound.
    spread = dataclasses.replace(alone, matrix_waves=None)
    assert model.estimate(spread, model.MI300X).issue == pytest.approx(3 * 20_000 / 10 / 2.1e9)


def test_the_busiest_work_group_sets_latency_issue_and_cache_but_not_the_memory():
    even, uneven = (model.estimate(dataclasses.replace(WORK, busiest=b), model.MI300X) for b in (1.0, 2.0))
    assert uneven.memory == even.memory
    assert (uneven.issue, uneven.cache) == (pytest.approx(2 * even.issue), pytest.approx(2 * even.cache))
    trips = -(-80_000_000 // (304 * 10 * 2400))
    assert even.latency == pytest.approx((1 + trips) * 0.8e-6)
    assert uneven.latency == pytest.approx((1 + 2 * 80_000_000 // (304 * 10 * 2400) + 1) * 0.8e-6)


# ---- the search ------------------------------------------------------------------------------------------------------


class Costs:
    def __init__(self, seconds):
        self.seconds = seconds
        self.tried = []

    def run(self, candidate):
        self.tried.append(candidate.kernel)
        return float("nan") if self.seconds[candidate.kernel] is None else 0.0

    def cost(self, candidate):
        return self.seconds[candidate.kernel], ""


def test_a_search_with_bounds_leaves_out_what_cannot_win():
    problem = Costs({"a": 9.0, "b": 4.0, "c": 5.0, "d": 3.5, "e": None})
    bounds = {"a": 8.0, "b": 2.0, "c": 4.5, "d": 3.0, "e": 1.0}
    trials = search(problem, [Candidate(name, {}) for name in "ebdca"], 1.0, bound=lambda c: bounds[c.kernel])
    assert problem.tried == [
        "e",
        "b",
        "d",
    ]  # a wrong result sets no limit; b's 4.0 admits d, d's 3.5 leaves out c and a
    assert [trial.candidate.kernel for trial in trials] == ["d", "b", "e"]
    assert trials[-1].rejected


# ---- the tuner -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", FORMATS)
def test_every_candidate_keeps_the_rules_reads_weights_once_and_has_the_deepest_queue(arch):
    cells = skinny_gemm_fp8.TUNER.default_cells  # three projections by four values of M
    assert len(cells) == 12 and {(c.n, c.k) for c in cells} == {(2304, 16384), (13312, 16384), (16384, 6656)}
    for cell in cells:
        chosen = FAMILY.choices(cell, arch)
        split = [wave_split.Configuration(**c.configuration) for c in chosen if c.kernel == wave_split.KERNEL]
        assert len(split) == len(set(split)) and 8 <= len(split) <= 16
        assert all(wave_split.refusal(c, cell.k) is None and c.rows >= cell.m for c in split)
        found = [Configuration(**c.configuration) for c in chosen if c.kernel == QUEUE.name]
        assert len(found) == len(set(found)) > 500
        tried = skinny_gemm_fp8.TUNER.candidates(cell, arch)
        assert {c.kernel for c in tried} == {wave_split.KERNEL, QUEUE.name}
        assert all(c in tried for c in chosen if c.kernel == wave_split.KERNEL)
        for c in found:
            assert refusal(c, arch, cell.k) is None and c.tile_m >= cell.m
            assert c.qsize == 6 or refusal(dataclasses.replace(c, qsize=c.qsize + 1), arch, cell.k) is not None


def test_tiles_hold_all_rows_and_are_not_half_empty():
    of_8, of_24 = {(8, 1)}, {(8, 3), (16, 2), (32, 1)}
    found = [{tile[:2] for tile in queue.tiles_for(m)} for m in (1, 8, 9, 16, 17, 24, 32)]
    assert found == [of_8, of_8, {(8, 2), (16, 1)}, {(8, 2), (16, 1)}, of_24, of_24, {(16, 2), (32, 1)}]


@settings(max_examples=200, deadline=None)
@given(columns=st.integers(1, 40), splits=st.integers(1, 8), extra=st.integers(0, 40), cu_count=st.integers(1, 50))
def test_the_busiest_share_is_that_of_the_kernels_runs(columns, splits, extra, cu_count):
    blocks = splits + extra
    each = blocks // splits
    # As the kernel's Tiles: the split is the slowest index and its last part takes what is left; of the runs, the first
    # are longer.
    work = [blocks - split * each if split + 1 == splits else each for split in range(splits) for _ in range(columns)]
    workgroups = min(len(work), cu_count)
    lengths = [len(work) // workgroups + (w < len(work) % workgroups) for w in range(workgroups)]
    runs = [sum(work[sum(lengths[:w]) : sum(lengths[: w + 1])]) for w in range(workgroups)]
    assert queue.busiest_share(len(work), splits, blocks, cu_count) == pytest.approx(max(runs) * workgroups / sum(work))


def test_the_bound_is_below_the_cost_that_counts_give():
    tuner = skinny_gemm_fp8.TUNER
    cell = Cell(n=200, k=1056, m=5)
    problem = Modelled(tuner, cell, ARCH)
    for b_lanes, waves, qsize, split_k in [(5, (1, 4, 2), 2, 1), (2, (2, 6, 2), 4, 3), (3, (1, 4, 3), 4, 2)]:
        chosen = Configuration(8, 1, b_lanes, 4, *waves, qsize, split_k)
        candidate = Candidate("skinny_gemm_fp8", chosen.parameters())
        assert problem.run(candidate) <= tuner.max_error
        seconds, _ = problem.cost(candidate)
        assert 0.5 * seconds < tuner.bound(candidate, cell, MACHINES[ARCH]) < seconds
    for c in (wave_split.Configuration(8, 8, 4), wave_split.Configuration(8, 16, 2, 2)):
        candidate = wave_split.choice(c)
        assert problem.run(candidate) <= tuner.max_error
        assert tuner.bound(candidate, cell, MACHINES[ARCH]) < problem.cost(candidate)[0]


def test_the_command_writes_rows_that_the_planner_takes(tmp_path, monkeypatch, put_table):
    path = tmp_path / "t.csv"
    tuner = skinny_gemm_fp8.TUNER
    few = dataclasses.replace(tuner, most_trials=2)
    monkeypatch.setattr(skinny_gemm_fp8, "TUNER", few)
    command = command_of("fp8_skinny_gemm")
    result = CliRunner().invoke(command, ["-o", str(path), "--shapes", "n=96,k=544", "-m", "3"], catch_exceptions=False)
    assert result.exit_code == 0 and "1 rows written" in result.output
    [row] = read_rows(FP8_SKINNY_GEMM, path)
    assert row.key == (ARCH, MACHINES[ARCH].cu_count, 3, 96, 544)
    assert row.values["source"] == f"model:{GPUS[gpu_of(ARCH)].version}"
    assert row.values["us"] is None and row.values["model_us"] > 1 and row.integer("use_hip") == 1
    assert 0 < row.values["err"] <= 2.0**-11

    put_table(FP8_SKINNY_GEMM, path=path)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 544, generator=generator).to(FORMATS[ARCH]) for rows in (3, 96))
    found = explain("skinny_gemm", a, b.t(), torch.ones(1))
    assert found.file == (path, 2) and dict(found.configuration) == dict(FAMILY.choice_of(row).configuration)
    assert found.reason == "the tuned row of this shape"
    want = reference(a, b.t(), torch.ones(1), None, torch.float64, torch.float64)
    assert relative_error(hipforge.skinny_gemm(a, b.t(), torch.ones(1)), want) <= 2e-3


def test_the_baseline_is_torchs_scaled_mm_on_the_same_operands(monkeypatch):
    tuner = skinny_gemm_fp8.TUNER
    cell = Cell(n=48, k=256, m=4)
    parts = tuner.operands(cell, ARCH, torch.device("cpu"))
    results = []

    def once(call, copies):
        results.extend(call(index) for index in range(copies))
        return 7.0

    monkeypatch.setattr(timing, "microseconds_per_call", once)
    assert tuner.baselines(cell, [parts, parts]) == (7.0, 7.0)
    monkeypatch.setattr("hipforge.tuning.families.fp8_skinny_gemm._torch_is_a_candidate", lambda: True)
    assert tuner.baselines(cell, [parts, parts]) is None  # on sm_90 a row may name it
    assert len(results) == 2 and all(relative_error(got, tuner.expected(cell, parts)) <= 2.0**-11 for got in results)


def test_more_rows_than_the_kernels_take_are_not_tuned(tmp_path):
    given = ["tune", "fp8_skinny_gemm", "-o", str(tmp_path / "t.csv"), "--shapes", "64,64", "-m", "33"]
    said = CliRunner().invoke(cli, given)
    assert said.exit_code != 0 and "the kernels take M of at most 32; got 33" in said.output
    assert not (tmp_path / "t.csv").exists()
