"""Pictures of tables: ``--plot FILE`` of profile, inspect, tune and the benches. The file's suffix says the format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hipforge import archs
from hipforge.errors import ConfigError

if TYPE_CHECKING:
    from hipforge.emulator.report import Profile

OPTION = click.option(
    "--plot", "picture", type=click.Path(path_type=Path), help="Also write a picture (needs matplotlib)."
)


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
    counts = found.counters
    info = archs.get(found.arch)
    simds = info.cu_count * info.simds_per_cu
    with figure(path, 2) as (mix, roof):
        classes = sorted((item for item in counts.by_class.items() if item[1]), key=lambda item: item[1])
        mix.barh([name for name, _ in classes], [count for _, count in classes])
        mix.set(title=f"{title}: instructions (counted)", xlabel="wave-instructions")
        # Work is what keeps the busiest pipe busy: its cycles over all SIMDs, per byte that must cross the memory bus.
        cycles = max(found.vector_cycles, found.matrix_cycles, found.lds_cycles * info.simds_per_cu, 1)
        intensity = cycles / max(1, found.memory_bytes)
        peak = simds * info.clock_hz / 1e12
        ridge = simds * info.clock_hz / info.bandwidth
        around = [ridge / 100, ridge, ridge * 100]
        roof.loglog(around, [min(peak, x * info.bandwidth / 1e12) for x in around], "k-", label=f"peak of {found.arch}")
        roof.loglog([intensity], [cycles / kernel_us / 1e6], "o", label=f"{title}: {kernel_us:.2f} µs")
        roof.set(
            title=f"bound: {found.bound}", xlabel="pipe cycles per byte (counted)",
            ylabel="10^12 pipe cycles per second (modelled)",
        )  # fmt: skip
        roof.legend()


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
