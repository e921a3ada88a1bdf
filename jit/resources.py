"""Per-kernel resources of a finished module, and the limits its registry entry sets."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

from hipforge.errors import BuildError
from hipforge.jit.code_object import CodeObjectError, read_code_objects
from hipforge.jit.spec import LIMITS, BuildSpec


def check(spec: BuildSpec, library: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return each kernel's resources and the library's gfx targets.

    Raises:
        BuildError: the library holds no code for the spec's target, or a kernel exceeds a limit.
    """
    if not spec.is_device_code:
        return {}, []
    try:
        objects = read_code_objects(library)
    except CodeObjectError as error:
        raise BuildError(f"{library.name} holds no readable device code: {error}") from error
    targets = sorted({item.arch for item in objects})
    if targets != [spec.target]:
        raise BuildError(f"{library.name} holds code for {', '.join(targets) or 'no GPU'}, not for {spec.target}")
    kernels: dict[str, dict[str, Any]] = {}
    for item in objects:
        for symbol, kernel in item.kernels.items():
            kernels[symbol] = {
                "name": kernel.short_name,
                "vgpr": kernel.vgpr,
                "agpr": kernel.agpr,
                "sgpr": kernel.sgpr,
                "vgpr_allocated": kernel.vgpr_allocated,
                "vgpr_spills": kernel.vgpr_spills,
                "sgpr_spills": kernel.sgpr_spills,
                "lds_bytes": kernel.lds_bytes,
                "scratch_bytes": kernel.scratch_bytes,
                "max_workgroup_size": kernel.max_workgroup_size,
                "occupancy": kernel.occupancy,
            }
    excess = [line for symbol, values in kernels.items() for line in _excess(symbol, values, dict(spec.limits))]
    if excess:
        raise BuildError("resource_limits exceeded:\n" + "\n".join(excess))
    return kernels, targets


def _excess(symbol: str, values: dict[str, Any], limits: dict[str, Any]) -> list[str]:
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
