"""One planted fault, and how files of one folder list theirs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A text of a file, what takes its place, and who notices.

    Attributes:
        name: area and mistake.
        file: below the repository's root; the package's folders are real there.
        text: occurs in it once.
        becomes: what takes its place.
        tests: files below op_tests (patterns are allowed), perhaps ``-k`` and a part of names; at least one test fails.
        arch: the architecture that these tests emulate.
    """

    name: str
    file: str
    text: str
    becomes: str
    tests: str
    arch: str = "gfx950"


def faults_in(folder: str, tests: str, *faults: tuple[str, ...]) -> list[Fault]:
    """Faults in files below ``folder`` that ``tests`` notice: (name, file, text, becomes[, tests[, arch]])."""
    return [Fault(f[0], folder + f[1], f[2], f[3], *((tests,) if len(f) < 5 else f[4:])) for f in faults]
