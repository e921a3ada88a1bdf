"""The router's product, in fp32 whatever its operands are: logits decide which experts run."""

from __future__ import annotations

import math

import torch

from hipforge.jit.compile_ops import compile_ops
from hipforge.ops import reference
from hipforge.ops.core import programmatic
from hipforge.ops.core.alignment import LOAD_BYTES, packed, require_copyable
from hipforge.ops.core.checks import require_dtype, require_operand, require_rank
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.formats import FLOATS
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given
from hipforge.ops.triton.launch import unavailable

PUBLIC = ("router_gemm",)

# torch dtype -> the module's variant
_WEIGHTS = {torch.float32: "f32", torch.bfloat16: "bf16"}
PIECE = 8  # elements of H that a lane loads at once
MAX_BYTES = 2**31 - 1  # of w, which one raw buffer addresses


@compile_ops(
    "module_router_gemm",
    variant=lambda out, x, w, *rest: {"HF_INPUT": FLOATS[x.dtype], "HF_WEIGHT": _WEIGHTS[w.dtype]},
)
def router_gemm_out(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, programmatic: bool
) -> None:
    """Write ``out`` as :func:`router_gemm` says."""


def _plan(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> Decision:
    require_rank("x", x, 2, "[T, H]")
    require_dtype("x", x, tuple(FLOATS))
    require_rank("w", w, 2, "[E, H]")
    require_operand("w", w, tuple(_WEIGHTS), (w.shape[0], x.shape[1]), "H of x", x.device)
    require_operand("bias", bias, (torch.float32,), w.shape[:1], "one per expert", x.device)
    refusal = None
    size = math.prod(w.shape) * w.dtype.itemsize
    if not size or w.shape[1] % PIECE:
        refusal = f"the kernel needs experts and H a multiple of {PIECE}; got w {list(w.shape)}"
    elif size > MAX_BYTES:
        refusal = f"the kernel addresses {MAX_BYTES} bytes of w; got {size}"
    return plan_kernel("router_gemm", x.device, refusal, unavailable(x.device))


def _new(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32)


@operator(_plan, fake=_new, outs=("out",))
def router_gemm(
    taken: Accepted,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x @ w.T + bias`` in fp32: the logits of a router.

    Products and sums are fp32, in an order that depends only on shapes, and the bias is added last. Made for a few
    tokens (up to 32 of them times up to 512 experts); any number is taken.

    Args:
        taken: the path that was decided; callers do not pass it.
        x: float32, float16 or bfloat16 [T, H]; rows contiguous.
        w: float32 or bfloat16 [E, H]. Where H is not a multiple of 8, torch computes the product.
        bias: float32 [E].
        out: contiguous float32 [T, E] to write into.

    Returns:
        float32 [T, E]; ``out`` itself where it is given.

    Raises:
        GuardError: an argument is not of this form (ArchError: a device that is neither gfx942 nor gfx950).
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> hipforge.router_gemm(torch.ones(1, 8), torch.eye(8)[:2], torch.tensor([0.0, 1.0])).tolist()
        [[1.0, 2.0]]
    """
    out = new_or_given(out, (x.shape[0], w.shape[0]), torch.float32, x.device)
    if taken.path == "kernel":
        router_gemm_out(out, _readable(x, out), _readable(packed(w, out), out), bias, programmatic.active())
    elif taken.path == "triton":
        from hipforge.ops.triton import routing as fallback

        fallback.router_gemm(out, x, w, bias)
    else:
        out.copy_(reference.router_gemm(x, w, bias))
    return out


def _readable(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if its rows are not aligned to the 16 bytes of a lane's load."""
    rows_fit = x.stride(1) == 1 and x.stride(0) * x.element_size() % LOAD_BYTES == 0
    if rows_fit and x.data_ptr() % LOAD_BYTES == 0:
        return x
    require_copyable(x, out)
    return x.clone(memory_format=torch.contiguous_format)
