"""Scales whose elements leave float32's range while the products do not: every path computes them.

An element e4m3 of 448 times 2^127 is past 2^128; times a weight of 2^-126 it is an ordinary number.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hipforge
from hipforge.ops.reference.e8m0 import product_dtype

pytestmark = pytest.mark.usefixtures("path")

M, N, K = 4, 16, 64


def _payload(rows: int, value: float) -> torch.Tensor:
    return torch.full((rows, K), value).to(torch.float8_e4m3fn)


def _scale(rows: int, byte: int) -> torch.Tensor:
    return torch.full((rows, K // 32), byte, dtype=torch.uint8)


def _dense(x: torch.Tensor, xs: torch.Tensor, w: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
    return hipforge.mxfp8_linear(x, xs, w, ws)


def _grouped(x: torch.Tensor, xs: torch.Tensor, w: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
    slots = hipforge.moe_align_block_size(torch.zeros(M, 1, dtype=torch.int32), 4, 1)
    return hipforge.grouped_mxfp8_linear(x, xs, w[None], ws[None], *slots, M, 4, 1)


@pytest.mark.parametrize("byte", [120, 246, 247, 254])
@pytest.mark.parametrize("linear", [_dense, _grouped])
def test_mxfp8(linear: Callable[..., torch.Tensor], byte: int) -> None:
    # K * 448 * 1 * 2^(byte - 127) * 2^(255 - byte - 127) = 64 * 448 * 2, which bfloat16 holds.
    operands = _payload(M, 448.0), _scale(M, byte), _payload(N, 1.0), _scale(N, 255 - byte)
    assert linear(*operands).unique().tolist() == [57344.0]
    swapped = linear(_payload(M, 1.0), _scale(M, 255 - byte), _payload(N, 448.0), _scale(N, byte))
    assert swapped.unique().tolist() == [57344.0]


@pytest.mark.parametrize("byte", [120, 252, 253, 254])
def test_mxfp4(byte: int) -> None:
    # K * 6 * 6 * 2^(byte - 127) * 2^(255 - byte - 127)
    six = torch.full((N, K // 2), 0x77, dtype=torch.uint8)
    result = hipforge.mxfp4_linear(six[:M], _scale(M, byte), six, _scale(N, 255 - byte))
    assert result.unique().tolist() == [4608.0]


def test_float64_is_taken_only_where_an_element_could_overflow() -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8)
    wide = [int(byte) for byte in bytes_ if product_dtype(byte.view(1)) == torch.float64]
    assert wide == list(range(247, 255))  # 448 * 2^(247 - 127) = 1.75 * 2^128; 255 is NaN in any dtype
    assert product_dtype(bytes_[:10], bytes_[240:250].view(torch.float8_e8m0fnu)) == torch.float64
