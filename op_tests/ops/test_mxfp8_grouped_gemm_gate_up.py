"""Gate and up of a MoE layer with SwiGLU and MX quantisation in the GEMM's epilogue, on gfx950 and on gfx942."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.mxfp8_cases import SCALE_NAN
from helpers.mxfp8_grouped_cases import Moe, exact

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops import moe_gate_up
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.gate_up_split import split_of
from hipforge.ops.moe_gate_up import grouped_swiglu_mxfp8, split_workspace
from hipforge.ops.mxfp8_grouped_gemm import mxfp8_grouped_split

pytestmark = pytest.mark.gfx942

ACTIVATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"alpha": 1.702, "beta": 1.0, "limit": 7.0},
    {"alpha": 1.702, "beta": 1.0, "limit": 3.0, "interleaved": True},
)
OWNERS = (*(1,) * 19, 3, *(4,) * 3, 0, 0)  # a tile of 20 with more than 16 slots; experts with one and with none


def problem(k: int, inner: int = 64, a_div: int = 1, block_m: int = 20) -> Moe:
    own = fp8_dtypes("cpu")[0]
    case = exact(OWNERS, experts=6, n=2 * inner, k=k, a_div=a_div, block_m=block_m)
    return case.but(a=case.a.view(own), w=case.w.view(own))


def arguments(case: Moe) -> tuple[Any, ...]:
    return case.a, case.a_scale, case.w, case.w_scale, *case.sorted()


def bias_of(case: Moe) -> torch.Tensor:
    return torch.randn(case.w.shape[:2], generator=torch.Generator().manual_seed(3))


def separately(case: Moe, bias: torch.Tensor | None, **activation: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a GEMM with its own tests and the launch for SwiGLU and quantisation make, in two launches."""
    gate_up = torch.zeros(case.slots, case.w.shape[1], dtype=torch.bfloat16)
    mxfp8_grouped_split(*arguments(case), gate_up, case.slots, case.a_div, case.block_m, None, bias, waves=2)
    return hipforge.swiglu_mxfp8(gate_up, **activation)


def same(case: Moe, bias: torch.Tensor | None = None, **activation: Any) -> None:
    with emulator.counters() as counted:
        q, scales = grouped_swiglu_mxfp8(
            *arguments(case), case.slots, case.block_m, case.a_div, bias=bias, **activation
        )
    assert [launch.name for launch in counted.kernels if "gate_up" in launch.name] and counted.launches == 1
    assert not counted.scratch_bytes
    want_q, want_scales = separately(case, bias, **activation)
    assert torch.equal(scales, want_scales)
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))


# The products are integers whose sums are exact, so that the order of additions cannot tell the two apart.
# 2880: gpt-oss.
@pytest.mark.parametrize("order", ("forward", "reverse", "random"))
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=("plain", "minimax", "gpt_oss"))
@pytest.mark.parametrize("k", (32, 96, 768, 1056, 2880))
def test_one_launch_gives_the_bits_of_two(k: int, activation: dict[str, Any], order: str) -> None:
    case = problem(k, a_div=2)
    with emulator.options(checks="all", wave_order=order):
        same(case, **activation)
        same(case, bias_of(case), **activation)


@pytest.mark.parametrize("k", (96, 1056))
def test_turns_of_one_instruction_change_nothing(k: int) -> None:
    with emulator.options(checks="all", quantum=1):
        same(problem(k), alpha=1.702, beta=1.0, limit=7.0)


@pytest.mark.parametrize("inner", (32, 96, 160))
@pytest.mark.parametrize("block_m", (4, 64, 128))
def test_every_width_and_size_of_tile_gives_the_same(inner: int, block_m: int) -> None:
    same(problem(160, inner, block_m=block_m))


def test_a_nan_scale_reaches_exactly_its_blocks() -> None:
    case = problem(1056)
    case.w_scale[1, 40, 20] = SCALE_NAN  # expert 1's gate of result 40, in the second block of 32
    case.a_scale[23, 4] = SCALE_NAN  # a slot of expert 0
    same(case)
    _, scales = grouped_swiglu_mxfp8(*arguments(case), case.slots, case.block_m, 1)
    nan = (scales == SCALE_NAN).nonzero().tolist()
    assert nan == [*([slot, 1] for slot in range(19)), [23, 0], [23, 1]]


