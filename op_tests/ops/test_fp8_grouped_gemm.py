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
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.fp8_grouped_gemm import fp8_grouped_split_out, grouped_fp8_linear, grouped_gemm_fp8

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


TRACED = {
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
