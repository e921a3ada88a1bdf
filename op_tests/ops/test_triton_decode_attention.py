"""The Triton kernels that decode attention is compared with, against float64 over the same bits.

The error bound of an output: K and V are rounded to bfloat16 after dequantisation (2^-8 of each), a weight too, and a
score is a float32 sum of D products. A score's error e moves each weight by e of it, once in the numerator and once
in the sum; V's rounding and the weight's add 2^-8 of sum(p |v|) / sum(p) each, and the output is rounded to bfloat16.
The log-sum-exp moves by the scores' error and 2^-20 for float32 exponentials, logarithm and sums.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hipforge import emulator
from hipforge.emulator import triton as emulated
from hipforge.errors import GuardError
from hipforge.ops.reference.attention import decode_attention, dequantize_kv_fp8, gather_pages, quantize_kv_fp8
from hipforge.ops.triton.decode_attention_fp8 import (
    RESIDENT,
    RESIDENT_64,
    STREAMING,
    Call,
    Problem,
    SplitConfig,
    prepare,
)

FP8 = {"gfx950": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}
HALF_ULP = 2.0**-8  # bfloat16's
RESIDENT_PARTS = SplitConfig(block_n=64, num_warps=2, parts=4)


def problem(
    batch: int, mq: int, kv_heads: int, group: int, d: int, keys: int, lengths: list[int], arch: str = "gfx950",
    split_k: int = 3,
) -> Problem:  # fmt: skip
    generator = torch.Generator().manual_seed(keys + d)
    q = torch.randn(batch, mq, kv_heads * group, d, generator=generator).bfloat16()
    k, v = (quantize_kv_fp8(torch.randn(batch, keys, kv_heads, d, generator=generator), FP8[arch]) for _ in range(2))
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    return Problem(q, *k, *v, seqlens, None, d**-0.5, split_k, arch)


def run(case: Problem, config: SplitConfig) -> tuple[torch.Tensor, torch.Tensor]:
    call: Call = prepare(case, config)
    with emulator.options(checks="all"):
        return call.run(lambda kernel: emulated.jit(kernel, arch=case.arch))


def check(case: Problem, out: torch.Tensor, lse: torch.Tensor) -> None:
    batch, mq, _, d = case.q.shape
    k, v = (
        dequantize_kv_fp8(words, rows, FP8[case.arch]) for words, rows in ((case.k, case.k_rows), (case.v, case.v_rows))
    )
    if case.block_tables is not None:
        k, v = (gather_pages(x.flatten(0, 1), case.block_tables, case.k.shape[1]) for x in (k, v))
    folded = case.q.view(batch, mq, -1, case.group, d)
    want, want_lse = decode_attention(folded, k, v, case.seqlens, case.scale, causal=True)
    spread, _ = decode_attention(folded, k, v.abs(), case.seqlens, case.scale, causal=True)
    products = torch.einsum("bmghd,bkgd->bmghk", folded.double().abs(), k.abs()).amax().item() * case.scale
    score = (HALF_ULP + (d + 4) * 2.0**-24) * products
    bound = (2 * score + 2 * HALF_ULP + 2.0**-18) * spread + HALF_ULP * want.abs() + 1e-7
    error = (out.double().view_as(want) - want).abs()
    assert (error <= bound).all(), f"worst part of the bound: {(error / bound).max()}"
    seen = want_lse.reshape(lse.shape) > -math.inf
    assert torch.equal(seen, lse > -math.inf)
    off = (lse.double() - want_lse.reshape(lse.shape))[seen].abs()
    assert (off <= score + 2.0**-20 * (1 + want_lse.abs()[want_lse > -math.inf].max())).all()


@pytest.mark.parametrize(
    ("arch", "config"),
    [*(("gfx950", config) for config in (RESIDENT, RESIDENT_64, STREAMING, RESIDENT_PARTS)),
     *(pytest.param("gfx942", config, marks=() if config is STREAMING else pytest.mark.full)
       for config in (RESIDENT, RESIDENT_64, STREAMING, RESIDENT_PARTS))],
    ids=str,
)  # fmt: skip
def test_ragged_lengths_heads_and_splits(arch: str, config: SplitConfig) -> None:
    case = problem(4, 1, 2, 8, 64, 200, [200, 0, 1, 131], arch)
    out, lse = run(case, config)
    check(case, out, lse)
    assert not out[1].any() and (lse[1] == -math.inf).all()


@pytest.mark.parametrize("config", [RESIDENT_64, STREAMING], ids=str)
def test_several_tokens_and_more_rows_than_a_tile(config: SplitConfig) -> None:
    case = problem(2, 3, 1, 7, 128, 96, [96, 2])
    check(case, *run(case, config))


@pytest.mark.parametrize("config", [RESIDENT, STREAMING], ids=str)
def test_pages_in_any_order_give_the_bits_of_the_dense_cache(config: SplitConfig) -> None:
    dense = problem(2, 1, 2, 4, 64, 256, [256, 130], split_k=2)
    order = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)

    def scatter(cache: torch.Tensor) -> torch.Tensor:
        pages = torch.empty(4, 128, *cache.shape[2:], dtype=cache.dtype)
        pages[order.flatten().long()] = cache.reshape(pages.shape)
        return pages

    paged = dataclasses.replace(
        dense, k=scatter(dense.k), k_rows=scatter(dense.k_rows), v=scatter(dense.v), v_rows=scatter(dense.v_rows),
        block_tables=order,
    )  # fmt: skip
    out, lse = run(paged, config)
    check(paged, out, lse)
    for got, same in zip((out, lse), run(dense, config), strict=True):
        assert torch.equal(got, same)


@pytest.mark.parametrize("config", [RESIDENT_64, STREAMING], ids=str)
def test_equal_scores_give_exact_means_and_the_logarithm_of_the_length(config: SplitConfig) -> None:
    case = problem(1, 1, 1, 1, 64, 256, [256], split_k=2)
    words = torch.randint(-8, 9, (1, 256, 1, 64), generator=torch.Generator().manual_seed(1)).float()
    v = words.to(FP8["gfx950"]).view(torch.uint8).view(torch.int32)
    one = torch.tensor([1.0, 0.0], dtype=torch.float16).view(torch.int32).expand(1, 256, 1).contiguous()
    out, lse = run(dataclasses.replace(case, q=torch.zeros_like(case.q), v=v, v_rows=one), config)
    assert torch.equal(out[0, 0, 0], (words[0, :, 0].sum(0) / 256).bfloat16())
    assert abs(lse.item() - math.log(256)) < 1e-6  # float32 of a number below 8


def test_pages_that_cut_a_block_are_refused() -> None:
    case = problem(1, 1, 1, 1, 64, 64, [64])
    tables = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(GuardError, match=r"multiple of block_n = 128; got 64"):
        prepare(dataclasses.replace(case, block_tables=tables), RESIDENT)
