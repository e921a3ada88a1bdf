"""The bench of the fused FP8 kernels: what it counts, and that a wrong result ends it with status 1."""

from __future__ import annotations

import csv

import bench_fused_fp8
from click.testing import CliRunner

OPS = [
    "residual_rms", "residual_rms_mxfp8", "rms_norm_fp8", "rms_norm_mxfp8", "swiglu_fp8", "swiglu_mxfp8",
    "mxfp4_quantize", "mxfp8_quantize",
]  # fmt: skip


def test_rows_are_counted_and_written(tmp_path):
    path = tmp_path / "rows.csv"
    result = CliRunner().invoke(bench_fused_fp8.main, ["--rows", "2", "--cols", "2048", "--csv", str(path)])
    assert result.exit_code == 0, result.output
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["op"], row["kernel"]) for row in rows] == [(op, k) for op in OPS for k in ("hipforge", "triton")]
    for row in rows:
        assert (row["source"], row["us"], row["torch_us"]) == ("counted", "", "")
        assert float(row["excess"]) >= 0
        assert float(row["slots_per_result"]) > 1
        assert float(row["excess"]) < 0.02


def test_a_wrong_result_ends_with_status_1(monkeypatch):
    good = bench_fused_fp8.swiglu_fp8
    monkeypatch.setattr(bench_fused_fp8, "swiglu_fp8", lambda gate_up, scale: good(gate_up, scale * 2))
    result = CliRunner().invoke(bench_fused_fp8.main, ["--rows", "1", "--cols", "128"])
    assert result.exit_code == 1
    assert "disagree" in result.output


def test_columns_that_do_not_fit_are_refused():
    result = CliRunner().invoke(bench_fused_fp8.main, ["--cols", "96"])
    assert result.exit_code == 2 and "96 is not a positive multiple of 64" in result.output
