"""The dot_scaled fallback against the reference: compiled by Triton for gfx950, run on the emulator."""

import pytest
import torch

from hipforge.emulator import triton as emulated
from hipforge.ops.reference import mxfp8_mm, quantize_mxfp8
from hipforge.ops.triton import mxfp8_dot_scaled as fallback
from hipforge.ops.triton.mxfp8_kernels import mxfp8_dot_scaled_kernel


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
