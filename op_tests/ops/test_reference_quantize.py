"""The quantisers against a scalar implementation in Python integers that shares nothing with them."""

import math
from dataclasses import dataclass

import pytest
import torch

from hipforge.errors import GuardError
from hipforge.ops.reference import (
    BLOCK,
    E2M1,
    E4M3FN,
    E4M3FNUZ,
    choose_scale,
    dequantize_mxfp4,
    dequantize_mxfp8,
    e8m0_to_f32,
    f32_to_e8m0,
    quantize_mxfp4,
    quantize_mxfp8,
    unpack_e2m1,
)

MODES = ("round_down", "round_up", "even", "ceil", "triton")
ROUNDINGS = ("rne", "half_up")

# ---- the scalar implementation: a magnitude is m * 2^e with an integer m ---------------------------------------------


@dataclass(frozen=True)
class Scalar:
    """An element format: maximum = max_m * 2^max_e, least exponent of a normal number, mantissa bits."""

    max_m: int
    max_e: int
    least_exponent: int
    mantissa_bits: int

    @property
    def max_exponent(self):
        return self.max_m.bit_length() - 1 + self.max_e

    def encode(self, m, e, half_up=False):
        """Code of the nearest value of the format; ties to the even code, or up."""
        if shifted(m, e) > shifted(self.max_m, self.max_e):
            m, e = self.max_m, self.max_e
        if m == 0:
            return 0
        exponent = max(m.bit_length() - 1 + e, self.least_exponent)
        drop = exponent - self.mantissa_bits - e  # the quantum is 2^(exponent - mantissa_bits)
        if drop <= 0:
            quanta = m << -drop
        else:
            quanta, rest = m >> drop, m & ((1 << drop) - 1)
            half = 1 << (drop - 1)
            quanta += rest > half or (rest == half and (half_up or quanta & 1))
        return ((exponent - self.least_exponent) << self.mantissa_bits) + quanta


def shifted(m, e, base=400):
    return m << (e + base)


FN = Scalar(7, 6, -6, 3)
FNUZ = Scalar(15, 4, -7, 3)
FP4 = Scalar(3, 1, 0, 1)
FORMATS = {E2M1: FP4, E4M3FN: FN, E4M3FNUZ: FNUZ}
FP8 = {torch.float8_e4m3fn: FN, torch.float8_e4m3fnuz: FNUZ}


def split(bits, mantissa_bits):
    """(m, e) of an IEEE magnitude with an 8-bit exponent, or None for inf and NaN."""
    field, fraction = bits >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    if field == 255:
        return None
    if field == 0:
        return fraction, -126 - mantissa_bits
    return fraction | (1 << mantissa_bits), field - 127 - mantissa_bits


def ceil_log2_quotient(m, e, fmt):
    """Least t with m * 2^e <= maximum * 2^t."""
    t = m.bit_length() + e - fmt.max_exponent - 2
    while shifted(m, e) > shifted(fmt.max_m, fmt.max_e + t, 400):
        t += 1
    return t


def scalar_scale(value, fmt, mode):
    saturates = mode == "triton" or (mode == "even" and fmt is FP4)
    if value is None:
        return 254 if saturates else 255
    m, e = value
    if m == 0:
        return 0
    top = m.bit_length() - 1  # the leading bit, so that m / 2^top is in [1, 2)
    exponent = top + e
    if mode == "round_down":
        exponent -= fmt.max_exponent
    elif mode == "ceil":
        exponent += (m & (m - 1) != 0) - fmt.max_exponent
    elif mode == "even":  # add half a unit of the format's last mantissa bit
        exponent += ((m << (fmt.mantissa_bits + 1)) + (1 << top)) >> (fmt.mantissa_bits + 2 + top) != 0
        exponent -= 0 if saturates and exponent == 128 else fmt.max_exponent
    elif mode == "triton":
        exponent += 4 * m >= 7 << top
        exponent -= 0 if exponent == 128 else fmt.max_exponent
    else:
        exponent = ceil_log2_quotient(m, e, fmt)
        if exponent < -126 or (exponent == -126 and shifted(m, e) < shifted(fmt.max_m, fmt.max_e - 126)):
            # The binary32 quotient is subnormal: byte 1 unless it rounds to zero (at most half of 2^-149).
            return int(shifted(m, e) > shifted(fmt.max_m, fmt.max_e - 150))
    return min(max(exponent + 127, 0), 254)


