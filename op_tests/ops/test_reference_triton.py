"""Triton against the references: quantisers with the same integer steps, bit for bit, and the dot_scaled fallback.

The kernels are compiled by Triton for gfx950 and run on the emulator.
"""

import pytest
import torch
import triton
import triton.language as tl

from hipforge.emulator import triton as emulated
from hipforge.ops.reference import mxfp8_mm, quantize_mxfp4, quantize_mxfp8
from hipforge.ops.triton import mxfp8_dot_scaled as fallback
from hipforge.ops.triton.mxfp8_kernels import mxfp8_dot_scaled_kernel


@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, s_ptr, ROWS: tl.constexpr, MODE: tl.constexpr, EMAX: tl.constexpr, MAX: tl.constexpr,
    FRACTION: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    """ROWS blocks of 32 bf16 elements per program: e8m0 byte by integer steps, then one code per byte."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    # As integers the magnitudes order like the numbers, with NaN above infinity.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exponent = bits >> 23
    if MODE == "round_up":
        biased = exponent - EMAX + ((bits & 0x7FFFFF) > FRACTION).to(tl.int32)
        biased = tl.where(bits > (MAX >> 1), tl.maximum(biased, 1), biased)
    elif MODE == "even":
        exponent = (bits + 0x200000) >> 23
        biased = tl.where(exponent == 255, 254, exponent - EMAX)
    else:
        biased = exponent - EMAX
    byte = tl.minimum(tl.maximum(biased, 0), 254)
    inverse = tl.where(byte == 254, 0x00400000, (254 - byte) << 23).to(tl.float32, bitcast=True)
    scaled = x * inverse[:, None]
    if FP4:
        m = tl.abs(scaled)
        code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32) + (m >= 1.75).to(tl.int32)
        code += (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
        code |= ((x.to(tl.int32, bitcast=True) >> 31) & 1) << 3
        tl.store(q_ptr + at, code.to(tl.uint8))
    else:
        clamped = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        tl.store(q_ptr + at, clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
    tl.store(s_ptr + row, byte.to(tl.uint8))


def every_finite_bf16():
    """All finite values, shuffled, 32 to a block: block maxima of every size, elements far below them."""
    bits = torch.arange(65536, dtype=torch.int32)
    bits = bits[(bits & 0x7F80) != 0x7F80]
    near = bits.view(-1, 32)  # neighbours share an exponent, so that elements keep bits
    far = bits[torch.randperm(bits.numel(), generator=torch.Generator().manual_seed(0))].view(-1, 32)
    blocks = torch.cat((near, far))
    blocks = blocks[: blocks.shape[0] // 64 * 64]
    return blocks.to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("mode", ["round_up", "round_down"])
def test_a_triton_mxfp8_quantiser_agrees_bit_for_bit(mode):
    x = every_finite_bf16()
    q, s = torch.empty(x.shape, dtype=torch.uint8), torch.empty(x.shape[0], dtype=torch.uint8)
    constants = {"ROWS": 64, "MODE": mode, "EMAX": 8, "MAX": 448, "FRACTION": 0x600000, "FP4": False}
    emulated.jit(quantize_kernel, arch="gfx950")[(x.shape[0] // 64,)](x, q, s, **constants)
    expected_q, expected_s = quantize_mxfp8(x, mode=mode)
    assert torch.equal(s, expected_s.flatten())
    assert torch.equal(q, expected_q.view(torch.uint8))


@pytest.mark.parametrize("mode", ["even", "round_up", "round_down"])
def test_a_triton_mxfp4_quantiser_agrees_bit_for_bit(mode):
    x = every_finite_bf16()
    codes, s = torch.empty(x.shape, dtype=torch.uint8), torch.empty(x.shape[0], dtype=torch.uint8)
    constants = {"ROWS": 64, "MODE": mode, "EMAX": 2, "MAX": 6, "FRACTION": 0x400000, "FP4": True}
    emulated.jit(quantize_kernel, arch="gfx950")[(x.shape[0] // 64,)](x, codes, s, **constants)
    expected, expected_s = quantize_mxfp4(x, mode)
    assert torch.equal(s, expected_s.flatten())
    assert torch.equal(codes[:, 0::2] | codes[:, 1::2] << 4, expected)


def run_fallback(args, config):
    xq, xs, wq, ws = (t.view(torch.uint8) for t in args)
    (m, k), n = xq.shape, wq.shape[0]
    out = torch.empty(m, n, dtype=torch.bfloat16)
    emulated.jit(mxfp8_dot_scaled_kernel, arch="gfx950")[config.grid(m, n)](
        xq, xs, wq, ws, out, m, n, k,
        **config.constants(n, k), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("config", [fallback.STOCK, fallback.SMALL_M], ids=["stock", "small_m"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 256), (17, 128, 512), (5, 100, 288), (70, 130, 160)])
def test_the_triton_fallback_computes_the_reference(config, m, n, k):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, k, generator=generator) * torch.rand(m, 1, generator=generator).exp()
    args = (*quantize_mxfp8(x), *quantize_mxfp8(torch.randn(n, k, generator=generator)))
    got = run_fallback(args, config).double()
    expected = mxfp8_mm(*args, out_dtype=torch.float64, compute_dtype=torch.float64)
    # bf16 rounds by at most 2^-9 of the value; float32 sums add at most k * 2^-24 of the sum of magnitudes, which for
    # independent normal terms is below sqrt(k) times the norm of a typical element.
    slack = k * 2**-24 * k**0.5 * expected.square().mean().sqrt()
    assert ((got - expected).abs() <= 2**-8 * expected.abs() + slack).all()


def test_the_triton_fallback_is_exact_on_integers_and_passes_nan_scales_on():
    generator = torch.Generator().manual_seed(1)
    # |sum| <= 64 * 2 * 2 = 256: exact in bf16, whatever the order of the sum.
    x, w = (torch.randint(-2, 3, (rows, 64), generator=generator).float() for rows in (3, 33))
    args = (*quantize_mxfp8(x), *quantize_mxfp8(w))
    for config in (fallback.STOCK, fallback.SMALL_M, *fallback.TUNED):
        assert torch.equal(run_fallback(args, config), (x @ w.T).bfloat16())
    xq, xs, wq, ws = args
    xs, ws = xs.clone(), ws.clone()
    xs[1, 0] = 255
    ws[32, 1] = 255
    nan = run_fallback((xq, xs, wq, ws), fallback.SMALL_M).isnan()
    assert nan[1].all() and nan[:, 32].all() and nan.sum() == 33 + 3 - 1
