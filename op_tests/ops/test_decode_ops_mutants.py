"""The checks of RoPE, gating, slots, sums and the router on kernels with one deliberate mistake each: all notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.fused_fp8_cases import assert_same
from helpers.gating_cases import by_hand, well_apart
from helpers.planted_faults import planted
from helpers.rope_cases import case, expected

import hipforge.csrc
from hipforge.errors import EmulatorFault
from hipforge.ops import moe_align, moe_combine, reference, rope_and_cache, router_gemm, topk_gating

CSRC = Path(hipforge.csrc.__file__).parent


def rope_is_right() -> None:
    given = case("fp8", exact=True)
    copy = given.copy()
    q = rope_and_cache.rope_and_cache(*copy.tensors(), **copy.options)
    want, written = expected(given)
    assert_same(q, want)
    for got, exact in zip(copy.written(), written, strict=True):
        assert torch.equal(got.view(torch.uint8), exact.view(torch.uint8))


def gating_is_right() -> None:
    logits = well_apart((3, 96), 0)
    logits[:, 5] = logits[:, 70] = 9.0
    assert torch.equal(topk_gating.topk_gating(logits, 4)[1], by_hand(logits, 4))


def slots_are_right() -> None:
    # 800 slots: a wave has more than the 64 that it takes at a time.
    ids = torch.randint(-1, 7, (200, 4), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    got, want = moe_align.moe_align_block_size(ids, 4, 6), reference.moe_align_block_size(ids, 4, 6)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def sums_are_right() -> None:
    rows, ids = torch.ones(6, 64).bfloat16(), torch.tensor([[0, -1, 2], [1, 5, 0]])
    assert moe_combine.moe_combine(rows, ids=ids, num_experts=3)[:, 0].tolist() == [2.0, 2.0]


def logits_are_right() -> None:
    x, w = torch.ones(3, 264).bfloat16(), torch.arange(5.0)[:, None].expand(-1, 264).contiguous()
    assert torch.equal(router_gemm.router_gemm(x, w), torch.arange(5.0).expand(3, -1) * 264)


@dataclass(frozen=True)
class Mutant:
    """A line of an op's source, what takes its place, and what must notice."""

    home: ModuleType
    stub: str
    source: str
    line: str
    becomes: str
    check: Callable[[], None]
    variants: dict[str, list[str]]
    unit: str | None = None  # what is compiled, for a mistake in a header


ROPE, ROUTING = "rope_and_cache/rotation.h", "moe_routing/"
MUTANTS = {
    "sine_of_the_wrong_sign": Mutant(
        rope_and_cache, "rope_and_cache_out", ROPE, "(first ? -turned : turned)", "(first ? turned : -turned)",
        rope_is_right, {"HF_INPUT": ["bf16"], "HF_CACHE": ["fp8"]}, "rope_and_cache/rope_and_cache.cu",
    ),
    "ties_to_the_higher_index": Mutant(
        topk_gating, "topk_gating_out", ROUTING + "topk_gating.cu", "for (int j = kPerLane; j-- > 0;) {",
        "for (int j = 0; j < kPerLane; ++j) {", gating_is_right, {"HF_INPUT": ["f32"]},
    ),
    "slots_of_a_wave_counted_once": Mutant(
        moe_align, "moe_align_block_size_out", ROUTING + "moe_align.cu",
        "if (rank == 0) own[expert] = at + hf::dev::lane_count(alike);",
        "if (rank == 0) own[expert] = at + 1;", slots_are_right, {},
    ),
    "experts_past_the_end_summed": Mutant(
        moe_combine, "moe_combine_out", ROUTING + "moe_combine.cu", "(a.experts < 0 || id < a.experts)", "true",
        sums_are_right, {"HF_INPUT": ["bf16"], "HF_OUTPUT": ["bf16"]},
    ),
    "one_wave_left_out": Mutant(
        router_gemm, "router_gemm_out", ROUTING + "amd/router_kernel.h", "for (int i = 0; i < kWaves; ++i) sum +=",
        "for (int i = 1; i < kWaves; ++i) sum +=", logits_are_right, {"HF_INPUT": ["bf16"], "HF_WEIGHT": ["f32"]},
        unit=ROUTING + "router_gemm.cu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.check()
    shipped = getattr(mutant.home, mutant.stub)
    entry = planted(
        tmp_path / name, shipped, mutant.source, mutant.line, mutant.becomes, unit=mutant.unit, variants=mutant.variants
    )
    monkeypatch.setattr(mutant.home, mutant.stub, entry)
    with pytest.raises((AssertionError, EmulatorFault)):
        mutant.check()