def scalar_element(value, negative, byte, fmt, rounding="rne"):
    """Code of value / 2^(byte - 127), sign included."""
    sign = negative << (3 if fmt is FP4 else 7)
    code = fmt.encode(value[0], value[1] + 127 - min(byte, 254), rounding == "half_up")
    return code if fmt is FNUZ and code == 0 else code | sign


FINITE = [bits for bits in range(65536) if split(bits & 0x7FFF, 7) is not None]


def own_blocks(values):
    """Each value in its own block, the rest zeros."""
    blocks = torch.zeros(values.numel(), BLOCK, dtype=values.dtype)
    blocks[:, 0] = values
    return blocks


def bf16(bits):
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


# ---- every bf16 value ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_finite_bf16_value_as_block_maximum_in_mxfp8(dtype, mode):
    fmt = FP8[dtype]
    elements, scales = quantize_mxfp8(own_blocks(bf16(FINITE)), dtype, mode)
    codes, scales = elements.view(torch.uint8)[:, 0].tolist(), scales[:, 0].tolist()
    for bits, code, scale in zip(FINITE, codes, scales, strict=True):
        value = split(bits & 0x7FFF, 7)
        assert scale == scalar_scale(value, fmt, mode), f"scale of {bits:#06x}"
        assert code == scalar_element(value, bits >> 15, scale, fmt), f"element {bits:#06x}"


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("mode", MODES)
def test_every_finite_bf16_value_as_block_maximum_in_mxfp4(mode, rounding):
    packed, scales = quantize_mxfp4(own_blocks(bf16(FINITE)), mode, rounding)
    codes, scales = unpack_e2m1(packed)[:, 0].tolist(), scales[:, 0].tolist()
    for bits, code, scale in zip(FINITE, codes, scales, strict=True):
        value = split(bits & 0x7FFF, 7)
        assert scale == scalar_scale(value, FP4, mode), f"scale of {bits:#06x}"
        assert code == scalar_element(value, bits >> 15, scale, FP4, rounding), f"element {bits:#06x}"


def beside_maximum(maximum):
    """Every bf16 value up to ``maximum`` in magnitude, 31 to a block whose last element is the maximum."""
    limit = torch.tensor(maximum, dtype=torch.bfloat16).view(torch.int16).item()
    bits = [b for b in FINITE if (b & 0x7FFF) <= limit]
    bits += [0] * (-len(bits) % (BLOCK - 1))
    blocks = bf16(bits).view(-1, BLOCK - 1)
    return bits, torch.cat((blocks, torch.full((blocks.shape[0], 1), maximum, dtype=torch.bfloat16)), dim=1)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_bf16_value_as_element_beside_a_fixed_maximum_in_mxfp8(dtype):
    fmt = FP8[dtype]
    bits, blocks = beside_maximum(float(fmt.max_m << fmt.max_e))
    elements, scales = quantize_mxfp8(blocks, dtype)
    assert (scales == 127).all()
    got = elements.view(torch.uint8)[:, :-1].flatten().tolist()
    assert got == [scalar_element(split(b & 0x7FFF, 7), b >> 15, 127, fmt) for b in bits]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_every_bf16_value_as_element_beside_a_fixed_maximum_in_mxfp4(rounding):
    bits, blocks = beside_maximum(6.0)
    packed, scales = quantize_mxfp4(blocks, "round_up", rounding)
    assert (scales == 127).all()
    got = unpack_e2m1(packed)[:, :-1].flatten().tolist()
    assert got == [scalar_element(split(b & 0x7FFF, 7), b >> 15, 127, FP4, rounding) for b in bits]


