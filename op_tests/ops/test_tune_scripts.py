"""Every script op_tests/tune_*.py runs: one tiny problem, from the command line to a valid row in a new table.

Any configuration that a tuner tries can be such a row.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hipforge import devices
from hipforge.cli.tune import TUNERS
from hipforge.ops.core.tuned import clear_tables, load_table, read_rows
from hipforge.tuning import work
from hipforge.tuning.families.fp8_gemm import QUANTIZERS
from hipforge.tuning.families.gate_up_split import KINDS
from hipforge.tuning.options import OPTIONS
from hipforge.tuning.search import Trial
from hipforge.tuning.table_writer import merge_rows

FOLDER = Path(__file__).resolve().parents[1]
GEMM = ("--shapes", "64,256", "-m", "1")
GROUPED = ("--shapes", "64,256", "-m", "4", "--experts", "6")


@dataclass(frozen=True)
class Script:
    """What a script is given: its family and the arguments of a tiny problem."""

    family: str
    arguments: tuple[str, ...] = GEMM


SCRIPTS = {
    "tune_mxfp8_gemm.py": Script("mxfp8_gemm"),
    "tune_mxfp8_grouped_gemm.py": Script("mxfp8_grouped_gemm", GROUPED),
    "tune_fp8_grouped_gemm.py": Script("fp8_grouped_gemm", (*GROUPED, "--block", "32")),
    "tune_mxfp4_grouped_gemm.py": Script("mxfp4_grouped_gemm", GROUPED),
    "tune_gate_up_split.py": Script("gate_up_split", (*GROUPED, "--kind", "128")),
    "tune_mxfp4_gemm.py": Script("mxfp4_gemm"),
    "tune_mxfp4_made.py": Script("mxfp4_made"),
    "tune_fp8_gemm.py": Script("fp8_gemm"),
    "tune_fp8_skinny_gemm.py": Script("fp8_skinny_gemm"),
    "tune_decode_attention.py": Script(
        "decode_attention_fp8", ("-b", "1", "--keys", "64", "--heads", "1", "1", "--page-size", "0", "--d", "64")
    ),
    "tune_decode_attention_int4.py": Script(
        "decode_attention_int4", ("-b", "1", "--keys", "64", "--heads", "1", "1", "--page-size", "0", "--d", "64")
    ),
}


def test_every_script_is_run_here_and_every_family_has_one() -> None:
    assert {path.name for path in FOLDER.glob("tune_*.py")} == set(SCRIPTS)
    assert {script.family for script in SCRIPTS.values()} == set(TUNERS)


@pytest.mark.parametrize(("option", "kinds"), [("block", QUANTIZERS), ("kind", KINDS)])
def test_the_kinds_that_the_command_offers_are_those_of_the_tuner(option: str, kinds: dict[int, object]) -> None:
    assert [int(kind) for kind in OPTIONS[option][0].type.to_info_dict()["choices"]] == [*kinds]


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_tunes_into_a_new_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, table = SCRIPTS[name], tmp_path / "tuned.csv"
    monkeypatch.setattr(sys, "argv", [name, *script.arguments, "-o", str(table)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert ended.value.code == 0
    assert f"1 rows written to {table}" in capsys.readouterr().out
    schema = load_table(script.family).schema
    (row,) = read_rows(schema, table)
    assert row.key[:2] == (devices.current().default_arch, devices.current().cu_count())
    assert str(row.values["source"]).startswith("model:") and row.values["us"] is None
    clear_tables()


@pytest.mark.parametrize("family", TUNERS)
def test_every_candidate_is_a_row_and_comes_back_from_it(family: str, tmp_path: Path) -> None:
    tuner, path = work.tuner_of(family), tmp_path / "rows.csv"
    for cell in tuner.default_cells[0], tuner.default_cells[-1]:
        for choice in tuner.candidates(cell, "gfx950"):
            trial = Trial(choice, 1e-6, 0.001)
            row = work.row_for(tuner, cell, ("gfx950", 256), trial, "model:test", None, 3.0)
            path.unlink(missing_ok=True)
            merge_rows(path, tuner.family.table, [row])
            assert tuner.family.choice_of(read_rows(tuner.family.table, path)[0]) == choice
