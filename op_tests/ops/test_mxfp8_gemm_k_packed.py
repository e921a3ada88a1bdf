"""The MX-FP8 GEMM with parts of K in the matrix instruction's empty rows, on gfx950 and on gfx942."""

from __future__ import annotations

import pytest
import torch
from helpers.mxfp8_cases import (
    SCALE_NAN,
    Operands,
    among_nans,
    assert_bits,
    assert_writes_only,
    bias_for,
    embedded,
    integers,
    nan_byte,
    oracle,
)

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.mxfp8_gemm import mxfp8_k_packed, mxfp8_k_packed_out
from hipforge.ops.mxfp8_gemm.kernels import k_packed, launch

pytestmark = pytest.mark.gfx942

INSTANCES = ((4, 1, 1), (4, 3, 2), (4, 4, 4), (8, 1, 16), (8, 2, 8), (8, 3, 1), (8, 16, 1))


def run(
    case: Operands, columns: int, groups: int = 2, waves: int = 2, bias: torch.Tensor | None = None
) -> torch.Tensor:
    out = case.out()
    mxfp8_k_packed_out(out, *case.args(), bias, columns, groups, waves)
    return out


@pytest.mark.parametrize("order", ("forward", "random"))
@pytest.mark.parametrize(("columns", "groups", "waves"), INSTANCES)
def test_every_instance_is_exact_on_integers_under_all_checks(
    arch: str, columns: int, groups: int, waves: int, order: str
) -> None:
    # 17 steps in each part: every wave has others than its neighbour; two work-groups and a bit.
    case = integers(columns - 1, columns * (2 * groups + 1) - 3, 17 * k_packed.k_step(columns), scales=(126, 128))
    with emulator.options(checks="all", wave_order=order):
        assert_bits(run(case, columns, groups, waves), oracle(case, arch))


@pytest.mark.parametrize("columns", k_packed.COLUMNS)
def test_turns_of_one_instruction_change_nothing(arch: str, columns: int) -> None:
    case = integers(columns, 3 * columns, 2048)
    with emulator.options(checks="all", quantum=1):
        assert_bits(run(case, columns), oracle(case, arch))


@pytest.mark.parametrize("columns", k_packed.COLUMNS)
def test_every_number_of_steps_m_and_n_is_exact(arch: str, columns: int) -> None:
    for steps in range(1, 18):
        case = integers(1, 2, steps * k_packed.k_step(columns), scales=(126, 128))
        assert_bits(run(case, columns, 1, 1), oracle(case, arch))
    for m in range(1, columns + 1):
        case = integers(m, 19, k_packed.k_step(columns))
        assert_bits(run(case, columns, 3, 1), oracle(case, arch))
    for n in (*range(1, 2 * columns + 2), 63, 64, 65):
        case = integers(3, n, 2 * k_packed.k_step(columns))
        assert_bits(run(case, columns, 2, 2), oracle(case, arch))


@pytest.mark.parametrize("columns", k_packed.COLUMNS)
def test_each_row_and_block_uses_its_own_scale(arch: str, columns: int) -> None:
    case = integers(columns, 16, 2048, scales=(126, 128))
    at_rows, blocks = torch.arange(16)[:, None], torch.arange(2048 // 32)
    case.xs.copy_((126 + (at_rows[:columns] + 2 * blocks) % 3).to(torch.uint8))
    case.ws.copy_((126 + (at_rows // 2 + blocks) % 3).to(torch.uint8))
    assert_bits(run(case, columns), oracle(case, arch))


@pytest.mark.parametrize("columns", k_packed.COLUMNS)
@pytest.mark.parametrize("block", (0, 3, 31, 32, 63))
def test_a_nan_makes_exactly_its_outputs_nan(arch: str, block: int, columns: int) -> None:
    case = integers(columns, 11, 2048)
    want = oracle(case, arch)
    case.xs[1, block] = SCALE_NAN
    case.ws[9, block] = SCALE_NAN
    case.wq[9, 32 * block : 32 * block + 32] = 0  # even where its block is zero
    case.xq[2, 32 * block + 5] = nan_byte(arch)
    case.wq[4, 32 * block + 31] = nan_byte(arch)
    want[1:3, :] = want[:, 4] = want[:, 9] = float("nan")
    assert_bits(run(case, columns), want)


@pytest.mark.parametrize("columns", k_packed.COLUMNS)
def test_neighbouring_bytes_never_take_part(arch: str, columns: int) -> None:
    surrounded, want = among_nans(integers(columns, 20, 1024), arch)
    assert_bits(run(surrounded, columns), want)


@pytest.mark.parametrize("columns", k_packed.COLUMNS)
def test_output_outside_the_result_is_untouched(arch: str, columns: int) -> None:
    case = integers(3, 13, 1024)
    assert_writes_only(lambda out: mxfp8_k_packed_out(out, *case.args(), None, columns, 3, 2), case, 17, arch)


@pytest.mark.parametrize("columns", k_packed.COLUMNS)
def test_the_bias_is_added_before_the_only_rounding(arch: str, columns: int) -> None:
    case = integers(4, 37, 1024)
    bias, want = bias_for(case, arch)
    assert_bits(run(case, columns, bias=bias), want)


def test_dispatch_copies_scales_that_lie_off_four_bytes_and_the_raw_op_refuses_them(arch: str) -> None:
    case = integers(3, 20, 1024)
    moved = case.but(xs=embedded(case.xs, 0xFF, margin=61), ws=embedded(case.ws, 0xFF, margin=63))
    with pytest.raises(GuardError, match="must be aligned to 4 bytes"):
        run(moved, 8)
    chosen = k_packed.K_PACKED.choice({"columns": 8, "groups": 1, "waves": 2})
    assert_bits(launch(chosen, moved.out(), *moved.args()), oracle(case, arch))


@pytest.mark.parametrize(
    ("m", "k", "given", "message"),
    (
        (5, 2048, {"columns": 4}, "M must be between 1 and 4; got 5"),
        (9, 2048, {"columns": 8}, "M must be between 1 and 8; got 9"),
        (4, 256, {"columns": 4, "waves": 1}, "K must be a multiple of 512 with 4 columns"),
        (4, 2048 + 128, {"columns": 8}, "K must be a multiple of 256 with 8 columns"),
        (4, 2048, {"columns": 16}, "columns must be 4 or 8; got 16"),
        (4, 2048, {"waves": 3}, "waves must be 1, 2, 4, 8 or 16; got 3"),
        (4, 2048, {"groups": 0}, "groups must be 1 to 16; got 0"),
        (4, 2048, {"groups": 5, "waves": 4}, "groups times waves at most 16; got groups = 5, waves = 4"),
    ),
)
def test_what_the_kernel_does_not_take_is_refused(m: int, k: int, given: dict[str, int], message: str) -> None:
    case = integers(m, 16, k)
    with pytest.raises(GuardError, match=message):
        mxfp8_k_packed(*case.args(), **given)
