"""Decode attention over fp8 caches against float64 over the same bits, on both architectures.

The bound is derived in attention_cases; data that must come out exactly is compared bit for bit.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers.attention_cases import (
    FP8,
    NAN_CODE,
    case,
    check,
    expanded,
    lengths,
    packed_case,
    paged,
    rng,
)

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8, decode_attention_splitk
from hipforge.ops.reference.attention import dequantize_kv_fp8, gather_pages

pytestmark = pytest.mark.gfx942("(head_dimensions and (bf16 or 256-f16)) or exact or nan or (packed_rows and 16)")


@pytest.fixture(autouse=True)
def every_checker():
    with emulator.options(checks="all"):
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_head_dimensions_dtypes_and_scales_per_head(d, dtype):
    q, k, v = case(2, 2, 2, 3, d, 150, seed=d, dtype=dtype)
    seqlens = lengths(150, 77)
    k_scale, v_scale = torch.tensor([0.5, 0.3]), torch.tensor([1.7, 0.01])
    out, lse = decode_attention_fp8(q, k, v, None, seqlens, k_scale, v_scale, return_lse=True, split_k=2)
    assert out.dtype == dtype
    k64, v64 = (x.double() * s.double().view(-1, 1) for x, s in ((k, k_scale), (v, v_scale)))
    check(q, k64, v64, seqlens, out, lse, d**-0.5)


@pytest.mark.parametrize("split_k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 63, 64, 65, 128, 200])
def test_every_split_over_lengths_around_tiles_and_blocks(keys, split_k):
    q, k, v = case(3, 1, 1, 2, 64, keys, seed=keys)
    seqlens = lengths(keys, 0, 1)
    out, lse = decode_attention_fp8(q, k, v, None, seqlens, return_lse=True, split_k=split_k)
    check(q, k.double(), v.double(), seqlens, out, lse, 64**-0.5)
    assert torch.equal(out[1], torch.zeros_like(out[1])) and (lse[1] == -math.inf).all()


@pytest.mark.parametrize(("mq", "group"), [(1, 16), (1, 17), (3, 5), (16, 1), (16, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_heads_and_tokens_folded_into_rows(mq, group, causal):
    q, k, v = case(2, mq, 2, group, 64, 100, seed=mq * group)
    seqlens = lengths(70, mq // 2)  # the second: causal rows that see nothing
    out, lse = decode_attention_fp8(q, k, v, None, seqlens, 0.9, 1.1, 0.2, return_lse=True, causal=causal, split_k=2)
    check(q, k.double() * 0.9, v.double() * 1.1, seqlens, out, lse, 0.2, causal)


@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
def test_pages_in_any_order_give_the_bits_of_the_dense_cache(page_size):
    q, k, v = case(4, 2, 2, 2, 128, 256, seed=page_size)
    seqlens = lengths(256, page_size, min(page_size + 1, 256), page_size - 1)
    k_pages, tables = paged(k, page_size)
    v_pages, _ = paged(v, page_size)
    tables = torch.cat((tables, torch.full((4, 2), 2**31 - 1, dtype=torch.int32)), dim=1)  # never to be read
    out, lse = decode_attention_fp8(q, k_pages, v_pages, tables, seqlens, return_lse=True, split_k=3)
    dense, dense_lse = decode_attention_fp8(q, k, v, None, seqlens, return_lse=True, split_k=3)
    assert torch.equal(out, dense) and torch.equal(lse, dense_lse)
    check(q, k.double(), v.double(), seqlens, out, lse, 128**-0.5)


@pytest.mark.parametrize("split_k", [1, 4])
def test_equal_scores_give_exact_means(split_k):
    _, k, _ = case(2, 1, 1, 1, 64, 256)
    v = torch.randint(-8, 9, (2, 256, 1, 64), generator=rng(1)).float().to(FP8)
    seqlens = lengths(256, 64)
    out, lse = decode_attention_fp8(
        torch.zeros(2, 1, 1, 64).bfloat16(), k, v, None, seqlens, return_lse=True, split_k=split_k
    )
    for b, length in enumerate((256, 64)):
        assert torch.equal(out[b, 0, 0], (v[b, :length, 0].float().sum(0) / length).bfloat16())
        assert abs(lse[b].item() - math.log(length)) < 1e-6


@pytest.mark.parametrize("position", [0, 15, 16, 63, 64, 130])
def test_one_dominant_key_returns_its_value_row_exactly(position):
    k = torch.zeros(1, 131, 1, 128)
    k[0, position] = 100.0
    v = torch.randn(1, 131, 1, 128, generator=rng(2)).to(FP8)
    q = torch.full((1, 1, 4, 128), 1.0).bfloat16()
    out = decode_attention_fp8(q, k.to(FP8), v, None, lengths(131), split_k=3)
    assert torch.equal(out[0, 0], v[0, position, 0].bfloat16().expand(4, 128))


def test_extreme_scales_stay_finite_and_right():
    q, k, v = case(1, 1, 1, 4, 64, 100)
    seqlens = lengths(100)
    for k_scale, v_scale in ((2.0**-40, 2.0**40), (50.0, 2.0**-60)):
        out, lse = decode_attention_fp8(q, k, v, None, seqlens, k_scale, v_scale, return_lse=True, split_k=2)
        assert out.isfinite().all() and lse.isfinite().all()
        check(q, k.double() * k_scale, v.double() * v_scale, seqlens, out, lse, 64**-0.5)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("power", [-90, 90])
def test_a_power_of_two_moves_from_q_to_the_scale_without_a_trace(d, power):
    q, k, v = case(1, 2, 1, 4, d, 100, seed=d)
    plain = decode_attention_fp8(q, k, v, None, lengths(100), scale=0.1, split_k=2)
    moved = decode_attention_fp8(q * 2.0**power, k, v, None, lengths(100), scale=0.1 * 2.0**-power, split_k=2)
    assert torch.equal(moved, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_elements_of_q_of_very_different_magnitudes(dtype):
    q, k, v = case(1, 1, 1, 16, 128, 40, seed=5, dtype=dtype)
    exponents = torch.randint(-14, 1, q.shape, generator=rng(6))
    q = (q * 2.0**exponents).to(dtype)
    q[0, 0, 0] = 0.0
    out, lse = decode_attention_fp8(q, k, v, None, lengths(40), return_lse=True, scale=0.3, split_k=1)
    check(q, k.double(), v.double(), lengths(40), out, lse, 0.3)


def test_a_row_of_q_that_is_not_finite_spoils_itself_alone():
    q, k, v = case(1, 1, 1, 4, 128, 50, seed=7)
    clean = decode_attention_fp8(q, k, v, None, lengths(50), split_k=2)
    q[0, 0, 1, 3], q[0, 0, 2, 100] = float("nan"), float("inf")
    out = decode_attention_fp8(q, k, v, None, lengths(50), split_k=2)
    assert out[0, 0, 1:3].isnan().all()
    assert torch.equal(out[0, 0, ::3], clean[0, 0, ::3])


def test_caches_that_share_one_tensor_and_bytes_without_a_dtype():
    q, k, v = case(2, 1, 2, 2, 64, 96, seed=8)
    seqlens = lengths(96, 50)
    both = torch.stack((k.view(torch.uint8), v.view(torch.uint8)), dim=2)  # [B, Mkv, 2, Hkv, D]
    got = decode_attention_fp8(q, both[:, :, 0], both[:, :, 1], None, seqlens, split_k=2)
    assert torch.equal(got, decode_attention_fp8(q, k, v, None, seqlens, split_k=2))


def test_rows_past_the_length_may_hold_nan():
    q, k, v = case(1, 1, 1, 2, 64, 100)
    seqlens = lengths(37)
    clean = decode_attention_fp8(q, k, v, None, seqlens, split_k=1)
    for cache in (k, v):
        cache.view(torch.uint8)[:, 37:] = NAN_CODE
    assert torch.equal(decode_attention_fp8(q, k, v, None, seqlens, split_k=1), clean)


def magnitudes(words, rows):
    """|fp8 * scale| and |shift| of packed rows; the kernel adds up both, so an error follows both."""
    halves = rows.contiguous().unsqueeze(-1).view(torch.float16).double()
    elements = words.contiguous().view(torch.uint8).view(FP8).double()
    return (elements * halves[..., :1]).abs(), halves[..., 1:].abs().expand_as(elements)


@pytest.mark.parametrize(
    ("d", "dtype"),
    [(64, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (256, torch.float16)],
    ids=["64", "128", "256", "256-f16"],
)
@pytest.mark.parametrize("page_size", [None, 64, 16])
def test_packed_rows_with_scale_and_shift(d, dtype, page_size):
    batch, mq, groups, heads, keys = 2, 2, 2, 3, 128
    q, (k, k_rows), (v, v_rows) = packed_case(batch, mq, groups, heads, d, keys, seed=d, dtype=dtype)
    seqlens = lengths(keys, 45)
    tables = None
    operands = [k, v, k_rows, v_rows]
    if page_size is None:
        operands = [x.flatten(0, 1).unsqueeze(0) for x in operands]
    else:
        per = keys // page_size
        tables = torch.randperm(batch * per, generator=rng(3)).view(batch, per).to(torch.int32)
        stored = []
        for x in operands:
            pages = torch.empty(batch * per, page_size, *x.shape[2:], dtype=torch.int32)
            pages[tables.long().flatten()] = x.reshape(pages.shape)
            stored.append(pages.flatten(0, 1).unsqueeze(0))
        operands = stored
        assert torch.equal(gather_pages(operands[0][0], tables, page_size), k)
    out, lse = decode_attention_splitk(
        q, *(expanded(x, heads) for x in operands), seqlens, tables, page_size, split_k=2
    )
    k64, v64 = dequantize_kv_fp8(k, k_rows, FP8), dequantize_kv_fp8(v, v_rows, FP8)
    weighted, k_parts = magnitudes(v, v_rows)[0], sum(magnitudes(k, k_rows))
    flat = q.view(batch, mq, groups * heads, d)
    assert lse.shape == (batch, groups, heads, mq)
    check(
        flat,
        k64,
        v64,
        seqlens,
        out,
        lse.reshape(batch, groups * heads, mq),
        d**-0.5,
        weighted=weighted,
        k_parts=k_parts,
    )


def test_what_the_kernel_does_not_take_runs_in_torch():
    q, k, v = case(2, 1, 1, 2, 32, 50)
    seqlens = lengths(50, 0)
    told = hipforge.explain(decode_attention_fp8, q, k, v, None, seqlens)
    assert told.path == "torch" and "D must be one of" in told.refused["kernel"]
    out, lse = decode_attention_fp8(q, k, v, None, seqlens, return_lse=True)
    check(q, k.double(), v.double(), seqlens, out, lse, 32**-0.5)


def test_pages_of_other_than_whole_tiles_run_in_torch():
    q, k, v = case(2, 1, 1, 2, 64, 40)
    seqlens = lengths(40, 9)
    (k_pages, tables), (v_pages, _) = paged(k, 8), paged(v, 8)
    told = hipforge.explain(decode_attention_fp8, q, k_pages, v_pages, tables, seqlens)
    assert told.path == "torch" and "page_size must be a multiple of 16" in told.refused["kernel"]
    out, lse = decode_attention_fp8(q, k_pages, v_pages, tables, seqlens, return_lse=True)
    check(q, k.double(), v.double(), seqlens, out, lse, 64**-0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 17, 2, 64).bfloat16()}, "Mq must be 1 to 16"),
        ({"q": torch.zeros(1, 1, 3, 64).bfloat16(), "k": torch.zeros(1, 32, 2, 64).to(FP8)}, "multiple of Hkv"),
        ({"seqlens": torch.tensor([3])}, "int32"),
        ({"seqlens": lengths(3, 3)}, "one length per sequence"),
        ({"k_scale": torch.ones(3)}, "one per KV head"),
        ({"split_k": 513}, "split_k must be 1 to 512; got 513"),
    ],
)
def test_refusals_name_argument_value_and_rule(change, message):
    k = change.get("k", torch.zeros(1, 32, 1, 64).to(FP8))
    q = change.get("q", torch.zeros(1, 1, 2, 64).bfloat16())
    seqlens = change.get("seqlens", lengths(3))
    with pytest.raises(GuardError, match=message):
        decode_attention_fp8(
            q, k, k.clone(), change.get("tables"), seqlens, change.get("k_scale", 1.0), split_k=change.get("split_k", 1)
        )


@pytest.mark.full
@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize("keys", [2048, 8192])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("page_size", [64, 256])
def test_the_matrix_of_decode_shapes(batch, keys, kv_heads, group, page_size):
    q, k, v = case(batch, 1, kv_heads, group, 128, keys, seed=10)
    seqlens = torch.randint(0, keys + 1, (batch,), generator=rng(10), dtype=torch.int32)
    seqlens[-1] = 0
    k_pages, tables = paged(k, page_size)
    v_pages, _ = paged(v, page_size)
    with emulator.options(checks="off"):
        out, lse = decode_attention_fp8(q, k_pages, v_pages, tables, seqlens, return_lse=True)
        dense, dense_lse = decode_attention_fp8(q, k, v, None, seqlens, return_lse=True)
    error, off = check(q, k.double(), v.double(), seqlens, out, lse, 128**-0.5)
    assert error.max() <= 5e-3 and (off <= 5e-4).all()
    assert torch.equal(out, dense) and torch.equal(lse, dense_lse)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float8_e5m2], ids=str)
def test_queries_that_are_not_floats_are_refused(dtype):
    q, k, v = case(1, 1, 1, 1, 64, 16)
    with pytest.raises(GuardError, match=rf"q must have dtype .*float16.*; got {dtype}"):
        hipforge.decode_attention_fp8(q.to(dtype), k, v, None, lengths(16), 1.0, 1.0)


def test_a_cache_that_is_not_fp8_is_refused_on_every_path():
    q, k, v = case(1, 1, 1, 2, 64, 32, seed=3)
    seqlens = lengths(32)
    with pytest.raises(GuardError, match=r"k_cache must have dtype .*float32"):
        decode_attention_fp8(q, k.float(), v, None, seqlens, 1.0, 1.0)
    with pytest.raises(GuardError, match=r"v_cache must have dtype .*float32"):
        decode_attention_fp8(q, k, v.float(), None, seqlens, 1.0, 1.0)


def test_a_traced_call_is_the_eager_one():
    q, k, v = case(2, 1, 2, 4, 64, 96)
    seqlens = lengths(96, 50)

    def attend(q, k, v, seqlens):
        return decode_attention_fp8(q, k, v, None, seqlens, 0.5, 0.7, return_lse=True, split_k=2)

    traced = torch.compile(attend, backend="eager", fullgraph=True)(q, k, v, seqlens)
    for got, want in zip(traced, attend(q, k, v, seqlens), strict=True):
        assert torch.equal(got, want)
