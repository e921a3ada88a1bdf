"""The grouped MX-FP8 GEMM's operands as one value, their checks, and the product in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hipforge import devices
from hipforge.errors import GuardError
from hipforge.ops.core.alignment import packed
from hipforge.ops.core.checks import require_dtype, require_operand
from hipforge.ops.reference.e8m0 import product_dtype
from hipforge.ops.reference.mxfp8 import dequantize_mxfp8

Tensor = torch.Tensor
SevenTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
SevenSizes = tuple[int, int, int, int, int, int, int]


# The parameters of the kernels' entries, as stubs declare them.
OPERANDS = "a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded: Tensor"
SIZES = "E, N, K, num_valid_tokens, M_act, a_div, block_m: int"
ROUTED = f"mul_weight_by, bias: Tensor?; {SIZES}"
GATE_UP = f"out, out_scales, {OPERANDS}; bias: Tensor?; {SIZES}; alpha, beta, limit: float; interleaved: bool"


class Operands(NamedTuple):
    """What every path of the grouped GEMM takes; shapes as in :mod:`hipforge.ops.mxfp8_grouped_gemm`."""

    a_q: torch.Tensor
    a_scale: torch.Tensor
    w: torch.Tensor
    w_scale: torch.Tensor
    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor
    num_valid_tokens: int
    block_m: int
    a_div: int
    mul_weight_by: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def contiguous(self) -> Operands:
        """Return the operands with contiguous tensors, as stubs take them; of the padded count its one entry."""
        parts: list[Any] = [packed(part) if isinstance(part, torch.Tensor) else part for part in self._of_one_count()]
        return Operands(*parts)

    def _of_one_count(self) -> Operands:
        count = self.num_tokens_post_padded
        return self if count.numel() <= 1 else self._replace(num_tokens_post_padded=count[:1])

    @property
    def tensors(self) -> SevenTensors:
        """Return the operands from ``a_q`` to ``num_tokens_post_padded``, in the order of every stub's arguments."""
        return self[:7]

    @property
    def sizes(self) -> SevenSizes:
        """Return E, N, K, num_valid_tokens, M_act, a_div and block_m, in the order of every stub's arguments."""
        (experts, n, _), (m_act, k) = self.w.shape, self.a_q.shape
        return experts, n, k, self.num_valid_tokens, m_act, self.a_div, self.block_m


def check_indices(parts: Operands) -> None:
    """Refuse indices and weights as the HIP module does, in the same words."""
    device, slots = parts.a_q.device, parts.num_valid_tokens
    for name in ("sorted_token_ids", "expert_ids", "num_tokens_post_padded"):
        tensor: torch.Tensor = getattr(parts, name)
        require_dtype(name, tensor, (torch.int32,))
        if tensor.dim() != 1 or tensor.device != device:
            raise GuardError(
                f"{name} must have 1 dimension and be on {device}; got shape {tuple(tensor.shape)} on {tensor.device}"
            )
    entries, tiles = parts.sorted_token_ids.numel(), parts.expert_ids.numel()
    if entries % parts.block_m:
        raise GuardError(
            f"sorted_token_ids must hold whole tiles, a multiple of block_m = {parts.block_m} entries; got {entries}"
        )
    if tiles < entries // parts.block_m:
        raise GuardError(f"expert_ids must have one entry per tile, {entries // parts.block_m}; got {tiles}")
    if parts.num_tokens_post_padded.numel() < 1:
        raise GuardError("num_tokens_post_padded must have 1 entry; got none")
    if (weights := parts.mul_weight_by) is not None:
        require_dtype("mul_weight_by", weights, (torch.float32,))
        if weights.numel() < slots or weights.device != device:
            raise GuardError(
                f"mul_weight_by must have one weight per slot, {slots}, on {device}; "
                f"got {weights.numel()} on {weights.device}"
            )
    require_operand("bias", parts.bias, (torch.float32,), parts.w.shape[:2], "[E, N] of w", device)


def grouped_mm(parts: Operands) -> torch.Tensor:
    """Return the product in float32."""
    compute = product_dtype(parts.a_scale, parts.w_scale)
    activations = dequantize_mxfp8(parts.a_q, parts.a_scale, compute)
    return by_expert(
        parts, lambda rows, e: activations[rows] @ dequantize_mxfp8(parts.w[e], parts.w_scale[e], compute).T
    )


def by_expert(parts: Operands, product: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """Return ``product`` (activation rows, expert) -> [rows, N] for all slots, with bias and weight, in float32.

    An expert with slots at a time, so that memory holds one expert dequantised.
    """
    if parts.a_q.is_meta:  # which experts have slots is not known, nor needed for a shape
        return torch.empty(int(parts.num_valid_tokens), parts.w.shape[1], dtype=torch.float32, device="meta")
    devices.refuse_in_capture("read on the host which experts have slots, as the torch path of a grouped GEMM does")
    experts, n, _ = parts.w.shape
    # Any integer type was accepted, but torch repeats only by an int.
    slots, block_m, a_div = int(parts.num_valid_tokens), int(parts.block_m), int(parts.a_div)
    padded = int(parts.num_tokens_post_padded[0])
    used = max(0, min(parts.sorted_token_ids.numel(), -(-padded // block_m) * block_m))
    slot = parts.sorted_token_ids[:used].to(torch.int64)
    expert = parts.expert_ids[: used // block_m].repeat_interleave(block_m).to(torch.int64)
    real = (slot >= 0) & (slot < slots) & (expert >= 0) & (expert < experts)
    slot, expert = slot[real], expert[real]
    out = torch.zeros((slots, n), dtype=torch.float32, device=parts.a_q.device)
    for e in expert.unique().tolist():
        mine = slot[expert == e]
        result = product(mine // a_div, e)
        if parts.bias is not None:
            result = result + parts.bias[e]
        factors = parts.mul_weight_by
        out[mine] = (result if factors is None else result * factors.flatten()[mine].unsqueeze(1)).to(out.dtype)
    return out
