"""Slots of a mixture of experts, sorted by expert and padded to whole tiles, in one launch.

Slot t of T · top_k is entry t of the flattened ``topk_ids``: token t // top_k and its choice t % top_k.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hipforge import devices
from hipforge.errors import GuardError
from hipforge.jit import registry
from hipforge.jit.call import torch_library
from hipforge.ops import reference
from hipforge.ops.core import programmatic
from hipforge.ops.core.alignment import packed
from hipforge.ops.core.arguments import is_traced
from hipforge.ops.core.checks import require_dtype, require_int, require_operand, require_out, require_rank
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.operator import operator
from hipforge.ops.core.stub import stub
from hipforge.ops.reference.moe import aligned_sizes
from hipforge.ops.triton.launch import unavailable

PUBLIC = ("moe_align_block_size",)

MAX_EXPERTS = 1024  # whose counters fit the LDS of either architecture
FEW = "moe_align_few"  # the kernel for the slots of a decode step
MOST_FEW, MOST_OF_FEW = 256, 1024  # slots, and entries of a tile, that it takes


class SortedSlots(NamedTuple):
    """Slots by expert, in tiles of ``block_m``, as the grouped GEMMs take them.

    Attributes:
        sorted_token_ids: int32, whole tiles; other entries are padding.
        expert_ids: int32, one per tile; -1 skips it.
        num_tokens_post_padded: int32 [1], entries in use.
    """

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor


_OPERANDS = (
    "sorted_ids, expert_ids, padded, topk_ids: Tensor; expert_map: Tensor?; block_m, experts: int; programmatic: bool"
)
_WRITTEN = ("sorted_ids", "expert_ids", "padded")
moe_align_block_size_out = stub(
    "moe_align_block_size_out", "module_moe_align", _OPERANDS,
    "Write the first three as :func:`moe_align_block_size` says.", mutates=_WRITTEN,
)  # fmt: skip
moe_align_few_out = stub(
    "moe_align_few_out", "module_moe_align_few", _OPERANDS,
    "Write the same for at most MOST_FEW slots and a ``block_m`` that is a multiple of 4, at most MOST_OF_FEW.",
    mutates=_WRITTEN,
)  # fmt: skip


def _launch(*given: Any) -> None:
    """Launch the kernel for a call whose number of slots is known now."""
    topk_ids, block_m = given[3], given[5]
    few = _is_for_few(topk_ids.numel(), block_m, topk_ids.device)
    (moe_align_few_out if few else moe_align_block_size_out)(*given)


# While torch traces: one graph serves every number of slots.
_traced_launch = torch_library.define(
    "moe_align_launch",
    "(Tensor(a!) sorted_ids, Tensor(b!) expert_ids, Tensor(c!) padded, Tensor topk_ids, Tensor? expert_map, "
    "int block_m, int experts, bool programmatic) -> ()",
    _launch,
    lambda *_: None,
)


def _is_for_few(slots: int, block_m: int, device: torch.device) -> bool:
    """Return whether the kernel for the slots of a decode step takes a call that a kernel takes."""
    fits = slots <= MOST_FEW and block_m % 4 == 0 and block_m <= MOST_OF_FEW
    return fits and devices.current().arch_of(device.index or 0) in registry.module("module_moe_align_few").archs


def _plan(topk_ids: torch.Tensor, block_m: int, num_experts: int, expert_map: torch.Tensor | None) -> Decision:
    require_rank("topk_ids", topk_ids, 2, "[T, top_k]")
    require_dtype("topk_ids", topk_ids, (torch.int32, torch.int64))
    require_int("block_m", block_m, 1)
    require_int("num_experts", num_experts, 0)
    slots = math.prod(topk_ids.shape)
    aligned_sizes(slots, block_m, num_experts)
    per_expert, why = (num_experts,), "one entry per expert of all ranks"
    require_operand("expert_map", expert_map, (torch.int32, torch.int64), per_expert, why, topk_ids.device)
    countable = 1 <= num_experts <= MAX_EXPERTS
    refusal = None if countable else f"the kernel takes 1 to {MAX_EXPERTS} experts; got {num_experts}"
    decision = plan_kernel("moe_align_block_size", topk_ids.device, refusal, unavailable(topk_ids.device) or refusal)
    taken = decision.accepted
    if taken is None or taken.path != "kernel" or is_traced("moe_align_block_size"):
        return decision
    few = _is_for_few(slots, block_m, topk_ids.device)
    return replace(decision, accepted=replace(taken, kernel=FEW)) if few else decision


def _key(topk_ids: torch.Tensor, block_m: int, num_experts: int, expert_map: torch.Tensor | None) -> object:
    mapped = None if expert_map is None else (expert_map.shape, expert_map.dtype, expert_map.device)
    return topk_ids.shape, topk_ids.dtype, topk_ids.device, block_m, num_experts, mapped


@operator(_plan, key=_key, outs=("out",))
def moe_align_block_size(
    taken: Accepted,
    topk_ids: torch.Tensor,
    block_m: int,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    *,
    out: SortedSlots | None = None,
) -> SortedSlots:
    """Sort slots by expert and pad each expert's slots to whole tiles of ``block_m``.

    Experts come in ascending order, an expert's slots too; the pad value is the number of slots. The buffers have the
    length of the worst case, T · top_k + E · (block_m - 1) rounded up to ``block_m``, so nothing waits for the device
    and a graph can capture it.

    Args:
        taken: the path that was decided; callers do not pass it.
        topk_ids: int32 or int64 [T, top_k]; slots of ids outside 0 … ``num_experts`` - 1 are left out.
        block_m: entries of a tile.
        num_experts: E, all ranks' experts where there is an ``expert_map``; more than 1024 are sorted by torch.
        expert_map: int32 or int64 [``num_experts``], the local number of each expert, within int32; -1 for one of
            another rank, whose tiles stay with expert -1 and are skipped.
        out: the three tensors to write into.

    Returns:
        The sorted slots; unpacks into (sorted_token_ids, expert_ids, num_tokens_post_padded).

    Raises:
        GuardError: ``topk_ids`` or ``expert_map`` of another shape, dtype or device, ``block_m`` < 1,
            ``num_experts`` < 0, more than 2^20 of them, or buffers of more than 2^31 - 1 entries.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> slots = hipforge.moe_align_block_size(torch.tensor([[1], [0], [1]], dtype=torch.int32), 4, 2)
        >>> slots.sorted_token_ids[:8].tolist(), slots.expert_ids[:2].tolist()
        ([1, 3, 3, 3, 0, 2, 3, 3], [0, 1])
    """
    sizes = (*aligned_sizes(topk_ids.numel(), block_m, num_experts), 1)
    if out is None:
        out = SortedSlots(*(topk_ids.new_empty(size, dtype=torch.int32) for size in sizes))
    else:
        if not isinstance(out, tuple | list) or len(out) != len(sizes):
            raise GuardError("out must be three tensors: sorted_token_ids, expert_ids, num_tokens_post_padded")
        for tensor, size in zip(out, sizes, strict=True):
            require_out(tensor, (size,), torch.int32, topk_ids.device)
    if taken.path == "kernel":
        mapped = None if expert_map is None else packed(expert_map, *out)
        given = *out, packed(topk_ids, *out), mapped, block_m, num_experts
        if is_traced("moe_align_block_size"):
            _traced_launch(*given, programmatic.active())
        elif taken.kernel == FEW:
            moe_align_few_out(*given, programmatic.active())
        else:
            moe_align_block_size_out(*given, programmatic.active())
    elif taken.path == "triton":
        from hipforge.ops.triton import routing as fallback

        fallback.moe_align_block_size(*out, topk_ids, expert_map, block_m, num_experts)
    else:
        ids, experts, total = reference.moe_align_block_size(topk_ids, block_m, num_experts)
        if expert_map is not None and num_experts:
            local = expert_map.to(torch.int32)[experts.clamp(min=0).to(torch.int64)]
            experts = torch.where(experts < 0, experts, local)
        for written, result in zip(out, (ids, experts, total), strict=True):
            written.copy_(result)
    return SortedSlots(*out)
