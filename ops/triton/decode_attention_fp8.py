"""Decode attention over a packed fp8 cache in Triton: what the HIP kernel is compared with.

The split-K kernel in two versions. ``resident``, the straightforward one, loads and dequantises K and V of a whole
block before its first product and holds them in registers. ``streaming`` loads, converts and multiplies one part of a
row at a time, and V only after the weights are computed. Both dequantise to q's dtype (fp8 * scale + shift, in
float32), so K, V and the weights are rounded before the products.

Triton is imported on first use, never with this module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hipforge.errors import GuardError
from hipforge.ops.triton.launch import Bind, Launch, power_of_two, unavailable

__all__ = ["RESIDENT", "RESIDENT_64", "STREAMING", "Call", "Launch", "Problem", "SplitConfig", "prepare", "unavailable"]

BLOCK_M = 16
MERGE_STEP = 8  # splits that the merge kernel loads at a time
LOG2_E = 1.4426950408889634
FNUZ_ARCH = "gfx942"  # whose fp8 has no negative zero; the others read e4m3fn


@dataclass(frozen=True)
class SplitConfig:
    """Keys of a block, parts in which a row of D elements is processed, and launch parameters of the split kernel."""

    block_n: int
    num_warps: int
    parts: int = 1
    resident: bool = True
    num_stages: int = 1

    def __str__(self) -> str:
        kind = "resident" if self.resident else "streaming"
        return f"{kind} {BLOCK_M}x{self.block_n} warps={self.num_warps} parts={self.parts} stages={self.num_stages}"


# Such kernels take 128 keys for the longest sequences; a block of 64 needs half the registers.
RESIDENT = SplitConfig(block_n=128, num_warps=1)
RESIDENT_64 = SplitConfig(block_n=64, num_warps=1)
STREAMING = SplitConfig(block_n=64, num_warps=1, parts=4, resident=False)


@dataclass(frozen=True)
class Problem:
    """Operands of one call, contiguous.

    Attributes:
        q: bfloat16 or float16 [B, Mq, Hkv * group, D].
        k: int32 words [pages, page_size, Hkv, D/4]; without block tables a page per sequence.
        k_rows: int32 [pages, page_size, Hkv]: float16 scale in the low half, float16 shift in the high half.
        v: like ``k``.
        v_rows: like ``k_rows``.
        seqlens: int32 [B].
        block_tables: int32 [B, max_pages], or None.
        scale: factor of q.k.
        split_k: parts of a sequence's keys.
        arch: whose fp8 the words hold.
    """

    q: torch.Tensor
    k: torch.Tensor
    k_rows: torch.Tensor
    v: torch.Tensor
    v_rows: torch.Tensor
    seqlens: torch.Tensor
    block_tables: torch.Tensor | None
    scale: float
    split_k: int
    arch: str

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[2] // self.k.shape[2]


@dataclass(frozen=True)
class Call:
    """Both launches of a call, and the tensors that they fill: out like q, float32 lse [B, Hq, Mq]."""

    split: Launch
    merge: Launch
    out: torch.Tensor
    lse: torch.Tensor

    def run(self, bind: Bind | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch both, as :meth:`Launch.run` does, and return (out, lse)."""
        self.split.run(bind)
        self.merge.run(bind)
        return self.out, self.lse


def prepare(problem: Problem, config: SplitConfig) -> Call:
    """Return the launches for ``problem``, with outputs and workspaces allocated.

    Raises:
        GuardError: pages do not hold whole blocks.
    """
    from hipforge.ops.triton.decode_attention_fp8_kernels import decode_merge_kernel, decode_split_kernel

    q, tables = problem.q, problem.block_tables
    batch, mq, heads, d = q.shape
    page_size, kv_heads = problem.k.shape[1:3]
    if tables is not None and page_size % config.block_n:
        raise GuardError(f"page_size must be a multiple of block_n = {config.block_n}; got {page_size}")
    splits, rows = problem.split_k, problem.group * mq
    partial = torch.empty((splits, batch, heads * mq, d), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((splits, batch, heads * mq), dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, mq), dtype=torch.float32, device=q.device)
    shape = (kv_heads, problem.group, mq)
    split = Launch(
        decode_split_kernel,
        (-(-rows // BLOCK_M), batch * kv_heads, splits),
        (
            q, problem.k, problem.k_rows, problem.v, problem.v_rows, problem.seqlens,
            # Not read where a sequence is one page; a separate tensor, so that counters would show reads.
            torch.empty(1, dtype=torch.int32, device=q.device) if tables is None else tables,
            partial, partial_lse, problem.scale * LOG2_E, *shape,
            1 if tables is None else tables.shape[1], page_size,
        ),
        {
            "FNUZ": problem.arch == FNUZ_ARCH, "PAGED": tables is not None, "RESIDENT": config.resident,
            "PARTS": config.parts, "D": d, "BLOCK_M": BLOCK_M, "BLOCK_N": config.block_n,
            "num_warps": config.num_warps, "num_stages": config.num_stages,
        },
    )  # fmt: skip
    merge = Launch(
        decode_merge_kernel,
        (rows, batch * kv_heads, 1),
        (partial, partial_lse, out, lse, *shape, splits),
        {"D": d, "BLOCK_S": power_of_two(splits), "STEP": MERGE_STEP, "num_warps": 1},
    )
    return Call(split, merge, out, lse)
