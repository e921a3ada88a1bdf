"""Tuners choose by the model of time: which candidates are timed, how ties are broken, and what decides at M = 8."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hipforge import devices, emulator
from hipforge.emulator.timing import machines
from hipforge.emulator.timing.model import ERROR_BAND
from hipforge.ops.core.tuned import read_rows
from hipforge.ops.mxfp4_gemm.family import TABLE as MXFP4_GEMM
from hipforge.tuning import driver, shortlist
from hipforge.tuning.cases import Cell
from hipforge.tuning.families import mxfp4_gemm as mxfp4_gemm
from hipforge.tuning.families import mxfp8_gemm as mxfp8_gemm
from hipforge.tuning.search import Candidate, Trial
from hipforge.tuning.shortlist import Contender
from hipforge.tuning.work import Task, tune_cell


def trial(kernel: str, number: int, seconds: float | None, model_us: float | None = None) -> Trial:
    return Trial(Candidate(kernel, {"n": number}), seconds, 0.001, model_us=model_us)


def numbers(trials: list[Trial]) -> list[int]:
    return [item.candidate.configuration["n"] for item in trials]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current", lambda: devices.Device("emulator", "gfx950"))


def test_close_candidates_and_the_best_of_every_kernel_are_timed() -> None:
    close = [trial("a", n, 1 + 0.01 * n) for n in range(shortlist.MOST_TIMED + 2)]
    far = [trial("a", 90, 1.9), trial("b", 91, 2.0), trial("b", 92, 2.1), trial("c", 93, None)]
    chosen = numbers(shortlist.select([*close, *far]))
    assert chosen == [*range(shortlist.MOST_TIMED), 91]
    asked_for = shortlist.select([*close, *far], lambda choice: choice.configuration["n"] == 90)
    assert numbers(asked_for) == [*range(shortlist.MOST_TIMED), 90, 91]


def test_a_tie_goes_to_fewer_launches_then_instructions_then_to_the_fuller_grid() -> None:
    contenders = [
        Contender(trial("a", 1, 1, 10.0), 1, 500, 1.0),
        Contender(trial("a", 2, 1, 10.9), 1, 100, 0.5),
        Contender(trial("a", 3, 1, 10.8), 1, 100, 0.9),
        Contender(trial("a", 4, 1, 11.5), 1, 10, 1.0),
        Contender(trial("a", 5, 1, 11.2), 1, 10, 1.0),
        Contender(trial("a", 6, 1, 10.1), 2, 10, 1.0),
    ]
    assert numbers(shortlist.order(contenders, 0.1)) == [3, 2, 1, 6, 5, 4]
    assert numbers(shortlist.order(contenders, 0.0)) == [1, 6, 3, 2, 5, 4]


def test_configurations_of_one_loop_are_decided_more_finely_than_kernels() -> None:
    contenders = [
        Contender(trial("a", 1, 1, 10.0), 1, 500, 1.0),
        Contender(trial("b", 2, 1, 10.2), 1, 400, 1.0),  # a tie with the first, of its loop, with fewer instructions
        Contender(trial("b", 3, 1, 10.9), 1, 100, 1.0),  # 9 % slower: no tie within a loop
        Contender(trial("c", 4, 1, 10.8), 1, 300, 1.0),  # another loop, within the band
        Contender(trial("c", 5, 1, 11.3), 1, 10, 1.0),
    ]
    loops = {"a": "wave", "b": "wave", "c": "tiles"}
    assert numbers(shortlist.order(contenders, 0.1, loops.__getitem__)) == [4, 2, 1, 3, 5]
    # The fastest of both loops are 8 % apart, what the first one's tie chose and the other's fastest 6 %.
    assert numbers(shortlist.order(contenders, 0.07, loops.__getitem__)) == [2, 1, 4, 3, 5]
    tuner = dataclasses.replace(mxfp8_gemm.TUNER, loop=loops.__getitem__)
    a, b, c = (Candidate(kernel, {}) for kernel in "abc")
    assert shortlist.tie_band(tuner, "gfx950", a, b) == shortlist.WITHIN_LOOP
    assert shortlist.tie_band(tuner, "gfx950", a, c) == ERROR_BAND["gfx950"]
    without = dataclasses.replace(tuner, loop=None)
    assert shortlist.tie_band(without, "gfx950", a, a) == ERROR_BAND["gfx950"]


def test_every_configuration_of_a_loop_that_may_win_is_timed(emulated) -> None:
    cell = Cell(256, 1024, 32)
    done = tune_cell(Task("mxfp8_gemm", cell, ("gfx950", 256), on_gpu=False))
    timed = {str(one.candidate) for one in done.trials if one.model_us is not None}
    found = mxfp8_gemm.TUNER.candidates(cell, "gfx950")
    waves = {str(choice) for choice in found if mxfp8_gemm.FAMILY.kernel(choice.kernel).loop}
    assert waves <= timed and len(waves) > 2 * shortlist.MOST_TIMED


def test_rows_hold_modelled_microseconds_and_the_models_version(tmp_path, emulated) -> None:
    path = tmp_path / "t.csv"
    said: list[str] = []
    cell = Cell(48, 256, 20)
    assert driver.tune(dataclasses.replace(mxfp4_gemm.TUNER, most_trials=3), [cell], path, say=said.append) == 1
    [row] = read_rows(MXFP4_GEMM, path)
    assert row.key == ("gfx950", 256, 20, 48, 256) and row.values["kernel"] == "mxfp4_gemm" and row.values["err"] < 3e-3
    tried = mxfp4_gemm.TUNER.candidates(cell, "gfx950")
    assert {c.configuration["m_sub"] for c in tried if c.kernel == "mxfp4_gemm"} == {1, 2}
    assert {c.configuration["tile"] for c in tried if c.kernel == "mxfp4_gemm_tiles"} == {32064}
    assert row.values["source"] == f"model:{machines.MI355X.version}" and row.values["us"] is None
    assert 1 < row.values["model_us"] < 10
    assert f"replayed in a graph {row.values['model_us']:.2f} us" in said[-1]


def test_a_table_from_before_the_column_is_read_and_gets_it_when_written(tmp_path, emulated) -> None:
    path = tmp_path / "t.csv"
    header = ",".join(name for name in MXFP4_GEMM.header if name != "model_us")
    path.write_text(f"{header}\ngfx950,256,8,64,256,mxfp4_gemm,m_sub=1;n_sub=1;k_splits=1,1,,,,0.0016,model:cdna4-counts-1\n")
    assert read_rows(MXFP4_GEMM, path)[0].values["model_us"] is None
    assert driver.tune(dataclasses.replace(mxfp4_gemm.TUNER, most_trials=1), [Cell(48, 256, 20)], path) == 1
    assert path.read_text().splitlines()[0] == ",".join(MXFP4_GEMM.header)
    assert [row.values["model_us"] is None for row in read_rows(MXFP4_GEMM, path)] == [False, True]


def test_eight_rows_go_to_the_matrix_kernel_because_the_vector_one_waits_for_issue(emulated) -> None:
    cell = Cell(768, 6144, 8)
    done = tune_cell(Task("mxfp8_gemm", cell, ("gfx950", 256), on_gpu=False))
    assert done.row is not None, done.error
    assert done.row["kernel"] in ("smallm_mxfp8_mfma", "mxfp8_wave_split", "mxfp8_k_packed")
    parts = mxfp8_gemm.TUNER.operands(cell, "gfx950", torch.device("cpu"))
    busy = {}
    for choice in (
        Candidate("smallm_mxfp8_gemv", {"block_n": 8}),
        Candidate("smallm_mxfp8_mfma", {"n_sub": 1, "k_splits": 4}),
    ):
        with emulator.timed() as timed:
            mxfp8_gemm.TUNER.run(choice, cell, parts)
        busy[choice.kernel] = timed.result.stalls["issue"] + timed.result.stalls["valu"]
        assert timed.result.bound == ("issue" if choice.kernel == "smallm_mxfp8_gemv" else "vmcnt")
    assert busy["smallm_mxfp8_gemv"] > 2 * busy["smallm_mxfp8_mfma"]


def test_the_band_of_ties_is_the_validated_error() -> None:
    assert 0.05 < ERROR_BAND["gfx950"] < 0.2
