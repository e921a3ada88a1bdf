"""The skinny fp8 GEMM as a family: its problem, table, envelope, default rule and candidates.

There are two kernels: ``queue`` (producer waves, a queue in LDS, consumer waves; :mod:`.space` has its configurations)
and ``wave_split`` (:mod:`.wave_split`). Kernel and configuration are those of the tuned row of the shape, of the tuned
row of the next larger m, or of the default rule. A ``split_k`` of the caller's is the queue kernel's: it replaces the
split of its row, or of its own default rule where another kernel was chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.errors import ConfigError, GuardError
from hipforge.ops.core import checks
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.family import Family
from hipforge.ops.core.tuned import (
    DEVICE_COLUMNS,
    EVIDENCE_COLUMNS,
    NEXT,
    USE_HIP,
    Column,
    TableSchema,
    TunedRow,
    Value,
    gemm_shape,
)
from hipforge.ops.fp8_skinny_gemm import wave_split
from hipforge.ops.fp8_skinny_gemm.space import OP_M, TILES, Configuration, refusal, require

QUEUE_KERNEL = "skinny_gemm_fp8"
PARAMETERS = tuple(field.name for field in dataclasses.fields(Configuration))
WAVE_SPLIT_PARAMETERS = tuple(field.name for field in dataclasses.fields(wave_split.Configuration))
# Of the table; both kernels have split_k, and the columns of the other one are 0.
_OF_QUEUE = tuple(name for name in PARAMETERS if name != "split_k")
_OF_WAVE_SPLIT = tuple(name for name in WAVE_SPLIT_PARAMETERS if name != "split_k")
ARCHS = ("gfx942", "gfx950")
FORMATS: Mapping[str, torch.dtype] = MappingProxyType(
    {arch: getattr(torch, archs.get(arch).fp8_e4m3) for arch in ARCHS}
)
K_MULTIPLE = 32
MAX_M = 32
MAX_BYTES = 2**31 - 1
ALIGNMENT = 16  # bytes, of operands and of b's pitch
MAX_SPLIT_K = 16  # of the queue kernel's default rule
TILE_BLOCKS = 0.25  # what the end of a tile costs there, in k blocks: its stores, most of them behind the next loads


# The queue kernel's default tile and waves for m up to the key: few instructions, 32 to 48 KB of weights in flight in a
# work-group, at most 60 KB of LDS.
_DEFAULTS: Mapping[int, Configuration] = MappingProxyType(
    {
        8: Configuration(op_m=8, b_lanes=2, ops=8, a_producers=2, b_producers=4, consumers=2, qsize=3),
        16: Configuration(op_m=16, b_lanes=3, ops=8, a_producers=2, b_producers=6, consumers=2, qsize=3),
        32: Configuration(op_m=32, b_lanes=2, ops=8, a_producers=2, b_producers=6, consumers=2, qsize=4),
    }
)


def default_configuration(m: int, n: int, k: int, cu_count: int) -> Configuration:
    """Return the queue kernel's configuration for a shape: tiles as high as m asks for, and the split that costs least.

    Split parts fill the compute units of the last round, and add tiles and traffic: every part writes and reads fp32
    sums of its own. The cost is that of all three in units of one read of the weights by all compute units.
    """
    whole = _DEFAULTS[next((height for height in _DEFAULTS if m <= height), MAX_M)]
    tiles = whole.tiles(m, n)

    def cost(split_k: int) -> float:
        rounds = -(-tiles * split_k // cu_count)
        idle, sums = rounds * cu_count / (tiles * split_k), 2 * 4 * m * split_k * whole.consumers / k
        return idle + sums + TILE_BLOCKS * split_k / whole.blocks(k)

    splits = range(1, min(MAX_SPLIT_K, whole.blocks(k)) + 1)
    return dataclasses.replace(whole, split_k=min(splits, key=cost))


@dataclass(frozen=True)
class Problem:
    """[m, k] @ [k, n] in one fp8 format; ``split_k`` is the caller's, if any."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    split_k: int | None = None
    deterministic: bool = True

    @property
    def key(self) -> tuple[int, int, int]:
        """Return m, n and k."""
        return self.m, self.n, self.k

    @classmethod
    def of(
        cls,
        a: checks.Described,
        b: checks.Described,
        scale: checks.Described,
        output: checks.Described | None = None,
        split_k: int | None = None,
        *,
        deterministic: bool = True,
    ) -> Problem:
        """Return the problem of operands; raises GuardError for ones that are malformed."""
        checks.require_rank("a", a, 2, "[m, k]")
        checks.require_rank("b", b, 2, "[k, n]")
        for name, operand in (("a", a), ("b", b)):
            checks.require_dtype(name, operand, tuple(FORMATS.values()))
        if a.dtype != b.dtype:
            raise GuardError(f"a and b must have the same fp8 format; got {a.dtype} and {b.dtype}")
        m, k = a.shape
        n = b.shape[1]
        checks.require_shape("b", b, (k, n), "its k is that of a")
        if k < K_MULTIPLE or k % K_MULTIPLE:
            raise GuardError(f"k must be a positive multiple of {K_MULTIPLE}; got {k}: pad both operands with zeros")
        checks.require_dtype("scale", scale, (torch.float32,))
        if tuple(scale.shape) not in ((), (1,)) and set(scale.shape) != {1}:
            raise GuardError(f"scale must be one float32; got shape {tuple(scale.shape)}")
        checks.require_device("b", b, a.device)
        checks.require_device("scale", scale, a.device)
        checks.require_operand("output", output, (torch.float16,), (m, n), "[m, n]", a.device)
        if isinstance(output, torch.Tensor) and not output.is_contiguous():
            raise GuardError(f"output must be contiguous; got strides {output.stride()}")
        if split_k is not None:
            split_k = checks.require_int("split_k", split_k, minimum=1)
        if not deterministic and n % 2:
            raise GuardError(f"packed fp16 atomics need an even n; got {n}: pass deterministic=True")
        return cls(m, n, k, a.dtype, a.device, split_k, deterministic)


