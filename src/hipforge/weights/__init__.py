"""Read checkpoints with MX-FP8 and MXFP4 weights, tensor by tensor, in the layouts that hipforge's ops take.

Example:
    >>> import hipforge.weights
    >>> for name, tensor, meta in hipforge.weights.load("checkpoint/"):     # doctest: +SKIP
    ...     print(name, meta.format, tuple(tensor.shape))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# public name -> the file that defines it; loaded on first use, because they import torch
_LAZY = {"Meta": "loader", "load": "loader", "share_scales": "sharing"}

__all__ = list(_LAZY)

if TYPE_CHECKING:
    from hipforge.weights.loader import Meta as Meta
    from hipforge.weights.loader import load as load
    from hipforge.weights.sharing import share_scales as share_scales


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
