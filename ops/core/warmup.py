"""``warmup``: do once, before a graph is captured, what a first call does and no graph can replay."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hipforge import devices
from hipforge.errors import GuardError
from hipforge.ops.core.dispatch import name_of


def warmup(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> None:
    """Call an op once for its shapes: its module is built and loaded, tables are read, the call is planned.

    After it, a call with arguments of the same shapes, dtypes and flags launches kernels and does nothing else, so it
    can be captured in a graph. The arguments are not written: the op writes copies.

    Args:
        op: a public op of hipforge, or its name.
        *args: its arguments. A tensor on the meta device is replaced by zeros on the device of the kernels, so that no
            data need exist yet; give indices as real tensors if zeros are not valid.
        **kwargs: its keyword arguments.

    Raises:
        GuardError: ``op`` is not a public op, or the arguments are ones that it refuses.
        HipforgeError: a capture is in progress.
        BuildError, ToolchainError: the module cannot be built.

    Example:
        >>> import torch, hipforge
        >>> x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((8, 64), (64,)))
        >>> hipforge.warmup(hipforge.rms_norm, x, weight, 1e-6)
    """
    name = name_of(op)
    function = _op(name)
    devices.refuse_in_capture(f"warm {name} up")
    given = inspect.signature(function).bind(*args, **kwargs)
    written = getattr(function, "writes", ())  # of an @operator; others write nothing but results
    for parameter, value in given.arguments.items():
        if isinstance(value, torch.Tensor):
            is_result = parameter in ("out", "workspace") or parameter.endswith("_out")
            given.arguments[parameter] = _stand_in(value, is_result or parameter in written)
    with torch.no_grad():
        function(*given.args, **given.kwargs)


def _op(name: str) -> Callable[..., Any]:
    from hipforge import ops

    homes = ops.public_names()
    if name not in homes:
        raise GuardError(f"op must be a public op of hipforge; got {name}. They are: {', '.join(homes)}")
    found: Callable[..., Any] = getattr(importlib.import_module(homes[name]), name)
    return found


def _stand_in(tensor: torch.Tensor, is_written: bool) -> torch.Tensor:
    if tensor.is_meta:
        place = "cuda" if devices.current().is_gpu else "cpu"
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
        return made.zero_()
    if not is_written:
        return tensor
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())
