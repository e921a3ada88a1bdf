"""RMS norms with and without a residual in every result format, on the emulated architecture.

The 16-bit result lies between two bounds; codes and scales are then exact, given that result beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from helpers.fused_fp8_cases import (
    DTYPES,
    DYNAMIC,
    FP8,
    INF,
    LARGEST,
    NAN,
    U,
    all_same,
    assert_between,
    assert_same,
    normal,
    quantiser,
    unaligned,
    wrong_width,
)

from hipforge import devices, emulator
from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.reference.rmsnorm import normalised
from hipforge.ops.rmsnorm_fp8 import (
    residual_rms,
    residual_rms_fp8_dynamic,
    residual_rms_mxfp8,
    residual_rms_mxfp8_out,
    residual_rms_out,
    rms_norm,
    rms_norm_fp8,
    rms_norm_fp8_dynamic,
    rms_norm_mxfp8,
)

pytestmark = pytest.mark.gfx942

EPSILON = 1.5e-5
SCALE = torch.tensor([0.017])
OFFSETS = (0.0, 1.0)
BEYOND_LDS = 32776 if devices.current().default_arch == "gfx942" else 81984  # columns; 2 bytes each exceed the LDS


@dataclass(frozen=True)
class Form:
    """The ops with and without a residual that give a format, and what they take beside a norm's own arguments."""

    summing: Callable[..., Any]
    alone: Callable[..., Any]
    given: dict[str, Any] = field(default_factory=dict)


FORMS = {
    "half": Form(residual_rms, rms_norm),
    "fp8": Form(residual_rms, rms_norm_fp8, {"scale_tensor": SCALE}),
    "mx": Form(residual_rms_mxfp8, rms_norm_mxfp8),
    **{name: Form(residual_rms_fp8_dynamic, rms_norm_fp8_dynamic, given) for name, given in DYNAMIC.items()},
}
# Rows of one chunk and less, that end inside a wave and inside a pair of chunks per thread, with whole and short blocks
# of 32 and of 128, and ones that are longer than what work-groups keep in registers.
SHAPES = (
    (1, 1), (3, 8), (2, 24), (3, 32), (3, 37), (5, 128), (2, 200), (2, 544), (1, 4097), (2, 4096), (1, 16384),
    (2, 17000), (1, 17001),
)  # fmt: skip

