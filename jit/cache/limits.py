"""``resource_limits`` of a registry entry: limits of its kernels' resources, and expected values.

Two kinds, because compilers differ. *Hard* limits (memory a kernel promises not to use: scratch, LDS) hold for every
binary: one that exceeds them is refused, with the numbers. *Expected* figures (registers, spills into other registers,
occupancy) are what certain compilers reach. For binaries of those compilers, exceeding one is a regression of the
kernel and an error; for every other compiler it is one warning at build time, because the results are still right. A
kernel whose largest work-group can never be resident is refused with the hard limits.

The limits do not determine the binary, so they are not in its key: they are checked against the resources in the
manifest whenever a module is looked up. Tightening a limit refuses the cached binary; loosening it needs no build.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hipforge import archs
from hipforge.errors import BuildError
from hipforge.jit.backends import vendors
from hipforge.jit.cache.store import Entry, Manifest
from hipforge.jit.spec import Binary

log = logging.getLogger("hipforge")

_SHOWN = 3
"""How many kernels a warning names."""


def compiler(manifest: Manifest) -> str:
    """Return the compiler that made an entry as limits name it: ``clang 22.1.8``, also for the clang inside a hipcc."""
    texts = [manifest.ingredients.get(f"compiler{part}:version", "") for part in (":clang", "")]
    match = re.search(r"clang version (\d+(?:\.\d+)*)", "\n".join(texts))
    return f"clang {match.group(1)}" if match else "an unknown compiler"


def problem(entry: Entry, spec: Binary) -> BuildError | None:
    """Return the error for an entry with kernels beyond their limits, or None."""
    if not spec.limits:
        return None
    lines = list(_excess(entry, spec, expected=False))
    if _is_recorded(entry, spec):
        lines += _excess(entry, spec, expected=True)
    if not lines:
        return None
    return BuildError(
        f"{spec.title} exceeds the resource_limits of its registry entry\nlog: {entry.path / 'build.log'}\n"
        f"built with {compiler(entry.manifest)}{_recorded_with(spec)}\n" + "\n".join(lines)
    )


def checked(entry: Entry, spec: Binary) -> Entry:
    """Return an entry that was just built; log one warning if a compiler without recorded figures exceeds them.

    Raises:
        BuildError: its kernels exceed the spec's limits.
    """
    error = problem(entry, spec)
    if error is not None:
        raise error
    if spec.limits and not _is_recorded(entry, spec):
        lines = list(_excess(entry, spec, expected=True))
        if lines:
            more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            log.warning(
                "%s built with %s works, but takes more than expected%s: %s%s",
                spec.title, compiler(entry.manifest), _recorded_with(spec), "; ".join(lines[:_SHOWN]), more,
            )  # fmt: skip
    return entry


def _compilers(spec: Binary) -> list[str]:
    return list(spec.limits.get("expected", {}).get("compilers", ()))


def _recorded_with(spec: Binary) -> str:
    names = " and ".join(_compilers(spec))
    return f" (figures recorded with {names})" if names else ""


def _is_recorded(entry: Entry, spec: Binary) -> bool:
    """Return whether the expected figures are those of the entry's compiler: ``clang 22.1`` means 22.1.8 too."""
    used = f"{compiler(entry.manifest)}."
    return any(used.startswith(f"{name}.") for name in _compilers(spec))


def _excess(entry: Entry, spec: Binary, *, expected: bool) -> Iterator[str]:
    vendor = vendors.of(entry.manifest.target)
    for symbol, values in entry.manifest.kernels.items():
        if not expected:
            yield from _not_resident(values, archs.get(entry.manifest.target))
        yield from _beyond(values, _applied(symbol, values, spec.limits, expected), vendor.limits)


def _applied(symbol: str, values: Mapping[str, Any], limits: Mapping[str, Any], expected: bool) -> dict[str, int]:
    """Return a kernel's limits of one kind: those of all kernels, then those of each pattern that it matches."""
    matching = (
        overrides
        for pattern, overrides in limits.get("kernels", {}).items()
        if any(fnmatch.fnmatchcase(name, pattern) for name in (symbol, values["name"]))
    )
    found: dict[str, int] = {}
    for level in (limits, *matching):
        chosen = level.get("expected", {}) if expected else level
        found.update({name: value for name, value in chosen.items() if type(value) is int})
    return found


def _beyond(
    values: Mapping[str, Any], limits: Mapping[str, int], words: Mapping[str, tuple[tuple[str, ...], bool]]
) -> Iterator[str]:
    for name, limit in limits.items():
        if name not in words:  # another vendor's
            continue
        numbers, is_upper = words[name]
        seen = sum(values[number] for number in numbers)
        if seen > limit if is_upper else seen < limit:
            what = name.removeprefix("max_") if len(numbers) > 1 else numbers[0].replace("_", " ")
            yield f"{values['name']}: {what} is {seen}, {name} is {limit}"


def _not_resident(values: Mapping[str, Any], arch: archs.ArchInfo) -> Iterator[str]:
    if "occupancy" not in values:  # a vendor whose compiler holds registers to the launch bounds
        return
    waves, room = -(-values["max_workgroup_size"] // arch.wave), arch.simds_per_cu * values["occupancy"]
    if waves > room:
        yield (
            f"{values['name']}: a work-group of {values['max_workgroup_size']} is {waves} waves, its registers leave "
            f"room for {room} per CU: lower its __launch_bounds__ or its registers"
        )
