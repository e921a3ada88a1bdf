"""Whether the HIP kernel runs a grouped MX-FP8 GEMM, and with which parameters: envelope, tuned table, defaults.

The order of the steps is documented in :mod:`hipforge.ops.grouped_gemm_mxfp8`.
"""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.ops.core import dispatch
from hipforge.ops.core.checks import (
    TensorSpec,
    require_dtype,
    require_int,
    require_last_multiple,
    require_rank,
    require_shape,
    require_tensor,
    require_torch_dtype,
)
from hipforge.ops.core.dispatch import Accepted, Decision, Refused
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.core.tuned import TunedRow, load_table
from hipforge.ops.mxfp8_dense.family import DEFAULT_BLOCK_N
from hipforge.ops.tables import SMALLM_MXFP8_MOE

ARCH = "gfx950"
KERNEL = "smallm_mxfp8_moe_grouped_gemm"
MAX_ELEMENTS = 2**31 - 1

# Without a tuned row: (most routed slots, least experts). With many experts few slots fall on each, so that the
# kernel keeps to its strength, few rows per expert, for more slots.
DEFAULT_BUCKETS = ((16, 0), (64, 128))

_FP8_PAYLOADS = (torch.float8_e4m3fn, torch.uint8)
_SCALES = (torch.uint8, E8M0_DTYPE)


