"""Read checkpoints with MX-FP8 and MXFP4 weights, tensor by tensor, in the layouts that hipforge's ops take.

Example:
    >>> import hipforge.weights
    >>> for name, tensor, meta in hipforge.weights.load("checkpoint/"):     # doctest: +SKIP
    ...     print(name, meta.format, tuple(tensor.shape))
"""

from __future__ import annotations

from hipforge.weights.loader import Meta, load

__all__ = ["Meta", "load"]
