"""``resource_limits`` of a registry entry: a kernel that takes more than it may fails the build, with the numbers.

The limits do not determine the binary, so they are not in its key: they are checked against the resources in the
manifest whenever a module is looked up. Tightening a limit refuses the cached binary; loosening it needs no build.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any, Protocol

from hipforge.errors import BuildError
from hipforge.jit.cache.store import Entry
from hipforge.jit.spec import LIMITS


class Limited(Protocol):
    """What has limits: a request, or the spec that was made of it."""

    @property
    def title(self) -> str:
        """What messages call it."""

    @property
    def limits(self) -> Mapping[str, Any]:
        """The ``resource_limits`` of its registry entry."""


def problem(entry: Entry, spec: Limited) -> BuildError | None:
    """Return the error for an entry whose kernels exceed the spec's limits, or None."""
    if not spec.limits:
        return None
    kernels = entry.manifest.kernels
    excess = [line for symbol, values in kernels.items() for line in _excess(symbol, values, spec.limits)]
    if not excess:
        return None
    return BuildError(
        f"{spec.title} exceeds the resource_limits of its registry entry\nlog: {entry.path / 'build.log'}\n"
        + "\n".join(excess)
    )


def checked(entry: Entry, spec: Limited) -> Entry:
    """Return ``entry``.

    Raises:
        BuildError: its kernels exceed the spec's limits.
    """
    error = problem(entry, spec)
    if error is not None:
        raise error
    return entry


def _excess(symbol: str, values: dict[str, Any], limits: Mapping[str, Any]) -> list[str]:
    names = (symbol, values["name"])
    applied = {name: value for name, value in limits.items() if name in LIMITS}
    for pattern, overrides in limits.get("kernels", {}).items():
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            applied.update(overrides)
    seen = {**values, "spills": values["vgpr_spills"] + values["sgpr_spills"]}
    lines: list[str] = []
    for name, limit in applied.items():
        resource, is_upper = LIMITS[name]
        if seen[resource] > limit if is_upper else seen[resource] < limit:
            lines.append(f"{values['name']}: {resource.replace('_', ' ')} is {seen[resource]}, {name} is {limit}")
    return lines
