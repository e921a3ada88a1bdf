"""The record of runs on a GPU: a kernel that changed after its last run is never passed over in silence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu import record, run, staging

OP_TESTS = Path(__file__).parents[1]
RUN: dict[str, Any] = {
    "digest": "a", "card": "H100", "driver": "1", "date": "2026-11-25", "tests": 3, "worst_error": None,
}  # fmt: skip


def test_a_changed_or_new_kernel_is_told_unless_pending_gives_a_reason() -> None:
    present = {"module_x-HF_INPUT=f16": "b", "module_y": "a"}
    known = {"module_x-HF_INPUT=f16": RUN}
    changed, missing = record.unrecorded(present, known, {})
    assert changed.startswith("module_x-HF_INPUT=f16: its sources have changed since")
    assert missing.startswith("module_y: there is no run of it")
    reasons = {"module_x": "no card was left", "module_y": "new"}
    assert record.unrecorded(present, known, reasons) == []


def test_a_reason_that_no_longer_holds_is_told() -> None:
    present = {"module_x": "a"}
    assert record.unrecorded(present, {"module_x": RUN}, {}) == []
    (line,) = record.unrecorded(present, {"module_x": RUN}, {"module_x": "no card was left"})
    assert line == "module_x: pending.json names it, but the record covers it"


def test_a_variant_is_recorded_when_every_test_that_called_it_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(record, "PENDING", tmp_path / "pending.json")
    record.PENDING.write_text(json.dumps(dict.fromkeys(("module_y", "module_z", "module_gone"), "no card")))
    (tmp_path / run.CARD).write_text(json.dumps({"card": "H100", "driver": "580", "date": "2026-11-25"}))
    calls = [
        ("a", {"module_x": 1e-3}), ("b", {"module_x": 2e-3, "module_y": None}), ("b", {"module_x": 1e-4}),
        ("c", {"module_z": 0.0}),
    ]  # fmt: skip
    outcomes = {"a": "passed", "b": "failed"}  # c was not reached
    _lines(tmp_path / "calls-1.jsonl", [{"test": f"op_tests/{name}", "variants": of} for name, of in calls])
    _lines(tmp_path / "outcomes.jsonl", [{"test": name, "outcome": end, "words": ""} for name, end in outcomes.items()])
    run.write_record(tmp_path, {"module_x": "1", "module_y": "2", "module_z": "3"}, None)
    assert record.read(record.RECORD) == {} and record.read(record.PENDING).keys() == {"module_y", "module_z"}
    _lines(tmp_path / "outcomes.jsonl", [{"test": "b", "outcome": "passed", "words": ""}])
    run.write_record(tmp_path, {"module_x": "1", "module_y": "2", "module_z": "3"}, None)
    written = record.read(record.RECORD)
    assert written.keys() == {"module_x", "module_y"} and written["module_x"]["tests"] == 2
    assert written["module_x"]["worst_error"] == 2e-3
    expected = {**RUN, "digest": "2", "driver": "580", "date": "2026-11-25", "tests": 1}
    assert written["module_y"] == expected and record.read(record.PENDING) == {"module_z": "no card"}
    record.RECORD.unlink()
    (tmp_path / run.DIGESTS).write_text(json.dumps({"module_y": "2"}))
    monkeypatch.setattr(sys, "argv", ["run.py", "--read", str(tmp_path)])
    assert run.main() == 0 and record.read(record.RECORD) == {"module_y": expected}


@pytest.mark.parametrize(("digest", "tests"), [("a", 3), ("b", 1)])
def test_of_two_runs_of_the_same_sources_the_one_with_more_tests_stays(
    digest: str, tests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(record, "PENDING", tmp_path / "pending.json")
    record.RECORD.write_text(json.dumps({"module_x": RUN}))
    (tmp_path / run.CARD).write_text(json.dumps({"card": "H200", "driver": "580", "date": "2026-11-28"}))
    _lines(tmp_path / "calls-1.jsonl", [{"test": "op_tests/a", "variants": {"module_x": None}}])
    _lines(tmp_path / "outcomes.jsonl", [{"test": "a", "outcome": "passed", "words": ""}])
    run.write_record(tmp_path, {"module_x": digest}, None)
    assert record.read(record.RECORD)["module_x"]["tests"] == tests


def test_what_is_written_for_a_gpu_runs_there_whatever_words_it_has() -> None:
    def function() -> str:
        return "Peers."

    def is_emulated(folder: str) -> bool:
        item: Any = SimpleNamespace(path=OP_TESTS / folder / "test_x.py", function=function)
        return staging._is_emulated(item)

    assert not is_emulated("gpu") and is_emulated("ops")


def _lines(path: Path, values: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(value) + "\n" for value in values)


def test_the_copying_below_the_ops_changes_no_result_and_notes_calls_and_errors(tmp_path: Path) -> None:
    """On the emulator, into other CPU memory: what the plugin does on a GPU but for the device."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu.staging"]
    environment = {**os.environ, "HIPFORGE_STAGE": "cpu", "HIPFORGE_STAGE_RECORD": str(tmp_path)}
    environment.pop("PYTEST_XDIST_WORKER", None)  # of this test, not of the run that it starts
    path = os.pathsep.join([str(OP_TESTS), os.environ.get("PYTHONPATH", "")])
    files = ["-k", "rms_norm or shapes_of_models", "ops/test_given_outputs.py", "ops/test_router_gemm.py"]
    done = subprocess.run(
        [*command, *files], cwd=OP_TESTS, env={**environment, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-2000:] + done.stderr[-1000:]
    (calls,) = tmp_path.glob("calls-*.jsonl")
    called = [json.loads(line)["variants"] for line in calls.read_text().splitlines()]
    norms, products = (
        [errors[name] for errors in called if name in errors]
        for name in ("module_rmsnorm_fp8-HF_INPUT=bf16", "module_router_gemm-HF_INPUT=bf16-HF_WEIGHT=f32")
    )
    assert set(norms) == {None}  # compared bit for bit
    ended = [error for error in products if error is not None]
    assert len(products) == 2 * len(ended) > 0  # noted ahead of the first call too, which may never return
    assert all(0 < error < 1e-6 for error in ended)
    assert '"outcome": "passed"' in (tmp_path / "outcomes.jsonl").read_text()
