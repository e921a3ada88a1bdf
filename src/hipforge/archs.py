"""What is fixed about each GPU architecture, in one place: vendor, wave, fp8 formats, LDS, compute units, peak rates.

A value per architecture, so that nothing else compares names of architectures to learn a fact about them.

    >>> from hipforge import archs
    >>> archs.get("gfx950").fp8_e4m3, archs.get("gfx942:sramecc+").lds_bytes
    ('float8_e4m3fn', 65536)

Imports nothing but the exceptions, so that every part may import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from hipforge.errors import ConfigError


@dataclass(frozen=True)
class ArchInfo:
    """Facts of one architecture. Sizes are in bytes; counts are per compute unit (CU) where the name says so.

    Attributes:
        name: as in ``--offload-arch`` (``gfx950``).
        vendor: whose compilers, binaries and runtime it needs; names a folder of ``jit/backends``.
        emulated: whether :mod:`hipforge.emulator` runs its code.
        product: the accelerator that the counts and rates below describe.
        wave: lanes of a wave.
        cu_count: compute units of the whole device.
        simds_per_cu: SIMDs of a CU; waves are spread over them.
        lds_bytes: local data share of a CU, which is also the most that one work-group can have.
        lds_granule_bytes: LDS is allocated in multiples of this (LLVM's getLdsDwGranularity).
        fp8_e4m3: name of the torch dtype that the matrix cores take as fp8 with 4 exponent bits.
        fp8_e5m2: the same with 5 exponent bits.
        clock_hz: peak engine clock, as its vendor publishes it.
        bandwidth: peak memory bandwidth in bytes per second, as its vendor publishes it.
    """

    name: str
    vendor: Literal["amd", "nvidia"]
    emulated: bool
    product: str
    wave: int
    cu_count: int
    simds_per_cu: int
    lds_bytes: int
    lds_granule_bytes: int
    fp8_e4m3: str
    fp8_e5m2: str
    clock_hz: float
    bandwidth: float

    @property
    def fp8_fnuz(self) -> bool:
        """Whether its fp8 has no negative zero and no infinity (``fnuz``), unlike the OCP formats."""
        return self.fp8_e4m3.endswith("fnuz")


ARCHS: Mapping[str, ArchInfo] = MappingProxyType(
    {
        "gfx950": ArchInfo(
            name="gfx950",
            vendor="amd",
            emulated=True,
            product="MI355X",
            wave=64,
            cu_count=256,
            simds_per_cu=4,
            lds_bytes=160 * 1024,
            lds_granule_bytes=1280,
            fp8_e4m3="float8_e4m3fn",
            fp8_e5m2="float8_e5m2",
            clock_hz=2.4e9,
            bandwidth=8.0e12,
        ),
        "gfx942": ArchInfo(
            name="gfx942",
            vendor="amd",
            emulated=True,
            product="MI300X",
            wave=64,
            cu_count=304,
            simds_per_cu=4,
            lds_bytes=64 * 1024,
            lds_granule_bytes=512,
            fp8_e4m3="float8_e4m3fnuz",
            fp8_e5m2="float8_e5m2fnuz",
            clock_hz=2.1e9,
            bandwidth=5.3e12,
        ),
        "sm_90": ArchInfo(
            name="sm_90",
            vendor="nvidia",
            emulated=False,
            product="H100",
            wave=32,
            cu_count=132,
            simds_per_cu=4,
            lds_bytes=227 * 1024,
            lds_granule_bytes=1024,
            fp8_e4m3="float8_e4m3fn",
            fp8_e5m2="float8_e5m2",
            clock_hz=1.98e9,
            bandwidth=3.35e12,
        ),
    }
)


EMULATED = tuple(name for name, info in ARCHS.items() if info.emulated)
"""The architectures that the emulator presents."""

VENDORS = tuple(dict.fromkeys(info.vendor for info in ARCHS.values()))
"""Whose architectures these are, in the order in which a device is looked for."""


def get(arch: str) -> ArchInfo:
    """Return the facts of ``arch``; features after ``:`` are ignored (``gfx942:sramecc+:xnack-``).

    Raises:
        ConfigError: the architecture is not known.
    """
    try:
        return ARCHS[arch.split(":", 1)[0]]
    except KeyError:
        raise ConfigError(f"unknown architecture {arch!r}; known: {', '.join(ARCHS)}") from None
