"""The skinny fp8 GEMM against float64, on both emulated architectures: exact data, tails, traffic, refusals."""

from __future__ import annotations

import pytest
import torch
from helpers.errors import relative
from helpers.fp8_skinny_cases import ARCH, FP8, ONE, OTHER, exact, integers, normals

from hipforge import emulator, explain
from hipforge.errors import GuardError
from hipforge.ops import fp8_skinny_gemm as ops
from hipforge.ops.reference.skinny import skinny_gemm as reference

pytestmark = pytest.mark.gfx942


def check_model_shape(m, n, k):
    a, b, scale = normals(m, n, k, seed=m)
    with emulator.counters() as counted:
        got = ops.skinny_gemm(a, b, scale)
    want = reference(a, b, scale, None, torch.float64, torch.float64)
    # fp32 sums of 2^14 products stay far below the fp16 rounding: each addition is 2^-24 of a sum like the result.
    assert relative(got, want) <= 2.0**-11 + 2.0**-12 < 2e-3
    assert counted.tensors["b"].loaded == n * k
    assert counted.lds_bank_conflicts == 0


@pytest.mark.parametrize("m", [1, 8, 16, 32])
def test_the_qkv_projection_reads_its_weights_once(m):
    check_model_shape(m, 2304, 16384)


@pytest.mark.full
@pytest.mark.parametrize("m", [1, 8, 16, 32])
@pytest.mark.parametrize(("n", "k"), [(13312, 16384), (16384, 6656)])
def test_the_other_model_shapes(m, n, k):
    check_model_shape(m, n, k)


@pytest.mark.parametrize("deterministic", [True, False])
def test_results_are_added_to_the_output(deterministic):
    a, b = integers(3, 48, 288)
    output = torch.arange(144).reshape(3, 48).half()
    want = exact(a, b, torch.tensor([0.5]), output)
    got = ops.skinny_gemm(a, b, torch.tensor([0.5]), output, deterministic=deterministic)
    assert got is output and torch.equal(output, want)


def test_one_sparse_instruction_does_the_work_of_two_dense_ones():
    a, b = integers(8, 32, 1024)
    counts = []
    for op_m in (8, 16):
        with emulator.counters() as counted:
            ops.run_skinny_gemm(a, b, ONE, op_m=op_m)
        counts.append(counted.mfma_count)
    columns, (sparse_k, dense_k) = 2, {"gfx942": (64, 32), "gfx950": (128, 128)}[ARCH]
    assert counts == [columns * 1024 // sparse_k, columns * 1024 // dense_k]


# --- who computes, and what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["too many rows", "another format"])
def test_torch_computes_what_the_kernel_does_not(make):
    a, b, scale = normals(33 if make == "too many rows" else 4, 48, 64)
    if make == "another format":
        a, b = a.float().to(OTHER), b.float().to(OTHER)
    found = explain(ops.skinny_gemm, a, b, scale)
    assert found.path == "torch" and found.refused["kernel"]
    output = torch.ones(a.shape[0], 48).half()
    want = reference(a, b, scale, output)
    assert torch.equal(ops.skinny_gemm(a, b, scale, output), want) and torch.equal(output, want)


def test_operands_of_any_strides():
    a, b = integers(4, 40, 96)
    want = exact(a, b)
    assert torch.equal(ops.skinny_gemm(a.t().contiguous().t(), b.contiguous(), ONE), want)
    storage = torch.empty(40 * 96 + 4, dtype=torch.uint8)
    storage[4:] = b.t().contiguous().view(torch.uint8).flatten()
    assert torch.equal(ops.skinny_gemm(a, storage[4:].view(FP8).view(40, 96).t(), ONE), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(4, 96)}, "a must be .*; got float32"),
        ({"a": torch.zeros(4, 96).to(OTHER)}, "same fp8 format"),
        ({"a": torch.zeros(4, 64).to(FP8)}, r"b must be .*\[64, 40\]"),
        ({"a": torch.zeros(4, 40).to(FP8), "b": torch.zeros(40, 40).to(FP8)}, "multiple of 32; got 40"),
        ({"scale": torch.zeros(2)}, "scale must be one float32"),
        ({"scale": torch.zeros(1).half()}, "scale must be one float32; got float16"),
        ({"output": torch.zeros(4, 41).half()}, r"output must be .*\[4, 40\].*; got .*\[4, 41\]"),
        ({"output": torch.zeros(4, 40)}, "output must be float16.*; got float32"),
        ({"output": torch.zeros(40, 4).half().t()}, "output must be contiguous"),
        ({"split_k": 0}, "split_k must be at least 1; got 0"),
        ({"split_k": 2.5}, r"split_k must be an int; got float 2.5"),
        ({"a": torch.zeros(33, 96).to(FP8), "split_k": -1}, "split_k must be at least 1; got -1"),  # torch's
        ({"b": torch.zeros(96, 41).to(FP8), "deterministic": False}, "even n; got 41"),
    ],
)
def test_refusals_name_argument_and_rule(change, message):
    a, b = integers(4, 40, 96)
    with pytest.raises(GuardError, match=message):
        ops.skinny_gemm(**{"a": a, "b": b, "scale": ONE, **change})


def test_refused_configurations_are_those_of_the_rules():
    """Which test_fp8_skinny_gemm_space has one by one."""
    a, b = integers(4, 40, 96)
    for change, message in (({"consumers": 0}, "consumers must be 1 to 16 waves; got 0"),
                            ({"workgroups": 0}, "workgroups must be at least 1; got 0")):  # fmt: skip
        with pytest.raises(GuardError, match=message):
            ops.run_skinny_gemm(a, b, ONE, **change)


def test_the_raw_op_refuses_what_the_wrappers_repair():
    a, b = integers(4, 40, 96)
    out, waves = torch.zeros(4, 40).half(), (1, 8, 1, 2, 4, 1, 1, 1, 1, 1)
    with pytest.raises(GuardError, match="accumulate must be true"):
        ops.skinny_gemm_fp8_out(out, a, b, ONE, None, False, *waves)
    with pytest.raises(
        GuardError, match=r"float32 \[1, 4, 40\] = \[split_k \* consumers, m, n\]; got float32 \[2, 4, 40\]"
    ):
        ops.skinny_gemm_fp8_out(out, a, b, ONE, torch.zeros(2, 4, 40), True, *waves)
    odd = torch.zeros(4, 39).half()
    with pytest.raises(GuardError, match="even n; got 39"):
        ops.skinny_gemm_fp8_out(odd, a, b[:, :39], ONE, None, True, *waves)


def test_one_graph_serves_every_number_of_rows_and_adds_in_place():
    _, b = integers(1, 48, 256, seed=1)

    def call(a: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return ops.skinny_gemm(a, b, ONE, output) + 1

    traced = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (2, 5, 9):
            a, _ = integers(m, 48, 256, seed=m)
            output = torch.ones(m, 48, dtype=torch.float16)
            want = exact(a, b, ONE, output)
            assert torch.equal(traced(a, output), want + 1)
            assert torch.equal(output, want)
