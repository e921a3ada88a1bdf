"""The plans of the grouped MX-FP8 kernels of sm_90, which need no GPU: what the default rule names, a kernel takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hipforge.errors import GuardError
from hipforge.ops.core.kernel import Kernel, best
from hipforge.ops.moe_gate_up import FUSED
from hipforge.ops.mxfp8_grouped_gemm import (
    family,
    mxfp8_grouped_pass_stream,
    mxfp8_grouped_row_stream,
    mxfp8_grouped_tile_stream,
    token,
)
from hipforge.ops.mxfp8_grouped_gemm.kernels import KERNELS, pass_stream, tile_stream
from hipforge.ops.mxfp8_grouped_gemm.kernels.row_stream import MOST_SLOTS, STREAM, loads, sharers_for
from hipforge.ops.mxfp8_grouped_gemm.kernels.tiles import TILES

HOPPER, UNITS = "sm_90", 132
PASSES, STREAMED = pass_stream.STREAM, tile_stream.STREAM


def problem(slots: int, experts: int, n: int, k: int) -> SimpleNamespace:
    return SimpleNamespace(experts=experts, n=n, k=k, slots=slots, key=(slots, n, k, 1, 0))


@given(
    st.integers(1, 100_000), st.integers(1, 512), st.integers(1, 20_000),
    st.integers(1, 300).map(lambda blocks: 32 * blocks),
)  # fmt: skip
def test_every_shape_has_a_default_and_every_candidate_is_accepted(slots: int, experts: int, n: int, k: int) -> None:
    cell = problem(slots, experts, n, k)
    assert best(KERNELS, cell, HOPPER, UNITS).kernel in (PASSES.name, STREAM.name, STREAMED.name, TILES.name)
    for kernel in (PASSES, STREAM, STREAMED, TILES):
        for us, configuration in kernel.default(cell, HOPPER, UNITS):
            assert us > 0 and kernel.needs(configuration, cell.key, HOPPER) is None
        if slots <= MOST_SLOTS or kernel in (STREAMED, TILES):
            for configuration in kernel.candidates(cell, HOPPER):
                assert kernel.needs(configuration, cell.key, HOPPER) is None


@pytest.mark.parametrize(
    ("slots", "n", "k", "kernel"),
    [
        (8, 1536, 2048, PASSES), (64, 1536, 2048, PASSES), (8, 2048, 768, PASSES), (64, 1536, 2880, STREAM),
        (64, 1536, 4352, STREAMED), (512, 3072, 4096, STREAMED), (2048, 3072, 4096, STREAMED),
        (64, 1544, 2048, STREAM), (4, 1536, 6144, STREAM), (1024, 1544, 2048, STREAM), (64, 2048, 768, STREAMED),
        (512, 1536, 2048, STREAMED), (2048, 1536, 2048, STREAMED), (4096, 2048, 768, STREAMED),
        (1 << 15, 1536, 2048, STREAMED), (1 << 15, 1536, 2880, TILES),
    ],
)  # fmt: skip
def test_slots_are_streamed_by_a_kernel_that_takes_them_or_in_tiles(slots: int, n: int, k: int, kernel: Kernel) -> None:
    choice = best(KERNELS, problem(slots, 128, n, k), HOPPER, UNITS)
    assert choice.kernel == kernel.name
    assert choice.configuration.get("rows") == (None if kernel is not STREAM else 16 if slots == 1024 else 8)
    if kernel is STREAMED:
        assert choice.configuration["slots"] == (16 if slots <= 512 else 32 if slots == 2048 else 48)
    assert choice.kernel in FUSED  # gate and up have their epilogue


@pytest.mark.parametrize(
    ("k", "passes", "sharers"),
    [
        (128, 50, 1), (256, 50, 1), (768, 50, 4), (1536, 50, 8), (2048, 50, 8), (4096, 50, 16), (768, 2, 4),
        (2048, 1, 16), (128, 1, 1),
    ],
)  # fmt: skip
def test_the_fewest_warps_with_two_steps_each_share_k(k: int, passes: float, sharers: int) -> None:
    assert pass_stream.sharers_for(k, passes) == sharers


@pytest.mark.parametrize(
    ("slots", "k", "sharers"), [(8, 768, 2), (4, 768, 4), (1, 768, 4), (8, 1536, 4), (8, 2048, 8), (2, 4096, 16)]
)
def test_a_team_has_one_expert_of_a_token_where_its_warps_have_room_for_k(slots: int, k: int, sharers: int) -> None:
    assert token.down_sharers(slots, k) == sharers


@pytest.mark.parametrize(
    ("n", "k", "passes"),
    [(1536, 128, True), (2048, 4096, True), (2048, 4608, False), (1536, 6144, False), (1544, 2048, False)],
)
def test_a_product_of_one_token_is_in_passes_up_to_a_k(
    n: int, k: int, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for of in ("gate_up", "down"):
        for name in (f"mxfp8_token_{of}_passes_out", f"mxfp8_token_{of}_out"):
            monkeypatch.setattr(token, name, lambda *given, name=name: called.append((name, given[-4:-1])))
    monkeypatch.setattr(token.devices, "current", lambda: SimpleNamespace(cu_count=lambda: UNITS))
    w, ids, x = torch.empty(1, 1, 1).expand(16, n, k), torch.arange(8), torch.empty(1)
    token.token_gate_up(x, x, w, x, ids)
    token.token_down(x, w, x, ids, x)
    assert [name for name, _ in called] == [
        f"mxfp8_token_{of}{'_passes' if passes else ''}_out" for of in ("gate_up", "down")
    ]
    for _, (tiles_of_w, sharers, blocks) in called:
        if passes:
            assert pass_stream.steps_refusal(k, sharers) is None and blocks == UNITS
        else:
            assert tiles_of_w in token.TILES


def test_what_passes_do_not_take_is_refused_with_the_reason() -> None:
    few = {"sharers": 2, "blocks": 132}
    assert PASSES.needs(few, (8, 64, 768), HOPPER) is None
    assert "N of a multiple of 16" in PASSES.needs(few, (8, 72, 768), HOPPER)
    assert "M of at most 2048" in PASSES.needs(few, (4096, 64, 768), HOPPER)
    assert "more sharers" in PASSES.needs(few, (8, 64, 1024), HOPPER)
    for k in (96, 4224, 6144):
        assert "K of a multiple of 128, at most 4096" in PASSES.needs({**few, "sharers": 16}, (8, 64, k), HOPPER)
    with pytest.raises(GuardError, match="sharers must be 1, 2, 4, 8 or 16; got 3"):
        mxfp8_grouped_pass_stream(*[torch.empty(0)] * 8, 1, 1, 64, sharers=3)


def test_what_streams_tiles_has_room_for_x_and_two_stages_of_w_or_says_why_not() -> None:
    few = {"slots": 32, "blocks": 132}
    assert STREAMED.needs(few, (8, 64, 768), HOPPER) is None
    assert "N of a multiple of 16" in STREAMED.needs(few, (8, 72, 768), HOPPER)
    assert "K of a multiple of 128" in STREAMED.needs(few, (8, 64, 800), HOPPER)
    for slots, most in ((16, 7168), (32, 4096), (48, 2048)):
        assert STREAMED.needs({**few, "slots": slots}, (4096, 64, most), HOPPER) is None
        assert "X leaves no room for W" in STREAMED.needs({**few, "slots": slots}, (4096, 64, most + 1024), HOPPER)
    assert "X leaves no room for W" in STREAMED.needs(few, (1 << 22, 64, 2048), HOPPER)
    with pytest.raises(GuardError, match="slots must be 16, 32 or 48; got 64"):
        mxfp8_grouped_tile_stream(*[torch.empty(0)] * 8, 1, 1, 64, slots=64)


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


@pytest.mark.parametrize(
    ("hidden", "inner", "scoring", "has_bias", "fault"),
    [
        (2048, 768, "softmax", False, None), (4096, 1536, "sigmoid", True, None),
        (2048, 768, "softmax", True, "sigmoid"),
        (6144, 768, "softmax", False, "got H=6144"), (2048, 4224, "softmax", False, "I=4224"),
    ],
)  # fmt: skip
def test_products_that_choose_experts_are_both_in_passes(
    hidden: int, inner: int, scoring: str, has_bias: bool, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = token.choice_refusal(hidden, inner, scoring, has_bias)
    assert refusal is None if fault is None else fault in str(refusal)
    between = token.new_inner(9, hidden, inner, torch.device("cpu"))
    if max(hidden, inner) <= pass_stream.MOST_K:
        assert between.shape == (9, inner) and between.dtype == torch.float32
    else:
        assert between.shape == (9, 2 * inner) and between.dtype == torch.bfloat16
    if fault is not None:
        return
    called = []
    for name in ("mxfp8_token_choose_gate_up_out", "mxfp8_token_choose_down_out"):
        at = 1 if "gate_up" in name else 4  # where the experts are left, and found
        monkeypatch.setattr(token, name, lambda *on, name=name, at=at: called.append((name, on[at], on[-8:-3])))
    monkeypatch.setattr(token.devices, "current", lambda: SimpleNamespace(cu_count=lambda: UNITS))
    choice = token.Choice(torch.empty(1, 16), 8, scoring, torch.empty(16), scale=2.5, shared_experts=1)
    x, sizes = torch.empty(1), ((2 * inner, hidden), (hidden, inner))
    w1, w2 = (torch.empty(1, 1, 1).expand(17, *size) for size in sizes)
    assert token.token_gate_up(x, x, w1, x, choice).shape == (9, inner)
    assert token.token_down(between, w2, x, choice).shape == (1, hidden)
    options = 8, 1, scoring == "sigmoid", True, 2.5
    assert choice.ids.shape == (9,) and choice.ids.dtype == torch.int32
    assert called == [(f"mxfp8_token_choose_{of}_out", choice.ids, options) for of in ("gate_up", "down")]
