"""Tune the cells of a GEMM family one by one into a table, and the command that does so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
import torch

from hipforge import devices
from hipforge.errors import ConfigError
from hipforge.ops.tuned import Key, Value
from hipforge.tuning.cases import Cell, cells, parse_shape, read_untuned
from hipforge.tuning.gemm import Baselines, GemmFamily, GemmProblem, MeasuredProblem, ModelledProblem
from hipforge.tuning.search import Candidate, Trial, search
from hipforge.tuning.table_writer import Row, merge_rows, read_existing


def row_for(
    family: GemmFamily,
    cell: Cell,
    cu_num: int,
    trial: Trial,
    source: str,
    baselines: Baselines,
    min_improvement_pct: float,
) -> Row:
    """Return the table row of a cell's chosen trial.

    ``use_hip`` is 0 only where the best baseline was measured and the kernel does not beat it by
    ``min_improvement_pct`` percent.
    """
    measured = source.startswith("measured:")
    us = trial.seconds * 1e6 if measured and trial.seconds is not None else None
    stock_us, best_us = baselines if measured and baselines else (None, None)
    wins = us is None or best_us is None or best_us > us * (1 + min_improvement_pct / 100)
    row: dict[str, Value] = {
        "gfx": family.arch,
        "cu_num": cu_num,
        "M": cell.m,
        "N": cell.n,
        "K": cell.k,
        **family.columns(trial.candidate),
        "use_hip": int(wins),
        "us": us,
        "stock_us": stock_us,
        "best_baseline_us": best_us,
        "err": trial.error,
        "source": source,
    }
    return row


def keep_old(family: GemmFamily, old: Row | None, trials: list[Trial], min_improvement_pct: float) -> Trial | None:
    """Return the trial of the configuration that ``old`` names, unless the best one beats it by the given percent."""
    if old is None or trials[0].seconds is None:
        return None
    for trial in trials:
        same = all(old[name] == value for name, value in family.columns(trial.candidate).items())
        if same and trial.seconds is not None:
            return trial if trial.seconds <= trials[0].seconds * (1 + min_improvement_pct / 100) else None
    return None


def _is_measured(row: Mapping[str, Value] | None) -> bool:
    return row is not None and str(row["source"]).startswith("measured:")


def family_of_device(families: Sequence[GemmFamily]) -> GemmFamily:
    """Return the family, of one op's on several architectures, whose kernels run on the current device.

    Raises:
        ConfigError: there is none.
    """
    device = devices.current()
    arch = device.kind if device.kind == "reference" else device.arch_of()
    for family in families:
        if family.arch == arch:
            return family
    raise ConfigError(
        f"the kernels are for {', '.join(family.arch for family in families)}; the device is {arch} "
        "(HIPFORGE_DEVICE, HIPFORGE_EMULATE)"
    )


def _search(family: GemmFamily, cell: Cell, on_gpu: bool) -> tuple[list[Trial], GemmProblem]:
    lowest = family.bound

    def bound(candidate: Candidate) -> float:
        return 0.0 if lowest is None else lowest(candidate, cell)

    found = sorted(family.candidates(cell), key=bound)[: family.most_trials]
    if on_gpu:  # the bound is of the model's times, not of measured ones
        measured = MeasuredProblem(family, cell, torch.device("cuda", 0))
        return search(measured, found, family.max_error), measured
    modelled = ModelledProblem(family, cell)
    return search(modelled, found, family.max_error, bound=bound), modelled


def tune(
    family: GemmFamily,
    wanted: list[Cell],
    output: Path,
    *,
    resume: bool = False,
    compare: bool = False,
    min_improvement_pct: float = 3.0,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Tune cells one by one and merge each row into ``output`` as soon as it is known.

    A cell that ``output`` holds a measured row for is left alone where there is no GPU: a model does not overrule a
    measurement.

    Args:
        family: whose kernels.
        wanted: the cells.
        output: the table; rows of other cells stay.
        resume: skip cells that ``output`` already has a row for.
        compare: keep the configuration that ``output`` has unless the new one is faster by ``min_improvement_pct``.
        min_improvement_pct: see :func:`row_for` and ``compare``.
        say: takes progress, one line at a time.

    Returns:
        How many rows were written.

    Raises:
        ConfigError: the device has no such kernels, ``output`` is malformed, or no candidate of a cell is usable.
    """
    family_of_device((family,))
    device = devices.current()
    cu_num = device.cu_count()
    existing = read_existing(family.schema, output)
    written = 0
    for number, cell in enumerate(wanted, 1):
        where = f"[{number}/{len(wanted)}] {cell}"
        key: Key = (family.arch, cu_num, cell.m, cell.n, cell.k)
        old = existing.get(key)
        if resume and old is not None:
            say(f"{where}: already in {output}")
            continue
        if _is_measured(old) and device.kind != "hip":
            say(f"{where}: {output} has a measured row, which a model does not replace")
            continue
        trials, problem = _search(family, cell, device.kind == "hip")
        rejected = [trial for trial in trials if trial.rejected]
        for trial in rejected:
            say(f"    rejected {trial.candidate}: {trial.rejected}")
        if len(rejected) == len(trials):
            raise ConfigError(f"{cell}: no candidate is usable" + (f": {rejected[0].rejected}" if rejected else ""))
        kept = keep_old(family, old, trials, min_improvement_pct) if compare else None
        chosen = kept or trials[0]
        row = row_for(family, cell, cu_num, chosen, problem.source, problem.baselines(), min_improvement_pct)
        merge_rows(output, family.schema, [row])
        written += 1
        verdict = "" if row["use_hip"] else ", fallback is faster"
        say(f"{where}: {chosen.candidate}{' kept' if kept else ''}, {chosen.note}{verdict}")
    return written