def _check_row(values: Mapping[str, Value]) -> str | None:
    if values["gfx"] not in ARCHS:
        return f"the kernel is for {', '.join(ARCHS)}; got {values['gfx']}"
    given = {name: int(values[name] or 0) for name in (*PARAMETERS, *_OF_WAVE_SPLIT)}
    k = int(values["K"] or 0)
    others = _OF_QUEUE if values["kernel"] == "wave_split" else _OF_WAVE_SPLIT
    foreign = [f"{name}={given[name]}" for name in others if given[name]]
    if foreign:
        return f"a {values['kernel']} row has 0 in the other kernel's columns; got {', '.join(foreign)}"
    if values["kernel"] == "queue":
        return refusal(Configuration(**{name: given[name] for name in PARAMETERS}), str(values["gfx"]), k)
    if k > wave_split.MAX_K:
        return f"a wave_split row needs K of at most {wave_split.MAX_K}; got {k}"
    return wave_split.refusal(wave_split.Configuration(**{name: given[name] for name in WAVE_SPLIT_PARAMETERS}), k)


def _envelope(problem: Problem, arch: str) -> str | None:
    m, n, k = problem.key
    if problem.dtype != FORMATS[arch]:
        return f"the matrix instructions of {arch} read {FORMATS[arch]}; the operands are {problem.dtype}"
    if not 1 <= m <= MAX_M or n < 1:
        return f"m must be 1 to {MAX_M} and n at least 1; got m={m}, n={n}"
    if -(-k // ALIGNMENT) * ALIGNMENT * n > MAX_BYTES:
        return f"b must span at most 2^31 - 1 bytes; got {k * n}"
    return None


def _choice(configuration: Configuration) -> Choice:
    return Choice(QUEUE_KERNEL, MappingProxyType(configuration.parameters()))


def choice_of(row: TunedRow) -> Choice:
    """Return the kernel and configuration that a row of the tuned table names."""
    if row.values["kernel"] == "wave_split":
        found = wave_split.Configuration(**{name: row.integer(name) for name in WAVE_SPLIT_PARAMETERS})
        return wave_split.choice(found)
    return _choice(Configuration(**{name: row.integer(name) for name in PARAMETERS}))


def columns_of(choice: Choice) -> Mapping[str, Value]:
    """Return the configuration columns of a choice's row."""
    kernel = "wave_split" if choice.kernel == wave_split.KERNEL else "queue"
    return {"kernel": kernel, **dict.fromkeys((*_OF_WAVE_SPLIT, *_OF_QUEUE), 0), **choice.configuration}


def default_choice(m: int, n: int, k: int, arch: str, cu_count: int) -> Choice:
    """Return kernel and configuration of a shape without a row."""
    if k > wave_split.MAX_K:
        return _choice(default_configuration(m, n, k, cu_count))
    return wave_split.choice(wave_split.by_cost(m, n, k, cu_count, archs.get(arch).bandwidth)[0])


def _adjust(problem: Problem, arch: str, choice: Choice, reason: str) -> tuple[Choice, str]:
    if problem.split_k is None:
        return choice, reason
    if choice.kernel == QUEUE_KERNEL:
        configuration, reason = Configuration(**choice.configuration), f"{reason} with the caller's split_k"
    else:
        configuration = default_configuration(*problem.key, archs.get(arch).cu_count)
        reason = "the caller's split_k, with the queue kernel's default rule"
    # split_k is capped at the number of k blocks.
    configuration = dataclasses.replace(configuration, split_k=min(problem.split_k, configuration.blocks(problem.k)))
    require(configuration, arch, problem.k)
    return _choice(configuration), reason


# What the tuner tries of each parameter beside the space's own values; the model knows no LDS latency, which a single
# consumer would have to bear alone.
A_PRODUCERS = (1, 2, 4)
B_PRODUCERS = (4, 6, 8, 10, 12)
CONSUMERS = (2, 3)
QSIZE = (6, 5, 4, 3, 2, 1)
SPLIT_K = tuple(range(1, 17))


def tiles_for(m: int) -> list[tuple[int, int, int, int]]:
    """Return the tiles that are the lowest of their op_m to hold m rows, and not half empty."""
    return [tile for tile in TILES if tile[1] == -(-m // tile[0]) and (tile[0] == OP_M[0] or m > tile[0] // 2)]


def candidates(cell: Any, arch: str) -> list[Choice]:
    """Return the configurations that may be tried for a cell, few splits and waves first: ties go to them.

    Raises:
        ConfigError: no kernel takes so many rows.
    """
    if cell.m > MAX_M:
        raise ConfigError(f"the kernels take M of at most {MAX_M}; got {cell.m}")
    info = archs.get(arch)
    waves_split = wave_split.candidates(cell.m, cell.n, cell.k, info.cu_count, info.bandwidth)
    found = [wave_split.choice(configuration) for configuration in waves_split]
    for split_k in SPLIT_K:
        for waves in ((a, b, c) for b in B_PRODUCERS for c in CONSUMERS for a in A_PRODUCERS):
            for tile in tiles_for(cell.m):
                possible = (Configuration(*tile, *waves, qsize, split_k) for qsize in QSIZE)
                deepest = next((c for c in possible if refusal(c, arch, cell.k) is None), None)
                if deepest is not None:
                    found.append(_choice(deepest))
    return found


TABLE = TableSchema(
    family="fp8_skinny_gemm",
    shape=gemm_shape(NEXT),
    config=(
        Column("kernel", str, accepted=("queue", "wave_split")),
        *(Column(name, int, minimum=0) for name in (*_OF_WAVE_SPLIT, *PARAMETERS)),
        USE_HIP,
    ),
    check=_check_row,
    # From before there was a second kernel, and from before modelled times were kept.
    legacy={
        (*DEVICE_COLUMNS, "M", "N", "K", *PARAMETERS, "use_hip", *evidence): {
            "kernel": "queue",
            **dict.fromkeys(_OF_WAVE_SPLIT, 0),
        }
        for evidence in (EVIDENCE_COLUMNS, tuple(name for name in EVIDENCE_COLUMNS if name != "model_us"))
    },
)

FAMILY = Family[Problem](
    problem=Problem.of,
    table=TABLE,
    archs=ARCHS,
    envelope=_envelope,
    default=lambda problem, arch, cu_count: default_choice(*problem.key, arch, cu_count),
    from_row=choice_of,
    candidates=candidates,
    reference="skinny_gemm",
    adjust=_adjust,
)
