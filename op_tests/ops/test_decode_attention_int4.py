"""Decode attention over int4 caches against float64 over the dequantised elements, on both architectures.

The bound of an output, from the arithmetic that the kernel documents:
* an element code * scale + shift is one float32 fused or two float32 operations, at most 2^-23 of |code scale| +
  |shift|, and then rounded to q's dtype (K: at most U of it, U = 2^-8 for bfloat16 and 2^-11 for float16, below a
  quantum of 2^-25) or bfloat16 (V: at most 2^-8 of it). Float32 sums of the exact products are off by at most
  (D + 8) 2^-24 of sum |q k|. So a score is off by U + (D + 8) 2^-24 times sum |q k|, by 2^-23 times
  sum |q| (|code scale| + |shift|) and by 2^-25 sum |q|, all times the factor; this moves a weight by that part of it,
  in the numerator and in the sum.
* a weight and an element of V are each rounded to bfloat16: 2^-7 of sum(p |v|) / sum(p) for both.
* float32 exponentials, sums and the merge of splits: 2^-18 of that; of V's parts 2^-23 as above.
* the output is rounded to q's dtype: U of it; below, a quantum of 1e-7.
The log-sum-exp moves by the scores' error and by 2^-20 for the float32 exponentials, logarithm and sums.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers.attention_cases import lengths, rng
from helpers.planted_faults import planted

import hipforge
from hipforge import emulator
from hipforge.errors import EmulatorFault, GuardError
from hipforge.ops.decode_attention import kernels
from hipforge.ops.decode_attention.family import INT4_CONFIGURATION
from hipforge.ops.decode_attention_fp8 import decode_attention_splitk
from hipforge.ops.reference.attention import decode_attention, dequantize_kv_int4, quantize_kv_int4

pytestmark = pytest.mark.gfx942("(groups_and_dtypes and (1-64 or 4-128 or 8-256)) or dominant or nan or bytes")

UNUSED = 0x7E007E00  # scale and shift NaN
BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def every_checker():
    with emulator.options(checks="all"):
        yield


def case(batch, mq, kv_heads, group, d, keys, num_groups, dtype=BF16, seed=0):
    """q [1, B*Mq, G, Hq, D] and packed rows k, v [B, Mkv, G, words] whose groups differ in scale and shift."""
    g = rng(seed)
    q = torch.randn(1, batch * mq, kv_heads, group, d, generator=g).to(dtype)
    sides = []
    for _ in range(2):
        x = torch.randn(batch, keys, kv_heads, num_groups, d // num_groups, generator=g)
        x = x * (0.25 + torch.rand(*x.shape[:-1], 1, generator=g)) + torch.randn(*x.shape[:-1], 1, generator=g)
        sides.append(quantize_kv_int4(x.flatten(-2), num_groups))
    return q, *sides


def expanded(x, heads):
    """[pages, page_size, G, words] as the operand [1, rows, G, Hq, words]."""
    return x.flatten(0, 1).unsqueeze(0).unsqueeze(3).expand(-1, -1, -1, heads, -1)


def paged(dense, page_size, seed=0):
    """Scatter [B, Mkv, ...] over pages in random order; return (pages, tables). Unused slots hold NaN."""
    batch, keys = dense.shape[:2]
    per = -(-keys // page_size)
    order = torch.randperm(batch * per + 1, generator=rng(seed))[: batch * per].view(batch, per)
    pages = torch.full((batch * per + 1, page_size, *dense.shape[2:]), UNUSED, dtype=torch.int32)
    for b in range(batch):
        for i in range(per):
            part = dense[b, i * page_size : (i + 1) * page_size]
            pages[order[b, i], : part.shape[0]] = part
    return pages, order.to(torch.int32)


def parts(rows, num_groups):
    """|code * scale| + |shift| of the elements."""
    halves = rows[..., :num_groups].contiguous().unsqueeze(-1).view(torch.float16).double()
    shift = halves[..., 1:].expand(*halves.shape[:-1], (rows.shape[-1] - num_groups) * 8 // num_groups).flatten(-2)
    return (dequantize_kv_int4(rows, num_groups) - shift).abs() + shift.abs()


def check(q, k, v, num_groups, seqlens, out, lse, factor=None, causal=True):
    batch, d = len(seqlens), q.shape[-1]
    factor = d**-0.5 if factor is None else factor
    q64 = q.view(batch, -1, *q.shape[2:]).double()
    unused = (torch.arange(k.shape[1]) >= seqlens.view(-1, 1))[:, :, None, None]
    k64, v64, k_parts, v_parts = (
        x.masked_fill(unused, 0.0)
        for x in (
            dequantize_kv_int4(k, num_groups),
            dequantize_kv_int4(v, num_groups),
            parts(k, num_groups),
            parts(v, num_groups),
        )
    )
    want, want_lse = decode_attention(q64, k64, v64, seqlens, factor, causal)
    spread, _ = decode_attention(q64, k64, v64.abs(), seqlens, factor, causal)
    # The weights are those of k64; v_parts of V's place gives the part of float32 dequantisation.
    computed, _ = decode_attention(q64, k64, v_parts, seqlens, factor, causal)
    ulp = 2.0**-8 if q.dtype == BF16 else 2.0**-11

    def largest(magnitude):
        return torch.einsum("bmghd,bkgd->bghmk", q64.abs(), magnitude).amax(-1)

    score = (ulp + (d + 8) * 2.0**-24) * largest(k64.abs()) + 2.0**-23 * largest(k_parts)
    score = abs(factor) * (score + 2.0**-25 * q64.abs().sum(-1).permute(0, 2, 3, 1))
    per_row = torch.expm1(2 * score).permute(0, 3, 1, 2).unsqueeze(-1)
    bound = (2.0**-7 + 2.0**-18 + per_row) * spread + 2.0**-23 * computed + ulp * want.abs() + 1e-7
    error = (out.double().view_as(want) - want).abs()
    assert (error <= bound).all(), f"worst part of the bound: {(error / bound).max()}"
    seen = want_lse > -math.inf
    assert torch.equal(seen, lse > -math.inf)
    off = (lse.double() - want_lse)[seen].abs()
    assert (off <= (score + 2.0**-20 * (1 + want_lse.abs()))[seen]).all()
    # The bound assumes that all roundings agree in sign; they do not, so an error is an order below it on average.
    if seen.any():
        assert error.mean() <= 0.25 * bound.mean()


def attend(q, k, v, seqlens, num_groups, tables=None, **options):
    k_rows, v_rows = (expanded(x, q.shape[3]) for x in (k, v))
    page_size = None if tables is None else k.shape[1]
    return decode_attention_splitk(
        q, k_rows, v_rows, None, None, seqlens, tables, page_size, num_groups=num_groups, **options
    )


def small(d, num_groups, dtype, **options):
    q, k, v = case(2, 2, 2, 3, d, 70, num_groups, dtype, seed=d + num_groups)
    seqlens = lengths(70, 37)
    out, lse = attend(q, k, v, seqlens, num_groups, **options)
    assert out.dtype == dtype and out.shape == q.shape and lse.shape == (2, 2, 3, 2)
    check(q, k, v, num_groups, seqlens, out, lse)


# --- the quantiser


@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
def test_elements_on_the_grid_come_back_exactly(num_groups):
    codes = torch.randint(0, 16, (5, 3, num_groups, 64 // num_groups), generator=rng(num_groups))
    codes[..., 0], codes[..., 1] = 0, 15
    scale = 2.0 ** torch.randint(-6, 4, (5, 3, num_groups, 1), generator=rng(1))
    shift = torch.randint(-8, 9, scale.shape, generator=rng(2)) * scale
    x = (codes * scale + shift).flatten(-2)
    rows = quantize_kv_int4(x, num_groups)
    assert rows.dtype == torch.int32 and rows.shape == (5, 3, num_groups + 8)
    assert torch.equal(dequantize_kv_int4(rows, num_groups, torch.float32), x)
    assert torch.equal(quantize_kv_int4(dequantize_kv_int4(rows, num_groups, torch.float32), num_groups), rows)


def test_the_layout_of_a_row():
    x = torch.cat((torch.arange(8.0) * 2 + 1, torch.arange(8.0))).clamp(max=15)  # 1 .. 15 and 0 .. 7
    rows = quantize_kv_int4(x, 2)
    scales = torch.tensor([14 / 15, 1.0, 7 / 15, 0.0]).half()  # scale low, shift high
    assert torch.equal(rows[:2], scales.view(torch.int32))
    for g in range(2):
        scale, shift = scales[2 * g : 2 * g + 2].float()
        for j in range(8):
            want = min(math.floor((x[8 * g + j] - shift) / scale + 0.5), 15)
            assert (rows[2 + g].item() >> (4 * j)) & 15 == want


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16])
@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
def test_quantisation_is_off_by_half_a_step(num_groups, dtype):
    """And by what float16 does to scale (2^-11 of 15 steps) and shift (2^-11 of it)."""
    x = (torch.randn(50, 128, generator=rng(3)) * 3 + 1).to(dtype)
    back = dequantize_kv_int4(quantize_kv_int4(x, num_groups), num_groups)
    groups = x.double().unflatten(-1, (num_groups, -1))
    least, largest = groups.aminmax(dim=-1, keepdim=True)
    bound = (largest - least) / 15 * (0.5 + 15 * 2.0**-11 + 1e-4) + least.abs() * 2.0**-11
    assert ((back.unflatten(-1, (num_groups, -1)) - groups).abs() <= bound).all()


def test_groups_of_equal_values_keep_their_value():
    x = torch.tensor([0.0, -3.5, 2.0**-24, 1.0]).repeat_interleave(16)
    x[-1] = 1.0 + 2.0**-23  # a range below float16's smallest scale
    back = dequantize_kv_int4(quantize_kv_int4(x, 4), 4)
    assert torch.equal(back, torch.tensor([0.0, -3.5, 2.0**-24, 1.0], dtype=torch.float64).repeat_interleave(16))


# --- the kernel


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
def test_head_dimensions_groups_and_dtypes(d, num_groups, dtype):
    small(d, num_groups, dtype, split_k=2)


@pytest.mark.parametrize("configuration", [(1, 1), (2, 1), (4, 1), (4, 3), (1, 9)])
@pytest.mark.parametrize("keys", [1, 16, 33, 100])
def test_waves_and_splits_over_lengths_around_tiles(keys, configuration):
    q, k, v = case(3, 1, 1, 2, 64, keys, 2, seed=keys)
    forced = dict(zip(INT4_CONFIGURATION, configuration, strict=True))
    seqlens = lengths(keys, 0, 1)
    out, lse = attend(q, k, v, seqlens, 2, force_kernel_config=forced)
    check(q, k, v, 2, seqlens, out, lse)
    assert not out[0, 1].any() and (lse[1] == -math.inf).all()


@pytest.mark.parametrize(("mq", "group", "causal"), [(1, 17, True), (3, 5, False), (16, 3, True), (16, 1, False)])
def test_heads_and_tokens_folded_into_rows(mq, group, causal):
    q, k, v = case(2, mq, 2, group, 64, 60, 4, seed=mq * group)
    seqlens = lengths(60, mq // 2)  # the second: causal rows that see nothing
    out, lse = attend(q, k, v, seqlens, 4, scale=0.2, causal=causal, split_k=2)
    check(q, k, v, 4, seqlens, out, lse, 0.2, causal)


@pytest.mark.parametrize("page_size", [16, 48, 64])
@pytest.mark.parametrize("d", [64, 128])
def test_pages_in_any_order_give_the_bits_of_the_dense_cache(page_size, d):
    q, k, v = case(4, 2, 2, 2, d, 130, 8, seed=page_size)
    seqlens = lengths(130, page_size, page_size + 1, page_size - 1)
    (k_pages, tables), (v_pages, _) = paged(k, page_size), paged(v, page_size)
    tables = torch.cat((tables, torch.full((4, 2), 2**31 - 1, dtype=torch.int32)), dim=1)  # never to be read
    out, lse = attend(q, k_pages, v_pages, seqlens, 8, tables, split_k=3)
    dense, dense_lse = attend(q, k, v, seqlens, 8, split_k=3)
    assert torch.equal(out, dense) and torch.equal(lse, dense_lse)
    check(q, k, v, 8, seqlens, out, lse)


def test_rows_past_the_length_may_hold_nan():
    q, k, v = case(1, 1, 1, 2, 64, 100, 1)
    clean, _ = attend(q, k, v, lengths(37), 1, split_k=1)
    k[:, 37:], v[:, 37:] = UNUSED, UNUSED
    assert torch.equal(attend(q, k, v, lengths(37), 1, split_k=1)[0], clean)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_one_dominant_key_returns_its_value_row(d):
    """Whose codes, scale 1 and shift 0 are exact in bfloat16: any element or nibble out of place would show."""
    codes = torch.randint(0, 16, (1, 40, 1, d), generator=rng(d)).float()
    codes[..., :: d // 8], codes[..., 1 :: d // 8] = 0.0, 15.0
    keys = torch.zeros(1, 40, 1, d)
    keys[0, 21] = 100.0
    q = torch.ones(1, 1, 1, 4, d).bfloat16()
    out, _ = attend(q, quantize_kv_int4(keys, 8), quantize_kv_int4(codes, 8), lengths(40), 8, split_k=2)
    assert torch.equal(out[0, 0, 0], codes[0, 21, 0].bfloat16().expand(4, d))


@pytest.mark.parametrize(("d", "num_groups"), [(64, 1), (64, 8), (128, 4), (256, 8)])
def test_bytes_of_the_cache_are_read_once(d, num_groups):
    q, k, v = case(2, 1, 2, 4, d, 128, num_groups)
    with emulator.counters() as counted:
        attend(q, k, v, lengths(128, 50), num_groups, split_k=2)
    keys = (128 + 50) * 2
    # No element twice. Each of a key's lanes (K: 4, V: 16) asks for its word of scales, K's for one per half.
    for name, asked in (("k", 2 * 4), ("v", 16)):
        traffic = counted.tensors[name]
        assert traffic.unique_loaded == keys * 4 * (num_groups + d // 8)
        assert traffic.loaded == keys * (d // 2 + 4 * asked)


def test_what_the_kernel_does_not_take_runs_in_torch():
    q, k, v = case(2, 1, 1, 2, 32, 40, 4)
    operands = (q, expanded(k, 2), expanded(v, 2), None, None, lengths(40, 0))
    told = hipforge.explain(decode_attention_splitk, *operands, num_groups=4)
    assert told.path == "torch" and "D must be one of" in told.refused["kernel"]
    out, lse = decode_attention_splitk(*operands, num_groups=4)
    check(q, k, v, 4, lengths(40, 0), out, lse)
    q, k, v = case(2, 1, 1, 2, 64, 40, 4)
    (k_pages, tables), (v_pages, _) = paged(k, 8), paged(v, 8)
    out, lse = attend(q, k_pages, v_pages, lengths(40, 9), 4, tables)
    check(q, k, v, 4, lengths(40, 9), out, lse)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": 3}, "num_groups must be one of 1, 2, 4, 8; got 3"),
        ({"num_groups": 2}, "k must have shape"),
        ({"num_groups": None}, "must be given for an fp8 cache"),
        ({"k_scale_shift": torch.zeros(1, 1, 1, 2, dtype=torch.int32)}, "must be None with num_groups"),
        ({"split_k": 513}, "split_k must be 1 to 512; got 513"),
        ({"force_kernel_config": {"waves": 3}}, "waves must be one of 1, 2, 4; got 3"),
        ({"force_kernel_config": {"block_n": 16}}, "waves, split_k for int4; got 'block_n'"),
        ({"page_size": 16}, "belong together"),
        ({"seqlens": torch.tensor([3])}, "int32"),
    ],
)
def test_refusals_name_argument_value_and_rule(change, message):
    q, k, v = case(1, 1, 1, 2, 64, 32, 1)
    given = {"k_scale_shift": None, "v_scale_shift": None, "seqlens": lengths(32), "num_groups": 1, **change}
    with pytest.raises(GuardError, match=message):
        decode_attention_splitk(q, expanded(k, 2), expanded(v, 2), **given)


KERNEL, WAVE, ROWS = "int4_kernel.h", "row_wave.h", "tile_rows.h"
MUTANTS = [
    ("one_key_too_many", ROWS, "if (own_left <= kTileN * t + r)", "if (own_left < kTileN * t + r)"),
    ("group_of_k", KERNEL, "((2 * group + half) * groups / 8)", "(group * groups / 8)"),
    ("group_of_v", KERNEL, "(Dealt::kWide * column * groups / kD)", "(Dealt::kWide * column * groups / (2 * kD))"),
    ("sums_not_rescaled", WAVE, "acc[j] *= keep;", "acc[j] *= 1.f;"),
    (
        "hidden_key_seen",
        ROWS,
        "min(left - hidden, static_cast<int32_t>(keys))",
        "min(left, static_cast<int32_t>(keys))",
    ),
]


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m[0], marks=() if m[0] == "group_of_k" else pytest.mark.full) for m in MUTANTS],
)
def test_a_mistake_is_noticed(tmp_path, monkeypatch, mutant):
    name, file, line, becomes = mutant
    entry = planted(
        tmp_path / name, kernels.decode_attention_int4_out, f"decode_attention/amd/{file}", line, becomes,
        unit="decode_attention/amd/decode_attention_int4.cu",
        variants={"HF_HEAD_DIM": [64], "HF_INPUT": ["bf16"]},
    )  # fmt: skip
    small(64, 8, BF16, split_k=1)
    monkeypatch.setattr(kernels, "decode_attention_int4_out", entry)
    with pytest.raises((AssertionError, EmulatorFault)):
        small(64, 8, BF16, split_k=1)


@pytest.mark.full
@pytest.mark.parametrize("keys", [2048, 4096])
@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_long_sequences(keys, num_groups, dtype):
    q, k, v = case(3, 1, 2, 8, 128, keys, num_groups, dtype, seed=keys)
    seqlens = lengths(keys, keys // 3, 0)
    (k_pages, tables), (v_pages, _) = paged(k, 64), paged(v, 64)
    with emulator.options(checks="off"):
        out, lse = attend(q, k_pages, v_pages, seqlens, num_groups, tables)
    check(q, k, v, num_groups, seqlens, out, lse)
