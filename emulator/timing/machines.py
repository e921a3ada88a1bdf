"""The parameters of the model: one table per GPU, each value with its unit, its source and the range that is plausible.

A source is a *document* (AMD's CDNA3 and CDNA4 white papers and ISA manuals), a published *microbenchmark*, an
*assumption*, or *fitted*: chosen by ``op_tests/fit_time_model.py`` so that modelled times meet published ones. Fitted
values belong to the whole GPU; none depends on a kernel, a tile or a shape. The shipped values are fitted on rows of
all published kernels; what fits on either half of the kernels give is in ``op_tests/helpers/time_model_halves.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hipforge.errors import ConfigError


@dataclass(frozen=True)
class Parameter:
    """One quantity of a GPU.

    Attributes:
        value: in ``unit``.
        unit: of the value and of the range.
        source: where the value comes from.
        low: the smallest plausible value of a fitted parameter.
        high: the largest.
    """

    value: float
    unit: str
    source: str
    low: float = 0.0
    high: float = 0.0

    @property
    def fitted(self) -> bool:
        """Whether the fitting script chooses the value."""
        return self.high > self.low


_WHOLE = {  # least and most; the simulator keeps a table of as many entries, or of a line of 128 bytes each
    "xcds": (1, 32), "cus_per_xcd": (1, 1 << 16), "l2_channels": (1, 1 << 16), "hbm_channels": (1, 1 << 16),
    "l1_bytes": (128, 1 << 24), "l2_bytes": (0, 1 << 32),
}  # fmt: skip
_DIVISORS = frozenset({
    "clock_ghz", "lds_bytes_per_cycle", "vector_bytes_per_cycle", "l2_bytes_per_cycle", "fabric_gbps_per_xcd",
    "hbm_gbps", "store_gbps",
})  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """A GPU as the model sees it.

    Attributes:
        name: as the ``--gpu`` option takes it.
        arch: of the code objects that it runs.
        version: of the parameters; rows that are tuned with the model carry it.
        parameters: by name.
    """

    name: str
    arch: str
    version: str
    parameters: Mapping[str, Parameter]

    def __getitem__(self, name: str) -> float:
        return self.parameters[name].value

    def check(self) -> None:
        """Refuse values that the simulator cannot compute with.

        Raises:
            ConfigError: a value that is not finite or is negative, a rate or clock of 0, or a count or size that is not
                whole or outside its limits; the message names the parameter.
        """
        for name, parameter in self.parameters.items():
            value = parameter.value
            if name in _WHOLE:
                least, most = _WHOLE[name]
                if not (least <= value <= most and value == int(value)):
                    raise ConfigError(f"{self.name}: {name} must be a whole number, {least} to {most}; got {value}")
            if not 0 <= value < math.inf or (name in _DIVISORS and value == 0):
                sign = "positive" if name in _DIVISORS else "0 or more"
                raise ConfigError(f"{self.name}: {name} must be finite and {sign}; got {value}")
        if self["hbm_channels"] < self["xcds"]:
            raise ConfigError(
                f"{self.name}: hbm_channels must be at least xcds, {self['xcds']:.0f}; got {self['hbm_channels']:.0f}"
            )

    @property
    def cu_count(self) -> int:
        """Compute units of the whole GPU."""
        return int(self["xcds"] * self["cus_per_xcd"])

    def with_values(self, values: Mapping[str, float]) -> Machine:
        """Return a machine with other values.

        Raises:
            ConfigError: a name is not a parameter.
        """
        unknown = sorted(set(values) - set(self.parameters))
        if unknown:
            raise ConfigError(f"unknown parameters {', '.join(unknown)}; there are: {', '.join(self.parameters)}")
        changed = {name: replace(self.parameters[name], value=value) for name, value in values.items()}
        return replace(self, parameters=MappingProxyType({**self.parameters, **changed}))


def _fitted(value: float, unit: str, low: float, high: float, on: str) -> Parameter:
    return Parameter(value, unit, f"fitted: {on}", low, high)


_CDNA4 = "document: CDNA4 white paper"
_CDNA3 = "document: CDNA3 white paper"
_ISA = "document: CDNA3 and CDNA4 ISA manuals"

_MI355X = {
    "clock_ghz": Parameter(2.4, "GHz", f"{_CDNA4}: peak engine clock of the MI355X"),
    "xcds": Parameter(8, "XCDs", _CDNA4),
    "cus_per_xcd": Parameter(32, "CUs", _CDNA4),
    "start_ns": _fitted(1593, "ns", 500, 3000, "the smallest rows: start of dispatch, end-of-kernel work"),
    "dispatch_ns": _fitted(13.8, "ns", 2, 40, "one round with little work: between work-groups of one XCD"),
    "issue_cycles": Parameter(4, "cycles", f"{_ISA}: a SIMD takes 64 lanes in four passes of 16"),
    "transcendental_cycles": Parameter(16, "cycles", f"{_ISA}: a quarter of the rate"),
    "matrix_extra_cycles": _fitted(4, "cycles", 0, 4, "large tiles with long K: MFMA beyond the ISA's passes"),
    "matrix_result_cycles": Parameter(12, "cycles", f"{_ISA}: three wait states before another unit reads a result"),
    "branch_cycles": Parameter(8, "cycles", "assumption: refill of the instruction buffer after a taken branch"),
    "barrier_cycles": Parameter(8, "cycles", "assumption"),
    "fetch_ns": Parameter(5, "ns", "assumption: a 128-byte line of code that is not in the instruction cache"),
    "lds_bytes_per_cycle": Parameter(128, "bytes per cycle and CU", f"{_CDNA4}: LDS read bandwidth"),
    "lds_latency_cycles": Parameter(64, "cycles", "microbenchmark: Chips and Cheese, CDNA 3 LDS, about 30 ns"),
    "vector_bytes_per_cycle": Parameter(64, "bytes per cycle and CU", f"{_CDNA3}: vector cache, one 64-byte read"),
    "vector_queue_cycles": Parameter(256, "cycles", "assumption: work a CU's memory pipe takes before issue stalls"),
    "l1_bytes": Parameter(32 << 10, "bytes per CU", f"{_CDNA3}: also what a CU can have in flight"),
    "l1_latency_cycles": Parameter(120, "cycles", "microbenchmark: Chips and Cheese, CDNA 3 vector cache"),
    "scalar_latency_cycles": Parameter(50, "cycles", "microbenchmark: Chips and Cheese, CDNA 3 scalar cache"),
    "l2_bytes": Parameter(4 << 20, "bytes per XCD", _CDNA3),
    "l2_channels": Parameter(16, "channels per XCD", _CDNA3),
    "l2_latency_ns": Parameter(120, "ns", "microbenchmark: Chips and Cheese, CDNA 3 L2 beyond the vector cache"),
    "l2_bytes_per_cycle": _fitted(1246, "bytes per cycle and XCD", 400, 2048, "square tiles: shared operands"),
    "l2_miss_extra": _fitted(1.53, "line transfers", 0, 3, "operands that are read once: filling the line"),
    "fabric_gbps_per_xcd": _fitted(1208, "GB/s", 400, 1400, "large operands shared by XCDs"),
    "hbm_latency_ns": _fitted(399, "ns", 250, 900, "4 work-groups with long K"),
    "dram_ns": Parameter(100, "ns", "assumption: what a hit in the Infinity Cache, which every request passes, saves"),
    "hbm_gbps": Parameter(7280, "GB/s", f"{_CDNA4}: 8 TB/s; assumption: less refresh, 350 of every 3,900 ns"),
    "hbm_channels": Parameter(128, "channels", f"{_CDNA3}: 8 stacks of 16 channels"),
    "store_gbps": _fitted(4790, "GB/s", 1500, 8000, "short K with a large result"),
    "replay_gap_ns": Parameter(900, "ns", "assumption: start of a kernel in a graph behind the one before it"),
}  # fmt: skip

MI355X = Machine("MI355X", "gfx950", "cdna4-events-3", MappingProxyType(_MI355X))

_MI300X_CHANGES = {
    "clock_ghz": Parameter(2.1, "GHz", f"{_CDNA3}: peak engine clock of the MI300X"),
    "cus_per_xcd": Parameter(38, "CUs", _CDNA3),
    "hbm_gbps": Parameter(_MI355X["hbm_gbps"].value * 5.3 / 8.0, "GB/s", "scaled from the MI355X by peak bandwidth"),
}
MI300X = Machine("MI300X", "gfx942", "cdna3-events-3", MappingProxyType({**_MI355X, **_MI300X_CHANGES}))

MACHINES: Mapping[str, Machine] = MappingProxyType({machine.name: machine for machine in (MI355X, MI300X)})


def machine(gpu: str, cu_count: int | None = None) -> Machine:
    """Return a GPU's parameters.

    Args:
        gpu: ``MI355X`` or ``MI300X``.
        cu_count: compute units, where only some are used (an MI300X with 80 of them, for example).

    Raises:
        ConfigError: the GPU is not known, or its XCDs cannot share the CUs evenly.
    """
    if gpu not in MACHINES:
        raise ConfigError(f"gpu={gpu!r}: there are parameters for {', '.join(MACHINES)}")
    found = MACHINES[gpu]
    if cu_count is None:
        return found
    if cu_count < 1 or cu_count % int(found["xcds"]):
        raise ConfigError(f"cu_count={cu_count}: a multiple of {found['xcds']:.0f} XCDs is accepted")
    return found.with_values({"cus_per_xcd": cu_count / found["xcds"]})
