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

from hipforge.nn.cache import CacheStep, PagedKVCache, SparseBlocks
from hipforge.nn.convert import convert_to_mxfp8
from hipforge.nn.linear import MXFP8Linear
from hipforge.nn.moe import MXFP8MoE

__all__ = ["CacheStep", "MXFP8Linear", "MXFP8MoE", "PagedKVCache", "SparseBlocks", "convert_to_mxfp8"]
