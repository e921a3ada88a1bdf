"""The MXFP4 bench compares the kernel with the reference and reports counts, not times, on the emulator."""

from __future__ import annotations

import csv
from pathlib import Path

import bench_mxfp4 as bench
import pytest
import torch
from click.testing import CliRunner


def invoke(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr(bench, "SHAPES", ((4, 32, 64),))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # what it saves does not matter here
    result = CliRunner().invoke(bench.main, ["--skip-start-up", "--repeats", "1", *words])
    return f"{result.exit_code} {result.exception if result.exit_code else ''}"


def test_a_shape_is_counted_and_held_to_the_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "rows.csv"
    assert invoke(monkeypatch, "--csv", str(target)) == "0 "
    with target.open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert row["kernel_ms"] == "" and int(row["kernel_instructions"]) > 0 and float(row["relf"]) <= 1e-3


def test_a_kernel_that_disagrees_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.mxfp4_gemm
    monkeypatch.setattr(bench, "mxfp4_gemm", lambda *operands: right(*operands) * 1.01)
    assert "kernel and the reference disagree" in invoke(monkeypatch)
