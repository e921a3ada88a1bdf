"""RMS norms without a residual, weight offsets, and the 16-bit copy beside a quantised result."""

from __future__ import annotations

import pytest
import torch
from helpers.fused_fp8_cases import assert_between, assert_same, normal, wrong_width

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.reference.fp8_static import to_fp8_static
from hipforge.ops.reference.rmsnorm import normalised
from hipforge.ops.rmsnorm_fp8 import residual_rms, residual_rms_mxfp8, rms_norm, rms_norm_fp8, rms_norm_mxfp8

from .test_rmsnorm_fp8 import BEYOND_LDS, DTYPES, EPSILON, FP8, factor_ends

pytestmark = pytest.mark.gfx942

OFFSETS = [0.0, 1.0]
# Per-head norms, rows that end inside a wave, and one of a model's hidden size; 37 takes the scalar path.
SHAPES = [(5, 128), (3, 37), (2, 544), (1, 6144)]
NAN, INF = float("nan"), float("inf")


def problem(rows, cols, dtype):
    return normal((rows, cols), dtype), normal((cols,), dtype, 2, 0.2)


def norm_ends(x, weight, offset, scalar=False):
    """The 16-bit results at the two ends of the root's error interval; fp32 roundings after it are the kernel's own."""
    return [normalised(x, end, weight, offset) for end in factor_ends(x, EPSILON, scalar)]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_lie_between_the_ends(shape, dtype, offset):
    x, weight = problem(*shape, dtype)
    scale, also, before = torch.tensor([0.017]), torch.empty_like(x), x.clone()
    one, other = norm_ends(x, weight, offset)
    # As in the tests with a residual: a relative interval of 3.6e-6 against steps of 2^-11 (16-bit) and 2^-4 (fp8).
    pinned = {16: 1 - (0.02 + 2 / x.numel()), 8: 1 - (0.002 + 2 / x.numel())}
    with emulator.options(checks="all"):
        y = rms_norm(x, weight, EPSILON, weight_offset=offset)
        q = rms_norm_fp8(x, weight, EPSILON, scale, weight_offset=offset, also_out=also)
    assert_between(y, one, other, pinned[16])
    assert_same(also, y)
    assert_between(q, *(to_fp8_static(end.float(), scale, FP8) for end in (one, other)), pinned[8])
    if shape[1] % 32 == 0:
        with emulator.options(checks="all"):
            got = rms_norm_mxfp8(x, weight, EPSILON, weight_offset=offset, also_out=also.zero_())
        assert_same(also, y)
        # Exact, given the 16-bit result that the same kernel wrote beside it.
        want_q, want_scales = reference.quantize_mxfp8(y, FP8)
        assert torch.equal(got[1], want_scales)
        assert_same(got[0], want_q)
    assert_same(x, before)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_of_the_sum_equals_the_norm_with_a_residual(dtype, offset):
    x, residual = normal((3, 544), dtype), normal((3, 544), dtype, 1)
    weight, scale = normal((544,), dtype, 2), torch.tensor([0.02])
    r, given = x + residual, {"weight_offset": offset}
    for buffer in (None, torch.ones(3, 57, dtype=dtype)):
        also, kept = torch.empty_like(x), residual.clone()
        q, _ = residual_rms(x, kept, weight, EPSILON, scale, buffer, **given, also_out=also)
        assert_same(kept, r)
        assert_same(q, rms_norm_fp8(r, weight, EPSILON, scale, **given))
        assert_same(also, rms_norm(r, weight, EPSILON, **given))
        kept = residual.clone()
        q, scales, _ = residual_rms_mxfp8(x, kept, weight, EPSILON, buffer, **given, also_out=also.zero_())
        want_q, want_scales = rms_norm_mxfp8(r, weight, EPSILON, **given)
        assert_same(q, want_q)
        assert torch.equal(scales, want_scales)
        assert_same(also, rms_norm(r, weight, EPSILON, **given))
        assert buffer is None or not buffer.any()
    assert_same(residual_rms(x, residual.clone(), weight, EPSILON, **given)[0], rms_norm(r, weight, EPSILON, **given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_are_exact_under_an_offset(dtype):
    """Rows of ±2 have mean 4, whose root is exact: y = ±(1 + w) for integers w, and nothing rounds."""
    signs = torch.where(normal((2, 512), torch.float32) > 0, 1.0, -1.0)
    weight = torch.arange(512) % 201 - 100.0
    y = signs * (1 + weight)
    x = (2 * signs).to(dtype)
    assert_same(rms_norm(x, weight.to(dtype), 0.0, weight_offset=1.0), y.to(dtype))
    scale = torch.tensor([0.5])
    got = rms_norm_fp8(x, weight.to(dtype), 0.0, scale, weight_offset=1.0)
    assert_same(got, (2 * y).to(FP8))
    q, scales = rms_norm_mxfp8(x, weight.to(dtype), 0.0, weight_offset=1.0)
    want_q, want_scales = reference.quantize_mxfp8(y, FP8)
    assert torch.equal(scales, want_scales)
    assert_same(q, want_q)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_offset_and_weight_is_not_rounded(dtype):
    """1 + w is halfway to the next 16-bit number and would round to 1; 1.5 (1 + w) rounds up to that after 1.5."""
    step = torch.finfo(dtype).eps
    x = torch.tensor([1.5] * 24 + [0.5] * 40, dtype=dtype)[None]  # mean of squares 1
    y = rms_norm(x, torch.full((64,), step / 2, dtype=dtype), 0.0, weight_offset=1.0)
    assert_same(y, torch.tensor([1.5 + step] * 24 + [0.5] * 40)[None].to(dtype))


@pytest.mark.parametrize("cols", [BEYOND_LDS - 8, BEYOND_LDS])
def test_rows_wider_than_lds_are_read_back_from_the_input(cols):
    x, weight = problem(1, cols, torch.bfloat16)
    with emulator.options(checks="all"):
        y = rms_norm(x, weight, EPSILON, weight_offset=1.0)
    assert_between(y, *norm_ends(x, weight, 1.0), 1 - 0.02)


@pytest.mark.parametrize("which", ["x", "weight", "also"])
def test_unaligned_data_gives_results_between_the_ends_too(which):
    x, weight = problem(2, 64, torch.float16)
    tensors = {"x": x, "weight": weight, "also": torch.empty_like(x)}
    moved = tensors[which]
    tensors[which] = torch.empty(moved.numel() + 1, dtype=moved.dtype)[1:].view(moved.shape).copy_(moved)
    with emulator.options(checks="all"):
        rms_norm_mxfp8(tensors["x"], tensors["weight"], EPSILON, also_out=tensors["also"])
    assert_between(tensors["also"], *norm_ends(x, weight, 0.0, scalar=True), 1 - (0.02 + 2 / x.numel()))


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("offset", OFFSETS)
def test_rows_that_are_not_finite_act_on_themselves_only(offset, bad):
    x, weight = problem(3, 128, torch.bfloat16)
    x[1, 70] = bad
    q, scales = rms_norm_mxfp8(x, weight, EPSILON, weight_offset=offset)
    want_q, want_scales = reference.rms_norm_mxfp8(x, weight, EPSILON, FP8, offset)
    assert torch.equal(scales[1], want_scales[1]) and scales[1, 2] == 255
    assert_same(q[1], want_q[1])
    assert bool(q[::2].float().isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_moved_are_the_least_possible(dtype):
    rows, cols = 3, 4096
    x, weight = problem(rows, cols, dtype)
    n = rows * cols
    for copy in (False, True):
        also = torch.empty_like(x) if copy else None
        with emulator.counters() as counted:
            rms_norm_mxfp8(x, weight, EPSILON, also_out=also)
        assert counted.launches == 1
        assert (counted.tensors["input"].loaded, counted.tensors["out"].stored) == (2 * n, n)
        assert counted.tensors["block_scales"].stored == n // 32
        assert not copy or counted.tensors["also_out"].stored == 2 * n
        least = (5 if copy else 3) * n + 2 * cols + n // 32
        assert least <= counted.unique_bytes <= 1.02 * least
        assert wrong_width(counted.by_mnemonic) == ["global_store_byte"]  # the scales
        assert counted.scratch_bytes == 0


def test_refusals_name_argument_value_and_rule():
    x, weight = problem(2, 64, torch.float16)
    residual, scale = normal((2, 64), torch.float16, 1), torch.ones(1)
    with pytest.raises(GuardError, match=r"input must be float16 or bfloat16; got float32"):
        rms_norm(x.float(), weight, EPSILON)
    with pytest.raises(GuardError, match=r"input must be \[rows, cols\]; got .*\[64\]"):
        rms_norm_mxfp8(x[0], weight, EPSILON)
    with pytest.raises(GuardError, match=r"weight must be contiguous float16 \[64\], of input's dtype; got .*63"):
        rms_norm_fp8(x, weight[:63], EPSILON, scale)
    with pytest.raises(GuardError, match=r"scale_tensor must be a torch\.Tensor; got NoneType"):
        rms_norm_fp8(x, weight, EPSILON, None)
    for value in (INF, NAN):
        with pytest.raises(GuardError, match=f"weight_offset must be finite; got {value}"):
            rms_norm(x, weight, EPSILON, weight_offset=value)
    with pytest.raises(GuardError, match="out is written and must not share memory with x"):
        rms_norm(x, weight, EPSILON, out=x)
    with pytest.raises(GuardError, match="also_out is the 16-bit copy of a quantised result; without a scale"):
        residual_rms(x, residual, weight, EPSILON, also_out=torch.empty_like(x))
    for also in (torch.empty(2, 63, dtype=torch.float16), torch.empty(2, 64, dtype=torch.bfloat16)):
        with pytest.raises(GuardError, match=r"also_out must be contiguous .*, input's shape and dtype"):
            rms_norm_fp8(x, weight, EPSILON, scale, also_out=also)
    for taken, said in ((x, "also_out .* memory with input"), (residual, "residual .* memory with also_out")):
        with pytest.raises(GuardError, match=said):
            residual_rms_mxfp8(x, residual, weight, EPSILON, also_out=taken)
    with pytest.raises(GuardError, match="next_buffer is written and must not share memory with also_out"):
        buffer = torch.empty_like(x)
        residual_rms_mxfp8(x, residual, weight, EPSILON, buffer, also_out=buffer)
    with pytest.raises(GuardError, match="scale_out is written and must not share memory with weight"):
        rms_norm_mxfp8(x, weight, EPSILON, scale_out=weight.view(torch.uint8)[:4].view(2, 2))
    out = torch.empty(2, 64, dtype=FP8)
    with pytest.raises(GuardError, match="out is written and must not share memory with scale_out"):
        rms_norm_mxfp8(x, weight, EPSILON, out=out, scale_out=out.view(torch.uint8)[0, :4].view(2, 2))
    with pytest.raises(GuardError, match="out is written and must not share memory with scale"):
        rms_norm_fp8(x, weight, EPSILON, out.view(torch.float32)[0, :1], out=out)
