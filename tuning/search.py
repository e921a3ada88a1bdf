"""Try every configuration of a cell, reject what is wrong, rank the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from hipforge.errors import BuildError, GuardError
from hipforge.ops.core.dispatch import Choice

Candidate = Choice


@dataclass(frozen=True)
class Trial:
    """The outcome of one candidate.

    Attributes:
        candidate: which.
        seconds: measured or modelled time; None if it was rejected.
        error: relative Frobenius error of its output; None if there was none.
        rejected: why it cannot be chosen, or None.
        note: what the time is made of, for the log.
        model_us: microseconds by the model of time, where it saw the candidate.
    """

    candidate: Candidate
    seconds: float | None = None
    error: float | None = None
    rejected: str | None = None
    note: str = ""
    model_us: float | None = None


class Problem(Protocol):
    """One cell's operands and the result they should give."""

    def run(self, candidate: Candidate) -> float:
        """Run once and return the relative Frobenius error of the output."""

    def cost(self, candidate: Candidate) -> tuple[float, str]:
        """Return the seconds of a call and a note on them."""


def try_candidate(problem: Problem, candidate: Candidate, max_error: float) -> Trial:
    """Run, check and cost one candidate; one that cannot be built or run, or is wrong, is rejected.

    A build that exceeds the module's ``resource_limits`` is a rejection like any other failed build; device faults
    are not caught, because nothing after one can be trusted.
    """
    try:
        error = problem.run(candidate)
    except (BuildError, GuardError) as refusal:
        return Trial(candidate, rejected=f"{type(refusal).__name__}: {refusal}")
    if not error <= max_error:  # a NaN is wrong too
        return Trial(candidate, error=error, rejected=f"wrong result: relative error {error:.3g} > {max_error:g}")
    seconds, note = problem.cost(candidate)
    return Trial(candidate, seconds, error, note=note)


def search(
    problem: Problem,
    candidates: Iterable[Candidate],
    max_error: float,
    report: Callable[[Trial], None] = lambda trial: None,
    bound: Callable[[Candidate], float] | None = None,
) -> list[Trial]:
    """Return every candidate's trial, fastest first and rejected ones last; equal times keep their order.

    Args:
        problem: the cell.
        candidates: what to try.
        max_error: largest relative error of a right result.
        report: called with each trial as it is made.
        bound: seconds that a candidate's cost cannot go below, known without running it; candidates must be in its
            order. The search ends at the first one whose bound is above the best cost so far.
    """
    trials = []
    best = math.inf
    for candidate in candidates:
        if bound is not None and bound(candidate) > best:
            break
        trial = try_candidate(problem, candidate, max_error)
        report(trial)
        trials.append(trial)
        best = min(best, math.inf if trial.seconds is None else trial.seconds)
    return sorted(trials, key=lambda trial: math.inf if trial.seconds is None else trial.seconds)
