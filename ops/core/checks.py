"""Argument checks of ops and references: each names the argument, the value seen and the rule."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, SupportsIndex, cast

import torch

from hipforge.errors import GuardError
from hipforge.jit.call import tensors

_REAL_INPUTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor that is not at hand; checks and planners take it in a tensor's place."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)


Described = torch.Tensor | TensorSpec
SHOWN = 120  # characters of a value in a message


def as_text(value: object) -> str:
    """Return a value for a message; a tensor's elements, which may be without memory, are not read."""
    if isinstance(value, torch.Tensor):
        return "a torch.Tensor"
    try:
        return repr(value)[:SHOWN]
    except Exception:
        return "..."


def shown(value: object) -> str:
    """Return a value for a message, after its type."""
    return as_text(value) if isinstance(value, torch.Tensor) else f"{type(value).__name__} {as_text(value)}"


def described(x: Described) -> str:
    """Return dtype and shape for a message, as the modules' own guards write them: ``uint8 [4, 128]``."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _alternatives(accepted: Collection[torch.dtype | None]) -> str:
    *names, last = (str(dtype).removeprefix("torch.") for dtype in accepted if dtype is not None)
    return f"{', '.join(names)} or {last}" if names else last


def require_tensor(**named: object) -> None:
    """Refuse arguments that are not tensors, each given under its name."""
    for name, value in named.items():
        if not isinstance(value, (torch.Tensor, TensorSpec)):
            raise GuardError(f"{name} must be a torch.Tensor; got {type(value).__name__}")


def require_torch_dtype(name: str, value: object) -> None:
    """Refuse a value that is not a torch.dtype, such as a dtype's name."""
    if not isinstance(value, torch.dtype):
        raise GuardError(f"{name} must be a torch.dtype, as torch.bfloat16; got {as_text(value)}")


def require_int(name: str, value: object, minimum: int | None = None) -> int:
    """Return an integer argument as an ``int``; refuse anything else, and integers below ``minimum``."""
    try:
        wrong = tensors.problem(value) if isinstance(value, torch.Tensor) else None
        integer: SupportsIndex = 0 if wrong is not None else cast(SupportsIndex, value)  # which index() judges
        number = int(operator.index(integer))
    except (TypeError, ValueError):  # the latter of a parameter without elements yet
        raise GuardError(f"{name} must be an int; got {shown(value)}") from None
    if wrong is not None:
        raise GuardError(f"{name} {wrong}")
    if minimum is not None and number < minimum:
        raise GuardError(f"{name} must be at least {minimum}; got {number}")
    if not -(2**63) <= number < 2**63:
        raise GuardError(f"{name} must fit 64 bits; got {number}")
    return number


def require_in_float32(name: str, value: Any) -> None:
    """Refuse a finite number that is infinite, or 0, in float32, the ops' arithmetic."""
    if not isinstance(value, Real):
        return
    size: Any = abs(value)
    if _FLOAT32_MAX < size < math.inf:
        raise GuardError(f"{name} must be at most {_FLOAT32_MAX:.7g}, finite in float32; got {value}")
    if 0 < size < _FLOAT32_LEAST:
        raise GuardError(f"{name} must be 0 or at least {_FLOAT32_LEAST:.2g}, as float32; got {value}")


_FLOAT32_MAX = float(torch.finfo(torch.float32).max)
_FLOAT32_LEAST = 2.0**-149


def require_real(name: str, x: Described) -> None:
    """Refuse anything but float32, bfloat16 and float16 (float64 would be rounded twice)."""
    require_dtype(name, x, _REAL_INPUTS)


def require_dtype(name: str, x: Described, accepted: Collection[torch.dtype | None]) -> None:
    """Refuse a tensor whose dtype is not among ``accepted`` (None entries are dtypes that this torch lacks)."""
    require_tensor(**{name: x})
    if not isinstance(x.dtype, torch.dtype):  # a TensorSpec of something that only looks like a tensor
        raise GuardError(f"{name} must be a torch.Tensor; got an array of dtype {x.dtype}")
    if x.dtype not in accepted:
        raise GuardError(f"{name} must be {_alternatives(accepted)}; got {described(x)}")


def require_one(name: str, x: Described) -> None:
    """Refuse anything but one float32, in any number of dimensions."""
    require_tensor(**{name: x})
    if x.dtype != torch.float32 or math.prod(x.shape) != 1:
        raise GuardError(f"{name} must be one float32; got {described(x)}")


