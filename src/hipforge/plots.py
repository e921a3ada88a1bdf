"""Pictures of tables: ``--plot FILE`` of profile, inspect, tune and the benches. The file's suffix says the format."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hipforge import archs
from hipforge.errors import ConfigError
from hipforge.jit.demangle import fit, short_name

if TYPE_CHECKING:
    from hipforge.emulator.counting import Counters
    from hipforge.emulator.report import Profile
    from hipforge.emulator.timing import Machine, Start
    from hipforge.emulator.timing.context import Timed


@contextmanager
def figure(
    path: Path, count: int = 1, *, down: bool = False, size: tuple[float, float] = (6, 4.5)
) -> Iterator[Sequence[Any]]:
    """Yield ``count`` axes of a picture that is written to ``path`` at the end.

    Args:
        path: the file.
        count: how many axes.
        down: one below the other instead of side by side.
        size: width and height of each, in inches.

    Raises:
        ConfigError: matplotlib is not installed, or ``path`` cannot be written or has a suffix that it does not know.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    grid = (count, 1) if down else (1, count)
    drawn, axes = pyplot.subplots(*grid, figsize=(size[0] * grid[1], size[1] * grid[0]), squeeze=False)
    try:
        yield list(axes.flat)
        drawn.tight_layout()
        drawn.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture {path} cannot be written: {error}") from error
    finally:
        pyplot.close(drawn)


def profile(found: Profile, kernel_us: float, title: str, path: Path) -> None:
    """Draw the instruction mix (counted), and the op, which takes ``kernel_us`` (modelled), below its roofline."""
    with figure(path, 2) as (mix, roof):
        classes = sorted((item for item in found.counters.by_class.items() if item[1]), key=lambda item: item[1])
        mix.barh([name for name, _ in classes], [count for _, count in classes])
        mix.set(title="instructions", xlabel="wave-instructions (counted)")
        roofline(roof, found, kernel_us, title)


def roofline(axes: Any, found: Profile, kernel_us: float, title: str) -> None:
    """Draw an op that takes ``kernel_us`` (modelled) below what the memory and the pipes of its architecture allow.

    The flat roof is the rate of the op's own matrix instructions, or of packed float32 where it has none.
    """
    from hipforge.emulator.report import VECTOR_FLOP_PER_CYCLE

    info = archs.get(found.arch)
    simd_cycles = info.cu_count * info.simds_per_cu * info.clock_hz
    flop = found.matrix_flop + found.vector_flop
    matrix = found.matrix_flop > found.vector_flop
    of_simd = found.matrix_flop / found.matrix_cycles if matrix else VECTOR_FLOP_PER_CYCLE
    peak, slope = simd_cycles * of_simd / 1e12, info.bandwidth / 1e12
    at = found.flop_per_byte
    ends = [min(at, peak / slope) / 10, peak / slope, max(at, peak / slope) * 10]
    axes.loglog(ends, [min(peak, x * slope) for x in ends], "k-")
    middle = (ends[0] * ends[1]) ** 0.5
    axes.text(middle, middle * slope, f"{info.bandwidth / 1e9:,.0f} GB/s  ", va="bottom", ha="right")
    axes.text(ends[2], peak, f"{peak:,.0f} TFLOP/s, {'matrix' if matrix else 'vector'}", va="bottom", ha="right")
    reached = f"{flop / kernel_us / 1e6:.3g} TFLOP/s, {found.memory_bytes / kernel_us / 1e3:,.0f} GB/s"
    axes.loglog([at], [flop / kernel_us / 1e6], "o", label=f"{title}\n{kernel_us:.2f} µs (modelled)\n{reached}")
    axes.set(
        title=f"{found.arch}, {info.product}: bound by {found.bound}",
        xlabel="executed FLOP per byte of memory traffic (counted)", ylabel="TFLOP/s (modelled)",
    )  # fmt: skip
    axes.margins(y=0.1)
    axes.legend(loc="lower right")


