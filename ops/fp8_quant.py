"""FP8 quantisation with scales on the device: of a tensor, of each row, or of each 128 elements of a row.

Tensor-wise it is amax, scale and cast, and a transposed copy on request: what the backward products of a linear layer
need (:mod:`hipforge.ops.fp8_linear`), written in the pass that casts. The scale stays on the device, so nothing
synchronises. Results equal :func:`hipforge.ops.fp8_linear.to_fp8` bit for bit on finite input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.arguments import require_sound
from hipforge.ops.core.checks import require_choice, require_dtype, require_rank
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.formats import FLOATS
from hipforge.ops.core.fp8 import FP8_DTYPES, fp8_dtypes, to_fp8
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given_fp8, written
from hipforge.ops.mx_quantize import mxfp8_quantize
from hipforge.ops.reference.fp8 import Scales, quantize_fp8_blocks, quantize_fp8_rows

PUBLIC = ("fp8_quant_blocks", "fp8_quant_rows", "fp8_quant_tensorwise")

_ROWS = "module_fp8_quant_rows"


@compile_ops(
    "module_fp8_quant",
    variant=lambda out, out_t, inv_scale, workspace, x: {"HF_INPUT": FLOATS[x.dtype]},
    mutates=("out", "out_t", "inv_scale", "workspace"),
)
def fp8_quant_tensorwise_out(
    out: torch.Tensor, out_t: torch.Tensor | None, inv_scale: torch.Tensor, workspace: torch.Tensor, x: torch.Tensor
) -> None:
    """Write x's codes to ``out``, their transpose to ``out_t`` [C, R], and the factor back to ``inv_scale`` [1]."""


def _plan(x: torch.Tensor, dtype: torch.dtype | None, transpose: bool) -> Decision:
    require_dtype("x", x, FLOATS)
    if dtype is not None:
        require_choice("dtype", dtype, FP8_DTYPES)
    if transpose:
        require_rank("x", x, 2, "[R, C] for a transposed copy")
    return plan_kernel("fp8_quant_tensorwise", x.device)


