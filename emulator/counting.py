"""What did the kernels do? Exact counts of a launch, or of every launch in a ``with`` block."""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any

from hipforge.emulator import runtime
from hipforge.errors import HipforgeError
from hipforge.jit.demangle import fit, short_name

VALU_CYCLES = 4  # 64 lanes on a SIMD of 16
TRANSCENDENTAL_CYCLES = 16  # a quarter of the rate


@dataclass(frozen=True)
class TensorTraffic:
    """Global-memory traffic of one tensor or allocation, in bytes.

    ``bytes`` is its size; ``loaded`` and ``stored`` count every access of every active lane; the unique ones count
    each byte once, however often it was touched.
    """

    bytes: int
    loaded: int
    stored: int
    unique_loaded: int
    unique_stored: int


@dataclass(frozen=True)
class LineUse:
    """How well vector loads and stores use cache lines of one size.

    ``lines`` counts lines per access (one wave instruction), ``bytes`` the different bytes of each access, those that
    several lanes share once; ``efficiency`` is bytes / (lines x line size), at most 1.
    """

    accesses: int
    bytes: int
    lines: int
    efficiency: float


@dataclass(frozen=True)
class KernelCount:
    """The launches of one kernel with one geometry.

    Attributes:
        name: the kernel's symbol.
        grid: in work-groups.
        block: in work-items.
        launches: how many there were.
        wave_instructions: of all of them.
        vgprs: registers per lane, architected and accumulation.
        lds_bytes: of a work-group, static and dynamic.
        scratch_bytes: private memory of a lane.
        workgroups_per_cu: how many fit a compute unit at once, by registers, waves and LDS.
        seconds: host wall time.
    """

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    launches: int
    wave_instructions: int
    vgprs: int
    lds_bytes: int
    scratch_bytes: int
    workgroups_per_cu: int
    seconds: float

    @property
    def occupancy(self) -> float:
        """Waves per SIMD when compute units are full: work-groups that fit one, times their waves, over four SIMDs."""
        waves = -(-self.block[0] * self.block[1] * self.block[2] // 64)
        return self.workgroups_per_cu * waves / 4


@dataclass(frozen=True)
class PcCount:
    """One instruction: ``count`` executions by a wave, ``lanes`` active lanes in all, ``bytes`` it moved.

    ``lds_bank_conflicts`` are the cycles that LDS took beyond the conflict-free number; ``source`` is ``file:line``
    where the code object has a line table.
    """

    kernel: str
    pc: int
    text: str
    count: int
    lanes: int
    bytes: int
    lds_bank_conflicts: int = 0
    source: str = ""


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Counters:
    """Exact counts over one or several launches. Nothing here is a time on a GPU.

    Attributes:
        launches, workgroups, waves: how many of each ran.
        seconds: host wall time of the launches, which says nothing about a GPU.
        wave_instructions: instructions executed, one per wave.
        active_lanes: sum of active lanes over VALU, LDS and vector-memory instructions.
        lane_slots: 64 x the number of those instructions.
        by_class: wave-instructions by class (salu, smem, valu, valu_trans, mfma, lds, vmem_load, vmem_store, atomic,
            branch, barrier, waitcnt, other).
        by_mnemonic: wave-instructions by mnemonic.
        bytes_loaded, bytes_stored: global memory, vector and scalar; atomics count in both.
        tensors: traffic by tensor or allocation name.
        lines64, lines128: use of 64-byte and 128-byte cache lines.
        scalar_bytes: loaded through the scalar cache. scratch_bytes: private memory, both directions.
        lds_bytes, lds_accesses: LDS traffic in bytes and wave-instructions.
        lds_bank_conflicts: cycles beyond the conflict-free number, for ``lds_banks`` banks.
        mfma_count, mfma_cycles: matrix instructions and the matrix-pipe cycles the ISA gives them.
        kernels: launches by kernel and geometry.
        per_pc: per instruction, when it was asked for.

    Example:
        >>> import torch, hipforge
        >>> with hipforge.emulator.counters() as counted:
        ...     _ = hipforge.moe_combine(torch.ones(2, 64), top_k=2)
        >>> counted.result.tensors["rows"].loaded
        512
    """

    launches: int = 0
    workgroups: int = 0
    waves: int = 0
    seconds: float = 0.0
    wave_instructions: int = 0
    active_lanes: int = 0
    lane_slots: int = 0
    by_class: Mapping[str, int] = field(default_factory=_empty)
    by_mnemonic: Mapping[str, int] = field(default_factory=_empty)
    bytes_loaded: int = 0
    bytes_stored: int = 0
    tensors: Mapping[str, TensorTraffic] = field(default_factory=_empty)
    lines64: LineUse = LineUse(0, 0, 0, 0.0)
    lines128: LineUse = LineUse(0, 0, 0, 0.0)
    scalar_bytes: int = 0
    scratch_bytes: int = 0
    lds_bytes: int = 0
    lds_accesses: int = 0
    lds_bank_conflicts: int = 0
    lds_banks: int = 0
    mfma_count: int = 0
    mfma_cycles: int = 0
    kernels: tuple[KernelCount, ...] = ()
    per_pc: tuple[PcCount, ...] = ()

    @property
    def unique_bytes(self) -> int:
        """Bytes of global memory touched at least once, loads and stores apart: what must cross the memory bus."""
        return sum(tensor.unique_loaded + tensor.unique_stored for tensor in self.tensors.values())

    @property
    def lane_efficiency(self) -> float:
        """Active lanes per lane slot of vector instructions, 0 to 1; 1 where there are none."""
        return self.active_lanes / self.lane_slots if self.lane_slots else 1.0

    def __str__(self) -> str:
        """Return the counts as lines for a terminal."""
        return counted(self)

    def as_dict(self) -> dict[str, Any]:
        """Return the counters as plain dictionaries, lists and numbers, ready for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values.update({name: dict(values[name]) for name in ("by_class", "by_mnemonic")})
        values["tensors"] = {name: asdict(traffic) for name, traffic in self.tensors.items()}
        values.update({name: asdict(values[name]) for name in ("lines64", "lines128")})
        values.update({name: [asdict(row) for row in values[name]] for name in ("kernels", "per_pc")})
        return values

    def count(self, mnemonic: str) -> int:
        """Return executions of ``mnemonic``, 0 if it never ran."""
        return self.by_mnemonic.get(mnemonic, 0)


def vector_cycles(counters: Counters) -> int:
    """Return the issue cycles of the vector ALU over all SIMDs."""
    by_class = counters.by_class
    return by_class.get("valu", 0) * VALU_CYCLES + by_class.get("valu_trans", 0) * TRANSCENDENTAL_CYCLES


def counted(c: Counters, name_columns: int | None = None) -> str:
    """Return counts as lines for a terminal; ``name_columns`` as :func:`hipforge.emulator.report.text` takes it."""
    lines = [
        f"{c.launches} launch(es), {c.workgroups} work-groups, {c.waves} waves",
        "",
        "counted",
        f"  wave-instructions      {c.wave_instructions:>14,}",
        *(
            f"    {name:<20} {count:>14,}  {count / c.wave_instructions:6.1%}"
            for name, count in sorted(c.by_class.items(), key=lambda item: -item[1])
            if count
        ),
        f"  active lanes           {c.lane_efficiency:>14.1%}",
        f"  bytes loaded           {c.bytes_loaded:>14,}",
        f"  bytes stored           {c.bytes_stored:>14,}",
        f"  bytes touched once     {c.unique_bytes:>14,}",
        f"  64-byte line use       {c.lines64.efficiency:>14.1%}",
        f"  128-byte line use      {c.lines128.efficiency:>14.1%}",
        f"  LDS bytes              {c.lds_bytes:>14,}",
        f"  LDS conflict cycles    {c.lds_bank_conflicts:>14,}  ({c.lds_banks} banks)",
        f"  matrix-pipe cycles     {c.mfma_cycles:>14,}  ({c.mfma_count:,} instructions)",
        f"  vector issue cycles    {vector_cycles(c):>14,}",
        "",
        "kernel          grid        block launches  VGPRs     LDS  scratch waves/SIMD",
        *(
            f"{fit(short_name(k.name), name_columns)}\n{_sizes(k.grid):>20} {_sizes(k.block):>12} "
            f"{k.launches:>8,} {k.vgprs:>6} {k.lds_bytes:>7,} {k.scratch_bytes:>8,} {k.occupancy:>10.3g}"
            for k in c.kernels
        ),
        "",
        "tensor                  size      loaded loaded once      stored stored once",
        *(
            f"{name:<16} {t.bytes:>11,} {t.loaded:>11,} {t.unique_loaded:>11,} {t.stored:>11,} {t.unique_stored:>11,}"
            for name, t in c.tensors.items()
        ),
    ]
    return "\n".join(lines)


def _sizes(extent: tuple[int, int, int]) -> str:
    return "x".join(map(str, extent[: 3 if extent[2] > 1 else 2 if extent[1] > 1 else 1]))


def from_json(text: str) -> Counters:
    """Return the counters that a collector's JSON holds (``emulator/native/counters.h``)."""
    raw: dict[str, Any] = json.loads(text)
    values: dict[str, Any] = {item.name: raw[item.name] for item in fields(Counters) if item.name in raw}
    for name in ("by_class", "by_mnemonic"):
        values[name] = MappingProxyType(dict(raw.get(name, {})))
    tensors = {name: TensorTraffic(**traffic) for name, traffic in raw.get("tensors", {}).items()}
    values["tensors"] = MappingProxyType(tensors)
    for name in ("lines64", "lines128"):
        if name in raw:
            values[name] = LineUse(**raw[name])
    values["kernels"] = tuple(
        KernelCount(**{**kernel, "grid": tuple(kernel["grid"]), "block": tuple(kernel["block"])})
        for kernel in raw.get("kernels", ())
    )
    values["per_pc"] = tuple(PcCount(**row) for row in raw.get("per_pc", ()))
    return Counters(**values)


class Collector:
    """What ``counters()`` yields. After the block, ``result`` and every field of :class:`Counters` can be read."""

    def __init__(self) -> None:
        self._result: Counters | None = None

    @property
    def result(self) -> Counters:
        """The counts of the whole block.

        Raises:
            HipforgeError: the block has not ended yet.
        """
        if self._result is None:
            raise HipforgeError("counters are complete only when their `with` block has ended; read them after it")
        return self._result

    def __str__(self) -> str:
        return str(self.result)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.result, name)


