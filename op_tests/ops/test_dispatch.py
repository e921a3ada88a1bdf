"""mxfp8_gemv's and mxfp8_linear's decisions: the order of the paths, None against exceptions, explain."""

import dataclasses

import pytest
import torch
from helpers import mxfp8_cases

import hipforge
from hipforge import devices, settings
from hipforge.errors import BuildError, ConfigError, GuardError
from hipforge.ops import mxfp8_gemm as ops
from hipforge.ops.core.dispatch import explain
from hipforge.ops.mxfp8_gemm import kernels
from hipforge.ops.mxfp8_gemm.family import TABLE
from hipforge.ops.reference import mxfp8_mm

HEADER = "gfx,cu_num,M,N,K,kernel,block_n,n_sub,k_splits,use_hip,us,stock_us,best_baseline_us,err,source"
N, K = 48, 1024


def operands(m, n=N, k=K):
    return mxfp8_cases.normal(m, n, k).args()


def meta_operands(m, n, k):
    """Operands with shapes only, on a device that passes for the emulator's CPU."""
    return tuple(
        torch.empty(shape, dtype=torch.uint8, device="meta") for shape in ((m, k), (m, k // 32), (n, k), (n, k // 32))
    )


def on_device(monkeypatch, kind="emulator", arch="gfx950"):
    device = devices.Device(kind, arch)
    monkeypatch.setattr(devices, "current", lambda: device)
    ops.reload_tables()


@pytest.fixture(autouse=True)
def emulated_gfx950(monkeypatch):
    on_device(monkeypatch)
    yield
    monkeypatch.undo()
    ops.reload_tables()


@pytest.fixture
def table(put_table):
    """A function that puts rows 'M,N,K,kernel,block_n,n_sub,k_splits,use_hip' into effect."""
    source = "7.0,9.0,9.0,0.002,measured:MI355X/test"
    return lambda *rows: put_table(TABLE, *(f"gfx950,256,{row},{source}" for row in rows), header=HEADER)


@pytest.fixture
def calls(monkeypatch):
    """The launches that would be made, as (kernel, tensors, parameters); outputs are filled with the reference."""
    made = []

    def recorded(kernel):
        def launch(out, *arguments):
            made.append((kernel.name, (out, *arguments[:4]), arguments[5:]))
            bias = 0 if arguments[4] is None else arguments[4]
            out.copy_(mxfp8_mm(*arguments[:4], out_dtype=torch.float32) + bias)

        return dataclasses.replace(kernel, launch=launch)

    for kernel in kernels.KERNELS:
        monkeypatch.setitem(kernels.BY_NAME, kernel.name, recorded(kernel))
    return made


# ---- the order of the paths ------------------------------------------------------------------------------------------


def test_an_output_dtype_other_than_bf16_is_none(calls):
    assert ops.mxfp8_gemv(*operands(1), out_dtype=torch.float16) is None
    assert "must be torch.bfloat16; got torch.float16" in explain(ops.mxfp8_gemv, *operands(1), torch.float16).reason
    assert not calls


def test_another_architecture_is_none(monkeypatch, calls):
    on_device(monkeypatch, arch="gfx942")
    assert ops.mxfp8_gemv(*operands(1)) is None
    assert explain(ops.mxfp8_gemv, *operands(1)).reason == "the kernels are for gfx950, sm_90; the device is gfx942"
    assert not calls


def test_reference_device_is_none_and_linear_computes_in_torch(monkeypatch, calls):
    on_device(monkeypatch, "reference", None)
    args = operands(2)
    assert ops.mxfp8_gemv(*args) is None
    assert torch.equal(ops.mxfp8_linear(*args), mxfp8_mm(*args))
    assert "HIPFORGE_DEVICE=reference" in explain(ops.mxfp8_gemv, *args).reason
    assert not calls


@pytest.mark.parametrize(("n", "k"), [(N, K), (2048, 2880), (640, 2048), (9216, 512), (4096, 4096)])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 9, 16])
def test_untuned_m_up_to_16_takes_what_the_other_ops_take_and_nothing_is_padded(calls, m, n, k):
    given = meta_operands(m, n, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hipforge.ops.core.dispatch.target_of", lambda device: ("gfx950", 256))
        ours, gemm, linear = (explain(op, *given) for op in (ops.mxfp8_gemv, ops.mxfp8_gemm, ops.mxfp8_linear))
    assert ours.kernel == gemm.kernel == linear.kernel and ours.configuration == gemm.configuration
    y = ops.mxfp8_gemv(*operands(m))
    [(_, tensors, _)] = calls
    assert y.shape == (m, N) and tensors[1].shape == (m, K)


@pytest.mark.parametrize("m", [17, 20, 31, 32, 33, 48, 63, 64])
def test_untuned_m_above_16_is_none(calls, m):
    assert ops.mxfp8_gemv(*operands(m)) is None
    assert f"M={m} needs a tuned row" in explain(ops.mxfp8_gemv, *operands(m)).reason
    assert not calls


@pytest.mark.parametrize("m", [65, 128, 0])
def test_m_outside_1_to_64_is_none(m):
    assert ops.mxfp8_gemv(*operands(m)) is None
    assert f"M must be 1 to 64, N and K at least 1; got M={m}" in explain(ops.mxfp8_gemv, *operands(m)).reason


def test_a_tuned_row_decides_before_the_defaults(table, calls):
    path = table(f"4,{N},{K},mfma,0,2,4,1", f"8,{N},{K},gemv,32,0,0,1")
    ops.mxfp8_gemv(*operands(4))
    ops.mxfp8_gemv(*operands(8))
    assert [(kernel[13:], parameters[-2:]) for kernel, _, parameters in calls] == [("mfma", (2, 4)), ("gemv", (32,))]
    shown = explain("mxfp8_gemv", *operands(8))
    assert shown.file == (path, 3) and shown.row["config"] == "block_n=32"


def test_use_hip_0_is_none_and_says_where(table, calls):
    path = table(f"1,{N},{K},gemv,8,0,0,0")
    assert ops.mxfp8_gemv(*operands(1)) is None
    shown = explain(ops.mxfp8_gemv, *operands(1))
    assert shown.path == "none" and "use_hip=0" in shown.reason and shown.file == (path, 2)
    assert not calls


def test_m_between_16_and_64_follows_the_next_larger_tuned_m(table, calls):
    table(f"32,{N},{K},mfma,0,1,2,1", f"64,{N},{K},mfma,0,4,1,1")
    for m, parameters in ((17, (1, 2)), (31, (1, 2)), (32, (1, 2)), (33, (4, 1)), (63, (4, 1)), (64, (4, 1))):
        ops.mxfp8_gemv(*operands(m))
        assert calls[-1][0] == "smallm_mxfp8_mfma" and calls[-1][2][-2:] == parameters, m
    assert "next larger M (64)" in explain(ops.mxfp8_gemv, *operands(33)).reason


def test_untuned_32_does_not_borrow_the_row_of_64(table):
    table(f"64,{N},{K},mfma,0,4,1,1")
    assert ops.mxfp8_gemv(*operands(32)) is None
    assert explain(ops.mxfp8_gemv, *operands(31)).kernel == "smallm_mxfp8_mfma"


def test_a_next_larger_row_with_use_hip_0_is_none(table):
    table(f"64,{N},{K},mfma,0,4,1,0")
    assert ops.mxfp8_gemv(*operands(63)) is None


def test_matrices_past_the_buffer_offset_limit_are_none(monkeypatch):
    monkeypatch.setattr("hipforge.ops.core.dispatch.target_of", lambda device: ("gfx950", 256))
    shown = explain(ops.mxfp8_gemv, *meta_operands(1, 349_526, 6144))
    assert shown.path == "none" and "at most 2^31 - 1" in shown.reason and "2147487744" in shown.reason
    assert explain(ops.mxfp8_gemv, *meta_operands(1, 349_525, 6144)).path == "kernel"


# ---- None against exceptions -----------------------------------------------------------------------------------------


def test_malformed_operands_raise_with_argument_value_and_rule():
    xq, xs, wq, ws = operands(2)
    for args, said in (
        ((xq.float(), xs, wq, ws), r"xq must be .*uint8; got float32"),
        ((xq, xs.float(), wq, ws), r"x_scale must be .*; got float32"),
        ((xq, xs, wq[:, :512], ws), r"wq must be .*\[48, 1024\] \(its K is that of xq\); got .*\[48, 512\]"),
        ((xq[:, :48], xs, wq[:, :48], ws), r"last dimension of xq must be a multiple of 32; got 48"),
        ((xq, xs[:, :31], wq, ws), r"x_scale must be .*\[2, 32\] .*; got .*\[2, 31\]"),
        ((xq, xs, wq, ws[:47]), r"w_scale must be .*\[48, 32\] .*; got .*\[47, 32\]"),
        ((xq[0], xs, wq, ws), r"xq must be \[M, K\]; got .*\[1024\]"),
    ):
        with pytest.raises(GuardError, match=said):
            ops.mxfp8_gemv(*args)
        with pytest.raises(GuardError, match=said):
            explain(ops.mxfp8_gemv, *args)


def test_failures_of_the_kernel_are_raised_not_turned_into_none(monkeypatch):
    def broken(*args):
        raise BuildError("no compiler today")

    for kernel in kernels.KERNELS:
        monkeypatch.setitem(kernels.BY_NAME, kernel.name, dataclasses.replace(kernel, launch=broken))
    with pytest.raises(BuildError, match="no compiler today"):
        ops.mxfp8_gemv(*operands(1))
    with pytest.raises(BuildError, match="no compiler today"):
        ops.mxfp8_linear(*operands(1))


def test_a_malformed_table_is_an_error_at_the_first_call(table):
    table("1,48,1024,gemv,9,0,0,1")
    with pytest.raises(ConfigError, match=r"table\.csv:2: a row of smallm_mxfp8_gemv needs block_n of"):
        ops.mxfp8_gemv(*operands(1))


def test_cpu_tensors_while_the_gpu_is_the_device_name_the_setting(monkeypatch):
    on_device(monkeypatch, "hip")
    with pytest.raises(GuardError, match="HIPFORGE_DEVICE=emulator"):
        ops.mxfp8_gemv(*operands(1))


def test_the_gemv_helper_refuses_more_than_16_rows():
    with pytest.raises(ValueError, match="M<=16; got M=17"):
        ops._run_gemv(*operands(17), torch.empty(17, N, dtype=torch.bfloat16), 8)


def test_raw_ops_refuse_another_output_dtype_and_rank():
    for raw in (ops.smallm_mxfp8_gemv, ops.smallm_mxfp8_mfma):
        with pytest.raises(GuardError, match=r"out_dtype must be torch\.bfloat16; got torch\.float32"):
            raw(*operands(8), torch.float32)
        with pytest.raises(GuardError, match=r"Wq must be \[N, K\]"):
            xq, xs, wq, ws = operands(8)
            raw(xq, xs, wq[0], ws, torch.bfloat16)


# ---- what reaches the kernel -----------------------------------------------------------------------------------------


def test_the_kernel_gets_contiguous_tensors_and_the_right_numbers(calls):
    xq, xs, wq, ws = operands(4)
    strided = [t.t().contiguous().t() for t in (xq.view(torch.uint8), xs, wq.view(torch.uint8), ws)]
    assert not any(t.is_contiguous() for t in strided)
    assert torch.equal(ops.mxfp8_gemv(*strided), ops.mxfp8_gemv(xq, xs, wq, ws))
    assert all(t.is_contiguous() for _, tensors, _ in calls for t in tensors)


def test_typed_and_byte_operands_are_the_same(calls):
    xq, xs, wq, ws = operands(2)
    typed = ops.mxfp8_gemv(xq, xs.view(torch.float8_e8m0fnu), wq, ws.view(torch.float8_e8m0fnu))
    assert torch.equal(typed, ops.mxfp8_gemv(xq.view(torch.uint8), xs, wq.view(torch.uint8), ws))


def test_split_k_gets_a_workspace_of_partial_sums(table, calls):
    table(f"16,{N},{K},mfma,0,1,4,1", f"8,{N},{K},mfma,0,1,1,1")
    ops.mxfp8_gemv(*operands(16))
    ops.mxfp8_gemv(*operands(8))
    with_splits, without = (parameters[0] for _, _, parameters in calls)
    assert (with_splits.shape, with_splits.dtype, without) == ((4, 16, N), torch.float32, None)


# ---- mxfp8_linear ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [0, 1, 16, 33, 100])
def test_linear_always_returns_a_tensor(m):
    args = operands(m)
    y = ops.mxfp8_linear(*args)
    # bf16 keeps 8 bits: sums in another order may round to a neighbour, 2^-7 away at most.
    torch.testing.assert_close(y, mxfp8_mm(*args), rtol=2**-7, atol=1e-4)


def test_linear_refuses_a_wrong_out_or_bias():
    args = operands(2)
    for kwargs, said in (
        ({"out": torch.empty(2, N)}, r"out must be bfloat16.*; got float32"),
        ({"out": torch.empty(2, N + 1, dtype=torch.bfloat16)}, r"out must be .*\[2, 48\]"),
        ({"out": torch.empty(N, 2, dtype=torch.bfloat16).t()}, r"out must be contiguous; got strides \(1, 2\)"),
        ({"bias": torch.empty(N)}, r"bias must be bfloat16"),
        ({"bias": torch.empty(2, N, dtype=torch.bfloat16)}, r"bias must be .*\[48\]"),
    ):
        with pytest.raises(GuardError, match=said):
            ops.mxfp8_linear(*args, **kwargs)


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_explain_names_every_path_once():
    taken = explain(hipforge.mxfp8_linear, *operands(4))
    assert taken.path == "kernel" and set(taken.refused) == {"triton", "torch"}
    fallen_back = explain(hipforge.mxfp8_linear, *operands(16385, k=32))
    assert fallen_back.path == "torch" and set(fallen_back.refused) == {"kernel", "triton"}
    assert "M must be 1 to 16384" in fallen_back.refused["kernel"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        fallen_back.path = "kernel"


def test_explain_reads_as_text(table):
    path = table(f"4,{N},{K},gemv,16,0,0,1")
    assert str(explain("mxfp8_gemv", *operands(4))) == (
        "mxfp8_gemv: kernel, smallm_mxfp8_gemv(block_n=16)\n  because the tuned row of this shape\n"
        f"  tuned row {path}:2"
    )


def test_explain_refuses_what_has_no_decision():
    with pytest.raises(GuardError, match=r"knows all_reduce.*argmax.*mxfp8_gemv, mxfp8_linear.*; got no_such_op"):
        explain("no_such_op")


@pytest.mark.parametrize("asked", [explain, hipforge.warmup])
def test_another_librarys_function_of_an_ops_name_is_not_that_op(asked):
    asked(hipforge.argmax, torch.ones(1, 8))
    with pytest.raises(GuardError, match=r"op must be hipforge.argmax or its name; got argmax of torch"):
        asked(torch.argmax, torch.ones(1, 8))


def test_the_op_runs_exactly_what_explain_shows(table, calls):
    decisions = {1: "gemv,64,0,0,1", 16: "mfma,0,4,2,1", 32: "mfma,0,2,1,1", 64: "mfma,0,1,1,0"}
    table(*(f"{m},{N},{K},{decision}" for m, decision in decisions.items()))
    for m in (*range(1, 18), 31, 32, 33, 63, 64, 65):
        calls.clear()
        shown = explain("mxfp8_gemv", *operands(m))
        y = ops.mxfp8_gemv(*operands(m))
        assert (y is None) == (shown.path == "none") == (not calls)
        if calls:
            [(kernel, _, parameters)] = calls
            assert shown.kernel == kernel
            assert tuple(shown.configuration.values()) == tuple(p for p in parameters if isinstance(p, int))


def test_settings_scope_reaches_the_decision(monkeypatch):
    monkeypatch.undo()
    devices.current.cache_clear()
    with settings.scope(DEVICE="reference"):
        ops.reload_tables()
        assert ops.mxfp8_gemv(*operands(1)) is None
    devices.current.cache_clear()
    ops.reload_tables()


def test_a_scope_with_an_unknown_name_changes_nothing():
    before = settings.VERBOSE.get()
    with pytest.raises(ConfigError, match="there is no setting 'NOPE'"), settings.scope(VERBOSE=not before, NOPE=1):
        pass
    assert settings.VERBOSE.get() == before


@pytest.mark.parametrize(
    ("m", "k", "block_n"), [(1, 6144, 4), (8, 6144, 4), (4, 8192, 4), (16, 6144, 8), (1, 6112, 8), (8, 1024, 8)]
)
def test_a_gemv_row_of_the_earlier_format_keeps_what_its_launcher_ran(m, k, block_n, put_table):
    # Its launcher took 4 columns instead of 8 for a long K and few rows.
    put_table(TABLE, f"{k},40,{m},gemv,0,0,1", header="K,N,M,kernel,n_sub,k_splits,use_hip")
    assert dict(explain("mxfp8_gemv", *operands(m, 40, k)).configuration) == {"block_n": block_n}


def test_a_row_may_name_a_tile(table):
    table(f"64,{N},{K},tiles,64,4,2,1")
    given = operands(64)
    taken = explain("mxfp8_gemv", *given)
    assert (taken.kernel, dict(taken.configuration)) == ("mxfp8_gemm_tiles", {"tile": 64064, "k_splits": 2})
    assert torch.equal(ops.mxfp8_gemv(*given), ops.mxfp8_gemm_tiles(*given, tile=64064, k_splits=2))


# ---- real launches ---------------------------------------------------------------------------------------------------


def assert_close(got, args):
    mxfp8_cases.assert_close(got, mxfp8_mm(*args, out_dtype=torch.float64, compute_dtype=torch.float64))


def test_a_tuned_cell_runs_its_row():
    args = operands(1, 768, 6144)
    shown = explain("mxfp8_gemv", *args)
    assert shown.file is not None and shown.file[0].name == "mxfp8_gemm_tuned.csv"
    assert_close(ops.mxfp8_gemv(*args), args)


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


def test_raw_ops_are_operators_with_declared_mutations():
    def raw(xq, xs, wq, ws):
        return ops.smallm_mxfp8_mfma(xq, xs, wq, ws, torch.bfloat16, n_sub=1, k_splits=2) + 1

    args = operands(9)
    assert torch.equal(torch.compile(raw, backend="aot_eager", fullgraph=True)(*args), raw(*args))
