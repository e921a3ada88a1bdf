"""Modules for models with quantised weights: linear layers, experts with or without a router, a paged K/V cache.

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
from hipforge.nn.convert import convert_to_fp8, convert_to_mxfp8
from hipforge.nn.experts import FP8Experts, MXFP4Experts, MXFP8Experts
from hipforge.nn.fp8_linear import FP8Linear
from hipforge.nn.linear import MXFP8Linear
from hipforge.nn.moe import FP8MoE, MXFP4MoE, MXFP8MoE
from hipforge.ops.peers import Peers

__all__ = [
    "CacheStep",
    "FP8Experts",
    "FP8Linear",
    "FP8MoE",
    "MXFP4Experts",
    "MXFP4MoE",
    "MXFP8Experts",
    "MXFP8Linear",
    "MXFP8MoE",
    "PagedKVCache",
    "Peers",
    "SparseBlocks",
    "convert_to_fp8",
    "convert_to_mxfp8",
]
