"""What the raw MX-FP8 ops share: the result that they allocate."""

from __future__ import annotations

import torch

from hipforge.ops.core.checks import require_rank


def new_result(Xq: torch.Tensor, Wq: torch.Tensor) -> torch.Tensor:
    """Return memory for Xq @ Wq^T, bfloat16 [M, N]; raises GuardError for operands that are not [M, K] and [N, K]."""
    require_rank("Xq", Xq, 2, "[M, K]")
    require_rank("Wq", Wq, 2, "[N, K]")
    return torch.empty((Xq.shape[0], Wq.shape[0]), dtype=torch.bfloat16, device=Xq.device)
