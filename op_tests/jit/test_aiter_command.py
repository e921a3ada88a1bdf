"""``hipforge aiter``: what modules need, and test files that run with "cuda" as the emulator's device."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hipforge.aiter_compat import checkout, runner
from hipforge.cli import aiter, doctor
from hipforge.cli.main import cli
from hipforge.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[1] / "helpers" / "aiter_checkout"


def source_of(folder: Path, text: str, **entry: object) -> checkout.Module:
    """Return the verdict on a module of one source in a copy of the checkout."""
    copy = shutil.copytree(CHECKOUT, folder / "copy")
    (copy / "csrc/kernels/one.cu").write_text(text)
    name = f"module_{folder.name}"
    plain = {"srcs": ["f'{AITER_CSRC_DIR}/kernels/one.cu'"], "extra_include": [], "torch_exclude": True}
    (copy / "aiter/jit/optCompilerConfig.json").write_text(json.dumps({name: plain | entry}))
    (found,) = checkout.modules(copy)
    return found


def test_modules_are_listed_with_what_they_need() -> None:
    done = CliRunner().invoke(cli, ["aiter", str(CHECKOUT), "list", "--json"])
    found = {item["name"]: item for item in json.loads(done.output)}
    assert found["module_sample_develop"]["state"] == "builds"
    assert found["module_executable"]["state"] == "refused" and "Makefile" in found["module_executable"]["reason"]
    done = CliRunner().invoke(cli, ["aiter", str(CHECKOUT), "list"])
    assert "8 modules: 5 builds, 2 refused, 1 needs Composable Kernel" in done.output


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("#include <hipcub/hipcub.hpp>\n#include <hiprand/hiprand_kernel.h>\n", "builds"),
        ("#include <rocprim/rocprim.hpp>\nauto f = rocprim::plus<int>();\n", "needs rocPRIM"),
        ("#include <rocprim/rocprim.hpp>  // of which nothing is used\n", "builds"),
        ('#include "ck_tile/core.hpp"\n', "needs Composable Kernel"),
        ("#include <ATen/hip/HIPContext.h>\n", "needs ROCm's torch headers"),
        ('#if ENABLE_CK\n#include "ck_tile/core.hpp"\n#else\n#include "aiter_tensor.h"\n#endif\n', "builds"),
        ('#if !ENABLE_CK\n#else\n#include "ck_tile/core.hpp"\n#endif\n', "builds"),
        ('#ifdef OTHER\n#else\n#include "ck_tile/core.hpp"\n#endif\n', "needs Composable Kernel"),
        ("using half = ck_tile::fp16_t;\n", "needs Composable Kernel"),
        ("#define HALF \\\n  ck_tile::fp16_t\n", "builds"),
        ("#ifdef OTHER\nusing half = ck_tile::fp16_t;\n#endif\n", "builds"),
        ("namespace ck_tile {\nstruct fp16_t;\n}\nusing half = ck_tile::fp16_t;\n", "builds"),
    ],
)
def test_what_a_source_includes_decides(tmp_path: Path, text: str, state: str) -> None:
    assert source_of(tmp_path, text).state == state


def test_rocms_headers_are_found_and_doctor_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    header = tmp_path / "include/hipcub/hipcub.hpp"
    header.parent.mkdir(parents=True)
    header.write_text("")
    assert source_of(tmp_path, "#include <hipcub/hipcub.hpp>\n").state == "builds"
    prim, cub = doctor.header_findings()
    assert (cub.name, cub.usable, cub.detail) == ("hipCUB", True, str(tmp_path / "include"))
    assert not prim.usable and f"no rocprim/rocprim.hpp in {tmp_path / 'include'}" in prim.detail


def test_headers_of_any_torch_are_there_unless_the_module_leaves_torch_out(tmp_path: Path) -> None:
    for name, exclude, state in (("a", False, "builds"), ("b", True, "needs ROCm's torch headers")):
        (tmp_path / name).mkdir()
        assert source_of(tmp_path / name, "#include <c10/util/Half.h>\n", torch_exclude=exclude).state == state


def test_torchs_own_interface_needs_rocthrust_where_it_is_compiled_as_hip(tmp_path: Path) -> None:
    found = source_of(tmp_path, "#include <torch/extension.h>\n", torch_exclude=False)
    reason = "one.cu includes torch/extension.h, which as HIP includes thrust/complex.h"
    assert (found.state, found.reason) == ("needs ROCm's torch headers", reason)


def test_an_entry_that_cannot_be_taken_still_says_what_its_sources_need(tmp_path: Path) -> None:
    flags = ["'-DX' if unclear(torch) else ''"]
    found = source_of(tmp_path, "#include <ATen/hip/HIPContext.h>\n", flags_extra_hip=flags)
    assert found.state == "needs ROCm's torch headers"
    (tmp_path / "copy/csrc/kernels/one.cu").write_text("")
    (again,) = checkout.modules(tmp_path / "copy")
    assert again.state == "refused" and "is neither a literal nor" in again.reason


def test_a_source_made_of_composable_kernels_templates_needs_it(tmp_path: Path) -> None:
    folder = tmp_path / "copy/csrc/ck_gemm"
    found = source_of(tmp_path, "", srcs=["f'{AITER_CSRC_DIR}/ck_gemm/one.cu'"])
    assert found.state == "refused" and found.reason == f"there is no {folder}/one.cu"
    folder.mkdir()
    (folder / "one.cu").write_text("")
    (again,) = checkout.modules(tmp_path / "copy")
    assert again.state == "needs Composable Kernel" and again.reason.endswith("is made of its templates")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"flags_extra_hip": ["-DX='"]}, "flags_extra_hip: .* is not what .* No closing quotation"),
        ({"flags_extra_hip_per_source": {"a.cu": 1}}, "flags_extra_hip_per_source: {'a.cu': 1} is not what"),
        ({"blob_gen_cmd": ["\ud800"]}, "blob_gen_cmd: .* is not what aiter's JSON has there"),
        ({"extra_include": ["f'{" + "-" * 5000 + "1}'"]}, "extra_include: .* is not what aiter's JSON has there"),
        ({"extra_include": ["/" + "x" * 300]}, "File name too long"),
        ({"srcs": ["/" + "x" * 300 + ".cu"]}, "File name too long"),
    ],
)
def test_an_entry_that_is_damaged_is_refused_and_the_others_are_judged(
    tmp_path: Path, entry: dict[str, object], reason: str
) -> None:
    found = source_of(tmp_path, "", **entry)
    assert found.state == "refused" and re.search(reason, found.reason)


def test_what_is_no_entry_is_refused_and_a_document_that_is_too_deep_named(tmp_path: Path) -> None:
    copy = shutil.copytree(CHECKOUT, tmp_path / "copy")
    file = copy / "aiter/jit/optCompilerConfig.json"
    file.write_text('{"module_none": null}')
    (found,) = checkout.modules(copy)
    assert found.state == "refused" and found.reason.endswith("expected an object of build arguments; got NoneType")
    file.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        checkout.modules(copy)


def test_headers_may_be_nested_as_deep_as_they_are_and_names_too_long_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "headers").mkdir()
    for number in range(1500):
        (tmp_path / f"headers/h{number}.h").write_text(f'#include "h{number + 1}.h"\n')
    (tmp_path / "headers/h1500.h").write_text('#include "ck_tile/core.hpp"\n')
    text = f'#include "{"x" * 300}.h"\n#include "{tmp_path}/headers/h0.h"\n'
    assert source_of(tmp_path, text).reason == "h1500.h includes ck_tile/core.hpp, which is not there"


def test_a_folder_that_is_no_checkout_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs aiter/jit/optCompilerConfig\.json"):
        checkout.modules(tmp_path)


def run(*words: str) -> tuple[int, dict[str, object]]:
    # No limit of time but a test's own: on a loaded machine a case may take minutes.
    done = CliRunner().invoke(cli, ["aiter", str(CHECKOUT), "test", "--json", "--case-seconds", "0", *words])
    (report,) = json.loads(done.stdout)
    return done.exit_code, report


def ran(file: Path, text: str, monkeypatch: pytest.MonkeyPatch, seconds: float = 0) -> list[tuple[str, str]]:
    """Run a script here, without a device; returns its cases and what became of each."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    file.write_text(text)
    cases = runner.Cases(file.with_suffix(".json"), seconds)
    runner._run(file, cases, 0, None)
    return [(case["case"], case["status"]) for case in cases.done]


