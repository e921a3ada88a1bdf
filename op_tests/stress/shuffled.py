"""The shuffled order of MXFP4 weights and scales, place by place."""

from __future__ import annotations

import numpy as np
import torch

from stress.floats import Array, raw_bytes


def _weight_places(n: int, columns: int) -> Array:
    """Where byte (row, kb) of a plain weight stands in a shuffled one."""
    row, kb = np.meshgrid(np.arange(n), np.arange(columns), indexing="ij")
    return ((row // 16) * (columns // 32) + kb // 32) * 512 + (kb % 32) // 16 * 256 + row % 16 * 16 + kb % 16


def _scale_places(rows: int, columns: int, padded: int) -> Array:
    m, s = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    place = (m // 32) * 32 * padded + (s // 8) * 256 + s % 4 * 64 + m % 16 * 4
    return place + s % 8 // 4 * 2 + m % 32 // 16


def shuffled_weight(weight: torch.Tensor) -> torch.Tensor:
    flat = np.zeros(weight.numel(), np.uint8)
    flat[_weight_places(*weight.shape)] = weight.numpy()
    return torch.from_numpy(flat.reshape(weight.shape))


def shuffled_scale(scale: torch.Tensor) -> torch.Tensor:
    rows, columns = -(-scale.shape[0] // 256) * 256, -(-scale.shape[1] // 8) * 8
    flat = np.full(rows * columns, 127, np.uint8)
    flat[_scale_places(*scale.shape, columns)] = scale.numpy()
    return torch.from_numpy(flat.reshape(rows, columns))


def unshuffled(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and its scales in plain order."""
    n, columns = weight.shape
    if n % 16 or columns % 32:
        raise ValueError("this is no shuffled weight")
    blocks, padded = columns // 16, -(-columns // 16 // 8) * 8
    if tuple(scale.shape) != (-(-n // 256) * 256, padded):
        raise ValueError("these are no shuffled scales")
    plain = raw_bytes(weight).reshape(-1)[_weight_places(n, columns)]
    return torch.from_numpy(plain), torch.from_numpy(raw_bytes(scale).reshape(-1)[_scale_places(n, blocks, padded)])
