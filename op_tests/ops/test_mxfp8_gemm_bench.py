"""The small-M MX-FP8 bench counts what it says, for ours and for Triton's kernels, and checks results first."""

from __future__ import annotations

import csv
from pathlib import Path

import bench_mxfp8_gemm as bench
import click
import pytest
from click.testing import CliRunner

from hipforge.tuning.cases import Cell


def test_a_cell_is_counted_side_by_side_into_a_csv(tmp_path: Path) -> None:
    target, picture = tmp_path / "rows.csv", tmp_path / "rows.png"
    arguments = ["--shapes", "128,256", "-m", "16", "--csv", str(target), "--plot", str(picture)]
    result = CliRunner().invoke(bench.command, arguments)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    with target.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["implementation"].split()[0] for row in rows] == ["hipforge", "triton", "triton"]
    assert {row["source"] for row in rows} == {"counted:emulator"}
    assert {row["us"] for row in rows} == {""}  # nothing is measured without a GPU
    # ceil(256 / 128) K steps x 8 tiles of columns x one tile of rows.
    assert int(rows[0]["mfma"]) == 2 * 8
    assert [float(row["weight_loads"]) for row in rows] == [1.0, 1.0, 1.0]
    for row in rows:
        classes = ("valu", "mfma", "salu", "memory", "lds", "other")
        assert sum(int(row[name]) for name in classes) == int(row["instructions"])
        assert float(row["relf"]) <= bench.MAX_ERROR


def test_a_wrong_result_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "relative_error", lambda got, want: 0.02)
    with pytest.raises(click.ClickException, match=r"relF 2\.00e-02 > 3e-03"):
        bench.bench(Cell(n=32, k=64, m=1), on_gpu=False)


def test_the_floor_is_each_byte_once_over_the_bandwidth() -> None:
    # 9216 x 6144 weight bytes and their scales at 8 TB/s: 7.3 us, the figure known for this shape.
    assert bench.floor_us(Cell(n=9216, k=6144, m=1)) == pytest.approx(7.30, abs=0.01)
