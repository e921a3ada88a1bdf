"""Fuzzed calls of every public op: a third of them good, the others with spoilt arguments.

Each ends in a result that its own oracle finds right, in None, or in an exception of hipforge's. Anything else is
written down: a crash, another exception, a wrong result, a good call refused, a kernel that had to be stopped (a guard
let through what no GPU survives), memory taken that is not there, an argument changed that the op does not write, or by
a call that it refused.
"""

from __future__ import annotations

import contextlib
import faulthandler
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
from helpers.declared import declared
from torch._subclasses.fake_tensor import FakeTensor

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

_DECLARED = (op for ops in declared("STRESS") for op in ops)
OPS: tuple[Op, ...] = (*gemms.OPS, *quantised.OPS, *routing.OPS, *attention.OPS, *_DECLARED)
HERE = Path(__file__).parent
# No guard backs these up: only the op's own checks refuse such a call.
LONGEST = 120  # seconds that a call may take
FAULTS = (BuildError, LaunchError, MissingModuleError, ToolchainError)


def snapshot(value: Any) -> Any:
    """A copy of an argument as it was before the call; of what cannot be copied, the thing itself."""
    with contextlib.suppress(Exception), torch.no_grad():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and tensors.problem(value) is None:
            if value.is_quantized:  # torch dies of copying some of these
                return value
            if value.dtype == torch.bool:  # a copy would make 0 and 1 of other bytes
                return value.detach().view(torch.uint8).clone(memory_format=torch.preserve_format).view(torch.bool)
            return value.detach().clone(memory_format=torch.preserve_format)
    return value


def bits(value: torch.Tensor) -> bytes | None:
    """The bytes of a plain tensor, None of another."""
    with contextlib.suppress(Exception):
        if tensors.problem(value) is None:
            plain = value.detach().view(torch.uint8) if value.dtype == torch.bool else value.detach()
            return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
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


def changed_by_refusal(before: Arguments, after: Arguments) -> str | None:
    """The name of an argument that a refused call changed, in words; or None."""
    for name, value in after.items():
        if isinstance(value, torch.Tensor) and value is not before[name] and bits(before[name]) != bits(value):
            return f"argument {name} was changed"
    return None


def unsound(arguments: Arguments) -> str | None:
    """The name of an argument whose memory is not what it says, in words; or None."""
    for name, value in arguments.items():
        with contextlib.suppress(Exception):
            if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or not value.numel():
                continue
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            end = (value.storage_offset() + last + 1) * value.element_size()
            if value.is_neg() or value.is_conj() or (not value.is_meta and value.untyped_storage().nbytes() < end):
                return f"argument {name} has a pending sign, or ends at byte {end} of a smaller storage"
    return None


def reaches_kernel(op: Op, arguments: Arguments) -> bool:
    """Whether explain says that a kernel runs; ops without a planner compose ops that have one."""
    try:
        return hipforge.explain(op.name, **arguments).path == "kernel"
    except GuardError:
        return op.name == "fused_moe_mxfp8"


def is_fake(result: Any) -> bool:
    """Whether the result of a call with meta or fake tensors came back, which has no numbers."""
    parts = result if isinstance(result, tuple) else (result,)
    return any(isinstance(part, torch.Tensor) and (part.is_meta or isinstance(part, FakeTensor)) for part in parts)


def one_call(seed: int, number: int) -> tuple[str, str]:
    """Make call ``number``; returns (how it ended, details): ``right``, ``none``, ``refused`` or what went wrong."""
    rng = Rng(seed, number)
    op = OPS[number % len(OPS)]
    good = is_good(number)
    arguments = arguments_of(rng, number)
    before = {name: snapshot(value) for name, value in arguments.items()}
    function = op.call or getattr(hipforge, op.name)
    try:
        result = function(**arguments)
    except FAULTS as error:
        return "fault", str(error)[:1500]
    except HipforgeError as error:
        if good:
            return "good call refused", str(error)[:600]
        changed = changed_by_refusal(before, arguments)
        return ("refused and written", f"{changed}: {error}"[:600]) if changed else ("refused", str(error)[:200])
    except Exception:
        return "raw exception", traceback.format_exc()[-1500:]
    if result is None or is_fake(result):
        return "none", ""
    wrong = unsound(arguments)
    if wrong:
        return "taken", wrong
    try:
        complaint = op.judge(before, result, arguments) or changed_input(op, before, arguments)
    except MemoryError:  # an expanded operand of 2^46 rows, few of which are read
        return "none", ""
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


def is_good(number: int) -> bool:
    """Whether the arguments of a call are left as they should be: one of three."""
    return number // len(OPS) % 3 == 0


def arguments_of(rng: Rng, number: int) -> Arguments:
    """The arguments of a call."""
    op = OPS[number % len(OPS)]
    made = op.make(rng)
    return made if is_good(number) else spoilt(rng, made, op.fixed)


def work(seed: int, first: int, end: int) -> None:
    """Make calls ``first`` to ``end``, announcing each before it is made, so that a crash names its call."""
    torch.set_num_threads(1)
    for number in range(first, end):
        print(json.dumps({"begins": number}), flush=True)
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        outcome, details = one_call(seed, number)
        faulthandler.cancel_dump_traceback_later()
        line: dict[str, Any] = {"number": number, "ended": outcome}
        if outcome not in GOOD_ENDS:
            line |= {
                "op": OPS[number % len(OPS)].name,
                "details": details,
                "call": describe(arguments_of(Rng(seed, number), number)),
            }
        print(json.dumps(line), flush=True)


def run(seed: int, first: int, end: int, where: str) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Make calls in their own processes, on an architecture or ``torch``.

    A process that dies, or takes too long for a call, is replaced, and its call counts as a crash.
    """
    ended: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    while first < end:
        number = first
        for line in _lines(seed, first, end, where):
            if "begins" in line:
                number = line["begins"]
                continue
            ended[line["ended"]] += 1
            first = line["number"] + 1
            if line["ended"] not in GOOD_ENDS:
                wrong.append({**line, "where": where})
        if first < end:
            ended["crash"] += 1
            wrong.append({"number": number, "ended": "crash", "op": OPS[number % len(OPS)].name, "where": where})
            first = number + 1
    return ended, wrong


def _lines(seed: int, first: int, end: int, where: str) -> Iterator[dict[str, Any]]:
    program = f"import sys; sys.path.insert(0, {str(HERE.parent)!r})\nfrom stress import calls\n"
    program += f"calls.work({seed}, {first}, {end})\n"
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", program]
    environment = {
        **os.environ,
        **({"HIPFORGE_DEVICE": "reference"} if where == "torch" else {"HIPFORGE_EMULATE": where}),
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
