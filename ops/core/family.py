"""A tuned op family as one value, and the pipeline that decides for it: envelope, tuned row, default rule.

A family's ``Problem`` is a frozen dataclass with all that a decision depends on: sizes, dtypes, flags and the device,
never tensors. :meth:`Family.decide` turns it into a Decision; :meth:`Family.decide_total` adds the fallbacks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import torch

from hipforge.ops.core import dispatch, invariance
from hipforge.ops.core.dispatch import Accepted, Choice, Decision, PathName, Refused
from hipforge.ops.core.kernel import Kernel, best, choice_of
from hipforge.ops.core.lookup import find_row
from hipforge.ops.core.tuned import TableSchema, TunedRow


class Problem(Protocol):
    """What a decision depends on."""

    @property
    def device(self) -> torch.device:
        """Return where the operands are."""

    @property
    def key(self) -> Sequence[int]:
        """Return the shape as the key columns of the family's table have it."""


P = TypeVar("P", bound=Problem)


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


@dataclass(frozen=True)
class Family(Generic[P]):
    """One op family: its table, its envelope, and the choice of a kernel.

    Attributes:
        problem: makes a call's problem from the op's arguments, given by name; further ones are dropped. Raises
            GuardError for operands that no path takes.
        table: the schema of its tuned table, with the range that a row covers.
        archs: architectures that it has kernels for.
        envelope: why the kernels do not take a problem on an architecture, or None.
        kernels: what it chooses from, simplest first.
        default: the choice without a tuned row, for (problem, arch, compute units), or why there is none; by default
            that of least rough time.
        candidates: a tuner's choices for a cell on an architecture, if they differ from the kernels' own.
        reference: the name of the torch function, the last resort.
        triton: the Triton path for a problem, or why it does not apply; None for a family that has none.
        row_refusal: why a row that was found does not apply to a problem, or None.
        without_triton: (problem, arch, compute units) -> the choice of a total op where the table or the default rule
            leaves a problem to Triton, and there is no Triton: perhaps slower than that, but far faster than torch.
            None for a family whose default rule takes the whole envelope.
        invariant: (problem, arch, compute units) -> the choice under :func:`hipforge.batch_invariant`: an order of sums
            that no size of the batch changes; None for a problem whose caller requires another.
        demanded: (problem, arch, compute units) -> the caller's own choice and its reason, which precede the table; or
            None.
        adjust: (problem, arch, choice, reason) -> the choice and its reason with the caller's own parameters in it;
            raises GuardError for those that the kernel does not have.
    """

    problem: Callable[..., P]
    table: TableSchema
    archs: tuple[str, ...]
    envelope: Callable[[P, str], str | None]
    reference: str
    kernels: tuple[Kernel, ...] = ()
    default: Callable[[P, str, int], Choice | str] | None = None
    candidates: Callable[[Any, str], list[Choice]] | None = None
    triton: Callable[[P], Accepted | Refused] | None = None
    row_refusal: Callable[[P, TunedRow], str | None] = lambda problem, row: None
    without_triton: Callable[[P, str, int], Choice] | None = None
    invariant: Callable[[P, str, int], Choice | None] | None = None
    demanded: Callable[[P, str, int], tuple[Choice, str] | None] | None = None
    adjust: Callable[[P, str, Choice, str], tuple[Choice, str]] = lambda problem, arch, choice, reason: (choice, reason)

    def plan(self, **given: Any) -> Decision:
        """Return the decision of an op that may return None, called with the arguments given."""
        return self.decide(self._problem(given))

    def plan_total(self, **given: Any) -> Decision:
        """Return the decision of an op that always computes, called with the arguments given."""
        return self.decide_total(self._problem(given))

    def _problem(self, given: Mapping[str, Any]) -> P:
        known = _parameters(self.problem)
        return self.problem(**{name: value for name, value in given.items() if name in known})

    def kernel(self, name: str) -> Kernel:
        """Return the kernel of a name."""
        return next(kernel for kernel in self.kernels if kernel.name == name)

    def choices(self, cell: Any, arch: str) -> list[Choice]:
        """Return a tuner's choices for a cell on an architecture, simplest first: ties go to the first."""
        if self.candidates is not None:
            return self.candidates(cell, arch)
        able = (kernel for kernel in self.kernels if arch in kernel.archs)
        return [kernel.choice(given) for kernel in able for given in kernel.candidates(cell, arch)]

    def default_choice(self, problem: Any, arch: str, cu_count: int) -> Choice | str:
        """Return the choice of a problem, or of a cell with its sizes, without a tuned row; or why there is none."""
        return (self.default or functools.partial(best, self.kernels))(problem, arch, cu_count)

    def choice_of(self, row: TunedRow) -> Choice:
        """Return the choice that a row names."""
        return choice_of(self.kernels, row.values)

    def decide(self, problem: P) -> Decision:
        """Return the kernel that runs a problem, or why none does."""
        outcome = self._decide(problem)
        return Decision(outcome) if isinstance(outcome, Accepted) else Decision(None, (outcome,))

    def _decide(self, problem: P) -> Accepted | Refused:
        target = dispatch.target_of(problem.device)
        if isinstance(target, Refused):
            return target
        arch, cu_count = target
        if arch not in self.archs:
            return Refused("kernel", f"the kernels are for {', '.join(self.archs)}; the device is {arch}")
        reason = self.envelope(problem, arch)
        if reason is not None:
            return Refused("kernel", reason)
        fixed = self.invariant(problem, arch, cu_count) if invariance.STATE.on and self.invariant else None
        if fixed is not None:
            choice, why = self.adjust(problem, arch, fixed, invariance.REASON)
            return Accepted("kernel", choice.kernel, choice.configuration, why, None, problem)
        demanded = None if self.demanded is None else self.demanded(problem, arch, cu_count)
        if demanded is not None:
            return Accepted("kernel", demanded[0].kernel, demanded[0].configuration, demanded[1], None, problem)
        row, why = find_row(self.table, arch, cu_count, problem.key)
        if row is None:
            default = self.default_choice(problem, arch, cu_count)
            if isinstance(default, str):
                return Refused("kernel", default)
            choice, why = default, f"{why}; the default rule"
        else:
            if row.values.get("use_hip") == 0:
                return Refused("kernel", f"{why} routes this shape to the fallback (use_hip=0)", row)
            refusal = self.row_refusal(problem, row)
            if refusal is not None:
                return Refused("kernel", f"{why} {refusal}", row)
            choice = self.choice_of(row)
        choice, why = self.adjust(problem, arch, choice, why)
        return Accepted("kernel", choice.kernel, choice.configuration, why, row, problem)

    def _without_triton(self, problem: P) -> Accepted | None:
        target = dispatch.target_of(problem.device)
        if self.without_triton is None or isinstance(target, Refused):
            return None
        arch, cu_count = target
        if arch not in self.archs or self.envelope(problem, arch) is not None:
            return None
        choice = self.without_triton(problem, arch, cu_count)
        why = "the table and the default rule leave this shape to Triton, which is not there"
        return Accepted("kernel", choice.kernel, choice.configuration, why, None, problem)

    def decide_total(self, problem: P) -> Decision:
        """Return the path of a function that always computes: the kernel, else Triton, else torch."""
        kernel = self.decide(problem)
        below: tuple[PathName, ...] = ("torch",) if self.triton is None else ("triton", "torch")
        if kernel.accepted is not None:
            return Decision(kernel.accepted, tuple(Refused(path, "the kernel takes this call") for path in below))
        refused = kernel.refused
        if self.triton is not None:
            triton = self.triton(problem)
            if isinstance(triton, Accepted):
                return Decision(triton, (*refused, Refused("torch", "Triton runs on this device")))
            refused = (*refused, triton)
        only = self._without_triton(problem)
        if only is not None:
            return Decision(only, (*refused, Refused("torch", "the kernel takes this call")))
        reason = "no kernel applies" if self.triton is None else "neither the kernel nor Triton applies"
        return Decision(Accepted("torch", self.reference, MappingProxyType({}), reason), refused)
