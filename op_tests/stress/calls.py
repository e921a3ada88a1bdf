"""Fuzzed calls of every public op: a third of them good, the others with spoilt arguments.

Each ends in a result that its own oracle finds right, in None, or in an exception of hipforge's. Anything else is
written down: a crash, another exception, a wrong result, a good call refused, a kernel that had to be stopped (a guard
let through what no GPU survives), memory taken that is not there, an argument changed that the op does not write, or by
a call that it refused. Every call is made twice, where nothing is decided and after a good call of the same sizes: both
end alike. A good call of a kernel is also captured in a graph, and replayed when the caller has let go of its tensors.
New memory holds NaN, so that a result made of what nothing wrote is wrong.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import functools
import inspect
import math
import resource
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from helpers.declared import declared
from torch._subclasses.fake_tensor import FakeTensor

import hipforge
from hipforge import emulator
from hipforge.errors import (
    BuildError,
    GuardError,
    HipforgeError,
    LaunchError,
    MissingModuleError,
    ToolchainError,
)
from hipforge.ops.core import dispatch
from stress import attention, experts, gemms, layers, quantised, rotation, routing, sparse, supervised
from stress.case import Arguments, Op, Rng
from stress.mutations import spoilt

_DECLARED = (op for ops in declared("STRESS") for op in ops)
OPS: tuple[Op, ...] = (
    *gemms.OPS, *experts.OPS, *layers.OPS, *quantised.OPS, *routing.OPS, *attention.OPS, *rotation.OPS, *sparse.OPS,
    *_DECLARED,
)  # fmt: skip
# No guard backs these up: only the op's own checks refuse such a call.
FLOAT32_MAX, FLOAT32_LEAST = (2 - 2.0**-23) * 2.0**127, 2.0**-149
LONGEST = 600  # seconds that a call may take, which may build its module on a busy machine
MOST_MEMORY = 16 << 30  # bytes of addresses that a process may use: a larger result is refused, not filled
FAULTS = (BuildError, LaunchError, MissingModuleError, ToolchainError)


def snapshot(value: Any) -> Any:
    """A copy of an argument as it was before the call; of what cannot be copied, the thing itself."""
    with contextlib.suppress(Exception), torch.no_grad():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and flaw(value) is None:
            if value.is_quantized:  # torch dies of copying some of these
                return value
            if value.dtype == torch.bool:  # a copy would make 0 and 1 of other bytes
                return value.detach().view(torch.uint8).clone(memory_format=torch.preserve_format).view(torch.bool)
            return value.detach().clone(memory_format=torch.preserve_format)
    return value


def bits(value: torch.Tensor) -> bytes | None:
    """The bytes of a plain tensor, None of another."""
    with contextlib.suppress(Exception):
        if flaw(value) is None:
            plain = value.detach().view(torch.uint8) if value.dtype == torch.bool else value.detach()
            return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return None


def changed_input(op: Op, before: Arguments, after: Arguments) -> str | None:
    """The name of an argument that the op changed and must not, in words; or None.

    It may be changed where it is itself what the op was given to write: what works in place takes it so.
    """
    written = [after[name] for name in op.writes if after.get(name) is not None]
    for name, value in after.items():
        if name in op.writes or not isinstance(value, torch.Tensor) or value is before[name]:
            continue
        if bits(before[name]) != bits(value) and all(value is not each for each in written):
            return f"argument {name} was changed"
    return None


def changed_by_refusal(before: Arguments, after: Arguments) -> str | None:
    """The name of an argument that a refused call changed, in words; or None."""
    for name, value in after.items():
        if isinstance(value, torch.Tensor) and value is not before[name] and bits(before[name]) != bits(value):
            return f"argument {name} was changed"
    return None


def flaw(value: torch.Tensor) -> str | None:
    """Why a tensor's memory is not what its elements are, not asked of the package's own check; or None."""
    if isinstance(value, FakeTensor):
        return None
    if value.is_neg() or value.is_conj() or value._is_zerotensor():
        return "has a pending sign, or is a zero without memory"
    if not value.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    end = (value.storage_offset() + last + 1) * value.element_size()
    return f"ends at byte {end} of a smaller storage" if end > value.untyped_storage().nbytes() else None


def unsound(op: Op, arguments: Arguments) -> str | None:
    """The name of a tensor or float that no op may take, and why; or None."""
    parameters = inspect.signature(function_of(op)).parameters
    for name, value in arguments.items():
        kind = str(parameters[name].annotation)
        size = abs(value) if isinstance(value, float) and "float" in kind else 0.0
        if FLOAT32_MAX < size < math.inf or 0.0 < size < FLOAT32_LEAST:
            return f"argument {name} is {value}, which float32 does not hold"
        with contextlib.suppress(Exception):
            if isinstance(value, torch.Tensor) and kind != "bool" and not value.is_meta:
                wrong = flaw(value)
                unused = name == "workspace" and wrong is not None and wrong.startswith("ends at")
                if wrong is not None and not unused:  # a call needs the first bytes of a workspace, or none
                    return f"argument {name} {wrong}"
    return None


def reaches_kernel(op: Op, arguments: Arguments) -> bool:
    """Whether explain says that a kernel runs; ops without a planner compose ops that have one."""
    try:
        return hipforge.explain(op.name, **arguments).path == "kernel"
    except GuardError:
        return op.name.startswith("fused_moe_")


def is_fake(result: Any) -> bool:
    """Whether the result of a call with meta or fake tensors came back, which has no numbers."""
    return any(
        isinstance(part, torch.Tensor) and (part.is_meta or isinstance(part, FakeTensor)) for part in results(result)
    )


def one_call(seed: int, number: int) -> tuple[str, str]:
    """Make call ``number``; returns (how it ended, details): ``right``, ``none``, ``refused`` or what went wrong."""
    op = OPS[number % len(OPS)]
    good = is_good(number)
    dispatch.clear_decisions()
    first = _ended(op, good, arguments_of(Rng(seed, number), number))
    if first[0] not in GOOD_ENDS:
        return first
    if not good:
        with contextlib.suppress(Exception):  # draws of good calls judge these
            function_of(op)(**op.make(Rng(seed, number)))
    again = _ended(op, good, arguments_of(Rng(seed, number), number))
    if again[0] not in GOOD_ENDS:
        return again[0], f"after a good call: {again[1]}"
    unused = "workspace" in first[1] and again[0] == "right"  # bytes past those that a call needs: seen by the first
    if (first[0] != again[0] or first[1].split(":")[0] != again[1].split(":")[0]) and not unused:  # class of error
        return "otherwise after a good call", f"{first} and then {again}"
    complaint = replayed(op, seed, number) if first[0] == "right, by a kernel" else None
    return ("wrong replay", complaint) if complaint else first


def replayed(op: Op, seed: int, number: int) -> str | None:
    """Capture a good call and replay it after its arguments are gone or freed; what is wrong with that, or None."""
    rng = Rng(seed, number, 1)
    arguments = op.make(Rng(seed, number))
    if not rng.chance(0.5) or not arguments.get("deterministic", True):
        return None
    wanted = [bits(part) for part in results(function_of(op)(**op.make(Rng(seed, number))))]
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and not value.untyped_storage().resizable():  # numpy's memory
            arguments[name] = snapshot(value)
    try:
        with emulator.capture() as graph:
            result = function_of(op)(**arguments)
    except HipforgeError:  # an op that must look at values
        return None
    memory = {name: value.untyped_storage() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    freed = rng.pick([None, *(name for name, held in memory.items() if held.resizable() and name not in op.writes)])
    sizes = [held.nbytes() for held in memory.values()]
    if freed is not None:
        memory[freed].fill_(0xAA)  # what is freed may hold anything
        memory[freed].resize_(0)
    del arguments, memory
    garbage = [torch.full((size,), 0xAA, dtype=torch.uint8) for size in sizes for _ in range(3)]
    try:
        graph.replay()
    except GuardError as error:
        return None if freed is not None else f"refused: {error}"
    del garbage
    same = [bits(part) for part in results(result)] == wanted
    return None if same else f"another result than the eager call's; freed: {freed}"


def results(result: Any) -> tuple[Any, ...]:
    """The parts of a result."""
    return result if isinstance(result, tuple) else (result,)


def function_of(op: Op) -> Any:
    """What a call of an op calls."""
    return op.call or getattr(hipforge, op.name)


def good_arguments(op: Op, accept: Callable[[Arguments], bool] = bool) -> Arguments:
    """Arguments of a call that returns a result, as many of them given as can be, and of more than one row."""
    return copy.deepcopy(_most_given(op, accept))


@functools.cache
def _most_given(op: Op, accept: Callable[[Arguments], bool]) -> Arguments:
    best: Arguments = {}
    most = (0, 0)
    for number in range(60):
        given = op.make(Rng(11, number))
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        found = len(tensors), sum(min(value.shape, default=1) > 1 for value in tensors)
        if all(value.numel() for value in tensors) and accept(given) and found > most:
            best, most = given, found
    return best


def _ended(op: Op, good: bool, arguments: Arguments) -> tuple[str, str]:
    """Make one call and judge it."""
    before = {name: snapshot(value) for name, value in arguments.items()}
    function = function_of(op)
    try:
        result = function(**arguments)
    except FAULTS as error:
        return "fault", str(error)[:1500]
    except HipforgeError as error:
        if good:
            return "good call refused", str(error)[:600]
        changed = changed_by_refusal(before, arguments)
        words = f"{type(error).__name__}: {error}"[:600]
        return ("refused and written", f"{changed}: {words}") if changed else ("refused", words)
    except Exception:
        return "raw exception", traceback.format_exc()[-1500:]
    if result is None or is_fake(result):
        return "none", ""
    wrong = unsound(op, arguments)
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
    return made if is_good(number) else spoilt(rng, made, op)


def work(seed: int, first: int, end: int) -> None:
    """Make calls ``first`` to ``end``, announcing each before it is made, so that a crash names its call."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch fills new memory then
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    for number in range(first, end):
        supervised.say(begins=number)
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        outcome, details = one_call(seed, number)
        faulthandler.cancel_dump_traceback_later()
        line: dict[str, Any] = {"number": number, "ended": outcome}
        if outcome not in GOOD_ENDS:
            line |= {"details": details, "call": describe(arguments_of(Rng(seed, number), number))}
        supervised.say(**line)


def run(
    seed: int, first: int, end: int, where: str, found: threading.Event | None = None
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Make calls in their own processes, on an architecture or ``torch``.

    A process that dies, or takes too long for a call, is replaced, and its call counts as a crash. ``found`` is set by
    the first call that is wrong; from then on no more are made.
    """
    ended: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    device = {"HIPFORGE_DEVICE": "reference"} if where == "torch" else {"HIPFORGE_EMULATE": where}
    environment = {**device, "HIPFORGE_EMULATOR_CHECKS": "all", "HIPFORGE_EMULATOR_QUIET": "1"}
    program = lambda first: f"from stress import calls\ncalls.work({seed}, {first}, {end})\n"
    for line in supervised.cases(program, first, end, environment) if not (found and found.is_set()) else ():
        ended[line["ended"]] += 1
        if line["ended"] not in GOOD_ENDS:
            wrong.append({"op": OPS[line["number"] % len(OPS)].name, **line, "where": where})
        if found and (wrong or found.is_set()):
            found.set()
            break
    return ended, wrong
