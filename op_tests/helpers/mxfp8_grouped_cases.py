"""Data and an oracle for the MoE grouped GEMM, independent of hipforge's own reference and of its sorting."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from helpers.mxfp8_cases import BLOCK, Operands, dequantize, integers
from hipforge.ops.grouped_gemm_mxfp8 import smallm_mxfp8_moe_grouped_gemm

UNTOUCHED = -123.0
ODD_TILES = 6  # entries of a tile, which only torch takes: the kernel's are multiples of 4
_MAP_NORESERVE = 0x4000  # Linux; Python's mmap names it only from 3.13 on


def sparse_bytes(*shape: int) -> torch.Tensor:
    """Zeroed uint8 of any size whose pages take memory only where something is written."""
    count = 1
    for extent in shape:
        count *= extent
    region = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(region, dtype=torch.uint8).view(shape)


def sort_slots(
    experts: Sequence[int], block_m: int, num_experts: int, pad: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tiles of slots whose expert is ``experts[slot]``, written one by one; buffers have just the length needed."""
    slots = len(experts)
    entries: list[int] = []
    tiles: list[int] = []
    for expert in range(num_experts):
        mine = [slot for slot, owner in enumerate(experts) if owner == expert]
        mine += [slots if pad is None else pad] * (-len(mine) % block_m)
        entries += mine
        tiles += [expert] * (len(mine) // block_m)
    as_int32 = [torch.tensor(values, dtype=torch.int32) for values in (entries, tiles, [len(entries)])]
    return as_int32[0], as_int32[1], as_int32[2]


@dataclass(frozen=True)
class Moe:
    """One problem as raw bytes: a [M_act, K], w [E, N, K], their scales, the sorted slots and who owns each slot."""

    a: torch.Tensor
    a_scale: torch.Tensor
    w: torch.Tensor
    w_scale: torch.Tensor
    owners: tuple[int, ...]  # expert of each slot; -1: none
    a_div: int
    block_m: int
    weights: torch.Tensor | None = None
    index: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(default=())  # type: ignore[assignment]

    @property
    def slots(self) -> int:
        return len(self.owners)

    def sorted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.index or sort_slots(self.owners, self.block_m, self.w.shape[0])

    def but(self, **changes: object) -> Moe:
        return replace(self, **changes)  # type: ignore[arg-type]

    def out(self) -> torch.Tensor:
        return torch.full((self.slots, self.w.shape[1]), UNTOUCHED, dtype=torch.bfloat16)

    def arguments(self, out: torch.Tensor) -> list[object]:
        """Return the raw op's positional arguments, up to block_m."""
        experts, n, k = self.w.shape
        return [
            self.a, self.a_scale, self.w, self.w_scale, *self.sorted(), out, experts, n, k, self.slots,
            self.a.shape[0], self.a_div, self.block_m,
        ]  # fmt: skip


def run(case: Moe, block_n: int = 8) -> torch.Tensor:
    """Run the raw op into an output full of a value that no test expects."""
    out = case.out()
    returned = smallm_mxfp8_moe_grouped_gemm(*case.arguments(out), case.weights, block_n)  # type: ignore[arg-type]
    assert returned is out
    return out


def oracle(case: Moe, elsewhere: float = UNTOUCHED) -> torch.Tensor:
    """Each slot's row in float64; ``elsewhere`` fills the rows of slots without an expert here."""
    want = torch.full((case.slots, case.w.shape[1]), elsewhere, dtype=torch.float64)
    a = dequantize(case.a, case.a_scale)
    for expert in sorted(set(case.owners)):
        if not 0 <= expert < case.w.shape[0]:
            continue
        w = dequantize(case.w[expert], case.w_scale[expert])
        for slot, owner in enumerate(case.owners):
            if owner == expert:
                want[slot] = w @ a[slot // case.a_div]
                if case.weights is not None:
                    want[slot] *= case.weights[slot].double()
    return want


def random_owners(slots: int, experts: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, experts, (slots,), generator=generator).tolist())


def exact(
    owners: Sequence[int], experts: int, n: int, k: int, a_div: int = 1, block_m: int = 64, weighted: bool = False,
    seed: int = 0, scales: tuple[int, int] = (125, 129),
) -> Moe:  # fmt: skip
    """Integers with distinct scales, whose sums and (integer) weighted sums are exact in float32."""
    slots = len(owners)
    data: Operands = integers(-(-slots // a_div), experts * n, k, seed, scales)
    weights = None
    if weighted:
        # Powers of two and their negatives: the product is exact, so there is one rounding, to bf16.
        generator = torch.Generator().manual_seed(seed + 1)
        weights = torch.exp2(torch.randint(-3, 4, (slots,), generator=generator).float())
        weights *= torch.where(torch.rand(slots, generator=generator) < 0.5, -1.0, 1.0)
    return Moe(
        data.xq, data.xs, data.wq.view(experts, n, k), data.ws.view(experts, n, k // BLOCK), tuple(owners), a_div,
        block_m, weights,
    )  # fmt: skip
