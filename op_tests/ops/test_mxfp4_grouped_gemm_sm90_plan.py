"""The plans of the grouped MXFP4 kernels of sm_90, which need no GPU: defaults, limits, calls of several launches."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hipforge.ops.core.kernel import best
from hipforge.ops.mxfp4_grouped_gemm import FUSED, streams
from hipforge.ops.mxfp4_grouped_gemm.family import FAMILY, KERNELS, Problem
from hipforge.ops.mxfp8_grouped_gemm.kernels import row_stream

HOPPER, UNITS = "sm_90", 132


def problem(slots: int, experts: int, n: int, k: int) -> SimpleNamespace:
    return SimpleNamespace(experts=experts, n=n, k=k, slots=slots, key=(slots, n, k, 1, 0))


@given(
    st.integers(1, 100_000), st.integers(1, 512), st.integers(1, 20_000),
    st.integers(1, 300).map(lambda blocks: 32 * blocks),
)  # fmt: skip
def test_every_shape_has_a_default_and_every_candidate_is_accepted(slots: int, experts: int, n: int, k: int) -> None:
    cell = problem(slots, experts, n, k)
    assert best(KERNELS, cell, HOPPER, UNITS).kernel in FUSED
    for kernel in streams.KERNELS:
        for us, configuration in kernel.default(cell, HOPPER, UNITS):
            assert us > 0 and kernel.needs(configuration, cell.key, HOPPER) is None
        if slots <= streams.MOST_GROUPS or kernel is streams.ROWS:
            for configuration in kernel.candidates(cell, HOPPER):
                assert kernel.needs(configuration, cell.key, HOPPER) is None


@pytest.mark.parametrize(
    ("slots", "n", "k", "kernel"),
    [
        (4, 5760, 2880, streams.PASSES), (256, 2880, 2880, streams.PASSES), (2048, 2880, 2880, streams.PASSES),
        (4, 4096, 6144, streams.PASSES), (4, 5768, 2880, streams.ROWS), (4, 5760, 6208, streams.ROWS),
        (4, 5760, 2848, streams.ROWS), (2049, 2880, 2880, streams.ROWS),
    ],
)  # fmt: skip
def test_passes_are_for_what_their_copies_take(slots: int, n: int, k: int, kernel) -> None:
    choice = best(KERNELS, problem(slots, 32, n, k), HOPPER, UNITS)
    assert choice.kernel == kernel.name
    if kernel is streams.PASSES:
        assert math.ceil(k / 128) <= 3 * choice.configuration["sharers"]


def test_passes_say_what_they_take() -> None:
    for sharers, k, needs in (
        (16, 2848, "K of a multiple of 64, at most 6144"), (16, 6208, "K of a multiple of 64, at most 6144"),
        (4, 2880, "more sharers: a warp keeps 3 steps of K, of 128"), (8, 2880, None),
    ):  # fmt: skip
        assert streams.PASSES.needs({"sharers": sharers, "blocks": UNITS}, (4, 5760, k, 4, 0), HOPPER) == needs


@example(60_000, 32, 64, 16)
@example(40_000, 8, 8, 8)
@example(30_000, 4, 100, 8)
@given(st.integers(1, 60_000), st.integers(1, 40), st.sampled_from((8, 16, 64, 100)), st.sampled_from(row_stream.ROWS))
def test_launches_have_every_tile_once_and_no_more_groups_than_a_block_lists(
    slots: int, experts: int, block_m: int, rows: int
) -> None:
    tiles = -(-slots // block_m) + experts
    ids = torch.arange(tiles * block_m, dtype=torch.int32)
    padded = torch.tensor([(tiles - 1) * block_m], dtype=torch.int32)
    operands = (None, None, None, None, ids, torch.arange(tiles, dtype=torch.int32), padded, None)
    parts = list(streams.launches(operands, slots, block_m, rows))
    assert torch.equal(torch.cat([part[4] for part in parts]), ids)
    assert torch.equal(torch.cat([part[5] for part in parts]), torch.arange(tiles, dtype=torch.int32))
    first = 0
    for part in parts:
        here = part[4].numel() // block_m
        assert min(here * -(-block_m // rows), slots) <= streams.MOST_GROUPS
        used = min(here, max(0, -(-int(part[6]) // block_m)))  # as the kernel counts tiles in use
        assert used == min(here, max(0, tiles - 1 - first))
        first += here


def test_a_tile_of_more_groups_than_a_block_lists_is_left_to_torch() -> None:
    def reason(block_m: int, arch: str) -> str | None:
        return FAMILY.envelope(Problem(4, 8, 64, 64, 4, block_m, 1, False, torch.bfloat16, torch.device("cpu")), arch)

    assert reason(16384, HOPPER) is None and reason(16388, "gfx950") is None
    assert reason(16388, HOPPER) == "block_m must be at most 16384; got 16388"
    ids, tiles = torch.zeros(2 * 16384, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    given = (None, None, None, None, ids, tiles, torch.tensor([32768]), None)
    assert [len(part[5]) for part in streams.launches(given, 30_000, 16384, 8)] == [1, 1]


def test_a_batch_invariant_choice_is_that_of_any_number_of_slots() -> None:
    assert FAMILY.invariant is not None
    choices = {
        (choice.kernel, tuple(choice.configuration.items()))
        for slots in (1, 7, 300, 5000)
        for choice in [FAMILY.invariant(problem(slots, 32, 5760, 2880), HOPPER, UNITS)]
    }
    assert choices == {(streams.ROWS_KERNEL, (("rows", 8), ("sharers", 8), ("blocks", UNITS)))}
    assert FAMILY.invariant(problem(7, 32, 5760, 2880), "gfx950", 256).kernel == "mxfp4_grouped_split"  # as before
