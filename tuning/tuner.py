"""What a tuner is: an op family with cells, operands and counts; and its cells as problems, modelled or measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import torch

from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.family import Family
from hipforge.ops.core.kernel import choice_of, spelled
from hipforge.ops.core.tuned import Key, Value
from hipforge.tuning import model, timing

Baselines = tuple[float, float] | None
MACHINES: Mapping[str, model.Machine] = MappingProxyType({"gfx942": model.MI300X, "gfx950": model.MI355X})


class Cell(Protocol):
    """One problem size of a tuned table."""

    @property
    def key(self) -> Sequence[int]:
        """Return the size in the order of the table's key columns."""


C = TypeVar("C", bound=Cell)
O = TypeVar("O")  # noqa: E741
Counted = Callable[[Choice], tuple[list[model.Work], float]]


def no_baselines(cell: Any, copies: Sequence[Any]) -> Baselines:
    """Return None: the family has nothing to be compared with."""
    return None


@dataclass(frozen=True)
class Tuner(Generic[C, O]):
    """One op family as the driver sees it; C is its cells' type and O its operands'.

    Attributes:
        family: its table, architectures and candidates.
        max_error: largest relative Frobenius error of a right result.
        default_cells: what is tuned where nothing is asked for.
        cell: makes one of the numbers that :mod:`hipforge.tuning.options` reads.
        operands: data of a cell on an architecture's device, the same on every run.
        expected: the exact result of operands.
        run: launches a candidate on operands and returns the result.
        count: (cell, arch) -> a function from a candidate to its launches, counted on the emulator, and the error of
            the run that they come from.
        copies: operands and how many calls' worth of them to rotate over on a GPU -> so many operands.
        bytes_per_call: bytes that a call reads from its operands.
        columns: a candidate's values of the configuration columns, ``use_hip`` left out, where rows do not name one of
            the family's kernels and its configuration.
        given: values of further columns that the cell decides.
        baselines: microseconds of (stock, best) alternatives over copies of the operands, on a GPU.
        bound: (candidate, cell, machine) -> seconds that the model never goes below, known without running it; where
            there is one, candidates are tried in its order, and a modelled search ends where it passes the best time.
        most_trials: how many candidates are tried at most; None for all.
        modelled: (candidate, cell, arch) -> modelled microseconds of a replayed call with operands in HBM, and its
            bound; by default of a call on ``operands``, of which every work-group runs.
        loop: kernel -> the loop that it runs, which other kernels may share; None if modelled times of one kernel's
            configurations are compared as those of different kernels are.
        problem: a cell as the family's default rule takes it; by default a cell has the sizes that the rule reads.
    """

    family: Family[Any]
    max_error: float
    default_cells: tuple[C, ...]
    cell: Callable[..., C]
    operands: Callable[[C, str, torch.device], O]
    expected: Callable[[C, O], torch.Tensor]
    run: Callable[[Choice, C, O], torch.Tensor]
    count: Callable[[C, str], Counted]
    copies: Callable[[O, int], Sequence[O]]
    bytes_per_call: Callable[[O], int]
    columns: Callable[[Choice], Mapping[str, Value]] | None = None
    given: Callable[[C], Mapping[str, Value]] = lambda cell: {}
    baselines: Callable[[C, Sequence[O]], Baselines] = no_baselines
    bound: Callable[[Choice, C, model.Machine], float] | None = None
    most_trials: int | None = None
    modelled: Callable[[Choice, C, str], tuple[float, str]] | None = None
    loop: Callable[[str], str] | None = None
    problem: Callable[[C], Any] = lambda cell: cell

    def candidates(self, cell: C, arch: str) -> list[Choice]:
        """Return the candidates of a cell: in the bound's order, if there is one, and at most ``most_trials``."""
        found = self.family.choices(cell, arch)
        lowest = self.bound
        if lowest is not None and arch in MACHINES:
            found = sorted(found, key=lambda choice: lowest(choice, cell, MACHINES[arch]))
        return found[: self.most_trials]

    def row_of(self, choice: Choice) -> Mapping[str, Value]:
        """Return the columns of a row that name a choice."""
        if self.columns is not None:
            return self.columns(choice)
        if not self.family.kernels:
            return choice.configuration
        return {"kernel": choice.kernel, "config": spelled(choice.configuration)}

    def names(self, row: Mapping[str, Value], choice: Choice) -> bool:
        """Return whether a row names a choice."""
        if self.family.kernels and self.columns is None:
            return choice_of(self.family.kernels, row) == choice
        return all(row[name] == value for name, value in self.row_of(choice).items())

    def key(self, cell: C, arch: str, cu_num: int) -> Key:
        """Return the key of a cell's row."""
        return (arch, cu_num, *cell.key)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of ``expected``."""
    difference = got.to(torch.float64) - expected.to(torch.float64)
    return float(difference.norm() / expected.to(torch.float64).norm())


class Modelled(Generic[C, O]):
    """A cell whose candidates cost what the model says of their counts on the emulator."""

    def __init__(self, tuner: Tuner[C, O], cell: C, arch: str) -> None:
        self.machine = MACHINES[arch]
        self.source = self.machine.source
        self._count = tuner.count(cell, arch)
        self._launches: list[model.Work] = []
        self.work: dict[str, list[model.Work]] = {}  # by candidate

    def run(self, choice: Choice) -> float:
        """Run and count a candidate and return the relative Frobenius error of its output."""
        self._launches, error = self._count(choice)
        self.work[str(choice)] = self._launches
        return error

    def cost(self, choice: Choice) -> tuple[float, str]:
        """Return the model's seconds for the call that :meth:`run` counted, and the bound of each launch."""
        estimates = [model.estimate(work, self.machine) for work in self._launches]
        return model.total(estimates), " + ".join(f"{item.seconds * 1e6:.2f} ({item.bound})" for item in estimates)


class Measured(Generic[C, O]):
    """A cell whose candidates are timed on the GPU, over rotating copies of its operands."""

    def __init__(self, tuner: Tuner[C, O], cell: C, arch: str, device: torch.device) -> None:
        self.tuner = tuner
        self.cell = cell
        self.source = timing.measured_source(device.index or 0)
        first = tuner.operands(cell, arch, device)
        self.expected = tuner.expected(cell, first)
        self.copies = tuner.copies(first, timing.copies_for(tuner.bytes_per_call(first)))

    def run(self, choice: Choice) -> float:
        """Run once and return the relative Frobenius error of the output."""
        return relative_error(self.tuner.run(choice, self.cell, self.copies[0]), self.expected)

    def cost(self, choice: Choice) -> tuple[float, str]:
        """Return the measured seconds of a call."""
        us = timing.microseconds_per_call(lambda i: self.tuner.run(choice, self.cell, self.copies[i]), len(self.copies))
        return us * 1e-6, f"{us:.2f} us"

    def baselines(self) -> Baselines:
        """Return microseconds of the family's alternatives."""
        return self.tuner.baselines(self.cell, self.copies)
