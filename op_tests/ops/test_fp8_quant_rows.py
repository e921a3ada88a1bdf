"""fp8 quantisation per row and per 128 elements: every code and scale as the definition says, bit for bit."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from helpers.mxfp8_cases import FORMATS

import hipforge
from hipforge.errors import GuardError
from hipforge.ops.reference import quantize_fp8_blocks, quantize_fp8_rows

pytestmark = pytest.mark.gfx942


def oracle(block: torch.Tensor, arch: str, e8m0: bool) -> tuple[list[float], float]:
    """Values of the codes and the scale of one block, by numpy's float32 division and the nearest of all codes."""
    limit = numpy.float32(448 if arch == "gfx950" else 240)
    values = block.float().numpy()
    amax = numpy.abs(values).max()
    if not numpy.isfinite(amax):
        return [0.0] * len(values), math.nan
    scale = numpy.float32(amax / limit) or numpy.float32(1)
    if e8m0:
        mantissa, exponent = math.frexp(scale)
        scale = numpy.float32(2.0 ** max(exponent - (mantissa == 0.5), -127))
    codes = FORMATS[arch][~FORMATS[arch].isnan()].unique()
    found = []
    for value in numpy.clip(values / scale, -limit, limit):
        distance = (codes - float(value)).abs()
        nearest = (distance == distance.min()).nonzero().flatten()
        # Of two neighbours the one with the even code: position from zero counts codes.
        zero = int((codes == 0).nonzero())
        found.append(float(codes[min(nearest, key=lambda at: (int(at) - zero) % 2)]))
    return found, float(scale)


def data(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * k)
    x = torch.randn(rows, k, generator=generator) * torch.exp2(torch.randint(-20, 12, (rows, 1), generator=generator))
    x[0] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("k", (1, 40, 127, 264, 2176))
def test_codes_and_scales_are_those_of_the_definition(arch: str, dtype: torch.dtype, k: int) -> None:
    x = data(4, k, dtype)
    for kind, size in (("rows", k), ("blocks", 128), ("e8m0", 128)):
        op = hipforge.fp8_quant_rows if kind == "rows" else hipforge.fp8_quant_blocks
        q, scales = op(x) if kind != "e8m0" else op(x, e8m0=True)
        if kind == "e8m0":
            scales = torch.exp2(scales.float() - 127)
        scales = scales.view(4, -1)
        for row in range(4):
            for block in range(min(2, scales.shape[1])):
                at = slice(block * size, (block + 1) * size)
                values, scale = oracle(x[row, at], arch, kind == "e8m0")
                assert scales[row, block].item() == scale
                assert q[row, at].float().tolist() == values


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("k", (33, 6144, 7000))
def test_long_rows_and_special_values_are_the_references(arch: str, dtype: torch.dtype, k: int) -> None:
    x = data(5, k, dtype)
    x[1, k // 2], x[2, -1], x[3, 0] = math.nan, -math.inf, 1e-38
    x[4] = torch.finfo(dtype).tiny / 512  # amax / fp8_max is 0 in float32 for the smallest
    own = torch.float8_e4m3fn if arch == "gfx950" else torch.float8_e4m3fnuz
    for got, want in (
        (hipforge.fp8_quant_rows(x), quantize_fp8_rows(x, own)),
        (hipforge.fp8_quant_blocks(x), quantize_fp8_blocks(x, own)),
        (hipforge.fp8_quant_blocks(x, e8m0=True), quantize_fp8_blocks(x, own, e8m0=True)),
    ):
        assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(got[1].nan_to_num(7e7), want[1].nan_to_num(7e7))
        assert got[0].dtype == own and not got[0].float().isnan().any()


def test_results_go_where_they_are_given_and_nowhere_else(arch: str) -> None:
    x = data(3, 136, torch.bfloat16)
    own = torch.float8_e4m3fn if arch == "gfx950" else torch.float8_e4m3fnuz
    for shift in (0, 1):  # off the boundary of vector stores
        buffer = torch.full((3 * 136 + 64,), 0x55, dtype=torch.uint8)
        out = buffer[16 + shift : 16 + shift + 3 * 136].view(own).view(3, 136)
        scales = torch.empty(3, 2)
        got = hipforge.fp8_quant_blocks(x, out=out, scale_out=scales)
        assert got[0] is out and got[1] is scales
        want = quantize_fp8_blocks(x, own)
        assert torch.equal(out.view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(scales, want[1])
        assert (buffer[: 16 + shift] == 0x55).all() and (buffer[16 + shift + 3 * 136 :] == 0x55).all()


def test_what_is_quantised_multiplies_to_the_product(arch: str) -> None:
    x, w = data(5, 300, torch.bfloat16), data(140, 300, torch.bfloat16)
    x[0], w[0] = 1, 2
    want = x.double() @ w.double().T
    size = x.double().abs() @ w.double().abs().T
    by_row = hipforge.fp8_linear(*hipforge.fp8_quant_rows(x), *hipforge.fp8_quant_rows(w))
    # Either factor is off by 2^-4 of itself, or of the smallest normal code, 2^-6 of 448 scales: less than that.
    assert ((by_row.double() - want).abs() <= 0.14 * size + 1e-6 * size.max()).all()


@pytest.mark.parametrize("op", (hipforge.fp8_quant_rows, hipforge.fp8_quant_blocks))
def test_refusals(op: object) -> None:
    assert callable(op)
    for x, message in (
        (torch.ones(4), r"x must be \[rows, K\]; got float32 \[4\]"),
        (torch.ones(2, 0), "at least one column"),
        (torch.ones(2, 8, dtype=torch.int32), "x must be .*; got int32"),
        (torch.ones(8, 4).T, "contiguous"),
    ):
        with pytest.raises(GuardError, match=message):
            op(x)
    with pytest.raises(GuardError, match="scale_out"):
        op(torch.ones(2, 8), scale_out=torch.ones(3, dtype=torch.float32))
    with pytest.raises(GuardError, match="out must be"):
        op(torch.ones(2, 8), out=torch.ones(2, 8))