def _check_operands(
    a_q: TensorSpec, a_scale: TensorSpec, w: TensorSpec, w_scale: TensorSpec, slots: int, block_m: int, a_div: int
) -> None:
    require_rank("a_q", a_q, 2, "[M_act, K]")
    require_rank("w", w, 3, "[E, N, K]")
    require_dtype("a_q", a_q, _FP8_PAYLOADS)
    require_dtype("w", w, _FP8_PAYLOADS)
    require_dtype("a_scale", a_scale, _SCALES)
    require_dtype("w_scale", w_scale, _SCALES)
    (m_act, k), (experts, n, _) = a_q.shape, w.shape
    require_shape("w", w, (experts, n, k), "its K is that of a_q")
    require_last_multiple("a_q", a_q, BLOCK)
    require_shape("a_scale", a_scale, (m_act, k // BLOCK), f"one byte per {BLOCK} elements of a_q")
    require_shape("w_scale", w_scale, (experts, n, k // BLOCK), f"one byte per {BLOCK} elements of w")
    if block_m < 1 or a_div < 1 or slots < 0:
        raise GuardError(
            f"block_m and a_div must be positive and num_valid_tokens not negative; got {block_m}, {a_div} and {slots}"
        )
    if m_act < -(-slots // a_div):
        raise GuardError(
            f"a_q must have a row for each {a_div} of the {slots} slots (num_valid_tokens), {-(-slots // a_div)}; "
            f"got M_act={m_act}"
        )


def _by_row(row: TunedRow, experts: int, what: str) -> Accepted | Refused:
    reason = f"the tuned row of {what}, up to M={row.integer('M')}"
    if row.integer("use_hip") == 0:
        return Refused("kernel", f"{reason}, routes this call to the fallback (use_hip=0)", row)
    least = row.integer("min_experts")
    if experts < least:
        return Refused("kernel", f"{reason}, asks for at least {least} experts; got E={experts}", row)
    return _accept(row.integer("block_n"), reason, row)


def _accept(block_n: int, reason: str, row: TunedRow | None = None) -> Accepted:
    return Accepted("kernel", KERNEL, MappingProxyType({"block_n": block_n}), reason, row)


@functools.lru_cache(maxsize=1024)
def _buckets(arch: str, cu_count: int, n: int, k: int, a_div: int, has_weight: int) -> tuple[TunedRow, ...]:
    """Return the rows of a key by ascending M; where two give the same M, the one for just this CU count."""
    table = load_table(SMALLM_MXFP8_MOE)
    routed = {int(row.key[2]) for row in table.rows if row.key[0] == arch and row.key[3:] == (n, k, a_div, has_weight)}
    found = (table.find(arch, cu_count, m, n, k, a_div, has_weight) for m in sorted(routed))
    return tuple(row for row in found if row is not None)


def _by_default(slots: int, experts: int, what: str) -> Accepted | Refused:
    for most, least in DEFAULT_BUCKETS:
        if slots <= most and experts >= least:
            return _accept(DEFAULT_BLOCK_N, f"no tuned row of {what}; the default up to M={most}")
    rules = " or ".join(f"M at most {most} with E at least {least}" for most, least in DEFAULT_BUCKETS)
    return Refused("kernel", f"no tuned row of {what}; the default needs {rules}; got M={slots}, E={experts}")


def _decide_hip(
    slots: int, experts: int, n: int, k: int, m_act: int, block_m: int, a_div: int, has_weight: bool,
    device: torch.device, out_dtype: torch.dtype,
) -> Accepted | Refused:  # fmt: skip
    if out_dtype != torch.bfloat16:
        return Refused("kernel", f"the output dtype must be torch.bfloat16; got {out_dtype}")
    target = dispatch.target_of(device)
    if isinstance(target, Refused):
        return target
    arch, cu_count = target
    if arch != ARCH:
        return Refused("kernel", f"the kernel is for {ARCH}; the device is {arch}")
    if min(slots, experts, n, k) < 1:
        return Refused("kernel", f"M, E, N and K must be at least 1; got M={slots}, E={experts}, N={n}, K={k}")
    if block_m % 4:
        return Refused("kernel", f"block_m must be a multiple of 4; got {block_m}")
    largest = max(n, m_act) * k
    if largest > MAX_ELEMENTS:
        return Refused(
            "kernel", f"N*K and M_act*K must be at most 2^31 - 1 (raw-buffer offsets are int32); got {largest}"
        )
    what = f"(N, K, a_div, has_weight)=({n}, {k}, {a_div}, {has_weight})"
    rows = _buckets(arch, cu_count, n, k, a_div, int(has_weight))
    if not rows:
        return _by_default(slots, experts, what)
    bucket = next((row for row in rows if slots <= row.integer("M")), None)
    if bucket is None:
        return Refused("kernel", f"the tuned rows of {what} end at M={rows[-1].integer('M')}; got M={slots}", rows[-1])
    return _by_row(bucket, experts, what)


@dispatch.remembered
def _decision(*key: Any) -> Decision:
    """Return the decision for shapes and dtypes of the four operands and the scalars."""
    (*shapes_dtypes, slots, block_m, a_div, has_weight, device, out_dtype) = key
    a_q, a_scale, w, w_scale = (
        TensorSpec(tuple(s), d) for s, d in zip(shapes_dtypes[:4], shapes_dtypes[4:], strict=True)
    )
    _check_operands(a_q, a_scale, w, w_scale, slots, block_m, a_div)
    (m_act, k), (experts, n, _) = a_q.shape, w.shape
    require_torch_dtype("out_dtype", out_dtype)
    outcome = _decide_hip(slots, experts, n, k, m_act, block_m, a_div, has_weight, device, out_dtype)
    return Decision(outcome) if isinstance(outcome, Accepted) else Decision(None, (outcome,))


dispatch.on_clear(_buckets.cache_clear)


def plan_grouped(
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    num_valid_tokens: int,
    top_k: int,
    block_m: int,
    out_dtype: torch.dtype,
    a_div: int,
    mul_weight_by: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
) -> Decision:
    """Return the decision for a call of ``grouped_gemm_mxfp8``; raises GuardError for operands that are malformed."""
    require_tensor(a_q=a_q, a_scale=a_scale, w=w, w_scale=w_scale)
    require_tensor(
        sorted_token_ids=sorted_token_ids, expert_ids=expert_ids, num_tokens_post_padded=num_tokens_post_padded
    )
    if mul_weight_by is not None:
        require_tensor(mul_weight_by=mul_weight_by)
    shapes = map(dispatch.constant_shape, (a_q, a_scale, w, w_scale))
    counts = {"num_valid_tokens": num_valid_tokens, "block_m": block_m, "a_div": a_div}
    return _decision(
        *shapes, a_q.dtype, a_scale.dtype, w.dtype, w_scale.dtype,
        *(require_int(name, count) for name, count in counts.items()), mul_weight_by is not None, a_q.device, out_dtype,
    )  # fmt: skip
