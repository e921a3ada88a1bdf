"""Gate and up of a MoE layer with SwiGLU and quantisation in the GEMM's epilogue, in every format that has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.grouped_formats import FORMATS, FUSED, Format, Pair, bias_of
from helpers.mxfp8_grouped_cases import Moe

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.gate_up_split import split_of, split_of_four

pytestmark = pytest.mark.gfx942

ACTIVATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"alpha": 1.702, "beta": 1.0, "limit": 7.0},
    {"alpha": 1.702, "beta": 1.0, "limit": 3.0, "interleaved": True},
)
# A tile of 20 with more than 16 slots; experts with one and with none.
OWNERS = (*(1,) * 19, 3, *(4,) * 3, 0, 0)
# K, columns of a result, entries of a tile. Results of whole blocks of 128, of one that is shorter, of a part of one;
# blocks of W's rows in which both gate and up lie; 2880: gpt-oss.
SHAPES = (
    (32, 96, 20), (96, 128, 20), (160, 32, 4), (160, 160, 128), (352, 192, 64), (768, 64, 20), (1056, 96, 20),
    (2880, 96, 20),
)  # fmt: skip
each_format = pytest.mark.parametrize("form", FUSED)


def separately(of: Format, case: Moe, bias: torch.Tensor | None = None, **activation: Any) -> Pair:
    """What a GEMM with its own tests and the launch for SwiGLU and quantisation make, in two launches."""
    zeros = torch.zeros(case.slots, case.w.shape[1], dtype=torch.bfloat16)
    return of.activated(of.split(case, bias=bias, out=zeros), **activation)


def assert_equal(got: Pair, want: Pair) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype or one.dtype == torch.uint8
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check(of: Format, case: Moe, **activation: Any) -> None:
    for bias in (None, bias_of(case)):
        with emulator.counters() as counted:
            got = of.swiglu(case, bias=bias, **activation)
        assert counted.launches == 1 and "gate_up" in counted.kernels[0].name and not counted.scratch_bytes
        assert_equal(got, separately(of, case, bias, **activation))


# The products are integers whose sums are exact, so that the order of additions cannot tell the two apart.
@pytest.mark.parametrize(
    ("shape", "activation"),
    [*((shape, at % 3) for at, shape in enumerate(SHAPES)), *((SHAPES[4], at) for at in (0, 2)), (SHAPES[6], 1)],
)
@each_format
def test_one_launch_gives_the_bits_of_two(form: str, shape: tuple[int, int, int], activation: int) -> None:
    k, inner, block_m = shape
    case = FORMATS[form].case(OWNERS, 6, 2 * inner, k, 2, block_m)
    with emulator.options(checks="all", wave_order="random"):
        check(FORMATS[form], case, **ACTIVATIONS[activation])


@pytest.mark.parametrize("k", (96, 1056))
def test_turns_of_one_instruction_change_nothing(k: int) -> None:
    with emulator.options(checks="all", quantum=1):
        check(FORMATS["mxfp8"], FORMATS["mxfp8"].case(OWNERS, 6, 128, k), **ACTIVATIONS[1])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=("plain", "minimax", "gpt_oss"))
@each_format
def test_thirty_two_slots_at_a_time_give_the_same(form: str, activation: dict[str, Any]) -> None:
    """What the default takes where an expert has many slots; 40 of one expert and 41 of another, so 32 and a rest."""
    of = FORMATS[form]
    for k in (96, 800):
        case = of.case((*(0, 1) * 40, 1), 2, 2 * 96, k, block_m=44)
        assert of.told(case, swiglu=True).configuration["rows"] == 32
        with emulator.options(checks="all", wave_order="random"):
            check(of, case, **activation)


# A K of 17 steps and a bit, so that each part has other steps, and one of a single step, so that some have none.
@pytest.mark.parametrize(("parts", "groups"), ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4)))
@each_format
def test_every_split_of_k_gives_the_same(form: str, parts: int, groups: int) -> None:
    of = FORMATS[form]
    for k, interleaved, rows in ((17 * 128 + 32, False, 16), (96, True, 32)):
        case = of.case((*OWNERS, *(2,) * 35), 6, 2 * 160, k, a_div=2, block_m=40)
        bias, workspace = bias_of(case), of.workspace(case, groups)
        want = separately(of, case, bias, interleaved=interleaved)
        if workspace is not None:
            workspace.view(torch.int32).random_(generator=torch.Generator().manual_seed(4))
        for order in ("forward", "reverse", "random"):  # a later launch finds what an earlier one left
            with emulator.options(checks="all", wave_order=order):
                got = of.gate_up(case, rows, parts, groups, interleaved, bias=bias, workspace=workspace)
            assert_equal(got, want)


@each_format
def test_a_nan_scale_reaches_exactly_its_blocks_of_results(form: str) -> None:
    of = FORMATS[form]
    case = of.spoilt(of.case((0, 1, 1, 2), 3, 2 * 256, 384), 1)  # of up, in the last block of expert 1's results
    q, scales = of.gate_up(case)
    nan = scales.isnan() if of.name == "blocks" else scales == 255
    last = scales.shape[1] - 1
    assert nan.nonzero().tolist() == [*([0, block] for block in range(last + 1)), [1, last], [2, last]]
    assert_equal((q, scales), separately(of, case))


@each_format
def test_bytes_around_the_operands_are_not_read(form: str) -> None:
    of = FORMATS[form]
    for k in (352, 1024):
        case = of.case((1,) * 5, 3, 2 * 96, k)
        assert_equal(of.swiglu(of.surrounded(case)), separately(of, case))


@each_format
def test_rows_of_tiles_elsewhere_are_left_alone(form: str) -> None:
    of = FORMATS[form]
    q, scales = of.gate_up(of.case((0, -1, 2, 2, 9, 0), 3, 2 * 64, 96))
    assert (q[[1, 4]] == 9).all() and (scales[[1, 4]] == 9).all() and (scales[[0, 2, 3, 5]] != 9).all()


def test_results_have_the_scales_that_are_asked_for(path: str) -> None:
    """By default those of the operands' kind; where one kind is not the other's, SwiGLU is a launch of its own."""
    for kind, of in FORMATS.items():
        if of.op != "fp8":
            continue
        case = of.case(OWNERS, 6, 2 * 96, 160)
        for form in (None, "rows", "blocks", "mx"):
            floats = kind in ("rows", "tensor", "blocks")
            into = kind if form is None else {"blocks": "blocks" if floats else "blocks_e8m0"}.get(form, form)
            got = of.swiglu(case, out_format=form, limit=7.0)
            assert_equal(got, FORMATS[into].activated(of.linear(case), limit=7.0))
            if path == "kernel":
                told = of.told(case, swiglu=True, out_format=form)
                assert told.kernel == ("fp8_gate_up" if into == kind in FUSED else "fp8_grouped_split")


def test_k_is_shared_where_work_groups_are_few_or_just_exceed_the_compute_units() -> None:
    for given, packing, want in (
        ((9, 257, 1024, 6144, 256), 1, (2, 1)),  # 144 blocks: twice as many fill none more
        ((9, 257, 512, 6144, 256), 1, (1, 2)),  # 72
        ((9, 257, 512, 6144, 288), 1, (1, 4)),  # with a compute unit for each of four that share one
        ((4, 128, 768, 6144, 256), 1, (1, 4)),  # 48
        ((9, 257, 512, 7168, 256), 2, (1, 4)),  # a few compute units have two, of half the bytes
        ((9, 257, 576, 7168, 256), 2, (1, 2)),  # 81
        ((4, 128, 768, 2816, 256), 2, (1, 4)), ((4, 128, 768, 2816, 256), 1, (1, 4)),  # 22 steps
        ((4, 128, 768, 2688, 256), 2, (2, 1)),
        ((4, 128, 768, 2688, 256), 1, (1, 2)), ((4, 128, 768, 1408, 256), 1, (1, 2)),
        ((4, 128, 768, 1280, 256), 1, (2, 1)),  # one whose halves would save less than their meeting costs
        ((18, 257, 1024, 6144, 256), 1, (1, 4)),  # 288
        ((36, 257, 1024, 6144, 256), 1, (1, 1)),  # 576
        ((64, 2, 1024, 6144, 256), 1, (1, 4)),  # 32: no more experts than there are
        # Blocks of half the bytes: with a second one nothing is gained, with a third one it is.
        *(((slots, 257, 512, 7168, 256), 2, want) for slots, want in
          ((36, (1, 1)), (64, (1, 1)), (65, (1, 4)), (72, (1, 4)), (73, (1, 1)))),
        # Choices of 257 experts reach 94, 97, 111 and 116 of them: 2.9, 3.0, 3.5 and 3.6 blocks for each compute unit.
        *(((slots, 257, 512, 7168, 256), 2, want) for slots, want in
          ((117, (1, 1)), (121, (1, 4)), (146, (1, 4)), (153, (1, 1)))),
        ((144, 257, 512, 2048, 256), 2, (1, 1)), ((144, 257, 512, 7168, 256), 1, (1, 1)),
        ((9, 257, 512, 768, 256), 1, (1, 1)),  # a short K
    ):  # fmt: skip
        assert split_of(*given, packing=packing) == want, (given, packing)
    for slots, experts, n, k, want in (
        (8, 128, 384, 4096, (2, 4)),  # 48 blocks
        (8, 128, 768, 4096, (1, 2)), (17, 128, 768, 4096, (1, 2)),  # 96 and 204
        (4, 32, 768, 1024, (1, 2)),  # a short K
    ):  # fmt: skip
        assert split_of_four(slots, experts, n, k, 256) == want


def test_fp8_gate_and_up_are_one_launch_where_slots_are_few() -> None:
    of_fp8 = [FORMATS[name] for name in FUSED if FORMATS[name].op == "fp8"]
    for of in of_fp8:
        for slots, kernel in ((512, "fp8_gate_up"), (513, "fp8_grouped_split")):
            told = of.told(of.case((0,) * slots, 1, 2 * 32, 256, block_m=64), swiglu=True)
            assert told.kernel == kernel and ("SwiGLU is not fused" in told.reason) == (slots == 513)
    with hipforge.batch_invariant():
        told = of_fp8[0].told(of_fp8[0].case((0, 1, 2), 3, 2 * 64, 256), swiglu=True)
        assert told.kernel == "fp8_grouped_split" and "SwiGLU is not fused: batch_invariant" in told.reason


SHARED = torch.zeros(13150)
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    *((form, given, message) for form in ("mxfp8", "blocks") for given, message in (
        ({"parts": 4}, "parts must be 1 or 2; got 4"),
        ({"groups": 8, "workspace": SHARED}, "groups must be 1, 2 or 4; got 8"),
        ({"rows": 48}, r"HF_ROWS.*48"),
        ({"out": torch.zeros(24, 96, dtype=torch.uint8)}, r"out must be contiguous float8_e4m3fn(uz)? \[25, 96\]"),
    )),
    ("mxfp8", {"scales": torch.zeros(25, 1).byte()}, r"out_scales must be contiguous uint8 \[25, 3\]; got uint8"),
    ("blocks", {"scales": torch.zeros(25, 2)}, r"out_scales must be contiguous float32 \[25, 1\], one scale per slot"),
)  # fmt: skip


@pytest.mark.parametrize(("form", "given", "message"), REFUSED)
def test_what_the_entry_does_not_take_is_refused(form: str, given: dict[str, Any], message: str) -> None:
    of = FORMATS[form]
    with pytest.raises(GuardError, match=message):
        of.gate_up(of.case(OWNERS, 6, 2 * 96, 160), **given)


@each_format
def test_a_workspace_that_is_missing_or_an_element_short_is_refused(form: str) -> None:
    of = FORMATS[form]
    case = of.case(OWNERS, 6, 2 * 96, 160)
    workspace = of.workspace(case, 2)
    assert workspace is not None
    count = len(workspace)
    with pytest.raises(GuardError, match=rf"needs a workspace: float32 \[{count}\]; got None"):
        of.gate_up(case, groups=2, workspace=None)
    with pytest.raises(GuardError, match=rf"must be float32 \[{count}\] or longer; got float32 \[{count - 1}\]"):
        of.gate_up(case, groups=2, workspace=workspace[:-1])


@each_format
def test_rows_of_w_that_are_no_pairs_of_blocks_are_refused(form: str) -> None:
    with pytest.raises(GuardError, match="N must be a multiple of 64"):
        FORMATS[form].gate_up(FORMATS[form].case(OWNERS, 6, 2 * 48, 160))


def test_what_the_op_does_not_take_is_refused() -> None:
    of = FORMATS["blocks"]
    case = of.case(OWNERS, 6, 2 * 96, 160)
    with pytest.raises(GuardError, match="out_format must be one of 'rows', 'blocks', 'mx'; got 'row'"):
        of.swiglu(case, out_format="row")
    with pytest.raises(GuardError, match="limit must be positive and finite, or None for no clamp; got 0"):
        of.swiglu(case, limit=0)
    with pytest.raises(GuardError, match="an even number of rows for each expert; got shape"):
        of.swiglu(of.case(OWNERS, 6, 9, 160))
