"""The MX quantisers against the reference, bit for bit, in every mode, layout and input type."""

from __future__ import annotations

import pytest
import torch
from helpers.fused_fp8_cases import normal, wrong_width

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.fp8_linear import fp8_dtypes
from hipforge.ops.mx_quantize import mxfp4_quantize, mxfp8_quantize
from hipforge.ops.reference.e8m0 import SCALE_MODES

pytestmark = pytest.mark.gfx942

FP8 = fp8_dtypes("cpu")[0]
FNUZ = FP8 is torch.float8_e4m3fnuz
LARGEST = torch.finfo(FP8).max
INPUTS = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")
# One block; chunks that end inside a pair of lanes, a wave, a work-group; several work-groups.
SHAPES = [(1, 32), (3, 96), (2, 544), (5, 1056), (1, 6144), (33, 160)]


def spread(shape, dtype, seed=0):
    """Values whose blocks span many scales: normal numbers times powers of two that differ block by block."""
    powers = torch.randint(-9, 9, (shape[0], shape[1] // 32, 1), generator=torch.Generator().manual_seed(seed))
    return (normal(shape, torch.float32, seed + 1).unflatten(-1, (-1, 32)) * 2.0**powers).flatten(-2).to(dtype)


def assert_bits(got, want):
    for part, expected in zip(got, want, strict=True):
        assert part.shape == expected.shape
        assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8))


def assert_as_reference(x, mode):
    assert_bits(mxfp8_quantize(x, mode=mode), reference.quantize_mxfp8(x, FP8, mode))
    packed, scales = reference.quantize_mxfp4(x, mode)
    assert_bits(mxfp4_quantize(x, mode=mode), (packed, scales))
    if x.shape[0] % 16 == 0 and x.shape[1] % 64 == 0:
        shuffled = reference.shuffle_weight(packed), reference.shuffle_scale(scales)
        assert_bits(mxfp4_quantize(x, mode=mode, shuffled=True), shuffled)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_equal_the_reference_in_every_mode(shape, dtype):
    with emulator.options(checks="all"):
        for mode in SCALE_MODES:
            assert_as_reference(spread(shape, dtype), mode)


