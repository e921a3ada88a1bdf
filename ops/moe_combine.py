"""The sum over a token's experts, in one launch."""

from __future__ import annotations

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops import reference
from hipforge.ops.core import programmatic
from hipforge.ops.core.checks import require_dtype, require_int, require_operand, require_rank
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given
from hipforge.ops.triton.launch import unavailable

PUBLIC = ("moe_combine",)

# torch dtype -> the module's variant
_INDICES = (torch.int32, torch.int64)
_INT32_MAX = 2**31 - 1
_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@compile_ops(
    "module_moe_combine",
    variant=lambda out, rows, *rest: {"HF_INPUT": _DTYPES[rows.dtype], "HF_OUTPUT": _DTYPES[out.dtype]},
)
def moe_combine_out(
    out: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    top_k: int,
    experts: int,
    local: int,
    programmatic: bool,
) -> None:
    """Write ``out`` as :func:`moe_combine` says; ``experts`` and ``local`` are -1 for no upper limit."""


def _plan(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    top_k: int | None,
    num_experts: int | None,
    num_local_experts: int | None,
) -> Decision:
    require_rank("rows", rows, 2, "[T * k, N]")
    require_dtype("rows", rows, tuple(_DTYPES))
    for name, tensor in {"weights": weights, "ids": ids}.items():
        if tensor is not None:
            require_rank(name, tensor, 2, "[T, k]")
    k = _top_k(weights, ids, top_k)
    if k < 1 or rows.shape[0] % k:
        raise GuardError(f"rows must have k = {k} for each token; got {rows.shape[0]}")
    tokens = rows.shape[0] // k
    require_operand("weights", weights, (torch.float32,), (tokens, k), "one weight per slot", rows.device)
    require_operand("ids", ids, _INDICES, (tokens, k), "one expert per slot", rows.device)
    if num_experts is not None:
        require_int("num_experts", num_experts, 0)
    if num_local_experts is not None:
        require_int("num_local_experts", num_local_experts, 0)
    if expert_map is not None:
        if ids is None:
            raise GuardError("expert_map needs ids, whose experts it maps; got none")
        require_rank("expert_map", expert_map, 1, "[E]")
        shape = expert_map.shape if num_experts is None else (num_experts,)
        require_operand("expert_map", expert_map, _INDICES, shape, "one entry per expert, num_experts", rows.device)
    return plan_kernel("moe_combine", rows.device, None, unavailable(rows.device))


def _new(rows: torch.Tensor, weights: torch.Tensor | None, ids: torch.Tensor | None, top_k: int | None) -> torch.Tensor:
    return rows.new_empty((rows.shape[0] // _top_k(weights, ids, top_k), rows.shape[1]))


@operator(_plan, fake=_new, outs=("out",))
def moe_combine(
    taken: Accepted,
    rows: torch.Tensor,
    weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    top_k: int | None = None,
    num_experts: int | None = None,
    num_local_experts: int | None = None,
) -> torch.Tensor:
    """Sum the rows of each token's slots: ``out[t] = sum over i of weights[t, i] * rows[t * k + i]``.

    In fp32, each product and each sum rounded, in the order of i, then rounded once to out's dtype. A slot without an
    expert here is left out and its row not read: an id below 0 or from ``num_experts`` on, or one that ``expert_map``
    makes negative, or ``num_local_experts`` or more. A token whose slots are all left out gets zeros.

    Args:
        taken: the path that was decided; callers do not pass it.
        rows: contiguous float32, float16 or bfloat16 [T * k, N].
        weights: float32 [T, k]; None where the rows are weighted already.
        ids: int32 or int64 [T, k]; None: every slot counts.
        expert_map: int32 or int64 [E]: the local number of each expert, negative for one that is not here.
        out: contiguous [T, N] of any of these dtypes; that of ``rows`` by default.
        top_k: k, needed where neither weights nor ids say it.
        num_experts: E, where there is no ``expert_map``; None: only negative ids are left out.
        num_local_experts: the experts that are here, whose local numbers are below it; None: only negative numbers in
            ``expert_map`` are left out.

    Returns:
        [T, N]; ``out`` itself where it is given.

    Raises:
        GuardError: an argument is not of this form (ArchError: a device that is neither gfx942 nor gfx950).
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> hipforge.moe_combine(rows, torch.tensor([[0.5, 2.0]])).tolist()
        [[6.5, 9.0]]
    """
    k = _top_k(weights, ids, top_k)
    if out is not None:
        require_dtype("out", out, tuple(_DTYPES))
    dtype = rows.dtype if out is None else out.dtype
    out = new_or_given(out, (rows.shape[0] // k, rows.shape[1]), dtype, rows.device)
    limit = num_experts if expert_map is None else expert_map.numel()
    local = None if num_local_experts is None else min(num_local_experts, _INT32_MAX)
    if taken.path == "kernel":
        known, own = (-1 if most is None else most for most in (limit, local))
        moe_combine_out(out, rows, weights, ids, expert_map, k, known, own, programmatic.active())
    elif taken.path == "triton":
        from hipforge.ops.triton import routing as fallback

        fallback.moe_combine(out, rows, weights, ids, expert_map, k, limit, local)
    else:
        out.copy_(reference.moe_combine(rows, k, weights, ids, expert_map, num_experts, out.dtype, local))
    return out


def _top_k(weights: torch.Tensor | None, ids: torch.Tensor | None, top_k: int | None) -> int:
    given = [tensor.shape[1] for tensor in (weights, ids) if tensor is not None]
    if top_k is not None:
        given.append(require_int("top_k", top_k, 1))
    if not given:
        raise GuardError("top_k must be given where there are neither weights nor ids, which are [T, k]")
    if any(k != given[0] for k in given):
        raise GuardError(f"weights, ids and top_k must agree on k; got {', '.join(map(str, given))}")
    return given[0]
