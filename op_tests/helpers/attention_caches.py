"""Every kind of cache that decode attention reads, as one value: what it stores, the op over it, the result's bound.

attention_cases has the bound of fp8 elements and rows. Of q's own dtype (*half*), from what the kernel documents:
* scores are float32 sums of exact products, off by at most (D + 8) 2^-24 of sum |q k|, times the factor; this moves a
  weight by that part of it, once in the numerator and once in the sum.
* a weight is rounded to the elements' dtype: U of it, 2^-8 for bfloat16 and 2^-11 for float16 (which holds weights down
  to 2^-29 of the largest in full, and loses at most 2^-40 of it below).
* float32 exponentials, sums and the merge of splits: 2^-18 of sum(p |v|) / sum(p).
* the output is rounded to q's dtype: U of it; below, a quantum of 1e-7.
Of *int4*:
* an element code * scale + shift is one float32 fused or two float32 operations, at most 2^-23 of |code scale| +
  |shift|, and then rounded to q's dtype (K: at most U of it, below a quantum of 2^-25) or bfloat16 (V: at most 2^-8 of
  it). So a score is off by U + (D + 8) 2^-24 times sum |q k|, by 2^-23 times sum |q| (|code scale| + |shift|) and by
  2^-25 sum |q|, all times the factor.
* a weight and an element of V are each rounded to bfloat16: 2^-7 of sum(p |v|) / sum(p) for both.
* sums and output as above; of V's parts 2^-23.
The log-sum-exp moves by the scores' error and by 2^-20 for the float32 exponentials, logarithm and sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from helpers import attention_cases
from helpers.attention_cases import CAP_STEP, FP8, NAN_CODE, expanded, rng, scattered
from helpers.errors import assert_within
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8, decode_attention_splitk
from hipforge.ops.reference.attention import (
    decode_attention,
    dequantize_kv_fp8,
    dequantize_kv_int4,
    quantize_kv_fp8,
    quantize_kv_int4,
)

KINDS = ("fp8", "rows", "half", "int4")
NAN_WORD = 0x7E007E00  # scale and shift NaN
Sides = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Cache:
    """K and V [B, Mkv, Hkv, ...], or [pages, page_size, Hkv, ...] with ``tables``, of one kind.

    Attributes:
        kind: ``fp8`` elements, fp8 ``rows`` with a word of scale and shift each, ``half`` of q's dtype, or ``int4``.
        sides: what is stored.
        words: of rows.
        dense: the same without pages.
        scales: of all elements, or one per KV head; of fp8 and half alone.
        num_groups: scales per int4 row.
    """

    kind: str
    sides: Sides
    words: Sides | None = None
    dense: Cache | None = None
    tables: torch.Tensor | None = None
    scales: tuple[Any, Any] = (1.0, 1.0)
    num_groups: int = 4

    def part(self, rows: slice) -> Cache:
        """The cache of some of the sequences."""
        words = None if self.words is None else (self.words[0][rows], self.words[1][rows])
        return replace(self, sides=(self.sides[0][rows], self.sides[1][rows]), words=words)

    def operands(self, q: torch.Tensor) -> tuple[Any, ...]:
        """The packed layout's k, v and their words, which the heads of a group share."""
        group = q.shape[-2] // self.sides[0].shape[2]
        wide = [expanded(side.flatten(0, 1).unsqueeze(0), group) for side in self.sides]
        words = [expanded(word.flatten(0, 1).unsqueeze(0), group) for word in self.words or ()]
        return *wide, *(words or (None, None))

    def attend(self, q: torch.Tensor, seqlens: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        """q [B, Mq, Hq, D], or [tokens, Hq, D] with ``cu_seqlens_q``: (out like q, log-sum-exp [B, Hq, Mq], ...)."""
        if self.kind in ("fp8", "half"):
            return decode_attention_fp8(q, *self.sides, self.tables, seqlens, *self.scales, return_lse=True, **options)
        if self.kind == "int4":
            options["num_groups"] = self.num_groups
        kv_heads = self.sides[0].shape[2]
        folded = q.reshape(1, -1, kv_heads, q.shape[-2] // kv_heads, q.shape[-1])
        page_size = None if self.tables is None else self.sides[0].shape[1]
        out, lse, *rest = decode_attention_splitk(folded, *self.operands(q), seqlens, self.tables, page_size, **options)
        return out.view(q.shape), lse.flatten(-3, -2), *rest

    def values(self) -> Sides:
        """K and V in float64 as they are stored."""
        whole = self.dense or self
        if whole.kind == "int4":
            return tuple(dequantize_kv_int4(side, self.num_groups) for side in whole.sides)  # type: ignore[return-value]
        if whole.words is not None:
            pairs = zip(whole.sides, whole.words, strict=True)
            return tuple(dequantize_kv_fp8(side, words, FP8) for side, words in pairs)  # type: ignore[return-value]
        factors = [x.double().view(-1, 1) if isinstance(x, torch.Tensor) else x for x in self.scales]
        return tuple(side.double() * factor for side, factor in zip(whole.sides, factors, strict=True))  # type: ignore[return-value]

    def parts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """|element times scale| and |shift| of both sides; a kernel adds up both, so an error follows both."""
        whole, found = self.dense or self, []
        for number, value in enumerate(self.values()):
            if self.kind == "int4":
                halves = whole.sides[number][..., : self.num_groups].contiguous().unsqueeze(-1).view(torch.float16)
                each = value.shape[-1] // self.num_groups
                shift = halves.double()[..., 1:].expand(*halves.shape[:-1], each).flatten(-2)
            else:
                shift = whole.words[number].contiguous().unsqueeze(-1).view(torch.float16).double()[..., 1:]  # type: ignore[index]
            found.append(((value - shift).abs(), shift.abs().expand_as(value)))
        return found

    def paged(self, page_size: int, seed: int = 0) -> Cache:
        """The same rows scattered over pages in random order; slots that are not used hold NaN."""
        fill = {"fp8": NAN_CODE, "rows": NAN_CODE, "half": math.nan, "int4": NAN_WORD}[self.kind]
        views = [side if self.kind in ("half", "int4") else side.view(torch.uint8) for side in self.sides]
        (k, tables), (v, _) = (scattered(view, page_size, fill, seed) for view in views)
        sides = (k.view(self.sides[0].dtype), v.view(self.sides[1].dtype))
        words = None
        if self.words is not None:
            words = tuple(scattered(word, page_size, NAN_WORD, seed)[0] for word in self.words)
        # Entries past a sequence's pages are never to be read.
        tables = torch.cat((tables, torch.full((len(tables), 2), 2**31 - 1, dtype=torch.int32)), dim=1)
        return replace(self, sides=sides, words=words, dense=self, tables=tables)  # type: ignore[arg-type]

    def spoil(self, rows: Any) -> Cache:
        """The cache with rows, an index of [B, Mkv], that are NaN throughout."""
        sides = tuple(side.clone() for side in self.sides)
        words = None if self.words is None else tuple(word.clone() for word in self.words)
        for side in sides:
            (side if self.kind in ("half", "int4") else side.view(torch.uint8))[rows] = {
                "half": math.nan, "int4": NAN_WORD
            }.get(self.kind, NAN_CODE)  # fmt: skip
        for word in words or ():
            word[rows] = NAN_WORD
        return replace(self, sides=sides, words=words)  # type: ignore[arg-type]

    def check(
        self,
        q: torch.Tensor,
        seqlens: torch.Tensor,
        got: tuple[torch.Tensor, ...],
        factor: float | None = None,
        causal: bool = True,
        **options: Any,
    ) -> None:
        """Compare (out, log-sum-exp, ...) with float64 over the same bits; options are sinks, window and softcap."""
        factor = q.shape[-1] ** -0.5 if factor is None else factor
        k, v = self.values()
        if self.kind in ("fp8", "rows"):
            given: dict[str, Any] = {}
            if self.kind == "rows":
                of_k, of_v = self.parts()
                given = {"weighted": of_v[0], "k_parts": sum(of_k)}
            attention_cases.check(q, k, v, seqlens, *got[:2], factor, causal, **given, **options)
        else:
            self._check_half_or_int4(q, k, v, seqlens, *got[:2], factor, causal, options)

    def _check_half_or_int4(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqlens: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, factor: float, causal: bool, options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        batch, mq, _, d = q.shape
        folded = q.view(batch, mq, k.shape[2], -1, d).double()
        unused = (torch.arange(k.shape[1]) >= seqlens.view(-1, 1))[:, :, None, None]
        k, v = k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)
        want, want_lse = decode_attention(folded, k, v, seqlens, factor, causal, **options)
        spread, _ = decode_attention(folded, k, v.abs(), seqlens, factor, causal, **options)
        ulp = 2.0**-8 if q.dtype == torch.bfloat16 else 2.0**-11

        def largest(magnitude: torch.Tensor) -> torch.Tensor:  # [B, Hkv, group, Mq]
            return torch.einsum("bmghd,bkgd->bghmk", folded.abs(), magnitude).amax(-1)

        if self.kind == "half":
            score, rounded, computed = (d + 8) * 2.0**-24 * largest(k.abs()), ulp, 0.0
        else:
            of_k, of_v = (sum(parts).masked_fill(unused, 0.0) for parts in self.parts())
            score = (ulp + (d + 8) * 2.0**-24) * largest(k.abs()) + 2.0**-23 * largest(of_k)
            score = score + 2.0**-25 * folded.abs().sum(-1).permute(0, 2, 3, 1)
            # The weights are those of K's elements; of_v in V's place gives the part of float32 dequantisation.
            rounded = 2.0**-7
            computed = 2.0**-23 * decode_attention(folded, k, of_v, seqlens, factor, causal, **options)[0]
        score = abs(factor) * score + CAP_STEP * (options.get("softcap") or 0.0)
        per_row = torch.expm1(2 * score).permute(0, 3, 1, 2).unsqueeze(-1)
        bound = (rounded + 2.0**-18 + per_row) * spread + computed + ulp * want.abs() + 1e-7
        error = assert_within(out.view_as(want), want, bound)
        seen = want_lse > -math.inf
        lse = lse.double().view_as(want_lse)
        assert torch.equal(seen, lse > -math.inf)
        off = (lse - want_lse)[seen].abs()
        assert (off <= (score + 2.0**-20 * (1 + want_lse.abs()))[seen]).all()
        # The bound assumes that all roundings agree in sign; they do not, so an error is an order below it on average.
        if self.kind == "int4" and seen.any():
            assert error.mean() <= 0.25 * bound.mean()


def holding(
    kind: str, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype = torch.bfloat16, num_groups: int = 4
) -> Cache:
    """The cache of float32 rows [B, Mkv, Hkv, D]."""
    if kind == "int4":
        return Cache(kind, tuple(quantize_kv_int4(x, num_groups) for x in (k, v)), num_groups=num_groups)  # type: ignore[arg-type]
    if kind == "rows":
        (k, k_words), (v, v_words) = quantize_kv_fp8(k, FP8), quantize_kv_fp8(v, FP8)
        return Cache(kind, (k, v), (k_words, v_words))
    own = FP8 if kind == "fp8" else dtype
    return Cache(kind, (k.to(own), v.to(own)))


def case(
    kind: str, batch: int, mq: int, kv_heads: int, group: int, d: int, keys: int, seed: int = 0,
    dtype: torch.dtype = torch.bfloat16, num_groups: int = 4,
) -> tuple[torch.Tensor, Cache]:  # fmt: skip
    """q [B, Mq, Hq, D] and a cache whose rows, and parts of rows, differ in scale and shift where the kind has them."""
    g = rng(seed)
    q = torch.randn(batch, mq, kv_heads * group, d, generator=g).to(dtype)
    sides = []
    for _ in range(2):
        x = torch.randn(batch, keys, kv_heads, num_groups, d // num_groups, generator=g)
        if kind == "int4":
            x = x * (0.25 + torch.rand(*x.shape[:-1], 1, generator=g)) + torch.randn(*x.shape[:-1], 1, generator=g)
        x = x.flatten(-2)
        sides.append(x + torch.randn(batch, keys, kv_heads, 1, generator=g) if kind == "rows" else x)
    return q, holding(kind, *sides, dtype, num_groups)
