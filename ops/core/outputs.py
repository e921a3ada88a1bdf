"""Memory for results: new, or what the caller gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.checks import (
    require_bias,
    require_choice,
    require_dtype,
    require_out,
    require_rank,
    require_tensor,
)
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE, FP8_BLOCK
from hipforge.ops.core.fp8 import fp8_dtypes


def new_or_given(
    out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device, name: str = "out"
) -> torch.Tensor:
    """Return memory for a result: ``out``, the argument ``name``, where it is given, and fits, or a new tensor.

    Raises:
        GuardError: ``out`` is not contiguous, or of another shape, dtype or device.
    """
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    require_out(out, shape, dtype, device, name)
    return out


def product_result(
    xq: torch.Tensor, wq: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return memory for X[M, K] @ W[N, K]^T + bias, [M, N]; raises GuardError for an ``out`` or bias that misfits."""
    if bias is not None:
        require_bias(bias, wq.shape[0], dtype, xq.device)
    return new_or_given(out, (xq.shape[0], wq.shape[0]), dtype, xq.device)


def new_or_given_mxfp8(
    x: torch.Tensor, shape: Sequence[int], out: torch.Tensor | None = None, scale_out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory on x's device for MX-FP8 elements of a shape [rows, columns] and their uint8 scales.

    A given tensor is returned unchecked: the kernel checks it.
    """
    rows, columns = shape
    if out is None:
        out = x.new_empty((rows, columns), dtype=fp8_dtypes(x.device)[0])
    if scale_out is None:
        scale_out = x.new_empty((rows, columns // BLOCK), dtype=torch.uint8)
    else:
        require_tensor(scale_out=scale_out)  # the kernel has another name for it
    return out, scale_out


def new_or_given_fp8(
    x: torch.Tensor,
    shape: Sequence[int],
    out_format: str,
    e8m0: bool,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory on x's device for e4m3 elements [rows, columns] and their scales, per row or per 128 of a row.

    What is given is returned, as in :func:`new_or_given_mxfp8`.

    Raises:
        GuardError: ``scale_out`` has not the dtype that ``e8m0`` says.
    """
    rows, columns = shape
    if out is None:
        out = x.new_empty((rows, columns), dtype=fp8_dtypes(x.device)[0])
    if scale_out is None:
        scales = (rows,) if out_format == "rows" else (rows, -(-columns // FP8_BLOCK))
        scale_out = x.new_empty(scales, dtype=torch.uint8 if e8m0 else torch.float32)
    else:
        require_dtype("scale_out", scale_out, (torch.uint8, E8M0_DTYPE) if e8m0 else (torch.float32,))
    return out, scale_out


def require_format(out_format: str, e8m0: bool) -> None:
    """Refuse a form of dynamic scales that does not exist."""
    require_choice("out_format", out_format, ("rows", "blocks"))
    if e8m0 and out_format != "blocks":
        raise GuardError('e8m0 scales are for out_format="blocks"; a scale per row is float32')


def written(**results: tuple[torch.Tensor | None, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the results, each given as (memory or None, value): the value, or the memory with the value in it.

    Nothing is written before everything fits.

    Raises:
        GuardError: memory that is not contiguous, or of another shape, dtype (float8_e8m0fnu holds uint8) or device.
    """
    for name, (out, value) in results.items():
        if out is not None:
            require_tensor(**{name: out})
            holds = out.dtype if value.dtype == torch.uint8 and out.dtype == E8M0_DTYPE else value.dtype
            require_out(out, value.shape, holds, value.device, name)
    for out, value in results.values():
        if out is not None:
            out.view(value.dtype).copy_(value)
    return tuple(value if out is None else out for out, value in results.values())


def require_buffer(buffer: torch.Tensor | None, rows: int, device: torch.device) -> None:
    """Refuse a ``next_buffer`` that is not contiguous float16 or bfloat16 [rows, columns] on ``device``."""
    if buffer is not None:
        require_dtype("next_buffer", buffer, (torch.float16, torch.bfloat16))
        require_rank("next_buffer", buffer, 2, "[rows, columns]")
        require_out(buffer, (rows, buffer.shape[1]), buffer.dtype, device, "next_buffer")


def written_into(out: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return the checked ``out`` with ``value`` written into it, or ``value`` without an ``out``.

    ``out`` itself, not the result of ``copy_``, which is a new object where ``value`` is of a tensor subclass.
    """
    if out is None:
        return value
    out.copy_(value)
    return out
