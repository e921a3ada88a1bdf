"""The int4 variant of decode attention: operands, the planner's decision, the stub of the module and its call.

A row of K or V is a word per group of neighbouring elements, float16 scale in the low half and float16 shift in the
high half, and D/8 words of eight nibbles; x = code * scale + shift. The kernel computes x in float32 and rounds it to
q's dtype for K and to bfloat16 for V; weights are rounded to bfloat16, the output to q's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core import dispatch
from hipforge.ops.core.checks import require_choice, require_dtype, require_rank, require_shape
from hipforge.ops.core.dispatch import Accepted, Decision, Refused
from hipforge.ops.decode_attention_fp8_checks import MAX_MQ
from hipforge.ops.decode_attention_fp8_kernels import (
    ARCH_DTYPES,
    HEAD_DIMS,
    INPUTS,
    MAX_SPLITS,
    PAGE_MULTIPLE,
    WAVES,
    allocate_results,
)
from hipforge.ops.decode_attention_fp8_plan import split_k_heuristic
from hipforge.ops.reference.attention import INT4_GROUPS, dequantize_kv_int4, paged_attention

CONFIGURATION = ("waves", "split_k")


@compile_ops(
    "module_decode_attention_int4",
    variant=lambda out, lse, partial, partial_lse, q, *rest: {"HF_HEAD_DIM": q.shape[-1], "HF_INPUT": INPUTS[q.dtype]},
    mutates=("out", "lse", "partial", "partial_lse"),
)
def decode_attention_int4_out(
    out: torch.Tensor,
    lse: torch.Tensor,
    partial: torch.Tensor | None,
    partial_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    groups: int,
    scale: float,
    causal: bool,
    waves: int,
    splits: int,
) -> None:
    """Write the attention into ``out`` [B, Mq, Hq, D] and its log-sum-exp into ``lse`` float32 [B, Hq, Mq]."""


def prepare_int4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqlens: torch.Tensor,
    block_tables: torch.Tensor | None,
    page_size: int | None,
    num_groups: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (q [B, Mq, G*Hq, D], k and v int32 [pages, page_size, G, num_groups + D/8]), all views.

    Raises:
        GuardError: operands that no path takes.
    """
    require_choice("num_groups", num_groups, INT4_GROUPS)
    require_rank("q", q, 5, "[1, B*Mq, G, Hq, D]")
    require_rank("seqlens", seqlens, 1, "[B]")
    require_dtype("seqlens", seqlens, (torch.int32,))
    batch = seqlens.shape[0]
    if batch < 1 or q.shape[0] != 1 or q.shape[1] % batch or not 1 <= q.shape[1] // batch <= MAX_MQ:
        raise GuardError(
            f"q must be [1, B*Mq, G, Hq, D] with B = {batch} of seqlens and Mq 1 to {MAX_MQ}; "
            f"got shape {tuple(q.shape)}"
        )
    groups, heads, d = q.shape[2:]
    if groups < 1 or heads < 1 or d < 8 or d % 8:
        raise GuardError(f"q needs at least one head and a D that is a multiple of 8; got shape {tuple(q.shape)}")
    if (block_tables is None) != (page_size is None):
        raise GuardError(f"block_tables and page_size belong together; got page_size={page_size!r}")
    if block_tables is not None:
        require_rank("block_tables", block_tables, 2, "[B, max_pages]")
        require_shape("block_tables", block_tables, (batch, block_tables.shape[1]), "one row per sequence")
        require_dtype("block_tables", block_tables, (torch.int32,))
    require_rank("k", k, 5, "[1, rows, G, Hq, num_groups + D/8]")
    rows = k.shape[1]
    per_page = rows // batch if page_size is None else page_size
    if per_page < 1 or rows % per_page or (page_size is None and rows % batch):
        raise GuardError(f"k must hold whole pages of {per_page} rows; got {rows} rows")
    caches = []
    for name, cache in (("k", k), ("v", v)):
        require_dtype(name, cache, (torch.int32,))
        shape = (1, rows, groups, heads, num_groups + d // 8)
        require_shape(name, cache, shape, "G, Hq and D of q, the words of scales, eight nibbles per word")
        if heads > 1 and cache.stride(3):
            raise GuardError(
                f"{name} must be expanded along Hq (stride 0), since the heads of a group share their keys; got stride "
                f"{cache.stride(3)}"
            )
        if cache.stride(4) != 1:
            raise GuardError(f"{name} must have its last dimension contiguous; got stride {cache.stride(4)}")
        caches.append(cache[0, :, :, 0].unflatten(0, (-1, per_page)))
    return q.reshape(batch, q.shape[1] // batch, groups * heads, d), caches[0], caches[1]


def plan_int4(
    q: torch.Tensor,
    k: torch.Tensor,
    block_tables: torch.Tensor | None,
    split_k: int | None,
    force_kernel_config: Mapping[str, int] | None,
) -> Decision:
    """Return the decision for q [B, Mq, Hq, D] and k [pages, page_size, Hkv, words]: the HIP kernel, else torch.

    Raises:
        GuardError: a forced configuration that does not apply, or a split_k outside 1 to 512.
    """
    reason = _outside_envelope(q, k.shape[1] if block_tables is not None else None)
    if reason is not None:
        if force_kernel_config is not None:
            raise GuardError(f"force_kernel_config is given, but the kernel does not apply: {reason}")
        torch_path = Accepted("torch", "decode_attention", MappingProxyType({}), "the HIP kernel refused")
        return Decision(torch_path, (Refused("kernel", reason),))
    max_keys = k.shape[1] * (1 if block_tables is None else block_tables.shape[1])
    split = split_k_heuristic(q.shape[0], k.shape[2], max_keys)
    configuration = {"waves": 1, "split_k": split if split_k is None else split_k}
    why = "the split-K heuristic" if split_k is None else "split_k as given"
    if force_kernel_config is not None:
        unknown = [name for name in force_kernel_config if name not in CONFIGURATION]
        if unknown:
            raise GuardError(f"force_kernel_config has {', '.join(CONFIGURATION)} for int4; got {unknown[0]!r}")
        configuration.update(force_kernel_config)
        why = "force_kernel_config, which overrides everything"
    require_choice("waves", configuration["waves"], WAVES)
    if not 1 <= configuration["split_k"] <= MAX_SPLITS:
        raise GuardError(f"split_k must be 1 to {MAX_SPLITS}; got {configuration['split_k']}")
    unused = Refused("torch", "the HIP kernel takes this shape")
    return Decision(Accepted("kernel", "decode_attention_int4", MappingProxyType(configuration), why), (unused,))


def _outside_envelope(q: torch.Tensor, page_size: int | None) -> str | None:
    target = dispatch.target_of(q.device)
    if isinstance(target, Refused):
        return target.reason
    if target[0] not in ARCH_DTYPES:
        return f"the kernel is for {', '.join(ARCH_DTYPES)}; the device is {target[0]}"
    if q.dtype not in INPUTS:
        return f"q must be float16 or bfloat16; got {q.dtype}"
    if q.shape[-1] not in HEAD_DIMS:
        return f"D must be one of {', '.join(map(str, HEAD_DIMS))}; got {q.shape[-1]}"
    if page_size is not None and page_size % PAGE_MULTIPLE:
        return f"page_size must be a multiple of {PAGE_MULTIPLE}, the keys of a matrix instruction; got {page_size}"
    return None


def attend_int4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    num_groups: int,
    scale: float | None,
    causal: bool,
    decision: Decision,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run what :func:`plan_int4` decided on what :func:`prepare_int4` returned.

    Returns:
        (out like q [B, Mq, Hq, D], log-sum-exp float32 [B, Hq, Mq], natural logarithm).
    """
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    taken = decision.accepted
    if taken is None or taken.path != "kernel":
        keys, values = (dequantize_kv_int4(cache, num_groups) for cache in (k, v))
        return paged_attention(q, keys, values, block_tables, seqlens, factor, causal)
    splits = taken.configuration["split_k"]
    out, lse, partial, partial_lse = allocate_results(q, splits)
    decode_attention_int4_out(
        out,
        lse,
        partial,
        partial_lse,
        q.contiguous(),
        k,
        v,
        None if block_tables is None else block_tables.contiguous(),
        seqlens.contiguous(),
        num_groups,
        factor,
        causal,
        taken.configuration["waves"],
        splits,
    )
    return out, lse
