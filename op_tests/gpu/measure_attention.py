"""Decode attention on this machine's GPU: µs in a graph beside reading the same bytes, and beside Triton's kernels.

    PYTHONPATH=src python op_tests/gpu/measure_attention.py [peers]

Neighbouring calls read different caches, which together exceed L2. The floor is a kernel that reads the cache's bytes
and computes nothing. The peer takes fp8 rows with a scale and a shift each, as our column *rows* does: both kernels of
:mod:`hipforge.ops.triton.decode_attention_fp8` in each configuration below, of which the fastest counts.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable

import torch

import hipforge
from hipforge.cli import read_floor
from hipforge.ops.triton import decode_attention_fp8 as peer
from hipforge.tuning import timing

PAGE = 64
# (B, Hkv, query heads per KV head, D, keys): a decode step's, from a quarter to one GB, then heads and groups.
SHAPES = (
    *((batch, kv_heads, 32 // kv_heads, 128, 2048) for kv_heads in (4, 8) for batch in (1, 8, 64)),
    (16, 8, 8, 128, 8192), (1, 8, 8, 128, 131072), (64, 8, 4, 128, 8192),
    *((64, 8, 4, d, 2048 * 128 // d) for d in (64, 192, 256)),
    *((64, 8, group, 128, 2048) for group in (1, 16)),
)  # fmt: skip
PEER_SPLITS, PEER_BLOCKS, PEER_WARPS, PEER_STAGES = (1, 2, 4, 16, 64), (32, 64), (1, 2, 4), (1, 3)


def bytes_of(shape: tuple[int, ...], kind: str) -> int:
    """Return the bytes of the elements of K and V."""
    batch, kv_heads, _, d, keys = shape
    return int(2 * batch * kv_heads * keys * d * {"half": 2, "int4": 0.5}.get(kind, 1))


class Caches:
    """Copies of the caches of a shape, which together exceed L2, and the call over copy i."""

    def __init__(self, shape: tuple[int, ...], kind: str) -> None:
        batch, kv_heads, group, d, keys = shape
        self.shape, self.kind, self.pages = shape, kind, batch * -(-keys // PAGE)
        self.q = torch.randn(batch, 1, kv_heads * group, d, device="cuda").bfloat16()
        self.seqlens = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
        self.copies = max(2, min(24, timing.copies_for(bytes_of(shape, kind))))
        self.sides = [(self._side(), self._side()) for _ in range(self.copies)]
        self.tables = torch.randperm(self.pages, device="cuda").view(batch, -1).int()
        words = torch.tensor([0.02, 0.0], dtype=torch.float16).view(torch.int32).item()  # scale and shift
        self.words = torch.full((self.pages, PAGE, kv_heads), words, dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(self.q)

    def _side(self) -> torch.Tensor:
        _, kv_heads, _, d, _ = self.shape
        if self.kind == "half":
            return torch.randn(self.pages, PAGE, kv_heads, d, device="cuda").bfloat16()
        if self.kind == "int4":
            nibbles = torch.randint(-(2**31), 2**31, (self.pages, PAGE, kv_heads, 4 + d // 8), device="cuda")
            nibbles[..., :4] = torch.tensor([0.02, -0.15], dtype=torch.float16).view(torch.int32).item()
            return nibbles.int()
        return torch.randint(0, 120, (self.pages, PAGE, kv_heads, d), device="cuda", dtype=torch.uint8)

    def call(self, i: int) -> object:
        """Attend over copy ``i``."""
        k, v = self.sides[i]
        if self.kind in ("fp8", "half"):
            return hipforge.decode_attention_fp8(self.q, k, v, self.tables, self.seqlens, out=self.out)
        _, kv_heads, group, d, _ = self.shape
        q = self.q.view(1, -1, kv_heads, group, d)

        def wide(x: torch.Tensor) -> torch.Tensor:
            return x.flatten(0, 1)[None, :, :, None].expand(-1, -1, -1, group, *x.shape[3:])

        sides = (wide(k), wide(v)) if self.kind == "int4" else (wide(k.view(torch.int32)), wide(v.view(torch.int32)))
        words = (None, None) if self.kind == "int4" else (wide(self.words), wide(self.words))
        return hipforge.decode_attention_splitk(
            q, *sides, *words, self.seqlens, self.tables, PAGE, num_groups=4 if self.kind == "int4" else None
        )

    def peer_us(self) -> tuple[float, str]:
        """Return the time of the fastest configuration of the Triton kernels, and which one it is."""
        batch, kv_heads, _, d, _ = self.shape

        def prepared(i: int, splits: int, config: peer.SplitConfig) -> Callable[[], object]:
            k, v = (side.view(torch.int32) for side in self.sides[i])
            problem = peer.Problem(
                self.q, k, self.words, v, self.words, self.seqlens, self.tables, d**-0.5, splits, "sm_90"
            )
            return peer.prepare(problem, config).run

        found = []
        for splits, block_n, warps, stages in itertools.product(PEER_SPLITS, PEER_BLOCKS, PEER_WARPS, PEER_STAGES):
            if not 64 <= batch * kv_heads * splits <= 4096:  # blocks: half of the multiprocessors, to 32 on each
                continue
            config = peer.SplitConfig(block_n, warps, num_stages=stages)
            runs = [prepared(i, splits, config) for i in range(self.copies)]
            us = timing.microseconds_per_call(lambda i, runs=runs: runs[i](), self.copies)
            found.append((us, f"{config} split_k={splits}"))
        return min(found)


def main() -> None:
    """Print a line for each shape and cache."""
    driver = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    sys.stdout.write(subprocess.run(driver, capture_output=True, text=True, check=False).stdout)
    sys.stdout.write("cache (B, Hkv, group, D, keys): us, TB/s, of the read floor, Triton over us\n")
    for shape, kind in itertools.product(SHAPES, ("fp8", "rows", "half", "int4")):
        if kind != "fp8" and shape[1:4] != (8, 4, 128):
            continue
        caches, size = Caches(shape, kind), bytes_of(shape, kind)
        us = timing.microseconds_per_call(caches.call, caches.copies)
        flat = [torch.cat([side.view(torch.uint8).flatten() for side in sides]) for sides in caches.sides]
        floor = read_floor.microseconds(flat)
        text = f"{kind:5} {shape!s:24} {us:8.1f} {size / us * 1e-6:6.2f} {floor / us:6.0%}"
        if kind == "rows" and "peers" in sys.argv[1:]:
            peer_us, config = caches.peer_us()
            text += f" {peer_us / us:6.2f} ({config})"
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
