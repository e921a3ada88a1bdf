"""The bench of decode attention: what it claims of the kernels, what it writes, and that a wrong result ends it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import bench_decode_attention as bench
import pytest
from click.testing import CliRunner, Result

from hipforge import devices
from hipforge.ops.decode_attention.cases import AttentionCell

ARCH = devices.current().default_arch


def invoke(*words: str) -> Result:
    return CliRunner().invoke(bench.main, ["--batch", "2", "--keys", "256", "--split-k", "2", *words])


@pytest.mark.parametrize("page_size", [0, 64])
def test_ours_reads_the_cache_once_with_fewer_registers_than_triton(page_size: int) -> None:
    ours, *others = bench.bench(AttentionCell(1, 8, 128, page_size, 512, 2), ARCH, on_gpu=False, split_k=4)
    assert (ours.implementation, ours.source, ours.us) == ("hipforge", "counted", None)
    assert (ours.vgpr_spills, ours.sgpr_spills, ours.scratch_bytes, ours.scratch_traffic) == (0, 0, 0, 0)
    names = [row.implementation for row in others]
    assert names == ["triton resident"] * (1 if page_size else 2) + ["triton streaming"]  # 128 keys span pages of 64
    for row in (ours, *others):
        assert row.relative_error <= bench.MAX_ERROR
        assert (row.k_reads, row.v_reads) == (1.0, 1.0)
        assert sum(row.by_class.values()) == row.instructions
    # A wave of our merge asks for four parts at once; here each has one, and asks for the same lines four times.
    assert ours.bytes_of["partial_loaded"] == 4 * ours.bytes_of["partial_stored"]
    for row in others:
        assert row.bytes_of["partial_stored"] == row.bytes_of["partial_loaded"]
        assert ours.vgprs is not None and row.vgprs is not None and ours.vgprs < row.vgprs
        assert ours.occupancy is not None and row.occupancy is not None and ours.occupancy > row.occupancy
        assert ours.lds_traffic is not None and row.lds_traffic is not None and ours.lds_traffic < row.lds_traffic


def test_numbers_are_written_under_what_they_are(tmp_path: Path) -> None:
    table, tree = tmp_path / "rows.csv", tmp_path / "rows.json"
    result = invoke("--csv", str(table), "--json", str(tree))
    assert result.exit_code == 0, result.output
    written = json.loads(tree.read_text())
    assert written["problem"]["keys"] == 256 and len(written["rows"]) == 4
    with table.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    for row, line in zip(written["rows"], lines, strict=True):
        assert set(row) == {"implementation", "configuration", "source", "checked", "compiled", "counted", "modelled"}
        assert int(line["compiled.vgprs"]) == row["compiled"]["vgprs"]
        assert int(line["counted.bytes_of.k_loaded"]) == row["counted"]["bytes_of"]["k_loaded"] == 2 * 256 * 128
    for heading in ("checked", "compiled", "counted", "modelled"):
        assert heading in result.output
    assert "measured" not in result.output


def test_a_wrong_result_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.decode_attention_splitk

    def wrong(*arguments: object, **keywords: object) -> object:
        out, lse = right(*arguments, **keywords)
        return out * 1.01, lse

    wrong.__name__ = right.__name__  # dispatch knows ops by their names
    monkeypatch.setattr(bench, "decode_attention_splitk", wrong)
    result = invoke()
    assert result.exit_code == 1 and "a result is wrong" in result.output
