"""What a key holds that a query token does not see never reaches that token's row, NaN included.

Tokens of one sequence share a tile of rows, so each test puts a NaN where some tokens see it and others do not. The
rows that do not see it must have the bits of a clean cache.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import attention_caches as caches
from helpers.attention_cases import FP8, NAN_CODE, case, lengths
from helpers.errors import assert_within

from hipforge import emulator
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8
from hipforge.ops.reference.attention import decode_attention, paged_attention

pytestmark = [
    pytest.mark.gfx942("(64 or 256 or any_order or every_code or own_dtype) and not reference"),
    pytest.mark.usefixtures("every_checker"),
]


def sees(mq, length, key):
    """bool [Mq]: which tokens see a key."""
    return key <= length - mq + torch.arange(mq)


def check_leaks(clean, got, seen):
    """``clean`` and ``got`` are (out [Mq, Hq, D], lse [Hq, Mq]); rows that do not see keep their bits."""
    for token, sees_it in enumerate(seen.tolist()):
        if not sees_it:
            assert torch.equal(got[0][token], clean[0][token]), token
            assert torch.equal(got[1][:, token], clean[1][:, token]), token


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize(("mq", "length"), [(2, 65), (4, 40), (16, 47)])
@pytest.mark.parametrize("split_k", [1, 3])
def test_a_nan_in_v_reaches_its_column_in_the_rows_that_see_it(d, mq, length, split_k):
    q, k, v = case(1, mq, 1, 3, d, 80, seed=d + mq)
    clean = decode_attention_fp8(q, k, v, None, lengths(length), return_lse=True, split_k=split_k)
    for key, column in ((length - 1, 5), (length - mq + 1, d - 1), (length - mq, 0), (3, 17)):
        spoiled = v.clone()
        spoiled.view(torch.uint8)[0, key, 0, column] = NAN_CODE
        out, lse = decode_attention_fp8(q, k, spoiled, None, lengths(length), return_lse=True, split_k=split_k)
        want = torch.zeros(mq, d, dtype=torch.bool)
        want[:, column] = sees(mq, length, key)
        assert torch.equal(out[0].isnan(), want.unsqueeze(1).expand(out[0].shape)), (key, column)
        assert torch.equal(out[0].masked_fill(out[0].isnan(), 0), clean[0][0].masked_fill(out[0].isnan(), 0))
        assert torch.equal(lse, clean[1])


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("split_k", [1, 3])
def test_a_nan_in_k_spoils_the_rows_that_see_it_and_no_other(d, split_k):
    q, k, v = case(1, 4, 1, 3, d, 80, seed=d)
    clean = decode_attention_fp8(q, k, v, None, lengths(70), return_lse=True, split_k=split_k)
    k.view(torch.uint8)[0, 68, 0, 7] = NAN_CODE
    out, lse = decode_attention_fp8(q, k, v, None, lengths(70), return_lse=True, split_k=split_k)
    check_leaks((clean[0][0], clean[1][0]), (out[0], lse[0]), sees(4, 70, 68))
    assert out[0, 2:].isnan().all() and lse[0, :, 2:].isnan().all()


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("split_k", [1, 2])
def test_a_row_that_sees_no_key_is_zero_whatever_the_keys_and_the_scale_of_v_hold(d, split_k):
    q, k, v = case(1, 5, 1, 4, d, 16, seed=d)
    for cache in (k, v):
        cache.view(torch.uint8)[0, :3] = NAN_CODE
    out, lse = decode_attention_fp8(
        q, k, v, None, lengths(3), 1.0, torch.tensor([math.nan]), return_lse=True, split_k=split_k
    )
    assert not out[0, :2].any() and (lse[0, :, :2] == -math.inf).all()
    assert out[0, 2:].isnan().all()


def test_waves_that_share_the_keys_leak_nothing_in_any_order():
    for d, waves in ((64, 4), (256, 4)):
        q, k, v = case(2, 3, 1, 2, d, 200, seed=waves)
        configuration = {"block_n": 32, "waves": waves, "split_k": 1}
        given = {"return_lse": True, "force_kernel_config": configuration}
        clean = decode_attention_fp8(q, k, v, None, lengths(200, 34), **given)
        v.view(torch.uint8)[0, 198:], v.view(torch.uint8)[1, 33] = NAN_CODE, NAN_CODE
        for order in ("forward", "reverse", "random"):
            with emulator.options(checks="all", wave_order=order):
                got = decode_attention_fp8(q, k, v, None, lengths(200, 34), **given)
            for b, (length, key) in enumerate(((200, 198), (34, 33))):
                check_leaks((clean[0][b], clean[1][b]), (got[0][b], got[1][b]), sees(3, length, key))


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("kind", ["rows", "int4"])
def test_words_of_a_hidden_row_that_are_no_numbers(kind, d, split_k):
    mq, length = 3, 66
    q, cache = caches.case(kind, 1, mq, 1, 2, d, 80, d)
    holds = "words" if kind == "rows" else "sides"  # of four groups a row

    def run(*parts, seen=length):
        out, lse, *_ = replace(cache, **{holds: parts}).attend(q, lengths(seen), split_k=split_k)
        return out[0], lse[0]

    sides = getattr(cache, holds)
    clean = run(*sides)
    for of_k, key, group in ((True, 65, 0), (False, 65, 1), (False, 64, 3), (False, 63, 2)):
        rows = [side.clone() for side in sides]
        rows[0 if of_k else 1][(0, key, 0) if kind == "rows" else (0, key, 0, group)] = caches.NAN_WORD
        got = run(*rows)
        seen = sees(mq, length, key)
        check_leaks(clean, got, seen)
        spoiled = torch.ones(d, dtype=torch.bool)
        if kind == "int4" and not of_k:
            spoiled = torch.arange(d) // (d // 4) == group
        assert torch.equal(got[0][seen].isnan(), spoiled.expand(got[0][seen].shape))
        assert of_k or torch.equal(got[1], clean[1])
    out, lse = run(*(torch.full_like(side, caches.NAN_WORD) for side in sides), seen=1)
    assert not out[:2].any() and (lse[:, :2] == -math.inf).all() and out[2].isnan().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_a_hidden_key_of_qs_own_dtype_leaks_nothing(d, value, dtype):
    q, cache = caches.case("half", 1, 4, 1, 3, d, 80, d, dtype)
    k, v = cache.sides
    clean = decode_attention_fp8(q, k, v, None, lengths(70), return_lse=True, split_k=2)
    for column in (1, d - 2):
        spoiled = v.clone()
        spoiled[0, 68, 0, column] = value
        out, lse = decode_attention_fp8(q, k, spoiled, None, lengths(70), return_lse=True, split_k=2)
        wrong = ~out.isfinite()
        assert wrong[0, 2:, :, column].all() and wrong.sum() == 2 * 3
        assert torch.equal(out.masked_fill(wrong, 0), clean[0].masked_fill(wrong, 0)) and torch.equal(lse, clean[1])
    k[0, 69] = math.nan
    out, lse = decode_attention_fp8(q, k, v, None, lengths(70), return_lse=True, split_k=2)
    assert torch.equal(out[:, :3], clean[0][:, :3]) and out[:, 3].isnan().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_reference_leaks_nothing_either(value):
    q, k, v = case(2, 3, 1, 2, 32, 20)
    k, v, seqlens = k.double(), v.double(), lengths(20, 2)
    clean = paged_attention(q, k, v, None, seqlens, 0.1, True)
    v[0, 18, 0, 4], v[1, 1, 0], k[1, 1, 0] = value, value, value
    out, lse = paged_attention(q, k, v, None, seqlens, 0.1, True)
    check_leaks((clean[0][0], clean[1][0]), (out[0], lse[0]), sees(3, 20, 18))
    check_leaks((clean[0][1], clean[1][1]), (out[1], lse[1]), sees(3, 2, 1))
    assert not out[1, 0].any() and (lse[1, :, 0] == -math.inf).all()
    wrong = out[0, 1:, :, 4]
    assert (wrong.isnan() if math.isnan(value) else wrong == value).all() and out[0, 1:, :, :4].isfinite().all()
    dense, _ = decode_attention(q.view(2, 3, 1, 2, 32), k, v, seqlens, 0.1, causal=True)
    assert not dense[1, 0].any()


def test_every_code_but_nan_stays_in_a_tile_that_is_searched_for_nans():
    q, k, v = case(1, 2, 1, 2, 64, 16)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(FP8).float().isfinite()]
    v.view(torch.uint8)[0, :, 0] = codes[torch.arange(16 * 64) % len(codes)].view(16, 64)
    k.view(torch.uint8)[:] = 0
    out = decode_attention_fp8(q, k, v, None, lengths(16), split_k=1)
    for token in range(2):
        seen = v[0, : 15 + token, 0].double()
        # Weights of 1 and float32 sums of 16 e4m3 values are exact: what is left is the output's rounding.
        assert_within(out[0, token], seen.mean(0), 2.0**-8 * seen.mean(0).abs() + 1e-7)