def problem(rows: int, cols: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return normal((rows, cols), dtype), normal((rows, cols), dtype, 1), normal((cols,), dtype, 2)


def norm(
    form: str, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, epsilon: float = EPSILON,
    **given: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The results beside the residual, which becomes the sum in place."""
    of = FORMS[form]
    given = {**of.given, **given}
    if residual is None:
        got = of.alone(x, weight, epsilon, **given)
        return got if isinstance(got, tuple) else (got,)
    *results, returned = of.summing(x, residual, weight, epsilon, **given)
    assert returned is residual
    return tuple(results)


def factor_ends(r: torch.Tensor, epsilon: float, scalar: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The two ends of rsqrt(mean + epsilon) as the kernel may compute it, [rows, 1] float32."""
    cols = r.shape[1]
    width = 1 if scalar or cols % 8 else 8
    threads = min(1024, -(-cols // width // 64) * 64)
    # Roundings on the longest path of the sum: the elements of one thread, 6 levels in a wave, one per wave; then the
    # division by cols and the addition of epsilon. All terms are positive, so each costs at most a relative U.
    steps = width * -(-cols // width // threads) + 6 + threads // 64 + 2
    # The root halves it; the instruction is within one unit in the last place (2 U); one U of slack for second order.
    relative = (steps / 2 + 3) * U
    exact = (r.double().square().mean(dim=-1, keepdim=True) + float(torch.tensor(epsilon))).rsqrt()
    ends = (exact * (1 - relative)).float(), (exact * (1 + relative)).float()
    return torch.nextafter(ends[0], torch.zeros(())), torch.nextafter(ends[1], torch.tensor(INF))


def check(
    form: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, scalar: bool = False,
    offset: float = 0.0, buffer: torch.Tensor | None = None, scale: torch.Tensor = SCALE, fp8_max: float | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The norm of a sum, twice: without and with the 16-bit copy; the second by the op without a residual if it may."""
    r, kept, copy = x + residual, residual.clone(), torch.empty_like(x)
    given: dict[str, Any] = {"weight_offset": offset}
    if form == "fp8":
        given |= {"scale_tensor": scale, "fp8_max": fp8_max}
    got = norm(form, x, weight, kept, next_buffer=buffer, force_scalar=scalar, **given)
    assert_same(kept, r)
    assert buffer is None or not buffer.view(torch.int16).any()
    beside = {} if form == "half" else {"also_out": copy}
    if scalar:
        again = norm(form, x, weight, residual.clone(), force_scalar=True, **given, **beside)
    else:
        again = norm(form, r, weight, **given, **beside)
    all_same(again, got)
    y = got[0] if form == "half" else copy
    # An interval of relative width w leaves an element open where a 16-bit rounding step, relative 2^-11, lies within
    # it: with w < 60 U = 3.6e-6 that is a share of about 0.8 %; small cases are one open element away from it.
    ends = (normalised(r, end, weight, offset) for end in factor_ends(r, EPSILON, scalar))
    assert_between(y, *ends, 1 - (0.02 + 2 / y.numel()))
    if form != "half":
        all_same(got, quantiser(form, scale, fp8_max)(y))
    return got


CASES = [
    # Both types and offsets, in turn; every form sees each pair with a third of the shapes.
    (form, shape, scalar, *tuple(product(DTYPES, OFFSETS))[(number + at) % 4])
    for number, form in enumerate(FORMS)
    for at, shape in enumerate(SHAPES)
    for scalar in (False, True)
    if form != "mx" or shape[1] % 32 == 0
]


@pytest.mark.parametrize(("form", "shape", "scalar", "dtype", "offset"), CASES, ids=str)
def test_the_sum_is_exact_and_its_norm_lies_between_the_ends(
    form: str, shape: tuple[int, int], scalar: bool, dtype: torch.dtype, offset: float
) -> None:
    buffer = torch.ones(shape[0], 57, dtype=dtype)
    with emulator.options(checks="all", wave_order="random"):
        check(form, *problem(*shape, dtype), scalar=scalar, offset=offset, buffer=buffer)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_where_nothing_rounds_results_are_exact(form: str, dtype: torch.dtype, offset: float) -> None:
    """Every row has mean 4 or 1/16, whose root is exact; weights are powers of two, or integers under an offset."""
    signs = torch.where(normal((2, 2048), torch.float32) > 0, 1.0, -1.0)
    x = (signs * torch.tensor([[1.0], [0.125]])).to(dtype)
    column = torch.arange(2048)
    weight = column % 201 - 100.0 if offset else torch.exp2(column // 5 % 17 - 8.0)
    y = signs * (weight + offset)
    scale = torch.tensor([0.25])
    given = {"scale_tensor": scale} if form == "fp8" else {}
    want = (y.to(dtype),) if form == "half" else quantiser(form, scale)(y)
    all_same(norm(form, x, weight.to(dtype), x.clone(), 0.0, weight_offset=offset, **given), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_offset_and_weight_is_not_rounded(dtype: torch.dtype) -> None:
    """1 + w is halfway to the next 16-bit number and would round to 1; 1.5 (1 + w) rounds up to that after 1.5."""
    step = torch.finfo(dtype).eps
    x = torch.tensor([1.5] * 24 + [0.5] * 40, dtype=dtype)[None]  # mean of squares 1
    y = rms_norm(x, torch.full((64,), step / 2, dtype=dtype), 0.0, weight_offset=1.0)
    assert_same(y, torch.tensor([1.5 + step] * 24 + [0.5] * 40)[None].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [BEYOND_LDS - 8, BEYOND_LDS, BEYOND_LDS + 1])
def test_rows_wider_than_lds_are_read_back(cols: int, dtype: torch.dtype) -> None:
    with emulator.options(checks="all"):
        check("fp8", *problem(1, cols, dtype), offset=1.0)


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("buffer_cols", [0, 1, 32, 57, 1024])
def test_next_buffer_is_zeroed_and_nothing_around_it(buffer_cols: int, scalar: bool) -> None:
    rows = 3
    storage = torch.full((rows * buffer_cols + 64,), 1.0, dtype=torch.float16)
    buffer = storage[8 : 8 + rows * buffer_cols].view(rows, buffer_cols)
    check("fp8", *problem(rows, 128, torch.float16), buffer=buffer, scalar=scalar)
    assert bool((storage[:8] == 1).all()) and bool((storage[8 + rows * buffer_cols :] == 1).all())


@pytest.mark.parametrize("which", range(3), ids=["input", "residual", "weight"])
def test_unaligned_data_takes_the_scalar_path(which: int) -> None:
    tensors = list(problem(2, 64, torch.float16))
    want = norm("mx", tensors[0], tensors[2], tensors[1].clone(), force_scalar=True)
    tensors[which] = unaligned(tensors[which])
    x, residual, weight = tensors
    with emulator.counters() as counted:
        all_same(norm("mx", x, weight, residual, also_out=unaligned(x) if which == 0 else None), want)
    assert counted.count("global_store_byte") > 2


@pytest.mark.parametrize("fp8_max", [None, 224.0, 1.0])
def test_codes_saturate(fp8_max: float | None) -> None:
    (q,) = check("fp8", *problem(2, 256, torch.float16), scale=torch.tensor([1e-3]), fp8_max=fp8_max)
    assert q.float().abs().max() == (fp8_max or LARGEST)


def test_static_scales_that_are_not_ordinary() -> None:
    given = problem(2, 64, torch.float16)
    (one,) = check("fp8", *given, scale=torch.tensor([1.0]))
    for zero in (0.0, -0.0):
        assert_same(check("fp8", *given, scale=torch.tensor([zero]))[0], one)
    assert not check("fp8", *given, scale=torch.tensor([INF]))[0].float().any()
    assert bool(check("fp8", *given, scale=torch.tensor([NAN]))[0].float().isnan().all())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("form", FORMS)
def test_elements_that_are_not_finite_act_on_their_row_only(form: str, offset: float, bad: float) -> None:
    x, residual, weight = problem(3, 128, DTYPES[bad == INF])
    x[1, 70] = bad
    kept, plain = residual.clone(), x + residual
    got = norm(form, x, weight, kept, weight_offset=offset)
    assert_same(kept, plain)
    alone = reference.rms_norm(plain, weight, EPSILON, offset)
    want = (alone,) if form == "half" else quantiser(form, SCALE)(alone)
    for one, other in zip(got, want, strict=True):
        assert_same(one[1], other[1])
    assert bool(got[0][::2].float().isfinite().all())


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("cols", [128, 999])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_keep_their_sign(dtype: torch.dtype, cols: int, offset: float) -> None:
    # Compilers may fold a product and its rounding to half into an fma that loses the sign of -0.
    x, residual, weight = problem(2, cols, dtype)
    x[:, ::3] = residual[:, ::3] = -0.0
    (q,) = norm("fp8", x, weight, residual.clone(), weight_offset=offset)
    want, _ = reference.residual_rms(x, residual, weight, EPSILON, SCALE, FP8, weight_offset=offset)
    zero = want.float() == 0
    assert bool(zero[:, ::3].all())
    assert_same(q[zero], want[zero])


def test_a_row_of_zeros_and_a_mean_that_is_subnormal() -> None:
    zero, ones = torch.zeros(2, 64, dtype=torch.float16), torch.ones(64, dtype=torch.float16)
    assert not residual_rms(zero, zero.clone(), ones, 1e-5, torch.tensor([1.0]))[0].float().any()
    assert bool(residual_rms(zero, zero.clone(), ones, 0.0, torch.tensor([1.0]))[0].float().isnan().all())
    x = torch.full((1, 64), 2.0**-68, dtype=torch.bfloat16)
    # r = 2^-67, its square 2^-134 is subnormal in fp32, the root 2^67: y = 1 exactly.
    assert_same(residual_rms(x, x.clone(), ones.bfloat16(), 0.0)[0], torch.ones(1, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(("form", "rows", "cols"), [("fp8", 4, 16384), ("fp8", 2, 2056), ("mx", 3, 4096)])
def test_bytes_moved_are_the_least_possible(form: str, rows: int, cols: int, copy: bool, with_residual: bool) -> None:
    dtype = DTYPES[copy]
    x, residual, weight = problem(rows, cols, dtype)
    buffer, also = torch.ones(rows, 64, dtype=dtype), torch.empty_like(x) if copy else None
    more = {"residual": residual, "next_buffer": buffer} if with_residual else {}
    with emulator.counters() as counted:
        norm(form, x, weight, also_out=also, **more)
    assert counted.launches == 1 and counted.scratch_bytes == 0
    n, scales = x.numel(), x.numel() // 32 if form == "mx" else 0
    moved = {"input": (2 * n, 0), "out": (0, n), "weight": (2 * cols * rows, 0)}
    moved |= {"residual": (2 * n, 2 * n), "next_buffer": (0, 2 * buffer.numel())} if with_residual else {}
    moved |= {"also_out": (0, 2 * n)} if copy else {}
    moved |= {"block_scales": (0, scales)} if scales else {}
    for name, wanted in moved.items():
        assert (counted.tensors[name].loaded, counted.tensors[name].stored) == wanted, name
    # Every row reads the weight, from L2 after the first. The scale and the arguments are the rest.
    least = sum(map(sum, moved.values())) - 2 * cols * (rows - 1)
    assert least <= counted.unique_bytes <= 1.02 * least
    # The only narrower accesses: scales, and the last chunk of a row that is not a multiple of 16 codes.
    narrow = ["global_store_byte"] if scales else ["global_store_dwordx2"] if cols // 8 % 2 else []
    assert wrong_width(counted.by_mnemonic) == narrow


@pytest.mark.parametrize("form", DYNAMIC)
def test_outputs_may_be_given_and_empty_batches_launch_nothing(form: str) -> None:
    x, _, weight = problem(2, 256, torch.bfloat16)
    want = norm(form, x, weight)
    out, scales = torch.empty_like(want[0]), torch.empty_like(want[1])
    with emulator.counters() as counted:
        got = norm(form, x, weight, out=out, scale_out=scales)
    assert counted.launches == 1 and got[0] is out and got[1] is scales
    all_same(got, want)
    with emulator.counters() as counted:
        assert norm(form, x[:0], weight)[0].shape == (0, 256)
    assert not counted.launches


X, RESIDUAL, WEIGHT = problem(2, 64, torch.float16)
ONE, OUT, FEW = torch.ones(1), torch.empty(2, 64, dtype=FP8), torch.empty(2, 1, dtype=torch.uint8)
OTHER = torch.float8_e4m3fnuz if FP8 is torch.float8_e4m3fn else torch.float8_e4m3fn
BLOCK_SCALES = r"block_scales must be contiguous uint8 or float8_e8m0fnu \[2, 2\]; got uint8 \[2, 1\]"
GOOD = {
    residual_rms: {"input": X, "residual": RESIDUAL, "weight": WEIGHT, "epsilon": 1e-5, "scale_tensor": ONE},
    residual_rms_mxfp8: {"input": X, "residual": RESIDUAL, "weight": WEIGHT, "epsilon": 1e-5},
    rms_norm: {"x": X, "weight": WEIGHT, "epsilon": 1e-5},
    rms_norm_fp8: {"x": X, "weight": WEIGHT, "epsilon": 1e-5, "scale_tensor": ONE},
    rms_norm_mxfp8: {"x": X, "weight": WEIGHT, "epsilon": 1e-5},
}
REFUSED: tuple[tuple[Callable[..., Any], dict[str, Any], str], ...] = (
    (residual_rms, {"input": X.float()}, r"input must be float16 or bfloat16; got float32"),
    (residual_rms_mxfp8, {"input": X.float()}, r"input must be float16 or bfloat16; got float32"),
    (rms_norm, {"x": X.float()}, r"x must be float16 or bfloat16; got float32"),
    (residual_rms, {"input": X[0]}, r"input must be \[rows, cols\]; got .*\[64\]"),
    (rms_norm_mxfp8, {"x": X[0]}, r"x must be \[rows, cols\]; got .*\[64\]"),
    (residual_rms, {"input": X[:, ::2], "residual": RESIDUAL[:, ::2], "weight": WEIGHT[::2]}, "input must be contig"),
    (residual_rms, {"input": torch.empty(2, 0).half(), "residual": torch.empty(2, 0).half(), "weight": WEIGHT[:0]},
     "at least one column"),
    (residual_rms_mxfp8, {"input": X[:, :40].contiguous(), "residual": X[:, :40].clone(), "weight": WEIGHT[:40]},
     "cols must be a multiple of 32, the block that shares a scale; got 40"),
    (residual_rms, {"residual": RESIDUAL[:1]}, r"residual must be contiguous .* \[2, 64\], input's shape"),
    (residual_rms, {"residual": RESIDUAL.bfloat16()}, r"residual must be contiguous .*, input's shape and dtype"),
    (residual_rms, {"weight": WEIGHT[:63]}, r"weight must be contiguous float16 \[64\], of input's dtype; got .*63"),
    (rms_norm_fp8, {"weight": WEIGHT[:63]}, r"weight must be contiguous float16 \[64\], of input's dtype; got .*63"),
    *((residual_rms, {"epsilon": bad}, "epsilon must be finite and at least 0; got") for bad in (-1e-5, NAN, INF)),
    *((rms_norm, {"weight_offset": bad}, f"weight_offset must be finite; got {bad}") for bad in (INF, NAN)),
    (residual_rms, {"scale_tensor": ONE.half()}, r"scale must be one float32; got float16 \[1\]"),
    (residual_rms, {"scale_tensor": torch.ones(2)}, r"scale must be one float32; got float32 \[2\]"),
    (rms_norm_fp8, {"scale_tensor": None}, r"scale_tensor must be a torch\.Tensor; got NoneType"),
    *((residual_rms, {"fp8_max": bad}, f"fp8_max must be above 0 and at most {LARGEST:g}")
      for bad in (0.0, -1.0, 2 * LARGEST, NAN)),
    (residual_rms, {"next_buffer": torch.empty(3, 8).half()},
     r"next_buffer must be contiguous float16 or bfloat16 \[2, buffer_cols\]"),
    (residual_rms, {"next_buffer": torch.empty(2, 8)}, "next_buffer must be"),
    (residual_rms, {"scale_tensor": None, "also_out": torch.empty_like(X)},
     "also_out is the 16-bit copy of a quantised result; without a scale"),
    *((rms_norm_fp8, {"also_out": also}, r"also_out must be contiguous .*, input's shape and dtype")
      for also in (torch.empty(2, 63).half(), torch.empty(2, 64).bfloat16())),
)  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "message"), REFUSED)
def test_refusals_name_argument_value_and_rule(op: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GuardError, match=message):
        op(**{**GOOD[op], **changes})


def test_the_entries_refuse_outputs_that_do_not_fit() -> None:
    with pytest.raises(GuardError, match="out must be contiguous"):
        residual_rms_out(OUT.view(OTHER), RESIDUAL, None, None, X, WEIGHT, ONE, 1e-5, 0.0, LARGEST, False, False)
    with pytest.raises(GuardError, match=BLOCK_SCALES):
        residual_rms_mxfp8_out(OUT, FEW, RESIDUAL, None, None, X, WEIGHT, 1e-5, 0.0, False, False)


def test_formats_that_do_not_exist_are_refused(path: str) -> None:
    for given, message in (
        ({"out_format": "mx"}, "out_format must be one of 'rows', 'blocks'; got 'mx'"),
        ({"e8m0": True}, "e8m0 scales are for"), ({"scale_out": torch.empty(3)}, "scale"),
        ({"out_format": "blocks", "e8m0": True, "scale_out": torch.empty(2, 2)}, "scale_out must"),
    ):  # fmt: skip
        with pytest.raises(GuardError, match=message):
            rms_norm_fp8_dynamic(X, WEIGHT, 1e-5, **given)
    for form in DYNAMIC:
        with pytest.raises(GuardError):
            norm(form, X[:, :0], WEIGHT[:0])


@pytest.mark.full
@pytest.mark.parametrize("form", ["half", "fp8"])
@pytest.mark.parametrize("cols", [8, 24, 128, 512, 4096, 16384])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16, 32, 64, 128, 256])
def test_the_whole_grid_of_decode_shapes(rows: int, cols: int, form: str) -> None:
    buffer_cols = (0, 32, 57, 1024)[(rows + cols // 8) % 4]
    for scalar in (False, True) if rows * cols <= 1 << 17 else (False,):
        buffer = torch.ones(rows, buffer_cols, dtype=torch.float16)
        check(form, *problem(rows, cols, torch.float16), scale=torch.tensor([1.7]), buffer=buffer, scalar=scalar)
