"""How long would a launch take? A model over exact counts, to rank configurations where there is no GPU.

The counts (instructions by class, bytes, matrix-pipe cycles, waves) come from running the real machine code on the
emulator; the machine's rates below turn them into times. The model ranks, it does not predict: rows made with it carry
its version and no microseconds.

A launch takes ``launch`` seconds, plus the largest of four times, each a bound that holds by itself, plus a tenth of
the other three, because they overlap imperfectly (an assumption; it decides between configurations of one bound):

memory    bytes touched at least once / bandwidth. The bandwidth reached is what the waves keep in flight per memory
          latency, up to the machine's: bytes in flight = resident waves x bytes that one wave requests ahead.
latency   generations of work-groups x trips to memory of one wave x memory latency. A wave makes one trip to start
          and one per ``bytes in flight`` that it loads of the streamed operand; where it empties its pipeline and
          starts over, parts of trips count whole.
issue     the busiest SIMD's cycles: its waves' vector instructions (4 cycles each for 64 lanes on 16), or their matrix
          cycles (which run beside the vector pipe), or one wave's own instructions, which issue at best every 4 cycles
          and wait for its matrix instructions.
cache     bytes that the busiest CU loads, repeats included, / 64 bytes per cycle of its vector cache.

"Busiest" counts whole work-groups per CU: 257 work-groups on 256 CUs take twice as long as 256. Where work-groups stay
and take one tile after another, the busiest of them has more to do than the average one: ``busiest`` says how much.

Rates are the manufacturer's figures for the MI355X and the MI300X (peak engine clock, peak memory bandwidth), except
``memory_latency_s`` and ``launch_s``, which are assumptions of the right order, the same for both: what matters is that
a second launch costs about as much as reading 10 MB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hipforge import archs
from hipforge.ops.core.kernel import ceil_div

OVERLAP_LOSS = 0.1


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU, and the version that rows modelled with them carry."""

    name: str
    model_version: str
    cu_count: int
    clock_hz: float
    bandwidth: float  # bytes per second
    memory_latency_s: float
    launch_s: float
    simds_per_cu: int
    vector_issue_cycles: int = 4  # 64 lanes on a 16-lane SIMD
    cache_bytes_per_cycle: int = 64  # per CU

    @property
    def source(self) -> str:
        """Return the ``source`` column of rows modelled for this GPU."""
        return f"model:{self.model_version}"


def _machine(info: archs.ArchInfo, model_version: str) -> Machine:
    return Machine(
        info.product, model_version, cu_count=info.cu_count, clock_hz=info.clock_hz, bandwidth=info.bandwidth,
        memory_latency_s=0.8e-6, launch_s=1.2e-6, simds_per_cu=info.simds_per_cu,
    )  # fmt: skip


MI355X = _machine(archs.get("gfx950"), "cdna4-counts-1")
MI300X = _machine(archs.get("gfx942"), "cdna3-counts-1")


@dataclass(frozen=True, kw_only=True)
class Work:
    """Exact counts of one kernel launch, and two facts about the kernel's code.

    Attributes:
        workgroups: work-groups launched.
        waves_per_workgroup: waves in each.
        vector_instructions: VALU wave-instructions.
        instructions: all wave-instructions.
        matrix_cycles: cycles of the matrix pipe.
        loaded_bytes: global bytes loaded, every access counted.
        unique_bytes: global bytes touched at least once, loads and stores.
        streamed_bytes: bytes loaded of the operand that the kernel streams (its weight).
        occupancy: waves per SIMD that registers and LDS allow.
        in_flight_bytes: of the streamed operand, bytes that one wave has requested ahead.
        restarts: how often a wave refills its pipeline.
        matrix_waves: waves of a work-group that have matrix instructions; None for all of them.
        busiest: work of the busiest work-group relative to the average one's.
    """

    workgroups: int
    waves_per_workgroup: int
    vector_instructions: int = 0
    instructions: int = 0
    matrix_cycles: int = 0
    loaded_bytes: int
    unique_bytes: int
    streamed_bytes: int
    occupancy: int
    in_flight_bytes: int
    restarts: int = 1
    matrix_waves: int | None = None
    busiest: float = 1.0


@dataclass(frozen=True)
class Estimate:
    """A modelled time in seconds, launch cost included, and the bound that gave it."""

    seconds: float
    bound: str
    memory: float
    latency: float
    issue: float
    cache: float


def estimate(work: Work, machine: Machine = MI355X) -> Estimate:
    """Return the modelled time of one launch; the module's docstring has the formulas."""
    waves = work.workgroups * work.waves_per_workgroup
    slots = work.occupancy * machine.simds_per_cu
    resident_per_cu = max(1, slots // work.waves_per_workgroup)
    resident_waves = min(waves, resident_per_cu * machine.cu_count * work.waves_per_workgroup)
    generations = ceil_div(work.workgroups, resident_per_cu * machine.cu_count)

    in_flight = min(resident_waves * work.in_flight_bytes, work.streamed_bytes) or 1
    bandwidth = min(machine.bandwidth, in_flight / machine.memory_latency_s)
    memory = work.unique_bytes / bandwidth
    streamed_per_start = math.ceil(work.busiest * work.streamed_bytes / (waves * work.restarts))
    trips = 1 + work.restarts * ceil_div(streamed_per_start, work.in_flight_bytes)
    latency = generations * trips * machine.memory_latency_s

    workgroups_per_cu = ceil_div(work.workgroups, machine.cu_count)
    waves_per_simd = ceil_div(workgroups_per_cu * work.waves_per_workgroup, machine.simds_per_cu)
    vector = waves_per_simd * work.vector_instructions / waves * machine.vector_issue_cycles
    matrix = waves_per_simd * work.matrix_cycles / waves
    matrix_waves = work.workgroups * (work.matrix_waves or work.waves_per_workgroup)
    alone = work.instructions * machine.vector_issue_cycles / waves + work.matrix_cycles / matrix_waves
    serial = alone * ceil_div(waves_per_simd, work.occupancy)
    issue = work.busiest * max(vector, matrix, serial) / machine.clock_hz
    busiest_cu_bytes = work.busiest * work.loaded_bytes / work.workgroups * workgroups_per_cu
    cache = busiest_cu_bytes / machine.cache_bytes_per_cycle / machine.clock_hz

    bounds = {"memory": memory, "latency": latency, "issue": issue, "cache": cache}
    bound = max(bounds, key=lambda name: bounds[name])
    hidden = sum(bounds.values()) - bounds[bound]
    return Estimate(machine.launch_s + bounds[bound] + OVERLAP_LOSS * hidden, bound, **bounds)


def total(estimates: list[Estimate]) -> float:
    """Return the modelled seconds of launches that follow one another in a stream."""
    return sum(item.seconds for item in estimates)
