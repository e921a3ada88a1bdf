"""A kernel as one value, and the table of a family of kernels.

A row of such a table names a kernel and its configuration, as in ``mxfp8_wave_split,rows=16;columns=32;waves=4``: the
raw op and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.checks import require_int
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.tuned import GEMM_SHAPE, USE_HIP, Column, Former, TableSchema, Value

Configuration = Mapping[str, int]
Timed = tuple[float, Configuration]
"""Rough microseconds of a configuration."""


def ceil_div(count: int, by: int) -> int:
    """Return how many parts of a size there are, the last one short."""
    return -(-count // by)


@dataclass(frozen=True)
class Pipeline:
    """How a kernel streams its weight, which the model over counts cannot see.

    Attributes:
        in_flight_bytes: weight bytes that one wave requests ahead, on average over the waves of a work-group.
        restarts: how often a wave fills its pipeline.
        matrix_waves: waves of a work-group that have matrix instructions; None for all of them.
        busiest: the work of the busiest work-group over that of the average one.
    """

    in_flight_bytes: int
    restarts: int = 1
    matrix_waves: int | None = None
    busiest: float = 1.0


@dataclass(frozen=True)
class Kernel:
    """One kernel of a family: all that dispatch, table, tuner and tests know of it.

    Attributes:
        name: of its raw op, which ``explain`` and the rows of the table show.
        archs: architectures that it is built for.
        parameters: each one's name and accepted values, in the order in which the entry takes them.
        launch: (out, operands ..., workspace if it has one, parameters ...) -> None; writes ``out``.
        candidates: (cell, arch) -> configurations that a tuner may try, simplest first: ties go to it.
        pipeline: (configuration, cell, arch) -> how it streams its weight.
        refusal: (configuration, key of a shape, arch) -> what it needs and does not get, or None. The parameters are
            accepted values.
        default: (problem, arch, compute units) -> configurations for a shape without a row, each with its rough time;
            none for a kernel that is never the fastest by the model of time. ``problem`` may be a tuner's cell.
        workspace: (configuration, key of a shape, device) -> the memory that a launch needs; None without.
        loop: of its waves, where other kernels run the same one: modelled times of one loop are compared more closely.
    """

    name: str
    archs: tuple[str, ...]
    parameters: Mapping[str, Sequence[int]]
    launch: Callable[..., None]
    candidates: Callable[[Any, str], Iterable[Configuration]]
    pipeline: Callable[[Configuration, Any, str], Pipeline] | None = None
    refusal: Callable[[Configuration, Sequence[int], str], str | None] = lambda given, key, arch: None
    default: Callable[[Any, str, int], Iterable[Timed]] = lambda problem, arch, cu_count: ()
    workspace: Callable[[Configuration, Sequence[int], torch.device], torch.Tensor | None] | None = None
    loop: str | None = None

    def choice(self, configuration: Configuration) -> Choice:
        """Return the kernel in a configuration, which may name the parameters in any order."""
        return Choice(self.name, MappingProxyType({name: configuration[name] for name in self.parameters}))

    def run(self, configuration: Configuration, key: Sequence[int], out: torch.Tensor, *operands: Any) -> None:
        """Launch it into ``out`` [...] of a shape's key; ``configuration`` is that of a choice."""
        if self.workspace is None:
            self.launch(out, *operands, *configuration.values())
        else:
            self.launch(out, *operands, self.workspace(configuration, key, out.device), *configuration.values())

    def require(self, **configuration: int) -> Configuration:
        """Return a raw op's parameters; raises GuardError for one that is not an accepted value."""
        for name, accepted in self.parameters.items():
            if require_int(name, configuration[name]) not in accepted:
                raise GuardError(f"{name} must be {_listed(accepted)}; got {configuration[name]}")
        return self.choice(configuration).configuration

    def needs(self, configuration: Configuration, key: Sequence[int], arch: str) -> str | None:
        """Return the kernel's requirement that a configuration does not meet for a shape, or None."""
        if arch not in self.archs:
            return f"gfx of {' or '.join(self.archs)}"
        if configuration.keys() != self.parameters.keys():
            return f"config of {';'.join(f'{name}=...' for name in self.parameters)}"
        for name, accepted in self.parameters.items():
            if configuration[name] not in accepted:
                return f"{name} of {_listed(accepted)}"
        return self.refusal(self.choice(configuration).configuration, key, arch)


def _listed(accepted: Sequence[int]) -> str:
    if isinstance(accepted, range):
        step = "" if accepted.step == 1 else f"a multiple of {accepted.step} from "
        return f"{step}{accepted[0]} to {accepted[-1]}"
    *others, last = map(str, accepted)
    return f"{', '.join(others)} or {last}" if others else last


def spelled(configuration: Configuration) -> str:
    """Return a configuration as a row has it.

    Example:
        >>> spelled({"waves": 4, "columns": 32})
        'waves=4;columns=32'
    """
    return ";".join(f"{name}={value}" for name, value in configuration.items())


def parsed(text: str) -> Configuration:
    """Return the configuration that a row spells; raises ValueError with the reason.

    Example:
        >>> parsed("waves=4; columns=32")
        {'waves': 4, 'columns': 32}
    """
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if not number.isascii() or not number.isdigit() or len(number) > 18 or name in found:
            raise ValueError(f"column config must read name=number;name=number ..., each name once; got {text!r}")
        found[name] = int(number)
    return found


def choice_of(kernels: Sequence[Kernel], values: Mapping[str, Value]) -> Choice:
    """Return the kernel and configuration that a row's values name."""
    kernel = next(kernel for kernel in kernels if kernel.name == values["kernel"])
    return kernel.choice(parsed(str(values["config"] or "")))


def best(kernels: Sequence[Kernel], problem: Any, arch: str, cu_count: int) -> Choice:
    """Return the kernel and configuration with the least rough time, the first of equals: the default rule."""
    timed = [
        (us, kernel, configuration)
        for kernel in kernels
        if arch in kernel.archs
        for us, configuration in kernel.default(problem, arch, cu_count)
    ]
    _, kernel, configuration = min(timed, key=lambda one: one[0])
    return kernel.choice(configuration)


def kernel_table(
    family: str,
    kernels: Sequence[Kernel],
    *,
    shape: tuple[Column, ...] = GEMM_SHAPE,
    extra_key: tuple[Column, ...] = (),
    more: tuple[Column, ...] = (USE_HIP,),
    formers: tuple[Former, ...] = (),
) -> TableSchema:
    """Return the schema of a table whose rows name one of ``kernels`` and its configuration.

    Args:
        family: the table's name.
        kernels: of the family.
        shape: key columns after ``gfx,cu_num``.
        extra_key: key columns after those.
        more: columns after ``kernel`` and ``config``.
        formers: earlier formats that are still read.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    key_names = [column.name for column in (*shape, *extra_key)]

    def check(values: Mapping[str, Value]) -> str | None:
        text = str(values["config"] or "")
        try:
            configuration = parsed(text)
        except ValueError as error:
            return str(error)
        key = [int(values[name] or 0) for name in key_names]
        needed = by_name[str(values["kernel"])].needs(configuration, key, str(values["gfx"]))
        if needed is None:
            return None
        given = ", ".join([f"config={text or 'nothing'}", *(f"{name}={values[name]}" for name in ("gfx", *key_names))])
        return f"a row of {values['kernel']} needs {needed}; got {given}"

    config = (Column("kernel", str, accepted=tuple(by_name)), Column("config", str, optional=True), *more)
    return TableSchema(family, config, shape=shape, extra_key=extra_key, check=check, formers=formers)