@contextlib.contextmanager
def counters(*, per_pc: bool = False) -> Iterator[Collector]:
    """Count every launch that this thread makes in the block, by ops or by :func:`hipforge.emulator.launch`.

    Args:
        per_pc: also count every instruction by its address.

    Example:
        >>> import torch, hipforge
        >>> with hipforge.emulator.counters() as counted:
        ...     _ = hipforge.moe_combine(torch.ones(2, 64), top_k=2)
        >>> [launch.grid for launch in counted.result.kernels]
        [(1, 1, 1)]
    """
    collector = Collector()
    if _uncounted.get():
        yield collector
        collector._result = Counters()
        return
    emulator = runtime.load().library
    identity = emulator.hfemu_counters_begin(int(per_pc))
    try:
        yield collector
    finally:
        text = emulator.hfemu_counters_end(identity)
        collector._result = from_json(text.decode()) if text else Counters()


_uncounted = contextvars.ContextVar("hipforge_uncounted", default=False)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Run launches at full speed in the block: nothing is counted; functions that return counters return empty ones.

    An op outside :func:`counters` counts nothing anyway; this is for :func:`hipforge.emulator.launch` and for Triton
    kernels.

    Example:
        >>> import hipforge, torch
        >>> from hipforge import devices, emulator
        >>> runtime, arch = devices.current().load_runtime(), devices.current().arch_of()
        >>> module = hipforge.jit.load("module_fp8_quant", {"HF_INPUT": "f32"}, arch)
        >>> kernel = emulator.CodeObject(module.path / "module.so").kernels["amax_kernel"]
        >>> with emulator.uncounted():
        ...     done = emulator.launch(kernel, 1, 256, [torch.ones(2), 2, False, torch.zeros(1)])
        >>> done.wave_instructions
        0
    """
    token = _uncounted.set(True)
    try:
        yield
    finally:
        _uncounted.reset(token)
