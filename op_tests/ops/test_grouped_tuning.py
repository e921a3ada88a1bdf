"""The tuners of the grouped GEMMs on small cells: what they write, that ops follow it, and what rows they leave out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import hipforge
from hipforge import devices
from hipforge.cli.main import cli
from hipforge.cli.tune import command_of
from hipforge.emulator import timing
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.kernel import spelled
from hipforge.ops.moe import DEFAULT_BLOCK_M
from hipforge.tuning import driver, work
from hipforge.tuning.families import fp8_grouped_gemm, gate_up_split, mxfp4_grouped_gemm, mxfp8_grouped_gemm
from hipforge.tuning.families.fp8_grouped_gemm import ScaledMoeCell
from hipforge.tuning.grouped import ROUTINGS, MoeCell, MoeOperands, over_routings
from hipforge.tuning.search import Trial
from hipforge.tuning.table_writer import merge_rows, read_existing
from hipforge.tuning.tuner import Tuner, relative_error

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"


@dataclasses.dataclass(frozen=True)
class Case:
    """A tuner, two cells with different weights, the family's op and its columns beside kernel and configuration."""

    tuner: Tuner[Any, MoeOperands]
    cells: tuple[MoeCell, MoeCell]
    op: Any
    more: dict[str, int]


CASES = {
    "mxfp8": Case(
        mxfp8_grouped_gemm.TUNER,
        (MoeCell(64, 256, 4, False, 8, min_experts=2, experts=6), MoeCell(48, 1024, 1, True, 12, experts=4)),
        hipforge.grouped_mxfp8_linear,
        {"min_experts": 2},
    ),
    "mxfp4": Case(
        mxfp4_grouped_gemm.TUNER,
        (MoeCell(64, 256, 4, False, 8, experts=6), MoeCell(48, 1056, 1, True, 12, experts=4)),
        hipforge.grouped_mxfp4_linear,
        {},
    ),
    **{
        f"fp8 block={block}": Case(
            fp8_grouped_gemm.TUNER,
            (
                ScaledMoeCell(256, 256, 4, False, 8, experts=6, block=block),
                ScaledMoeCell(40, 1024, 1, True, 12, experts=4, block=block),
            ),
            hipforge.grouped_fp8_linear,
            {},
        )
        for block in (0, 32, 128)
    },
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def on_cpu(case: Case, cell: MoeCell, arch: str = "gfx950") -> MoeOperands:
    return case.tuner.operands(cell, arch, torch.device("cpu"))


def given(cell: MoeCell, parts: MoeOperands) -> tuple[Any, ...]:
    weights = parts.a, parts.a_scale, parts.w, parts.w_scale
    return *weights, *parts.index, cell.m, DEFAULT_BLOCK_M, cell.a_div, parts.weights


def test_a_candidate_is_modelled_over_several_routings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median counts: by one routing alone a configuration may win by where its work-groups fall."""
    cell, arch = MoeCell(64, 256, 1, False, 4, experts=40, top_k=2), devices.current().arch_of()
    parts, routed, times = mxfp4_grouped_gemm.TUNER.operands(cell, arch, torch.device("cpu")), [], iter((3.0, 9.0, 4.0))
    monkeypatch.setattr(timing, "estimate", lambda *_: SimpleNamespace(replay_us=next(times), bound="some"))
    modelled = over_routings(lambda *_: parts, lambda choice, cell, given: routed.append(given.topk_ids.tolist()))
    assert modelled(Choice("k", {}), cell, arch) == (4.0, "some")
    assert len(routed) == ROUTINGS == 3 and routed[0] not in routed[1:] and routed[1] != routed[2]


@pytest.mark.parametrize("tuner", [mxfp4_grouped_gemm.TUNER, gate_up_split.TUNER], ids=["grouped", "gate and up"])
def test_tuners_of_experts_model_over_routings(
    tuner: Tuner[Any, MoeOperands], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gate_up_split.SplitCell if tuner is gate_up_split.TUNER else MoeCell
    cell, arch = made(64, 256, 1, False, 4, experts=40, top_k=2), devices.current().arch_of()
    asked = []
    monkeypatch.setattr(timing, "estimate", lambda *_: asked.append(1) or SimpleNamespace(replay_us=1.0, bound="some"))
    assert tuner.modelled is not None
    assert tuner.modelled(tuner.family.choices(cell, arch)[0], cell, arch)[0] == 1.0
    assert len(asked) == ROUTINGS


def test_a_modelled_row_is_written_per_cell_and_measured_ones_stay(case: Case, tmp_path: Path) -> None:
    table, schema = tmp_path / "table.csv", case.tuner.family.table
    assert driver.tune(case.tuner, case.cells, table) == 2
    key = case.tuner.key(case.cells[0], "gfx950", 256)
    row = dict(read_existing(schema, table)[key])
    assert {name: row[name] for name in case.more} == case.more
    assert row["us"] is None and str(row["source"]).startswith("model:")
    assert isinstance(row["err"], float) and 0 < row["err"] < case.tuner.max_error
    merge_rows(table, schema, [{**row, "us": 5.0, "source": "measured:MI355X/versions"}])
    assert driver.tune(case.tuner, case.cells[:1], table) == 0
    assert read_existing(schema, table)[key]["us"] == 5.0
    assert driver.tune(case.tuner, case.cells, table, resume=True) == 0


def test_the_op_runs_what_a_row_says(case: Case, tmp_path: Path, put_table: Callable[..., Path]) -> None:
    cell, family, path = case.cells[0], case.tuner.family, tmp_path / "own.csv"
    default = family.default_choice(cell, "gfx950", 256)
    other = next(choice for choice in reversed(case.tuner.candidates(cell, "gfx950")) if choice != default)
    trial = Trial(other, 1e-6, 0.001, model_us=1.0)
    row = work.row_for(case.tuner, cell, ("gfx950", 256), trial, "model:test", None, 3.0)
    merge_rows(path, family.table, [row])
    put_table(family.table, path=path)
    parts = on_cpu(case, cell)
    told = hipforge.explain(case.op, *given(cell, parts))
    assert told.file is not None and told.file[0] == path
    assert (told.kernel, dict(told.configuration)) == (other.kernel, dict(other.configuration))
    assert relative_error(case.op(*given(cell, parts)), case.tuner.expected(cell, parts)) < case.tuner.max_error


@pytest.mark.gfx942
def test_a_result_of_other_experts_is_wrong(case: Case, arch: str) -> None:
    cell = case.cells[0]
    parts = on_cpu(case, cell, arch)
    want = case.tuner.expected(cell, parts)
    choice = case.tuner.candidates(cell, arch)[0]
    assert relative_error(case.tuner.run(choice, cell, parts), want) < case.tuner.max_error
    (elsewhere,) = case.tuner.copies(parts, 2)[1:]
    assert relative_error(case.tuner.run(choice, cell, elsewhere), want) > 100 * case.tuner.max_error
    doubled = parts.w_scale.clone()
    doubled[..., -1] += 1 if doubled.dtype == torch.uint8 else doubled[..., -1]
    scaled = dataclasses.replace(parts, w_scale=doubled)
    assert relative_error(case.tuner.run(choice, cell, scaled), want) > 10 * case.tuner.max_error


def test_candidates_are_those_of_every_kernel_of_the_family(case: Case) -> None:
    family = case.tuner.family
    added = dataclasses.replace(family.kernels[0], name="added_later")
    more = dataclasses.replace(case.tuner, family=dataclasses.replace(family, kernels=(*family.kernels, added)))
    before = case.tuner.candidates(case.cells[0], "gfx950")
    after = [choice for choice in more.candidates(case.cells[0], "gfx950") if choice not in before]
    assert {choice.kernel for choice in after} == {"added_later"}
    own = [choice.configuration for choice in before if choice.kernel == family.kernels[0].name]
    assert [choice.configuration for choice in after] == own


def test_cells_are_those_of_a_models_experts_or_of_shapes() -> None:
    def asked(family: str, *arguments: str) -> None:
        command_of(family).main([*arguments, "-o", "x"], standalone_mode=False)

    found: list[Any] = []
    for family, cell in (("fp8_grouped_gemm", ScaledMoeCell), ("mxfp4_grouped_gemm", MoeCell)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "tune", lambda tuner, wanted, output, **more: found.append(wanted) or 0)
            asked(family, "--config", str(EXAMPLES / "qwen3_235b_a22b.json"), "--tp", "4", "-m", "2")
            asked(family, "--shapes", "64,256", "-m", "8", "--experts", "6", "--top-k", "2", "--weighted")
        sizes = {"experts": 128, "top_k": 8}
        assert found == [
            [cell(768, 4096, 8, False, 16, **sizes), cell(4096, 384, 1, True, 16, **sizes)],
            [cell(64, 256, 1, True, 8, experts=6, top_k=2)],
        ]
        found.clear()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shapes", "64,256"), "--shapes of N,K need -m, the number of slots"),
        (("--shapes", "64,256", "--config", "x.json", "-m", "1"), "give either --shapes or --config, not both"),
        (("--config", str(EXAMPLES / "llama_3_1_8b.json")), "is of a model without experts"),
        (("--shapes", "64,256", "-m", "6"), "M must be a multiple of top_k = 4; got 6"),
    ],
)
def test_arguments_that_name_no_cells_are_refused(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["tune", "mxfp4_grouped_gemm", "-o", str(tmp_path / "t.csv"), *arguments])
    assert done.exit_code == 1 and said in done.output


# ---- rows that the default rule makes needless -----------------------------------------------------------------------

SLOW = {"rows": 32, "waves": 8, "columns": 16}


def _row(m: int, choice: Choice, source: str = "model:test") -> dict[str, Any]:
    return {
        "gfx": "gfx950", "cu_num": 256, "M": m, "N": 64, "K": 2048, "a_div": 4, "has_weight": 0,
        "kernel": choice.kernel, "config": spelled(choice.configuration), "use_hip": 1,
        "us": 1.0 if source.startswith("measured") else None, "source": source,
    }  # fmt: skip


def test_needless_rows_are_those_without_which_dispatch_does_the_same(tmp_path: Path) -> None:
    tuner, path = mxfp4_grouped_gemm.TUNER, tmp_path / "t.csv"
    cells = [MoeCell(64, 2048, 4, False, m) for m in (4, 8, 16, 32, 64)]
    rules = [tuner.family.default_choice(cell, "gfx950", 256) for cell in cells]
    assert len(set(map(str, rules))) == 1
    slow = tuner.family.kernels[0].choice(SLOW)
    # M = 64 says what the rule says; 16 what the row of 32 says; without that of 8 the row of 16 or 32 would serve it.
    chosen = [slow, rules[1], slow, slow, rules[4]]
    merge_rows(path, tuner.family.table, [_row(cell.m, choice) for cell, choice in zip(cells, chosen, strict=True)])
    rows = read_existing(tuner.family.table, path)
    needless = driver._needless(tuner, cells, rows, ("gfx950", 256))
    assert [key[2] for key in needless] == [64, 16]
    assert [key[2] for key in driver._needless(tuner, cells[2:3], rows, ("gfx950", 256))] == [16]
    merge_rows(path, tuner.family.table, [_row(64, rules[4], "measured:MI355X/versions")])
    rows = read_existing(tuner.family.table, path)
    assert [key[2] for key in driver._needless(tuner, cells, rows, ("gfx950", 256))] == [16]


def test_a_row_stays_where_the_default_rule_has_no_kernel_beyond_the_others(tmp_path: Path) -> None:
    tuner, path = mxfp8_grouped_gemm.TUNER, tmp_path / "t.csv"
    cells = [MoeCell(64, 2048, 4, False, m) for m in (4, 16)]
    rule = tuner.family.default_choice(cells[1], "gfx950", 256)
    assert isinstance(rule, Choice)
    last = {**_row(16, rule), "min_experts": 0}
    merge_rows(path, tuner.family.table, [last])
    rows = read_existing(tuner.family.table, path)
    assert [key[2] for key in driver._needless(tuner, cells, rows, ("gfx950", 256))] == [16]
    slow = tuner.family.kernels[0].choice(SLOW)
    merge_rows(path, tuner.family.table, [{**_row(4, slow), "min_experts": 0}])
    rows = read_existing(tuner.family.table, path)
    assert driver._needless(tuner, cells, rows, ("gfx950", 256)) == []
    assert tuner.family.default_choice(cells[1], "gfx950", 256) == rule  # the table in effect is as it was


@pytest.mark.parametrize(("gain", "kept"), [(1.02, False), (1.05, True)])
def test_only_clear_gains_over_the_default_rule_are_written(
    gain: float, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner, path = mxfp4_grouped_gemm.TUNER, tmp_path / "t.csv"
    cell = MoeCell(64, 2048, 4, False, 8)
    rule = tuner.family.default_choice(cell, "gfx950", 256)
    assert isinstance(rule, Choice)
    other = tuner.family.kernels[0].choice(SLOW)
    trials = [Trial(other, 1e-6, 0.001, model_us=1.0), Trial(rule, gain * 1e-6, 0.001, model_us=gain)]
    monkeypatch.setattr(work, "_search", lambda tuner, task: (trials, "model:test", None))
    said: list[str] = []
    assert driver.tune(tuner, [cell], path, gains_only=True, say=said.append) == kept
    assert (len(read_existing(tuner.family.table, path)) == 1) == kept
    assert said[-1] == f"{0 if kept else 1} rows taken out: dispatch does the same without them"
    assert f"{gain:.2f} x as fast" in said[-2] if kept else "as the default rule" in said[-2]
