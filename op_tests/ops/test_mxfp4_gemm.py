"""The MXFP4 GEMM against float64 over the same bits, on any architecture: task shapes, layouts, tails, refusals."""

from __future__ import annotations

import pytest
import torch
from helpers.errors import assert_within
from helpers.mxfp4_cases import TASKS, assert_close, codes, operands

from hipforge import explain
from hipforge.errors import GuardError
from hipforge.ops import mxfp4_gemm as ops
from hipforge.ops.core import dispatch
from hipforge.ops.reference import dequantize_mxfp4, mxfp4_mm, mxfp4_mm_packed, shuffle_scale, shuffle_weight

pytestmark = pytest.mark.usefixtures("every_checker")


@pytest.mark.parametrize("k", [32, 64, 96, 160, 1056, 2880])  # 2880: gpt-oss
@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 17), (17, 50)])
def test_tails_of_every_dimension(m, n, k):
    parts = codes(m, n, k, (0, 1, 120, 127, 133), seed=k)
    got = ops.mxfp4_gemm(*parts)
    assert_close(got, parts, k)


@pytest.mark.parametrize(("m", "n", "k", "seed"), [TASKS[1], (4, 2880, 512, 1)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_task_shapes(m, n, k, seed, shuffled):
    parts, (x, w) = operands(m, n, k, seed)
    xq, xs, wq, ws = parts
    weights = (shuffle_weight(wq), shuffle_scale(ws)) if shuffled else (wq, ws)
    got = ops.mxfp4_linear(xq, xs, *weights, shuffled=shuffled)
    assert_close(got, parts, k)
    # The task's own criterion, against the reference from the bf16 inputs.
    torch.testing.assert_close(got, mxfp4_mm(x, w), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("k", [32, 1056])
def test_bf16_activations_are_multiplied_as_they_are(k):
    _, _, wq, ws = codes(5, 50, k, (0, 1, 120, 127, 128, 133), seed=k)
    x = torch.randn(5, k).bfloat16()
    weight = dequantize_mxfp4(wq, ws, torch.float64)
    want, magnitude = x.double() @ weight.T, x.double().abs() @ weight.T.abs()
    got = ops.mxfp4_linear(x, None, wq, ws)
    assert got.dtype == torch.bfloat16
    assert_within(got, want, 2.0**-8 * want.abs() + 2.0**-134 + k * 2.0**-24 * magnitude)
    with pytest.raises(GuardError, match=r"x_scale may be None where xq is torch\.bfloat16; got None with xq of"):
        ops.mxfp4_linear(x.view(torch.uint8)[:, : k // 2], None, wq, ws)


def test_strides_do_not_matter():
    (xq, xs, wq, ws), _ = operands(8, 64, 256)
    want = [ops.mxfp4_gemm(xq, xs, wq, ws) for _ in range(2)][1]  # the second by the decision that was kept
    got = ops.mxfp4_gemm(xq.t().contiguous().t(), xs.t().contiguous().t(), wq, ws)
    assert torch.equal(got, want)
    assert torch.equal(ops.mxfp4_gemm(xq, xs, wq, ws), want)


def test_another_output_dtype_is_none():
    parts, _ = operands(4, 32, 64)
    assert ops.mxfp4_gemm(*parts, torch.float16) is None
    assert "torch.bfloat16; got torch.float16" in explain(ops.mxfp4_gemm, *parts, torch.float16).reason


def test_linear_adds_the_bias_to_the_kernels_result():
    parts, _ = operands(4, 32, 64)
    bias = torch.arange(32).bfloat16()
    assert explain(ops.mxfp4_linear, *parts, bias).path == "kernel"
    assert torch.equal(ops.mxfp4_linear(*parts, bias), ops.mxfp4_gemm(*parts) + bias)
    with pytest.raises(GuardError, match=r"bias must be .*\[32\]"):
        ops.mxfp4_linear(*parts, bias[:31])
    with pytest.raises(GuardError, match="out"):
        ops.mxfp4_linear(*parts, out=torch.empty(2, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("payload", [torch.uint8, torch.float4_e2m1fn_x2])
@pytest.mark.parametrize("shuffled", [False, True])
def test_linear_computes_in_torch_where_the_kernel_does_not(payload, shuffled, monkeypatch):
    (xq, xs, wq, ws), _ = operands(4, 32, 64)
    expected = mxfp4_mm_packed(xq, xs, wq, ws)
    weights = (shuffle_weight(wq), shuffle_scale(ws)) if shuffled else (wq, ws)
    parts = (xq.view(payload), xs, weights[0].view(payload), weights[1])
    monkeypatch.setattr(dispatch, "target_of", lambda device: ("gfx942", 304))
    dispatch.clear_decisions()
    try:
        assert ops.mxfp4_gemm(*parts, shuffled=shuffled) is None
        found = explain("mxfp4_linear", *parts, shuffled=shuffled)
        assert found.path == "torch" and "gfx942" in found.refused["kernel"]
        assert torch.equal(ops.mxfp4_linear(*parts, shuffled=shuffled), expected)
    finally:
        dispatch.clear_decisions()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p[0].float(), *p[1:]), r"xq .*float32"),
        (lambda p: (p[0][:, :8].contiguous(), p[1], p[2][:, :8].contiguous(), p[3]), "multiple of 32.*K=16"),
        (lambda p: (p[0], p[1][:, :1], p[2], p[3]), "x_scale"),
        (lambda p: (p[0], p[1], p[2], p[3][:5]), "w_scale"),
        (lambda p: (p[0], p[1], p[2][:, :16], p[3]), "wq"),
        (lambda p: (p[0][0], p[1], p[2], p[3]), "xq"),
        (lambda p: (p[0], p[1].int(), p[2], p[3]), "x_scale .*int32"),
    ],
)
def test_refusals_name_argument_and_rule(change, message):
    parts = codes(4, 32, 64, (127,))
    with pytest.raises(GuardError, match=message):
        ops.mxfp4_gemm(*change(parts))


def test_a_payload_view_off_sixteen_bytes_is_copied():
    parts = codes(4, 32, 64, (127, 128), seed=5)
    storage = torch.zeros(1 + parts[0].numel(), dtype=torch.uint8)
    view = storage[1:].view_as(parts[0]).copy_(parts[0])
    assert view.data_ptr() % 16
    assert torch.equal(ops.mxfp4_gemm(view, *parts[1:]), ops.mxfp4_gemm(*parts))
