"""Fuzzed calls of every public op: half of them good, half with spoilt arguments.

Each ends in a result that its own oracle finds right, in None, or in an exception of hipforge's. Anything else is
written down: a crash, another exception, a wrong result, a good call refused, a kernel that had to be stopped (a guard
let through what no GPU survives), an argument changed that the op does not write.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hipforge
from hipforge.errors import (
    BuildError,
    GuardError,
    HipforgeError,
    LaunchError,
    MissingModuleError,
    ToolchainError,
)
from hipforge.jit.call import tensors
from stress import attention, gemms, quantised, routing
from stress.case import Arguments, Op, Rng
from stress.mutations import spoilt

OPS: tuple[Op, ...] = (*gemms.OPS, *quantised.OPS, *routing.OPS, *attention.OPS)
HERE = Path(__file__).parent
# No guard backs these up: only the op's own checks refuse such a call.
FAULTS = (BuildError, LaunchError, MissingModuleError, ToolchainError)


def snapshot(value: Any) -> Any:
    """A copy of an argument as it was before the call; of what cannot be copied, the thing itself."""
    with contextlib.suppress(Exception), torch.no_grad():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and tensors.problem(value) is None:
            if value.is_quantized:  # torch dies of copying some of these
                return value
            return value.detach().clone(memory_format=torch.preserve_format)
    return value


def bits(value: torch.Tensor) -> bytes | None:
    """The bytes of a plain tensor, None of another."""
    with contextlib.suppress(Exception):
        if tensors.problem(value) is None:
            return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return None


def changed_input(op: Op, before: Arguments, after: Arguments) -> str | None:
    """The name of an argument that the op changed and must not, in words; or None."""
    written = {
        after[name].untyped_storage().data_ptr() for name in op.writes if isinstance(after.get(name), torch.Tensor)
    }
    for name, value in after.items():
        if name in op.writes or not isinstance(value, torch.Tensor) or value is before[name]:
            continue
        if bits(before[name]) != bits(value) and value.untyped_storage().data_ptr() not in written:
            return f"argument {name} was changed"
    return None


def reaches_kernel(op: Op, arguments: Arguments) -> bool:
    """Whether explain says that a kernel runs; ops without a planner compose ops that have one."""
    try:
        return hipforge.explain(op.name, **arguments).path == "kernel"
    except GuardError:
        return op.name == "fused_moe_mxfp8"


def is_fake(result: Any) -> bool:
    """Whether the result of a call with meta tensors came back, which has no numbers."""
    parts = result if isinstance(result, tuple) else (result,)
    return any(isinstance(part, torch.Tensor) and part.is_meta for part in parts)


def one_call(seed: int, number: int) -> tuple[str, str]:
    """Make call ``number``; returns (how it ended, details): ``right``, ``none``, ``refused`` or what went wrong."""
    rng = Rng(seed, number)
    op = OPS[number % len(OPS)]
    good = number // len(OPS) % 2 == 0
    arguments = op.make(rng)
    if not good:
        arguments = spoilt(rng, arguments, op.fixed)
    before = {name: snapshot(value) for name, value in arguments.items()}
    function = op.call or getattr(hipforge, op.name)
    try:
        result = function(**arguments)
    except FAULTS as error:
        return "fault", str(error)[:1500]
    except HipforgeError as error:
        return ("good call refused", str(error)[:600]) if good else ("refused", str(error)[:200])
    except Exception:
        return "raw exception", traceback.format_exc()[-1500:]
    if result is None or is_fake(result):
        return "none", ""
    try:
        complaint = op.judge(before, result, arguments) or changed_input(op, before, arguments)
    except Exception:
        return "accepted what means nothing", traceback.format_exc()[-1500:]
    if complaint:
        return "wrong result", complaint
    return ("right, by a kernel" if good and reaches_kernel(op, before) else "right"), ""


GOOD_ENDS = ("right", "right, by a kernel", "none", "refused")


def describe(arguments: Arguments) -> str:
    """Arguments in a few words."""
    parts = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            try:
                text = f"{value.dtype}{list(value.shape)} strides {value.stride()} {type(value).__name__}"
            except Exception:
                text = f"{value.dtype} {value.layout}"
        else:
            text = repr(value)[:80]
        parts.append(f"{name}={text}")
    return "\n    ".join(parts)


def arguments_of(seed: int, number: int) -> Arguments:
    """The arguments of a call, made again."""
    rng, op = Rng(seed, number), OPS[number % len(OPS)]
    made = op.make(rng)
    return made if number // len(OPS) % 2 == 0 else spoilt(rng, made, op.fixed)


def work(seed: int, first: int, end: int) -> None:
    """Make calls ``first`` to ``end``, announcing each before it is made, so that a crash names its call."""
    torch.set_num_threads(1)
    for number in range(first, end):
        print(json.dumps({"begins": number}), flush=True)
        outcome, details = one_call(seed, number)
        line: dict[str, Any] = {"number": number, "ended": outcome}
        if outcome not in GOOD_ENDS:
            line |= {
                "op": OPS[number % len(OPS)].name,
                "details": details,
                "call": describe(arguments_of(seed, number)),
            }
        print(json.dumps(line), flush=True)


def run(seed: int, first: int, end: int, arch: str) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Make calls in their own processes; a process that dies is replaced, and its call counts as a crash."""
    ended: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    while first < end:
        number = first
        for line in _lines(seed, first, end, arch):
            if "begins" in line:
                number = line["begins"]
                continue
            ended[line["ended"]] += 1
            first = line["number"] + 1
            if line["ended"] not in GOOD_ENDS:
                wrong.append({**line, "arch": arch})
        if first < end:
            ended["crash"] += 1
            wrong.append({"number": number, "ended": "crash", "op": OPS[number % len(OPS)].name, "arch": arch})
            first = number + 1
    return ended, wrong


def _lines(seed: int, first: int, end: int, arch: str) -> Iterator[dict[str, Any]]:
    program = f"import sys; sys.path.insert(0, {str(HERE.parent)!r})\nfrom stress import calls\n"
    program += f"calls.work({seed}, {first}, {end})\n"
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", program]
    environment = {
        **os.environ,
        "HIPFORGE_EMULATE": arch,
        "HIPFORGE_EMULATOR_CHECKS": "all",
        "HIPFORGE_EMULATOR_QUIET": "1",
    }
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    yield line
