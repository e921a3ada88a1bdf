"""The MX-FP8 variants of the fused norm and activation: scales and codes against the reference quantiser."""

from __future__ import annotations

import pytest
import torch
from helpers.fused_fp8_cases import assert_between, assert_same, normal, wrong_width
from helpers.mxfp8_cases import assert_close

from hipforge import devices, emulator
from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.fp8_linear import fp8_dtypes
from hipforge.ops.reference.rmsnorm import normalised
from hipforge.ops.reference.swiglu import swiglu
from hipforge.ops.rmsnorm_fp8 import residual_rms_mxfp8
from hipforge.ops.swiglu_fp8 import swiglu_mxfp8

from .test_rmsnorm_fp8 import factor_ends
from .test_swiglu_fp8 import relative_error

pytestmark = pytest.mark.gfx942

FP8 = fp8_dtypes("cpu")[0]
DTYPES = [torch.float16, torch.bfloat16]
EPSILON = 1.5e-5
# Columns: one block, an odd count of them, rows that end inside a wave and inside a pair of chunks per thread.
SHAPES = [(1, 32), (3, 96), (2, 544), (2, 2080), (1, 16384)]


def assert_mx_between(got, one, other):
    """Scales and codes lie between the results of the two ends; blocks whose scale is open are few and left out."""
    (q, scales), (q1, s1), (q2, s2) = got, one, other
    assert scales.dtype == torch.uint8 and scales.shape == s1.shape
    decided = s1 == s2
    # The scale turns at one mantissa of the maximum, which an interval of 4e-6 meets with that order of probability.
    assert (~decided).sum() <= 1
    assert torch.equal(scales[decided], s1[decided])
    assert bool(((torch.minimum(s1, s2) <= scales) & (scales <= torch.maximum(s1, s2))).all())
    blocks = [x.unflatten(-1, (-1, 32)).view(torch.uint8)[decided].view(FP8) for x in (q, q1, q2)]
    # As in the tests of the static scale: a relative 4e-6 against steps of 2^-4.
    assert_between(*blocks, 1 - (0.002 + 2 / q.numel()))


