"""Every public op under torch.compile, torch.export and opcheck, each first thing in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.op_calls import CALLS

import hipforge
from hipforge import ops
from hipforge.errors import GuardError
from hipforge.ops.core import traced
from hipforge.ops.core.checks import TensorSpec
from hipforge.ops.core.dispatch import planner_of

CHILD = Path(__file__).resolve().parents[1] / "helpers" / "trace_every_op.py"
NO_OPERATORS = {"Float8Linear", "Float8LinearConfig", "convert_to_float8_training", "disable_fp8"}


@pytest.fixture(scope="module")
def child() -> Callable[..., dict[str, dict[str, Any]]]:
    """Runs the script in its own process and returns what it said of each op; an error of any op fails the test."""
    ran: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    # Which call runs is in question, not what a kernel does: that has its own tests, with every check of the emulator.
    environment = {**os.environ, "HIPFORGE_QUIET": "1", "HIPFORGE_EMULATOR_CHECKS": "memory"}

    def run(*arguments: str) -> dict[str, dict[str, Any]]:
        if arguments not in ran:
            command = [sys.executable, str(CHILD), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert done.returncode == 0, done.stderr[-3000:]
            said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            ran[arguments] = {entry.pop("op"): entry for entry in said}
        errors = {op: entry["error"] for op, entry in ran[arguments].items() if "error" in entry}
        assert not errors, errors
        assert set(ran[arguments]) == set(CALLS)
        return ran[arguments]

    return run


def test_every_public_op_has_a_call_here() -> None:
    assert set(CALLS) == set(ops.public_names()) - NO_OPERATORS


def test_one_graph_serves_all_batch_sizes(child: Callable[..., Any]) -> None:
    for op, said in child("compile", "dynamic").items():
        graphs = said["graphs"]
        if op.startswith("grouped_gemm_"):  # may return None; the planner knows no range of batches: a graph for each
            continue
        # torch itself always makes another graph for a batch of 1; a batch outside the envelope is None, in a third.
        assert (graphs["3"], graphs["8"], graphs["1"]) == (1, 1, 2), (op, graphs)
        limited = op == "mxfp8_gemv" or op.startswith("all_reduce")
        assert graphs.get("70", 2) == 2 + limited, (op, graphs)


@pytest.mark.full
def test_by_default_there_are_at_most_two_graphs(child: Callable[..., Any]) -> None:
    for op, said in child("compile", "default").items():
        if not op.startswith("grouped_gemm_"):
            assert said["graphs"]["8"] <= 2, (op, said)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)])
def test_exported_programs_load_and_run_in_another_process(
    child: Callable[..., Any], tmp_path: Path, strict: bool
) -> None:
    child("export-strict" if strict else "export", str(tmp_path))
    child("load", str(tmp_path))


def test_torchs_own_checks_of_every_operator(child: Callable[..., Any]) -> None:
    # To see whether an input changed, torch's schema check multiplies its elements, which it cannot for float8.
    beyond_torch = "not implemented for 'Float8_e4m3fn"
    operators: dict[str, dict[str, str]] = {}
    for said in child("opcheck").values():
        operators.update(said["operators"])
    failed = {
        (name, test): result
        for name, tests in operators.items()
        for test, result in tests.items()
        if result != "SUCCESS" and not (test == "test_schema" and beyond_torch in result)
    }
    assert not failed
    assert len(operators) >= 20


def test_ranges_of_m_are_what_the_planner_says_of_each_m() -> None:
    assert hipforge.mxfp8_gemv  # imports the op, which registers its planner
    n, k = 768, 6144  # a shape of the tuned table
    device = torch.device("cpu")
    tensor = ("tensor", True)
    parts = (
        ("xq", (*tensor, (k,), torch.float8_e4m3fn, device)),
        ("x_scale", (*tensor, (k // 32,), torch.uint8, device)),
        ("wq", ("tensor", False, (n, k), torch.float8_e4m3fn, device)),
        ("w_scale", ("tensor", False, (n, k // 32), torch.uint8, device)),
    )
    ranges = traced._ranges("mxfp8_gemv", parts)
    for m in (*range(1, 70), 128, 1000, 1 << 20):
        specs = [TensorSpec(s if not rows else (m, *s), dtype, d) for _, (_, rows, s, dtype, d) in parts]
        accepted = planner_of("mxfp8_gemv")(*specs).accepted is not None
        assert any(low <= m <= high for low, high in ranges) == accepted, (m, ranges)
    assert ranges and ranges[-1][1] == 64


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"scaled_mm"}))  # that is torch's own operation
def test_jit_trace_is_refused_because_it_would_record_the_results_memory_alone(name: str) -> None:
    given = CALLS[name].make(3)

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return CALLS[name].run(**dict(zip(given, tensors, strict=True)))

    with pytest.raises(GuardError, match=r"under torch.jit.trace, .* use torch.export.export"):
        torch.jit.trace(Module(), tuple(given.values()), check_trace=False)


def test_a_profile_names_every_op_once_a_call() -> None:
    calls = [(call.run, call.make(2)) for call in CALLS.values()]
    for run, given in calls:  # builds
        run(**given)
    with torch.profiler.profile() as profile:
        for run, given in calls:
            run(**given)
    times = {event.key: event.count for event in profile.key_averages()}
    assert not [op for op in CALLS if f"hipforge::{op}" not in times]
    assert times["hipforge::swiglu_mxfp8"] == 1
    with torch.profiler.profile() as profile:
        torch.ops.hipforge.rms_norm(torch.ones(2, 64).bfloat16(), torch.ones(64).bfloat16(), 1e-5)
    (seen,) = [event for event in profile.events() if event.key == "hipforge::rms_norm"]  # not inside itself again
    assert [child.name for child in seen.cpu_children] == ["aten::empty_like"]
