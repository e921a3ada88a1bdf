"""Results computed by torch, written into memory that the caller may give."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.checks import require_device, require_out, require_shape, require_tensor, require_writable
from hipforge.ops.core.formats import E8M0_DTYPE


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


def written(name: str, out: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return ``out`` with ``value`` written into it, or ``value`` where there is no ``out``.

    Raises:
        GuardError: ``out`` is not contiguous, or of another shape, dtype (float8_e8m0fnu holds uint8) or device.
    """
    if out is None:
        return value
    require_tensor(**{name: out})
    require_shape(name, out, value.shape, "the result's")
    require_device(name, out, value.device)
    if out.dtype != value.dtype and not (value.dtype == torch.uint8 and out.dtype == E8M0_DTYPE):
        raise GuardError(f"{name} must have dtype {value.dtype}; got {out.dtype}")
    require_writable(name, out)
    if not out.is_contiguous():
        raise GuardError(f"{name} must be contiguous; got strides {out.stride()} for shape {tuple(out.shape)}")
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
