"""The operator behind both functions of decode attention: its plan, and the run of what was planned."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from hipforge.ops.core.alignment import packed
from hipforge.ops.core.checks import require_device, require_dtype, require_out
from hipforge.ops.core.dispatch import Accepted, Decision
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import written_into
from hipforge.ops.decode_attention import reference
from hipforge.ops.decode_attention.family import family_of, problem_of
from hipforge.ops.decode_attention.kernels import empty_lse, empty_output, lse_shape, run_decode_attention
from hipforge.ops.decode_attention.layout import Call, check_call, check_pages, token_counts
from hipforge.ops.mx_quantize import mxfp8_quantize


def _plan(**given: Any) -> Decision:
    call = Call(**{name: given[name] for name in Call._fields})
    check_call(call)
    demands = None if call.forced is None else json.loads(call.forced)
    ragged = None if call.max_seqlen_q is None else (call.seqlens.shape[0], int(call.max_seqlen_q))
    problem = problem_of(call.q, call.k, call.block_tables, call.split_k, demands, call.window, ragged)
    return family_of(problem, call.num_groups).decide_total(problem)


def _new(
    q: torch.Tensor, out_scale: torch.Tensor | None, scale_out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_output(q, out_scale is not None or scale_out is not None), empty_lse(q)


@operator(_plan, fake=_new, outs=("out", "lse_out", "workspace"), mutates=("scale_out",))
def decode_attention(
    taken: Accepted,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_scale_shift: torch.Tensor | None,
    v_scale_shift: torch.Tensor | None,
    num_groups: int | None,
    scale: float | None,
    causal: bool,
    split_k: int | None,
    forced: str | None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    scale_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (attention, log-sum-exp) of a call in the form of :class:`Call`."""
    if out is not None:
        quantised = out_scale is not None or scale_out is not None
        require_out(out, q.shape, fp8_dtypes(q.device)[0] if quantised else q.dtype, q.device)
    if out_scale is not None:
        require_device("out_scale", out_scale, q.device)
    if lse_out is not None:
        require_out(lse_out, lse_shape(q), torch.float32, q.device, "lse_out")
    counts: list[int] | int | None = q.shape[1]
    writes = (out, lse_out, scale_out, workspace)
    if cu_seqlens_q is not None and max_seqlen_q is not None:
        require_device("cu_seqlens_q", cu_seqlens_q, q.device)
        cu_seqlens_q = packed(cu_seqlens_q, *writes)
        counts = token_counts(cu_seqlens_q, q.shape[0], max_seqlen_q)
    if block_tables is not None:
        check_pages(block_tables, seqlens, k, counts, window)
    if sinks is not None:
        require_device("sinks", sinks, q.device)
        sinks = packed(sinks, *writes)
    if taken.path == "torch":
        call = Call(
            q, k, v, block_tables, seqlens, k_scale, v_scale, k_scale_shift, v_scale_shift, num_groups, scale, causal,
            split_k, forced, sinks, window, softcap, out_scale, cu_seqlens_q, max_seqlen_q,
        )  # fmt: skip
        found, lse = reference.attend(call, scale_out)
        return written_into(out, found), written_into(lse_out, lse)
    if block_tables is not None and block_tables.shape[-1] == 0:  # no memory: a kernel may read before it compares
        block_tables = block_tables.new_zeros((*block_tables.shape[:-1], 1))
        seqlens = torch.zeros_like(seqlens)
    blocks, out_of, width = scale_out, out, q.shape[-2] * q.shape[-1]
    if scale_out is not None and q.shape[-1] % BLOCK:  # a block's elements are of two heads, which no wave has both of
        require_dtype("scale_out", scale_out, (torch.uint8, E8M0_DTYPE))  # all before lse_out is written
        require_out(scale_out, (q.numel() // width, width // BLOCK), scale_out.dtype, q.device, "scale_out")
        blocks = None
        out_of = (torch.empty if cu_seqlens_q is None else torch.zeros)(q.shape, dtype=torch.float32, device=q.device)
    found, lse = run_decode_attention(
        q, k, v, block_tables, seqlens, k_scale, v_scale, k_scale_shift, v_scale_shift, num_groups=num_groups,
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale, configuration=taken.configuration,
        causal=causal, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, sinks=sinks, window=window,
        softcap=softcap, out_scale=out_scale, scale_out=blocks, out=out_of, lse_out=lse_out, workspace=workspace,
    )  # fmt: skip
    if blocks is scale_out:
        return found, lse
    out = empty_output(q, True) if out is None else out
    mxfp8_quantize(found.view(-1, width), out=out.view(-1, width), scale_out=scale_out)
    return out, lse
