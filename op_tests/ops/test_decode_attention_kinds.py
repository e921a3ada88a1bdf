"""Decode attention over every kind of cache against float64 over the same bits, on both architectures.

Bounds are derived in attention_cases and attention_caches; data that must come out exactly is compared bit for bit.
What one kind has alone is in the file named after it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.attention_caches import KINDS, Cache, case, holding
from helpers.attention_cases import FP8, lengths, rng

import hipforge
from hipforge import devices, emulator
from hipforge.errors import GuardError
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8, decode_attention_splitk

pytestmark = [
    pytest.mark.gfx942(
        "dominant or means or (dimensions and (64-bf16 or 256-f16)) or (order_give and 16) or together or may_hold"
        " or bytes or far_below"
    ),
    pytest.mark.usefixtures("every_checker"),
]

BF16, F16 = torch.bfloat16, torch.float16
HEAD_DIMS = (64, 128, 192, 256)


# float16 with one token and one split: the exact results of a dominant key below.
@pytest.mark.parametrize(
    ("dtype", "mq", "split_k"), [(BF16, 1, 1), (BF16, 4, 3), (F16, 4, 3)], ids=["bf16-1-1", "bf16-4-3", "f16-4-3"]
)
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_head_dimensions_dtypes_and_splits(kind, d, dtype, mq, split_k):
    for num_groups in (1, 2, 4, 8) if kind == "int4" else (4,):
        q, cache = case(kind, 2, mq, 2, 3, d, 150 if num_groups == 4 else 70, d, dtype, num_groups)
        if kind in ("fp8", "half"):  # scales per head: any of fp8, powers of two of half, which move no bit
            scales = ((0.5, 0.3), (1.7, 0.01)) if kind == "fp8" else ((0.5, 2.0), (4.0, 0.25))
            cache = Cache(kind, cache.sides, scales=tuple(map(torch.tensor, scales)))
        got = cache.attend(q, lengths(cache.sides[0].shape[1], 37), split_k=split_k)
        assert got[0].dtype == dtype and got[0].shape == q.shape and got[1].shape == (2, 6, mq)
        cache.check(q, lengths(cache.sides[0].shape[1], 37), got)


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_splits_are_merged_by_one_launch_more(kind, split_k):
    q, cache = case(kind, 2, 1, 2, 3, 64, 70)
    with emulator.counters() as counted:
        cache.attend(q, lengths(70, 37), split_k=split_k)
    assert counted.launches == (1 if split_k == 1 else 2)


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_splits_and_waves_over_lengths_around_tiles_and_blocks(kind, keys):
    q, cache = case(kind, 3, 1, 1, 2, 64, keys, seed=keys)
    seqlens = lengths(keys, 0, 1)
    for waves, split_k in ((1, 1), (2, 2), (4, 1), (1, 3), (4, 5), (2, 8)):
        got = cache.attend(q, seqlens, force_kernel_config={"waves": waves, "split_k": split_k})
        cache.check(q, seqlens, got)
        assert not got[0][1].any() and (got[1][1] == -math.inf).all()


@pytest.mark.parametrize(("mq", "group"), [(1, 16), (1, 17), (3, 5), (16, 1), (16, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_tokens_folded_into_rows(kind, mq, group):
    q, cache = case(kind, 2, mq, 2, group, 64, 100, seed=mq * group)
    seqlens = lengths(70, mq // 2)  # the second: causal rows that see nothing
    for causal in (True, False):
        got = cache.attend(q, seqlens, scale=0.2, causal=causal, split_k=2)
        cache.check(q, seqlens, got, 0.2, causal)


@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_in_any_order_give_the_bits_of_the_dense_cache(kind, page_size):
    # Two tokens of two heads in one tile, or three of 17 in several; each with two sizes of pages.
    d, mq, group, causal = (128, 2, 2, True) if page_size in (16, 48) else (64, 3, 17, False)
    q, cache = case(kind, 4, mq, 2, group, d, 256, seed=page_size)
    seqlens = lengths(256, page_size, min(page_size + 1, 256), page_size - 1)
    got = cache.paged(page_size).attend(q, seqlens, causal=causal, split_k=3)
    dense = cache.attend(q, seqlens, causal=causal, split_k=3)
    assert torch.equal(got[0], dense[0]) and torch.equal(got[1], dense[1])
    cache.check(q, seqlens, got, causal=causal)


def codes(*shape, seed):
    """Integers 0 to 15, the least and the largest in each eight elements, so that int4 holds them with a scale of 1."""
    x = torch.randint(0, 16, shape, generator=rng(seed)).float()
    x[..., ::8], x[..., 1::8] = 0.0, 15.0
    return x


def exactly(kind, k, v, dtype=BF16, num_groups=4):
    """A cache that holds the rows exactly, and what its results exceed V's by: rows of V have a shift."""
    if kind != "rows":
        return holding(kind, k, v, dtype, num_groups), 0.0
    one, one_and_two = 0x3C00, 0x3C00 | 0x4000 << 16  # float16 scale 1, and with it a shift of 2
    words = tuple(torch.full(k.shape[:3], word, dtype=torch.int32) for word in (one, one_and_two))
    return Cache(kind, tuple(x.to(FP8).view(torch.int32) for x in (k, v)), words), 2.0


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize(
    ("kind", "d", "page_size"),
    [*product(KINDS, HEAD_DIMS, [None]), *product(["fp8", "half"], [72, 112, 160, 512], [2])],
)
def test_one_dominant_key_returns_its_value_row_exactly(kind, d, page_size, split_k):
    """All columns of K count, those of V have values of their own; 15 (q . k) is so large that other weights are 0."""
    for keys, position in ((1, 0), (17, 16), (33, 15), (131, 130), (131, 64)):
        for num_groups in (1, 8) if kind == "int4" and d % 64 == 0 else (4,):
            k, v = torch.zeros(1, keys, 2, d), codes(1, keys, 2, d, seed=keys)
            k[..., ::8] = 15.0  # of all keys alike: int4 has a scale in each group
            k[0, position] += 15.0 * (k[0, position] == 0)
            for dtype in (BF16, F16):
                cache, more = exactly(kind, k, v, dtype, num_groups)
                q = torch.ones(1, 1, 6, d).to(dtype)
                cache = cache.paged(page_size) if page_size else cache
                out, lse = cache.attend(q, lengths(keys), split_k=split_k, scale=1.0)
                assert torch.equal(out[0, 0].float() - more, v[0, position].repeat_interleave(3, dim=0))
                assert (lse - 15.0 * d).abs().max() < 0.1


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores_give_exact_means_up_to_each_tail(kind, d, split_k):
    """Sums of 2^n integers below 16 are exact in bfloat16 weights and float32, and so are their means in float16."""
    v = codes(4, 64, 1, d, seed=5)
    cache, more = exactly(kind, codes(4, 64, 1, d, seed=6), v, F16)
    out, lse = cache.attend(torch.zeros(4, 1, 2, d).half(), lengths(64, 32, 1, 0), split_k=split_k)
    for b, length in enumerate((64, 32, 1)):
        assert torch.equal(out[b, 0] - more, v[b, :length, 0].mean(0).half().expand(2, d))
        assert (lse[b] - math.log(length)).abs().max() < 1e-6
    assert not out[3].any() and (lse[3] == -math.inf).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_past_the_length_may_hold_nan(kind):
    q, cache = case(kind, 1, 1, 1, 2, 64, 100)
    clean = cache.attend(q, lengths(37), split_k=1)
    got = cache.spoil((slice(None), slice(37, None))).attend(q, lengths(37), split_k=1)
    assert torch.equal(got[0], clean[0]) and torch.equal(got[1], clean[1])


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize(
    ("kind", "d", "page_size"),
    [*product(KINDS, HEAD_DIMS, [None]), ("fp8", 96, 8), ("half", 160, 8), ("rows", 512, 8), ("int4", 136, 8)],
)
def test_sinks_a_window_and_a_cap_together(kind, d, page_size, split_k):
    """The window leaves tiles and a part of one out at its begin, whose pages are not read: they are none."""
    q, cache = case(kind, 2, 3, 1, 2, d, 200, seed=d, num_groups=1 if page_size else 4)
    if page_size:
        cache = cache.paged(page_size)
        cache.tables[0, : 110 // page_size] = -1
    options = {"sinks": torch.tensor([1.0, -2.0]), "window": 88, "softcap": 4.0}
    got = cache.attend(q, lengths(200, 50), split_k=split_k, **options)
    cache.check(q, lengths(200, 50), got, **options)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_the_cache_are_read_once(kind, d):
    q, cache = case(kind, 2, 1, 2, 4, d, 256)
    forced = {"waves": {64: 1, 128: 4, 256: 2}[d], "split_k": 2}
    with emulator.counters() as counted:
        cache.attend(q, lengths(256, 100), force_kernel_config=forced)
    rows = (256 + 100) * 2
    for name, asked in (("k", 2 * 4), ("v", 16)):
        traffic = counted.tensors[name]
        if kind == "int4":  # each of a key's lanes (K: 4, V: 16) asks for its word of scales, K's for one per half
            assert traffic.unique_loaded == rows * 4 * (4 + d // 8)
            assert traffic.loaded == rows * (d // 2 + 4 * asked)
        else:
            assert traffic.loaded == rows * d * (2 if kind == "half" else 1)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("d", [64, 160, 256])
@pytest.mark.parametrize(
    ("kind", "which"), [("fp8", 0), ("half", 0), ("rows", 0), ("rows", 1), ("int4", 0), ("int4", 1)]
)
def test_a_scale_of_k_that_is_no_number_reaches_the_result_past_a_soft_cap(kind, which, d, number):
    q, cache = case(kind, 2, 1, 1, 3, d, 50)
    if kind in ("fp8", "half"):
        cache = replace(cache, scales=(torch.tensor([number]), 1.0))
    else:  # scale and shift, float16, of sequence 1 alone
        words = (cache.words or cache.sides)[0].view(torch.float16)
        words = words.unflatten(-1, (-1, 2))[..., : cache.num_groups if kind == "int4" else 1, which]
        words[1] = number
    for softcap in (None, 30.0):
        out, lse, *_ = cache.attend(q, lengths(50, 20), softcap=softcap)
        assert out[1].isnan().all() and lse[1].isnan().all()
        assert out[0].isnan().all() == (kind in ("fp8", "half"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_kernels_do_not_take_runs_in_torch(kind):
    d = {"int4": 80, "half": 520}.get(kind, 12)  # 80 is no multiple of four groups of words
    few = kind == "int4" or devices.current().arch_of().startswith("sm_")
    reason = "D must be one of 64" if few else f"D must be a multiple of 8 from 16 to 512; got {d}"
    q, cache = case(kind, 2, 1, 1, 2, d, 50)
    seqlens = lengths(50, 0)
    if kind in ("fp8", "half"):
        told = hipforge.explain(decode_attention_fp8, q, *cache.sides, None, seqlens)
    else:
        groups = {"num_groups": 4} if kind == "int4" else {}
        told = hipforge.explain(decode_attention_splitk, q.view(1, 2, 1, 2, d), *cache.operands(q), seqlens, **groups)
    assert told.path == "torch" and reason in told.refused["kernel"]
    cache.check(q, seqlens, cache.attend(q, seqlens))


def test_the_packed_layout_gives_the_bits_of_the_plain_one():
    q, cache = case("half", 2, 1, 2, 3, 64, 50)
    out, lse = decode_attention_splitk(q.view(1, 2, 2, 3, 64), *cache.operands(q), lengths(50, 20), split_k=2)
    want = cache.attend(q, lengths(50, 20), split_k=2)
    assert torch.equal(out.view(q.shape), want[0]) and torch.equal(lse.view(want[1].shape), want[1])


def test_float16_weights_keep_their_bits_far_below_the_largest():
    """A key 2^-20 as heavy as the largest, with 2^15 as value: without the factor its weight would be subnormal."""
    k = torch.zeros(1, 2, 1, 64)
    k[0, 1, 0, 0] = -20.0 * math.log(2.0)
    v = torch.zeros(1, 2, 1, 64)
    v[0, 1] = 32768.0
    q = torch.zeros(1, 1, 1, 64)
    q[..., 0] = 1.0
    q, k, v = q.half(), k.half(), v.half()
    out, lse = decode_attention_fp8(q, k, v, None, lengths(2), return_lse=True, scale=1.0, split_k=1)
    Cache("half", (k, v)).check(q, lengths(2), (out, lse), 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_cache": torch.zeros(1, 32, 1, 64).half()}, "k_cache must be .*bfloat16 .*; got float16"),
        ({"v_cache": torch.zeros(1, 32, 1, 64).half()}, "v_cache must be bfloat16.*; got float16"),
        ({"force_kernel_config": {"block_n": 32}}, "force_kernel_config has waves, split_k for half; got 'block_n'"),
        ({"k_scale": torch.ones(3)}, "one per KV head"),
    ],
)
def test_refusals_of_a_cache_of_qs_own_dtype(change, message):
    q, cache = case("half", 1, 1, 1, 2, 64, 32)
    k, v = cache.sides
    given = {"k_cache": k, "v_cache": v, "block_tables": None, "seqlens": lengths(32), **change}
    with pytest.raises(GuardError, match=message):
        decode_attention_fp8(q, **given)
