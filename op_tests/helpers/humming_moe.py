"""Humming's grouped product over sorted slots, where it is installed: MX-FP8 weights as they are, bf16 or fp8 rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import hipforge
from hipforge.tuning.grouped import MoeOperands

INDEXED = {"gemm_type": "indexed"}
DTYPES = ("bfloat16", "float8e4m3")  # of activations, by Humming's names


def layer_of(w: torch.Tensor, w_scale: torch.Tensor, a_dtype: str) -> Any:
    """Return Humming's layer of these experts [E, N, K], for activations of a dtype by its name of it."""
    from humming.layer import HummingLayer

    experts, n, k = w.shape
    layer = HummingLayer(
        n, k, {"quant_method": "modelopt", "quant_algo": "mxfp8"}, {"quant_method": "humming", "dtype": a_dtype},
        num_experts=experts, torch_dtype=torch.bfloat16,
    ).cuda()  # fmt: skip
    layer.load_from_tensors({"weight": w.view(torch.float8_e4m3fn), "weight_scale": w_scale.view(torch.uint8)})
    layer.transform()
    return layer


def configuration(layer: Any, slots: int) -> dict[str, Any]:
    """Return what Humming chooses for so many slots."""
    from humming.tune import get_heuristics_config

    return get_heuristics_config(layer.humming_config, slots, **INDEXED)


def calls(
    a: torch.Tensor, copies: Sequence[MoeOperands], slots: int, a_div: int, a_dtypes: Sequence[str] = DTYPES
) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Yield the products of bf16 rows ``a`` with each routing; rows of other dtypes are quantised before the call."""
    try:
        from humming.forward import may_quant_input
    except ImportError:
        return
    first = copies[0]
    order = torch.arange(slots, device=a.device)
    for name in a_dtypes:
        layer = layer_of(first.w, first.w_scale, name)
        chosen = configuration(layer, slots)
        block, experts = chosen["block_shape"][0], first.w.shape[0]
        routed = [hipforge.moe_align_block_size(parts.topk_ids, block, experts) for parts in copies]
        rows, scale = may_quant_input(layer.humming_config, a)

        def call(i: int, run: Any = layer, routed: Any = routed, chosen: Any = chosen, a: Any = (rows, scale)) -> Any:
            ids, expert_ids, padded = routed[i]
            given = {"sorted_ids": ids, "expert_ids": expert_ids, "num_tokens_padded": padded, "top_k": a_div}
            return run(a[0], input_scale=a[1], **given, compute_config=INDEXED, tuning_config=chosen), order

        yield f"humming mxfp8 x {name}", call
