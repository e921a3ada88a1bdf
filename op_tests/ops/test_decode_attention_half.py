"""Decode attention over caches of q's own dtype against float64 over the same bits, on both architectures.

The bound of an output, from the arithmetic that the kernel documents:
* scores are float32 sums of exact products, off by at most (D + 8) 2^-24 of sum |q k|, times the factor; this moves a
  weight by that part of it, once in the numerator and once in the sum.
* a weight is rounded to the elements' dtype: U of it, 2^-8 for bfloat16 and 2^-11 for float16 (which holds weights down
  to 2^-29 of the largest in full, and loses at most 2^-40 of it below).
* float32 exponentials, sums and the merge of splits: 2^-18 of sum(p |v|) / sum(p).
* the output is rounded to q's dtype: U of it; below, a quantum of 1e-7.
The log-sum-exp moves by the scores' error and by 2^-20 for the float32 exponentials, logarithm and sums.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers.attention_cases import expanded, lengths, rng
from helpers.planted_faults import planted

import hipforge
from hipforge import emulator
from hipforge.errors import EmulatorFault, GuardError
from hipforge.ops.decode_attention import kernels
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8, decode_attention_splitk
from hipforge.ops.reference.attention import decode_attention

pytestmark = pytest.mark.gfx942("(dimensions and splits) or dominant or exact_means or leaks or far_below or cap")

BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def every_checker():
    with emulator.options(checks="all"):
        yield


def case(batch, mq, kv_heads, group, d, keys, dtype=BF16, seed=0):
    g = rng(seed)
    q = torch.randn(batch, mq, kv_heads * group, d, generator=g).to(dtype)
    return q, *(torch.randn(batch, keys, kv_heads, d, generator=g).to(dtype) for _ in range(2))


def paged(dense, page_size, seed=0):
    """Scatter [B, Mkv, ...] over pages in random order; return (pages, tables). Unused slots hold NaN."""
    batch, keys = dense.shape[:2]
    per = -(-keys // page_size)
    order = torch.randperm(batch * per + 1, generator=rng(seed))[: batch * per].view(batch, per)
    pages = torch.full((batch * per + 1, page_size, *dense.shape[2:]), math.nan, dtype=dense.dtype)
    for b in range(batch):
        for i in range(per):
            part = dense[b, i * page_size : (i + 1) * page_size]
            pages[order[b, i], : part.shape[0]] = part
    return pages, order.to(torch.int32)


def check(q, k, v, seqlens, out, lse, factor=None, causal=True, **options):
    batch, mq, _, d = q.shape
    factor = d**-0.5 if factor is None else factor
    folded = q.view(batch, mq, k.shape[2], -1, d).double()
    k, v = k.double(), v.double()
    want, want_lse = decode_attention(folded, k, v, seqlens, factor, causal, **options)
    spread, _ = decode_attention(folded, k, v.abs(), seqlens, factor, causal, **options)
    unused = (torch.arange(k.shape[1]) >= seqlens.view(-1, 1))[:, :, None, None]
    products = torch.einsum("bmghd,bkgd->bgmhk", folded.abs(), k.abs().masked_fill(unused, 0.0)).amax(-1)
    score = abs(factor) * (d + 8) * 2.0**-24 * products + 2.0**-20 * (options.get("softcap") or 0.0)
    ulp = 2.0**-8 if q.dtype == BF16 else 2.0**-11
    per_row = torch.expm1(2 * score).permute(0, 2, 1, 3).unsqueeze(-1)
    bound = (ulp + 2.0**-18 + per_row) * spread + ulp * want.abs() + 1e-7
    error = (out.double().view_as(want) - want).abs()
    assert (error <= bound).all(), f"worst part of the bound: {(error / bound).max()}"
    seen = want_lse > -math.inf
    lse = lse.double().view_as(want_lse)
    assert torch.equal(seen, lse > -math.inf)
    off = (lse - want_lse)[seen].abs()
    assert (off <= (score.transpose(2, 3) + 2.0**-20 * (1 + want_lse.abs()))[seen]).all()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize(("mq", "split_k"), [(1, 1), (4, 3)])
def test_head_dimensions_dtypes_and_splits(d, dtype, mq, split_k):
    q, k, v = case(2, mq, 2, 3, d, 150, dtype, seed=d)
    seqlens = lengths(150, 77)
    told = hipforge.explain(decode_attention_fp8, q, k, v, None, seqlens, split_k=split_k)
    assert told.path == "kernel" and told.kernel == "decode_attention_half"
    k_scale, v_scale = torch.tensor([0.5, 2.0]), torch.tensor([4.0, 0.25])  # powers of two move no bit
    out, lse = decode_attention_fp8(q, k, v, None, seqlens, k_scale, v_scale, return_lse=True, split_k=split_k)
    assert out.dtype == dtype
    check(q, k.double() * k_scale.view(-1, 1), v.double() * v_scale.view(-1, 1), seqlens, out, lse)


@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize("keys", [1, 16, 33, 100])
def test_waves_over_lengths_around_tiles(keys, waves):
    q, k, v = case(3, 1, 1, 2, 64, keys, seed=keys)
    seqlens = lengths(keys, 0, 1)
    for split_k in (1, 3):
        out, lse = decode_attention_fp8(
            q, k, v, None, seqlens, return_lse=True, force_kernel_config={"waves": waves, "split_k": split_k}
        )
        check(q, k, v, seqlens, out, lse)
        assert not out[1].any() and (lse[1] == -math.inf).all()


@pytest.mark.parametrize(("mq", "group", "causal"), [(1, 17, True), (3, 5, False), (16, 3, True)])
@pytest.mark.parametrize("page_size", [16, 48])
def test_pages_in_any_order_give_the_bits_of_the_dense_cache(page_size, mq, group, causal):
    q, k, v = case(3, mq, 2, group, 128, 130, seed=page_size)
    seqlens = lengths(130, page_size + 1, mq // 2)
    (k_pages, tables), (v_pages, _) = paged(k, page_size), paged(v, page_size)
    tables = torch.cat((tables, torch.full((3, 2), 2**31 - 1, dtype=torch.int32)), dim=1)  # never to be read
    out, lse = decode_attention_fp8(q, k_pages, v_pages, tables, seqlens, return_lse=True, causal=causal, split_k=2)
    dense = decode_attention_fp8(q, k, v, None, seqlens, return_lse=True, causal=causal, split_k=2)
    assert torch.equal(out, dense[0]) and torch.equal(lse, dense[1])
    check(q, k, v, seqlens, out, lse, causal=causal)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_one_dominant_key_returns_its_value_row_exactly(d, dtype):
    k = torch.zeros(1, 131, 1, d)
    k[0, 77] = 100.0
    v = torch.randn(1, 131, 1, d, generator=rng(2)).to(dtype)
    out = decode_attention_fp8(torch.ones(1, 1, 4, d).to(dtype), k.to(dtype), v, None, lengths(131), split_k=3)
    assert torch.equal(out[0, 0], v[0, 77, 0].expand(4, d))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_equal_scores_give_exact_means(dtype):
    q, k, _ = case(2, 1, 1, 1, 64, 256, dtype)
    v = torch.randint(-8, 9, (2, 256, 1, 64), generator=rng(1)).to(dtype)
    out, lse = decode_attention_fp8(q * 0, k, v, None, lengths(256, 64), return_lse=True, split_k=1)
    for b, length in enumerate((256, 64)):
        assert torch.equal(out[b, 0, 0], (v[b, :length, 0].float().sum(0) / length).to(dtype))
        assert abs(lse[b].item() - math.log(length)) < 1e-6


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
    check(q, k, v, lengths(2), out, lse, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_a_hidden_key_leaks_nothing(d, value, dtype):
    q, k, v = case(1, 4, 1, 3, d, 80, dtype, seed=d)
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


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("split_k", [1, 3])
def test_sinks_a_window_and_a_cap(d, split_k):
    q, k, v = case(2, 3, 1, 2, d, 200, F16, seed=d)
    options = {"sinks": torch.tensor([1.0, -2.0]), "window": 100, "softcap": 4.0}
    out, lse = decode_attention_fp8(q, k, v, None, lengths(200, 50), return_lse=True, split_k=split_k, **options)
    check(q, k, v, lengths(200, 50), out, lse, **options)


def test_bytes_of_the_cache_are_read_once():
    q, k, v = case(2, 1, 2, 4, 128, 256)
    with emulator.counters() as counted:
        decode_attention_fp8(q, k, v, None, lengths(256, 100), split_k=2)
    read = (256 + 100) * 2 * 128 * 2
    assert counted.tensors["k"].loaded == read and counted.tensors["v"].loaded == read


def test_the_packed_layout_and_the_torch_path():
    q, k, v = case(2, 1, 2, 3, 64, 50)
    sides = [expanded(x.flatten(0, 1).unsqueeze(0), 3) for x in (k, v)]
    out, lse = decode_attention_splitk(q.view(1, 2, 2, 3, 64), *sides, None, None, lengths(50, 20), split_k=2)
    want = decode_attention_fp8(q, k, v, None, lengths(50, 20), return_lse=True, split_k=2)
    assert torch.equal(out.view(q.shape), want[0]) and torch.equal(lse.view(want[1].shape), want[1])
    q, k, v = case(2, 1, 2, 3, 32, 50)
    assert hipforge.explain(decode_attention_fp8, q, k, v, None, lengths(50, 20)).path == "torch"
    out, lse = decode_attention_fp8(q, k, v, None, lengths(50, 20), return_lse=True)
    check(q, k, v, lengths(50, 20), out, lse)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_cache": torch.zeros(1, 32, 1, 64).half()}, "k_cache must have dtype .*bfloat16; got torch.float16"),
        ({"v_cache": torch.zeros(1, 32, 1, 64).half()}, "v_cache must have dtype torch.bfloat16; got torch.float16"),
        ({"force_kernel_config": {"block_n": 32}}, "force_kernel_config has waves, split_k for half; got 'block_n'"),
        ({"k_scale": torch.ones(3)}, "one per KV head"),
    ],
)
def test_refusals_name_argument_value_and_rule(change, message):
    q, k, v = case(1, 1, 1, 2, 64, 32)
    given = {"k_cache": k, "v_cache": v, "block_tables": None, "seqlens": lengths(32), **change}
    with pytest.raises(GuardError, match=message):
        decode_attention_fp8(q, **given)


MUTANTS = [
    ("halves_exchanged", "half_kernel.h", "kLowHalves = 0x05040100", "kLowHalves = 0x01000504"),
    ("special_left", "half_kernel.h", "(low ? 0 : kLow)", "kLow"),
    (
        "scale_of_v_forgotten",
        "half_kernel.h",
        "inverse * load_constant(p.v.scale + p.v.scale_stride * head)",
        "inverse",
    ),
    ("column_of_k", "half_kernel.h", "64 * (first + c)", "64 * c * first"),
]


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m[0], marks=() if m[0] == "special_left" else pytest.mark.full) for m in MUTANTS],
)
def test_a_mistake_is_noticed(tmp_path, monkeypatch, mutant):
    name, file, line, becomes = mutant
    entry = planted(
        tmp_path / name, kernels.decode_attention_half_out, f"decode_attention/amd/{file}", line, becomes,
        unit="decode_attention/amd/decode_attention_half.cu",
        variants={"HF_HEAD_DIM": [64, 256], "HF_INPUT": ["bf16"]},
    )  # fmt: skip

    def all_right():
        test_head_dimensions_dtypes_and_splits(256, BF16, 4, 3)
        test_a_hidden_key_leaks_nothing(64, math.nan, BF16)

    all_right()
    monkeypatch.setattr(kernels, "decode_attention_half_out", entry)
    with pytest.raises((AssertionError, EmulatorFault)):
        all_right()
