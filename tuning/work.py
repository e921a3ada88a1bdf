"""One cell's search, apart from any table: what a worker does, in this process or in another one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hipforge import devices, ops
from hipforge.errors import ConfigError, EmulatorFault, HipforgeError
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.tuned import Value
from hipforge.tuning.search import Trial, search
from hipforge.tuning.shortlist import tie_band, time_trials
from hipforge.tuning.table_writer import Row
from hipforge.tuning.tuner import MACHINES, Baselines, C, Measured, Modelled, O, Tuner


@dataclass(frozen=True)
class Task:
    """A cell to tune.

    Attributes:
        family: name of the table whose tuner it is.
        cell: the problem size.
        device: architecture and number of compute units.
        on_gpu: whether candidates are measured.
        old: the row that the table has.
        compare: keep the old row's configuration unless another one is faster by ``min_improvement_pct``, or, of
            modelled times, by more than the model's error.
        min_improvement_pct: least gain, in percent, that replaces the old row's configuration.
        gains_only: take the default rule's configuration unless another one is faster by so much.
    """

    family: str
    cell: Any
    device: tuple[str, int]
    on_gpu: bool
    old: Mapping[str, Value] | None = None
    compare: bool = False
    min_improvement_pct: float = 3.0
    gains_only: bool = False


@dataclass(frozen=True)
class Done:
    """The outcome of a task: a row or the error, log lines (the last is the verdict), all trials, best first."""

    row: Row | None
    lines: list[str] = field(default_factory=list)
    error: str | None = None
    trials: Sequence[Trial] = ()
    chosen: Trial | None = None


def tuner_of(family: str) -> Tuner[Any, Any]:
    """Return the tuner of a table's family.

    Raises:
        ConfigError: there is no such family.
    """
    homes = ops.families()
    if family not in homes:
        raise ConfigError(f"no op family has a table {family!r}; there are {', '.join(homes)}")
    found: Tuner[Any, Any] = importlib.import_module(f"hipforge.tuning.families.{homes[family]}").TUNER
    return found


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
        **tuner.row_of(trial.candidate),
        **tuner.given(cell),
        "us": us,
        "model_us": None if measured else trial.model_us,
        "stock_us": stock_us,
        "best_baseline_us": best_us,
        "err": trial.error,
        "source": source,
    }
    return {**row, "use_hip": int(wins)} if "use_hip" in table.header else row


def keep_old(
    tuner: Tuner[C, O],
    old: Mapping[str, Value] | None,
    trials: list[Trial],
    least_gain: Callable[[Choice, Choice], float],
) -> Trial | None:
    """Return the trial of the configuration that ``old`` names, unless the best one beats it by the least gain."""
    if old is None or trials[0].seconds is None:
        return None
    for trial in trials:
        if tuner.names(old, trial.candidate) and trial.seconds is not None:
            gain = least_gain(trial.candidate, trials[0].candidate)
            return trial if trial.seconds <= trials[0].seconds * (1 + gain) else None
    return None


def _search(tuner: Tuner[C, O], task: Task) -> tuple[list[Trial], str, Baselines]:
    """Return a cell's trials, the choice first, the source of their times, and what there is to beat."""
    cell, arch = task.cell, task.device[0]
    found, rule = tuner.candidates(cell, arch), _default(tuner, task)
    if isinstance(rule, Choice) and rule not in found and tuner.bound is None:  # a bound's order is the candidates' own
        found = [rule, *found]
    if task.on_gpu:  # the bound is of the counts' model, not of measured times
        measured = Measured(tuner, cell, arch, torch.device("cuda", 0))
        return search(measured, found, tuner.max_error), measured.source, measured.baselines()
    lowest = tuner.bound
    bound = None if lowest is None else lambda choice: lowest(choice, cell, MACHINES[arch])
    counted = Modelled(tuner, cell, arch)
    trials = search(counted, found, tuner.max_error, bound=bound)
    old = task.old if task.compare else None
    timed, source = time_trials(
        tuner, cell, arch, counted, trials,
        lambda choice: choice == rule or (old is not None and tuner.names(old, choice)),
    )  # fmt: skip
    return timed, source, None


