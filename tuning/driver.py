"""Tune the cells of an op family one by one into a table, and the command that does so."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from hipforge import devices
from hipforge.errors import ConfigError
from hipforge.ops.core.tuned import Value
from hipforge.tuning.search import Trial, search
from hipforge.tuning.table_writer import Row, merge_rows, read_existing
from hipforge.tuning.tuner import MACHINES, Baselines, C, Measured, Modelled, O, Tuner

SAVE_EVERY_S = 1.0  # merging reads and checks the whole table


def row_for(
    tuner: Tuner[C, O],
    cell: C,
    device: tuple[str, int],
    trial: Trial,
    source: str,
    baselines: Baselines,
    min_improvement_pct: float,
) -> Row:
    """Return the table row of a cell's chosen trial on a device, (architecture, compute units).

    ``use_hip`` is 0 only where the best baseline was measured and the kernel does not beat it by
    ``min_improvement_pct`` percent.
    """
    table = tuner.family.table
    measured = source.startswith("measured:")
    us = trial.seconds * 1e6 if measured and trial.seconds is not None else None
    stock_us, best_us = baselines if measured and baselines else (None, None)
    wins = us is None or best_us is None or best_us > us * (1 + min_improvement_pct / 100)
    row: dict[str, Value] = {
        **dict(zip(table.key_names, tuner.key(cell, *device), strict=True)),
        **tuner.columns(trial.candidate),
        **tuner.given(cell),
        "us": us,
        "stock_us": stock_us,
        "best_baseline_us": best_us,
        "err": trial.error,
        "source": source,
    }
    return {**row, "use_hip": int(wins)} if "use_hip" in table.header else row


def keep_old(tuner: Tuner[C, O], old: Row | None, trials: list[Trial], min_improvement_pct: float) -> Trial | None:
    """Return the trial of the configuration that ``old`` names, unless the best one beats it by the given percent."""
    if old is None or trials[0].seconds is None:
        return None
    for trial in trials:
        same = all(old[name] == value for name, value in tuner.columns(trial.candidate).items())
        if same and trial.seconds is not None:
            return trial if trial.seconds <= trials[0].seconds * (1 + min_improvement_pct / 100) else None
    return None


def _is_measured(row: Mapping[str, Value] | None) -> bool:
    return row is not None and str(row["source"]).startswith("measured:")


def arch_of_device(tuner: Tuner[Any, Any]) -> str:
    """Return the current device's architecture; raises ConfigError where the family has no kernels for it."""
    device = devices.current()
    arch = device.kind if device.kind == "reference" else device.arch_of()
    if arch not in tuner.family.archs:
        raise ConfigError(
            f"the kernels are for {', '.join(tuner.family.archs)}; the device is {arch} "
            "(HIPFORGE_DEVICE, HIPFORGE_EMULATE)"
        )
    return arch


def _search(tuner: Tuner[C, O], cell: C, arch: str, on_gpu: bool) -> tuple[list[Trial], str, Baselines]:
    """Return a cell's trials, fastest first, the source of their times, and what there is to beat."""
    found = tuner.candidates(cell, arch)
    if on_gpu:  # the bound is of the model's times, not of measured ones
        measured = Measured(tuner, cell, arch, torch.device("cuda", 0))
        return search(measured, found, tuner.max_error), measured.source, measured.baselines()
    lowest = tuner.bound
    bound = None if lowest is None else lambda choice: lowest(choice, cell, MACHINES[arch])
    modelled = Modelled(tuner, cell, arch)
    return search(modelled, found, tuner.max_error, bound=bound), modelled.source, modelled.baselines()


def tune(
    tuner: Tuner[C, O],
    wanted: Sequence[C],
    output: Path,
    *,
    resume: bool = False,
    compare: bool = False,
    min_improvement_pct: float = 3.0,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Tune cells one by one and merge their rows into ``output`` as they are known, at most once a second.

    A cell that ``output`` holds a measured row for is left alone where there is no GPU: a model does not overrule a
    measurement.

    Args:
        tuner: whose kernels.
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
    arch = arch_of_device(tuner)
    on_gpu, cu_num = devices.current().kind == "hip", devices.current().cu_count()
    table = tuner.family.table
    existing = read_existing(table, output)
    pending: list[Row] = []
    written, saved = 0, time.monotonic()
    try:
        for number, cell in enumerate(wanted, 1):
            where = f"[{number}/{len(wanted)}] {cell}"
            old = existing.get(tuner.key(cell, arch, cu_num))
            if resume and old is not None:
                say(f"{where}: already in {output}")
                continue
            if _is_measured(old) and not on_gpu:
                say(f"{where}: {output} has a measured row, which a model does not replace")
                continue
            trials, source, baselines = _search(tuner, cell, arch, on_gpu)
            rejected = [trial for trial in trials if trial.rejected]
            for trial in rejected:
                say(f"    rejected {trial.candidate}: {trial.rejected}")
            if len(rejected) == len(trials):
                raise ConfigError(f"{cell}: no candidate is usable" + (f": {rejected[0].rejected}" if rejected else ""))
            kept = keep_old(tuner, old, trials, min_improvement_pct) if compare else None
            chosen = kept or trials[0]
            row = row_for(tuner, cell, (arch, cu_num), chosen, source, baselines, min_improvement_pct)
            pending.append(row)
            written += 1
            if time.monotonic() - saved > SAVE_EVERY_S:
                merge_rows(output, table, pending)
                saved = time.monotonic()
                pending.clear()
            verdict = "" if row.get("use_hip", 1) else ", fallback is faster"
            say(f"{where}: {chosen.candidate}{' kept' if kept else ''}, {chosen.note}{verdict}")
    finally:
        if pending:
            merge_rows(output, table, pending)
    return written


def command_for(
    tuner: Tuner[C, O], summary: str, options: Sequence[click.Option], wanted: Callable[..., Sequence[C]]
) -> click.Command:
    """Return a family's tuner as a command, ``hipforge tune <family>``.

    Args:
        tuner: the family's.
        summary: the command's help.
        options: those that choose cells.
        wanted: takes their values by name and returns the cells.
    """

    def run(output: Path, resume: bool, compare: bool, min_improvement_pct: float, **chosen: Any) -> None:
        count = tune(
            tuner,
            wanted(**chosen),
            output,
            resume=resume,
            compare=compare,
            min_improvement_pct=min_improvement_pct,
            say=click.echo,
        )
        click.echo(f"{count} rows written to {output}")

    path = click.Path(path_type=Path)
    common: list[click.Parameter] = [
        click.Option(["-o", "--output"], type=path, required=True, help="Table to merge rows into."),
        *options,
        click.Option(
            ["--compare"], is_flag=True, help="Keep the output's configuration unless the new one clearly wins."
        ),
        click.Option(["--min-improvement-pct"], default=3.0, show_default=True, help="What clearly is, in percent."),
        click.Option(["--resume"], is_flag=True, help="Skip cells that the output already has."),
    ]
    return click.Command(tuner.family.table.family, params=common, help=summary, callback=run)
