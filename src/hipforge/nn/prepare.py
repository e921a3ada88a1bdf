"""``prepare``: warm the layers of a model up, before its step is captured in a graph."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hipforge import devices
from hipforge.errors import GuardError
from hipforge.nn.payload import Quantized
from hipforge.ops.core.checks import require_int, require_torch_dtype


def prepare(model: torch.nn.Module, tokens: int | Iterable[int] = 1, dtype: torch.dtype = torch.bfloat16) -> int:
    """Run every kind of quantised layer of a model once, so that its modules are loaded and its tables are read.

    Layers of one kind and shape are warmed up once. Ops that a model calls outside of :mod:`hipforge.nn`'s modules
    (norms, attention over a cache) are warmed up with :func:`hipforge.warmup`, or by one step before the capture.

    Args:
        model: on the device where its kernels run.
        tokens: the batches, in tokens, for which graphs will be captured: a number, or several.
        dtype: of the activations.

    Returns:
        How many calls were made; 0 for a model without such layers.

    Raises:
        GuardError: no model, a number of tokens below 1, or a dtype that a layer does not take.
        HipforgeError: a capture is going on already.
        BuildError, ToolchainError: a module cannot be built.

    Example:
        >>> import torch, hipforge
        >>> from hipforge.nn import MXFP8Linear
        >>> layers = [MXFP8Linear.from_linear(torch.nn.Linear(64, 64, bias=False)) for _ in range(3)]
        >>> hipforge.prepare(torch.nn.Sequential(*layers), tokens=(1, 4))
        2
    """
    devices.refuse_in_capture("warm a model up")
    if not isinstance(model, torch.nn.Module):
        raise GuardError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    require_torch_dtype("dtype", dtype)
    counts = tokens if isinstance(tokens, Iterable) and not isinstance(tokens, torch.Tensor) else (tokens,)
    batches = sorted({require_int("tokens", count, 1) for count in counts})
    kinds: dict[object, Quantized] = {}
    for part in model.modules():
        if isinstance(part, Quantized):
            shapes = tuple((name, buffer.shape, buffer.dtype, buffer.device) for name, buffer in part.named_buffers())
            kinds.setdefault((type(part), part.extra_repr(), shapes), part)
    with torch.no_grad():
        for part in kinds.values():
            for count in batches:
                part(part.input_like(count, dtype))
    return len(kinds) * len(batches)
