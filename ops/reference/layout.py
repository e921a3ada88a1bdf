"""Weight and scale layouts that pre-shuffled MXFP4 GEMMs read, and the way back."""

from __future__ import annotations

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.checks import require_int, require_last_multiple, require_rank
from hipforge.ops.reference.e8m0 import as_scale_bytes

_TILE_ROWS, _TILE_BYTES = 16, 32  # a weight tile: 16 rows of 32 bytes, kept as two halves of 16 x 16
SCALE_ROWS, SCALE_COLUMNS = 256, 8  # scales are padded to multiples of these


def _check_weight(name: str, weight: torch.Tensor) -> None:
    require_rank(name, weight, 2, "[N, bytes]")
    if weight.element_size() != 1:
        raise GuardError(f"{name} must have 1-byte elements; got {weight.dtype}")
    if weight.shape[0] % _TILE_ROWS != 0:
        raise GuardError(f"the first dimension of {name} must be a multiple of {_TILE_ROWS}; got {weight.shape[0]}")
    require_last_multiple(name, weight, _TILE_BYTES)


def shuffle_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in the (16, 16) layout: byte (n, b) moves to tile (n/16, b/32), half (b%32)/16, row n%16.

    Args:
        weight: [N, B] of 1-byte elements, N a multiple of 16 and B of 32.

    Returns:
        Contiguous [N, B] of the same dtype.

    Raises:
        GuardError: another rank, element size or shape.
    """
    _check_weight("weight", weight)
    n, b = weight.shape
    tiles = weight.reshape(n // _TILE_ROWS, _TILE_ROWS, b // _TILE_BYTES, 2, _TILE_BYTES // 2)
    return tiles.permute(0, 2, 3, 1, 4).contiguous().view(n, b)


def unshuffle_weight(shuffled: torch.Tensor) -> torch.Tensor:
    """Invert :func:`shuffle_weight`; same shapes, same errors."""
    _check_weight("shuffled", shuffled)
    n, b = shuffled.shape
    tiles = shuffled.reshape(n // _TILE_ROWS, b // _TILE_BYTES, 2, _TILE_ROWS, _TILE_BYTES // 2)
    return tiles.permute(0, 3, 1, 2, 4).contiguous().view(n, b)


def shuffle_scale(scale: torch.Tensor, pad: int = 127) -> torch.Tensor:
    """Return e8m0 scales padded to multiples of 256 rows and 8 columns, in the order that pre-shuffled GEMMs read.

    Scale (m, s) of a padded [M, S] moves to byte (m/32)·32·S + (s/8)·256 + (s%4)·64 + (m%16)·4 + ((s%8)/4)·2
    + (m%32)/16.

    Args:
        scale: uint8 or float8_e8m0fnu [M, K/32].
        pad: byte that fills the padding; 127 is 1.0.

    Returns:
        uint8, [M rounded up to 256, K/32 rounded up to 8].

    Raises:
        GuardError: another rank or dtype.
    """
    require_rank("scale", scale, 2, "[M, K/32]")
    bytes_ = as_scale_bytes("scale", scale)
    m, s = bytes_.shape
    padded_m, padded_s = -(-m // SCALE_ROWS) * SCALE_ROWS, -(-s // SCALE_COLUMNS) * SCALE_COLUMNS
    padded = torch.nn.functional.pad(bytes_, (0, padded_s - s, 0, padded_m - m), value=pad)
    parts = padded.view(padded_m // 32, 2, 16, padded_s // 8, 2, 4)
    return parts.permute(0, 3, 5, 2, 4, 1).contiguous().view(padded_m, padded_s)


def unshuffle_scale(shuffled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Invert :func:`shuffle_scale`: return the first ``rows`` x ``columns`` scales in plain order.

    Args:
        shuffled: uint8 or float8_e8m0fnu, dimensions multiples of 256 and 8.
        rows: M of the result.
        columns: K/32 of the result.

    Returns:
        uint8 [rows, columns].

    Raises:
        GuardError: another rank, dtype or shape, or a result larger than the padded scales.
    """
    require_rank("shuffled", shuffled, 2, "[padded M, padded K/32]")
    rows, columns = require_int("rows", rows), require_int("columns", columns)
    bytes_ = as_scale_bytes("shuffled", shuffled)
    m, s = bytes_.shape
    if m % SCALE_ROWS or s % SCALE_COLUMNS or not (0 <= rows <= m and 0 <= columns <= s):
        raise GuardError(
            f"shuffled must be padded to multiples of {SCALE_ROWS} rows and {SCALE_COLUMNS} columns and hold "
            f"{rows} x {columns} scales; got shape {(m, s)}"
        )
    parts = bytes_.reshape(m // 32, s // 8, 4, 16, 2, 2)
    return parts.permute(0, 5, 3, 1, 4, 2).reshape(m, s)[:rows, :columns].contiguous()
