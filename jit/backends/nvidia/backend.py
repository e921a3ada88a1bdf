"""The NVIDIA backend as the rest of the package sees it."""

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


def _load_runtime() -> Any:
    from hipforge.jit.backends.nvidia import cuda_runtime

    return cuda_runtime.load()


def _compilers(named: Path | None) -> Iterator[tuple[str, Path | None]]:
    from hipforge.jit.backends.nvidia import compilers

    return compilers.compilers(named)


def _inspect(path: Path, arch: str) -> Toolchain:
    from hipforge.jit.backends.nvidia import compilers

    return compilers.inspect(path, arch)


def _search_environment() -> tuple[str, ...]:
    from hipforge.jit.backends.nvidia import compilers

    return compilers.SEARCH_ENVIRONMENT


def _read_resources(spec: BuildSpec, library: Path) -> DeviceCode:
    from hipforge.jit.backends.nvidia import resources

    return resources.read(spec, library)


VENDOR = Vendor(
    name="nvidia",
    device="cuda",
    gpu="an NVIDIA GPU",
    torch_arch=_torch_arch,
    torch_says=_torch_says,
    any_arch=False,
    no_gpu="install a CUDA build of torch and a driver for it",
    load_runtime=_load_runtime,
    runtime_functions=("cudaGetDevice", "cudaSetDevice"),
    compiler=settings.NVCC,
    compilers=_compilers,
    inspect=_inspect,
    nowhere="not found in CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda or the wheel nvidia-cuda-nvcc",
    search_environment=_search_environment,
    install="Run `pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime`, or install a CUDA "
    "toolkit, or name an nvcc with "
    "HIPFORGE_NVCC",
    read_resources=_read_resources,
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
