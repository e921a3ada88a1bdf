"""Activations and weights to MX-FP8 or MXFP4 in one launch: blocks of 32 elements along the rows share an e8m0 scale.

Results equal those of :func:`hipforge.ops.reference.quantize_mxfp8` and :func:`hipforge.ops.reference.quantize_mxfp4`
bit for bit, in every mode of :data:`hipforge.ops.reference.e8m0.SCALE_MODES`.
"""

from __future__ import annotations

import functools

import torch

from hipforge.jit.compile_ops import compile_ops
from hipforge.ops import reference
from hipforge.ops.core.checks import require_choice, require_dtype, require_last_multiple, require_rank
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.formats import BLOCK, FLOATS
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given_mxfp8, written
from hipforge.ops.reference.e8m0 import SCALE_MODES, ScaleMode
from hipforge.ops.reference.layout import SCALE_COLUMNS, SCALE_ROWS

PUBLIC = ("mxfp4_quantize", "mxfp8_quantize")


def _variant(out: torch.Tensor, scale_out: torch.Tensor, x: torch.Tensor, *rest: object) -> dict[str, str]:
    return {"HF_INPUT": FLOATS[x.dtype]}


@compile_ops("module_mx_quantize", variant=_variant, mutates=("out", "scale_out"))
# torch has a parameter of its own called mode, so the stubs' has another name.
def mxfp8_quantize_out(out: torch.Tensor, scale_out: torch.Tensor, x: torch.Tensor, scale_mode: str) -> None:
    """Write both outputs as :func:`mxfp8_quantize` says."""


@compile_ops("module_mx_quantize", variant=_variant, mutates=("out", "scale_out"))
def mxfp4_quantize_out(
    out: torch.Tensor, scale_out: torch.Tensor, x: torch.Tensor, scale_mode: str, shuffled: bool
) -> None:
    """Write both outputs as :func:`mxfp4_quantize` says."""


def _plan(op: str, x: torch.Tensor, mode: ScaleMode) -> Decision:
    require_rank("x", x, 2, "[rows, K]")
    require_dtype("x", x, tuple(FLOATS))
    require_last_multiple("x", x, BLOCK)
    require_choice("mode", mode, SCALE_MODES)
    return plan_kernel(op, x.device)


def _new_scales(x: torch.Tensor, shuffled: bool) -> torch.Tensor:
    rows, blocks = x.shape[0], x.shape[1] // BLOCK
    if shuffled:
        rows, blocks = -(-rows // SCALE_ROWS) * SCALE_ROWS, -(-blocks // SCALE_COLUMNS) * SCALE_COLUMNS
    return x.new_empty((rows, blocks), dtype=torch.uint8)


@operator(functools.partial(_plan, "mxfp8_quantize"), outs=("out", "scale_out"))
def mxfp8_quantize(
    _taken: Accepted,
    x: torch.Tensor,
    *,
    mode: ScaleMode = "round_up",
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MX-FP8: what :func:`hipforge.mxfp8_gemv` takes as activations.

    Each element is x / scale, clamped to the format's range and rounded to nearest even. A block with a NaN or an
    infinity gets scale 255 and elements 0x7F (fnuz: 0x80); in mode ``triton`` scale 254, where only NaNs stay NaN.

    Args:
        x: contiguous float32, float16 or bfloat16 [rows, K], K a positive multiple of 32.
        mode: how the scale follows from a block's largest magnitude, see :mod:`hipforge.ops.reference.e8m0`. The
            default clips nothing.
        out: where to write q; default: a new tensor.
        scale_out: where to write the scales, uint8 or float8_e8m0fnu; default: a new uint8 tensor.

    Returns:
        ``(q, scales)``: q [rows, K], float8_e4m3fn on gfx950 and elsewhere, float8_e4m3fnuz on gfx942; scales uint8
        [rows, K / 32], e8m0. Outputs that were given are returned.

    Raises:
        GuardError: an argument is not of this form (ArchError: an AMD device that is neither gfx942 nor gfx950).

    Example:
        >>> import torch, hipforge
        >>> q, scales = hipforge.mxfp8_quantize(torch.full((1, 32), 448.0))
        >>> q.view(torch.uint8)[0, 0].item(), scales.item()
        (126, 127)
    """
    if _taken.path == "torch":
        q, scales = reference.quantize_mxfp8(x, fp8_dtypes(x.device)[0], mode)
        q, scales = written(out=(out, q), scale_out=(scale_out, scales))
        return q, scales
    out, scale_out = new_or_given_mxfp8(x, x.shape, out, scale_out)
    mxfp8_quantize_out(out, scale_out, x, mode)
    return out, scale_out


@operator(functools.partial(_plan, "mxfp4_quantize"), outs=("out", "scale_out"))
def mxfp4_quantize(
    _taken: Accepted,
    x: torch.Tensor,
    *,
    mode: ScaleMode = "even",
    shuffled: bool = False,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MXFP4, ties to even: what :func:`hipforge.mxfp4_gemm` takes.

    Each element is x / scale, rounded to e2m1 and saturated at ±6. A block with a NaN or an infinity gets scale 254 in
    modes ``even`` and ``triton``, where a NaN becomes 6, and 255 (all NaN) in the others.

    Args:
        x: contiguous float32, float16 or bfloat16 [rows, K], K a positive multiple of 32.
        mode: as for :func:`mxfp8_quantize`.
        shuffled: write the layouts of :func:`hipforge.ops.reference.shuffle_weight` and
            :func:`hipforge.ops.reference.shuffle_scale`, as ``mxfp4_gemm(..., shuffled=True)`` reads a weight; then
            rows are a multiple of 16 and K of 64.
        out: where to write the codes, uint8 or float4_e2m1fn_x2; default: a new uint8 tensor.
        scale_out: where to write the scales, uint8 or float8_e8m0fnu; default: a new uint8 tensor.

    Returns:
        ``(packed, scales)``: packed uint8 [rows, K / 2], the even element in the low nibble; scales uint8
        [rows, K / 32], e8m0; shuffled scales are padded to multiples of 256 rows and 8 columns by bytes of 127.
        Outputs that were given are returned.

    Raises:
        GuardError: an argument is not of this form (ArchError: an AMD device that is neither gfx942 nor gfx950).

    Example:
        >>> import torch, hipforge
        >>> q, scales = hipforge.mxfp4_quantize(torch.ones(1, 32))
        >>> q.shape, scales.shape  # two elements in a byte
        (torch.Size([1, 16]), torch.Size([1, 1]))
    """
    if _taken.path == "torch":
        packed, scales = reference.quantize_mxfp4(x, mode)
        if shuffled:
            packed, scales = reference.shuffle_weight(packed), reference.shuffle_scale(scales)
        packed, scales = written(out=(out, packed), scale_out=(scale_out, scales))
        return packed, scales
    if out is None:
        out = x.new_empty((x.shape[0], x.shape[1] // 2), dtype=torch.uint8)
    if scale_out is None:
        scale_out = _new_scales(x, shuffled)
    mxfp4_quantize_out(out, scale_out, x, mode, shuffled)
    return out, scale_out
