"""Tune the cells of an op family into a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hipforge import devices, plots
from hipforge.errors import ConfigError
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.lookup import row_in
from hipforge.ops.core.tuned import Key, TunedRow, TunedTable, Value, in_effect
from hipforge.tuning import pool
from hipforge.tuning.table_writer import Row, merge_rows, read_existing, require_writable
from hipforge.tuning.tuner import C, O, Tuner
from hipforge.tuning.work import Done, Task, tune_cell

SAVE_EVERY_S = 1.0  # merging reads and checks the whole table


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


def tune(
    tuner: Tuner[C, O],
    wanted: Sequence[C],
    output: Path,
    *,
    resume: bool = False,
    compare: bool = False,
    min_improvement_pct: float = 3.0,
    gains_only: bool = False,
    workers: int = 1,
    ray: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    picture: Path | None = None,
) -> int:
    """Tune cells and merge their rows into ``output`` as they are known, at most once a second.

    A cell that ``output`` holds a measured row for is left alone where there is no GPU: a model does not overrule a
    measurement. Rows are merged under the table's lock, so that several tuners may write one table.

    Args:
        tuner: whose kernels.
        wanted: the cells.
        output: the table; rows of other cells stay.
        resume: skip cells that ``output`` already has a row for.
        compare: keep the configuration that ``output`` has unless the new one is faster by ``min_improvement_pct`` (or
            by more than the error of modelled times).
        min_improvement_pct: see :func:`hipforge.tuning.work.row_for` and ``compare``.
        gains_only: take the default rule's configuration where no other one is faster by as much as ``compare`` asks
            for, and at the end take out the cells' rows that say what dispatch does without them.
        workers: processes that search cells side by side; 1 for this process alone.
        ray: address of a Ray cluster that searches them instead.
        say: takes progress, one line at a time.
        picture: where to draw the candidates' times, of the cells that were searched (needs matplotlib).

    Returns:
        How many rows were written and stay.

    Raises:
        ConfigError: the device has no such kernels, ``output`` is malformed or cannot be written, several processes are
            to share a GPU, or a cell could not be tuned; rows of the other cells are written first.
    """
    arch = arch_of_device(tuner)
    on_gpu, cu_num = devices.current().is_gpu, devices.current().cu_count()
    if on_gpu and (workers > 1 or ray is not None):
        raise ConfigError("--workers and --ray are for the emulator: measurements on one GPU would disturb each other")
    require_writable(output)
    existing = read_existing(tuner.family.table, output)
    tasks: list[Task] = []
    places: list[int] = []
    for place, cell in enumerate(wanted, 1):
        old = existing.get(tuner.key(cell, arch, cu_num))
        if resume and old is not None:
            say(f"[{place}/{len(wanted)}] {cell}: already in {output}")
        elif _is_measured(old) and not on_gpu:
            say(f"[{place}/{len(wanted)}] {cell}: {output} has a measured row, which a model does not replace")
        else:
            tasks.append(
                Task(
                    tuner.family.table.family,
                    cell,
                    (arch, cu_num),
                    on_gpu,
                    old,
                    compare,
                    min_improvement_pct,
                    gains_only,
                )
            )
            places.append(place)
    if ray is not None:
        results = pool.ray_cluster(tasks, ray)
    elif workers > 1:
        results = pool.processes(tasks, workers)
    else:
        results = pool.here(tasks, lambda task: tune_cell(task, tuner))
    pending: list[Row] = []
    failed: list[str] = []
    landscapes: list[tuple[int, plots.Landscape]] = []
    written: set[Key] = set()
    saved = time.monotonic()
    try:
        for finished, (number, done) in enumerate(results, 1):
            for line in done.lines[:-1] if done.row else done.lines:
                say(line)
            where = f"[{places[number]}/{len(wanted)}] {tasks[number].cell}"
            progress = f" ({finished} of {len(tasks)} done)" if workers > 1 or ray is not None else ""
            if done.row is None:
                failed.append(done.error or str(tasks[number].cell))
                say(f"{where}: failed{progress}")
                continue
            pending.append(done.row)
            if picture is not None:
                landscapes.append((places[number], landscape(str(tasks[number].cell), done)))
            written.add(tuner.key(tasks[number].cell, arch, cu_num))
            if time.monotonic() - saved > SAVE_EVERY_S:
                merge_rows(output, tuner.family.table, pending)
                saved = time.monotonic()
                pending.clear()
            say(f"{where}: {done.lines[-1]}{progress}")
    finally:
        if pending:
            merge_rows(output, tuner.family.table, pending)
    if gains_only:
        needless = _needless(tuner, wanted, read_existing(tuner.family.table, output), (arch, cu_num))
        merge_rows(output, tuner.family.table, (), needless)
        written.difference_update(needless)
        say(f"{len(needless)} rows taken out: dispatch does the same without them")
    if picture is not None:
        plots.landscapes([one for _, one in sorted(landscapes, key=lambda item: item[0])], picture)
    if failed:
        raise ConfigError("\n".join(failed))
    return len(written)


def _needless(
    tuner: Tuner[C, O], wanted: Sequence[C], rows: Mapping[Key, Mapping[str, Value]], device: tuple[str, int]
) -> list[Key]:
    """Return the keys of cells whose rows another row, or the default rule, would say; largest M first.

    Measured rows stay: their times are evidence.
    """
    schema = tuner.family.table
    left = {key: TunedRow(key, MappingProxyType(dict(row)), Path(), 0) for key, row in rows.items()}
    found = []
    for cell in sorted(wanted, key=lambda cell: tuner.key(cell, *device)[2], reverse=True):
        key = tuner.key(cell, *device)
        own = left.pop(key, None)
        if own is None:
            continue
        others = TunedTable(schema, left.values())
        other, _ = row_in(others, *device, [int(part) for part in key[2:]])
        if other is None:
            with in_effect(others):  # a rule may look at where a shape's rows end
                rule = tuner.family.default_choice(tuner.problem(cell), *device)
            same = isinstance(rule, Choice) and tuner.names(own.values, rule) and own.values.get("use_hip", 1) == 1
        else:
            same = all(own.values[column.name] == other.values[column.name] for column in schema.config)
        if same and not _is_measured(own.values):
            found.append(key)
        else:
            left[key] = own
    return found


def landscape(cell: str, done: Done) -> plots.Landscape:
    """Return a search's times for a picture: measured times, else modelled ones.

    Where the model of time saw only some candidates, only those are shown: times from counts are not comparable with
    its times.
    """
    usable = [trial for trial in done.trials if trial.seconds is not None]
    rejected = len(done.trials) - len(usable)
    source = "" if done.row is None else f" ({done.row['source']})"
    if any(trial.model_us is not None for trial in usable):
        times = sorted((trial.model_us, str(trial.candidate)) for trial in usable if trial.model_us is not None)
    else:
        times = [(trial.seconds * 1e6, str(trial.candidate)) for trial in usable if trial.seconds is not None]
    chosen = "" if done.chosen is None else str(done.chosen.candidate)
    return plots.Landscape(f"{cell}{source}", [(name, us) for us, name in times], chosen, rejected)
