"""Memory for results: new, or what the caller gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hipforge.ops.core.checks import require_out, require_tensor
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.core.fp8 import fp8_dtypes


def new_or_given(
    out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return memory for a result: ``out`` where it is given, and fits, or a new tensor.

    Raises:
        GuardError: ``out`` is not contiguous, or of another shape, dtype or device.
    """
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    require_out(out, shape, dtype, device)
    return out


def new_or_given_mxfp8(
    x: torch.Tensor, shape: Sequence[int], out: torch.Tensor | None = None, scale_out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory on x's device for MX-FP8 elements of a shape [rows, columns] and their uint8 scales.

    What is given is returned as it is: the kernel that writes it checks it.
    """
    rows, columns = shape
    if out is None:
        out = x.new_empty((rows, columns), dtype=fp8_dtypes(x.device)[0])
    if scale_out is None:
        scale_out = x.new_empty((rows, columns // BLOCK), dtype=torch.uint8)
    return out, scale_out


def written(name: str, out: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return ``out`` with ``value`` written into it, or ``value`` where there is no ``out``.

    Raises:
        GuardError: ``out`` is not contiguous, or of another shape, dtype (float8_e8m0fnu holds uint8) or device.
    """
    if out is None:
        return value
    require_tensor(**{name: out})
    holds = out.dtype if value.dtype == torch.uint8 and out.dtype == E8M0_DTYPE else value.dtype
    require_out(out, value.shape, holds, value.device, name)
    out.view(value.dtype).copy_(value)
    return out


def written_into(out: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return ``out``, which has been checked, with ``value`` written into it, or ``value`` where there is no ``out``.

    ``out`` itself, not the result of ``copy_``, which is a new object where ``value`` is of a tensor subclass.
    """
    if out is None:
        return value
    out.copy_(value)
    return out