def timeline(timed: Timed, of: Machine, start: Start, counts: Counters, title: str, path: Path) -> None:
    """Draw per launch the waves of one compute unit over time, then the roofline and the waves' time by reason.

    A bar is a wave, light where it issues instructions, coloured where it waits and by what for.
    """
    from hipforge.emulator import report as counted
    from hipforge.emulator.timing import report

    launches = timed.capture.launches()
    with figure(path, len(launches) + 2, down=True, size=(10, 3)) as (*waves, roof, share):
        for number, (axes, launch) in enumerate(zip(waves, launches, strict=True)):
            done = report.detailed(timed.capture, number, of, start)
            rows = sorted({(simd, wave) for simd, _group, wave, _begin, _end in done["spans"]})
            draw = functools.partial(_waves, axes, rows, of["clock_ghz"] * 1e3)
            draw(done["spans"], color="0.9", edgecolor="black", label="issues")
            for label, (colour, reasons) in report.PHASES.items():
                draw([one for one in done["phases"] if report.reason(one) in reasons], color=colour, label=label)
            axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
            axes.set(title=f"{fit(short_name(launch['kernel']), 70)}: waves of one CU", xlabel="µs (modelled)")
            axes.set_yticks(range(len(rows)), [f"SIMD {simd}, wave {wave}" for simd, wave in rows], fontsize=6)
        roofline(roof, counted.profile(counts, of.arch), timed.result.kernel_us, title)
        stalls = {name: 100 * each for name, each in timed.result.stalls.items() if each >= 0.0005}
        share.barh(list(stalls), list(stalls.values()))
        share.set(title=f"{timed.result.kernel_us:.2f} µs: the waves' time by reason", xlabel="% (modelled)")


def _waves(axes: Any, rows: Sequence[Any], per_us: float, spans: Sequence[Any], **look: Any) -> None:
    axes.barh(
        [rows.index((simd, wave)) for simd, _group, wave, *_ in spans],
        [(end - begin) / per_us for _simd, _group, _wave, begin, end, *_ in spans],
        left=[begin / per_us for _simd, _group, _wave, begin, *_ in spans], **look,
    )  # fmt: skip


def inspect(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw each kernel's waves per SIMD against its vector registers, larger where it has LDS; spills are crosses."""
    with figure(path) as (axes,):
        for spilled, marker in ((False, "o"), (True, "x")):
            chosen = [row for row in rows if bool(row["vgpr_spills"] or row["sgpr_spills"]) == spilled]
            axes.scatter(
                [row["vgpr"] for row in chosen], [row["occupancy"] for row in chosen], marker=marker,
                s=[30 + row["lds_bytes"] / 512 for row in chosen], alpha=0.6,
                label="with spills" if spilled else "no spills",
            )  # fmt: skip
        axes.set(title=title, xlabel="vector registers", ylabel="waves per SIMD", xlim=(0, 520), ylim=(0, 8.5))
        axes.legend()


@dataclass(frozen=True)
class Bar:
    """One value of :func:`bars`.

    Attributes:
        group: what is compared, such as a shape; its bars stand side by side.
        series: whose value it is, the same in every group.
        value: greater than 0.
        panel: which axes it is in.
    """

    group: str
    series: str
    value: float
    panel: str = ""


def kernels(spans: Sequence[tuple[str, float, float]], title: str, path: Path) -> None:
    """Draw when kernels ran: a line for each, in the order of their first launches, with all its launches.

    Args:
        spans: name, start and duration of each launch, the last two in microseconds.
        title: of the picture.
        path: as :func:`figure`, which says what raises.
    """
    names = list(dict.fromkeys(name for name, _, _ in spans))
    with figure(path, size=(11, 1.2 + 0.3 * len(names))) as (axes,):
        for line, name in enumerate(names):
            own = [(start, us) for each, start, us in spans if each == name]
            axes.broken_barh(own, (line - 0.4, 0.8), color=f"C{line % 10}")
        axes.set_yticks(range(len(names)), [fit(name, 60) for name in names], fontsize=7)
        axes.set(title=title, xlabel="µs (measured)")
        axes.invert_yaxis()


def bars(values: Sequence[Bar], title: str, unit: str, path: Path) -> None:
    """Draw groups of bars on a logarithmic scale, each labelled with its ratio to the first series of its group.

    Raises:
        ConfigError: there is no value, or as :func:`figure`.
    """
    if not values:
        raise ConfigError(f"the picture {path} would be empty: no row has a value in {unit}")
    panels = list(dict.fromkeys(bar.panel for bar in values))
    series = list(dict.fromkeys(bar.series for bar in values))
    most = max(len({bar.group for bar in values if bar.panel == panel}) for panel in panels)
    with figure(path, len(panels), down=True, size=(max(7, 0.45 * most * len(series) + 2), 4)) as all_axes:
        for axes, panel in zip(all_axes, panels, strict=True):
            here = [bar for bar in values if bar.panel == panel]
            groups = list(dict.fromkeys(bar.group for bar in here))
            first = {bar.group: bar.value for bar in reversed(here)}
            width = 0.8 / len(series)
            for number, name in enumerate(series):
                own = [bar for bar in here if bar.series == name]
                at = [groups.index(bar.group) + width * (number - (len(series) - 1) / 2) for bar in own]
                drawn = axes.bar(at, [bar.value for bar in own], width, label=name)
                axes.bar_label(drawn, [f"{bar.value / first[bar.group]:.2f}" for bar in own], fontsize=7)
            axes.set(yscale="log", ylabel=unit, title=panel)
            axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right", fontsize=7)
            axes.margins(y=0.15)
        all_axes[0].legend(fontsize=7)
        all_axes[0].set_title(" ".join(filter(None, (title, panels[0]))))


@dataclass(frozen=True)
class Curve:
    """A line of :func:`curves`.

    Attributes:
        panel: which axes it is in.
        series: whose values these are, the same in every panel.
        points: x and y, both greater than 0.
        bound: whether it is a limit, which is dashed.
    """

    panel: str
    series: str
    points: Sequence[tuple[float, float]]
    bound: bool = False


def curves(found: Sequence[Curve], title: str, x: str, y: str, path: Path) -> None:
    """Draw lines on logarithmic scales, those of a series in one colour.

    Raises:
        ConfigError: there is no line, or as :func:`figure`.
    """
    if not found:
        raise ConfigError(f"the picture {path} would be empty: no row has a value in {y}")
    panels = list(dict.fromkeys(one.panel for one in found))
    series = list(dict.fromkeys(one.series for one in found))
    with figure(path, len(panels), size=(4.2, 3.8)) as all_axes:
        from matplotlib.ticker import LogFormatter

        for axes, panel in zip(all_axes, panels, strict=True):
            for one in found:
                if one.panel != panel:
                    continue
                look = {"linestyle": "--", "color": "black"} if one.bound else {"marker": "o"}
                look.setdefault("color", f"C{series.index(one.series) % 10}")
                axes.plot(*zip(*sorted(one.points), strict=True), label=one.series, markersize=3, **look)
            axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y, title=panel)
            for of in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                of(LogFormatter(minor_thresholds=(2, 0.5)))
            at = sorted({point[0] for one in found if one.panel == panel for point in one.points})
            axes.set_xticks(at, [f"{each:g}" for each in at], fontsize=7)
            axes.tick_params(axis="x", which="minor", bottom=False)
            axes.grid(which="major", alpha=0.3)
        all_axes[0].legend(fontsize=7)
        all_axes[0].figure.suptitle(title)


