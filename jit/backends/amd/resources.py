"""The device code of a finished module: its GPUs, its kernels' resources, and whether it may be used at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hipforge.errors import BuildError
from hipforge.jit.backends.amd.code_object import CodeObject, CodeObjectError, read_code_objects
from hipforge.jit.backends.amd.scaled_mfma import scaled_mfmas
from hipforge.jit.backends.vendors import DeviceCode
from hipforge.jit.diagnostics import UnreadableError
from hipforge.jit.spec import BuildSpec


def read(spec: BuildSpec, library: Path) -> DeviceCode:
    """Return what a module's library holds.

    Raises:
        BuildError: the library has no code for the spec's target, or code that computes something else than its
            source says (see :mod:`hipforge.jit.backends.amd.scaled_mfma`).
    """
    try:
        objects = read_code_objects(library)
    except CodeObjectError as error:
        raise UnreadableError(f"{library.name} has no readable device code: {error}") from error
    targets = sorted({item.arch for item in objects})
    if targets != [spec.target]:
        raise BuildError(f"{library.name} holds code for {', '.join(targets) or 'no GPU'}, not for {spec.target}")
    for item in objects:
        _check_scales(item, spec)
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
    return DeviceCode(kernels, targets)


def _check_scales(code: CodeObject, spec: BuildSpec) -> None:
    wrong = [str(found) for found in scaled_mfmas(code) if found.misplaced]
    if wrong:
        raise BuildError(
            "scaled MFMA with a block scale outside the vector registers, where gfx950 reads bits 30:23 instead of the "
            f"selected byte; built with {spec.toolchain}. Build with clang 22 or newer, or keep the scale in a VGPR: "
            "hf::dev::scale_in_vgpr of hipforge/amd/mfma.h\n" + "\n".join(wrong)
        )
