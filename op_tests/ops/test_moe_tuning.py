"""The MoE tuner and bench on small cells, and the op inside torch.compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench_moe import bench_counted
from helpers.moe_cases import exact, oracle
from helpers.mxfp8_cases import assert_bits

import hipforge
from hipforge.ops.mxfp8_dense.tuner import MAX_ERROR
from hipforge.ops.mxfp8_grouped.family import TABLE as SMALLM_MXFP8_MOE
from hipforge.ops.mxfp8_grouped.tuner import TUNER, MoeCell
from hipforge.tuning.driver import tune
from hipforge.tuning.table_writer import merge_rows, read_existing

CELLS = [
    MoeCell(64, 256, 4, False, 8, min_experts=2, experts=6),
    MoeCell(48, 1024, 1, True, 12, experts=4),
]


def test_the_tuner_writes_a_modelled_row_per_cell_and_leaves_measured_ones(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    assert tune(TUNER, CELLS, table) == 2
    rows = read_existing(SMALLM_MXFP8_MOE, table)
    row = dict(rows["gfx950", 256, 8, 64, 256, 4, 0])
    assert row["min_experts"] == 2 and row["us"] is None and str(row["source"]).startswith("model:")
    assert isinstance(row["err"], float) and 0 < row["err"] < MAX_ERROR
    merge_rows(table, SMALLM_MXFP8_MOE, [{**row, "us": 5.0, "source": "measured:MI355X/versions"}])
    assert tune(TUNER, CELLS, table) == 1
    assert read_existing(SMALLM_MXFP8_MOE, table)["gfx950", 256, 8, 64, 256, 4, 0]["us"] == 5.0


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_bench_counts_ours_and_tritons_on_the_same_problem(cell: MoeCell) -> None:
    pytest.importorskip("triton")
    rows = bench_counted(cell)
    assert [row.implementation.split()[0] for row in rows] == ["hipforge", "hipforge", "hipforge", "triton"]
    for row in rows:
        assert row.relf < MAX_ERROR and row.weight_loads == 1.0 and row.source == "counted" and row.us is None
        assert row.instructions and row.vgprs and row.occupancy


def test_a_graph_holds_the_op() -> None:
    case = exact((0, 1, 1, 0), experts=2, n=16, k=96)

    def grouped(a: torch.Tensor, ids: torch.Tensor, experts: torch.Tensor, padded: torch.Tensor) -> torch.Tensor | None:
        return hipforge.grouped_gemm_mxfp8(
            a, case.a_scale, case.w, case.w_scale, ids, experts, padded, 4, 1, 64, torch.bfloat16, 1
        )

    compiled = torch.compile(grouped, backend="eager", fullgraph=True)
    assert_bits(compiled(case.a, *case.sorted()), oracle(case))