# ---- rounding boundaries of the scale --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_scale_one_ulp_around_every_boundary_at_every_exponent(fmt, mode):
    # 1, 1.5, 1.75, 1.875 and 1.9375 are every significand at which some rule steps; binary32, all binades.
    fractions = (0, 0x400000, 0x600000, 0x700000, 0x780000)
    bits = {(e << 23) + f + d for e in range(255) for f in fractions for d in (-1, 0, 1)}
    bits |= set(range(1, 600)) | {1 << i for i in range(23)}  # subnormals
    bits = sorted(b for b in bits if 0 <= b < 0x7F800000)
    amax = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    got = choose_scale(amax, fmt, mode).tolist()
    for b, byte in zip(bits, got, strict=True):
        assert byte == scalar_scale(split(b, 23), FORMATS[fmt], mode), f"{b:#010x}"


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_round_up_is_the_binary32_quotient_rounded_to_the_next_power_of_two(fmt):
    bits = torch.cat((torch.arange(4096), torch.randint(0, 0x7F800000, (200_000,)))).to(torch.int32)
    amax = bits.view(torch.float32)
    quotient = (amax / fmt.max_value).view(torch.int32)
    expected = (quotient >> 23) + ((quotient & 0x7FFFFF) != 0).to(torch.int32)
    assert torch.equal(choose_scale(amax, fmt, "round_up").to(torch.int32), expected)


@pytest.mark.parametrize("mode", ("round_up", "ceil"))
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_modes_that_round_up_never_clip(dtype, mode):
    x = torch.randn(64, BLOCK, generator=torch.Generator().manual_seed(0)) * 1e3
    q, scale = quantize_mxfp8(x, dtype, mode)
    largest = dequantize_mxfp8(q, scale).abs().amax(-1)
    # A clipped maximum would lose more than half a unit in the last place of a 4-bit significand, 2^-4.
    assert ((largest / x.abs().amax(-1) - 1).abs() <= 2**-4).all()


# ---- zeros, denormals, infinities, NaN -------------------------------------------------------------------------------


def test_zero_blocks_get_scale_byte_0_and_zero_elements():
    zeros = torch.zeros(3, 64, dtype=torch.bfloat16)
    for mode in MODES:
        for dtype in FP8:
            q, scale = quantize_mxfp8(zeros, dtype, mode)
            assert not q.view(torch.uint8).any() and not scale.any()
        packed, scale = quantize_mxfp4(zeros, mode)
        assert not packed.any() and not scale.any()


def test_negative_zero_keeps_its_sign_where_the_format_has_one():
    x = torch.full((1, BLOCK), -0.0)
    assert (unpack_e2m1(quantize_mxfp4(x)[0]) == 8).all()
    assert (quantize_mxfp8(x, torch.float8_e4m3fn)[0].view(torch.uint8) == 0x80).all()
    assert (quantize_mxfp8(x, torch.float8_e4m3fnuz)[0].view(torch.uint8) == 0).all()


def test_denormal_blocks_read_back_within_the_smallest_scale():
    x = torch.full((1, BLOCK), 1.0) * torch.tensor(2.0**-130)
    q, scale = quantize_mxfp8(x)
    assert scale.item() == 1  # 2^-126, the subnormal-quotient rule
    assert torch.equal(dequantize_mxfp8(q, scale), x)
    packed, scale = quantize_mxfp4(torch.full((1, BLOCK), 2.0**-127))
    assert scale.item() == 0
    assert torch.equal(dequantize_mxfp4(packed, scale), torch.full((1, BLOCK), 2.0**-127))


@pytest.mark.parametrize("special", (math.inf, -math.inf, math.nan))
@pytest.mark.parametrize("mode", MODES)
def test_blocks_with_a_special_value(special, mode):
    x = torch.ones(2, BLOCK)
    x[1, 5] = special
    packed, scale = quantize_mxfp4(x, mode)
    saturating = mode in ("even", "triton")
    assert scale[1].item() == (254 if saturating else 255)
    assert unpack_e2m1(packed)[1, 5].item() & 7 == 7
    back = dequantize_mxfp4(packed, scale)
    assert torch.equal(back[0], x[0])
    assert back[1].isnan().all() == (not saturating)
    for dtype in FP8:
        q, scale = quantize_mxfp8(x, dtype, mode)
        assert scale[1].item() == (254 if mode == "triton" else 255)
        back = dequantize_mxfp8(q, scale)
        assert torch.equal(back[0], x[0])
        assert back[1].isnan().all() == (mode != "triton")
        assert back[1, 5].isnan() == (mode != "triton" or math.isnan(special))


def test_nan_elements_have_one_code_whatever_their_sign_and_payload():
    bits = [0x7F80 + p | s for p in (1, 0x40, 0x7F) for s in (0, 0x8000)]
    blocks = own_blocks(bf16(bits))
    assert (quantize_mxfp8(blocks, torch.float8_e4m3fn)[0].view(torch.uint8)[:, 0] == 0x7F).all()
    assert (quantize_mxfp8(blocks, torch.float8_e4m3fnuz)[0].view(torch.uint8)[:, 0] == 0x80).all()
    assert (unpack_e2m1(quantize_mxfp4(blocks)[0])[:, 0] == 7).all()


