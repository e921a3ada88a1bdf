"""Which GPUs a finished module is for, and which resources each of its kernels takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hipforge.errors import BuildError
from hipforge.jit.backends.amd.code_object import CodeObjectError, read_code_objects
from hipforge.jit.spec import BuildSpec


def read(spec: BuildSpec, library: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return each kernel's resources and the library's gfx targets.

    Raises:
        BuildError: the library holds no code for the spec's target.
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
    return kernels, targets