def _default(tuner: Tuner[C, O], task: Task) -> Choice | str:
    """Return what the family's default rule takes for a cell, or why it takes nothing."""
    return tuner.family.default_choice(tuner.problem(task.cell), *task.device)


def _gain(rule: Choice | str, chosen: Trial, trials: Sequence[Trial], baselines: Baselines) -> str:
    """Return in words a chosen trial's gain over the default rule, or over the baselines if the rule has no kernel."""
    if chosen.candidate == rule:
        return "as the default rule"
    if isinstance(rule, str):
        if baselines is None or not chosen.seconds:
            return f"the default rule has no kernel ({rule}): without this row no kernel runs"
        faster = baselines[1] / (chosen.seconds * 1e6)
        return f"{faster:.2f} x as fast as the best of the other ways; the default rule has no kernel ({rule})"
    of_rule = next((trial for trial in trials if trial.candidate == rule), None)
    comparable = of_rule is not None and (of_rule.model_us is None) == (chosen.model_us is None)
    if of_rule is None or not comparable or not of_rule.seconds or not chosen.seconds:
        return f"not compared with the default rule's {rule}"
    return f"{of_rule.seconds / chosen.seconds:.2f} x as fast as the default rule's {rule}"


def tune_cell(task: Task, tuner: Tuner[Any, Any] | None = None) -> Done:
    """Search one cell; a failure is returned as an error, so that other cells continue.

    Args:
        task: the cell.
        tuner: by default the family's own.
    """
    with_tuner = tuner or tuner_of(task.family)
    lines: list[str] = []
    try:
        trials, source, baselines = _search(with_tuner, task)
    except EmulatorFault:  # nothing after one can be trusted
        raise
    except HipforgeError as error:
        return Done(None, lines, f"{task.cell}: {type(error).__name__}: {error}")
    rejected = [trial for trial in trials if trial.rejected]
    lines += [f"    rejected {trial.candidate}: {trial.rejected}" for trial in rejected]
    if len(rejected) == len(trials):
        reason = f": {rejected[0].rejected}" if rejected else ""
        return Done(None, lines, f"{task.cell}: no candidate is usable{reason}")

    def least_gain(old: Choice, new: Choice) -> float:  # modelled times that tie are no gain
        tie = 0.0 if task.on_gpu else tie_band(with_tuner, task.device[0], old, new)
        return max(task.min_improvement_pct / 100, tie)

    kept = keep_old(with_tuner, task.old, trials, least_gain) if task.compare else None
    rule = _default(with_tuner, task)
    if kept is None and task.gains_only and isinstance(rule, Choice):
        kept = keep_old(with_tuner, with_tuner.row_of(rule), trials, least_gain)
    chosen = kept or trials[0]
    row = row_for(with_tuner, task.cell, task.device, chosen, source, baselines, task.min_improvement_pct)
    verdict = "" if row.get("use_hip", 1) else ", fallback is faster"
    gain = _gain(rule, chosen, trials, baselines)
    lines.append(f"{chosen.candidate}{' kept' if kept else ''}, {chosen.note}; {gain}{verdict}")
    return Done(row, lines, trials=trials, chosen=chosen)


def tune_cell_elsewhere(task: Task) -> Done:
    """Do a task in a process that has nothing else to do: it emulates the task's architecture on one core."""
    os.environ["HIPFORGE_DEVICE"], os.environ["HIPFORGE_EMULATE"] = "emulator", task.device[0]
    torch.set_num_threads(1)
    found = devices.current()
    if found.kind != "emulator" or found.arch_of() != task.device[0]:
        return Done(None, [], f"{task.cell}: the worker's device is {found}, not an emulated {task.device[0]}")
    return tune_cell(task)
