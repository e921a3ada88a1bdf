"""Every decode shape of MiniMax-M3 with every batch size that serving meets, on real data. Long: run with --full."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from helpers.mxfp8_cases import BYTE_OF_INTEGER, SCALE_ONE, Operands, assert_bits, assert_close, dequantize, normal

from hipforge.ops.smallm_gemm_mxfp8 import mxfp8_gemv, smallm_mxfp8_gemv, smallm_mxfp8_mfma
from hipforge.tuning.cases import DECODE_M, MINIMAX_M3

ODD_M = (3, 5, 7, 9, 17, 33, 63)


@functools.lru_cache(maxsize=1)  # cases of one shape follow each other and share its weight
def weight(k: int, n: int) -> tuple[Operands, torch.Tensor]:
    case = normal(max(DECODE_M), n, k)
    return case, dequantize(case.wq, case.ws)


@pytest.mark.full
@pytest.mark.parametrize(("k", "n"), (*MINIMAX_M3, (4096, 4096)))
def test_every_batch_size_is_within_the_bounds(k: int, n: int) -> None:
    case, dense = weight(k, n)
    reference = dequantize(case.xq, case.xs) @ dense.T
    for m in sorted((*DECODE_M, *ODD_M)):
        operands = (case.xq[:m], case.xs[:m], case.wq, case.ws)
        got = mxfp8_gemv(*operands)
        if got is None:  # untuned and past 16 rows: the kernel takes it anyway
            assert (k, n) == (4096, 4096) and m > 16
            got = smallm_mxfp8_mfma(*operands, torch.bfloat16)
        assert_close(got, reference[:m])


@pytest.mark.full
@pytest.mark.parametrize("kernel", (smallm_mxfp8_gemv, smallm_mxfp8_mfma))
def test_the_last_row_of_a_weight_just_below_2_gib_is_reached(kernel: Callable[..., torch.Tensor]) -> None:
    n, k = 65535, 32768
    payload, scales = torch.zeros(n, k, dtype=torch.uint8), torch.zeros(n, k // 32, dtype=torch.uint8)
    assert 2**31 - 1 - k < payload.numel() <= 2**31 - 1
    payload[-1], scales[-1] = BYTE_OF_INTEGER[2], SCALE_ONE
    x, x_scale = torch.full((1, k), BYTE_OF_INTEGER[1], dtype=torch.uint8), torch.full((1, k // 32), SCALE_ONE)
    want = torch.zeros(1, n, dtype=torch.float64)
    want[0, -1] = 2 * k
    assert_bits(kernel(x, x_scale.byte(), payload, scales, torch.bfloat16), want)
