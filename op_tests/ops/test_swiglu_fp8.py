"""SwiGLU in every result format on the emulated architecture: exact where the operations are, bounded where not."""

from __future__ import annotations

from collections.abc import Callable
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

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.reference.fp8_static import inverse_scale
from hipforge.ops.reference.swiglu import LOG2_E, swiglu
from hipforge.ops.swiglu_fp8 import swiglu_fp8, swiglu_fp8_dynamic, swiglu_fp8_out, swiglu_mxfp8, swiglu_mxfp8_out

pytestmark = pytest.mark.gfx942

SCALE = torch.tensor([0.3])
FORMS = ("fp8", "mx", *DYNAMIC)
MINIMAX = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {}, "minimax": MINIMAX, "gpt_oss": {**MINIMAX, "interleaved": True}, "limit": {"limit": 2.0},
    "alpha": {"alpha": 1.702}, "beta": {"beta": -0.5},
}  # fmt: skip
# (rows, d): odd counts of chunks, one and several work-groups, chunks that end inside a row, no multiple of 8, short
# blocks of 128, and more than what work-groups keep in registers.
SHAPES = (
    (1, 1), (3, 8), (2, 24), (1, 32), (3, 37), (3, 96), (4, 128), (3, 200), (5, 544), (1, 4097), (2, 4096), (3, 6656),
    (1, 16384), (3, 17000), (1, 17001),
)  # fmt: skip

def run(form: str, gate_up: torch.Tensor, scale: torch.Tensor = SCALE, **given: Any) -> tuple[torch.Tensor, ...]:
    """Codes, and the scales where the launch chooses them."""
    if form == "fp8":
        return (swiglu_fp8(gate_up, scale, **given),)
    return swiglu_mxfp8(gate_up, **given) if form == "mx" else swiglu_fp8_dynamic(gate_up, **DYNAMIC[form], **given)