def command_for(families: Sequence[GemmFamily], summary: str) -> click.Command:
    """Return an op's tuner as a command, ``hipforge tune <family>``.

    Args:
        families: the op's, one per architecture, all with the same default cells; the device's is tuned.
        summary: the command's help.
    """

    @click.command(families[0].schema.family, help=summary)
    @click.option("-i", "--untuned", type=click.Path(path_type=Path), help="CSV with columns M,N,K of cells to tune.")
    @click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Table to merge rows into.")
    @click.option("--shapes", multiple=True, metavar="K,N", help="Weight shape; may be repeated. Needs -m.")
    @click.option("-m", "--batch", "batches", multiple=True, type=click.IntRange(min=1), help="M; may be repeated.")
    @click.option("--compare", is_flag=True, help="Keep the output's configuration unless the new one clearly wins.")
    @click.option("--min-improvement-pct", default=3.0, show_default=True, help="What clearly is, in percent.")
    @click.option("--resume", is_flag=True, help="Skip cells that the output already has.")
    def command(
        untuned: Path | None,
        output: Path,
        shapes: tuple[str, ...],
        batches: tuple[int, ...],
        compare: bool,
        min_improvement_pct: float,
        resume: bool,
    ) -> None:
        wanted = _wanted(families[0], untuned, shapes, batches)
        count = tune(
            family_of_device(families),
            wanted,
            output,
            resume=resume,
            compare=compare,
            min_improvement_pct=min_improvement_pct,
            say=click.echo,
        )
        click.echo(f"{count} rows written to {output}")

    return command


def _wanted(family: GemmFamily, untuned: Path | None, shapes: tuple[str, ...], batches: tuple[int, ...]) -> list[Cell]:
    if untuned is not None:
        if shapes or batches:
            raise ConfigError("give either -i FILE or --shapes and -m, not both")
        return read_untuned(untuned)
    if not shapes:
        return [cell for cell in family.default_cells if not batches or cell.m in batches]
    by_default = sorted({cell.m for cell in family.default_cells})
    return cells([parse_shape(text) for text in shapes], batches or by_default)
