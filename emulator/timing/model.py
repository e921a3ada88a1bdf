"""Times of recorded launches: simulations of a sample, extended to the whole launch."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from hipforge.emulator.timing import library
from hipforge.emulator.timing.capture import Capture
from hipforge.emulator.timing.machines import Machine, machine
from hipforge.errors import GuardError

Start = Literal["cold", "mall", "l2"]

STARTS: tuple[Start, ...] = ("cold", "mall", "l2")
STALLS = (
    "issue", "valu", "matrix", "lds", "vector_memory", "vmcnt", "lgkmcnt", "barrier", "fetch", "tail",
)  # fmt: skip
ERROR_BAND: Mapping[str, float] = MappingProxyType({"gfx950": 0.13, "gfx942": 0.40})
"""The 90th percentile of |error|: on kernels that were not fitted for gfx950, on the rows of docs/time-model.md for
gfx942. Two times that differ by less are a tie."""


@dataclass(frozen=True)
class Sampling:
    """How much of a launch is simulated.

    A launch with more rounds of work-groups than ``rounds[1]`` is simulated with that many and with ``rounds[0]``; a
    kernel whose waves repeat one loop more often than ``iterations[1]`` likewise. What each further round and
    iteration takes is the difference of the two. The last, partly filled round is always kept.
    """

    rounds: tuple[int, int] = (4, 12)
    iterations: tuple[int, int] = (12, 24)


LEAST_PART = 4  # of the instructions of the work-group with most; one with less than a fourth ends at once
DEFAULT_SAMPLING = Sampling()
WHOLE_LAUNCH = Sampling(rounds=(0, 0), iterations=(0, 0))


@dataclass(frozen=True)
class Timing:
    """A modelled time, never a measured one.

    Attributes:
        gpu: whose parameters were used, and their version.
        kernel_us: from the start of dispatch to the end of write-back, as a profiler shows it.
        replay_us: the interval of equal launches back to back in a graph.
        stalls: share of the waves' time by reason; they add up to 1.
        bound: the reason with the largest share beyond issue, or ``issue``.
        hbm_bytes: read from HBM and written by stores.
        peak_gbps: of HBM, as the model has it.
        l2_hit_rate: of the lines that the vector caches ask for.
        error_band: nine in ten published kernels are within it (docs/time-model.md).
    """

    gpu: str
    kernel_us: float
    replay_us: float
    stalls: Mapping[str, float]
    bound: str
    hbm_bytes: int
    peak_gbps: float
    l2_hit_rate: float
    error_band: float

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON."""
        return {item.name: getattr(self, item.name) for item in fields(self)} | {"stalls": dict(self.stalls)}

    @property
    def memory_gbps(self) -> float:
        """Memory traffic over the kernel's time, in GB/s."""
        return self.hbm_bytes / self.kernel_us / 1e3


def simulate(
    capture: Capture,
    launch: int,
    of: Machine,
    start: Start = "cold",
    *,
    rounds: int = 0,
    iterations: int = 0,
    all_xcds: bool = False,
    detail: bool = False,
) -> dict[str, Any]:
    """Simulate one recorded launch once; the simulator's raw results.

    Args:
        capture: the recording.
        launch: its number in the capture.
        of: the GPU.
        start: where the operands are at the start.
        rounds: at most so many rounds of work-groups; 0 for all.
        iterations: at most so many iterations of the waves' longest loop; 0 for all.
        all_xcds: simulate every XCD instead of the first one.
        detail: also stalls per instruction, and the waves of one compute unit.

    Raises:
        GuardError: a work-group that is needed was not recorded, for want of room or because it was not chosen, or
            ``start`` is not a level; there is no such launch; ``iterations`` is 1, of which a loop keeps its end alone.
        ConfigError: a value of the GPU is none that can be computed with (:meth:`Machine.check`).
    """
    if start not in STARTS:
        raise GuardError(f"start={start!r}; accepted: {', '.join(STARTS)}")
    for name, count, least in (("rounds", rounds, 1), ("iterations", iterations, 2)):
        if count and count < least:
            raise GuardError(f"{name} must be 0 for all, or at least {least}; got {count}")
    of.check()
    loaded = library.load()
    names = loaded.hftime_parameter_names().decode().split()
    values = (ctypes.c_double * len(names))(*(of[name] for name in names))
    result: dict[str, Any] = json.loads(
        loaded.hftime_simulate(
            capture.handle, launch, values, STARTS.index(start), all_xcds, rounds, iterations, detail
        )
    )
    if "error" in result:
        raise GuardError(f"cannot simulate launch {launch}: {result['error']}")
    return result


@dataclass(frozen=True)
class LaunchTime:
    """One launch: the cycles of all of it, and the largest simulation that they were extended from."""

    cycles: float
    simulation: Mapping[str, Any]

    def kernel_us(self, of: Machine) -> float:
        """Return the time from the start of dispatch to the end of write-back."""
        return self.cycles / of["clock_ghz"] / 1e3 + of["start_ns"] / 1e3


