"""Decode attention as families, one per cache format: problem, tables, envelope and a caller's own parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.dispatch import Choice, Refused, target_of
from hipforge.ops.core.family import Family
from hipforge.ops.core.kernel import Kernel, best, kernel_table, spelled
from hipforge.ops.core.tuned import BUCKET, DEVICE, EVIDENCE, Column, Former, Reach, TableSchema, Value
from hipforge.ops.decode_attention.kernels import (
    ANY_PAGE_SIZE,
    ARCH_DTYPES,
    BLOCK_M,
    FP8,
    GATHERED,
    GATHERED_DIMS,
    GATHERED_RULE,
    HALF,
    HEAD_DIMS,
    INPUTS,
    INT4,
    PAGE_MULTIPLE,
    STREAM_ARCH,
    checked,
    gathers,
)

Forced = Mapping[str, int] | None
INVARIANT_WORKGROUPS = 128  # for each sequence, where its split must not depend on the batch


@dataclass(frozen=True)
class Problem:
    """q [batch, mq, heads, d] over a cache of kv_heads heads whose sequences have up to ``max_keys`` keys.

    ``page_size`` is 0 without pages; ``cache`` is the cache's dtype; ``split_k`` and ``forced`` are the caller's. With
    ``own_keys`` each KV head has a page table and a length of its own.
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
    own_keys: bool = False

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
    max_keys = page_size * (1 if block_tables is None else block_tables.shape[-1])
    if window is not None:
        max_keys = min(max_keys, int(window) + mq - 1)  # any integer type is accepted; only int has bit_length
    demands = None if forced is None else tuple(forced.items())
    paged = 0 if block_tables is None else page_size
    own_keys = block_tables is not None and block_tables.dim() == 3
    return Problem(
        batch, mq, heads, kv_heads, d, max_keys, paged, q.dtype, k.dtype, q.device, split_k, demands, own_keys
    )  # fmt: skip


def _shape(dims: Sequence[int]) -> tuple[Column, ...]:
    """Return the columns of a problem.

    A page size of 0 is for caches without pages, and for every page size without a row of its own. An int4 row is for
    any ``num_groups``.
    """
    return (
        Column("B", int, minimum=1, reach=BUCKET),
        Column("Hkv", int, minimum=1),
        Column("G", int, minimum=1, reach=BUCKET),
        Column("D", int, accepted=tuple(dims)),
        Column("Mkv", int, minimum=1, reach=BUCKET),
        Column("page_size", int, minimum=0, reach=Reach("exact", lambda value, tuned: (value, ANY_PAGE_SIZE))),
    )


def _table(kernel: Kernel) -> TableSchema:
    parameters = tuple(Column(name, int, minimum=1) for name in kernel.parameters)

    def now(values: Mapping[str, Value]) -> Mapping[str, Value]:
        given = {name: int(values[name] or 0) for name in kernel.parameters}
        return {**values, "kernel": kernel.name, "config": spelled(given)}

    shape = _shape(GATHERED_DIMS if kernel is GATHERED else HEAD_DIMS)
    # The tables that shipped with a column for each parameter.
    formers = (Former((*DEVICE, *shape, *parameters, *EVIDENCE), now),) if kernel in (FP8, INT4) else ()
    return kernel_table(kernel.name, (kernel,), shape=shape, more=(), formers=formers)


def _outside(problem: Problem, arch: str, gathered: bool) -> str | None:
    if problem.dtype not in INPUTS:
        return f"q must be float16 or bfloat16; got {problem.dtype}"
    if problem.d not in (GATHERED_DIMS if gathered else HEAD_DIMS):
        dims = GATHERED_RULE if gathered else f"one of {', '.join(map(str, HEAD_DIMS))}"
        return f"D must be {dims}; got {problem.d}"
    if problem.cache not in (torch.uint8, torch.int32, problem.dtype, ARCH_DTYPES[arch]):
        return f"{arch} reads {ARCH_DTYPES[arch]}; the cache is {problem.cache}"
    if problem.own_keys and arch == STREAM_ARCH:
        return f"{arch} reads one page table for all KV heads of a sequence; block_tables has one for each"
    if problem.page_size % PAGE_MULTIPLE and not gathered:
        return (
            f"page_size must be a multiple of {PAGE_MULTIPLE}, the keys of a matrix instruction; "
            f"got {problem.page_size}"
        )
    return None


def _envelope(problem: Problem, arch: str, gathered: bool) -> str | None:
    reason = _outside(problem, arch, gathered)
    if reason is not None and problem.forced is not None:
        raise GuardError(f"force_kernel_config is given, but the kernel does not apply: {reason}")
    return reason


def _family(kernel: Kernel) -> Family[Problem]:
    def with_given(found: Choice, problem: Problem, given: Mapping[str, int]) -> Choice:
        return kernel.choice(checked(kernel, {**found.configuration, **given}, problem.d))

    def invariant(problem: Problem, arch: str, cu_count: int) -> Choice | None:
        if problem.forced is not None:
            return None
        splits = max(1, INVARIANT_WORKGROUPS // problem.kv_heads)
        alone = best((kernel,), replace(problem, batch=1), arch, cu_count)
        return with_given(alone, problem, {"split_k": splits})

    def demanded(problem: Problem, arch: str, cu_count: int) -> tuple[Choice, str] | None:
        if problem.forced is None:
            return None
        forced = dict(problem.forced)
        accepted = tuple(kernel.parameters) if kernel is not FP8 else ("block_m", *kernel.parameters)
        of = "" if kernel is FP8 else f" for {kernel.name.removeprefix('decode_attention_')}"
        for name in forced:
            if name not in accepted:
                raise GuardError(f"force_kernel_config has {', '.join(accepted)}{of}; got {name!r}")
        if (block_m := forced.pop("block_m", BLOCK_M)) != BLOCK_M:
            raise GuardError(f"force_kernel_config: block_m must be {BLOCK_M}, what the kernel has; got {block_m}")
        given = {} if problem.split_k is None else {"split_k": problem.split_k}
        found = with_given(best((kernel,), problem, arch, cu_count), problem, {**given, **forced})
        return found, "force_kernel_config, which overrides everything"

    def adjust(problem: Problem, arch: str, found: Choice, why: str) -> tuple[Choice, str]:
        if problem.split_k is None:
            return found, why
        return with_given(found, problem, {"split_k": problem.split_k}), f"{why}, with split_k as given"

    return Family(
        problem=problem_of,
        table=_table(kernel),
        kernels=(kernel,),
        archs=kernel.archs,
        envelope=partial(_envelope, gathered=kernel is GATHERED),
        reference="decode_attention",
        invariant=invariant,
        demanded=demanded,
        adjust=adjust,
    )


FAMILY, INT4_FAMILY = _family(FP8), _family(INT4)
# Their default rules decide, there are no tables yet.
HALF_FAMILY, GATHERED_FAMILY = _family(HALF), _family(GATHERED)
TABLE = FAMILY.table


def family_of(problem: Problem, num_groups: int | None) -> Family[Problem]:
    """Return the family that decides for a problem: that of its cache, or the gathered kernel's where that has none."""
    target = target_of(problem.device)
    has_gathered = isinstance(target, Refused) or target[0] in GATHERED.archs
    if has_gathered and gathers(problem.d, problem.page_size, num_groups):
        return GATHERED_FAMILY
    return INT4_FAMILY if num_groups is not None else HALF_FAMILY if problem.cache in INPUTS else FAMILY
