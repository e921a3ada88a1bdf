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
        assert graphs.get("70", 2) == {"mxfp8_gemv": 3}.get(op, 2), (op, graphs)


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


def test_a_fresh_process_compiles_the_documented_chain_first() -> None:
    code = """
import torch, hipforge
from hipforge.ops.reference import quantize_mxfp8
wq, ws = quantize_mxfp8(torch.randn(64, 256).bfloat16())
def chain(gate_up):
    return hipforge.mxfp8_gemv(*hipforge.swiglu_mxfp8(gate_up), wq, ws)
compiled = torch.compile(chain, backend="eager", fullgraph=True, dynamic=True)
for batch in (7, 3, 12):
    gate_up = torch.randn(batch, 512).bfloat16()
    assert torch.equal(compiled(gate_up), chain(gate_up))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


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


FLOATS = """
import torch, hipforge
w, x = torch.ones(64).half(), torch.randn(2, 64).half()
cos_sin, cache, at = torch.randn(9, 64), torch.zeros(1, 8, 1, 64, dtype=torch.uint8), torch.arange(2)
def rope(x, n):
    q, k, v = x[:, None].clone(), cache.clone(), cache.clone()
    hipforge.rope_and_cache(
        q, q, q, cos_sin, at, k, v, at, q_weight=w, epsilon=n, weight_offset=n, k_scale=n, v_scale=2 * n,
        q_out=torch.empty_like(q),
    )
    return torch.cat((k.float(), v.float()))
ops = {
    "rope_and_cache": rope,
    "rms_norm": lambda x, n: hipforge.rms_norm(x, w, n, weight_offset=2 * n),
    "swiglu_mxfp8": lambda x, n: hipforge.swiglu_mxfp8(x, alpha=n)[0].float(),
    "topk_gating": lambda x, n: hipforge.topk_gating(x, 2, scale=n)[0],
}
for name, op in ops.items():
    for backend in ("eager", "inductor"):  # aot_eager is a part of inductor
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(op, backend=backend, fullgraph=True)
        for step in range(12):
            assert torch.equal(compiled(x, 0.1 + 0.01 * step), op(x, 0.1 + 0.01 * step)), (name, backend, step)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs <= 2, (name, backend, graphs)
print("done")
"""


def test_a_float_that_changes_from_call_to_call_is_compiled_once() -> None:
    ran = subprocess.run([sys.executable, "-c", FLOATS], capture_output=True, text=True)
    assert ran.stdout.strip() == "done", ran.stderr[-2000:]


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