def _some_end_at_once(instructions: Sequence[int]) -> bool:
    """Return whether some work-groups have next to nothing to do, as those of experts without a slot.

    They come last: rounds that are left out would count as those before.
    """
    return LEAST_PART * min(instructions) < max(instructions)


def launch_time(
    capture: Capture,
    launch: int,
    of: Machine,
    start: Start = "cold",
    sampling: Sampling = DEFAULT_SAMPLING,
    *,
    detail: bool = False,
) -> LaunchTime:
    """Return the modelled cycles of one launch; arguments as for :func:`simulate`."""
    few_rounds, rounds = sampling.rounds
    few_iterations, iterations = sampling.iterations

    def run(of_rounds: int, of_iterations: int, detail: bool = False) -> dict[str, Any]:
        return simulate(capture, launch, of, start, rounds=of_rounds, iterations=of_iterations, detail=detail)

    most = run(rounds, iterations, detail)
    if most["total_rounds"] > most["rounds"] and _some_end_at_once(capture.launches()[launch]["templates"]):
        few_rounds = rounds = 0
        most = run(rounds, iterations, detail)
    cycles = float(most["cycles"])
    more_rounds = most["total_rounds"] - most["rounds"]
    more_iterations = most["total_iterations"] - most["iterations"]
    round_step, iteration_step = rounds - few_rounds, iterations - few_iterations
    if more_rounds:
        by_round = (most["cycles"] - run(few_rounds, iterations)["cycles"]) / round_step
        cycles += more_rounds * by_round
    if more_iterations:
        by_iteration = (most["cycles"] - run(rounds, few_iterations)["cycles"]) / iteration_step
        cycles += more_iterations * by_iteration
    if more_rounds and more_iterations:
        least = run(few_rounds, few_iterations)["cycles"]
        both = (most["cycles"] - least) / (round_step * iteration_step)
        both -= by_round / iteration_step + by_iteration / round_step
        cycles -= more_rounds * more_iterations * both
    return LaunchTime(cycles, MappingProxyType(most))


def estimate(
    launches: Capture,
    gpu: str | Machine = "MI355X",
    start: Start = "cold",
    sampling: Sampling = DEFAULT_SAMPLING,
) -> Timing:
    """Return the modelled time of recorded launches that run one after another.

    Args:
        launches: what :meth:`Capture.recording` recorded, one launch or several.
        gpu: ``MI355X`` or ``MI300X``, or a machine of one's own.
        start: where the operands are when the first launch begins: ``cold`` in HBM, ``mall`` in the Infinity Cache, or
            ``l2``. Later launches find them in the Infinity Cache at least.
        sampling: how much of each launch is simulated.

    Raises:
        GuardError: nothing was recorded, or the code is for another architecture than the GPU's.
        ConfigError: the GPU is not known.
    """
    of = machine(gpu) if isinstance(gpu, str) else gpu
    recorded = launches.launches()
    if not recorded:
        raise GuardError("no launch was recorded; run the kernels inside capture.recording()")
    kernel_us = replay_us = 0.0
    shares = dict.fromkeys(STALLS, 0.0)
    lines = hits = moved = 0.0
    for number, launch in enumerate(recorded):
        if launch["arch"] != of.arch:
            raise GuardError(f"{launch['kernel']} is code for {launch['arch']}; the {of.name} runs {of.arch}")
        warm: Start = "mall" if number and start == "cold" else start
        time = launch_time(launches, number, of, warm, sampling)
        took = time.kernel_us(of)
        kernel_us += took
        replay_us += took - (of["start_ns"] - of["replay_gap_ns"]) / 1e3
        stalls = time.simulation["stalls"]
        for name, cycles in zip(STALLS, stalls, strict=True):
            shares[name] += took * cycles / max(1e-9, sum(stalls))
        lines += time.simulation["l2_lines"]
        hits += time.simulation["l2_hits"]
        extended = time.cycles / max(1.0, time.simulation["cycles"])
        moved += (
            extended
            * (time.simulation["hbm_bytes"] + time.simulation["stored_bytes"])
            * min(of["xcds"], launch["groups"])
        )
    shares = {name: value / kernel_us for name, value in shares.items()}
    waits = {name: value for name, value in shares.items() if name != "issue"}
    largest = max(waits, key=lambda name: waits[name])
    return Timing(
        gpu=f"{of.name} ({of.version})",
        kernel_us=kernel_us,
        replay_us=replay_us,
        stalls=MappingProxyType(shares),
        bound=largest if waits[largest] > shares["issue"] else "issue",
        hbm_bytes=int(moved),
        peak_gbps=of["hbm_gbps"],
        l2_hit_rate=hits / max(1.0, lines),
        error_band=ERROR_BAND[of.arch],
    )
