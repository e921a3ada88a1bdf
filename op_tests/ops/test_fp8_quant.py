"""The tensor-wise quantiser against torch, bit for bit, on the emulated architecture."""

from __future__ import annotations

import pytest
import torch

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.fp8_linear import fp8_dtypes, to_fp8
from hipforge.ops.fp8_quant import fp8_quant_tensorwise

pytestmark = [pytest.mark.gfx942, pytest.mark.usefixtures("every_checker")]

FORWARD, GRADIENT = fp8_dtypes("cpu")
SHAPES = [(1, 1), (1, 16), (64, 64), (65, 63), (128, 192), (16, 1000), (3, 7), (257, 48)]


def bits(x):
    return x.contiguous().view(torch.uint8)


def data(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("fp8_dtype", [FORWARD, GRADIENT], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_scale_and_transpose_equal_torch(shape, dtype, fp8_dtype):
    x = data(shape, dtype)
    want, want_inv = to_fp8(x, fp8_dtype)
    for transpose in (False, True):
        got, inv, got_t = fp8_quant_tensorwise(x, fp8_dtype, transpose=transpose)
        assert torch.equal(inv, want_inv)
        assert torch.equal(bits(got), bits(want))
        if transpose:
            assert torch.equal(bits(got_t), bits(want.t()))
        else:
            assert got_t is None


@pytest.mark.parametrize("magnitude", [1e-38, 1e-13, 1e-6, 3e4, 3e38])
def test_every_magnitude_scales_as_in_torch(magnitude):
    x = data((64, 80), torch.float32)
    x = x / x.abs().max() * magnitude
    want, want_inv = to_fp8(x, FORWARD)
    got, inv, _ = fp8_quant_tensorwise(x)
    assert torch.equal(inv, want_inv) and torch.equal(bits(got), bits(want))


def test_every_bf16_value_rounds_as_in_torch():
    codes = torch.arange(0, 1 << 16, dtype=torch.int32)
    values = codes.to(torch.uint16).view(torch.bfloat16)
    x = values[values.float().abs() <= 448.0].clone()
    x[0] = 448.0  # scale 1 on gfx950: the codes are the values' own
    for fp8_dtype in (FORWARD, GRADIENT):
        want, _ = to_fp8(x, fp8_dtype)
        got, _, _ = fp8_quant_tensorwise(x, fp8_dtype)
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_input_makes_every_product_with_the_scale_nan(bad):
    x = torch.ones(64, 64)
    x[13, 5] = bad
    got, inv, got_t = fp8_quant_tensorwise(x, transpose=True)
    want, want_inv = to_fp8(x, FORWARD)
    assert torch.equal(torch.isnan(got.float()), torch.isnan(want.float()))
    assert torch.equal(torch.isnan(got_t.float()), torch.isnan(want.float()).t())
    assert torch.equal(torch.isnan(inv), torch.isnan(want_inv))


def test_the_zero_tensor_and_the_empty_tensor():
    for shape in ((16, 16), (0, 16), (0,)):
        want, want_inv = to_fp8(torch.zeros(shape), FORWARD)
        got, inv, _ = fp8_quant_tensorwise(torch.zeros(shape))
        assert got.shape == want.shape and torch.equal(inv, want_inv) and torch.equal(bits(got), bits(want))


def test_unaligned_data_takes_the_scalar_path():
    storage = data((4097,), torch.bfloat16)
    x = storage[1:]
    want, want_inv = to_fp8(x, FORWARD)
    got, inv, _ = fp8_quant_tensorwise(x)
    assert torch.equal(inv, want_inv) and torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(("transpose", "passes"), [(False, 1), (True, 2)])
def test_bytes_moved_are_the_least_possible(transpose, passes):
    x = data((256, 512), torch.bfloat16)
    with emulator.counters() as counted:
        fp8_quant_tensorwise(x, transpose=transpose)
    # x is read by the amax pass and by the cast; every code is written once per copy.
    assert counted.tensors["x"].loaded == 2 * x.numel() * 2
    stored = sum(counted.tensors[name].stored for name in ("out", "out_t") if name in counted.tensors)
    assert stored == passes * x.numel()


def test_refusals_name_argument_value_and_rule():
    x = torch.zeros(16, 16)
    with pytest.raises(GuardError, match=r"x must be float32, float16 or bfloat16; got int8"):
        fp8_quant_tensorwise(x.to(torch.int8))
    with pytest.raises(GuardError, match=r"contiguous; got strides \(1, 16\)"):
        fp8_quant_tensorwise(x.t())
    with pytest.raises(GuardError, match=r"x must be \[R, C\] for a transposed copy; got float32 \[16\]"):
        fp8_quant_tensorwise(x[0], transpose=True)
    with pytest.raises(GuardError, match=r"got torch\.bfloat16"):
        fp8_quant_tensorwise(x, torch.bfloat16)
    other = torch.float8_e4m3fnuz if FORWARD is torch.float8_e4m3fn else torch.float8_e4m3fn
    with pytest.raises(GuardError, match="converts to no other"):
        fp8_quant_tensorwise(x, other)
