"""Choose by the model of time among the candidates that exact counts put first.

The counts of :mod:`hipforge.tuning.model` cost one run of the emulator per candidate, the model of time
(docs/time-model.md) several. So it sees the best candidate of every kernel and the next ones in the counts' order. Two
modelled times that differ by less than the model's error are a tie: fewer launches decide it, then fewer instructions,
then the fuller grid.

A tuner may name the loop that a kernel runs (:attr:`~hipforge.tuning.tuner.Tuner.loop`). The model's error is then
mostly the same for all configurations of a loop: every one of a loop that may win is timed, and a tie among them is a
difference of at most WITHIN_LOOP. Loops are compared by the fastest of each.
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
WITHIN_LOOP = 0.03
"""Times of one loop's configurations that differ by no more are a tie (assumption; measured gains count from there)."""


@dataclass(frozen=True)
class Contender:
    """A candidate as the tie rule sees it.

    Attributes:
        trial: with the modelled time.
        launches: kernels of a call.
        instructions: wave-instructions of all its launches.
        fill: share of the compute units' last round of work-groups that its first launch fills, 0 to 1.
    """

    trial: Trial
    launches: int
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


def _us(contender: Contender) -> float:
    return contender.trial.model_us or 0.0


def _in_a_tie(contender: Contender) -> tuple[int, int, float, float]:
    return contender.launches, contender.instructions, -contender.fill, _us(contender)


def _decided(contenders: Sequence[Contender], band: float) -> list[Contender]:
    fastest = min(map(_us, contenders))
    ties = [contender for contender in contenders if _us(contender) <= fastest * (1 + band)]
    rest = [contender for contender in contenders if _us(contender) > fastest * (1 + band)]
    return [*sorted(ties, key=_in_a_tie), *sorted(rest, key=_us)]


def order(contenders: Sequence[Contender], band: float, loop: Callable[[str], str] | None = None) -> list[Trial]:
    """Return the trials, the choice first: ties with the fastest by launches, instructions and fill, the rest by time.

    Args:
        contenders: all that were timed.
        band: relative difference of two kernels' times that is a tie.
        loop: kernel -> the loop that it runs; where given, each loop's choice is made first, with WITHIN_LOOP, and of
            the loops whose fastest is within ``band`` of the fastest of all, one choice is taken as in any tie.
    """
    if loop is None:
        return [contender.trial for contender in _decided(contenders, band)]
    by_loop: dict[str, list[Contender]] = {}
    for contender in contenders:
        by_loop.setdefault(loop(contender.trial.candidate.kernel), []).append(contender)
    fastest = min(map(_us, contenders))
    may_win = [members for members in by_loop.values() if min(map(_us, members)) <= fastest * (1 + band)]
    first = sorted((_decided(members, WITHIN_LOOP)[0] for members in may_win), key=_in_a_tie)
    rest = [contender for contender in contenders if contender not in first]
    return [contender.trial for contender in [*first, *sorted(rest, key=_us)]]


def tie_band(tuner: Tuner[Any, Any], arch: str, one: Choice, other: Choice) -> float:
    """Return how much the modelled times of two candidates may differ and still be a tie."""
    loop = tuner.loop
    return WITHIN_LOOP if loop is not None and loop(one.kernel) == loop(other.kernel) else ERROR_BAND[arch]


def modelled_on_operands(tuner: Tuner[C, O], cell: C, arch: str) -> Callable[[Choice, C, str], tuple[float, str]]:
    """Return a function that models a candidate on the cell's operands: microseconds of a replay, and its bound."""
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
    modelled = tuner.modelled or modelled_on_operands(tuner, cell, arch)

    def timed(trial: Trial) -> Contender:
        us, bound = modelled(trial.candidate, cell, arch)
        note = f"replayed in a graph {us:.2f} us, modelled (bound: {bound})"
        work = counted.work[str(trial.candidate)]
        groups = work[0].workgroups
        return Contender(
            replace(trial, seconds=us * 1e-6, model_us=us, note=note),
            len(work),
            sum(item.instructions for item in work),
            groups / (-(-groups // gpu.cu_count) * gpu.cu_count),
        )

    contenders = [timed(trial) for trial in chosen]
    band = ERROR_BAND[arch]
    if tuner.loop is not None:
        fastest = min(map(_us, contenders))
        may_win = {tuner.loop(one.trial.candidate.kernel) for one in contenders if _us(one) <= fastest * (1 + band)}
        more = [trial for trial in trials if trial.seconds is not None and trial not in chosen]
        more = [trial for trial in more if tuner.loop(trial.candidate.kernel) in may_win]
        contenders += [timed(trial) for trial in more]
        chosen += more
    ordered = order(contenders, band, tuner.loop)
    return [*ordered, *(trial for trial in trials if trial not in chosen)], source