@pytest.mark.parametrize("shape", [(16, 64), (48, 320), (272, 64), (256, 256)], ids=str)
def test_shuffled_layouts_equal_the_shuffled_reference(shape):
    """Rows and columns short of the padding, and exactly at it."""
    with emulator.options(checks="all"):
        for mode in ("even", "round_up"):
            assert_as_reference(spread(shape, torch.bfloat16), mode)


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_pattern(dtype, mode):
    """Sorted, so that blocks have every magnitude, and shuffled, so that NaN and infinity meet ordinary values."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    assert_as_reference(x.view(32, 2048), mode)
    assert_as_reference(x[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))].view(32, 2048), mode)


@pytest.mark.parametrize("mode", SCALE_MODES)
def test_maxima_around_every_step_of_the_rules(mode):
    """fp32 maxima one unit below, at and above each mantissa at which a rule turns, at exponents from one end to the
    other, subnormals and what rounds up to infinity included."""
    fractions = (0, 0x200000, 0x400000, 0x500000, 0x580000, 0x600000, 0x680000, 0x700000, 0x780000, 0x7FFFFF)
    exponents = (0, 1, 2, 7, 8, 9, 126, 127, 128, 252, 253, 254)
    bits = [(e << 23 | f) + step for e in exponents for f in fractions for step in (-1, 0, 1)]
    bits += [0, 1, 2, 3, 4, 119, 120, 121, 223, 224, 225]  # max * 2^-150 as a count of smallest subnormals
    maxima = torch.tensor([b for b in bits if 0 <= b <= 0x7F800001], dtype=torch.int32).view(torch.float32)
    x = torch.zeros(len(maxima), 32)
    x[:, 7] = maxima
    x[:, 20] = -maxima / 3
    assert_as_reference(x, mode)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_unaligned_data_gives_the_same(dtype):
    x = spread((16, 192), dtype)
    shifted = torch.empty(x.numel() + 1, dtype=dtype)[1:].view(x.shape).copy_(x)
    out = torch.empty(x.numel() + 1, dtype=torch.uint8)[1:].view(FP8).view(x.shape)
    packed = torch.empty(x.numel() // 2 + 1, dtype=torch.uint8)[1:].view(16, 96)
    with emulator.options(checks="all"):
        assert_bits(mxfp8_quantize(shifted, out=out), mxfp8_quantize(x))
        assert_bits(mxfp4_quantize(shifted, out=packed), mxfp4_quantize(x))
        assert_bits(mxfp4_quantize(x, out=packed, shuffled=True), mxfp4_quantize(x, shuffled=True))


def test_outputs_that_are_given_are_written_and_returned():
    x = spread((16, 64), torch.bfloat16)
    out, packed = torch.empty(16, 64, dtype=FP8), torch.empty(16, 32, dtype=torch.uint8)
    for dtype in filter(None, (torch.uint8, getattr(torch, "float8_e8m0fnu", None))):
        scale_out = torch.empty(16, 2, dtype=dtype)
        got = mxfp8_quantize(x, out=out, scale_out=scale_out)
        assert got[0] is out and got[1] is scale_out
        assert_bits(got, mxfp8_quantize(x))
        got = mxfp4_quantize(x, out=packed, scale_out=scale_out)
        assert got[0] is packed and got[1] is scale_out
        assert_bits(got, mxfp4_quantize(x))


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_bytes_moved_are_the_least_possible(dtype):
    x = spread((16, 4096), dtype)
    n, read = x.numel(), x.numel() * x.element_size()
    for call, stored, width in (
        (lambda: mxfp8_quantize(x), n, []),
        (lambda: mxfp4_quantize(x), n // 2, ["global_store_dwordx2"]),  # 8 codes a chunk: 2 words a lane
        (lambda: mxfp4_quantize(x, shuffled=True), n // 2, ["global_store_dwordx2"]),
    ):
        with emulator.counters() as counted:
            call()
        assert counted.launches == 1
        assert (counted.tensors["x"].loaded, counted.tensors["out"].stored) == (read, stored)
        scales = counted.tensors["scale_out"].stored
        padded = 256 * 128 if scales > n // 32 else n // 32
        assert scales == padded
        assert read + stored + padded <= counted.unique_bytes <= 1.02 * (read + stored + padded)
        assert sorted(wrong_width(counted.by_mnemonic)) == ["global_store_byte", *width]
        assert counted.scratch_bytes == 0


def test_refusals_name_argument_value_and_rule():
    x = spread((16, 64), torch.bfloat16)
    for call in (mxfp8_quantize, mxfp4_quantize):
        with pytest.raises(GuardError, match=r"x must be \[rows, K\]; got .*\[64\]"):
            call(x[0])
        with pytest.raises(GuardError, match=r"x must be float32, float16 or bfloat16; got"):
            call(x.double())
        with pytest.raises(GuardError, match="the last dimension of x must be a multiple of 32; got 40"):
            call(torch.zeros(2, 40))
        with pytest.raises(GuardError, match=r"K must be a positive multiple of 32.*; got 0"):
            call(torch.zeros(2, 0))
        with pytest.raises(GuardError, match="x must be contiguous"):
            call(x[:, :32])
        with pytest.raises(GuardError, match=r"mode must be one of 'round_down', .*; got 'nearest'"):
            call(x, mode="nearest")
        with pytest.raises(GuardError, match=r"scale_out must be contiguous .* \[16, 2\]; got uint8 \[16, 1\]"):
            call(x, scale_out=torch.empty(16, 1, dtype=torch.uint8))
        with pytest.raises(GuardError, match=r"scale_out must be contiguous uint8 or float8_e8m0fnu .*; got int8"):
            call(x, scale_out=torch.empty(16, 2, dtype=torch.int8))
    with pytest.raises(GuardError, match=r"out must be contiguous float8_e4m3fn.* \[16, 64\].*; got uint8 \[16, 64\]"):
        mxfp8_quantize(x, out=torch.empty(16, 64, dtype=torch.uint8))
    with pytest.raises(GuardError, match=r"out must be contiguous uint8 or float4_e2m1fn_x2 \[16, 32\]; got"):
        mxfp4_quantize(x, out=torch.empty(16, 64, dtype=torch.uint8))
    for shape in ((8, 64), (16, 32)):
        with pytest.raises(GuardError, match="a shuffled result needs rows in multiples of 16 and K in"):
            mxfp4_quantize(torch.zeros(shape), shuffled=True)
    with pytest.raises(GuardError, match=r"scale_out must be .* \[256, 8\], padded to 256 rows and 8 columns"):
        mxfp4_quantize(x, shuffled=True, scale_out=torch.empty(16, 2, dtype=torch.uint8))