def problem(rows, cols, dtype):
    return normal((rows, cols), dtype), normal((rows, cols), dtype, 1), normal((cols,), dtype, 2)


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_residual_is_exact_and_codes_lie_between_the_ends(shape, dtype, scalar):
    x, residual, weight = problem(*shape, dtype)
    kept, buffer = residual.clone(), torch.ones(shape[0], 57, dtype=dtype)
    with emulator.options(checks="all"):
        q, scales, returned = residual_rms_mxfp8(x, kept, weight, EPSILON, buffer, scalar)
    assert returned is kept and not buffer.any()
    assert_same(kept, x + residual)
    ends = (normalised(kept, end, weight) for end in factor_ends(kept, EPSILON, scalar))
    assert_mx_between((q, scales), *(reference.quantize_mxfp8(y, FP8) for y in ends))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_of_powers_of_two_is_exact(dtype):
    r = torch.where(normal((2, 2048), torch.float32) > 0, 2.0, -2.0)  # mean 4, root and quotients exact
    x = (r / 2).to(dtype)
    weight = torch.exp2(torch.arange(2048) // 5 % 17 - 8.0).to(dtype)
    want_q, want_scales = reference.quantize_mxfp8((r / 2 * weight.float()).to(dtype), FP8)
    q, scales, _ = residual_rms_mxfp8(x, x.clone(), weight, 0.0)
    assert torch.equal(scales, want_scales)
    assert_same(q, want_q)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rms_of_a_row_that_is_not_finite(bad):
    x, residual, weight = problem(3, 128, torch.float16)
    x[1, 70] = bad
    q, scales, _ = residual_rms_mxfp8(x, residual.clone(), weight, EPSILON)
    want_q, want_scales, _ = reference.residual_rms_mxfp8(x, residual, weight, EPSILON, FP8)
    assert torch.equal(scales[1], want_scales[1]) and scales[1, 2] == 255
    assert_same(q[1], want_q[1])


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_codes_lie_between_the_ends(shape, dtype, scalar):
    rows, d = shape
    gate_up, buffer = normal((rows, 2 * d), dtype, 0, 2.0), torch.ones(rows, 57, dtype=dtype)
    with emulator.options(checks="all"):
        got = swiglu_mxfp8(gate_up, buffer, force_scalar=scalar)
    assert not buffer.any()
    exact, relative = relative_error(gate_up)
    ends = ((exact * side).float() for side in (1 - relative, 1 + relative))
    assert_mx_between(got, *(reference.quantize_mxfp8(y, FP8) for y in ends))


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "shuffled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_maximum_gets_the_scale_of_the_reference(dtype, ordered, scalar):
    """All 65536 bit patterns as up, and gates of 64, so that y = 64 up exactly: NaN, infinity, overflow, subnormals."""
    up = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    if not ordered:
        up = up[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    up = up.view(32, 2048)
    gate_up = torch.cat([torch.full_like(up, 64.0), up], dim=1)
    want_q, want_scales = reference.swiglu_mxfp8(gate_up, FP8)
    q, scales = swiglu_mxfp8(gate_up, force_scalar=scalar)
    assert torch.equal(scales, want_scales)
    assert_same(q, want_q)
    assert len(scales.unique()) >= (36 if dtype is torch.float16 else 248) or not ordered


def test_scales_of_the_smallest_maxima():
    """Maxima n 2^-149, n < 256: a quotient by the format's maximum of 2^-150 or less is zero and gets byte 0."""
    gate_up = torch.zeros(1, 2 * 256 * 32, dtype=torch.bfloat16)
    gate, up = gate_up[0].chunk(2)
    # silu(2^-16) is 2^-17 (1 + 4e-6), too little more to change n 2^-149 once the product is rounded to a subnormal.
    gate[:] = 2.0**-16
    up[::32] = torch.arange(256) * 2.0**-132
    assert torch.equal(swiglu(gate_up)[0, ::32], torch.arange(256) * 2.0**-149)
    want_q, want_scales = reference.swiglu_mxfp8(gate_up, FP8)
    half = int(torch.finfo(FP8).max) // 2
    assert want_scales[0].tolist() == [0] * (half + 1) + [1] * (255 - half)
    q, scales = swiglu_mxfp8(gate_up)
    assert torch.equal(scales, want_scales)
    assert_same(q, want_q)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_moved_are_the_least_possible(dtype):
    rows, cols = 3, 4096
    x, residual, weight = problem(rows, cols, dtype)
    with emulator.counters() as rms:
        residual_rms_mxfp8(x, residual, weight, EPSILON)
    with emulator.counters() as activation:
        swiglu_mxfp8(normal((rows, 2 * cols), dtype))
    n = rows * cols
    assert [(rms.tensors[name].loaded, rms.tensors[name].stored) for name in ("input", "residual")] == [
        (2 * n, 0),
        (2 * n, 2 * n),
    ]
    assert (activation.tensors["gate_up"].loaded, activation.tensors["gate_up"].stored) == (4 * n, 0)
    for counted, least in ((rms, 7 * n + 2 * cols + n // 32), (activation, 5 * n + n // 32)):
        for name, stored in (("out", n), ("block_scales", n // 32)):
            assert (counted.tensors[name].loaded, counted.tensors[name].stored) == (0, stored)
        assert least <= counted.unique_bytes <= 1.02 * least
        assert wrong_width(counted.by_mnemonic) == ["global_store_byte"]  # the scales
        assert counted.scratch_bytes == 0


def test_results_feed_the_mxfp8_gemm():
    """norm, gate and up projection, activation, down projection, each by one op, against the references in fp64."""
    from hipforge.ops.mxfp8_gemm import mxfp8_gemm
    from hipforge.ops.reference.fnuz import mx_fn_to_fnuz

    rows, hidden, inner = 2, 512, 256
    x, residual, weight = problem(rows, hidden, torch.bfloat16)
    up_weight = reference.quantize_mxfp8(normal((2 * inner, hidden), torch.bfloat16, 3, 0.05))
    down_weight = reference.quantize_mxfp8(normal((hidden, inner), torch.bfloat16, 4, 0.05))

    if devices.current().default_arch == "gfx942":
        up_weight, down_weight = mx_fn_to_fnuz(*up_weight), mx_fn_to_fnuz(*down_weight)
    normed = residual_rms_mxfp8(x, residual, weight, EPSILON)[:2]
    gate_up = mxfp8_gemm(*normed, *up_weight)
    assert gate_up is not None
    assert_close(gate_up, reference.mxfp8_mm(*normed, *up_weight, torch.float64, torch.float64))
    activated = swiglu_mxfp8(gate_up)
    down = mxfp8_gemm(*activated, *down_weight)
    assert down is not None
    assert_close(down, reference.mxfp8_mm(*activated, *down_weight, torch.float64, torch.float64))


def test_refusals_name_argument_value_and_rule():
    x, residual, weight = problem(2, 40, torch.float16)
    with pytest.raises(GuardError, match="cols must be a multiple of 32, the block that shares a scale; got 40"):
        residual_rms_mxfp8(x, residual, weight, 1e-5)
    with pytest.raises(GuardError, match="d must be a multiple of 32, the block that shares a scale; got 20"):
        swiglu_mxfp8(x)
    with pytest.raises(GuardError, match=r"input must be float16 or bfloat16; got float32"):
        residual_rms_mxfp8(x.float(), residual, weight, 1e-5)
    with pytest.raises(GuardError, match=r"gate_up must be \[rows, 2 d\]; got .*\[2, 39\]"):
        swiglu_mxfp8(x[:, :39])
    from hipforge.ops.rmsnorm_fp8 import residual_rms_mxfp8_out
    from hipforge.ops.swiglu_fp8 import swiglu_mxfp8_out

    x, residual, weight = problem(2, 64, torch.float16)
    few = torch.empty(2, 1, dtype=torch.uint8)
    rule = r"block_scales must be contiguous uint8 or float8_e8m0fnu \[2, {}\]; got uint8 \[2, 1\]"
    with pytest.raises(GuardError, match=rule.format(2)):
        numbers = 1e-5, 0.0, False, False
        residual_rms_mxfp8_out(torch.empty(2, 64, dtype=FP8), few, residual, None, None, x, weight, *numbers)
    gate_up = normal((2, 128), torch.float16)
    with pytest.raises(GuardError, match=rule.format(2)):
        swiglu_mxfp8_out(torch.empty(2, 64, dtype=FP8), few, None, gate_up, 1.0, 0.0, float("inf"), False, False, False)
