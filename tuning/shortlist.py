"""Choose by the model of time among the candidates that exact counts put first.

The counts of :mod:`hipforge.tuning.model` cost one run of the emulator per candidate, the model of time
(docs/time-model.md) several. So it sees the best candidate of every kernel and the next ones in the counts' order. Two
modelled times that differ by less than the model's error are a tie: fewer instructions decide it, then the fuller grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hipforge.emulator.timing import Capture, estimate
from hipforge.emulator.timing.context import gpu_of
from hipforge.emulator.timing.machines import MACHINES
from hipforge.emulator.timing.model import ERROR_BAND
from hipforge.ops.core.dispatch import Choice
from hipforge.tuning.search import Trial
from hipforge.tuning.tuner import C, Modelled, O, Tuner

MOST_TIMED = 5
WITHIN = 1.6
"""Candidates whose counted cost is above this much of the best one are not timed, except the best of each kernel
(assumption: the counts are not further off within one kernel)."""


@dataclass(frozen=True)
class Contender:
    """A candidate as the tie rule sees it.

    Attributes:
        trial: with the modelled time.
        instructions: wave-instructions of all its launches.
        fill: share of the compute units' last round of work-groups that its first launch fills, 0 to 1.
    """

    trial: Trial
    instructions: int
    fill: float


def select(trials: Sequence[Trial], keep: Callable[[Choice], bool] = lambda choice: False) -> list[Trial]:
    """Return the trials that are worth timing, in their order.

    Args:
        trials: fastest first by their counts; rejected ones are left out.
        keep: candidates that are timed in any case.
    """
    usable = [trial for trial in trials if trial.seconds is not None]
    chosen: list[Trial] = []
    for number, trial in enumerate(usable):
        first_of_kernel = all(other.candidate.kernel != trial.candidate.kernel for other in usable[:number])
        close = len(chosen) < MOST_TIMED and (trial.seconds or 0.0) <= WITHIN * (usable[0].seconds or 0.0)
        if first_of_kernel or close or keep(trial.candidate):
            chosen.append(trial)
    return chosen


def order(contenders: Sequence[Contender], band: float) -> list[Trial]:
    """Return the trials, the choice first: ties with the fastest by instructions and fill, then the rest by time."""

    def us(contender: Contender) -> float:
        return contender.trial.model_us or 0.0

    fastest = min(map(us, contenders))
    ties = [contender for contender in contenders if us(contender) <= fastest * (1 + band)]
    rest = [contender for contender in contenders if us(contender) > fastest * (1 + band)]
    ties.sort(key=lambda contender: (contender.instructions, -contender.fill, us(contender)))
    return [contender.trial for contender in [*ties, *sorted(rest, key=us)]]


def _modelled_on_operands(tuner: Tuner[C, O], cell: C, arch: str) -> Callable[[Choice, C, str], tuple[float, str]]:
    parts: Any = tuner.operands(cell, arch, torch.device("cpu"))

    def modelled(choice: Choice, cell: C, arch: str) -> tuple[float, str]:
        capture = Capture()
        with capture.recording():
            tuner.run(choice, cell, parts)
        timing = estimate(capture, gpu_of(arch), "cold")
        return timing.replay_us, timing.bound

    return modelled


def time_trials(
    tuner: Tuner[C, O],
    cell: C,
    arch: str,
    counted: Modelled[C, O],
    trials: Sequence[Trial],
    keep: Callable[[Choice], bool] = lambda choice: False,
) -> tuple[list[Trial], str]:
    """Return trials in the order of the model of time, those that it did not see behind, and the rows' source.

    The time is that of calls back to back in a graph with operands from HBM, which is what a GPU would measure.

    Args:
        tuner: whose kernels.
        cell: the problem.
        arch: the emulated architecture.
        counted: with the counts of every trial.
        trials: fastest first by their counts, rejected ones last.
        keep: candidates that are timed in any case.
    """
    gpu = MACHINES[gpu_of(arch)]
    source = f"model:{gpu.version}"
    chosen = select(trials, keep)
    if not chosen:
        return list(trials), source
    modelled = tuner.modelled or _modelled_on_operands(tuner, cell, arch)
    contenders = []
    for trial in chosen:
        us, bound = modelled(trial.candidate, cell, arch)
        work = counted.work[str(trial.candidate)]
        groups = work[0].workgroups
        contenders.append(
            Contender(
                replace(trial, seconds=us * 1e-6, model_us=us, note=f"modelled {us:.2f} us ({bound})"),
                sum(item.instructions for item in work),
                groups / (-(-groups // gpu.cu_count) * gpu.cu_count),
            )
        )
    ordered = order(contenders, ERROR_BAND[arch])
    return [*ordered, *(trial for trial in trials if trial not in chosen)], source