def test_rows_of_tiles_elsewhere_are_left_alone() -> None:
    case = problem(96)
    ids, experts, padded = case.sorted()
    experts[experts == 1] = -1
    q, scales = torch.full((25, 64), 9, dtype=torch.uint8), torch.full((25, 2), 9, dtype=torch.uint8)
    raw(case.but(index=(ids, experts, padded)), q, scales)
    assert (q[:19] == 9).all() and (scales[:19] == 9).all() and (scales[19:] != 9).all()


def raw(
    case: Moe, q: torch.Tensor, scales: torch.Tensor, parts: int = 1, rows: int = 16, groups: int = 1,
    workspace: torch.Tensor | None = None, bias: torch.Tensor | None = None, interleaved: bool = False,
) -> None:  # fmt: skip
    activation = 1.0, 0.0, float("inf"), interleaved
    moe_gate_up.mxfp8_gate_up_out(
        q.view(fp8_dtypes("cpu")[0]), scales, *arguments(case), bias, *case.w.shape, case.slots, case.a.shape[0],
        case.a_div, case.block_m, *activation, workspace, rows, parts, groups,
    )  # fmt: skip


def test_what_the_kernel_does_not_take_is_refused() -> None:
    case = problem(96)
    q, scales = torch.zeros(25, 64, dtype=torch.uint8), torch.zeros(25, 2, dtype=torch.uint8)
    with pytest.raises(GuardError, match="parts must be 1 or 2; got 4"):
        raw(case, q, scales, parts=4)
    with pytest.raises(GuardError, match="groups must be 1, 2 or 4; got 8"):
        raw(case, q, scales, groups=8)
    with pytest.raises(GuardError, match=r"needs a workspace: float32 \[6500\]; got None"):
        raw(case, q, scales, groups=2)
    with pytest.raises(GuardError, match=r"workspace must be float32 \[6500\] or longer; got float32 \[6499\]"):
        raw(case, q, scales, groups=2, workspace=torch.zeros(6499))
    with pytest.raises(GuardError, match="out is written and must not share memory with workspace"):
        workspace = torch.zeros(6500)
        raw(case, workspace.view(torch.uint8)[: q.numel()].view(q.shape), scales, groups=2, workspace=workspace)
    with pytest.raises(GuardError, match=r"HF_ROWS.*48"):
        raw(case, q, scales, rows=48)
    with pytest.raises(GuardError, match=r"out must be contiguous float8_e4m3fn(uz)? \[25, 64\], the fp8 of this"):
        raw(case, q[:24], scales)
    with pytest.raises(GuardError, match=r"out_scales must be contiguous uint8 \[25, 2\]; got uint8 \[25, 1\]"):
        raw(case, q, scales[:, :1])
    with pytest.raises(GuardError, match="N must be a multiple of 64"):
        raw(case.but(w=case.w[:, :96].contiguous(), w_scale=case.w_scale[:, :96].contiguous()), q, scales)


@pytest.mark.parametrize("k", (96, 800, 1056))
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=("plain", "minimax", "gpt_oss"))
def test_thirty_two_slots_at_a_time_give_the_same(activation: dict[str, Any], k: int) -> None:
    """What the default takes where an expert has many slots; 40 of one expert and 41 of another, so 32 and a rest."""
    own = fp8_dtypes("cpu")[0]
    case = exact((*(0, 1) * 40, 1), experts=2, n=128, k=k, block_m=44)
    case = case.but(a=case.a.view(own), w=case.w.view(own))
    told = hipforge.explain(grouped_swiglu_mxfp8, *arguments(case), case.slots, 44, 1)
    assert told.configuration["rows"] == 32
    with emulator.options(checks="all", wave_order="random"):
        same(case, bias_of(case), **activation)