@pytest.fixture(scope="module")
def of_many_cases() -> tuple[int, dict[str, object]]:
    """What one process said of all that need none of their own: it takes seconds to start."""
    before = (CHECKOUT / "op_tests/scale.py").read_text()
    words = ["test_scale(3)", "test_scale(2, wrong=5.0)", "test_scale(1, beyond=8)"]
    words += ["test_uncovered()", "test_aborts()", "test_unbuilt()"]
    words += ["test_backward()", "test_generator()", "table(1, 0, 2)", "ends()"]
    found = run("op_tests/scale.py", "--", *words)
    assert (CHECKOUT / "op_tests/scale.py").read_text() == before
    return found


def problems(report: dict[str, object]) -> dict[str, tuple[str, str]]:
    return {case["case"]: (case["status"], case["detail"]) for case in report["problems"]}


def test_a_test_file_runs_unchanged_and_each_case_before_its_end_is_reported(
    of_many_cases: tuple[int, dict[str, object]],
) -> None:
    code, report = of_many_cases
    assert code == 1 and report["end"] == "the process ended with signal 6"
    assert (report["cases"], report["passed"], report["failed"], report["not_built"]) == (11, 5, 5, 1)
    details = problems(report)
    assert details["test_scale(2, wrong=5.0)"][1].endswith("of the elements differ")
    status, fault = details["test_scale(1, beyond=8)"]
    assert status == "fault" and "scale_rows.h:7" in fault and "x" in fault
    assert "torch.cuda.CUDAGraph is not there" in details["test_uncovered()"][1]
    assert "called abort()" in details["test_aborts()"][1]
    status, reason = details["test_unbuilt()"]
    assert status == "not built" and "AITER_ELSEWHERE" in reason


