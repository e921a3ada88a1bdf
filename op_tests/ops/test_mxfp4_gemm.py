"""The MXFP4 GEMM kernel against float64 over the same bits: exact data, task shapes, layouts, tails, refusals."""

from __future__ import annotations

import pytest
import torch
from helpers.mxfp8_grouped_cases import sparse_bytes

from hipforge import emulator, explain
from hipforge.errors import GuardError
from hipforge.ops import mxfp4_gemm as ops
from hipforge.ops.core import dispatch
from hipforge.ops.reference import mxfp4_mm, mxfp4_mm_packed, quantize_mxfp4, shuffle_scale, shuffle_weight

TASKS = [(8, 2112, 7168, 124), (16, 3072, 1536, 6635), (64, 3072, 1536, 45), (256, 2880, 512, 78)]
BENCH = [
    (4, 2880, 512, 1),
    (16, 2112, 7168, 1),
    (32, 4096, 512, 1),
    (32, 2880, 512, 1),
    (64, 7168, 2048, 1),
    (256, 3072, 1536, 1),
]


@pytest.fixture(autouse=True)
def every_checker():
    """Uninitialised reads, missing waits and LDS races are faults here, besides memory bounds."""
    with emulator.options(checks="all"):
        yield


def operands(m, n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).bfloat16()
    w = torch.randn(n, k, generator=generator).bfloat16()
    return (*quantize_mxfp4(x), *quantize_mxfp4(w)), (x, w)


