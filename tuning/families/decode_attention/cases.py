"""Problems of decode attention over packed caches: operands, and the float64 result of the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from hipforge.ops.core.tuned import bucket
from hipforge.ops.decode_attention.kernels import ARCH_DTYPES
from hipforge.ops.reference.attention import (
    decode_attention,
    dequantize_kv_fp8,
    dequantize_kv_int4,
    gather_pages,
    quantize_kv_fp8,
    quantize_kv_int4,
)
from hipforge.ops.triton.decode_attention_fp8 import Problem

FP8 = ARCH_DTYPES


@dataclass(frozen=True, order=True)
class AttentionCell:
    """One problem size, a query token per sequence and every sequence full.

    Attributes:
        kv_heads: KV heads.
        group: query heads per KV head.
        d: head dimension.
        page_size: keys of a page; 0 for a cache without pages.
        keys: keys of each sequence.
        batch: sequences.
        num_groups: scales per row of an int4 cache; 0 for an fp8 cache.
    """

    kv_heads: int
    group: int
    d: int
    page_size: int
    keys: int
    batch: int
    num_groups: int = 0

    def __str__(self) -> str:
        pages = f" page={self.page_size}" if self.page_size else ""
        int4 = f" int4 groups={self.num_groups}" if self.num_groups else ""
        return f"B={self.batch} Mkv={self.keys} Hkv={self.kv_heads} G={self.group} D={self.d}{pages}{int4}"

    @property
    def key(self) -> tuple[int, ...]:
        """Return B, Hkv, G, D, Mkv and page_size as in the table row for this cell."""
        return bucket(self.batch), self.kv_heads, bucket(self.group), self.d, bucket(self.keys), self.page_size

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of K's elements, or of V's, with the words of scales that int4 rows hold."""
        row = self.d // 2 + 4 * self.num_groups if self.num_groups else self.d
        return self.batch * self.keys * self.kv_heads * row

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of K's words of scales, or of V's."""
        return 0 if self.num_groups else 4 * self.batch * self.keys * self.kv_heads


@dataclass(frozen=True)
class AttentionOperands:
    """A cell's tensors.

    Attributes:
        arch: whose fp8 the caches hold.
        q: bfloat16 [B, 1, Hkv * G, D].
        k: int32 words [pages, page_size, Hkv, D/4]; [B, Mkv, Hkv, D/4] without pages. int4: num_groups + D/8 words.
        k_rows: int32 [pages, page_size, Hkv], float16 scale and shift; without elements for int4.
        v: like ``k``.
        v_rows: like ``k_rows``.
        seqlens: int32 [B].
        block_tables: int32 [B, max_pages] in random order, or None.
        num_groups: scales per row of an int4 cache; 0 for an fp8 cache.
    """

    arch: str
    q: torch.Tensor
    k: torch.Tensor
    k_rows: torch.Tensor
    v: torch.Tensor
    v_rows: torch.Tensor
    seqlens: torch.Tensor
    block_tables: torch.Tensor | None
    num_groups: int = 0

    @property
    def scale(self) -> float:
        """Return the factor of q.k."""
        return float(self.q.shape[-1] ** -0.5)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        """Return the bytes that a call reads."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def clone(self) -> AttentionOperands:
        """Return a copy in memory of its own."""
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return replace(self, **copies)

    def triton_problem(self, split_k: int) -> Problem:
        """Return the same problem for the Triton kernels."""
        return Problem(
            self.q, self.k, self.k_rows, self.v, self.v_rows, self.seqlens, self.block_tables, self.scale, split_k,
            self.arch,
        )  # fmt: skip


def operands(cell: AttentionCell, arch: str, device: torch.device | str = "cpu") -> AttentionOperands:
    """Return normally distributed data, quantised; the same for a cell on every run."""
    generator = torch.Generator().manual_seed(10)
    q = torch.randn(cell.batch, 1, cell.kv_heads * cell.group, cell.d, generator=generator).bfloat16()
    slots = cell.page_size or cell.keys
    pages = -(-cell.keys // slots) * cell.batch
    caches = []
    for _ in range(2):
        x = torch.randn(pages, slots, cell.kv_heads, cell.d, generator=generator)
        packed = (quantize_kv_int4(x, cell.num_groups), torch.empty(0, dtype=torch.int32)) if cell.num_groups else None
        caches.append(packed or quantize_kv_fp8(x, FP8[arch]))
    (k, k_rows), (v, v_rows) = caches
    tables = None
    if cell.page_size:
        tables = torch.randperm(pages, generator=generator).to(torch.int32).view(cell.batch, -1).to(device)
    seqlens = torch.full((cell.batch,), cell.keys, dtype=torch.int32)
    return AttentionOperands(
        arch, q.to(device), k.to(device), k_rows.to(device), v.to(device), v_rows.to(device), seqlens.to(device),
        tables, cell.num_groups,
    )  # fmt: skip


def expected(parts: AttentionOperands) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 (out [B, 1, Hkv * G, D], log-sum-exp [B, Hkv * G, 1]) of the same bits."""
    k, v = (
        dequantize_kv_int4(words, parts.num_groups)
        if parts.num_groups
        else dequantize_kv_fp8(words, rows, FP8[parts.arch])
        for words, rows in ((parts.k, parts.k_rows), (parts.v, parts.v_rows))
    )
    if parts.block_tables is not None:
        k, v = (gather_pages(cache.flatten(0, 1), parts.block_tables, cache.shape[1]) for cache in (k, v))
    batch, mq, heads, d = parts.q.shape
    folded = parts.q.view(batch, mq, k.shape[2], heads // k.shape[2], d)
    out, lse = decode_attention(folded, k, v, parts.seqlens, parts.scale)
    return out.view(batch, mq, heads, d), lse.view(batch, heads, mq)
