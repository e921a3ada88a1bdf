"""The wrappers with real launches: every M, tuned and default paths, bad strides, torch.compile."""

import pytest
import torch
from helpers import mxfp8_cases

from hipforge import devices
from hipforge.ops import smallm_gemm_mxfp8 as ops
from hipforge.ops.core.dispatch import explain
from hipforge.ops.reference import mxfp8_mm, quantize_mxfp8

N, K = 40, 288


def operands(m, n=N, k=K):
    return mxfp8_cases.normal(m, n, k).args()


def assert_close(got, args):
    mxfp8_cases.assert_close(got, mxfp8_mm(*args, out_dtype=torch.float64, compute_dtype=torch.float64))


@pytest.fixture(autouse=True)
def emulated_gfx950():
    assert devices.current().arch_of() == "gfx950"
    ops.reload_tables()
    yield
    ops.reload_tables()


@pytest.mark.parametrize("m", range(1, 17))
def test_every_small_m_by_the_wrapper(m):
    args = operands(m)
    assert_close(ops.mxfp8_gemv(*args), args)


@pytest.mark.parametrize("m", [17, 33, 64])
def test_tuned_larger_m_by_the_wrapper(m, tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    rows = "".join(f"{K},{N},{rows},mfma,2,2,1\n" for rows in (32, 64))
    path.write_text("K,N,M,kernel,n_sub,k_splits,use_hip\n" + rows)
    monkeypatch.setenv("HIPFORGE_CONFIG_MXFP8_GEMM", str(path))
    ops.reload_tables()
    args = operands(m)
    assert_close(ops.mxfp8_gemv(*args), args)


def test_the_untuned_4096_square_engages_up_to_16_rows_and_not_beyond():
    for m in (1, 4, 16):
        args = operands(m, 4096, 4096)
        assert explain("mxfp8_gemv", *args).row is None
        assert_close(ops.mxfp8_gemv(*args), args)
    for m in (64, 128):
        assert ops.mxfp8_gemv(*operands(m, 4096, 4096)) is None
    assert ops.mxfp8_gemv(*operands(1, 4096, 4096), out_dtype=torch.float16) is None


def test_a_tuned_cell_runs_its_row():
    args = operands(1, 768, 6144)
    shown = explain("mxfp8_gemv", *args)
    assert shown.file is not None and shown.file[0].name == "mxfp8_gemm_tuned.csv"
    assert_close(ops.mxfp8_gemv(*args), args)


def test_integers_come_out_exactly_and_strides_do_not_matter():
    generator = torch.Generator().manual_seed(1)
    # |sum| <= 32 * 2 * 2 * 2 = 256: exact in bf16, whatever the order of the sum.
    x, w = (torch.randint(-2, 3, (rows, 32), generator=generator).float() for rows in (5, 24))
    xq, xs, wq, ws = (*quantize_mxfp8(x), *quantize_mxfp8(w))
    expected = (x @ w.T).bfloat16()
    assert torch.equal(ops.mxfp8_gemv(xq, xs, wq, ws), expected)
    strided = [t.t().contiguous().t() for t in (xq.view(torch.uint8), xs, wq.view(torch.uint8), ws)]
    assert torch.equal(ops.mxfp8_gemv(*strided), expected)


@pytest.mark.parametrize("op", [ops.mxfp8_gemv, ops.mxfp8_gemm, ops.mxfp8_linear])
def test_a_decision_kept_for_contiguous_operands_does_not_serve_others(op):
    args = operands(3)
    strided = tuple(torch.stack((x.view(torch.uint8), x.view(torch.uint8) ^ 1), dim=-1)[..., 0] for x in args)
    assert not any(x.is_contiguous() for x in strided)
    for _ in range(2):  # the first call decides, the second takes what was kept
        assert_close(op(*args), args)
        for i in range(4):
            mixed = [strided[j] if i == j else args[j].view(torch.uint8) for j in range(4)]
            assert_close(op(*mixed), args)
            assert_close(op(*(x.contiguous() for x in mixed)), args)


def test_linear_takes_any_m_with_bias_and_out():
    bias = torch.randn(N, generator=torch.Generator().manual_seed(2)).bfloat16()
    for m in (1, 16, 40, 100):
        args = operands(m)
        out = torch.empty(m, N, dtype=torch.bfloat16)
        y = ops.mxfp8_linear(*args, bias=bias, out=out)
        assert y is out
        want = ops.mxfp8_linear(*args).float() + bias
        # Rounded once or twice, by the kernel: half a unit of the product and half a unit of the sum.
        torch.testing.assert_close(y, want.bfloat16(), rtol=2**-7, atol=2**-8 * want.abs().max().item())


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_wrappers_trace_as_one_graph(dynamic):
    def layer(xq, xs, wq, ws):
        y = ops.mxfp8_gemv(xq, xs, wq, ws)
        return ops.mxfp8_linear(xq, xs, wq, ws) * 2 if y is None else y * 2

    traced = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for m in (1, 6, 16, 65):
        args = operands(m)
        assert torch.equal(traced(*args), layer(*args))


def test_linear_keeps_m_symbolic():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    traced = torch.compile(ops.mxfp8_linear, backend=count, fullgraph=True, dynamic=True)
    for m in (2, 3, 16, 70):
        args = operands(m)
        assert torch.equal(traced(*args), ops.mxfp8_linear(*args))
    assert len(graphs) == 1


def test_raw_ops_are_operators_with_declared_mutations():
    def raw(xq, xs, wq, ws):
        return ops.smallm_mxfp8_mfma(xq, xs, wq, ws, torch.bfloat16, n_sub=1, k_splits=2) + 1

    args = operands(9)
    assert torch.equal(torch.compile(raw, backend="aot_eager", fullgraph=True)(*args), raw(*args))


def test_a_payload_view_off_sixteen_bytes_is_copied():
    xq, xs, wq, ws = operands(4)
    storage = torch.zeros(1 + xq.numel(), dtype=torch.uint8)
    view = storage[1:].view_as(xq).copy_(xq.view(torch.uint8))
    assert view.data_ptr() % 16
    for op in (ops.mxfp8_gemv, ops.mxfp8_linear):
        assert torch.equal(op(view, xs, wq, ws), op(xq, xs, wq, ws))
