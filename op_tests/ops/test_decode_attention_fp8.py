"""Decode attention over fp8: what q and the scales may hold, refusals, tracing; see test_decode_attention_kinds."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_cases import (
    FP8,
    case,
    check,
    lengths,
    paged,
    rng,
)

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8

pytestmark = pytest.mark.usefixtures("every_checker")


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
    with pytest.raises(GuardError, match=rf"q must be .*float16.*; got {str(dtype)[6:]}"):
        hipforge.decode_attention_fp8(q.to(dtype), k, v, None, lengths(16), 1.0, 1.0)


def test_a_cache_that_is_not_fp8_is_refused_on_every_path():
    q, k, v = case(1, 1, 1, 2, 64, 32, seed=3)
    seqlens = lengths(32)
    with pytest.raises(GuardError, match=r"k_cache must be .*float32"):
        decode_attention_fp8(q, k.float(), v, None, seqlens, 1.0, 1.0)
    with pytest.raises(GuardError, match=r"v_cache must be .*float32"):
        decode_attention_fp8(q, k, v.float(), None, seqlens, 1.0, 1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": torch.linspace(-1, 2, 4), "window": 40, "softcap": 3.0}, {"out_format": "mxfp8"},
        {"out_scale": torch.tensor([0.02])}, {"cu_seqlens_q": lengths(0, 1, 4), "max_seqlen_q": 3},
    ],
    ids=["options", "mxfp8", "one scale", "ragged"],
)  # fmt: skip
def test_a_traced_call_is_the_eager_one(options):
    q, k, v = case(2, 2, 1, 4, 64, 96)
    if "cu_seqlens_q" in options:
        q = q.flatten(0, 1)

    def attend(q, k, v, seqlens):
        return decode_attention_fp8(q, k, v, None, seqlens, return_lse=True, split_k=2, **options)

    given = (q, k, v, lengths(96, 50))
    traced = torch.compile(attend, backend="aot_eager", fullgraph=True)(*given)
    for got, want in zip(traced, attend(*given), strict=True):
        assert got.dtype == want.dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8))
