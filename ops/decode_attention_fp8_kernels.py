"""The stub of the decode attention module: one raw op, out first, over any strides of the cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hipforge.jit.compile_ops import compile_ops

# dtype of q -> the module's variant
INPUTS = {torch.float16: "f16", torch.bfloat16: "bf16"}
HEAD_DIMS = (64, 128, 256)


def _variant(
    out: torch.Tensor,
    lse: torch.Tensor,
    partial: torch.Tensor | None,
    partial_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_scale_shift: torch.Tensor | None,
    v_scale_shift: torch.Tensor | None,
    scale: float,
    splits: int,
    causal: bool,
) -> Mapping[str, int | str]:
    return {"HF_HEAD_DIM": q.shape[-1], "HF_INPUT": INPUTS[q.dtype]}


@compile_ops("module_decode_attention_fp8", variant=_variant, mutates=("out", "lse", "partial", "partial_lse"))
def decode_attention_fp8_out(
    out: torch.Tensor,
    lse: torch.Tensor,
    partial: torch.Tensor | None,
    partial_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_scale_shift: torch.Tensor | None,
    v_scale_shift: torch.Tensor | None,
    scale: float,
    splits: int,
    causal: bool,
) -> None:
    """Write the attention into ``out`` [B, Mq, Hq, D] and its log-sum-exp into ``lse`` float32 [B, Hq, Mq]."""
