"""Decode attention as families, one per cache format: problem, tables, envelope, split-K heuristic and candidates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.errors import GuardError
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.family import Family
from hipforge.ops.core.tuned import BUCKET, EXACT, Column, Reach, TableSchema, Value

ARCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, archs.get(name).fp8_e4m3) for name in ("gfx950", "gfx942")}
)
# dtype of q -> the module's variant
INPUTS = {torch.float16: "f16", torch.bfloat16: "bf16"}
HEAD_DIMS = (64, 128, 192, 256)
BLOCK_M = 16  # rows of one matrix instruction
PAGE_MULTIPLE = 16  # keys of one matrix instruction
BLOCKS_N = (16, 32, 64)
BLOCK_N = 64  # without a tuned row, and the heuristic's grain
WAVES = (1, 2, 4)
MAX_SPLITS = 512
MAX_TILE = 64  # of BLOCK_M and BLOCK_N; larger tiles keep too much in registers
MAX_WAVES = 4
ANY_PAGE_SIZE = 0
CONFIGURATION = ("block_n", "waves", "split_k")
INT4_CONFIGURATION = ("waves", "split_k")
INT4_BLOCK_N = 32  # keys of the int4 kernel's blocks
# S = 2^i and 3 * 2^i: finer steps make no difference that the model sees.
SPLITS = tuple(sorted({base << shift for base in (1, 3) for shift in range(10) if base << shift <= MAX_SPLITS}))

Forced = Mapping[str, int] | None


def waves_per_range(head_dim: int) -> int:
    """Return how many waves of the fp8 kernel share a key range, each with its part of V's columns."""
    return 2 if head_dim == 256 else 1


@dataclass(frozen=True)
class Problem:
    """q [batch, mq, heads, d] over a cache of kv_heads heads whose sequences have up to ``max_keys`` keys.

    ``page_size`` is 0 without pages; ``cache`` is the cache's dtype; ``split_k`` and ``forced`` are the caller's.
    """

    batch: int
    mq: int
    heads: int
    kv_heads: int
    d: int
    max_keys: int
    page_size: int
    dtype: torch.dtype
    cache: torch.dtype
    device: torch.device
    split_k: int | None = None
    forced: tuple[tuple[str, int], ...] | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """Return B, Hkv, G, D, Mkv and page_size; G is rows per KV head, query heads times tokens."""
        group = self.heads // self.kv_heads * self.mq
        return self.batch, self.kv_heads, group, self.d, self.max_keys, self.page_size


def problem_of(
    q: torch.Tensor,
    k: torch.Tensor,
    block_tables: torch.Tensor | None,
    split_k: int | None = None,
    forced: Forced = None,
    window: int | None = None,
    ragged: tuple[int, int] | None = None,
) -> Problem:
    """Return the problem of q [B, Mq, Hq, D] and k [pages, page_size, Hkv, ...], both checked before.

    With a window a sequence has no more keys than its tokens see. Of q [tokens, Hq, D] ``ragged`` says B and Mq.
    """
    heads, d = q.shape[-2:]
    batch, mq = (q.shape[0], q.shape[1]) if ragged is None else ragged
    _, page_size, kv_heads = k.shape[:3]
    max_keys = page_size * (1 if block_tables is None else block_tables.shape[1])
    if window is not None:
        max_keys = min(max_keys, int(window) + mq - 1)  # any integer type is accepted; only int has bit_length
    demands = None if forced is None else tuple(forced.items())
    paged = 0 if block_tables is None else page_size
    return Problem(batch, mq, heads, kv_heads, d, max_keys, paged, q.dtype, k.dtype, q.device, split_k, demands)