def codes(m, n, k, scales, seed=0):
    """Random codes with scale bytes drawn from ``scales``, another one for every block."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rows in (m, n):
        parts.append(torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8))
        choice = torch.randint(0, len(scales), (rows, k // 32), generator=generator)
        parts.append(torch.tensor(scales, dtype=torch.uint8)[choice])
    return tuple(parts)


def assert_close(got, parts, k):
    """One bf16 rounding (half a step: 2^-8 relative, 2^-134 where subnormal) and K rounded fp32 additions."""
    xq, xs, wq, ws = parts
    want = mxfp4_mm_packed(xq, xs, wq, ws, torch.float64, torch.float64)
    magnitude = mxfp4_mm_packed(xq & 0x77, xs, wq & 0x77, ws, torch.float64, torch.float64)
    assert got.dtype == torch.bfloat16
    assert ((got.double() - want).abs() <= 2.0**-8 * want.abs() + 2.0**-134 + k * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize("k", [32, 64, 96, 160, 1056])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 17), (17, 50)])
def test_tails_of_every_dimension(m, n, k):
    parts = codes(m, n, k, (0, 1, 120, 127, 133), seed=k)
    got = ops.mxfp4_gemm(*parts)
    assert_close(got, parts, k)


@pytest.mark.parametrize(("m", "n", "k", "seed"), [TASKS[1], (4, 2880, 512, 1)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_task_shapes(m, n, k, seed, shuffled):
    check_task(m, n, k, seed, shuffled)


@pytest.mark.full
@pytest.mark.parametrize(("m", "n", "k", "seed"), TASKS + BENCH)
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_task_shape(m, n, k, seed, shuffled):
    check_task(m, n, k, seed, shuffled)


def ceil(count, by):
    return -(-count // by)


def check_task(m, n, k, seed, shuffled):
    parts, (x, w) = operands(m, n, k, seed)
    xq, xs, wq, ws = parts
    weights = (shuffle_weight(wq), shuffle_scale(ws)) if shuffled else (wq, ws)
    with emulator.counters() as counted:
        got = ops.mxfp4_gemm(xq, xs, *weights, shuffled=shuffled)
    assert_close(got, parts, k)
    # The task's own criterion, against the reference from the bf16 inputs.
    torch.testing.assert_close(got, mxfp4_mm(x, w), rtol=1e-2, atol=1e-2)
    chosen = explain(ops.mxfp4_gemm, xq, xs, *weights, shuffled=shuffled).configuration
    assert counted.launches == 1
    if "tile" in chosen:
        rows, columns = divmod(chosen["tile"], 1000)
        assert counted.mfma_count == ceil(m, rows) * ceil(n, columns) * rows * columns // 1024 * 4 * ceil(k, 256)
        assert counted.tensors["Wq"].loaded == ceil(m, rows) * wq.numel()
        return
    m_sub, n_sub = chosen["m_sub"], chosen["n_sub"]
    assert counted.mfma_count == ceil(m, 16 * m_sub) * m_sub * ceil(n, 16 * n_sub) * n_sub * ceil(k, 128)
    assert counted.tensors["Wq"].loaded == ceil(m, 16 * m_sub) * wq.numel()


def test_strides_do_not_matter():
    (xq, xs, wq, ws), _ = operands(8, 64, 256)
    got = ops.mxfp4_gemm(xq.t().contiguous().t(), xs.t().contiguous().t(), wq, ws)
    assert torch.equal(got, ops.mxfp4_gemm(xq, xs, wq, ws))


def test_another_output_dtype_is_none():
    parts, _ = operands(4, 32, 64)
    assert ops.mxfp4_gemm(*parts, torch.float16) is None
    assert "torch.bfloat16; got torch.float16" in explain(ops.mxfp4_gemm, *parts, torch.float16).reason


def test_linear_adds_the_bias_to_the_kernels_result():
    parts, _ = operands(4, 32, 64)
    bias = torch.arange(32).bfloat16()
    assert explain(ops.mxfp4_linear, *parts, bias).path == "kernel"
    assert torch.equal(ops.mxfp4_linear(*parts, bias), ops.mxfp4_gemm(*parts) + bias)
    with pytest.raises(GuardError, match=r"bias must have shape \(32,\)"):
        ops.mxfp4_linear(*parts, bias[:31])


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


def test_the_wrappers_trace_as_one_graph():
    def layer(xq, xs, wq, ws):
        y = ops.mxfp4_gemm(xq, xs, wq, ws)
        assert y is not None
        return y * 2 + ops.mxfp4_linear(xq, xs, wq, ws)

    traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for m in (1, 20):
        parts, _ = operands(m, 48, 256)
        assert torch.equal(traced(*parts), layer(*parts))


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


def test_refused_configurations():
    parts = codes(4, 32, 64, (127,))
    with pytest.raises(GuardError, match="m_sub"):
        ops.run_mxfp4(*parts, m_sub=3)
    with pytest.raises(GuardError, match="number of K steps"):
        ops.run_mxfp4(*parts, k_splits=2)
    with pytest.raises(GuardError, match=r"m_sub \* n_sub \* k_splits must be at most 64; got 4 \* 4 \* 8"):
        ops.run_mxfp4(*codes(4, 32, 1024, (127,)), m_sub=4, n_sub=4, k_splits=8)
    odd = codes(4, 24, 64, (127,))
    with pytest.raises(GuardError, match="N % 16 == 0"):
        ops.run_mxfp4(*odd, shuffled=True)


def test_a_payload_view_off_sixteen_bytes_is_copied():
    parts = codes(4, 32, 64, (127, 128), seed=5)
    storage = torch.zeros(1 + parts[0].numel(), dtype=torch.uint8)
    view = storage[1:].view_as(parts[0]).copy_(parts[0])
    assert view.data_ptr() % 16
    assert torch.equal(ops.mxfp4_gemm(view, *parts[1:]), ops.mxfp4_gemm(*parts))


def test_the_total_function_writes_into_out():
    parts = codes(4, 32, 64, (127, 128))
    out = torch.empty(4, 32, dtype=torch.bfloat16)
    assert ops.mxfp4_linear(*parts, out=out) is out
    assert torch.equal(out, ops.mxfp4_linear(*parts))
    with pytest.raises(GuardError, match="out"):
        ops.mxfp4_linear(*parts, out=out[:2])


def test_an_output_inside_an_operand_is_refused():
    parts = codes(4, 32, 64, (127, 128))
    held = parts[2].view(-1)[:256].view(torch.bfloat16).view(4, 32)
    with pytest.raises(GuardError, match="out is written and must not share memory with Wq"):
        ops.mxfp4_gemm_out(held, *parts, False, 1, 1, 1)


def test_payloads_past_two_gigabytes_are_refused_by_the_kernel():
    rows, columns = 1 << 16, 1 << 15
    wq = sparse_bytes(rows, columns)
    ws = sparse_bytes(rows, columns // 16)
    xq, xs = torch.zeros(1, columns, dtype=torch.uint8), torch.zeros(1, columns // 16, dtype=torch.uint8)
    with pytest.raises(GuardError, match=r"Wq has 2147483648 bytes.*2 GB.*signed 32-bit"):
        ops.run_mxfp4(xq, xs, wq, ws)