def test_finite_maximum_that_rounds_to_infinity_is_clamped_like_one():
    x = torch.full((1, BLOCK), torch.finfo(torch.float32).max)
    assert quantize_mxfp4(x, "even")[1].item() == 254
    assert quantize_mxfp4(x, "round_down")[1].item() == 254 - 2


# ---- e8m0 ------------------------------------------------------------------------------------------------------------


def test_e8m0_bytes_are_exact_powers_of_two_and_255_is_nan():
    values = e8m0_to_f32(torch.arange(256, dtype=torch.uint8))
    assert values.to(torch.float64).tolist()[:255] == [2.0 ** (b - 127) for b in range(255)]
    assert values.view(torch.int32)[255].item() == 0x7F800001


def test_f32_to_e8m0_inverts_and_rounds_up():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(f32_to_e8m0(e8m0_to_f32(every)), every)
    x = torch.tensor([0.0, 1e-45, 2.0**-127, 2.0**-127 * 1.5, 1.0, 1.0000001, -3.0, 2.0**127 * 1.5, math.inf])
    assert f32_to_e8m0(x).tolist() == [0, 0, 0, 1, 127, 128, 129, 255, 255]


def test_e8m0_dtype_is_taken_wherever_bytes_are():
    q, scale = quantize_mxfp8(torch.randn(4, 64))
    typed = scale.view(torch.float8_e8m0fnu)
    assert torch.equal(dequantize_mxfp8(q, typed), dequantize_mxfp8(q, scale))


# ---- bad input, shapes, strides --------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", (quantize_mxfp8, quantize_mxfp4))
def test_quantisers_refuse_what_they_cannot_take(quantize):
    with pytest.raises(GuardError, match=r"last dimension of x must be a multiple of 32; got 33 \(shape \(2, 33\)\)"):
        quantize(torch.zeros(2, 33))
    with pytest.raises(GuardError, match=r"x must be .*bfloat16.*; got float64"):
        quantize(torch.zeros(2, 32, dtype=torch.float64))
    with pytest.raises(GuardError, match="at least 1 dimension; got a scalar"):
        quantize(torch.tensor(1.0))
    with pytest.raises(GuardError, match=r"mode must be one of 'round_down'.*; got 'floor'"):
        quantize(torch.zeros(2, 32), mode="floor")


def test_other_arguments_are_refused_by_name():
    with pytest.raises(GuardError, match=r"dtype must be one of .*; got torch\.float8_e5m2"):
        quantize_mxfp8(torch.zeros(1, 32), torch.float8_e5m2)
    with pytest.raises(GuardError, match="rounding must be one of 'rne', 'half_up'; got 'up'"):
        quantize_mxfp4(torch.zeros(1, 32), rounding="up")
    with pytest.raises(GuardError, match=r"scale must be .*\[1, 2\] .*; got .*\[1, 1\]"):
        dequantize_mxfp8(torch.zeros(1, 64, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8))
    with pytest.raises(GuardError, match=r"scale must be .*\[1, 2\] .*; got .*\[2, 1\]"):
        dequantize_mxfp4(torch.zeros(1, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))
    with pytest.raises(GuardError, match=r"scale must be .*; got "):
        e8m0_to_f32(torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("shape", ((0, 32), (1, 32), (2, 3, 64), (4, 0), (32,)))
def test_any_leading_shape_works(shape):
    x = torch.randn(shape)
    q, scale = quantize_mxfp8(x)
    assert q.shape == x.shape and scale.shape == (*shape[:-1], shape[-1] // BLOCK)
    assert dequantize_mxfp8(q, scale).shape == x.shape
    packed, scale = quantize_mxfp4(x)
    assert packed.shape == (*shape[:-1], shape[-1] // 2) and scale.shape == (*shape[:-1], shape[-1] // BLOCK)
    assert dequantize_mxfp4(packed, scale).shape == x.shape


def test_strides_do_not_matter():
    x = torch.randn(64, 48)
    for quantize in (quantize_mxfp8, quantize_mxfp4):
        for got, expected in zip(quantize(x.T), quantize(x.T.contiguous()), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
