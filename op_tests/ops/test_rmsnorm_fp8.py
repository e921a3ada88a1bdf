"""Residual + RMS norm + FP8 on the emulated architecture: exact where operations are, bounded where they are not."""

from __future__ import annotations

import pytest
import torch
from helpers.fused_fp8_cases import U, assert_between, assert_same, normal, wrong_width

from hipforge import devices, emulator
from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.fp8_linear import fp8_dtypes
from hipforge.ops.reference.fp8_static import to_fp8_static
from hipforge.ops.reference.rmsnorm import normalised
from hipforge.ops.rmsnorm_fp8 import residual_rms

pytestmark = pytest.mark.gfx942

FP8 = fp8_dtypes("cpu")[0]
LARGEST = torch.finfo(FP8).max
DTYPES = [torch.float16, torch.bfloat16]
EPSILON = 1.5e-5
SHAPES = [(1, 1), (3, 8), (2, 24), (3, 37), (4, 128), (2, 520), (1, 4097), (2, 4096), (1, 16384), (2, 16392)]
BEYOND_LDS = 32776 if devices.current().default_arch == "gfx942" else 81984  # columns; 2 bytes each exceed the LDS


def problem(rows, cols, dtype, seed=0):
    x, residual = normal((rows, cols), dtype, seed), normal((rows, cols), dtype, seed + 1)
    return x, residual, normal((cols,), dtype, seed + 2)


def factor_ends(r, epsilon, scalar):
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
    return torch.nextafter(ends[0], torch.zeros(())), torch.nextafter(ends[1], torch.tensor(float("inf")))