def test_a_case_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def test_endless():\n    while True:\n        pass\ndef test_next(): ...\ntest_endless()\ntest_next()\n"
    found = ran(tmp_path / "endless.py", text, monkeypatch, seconds=0.1)
    assert found == [("test_endless()", "unfinished"), ("test_next()", "passed")]


def test_a_file_that_calls_none_of_its_functions_is_one_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def test_scale(): ...\nfor case in ():\n    eval(case)\n"
    assert ran(tmp_path / "scale.py", text, monkeypatch) == [("scale", "passed")]


def test_of_a_grid_that_a_filter_leaves_a_sample_runs_each_case_limited_and_judged_by_what_it_compares() -> None:
    """Under pytest, which the file asks for although it could run as a script."""
    _, report = run("--sample", "4", "--case-seconds", "2", "op_tests/grid.py", "--", "-k", "not 8")
    assert (report["cases"], report["collected"], report["passed"], report["end"]) == (4, 8, 1, "")
    found = problems(report)
    assert found["test_grid[2]"][0] == "unfinished"
    status, reason = found["test_grid[4]"]
    assert status == "not built" and "needs Composable Kernel: templates.cu includes ck_tile/core.hpp" in reason
    assert found["test_grid[6]"] == ("failed", "100.0% of the elements differ")


@pytest.mark.parametrize("case", ["test_backward()", "test_generator()"])
def test_a_backward_pass_is_on_the_device_and_its_generator_has_seed_offset_and_state(
    of_many_cases: tuple[int, dict[str, object]], case: str
) -> None:
    assert case not in problems(of_many_cases[1])


def test_measured_functions_are_cases_and_a_failed_one_does_not_end_their_table(
    of_many_cases: tuple[int, dict[str, object]],
) -> None:
    found = problems(of_many_cases[1])
    measured = {case: status for case, (status, _) in found.items() if case.startswith("measure")}
    assert measured == {"measure(0)": "failed"}


def test_the_reports_are_tables_too(
    of_many_cases: tuple[int, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aiter, "_run", lambda *_: of_many_cases[1])
    done = CliRunner().invoke(cli, ["aiter", str(CHECKOUT), "test", "--markdown", "op_tests/scale.py"])
    assert done.exit_code == 1
    head, _, row = done.stdout.splitlines()
    assert head.startswith("| file | arguments | cases ")
    assert row.startswith("| `op_tests/scale.py` | `'test_scale(3)' 'test_scale(2, wrong=5.0)'")
    assert " | 11 | 5 | 4 failed: 100.0% of the elements differ; 1 fault: " in row and "; 1 not built: " in row
    built = [("module_a gfx950", "built", 3.2, "None"), ("module_a gfx942", "failed", 1.0, "a\nb.h:1: error: x | y\nz")]
    assert aiter.build_table(built).splitlines()[-1] == "| `module_a` | 3 s | failed: b.h:1: error: x \\| y |"


def test_a_file_that_is_not_there_is_named() -> None:
    done = CliRunner().invoke(cli, ["aiter", str(CHECKOUT), "test", "op_tests/test_none.py"])
    assert done.exit_code == 1 and "there is no" in done.output and "test_none.py" in done.output
