"""The tiles of the skinny fp8 GEMM: every lane count and depth of each instruction, exact at every edge of the matrix.

Shapes around one tile: less than one row, column or block of k, one more, one less, and odd widths. The memory checker
holds each access to its tensor; the bytes loaded prove that nothing is read twice at the edges.
"""

from __future__ import annotations

import pytest
import torch
from helpers.fp8_skinny_cases import ARCH, FP8, ONE, exact, integers

from hipforge import emulator
from hipforge.jit import fleet
from hipforge.ops import fp8_skinny_gemm as ops
from hipforge.ops.fp8_skinny_gemm.space import OP_M, TILES, Configuration, refusal

pytestmark = pytest.mark.gfx942


def configuration(op_m, a_lanes, b_lanes, depth):
    """As many waves of each role as the tile's registers and the LDS of gfx942 let in, up to two."""
    for waves in (2, 1):
        chosen = Configuration(op_m, a_lanes, b_lanes, depth, waves, waves, waves, waves)
        if refusal(chosen, "gfx942", chosen.block_k) is None:
            return chosen
    raise AssertionError("one wave a role and one slot always fit")


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_edges_of_every_tile(tile, deterministic):
    c = configuration(*tile)
    shapes = [
        (1, 1, 32),
        (c.tile_m - 1, c.tile_n - 1, c.block_k + 32),
        (c.tile_m + 1, c.tile_n + 1, 3 * c.block_k - 32),
        (c.tile_m, 2 * c.tile_n + 3, c.block_k),
    ]
    for m, n, k in shapes:
        a, b = integers(m, n if deterministic else n + n % 2, k, seed=sum(tile))
        settings = {**c.parameters(), "split_k": min(2, c.blocks(k)), "workgroups": 3}
        with emulator.options(checks="all"), emulator.counters() as counted:
            got = ops.run_skinny_gemm(a, b, ONE, deterministic=deterministic, **settings)
        assert torch.equal(got, exact(a, b)), (m, n, k)
        assert counted.tensors["b"].loaded == b.numel() * -(-m // c.tile_m)
        assert counted.tensors["a"].loaded == a.numel() * -(-b.shape[1] // c.tile_n)
        assert counted.lds_bank_conflicts == 0


def test_every_variant_builds_within_its_limits():
    wanted = fleet.requests(["module_fp8_skinny_gemm_queue"], [ARCH], every_variant=True)
    outcomes = fleet.build_many(wanted, 2, lambda event: None)
    assert len(outcomes) == len(TILES) <= 12
    assert [outcome.planned for outcome in outcomes if outcome.status == "failed"] == []


@pytest.mark.parametrize("op_m", OP_M)
@pytest.mark.parametrize("deterministic", [True, False])
def test_poison_around_the_operands_is_never_read(op_m, deterministic):
    m, n, k, pitch = op_m - 3, 70, 608, 640
    rows, narrow = integers(m, n, k)
    around = torch.full((m * k + 64,), 0xFF, dtype=torch.uint8)  # NaN in e4m3fn, and -240 in e4m3fnuz
    around[32 : 32 + m * k] = rows.contiguous().view(torch.uint8).flatten()
    padded = torch.full((n + 2, pitch), 0xFF, dtype=torch.uint8)
    padded[1:-1, :k] = narrow.t().contiguous().view(torch.uint8)
    a, b = around[32 : 32 + m * k].view(FP8).view(m, k), padded.view(FP8)[1:-1, :k].t()
    with emulator.options(checks="all"), emulator.counters() as counted:
        got = ops.run_skinny_gemm(a, b, ONE, op_m=op_m, deterministic=deterministic)
    assert torch.equal(got, exact(rows, narrow))
    assert counted.tensors["b"].loaded == n * k


@pytest.mark.parametrize("op_m", OP_M)
def test_lanes_past_the_last_column_load_nothing_however_large_the_pitch(op_m):
    # 15 times this pitch is 2^32 plus an offset inside b: what wraps would be read.
    n, k, pitch = 2, 32, 301_989_888
    a, narrow = integers(1, n, k)
    b = torch.empty(pitch + k, dtype=torch.uint8).as_strided((k, n), (1, pitch)).view(FP8)
    b.copy_(narrow)
    with emulator.counters() as counted:
        got = ops.run_skinny_gemm(a, b, ONE, op_m=op_m)
    assert torch.equal(got, exact(a, narrow))
    assert counted.tensors["b"].loaded == n * k
