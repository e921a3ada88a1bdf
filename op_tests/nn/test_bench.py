"""hipforge bench: what a report holds, the page that is made of it, and what goes into tuned tables."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import hipforge.configs
from hipforge.cli import bench
from hipforge.cli.main import cli
from hipforge.errors import ConfigError


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["bench", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def modelled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    cells = (bench.Cell("fp8_gemm", "2,64,128", 10.0, "somebody", 0.5), bench.Cell("rms_norm", "2,256"))
    monkeypatch.setattr(bench, "CELLS", cells)
    run("--report", folder / "out.json")
    return json.loads((folder / "out.json").read_text())


def test_a_report_on_the_emulator_is_modelled_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = modelled(monkeypatch, tmp_path)
    assert report["source"].startswith("model:cdna") and report["arch"] == "gfx950"
    first, second = report["rows"]
    assert first["kernel"].startswith("fp8_") and 1 < first["us"] < 10 and first["row"] is None
    assert second["cell"]["op"] == "rms_norm" and second["us"] > 1
    page = bench.text(report)
    assert "**modelled**" in page and "| `fp8_gemm` | 2,64,128 |" in page and "| 10 |" in page
    assert f"{int(first['us'] <= 5)} of 1 calls that have a goal reach it." in page
    output = run("--from", tmp_path / "out.json", "--merge", tmp_path / "tables", code=1)
    assert "only measured times go into tables; these are of model:" in output


def test_measured_times_go_into_the_rows_that_chose_the_kernels(tmp_path: Path) -> None:
    table = Path(hipforge.configs.__file__).parent / "fp8_gemm_tuned.csv"
    shutil.copy(table, tmp_path)
    before = list(csv.DictReader(table.open()))
    row = hipforge.ops.core.tuned.read_rows(hipforge.ops.schema_of("fp8_gemm"), table)[0]
    cell = {"op": "fp8_gemm", "shape": "1,2304,6144", "published_us": 9.77, "publisher": "", "goal": 0.85}
    report = {
        "hipforge": "0", "date": "2026-11-26", "arch": "gfx950", "source": "measured:MI355X/torch",
        "rows": [
            {"cell": cell, "us": 4.5, "kernel": "k", "configuration": {}, "table": "fp8_gemm", "row": dict(row.values)},
            {"cell": cell, "us": 9.0, "kernel": "k", "configuration": {}, "table": None, "row": None},
        ],
    }  # fmt: skip
    (tmp_path / "out.json").write_text(json.dumps(report))
    assert "1 rows measured" in run("--from", tmp_path / "out.json", "--merge", tmp_path)
    after = list(csv.DictReader((tmp_path / table.name).open()))
    assert len(after) == len(before)
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 1
    old, new = changed[0]
    assert (new["us"], new["source"]) == ("4.5", "measured:MI355X/torch")
    assert {name for name in old if old[name] != new[name]} == {"us", "source"}
    assert bench.text(report).startswith("# Measured times\n")


@pytest.mark.parametrize("content", ("", "[]", "{}", '{"rows": [{}]}', '{"rows": [{"us": "fast"}]}'))
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "out.json").write_text(content)
    assert "is no report of hipforge bench" in run("--from", tmp_path / "out.json", "--page", tmp_path / "p", code=1)


def test_the_page_of_predictions_is_made_of_the_tuned_rows(tmp_path: Path) -> None:
    """``hipforge bench --tables --page docs/predictions.md`` writes it; only its day may differ."""
    run("--tables", "--page", tmp_path / "page.md", "--report", tmp_path / "out.json")
    page = (Path(__file__).parents[2] / "docs" / "predictions.md").read_text()
    written = (tmp_path / "page.md").read_text()
    assert re.sub(r"on \d{4}-\d\d-\d\d by", "", page) == re.sub(r"on \d{4}-\d\d-\d\d by", "", written)
    cells = [row["cell"]["shape"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]]
    assert cells == [cell.shape for cell in bench.CELLS]


def test_a_shape_without_a_tuned_row_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "CELLS", (bench.Cell("fp8_gemm", "2,64,128"),))
    assert "no tuned row of fp8_gemm has 2,64,128" in run("--tables", "--page", tmp_path / "p", code=1)


def test_a_call_without_a_kernel_for_the_gpu_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(op: str, shape: str, rotating: bool) -> object:
        if op == "fp8_gemm":
            raise ConfigError("fp8_gemm runs no kernel")
        return SimpleNamespace(us=2.5)

    cells = (bench.Cell("fp8_gemm", "2,64,128"), bench.Cell("rms_norm", "2,256"))
    monkeypatch.setattr(bench, "CELLS", cells)
    gpu = SimpleNamespace(kind="cuda", is_gpu=True, arch_of=lambda: "sm_90")
    monkeypatch.setattr(bench.devices, "current", lambda: gpu)
    monkeypatch.setattr("hipforge.cli.time.measured", measured)
    monkeypatch.setattr("hipforge.cli.time.on_gpu", lambda value: value)
    told = SimpleNamespace(file=None, row=None, kernel="k", configuration={})
    monkeypatch.setattr("hipforge.ops.core.dispatch.explain", lambda *_, **__: told)
    monkeypatch.setattr("hipforge.tuning.timing.measured_source", lambda: "measured:card/torch")
    found = bench._run(False)
    assert [row["cell"]["op"] for row in found["rows"]] == ["rms_norm"] and found["source"] == "measured:card/torch"
    monkeypatch.setattr(bench, "CELLS", cells[:1])
    with pytest.raises(ConfigError, match="no call has a kernel for sm_90"):
        bench._run(False)
