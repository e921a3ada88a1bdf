"""Compiler output → what a person needs: the first real error, how to rerun it, and whether it is deterministic."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from hipforge.errors import BuildError

_ERROR = re.compile(
    r"(?:^|[\s:])(?:fatal )?error:|undefined (?:reference|symbol)|: multiple definition of|^Traceback|"
    r"^\w*(?:Error|Exception): ",
    re.MULTILINE,
)

# Where a template of a header was asked for, in clang's words and in nvcc's: the last one is the source's own line.
_ASKED_FOR = re.compile(r"^(\S+:\d+:\d+): note: .* requested here|at line (\d+) of (\S+)")

# Signs of a fault of the machine, or of something missing there, not of the source: the next attempt may succeed.
_TRANSIENT = re.compile(
    r"(?i:No space left on device|Disk quota exceeded|Cannot allocate memory|out of memory|bad_alloc|"
    r"due to signal|unable to execute command|Bus error|Input/output error|Too many open files|"
    r"Resource temporarily unavailable|Text file busy|Stale file handle|Permission denied)|"
    # a compiler that crashed, in gcc's words and in clang's
    r"internal compiler error|signal terminated|PLEASE submit a bug report|Segmentation fault|"
    # a library that is missing on the linker's search path may appear unnoticed
    r"cannot find -l|unable to find library -l|library not found for -l|"
    # with capitals, as a shell or a driver reports a signal; gcc ends every fatal error with "compilation terminated."
    r"\bKilled\b|\bTerminated\b",
)

_SIGNAL_STATUS = 128

# Errors of a source that needs more of headers than a module with "bare": true has, and how its command is told.
_BARE = (
    (
        re.compile(r"\s-nogpuinc\b"),
        re.compile(r"hip/[\w/]+\.h:|undeclared identifier|unknown type name|no member named|undefined hidden"),
        "no header of HIP but hipforge/amd/hip.h, and no device library; if the source needs more of HIP than that, "
        'remove "bare" and include hip/hip_runtime.h',
    ),
    (
        re.compile(r"/nvidia/bare\b"),
        re.compile(r'identifier "\w+" is undefined|has no member|no instance of overloaded function|was not declared'),
        "of CUDA's headers only what hipforge/nvidia/bare has; if the source needs more of CUDA than that, "
        'remove "bare"',
    ),
)


class UnreadableError(BuildError):
    """A compiler's output cannot be read: a fault of the disk or the machine, which may not recur."""


@dataclass(frozen=True)
class StepFailure:
    """One command that failed: its name, exit status (128 + n when signal n ended it), command line and output."""

    step: str
    status: int
    command: str
    output: str

    @property
    def deterministic(self) -> bool:
        """Whether the same inputs would fail the same way: a compiler said why, and no resource ran out."""
        if self.status >= _SIGNAL_STATUS or self.status < 0 or _TRANSIENT.search(self.output):
            return False
        return _ERROR.search(self.output) is not None

    @property
    def out_of_space(self) -> bool:
        """Whether the disk was full."""
        return re.search(r"No space left on device|Disk quota exceeded", self.output) is not None

    @property
    def hint(self) -> str:
        """What to do about it, as a line of its own, or nothing."""
        for command, error, rest in _BARE:
            if command.search(self.command) and error.search(self.output):
                return f'\nthe module says "bare": true, so it has {rest}'
        return ""

    @property
    def first_error(self) -> str:
        """The first line with an error, and the source's line for it; without one, the output's last line."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        for number, line in enumerate(lines):
            if _ERROR.search(line):
                if line.startswith("Traceback"):
                    return next((later for later in lines[number + 1 :] if not later.startswith(" ")), line)
                return line.strip() + _asked_for(lines[number + 1 :])
        return lines[-1].strip() if lines else f"the command exited with status {self.status} and no output"


def _asked_for(lines: list[str]) -> str:
    """Return the line of the source that an error in a header's template comes from, or nothing."""
    asked = ""
    for line in itertools.takewhile(lambda line: not _ERROR.search(line), lines):
        if found := _ASKED_FOR.search(line):
            clang, number, file = found.groups()
            asked = f"\n  asked for at {clang or f'{file}:{number}'}"
    return asked
