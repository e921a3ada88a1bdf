"""e2m1 packing, shuffled layouts, fnuz checkpoints: every byte against its formula."""

import math

import pytest
import torch

from hipforge.errors import GuardError
from hipforge.ops.reference import (
    f32_to_e2m1,
    fn_to_fnuz,
    fnuz_to_fn,
    mxfp4_to_f32,
    pack_e2m1,
    shuffle_scale,
    shuffle_weight,
    unpack_e2m1,
    unshuffle_scale,
    unshuffle_weight,
)

EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_every_packed_byte_unpacks_low_nibble_first_and_packs_back():
    codes = unpack_e2m1(EVERY_BYTE)
    assert codes.tolist() == [nibble for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert torch.equal(pack_e2m1(codes), EVERY_BYTE)


def test_every_code_has_its_value_and_encodes_back():
    values = mxfp4_to_f32(EVERY_BYTE)
    expected = [(-1.0 if code & 8 else 1.0) * E2M1[code & 7] for code in unpack_e2m1(EVERY_BYTE).tolist()]
    assert values.tolist() == expected
    assert [math.copysign(1, v) for v in values.tolist()] == [math.copysign(1, v) for v in expected]
    for rounding in ("rne", "half_up"):
        assert torch.equal(f32_to_e2m1(values, rounding), unpack_e2m1(EVERY_BYTE))


def legacy_e2m1(bits):
    """The bit arithmetic of the older quantisers, whose ties go away from zero."""
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent < 127:
        mantissa, exponent = (0x400000 | mantissa >> 1) >> min(126 - exponent, 31), 0
    else:
        exponent -= 126
    return min(((exponent << 2 | mantissa >> 21) + 1) >> 1, 7) | bits >> 31 << 3


def test_half_up_is_the_legacy_bit_arithmetic():
    magnitudes = torch.cat((torch.arange(0, 0x7F800000, 9973), torch.arange(0x3D000000, 0x41000000, 251)))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).view(torch.int32)
    bits = torch.cat((magnitudes.to(torch.int32), ties, ties - 1, ties + 1))
    bits = torch.cat((bits, bits | -0x80000000))
    codes = f32_to_e2m1(bits.view(torch.float32), "half_up").tolist()
    assert codes == [legacy_e2m1(b & 0xFFFFFFFF) for b in bits.tolist()]


def test_the_two_roundings_differ_at_four_ties_only():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert f32_to_e2m1(ties, "rne").tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert f32_to_e2m1(ties, "half_up").tolist() == [1, 2, 3, 4, 5, 6, 7]
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(f32_to_e2m1(x, "rne"), f32_to_e2m1(x, "half_up"))  # float32 noise meets no tie


def test_shuffled_weight_byte_by_byte():
    n, kb = 48, 96
    weight = torch.randint(0, 256, (n, kb), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shuffled = shuffle_weight(weight).flatten()
    for row in range(n):
        for b in range(kb):
            at = (row // 16 * (kb // 32) + b // 32) * 512 + b % 32 // 16 * 256 + row % 16 * 16 + b % 16
            assert shuffled[at] == weight[row, b]
    assert torch.equal(unshuffle_weight(shuffle_weight(weight)), weight)


@pytest.mark.parametrize("shape", [(256, 8), (300, 11), (1, 1), (512, 24)])
def test_shuffled_scale_byte_by_byte(shape):
    m, s = shape
    scale = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shuffled = shuffle_scale(scale, pad=7)
    rows, columns = -(-m // 256) * 256, -(-s // 8) * 8
    assert shuffled.shape == (rows, columns)
    flat = shuffled.flatten().tolist()
    for row in range(rows):
        for c in range(columns):
            at = row // 32 * 32 * columns + c // 8 * 256 + c % 4 * 64 + row % 16 * 4 + c % 8 // 4 * 2 + row % 32 // 16
            assert flat[at] == (scale[row, c].item() if row < m and c < s else 7)
    assert torch.equal(unshuffle_scale(shuffled, m, s), scale)


def test_layouts_refuse_shapes_that_do_not_fit():
    with pytest.raises(GuardError, match="first dimension of weight must be a multiple of 16; got 8"):
        shuffle_weight(torch.zeros(8, 32, dtype=torch.uint8))
    with pytest.raises(GuardError, match="last dimension of weight must be a multiple of 32; got 48"):
        shuffle_weight(torch.zeros(16, 48, dtype=torch.uint8))
    with pytest.raises(GuardError, match="weight must have 1-byte elements"):
        shuffle_weight(torch.zeros(16, 32))
    with pytest.raises(GuardError, match=r"shuffled must be padded to multiples of 256 rows and 8 columns"):
        unshuffle_scale(torch.zeros(256, 7, dtype=torch.uint8), 1, 1)
    with pytest.raises(GuardError, match=r"hold 257 x 8 scales; got shape \(256, 8\)"):
        unshuffle_scale(torch.zeros(256, 8, dtype=torch.uint8), 257, 8)


def test_every_fn_byte_means_the_same_as_fnuz_with_twice_the_scale():
    weight = EVERY_BYTE.view(torch.float8_e4m3fn)
    converted, scale = fn_to_fnuz(weight, torch.tensor(0.125))
    assert scale.item() == 0.25
    before = weight.float() * 0.125
    after = converted.float() * scale
    assert torch.equal(before.nan_to_num(nan=1e9), after.nan_to_num(nan=1e9))
    assert converted.view(torch.uint8)[[0x7F, 0xFF, 0x80]].tolist() == [0x80, 0x80, 0x00]


def test_fnuz_goes_back_and_saturates_where_fn_ends():
    every = EVERY_BYTE.view(torch.float8_e4m3fn)
    back, scale = fnuz_to_fn(*fn_to_fnuz(every, torch.tensor([2.0])))
    assert scale.item() == 2.0
    assert torch.equal(back.float().nan_to_num(nan=1e9), every.float().nan_to_num(nan=1e9))
    converted, scale = fnuz_to_fn(EVERY_BYTE.view(torch.float8_e4m3fnuz), torch.tensor(1.0))
    expected = EVERY_BYTE.view(torch.float8_e4m3fnuz).float()
    expected = torch.where(expected.abs() == 240, expected.sign() * 224, expected)
    assert torch.equal((converted.float() * scale).nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


def test_checkpoint_conversion_refuses_other_dtypes():
    with pytest.raises(GuardError, match=r"weight must be float8_e4m3fn; got float8_e4m3fnuz"):
        fn_to_fnuz(EVERY_BYTE.view(torch.float8_e4m3fnuz), torch.tensor(1.0))
    with pytest.raises(GuardError, match=r"scale must be .*; got uint8"):
        fnuz_to_fn(EVERY_BYTE.view(torch.float8_e4m3fnuz), torch.tensor(1, dtype=torch.uint8))
