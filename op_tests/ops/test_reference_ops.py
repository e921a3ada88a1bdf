"""The reference GEMMs, MoE and attention against plain loops, and all of them under torch.compile."""

import math

import pytest
import torch

from hipforge.errors import GuardError
from hipforge.ops.reference import (
    decode_attention,
    dequantize_kv_fp8,
    dequantize_mxfp4,
    dequantize_mxfp8,
    fn_to_fnuz,
    gather_pages,
    grouped_gemm_mxfp8,
    moe_align_block_size,
    mxfp4_mm,
    mxfp8_mm,
    quantize_kv_fp8,
    quantize_mxfp4,
    quantize_mxfp8,
    shuffle_scale,
    shuffle_weight,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- GEMMs -----------------------------------------------------------------------------------------------------------


def test_mxfp8_mm_with_a_distinct_scale_per_block_is_the_sum_over_blocks():
    m, n, k = 3, 5, 128
    xq = torch.randint(0, 0x7F, (m, k), dtype=torch.uint8, generator=seeded(1))
    wq = torch.randint(0, 0x7F, (n, k), dtype=torch.uint8, generator=seeded(2))
    xs = torch.arange(120, 120 + m * 4, dtype=torch.uint8).view(m, 4)
    ws = torch.arange(110, 110 + n * 4, dtype=torch.uint8).view(n, 4)
    got = mxfp8_mm(xq, xs, wq, ws, torch.float64, torch.float64)
    x, w = (t.view(torch.float8_e4m3fn).double() for t in (xq, wq))
    for i in range(m):
        for j in range(n):
            expected = 0.0  # exact: at most 19 significant bits per block, and scales within 2^38 of each other
            for b in range(4):
                block = slice(32 * b, 32 * b + 32)
                factor = 2.0 ** (xs[i, b].item() + ws[j, b].item() - 254)
                expected += factor * (x[i, block] * w[j, block]).sum().item()
            assert got[i, j].item() == expected


def test_mxfp8_mm_on_integers_is_exact_in_bf16():
    x = torch.randint(-4, 5, (4, 64), generator=seeded()).float()
    w = torch.randint(-4, 5, (8, 64), generator=seeded(1)).float()
    # Sums of 64 products of at most 16 stay below 2^11; keep those that bf16 holds (below 256).
    expected = (x @ w.T).clamp(-255, 255)
    got = mxfp8_mm(*quantize_mxfp8(x), *quantize_mxfp8(w), out_dtype=torch.float32)
    assert torch.equal(got.clamp(-255, 255), expected)


def test_a_scale_of_255_makes_its_outputs_nan_and_no_others():
    (xq, xs), (wq, ws) = quantize_mxfp8(torch.randn(3, 64)), quantize_mxfp8(torch.randn(4, 64))
    xs[1, 0] = 255
    ws[2, 1] = 255
    nan = mxfp8_mm(xq, xs, wq, ws).isnan()
    assert nan[1].all() and nan[:, 2].all() and nan.sum() == 3 + 4 - 1


def test_mxfp4_mm_is_the_product_of_the_dequantised_operands():
    a, b = torch.randn(4, 96, generator=seeded()).bfloat16(), torch.randn(6, 96, generator=seeded(1)).bfloat16()
    for mode in ("even", "round_up"):
        for rounding in ("rne", "half_up"):
            da, db = (dequantize_mxfp4(*quantize_mxfp4(t, mode, rounding), torch.float64) for t in (a, b))
            got = mxfp4_mm(a, b, mode, rounding)
            assert got.dtype == torch.bfloat16
            # float32 accumulation of 96 terms stays far below the bf16 rounding, half a unit of 8 bits: 2^-9 relative,
            # doubled for a result that rounds across a binade; plus 96 * 2^-24 of the sum of magnitudes.
            bound = 2**-8 * (da @ db.T).abs() + 96 * 2**-24 * (da.abs() @ db.abs().T)
            assert ((got.double() - da @ db.T).abs() <= bound).all()


def test_nan_and_infinity_stand_where_the_tasks_want_them():
    a, b = (torch.randn(rows, 64, generator=seeded(rows)).bfloat16() for rows in (4, 32))
    a[1, 3] = float("inf")
    a[2, 40] = float("nan")
    # "even" saturates such an element at 6 * 2^127: its row is finite or infinite, never NaN from the quantiser.
    assert not dequantize_mxfp4(*quantize_mxfp4(a), torch.float64).isnan().any()
    # Modes that mark the block as NaN make the whole row NaN and no other.
    nan = mxfp4_mm(a, b, mode="round_up").isnan()
    assert nan[1:3].all() and not nan[0].any() and not nan[3].any()


def test_the_legacy_rounding_is_another_format_not_a_detail():
    a, b = (torch.randn(rows, 1536, generator=seeded(rows)).bfloat16() for rows in (64, 256))
    rne, half_up = mxfp4_mm(a, b).double(), mxfp4_mm(a, b, rounding="half_up").double()
    # Ties differ in 0.66 % of codes; the products differ by 5 %, far past the tasks' 1e-2.
    assert 0.03 < (rne - half_up).norm() / rne.norm() < 0.08
    outside = (rne - half_up).abs() > 1e-2 + 1e-2 * half_up.abs()
    assert outside.double().mean() > 0.8
    codes = [quantize_mxfp4(torch.cat((a, b)), rounding=rounding)[0] for rounding in ("rne", "half_up")]
    assert 0.01 < (codes[0] != codes[1]).double().mean() < 0.02  # two codes per byte


def test_gemms_refuse_operands_that_do_not_fit():
    (xq, xs), (wq, ws) = quantize_mxfp8(torch.randn(3, 64)), quantize_mxfp8(torch.randn(4, 32))
    with pytest.raises(GuardError, match=r"wq must be .*\[4, 64\] \(its K is that of xq\); got .*\[4, 32\]"):
        mxfp8_mm(xq, xs, wq, ws)
    with pytest.raises(GuardError, match=r"xq must be \[M, K\]"):
        mxfp8_mm(xq[0], xs[0], wq, ws)
    with pytest.raises(GuardError, match=r"b must be \[N, K\]"):
        mxfp4_mm(torch.zeros(1, 32), torch.zeros(32))
    assert mxfp4_mm(torch.zeros(0, 32), torch.zeros(2, 32)).shape == (0, 2)


# ---- MoE -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("a_div", [1, 2])
def test_grouped_gemm_is_each_slot_times_its_expert(a_div, weighted):
    tokens, top_k, experts, n, k = 6, 2, 5, 7, 64
    slots = tokens * top_k
    topk_ids = torch.randint(0, experts, (tokens, top_k), generator=seeded(3), dtype=torch.int64)
    topk_ids[2, 1] = -1
    aq, a_scale = quantize_mxfp8(torch.randn(slots // a_div, k, generator=seeded(4)))
    w, w_scale = quantize_mxfp8(torch.randn(experts, n, k, generator=seeded(5)))
    factors = torch.rand(slots, generator=seeded(6)) if weighted else None
    ids, owners, total = moe_align_block_size(topk_ids, 4, experts)
    got = grouped_gemm_mxfp8(aq, a_scale, w, w_scale, ids, owners, total, slots, 4, a_div, factors)
    a64, w64 = dequantize_mxfp8(aq, a_scale, torch.float64), dequantize_mxfp8(w, w_scale, torch.float64)
    for slot in range(slots):
        expert = topk_ids.flatten()[slot].item()
        expected = torch.zeros(n, dtype=torch.float64)
        if expert >= 0:
            expected = w64[expert] @ a64[slot // a_div] * (factors[slot].double() if weighted else 1)
        # Both sides sum 64 float64 products; only their order differs.
        torch.testing.assert_close(got[slot], expected, rtol=0, atol=1e-12)


def test_grouped_gemm_skips_foreign_experts_and_tiles_past_the_padded_total():
    aq, a_scale = quantize_mxfp8(torch.ones(4, 32))
    w, w_scale = quantize_mxfp8(torch.ones(2, 3, 32))
    ids = torch.tensor([0, 4, 1, 4, 2, 4, 3, -1], dtype=torch.int32)
    owners = torch.tensor([0, -1, 2, 1], dtype=torch.int32)
    run = lambda total: grouped_gemm_mxfp8(
        aq, a_scale, w, w_scale, ids, owners, torch.tensor([total], dtype=torch.int32), 4, 2, 1
    )
    assert run(8)[:, 0].tolist() == [32, 0, 0, 32]
    assert run(6)[:, 0].tolist() == [32, 0, 0, 0]


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_by_loops(q, k, v, seqlens, causal):
    batch, mq, groups, heads, d = q.shape
    out = torch.zeros_like(q)
    lse = torch.full((batch, groups, heads, mq), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for g in range(groups):
            for h in range(heads):
                for i in range(mq):
                    keys = int(seqlens[b]) - (mq - 1 - i if causal else 0)
                    if keys <= 0:
                        continue
                    scores = k[b, :keys, g] @ q[b, i, g, h] / math.sqrt(d)
                    weights = torch.exp(scores - scores.max())
                    out[b, i, g, h] = weights @ v[b, :keys, g] / weights.sum()
                    lse[b, g, h, i] = weights.sum().log() + scores.max()
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
def test_attention_against_loops_with_empty_and_ragged_sequences(causal):
    batch, mq, mkv, groups, heads, d = 4, 3, 10, 2, 2, 8
    q = torch.randn(batch, mq, groups, heads, d, generator=seeded(), dtype=torch.float64)
    k, v = (torch.randn(batch, mkv, groups, d, generator=seeded(s), dtype=torch.float64) for s in (1, 2))
    seqlens = torch.tensor([10, 4, 1, 0])
    k[1, 4:] = math.nan  # rows past the length may hold anything
    v[1, 4:] = math.nan
    out, lse = decode_attention(q, k, v, seqlens, causal=causal)
    expected_out, expected_lse = attention_by_loops(q, k, v, seqlens, causal)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_kv_rows_survive_quantisation_to_half_a_unit_of_fp8(dtype):
    x = torch.randn(5, 3, 64, generator=seeded()) * 3 + 1
    words, scale_shift = quantize_kv_fp8(x, dtype)
    assert words.shape == (5, 3, 16) and words.dtype == torch.int32 and scale_shift.shape == (5, 3)
    back = dequantize_kv_fp8(words, scale_shift, dtype)
    # e4m3 keeps 4 significant bits: half a unit is at most 2^-4 of the centred value. float16 rounds the scale by up
    # to 2^-11, so that the largest elements may clip by as much; the smallest are off by half a subnormal step.
    centred = (x - scale_shift.view(torch.float16).view(5, 3, 2)[..., 1:].float()).double()
    scale = scale_shift.view(torch.float16).view(5, 3, 2)[..., :1].double()
    assert ((back - x.double()).abs() <= (2**-4 + 2**-11) * centred.abs() + 2**-10 * scale).all()


def test_kv_words_hold_element_d_in_bits_8_d_mod_4():
    words, scale_shift = quantize_kv_fp8(torch.tensor([[-448.0, 448.0, -224.0, 224.0]]))
    assert words.item() & 0xFFFFFFFF == 0x76F67EFE
    assert scale_shift.item() & 0xFFFFFFFF == 0x00003C00  # scale 1.0 below, shift 0 above


def test_constant_kv_rows_keep_their_mean():
    words, scale_shift = quantize_kv_fp8(torch.full((2, 8), 1.5))
    assert torch.equal(dequantize_kv_fp8(words, scale_shift), torch.full((2, 8), 1.5, dtype=torch.float64))


def test_gathered_pages_are_the_rows_in_order():
    cache = torch.arange(24).view(12, 2)
    got = gather_pages(cache, torch.tensor([[2, 0], [1, 1]], dtype=torch.int32), 4)
    assert got[0, :, 0].tolist() == [16, 18, 20, 22, 0, 2, 4, 6]
    assert got[1, :, 0].tolist() == [8, 10, 12, 14] * 2
    with pytest.raises(GuardError, match="whole pages of 5 rows; got 12 rows"):
        gather_pages(cache, torch.zeros(1, 1, dtype=torch.int32), 5)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def compile_cases():
    x = torch.randn(4, 64, generator=seeded()).bfloat16()
    w = torch.randn(32, 64, generator=seeded(1)).bfloat16()
    xq, xs = quantize_mxfp8(x)
    wq, ws = quantize_mxfp8(w)
    moe = moe_align_block_size(torch.tensor([[0, 1], [1, 1]]), 2, 2)
    we, wes = quantize_mxfp8(torch.randn(2, 3, 64, generator=seeded(2)))
    kv = torch.randn(2, 5, 1, 8, generator=seeded(3))
    yield "quantize_mxfp8", lambda: quantize_mxfp8(x)
    yield "quantize_mxfp4", lambda: quantize_mxfp4(x)
    yield "mxfp8_mm", lambda: mxfp8_mm(xq, xs, wq, ws)
    yield "mxfp4_mm", lambda: mxfp4_mm(x, w)
    yield "shuffles", lambda: (shuffle_weight(wq.view(torch.uint8)), shuffle_scale(ws))
    yield "fn_to_fnuz", lambda: fn_to_fnuz(wq, torch.ones(1))
    yield "moe_align_block_size", lambda: moe_align_block_size(torch.tensor([[0, 1], [1, 1]]), 2, 2)
    yield "grouped_gemm_mxfp8", lambda: grouped_gemm_mxfp8(xq, xs, we, wes, *moe, 4, 2, 1)
    yield (
        "attention",
        lambda: decode_attention(
            torch.ones(2, 1, 1, 2, 8), dequantize_kv_fp8(*quantize_kv_fp8(kv)), kv, torch.tensor([5, 2])
        ),
    )


def as_bytes(result):
    tensors = result if isinstance(result, tuple) else (result,)
    return [t.contiguous().view(torch.uint8) for t in tensors]


@pytest.mark.parametrize(
    ("name", "function"), list(compile_cases()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_references_trace_as_one_graph(name, function):
    traced = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(as_bytes(traced()), as_bytes(function()), strict=True))


def test_compiled_quantisers_are_bit_equal_to_eager():
    x = torch.cat((torch.randn(64, 64, generator=seeded()), torch.zeros(1, 64), torch.full((1, 64), math.inf)))

    def both(x):
        return (*quantize_mxfp8(x), *quantize_mxfp4(x), *quantize_mxfp4(x, "round_up", "half_up"))

    compiled = torch.compile(both, fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(as_bytes(compiled(x)), as_bytes(both(x)), strict=True))
