"""The AMD backend as the rest of the package sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hipforge import settings
from hipforge.jit.backends.vendors import DeviceCode, Vendor

if TYPE_CHECKING:
    from hipforge.jit.spec import BuildSpec
    from hipforge.jit.toolchain import Toolchain

# Each function imports what it needs: a process that builds nothing, or runs nothing, does without the rest.


def _torch_arch(index: int) -> str | None:
    import torch

    if getattr(torch.version, "hip", None) is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(index).gcnArchName).split(":", 1)[0]


def _torch_says() -> str:
    import torch

    if getattr(torch.version, "hip", None) is None:
        return f"torch {torch.__version__} is not a ROCm build"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (ROCm {torch.version.hip}) sees no GPU"
    return str(torch.cuda.get_device_properties(0).gcnArchName)


def _load_runtime() -> Any:
    from hipforge.jit.backends.amd import hip_runtime

    return hip_runtime.load()


def _compilers(named: Path | None) -> Iterator[tuple[str, Path | None]]:
    from hipforge.jit.backends.amd import compilers

    return compilers.compilers(named)


def _inspect(path: Path, arch: str) -> Toolchain:
    from hipforge.jit.backends.amd import compilers

    return compilers.inspect(path, arch)


def _search_environment() -> tuple[str, ...]:
    from hipforge.jit.backends.amd import compilers

    return compilers.SEARCH_ENVIRONMENT


def _read_resources(spec: BuildSpec, library: Path) -> DeviceCode:
    from hipforge.jit.backends.amd import resources

    return resources.read(spec, library)


VENDOR = Vendor(
    name="amd",
    device="hip",
    gpu="an AMD GPU",
    torch_arch=_torch_arch,
    torch_says=_torch_says,
    any_arch=True,
    no_gpu="install a ROCm build of torch",
    load_runtime=_load_runtime,
    runtime_functions=("hipGetDevice", "hipSetDevice"),
    compiler=settings.HIPCC,
    compilers=_compilers,
    inspect=_inspect,
    nowhere="not found in ROCM_PATH, HIP_PATH, /opt/rocm or PATH",
    search_environment=_search_environment,
    install="Install ROCm, or clang-22 lld-22 llvm-22 clang-tools-22 with `pip install triton`, or name a "
    "compiler with HIPFORGE_HIPCC",
    read_resources=_read_resources,
    code_checks=("scaled MFMA operands",),
    kernel_numbers=(
        "vgpr", "agpr", "sgpr", "vgpr_allocated", "vgpr_spills", "sgpr_spills", "lds_bytes", "scratch_bytes",
        "max_workgroup_size", "occupancy",
    ),
    limits=MappingProxyType(
        {
            "max_vgprs": (("vgpr_allocated",), True),
            "max_spills": (("vgpr_spills", "sgpr_spills"), True),
            "max_scratch": (("scratch_bytes",), True),
            "max_lds": (("lds_bytes",), True),
            "min_occupancy": (("occupancy",), False),
        }
    ),
    columns=MappingProxyType(
        {
            "VGPR": ("vgpr",),
            "AGPR": ("agpr",),  # these are among the VGPRs
            "SGPR": ("sgpr",),
            "spills": ("vgpr_spills", "sgpr_spills"),
            "LDS B": ("lds_bytes",),
            "scratch": ("scratch_bytes",),
            "waves/SIMD": ("occupancy",),
        }
    ),
)  # fmt: skip
