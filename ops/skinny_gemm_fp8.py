"""Skinny fp8 GEMM for decoding (gfx942 and gfx950): D += scale * (A @ B) with few rows.

Shapes and dtypes everywhere in this module: ``a`` [m, k] row-major and ``b`` [k, n] column-major (``b.stride(0) == 1``,
``b.stride(1)`` the pitch) hold e4m3 in the format of the architecture, ``torch.float8_e4m3fnuz`` on gfx942 and
``torch.float8_e4m3fn`` on gfx950; ``scale`` is one float32, the product of both operands' scales; the result is float16
[m, n]; k is a multiple of 32.

Two ways to add up. The deterministic one (the default) keeps fp32 partial sums per split of k and consumer and adds
them in a fixed order: results depend on nothing but the operands and the configuration. The atomic one adds rounded
fp16 pairs to the output as they come: no workspace, but the result varies from run to run and carries one fp16 rounding
per split and consumer; it needs an even n.
"""

from __future__ import annotations

import torch

from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core import dispatch
from hipforge.ops.core.dispatch import Refused, planned_by
from hipforge.ops.reference import skinny as reference
from hipforge.ops.skinny_gemm_fp8_plan import ALIGNMENT, FORMATS, MAX_BYTES, check_operands, plan_skinny_gemm
from hipforge.ops.skinny_gemm_fp8_space import A_LANES, B_LANES, OP_M, OPS, Configuration, require

__all__ = ["A_LANES", "B_LANES", "FORMATS", "OPS", "OP_M", "run_skinny_gemm", "skinny_gemm", "skinny_gemm_fp8_out"]


@compile_ops(
    "module_skinny_gemm_fp8",
    variant=lambda out, a, b, scale, workspace, accumulate, split_k, op_m, a_lanes, b_lanes, ops, *_: {
        "HF_OP_M": op_m,
        "HF_A_LANES": a_lanes,
        "HF_B_LANES": b_lanes,
        "HF_OPS": ops,
    },
    mutates=("out", "workspace"),
)
def skinny_gemm_fp8_out(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    workspace: torch.Tensor | None,
    accumulate: bool,
    split_k: int,
    op_m: int,
    a_lanes: int,
    b_lanes: int,
    ops: int,
    a_producers: int,
    b_producers: int,
    consumers: int,
    qsize: int,
    workgroups: int,
) -> None:
    """Write or add (``accumulate``) scale * (a @ b) to ``out`` fp16 [m, n].

    ``workspace`` float32 [split_k * consumers, m, n] holds the partial sums; None adds with packed fp16 atomics, which
    takes an even n and ``accumulate=True``.
    """


@planned_by(plan_skinny_gemm)
def skinny_gemm(
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
        a: activations, e4m3 [m, k], any strides; the kernel takes m from 1 to 32 and any k that is a multiple of 32.
        b: weights, e4m3 [k, n] of a's dtype; column-major with a pitch that is a multiple of 16 is used in place,
            anything else is copied first.
        scale: one float32.
        output: float16 [m, n], contiguous, added to in place and returned; None makes a new tensor.
        split_k: parts that k is cut into, at most as many as there are k blocks; None for the tuned table's or the
            default rule's.
        deterministic: fp32 partial sums in a fixed order; False adds with packed fp16 atomics, whose order, and with it
            the rounding, varies from run to run (n must be even).

    Returns:
        float16 [m, n].

    Raises:
        GuardError: dtypes, shapes or devices that are not accepted, a split_k below 1, an odd n with
            ``deterministic=False``.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    taken = plan_skinny_gemm(a, b, scale, output, split_k, deterministic=deterministic).accepted
    if taken is not None and taken.path == "kernel":
        return run_skinny_gemm(a, b, scale, output, deterministic=deterministic, **taken.configuration)
    result = reference.skinny_gemm(a, b, scale, output)
    return result if output is None else output.copy_(result)


def _column_major(b: torch.Tensor) -> torch.Tensor:
    k, n = b.shape
    pitch_fits = n == 1 or (b.stride(1) % ALIGNMENT == 0 and b.stride(1) >= k)
    span = k if n == 1 else (n - 1) * b.stride(1) + k
    if b.stride(0) == 1 and pitch_fits and span <= MAX_BYTES and b.data_ptr() % ALIGNMENT == 0:
        return b
    return b.t().clone(memory_format=torch.contiguous_format).t()


def run_skinny_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None = None,
    *,
    deterministic: bool = True,
    split_k: int = 1,
    op_m: int = 8,
    a_lanes: int = 1,
    b_lanes: int = 2,
    ops: int = 4,
    a_producers: int = 2,
    b_producers: int = 6,
    consumers: int = 2,
    qsize: int = 4,
    workgroups: int | None = None,
) -> torch.Tensor:
    """Run the kernel with the configuration given; any m and n. Shapes and dtypes as in the module's docstring.

    Args:
        a: e4m3 [m, k].
        b: e4m3 [k, n].
        scale: one float32.
        output: float16 [m, n], added to in place; None makes a new tensor.
        deterministic: as for :func:`skinny_gemm`.
        split_k: parts that k is cut into, at most the number of k blocks.
        op_m: rows of a matrix instruction: 8 (sparse), 16 or 32.
        a_lanes: instructions side by side along m: 1 to 3; a work-group computes op_m a_lanes rows at once.
        b_lanes: and along n: 1 to 6; it computes 16 b_lanes columns (32 b_lanes for op_m 32) at once.
        ops: depth of a k block, 4 or 8 instructions of gfx942: 512 / op_m * ops of k.
        a_producers: waves that load a.
        b_producers: waves that load b.
        consumers: waves that multiply; all three together at most 16.
        qsize: slots of the LDS queue, at least a_producers / a_lanes, b_producers / b_lanes and consumers.
        workgroups: size of the persistent grid; None for one per compute unit.

    Returns:
        float16 [m, n].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    m, n, k = check_operands(a, b, scale, output)
    target = dispatch.target_of(a.device)
    if not isinstance(target, Refused) and target[0] in FORMATS:  # the stub refuses the other devices
        chosen = Configuration(op_m, a_lanes, b_lanes, ops, a_producers, b_producers, consumers, qsize, split_k)
        require(chosen, target[0], k)
        workgroups = target[1] if workgroups is None else workgroups
    accumulate = output is not None or not deterministic
    if output is None:
        allocate = torch.zeros if accumulate else torch.empty
        output = allocate((m, n), dtype=torch.float16, device=a.device)
    a = a.contiguous()
    if a.data_ptr() % ALIGNMENT:
        a = a.clone()
    workspace = None
    if deterministic:
        workspace = torch.empty((max(split_k * consumers, 1), m, n), dtype=torch.float32, device=a.device)
    skinny_gemm_fp8_out(
        output, a, _column_major(b), scale, workspace, accumulate,
        split_k, op_m, a_lanes, b_lanes, ops, a_producers, b_producers, consumers, qsize,
        1 if workgroups is None else workgroups,
    )  # fmt: skip
    return output
