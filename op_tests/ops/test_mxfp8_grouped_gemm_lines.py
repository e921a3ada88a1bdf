"""Eight slots at a time: the two halves of a line of W fill the matrix instruction's rows (line_wave.h, gfx950)."""

from __future__ import annotations

import pytest
import torch
from helpers.grouped_formats import FORMATS, bias_of
from helpers.mxfp8_cases import SCALE_NAN, assert_bits, embedded, nan_byte
from helpers.mxfp8_grouped_cases import Moe, exact, oracle

from hipforge import emulator
from hipforge.ops.mxfp8_grouped_gemm import mxfp8_grouped_split
from hipforge.ops.mxfp8_grouped_gemm.kernels.wave_split import COLUMNS, FEW_ROWS, WAVES, default_choice, fits, has_lines

# Pairs of steps: fewer than some waves, every rest of a run, several runs of 24 and of what is left of one.
# 96 and 1152 are no whole pairs: 16 slots at a time take them.
DEPTHS = (96, 256, 512, 768, 1024, 1152, 1280, 2304, 3072, 4608, 6144, 6400, 12544)


pytestmark = pytest.mark.gfx942  # which takes 16 slots for them


def expected(case: Moe, arch: str) -> torch.Tensor:
    """The oracle reads e4m3fn; the same bytes are half as much in e4m3fnuz, and each output has two factors."""
    return oracle(case) / (4 if arch == "gfx942" else 1)


def lines(case: Moe, waves: int, columns: int = 16) -> torch.Tensor:
    operands = case.a, case.a_scale, case.w, case.w_scale, *case.sorted()
    return mxfp8_grouped_split(
        *operands, case.out(), case.slots, case.a_div, case.block_m, case.weights,
        rows=FEW_ROWS, waves=waves, columns=columns,
    )  # fmt: skip


@pytest.mark.parametrize("k", DEPTHS)
@pytest.mark.parametrize("waves", WAVES)
def test_every_run_of_steps_is_exact_on_integers_under_all_checks(arch: str, waves: int, k: int) -> None:
    case = exact((*(1,) * 19, 3, 0, 2), experts=4, n=37, k=k, a_div=2, block_m=12, weighted=True, scales=(126, 128))
    with emulator.options(checks="all", wave_order="random"):
        assert_bits(lines(case, waves), expected(case, arch))


@pytest.mark.parametrize("columns", COLUMNS[1:])
@pytest.mark.parametrize("waves", WAVES)
def test_wide_work_groups_are_exact(arch: str, waves: int, columns: int) -> None:
    if fits(waves, columns):
        case = exact((0, 1, 1, 2, 2, 2), experts=3, n=200, k=1280, scales=(126, 128))
        assert_bits(lines(case, waves, columns), expected(case, arch))


@pytest.mark.parametrize("count", (1, 7, 8, 9, 16, 17, 64))
def test_every_number_of_slots_is_exact_and_turns_of_one_instruction_change_nothing(arch: str, count: int) -> None:
    case = exact([1] * count, experts=3, n=20, k=768, weighted=True)
    with emulator.options(checks="all", quantum=1):
        assert_bits(lines(case, 2), expected(case, arch))


@pytest.mark.parametrize("block", (0, 3, 13, 31))
def test_a_nan_scale_or_element_reaches_exactly_its_outputs(arch: str, block: int) -> None:
    case = exact([1] * 20, experts=2, n=20, k=1024)
    want = expected(case, arch)
    case.a_scale[0, block] = SCALE_NAN
    case.w[1, 3, 32 * block + 7] = nan_byte(arch)
    case.w_scale[1, 17, block] = SCALE_NAN
    want[0] = want[:, 3] = want[:, 17] = float("nan")
    assert_bits(lines(case, 2), want)


def test_bytes_around_the_operands_are_not_read(arch: str) -> None:
    case = exact((1, 1, 1), experts=3, n=21, k=1280)
    want, nan = expected(case, arch), nan_byte(arch)
    for expert in (0, 2):
        case.w[expert], case.w_scale[expert] = nan, SCALE_NAN
    scales = torch.cat((case.a_scale, torch.full((3, 40), SCALE_NAN, dtype=torch.uint8)))
    around = case.but(
        a=embedded(torch.cat((case.a, torch.full((3, 1280), nan, dtype=torch.uint8))), nan | 0x80),
        a_scale=embedded(scales, SCALE_NAN),
        w=embedded(case.w, nan | 0x80),
        w_scale=embedded(case.w_scale, SCALE_NAN, margin=63),  # these do not start at a multiple of 4 bytes
    )
    assert_bits(lines(around, 2), want)
    assert_bits(lines(around.but(w_scale=case.w_scale, a_scale=scales), 2), want)


@pytest.mark.parametrize("k", (256, 1280, 6400))
@pytest.mark.parametrize(("parts", "groups"), ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4)))
def test_gate_and_up_in_every_split_of_k_give_the_same(parts: int, groups: int, k: int) -> None:
    of = FORMATS["mxfp8"]
    case = of.case((*(1,) * 19, 3, *(4,) * 3, 0, 0), 6, 2 * 64, k, a_div=2, block_m=40)
    bias, workspace = bias_of(case), of.workspace(case, groups)
    for interleaved in (False, True):
        zeros = torch.zeros(case.slots, case.w.shape[1], dtype=torch.bfloat16)
        want = of.activated(of.split(case, bias=bias, out=zeros), interleaved=interleaved)
        with emulator.options(checks="all", wave_order="random"):
            got = of.gate_up(case, FEW_ROWS, parts, groups, interleaved, bias=bias, workspace=workspace)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_the_default_takes_whole_lines_where_memory_is_the_bound() -> None:
    assert has_lines(6144, "gfx950") and not has_lines(6144, "gfx942") and not has_lines(6016, "gfx950")

    def rows(slots: int, experts: int, n: int, k: int) -> int:
        return default_choice(slots, experts, n, k, 256, lines=True).configuration["rows"]

    assert [rows(9 * tokens, 257, 1024, 6144) for tokens in (1, 2, 4, 16, 64, 128)] == [16, 16, 8, 8, 8, 8]
    assert [rows(slots, 128, 2048, 4096) for slots in (128, 575, 576, 1100)] == [8, 8, 16, 32]
    assert rows(144, 257, 6144, 1024) == 16
