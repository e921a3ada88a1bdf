"""The grouped scaled fp8 GEMM with every kind of scales, on gfx950 and on gfx942 in its own fp8 format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.fp8_cases import KINDS, NUMBERS, Case, case_of, surrounded
from helpers.mxfp8_cases import assert_bits
from helpers.mxfp8_grouped_cases import random_owners, sort_slots

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops import swiglu_fp8
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.fp8_grouped_gemm import (
    fp8_gate_up_out,
    fp8_grouped_split_out,
    grouped_fp8_linear,
    grouped_gemm_fp8,
    grouped_swiglu_fp8,
)
from hipforge.ops.gate_up_split import split_of_four
from hipforge.ops.moe_gate_up import split_workspace

pytestmark = pytest.mark.gfx942

FP8 = fp8_dtypes("cpu")[0]

ROWS, WAVES = (16, 32), (1, 2, 8)


def _traced(batch: int) -> dict[str, torch.Tensor]:
    case = case_of("rows", batch, 8, 64, "gfx950" if torch.float8_e4m3fn == FP8 else "gfx942")
    return {"xq": case.typed()[0], "xs": case.xs, "ids": torch.arange(2 * batch, dtype=torch.int32).view(batch, 2) % 4}


def _run(op: str, xq: torch.Tensor, xs: torch.Tensor, ids: torch.Tensor) -> Any:
    w = torch.ones(4, 8, 64).to(xq.dtype)
    slots = hipforge.moe_align_block_size(ids, 16, 4)
    return getattr(hipforge, op)(xq, xs, w, torch.ones(4, 8), *slots, ids.numel(), 16, 2)


def _swiglu(xq: torch.Tensor, xs: torch.Tensor, ids: torch.Tensor) -> Any:
    slots = hipforge.moe_align_block_size(ids, 16, 4)
    weights = torch.ones(4, 64, 64).to(xq.dtype), torch.ones(4, 1, 1)
    return hipforge.grouped_swiglu_fp8(xq, xs[:, None], *weights, *slots, ids.numel(), 16, 2, out_format="blocks")


TRACED = {
    "grouped_swiglu_fp8": (_traced, _swiglu),
    "grouped_gemm_fp8": (_traced, partial(_run, "grouped_gemm_fp8"), True),
    "grouped_fp8_linear": (_traced, partial(_run, "grouped_fp8_linear")),
}


@dataclass(frozen=True)
class Experts:
    """One W for each expert in ``cases``, which share X; who owns each slot; -1: nobody here."""

    cases: tuple[Case, ...]
    owners: tuple[int, ...]
    a_div: int = 1
    block_m: int = 20

    def operands(self) -> tuple[torch.Tensor, ...]:
        parts = [case.typed() for case in self.cases]
        w, ws = (torch.stack([part[index] for part in parts]) for index in (2, 3))
        ids, experts, padded = sort_slots(self.owners, self.block_m, len(self.cases))
        return (*parts[0][:2], w, ws, ids, experts, padded)

    def counts(self) -> tuple[int, int, int]:
        return len(self.owners), self.block_m, self.a_div

    def oracle(self, elsewhere: float = 0.0) -> torch.Tensor:
        products = [case.oracle() for case in self.cases]
        nothing = torch.full_like(products[0][0], elsewhere)
        return torch.stack(
            [nothing if owner < 0 else products[owner][slot // self.a_div] for slot, owner in enumerate(self.owners)]
        )

    def launch(self, out: torch.Tensor, kind: str, rows: int, waves: int, columns: int, *more: Any) -> None:
        operands = self.operands()
        weights, bias = more or (None, None)
        slots, block_m, a_div = self.counts()
        sizes = *operands[2].shape, slots, operands[0].shape[0], a_div, block_m
        fp8_grouped_split_out(out, *operands, weights, bias, *sizes, NUMBERS[kind], rows, waves, columns)


def experts(
    kind: str, arch: str, owners: tuple[int, ...], n: int, k: int, count: int = 3, a_div: int = 1, block_m: int = 20
) -> Experts:
    rows = -(-len(owners) // a_div)
    first = case_of(kind, rows, n, k, arch)
    others = (case_of(kind, rows, n, k, arch, seed) for seed in range(1, count))
    cases = (first, *(replace(first, wq=other.wq, ws=other.ws) for other in others))
    return Experts(cases, owners, a_div, block_m)


# A short K, one with a partial step, ones with many (2880: gpt-oss); N that ends within a tile, and past 128 columns.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "a_div"), ((40, 32, 1), (131, 352, 4), (260, 2208, 1), (24, 640, 2), (40, 2880, 4)))
def test_sums_are_exact_and_rounded_once(arch: str, kind: str, n: int, k: int, a_div: int) -> None:
    case = experts(kind, arch, random_owners(22, 3), n, k, a_div=a_div)
    assert hipforge.explain(grouped_gemm_fp8, *case.operands(), *case.counts()).kernel == "fp8_grouped_split"
    got = grouped_gemm_fp8(*case.operands(), *case.counts())
    assert got is not None
    assert_bits(got, case.oracle())
    assert torch.equal(grouped_fp8_linear(*case.operands(), *case.counts()), got)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("waves", WAVES)
def test_every_shape_of_work_group(arch: str, kind: str, rows: int, waves: int) -> None:
    case = experts(kind, arch, (*(1,) * 35, 0, 2, 2), 150, 1056, block_m=40)
    for columns in (16, 64) if waves <= 2 else (16,):
        out = torch.empty(38, 150, dtype=torch.bfloat16)
        with emulator.options(checks="all", wave_order="random"), emulator.counters() as counted:
            case.launch(out, kind, rows, waves, columns)
        assert_bits(out, case.oracle())
        assert counted.launches == 1 and not counted.scratch_bytes and not counted.lds_bank_conflicts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waves", (1, 4))
def test_bias_and_weight_come_before_the_only_rounding(arch: str, kind: str, waves: int) -> None:
    owners = (0, 0, 2, 1, *(2,) * 18)
    case = experts(kind, arch, owners, 22, 256)
    bias = torch.randint(-8, 9, (3, 22), generator=torch.Generator().manual_seed(2)) * 0.37 + 1e-3
    weights = -torch.exp2(torch.arange(22.0) % 5 - 2)
    want = (case.oracle() + bias.double()[list(owners)]).float().double() * weights.double()[:, None]
    out = torch.empty(22, 22, dtype=torch.bfloat16)
    case.launch(out, kind, 16, waves, 16, weights, bias)
    assert_bits(out, want)
    operands = *case.operands(), *case.counts(), weights
    assert torch.equal(grouped_fp8_linear(*operands, bias=bias), out)


def test_one_scale_stands_for_all_rows_or_an_expert(arch: str) -> None:
    case = experts("rows", arch, random_owners(9, 3), 40, 256)
    a, _, w, ws, *index = case.operands()
    for a_scale, w_scale in (
        (torch.tensor(0.5), ws), (torch.full((9, 1), 2.0), torch.tensor([0.5, 2.0, 4.0])),
        (torch.tensor([4.0]), torch.tensor([[0.5], [2.0], [4.0]])), (torch.linspace(1, 3, 9), ws[:, :, None]),
    ):  # fmt: skip
        wide = a_scale.reshape(-1).expand(9), w_scale.reshape(3, -1).expand(3, 40)
        cases = tuple(replace(one, xs=wide[0], ws=wide[1][e]) for e, one in enumerate(case.cases))
        want = replace(case, cases=cases).oracle()
        got = grouped_fp8_linear(a, a_scale, w, w_scale, *index, *case.counts())
        assert torch.equal(got, want.float().bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_nan_makes_its_outputs_nan_and_no_other(arch: str, kind: str) -> None:
    case = experts(kind, arch, (0, 1, 1, 2), 200, 384)
    ws = case.cases[1].ws.clone()
    ws.view(-1)[-1] = 255 if ws.dtype == torch.uint8 else float("nan")
    cases = case.cases[0], replace(case.cases[1], ws=ws), case.cases[2]
    spoilt = replace(case, cases=cases)
    want = spoilt.oracle()
    assert want[1].isnan().any() and not want[[0, 3]].isnan().any()
    assert_bits(grouped_fp8_linear(*spoilt.operands(), *spoilt.counts()), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", (352, 1024))
def test_what_lies_around_the_operands_is_not_read(arch: str, kind: str, k: int) -> None:
    case = experts(kind, arch, (0, 0, 0, 0, 0), 131, k, count=1)
    guarded = surrounded(case.cases[0]).typed()
    _, _, _, _, *index = case.operands()
    got = grouped_fp8_linear(*guarded[:2], guarded[2][None], guarded[3][None], *index, *case.counts())
    assert_bits(got, case.oracle())


def test_slots_of_experts_elsewhere_are_zero(arch: str) -> None:
    case = experts("rows", arch, (0, -1, 2, 2, -1, 0), 16, 96)
    assert_bits(grouped_fp8_linear(*case.operands(), *case.counts()), case.oracle())
    out = torch.full((6, 16), 7.0).bfloat16()
    grouped_fp8_linear(*case.operands(), *case.counts(), out=out, uncovered="undefined")
    assert_bits(out, case.oracle(elsewhere=7.0))


def test_a_k_of_uneven_rows_is_for_torch(arch: str) -> None:
    for kind in ("rows", "blocks"):
        case = experts(kind, arch, (0, 1, 2), 20, 129)
        told = hipforge.explain(grouped_fp8_linear, *case.operands(), *case.counts())
        assert told.path == "torch" and "K must be a multiple of 16" in told.refused["kernel"]
        assert grouped_gemm_fp8(*case.operands(), *case.counts()) is None
        assert_bits(grouped_fp8_linear(*case.operands(), *case.counts()), case.oracle())


def test_scales_of_no_kind_are_refused(arch: str) -> None:
    case = experts("rows", arch, (0, 1, 2), 8, 64)
    a, a_scale, w, w_scale, *index = case.operands()
    for op in (grouped_gemm_fp8, grouped_fp8_linear):
        for wrong in ((a_scale[:2], w_scale), (a_scale, w_scale[:2]), (a_scale.half(), w_scale), (a_scale, w_scale[0])):
            with pytest.raises(GuardError, match="for each of 3 experts of wq; got"):
                op(a, wrong[0], w, wrong[1], *index, *case.counts())


def test_the_entry_refuses_what_the_kernel_does_not_take(arch: str) -> None:
    out = torch.empty(3, 8, dtype=torch.bfloat16)
    good = experts("rows", arch, (0, 1, 2), 8, 64)
    with pytest.raises(GuardError, match=r"a_scale must be contiguous float32 \[3, 1\], one scale per row and block"):
        good.launch(out, "blocks", 16, 1, 16)
    with pytest.raises(GuardError, match="K must be a positive multiple of 16; got 40"):
        experts("rows", arch, (0, 1, 2), 8, 40).launch(out, "rows", 16, 1, 16)
    short = replace(good, cases=tuple(replace(case, ws=case.ws[:7]) for case in good.cases))
    with pytest.raises(GuardError, match="w_scale must have 24 scales, one per row, or 3; got"):
        short.launch(out, "rows", 16, 1, 16)


def test_one_row_with_one_byte_of_scale_is_multiplied_on_both_paths(path: str) -> None:
    ones, slots = torch.ones(1, 32).to(FP8), hipforge.moe_align_block_size(torch.zeros(1, 1, dtype=torch.int32), 16, 3)
    scale = torch.full((1, 1), 127, dtype=torch.uint8)
    y = hipforge.grouped_fp8_linear(
        ones, scale, ones.expand(3, 8, -1).contiguous(), scale.expand(3, -1, -1).contiguous(), *slots, 1, 16, 1
    )
    assert y.tolist() == [[32.0] * 8]


def test_scales_of_one_block_are_of_the_kind_that_the_other_weights_have(path: str) -> None:
    # [2, 1, 1] bytes of a weight [32, 32] are one of 32 x 32 and one of 128 x 128; w1's can be of 32 x 32 alone.
    w1, w2 = torch.ones(2, 64, 32).to(FP8), torch.ones(2, 32, 32).to(FP8)
    bytes_ = [torch.full((2, blocks, 1), 127, dtype=torch.uint8) for blocks in (2, 1)]
    routing = torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32)
    y = hipforge.fused_moe_fp8(torch.ones(3, 32).bfloat16(), w1, bytes_[0], w2, bytes_[1], *routing)
    assert y.unique().tolist() == [32.0 * 32 * 32]  # SwiGLU of 32 and 32 is 1,024 in float32
    with pytest.raises(GuardError, match="of one kind; got MX_SHARED and ONCE or BLOCKS"):
        hipforge.fused_moe_fp8(torch.ones(3, 32).bfloat16(), w1, bytes_[0], w2, torch.ones(2, 1, 1), *routing)


# ---- gate and up -----------------------------------------------------------------------------------------------------

FUSED_KINDS = ("blocks", "blocks_e8m0", "mx")
ACTIVATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"alpha": 1.702, "beta": 1.0, "limit": 7.0},
    {"alpha": 1.702, "beta": 1.0, "limit": 3.0, "interleaved": True},
)
# A tile of 20 with more than 16 slots; experts with one and with none; a slot of nobody here.
OWNERS = (*(1,) * 19, 3, *(4,) * 3, 0, 0)

Pair = tuple[torch.Tensor, torch.Tensor]


def activated(kind: str, gate_up: torch.Tensor, **activation: Any) -> Pair:
    if kind == "mx":
        return hipforge.swiglu_mxfp8(gate_up, **activation)
    blocks = kind.startswith("blocks")
    form = {"out_format": "blocks" if blocks else "rows", "e8m0": kind.endswith("e8m0")}
    return swiglu_fp8.swiglu_fp8_dynamic(gate_up, **form, **activation)


def separately(case: Experts, kind: str, bias: torch.Tensor | None, **activation: Any) -> Pair:
    """What a GEMM with its own tests and the launch for SwiGLU and quantisation make, in two launches."""
    gate_up = torch.zeros(len(case.owners), case.operands()[2].shape[1], dtype=torch.bfloat16)
    case.launch(gate_up, kind, 16, 2, 16, None, bias)
    return activated(kind, gate_up, **activation)


def bias_of(case: Experts) -> torch.Tensor:
    return torch.randn(case.operands()[2].shape[:2], generator=torch.Generator().manual_seed(3)) * 8


def bits(pair: Pair) -> list[list[int]]:
    return [part.view(torch.uint8).flatten().tolist() for part in pair]


def gate_up(case: Experts, kind: str, rows: int, parts: int, groups: int, **given: Any) -> Pair:
    """What the entry makes in a result that holds something else before."""
    operands = case.operands()
    (count, n, k), slots = operands[2].shape, len(case.owners)
    size = 32 if kind == "mx" else 128
    q, scales = torch.full((slots, n // 2), 9, dtype=torch.uint8), torch.full((slots, -(-n // 2 // size)), 9)
    scales = scales.float() if kind == "blocks" else scales.to(torch.uint8)
    workspace = given.get("workspace", split_workspace(slots, n, groups, q.device, size))
    sizes = count, n, k, slots, operands[0].shape[0], case.a_div, case.block_m
    activation = 1.0, 0.0, float("inf"), given.get("interleaved", False)
    launch = given.get("bias"), *sizes, *activation, NUMBERS[kind], workspace, rows, parts, groups
    fp8_gate_up_out(q.view(FP8), given.get("scales", scales), *operands, *launch)
    return q, scales


# The products are integers whose sums are exact, so that the order of additions cannot tell the two apart. Results of
# whole blocks of 128, of one that is shorter, of a part of one; blocks of W's rows in which both gate and up lie.
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=("plain", "minimax", "gpt_oss"))
@pytest.mark.parametrize("kind", FUSED_KINDS)
@pytest.mark.parametrize(("k", "inner"), ((96, 128), (352, 192), (2880, 96)))
def test_gate_and_up_in_one_launch_have_the_bits_of_two(
    arch: str, kind: str, k: int, inner: int, activation: dict[str, Any]
) -> None:
    case = experts(kind, arch, OWNERS, 2 * inner, k, count=6, a_div=2)
    for bias in (None, bias_of(case)):
        operands = *case.operands(), *case.counts()
        with emulator.options(checks="all", wave_order="random"), emulator.counters() as counted:
            got = grouped_swiglu_fp8(*operands, bias=bias, **activation)
        assert [launch.name for launch in counted.kernels if "fp8_gate_up" in launch.name] and counted.launches == 1
        assert not counted.scratch_bytes
        assert bits(got) == bits(separately(case, kind, bias, **activation))


# A K of 17 steps and a bit, so that each part has other steps, and one of a single step, so that some have none.
@pytest.mark.parametrize("kind", FUSED_KINDS)
@pytest.mark.parametrize(("parts", "groups"), ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4)))
def test_every_split_of_gate_and_up_gives_the_same(arch: str, kind: str, parts: int, groups: int) -> None:
    for k, interleaved, rows in ((17 * 128 + 32, False, 16), (96, True, 32)):
        case = experts(kind, arch, (*OWNERS, *(2,) * 35), 2 * 160, k, count=6, block_m=40)
        bias = bias_of(case)
        want = separately(case, kind, bias, interleaved=interleaved)
        workspace = split_workspace(len(case.owners), 320, groups, torch.device("cpu"), 32 if kind == "mx" else 128)
        if workspace is not None:
            workspace.view(torch.int32).random_(generator=torch.Generator().manual_seed(4))
        for _ in range(2):  # a second launch in what the first one left
            with emulator.options(checks="all", wave_order="random"):
                got = gate_up(case, kind, rows, parts, groups, bias=bias, interleaved=interleaved, workspace=workspace)
            assert bits(got) == bits(want)


@pytest.mark.parametrize("kind", FUSED_KINDS)
def test_a_nan_scale_reaches_exactly_its_blocks_of_results(arch: str, kind: str) -> None:
    case = experts(kind, arch, (0, 1, 1, 2), 2 * 256, 384)
    ws = case.cases[1].ws.clone()
    ws[-1, 0] = 255 if ws.dtype == torch.uint8 else float("nan")  # of up, in the last block of results
    spoilt = replace(case, cases=(case.cases[0], replace(case.cases[1], ws=ws), case.cases[2]))
    q, scales = gate_up(spoilt, kind, 16, 1, 1)
    nan = scales.isnan() if kind == "blocks" else scales == 255
    assert nan.nonzero().tolist() == [[slot, scales.shape[1] - 1] for slot in (1, 2)]
    assert bits((q, scales)) == bits(separately(spoilt, kind, None))


@pytest.mark.parametrize("kind", FUSED_KINDS)
@pytest.mark.parametrize("k", (352, 1024))
def test_gate_and_up_read_nothing_around_their_operands(arch: str, kind: str, k: int) -> None:
    case = experts(kind, arch, (0, 0, 0, 0, 0), 2 * 96, k, count=1)
    guarded = surrounded(case.cases[0]).typed()
    _, _, _, _, *index = case.operands()
    got = grouped_swiglu_fp8(*guarded[:2], guarded[2][None], guarded[3][None], *index, *case.counts())
    assert bits(got) == bits(separately(case, kind, None))


def test_gate_and_up_leave_rows_of_tiles_elsewhere_alone(arch: str) -> None:
    for kind in FUSED_KINDS:
        case = experts(kind, arch, (0, -1, 2, 2, -1, 0), 2 * 64, 96)
        q, scales = gate_up(case, kind, 16, 1, 1)
        assert (q[[1, 4]] == 9).all() and (scales[[1, 4]] == 9).all() and (scales[[0, 2, 3, 5]] != 9).all()


def test_results_have_the_scales_that_are_asked_for(arch: str, path: str) -> None:
    """By default those of the operands' kind; where one kind is not the other's, SwiGLU is a launch of its own."""
    for kind in KINDS:
        case = experts(kind, arch, OWNERS, 2 * 96, 160, count=6)
        operands = *case.operands(), *case.counts()
        product = grouped_fp8_linear(*operands)
        for form in (None, "rows", "blocks", "mx"):
            floats = kind in ("rows", "tensor", "blocks")
            of = kind if form is None else {"blocks": "blocks" if floats else "blocks_e8m0"}.get(form, form)
            got = grouped_swiglu_fp8(*operands, out_format=form, limit=7.0)
            assert bits(got) == bits(activated(of, product, limit=7.0))
            told = hipforge.explain(grouped_swiglu_fp8, *operands, out_format=form)
            if path == "kernel":
                assert told.kernel == ("fp8_gate_up" if of == kind in FUSED_KINDS else "fp8_grouped_split")


def test_gate_and_up_are_one_launch_where_slots_are_few(arch: str) -> None:
    assert split_of_four(8, 128, 384, 4096, 256) == (2, 4)  # 48 blocks
    assert split_of_four(8, 128, 768, 4096, 256) == (1, 2)  # 96
    assert split_of_four(17, 128, 768, 4096, 256) == (1, 2)  # 204
    assert split_of_four(4, 32, 768, 1024, 256) == (1, 2)  # a short K
    for kind in FUSED_KINDS:
        for slots, kernel in ((512, "fp8_gate_up"), (513, "fp8_grouped_split")):
            case = experts(kind, arch, (0,) * slots, 2 * 32, 256, count=1, block_m=64)
            told = hipforge.explain(grouped_swiglu_fp8, *case.operands(), *case.counts())
            assert told.kernel == kernel and ("SwiGLU is not fused" in told.reason) == (slots == 513)
    with hipforge.batch_invariant():
        few = experts("blocks", arch, (0, 1, 2), 2 * 64, 256)
        told = hipforge.explain(grouped_swiglu_fp8, *few.operands(), *few.counts())
        assert told.kernel == "fp8_grouped_split" and "SwiGLU is not fused: batch_invariant" in told.reason


def test_what_gate_and_up_do_not_take_is_refused(arch: str) -> None:
    case = experts("blocks", arch, OWNERS, 2 * 96, 160, count=6)
    for given, wrong in (
        ({"parts": 4}, "parts must be 1 or 2; got 4"), ({"groups": 8}, "groups must be 1, 2 or 4; got 8"),
        ({"workspace": None}, r"needs a workspace: float32 \[6550\]; got None"),
        ({"workspace": torch.zeros(6549)}, r"workspace must be float32 \[6550\] or longer; got float32 \[6549\]"),
        ({"scales": torch.zeros(25, 2)}, r"out_scales must be contiguous float32 \[25, 1\], one scale per slot and"),
    ):  # fmt: skip
        with pytest.raises(GuardError, match=wrong):
            gate_up(case, "blocks", **{"rows": 16, "parts": 1, "groups": 1, **given})
    with pytest.raises(GuardError, match="N must be a multiple of 64"):
        gate_up(experts("blocks", arch, OWNERS, 2 * 48, 160, count=6), "blocks", 16, 1, 1)
    operands = *case.operands(), *case.counts()
    with pytest.raises(GuardError, match="out_format must be one of 'rows', 'blocks', 'mx'; got 'row'"):
        grouped_swiglu_fp8(*operands, out_format="row")
    with pytest.raises(GuardError, match="limit must be positive and finite, or None for no clamp; got 0"):
        grouped_swiglu_fp8(*operands, limit=0)
    odd = experts("blocks", arch, OWNERS, 9, 160, count=6)
    with pytest.raises(GuardError, match="an even number of rows for each expert; got shape"):
        grouped_swiglu_fp8(*odd.operands(), *odd.counts())
