"""The plans of the grouped MX-FP8 kernels of sm_90, which need no GPU: what the default rule names, a kernel takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hipforge.errors import GuardError
from hipforge.ops.core.kernel import best
from hipforge.ops.moe_gate_up import FUSED
from hipforge.ops.mxfp8_grouped_gemm import family, mxfp8_grouped_row_stream
from hipforge.ops.mxfp8_grouped_gemm.kernels import KERNELS
from hipforge.ops.mxfp8_grouped_gemm.kernels.row_stream import MOST_SLOTS, STREAM, loads, sharers_for
from hipforge.ops.mxfp8_grouped_gemm.kernels.tiles import TILES

HOPPER, UNITS = "sm_90", 132


def problem(slots: int, experts: int, n: int, k: int) -> SimpleNamespace:
    return SimpleNamespace(experts=experts, n=n, k=k, slots=slots, key=(slots, n, k, 1, 0))


@given(
    st.integers(1, 100_000), st.integers(1, 512), st.integers(1, 20_000),
    st.integers(1, 300).map(lambda blocks: 32 * blocks),
)  # fmt: skip
def test_every_shape_has_a_default_and_every_candidate_is_accepted(slots: int, experts: int, n: int, k: int) -> None:
    cell = problem(slots, experts, n, k)
    assert best(KERNELS, cell, HOPPER, UNITS).kernel in (STREAM.name, TILES.name)
    for kernel in (STREAM, TILES):
        for us, configuration in kernel.default(cell, HOPPER, UNITS):
            assert us > 0 and kernel.needs(configuration, cell.key, HOPPER) is None
        if slots <= MOST_SLOTS or kernel is TILES:
            for configuration in kernel.candidates(cell, HOPPER):
                assert kernel.needs(configuration, cell.key, HOPPER) is None


@pytest.mark.parametrize(("slots", "rows"), [(8, 8), (64, 8), (1024, 16), (1 << 15, None)])
def test_few_slots_of_an_expert_stream_and_many_take_tiles(slots: int, rows: int | None) -> None:
    choice = best(KERNELS, problem(slots, 128, 1536, 2048), HOPPER, UNITS)
    assert choice.configuration.get("rows") == rows
    assert (choice.kernel == TILES.name) == (rows is None)
    assert choice.kernel in FUSED  # gate and up have their epilogue


@pytest.mark.parametrize(
    ("passes", "k", "rows", "sharers"),
    [
        (6, 2048, 8, 8),
        (50, 768, 8, 2),
        (50, 2048, 16, 4),
        (50, 6144, 16, 8),
        (50, 384, 8, 1),
        (50, 2880, 8, 8),
        (2, 768, 8, 4),
        (1, 128, 8, 1),
    ],
)
def test_as_many_warps_share_k_as_have_steps_of_their_own(passes: float, k: int, rows: int, sharers: int) -> None:
    assert sharers_for(passes, k, rows) == sharers


def test_loads_are_those_of_many_routings() -> None:
    generator = torch.Generator().manual_seed(0)
    for slots, experts, rows in ((24, 16, 8), (200, 16, 8), (700, 32, 16), (5000, 32, 32)):
        counts = torch.stack(
            [torch.randint(experts, (slots,), generator=generator).bincount(minlength=experts) for _ in range(300)]
        )
        seen = (-(-counts // rows)).sum(1).double().mean().item()
        assert loads(slots, experts, rows) == pytest.approx(seen, rel=0.02)


def test_batch_invariance_takes_one_order_of_sums_for_every_number_of_slots() -> None:
    chosen = [family.invariant(problem(slots, 128, 1536, 2048), HOPPER, UNITS) for slots in (1, 64, 1 << 15)]
    assert len({(choice.kernel, *choice.configuration.items()) for choice in chosen}) == 1


def test_what_a_kernel_does_not_take_is_refused_with_the_reason() -> None:
    few = {"rows": 16, "sharers": 16, "blocks": 132}
    assert "M of at most 2048" in STREAM.needs(few, (4096, 64, 64), HOPPER)
    assert "N of at most" in STREAM.needs(few, (8, 1 << 24, 64), HOPPER)
    assert "K of at most" in TILES.needs({"slots": 32}, (8, 64, 1 << 25), HOPPER)
    nothing = torch.empty(0)
    with pytest.raises(GuardError, match="rows must be 8 or 16; got 24"):
        mxfp8_grouped_row_stream(*[nothing] * 8, 1, 1, 64, rows=24)