def check(x, residual, weight, epsilon, scale, *, next_buffer=None, scalar=False, fp8_max=None, pinned=None):
    r = x + residual
    kept = residual.clone()
    q, returned = residual_rms(x, kept, weight, epsilon, scale, next_buffer, scalar, fp8_max=fp8_max)
    assert returned is kept
    assert_same(kept, r)
    one, other = (normalised(r, end, weight) for end in factor_ends(r, epsilon, scalar))
    if scale is not None:
        one, other = (to_fp8_static(y.float(), scale, FP8, fp8_max) for y in (one, other))
    # An interval of relative width w leaves an element open where a rounding step of relative size s >= 2^-11 (16-bit)
    # or 2^-4 (fp8) lies within it: with w < 60 U = 3.6e-6 that is a share of about w / s, 0.8 % and 0.01 %; small cases
    # are one open element away from their share, hence the count.
    open_share = (0.02 if scale is None else 0.002) + 2 / q.numel()
    assert_between(q, one, other, (1 - open_share) if pinned is None else pinned)
    if next_buffer is not None:
        assert not next_buffer.view(torch.int16).any()
    return q


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("output", ["half", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_residual_is_exact_and_codes_lie_between_the_ends(shape, dtype, output, scalar):
    scale = torch.tensor([0.017]) if output == "fp8" else None
    with emulator.options(checks="all"):
        check(*problem(*shape, dtype), EPSILON, scale, scalar=scalar)


@pytest.mark.parametrize("output", ["half", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_powers_of_two_are_exact(dtype, output):
    """Every row has mean 4 or 1/16, whose root is exact, and all other operations are exact too."""
    signs = torch.where(normal((2, 2048), torch.float32) > 0, 1.0, -1.0)
    r = signs * torch.tensor([[2.0], [0.25]])
    x = (r / 2).to(dtype)
    weight = torch.exp2(torch.arange(2048) % 7 - 3.0).to(dtype)
    scale = torch.tensor([0.25]) if output == "fp8" else None
    want = signs * weight.float()
    want = want.to(dtype) if scale is None else (want * 4).to(FP8)
    q, kept = residual_rms(x, x.clone(), weight, 0.0, scale)
    assert_same(q, want)
    assert_same(kept, r.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [BEYOND_LDS - 8, BEYOND_LDS, BEYOND_LDS + 1])
def test_rows_wider_than_lds_are_read_back_from_the_residual(cols, dtype):
    x, residual, weight = problem(1, cols, dtype)
    with emulator.options(checks="all"):
        check(x, residual, weight, EPSILON, torch.tensor([0.02]))


@pytest.mark.parametrize("scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("buffer_cols", [0, 1, 32, 57, 1024])
def test_next_buffer_is_zeroed_and_nothing_around_it(buffer_cols, scalar):
    rows = 3
    storage = torch.full((rows * buffer_cols + 64,), 1.0, dtype=torch.float16)
    buffer = storage[8 : 8 + rows * buffer_cols].view(rows, buffer_cols)
    check(*problem(rows, 128, torch.float16), EPSILON, torch.tensor([0.02]), next_buffer=buffer, scalar=scalar)
    assert bool((storage[:8] == 1).all()) and bool((storage[8 + rows * buffer_cols :] == 1).all())


@pytest.mark.parametrize("which", ["input", "residual", "weight"])
def test_unaligned_data_takes_the_scalar_path(which):
    tensors = dict(zip(("input", "residual", "weight"), problem(2, 64, torch.float16), strict=True))
    shifted = torch.empty(tensors[which].numel() + 1, dtype=torch.float16)[1:].view(tensors[which].shape)
    tensors[which] = shifted.copy_(tensors[which])
    check(tensors["input"], tensors["residual"], tensors["weight"], EPSILON, torch.tensor([0.02]), scalar=True)
    with emulator.counters() as counted:
        residual_rms(tensors["input"], tensors["residual"], tensors["weight"], EPSILON, torch.tensor([0.02]))
    assert counted.count("global_store_byte") > 0


@pytest.mark.parametrize("fp8_max", [None, 224.0, 1.0])
def test_codes_saturate(fp8_max):
    x, residual, weight = problem(2, 256, torch.float16)
    q = check(x, residual, weight, EPSILON, torch.tensor([1e-3]), fp8_max=fp8_max)
    assert q.float().abs().max() == (fp8_max or LARGEST)


def test_scales_that_are_not_ordinary():
    x, residual, weight = problem(2, 64, torch.float16)
    one = check(x, residual, weight, EPSILON, torch.tensor([1.0]))
    assert_same(check(x, residual, weight, EPSILON, torch.tensor([0.0])), one)
    assert_same(check(x, residual, weight, EPSILON, torch.tensor([-0.0])), one)
    assert not check(x, residual, weight, EPSILON, torch.tensor([float("inf")])).float().any()
    assert bool(check(x, residual, weight, EPSILON, torch.tensor([float("nan")])).float().isnan().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_elements_act_on_their_row_only(dtype, bad):
    x, residual, weight = problem(3, 128, dtype)
    x[1, 5] = bad
    q, kept = residual_rms(x, residual.clone(), weight, EPSILON, torch.tensor([0.02]))
    want, r = reference.residual_rms(x, residual, weight, EPSILON, torch.tensor([0.02]), FP8)
    assert_same(kept, r)
    assert_same(q[1], want[1])
    assert bool(q[::2].float().isfinite().all())


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("cols", [128, 999])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_keep_their_sign(dtype, cols, offset):
    # Compilers may fold a product and its rounding to half into an fma that loses the sign of -0.
    x, residual, weight = problem(2, cols, dtype)
    x[:, ::3] = residual[:, ::3] = -0.0
    q, _ = residual_rms(x, residual.clone(), weight, EPSILON, torch.tensor([0.02]), weight_offset=offset)
    want, _ = reference.residual_rms(x, residual, weight, EPSILON, torch.tensor([0.02]), FP8, weight_offset=offset)
    zero = want.float() == 0
    assert bool(zero[:, ::3].all())
    assert_same(q[zero], want[zero])


def test_a_row_of_zeros():
    zero = torch.zeros(2, 64, dtype=torch.float16)
    weight = torch.ones(64, dtype=torch.float16)
    assert not residual_rms(zero, zero.clone(), weight, 1e-5, torch.tensor([1.0]))[0].float().any()
    assert bool(residual_rms(zero, zero.clone(), weight, 0.0, torch.tensor([1.0]))[0].float().isnan().all())


def test_a_mean_that_is_subnormal_in_fp32():
    x = torch.full((1, 64), 2.0**-68, dtype=torch.bfloat16)
    weight = torch.ones(64, dtype=torch.bfloat16)
    # r = 2^-67, its square 2^-134 is subnormal, the root 2^67: y = 1 exactly.
    q, _ = residual_rms(x, x.clone(), weight, 0.0)
    assert_same(q, torch.ones(1, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(4, 16384), (3, 4096), (2, 2056)])
def test_bytes_moved_are_the_least_possible(rows, cols, dtype):
    x, residual, weight = problem(rows, cols, dtype)
    buffer = torch.ones(rows, 64, dtype=dtype)
    with emulator.counters() as counted:
        residual_rms(x, residual, weight, EPSILON, torch.tensor([0.02]), buffer)
    assert counted.launches == 1
    for name, loaded, stored in (
        ("input", 2, 0), ("residual", 2, 2), ("out", 0, 1), ("next_buffer", 0, 2 * buffer.numel() / x.numel())
    ):  # fmt: skip
        tensor = counted.tensors[name]
        assert (tensor.loaded, tensor.stored) == (loaded * x.numel(), stored * x.numel()), name
    # Every row reads the weight, from L2 after the first. What crosses the memory bus: 7 bytes an element, the weight
    # once and the buffer; the scale and the arguments are the rest.
    least = 7 * x.numel() + 2 * cols + 2 * buffer.numel()
    assert least <= counted.unique_bytes <= 1.02 * least
    assert counted.tensors["weight"].loaded == 2 * cols * rows
    # The only narrower access: the last chunk of a row that is not a multiple of 16 codes.
    assert wrong_width(counted.by_mnemonic) == (["global_store_dwordx2"] if cols // 8 % 2 else [])
    assert counted.scratch_bytes == 0


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_wave_order_changes_nothing(order):
    x, residual, weight = problem(3, 2048, torch.float16)
    scale = torch.tensor([0.02])
    want, _ = residual_rms(x, residual.clone(), weight, EPSILON, scale)
    with emulator.options(checks="all", wave_order=order):
        got, _ = residual_rms(x, residual.clone(), weight, EPSILON, scale)
    assert_same(got, want)


def test_refusals_name_argument_value_and_rule():
    x, residual, weight = problem(2, 64, torch.float16)
    scale = torch.tensor([1.0])
    other = torch.float8_e4m3fnuz if FP8 is torch.float8_e4m3fn else torch.float8_e4m3fn
    with pytest.raises(GuardError, match=r"input must be float16 or bfloat16; got float32"):
        residual_rms(x.float(), residual, weight, 1e-5)
    with pytest.raises(GuardError, match=r"input must be \[rows, cols\]; got .*\[64\]"):
        residual_rms(x[0], residual, weight, 1e-5)
    with pytest.raises(GuardError, match="input must be contiguous"):
        residual_rms(x[:, ::2], residual[:, ::2], weight[::2], 1e-5)
    with pytest.raises(GuardError, match="at least one column"):
        residual_rms(x[:, :0].contiguous(), residual[:, :0].contiguous(), weight[:0], 1e-5)
    with pytest.raises(GuardError, match=r"residual must be contiguous .* \[2, 64\], input's shape"):
        residual_rms(x, residual[:1], weight, 1e-5)
    with pytest.raises(GuardError, match=r"residual must be contiguous .*, input's shape and dtype"):
        residual_rms(x, residual.bfloat16(), weight, 1e-5)
    with pytest.raises(GuardError, match="residual is written and must not share memory with input"):
        residual_rms(x, x, weight, 1e-5)
    with pytest.raises(GuardError, match="residual is written and must not share memory with weight"):
        residual_rms(x, residual, residual[0], 1e-5)
    for taken, written, name in ((x, "next_buffer", "input"), (residual, "residual", "next_buffer")):
        with pytest.raises(GuardError, match=f"{written} is written and must not share memory with {name}"):
            residual_rms(x, residual, weight, 1e-5, scale, next_buffer=taken)
    with pytest.raises(GuardError, match=r"weight must be contiguous float16 \[64\], of input's dtype; got .*63"):
        residual_rms(x, residual, weight[:63], 1e-5)
    for epsilon in (-1e-5, float("nan"), float("inf")):
        with pytest.raises(GuardError, match="epsilon must be finite and at least 0; got"):
            residual_rms(x, residual, weight, epsilon)
    with pytest.raises(GuardError, match=r"scale must be one float32; got float16 \[1\]"):
        residual_rms(x, residual, weight, 1e-5, scale.half())
    with pytest.raises(GuardError, match=r"scale must be one float32; got float32 \[2\]"):
        residual_rms(x, residual, weight, 1e-5, torch.ones(2))
    for fp8_max in (0.0, -1.0, 2 * LARGEST, float("nan")):
        with pytest.raises(GuardError, match=f"fp8_max must be above 0 and at most {LARGEST:g}"):
            residual_rms(x, residual, weight, 1e-5, scale, fp8_max=fp8_max)
    with pytest.raises(GuardError, match=r"next_buffer must be contiguous float16 or bfloat16 \[2, buffer_cols\]"):
        residual_rms(x, residual, weight, 1e-5, scale, torch.empty(3, 8, dtype=torch.float16))
    with pytest.raises(GuardError, match="next_buffer must be"):
        residual_rms(x, residual, weight, 1e-5, scale, torch.empty(2, 8))
    from hipforge.ops.rmsnorm_fp8 import residual_rms_out

    with pytest.raises(GuardError, match="out must be contiguous"):
        out = torch.empty(2, 64, dtype=other)
        residual_rms_out(out, residual, None, None, x, weight, scale, 1e-5, 0.0, LARGEST, False, False)


@pytest.mark.full
@pytest.mark.parametrize("output", ["half", "fp8"])
@pytest.mark.parametrize("cols", [8, 24, 128, 512, 4096, 16384])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16, 32, 64, 128, 256])
def test_the_whole_grid_of_decode_shapes(rows, cols, output):
    buffer_cols = (0, 32, 57, 1024)[(rows + cols // 8) % 4]
    buffer = torch.ones(rows, buffer_cols, dtype=torch.float16)
    scale = torch.tensor([1.7]) if output == "fp8" else None
    for scalar in (False, True) if rows * cols <= 1 << 17 else (False,):
        check(*problem(rows, cols, torch.float16), EPSILON, scale, next_buffer=buffer, scalar=scalar)
