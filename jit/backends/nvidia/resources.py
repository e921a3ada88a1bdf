"""What the kernels of a finished module need, as ptxas reported it while it was built."""

from __future__ import annotations

import re
from pathlib import Path

from hipforge.errors import BuildError
from hipforge.jit.backends.vendors import DeviceCode
from hipforge.jit.demangle import short_name
from hipforge.jit.spec import BuildSpec

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\d+)[a-z]?'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:, used (\d+) barriers)?(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse(report: str) -> tuple[dict[str, dict[str, str | int]], set[str]]:
    """Return each kernel's resources by symbol, and the targets, from the output of ``ptxas -v``."""
    kernels: dict[str, dict[str, str | int]] = {}
    targets: set[str] = set()
    kernel: dict[str, str | int] = {}
    for line in report.splitlines():
        if entry := _ENTRY.search(line):
            targets.add(entry.group(2))
            numbers = dict.fromkeys(("registers", "spill_bytes", "stack_bytes", "shared_bytes", "barriers"), 0)
            kernel = kernels[entry.group(1)] = {"name": short_name(entry.group(1)), **numbers}
        elif stack := _STACK.search(line):
            # Of the kernel itself first, then of each function that it calls.
            kernel["stack_bytes"] = int(kernel["stack_bytes"]) + int(stack.group(1))
            kernel["spill_bytes"] = int(kernel["spill_bytes"]) + int(stack.group(2)) + int(stack.group(3))
        elif used := _USED.search(line):
            shared = _SHARED.search(used.group(3))
            kernel.update(
                registers=int(used.group(1)),
                barriers=int(used.group(2) or 0),
                shared_bytes=int(shared.group(1)) if shared else 0,
            )
    return kernels, targets


def read(spec: BuildSpec, library: Path) -> DeviceCode:
    """Return what a module's library holds.

    Raises:
        BuildError: the library has no code for the spec's target.
    """
    logs = (library.parent / f"{step.name}.log" for step in spec.steps)
    kernels, targets = parse("\n".join(log.read_text(errors="replace") for log in logs if log.is_file()))
    if targets != {spec.target}:
        held = ", ".join(sorted(targets)) or "no GPU"
        raise BuildError(f"{library.name} holds code for {held}, not for {spec.target}")
    return DeviceCode(kernels, sorted(targets))
