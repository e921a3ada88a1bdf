"""The experts of each token and their weights, from the router's logits, in one launch."""

from __future__ import annotations

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops import reference
from hipforge.ops.core import programmatic
from hipforge.ops.core.checks import require_choice, require_dtype, require_int, require_operand, require_rank
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.formats import FLOATS
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given
from hipforge.ops.triton.launch import unavailable

PUBLIC = ("topk_gating",)

SCORINGS = ("softmax", "sigmoid")
MAX_EXPERTS = 512
MAX_CHOICES = 16
MAX_SHARED = 16


@compile_ops(
    "module_topk_gating",
    variant=lambda weights, ids, logits, *rest: {"HF_INPUT": FLOATS[logits.dtype]},
    mutates=("weights", "ids"),
)
def topk_gating_out(
    weights: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    choices: int,
    sigmoid: bool,
    renormalize: bool,
    groups: int,
    topk_groups: int,
    scale: float,
    shared: int,
    programmatic: bool,
) -> None:
    """Write ``weights`` and ``ids`` as :func:`topk_gating` says; without groups both numbers of them are 1."""


def _plan(
    logits: torch.Tensor,
    k: int,
    scoring: str,
    bias: torch.Tensor | None,
    groups: int | None,
    topk_groups: int | None,
    shared_experts: int,
) -> Decision:
    require_rank("logits", logits, 2, "[T, E]")
    require_dtype("logits", logits, tuple(FLOATS))
    require_choice("scoring", scoring, SCORINGS)
    experts = logits.shape[1]
    if not 1 <= experts <= MAX_EXPERTS:
        raise GuardError(f"logits must have 1 to {MAX_EXPERTS} experts; got {experts}")
    require_operand("bias", bias, (torch.float32,), (experts,), "one per expert", logits.device)
    candidates = experts
    if (groups is None) != (topk_groups is None):
        raise GuardError(f"groups and topk_groups belong together; got {groups!r} and {topk_groups!r}")
    if groups is not None and topk_groups is not None:
        require_int("groups", groups, 1)
        if experts % groups:
            raise GuardError(f"groups must divide the number of experts, {experts}; got {groups}")
        require_int("topk_groups", topk_groups, 1)
        if topk_groups > groups:
            raise GuardError(f"topk_groups must be 1 to groups = {groups}; got {topk_groups}")
        candidates = experts // groups * topk_groups
    require_int("k", k)
    if not 1 <= k <= min(MAX_CHOICES, candidates):
        raise GuardError(
            f"k must be 1 to {MAX_CHOICES} and at most the experts in the kept groups, {candidates}; got {k}"
        )
    require_int("shared_experts", shared_experts)
    if not 0 <= shared_experts <= MAX_SHARED:
        raise GuardError(f"shared_experts must be 0 to {MAX_SHARED}; got {shared_experts}")
    size = experts // (groups or 1)
    uneven = groups is not None and size & (size - 1)
    refusal = f"Triton groups are a power of two of experts; these have {size}" if uneven else None
    return plan_kernel("topk_gating", logits.device, None, unavailable(logits.device) or refusal)


def _new(logits: torch.Tensor, k: int, shared_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], k + shared_experts)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@operator(_plan, fake=_new, outs=("out", "ids_out"))
def topk_gating(
    taken: Accepted,
    logits: torch.Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    renormalize: bool = True,
    groups: int | None = None,
    topk_groups: int | None = None,
    scale: float = 1.0,
    shared_experts: int = 0,
    out: torch.Tensor | None = None,
    ids_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts for each token and weigh them.

    Scores are ``softmax(logits)`` over all experts or ``sigmoid(logits)``, in fp32. The k experts of largest logit are
    chosen, with ``bias`` those of largest score + bias; equal ones by index, NaN last. A weight is the expert's score,
    over the sum of the chosen scores + 1e-20 with ``renormalize``, times ``scale``. With ``groups`` only experts of the
    ``topk_groups`` best groups can be chosen: a group's value is that of its best expert, with ``bias`` the sum of its
    two best (or its only one).

    A NaN logit takes no part in the softmax of the others; where it is chosen all the same, its weight is NaN. Where
    logits are infinite, those of +inf share the softmax.

    Example:
        >>> import torch
        >>> import hipforge.ops.reference as reference
        >>> weights, ids = reference.topk_gating(torch.tensor([[0.0, 2.0, 1.0]]), 2)
        >>> ids.tolist()
        [[1, 2]]

    Args:
        taken: the path that was decided; callers do not pass it.
        logits: float32, float16 or bfloat16 [T, E], E at most 512; rows contiguous.
        k: 1 to 16, at most the experts in the kept groups.
        scoring: ``softmax`` or ``sigmoid``.
        bias: float32 [E], added to the scores for the choice only.
        renormalize: make the weights of a token sum to ``scale``.
        groups: a divisor of E: groups of E / groups neighbouring experts.
        topk_groups: groups to keep, 1 to ``groups``; given together with it.
        scale: finite.
        shared_experts: 0 to 16: ids E, E + 1, ... with weight 1 after the chosen ones.
        out: contiguous float32 [T, k + shared_experts] to write the weights into.
        ids_out: contiguous int32 [T, k + shared_experts] to write the ids into.

    Returns:
        ``(weights, ids)``: float32 and int32, both [T, k + shared_experts], in the order of choice.

    Raises:
        GuardError: an argument is not of this form (ArchError: a device that is neither gfx942 nor gfx950).
        BuildError, LaunchError: the kernel could not be built or run.
    """
    shape = logits.shape[0], k + shared_experts
    weights = new_or_given(out, shape, torch.float32, logits.device)
    ids = new_or_given(ids_out, shape, torch.int32, logits.device, "ids_out")
    counts = (1, 1) if groups is None or topk_groups is None else (groups, topk_groups)
    arguments = weights, ids, logits, bias, k, scoring == "sigmoid", renormalize, *counts, scale, shared_experts
    if taken.path == "kernel":
        topk_gating_out(*arguments, programmatic.active())
    elif taken.path == "triton":
        from hipforge.ops.triton import routing as fallback

        fallback.topk_gating(*arguments)
    else:
        results = reference.topk_gating(
            logits, k, scoring=scoring, bias=bias, renormalize=renormalize, groups=counts[0], topk_groups=counts[1],
            scale=float(scale), shared_experts=shared_experts,
        )  # fmt: skip
        weights.copy_(results[0])
        ids.copy_(results[1])
    return weights, ids
