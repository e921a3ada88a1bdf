"""Heads of 192, whose columns a lane has in two pieces (8 of 128, 4 of 64): every cache, tails and exact values.

Bounds are tested in the files of each cache with the other head dimensions; here the data gives exact results.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers.attention_cases import FP8, lengths, paged, rng
from helpers.planted_faults import planted

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.decode_attention import decode_attention_fp8, decode_attention_splitk, kernels
from hipforge.ops.reference.attention import quantize_kv_int4

pytestmark = pytest.mark.gfx942("(dominant and (fp8 or half or 8)) or (means and (rows or 4)) or pages")

D = 192
CACHES = ("fp8", "rows", "half", 1, 4, 8)  # numbers: int4 with so many scales per row


@pytest.fixture(autouse=True)
def every_checker():
    with emulator.options(checks="all"):
        yield


def attend(cache, q, k, v, seqlens, **options):
    """(out [B, Mq, Hq, D], log-sum-exp) over k, v float [B, Mkv, Hkv, D], which the cache holds exactly."""
    if cache in ("fp8", "half"):
        k, v = (x.to(FP8 if cache == "fp8" else q.dtype) for x in (k, v))
        return decode_attention_fp8(q, k, v, None, seqlens, return_lse=True, **options)
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    if cache == "rows":
        k, v = (x.to(FP8).view(torch.int32) for x in (k, v))
        one, one_and_two = 0x3C00, 0x3C00 | 0x4000 << 16  # float16 scale 1, and with it a shift of 2
        words = [torch.full((1, k.shape[0] * k.shape[1], kv_heads, group), x) for x in (one, one_and_two)]
        words = [x[..., :1].int().expand_as(x) for x in words]
    else:
        k, v = (quantize_kv_int4(x, cache) for x in (k, v))
        words, options = [None, None], {**options, "num_groups": cache}
    wide = [x.flatten(0, 1)[None, :, :, None].expand(-1, -1, -1, group, -1) for x in (k, v)]
    folded = q.reshape(1, -1, kv_heads, group, D)
    out, lse = decode_attention_splitk(folded, *wide, *words, seqlens, **options)
    return out.view(q.shape) - (2 if cache == "rows" else 0), lse.flatten(1, 2)


def codes(*shape, seed):
    """Integers 0 to 15, the least and the largest in each 24 elements, so that int4 holds them with a scale of 1."""
    x = torch.randint(0, 16, (*shape, D), generator=rng(seed)).float()
    x[..., ::24], x[..., 1::24] = 0.0, 15.0
    return x


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("split_k", [1, 3])
def test_one_dominant_key_returns_its_value_row_exactly(cache, split_k):
    """Every column of V has a value of its own place; 15 (q . k) is so large that other weights are 0."""
    for keys, position in ((1, 0), (17, 16), (33, 15), (131, 130), (131, 64)):
        k, v = torch.zeros(1, keys, 2, D), codes(1, keys, 2, seed=keys)
        k[..., ::24] = 15.0  # of all keys alike: int4 has a scale in each group
        k[0, position] += 15.0 * (k[0, position] == 0)
        q = torch.ones(1, 1, 6, D).bfloat16()
        out, _ = attend(cache, q, k, v, lengths(keys), split_k=split_k, scale=1.0)
        assert torch.equal(out[0, 0].float(), v[0, position].repeat_interleave(3, dim=0))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("split_k", [1, 2])
def test_equal_scores_give_exact_means_up_to_each_tail(cache, split_k):
    """Sums of 2^n integers below 16 are exact in bfloat16 weights and float32, and so are their means in float16."""
    v = codes(4, 64, 1, seed=5)
    seqlens = lengths(64, 32, 1, 0)
    q = torch.zeros(4, 1, 2, D).half()
    out, lse = attend(cache, q, codes(4, 64, 1, seed=6), v, seqlens, split_k=split_k)
    for b, length in enumerate((64, 32, 1)):
        mean = v[b, :length, 0].mean(0)
        assert torch.equal(out[b, 0], mean.half().expand(2, D))
        assert (lse[b] - math.log(length)).abs().max() < 1e-6
    assert not (out[3] + (2 if cache == "rows" else 0)).any() and (lse[3] == -math.inf).all()


@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_pages_splits_and_waves_give_the_mean_of_integers(block_n):
    v = torch.randint(-8, 9, (2, 128, 1, D), generator=rng(8)).float()
    v_pages, tables = paged(v.to(FP8), 16)
    k_pages = torch.zeros(v_pages.shape).to(FP8)
    for waves, split_k in ((1, 1), (2, 2), (4, 3)):
        forced = {"block_n": block_n, "waves": waves, "split_k": split_k}
        out = decode_attention_fp8(
            torch.zeros(2, 1, 4, D).half(), k_pages, v_pages, tables, lengths(128, 64), force_kernel_config=forced
        )
        for b, length in enumerate((128, 64)):
            assert torch.equal(out[b, 0], v[b, :length, 0].mean(0).half().expand(4, D))


def test_the_kernel_is_what_answers():
    q, cache = torch.zeros(1, 1, 2, D).bfloat16(), torch.zeros(1, 32, 1, D).to(FP8)
    told = hipforge.explain(decode_attention_fp8, q, cache, cache, None, lengths(32))
    assert told.path == "kernel" and told.configuration["waves"] == 1
    told = hipforge.explain(decode_attention_fp8, q[..., :96], cache[..., :96], cache[..., :96], None, lengths(32))
    assert told.path == "torch" and "D must be one of 64, 128, 192, 256; got 96" in str(told)
    with pytest.raises(GuardError, match="block_n must be one of 16, 32, 64 at D=192; got 8"):
        decode_attention_fp8(q, cache, cache, None, lengths(32), force_kernel_config={"block_n": 8})


def test_a_column_out_of_place_is_noticed(tmp_path, monkeypatch):
    entry = planted(
        tmp_path / "narrow_from_the_start", kernels.decode_attention_fp8_out, "decode_attention/amd/decode_kernel.h",
        "Dealt::kNarrowFrom + Dealt::kNarrow * column;", "Dealt::kNarrow * column;",
        unit="decode_attention/amd/decode_attention_fp8.cu",
        variants={"HF_HEAD_DIM": [D], "HF_INPUT": ["bf16"], "HF_BLOCK_N": [64]},
    )  # fmt: skip
    monkeypatch.setattr(kernels, "decode_attention_fp8_out", entry)
    with pytest.raises(AssertionError):
        test_one_dominant_key_returns_its_value_row_exactly("fp8", 1)
