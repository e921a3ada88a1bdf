"""What does a modelled time consist of? Tables for a terminal, a timeline for a viewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hipforge.emulator.timing.capture import Capture
from hipforge.emulator.timing.machines import Machine
from hipforge.emulator.timing.model import STALLS, Start, Timing, simulate
from hipforge.jit.demangle import short_name

if TYPE_CHECKING:
    from hipforge.emulator.code_object import Kernel

REASONS = {
    "issue": "issuing instructions",
    "valu": "vector ALU busy",
    "matrix": "matrix pipe or its result",
    "lds": "LDS busy",
    "vector_memory": "vector memory pipe, or no line of L1 free",
    "vmcnt": "waiting for global memory",
    "lgkmcnt": "waiting for LDS or scalar memory",
    "barrier": "barrier",
    "fetch": "instruction fetch",
    "tail": "write-back after the last wave",
}
# What a wave waits for, as the timeline has it: its colour, and the reasons of the model.
PHASES = {
    "load": ("C0", ("vmcnt", "vector_memory")),
    "LDS, scalar": ("C2", ("lds", "lgkmcnt")),
    "matrix": ("C3", ("matrix",)),
    "vector ALU": ("C4", ("valu",)),
    "barrier": ("C1", ("barrier",)),
    "fetch": ("C7", ("fetch",)),
}
DETAIL_ROUNDS, DETAIL_ITERATIONS = 4, 24


@dataclass(frozen=True)
class HotInstruction:
    """One instruction with the time that waves spent waiting to execute it, and its source line where it is known."""

    kernel: str
    pc: int
    text: str
    count: int
    share: float
    source: str = ""


def _sources(kernel: Kernel) -> dict[int, str]:
    """Return ``file:line`` by address, counted from the kernel's first instruction."""
    at = [int(line.split(":", 1)[0], 16) for line in kernel.disassembly().splitlines()]
    return {pc - at[0]: line for pc, line in zip(at, kernel.source_lines(), strict=False) if line}


def hottest(
    capture: Capture, of: Machine, start: Start = "cold", most: int = 12, kernels: Sequence[Kernel] = ()
) -> list[HotInstruction]:
    """Return the instructions at which the waves wait longest, over all launches of a capture.

    Args:
        capture: the recording.
        of: the GPU.
        start: where operands are at the start.
        most: how many instructions.
        kernels: those that were launched, for their source lines (compile with ``-gline-tables-only``).
    """
    sources = {kernel.name: _sources(kernel) for kernel in kernels}
    found: list[HotInstruction] = []
    total = 0.0
    for number, launch in enumerate(capture.launches()):
        done = detailed(capture, number, of, start)
        total += sum(done["stalls"])
        lines = sources.get(launch["kernel"], {})
        first = min(pc for pc, *_ in done["hot"])
        found += [
            HotInstruction(short_name(launch["kernel"]), pc, text, count, stalled, lines.get(pc - first, ""))
            for pc, text, count, stalled in done["hot"]
        ]
    found.sort(key=lambda item: -item.share)
    return [replace(item, share=item.share / max(1.0, total)) for item in found[:most]]


def detailed(capture: Capture, number: int, of: Machine, start: Start) -> dict[str, Any]:
    """Return the simulation of a launch with its waves' spans and phases: (SIMD, work-group, wave, begin, end, ...)."""
    return simulate(capture, number, of, start, rounds=DETAIL_ROUNDS, iterations=DETAIL_ITERATIONS, detail=True)


def reason(phase: Sequence[Any]) -> str:
    """Return what the wave of a phase waits for, a key of ``REASONS``."""
    return STALLS[phase[5]]


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
        lines += [
            f"  {item.share:6.1%} {item.count:>10,}  {item.pc:8x}  {item.text}"
            + (f"  {item.source}" if item.source else "")
            for item in hot
        ]
    return "\n".join(lines)


def compare(names: tuple[str, str], timings: tuple[Timing, Timing]) -> str:
    """Return two timings side by side as lines for a terminal; a difference within the error is called a tie."""
    one, two = timings
    ratio = two.kernel_us / one.kernel_us
    tie = max(ratio, 1 / ratio) <= 1 + one.error_band
    verdict = (
        f"a tie: they differ by less than the error of {one.error_band:.0%}"
        if tie
        else f"{names[1] if ratio < 1 else names[0]} is faster, by a factor of {max(ratio, 1 / ratio):.2f}"
    )
    rows = [
        ("kernel, us", f"{one.kernel_us:.2f}", f"{two.kernel_us:.2f}"),
        ("replayed in a graph, us", f"{one.replay_us:.2f}", f"{two.replay_us:.2f}"),
        ("bound", one.bound, two.bound),
        ("memory traffic, bytes", f"{one.hbm_bytes:,}", f"{two.hbm_bytes:,}"),
        ("GB/s", f"{one.memory_gbps:.0f}", f"{two.memory_gbps:.0f}"),
        ("L2 hit rate", f"{one.l2_hit_rate:.1%}", f"{two.l2_hit_rate:.1%}"),
        *(
            (REASONS[name], f"{one.stalls[name]:.1%}", f"{two.stalls[name]:.1%}")
            for name in STALLS
            if max(one.stalls[name], two.stalls[name]) >= 0.0005
        ),
    ]
    wide = max(14, *(len(name) + 2 for name in names))
    return "\n".join(
        [
            f"modelled on {one.gpu}, not measured: {verdict}",
            f"  {'':<40}{names[0]:>{wide}}{names[1]:>{wide}}",
            *(f"  {what:<40}{left:>{wide}}{right:>{wide}}" for what, left, right in rows),
        ]
    )


def chrome_trace(capture: Capture, of: Machine, start: Start = "cold") -> dict[str, Any]:
    """Return the timeline of one compute unit in the Trace Event Format, for Perfetto or Chrome: modelled microseconds.

    A process is a launch, a thread a wave slot; a wave holds what it waits for.
    """
    per_us = of["clock_ghz"] * 1e3
    events: list[dict[str, Any]] = []
    for number, launch in enumerate(capture.launches()):
        done = detailed(capture, number, of, start)
        title = {"name": f"{short_name(launch['kernel'])} (modelled)"}
        events.append({"name": "process_name", "ph": "M", "pid": number, "args": title})
        waves = [(*span, "wave") for span in done["spans"]]
        rows = sorted({(simd, wave) for simd, _group, wave, _begin, _end in done["spans"]})
        events += [
            {"name": "thread_name", "ph": "M", "pid": number, "tid": row, "args": {"name": f"SIMD {simd}, wave {wave}"}}
            for row, (simd, wave) in enumerate(rows)
        ]
        waits = [(*phase[:5], REASONS[reason(phase)]) for phase in done["phases"]]
        events += [
            {
                "name": name, "ph": "X", "pid": number, "tid": rows.index((simd, wave)), "ts": begin / per_us,
                "dur": (end - begin) / per_us, "args": {"work-group": group},
            }
            for simd, group, wave, begin, end, name in sorted(waves + waits, key=lambda item: (item[3], -item[4]))
        ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ns"}
