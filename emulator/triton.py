"""Triton kernels without a GPU: compiled for gfx950 or gfx942 by Triton itself, run here on CPU tensors.

>>> from hipforge.emulator import triton as emulated      # doctest: +SKIP
>>> add = emulated.jit(add_kernel)                        # doctest: +SKIP
>>> add[(4,)](x, y, out, n, BLOCK=1024, num_warps=4)      # doctest: +SKIP

Arguments are specialised as on a GPU: pointers and integers by divisibility by 16, integers equal to 1 become
constants, tensors under 2 GiB get 32-bit offsets. This is the only module of the emulator that imports Triton.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver as triton_driver

from hipforge import archs, settings
from hipforge.emulator.code_object import CodeObject, Kernel
from hipforge.emulator.counting import Counters
from hipforge.emulator.launching import launch
from hipforge.errors import ConfigError, GuardError
from hipforge.jit.cache import cache_dir

WAVE_SIZE = 64

# Triton keeps compiled kernels per device index; these never meet those of a real GPU.
_DEVICE_INDEX = {"gfx950": 950, "gfx942": 942}


@dataclass(frozen=True)
class Compiled:
    """A specialised kernel: its machine code, and Triton's own record (``.metadata``, ``.asm["amdgcn"]``, ...)."""

    kernel: Kernel
    triton: Any


class EmulatedKernel:
    """A ``@triton.jit`` function bound to the emulator; ``kernel[grid](*args, **meta)`` runs it.

    ``grid`` is a tuple of one to three sizes or a callable of the bound arguments, as in Triton. The call takes CPU
    tensors, returns the :class:`~hipforge.emulator.Counters` of the launch, and raises what
    :func:`hipforge.emulator.launch` raises.
    """

    def __init__(self, function: Any, arch: str | None) -> None:
        self._function = function
        self._arch = None if arch is None else archs.get(arch).name

    @property
    def arch(self) -> str:
        """The architecture that calls compile for: the one given, else ``HIPFORGE_EMULATE``."""
        return self._arch or settings.EMULATE.get()

    def __getitem__(self, grid: Sequence[int] | Callable[[dict[str, Any]], Sequence[int]]) -> Callable[..., Counters]:
        def run(*args: Any, **meta: Any) -> Counters:
            with _active(self.arch) as active:
                active.counters = None
                self._function[grid](*args, **meta)
                if active.counters is None:
                    raise ConfigError(f"{self._function} compiled but launched nothing")
                return active.counters

        return run

    def compile(self, *args: Any, **meta: Any) -> Compiled:
        """Compile for these arguments without running; tensors may be of any content but count for alignment."""
        with _active(self.arch):
            record = self._function.warmup(*args, grid=(1,), **meta)
            record._init_handles()
            return Compiled(record.function, record)


def jit(function: Any = None, *, arch: str | None = None) -> Any:
    """Bind a Triton kernel to the emulator.

    Args:
        function: a ``@triton.jit`` function (also under ``@triton.heuristics``), or a plain function to make one of.
        arch: ``gfx950`` or ``gfx942``; by default the one of ``HIPFORGE_EMULATE`` at each call.

    Returns:
        An :class:`EmulatedKernel`; without ``function``, a decorator.

    Raises:
        ConfigError: an unknown ``arch``.
    """
    if function is None:
        return lambda given: jit(given, arch=arch)
    bound = function if hasattr(function, "warmup") or hasattr(function, "run") else triton.jit(function)
    return EmulatedKernel(bound, arch)


# --- what Triton asks of a driver ---


