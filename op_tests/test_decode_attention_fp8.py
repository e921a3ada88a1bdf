"""Decode attention over fp8 caches against float64 over the same bits, on the emulated architecture.

The error bound of an output, from the arithmetic that the module documents: each weight is rounded to bfloat16, at
most 2^-8 of it, so sum(p |v|) / sum(p) times 2^-8; the output is rounded to q's dtype, at most 2^-8 of it (2^-11 for
f16); a score is a float32 sum of D exact products, so it is off by at most (D + 4) 2^-24 sum |q k| times the factor,
which moves each weight by that part of it, once in the numerator and once in the sum. The log-sum-exp moves by the
scores' error and by 2^-20 for the float32 exponentials, logarithm and sums.
"""

from __future__ import annotations

import math

import pytest
import torch

import hipforge
from hipforge import devices, emulator
from hipforge.errors import GuardError
from hipforge.ops import decode_attention_fp8 as ops
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8, decode_attention_splitk, split_k_heuristic
from hipforge.ops.reference.attention import (
    decode_attention,
    dequantize_kv_fp8,
    gather_pages,
    quantize_kv_fp8,
)

ARCH = devices.current().default_arch
FP8 = ops.ARCH_DTYPES[ARCH]
SCORE_ULP = 2.0**-24
WEIGHT_ULP = 2.0**-8


@pytest.fixture(autouse=True)
def every_checker():
    with emulator.options(checks="all"):
        yield


def rng(seed):
    return torch.Generator().manual_seed(seed)