@operator(_plan)
def fp8_quant_tensorwise(
    taken: Accepted, x: torch.Tensor, dtype: torch.dtype | None = None, *, transpose: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise a tensor with one scale on the device: ``x ≈ x8.float() * inv_scale``.

    ``scale = finfo(dtype).max / max(amax, 1e-12)`` in double, rounded to fp32; ``x8 = clamp(x * scale)`` rounded to
    nearest even; ``inv_scale = 1 / scale``. A NaN in x makes every code and inv_scale NaN. An infinity makes
    the scale 0: its own code is NaN, those of finite elements are 0, and inv_scale is infinite.

    Args:
        taken: the path that was decided; callers do not pass it.
        x: contiguous float32, float16 or bfloat16, any shape (2-D with ``transpose``); may be empty.
        dtype: float8 dtype of the device's own formats, e4m3 or e5m2; default: the e4m3 one.
        transpose: also write the transposed codes, in the same pass over x.

    Returns:
        ``(x8, inv_scale, x8_t)``: x8 like x, inv_scale a 0-dim float32, x8_t [C, R] contiguous or None.

    Raises:
        GuardError: x or dtype is not one of these (ArchError: a device that is neither gfx942 nor gfx950).

    Example:
        >>> import torch, hipforge
        >>> x8, inv_scale, _ = hipforge.fp8_quant_tensorwise(torch.tensor([[1.0, -2.0]]))
        >>> (x8.float() * inv_scale).tolist()
        [[1.0, -2.0]]
    """
    if not x.is_contiguous():
        raise GuardError(f"x must be contiguous; got strides {x.stride()} for shape {tuple(x.shape)}")
    dtype = dtype or fp8_dtypes(x.device)[0]
    if taken.path == "torch":
        x8, inv_scale = to_fp8(x, dtype)
        return x8, inv_scale, x8.t().contiguous() if transpose else None
    out = torch.empty_like(x, dtype=dtype)
    out_t = x.new_empty(x.shape[::-1], dtype=dtype) if transpose else None
    inv_scale = x.new_empty((), dtype=torch.float32)
    workspace = x.new_empty(1, dtype=torch.int32)
    fp8_quant_tensorwise_out(out, out_t, inv_scale, workspace, x)
    return out, inv_scale, out_t


def _input(out: torch.Tensor, scale_out: torch.Tensor, x: torch.Tensor) -> dict[str, str]:
    return {"HF_INPUT": FLOATS[x.dtype]}


@compile_ops(_ROWS, variant=_input, mutates=("out", "scale_out"))
def fp8_quant_rows_out(out: torch.Tensor, scale_out: torch.Tensor, x: torch.Tensor) -> None:
    """Write codes [rows, K] and float32 scales [rows] of x."""


@compile_ops(_ROWS, variant=_input, mutates=("out", "scale_out"))
def fp8_quant_blocks_out(out: torch.Tensor, scale_out: torch.Tensor, x: torch.Tensor) -> None:
    """Write codes [rows, K] and scales [rows, ceil(K / 128)], float32 or e8m0, of x."""


def _plan_rows(op: str, x: torch.Tensor) -> Decision:
    require_rank("x", x, 2, "[rows, K]")
    require_dtype("x", x, tuple(FLOATS))
    if x.shape[1] == 0:
        raise GuardError("x must have at least one column; got K=0")
    return plan_kernel(op, x.device, module=_ROWS)


@operator(functools.partial(_plan_rows, "fp8_quant_rows"), outs=("out", "scale_out"))
def fp8_quant_rows(
    taken: Accepted, x: torch.Tensor, *, out: torch.Tensor | None = None, scale_out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row with a scale of its own: the activations of :func:`hipforge.fp8_gemm` with scales per row.

    ``scale = amax / fp8_max`` in float32, or 1 for 0; codes are ``x / scale``, rounded to nearest even. A row
    with a NaN or an infinity gets the scale NaN and codes of 0.

    Args:
        taken: the path that was decided; callers do not pass it.
        x: contiguous float32, float16 or bfloat16 [rows, K], K at least 1.
        out: where to write the codes, in the device's e4m3; default: a new tensor.
        scale_out: where to write the scales, float32 [rows]; default: a new tensor.

    Returns:
        ``(q, scales)``; outputs that were given are returned.

    Raises:
        GuardError: an argument is not of this form.

    Example:
        >>> import torch, hipforge
        >>> q, scales = hipforge.fp8_quant_rows(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
        >>> (q.float() * scales[:, None]).tolist()
        [[1.0, -2.0], [0.0, 0.0]]
    """
    dtype = fp8_dtypes(x.device)[0]
    if taken.path == "torch":
        q, scales = quantize_fp8_rows(x, dtype)
        q, scales = written(out=(out, q), scale_out=(scale_out, scales))
        return q, scales
    out, scale_out = new_or_given_fp8(x, x.shape, "rows", False, out, scale_out)
    fp8_quant_rows_out(out, scale_out, x)
    return out, scale_out


@operator(functools.partial(_plan_rows, "fp8_quant_blocks"), outs=("out", "scale_out"))
def fp8_quant_blocks(
    taken: Accepted,
    x: torch.Tensor,
    *,
    e8m0: bool = False,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each 128 elements of a row: the activations of :func:`hipforge.fp8_gemm` with blocks of 128 x 128.

    As :func:`fp8_quant_rows`; the last block of a row may be short. With ``e8m0`` the scale is rounded up to a power of
    two, and a block with a NaN or an infinity has the byte 255.

    Args:
        taken: the path that was decided; callers do not pass it.
        x: contiguous float32, float16 or bfloat16 [rows, K], K at least 1.
        e8m0: scales are e8m0 bytes instead of float32.
        out: where to write the codes, in the device's e4m3; default: a new tensor.
        scale_out: where to write the scales [rows, ceil(K / 128)], float32, with ``e8m0`` uint8 or float8_e8m0fnu;
            default: a new tensor, float32 or uint8.

    Returns:
        ``(q, scales)``; outputs that were given are returned.

    Raises:
        GuardError: an argument is not of this form.

    Example:
        >>> import torch, hipforge
        >>> q, scales = hipforge.fp8_quant_blocks(torch.ones(2, 200), e8m0=True)
        >>> q.shape, scales.shape, scales.dtype
        (torch.Size([2, 200]), torch.Size([2, 2]), torch.uint8)
    """
    dtype = fp8_dtypes(x.device)[0]
    if taken.path == "torch":
        q, scales = quantize_fp8_blocks(x, dtype, e8m0)
        q, scales = written(out=(out, q), scale_out=(scale_out, scales))
        return q, scales
    if scale_out is not None and x.shape[1] == 1:  # the same view of one memory, which bindings take
        require_sound("fp8_quant_blocks", {"x": x, "scale_out": scale_out}, ("scale_out",))
    out, scale_out = new_or_given_fp8(x, x.shape, "blocks", e8m0, out, scale_out)
    fp8_quant_blocks_out(out, scale_out, x)
    return out, scale_out


# What quantises activations [rows, K] for a product with weights of each kind of scales.
QUANTISERS: dict[Scales, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    Scales.ONCE: fp8_quant_rows,
    Scales.BLOCKS: fp8_quant_blocks,
    Scales.BLOCKS_E8M0: functools.partial(fp8_quant_blocks, e8m0=True),
    Scales.MX_SHARED: mxfp8_quantize,
}
