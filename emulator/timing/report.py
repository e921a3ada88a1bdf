"""What does a modelled time consist of? Tables and plots for a terminal and a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipforge.emulator.timing.capture import Capture
from hipforge.emulator.timing.machines import Machine
from hipforge.emulator.timing.model import STALLS, Start, Timing, simulate
from hipforge.errors import ConfigError
from hipforge.jit.backends.amd.demangle import short_name

REASONS = {
    "issue": "issuing instructions",
    "valu": "vector ALU busy",
    "matrix": "matrix pipe or its result",
    "lds": "LDS busy",
    "vector_memory": "vector memory pipe busy",
    "vmcnt": "waiting for global memory",
    "lgkmcnt": "waiting for LDS or scalar memory",
    "barrier": "barrier",
    "fetch": "instruction fetch",
    "tail": "write-back after the last wave",
}
DETAIL_ROUNDS, DETAIL_ITERATIONS = 4, 24


@dataclass(frozen=True)
class HotInstruction:
    """One instruction with the time that waves spent waiting to execute it."""

    kernel: str
    pc: int
    text: str
    count: int
    share: float


def hottest(capture: Capture, of: Machine, start: Start = "cold", most: int = 12) -> list[HotInstruction]:
    """Return the instructions at which the waves wait longest, over all launches of a capture."""
    found: list[HotInstruction] = []
    total = 0.0
    for number, launch in enumerate(capture.launches()):
        done = simulate(capture, number, of, start, rounds=DETAIL_ROUNDS, iterations=DETAIL_ITERATIONS, detail=True)
        total += sum(done["stalls"])
        found += [
            HotInstruction(short_name(launch["kernel"]), pc, text, count, stalled)
            for pc, text, count, stalled in done["hot"]
        ]
    found.sort(key=lambda item: -item.share)
    return [
        HotInstruction(item.kernel, item.pc, item.text, item.count, item.share / max(1.0, total))
        for item in found[:most]
    ]


def text(timing: Timing, hot: Sequence[HotInstruction] = ()) -> str:
    """Return a timing as lines for a terminal; every time is modelled."""
    band = timing.error_band
    lines = [
        f"modelled on {timing.gpu}, not measured; {band:.0%} is the error of nine in ten published kernels",
        f"  kernel                 {timing.kernel_us:>10.2f} us  ({timing.kernel_us * (1 - band):.2f} to "
        f"{timing.kernel_us * (1 + band):.2f})",
        f"  replayed in a graph    {timing.replay_us:>10.2f} us",
        f"  bound                  {timing.bound:>10}     {REASONS[timing.bound]}",
        f"  memory traffic         {timing.hbm_bytes:>10,} bytes, {timing.memory_gbps:.0f} GB/s of "
        f"{timing.peak_gbps:.0f} that the model reaches",
        f"  L2 hit rate            {timing.l2_hit_rate:>10.1%}",
        "",
        "the waves' time by reason",
        *(
            f"  {name:<14} {timing.stalls[name]:>7.1%}  {REASONS[name]}"
            for name in sorted(STALLS, key=lambda name: -timing.stalls[name])
            if timing.stalls[name] >= 0.0005
        ),
    ]
    if hot:
        lines += ["", "where the waves wait longest", "   share      count   address  instruction"]
        lines += [f"  {item.share:6.1%} {item.count:>10,}  {item.pc:8x}  {item.text}" for item in hot]
    return "\n".join(lines)


def plot(capture: Capture, timing: Timing, of: Machine, start: Start, path: Path) -> None:
    """Write a picture: the waves of one compute unit over time, and the waves' time by reason.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'hipforge[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    launches = capture.launches()
    figure, all_axes = pyplot.subplots(len(launches) + 1, 1, figsize=(10, 2.5 * (len(launches) + 1)), squeeze=False)
    for number, launch in enumerate(launches):
        axes = all_axes[number][0]
        done: dict[str, Any] = simulate(
            capture, number, of, start, rounds=DETAIL_ROUNDS, iterations=DETAIL_ITERATIONS, detail=True
        )
        rows = sorted({(simd, wave) for simd, _group, wave, _begin, _end in done["spans"]})
        for simd, group, wave, begin, end in done["spans"]:
            at, length = begin / of["clock_ghz"] / 1e3, (end - begin) / of["clock_ghz"] / 1e3
            axes.barh(rows.index((simd, wave)), length, left=at, color=f"C{group % 10}", edgecolor="black")
        axes.set(title=f"{short_name(launch['kernel'])}: waves of one compute unit (modelled)", xlabel="µs")
        axes.set_yticks(range(len(rows)), [f"SIMD {simd}, wave {wave}" for simd, wave in rows], fontsize=6)
    axes = all_axes[-1][0]
    names = [name for name in STALLS if timing.stalls[name] >= 0.0005]
    axes.barh(names, [100 * timing.stalls[name] for name in names])
    axes.set(title=f"{timing.kernel_us:.2f} µs: the waves' time by reason (modelled)", xlabel="%")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
