"""A vendor of GPUs as one value: its compilers, its binaries, its runtime, and the words for them.

The rest of the package gets a vendor from :func:`of`, by architecture, and names none. A vendor is a folder beside this
file with ``backend.VENDOR``, an entry per architecture in :mod:`hipforge.archs`, and a folder of headers in
``csrc/include/hipforge``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hipforge import archs, settings

if TYPE_CHECKING:
    from hipforge.jit.spec import BuildSpec
    from hipforge.jit.toolchain import Toolchain


@dataclass(frozen=True)
class DeviceCode:
    """What a manifest records of a library: each kernel's resources by symbol, its targets, the checks that passed."""

    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    gfx_targets: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Vendor:
    """A vendor's data and functions for the build machinery, the binding and the command line.

    Attributes:
        name: as in ``ArchInfo.vendor``; keys of a registry entry that differ by vendor use it.
        device: the value of ``HIPFORGE_DEVICE`` that requires its GPUs.
        gpu: what messages call one: ``an AMD GPU``.
        torch_arch: GPU index -> its architecture as torch reports it; None where this torch sees no GPU of the vendor.
        torch_says: one line on what torch sees, for people.
        any_arch: whether ``HIPFORGE_DEVICE=auto`` takes its GPU also where there are no kernels for its architecture.
        no_gpu: what to do where ``device`` is required and there is none.
        runtime_functions: its functions that get and set a thread's device.
        compiler: the setting that names a compiler.
        nowhere: the places where a kind of compiler was looked for and not found.
        install: what to install where no compiler can be used.
        code_checks: what :attr:`read_resources` checks; an entry whose manifest lacks one is built again.
        kernel_numbers: what it records of each kernel beside its name, all integers.
        limits: name in ``resource_limits`` -> (the numbers whose sum it limits, whether it is an upper limit).
        columns: the table of ``hipforge inspect``: heading -> the numbers under it.
    """

    name: str
    device: Literal["hip", "cuda"]
    gpu: str
    torch_arch: Callable[[int], str | None]
    torch_says: Callable[[], str]
    any_arch: bool
    no_gpu: str
    runtime_functions: tuple[str, str]
    compiler: settings.Setting[Path | None]
    nowhere: str
    install: str
    code_checks: tuple[str, ...]
    kernel_numbers: tuple[str, ...]
    limits: Mapping[str, tuple[tuple[str, ...], bool]]
    columns: Mapping[str, tuple[str, ...]]

    # Files of the vendor's folder are imported when they are needed: a process that builds or runs nothing needs none.

    def _file(self, name: str) -> Any:
        return importlib.import_module(f"{__package__}.{self.name}.{name}")

    def load_runtime(self) -> ctypes.CDLL:
        """Load the runtime library with global symbols, so that modules bind to it; raises LaunchError."""
        loaded: ctypes.CDLL = self._file("runtime").load()
        return loaded

    def compilers(self, named: Path | None) -> Iterator[tuple[str, Path | None]]:
        """Yield (name for people, path) of each candidate, ``named``, the setting's, first; None: not found."""
        found: Iterator[tuple[str, Path | None]] = self._file("compilers").compilers(named)
        return found

    def inspect(self, path: Path, arch: str) -> Toolchain:
        """Return a compiler as a toolchain for an architecture; raises ToolchainError with what it lacks."""
        found: Toolchain = self._file("compilers").inspect(path, arch)
        return found

    def search_environment(self) -> tuple[str, ...]:
        """Return the variables that the search for compilers reads."""
        names: tuple[str, ...] = self._file("compilers").SEARCH_ENVIRONMENT
        return names

    def read_resources(self, spec: BuildSpec, library: Path) -> DeviceCode:
        """Return what a library's device code holds; raises BuildError for code to be refused."""
        found: DeviceCode = self._file("resources").read(spec, library)
        return found


@functools.cache
def named(name: str) -> Vendor:
    """Return the vendor of that name."""
    found: Vendor = importlib.import_module(f"hipforge.jit.backends.{name}.backend").VENDOR
    return found


def of(arch: str) -> Vendor:
    """Return the vendor of an architecture.

    Raises:
        ConfigError: the architecture is not known.
    """
    return named(archs.get(arch).vendor)


@functools.cache
def every() -> tuple[Vendor, ...]:
    """Return all vendors, the first one first."""
    return tuple(map(named, archs.VENDORS))


def limits() -> dict[str, tuple[tuple[str, ...], bool]]:
    """Return what ``resource_limits`` may hold: the words of all vendors; a kernel is held to its own vendor's."""
    return {name: bound for vendor in every() for name, bound in vendor.limits.items()}


def read_resources(spec: BuildSpec, library: Path) -> DeviceCode:
    """Return what a module's library holds; nothing for one without device code.

    Raises:
        BuildError: the device code is not for the spec's target, or must not be used.
    """
    if not spec.is_device_code:
        return DeviceCode()
    vendor = of(spec.target)
    return replace(vendor.read_resources(spec, library), checks=list(vendor.code_checks))
