"""The command line: what each command prints, as text and as JSON, and with which status it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.command_line import answer, invoke
from helpers.jit_stand_in import StandIn

from hipforge import ops, settings, shapes
from hipforge.cli import demo, inspect, output
from hipforge.cli.build_progress import spoken_seconds
from hipforge.cli.cache import human
from hipforge.cli.main import COMMANDS
from hipforge.cli.profile_subjects import SUBJECTS
from hipforge.errors import ConfigError
from hipforge.jit import fleet
from hipforge.jit.backends import vendors
from hipforge.jit.cache import store as cache
from hipforge.jit.demangle import fit


def test_help_names_every_command_and_imports_none() -> None:
    code = """
import sys
from click.testing import CliRunner
from hipforge.cli.main import cli
print(CliRunner().invoke(cli, ["--help"]).output)
print("imported:", *(name for name in ("torch", "rich", "hipforge.jit") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert done.stdout.splitlines()[-1] == "imported:"


ANSWERED = {
    "tune --help": "mxfp8_gemm ",
    "tune mxfp8_gemm --help": "15 weight shapes of MiniMax-M3",
    "tune mxfp8_gemm --shape 1,2,3": "--shapes",
    "tune mxfp8_gemm -o t.csv --shapes 4": "expected N,K",
    "tune mxfp4_grouped_gemm -o t.csv --shapes 4,768": "need -m",
    "tune decode_attention_fp8 -o t.csv --keys 0": "x>=1",
    "time-model no-such.json": "no-such.json cannot be read",
    "bench-model no-such.json": "no-such.json cannot be read",
    "time --help": "  residual_rms_fp8_dynamic ",
    "time mxfp8_linear 4,768": "expected M,N,K",
    "trace nosuch 1": "nosuch",
    "explain mxfp8_gemv 1": "expected M,N,K",
    "explain mxfp8_liner 4,768,6144": "mxfp8_linear",
    "explain fused_moe_mxfp4 4,384,1024,8,9": "TOPK must be at most E (8); got 9",
    "time topk_gating 4,8,9": "TOPK must be at most E (8); got 9",
    "time mxfp8_linear 4,768,64 --trace /no/such/t.json": "there is no folder /no/such; make it",
    "time mxfp8_linear 4,768,64 --plot t.nonsense": "t.nonsense cannot be written: formats are",
    "bench --report /proc": "'/proc' is a directory",
    "bench --page /no/such/t.md": "there is no folder /no/such; make it",
    "build nosuch": "nosuch",
    "inspect nosuch": "nosuch",
    "nosuch": "No such command",
}


def test_help_and_wrong_words_are_answered_before_torch_is_imported() -> None:
    code = f"""
import sys
from click.testing import CliRunner
from hipforge.cli.main import cli
for words, told in {ANSWERED}.items():
    said = CliRunner().invoke(cli, words.split()).output
    assert told in said and "torch" not in sys.modules, (words, said)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "hipforge", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == invoke("--version").output


# ---- build -----------------------------------------------------------------------------------------------------------


def test_build_makes_every_variant_once_and_a_dry_run_makes_none(stand_in: StandIn) -> None:
    stand_in.module(variants={"M": [1, 2]})
    planned = answer("build", "sample", "--dry-run")
    assert [row["state"] for row in planned] == ["miss", "miss"] and all(row["commands"] for row in planned)
    assert stand_in.compiles() == []
    assert [row["status"] for row in answer("build", "sample")] == ["built", "built"]
    assert [row["status"] for row in answer("build", "sample")] == ["hit", "hit"]
    assert [row["state"] for row in answer("build", "sample", "--dry-run")] == ["hit", "hit"]
    assert len(stand_in.compiles()) == 2


def test_a_failure_stops_no_other_build_and_ends_with_1(stand_in: StandIn) -> None:
    stand_in.write("broken.cu", "int f() { return missing; }\n")
    stand_in.module("broken", srcs=["broken.cu"])
    result = invoke("build", "broken", "sample")
    assert result.exit_code == 1
    assert "1 built" in result.output and "1 failed" in result.output and "missing" in result.output


def test_brackets_of_a_compiler_message_are_printed_as_they_are(stand_in: StandIn) -> None:
    stand_in.write("broken.cu", '#error "use [compiler] and [/red]"\n')
    stand_in.module("broken", srcs=["broken.cu"])
    assert "use [compiler] and [/red]" in invoke("build", "broken").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("build",), "name the modules to build, or give --all"),
        (("build", "sample", "--all"), "not both"),
        (("build", "no_such_module"), "no_such_module"),
        (("inspect", "sample", "--variant", "M"), "expected NAME=VALUE"),
        (("inspect", "sample", "--variant", "M=1"), "no variant parameter 'M'"),
        (("profile", "mxfp8_gemv", "1,16"), "expected M,N,K as positive integers"),
        (("explain", "mxfp8_gemv", "-1,2,3"), "shape '-1,2,3': expected M,N,K as positive integers"),
        (("explain", "mxfp8_gemv", "--json", "--", "-1,2,3"), "shape '-1,2,3': expected M,N,K as positive integers"),
        (("trace", "mxfp8_gemv", "-1x2x3", "--wave", "0"), "shape '-1x2x3': expected M,N,K as positive integers"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_status_1(
    words: tuple[str, ...],
    message: str,
    stand_in: StandIn,
) -> None:
    result = invoke(*words)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ") and message in result.output and "Traceback" not in result.output


def test_a_build_of_many_says_how_many_and_about_how_long_before_it_starts(stand_in: StandIn) -> None:
    stand_in.module(variants={"M": [1, 2, 3]})
    lines = invoke("build", "sample").stderr.splitlines()
    assert re.match(r"3 libraries: 0 need no build, 3 to build with \d+ commands at once, about \d+ (s|min)", lines[0])
    assert "libraries" not in invoke("build", "sample").stderr, "nothing is slow about hits"
    stand_in.write("value.h", "#define VALUE 5\n")
    assert "3 to build" in invoke("inspect", "sample").stderr
    stand_in.write("value.h", "#define VALUE 6\n")
    with settings.scope(QUIET=True):
        assert invoke("build", "sample").stderr == ""


def test_the_estimate_takes_the_mean_for_what_was_never_built_and_no_less_than_the_longest() -> None:
    def planned(estimate: float | None) -> fleet.Planned:
        return fleet.Planned(request=None, spec=None, entry=None, estimate=estimate, problem=None)

    assert fleet.expected_seconds([planned(2.0), planned(4.0), planned(None)], 3) == 4.0
    assert fleet.expected_seconds([planned(2.0), planned(4.0), planned(None)], 1) == 9.0
    assert fleet.expected_seconds([], 2) == 0.0
    assert [spoken_seconds(s) for s in (0.2, 40, 400, 7200)] == ["1 s", "40 s", "7 min", "2.0 h"]


# ---- inspect and cache -----------------------------------------------------------------------------------------------


def test_inspect_prints_what_the_manifest_keeps(stand_in: StandIn) -> None:
    (row,) = answer("inspect", "sample")
    kept = stand_in.build().entry.manifest.kernels
    assert kept[row["symbol"]]["vgpr"] == row["vgpr"] and row["arch"] == "gfx950" and row["vgpr_spills"] == 0
    text = invoke("inspect", "sample").output
    assert "empty" in text and "waves/SIMD" in text


LONG = "hf::some_space::a_kernel_with_a_long_name<" + "(Layout)1, " * 20 + "true>"


def test_kernel_names_fit_80_columns_unless_they_are_asked_for_in_full(
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    columns = vendors.named("amd").columns
    row = {"variant": "M=1", "name": LONG + "(int*)", **{key: 7 for keys in columns.values() for key in keys}}
    inspect._print([row], "title", columns, False)
    short = capsys.readouterr().out
    assert max(map(len, short.splitlines())) <= 80 and "hf::some_" in short and "true>" in short and "…" in short
    inspect._print([row], "title", columns, True)
    assert LONG in capsys.readouterr().out
    assert len(fit(LONG, 31)) == 31 and fit("k", 31) == "k" and fit(LONG, None) == LONG


def test_a_listed_entry_is_one_line_of_what_reads_it(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.build()
    monkeypatch.setattr(output, "PIPED_COLUMNS", 40)  # names of modules are longer than 160 here and there
    (listed,) = answer("cache", "list")
    line = next(line for line in invoke("cache", "list").stdout.splitlines() if "sample" in line)
    assert Path(listed["path"]).name in line and human(listed["bytes"]) in line and line.rstrip().endswith("in use")


def test_the_cache_is_listed_measured_explained_pruned_and_cleared(stand_in: StandIn) -> None:
    stand_in.build()
    (listed,) = answer("cache", "list")
    assert (listed["module"], listed["target"], listed["in_use"]) == ("sample", "gfx950", True)
    assert listed["bytes"] <= answer("cache", "size")["bytes"]
    assert answer("cache", "why", "sample")[0]["status"] == "hit"
    header = stand_in.write("value.h", "#define VALUE 4\n")
    (why,) = answer("cache", "why", "sample")
    assert why["status"] == "miss" and len(why["changes"]) == 1
    (change,) = why["changes"]
    assert change["name"].endswith(header.name) and change["old"] != change["new"]
    assert change["name"] in invoke("cache", "why", "sample").output
    assert answer("cache", "prune", "--max-size", "1T") == {"removed": []}
    for descriptor in cache._held.values():  # this process stops using the entry
        os.close(descriptor)
    cache._held.clear()
    assert answer("cache", "clear") == {"removed": [listed["path"]]}
    assert answer("cache", "list") == []


def test_a_size_that_is_none_is_a_usage_error(stand_in: StandIn) -> None:
    result = invoke("cache", "prune", "--max-size", "3Q")
    assert result.exit_code == 2 and "as in 500M" in result.output


def drawn(folder: Path, *words: str) -> None:
    result = invoke(*words, "--plot", str(folder / "picture.png"))
    assert result.exit_code == 0, result.output
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    refused = invoke(*words, "--plot", str(folder / "picture.nonsense"))
    assert refused.exit_code == 2 and "picture.nonsense cannot be written" in refused.output


def test_registers_are_drawn_against_occupancy(stand_in: StandIn, tmp_path: Path) -> None:
    drawn(tmp_path, "inspect", "sample")


def test_a_profile_is_drawn(tmp_path: Path) -> None:
    drawn(tmp_path, "profile", "mxfp8_gemv", "1,16,64")


# ---- profile and demo ------------------------------------------------------------------------------------------------


def test_profile_counts_and_says_what_is_modelled() -> None:
    counts = answer("profile", "mxfp8_gemv", "1,16,64")
    assert counts["launches"] == 1 and counts["tensors"]["Wq"]["unique_loaded"] == 16 * 64
    text = invoke("profile", "mxfp8_gemv", "1,16,64").output
    counted, modelled = text.split("modelled at peak rates", 1)
    assert " us\n" not in counted and modelled.count(" us\n") == 2


@pytest.mark.parametrize("text", ["4,768,6144", "4x768x6144", "m=4,n=768,k=6144", "K=6144, M=4, N=768"])
def test_a_shape_is_read_in_one_order_or_by_name(text: str) -> None:
    assert shapes.parse(text, ("M", "N", "K"), (4, 768, 6144)) == [4, 768, 6144]


@pytest.mark.parametrize(
    "text", ["4,768", "4,768,0", "m=4,n=768", "m=4,n=768,q=1", "m=4,m=4,n=7,k=8", "m=4,768,6144", ""]
)
def test_a_shape_that_is_none_names_the_order_and_both_ways_of_writing_it(text: str) -> None:
    with pytest.raises(ConfigError, match="expected M,N,K as positive integers, as in 4,7,9 or m=4,n=7,k=9"):
        shapes.parse(text, ("M", "N", "K"), (4, 7, 9))


def test_explain_says_what_is_taken_and_why_and_runs_nothing() -> None:
    found = answer("explain", "mxfp8_gemv", "m=4,n=768,k=6144")
    assert (found["path"], found["row"]["M"]) == ("kernel", 4)
    refused = invoke("explain", "mxfp8_gemv", "65,768,6144").stdout
    assert "returns None" in refused and "M must be 1 to 64" in refused
    large = answer("explain", "mxfp8_gemm", "16384,999999,16384")  # the operands, which are not made, would take 16 GB
    assert large["reason"] == "no tuned row; the default rule"


@pytest.mark.parametrize("op", SUBJECTS)
def test_every_op_can_be_explained_at_its_example(op: str) -> None:
    found = answer("explain", op, ",".join(map(str, SUBJECTS[op].example)))
    parts = found if op.startswith("fused_moe") else [found]
    assert all(part["path"] == "kernel" for part in parts), parts
    if op.startswith("fused_moe"):
        assert [part["call"] for part in parts] == ["gate and up 4,768,1024,8,2", "down 8,1024,384,8,1"]


def test_operands_too_large_for_memory_are_an_error_of_one_line() -> None:
    result = invoke("profile", "rms_norm", "99999999999,99999999")
    assert result.exit_code == 1 and "cannot be made" in result.output and "take a smaller shape" in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hipforge prof", "profile"),
        ("hipforge explain mxfp8_gemv", "mxfp8_gemv"),
        ("hipforge inspect module_moe_c", "module_moe_combine"),
    ],
)
def test_a_shell_completes_commands_ops_and_modules(words: str, expected: str) -> None:
    environment = {
        **os.environ, "_HIPFORGE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")),
    }  # fmt: skip
    program = [sys.executable, "-c", "import sys; sys.argv[0] = 'hipforge'; from hipforge.cli import main; main()"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"plain,{expected}"]


SMALL_SHAPES = {
    "mxfp8_gemv": "1,16,64",
    "mxfp8_gemm": "17,64,128",
    "grouped_gemm_mxfp8": "2,16,128,2,1",
    "grouped_mxfp8_linear": "2,16,128,2,1",
    "grouped_gemm_fp8": "2,16,128,2,1",
    "grouped_fp8_linear": "2,16,128,2,1",
    "grouped_swiglu_fp8": "2,64,128,2,1",
    "mxfp4_gemm": "2,16,128",
    "fp8_quant_tensorwise": "4,64",
    "fp8_quant_rows": "4,72",
    "fp8_quant_blocks": "4,136",
    "residual_rms": "2,64",
    "swiglu_fp8": "2,64",
    "skinny_gemm": "2,32,256",
    "decode_attention_fp8": "1,70,1,2,64",
    "decode_attention_splitk": "1,70,1,2,64",
    "mxfp8_linear": "1,16,64",
    "fp8_gemm": "2,16,64",
    "fp8_linear": "2,16,64",
    "mxfp4_linear": "2,16,128",
    "quantize_mxfp4_linear": "2,16,128",
    "fused_moe_mxfp8": "2,64,128,2,1",
    "fused_moe_fp8": "2,64,128,2,1",
    "fused_moe_mxfp4": "2,64,128,2,1",
    "grouped_gemm_mxfp4": "2,16,128,2,1",
    "grouped_mxfp4_linear": "2,16,128,2,1",
    "mxfp8_quantize": "2,64",
    "mxfp4_quantize": "2,64",
    "rms_norm": "2,64",
    "rms_norm_fp8": "2,64",
    "rms_norm_mxfp8": "2,64",
    "residual_rms_mxfp8": "2,64",
    "swiglu_mxfp8": "2,64",
    "rms_norm_fp8_dynamic": "2,64",
    "residual_rms_fp8_dynamic": "2,64",
    "swiglu_fp8_dynamic": "2,64",
    "router_gemm": "2,16,128",
    "topk_gating": "2,16,2",
    "argmax": "2,1000",
    "all_reduce": "2,64",
    "all_reduce_residual_rms": "2,64",
    "all_reduce_residual_rms_mxfp8": "2,64",
    "moe_align_block_size": "4,8,2",
    "moe_combine": "2,64,2",
    "rope_and_cache": "4,2,1,64",
    "sparse_block_scores": "1,200,4,64",
    "sparse_topk_blocks": "1,200,4",
    "grouped_swiglu_mxfp8": "2,64,64,4,2",
    "grouped_swiglu_mxfp4": "2,64,64,4,2",
    "grouped_fp8_blocks": "2,64,192,4,2",
}


def test_every_public_op_with_a_kernel_can_be_profiled() -> None:
    torch_only = {"Float8Linear", "Float8LinearConfig", "convert_to_float8_training", "disable_fp8", "scaled_mm"}
    # What bench also calls.
    others = {"grouped_swiglu_mxfp8", "grouped_swiglu_mxfp4", "grouped_fp8_blocks", "quantize_mxfp4_linear"}
    assert {*SUBJECTS} == {*ops.public_names()} - torch_only | others


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("docter", "No such command 'docter' (did you mean doctor?)"),
        ("tim", "No such command 'tim' (did you mean time?)"),
        ("tune mxfp8_gem", "(did you mean mxfp8_gemm?)"),
        ("profile mxfp8_liner 4,64,64", "(did you mean mxfp8_linear?)"),
        ("inspect module_mx_quantise", "(did you mean module_mx_quantize?)"),
        ("time mxfp8_gevm 1,2,3", "there is no op 'mxfp8_gevm' (did you mean mxfp8_gemv?)"),
        ("time mxfp8_gemv 1,2,3 --beside mxfp8_gevm 1", "(did you mean mxfp8_gemv?)"),
        ("build module_fp8_qant", "there is no module 'module_fp8_qant' (did you mean module_fp8_quant?)"),
        ("time mxfp8_gemv m=x", "shape 'm=x': expected M,N,K as positive integers"),
        ("profile mxfp8_gemv 99999999999999999999,1,1", "is beyond 9223372036854775807, the largest size"),
        (f"explain mxfp8_gemv {'9' * 5000},1,1", "is beyond 9223372036854775807, the largest size"),
        ("time-model x.json --batch 999999999999", "999999999999 is not in the range"),
    ],
)
def test_a_mistyped_word_is_answered_by_what_is_near_or_accepted(words: str, answer: str) -> None:
    result = invoke(*words.split())
    assert result.exit_code in (1, 2) and isinstance(result.exception, SystemExit), result.exception
    assert answer in " ".join(result.output.split())


@pytest.mark.parametrize("op", SUBJECTS)
def test_every_subject_of_profile_runs_a_kernel(op: str) -> None:
    counts = answer("profile", op, SMALL_SHAPES.get(op) or ",".join(map(str, SUBJECTS[op].example)))
    assert counts["launches"] >= 1 and counts["wave_instructions"] > 0
    assert all(0 < counts[lines]["efficiency"] <= 1 for lines in ("lines64", "lines128")), "shared bytes count once"


def test_profile_says_why_no_kernel_ran() -> None:
    result = invoke("profile", "mxfp8_gemv", "65,16,64")
    assert result.exit_code == 1 and "M must be 1 to 64" in result.output


def test_commands_emulate_the_architecture_that_they_are_told_with_operands_in_its_format() -> None:
    code = """
from click.testing import CliRunner
from hipforge.cli.main import cli
for words in ("explain mxfp8_gemm 17,64,128 --arch gfx942 --json", "profile swiglu_fp8 1,64 --arch gfx942",
              "time --arch gfx942 mxfp8_linear 4,16,256"):
    print(CliRunner().invoke(cli, words.split()).output)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert '"path": "kernel"' in done.stdout and "on gfx942" in done.stdout and "modelled on MI300X" in done.stdout


def test_the_demo_ends_with_0_and_reports_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHAPES", ((256, 64),))
    monkeypatch.setattr(demo, "ROWS", (1,))
    monkeypatch.setattr(demo, "second_process", lambda: 1.0)
    monkeypatch.setattr(demo, "emulator_speed", lambda: 1e7)
    report = answer("demo")
    (row,) = report["rows"]
    assert row["exact"] and row["misses"] == [] and row["weight_ratio"] == 1.0 and row["spills"] == 0
    assert {"compiler", "device", "cold build", "warm load"} <= set(report["header"])
    monkeypatch.setattr(demo, "MAX_WEIGHT_RATIO", 0.5)
    missed = invoke("demo")
    assert missed.exit_code == 1 and "weight bytes loaded 1.000x > 0.5x" in missed.output


def test_the_demo_of_a_gpu_shows_microseconds_beside_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    row = demo.Row(6144, 768, 1, "gemv", 1.7e-3, True, None, 64, 0, None, us=5.25, bf16_us=7.5)
    demo._print(output.console(), {"device": "a card"}, [row])
    said = capsys.readouterr().out
    assert all(part in said for part in ("a card", "5.25", "7.50", "measured in this run")) and "waves/SIMD" not in said
    demo._print(output.console(), {}, [replace(row, us=None, bf16_us=None)])
    assert "not counted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relative_error": float("nan")}, "relative error nan"),
        ({"relative_error": 3.1e-3}, "relative error 3.10e-03"),
        ({"exact": False}, "not bit-exact"),
        ({"weight_ratio": 1.06}, "weight bytes loaded 1.060x"),
        ({"spills": 1}, "1 spilled registers"),
    ],
)
def test_a_demo_row_misses_each_bound_by_itself(change: dict[str, float], message: str) -> None:
    good = demo.Row(6144, 768, 1, "gemv", 1.7e-3, True, 1.0, 64, 0, 8)
    assert good.misses == []
    (miss,) = replace(good, **change).misses
    assert message in miss
