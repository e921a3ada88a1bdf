"""Which device runs the kernels, decided once per process: an AMD GPU, the emulator, or none (reference).

This is where the runtime parts meet: ``jit`` asks :func:`current` for the device and lets it load its HIP runtime;
the emulator is named here by string, so that ``jit`` never imports it.
"""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass
from typing import Any, Literal

from hipforge import archs, settings
from hipforge.errors import ConfigError, HipforgeError

log = logging.getLogger("hipforge")

DeviceKind = Literal["hip", "emulator", "reference"]


@dataclass(frozen=True)
class Device:
    """The process's device. ``default_arch`` is None for ``reference``."""

    kind: DeviceKind
    default_arch: str | None

    def arch_of(self, device_index: int = 0) -> str:
        """Return the architecture name of GPU ``device_index`` (of the emulator: the emulated one)."""
        if self.kind == "hip":
            return _hip_arch(device_index)
        if self.default_arch is None:
            raise ConfigError("HIPFORGE_DEVICE=reference runs no kernels and so has no architecture")
        return self.default_arch

    def cu_count(self, device_index: int = 0) -> int:
        """Return the number of compute units of the device (rows of tuned tables are keyed by it)."""
        if self.kind == "hip":
            import torch

            return int(torch.cuda.get_device_properties(device_index).multi_processor_count)
        return archs.get(self.arch_of(device_index)).cu_count

    def is_capturing(self) -> bool:
        """Return whether the stream that ops use in this thread is being captured into a graph."""
        if self.kind == "hip":
            import torch

            return bool(torch.cuda.is_current_stream_capturing())
        # A runtime that is not loaded yet captures nothing.
        loaded = self.kind == "emulator" and _load_runtime.cache_info().currsize > 0
        return loaded and bool(self.load_runtime().library.hfemu_capturing())

    def load_runtime(self) -> Any:
        """Load the HIP runtime that modules bind to; returns the emulator's runtime object, or None on a GPU.

        The library is loaded with global symbols, once per process. Building the emulator's library on its first
        use on a machine happens here.
        """
        return _load_runtime(self.kind)


def refuse_in_capture(what: str) -> None:
    """Refuse what a graph cannot replay; checked on the slow path of a first call, so that other calls pay nothing.

    Args:
        what: the rest of "this call would ...".

    Raises:
        HipforgeError: the stream that ops use in this thread is being captured.
    """
    if current().is_capturing():
        raise HipforgeError(
            f"the current stream is capturing a graph, and this call would {what}, which no graph can replay; before "
            "the capture, call hipforge.warmup(op, ...) with arguments of these shapes, or hipforge.prepare(model)"
        )


@functools.cache
def _hip_arch(device_index: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device_index).gcnArchName).split(":", 1)[0]


@functools.cache
def _load_runtime(kind: DeviceKind) -> Any:
    if kind == "emulator":
        return importlib.import_module("hipforge.emulator.runtime").load()
    if kind == "hip":
        return importlib.import_module("hipforge.jit.backends.amd.hip_runtime").load()
    raise ConfigError("HIPFORGE_DEVICE=reference runs no kernels and so has no HIP runtime")


def _torch_sees_amd() -> bool:
    import torch

    return getattr(torch.version, "hip", None) is not None and torch.cuda.is_available()


@functools.lru_cache(maxsize=1)
def current() -> Device:
    """Return the device of this process; decided on the first call and then fixed.

    Raises:
        ConfigError: ``HIPFORGE_DEVICE=hip`` but torch sees no AMD GPU.
    """
    wanted = settings.DEVICE.get()
    if wanted == "reference":
        return Device("reference", None)
    if wanted in ("auto", "hip") and _torch_sees_amd():
        return Device("hip", _hip_arch(0))
    if wanted == "hip":
        raise ConfigError(
            "HIPFORGE_DEVICE=hip but torch sees no AMD GPU; install a ROCm build of torch, "
            "or set HIPFORGE_DEVICE=emulator"
        )
    arch = settings.EMULATE.get()
    if not (settings.EMULATOR_QUIET.get() or settings.QUIET.get()):
        log.warning(
            "no AMD GPU in use: kernels run on the built-in %s emulator "
            "(results are real, speed is not; HIPFORGE_EMULATOR_QUIET=1 silences this line)",
            arch,
        )
    return Device("emulator", arch)


def kind() -> DeviceKind:
    """Return the kind of this process's device, which torch.compile takes as a constant of the graph."""
    return current().kind


kind._dynamo_marked_constant = True  # type: ignore[attr-defined]