@dataclass(frozen=True)
class Landscape:
    """What a search found for one problem.

    Attributes:
        title: the problem, and where the times come from.
        times: microseconds of every candidate that could be chosen, fastest first, with its name.
        chosen: the name of the candidate that was taken.
        rejected: how many candidates could not be taken.
    """

    title: str
    times: Sequence[tuple[str, float]]
    chosen: str
    rejected: int


MOST_CANDIDATES = 20


def landscapes(found: Sequence[Landscape], path: Path) -> None:
    """Draw the times of each search's candidates, at most 20 of them, the chosen one in another colour.

    Raises:
        ConfigError: nothing was searched, or as :func:`figure`.
    """
    if not found:
        raise ConfigError(f"the picture {path} would be empty: no cell was searched")
    tallest = max(min(MOST_CANDIDATES, len(one.times)) for one in found)
    with figure(path, len(found), down=True, size=(9, 0.25 * tallest + 1.2)) as all_axes:
        for axes, one in zip(all_axes, found, strict=True):
            shown = list(one.times)[:MOST_CANDIDATES]
            names = [name for name, _ in shown]
            drawn = axes.barh(range(len(shown)), [us for _, us in shown])
            axes.bar_label(drawn, [f"{us / shown[0][1]:.2f}" for _, us in shown], fontsize=7)
            if one.chosen in names:
                drawn[names.index(one.chosen)].set_color("C1")
            axes.set_yticks(range(len(shown)), names, fontsize=7)
            axes.invert_yaxis()
            left = f", {len(one.times) - len(shown)} slower ones not shown" if len(one.times) > len(shown) else ""
            axes.set(title=f"{one.title}: {one.rejected} rejected{left}", xlabel="µs; labels: ratio to the fastest")
