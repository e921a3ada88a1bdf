"""hipforge bench: what a report holds, the page that is made of it, and what goes into tuned tables."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from helpers import streaming
from nn.test_time_model import DENSE, LATENTS, written
from nn.test_time_model import modelled as time_model

import hipforge.configs
from hipforge.cli import bench
from hipforge.cli.main import cli
from hipforge.cli.operands import routed
from hipforge.emulator.timing.machines import machine
from hipforge.errors import ConfigError
from hipforge.ops.core.tuned import clear_tables


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["bench", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


CELLS = (
    bench.Cell((bench.Call("fp8_gemm", "2,64,128"),), 10.0, "somebody", 0.5, "kernel"),
    bench.Cell((bench.Call("rms_norm", "2,256"), bench.Call("rms_norm", "2,256", "mall")), 5.0, "somebody", 0.9),
)


def page_of(*cells: tuple[bench.Cell, float]) -> str:
    """The page of a report with these lines and the durations of their kernels."""
    part = {"us": 1.0, "kernel": "some", "configuration": {}, "table": None, "row": None}
    rows = [{"cell": asdict(cell), "parts": [{**part, "kernel_us": us}]} for cell, us in cells]
    return bench.text({"hipforge": "0", "date": "", "arch": "gfx950", "source": "model:0", "rows": rows})


def test_the_page_names_goals_that_reading_the_weights_alone_misses() -> None:
    def line(m: int, reading: float | None) -> bench.Cell:
        return bench.Cell((bench.Call("fp8_gemm", f"{m},64,128"),), 10.0, "somebody", 0.5, "kernel", reading)

    page = page_of((line(1, 5.1), 6.0), (line(2, 4.9), 6.0), (line(3, None), 6.0), (line(4, 5.1), 4.0))
    assert "| 10 | kernel | 0.60 | ≤ 0.5 | 5.10 | some() |" in page and "| 0.60 | ≤ 0.5 |  | some() |" in page
    assert "1 of 4 lines that have a goal reach it." in page
    beyond = "reading the weights alone takes longer than the goal allows"
    assert f"In 1 of the 3 others {beyond}: `fp8_gemm` 1,64,128 0.51 for 0.5." in page
    assert beyond not in page_of((line(2, 4.9), 6.0), (line(3, None), 6.0))


def test_the_page_has_the_median_of_lines_that_have_a_goal_for_it() -> None:
    def line(m: int, median_goal: float | None) -> bench.Cell:
        calls = (bench.Call("fp8_gemm", f"{m},64,128"),)
        return bench.Cell(calls, 10.0, "somebody", 1.0, "kernel", median_goal=median_goal)

    slow = (line(1, 0.85), 9.9), (line(2, 0.85), 6.0), (line(3, 0.85), 8.8), (line(4, None), 1.0)
    page = page_of(*slow)
    assert "| 0.99 | ≤ 1, median ≤ 0.85 |" in page and "| 0.10 | ≤ 1 |" in page and "4 of 4 lines" in page
    told = "ratios that have a goal for it is"
    assert f"The median of the 3 {told} 0.880 and misses 0.85; 1 of them reach that alone." in page
    assert f"The median of the 4 {told} 0.840 and reaches 0.85; 2 of" in page_of(*slow, (line(5, 0.85), 8.0))
    assert "median" not in page_of(slow[-1])


def test_the_page_derives_the_time_of_reading_where_a_goal_is_below_it() -> None:
    def line(m: int, reading: float, published: float) -> bench.Cell:
        calls = tuple(bench.Call("fp8_gemm", f"{each},64,128") for each in (m, m))
        return bench.Cell(calls, published, "somebody", 0.5, "kernel", reading, 7_280_000)

    cells = (line(1, 6.0, 10.0), 7.0), (line(2, 6.0, 14.0), 8.0), (line(3, 6.0, 10.0), 4.0)
    page = page_of(*cells)
    start = machine("MI355X")["start_ns"] / 1e3
    derived = page[page.index("## Goals below the time of reading") :]
    (row,) = [row for row in derived.splitlines() if row.startswith("| `")]  # that which misses it
    assert row.startswith("| `fp8_gemm` 1,64,128 + ")
    assert row.endswith("| 7,280,000 | 1.00 | 3.19 | 4.19 | 6.00 | 2,587 | 5.00 | 4,013 |")
    assert round(7280 / (6.0 - 2 * start)) == 2587 and round(7280 / (5.0 - 2 * start)) == 4013
    assert "## Goals below" not in page_of((line(3, 6.0, 14.0), 8.0))


def reached(tokens: int, top_k: int) -> int:
    return len(routed(tokens, 257, top_k).unique())


# Of a routed line: experts with a slot, and rows and columns of one's W, of both products.
ROUTED = {
    tokens: ((reached(tokens, 9), 1024, 6144), (reached(9 * tokens, 1), 6144, 512)) for tokens in (1, 16, 64)
}  # fmt: skip


def read_alone(*weights: tuple[int, int, int], bits: int) -> float:
    """The modelled durations of reading weights, in eighths of ``bits`` bytes an element, added."""
    of = machine("MI355X")
    return sum(streaming.least(experts * n * k * bits // 8, of).kernel_us for experts, n, k in weights)


@pytest.mark.parametrize("tokens", [1, pytest.param(16, marks=pytest.mark.full)])
def test_times_of_reading_are_those_of_the_kernels_that_read(tokens: int) -> None:
    """64 tokens, whose weights take a minute, are left to ``op_tests/helpers/streaming.py``."""
    told = {cell.calls[0]: cell.reading_us for cell in bench.CELLS if cell.reading_us is not None}
    dense = {(call.shape.partition(",")[2], us) for call, us in told.items() if call.op == "fp8_gemm"}
    assert len(dense) == 3
    for shape, us in dense:
        assert us == pytest.approx(read_alone((1, *map(int, shape.split(","))), bits=8), abs=0.006)
    sizes = {cell.calls[0]: cell.read_bytes for cell in bench.CELLS if cell.reading_us is not None}
    assert all(sizes[call] == math.prod(map(int, call.shape.split(",")[1:])) for call in told if call.op == "fp8_gemm")
    call = bench.Call("grouped_swiglu_mxfp8", f"{tokens},1024,6144,257,9")
    us = told[call]
    assert us == pytest.approx(sum(read_alone((e, n * 33, k // 32), bits=8) for e, n, k in ROUTED[tokens]), abs=0.011)


def test_weights_that_are_read_are_those_of_the_experts_that_a_line_reaches() -> None:
    sizes = {cell.calls[0].shape: cell.read_bytes for cell in bench.CELLS if cell.calls[0].op == "grouped_swiglu_mxfp8"}
    for tokens, weights in ROUTED.items():
        told = sum(experts * n * k * 33 // 32 for experts, n, k in weights)
        assert sizes.pop(f"{tokens},1024,6144,257,9") == told
    assert not sizes


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 257, 9), (16, 257, 9), (64, 257, 9), (576, 257, 1), (4, 8, 2)]
)
def test_a_routing_reaches_as_many_experts_as_routings_do_on_average(tokens: int, experts: int, top_k: int) -> None:
    """A draw that is 2 standard deviations off is 4 % of the weights of 64 tokens."""
    ids, mean = routed(tokens, experts, top_k), experts * (1 - (1 - top_k / experts) ** tokens)
    assert ids.shape == (tokens, top_k) and ids.dtype == torch.int32 and ids.min() >= 0 and ids.max() < experts
    assert all(len(row.unique()) == top_k for row in ids)
    assert abs(len(ids.unique()) - mean) <= 0.5


def test_a_report_on_the_emulator_is_modelled_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "CELLS", CELLS)
    run("--report", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["source"].startswith("model:cdna") and report["arch"] == "gfx950" and report["steps"] == []
    first, second = (row["parts"] for row in report["rows"])
    assert len(first) == 1 and first[0]["kernel"].startswith("fp8_") and first[0]["row"] is None
    assert 1 < first[0]["us"] < first[0]["kernel_us"] < 10
    assert second[0]["us"] > second[1]["us"] > 0.5  # what the Infinity Cache has is read sooner
    page = bench.text(report)
    assert "**modelled**" in page and "| `fp8_gemm` 2,64,128 |" in page
    # A profiler's durations are compared with the kernel's, an interval of calls with the replayed one.
    ratios = first[0]["kernel_us"] / 10, (second[0]["us"] + second[1]["us"]) / 5
    assert f"| 10 | kernel | {ratios[0]:.2f} | ≤ 0.5 |" in page and f"| 5 | call | {ratios[1]:.2f} | ≤ 0.9 |" in page
    assert f"{(ratios[0] <= 0.5) + (ratios[1] <= 0.9)} of 2 lines that have a goal reach it." in page
    output = run("--from", tmp_path / "out.json", "--merge", tmp_path / "tables", code=1)
    assert "only measured times go into tables; these are of model:" in output
    monkeypatch.setattr(bench, "_run", lambda configs: pytest.fail("measured before the tables were looked at"))
    assert "only measured times go into tables, and the device is emulator" in run("--merge", tmp_path, code=1)
    (tmp_path / "file").touch()
    output = run("--from", tmp_path / "out.json", "--merge", tmp_path / "file" / "tables", code=1)
    assert "_tuned.csv cannot be written: Not a directory" in output
    assert "none.json cannot be read: No such file" in run("--from", tmp_path / "none.json", code=1)
    for option in (("--arch", "gfx942"), ("--configs", tmp_path)):
        assert "leave out --arch and --configs" in run("--from", tmp_path / "out.json", *option, code=2)


def test_a_row_of_a_file_of_ones_own_is_of_its_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = "gfx950,256,2,64,128,0,fp8_wave_split,rows=16;columns=16;waves=1,1,,3.5,,,,model:0"
    (tmp_path / "site.csv").write_text(f"{','.join(hipforge.ops.schema_of('fp8_gemm').header)}\n{row}\n")
    monkeypatch.setenv("HIPFORGE_CONFIG_FP8_GEMM", str(tmp_path / "site.csv"))
    monkeypatch.setattr(bench, "CELLS", CELLS[:1])
    clear_tables()
    run("--report", tmp_path / "out.json")
    monkeypatch.undo()
    clear_tables()
    ((part,),) = (row["parts"] for row in json.loads((tmp_path / "out.json").read_text())["rows"])
    assert part["table"] == "fp8_gemm" and part["row"]["config"] == "rows=16;columns=16;waves=1"


def test_steps_are_those_of_time_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "CELLS", CELLS[:1])
    monkeypatch.setattr(bench, "MODELS", (("config", 2),))
    monkeypatch.setattr(bench, "CONTEXT", 48)
    path = written(tmp_path, DENSE)
    run("--configs", tmp_path, "--report", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    (want,) = time_model(path, "--context", "48", "--tp", "2")
    (step,) = report["steps"]
    assert step == {"model": "config", "tp": 2, "batch": 1, "context": 48, "us": round(want["us"], 1), "notes": []}
    assert f"| config | 2 | 1 | 48 | {want['us']:.0f} |  |" in bench.text(report)
    written(tmp_path, LATENTS)
    run("--configs", tmp_path, "--page", tmp_path / "page.md")
    assert re.search(r"\| config \| 2 \| 1 \| 48 \| \d+ \| without attention \|", (tmp_path / "page.md").read_text())


def test_measured_times_go_into_the_rows_that_chose_the_kernels(tmp_path: Path) -> None:
    table = Path(hipforge.configs.__file__).parent / "fp8_gemm_tuned.csv"
    shutil.copy(table, tmp_path)
    before = list(csv.DictReader(table.open()))
    row = hipforge.ops.core.tuned.read_rows(hipforge.ops.schema_of("fp8_gemm"), table)[0]
    cell = asdict(bench.CELLS[0])
    part = {"us": 4.5, "kernel_us": None, "kernel": row.values["kernel"], "configuration": {}, "table": "fp8_gemm"}
    report = {
        "hipforge": "0", "date": "2026-11-26", "arch": "gfx950", "source": "measured:MI355X/torch",
        "rows": [
            {"cell": cell, "parts": [{**part, "row": dict(row.values)}]},
            {"cell": cell, "parts": [{**part, "us": 9.0, "table": None, "row": None}]},
            {"cell": cell, "parts": [{**part, "us": 9.0, "kernel": "with_an_epilogue", "row": dict(row.values)}]},
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
    page = bench.text(report)
    assert page.startswith("# Measured times\n") and "the ratio is not of like and like" in page


@pytest.mark.parametrize("content", ("", "[]", "{}", '{"rows": [{}]}', '{"rows": [{"parts": 1}]}'))
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "out.json").write_text(content)
    assert "is no report of hipforge bench" in run("--from", tmp_path / "out.json", "--page", tmp_path / "p", code=1)


def test_the_page_of_predictions_is_made_of_its_report_and_that_of_the_list() -> None:
    """``hipforge bench --from docs/predictions.json --page docs/predictions.md`` writes it."""
    docs = Path(__file__).parents[2] / "docs"
    report = json.loads((docs / "predictions.json").read_text())
    assert bench.text(report) == (docs / "predictions.md").read_text()
    assert [row["cell"] for row in report["rows"]] == json.loads(json.dumps([asdict(cell) for cell in bench.CELLS]))
    assert [(step["model"], step["tp"]) for step in report["steps"]] == list(bench.MODELS)
    half, most = re.findall(r"[\d.]+ %", bench.BAND)
    assert f"| all batches | 1,207 | {half} | {most} |" in (docs / "time-model.md").read_text()


def test_the_tuned_rows_of_the_report_are_those_that_ship() -> None:
    report = json.loads((Path(__file__).parents[2] / "docs" / "predictions.json").read_text())
    parts = [part for row in report["rows"] for part in row["parts"] if part["table"] is not None]
    assert len(parts) >= 12
    for part in parts:
        schema = hipforge.ops.schema_of(part["table"])
        shipped = hipforge.ops.core.tuned.read_rows(schema, Path(hipforge.configs.__file__).parent / schema.file_name)
        assert part["row"] in [dict(row.values) for row in shipped], part["row"]


def test_a_call_without_a_kernel_for_the_gpu_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(op: str, shape: str, rotating: bool) -> object:
        if op == "fp8_gemm":
            raise ConfigError("fp8_gemm runs no kernel")
        return SimpleNamespace(us=2.5)

    cells = CELLS
    monkeypatch.setattr(bench, "CELLS", cells)
    gpu = SimpleNamespace(kind="cuda", is_gpu=True, arch_of=lambda: "sm_90")
    monkeypatch.setattr(bench.devices, "current", lambda: gpu)
    monkeypatch.setattr("hipforge.cli.time.measured", measured)
    monkeypatch.setattr("hipforge.cli.time.on_gpu", lambda value: value)
    told = SimpleNamespace(file=None, row=None, kernel="k", configuration={})
    monkeypatch.setattr("hipforge.ops.core.dispatch.explain", lambda *_, **__: told)
    monkeypatch.setattr("hipforge.tuning.timing.measured_source", lambda: "measured:card/torch")
    found = bench._run(None)
    assert [row["cell"]["calls"][0]["op"] for row in found["rows"]] == ["rms_norm"]
    assert found["source"] == "measured:card/torch"
    assert [[part["us"], part["kernel_us"]] for part in found["rows"][0]["parts"]] == [[2.5, None]] * 2
    with pytest.raises(ConfigError, match="on a GPU hipforge bench-model measures a decode step"):
        bench._run(tmp_path)
    monkeypatch.setattr(bench, "CELLS", cells[:1])
    with pytest.raises(ConfigError, match="no call has a kernel for sm_90"):
        bench._run(None)
