"""The skinny fp8 GEMM as a family: its table, envelope and default rule.

Kernel and configuration are those of the tuned row of the shape, of the tuned row of the next larger m, or of the
default rule. A ``split_k`` of the caller's is the queue kernel's: it replaces the split of its row, or of its own
default rule where another kernel was chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hipforge import archs
from hipforge.errors import ConfigError
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.family import Family
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.kernel import kernel_table, spelled
from hipforge.ops.core.tuned import DEVICE, EVIDENCE, NEXT, USE_HIP, Column, Former, Value, gemm_shape
from hipforge.ops.fp8_skinny_gemm.kernels import (
    KERNELS,
    QUEUE,
    ROW_STREAM,
    SCALED_MM,
    WAVE_SPLIT,
    queue,
    row_stream,
    wave_split,
)
from hipforge.ops.fp8_skinny_gemm.raw import ALIGNMENT, ARCHS, HOPPER, MAX_BYTES, MAX_K, MAX_M, Problem
from hipforge.ops.fp8_skinny_gemm.space import Configuration, require

STREAMED_M = 8  # rows up to which sm_90's own kernel is the faster one


def _now(values: Mapping[str, Value]) -> Mapping[str, Value]:
    kernel, other = (WAVE_SPLIT, QUEUE) if values.get("kernel") == "wave_split" else (QUEUE, WAVE_SPLIT)
    only = other.parameters.keys() - kernel.parameters.keys()
    foreign = [f"{name}={values[name]}" for name in other.parameters if name in only and values.get(name)]
    if foreign:
        raise ValueError(f"a {values['kernel']} row has 0 in the other kernel's columns; got {', '.join(foreign)}")
    given = {name: int(values[name] or 0) for name in kernel.parameters}
    return {**values, "kernel": kernel.name, "config": spelled(given)}


_KERNEL = Column("kernel", str, accepted=("queue", "wave_split"))
_OF_QUEUE, _OF_WAVES = (tuple(Column(name, int, minimum=0) for name in one.parameters) for one in (QUEUE, WAVE_SPLIT))
TABLE = kernel_table(
    "fp8_skinny_gemm",
    KERNELS,
    shape=gemm_shape(NEXT),
    formers=tuple(  # the second from before there were two kernels
        Former((*DEVICE, *gemm_shape(NEXT), *columns, *_OF_QUEUE, USE_HIP, *EVIDENCE), _now)
        for columns in ((_KERNEL, *_OF_WAVES[:-1]), ())
    ),
)


def _envelope(problem: Problem, arch: str) -> str | None:
    m, n, k = problem.key
    own = fp8_dtypes(arch)[0]
    if problem.dtype != own:
        return f"the matrix instructions of {arch} read {own}; the operands are {problem.dtype}"
    if not 1 <= m <= MAX_M or n < 1:
        return f"m must be 1 to {MAX_M} and n at least 1; got m={m}, n={n}"
    if -(-k // ALIGNMENT) * ALIGNMENT * n > MAX_BYTES:
        return f"b must span at most 2^31 - 1 bytes; got {k * n}"
    if arch == HOPPER and problem.split_k is not None:
        return f"split_k is for the queue kernel, which {arch} does not have; got {problem.split_k}"
    return None


def default_choice(m: int, n: int, k: int, arch: str, cu_count: int) -> Choice:
    """Return kernel and configuration of a shape without a row."""
    if arch == HOPPER and m > STREAMED_M and SCALED_MM.needs({}, (m, n, k), arch) is None:
        return SCALED_MM.choice({})
    if arch == HOPPER:
        return ROW_STREAM.choice(row_stream.PLANS.best(m, n, k, cu_count))
    if k > MAX_K:
        return queue.choice(queue.default_configuration(m, n, k, cu_count))
    return wave_split.choice(wave_split.by_cost(m, n, k, cu_count, archs.get(arch).bandwidth)[0])


def _adjust(problem: Problem, arch: str, choice: Choice, reason: str) -> tuple[Choice, str]:
    if problem.split_k is None:
        return choice, reason
    if choice.kernel == QUEUE.name:
        configuration, reason = Configuration(**choice.configuration), f"{reason} with the caller's split_k"
    else:
        configuration = queue.default_configuration(*problem.key, archs.get(arch).cu_count)
        reason = "the caller's split_k, with the queue kernel's default rule"
    # split_k is capped at the number of k blocks.
    configuration = dataclasses.replace(configuration, split_k=min(problem.split_k, configuration.blocks(problem.k)))
    require(configuration, arch, problem.k)
    return queue.choice(configuration), reason


def _candidates(cell: Any, arch: str) -> list[Choice]:
    if cell.m > MAX_M:
        raise ConfigError(f"the kernels take M of at most {MAX_M}; got {cell.m}")
    able = (kernel for kernel in KERNELS if arch in kernel.archs)
    return [kernel.choice(given) for kernel in able for given in kernel.candidates(cell, arch)]


def _invariant(problem: Problem, arch: str, cu_count: int) -> Choice:
    """Return one configuration for every m: of 8 rows a matrix instruction adds two parts of k, of more one."""
    if arch == HOPPER:
        return ROW_STREAM.choice(row_stream.PLANS.best(MAX_M, problem.n, problem.k, cu_count))
    return default_choice(MAX_M, problem.n, problem.k, arch, cu_count)


FAMILY = Family[Problem](
    problem=Problem.of,
    table=TABLE,
    kernels=KERNELS,
    archs=(*ARCHS, HOPPER),
    envelope=_envelope,
    default=lambda problem, arch, cu_count: default_choice(*problem.key, arch, cu_count),
    candidates=_candidates,
    reference="skinny_gemm",
    adjust=_adjust,
    invariant=_invariant,
)
