"""The skinny GEMM's tuner: a search that leaves out what cannot win, the MI300X in the model, roles in a work-group."""

from __future__ import annotations

import dataclasses

import pytest

from hipforge.tuning import model
from hipforge.tuning.search import Candidate, search

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


def test_a_search_with_bounds_tries_the_promising_first_and_leaves_out_what_cannot_win():
    problem = Costs({"a": 9.0, "b": 4.0, "c": 5.0, "d": 3.5, "e": None})
    bounds = {"a": 8.0, "b": 2.0, "c": 4.5, "d": 3.0, "e": 1.0}
    trials = search(
        problem, [Candidate(name, {}) for name in "abcde"], 1.0, bound=lambda candidate: bounds[candidate.kernel]
    )
    assert problem.tried == [
        "e",
        "b",
        "d",
    ]  # a wrong result sets no limit; b's 4.0 admits d, d's 3.5 leaves out c and a
    assert [trial.candidate.kernel for trial in trials] == ["d", "b", "e"]
    assert trials[-1].rejected
