"""Shared by the tests of decode attention: operands, pages, and the comparison with float64 over the same bits.

The error bound of an output, from the arithmetic that the kernel documents:
* q is split into e4m3 terms that are exact except for elements below 2^-13 of the row's largest, which lose at most
  2^-21 of it; so a score is off by that times sum |k|, and by the float32 sums of up to three exact products per
  element, at most (3 D + 8) 2^-24 sum |q k|, all times the factor. A score's error moves its weight by that part of it,
  once in the numerator and once in the sum.
* each weight is rounded to bfloat16, at most 2^-8 of it, so sum(p |v|) / sum(p) times 2^-8; where rows of V have a
  scale, it is the product of both that is rounded.
* float32 exponentials, sums and the merge of splits: 2^-18 of sum(p |v|) / sum(p).
* the output is rounded to q's dtype: 2^-8 of it for bfloat16, 2^-11 for float16; below, a quantum of 1e-7.
* a soft cap computes c tanh(x / c) in float32, off by at most 2^-20 c (CAP_STEP).
The log-sum-exp moves by the scores' error and by 2^-20 for the float32 exponentials, logarithm and sums.
"""

from __future__ import annotations

import math

import torch

from helpers.errors import assert_within
from hipforge import devices
from hipforge.ops import decode_attention_fp8 as ops
from hipforge.ops.reference.attention import decode_attention, quantize_kv_fp8

ARCH = devices.current().default_arch
FP8 = ops.ARCH_DTYPES[ARCH]
NAN_CODE = 0x80 if ARCH == "gfx942" else 0x7F
PRODUCT_ULP = 2.0**-24
SPLIT_STEP = 2.0**-21
WEIGHT_ULP = 2.0**-8
CAP_STEP = 2.0**-20
ONE = torch.ones(1)


def rng(seed):
    return torch.Generator().manual_seed(seed)


def case(batch, mq, kv_heads, group, d, keys, seed=0, dtype=torch.bfloat16):
    g = rng(seed)
    q = torch.randn(batch, mq, kv_heads * group, d, generator=g).to(dtype)
    k, v = (torch.randn(batch, keys, kv_heads, d, generator=g).to(FP8) for _ in range(2))
    return q, k, v


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


def packed_case(batch, mq, groups, heads, d, keys, seed, dtype=torch.bfloat16):
    g = rng(seed)
    q = torch.randn(1, batch * mq, groups, heads, d, generator=g).to(dtype)
    sides = []
    for _ in range(2):
        x = torch.randn(batch, keys, groups, d, generator=g) + torch.randn(batch, keys, groups, 1, generator=g)
        sides.append(quantize_kv_fp8(x, FP8))
    return q, *sides


def expanded(x, heads):
    """The packed layout's Hq axis, which the heads of a group share."""
    return x.unsqueeze(3).expand(-1, -1, -1, heads, *x.shape[3:])


def scattered(dense: torch.Tensor, page_size: int, fill: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (pages, tables) of [B, Mkv, ...] in random order; slots that are not used hold ``fill``."""
    batch, keys = dense.shape[:2]
    per = -(-keys // page_size)
    order = torch.randperm(batch * per + 1, generator=rng(seed))[: batch * per].view(batch, per)
    pages = torch.full((batch * per + 1, page_size, *dense.shape[2:]), fill, dtype=dense.dtype)
    for b in range(batch):
        for i in range(per):
            part = dense[b, i * page_size : (i + 1) * page_size]
            pages[order[b, i], : part.shape[0]] = part
    return pages, order.to(torch.int32)


def paged(dense, page_size, seed=0):
    """The same of fp8; slots that are not used hold NaN codes."""
    pages, tables = scattered(dense.view(torch.uint8), page_size, NAN_CODE, seed)
    return pages.view(dense.dtype), tables


def check(q, k, v, seqlens, got, lse, factor, causal=True, weighted=None, k_parts=None, **options):
    """Compare with float64 attention over k, v [B, Mkv, Hkv, D]; return the errors of output and log-sum-exp.

    ``options`` are sinks, window and softcap.
    Where rows have a shift: ``weighted`` is |v| without it, ``k_parts`` the sum of the magnitudes of its two parts.
    """
    batch, mq, heads, d = q.shape
    kv_heads = k.shape[2]
    folded = q.view(batch, mq, kv_heads, heads // kv_heads, d).double()
    want, want_lse = decode_attention(folded, k, v, seqlens, factor, causal, **options)
    spread, _ = decode_attention(
        folded, k, v.abs() if weighted is None else weighted, seqlens, factor, causal, **options
    )
    size, _ = decode_attention(folded, k, v.abs(), seqlens, factor, causal, **options)
    unused = (torch.arange(k.shape[1]) >= seqlens.view(-1, 1))[:, :, None, None]
    magnitude = (k.abs() if k_parts is None else k_parts).masked_fill(unused, 0.0)
    products = torch.einsum("bmghd,bkgd->bgmhk", folded.abs(), magnitude).amax(-1)  # [B, Hkv, Mq, group]
    split = folded.abs().amax(-1).permute(0, 2, 1, 3) * magnitude.sum(-1).amax(1)[:, :, None, None]
    score = abs(factor) * ((3 * d + 8) * PRODUCT_ULP * products + SPLIT_STEP * split)
    # Capping reduces the error of a score, and adds its own.
    score = score + CAP_STEP * (options.get("softcap") or 0.0)
    per_row = score.permute(0, 2, 1, 3).unsqueeze(-1)
    rounding = 2.0**-8 if q.dtype == torch.bfloat16 else 2.0**-11
    bound = WEIGHT_ULP * spread + (2 * per_row + 2.0**-18) * size + rounding * want.abs() + 1e-7
    error = assert_within(got.view_as(want), want, bound)
    seen = want_lse > -math.inf  # [B, Hkv, group, Mq]
    lse = lse.double().view_as(want_lse)
    assert torch.equal(seen, lse > -math.inf)
    off = (lse - want_lse)[seen].abs()
    assert (off <= (score.transpose(2, 3) + 2.0**-20 * (1 + want_lse.abs()))[seen]).all()
    return error, off
