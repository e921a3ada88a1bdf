"""The benches of the ops: what they count of ours and of Triton's kernels, and that a wrong result ends them."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import bench_decode_attention
import bench_decode_ops
import bench_fp8_skinny_gemm
import bench_fused_fp8
import bench_gpu
import bench_mxfp4_gemm
import bench_mxfp8_gemm
import bench_mxfp8_grouped_gemm
import click
import pytest
import torch
from click.testing import CliRunner, Result
from helpers import bench, errors

from hipforge.tuning.cases import Cell
from hipforge.tuning.families.decode_attention.cases import AttentionCell
from hipforge.tuning.grouped import MoeCell

CLASSES = ("valu", "mfma", "salu", "memory", "lds", "other")
FUSED = [
    "residual_rms", "residual_rms_mxfp8", "rms_norm_fp8", "rms_norm_mxfp8", "swiglu_fp8", "swiglu_mxfp8",
    "mxfp4_quantize", "mxfp8_quantize",
]  # fmt: skip
# A bench, the arguments of a small problem, and the implementations of each row.
SMALL: dict[str, tuple[click.Command, str, str]] = {
    "mxfp8": (bench_mxfp8_gemm.main, "--shapes 128,256 -m 16", "hipforge triton triton"),
    "skinny": (bench_fp8_skinny_gemm.main, "--rows 1", "hipforge triton"),
    "attention": (bench_decode_attention.main, "--batch 2 --keys 256 --split-k 2", "hipforge triton triton triton"),
    "ops": (bench_decode_ops.main, "--op moe_combine", "hipforge triton hipforge triton"),
    "fused": (bench_fused_fp8.main, "--rows 2 --cols 2048", "hipforge triton " * len(FUSED)),
    "mxfp4": (bench_mxfp4_gemm.main, "--skip-start-up --repeats 1", "hipforge"),
}


def invoke(name: str, *more: str) -> Result:
    main, arguments, _ = SMALL[name]
    return CliRunner().invoke(main, [*arguments.split(), *more])


@pytest.fixture(autouse=True)
def small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_mxfp4_gemm, "SHAPES", ((4, 32, 64),))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # what it saves does not matter here
    monkeypatch.setattr(bench_fp8_skinny_gemm, "SHAPES", {"qkv": (64, 1024)})


@pytest.mark.parametrize("name", SMALL)
def test_rows_are_counted_and_written(name: str, tmp_path: Path) -> None:
    target, picture = tmp_path / "rows.csv", tmp_path / "rows.png"
    result = invoke(name, "--csv", str(target), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    with target.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["implementation"].split()[0] for row in rows] == SMALL[name][2].split()
    for row in rows:
        assert row["source"] == "counted:emulator" and "us" not in row  # nothing is measured without a GPU
        assert sum(int(row[of]) for of in CLASSES) == int(row["instructions"]) > 0
        assert float(row["occupancy"]) > 0 and int(row["vgprs"]) > 0 and int(row["unique"]) > 0
    if name == "mxfp8":
        # ceil(256 / 128) K steps x 8 tiles of columns x one tile of rows.
        assert int(rows[0]["mfma"]) == 2 * 8
        assert [float(row["weight_loads"]) for row in rows] == [1.0, 1.0, 1.0]
    if name == "fused":
        assert [row["op"] for row in rows[::2]] == FUSED
        assert all(0 <= float(row["excess"]) < 0.02 and float(row["slots_per_result"]) > 1 for row in rows)
    if name == "mxfp4":
        assert float(rows[0]["eager_ms"]) > 0


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_result_ends_with_status_1(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "relative", lambda got, want: 0.02)
    monkeypatch.setattr(bench_fused_fp8, "MAX_DIFFERENT", 0.0)
    if name == "fused":
        good = bench_fused_fp8.swiglu_fp8
        monkeypatch.setattr(bench_fused_fp8, "swiglu_fp8", lambda gate_up, scale: good(gate_up, scale * 2))
    result = invoke(name)
    assert result.exit_code == 1 and "a result is wrong: column error must be at most" in result.output


def test_what_a_bench_cannot_run_is_refused() -> None:
    result = invoke("fused", "--cols", "96")
    assert result.exit_code == 2 and "96 is not a positive multiple of 64" in result.output
    result = CliRunner().invoke(bench_decode_ops.main, ["--op", "none"])
    assert result.exit_code == 2 and "no op is called none" in result.output


def test_the_floor_is_each_byte_once_over_the_bandwidth() -> None:
    # 9216 x 6144 weight bytes and their scales at 8 TB/s: 7.3 us, the figure known for this shape.
    assert bench_mxfp8_gemm.floor_us(Cell(n=9216, k=6144, m=1)) == pytest.approx(7.30, abs=0.01)


@pytest.mark.parametrize("cell", [MoeCell(64, 256, 4, False, 8, experts=6), MoeCell(48, 1024, 1, True, 12, experts=4)])
def test_the_grouped_gemm_reads_the_busy_experts_once_as_tritons_does(cell: MoeCell) -> None:
    rows = bench.rows_of(bench_mxfp8_grouped_gemm.problem(cell))
    assert [row["implementation"].split()[0] for row in rows] == ["hipforge", "triton"]
    assert all(row["error"] < 3e-3 and row["weight_loads"] == 1.0 for row in rows)


@pytest.mark.parametrize("cell", [MoeCell(64, 256, 4, False, 8, experts=6), MoeCell(48, 1024, 1, True, 12, experts=4)])
def test_the_peers_of_the_grouped_gemm_on_an_nvidia_gpu_compute_the_same(cell: MoeCell, monkeypatch) -> None:
    monkeypatch.setattr(bench_mxfp8_grouped_gemm, "measured_floor", lambda *given: 1.0)
    problem = bench_mxfp8_grouped_gemm.problem_nvidia(cell)
    ours, *others = problem.calls
    assert ours.startswith("hipforge mxfp8_grouped") and {"programmatic", "torch grouped_mm bf16"} < {*others}
    assert ("gate up" in others) == (not cell.has_weight)
    bf16, fp8 = ([name for name in others if name.startswith(f"triton {each}")] for each in ("bf16", "fp8"))
    assert len(bf16) == len(fp8) > 1
    named = [ours, *(name for name in others if name not in {*bf16[1:], *fp8[:-1]})]  # one of each kind is enough here
    found = {name: problem.error(problem.calls[name](0)) for name in named}
    # Half a step of e4m3 is 2^-4 of a value at most, 3^-0.5 of it in the mean, and both operands are rounded once more.
    bounds = {"gate up": 0.05, "triton fp8": 0.051, ours: 3e-3, "programmatic": 3e-3}
    for name, error in found.items():
        assert error < next((bound for start, bound in bounds.items() if name.startswith(start)), 0.02), name


@pytest.mark.parametrize("page_size", [0, 64])
def test_attention_reads_the_cache_once_with_fewer_registers_than_triton(page_size: int) -> None:
    rows = bench.rows_of(bench_decode_attention.problem(AttentionCell(1, 8, 128, page_size, 512, 2), 4))
    ours: dict[str, Any]
    ours, *others = rows
    assert ours["scratch"] == 0
    kinds = [row["implementation"].split()[1] for row in others]
    assert kinds == ["resident"] * (1 if page_size else 2) + ["streaming"]  # 128 keys span pages of 64
    for row in rows:
        assert row["error"] <= bench_decode_attention.MAX_ERROR and (row["k_reads"], row["v_reads"]) == (1.0, 1.0)
    # A wave of our merge asks for four parts at once; here each has one, and asks for the same lines four times.
    assert ours["partial_loaded"] == 4 * ours["partial_stored"]
    for row in others:
        assert row["partial_stored"] == row["partial_loaded"]
        assert ours["vgprs"] < row["vgprs"] and ours["lds_bytes"] < row["lds_bytes"]
        assert ours["occupancy"] > row["occupancy"]


def test_the_bench_of_every_dense_kernel_of_a_gpu_names_each_once_and_none_of_another_gpu() -> None:
    calls = dict(bench_mxfp8_gemm.every_kernel(Cell(n=4096, k=4096, m=256), [], bench_mxfp8_gemm.HOPPER))
    kernels = {"mxfp8_row_stream", "mxfp8_span_tiles", "mxfp8_half_tiles", "mxfp8_ring_tiles"}
    assert {name.partition("(")[0] for name in calls} == kernels


@pytest.mark.parametrize("name", ["mxfp4 x4", "mxfp4 x16", "skinny fp8"])
def test_the_products_of_an_nvidia_gpu_and_their_peers_compute_the_same(name: str, monkeypatch) -> None:
    monkeypatch.setattr(bench_gpu.dense, "measured_floor", lambda *given: 1.0)
    cell = Cell(n=64, k=256, m=8)
    makers = {"skinny fp8": bench_gpu.skinny}
    make = makers.get(name, lambda cell, every: bench_gpu.mxfp4(cell, int(name.removeprefix("mxfp4 x")), every))
    problem = make(cell, False)
    assert problem.of["op"] == name and problem.known["floor_us"] == 1.0
    found = {call: problem.error(run(0)) for call, run in problem.calls.items()}
    assert {call.split()[0] for call in found} == {"hipforge", "torch"}
    for call, error in found.items():  # torch has no MXFP4: its operands are not quantised
        assert error < (0.2 if call == "torch bf16" else 3e-3), call
    every = make(cell, True).calls.keys() - problem.calls.keys()
    kernels = {"mxfp4_row_stream", "mxfp4_code_stream"} if name.startswith("mxfp4") else {"skinny_row_stream"}
    assert {call.partition("(")[0] for call in every} == kernels


def test_what_the_bench_of_an_nvidia_gpu_does_not_know_is_refused() -> None:
    result = CliRunner().invoke(bench_gpu.main, ["--ops", "norms,none"])
    assert result.exit_code == 2 and "none is not one of mxfp8, mxfp4, skinny, norms" in result.output
    result = CliRunner().invoke(bench_gpu.main, ["--ops", "routing"])
    assert result.exit_code == 1 and "the kernels are for sm_90" in result.output


def measured(path: Path, rows: list[dict[str, Any]]) -> Path:
    bench.write_csv(path, [{**row, "source": "measured:a card", "error": 0.0} for row in rows])
    return path


@pytest.mark.parametrize(
    "rows, drawn",
    [
        (
            [
                {"m": m, "n": 64, "k": 128, "implementation": name, "floor_us": 2.0, "us": us * m}
                for m in (1, 8, 64)
                for name, us in (("hipforge kernel rows=8", 3.0), ("hipforge programmatic", 2.5), ("torch bf16", 4.0))
            ],
            {"reading W", "hipforge", "hipforge programmatic", "torch bf16", "M", "µs (measured)"},
        ),
        (
            [{"op": "attention", "batch": 2, "keys": 64, "implementation": "hipforge", "mb": 268.0, "floor_us": 90.0,
              "us": 100.0}],
            {"TB/s (measured)", "hipforge", "reading alone", "attention 2 × 64", "1.00", "0.90"},
        ),
    ],
    ids=["against M", "bandwidth"],
)
def test_rows_of_another_machine_are_drawn(
    rows: list[dict[str, Any]], drawn: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    picture = tmp_path / "rows.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        result = invoke("mxfp8", "--read", str(measured(tmp_path / "rows.csv", rows)), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert drawn <= set(re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text()))


@pytest.mark.parametrize(
    "text, more, message",
    [
        (b"a,b\n1,2\n", ["--plot", "x.svg"], "has no rows of a bench"),
        (b"implementation,source\n1,2,3\n", ["--plot", "x.svg"], "line 2 has not as many cells"),
        (b"implementation,source,us\nhipforge,here,\n", ["--plot", "x.svg"], "some without"),
        (b"implementation,source,us\n", ["--plot", "x.svg"], "no rows"),
        (b"\xff\xfe", ["--plot", "x.svg"], "has no rows of a bench"),
        (b"a\n", [], "say where to, with --plot"),
    ],
)
def test_rows_that_cannot_be_drawn_are_refused(text: bytes, more: list[str], message: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_bytes(text)
    result = invoke("mxfp8", "--read", str(source), *more)
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "x.svg").exists()
