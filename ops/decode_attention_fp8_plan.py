"""Which path and configuration decode attention takes: envelope, the tuner's filter, tuned table, split-K heuristic."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from types import MappingProxyType

import torch

from hipforge.errors import GuardError
from hipforge.ops.core import dispatch
from hipforge.ops.core.dispatch import Accepted, Decision, Refused
from hipforge.ops.core.tuned import TunedRow, load_table
from hipforge.ops.decode_attention_fp8_kernels import (
    ARCH_DTYPES,
    BLOCK_M,
    CONFIGURATION,
    HEAD_DIMS,
    INPUTS,
    MAX_SPLITS,
    PAGE_MULTIPLE,
    PART_COLUMNS,
    check_configuration,
)
from hipforge.ops.tables import ANY_PAGE_SIZE, DECODE_ATTENTION_FP8

MAX_TILE = 64  # of BLOCK_M and BLOCK_N; larger tiles keep too much in registers
MAX_WAVES = 4
BLOCK_N = 64  # without a tuned row, and the heuristic's grain


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


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    max_keys: int,
    paged: bool,
    split_k: int | None,
    force_kernel_config: Mapping[str, int] | None,
) -> Decision:
    """Return the decision for ``q`` [B, Mq, Hq, D] and ``k`` [pages, page_size, Hkv, D]: the HIP kernel, else torch.

    Raises:
        GuardError: a forced configuration that does not apply, or a split_k outside 1 to 512.
    """
    forced = None if force_kernel_config is None else tuple(force_kernel_config.items())
    shapes = (dispatch.constant_shape(q), dispatch.constant_shape(k))
    return _decided(q.device, q.dtype, k.dtype, *shapes, operator.index(max_keys), paged, split_k, forced)


@dispatch.remembered
def _decided(
    device: torch.device,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    max_keys: int,
    paged: bool,
    split_k: int | None,
    forced: tuple[tuple[str, int], ...] | None,
) -> Decision:
    torch_path = Accepted("torch", "decode_attention", MappingProxyType({}), "the HIP kernel refused")
    target = dispatch.target_of(device)
    if isinstance(target, Refused):
        return Decision(torch_path, (target,))
    reason = _outside_envelope(q_dtype, k_dtype, q_shape[-1], k_shape[1] if paged else None, target[0])
    if reason is not None:
        if forced is not None:
            raise GuardError(f"force_kernel_config is given, but the kernel does not apply: {reason}")
        return Decision(torch_path, (Refused("kernel", reason),))
    row = tuned_row(*target, q_shape, k_shape, max_keys, paged) if forced is None else None
    if row is not None:
        configuration, why = {name: row.integer(name) for name in CONFIGURATION}, "the tuned row of the shape's bucket"
    else:
        split = split_k_heuristic(q_shape[0], k_shape[2], max_keys)
        configuration = {"block_n": BLOCK_N, "waves": max(q_shape[-1] // PART_COLUMNS, 1), "split_k": split}
        why = "no tuned row; the split-K heuristic"
    if split_k is not None:
        configuration["split_k"] = split_k
        why = "split_k as given" if row is None else f"{why}, with split_k as given"
    if forced is not None:
        configuration = _forced(dict(forced), configuration)
        why = "force_kernel_config, which overrides everything"
    check_configuration(configuration, q_shape[-1])
    unused = Refused("torch", "the HIP kernel takes this shape")
    return Decision(Accepted("kernel", "decode_attention_fp8", MappingProxyType(configuration), why, row), (unused,))


def bucket(number: int) -> int:
    """Return the least power of two that is not below ``number``, at least 1: what a tuned row is filed under."""
    return 1 << (max(number, 1) - 1).bit_length()


def tuned_row(
    arch: str, cu_count: int, q_shape: tuple[int, ...], k_shape: tuple[int, ...], max_keys: int, paged: bool
) -> TunedRow | None:
    """Return the row that speaks for q [B, Mq, Hq, D] and k [pages, page_size, Hkv, D], or None."""
    batch, mq, heads, d = q_shape
    page_size, kv_heads = k_shape[1:3]
    shape = (bucket(batch), kv_heads, bucket(heads // kv_heads * mq), d, bucket(max_keys))
    table = load_table(DECODE_ATTENTION_FP8)
    own = table.find(arch, cu_count, *shape, page_size) if paged else None
    return own or table.find(arch, cu_count, *shape, ANY_PAGE_SIZE)


def _outside_envelope(
    q_dtype: torch.dtype, k_dtype: torch.dtype, head_dim: int, page_size: int | None, arch: str
) -> str | None:
    if arch not in ARCH_DTYPES:
        return f"the kernel is for {', '.join(ARCH_DTYPES)}; the device is {arch}"
    if q_dtype not in INPUTS:
        return f"q must be float16 or bfloat16; got {q_dtype}"
    if head_dim not in HEAD_DIMS:
        return f"D must be one of {', '.join(map(str, HEAD_DIMS))}; got {head_dim}"
    if k_dtype not in (torch.uint8, ARCH_DTYPES[arch]):
        return f"{arch} reads {ARCH_DTYPES[arch]}; the cache is {k_dtype}"
    if page_size is not None and page_size % PAGE_MULTIPLE:
        return f"page_size must be a multiple of {PAGE_MULTIPLE}, the keys of a matrix instruction; got {page_size}"
    return None


def _forced(forced: Mapping[str, int], default: Mapping[str, int]) -> dict[str, int]:
    for name in forced:
        if name not in ("block_m", *CONFIGURATION):
            raise GuardError(f"force_kernel_config has block_m, {', '.join(CONFIGURATION)}; got {name!r}")
    if forced.get("block_m", BLOCK_M) != BLOCK_M:
        raise GuardError(
            f"force_kernel_config: block_m must be {BLOCK_M}, what the kernel has; got {forced['block_m']}"
        )
    return {name: forced.get(name, value) for name, value in default.items()}
