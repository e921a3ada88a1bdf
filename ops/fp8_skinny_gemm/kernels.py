"""The stub of the skinny fp8 GEMM's module, and its call in an explicit configuration."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch

from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core import dispatch
from hipforge.ops.core.dispatch import Refused
from hipforge.ops.fp8_skinny_gemm.family import ALIGNMENT, FORMATS, MAX_BYTES, Problem
from hipforge.ops.fp8_skinny_gemm.space import Configuration, require


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


# The configuration as the stub takes it.
_IN_ORDER = operator.itemgetter(
    "split_k", "op_m", "a_lanes", "b_lanes", "ops", "a_producers", "b_producers", "consumers", "qsize"
)


def _column_major(b: torch.Tensor) -> torch.Tensor:
    k, n = b.shape
    pitch_fits = n == 1 or (b.stride(1) % ALIGNMENT == 0 and b.stride(1) >= k)
    span = k if n == 1 else (n - 1) * b.stride(1) + k
    if b.stride(0) == 1 and pitch_fits and span <= MAX_BYTES and b.data_ptr() % ALIGNMENT == 0:
        return b
    return b.t().clone(memory_format=torch.contiguous_format).t()


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None,
    configuration: Mapping[str, int],
    *,
    deterministic: bool,
    workgroups: int | None = None,
) -> torch.Tensor:
    """Run the kernel on operands that were checked; the arguments are those of :func:`run_skinny_gemm`."""
    m, n = a.shape[0], b.shape[1]
    accumulate = output is not None or not deterministic
    if output is None:
        allocate = torch.zeros if accumulate else torch.empty
        output = allocate((m, n), dtype=torch.float16, device=a.device)
    a = a.contiguous()
    if a.data_ptr() % ALIGNMENT:
        a = a.clone()
    workspace = None
    if deterministic:
        parts = max(configuration["split_k"] * configuration["consumers"], 1)
        workspace = torch.empty((parts, m, n), dtype=torch.float32, device=a.device)
    if workgroups is None:
        target = dispatch.target_of(a.device)
        workgroups = 1 if isinstance(target, Refused) else target[1]  # the stub refuses a device without kernels
    values: tuple[int, ...] = (*_IN_ORDER(configuration), workgroups)
    skinny_gemm_fp8_out(output, a, _column_major(b), scale, workspace, accumulate, *values)
    return output


def run_skinny_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None = None,
    *,
    deterministic: bool = True,
    workgroups: int | None = None,
    **configuration: int,
) -> torch.Tensor:
    """Run the kernel with the configuration given; any m and n. Shapes as in :mod:`hipforge.ops.fp8_skinny_gemm`.

    Args:
        a: e4m3 [m, k].
        b: e4m3 [k, n].
        scale: one float32.
        output: float16 [m, n], added to in place; None makes a new tensor.
        deterministic: as for :func:`hipforge.skinny_gemm`.
        workgroups: size of the persistent grid; None for one per compute unit.
        **configuration: attributes of :class:`hipforge.ops.fp8_skinny_gemm.space.Configuration` by name, ``split_k``,
            ``op_m``, ``a_lanes`` ...; its defaults stand for what is not given.

    Returns:
        float16 [m, n].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    k = Problem.of(a, b, scale, output).k
    chosen = Configuration(**configuration)
    target = dispatch.target_of(a.device)
    if not isinstance(target, Refused) and target[0] in FORMATS:  # the stub refuses the other devices
        require(chosen, target[0], k)
    return launch(a, b, scale, output, chosen.parameters(), deterministic=deterministic, workgroups=workgroups)
