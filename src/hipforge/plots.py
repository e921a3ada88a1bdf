"""Pictures of the commands' tables: ``--plot FILE`` of profile and inspect. The file's suffix says the format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
def figure(path: Path, count: int = 1) -> Iterator[Sequence[Any]]:
    """Yield ``count`` axes side by side of a picture that is written to ``path`` at the end.

    Raises:
        ConfigError: matplotlib is not installed, or ``path`` cannot be written or has a suffix that it does not know.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'hipforge[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, count, figsize=(6 * count, 4.5), squeeze=False)
    try:
        yield list(axes[0])
        drawn.tight_layout()
        drawn.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture {path} cannot be written: {error}") from error
    finally:
        pyplot.close(drawn)


def profile(found: Profile, title: str, path: Path) -> None:
    """Draw the instruction mix (counted), and the op on the roofline of its architecture (modelled at peak rates)."""
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
        roof.loglog([intensity], [min(peak, intensity * info.bandwidth / 1e12)], "o", label=title)
        roof.set(
            title=f"bound: {found.bound} (modelled at peak rates)", xlabel="pipe cycles per byte (counted)",
            ylabel="10^12 pipe cycles per second",
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
