"""Modules for models whose weights are MX-FP8: linear layers, a mixture of experts, and a paged K/V cache.

They hold buffers and call hipforge's ops: a forward pass launches kernels, allocates through torch and computes nothing
in torch beside them. They compute no gradients.

Example:
    >>> import torch
    >>> from hipforge.nn import MXFP8Linear
    >>> layer = MXFP8Linear.from_linear(torch.nn.Linear(64, 16, bias=False))
    >>> layer.weight.dtype.itemsize, tuple(layer.weight_scale.shape)
    (1, (16, 2))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# public name -> the file that defines it; loaded on first use, because they import torch
_LAZY = {
    "CacheStep": "cache",
    "MXFP8Linear": "linear",
    "MXFP8MoE": "moe",
    "PagedKVCache": "cache",
    "convert_to_mxfp8": "convert",
}

__all__ = list(_LAZY)

if TYPE_CHECKING:
    from hipforge.nn.cache import CacheStep as CacheStep
    from hipforge.nn.cache import PagedKVCache as PagedKVCache
    from hipforge.nn.convert import convert_to_mxfp8 as convert_to_mxfp8
    from hipforge.nn.linear import MXFP8Linear as MXFP8Linear
    from hipforge.nn.moe import MXFP8MoE as MXFP8MoE


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
