"""Which device runs the kernels, decided once per process: a GPU, the emulator, or none (reference).

This is where the runtime parts meet: ``jit`` asks :func:`current` for the device and lets it load its runtime;
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
from hipforge.jit.backends import vendors
from hipforge.jit.backends.vendors import Vendor

log = logging.getLogger("hipforge")

DeviceKind = Literal["hip", "cuda", "emulator", "reference"]
"""A GPU of the vendor whose ``device`` it is (:class:`hipforge.jit.backends.Vendor`), or what there is without one."""


@dataclass(frozen=True)
class Device:
    """The process's device. ``default_arch`` is None for ``reference``."""

    kind: DeviceKind
    default_arch: str | None

    @property
    def is_gpu(self) -> bool:
        """Whether kernels run on a GPU."""
        return self.kind not in ("emulator", "reference")

    @property
    def vendor(self) -> Vendor:
        """The vendor of the GPU."""
        return _vendor(self.kind)

    def arch_of(self, device_index: int = 0) -> str:
        """Return the architecture name of GPU ``device_index`` (of the emulator: the emulated one)."""
        if self.is_gpu:
            return _gpu_arch(self.kind, device_index)
        if self.default_arch is None:
            raise ConfigError("HIPFORGE_DEVICE=reference runs no kernels and so has no architecture")
        return self.default_arch

    def cu_count(self, device_index: int = 0) -> int:
        """Return the number of compute units of the device (rows of tuned tables are keyed by it)."""
        if self.is_gpu:
            import torch

            return int(torch.cuda.get_device_properties(device_index).multi_processor_count)
        return archs.get(self.arch_of(device_index)).cu_count

    def is_capturing(self) -> bool:
        """Return whether the stream that ops use in this thread is being captured into a graph."""
        if self.is_gpu:
            import torch

            return bool(torch.cuda.is_current_stream_capturing())
        # A runtime that is not loaded yet captures nothing.
        loaded = self.kind == "emulator" and _load_runtime.cache_info().currsize > 0
        return loaded and bool(self.load_runtime().library.hfemu_capturing())

    def load_runtime(self) -> Any:
        """Load the runtime that modules bind to; returns the emulator's runtime object, or a GPU's library.

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
def _gpu_arch(kind: DeviceKind, device_index: int) -> str:
    found = _vendor(kind).torch_arch(device_index)
    if found is None:
        raise ConfigError(f"torch no longer sees {_vendor(kind).gpu}")
    return found


@functools.cache
def _vendor(kind: DeviceKind) -> Vendor:
    return next(vendor for vendor in vendors.every() if vendor.device == kind)


def torch_arch(device_index: int) -> str | None:
    """Return the architecture of a GPU that torch sees, known or not; None where torch sees none."""
    found = (vendor.torch_arch(device_index) for vendor in vendors.every())
    return next((arch for arch in found if arch is not None), None)


@functools.cache
def _load_runtime(kind: DeviceKind) -> Any:
    if kind == "emulator":
        return importlib.import_module("hipforge.emulator.runtime").load()
    if kind == "reference":
        raise ConfigError("HIPFORGE_DEVICE=reference runs no kernels and so has no HIP runtime")
    return _vendor(kind).load_runtime()


@functools.lru_cache(maxsize=1)
def current() -> Device:
    """Return the device of this process; decided on the first call and then fixed.

    Raises:
        ConfigError: ``HIPFORGE_DEVICE`` demands a GPU of a vendor, and torch sees none that has kernels.
    """
    settings.warn_of_mistyped()
    wanted = settings.DEVICE.get()
    if wanted == "reference":
        return Device("reference", None)
    for vendor in vendors.every() if wanted != "emulator" else ():
        if wanted not in ("auto", vendor.device):
            continue
        found = vendor.torch_arch(0)
        if found is not None and (vendor.any_arch or found in archs.ARCHS):
            return Device(vendor.device, found)
        if wanted == vendor.device:
            raise ConfigError(_no_device(vendor, found))
    arch = settings.EMULATE.get()
    if not (settings.EMULATOR_QUIET.get() or settings.QUIET.get()):
        log.warning(
            "no AMD GPU in use: kernels run on the built-in %s emulator "
            "(results are real, speed is not; HIPFORGE_EMULATOR_QUIET=1 silences this line)",
            arch,
        )
    return Device("emulator", arch)


def _no_device(vendor: Vendor, found: str | None) -> str:
    if found is None:
        why = f"torch sees no {vendor.gpu.split(' ', 1)[1]}; {vendor.no_gpu}, or set HIPFORGE_DEVICE=emulator"
    else:
        known = ", ".join(name for name, info in archs.ARCHS.items() if info.vendor == vendor.name)
        why = f"its kernels are for {known} and GPU 0 is {found}; HIPFORGE_DEVICE=auto takes Triton and torch there"
    return f"HIPFORGE_DEVICE={vendor.device} but {why}"


def kind() -> DeviceKind:
    """Return the kind of this process's device, which torch.compile takes as a constant of the graph."""
    return current().kind


kind._dynamo_marked_constant = True  # type: ignore[attr-defined]