def paged(dense, page_size, seed=0):
    """Scatter [B, Mkv, ...] over pages in random order; return (pages, block_tables). Unused slots hold NaN codes."""
    batch, keys = dense.shape[:2]
    per = -(-keys // page_size)
    order = torch.randperm(batch * per + 1, generator=rng(seed))[: batch * per].view(batch, per)
    raw = dense.view(torch.uint8)
    nan = 0x80 if ARCH == "gfx942" else 0x7F
    pages = torch.full((batch * per + 1, page_size, *raw.shape[2:]), nan, dtype=torch.uint8)
    for b in range(batch):
        for i in range(per):
            part = raw[b, i * page_size : (i + 1) * page_size]
            pages[order[b, i], : part.shape[0]] = part
    return pages.view(dense.dtype), order.to(torch.int32)


def check(q, k, v, seqlens, got, lse, factor, causal=True, weighted=None):
    """Compare with float64 attention over k, v [B, Mkv, Hkv, D]; ``weighted``: |v| without its shift, if other."""
    batch, mq, heads, d = q.shape
    kv_heads = k.shape[2]
    folded = q.view(batch, mq, kv_heads, heads // kv_heads, d).double()
    want, want_lse = decode_attention(folded, k, v, seqlens, factor, causal)
    spread, _ = decode_attention(folded, k, v.abs() if weighted is None else weighted, seqlens, factor, causal)
    size, _ = decode_attention(folded, k, v.abs(), seqlens, factor, causal)
    products = torch.einsum("bmghd,bkgd->bmghk", folded.abs(), k.abs().nan_to_num(0.0))
    score = (d + 4) * SCORE_ULP * abs(factor) * products.amax().item()
    rounding = 2.0**-8 if q.dtype == torch.bfloat16 else 2.0**-11
    bound = WEIGHT_ULP * spread + (2 * score + 2.0**-18) * size + rounding * want.abs() + 1e-7
    error = (got.double().view_as(want) - want).abs()
    assert (error <= bound).all(), f"worst part of the bound: {(error / bound).max()}"
    want_lse = want_lse.reshape(lse.shape)
    seen = want_lse > -math.inf
    assert torch.equal(seen, lse > -math.inf)
    if seen.any():
        off = (lse.double()[seen] - want_lse[seen]).abs()
        assert (off <= score + 2.0**-20 * (1 + want_lse[seen].abs())).all()
    return error


def case(batch, mq, kv_heads, group, d, keys, seed=0, dtype=torch.bfloat16):
    g = rng(seed)
    q = torch.randn(batch, mq, kv_heads * group, d, generator=g).to(dtype)
    k, v = (torch.randn(batch, keys, kv_heads, d, generator=g).to(FP8) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_head_dimensions_dtypes_and_scales_per_head(d, dtype):
    q, k, v = case(2, 2, 2, 3, d, 150, seed=d, dtype=dtype)
    lengths = torch.tensor([150, 77], dtype=torch.int32)
    k_scale, v_scale = torch.tensor([0.5, 0.3]), torch.tensor([1.7, 0.01])
    out, lse = decode_attention_fp8(q, k, v, None, lengths, k_scale, v_scale, return_lse=True, split_k=2)
    assert out.dtype == dtype
    k64, v64 = (x.double() * s.double().view(-1, 1) for x, s in ((k, k_scale), (v, v_scale)))
    check(q, k64, v64, lengths, out, lse, d**-0.5)


@pytest.mark.parametrize("split_k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 63, 64, 65, 128, 200])
def test_every_split_over_lengths_around_tiles_and_blocks(keys, split_k):
    q, k, v = case(3, 1, 1, 2, 64, keys, seed=keys)
    lengths = torch.tensor([keys, 0, 1], dtype=torch.int32)
    out, lse = decode_attention_fp8(q, k, v, None, lengths, return_lse=True, split_k=split_k)
    check(q, k.double(), v.double(), lengths, out, lse, 64**-0.5)
    assert torch.equal(out[1], torch.zeros_like(out[1])) and (lse[1] == -math.inf).all()


@pytest.mark.parametrize(("mq", "group"), [(1, 16), (1, 17), (3, 5), (16, 1), (16, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_heads_and_tokens_folded_into_rows(mq, group, causal):
    q, k, v = case(2, mq, 2, group, 64, 100, seed=mq * group)
    lengths = torch.tensor([70, mq // 2], dtype=torch.int32)  # the second: causal rows that see nothing
    out, lse = decode_attention_fp8(q, k, v, None, lengths, 0.9, 1.1, 0.2, return_lse=True, causal=causal, split_k=2)
    check(q, k.double() * 0.9, v.double() * 1.1, lengths, out, lse, 0.2, causal)


@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
def test_pages_in_any_order_give_the_bits_of_the_dense_cache(page_size):
    q, k, v = case(4, 2, 2, 2, 128, 256, seed=page_size)
    lengths = torch.tensor([256, page_size, min(page_size + 1, 256), page_size - 1], dtype=torch.int32)
    k_pages, tables = paged(k, page_size)
    v_pages, _ = paged(v, page_size)
    tables = torch.cat((tables, torch.full((4, 2), 2**31 - 1, dtype=torch.int32)), dim=1)  # never to be read
    out, lse = decode_attention_fp8(q, k_pages, v_pages, tables, lengths, return_lse=True, split_k=3)
    dense, dense_lse = decode_attention_fp8(q, k, v, None, lengths, return_lse=True, split_k=3)
    assert torch.equal(out, dense) and torch.equal(lse, dense_lse)
    check(q, k.double(), v.double(), lengths, out, lse, 128**-0.5)


@pytest.mark.parametrize("split_k", [1, 4])
def test_equal_scores_give_exact_means(split_k):
    _, k, _ = case(2, 1, 1, 1, 64, 256)
    v = torch.randint(-8, 9, (2, 256, 1, 64), generator=rng(1)).float().to(FP8)
    lengths = torch.tensor([256, 64], dtype=torch.int32)
    out, lse = decode_attention_fp8(
        torch.zeros(2, 1, 1, 64).bfloat16(), k, v, None, lengths, return_lse=True, split_k=split_k
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
    out = decode_attention_fp8(q, k.to(FP8), v, None, torch.tensor([131], dtype=torch.int32), split_k=3)
    assert torch.equal(out[0, 0], v[0, position, 0].bfloat16().expand(4, 128))


def test_extreme_scales_stay_finite_and_right():
    q, k, v = case(1, 1, 1, 4, 64, 100)
    lengths = torch.tensor([100], dtype=torch.int32)
    for k_scale, v_scale in ((2.0**-40, 2.0**40), (50.0, 2.0**-60)):
        out, lse = decode_attention_fp8(q, k, v, None, lengths, k_scale, v_scale, return_lse=True, split_k=2)
        assert out.isfinite().all() and lse.isfinite().all()
        check(q, k.double() * k_scale, v.double() * v_scale, lengths, out, lse, 64**-0.5)


def test_rows_past_the_length_may_hold_nan():
    q, k, v = case(1, 1, 1, 2, 64, 100)
    lengths = torch.tensor([37], dtype=torch.int32)
    clean = decode_attention_fp8(q, k, v, None, lengths, split_k=1)
    for cache in (k, v):
        cache.view(torch.uint8)[:, 37:] = 0x80 if ARCH == "gfx942" else 0x7F
    assert torch.equal(decode_attention_fp8(q, k, v, None, lengths, split_k=1), clean)


def test_results_do_not_depend_on_the_order_of_waves():
    q, k, v = case(2, 4, 2, 8, 64, 200)
    lengths = torch.tensor([200, 111], dtype=torch.int32)
    results = []
    for order in ("forward", "reverse", "random"):
        with emulator.options(wave_order=order, checks="all"):
            results.append(decode_attention_fp8(q, k, v, None, lengths, return_lse=True, split_k=4))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def packed_case(batch, mq, groups, heads, d, keys, seed):
    g = rng(seed)
    q = torch.randn(1, batch * mq, groups, heads, d, generator=g).bfloat16()
    sides = []
    for _ in range(2):
        x = torch.randn(batch, keys, groups, d, generator=g) + torch.randn(batch, keys, groups, 1, generator=g)
        sides.append(quantize_kv_fp8(x, FP8))
    return q, *sides


def expanded(x, heads):
    return x.unsqueeze(3).expand(-1, -1, -1, heads, *x.shape[3:])


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("page_size", [None, 64, 128])
def test_packed_rows_with_scale_and_shift(d, page_size):
    batch, mq, groups, heads, keys = 2, 2, 2, 3, 128
    q, (k, k_rows), (v, v_rows) = packed_case(batch, mq, groups, heads, d, keys, seed=d)
    lengths = torch.tensor([keys, 45], dtype=torch.int32)
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
        q, *(expanded(x, heads) for x in operands), lengths, tables, page_size, split_k=2
    )
    k64, v64 = dequantize_kv_fp8(k, k_rows, FP8), dequantize_kv_fp8(v, v_rows, FP8)
    scale = v_rows.contiguous().unsqueeze(-1).view(torch.float16)[..., :1].double()
    weighted = (v.contiguous().view(torch.uint8).view(FP8).double() * scale).abs()
    # The scores' shift term is a second product of q with |shift|, which |k| alone may hide.
    flat = q.view(batch, mq, groups * heads, d)
    assert lse.shape == (batch, groups, heads, mq)
    check(flat, k64, v64, lengths, out, lse.reshape(batch, groups * heads, mq), d**-0.5, weighted=weighted)


def test_bytes_of_the_cache_are_read_once():
    q, k, v = case(1, 1, 2, 4, 128, 256)
    with emulator.counters() as counted:
        decode_attention_fp8(q, k, v, None, torch.tensor([256], dtype=torch.int32), split_k=2)
    assert counted.tensors["k"].loaded == k.numel() and counted.tensors["v"].loaded == v.numel()


def test_the_heuristic_of_splits():
    assert split_k_heuristic(1, 1, 8192) == 129  # 8192 / 128 is 64, not less
    assert split_k_heuristic(64, 1, 8192) == 16
    assert split_k_heuristic(1, 1, 1) == 2  # ceil(1/1) is no multiple of 64
    assert split_k_heuristic(1, 8, 8192) == 64
    assert split_k_heuristic(512, 8, 8192) == 1
    assert split_k_heuristic(1, 1, 1 << 20) == 512
    assert split_k_heuristic(16, 1, 8192, page_size=64) == 128
    for batch in (1, 3, 64, 1000):
        for keys in (0, 1, 63, 64, 1000, 131072):
            assert 1 <= split_k_heuristic(batch, 2, keys) <= 512


def test_the_tuner_refuses_large_tiles_and_many_waves():
    assert ops.accepts_configuration(16, 64, 1) and ops.accepts_configuration(64, 64, 4)
    assert not ops.accepts_configuration(16, 128, 1)
    assert not ops.accepts_configuration(128, 64, 1)
    assert not ops.accepts_configuration(16, 64, 8)


def test_a_forced_configuration_overrides_and_says_so():
    q, k, v = case(1, 1, 1, 2, 64, 100)
    lengths = torch.tensor([100], dtype=torch.int32)
    told = hipforge.explain(decode_attention_fp8, q, k, v, None, lengths)
    assert told.path == "hip" and told.configuration["split_k"] == split_k_heuristic(1, 1, 100)
    forced = {"block_n": 64, "split_k": 5}
    told = hipforge.explain(decode_attention_fp8, q, k, v, None, lengths, split_k=2, force_kernel_config=forced)
    assert told.configuration["split_k"] == 5 and "force_kernel_config" in told.reason
    out = decode_attention_fp8(q, k, v, None, lengths, split_k=2, force_kernel_config=forced)
    assert torch.equal(out, decode_attention_fp8(q, k, v, None, lengths, split_k=5))
    with pytest.raises(GuardError, match="block_n must be one of 16, 32, 64"):
        decode_attention_fp8(q, k, v, None, lengths, force_kernel_config={"block_n": 128})


def test_what_the_kernel_does_not_take_runs_in_torch():
    q, k, v = case(2, 1, 1, 2, 32, 50)
    lengths = torch.tensor([50, 0], dtype=torch.int32)
    told = hipforge.explain(decode_attention_fp8, q, k, v, None, lengths)
    assert told.path == "torch" and "D must be one of" in told.refused["hip"]
    out, lse = decode_attention_fp8(q, k, v, None, lengths, return_lse=True)
    check(q, k.double(), v.double(), lengths, out, lse, 32**-0.5)


def test_pages_of_other_than_whole_tiles_run_in_torch():
    q, k, v = case(2, 1, 1, 2, 64, 40)
    lengths = torch.tensor([40, 9], dtype=torch.int32)
    (k_pages, tables), (v_pages, _) = paged(k, 8), paged(v, 8)
    told = hipforge.explain(decode_attention_fp8, q, k_pages, v_pages, tables, lengths)
    assert told.path == "torch" and "page_size must be a multiple of 16" in told.refused["hip"]
    out, lse = decode_attention_fp8(q, k_pages, v_pages, tables, lengths, return_lse=True)
    check(q, k.double(), v.double(), lengths, out, lse, 64**-0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 17, 2, 64).bfloat16()}, "Mq must be 1 to 16"),
        ({"q": torch.zeros(1, 1, 3, 64).bfloat16(), "k": torch.zeros(1, 32, 2, 64).to(FP8)}, "multiple of Hkv"),
        ({"seqlens": torch.tensor([3])}, "int32"),
        ({"seqlens": torch.tensor([3, 3], dtype=torch.int32)}, "one length per sequence"),
        ({"k_scale": torch.ones(3)}, "one per KV head"),
        ({"split_k": 513}, "split_k must be 1 to 512; got 513"),
    ],
)
def test_refusals_name_argument_value_and_rule(change, message):
    k = change.get("k", torch.zeros(1, 32, 1, 64).to(FP8))
    q = change.get("q", torch.zeros(1, 1, 2, 64).bfloat16())
    lengths = change.get("seqlens", torch.tensor([3], dtype=torch.int32))
    with pytest.raises(GuardError, match=message):
        decode_attention_fp8(
            q, k, k.clone(), change.get("tables"), lengths, change.get("k_scale", 1.0), split_k=change.get("split_k", 1)
        )


@pytest.mark.full
@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize("keys", [2048, 8192])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("page_size", [64, 256])
def test_the_matrix_of_decode_shapes(batch, keys, kv_heads, group, page_size):
    q, k, v = case(batch, 1, kv_heads, group, 128, keys, seed=10)
    lengths = torch.randint(0, keys + 1, (batch,), generator=rng(10), dtype=torch.int32)
    k_pages, tables = paged(k, page_size)
    v_pages, _ = paged(v, page_size)
    with emulator.options(checks="off"):
        out, lse = decode_attention_fp8(q, k_pages, v_pages, tables, lengths, return_lse=True)
    error = check(q, k.double(), v.double(), lengths, out, lse, 128**-0.5)
    assert error.max() <= 5e-3


def test_a_cache_that_is_not_fp8_is_refused_on_every_path():
    q, k, v = case(1, 1, 1, 2, 64, 32, seed=3)
    lengths = torch.tensor([32], dtype=torch.int32)
    with pytest.raises(GuardError, match=r"k_cache must have dtype .*float32"):
        decode_attention_fp8(q, k.float(), v, None, lengths, 1.0, 1.0)
    with pytest.raises(GuardError, match=r"v_cache must have dtype .*float32"):
        decode_attention_fp8(q, k, v.float(), None, lengths, 1.0, 1.0)
