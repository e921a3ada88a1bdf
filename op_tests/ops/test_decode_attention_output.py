"""Decode attention that quantises its output: what the quantising ops make of the result in float32, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.attention_caches import KINDS, holding
from helpers.attention_cases import FP8, NAN_CODE, case, lengths, rng

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.decode_attention import kernels
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8, decode_attention_splitk
from hipforge.ops.reference import dequantize_mxfp8, quantize_mxfp8
from hipforge.ops.reference.fp8_static import to_fp8_static

pytestmark = [
    pytest.mark.gfx942("(quantising_ops and 64) or dominant or exact or (nan and 64) or special"),
    pytest.mark.usefixtures("every_checker"),
]

BATCH, MQ, KV_HEADS, GROUP, KEYS = 2, 3, 2, 3, 70
HEADS, ROWS = KV_HEADS * GROUP, BATCH * MQ
LARGEST = torch.finfo(FP8).max


def bits(x):
    return x.view(torch.uint8)


def uneven(d, seed):
    """Values whose blocks of 32 columns differ by powers of two up to 2^20, and a block of zeros."""
    x = torch.randn(BATCH, KEYS, KV_HEADS, d, generator=rng(seed))
    x = x * 2.0 ** torch.linspace(-10, 3, d // 32).round().repeat_interleave(32)
    x[:, :, 1, 32:64] = 0.0
    return x


class Attention:
    """A call over one kind of cache: with the public function, and raw with a float32 output."""

    def __init__(self, cache, d, split_k):
        self.q = torch.randn(BATCH, MQ, HEADS, d, generator=rng(d)).bfloat16()
        self.stored = holding(cache, torch.randn(BATCH, KEYS, KV_HEADS, d, generator=rng(1)), uneven(d, 2))
        self.cache, self.seqlens, self.options = cache, lengths(KEYS, 33), {"split_k": split_k}
        self.scale, self.one = d**-0.5, torch.ones(1)

    def __call__(self, **options):
        """(out, log-sum-exp[, scales])."""
        return self.stored.attend(self.q, self.seqlens, **self.options, **options)

    def in_float32(self):
        """The result before any rounding, and the log-sum-exp, in the configuration that the public function takes."""
        given = {"scale": self.scale, "out": torch.full(self.q.shape, math.nan)}
        operands = (self.q, *self.stored.sides, None, self.seqlens)
        if self.cache == "int4":
            folded = self.q.view(1, -1, KV_HEADS, GROUP, self.q.shape[-1])
            packed = (folded, *self.stored.operands(self.q), self.seqlens)
            taken = hipforge.explain(decode_attention_splitk, *packed, num_groups=4, **self.options)
            return kernels.run_decode_attention(*operands, num_groups=4, configuration=taken.configuration, **given)
        if self.cache == "rows":
            operands = (self.q, *(x.view(torch.uint8) for x in self.stored.sides), None, self.seqlens)
        given["configuration"] = hipforge.explain(decode_attention_fp8, *operands, **self.options).configuration
        if self.cache == "rows":
            words = dict(zip(("k_scale_shift", "v_scale_shift"), self.stored.words, strict=True))
            return kernels.run_decode_attention(*operands, **words, **given)
        return kernels.run_decode_attention(*operands, self.one, self.one, **given)


@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("split_k", [1, 3])
def test_codes_and_scales_are_those_of_the_quantising_ops(cache, d, split_k):
    attention = Attention(cache, d, split_k)
    exact, lse = attention.in_float32()
    plain, plain_lse = attention()
    assert torch.equal(exact.bfloat16(), plain) and torch.equal(lse, plain_lse)
    assert (exact != plain.float()).any()  # more than bf16 holds: nothing was rounded on the way
    q, blocks_lse, scales = attention(out_format="mxfp8")
    want, want_scales = hipforge.mxfp8_quantize(exact.view(ROWS, HEADS * d))
    assert q.dtype == FP8 and q.shape == attention.q.shape and len(want_scales.unique()) > 2
    assert torch.equal(scales, want_scales) and torch.equal(bits(q).view_as(want), bits(want))
    by_one = torch.tensor([0.003])  # large elements saturate, small ones become subnormal
    q, one_lse = attention(out_scale=by_one)
    want = to_fp8_static(exact, by_one, FP8)
    assert torch.equal(bits(q), bits(want)) and (want.float().abs() == LARGEST).any()
    assert torch.equal(blocks_lse, lse) and torch.equal(one_lse, lse)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("split_k", [1, 2])
def test_a_dominant_key_returns_its_fp8_row_exactly(d, split_k):
    """Scaled to fill the format an e4m3 element stays one, so that dequantising gives the cache's own value."""
    k = torch.zeros(1, 40, 1, d)
    k[0, 17] = 100.0
    v = torch.randint(0, 256, (1, 40, 1, d), generator=rng(d), dtype=torch.uint8)
    v[(v & 0x7F) == 0x7F], v[v == 0x80] = 1, 1  # no NaN in either format
    v = v.view(FP8)
    q = torch.ones(1, 1, 2, d).bfloat16()
    out, scales = decode_attention_fp8(q, k.to(FP8), v, None, lengths(40), split_k=split_k, out_format="mxfp8")
    assert out.shape == q.shape and scales.shape == (1, 2 * d // 32)
    assert torch.equal(dequantize_mxfp8(out.view(1, -1), scales).view(2, d), v[0, 17, 0].float().expand(2, d))
    out = decode_attention_fp8(q, k.to(FP8), v, None, lengths(40), split_k=split_k, out_scale=torch.ones(1))
    assert torch.equal(bits(out)[0, 0] & 0x7F, (bits(v)[0, 17, 0] & 0x7F).expand(2, d))
    assert torch.equal(out.float()[0, 0], v[0, 17, 0].float().expand(2, d))


@pytest.mark.parametrize("split_k", [1, 2])
def test_equal_scores_give_exact_means_in_fp8(split_k):
    q, k, _ = case(1, 1, 1, 2, 64, 8)
    v = torch.randint(-3, 4, (1, 8, 1, 64), generator=rng(3)).float()
    v[0, 1] = -v[0, 0]
    v[0, 2:] = 8.0  # the mean is 6
    out, scales = decode_attention_fp8(q * 0, k, v.to(FP8), None, lengths(8), split_k=split_k, out_format="mxfp8")
    # 6 = 1.5 * 2^2 times 2^6 is the largest such number up to 448, times 2^5 up to 240.
    assert (scales == (127 - 6 if LARGEST == 448 else 127 - 5)).all()
    assert (out.float() == (384 if LARGEST == 448 else 192)).all()


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("split_k", [1, 2])
def test_a_nan_spoils_its_block_alone_and_a_row_without_keys_is_zero(d, split_k):
    q, k, v = case(2, 1, 1, 2, d, 40)
    bits(v)[0, 3, 0, 33] = NAN_CODE
    seqlens = lengths(40, 0)
    plain = decode_attention_fp8(q, k, v, None, seqlens, split_k=split_k)
    out, lse, scales = decode_attention_fp8(
        q, k, v, None, seqlens, split_k=split_k, return_lse=True, out_format="mxfp8"
    )
    spoiled = (torch.arange(d // 32) == 1).repeat(2)
    assert torch.equal(scales[0] == 255, spoiled) and (scales[0][~spoiled] > 100).all()
    assert torch.equal(bits(out[0]).view(-1, 32) == NAN_CODE, spoiled.view(-1, 1).expand(-1, 32))
    assert not bits(out[1]).any() and (lse[1] == -math.inf).all()
    _, of_zeros = quantize_mxfp8(torch.zeros(1, 2 * d), FP8)
    assert torch.equal(scales[1:], of_zeros)
    static = decode_attention_fp8(q, k, v, None, seqlens, split_k=split_k, out_scale=torch.ones(1))
    assert torch.equal(static.float().isnan(), plain.isnan()) and plain.isnan().sum() == 2


@pytest.mark.parametrize("scale", [0.0, 1e-30, math.inf, math.nan])
@pytest.mark.parametrize("split_k", [1, 2])
def test_special_scales_do_what_they_do_everywhere(scale, split_k):
    attention = Attention("fp8", 64, split_k)
    by_one = torch.tensor([scale])
    out = attention(out_scale=by_one)[0].float()
    want = to_fp8_static(attention.in_float32()[0], by_one, FP8).float()
    assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize(("split_k", "launches"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("cache", KINDS)
def test_quantising_is_no_launch_of_its_own(cache, split_k, launches):
    attention = Attention(cache, 64, split_k)
    for options in ({"out_format": "mxfp8"}, {"out_scale": torch.ones(1)}):
        with emulator.counters() as counted:
            attention(**options)
        assert counted.launches == launches


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("cache", KINDS)
def test_memory_that_is_given_is_written_and_nothing_beside_it(cache, split_k):
    attention = Attention(cache, 64, split_k)
    want, _, want_scales = attention(out_format="mxfp8")
    spare = 64
    room, scale_room = (
        torch.full((want.numel() + spare,), 0x55, dtype=torch.uint8),
        torch.full((72 + spare,), 0x55).byte(),
    )
    out, scale_out = room[: want.numel()].view(FP8).view(want.shape), scale_room[:72].view(ROWS, 12)
    shape = (1, ROWS, KV_HEADS, GROUP, 64) if cache in ("rows", "int4") else attention.q.shape
    got = attention(out_format="mxfp8", scale_out=scale_out, out=out.view(shape))
    assert got[2] is scale_out and torch.equal(bits(out), bits(want)) and torch.equal(scale_out, want_scales)
    assert (room[want.numel() :] == 0x55).all() and (scale_room[72:] == 0x55).all()
    typed = torch.zeros(ROWS, 12, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert attention(out_format="mxfp8", scale_out=typed)[2] is typed and torch.equal(bits(typed), want_scales)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"out_scale": torch.ones(1), "out_format": "mxfp8"},
            "out_scale and out_format='mxfp8' must not both be given",
        ),
        ({"out_scale": torch.ones(2)}, r"out_scale must have one element, the scale of all of out; got \(2,\)"),
        ({"out_scale": torch.ones(1).half()}, "out_scale must be float32"),
        ({"out_format": "fp8"}, "out_format must be one of None, 'mxfp8'; got 'fp8'"),
        (
            {"scale_out": torch.zeros(1, 4).byte()},
            "scale_out takes the scales of out_format='mxfp8'; got out_format=None",
        ),
        ({"out_format": "mxfp8", "scale_out": torch.zeros(1, 3).byte()}, r"scale_out must be .* \[1, 4\]"),
        (
            {"out_format": "mxfp8", "scale_out": torch.zeros(1, 4)},
            "scale_out must be contiguous uint8 or float8_e8m0fnu",
        ),
        ({"out_format": "mxfp8", "out": torch.zeros(1, 1, 2, 64).bfloat16()}, "out must be float8"),
        ({"out_scale": torch.ones(1), "out": torch.zeros(1, 1, 2, 64).bfloat16()}, "out must be float8"),
        ({"out": torch.zeros(1, 1, 2, 64).to(FP8)}, "out must be bfloat16"),
    ],
)
def test_refusals_name_argument_value_and_rule(change, message):
    q, k, v = case(1, 1, 1, 2, 64, 32)
    with pytest.raises(GuardError, match=message):
        decode_attention_fp8(q, k, v, None, lengths(32), **change)


def test_heads_that_are_no_whole_blocks_are_refused():
    q, k, v = case(1, 1, 1, 1, 48, 32)
    with pytest.raises(GuardError, match=r"Hq \* D must be a multiple of 32, .* got 48"):
        decode_attention_fp8(q, k, v, None, lengths(32), out_format="mxfp8")