def test_k_is_shared_where_work_groups_are_few_or_just_exceed_the_compute_units() -> None:
    assert split_of(9, 257, 1024, 6144, 256) == (2, 1)  # 144 blocks: twice as many fill none more
    assert split_of(9, 257, 512, 6144, 256) == (1, 2)  # 72
    assert split_of(9, 257, 512, 6144, 288) == (1, 4)  # with a compute unit for each of four that share one
    assert split_of(4, 128, 768, 6144, 256) == (1, 4)  # 48
    assert split_of(9, 257, 512, 7168, 256, packing=2) == (1, 4)  # a few compute units have two, of half the bytes
    assert split_of(9, 257, 576, 7168, 256, packing=2) == (1, 2)  # 81
    assert split_of(4, 128, 768, 2816, 256, packing=2) == split_of(4, 128, 768, 2816, 256) == (1, 4)  # 22 steps
    assert split_of(4, 128, 768, 2688, 256, packing=2) == (2, 1)
    assert split_of(4, 128, 768, 2688, 256) == split_of(4, 128, 768, 1408, 256) == (1, 2)
    assert split_of(4, 128, 768, 1280, 256) == (2, 1)  # one whose halves would save less than their meeting costs
    assert split_of(18, 257, 1024, 6144, 256) == (1, 4)  # 288
    assert split_of(36, 257, 1024, 6144, 256) == (1, 1)  # 576
    assert split_of(64, 2, 1024, 6144, 256) == (1, 4)  # 32: no more experts than there are
    # Blocks of half the bytes: with a second one nothing is gained, with a third one it is.
    assert [split_of(slots, 257, 512, 7168, 256, packing=2) for slots in (36, 64, 65, 72, 73)] == [
        (1, 1), (1, 1), (1, 4), (1, 4), (1, 1)
    ]  # fmt: skip
    # Choices of 257 experts reach 94, 97, 111 and 116 of them: 2.9, 3.0, 3.5 and 3.6 blocks for each compute unit.
    assert [split_of(slots, 257, 512, 7168, 256, packing=2) for slots in (117, 121, 146, 153)] == [
        (1, 1), (1, 4), (1, 4), (1, 1)
    ]  # fmt: skip
    assert split_of(144, 257, 512, 2048, 256, packing=2) == (1, 1)
    assert split_of(144, 257, 512, 7168, 256) == (1, 1)
    assert split_of(9, 257, 512, 768, 256) == (1, 1)  # a short K


def shared(
    case: Moe, workspace: torch.Tensor, parts: int, groups: int, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What work-groups that share K make, in a result that holds something else before."""
    inner = case.w.shape[1] // 2
    q, scales = (torch.full((case.slots, width), 9, dtype=torch.uint8) for width in (inner, inner // 32))
    raw(case, q, scales, parts, groups=groups, workspace=workspace, **given)
    return q, scales


# A K of 17 steps and a bit, so that each has other steps, and one of a single step, so that some have none.
@pytest.mark.parametrize("order", ("forward", "reverse", "random"))
@pytest.mark.parametrize(("parts", "groups"), ((1, 2), (1, 4), (2, 2), (2, 4)))
def test_work_groups_that_share_k_give_the_same_bits(parts: int, groups: int, order: str) -> None:
    same_where_k_is_shared(parts, groups, order)


def same_where_k_is_shared(parts: int, groups: int, order: str) -> None:
    for k, interleaved in ((17 * 128 + 32, False), (96, True)):
        case = problem(k, inner=96, a_div=2)
        bias = bias_of(case)
        workspace = split_workspace(case.slots, case.w.shape[1], groups, torch.device("cpu"))
        assert workspace is not None
        workspace.view(torch.int32).random_(generator=torch.Generator().manual_seed(4))
        want = separately(case, bias, interleaved=interleaved)
        for _ in range(2):  # a second launch in what the first one left
            with emulator.options(checks="all", wave_order=order):
                q, scales = shared(case, workspace, parts, groups, bias=bias, interleaved=interleaved)
            assert torch.equal(q, want[0].view(torch.uint8)) and torch.equal(scales, want[1])