def joined(gate: torch.Tensor, up: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Both [rows, d] as the op takes them."""
    return torch.stack((gate, up), -1).flatten(-2) if interleaved else torch.cat((gate, up), -1)


def relative_error(
    gate_up: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact y in float64, and by how much the kernel's (as float32) may differ, relatively."""
    x = gate_up.double()
    gate, up = (x[:, 0::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    constant = float(torch.tensor(alpha * LOG2_E))
    exact = gate / (1 + torch.exp2(-gate * constant)) * (up + beta)
    # The product g alpha log2 e is rounded once, which changes the power relatively by ln 2 |g| alpha log2 e U =
    # |alpha g| U; the instruction is within one unit in the last place, 2 U. Of that the sum 1 + power keeps the share
    # sigmoid(-alpha g). The two sums, the quotient and up to two products round once each; the exact value becomes
    # float32 before the cast: one more, and one for second order. Where |g| U reaches 1/2 the power is 0 or infinite
    # whatever its last bits.
    power = alpha * gate
    return exact, (((power.abs() * 1.001 + 2) * torch.sigmoid(-power) + 7) * U).clamp(max=0.5)


def check(
    gate_up: torch.Tensor, scale: torch.Tensor = SCALE, *, scalar: bool = False, buffer: torch.Tensor | None = None,
    fp8_max: float | None = None, **parameters: Any,
) -> torch.Tensor:  # fmt: skip
    """The static format's codes, between those of the two ends of what the roundings and the exponential allow."""
    q = swiglu_fp8(gate_up, scale, buffer, force_scalar=scalar, fp8_max=fp8_max, **parameters)
    exact, relative = relative_error(gate_up, **parameters)
    limit = LARGEST if fp8_max is None else fp8_max
    scaled = exact * inverse_scale(scale).double()
    ends = [(scaled * side).float().clamp(-limit, limit).to(FP8) for side in (1 - relative, 1 + relative)]
    # The interval is at most 2 * 20 U = 2.4e-6 wide against steps of at least 2^-4: a share of 4e-5 is open; and small
    # cases are one element away from their share, hence the count.
    assert_between(q, *ends, 1 - (0.001 + 2 / q.numel()))
    assert buffer is None or not buffer.view(torch.int16).any()
    return q


def check_mx(gate_up: torch.Tensor, *, scalar: bool = False, **parameters: Any) -> None:
    """Scales and codes lie between the results of the two ends; blocks whose scale is open are few and left out."""
    q, scales = swiglu_mxfp8(gate_up, force_scalar=scalar, **parameters)
    exact, relative = relative_error(gate_up, **parameters)
    (q1, s1), (q2, s2) = (
        reference.quantize_mxfp8((exact * side).float(), FP8) for side in (1 - relative, 1 + relative)
    )
    assert scales.dtype == torch.uint8 and scales.shape == s1.shape
    decided = s1 == s2
    # The scale turns at one mantissa of the maximum, which an interval of 4e-6 meets with that order of probability.
    assert (~decided).sum() <= 1
    assert torch.equal(scales[decided], s1[decided])
    assert bool(((torch.minimum(s1, s2) <= scales) & (scales <= torch.maximum(s1, s2))).all())
    blocks = [x.unflatten(-1, (-1, 32)).view(torch.uint8)[decided].view(FP8) for x in (q, q1, q2)]
    assert_between(*blocks, 1 - (0.002 + 2 / q.numel()))


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:-2], ids=str)
def test_codes_lie_between_the_ends(shape: tuple[int, int], dtype: torch.dtype, scalar: bool) -> None:
    rows, d = shape
    gate_up = normal((rows, 2 * d), dtype, 0, 2.0)
    with emulator.options(checks="all"):
        check(gate_up, torch.tensor([0.017]), scalar=scalar)
        if d % 32 == 0:
            check_mx(gate_up, scalar=scalar)


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_codes_with_parameters_lie_between_the_ends(parameters: str, dtype: torch.dtype, scalar: bool) -> None:
    # Gates and ups reach 16, so that clamps act; an odd number of chunks ends inside a pair of lanes.
    gate_up = normal((3, 2 * 544), dtype, 0, 4.0)
    with emulator.options(checks="all"):
        check(gate_up, scalar=scalar, **PARAMETERS[parameters])
        check_mx(gate_up, scalar=scalar, **PARAMETERS[parameters])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("form", "shape"), [(form, shape) for form in FORMS for shape in SHAPES if form != "mx" or shape[1] % 32 == 0]
)
def test_where_the_sigmoid_is_1_results_are_exact(form: str, shape: tuple[int, int], interleaved: bool) -> None:
    """Gates of 32 and more, so that y is an exact product: 1 + 2^-46 is 1 in fp32."""
    dtype = DTYPES[(shape[1] // 8 + interleaved) % 2]
    gate, up = normal(shape, dtype).abs() + 32, normal(shape, dtype, 1)
    want = quantiser(form, SCALE)(gate.float() * up.float())
    for scalar in (False, True):
        buffer = torch.ones(shape[0], 5).to(dtype)
        with emulator.options(checks="all", wave_order="random"):
            got = run(
                form, joined(gate, up, interleaved), interleaved=interleaved, force_scalar=scalar, next_buffer=buffer
            )
        assert not buffer.any()
        all_same(got, want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_clamped_integers_are_exact(form: str, dtype: torch.dtype, interleaved: bool) -> None:
    """Gates of 0, and of 32 or more after the clamp at 64, are silu's own result; so y = g (u + 3), an integer."""
    gate = torch.tensor([0.0, 32.0, 64.0, 65.0, 1000.0]).repeat(64)
    up = torch.arange(320) % 201 - 100.0
    y = (gate.clamp(max=64) * (up.clamp(-64, 64) + 3))[None]
    gate_up = joined(gate, up, interleaved).to(dtype)[None]
    scale = torch.tensor([32.0])
    all_same(run(form, gate_up, scale, beta=3.0, limit=64.0, interleaved=interleaved), quantiser(form, scale)(y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gate(dtype: torch.dtype) -> None:
    """All 65536 bit patterns as gates, up 1, so that the code is silu's own."""
    gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    finite = torch.where(gate.float().isfinite(), gate, torch.zeros_like(gate)).view(128, 512)
    check(joined(finite, torch.ones_like(finite)), torch.tensor([0.5]))


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "shuffled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_maximum_gets_the_scale_of_the_reference(dtype: torch.dtype, ordered: bool, scalar: bool) -> None:
    """All 65536 bit patterns as up, and gates of 64, so that y = 64 up exactly: NaN, infinity, overflow, subnormals."""
    up = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    if not ordered:
        up = up[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    up = up.view(32, 2048)
    gate_up = joined(torch.full_like(up, 64.0), up)
    got = swiglu_mxfp8(gate_up, force_scalar=scalar)
    all_same(got, reference.swiglu_mxfp8(gate_up, FP8))
    assert len(got[1].unique()) >= (36 if dtype is torch.float16 else 248) or not ordered


def test_scales_of_the_smallest_maxima() -> None:
    """Maxima n 2^-149, n < 256: a quotient by the format's maximum of 2^-150 or less is zero and gets byte 0."""
    gate_up = torch.zeros(1, 2 * 256 * 32, dtype=torch.bfloat16)
    gate, up = gate_up[0].chunk(2)
    # silu(2^-16) is 2^-17 (1 + 4e-6), too little more to change n 2^-149 once the product is rounded to a subnormal.
    gate[:] = 2.0**-16
    up[::32] = torch.arange(256) * 2.0**-132
    assert torch.equal(swiglu(gate_up)[0, ::32], torch.arange(256) * 2.0**-149)
    want = reference.swiglu_mxfp8(gate_up, FP8)
    half = int(LARGEST) // 2
    assert want[1][0].tolist() == [0] * (half + 1) + [1] * (255 - half)
    all_same(swiglu_mxfp8(gate_up), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_quotient_is_not_a_product_with_a_reciprocal(dtype: torch.dtype) -> None:
    """1 + 2^127 and a little more have subnormal reciprocals, which the instruction flushes; the quotient is normal."""
    gate_up = joined(torch.linspace(-88.0, -88.35, 64), torch.full((64,), 1024.0)).to(dtype)[None]
    q = check(gate_up, torch.tensor([2.0**-112]))
    assert bool((q.float() < -1).all())


# (limit, scale, (gate, up, code times scale)...): NaN passes clamps, infinities stop at them; 32 is its own silu.
NOT_FINITE = (
    (None, 1.0, ((INF, 2, LARGEST), (INF, -2, -LARGEST), (INF, 0, NAN), (-INF, 1, NAN), (-INF, 0, NAN), (NAN, 1, NAN),
                 (1, NAN, NAN), (0, INF, NAN), (-100, 1, -0.0), (-1, -INF, LARGEST))),
    (32.0, 64.0, ((NAN, 1, NAN), (1, NAN, NAN), (64, INF, 1024), (INF, 2, 64), (INF, -INF, -1024), (INF, 0, 0),
                  (-INF, 1, NAN), (64, -2, -64))),
)  # fmt: skip


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("limit", "scale", "elements"), NOT_FINITE, ids=["plain", "limit"])
def test_gates_and_ups_that_are_not_finite(
    limit: float | None, scale: float, elements: Any, dtype: torch.dtype, scalar: bool
) -> None:
    gate, up, want = torch.tensor(elements).repeat(16, 1).T
    gate_up = joined(gate, up).to(dtype)[None]
    got = swiglu_fp8(gate_up, torch.tensor([scale]), limit=limit, force_scalar=scalar)
    assert_same(got, (want / scale).to(FP8)[None])
    q, scales = swiglu_mxfp8(gate_up, limit=limit, force_scalar=scalar)
    assert bool((scales == 255).all()) and bool(q.float().isnan().all())


@pytest.mark.parametrize("form", DYNAMIC)
@pytest.mark.parametrize("bad", (NAN, INF))
def test_what_is_not_finite_spoils_its_row_or_block(form: str, bad: float) -> None:
    gate, up = torch.full((2, 300), 32.0).bfloat16(), torch.ones(2, 300).bfloat16()
    up[1, 140] = bad
    got = run(form, joined(gate, up))
    all_same(got, quantiser(form, SCALE)(gate.float() * up.float()))
    spoilt = got[1] == 255 if form == "blocks_e8m0" else got[1].isnan()
    assert spoilt.nonzero().tolist() == ([[1]] if form == "rows" else [[1, 1]])
    zeros = run(form, torch.zeros(1, 256).bfloat16())
    assert not zeros[0].view(torch.uint8).any() and (zeros[1] == (127 if form == "blocks_e8m0" else 1.0)).all()


@pytest.mark.parametrize("parameters", [{}, {"limit": 4.0}], ids=["plain", "limit"])
def test_a_negative_zero_keeps_its_sign_without_beta(parameters: dict[str, float]) -> None:
    gate_up = joined(torch.full((32,), 2.0), torch.full((32,), -0.0)).half()[None]
    q = swiglu_fp8(gate_up, torch.ones(1), **parameters)
    assert torch.equal(q.view(torch.uint8), torch.full((1, 32), -0.0).to(FP8).view(torch.uint8))


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("buffer_cols", [0, 1, 32, 57, 1024])
def test_next_buffer_is_zeroed_and_nothing_around_it(buffer_cols: int, scalar: bool) -> None:
    rows = 3
    storage = torch.full((rows * buffer_cols + 64,), 1.0, dtype=torch.float16)
    buffer = storage[8 : 8 + rows * buffer_cols].view(rows, buffer_cols)
    check(normal((rows, 128), torch.float16, 0, 2.0), buffer=buffer, scalar=scalar)
    assert bool((storage[:8] == 1).all()) and bool((storage[8 + rows * buffer_cols :] == 1).all())


@pytest.mark.parametrize("parameters", ["plain", "gpt_oss"])
def test_unaligned_data_takes_the_scalar_path(parameters: str) -> None:
    gate_up, given = normal((2, 128), torch.float16, 0, 4.0), PARAMETERS[parameters]
    with emulator.counters() as counted:
        got = swiglu_fp8(unaligned(gate_up), SCALE, **given)
    assert counted.count("global_store_byte") > 0
    assert_same(got, swiglu_fp8(gate_up, SCALE, **given))


@pytest.mark.parametrize("fp8_max", [None, 224.0, 1.0])
def test_codes_saturate(fp8_max: float | None) -> None:
    q = check(normal((2, 512), torch.float16, 0, 2.0), torch.tensor([1e-3]), fp8_max=fp8_max)
    assert q.float().abs().max() == (fp8_max or LARGEST)


def test_static_scales_that_are_not_ordinary() -> None:
    gate_up = normal((2, 128), torch.float16, 0, 2.0)
    one = check(gate_up, torch.tensor([1.0]))
    for zero in (0.0, -0.0):
        assert_same(swiglu_fp8(gate_up, torch.tensor([zero])), one)
    assert not swiglu_fp8(gate_up, torch.tensor([INF])).float().any()
    assert bool(swiglu_fp8(gate_up, torch.tensor([NAN])).float().isnan().all())


@pytest.mark.parametrize("parameters", ["plain", "gpt_oss"])
@pytest.mark.parametrize(("form", "rows", "d"), [("fp8", 3, 6656), ("fp8", 3, 2056), ("mx", 3, 2048)])
def test_bytes_moved_are_the_least_possible(form: str, rows: int, d: int, parameters: str) -> None:
    dtype = DTYPES[d == 6656]
    gate_up, buffer = normal((rows, 2 * d), dtype, 0, 2.0), torch.ones(rows, 64, dtype=dtype)
    with emulator.counters() as counted:
        run(form, gate_up, next_buffer=buffer, **PARAMETERS[parameters])
    assert counted.launches == 1 and counted.scratch_bytes == 0
    scales = rows * d // 32 if form == "mx" else 0
    moved = {"gate_up": (4 * rows * d, 0), "out": (0, rows * d), "next_buffer": (0, 2 * buffer.numel())}
    moved |= {"block_scales": (0, scales)} if scales else {}
    for name, wanted in moved.items():
        assert (counted.tensors[name].loaded, counted.tensors[name].stored) == wanted, name
    least = sum(map(sum, moved.values()))  # the scale and the arguments are the rest
    assert least <= counted.unique_bytes <= 1.02 * least
    # The only narrower accesses: scales, and the last chunk of a result that is not a multiple of 16 codes.
    narrow = ["global_store_byte"] if scales else ["global_store_dwordx2"] if rows * d // 8 % 2 else []
    assert wrong_width(counted.by_mnemonic) == narrow


def test_a_batch_without_rows_launches_nothing() -> None:
    with emulator.counters() as counted:
        assert swiglu_fp8_dynamic(torch.empty(0, 256).bfloat16())[0].shape == (0, 128)
    assert not counted.launches


GATE_UP, ONE = normal((2, 128), torch.float16), torch.ones(1)
OTHER = torch.float8_e4m3fnuz if FP8 is torch.float8_e4m3fn else torch.float8_e4m3fn
OUT = torch.empty(2, 64, dtype=FP8)
LIMIT = "limit must be positive and finite, or None for no clamp; got {}"
GOOD = {swiglu_fp8: {"gate_up": GATE_UP, "scale_tensor": ONE}, swiglu_mxfp8: {"gate_up": GATE_UP}}
REFUSED: tuple[tuple[Callable[..., Any], dict[str, Any], str], ...] = (
    (swiglu_fp8, {"gate_up": GATE_UP.float()}, r"gate_up must be float16 or bfloat16; got float32"),
    (swiglu_fp8, {"gate_up": GATE_UP[:, :63].contiguous()}, r"gate_up must be \[rows, 2 d\]; got .*\[2, 63\]"),
    (swiglu_mxfp8, {"gate_up": GATE_UP[:, :63].contiguous()}, r"gate_up must be \[rows, 2 d\]; got .*\[2, 63\]"),
    (swiglu_fp8, {"gate_up": GATE_UP[0]}, r"gate_up must be \[rows, 2 d\]; got .*\[128\]"),
    (swiglu_fp8, {"gate_up": GATE_UP[:, ::2]}, "gate_up must be contiguous"),
    (swiglu_fp8, {"gate_up": torch.empty(2, 0).half()}, "d at least 1"),
    (swiglu_mxfp8, {"gate_up": GATE_UP[:, :40].contiguous()},
     "d must be a multiple of 32, the block that shares a scale; got 20"),
    (swiglu_fp8, {"scale_tensor": ONE.half()}, r"scale must be one float32; got float16 \[1\]"),
    *((swiglu_fp8, {"fp8_max": bad}, f"fp8_max must be above 0 and at most {LARGEST:g}")
      for bad in (0.0, -1.0, 2 * LARGEST, NAN)),
    (swiglu_fp8, {"next_buffer": torch.empty(3, 8).half()},
     r"next_buffer must be contiguous float16 or bfloat16 \[2, buffer_cols\]"),
    *((op, {"limit": bad}, LIMIT.format(bad)) for op in (swiglu_fp8, swiglu_mxfp8) for bad in (0.0, -7.0, INF, NAN)),
    *((swiglu_fp8, {name: bad}, f"{name} must be finite; got {bad}")
      for name in ("alpha", "beta") for bad in (INF, NAN)),
    (swiglu_fp8, {"out": torch.empty(2, 32, dtype=FP8)},
     r"out must be contiguous float8_e4m3fn(uz)? \[2, 64\].*; got .* \[2, 32\]"),
)  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "message"), REFUSED)
def test_refusals_name_argument_value_and_rule(op: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GuardError, match=message):
        op(**{**GOOD[op], **changes})


def test_the_entries_refuse_outputs_that_do_not_fit() -> None:
    options = 1.0, 0.0, INF, False, False, False
    with pytest.raises(GuardError, match="out must be contiguous"):
        swiglu_fp8_out(OUT.view(OTHER), None, GATE_UP, ONE, LARGEST, *options)
    rule = r"block_scales must be contiguous uint8 or float8_e8m0fnu \[2, 2\]; got uint8 \[2, 1\]"
    with pytest.raises(GuardError, match=rule):
        swiglu_mxfp8_out(OUT, torch.empty(2, 1, dtype=torch.uint8), None, GATE_UP, *options)


def test_formats_that_do_not_exist_are_refused(path: str) -> None:
    for given, message in (
        ({"out_format": "mx"}, "out_format must be one of 'rows', 'blocks'; got 'mx'"),
        ({"e8m0": True}, "e8m0 scales are for"), ({"scale_out": torch.empty(3)}, "scale"),
        ({"out_format": "blocks", "e8m0": True, "scale_out": torch.empty(2, 2)}, "scale_out must"),
    ):  # fmt: skip
        with pytest.raises(GuardError, match=message):
            swiglu_fp8_dynamic(GATE_UP, **given)
    for form in DYNAMIC:
        with pytest.raises(GuardError):
            run(form, torch.ones(3, 0).bfloat16())


@pytest.mark.full
@pytest.mark.parametrize("d", [8, 24, 128, 512, 4096, 8192])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16, 32, 64, 128, 256])
def test_the_whole_grid_of_decode_shapes(rows: int, d: int) -> None:
    buffer_cols = (0, 32, 57, 1024)[(rows + d // 8) % 4]
    for scalar in (False, True) if rows * d <= 1 << 17 else (False,):
        buffer = torch.ones(rows, buffer_cols, dtype=torch.float16)
        check(normal((rows, 2 * d), torch.float16), torch.tensor([1.7]), buffer=buffer, scalar=scalar)