def require_floating(**named: torch.Tensor) -> None:
    """Refuse tensors that are not floating point, each given under its name."""
    require_tensor(**named)
    for name, tensor in named.items():
        if not tensor.is_floating_point():
            raise GuardError(f"{name} must be floating point; got {described(tensor)}")


def require_last_multiple(name: str, x: Described, multiple: int) -> None:
    """Refuse a 0-dimensional tensor, or one whose last dimension is not a multiple of ``multiple``."""
    require_tensor(**{name: x})
    if x.dim() == 0:
        raise GuardError(f"{name} must have at least 1 dimension; got a scalar")
    if x.shape[-1] % multiple != 0:
        raise GuardError(
            f"the last dimension of {name} must be a multiple of {multiple}; got {x.shape[-1]} "
            f"(shape {tuple(x.shape)}); pad it with zeros"
        )


def require_rank(name: str, x: Described, rank: int, layout: str) -> None:
    """Refuse a tensor that does not have ``rank`` dimensions; ``layout`` says which, as in ``[M, K]``."""
    require_tensor(**{name: x})
    if x.dim() != rank:
        raise GuardError(f"{name} must be {layout}; got {described(x)}")


def require_shape(name: str, x: Described, shape: Sequence[int], why: str) -> None:
    """Refuse a tensor whose shape is not ``shape``; ``why`` names the origin of that shape."""
    require_tensor(**{name: x})
    if tuple(x.shape) != tuple(shape):
        raise GuardError(f"{name} must be {list(shape)} ({why}); got {described(x)}")


def require_factors(
    x: Described, w: Described, names: tuple[str, str] = ("xq", "wq")
) -> tuple[int, int, int]:
    """Return M, N and K of the factors of X[M, K] @ W[N, K]^T; refuse ones that do not fit each other."""
    of_x, of_w = names
    require_tensor(**{of_x: x, of_w: w})
    require_rank(of_x, x, 2, "[M, K]")
    require_rank(of_w, w, 2, "[N, K]")
    (m, k), n = x.shape, w.shape[0]
    require_shape(of_w, w, (n, k), f"its K is that of {of_x}")
    return m, n, k


def require_finite(**numbers: float) -> None:
    """Refuse infinities and NaN by their names, with a comparison, which torch traces with symbolic numbers."""
    for name, value in numbers.items():
        if not abs(value) < math.inf:
            raise GuardError(f"{name} must be finite; got {value}")


def require_device(name: str, x: Described, device: torch.device) -> None:
    """Refuse a tensor that is not on ``device``."""
    if x.device != device:
        raise GuardError(f"{name} must be on {device}, where the other tensors are; got {x.device}")


def require_operand(
    name: str,
    x: Described | None,
    accepted: Sequence[torch.dtype | None],
    shape: Sequence[int],
    why: str,
    device: torch.device | None = None,
) -> None:
    """Refuse an operand of another dtype, shape or device, if one is named; None, for one that is not given, passes."""
    if x is not None:
        require_tensor(**{name: x})
        if x.dtype not in accepted or tuple(x.shape) != tuple(shape):
            if not isinstance(x.dtype, torch.dtype):
                require_dtype(name, x, accepted)
            wanted = f"{_alternatives(accepted)} {list(shape)}"
            raise GuardError(f"{name} must be {wanted} ({why}); got {described(x)}")
        if device is not None:
            require_device(name, x, device)


def require_choice(name: str, value: object, accepted: Sequence[object]) -> None:
    """Refuse a value that is not one of ``accepted``."""
    if isinstance(value, torch.Tensor) or value not in accepted:
        raise GuardError(f"{name} must be one of {', '.join(map(repr, accepted))}; got {as_text(value)}")


def require_out(
    out: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, name: str = "out"
) -> None:
    """Refuse an ``out`` that a result of this shape and dtype cannot be written into."""
    require_operand(name, out, (dtype,), shape, "the result's shape", device)
    if out.requires_grad and torch.is_grad_enabled():
        raise GuardError(
            f"{name} is written and requires grad, which autograd would not see; pass it detached, or call under "
            "torch.no_grad()"
        )
    if not out.is_contiguous():
        raise GuardError(f"{name} must be contiguous; got strides {out.stride()} for shape {tuple(out.shape)}")


def require_unexpanded(**named: object) -> None:
    """Refuse written tensors whose elements share memory, each given under its name."""
    for name, tensor in named.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel():
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                if size > 1 and stride == 0:
                    raise GuardError(f"{name} must not be expanded: its rows share memory; pass a clone")


def require_bias(bias: torch.Tensor, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a bias that is not [N] of the result's dtype and device."""
    require_operand("bias", bias, (dtype,), (n,), "[N]", device)
