"""Which compiler builds a module here, and why not the others?

A toolchain answers four questions: where its files are (``roots``), what of it enters a key
(``ingredients``), which commands compile one source (``compile``) and which link (``link``). Candidates are looked at
in a fixed order; each is accepted or refused with a reason, and ``hipforge doctor`` prints them all. Looking at one
starts processes, so the answers are kept beside the stat of the compiler (see :mod:`hipforge.jit.tools`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hipforge.archs import ARCHS
from hipforge.errors import ConfigError, ToolchainError
from hipforge.jit.backends import vendors
from hipforge.jit.backends.vendors import Vendor
from hipforge.jit.cache import cache_dir
from hipforge.jit.units import Compiled, Unit


class Toolchain(Protocol):
    """What can build a module for a GPU."""

    @property
    def description(self) -> str:
        """Name and version, for people."""
        ...

    def roots(self) -> dict[str, str]:
        """Return the placeholders this toolchain's commands use."""
        ...

    def ingredients(self, arch: str) -> dict[str, str]:
        """Return everything of the toolchain that determines a binary for ``arch``."""
        ...

    def host_flags(self) -> tuple[str, ...]:
        """Return what a source without device code needs to include the runtime's header."""
        ...

    def compile(self, unit: Unit, module: str, arch: str) -> Compiled:
        """Return the commands that compile one source."""
        ...

    def link(self, objects: Sequence[str], ldflags: Sequence[str], library: str) -> Compiled:
        """Return the command that makes the shared library, and the files it needs."""
        ...


@dataclass(frozen=True)
class Accepted:
    """A toolchain that can build."""

    name: str
    path: Path
    toolchain: Toolchain


@dataclass(frozen=True)
class Refused:
    """A compiler that was looked at, and why it cannot be used.

    ``lacks_headers_only``: all it lacks is HIP headers and device libraries, which the triton wheel carries.
    """

    name: str
    path: Path | None
    reason: str
    lacks_headers_only: bool = False


Verdict = Accepted | Refused


def probe_all(arch: str = next(iter(ARCHS))) -> list[Verdict]:
    """Return a verdict on every candidate, in the order in which they are preferred."""
    return [_judge_any(judge, arch) for judge in _candidates(vendors.of(arch))]


def select(arch: str) -> Toolchain:
    """Return the first toolchain that can build for ``arch``.

    Raises:
        ConfigError: the cache directory cannot be used.
        ToolchainError: none can, or the compiler that the vendor's setting names cannot; the message gives each reason.
    """
    vendor = vendors.of(arch)
    named = vendor.compiler.get()
    settled = (arch, named, cache_dir.configured()[0], *map(os.environ.get, vendor.search_environment()))
    if settled in _selected:
        return _selected[settled]
    reasons: list[str] = []
    for judge in _candidates(vendor):
        verdict = judge(arch)
        if isinstance(verdict, Accepted):
            _selected[settled] = verdict.toolchain
            return verdict.toolchain
        reasons.append(f"  {verdict.name}: {verdict.reason}")
        if named is not None:
            break
    raise ToolchainError(
        f"no compiler can build for {arch}:\n" + "\n".join(reasons) + "\n"
        f"{vendor.install}; `hipforge doctor` shows the whole search"
    )


_selected: dict[tuple[object, ...], Toolchain] = {}


def _candidates(vendor: Vendor) -> Iterator[Callable[[str], Verdict]]:
    for name, path in vendor.compilers(vendor.compiler.get()):
        yield functools.partial(_judge, vendor, name, path)


def _judge_any(judge: Callable[[str], Verdict], arch: str) -> Verdict:
    """Return a verdict also for wrong settings or a wrong cache directory, which a build reports itself."""
    try:
        return judge(arch)
    except ConfigError as error:
        return Refused("settings", None, str(error))


def _judge(vendor: Vendor, name: str, path: Path | None, arch: str) -> Verdict:
    if path is None:
        return Refused(name, None, vendor.nowhere)
    try:
        toolchain = vendor.inspect(path, arch)
    except (ToolchainError, OSError) as error:
        return Refused(name, path, str(error), getattr(error, "lacks_headers_only", False))
    return Accepted(name, path, toolchain)
