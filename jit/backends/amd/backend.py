"""The AMD backend as the rest of the package sees it."""

from __future__ import annotations

from types import MappingProxyType

from hipforge import settings
from hipforge.jit.backends.vendors import Vendor


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


VENDOR = Vendor(
    name="amd",
    device="hip",
    gpu="an AMD GPU",
    torch_arch=_torch_arch,
    torch_says=_torch_says,
    any_arch=True,
    no_gpu="install a ROCm build of torch",
    runtime_functions=("hipGetDevice", "hipSetDevice"),
    compiler=settings.HIPCC,
    nowhere="not found in ROCM_PATH, HIP_PATH, /opt/rocm or PATH",
    install="Install ROCm, or clang-22 lld-22 llvm-22 with `pip install triton`, or name a "
    "compiler with HIPFORGE_HIPCC",
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
