"""The queue kernel of the skinny fp8 GEMM: its stub and its call in a configuration; and the call of either kernel."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch

from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core import dispatch
from hipforge.ops.core.arguments import require_readable
from hipforge.ops.core.dispatch import Accepted, Refused
from hipforge.ops.fp8_skinny_gemm import wave_split
from hipforge.ops.fp8_skinny_gemm.family import ALIGNMENT, FORMATS, MAX_BYTES, Problem
from hipforge.ops.fp8_skinny_gemm.space import Configuration, require


@compile_ops(
    "module_fp8_skinny_gemm_queue",
    variant=lambda out, a, b, scale, workspace, accumulate, split_k, op_m, a_lanes, b_lanes, ops, *_: {
        "HF_TILE": 1000 * op_m + 100 * a_lanes + 10 * b_lanes + ops
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


# The configurations as the stubs take them.
_WAVE_SPLIT_IN_ORDER = operator.itemgetter("rows", "columns", "waves", "split_k")
_IN_ORDER = operator.itemgetter(
    "split_k", "op_m", "a_lanes", "b_lanes", "ops", "a_producers", "b_producers", "consumers", "qsize"
)


def _row_major(a: torch.Tensor) -> torch.Tensor:
    if a.is_contiguous() and a.data_ptr() % ALIGNMENT == 0:
        return a
    require_readable(a=a)
    return a.clone(memory_format=torch.contiguous_format)


def _column_major(b: torch.Tensor, most: int = MAX_BYTES) -> torch.Tensor:
    k, n = b.shape
    pitch_fits = n == 1 or (b.stride(1) % ALIGNMENT == 0 and k <= b.stride(1) <= most)
    span = k if n == 1 else (n - 1) * b.stride(1) + k
    if b.stride(0) == 1 and pitch_fits and span <= MAX_BYTES and b.data_ptr() % ALIGNMENT == 0:
        return b
    require_readable(b=b)
    return b.t().clone(memory_format=torch.contiguous_format).t()


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None,
    taken: Accepted,
    *,
    deterministic: bool,
) -> torch.Tensor:
    """Run what was decided on checked operands, which are copied where the kernel does not take their layout."""
    if taken.kernel != wave_split.KERNEL:
        return _launch_queue(a, b, scale, output, taken.configuration, deterministic=deterministic)
    rows, columns, waves, split_k = _WAVE_SPLIT_IN_ORDER(taken.configuration)
    m, n = a.shape[0], b.shape[1]
    out = torch.empty((m, n), dtype=torch.float16, device=a.device) if output is None else output
    workspace = None
    if split_k > 1:
        configuration = wave_split.Configuration(rows, columns, waves, split_k)
        workspace = wave_split.split_workspace(m, n, configuration, a.device)
    left, right = _row_major(a), _column_major(b, wave_split.MAX_K)
    accumulate = output is not None
    wave_split.skinny_wave_split_out(out, left, right, scale, workspace, accumulate, rows, columns, waves, split_k)
    return out


def _launch_queue(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None,
    configuration: Mapping[str, int],
    *,
    deterministic: bool,
    workgroups: int | None = None,
) -> torch.Tensor:
    m, n = a.shape[0], b.shape[1]
    accumulate = output is not None or not deterministic
    if output is None:
        allocate = torch.zeros if accumulate else torch.empty
        output = allocate((m, n), dtype=torch.float16, device=a.device)
    workspace = None
    if deterministic:
        parts = max(configuration["split_k"] * configuration["consumers"], 1)
        workspace = torch.empty((parts, m, n), dtype=torch.float32, device=a.device)
    if workgroups is None:
        target = dispatch.target_of(a.device)
        workgroups = 1 if isinstance(target, Refused) else target[1]  # the stub refuses a device without kernels
    values: tuple[int, ...] = (*_IN_ORDER(configuration), workgroups)
    skinny_gemm_fp8_out(output, _row_major(a), _column_major(b), scale, workspace, accumulate, *values)
    return output


def run_skinny_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None = None,
    *,
    deterministic: bool = True,
    workgroups: int | None = None,
    op_m: int = 8,
    a_lanes: int = 1,
    b_lanes: int = 2,
    ops: int = 4,
    a_producers: int = 2,
    b_producers: int = 6,
    consumers: int = 2,
    qsize: int = 4,
    split_k: int = 1,
) -> torch.Tensor:
    """Run the queue kernel in the configuration given; any m and n. Shapes as in :mod:`hipforge.ops.fp8_skinny_gemm`.

    A work-group computes tiles of op_m a_lanes rows and 16 b_lanes columns (32 b_lanes with op_m 32).

    Args:
        a: e4m3 [m, k].
        b: e4m3 [k, n].
        scale: one float32.
        output: float16 [m, n], added to in place; None makes a new tensor.
        deterministic: fp32 partial sums in a fixed order; False adds with packed fp16 atomics (n must be even).
        workgroups: size of the persistent grid; None for one per compute unit.
        op_m: rows of a matrix instruction: 8 (sparse), 16 or 32; with the next three one of ``space.TILES``.
        a_lanes: instructions side by side along m, 1 to 3.
        b_lanes: and along n, 2, 3 or 5.
        ops: depth of a block of k, in 4 or 8 instructions of gfx942 (512 / op_m of k each).
        a_producers: waves that load a.
        b_producers: waves that load b.
        consumers: waves that multiply; all three together at most 16.
        qsize: slots of the queue, at least a_producers / a_lanes, b_producers / b_lanes and consumers.
        split_k: parts that k is cut into, at most the number of k blocks.

    Returns:
        float16 [m, n].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    k = Problem.of(a, b, scale, output).k
    chosen = Configuration(op_m, a_lanes, b_lanes, ops, a_producers, b_producers, consumers, qsize, split_k)
    target = dispatch.target_of(a.device)
    if not isinstance(target, Refused) and target[0] in FORMATS:  # the stub refuses the other devices
        require(chosen, target[0], k)
    return _launch_queue(a, b, scale, output, chosen.parameters(), deterministic=deterministic, workgroups=workgroups)
