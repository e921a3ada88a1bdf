"""The LDS queue of the skinny fp8 GEMM, clean under every order of waves; faults that remove a wait are in mutants/."""

from __future__ import annotations

import pytest
import torch
from helpers.fp8_skinny_cases import ARCH, ONE, exact, integers

from hipforge import archs, emulator
from hipforge.ops import fp8_skinny_gemm as ops
from hipforge.ops.fp8_skinny_gemm.space import Configuration

pytestmark = pytest.mark.gfx942


# Of one slot, so that both sides wait for each other at every block, and of several.
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("tile", [(8, 1, 2, 4), (8, 2, 5, 8), (8, 3, 2, 4), (16, 1, 2, 4), (32, 1, 2, 8)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_queue_under_every_order_of_waves(order: str, tile: tuple[int, ...], count: int) -> None:
    a, b = integers(11, 50, 1312)
    chosen = dict(zip(("op_m", "a_lanes", "b_lanes", "ops"), tile, strict=True))
    # As many slots as LDS has room for: of the widest tile one on gfx942.
    slots = archs.get(ARCH).lds_bytes // Configuration(*tile, 1, 1, 1, 1, 1).slot_bytes
    most = {"a_producers": slots * tile[1], "b_producers": slots * tile[2], "consumers": slots, "qsize": slots}
    waves = {name: min(count, limit) for name, limit in most.items()}
    for seed in range(2 if order == "random" else 1):
        with emulator.options(checks="all", wave_order=order, seed=seed, instruction_budget=5_000_000):
            got = ops.run_skinny_gemm(a, b, ONE, split_k=2, workgroups=2, **chosen, **waves)
        assert torch.equal(got, exact(a, b))
