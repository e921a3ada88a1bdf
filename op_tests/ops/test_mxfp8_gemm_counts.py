"""What the GEMV and the MFMA kernel of the dense MX-FP8 GEMM count: loads, instructions, matrix instructions."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from helpers.mxfp8_cases import Operands, assert_bits, assert_close, integers, normal, oracle

from hipforge import emulator
from hipforge.ops.mxfp8_gemm.kernels import BY_NAME
from hipforge.ops.smallm_gemm_mxfp8 import smallm_mxfp8_mfma_out

MFMA = "v_mfma_scale_f32_16x16x128_f8f6f4"


def counted(case: Operands, kernel: str, **configuration: int) -> tuple[emulator.Counters, torch.Tensor]:
    out = case.out()
    with emulator.counters() as collector:
        BY_NAME[kernel].run(configuration, case.mnk, out, *case.args(), None)
    return collector.result, out


@pytest.mark.parametrize(("m", "block_n"), ((1, 4), (2, 16), (16, 64)))
def test_the_gemv_loads_each_weight_byte_once_by_wide_loads(m: int, block_n: int) -> None:
    case = integers(m, 128, 3072)
    counters, _ = counted(case, "smallm_mxfp8_gemv", block_n=block_n)
    weights, scales = counters.tensors["Wq"], counters.tensors["Ws"]
    assert weights.loaded == weights.unique_loaded == case.wq.numel()
    assert scales.unique_loaded == case.ws.numel()
    # 16 bytes per lane: a full step of a row is one instruction.
    assert counters.count("buffer_load_dwordx4") >= 128 * 3
    assert not counters.scratch_bytes and not counters.lds_bytes


def test_the_gemv_takes_few_instructions_per_kib_of_weight() -> None:
    # Two more steps of 256 rows at M = 1. A step of a row costs 8 conversions, 7 packed FMAs, a packed multiplication,
    # 4 scale instructions and a quarter of X's 8 conversions: 22. Loads (1.25 wide, 0.6 of scales), their offsets,
    # waits, the watch for NaN and the loop add 7. The bandwidth of an MI355X allows 79 (gemv_kernel.h).
    shallow, deep = (
        counted(integers(1, 256, k, scales=(126, 128)), "smallm_mxfp8_gemv", block_n=16)[0] for k in (4096, 6144)
    )
    steps = 2 * 256
    assert deep.count("v_pk_fma_f32") - shallow.count("v_pk_fma_f32") == 7 * steps
    assert deep.count("buffer_load_dwordx4") - shallow.count("buffer_load_dwordx4") == 1.25 * steps
    assert deep.wave_instructions - shallow.wave_instructions <= 30 * steps


@pytest.mark.parametrize(
    ("m", "n", "k", "n_sub", "k_splits"),
    (
        (16, 48, 1024, 1, 1), (17, 40, 544, 2, 4), (64, 128, 512, 4, 2), (1, 1, 32, 4, 1), (5, 130, 1440, 1, 8),
        (3, 128, 1408, 2, 4),
    ),
)  # fmt: skip
def test_one_mfma_per_tile_and_step(m: int, n: int, k: int, n_sub: int, k_splits: int) -> None:
    case = integers(m, n, k)
    counters, _ = counted(case, "smallm_mxfp8_mfma", n_sub=n_sub, k_splits=k_splits)
    assert counters.mfma_count == ceil(k / 128) * ceil(n / 16) * ceil(m / 16)
    weights = counters.tensors["Wq"]
    assert weights.unique_loaded == case.wq.numel()
    assert weights.loaded == ceil(m / 16) * case.wq.numel()
    assert not counters.scratch_bytes and not counters.lds_bytes


@pytest.mark.full
@pytest.mark.parametrize(("n_sub", "k_splits"), ((1, 1), (1, 8), (2, 4), (4, 2)))
def test_the_tp4_qkv_projection_takes_6912_mfmas(n_sub: int, k_splits: int) -> None:
    case = normal(16, 2304, 6144)
    counters, out = counted(case, "smallm_mxfp8_mfma", n_sub=n_sub, k_splits=k_splits)
    assert counters.count(MFMA) == counters.mfma_count == 6912
    assert counters.tensors["Wq"].loaded == case.wq.numel()
    assert_close(out, oracle(case))


def test_a_workspace_of_the_mfma_kernel_need_not_be_aligned() -> None:
    case = integers(3, 8, 256)
    workspace = torch.empty(2 * 24 + 1)[1:].view(2, 3, 8)
    out = case.out()
    smallm_mxfp8_mfma_out(out, *case.args(), workspace, 1, 2)
    assert_bits(out, oracle(case))
    assert torch.equal(workspace.double().sum(0), oracle(case))