def split_k_heuristic(batch: int, kv_heads: int, max_keys: int, page_size: int | None = None) -> int:
    """Return the number of splits for a shape without a tuned row, 1 to 512.

    Args:
        batch: sequences.
        kv_heads: KV heads; the queries of each are folded into rows, so that the head count of the formula is 1.
        max_keys: keys that a sequence may have.
        page_size: keys of a page for a kernel whose splits must not cross pages. Those of this module do.
    """
    rows = max(batch, 1)
    split = min(max(max_keys + rows - 1, 1024) // rows, max_keys // BLOCK_N + 1)
    enough = max(1024 // max(batch * kv_heads, 1), 1)
    while split > enough:
        split //= 2
    split = max(split, 1)
    if math.ceil(max_keys / split) % BLOCK_N:
        split += 1
    split = min(max(split, 1), MAX_SPLITS)
    if page_size is not None and math.ceil(max_keys / split) > page_size:
        split = math.ceil(max_keys / page_size)
    return split


def accepts_configuration(block_m: int, block_n: int, waves: int) -> bool:
    """Return whether a tuner may try a configuration: tiles up to 64 x 64 and at most four waves."""
    return 1 <= block_m <= MAX_TILE and 1 <= block_n <= MAX_TILE and 1 <= waves <= MAX_WAVES


def refusal(configuration: Mapping[str, int], head_dim: int) -> str | None:
    """Return what no kernel has of a configuration, or None; one with ``block_n`` is of the fp8 kernel."""
    least, at = (waves_per_range(head_dim), f" at D={head_dim}") if "block_n" in configuration else (1, "")
    for name, accepted in (("block_n", BLOCKS_N), ("waves", tuple(count for count in WAVES if count >= least))):
        if configuration.get(name, accepted[0]) not in accepted:
            return f"{name} must be one of {', '.join(map(str, accepted))}{at}; got {configuration[name]}"
    splits = configuration["split_k"]
    return None if 1 <= splits <= MAX_SPLITS else f"split_k must be 1 to {MAX_SPLITS}; got {splits}"


def check_configuration(
    configuration: Mapping[str, int], head_dim: int, names: tuple[str, ...] = CONFIGURATION
) -> None:
    """Refuse a configuration that a kernel, by default the fp8 one, does not have.

    Raises:
        GuardError: a missing or unknown name, or a value outside what the kernel has.
    """
    if set(configuration) != set(names):
        raise GuardError(f"a configuration has {', '.join(names)}; got {', '.join(configuration) or 'nothing'}")
    reason = refusal(configuration, head_dim)
    if reason is not None:
        raise GuardError(reason)


def _check_row(values: Mapping[str, Value]) -> str | None:
    for name in ("B", "G", "Mkv"):
        if (number := int(values[name] or 0)) & (number - 1):
            return f"{name} is a bucket, the power of two that ends it; got {number}"
    if values["D"] not in HEAD_DIMS:
        return f"D must be one of {', '.join(map(str, HEAD_DIMS))}; got {values['D']}"
    if int(values["page_size"] or 0) % PAGE_MULTIPLE:
        return f"page_size must be a multiple of {PAGE_MULTIPLE}, or {ANY_PAGE_SIZE} for any; got {values['page_size']}"
    given = {name: int(values[name] or 0) for name in CONFIGURATION if name in values}
    return refusal(given, int(values["D"] or 0))


def _table(family: str, configuration: tuple[str, ...]) -> TableSchema:
    """A page size of 0 is for caches without pages, and for every page size without a row of its own.

    B, G and Mkv reach their buckets, Hkv and D themselves; an int4 row, whatever ``num_groups`` is.
    """
    reach = {"B": BUCKET, "G": BUCKET, "Mkv": BUCKET}
    own_or_any = Reach("exact", lambda value, tuned: (value, ANY_PAGE_SIZE))
    return TableSchema(
        family=family,
        shape=(
            *(Column(name, int, minimum=1, reach=reach.get(name, EXACT)) for name in ("B", "Hkv", "G", "D", "Mkv")),
            Column("page_size", int, minimum=0, reach=own_or_any),
        ),
        config=tuple(Column(name, int, minimum=1) for name in configuration),
        check=_check_row,
    )


TABLE = _table("decode_attention_fp8", CONFIGURATION)
HALF_TABLE = _table("decode_attention_half", INT4_CONFIGURATION)
INT4_TABLE = _table("decode_attention_int4", INT4_CONFIGURATION)


def _outside(problem: Problem, arch: str) -> str | None:
    if problem.dtype not in INPUTS:
        return f"q must be float16 or bfloat16; got {problem.dtype}"
    if problem.d not in HEAD_DIMS:
        return f"D must be one of {', '.join(map(str, HEAD_DIMS))}; got {problem.d}"
    if problem.cache not in (torch.uint8, torch.int32, problem.dtype, ARCH_DTYPES[arch]):
        return f"{arch} reads {ARCH_DTYPES[arch]}; the cache is {problem.cache}"
    if problem.page_size % PAGE_MULTIPLE:
        return (
            f"page_size must be a multiple of {PAGE_MULTIPLE}, the keys of a matrix instruction; "
            f"got {problem.page_size}"
        )
    return None


def _envelope(problem: Problem, arch: str) -> str | None:
    reason = _outside(problem, arch)
    if reason is not None and problem.forced is not None:
        raise GuardError(f"force_kernel_config is given, but the kernel does not apply: {reason}")
    return reason


def _family(table: TableSchema, names: tuple[str, ...], **more: Any) -> Family[Problem]:
    def choice(configuration: Mapping[str, int]) -> Choice:
        return Choice(table.family, MappingProxyType({name: configuration[name] for name in names}))

    def default(problem: Problem, arch: str, cu_count: int) -> Choice:
        split_k = split_k_heuristic(problem.batch, problem.kv_heads, problem.max_keys)
        waves = waves_per_range(problem.d) if "block_n" in names else 1
        return choice({"block_n": BLOCK_N, "waves": waves, "split_k": split_k})

    def demanded(problem: Problem, arch: str, cu_count: int) -> tuple[Choice, str] | None:
        if problem.forced is None:
            return None
        forced = dict(problem.forced)
        of = "" if "block_n" in names else f" for {table.family.removeprefix('decode_attention_')}"
        accepted = ("block_m", *names) if "block_n" in names else names
        for name in forced:
            if name not in accepted:
                raise GuardError(f"force_kernel_config has {', '.join(accepted)}{of}; got {name!r}")
        if forced.get("block_m", BLOCK_M) != BLOCK_M:
            raise GuardError(
                f"force_kernel_config: block_m must be {BLOCK_M}, what the kernel has; got {forced['block_m']}"
            )
        given = {} if problem.split_k is None else {"split_k": problem.split_k}
        found = choice({**default(problem, arch, cu_count).configuration, **given, **forced})
        check_configuration(found.configuration, problem.d, names)
        return found, "force_kernel_config, which overrides everything"

    def adjust(problem: Problem, arch: str, found: Choice, why: str) -> tuple[Choice, str]:
        if problem.split_k is not None:
            found = choice({**found.configuration, "split_k": problem.split_k})
            check_configuration(found.configuration, problem.d, names)
            why = f"{why}, with split_k as given"
        return found, why

    return Family(
        problem=problem_of,
        table=table,
        archs=tuple(ARCH_DTYPES),
        envelope=_envelope,
        default=default,
        from_row=lambda row: choice({name: row.integer(name) for name in names}),
        reference="decode_attention",
        demanded=demanded,
        adjust=adjust,
        **more,
    )


def ranges(configuration: Mapping[str, int], d: int) -> int:
    """Return into how many parts the waves of a work-group cut its keys; a wave of the int4 kernel owns all columns."""
    return configuration["waves"] // (waves_per_range(d) if "block_n" in configuration else 1)


def blocks_per_wave(configuration: Mapping[str, int], d: int, keys: int) -> int:
    """Return the blocks of the first wave, which has the most."""
    blocks = math.ceil(keys / configuration.get("block_n", INT4_BLOCK_N))
    return math.ceil(blocks / (configuration["split_k"] * ranges(configuration, d)))


def _without_empty_splits(kernel: str, cell: Any, tried: Iterable[dict[str, int]]) -> list[Choice]:
    found = []
    for configuration in tried:
        of_a_split = blocks_per_wave(configuration, cell.d, cell.keys) * ranges(configuration, cell.d)
        blocks = cell.keys / configuration.get("block_n", INT4_BLOCK_N)
        if math.ceil(blocks / of_a_split) == configuration["split_k"]:
            found.append(Choice(kernel, MappingProxyType(configuration)))
    return found


def candidates(cell: Any, arch: str = "gfx950") -> list[Choice]:
    """Return the configurations that the kernel has, the tuner may try and that leave no split empty.

    Fewest splits and waves and the largest block first: ties go to them.
    """
    tried = (
        {"block_n": block_n, "waves": waves, "split_k": split_k}
        for split_k in SPLITS
        for waves in WAVES
        for block_n in sorted(BLOCKS_N, reverse=True)
        if accepts_configuration(BLOCK_M, block_n, waves)
    )
    possible = (one for one in tried if refusal(one, cell.d) is None)
    return _without_empty_splits("decode_attention_fp8", cell, possible)


def int4_candidates(cell: Any, arch: str = "gfx950") -> list[Choice]:
    """Return the configurations of the int4 kernel that leave no split empty, fewest splits and waves first."""
    tried = ({"waves": waves, "split_k": split_k} for split_k in SPLITS for waves in WAVES)
    return _without_empty_splits("decode_attention_int4", cell, tried)


FAMILY = _family(TABLE, CONFIGURATION, candidates=candidates)
# A cache of q's own dtype: the heuristic decides, there is no table yet.
HALF_FAMILY = _family(HALF_TABLE, INT4_CONFIGURATION, candidates=lambda cell, arch: [])
INT4_FAMILY = _family(INT4_TABLE, INT4_CONFIGURATION, candidates=int4_candidates)
