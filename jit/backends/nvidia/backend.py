"""The NVIDIA backend as the rest of the package sees it."""

from __future__ import annotations

from types import MappingProxyType

from hipforge import settings
from hipforge.jit.backends.vendors import Vendor

WHEELS = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"
"""What a toolkit is put together from; pyproject.toml has the same as the extra ``cuda``."""


def _torch_arch(index: int) -> str | None:
    import torch

    if getattr(torch.version, "cuda", None) is None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def _torch_says() -> str:
    import torch

    if getattr(torch.version, "cuda", None) is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU"
    return f"{torch.cuda.get_device_name(0)} ({_torch_arch(0)})"


VENDOR = Vendor(
    name="nvidia",
    device="cuda",
    gpu="an NVIDIA GPU",
    torch_arch=_torch_arch,
    torch_says=_torch_says,
    any_arch=False,
    no_gpu="install a CUDA build of torch and a driver for it",
    runtime_functions=("cudaGetDevice", "cudaSetDevice"),
    compiler=settings.NVCC,
    nowhere="not found in CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda or the wheel nvidia-cuda-nvcc",
    install=f"Run `pip install {WHEELS}`, or install a CUDA toolkit, or name an nvcc with HIPFORGE_NVCC",
    code_checks=(),
    kernel_numbers=("registers", "spill_bytes", "stack_bytes", "shared_bytes", "barriers"),
    limits=MappingProxyType(
        {
            "max_registers": (("registers",), True),
            "max_spill_bytes": (("spill_bytes",), True),
            "max_stack": (("stack_bytes",), True),
            "max_shared": (("shared_bytes",), True),
        }
    ),
    columns=MappingProxyType(
        {
            "regs": ("registers",),
            "spill B": ("spill_bytes",),
            "stack": ("stack_bytes",),
            "smem B": ("shared_bytes",),
            "barriers": ("barriers",),
        }
    ),
)
