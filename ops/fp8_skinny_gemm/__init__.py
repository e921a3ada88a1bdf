"""Skinny fp8 GEMM for decoding: D += scale * (A @ B) with few rows.

Shapes and dtypes everywhere in this package: ``a`` [m, k] row-major and ``b`` [k, n] column-major (``b.stride(0)`` 1,
``b.stride(1)`` the pitch) hold e4m3 in the format of the architecture, ``torch.float8_e4m3fnuz`` on gfx942 and
``torch.float8_e4m3fn`` on gfx950 and sm_90; ``scale`` is one float32, the product of both operands' scales; the result
is float16 [m, n]; k is a multiple of 32.

AMD GPUs have two kernels. ``wave_split`` (:func:`skinny_wave_split`) cuts k into parts for the waves of a work-group,
and where there are few columns for several work-groups; all sums are added in a fixed order, in one launch. ``queue``
(:func:`run_skinny_gemm`) has waves that load blocks into a queue in LDS and waves that multiply them. It has two ways
to add up: the deterministic one keeps fp32 partial sums per split of k and consumer and adds them in a fixed order in a
second launch; the atomic one adds rounded fp16 pairs to the output as they come: no workspace, but the result varies
from run to run and carries one fp16 rounding per split and consumer, and n must be even. The tuned table chooses the
kernel, else a rule: ``wave_split`` for every k up to 2^24. :func:`hipforge.explain` tells. sm_90 has a third instead,
``row_stream``, which streams b once through all multiprocessors in one launch, its sums in a fixed order, and from 9
rows on takes ``torch._scaled_mm``.
"""

from __future__ import annotations

import torch

from hipforge.ops.core.dispatch import Accepted
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import written_into
from hipforge.ops.fp8_skinny_gemm.family import FAMILY
from hipforge.ops.fp8_skinny_gemm.kernels import launch
from hipforge.ops.fp8_skinny_gemm.kernels.queue import run_skinny_gemm, skinny_gemm_fp8_out
from hipforge.ops.fp8_skinny_gemm.kernels.wave_split import skinny_wave_split, skinny_wave_split_out
from hipforge.ops.fp8_skinny_gemm.raw import FORMATS, Problem
from hipforge.ops.fp8_skinny_gemm.space import A_LANES, B_LANES, OP_M, OPS
from hipforge.ops.reference import skinny as reference

PUBLIC = ("skinny_gemm",)

__all__ = [
    "A_LANES", "B_LANES", "FAMILY", "FORMATS", "OPS", "OP_M", "run_skinny_gemm", "skinny_gemm", "skinny_gemm_fp8_out",
    "skinny_wave_split", "skinny_wave_split_out",
]  # fmt: skip


def _new(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.empty((a.shape[0], b.shape[1]), dtype=torch.float16, device=a.device)


@operator(FAMILY.plan_total, fake=_new, adds="output")
def skinny_gemm(
    taken: Accepted,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None = None,
    split_k: int | None = None,
    *,
    deterministic: bool = True,
) -> torch.Tensor:
    """Return ``output + scale * (a @ b)``, always: the kernel where it applies, else torch.

    Args:
        taken: the path that was decided; callers do not pass it.
        a: activations, e4m3 [m, k], any strides; the kernel takes m from 1 to 32 and any k that is a multiple of 32.
        b: weights, e4m3 [k, n] of a's dtype; column-major with a pitch that is a multiple of 16 is used in place,
            anything else is copied first.
        scale: one float32.
        output: float16 [m, n], contiguous, added to in place and returned; None makes a new tensor.
        split_k: None leaves kernel and configuration to the tuned table and the default rule. A number asks for the
            queue kernel with so many parts of k, at most as many as there are k blocks; on sm_90, which does not
            have it, torch computes.
        deterministic: sums in a fixed order. False lets the queue kernel, where it is chosen, add with packed fp16
            atomics, whose order, and with it the rounding, varies from run to run (n must be even).

    Returns:
        float16 [m, n].

    Raises:
        GuardError: dtypes, shapes or devices that are not accepted, a split_k below 1, an odd n with
            ``deterministic=False``.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> a, b = (torch.randn(*shape).to(torch.float8_e4m3fn) for shape in ((4, 256), (64, 256)))
        >>> hipforge.skinny_gemm(a, b.t(), torch.tensor([0.5])).shape
        torch.Size([4, 64])
    """
    # The decision was made from shapes; what it did not see is checked with every call.
    Problem.of(a, b, scale, output, split_k, deterministic=deterministic)
    if taken.path == "kernel":
        return launch(a, b, scale, output, taken, deterministic=deterministic)
    result = reference.skinny_gemm(a, b, scale, output)
    return written_into(output, result)