class _Utils:
    """Loads binaries and tells device properties."""

    def __init__(self, arch: str) -> None:
        self._arch = arch

    def load_binary(self, name: str, image: bytes, _shared: int, _device: int) -> tuple[Any, Kernel, int, int, int]:
        code = CodeObject(image)
        kernel = code.kernels[name]
        return code, kernel, kernel.vgpr, kernel.vgpr_spills + kernel.sgpr_spills, kernel.max_workgroup_size

    def unload_module(self, _module: Any) -> None:
        """Nothing to do: a CodeObject unloads itself."""

    def get_device_properties(self, _device: int) -> dict[str, Any]:
        info = archs.get(self._arch)
        return {
            "arch": info.name,
            "warpSize": WAVE_SIZE,
            "max_shared_mem": info.lds_bytes,
            "multiprocessor_count": info.cu_count,
        }


class _Launcher:
    """Turns a bound call into an emulated launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._signature: dict[Any, Any] = dict(source.signature)
        self._metadata = metadata

    def __call__(
        self, x: int, y: int, z: int, _stream: Any, function: Kernel, _packed: Any, _launch: Any, _enter: Any,
        _exit: Any, *args: Any,
    ) -> None:  # fmt: skip
        active = triton_driver.active
        if 0 in (x, y, z):
            active.counters = Counters()
            return
        values: dict[str, Any] = {}
        for (name, kind), value in zip(self._signature.items(), args, strict=True):
            values.update(_flatten(str(name), kind, value))
        for name in ("global_scratch", "profile_scratch"):  # Triton 3.7 reports only the second for AMD
            values[name] = self._scratch(getattr(self._metadata, f"{name}_size", 0), x * y * z)
        active.counters = launch(
            function, (x, y, z), self._metadata.num_warps * WAVE_SIZE, values, dynamic_lds=self._metadata.shared
        )

    @staticmethod
    def _scratch(bytes_per_program: int, programs: int) -> torch.Tensor | None:
        return torch.empty(bytes_per_program * programs, dtype=torch.uint8) if bytes_per_program else None


def _flatten(name: str, kind: Any, value: Any) -> dict[str, Any]:
    if kind == "constexpr":
        return {}
    if isinstance(kind, tuple):
        parts = [_flatten(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(kind, value, strict=True))]
        return {key: item for part in parts for key, item in part.items()}
    if kind.startswith("tensordesc"):
        raise GuardError(f"argument {name}: tensor descriptors are emulated only where the kernel makes them")
    if kind in _FLOATS:
        return {name: _FLOATS[kind](float(value))}
    return {name: value}


def _bf16(value: float) -> bytes:
    return bytes(torch.tensor([value], dtype=torch.bfloat16).view(torch.uint8).tolist())


_FLOATS: dict[str, Callable[[float], bytes]] = {
    "fp16": lambda value: struct.pack("<e", value),
    "bf16": _bf16,
    "fp32": lambda value: struct.pack("<f", value),
    "f32": lambda value: struct.pack("<f", value),
    "fp64": lambda value: struct.pack("<d", value),
}


class _Driver:
    """The part of Triton's driver interface that compiling and launching use."""

    launcher_cls = _Launcher

    def __init__(self, arch: str) -> None:
        self.utils = _Utils(arch)
        self.counters: Counters | None = None
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self._arch, WAVE_SIZE)

    def get_current_device(self) -> int:
        return _DEVICE_INDEX[self._arch]

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Any]:
        raise ConfigError("the emulator has no times to autotune by; give the kernel a single triton.Config")


_lock = threading.RLock()


@contextlib.contextmanager
def _private_environment() -> Iterator[None]:
    """Keep Triton from writing knobs into ``os.environ``."""
    before, knobs.propagate_env = knobs.propagate_env, False
    try:
        yield
    finally:
        knobs.propagate_env = before


@contextlib.contextmanager
def _active(arch: str) -> Iterator[_Driver]:
    """Make the emulator Triton's device for the block, with its cache inside hipforge's."""
    with _lock, _private_environment(), knobs.cache.scope():
        knobs.cache.dir = str(cache_dir.private_folder("triton"))
        before, mine = triton_driver._active, _Driver(arch)
        triton_driver.set_active(mine)
        try:
            yield mine
        finally:
            triton_driver._active = before
