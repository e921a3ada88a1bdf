"""The small-M MX-FP8 scaled-MFMA kernel, called as its module exports it."""

from __future__ import annotations

import re
from math import ceil

import pytest
import torch
from helpers.mxfp8_cases import (
    BYTE_OF_INTEGER,
    PAYLOAD_MINUS_ZERO,
    PAYLOAD_NAN,
    SCALE_NAN,
    SCALE_ONE,
    Operands,
    among_nans,
    assert_bits,
    assert_close,
    embedded,
    integers,
    normal,
    oracle,
    refusal_on_gfx942,
)

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.smallm_gemm_mxfp8 import smallm_mxfp8_mfma_out

N_SUB = (1, 2, 4)
K_SPLITS = (1, 2, 4, 8)
MFMA = "v_mfma_scale_f32_16x16x128_f8f6f4"


def workspace_for(case: Operands, k_splits: int) -> torch.Tensor | None:
    m, n, _ = case.mnk
    # What is in it beforehand must not matter.
    return torch.full((k_splits, m, n), float("nan")) if k_splits > 1 else None


def run(case: Operands, n_sub: int = 1, k_splits: int = 1) -> torch.Tensor:
    out = case.out()
    smallm_mxfp8_mfma_out(out, *case.args(), workspace_for(case, k_splits), n_sub, k_splits)
    return out


@pytest.mark.parametrize("k_splits", K_SPLITS)
@pytest.mark.parametrize("n_sub", N_SUB)
def test_every_instance_is_exact_on_integers(n_sub: int, k_splits: int) -> None:
    # 17 steps: no number of splits divides them, and the last is partial.
    case = integers(18, 32 * n_sub + 5, 2080)
    with emulator.options(checks="all"):
        assert_bits(run(case, n_sub, k_splits), oracle(case))


@pytest.mark.parametrize("m", (*range(1, 18), 31, 32, 33, 48, 63, 64))
def test_every_m_is_taken_as_it_is(m: int) -> None:
    case = integers(m, 20, 256)
    assert_bits(run(case, 2), oracle(case))


@pytest.mark.parametrize("n_sub", (1, 4))
@pytest.mark.parametrize("k", (32, 64, 96, 128, 160, 256, 384, 512, 544, 640, 768, 896, 1024, 1056, 1152, 1248))
def test_every_number_of_steps_and_kind_of_tail_is_exact(k: int, n_sub: int) -> None:
    case = integers(3, 17, k)
    assert_bits(run(case, n_sub), oracle(case))


@pytest.mark.parametrize("k", (1024, 1152, 1408, 1440))
@pytest.mark.parametrize("k_splits", (2, 4, 8))
def test_uneven_splits_are_exact(k_splits: int, k: int) -> None:
    case = integers(5, 20, k)
    assert_bits(run(case, 2, k_splits), oracle(case))


@pytest.mark.parametrize("k_splits", (1, 2))
@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 15, 16, 17, 18, 19, 63, 64, 65))
def test_every_n_is_exact(n: int, k_splits: int) -> None:
    # Whether n is a multiple of 4 decides how outputs are stored.
    case = integers(3, n, 256)
    assert_bits(run(case, 2, k_splits), oracle(case))


@pytest.mark.parametrize("k", (512, 544))
def test_each_row_and_block_uses_its_own_scale(k: int) -> None:
    m, n = 16, 16
    ones = torch.zeros(16, k, dtype=torch.uint8)
    ones[:, 5::32] = BYTE_OF_INTEGER[1]
    for block in range(k // 32):
        case = Operands(
            ones,
            torch.full((m, k // 32), SCALE_ONE, dtype=torch.uint8),
            ones.clone(),
            torch.full((n, k // 32), SCALE_ONE, dtype=torch.uint8),
        )
        case.xs[:, block] = 130 + torch.arange(m, dtype=torch.uint8) % 4
        case.ws[:, block] = 120 + torch.arange(n, dtype=torch.uint8) % 5
        assert_bits(run(case), oracle(case))


@pytest.mark.parametrize("k", (128, 160))
def test_each_element_meets_its_own_counterpart(k: int) -> None:
    # Row m of X selects element k0 + m of W's rows, whose elements are all different within 16.
    table = torch.tensor([BYTE_OF_INTEGER[value] for value in range(-8, 9)], dtype=torch.uint8)
    w = table[torch.arange(16 * k).reshape(16, k) * 7 % 17]
    for first in range(0, k, 16):
        x = torch.zeros(16, k, dtype=torch.uint8)
        x[torch.arange(16), first + torch.arange(16)] = BYTE_OF_INTEGER[1]
        scale = torch.full((16, k // 32), SCALE_ONE, dtype=torch.uint8)
        scale[:, first // 32] = 129
        case = Operands(x, scale, w, torch.full_like(scale, SCALE_ONE))
        assert_bits(run(case), oracle(case))


@pytest.mark.parametrize("byte", (0, 1, 2, 126, 127, 128, 253, 254))
def test_extreme_scales_that_cancel_lose_nothing(byte: int) -> None:
    case = integers(3, 7, 544)
    case.xs.fill_(byte)
    case.ws.fill_(254 - byte)
    case.xs[:, ::3] = 254 - byte
    case.ws[:, ::3] = byte
    assert_bits(run(case), oracle(case))


@pytest.mark.parametrize("x_byte", (0, 1, 127, 254))
@pytest.mark.parametrize("w_byte", (0, 1, 64, 127, 190, 254))
def test_extreme_scales_overflow_and_underflow_as_fp32_does(x_byte: int, w_byte: int) -> None:
    case = integers(1, 5, 128)
    case.xq.zero_(), case.wq.zero_()
    case.xq[:, 49] = case.wq[:, 49] = BYTE_OF_INTEGER[1]
    case.xs.fill_(x_byte), case.ws.fill_(w_byte)
    want = torch.full((1, 5), 2.0 ** (x_byte + w_byte - 254) if x_byte + w_byte < 382 else float("inf"))
    assert_bits(run(case), want.double())


@pytest.mark.parametrize("k_splits", (1, 4))
@pytest.mark.parametrize("block", (0, 3, 4, 15, 16, 17))
def test_a_nan_scale_makes_exactly_its_outputs_nan(block: int, k_splits: int) -> None:
    case = integers(20, 23, 576)
    want = oracle(case)
    case.xs[18, block] = SCALE_NAN
    case.ws[17, block] = SCALE_NAN
    want[18, :] = want[:, 17] = float("nan")
    assert_bits(run(case, 1, k_splits), want)


def test_a_nan_scale_counts_even_where_its_block_is_zero() -> None:
    case = integers(2, 4, 64)
    case.wq[2, 32:] = 0
    case.ws[2, 1] = SCALE_NAN
    assert_bits(run(case), oracle(case))


@pytest.mark.parametrize("k_index", (0, 63, 64, 127, 128, 543))
def test_nan_payload_makes_exactly_its_outputs_nan(k_index: int) -> None:
    case = integers(3, 9, 544)
    want = oracle(case)
    case.xq[2, k_index] = PAYLOAD_NAN
    case.wq[5, k_index] = PAYLOAD_NAN | 0x80
    want[2, :] = want[:, 5] = float("nan")
    assert_bits(run(case), want)


def test_minus_zero_is_zero() -> None:
    case = integers(2, 4, 96)
    zeroed = case.but(xq=case.xq.masked_fill(case.xq == 0, PAYLOAD_MINUS_ZERO))
    assert (zeroed.xq == PAYLOAD_MINUS_ZERO).any()
    assert_bits(run(zeroed), oracle(case))


@pytest.mark.parametrize("k", (32, 96, 128, 544, 1056))
@pytest.mark.parametrize("m", (1, 17))
def test_neighbouring_bytes_never_take_part(m: int, k: int) -> None:
    surrounded, want = among_nans(integers(2 * m, 20, k))
    assert_bits(run(surrounded, 2), want)


@pytest.mark.parametrize("k_splits", (1, 2))
@pytest.mark.parametrize("n", (12, 13))
def test_output_outside_the_result_is_untouched(n: int, k_splits: int) -> None:
    case = integers(3, n, 256)
    buffer = torch.full((3 * n + 33,), -123.0, dtype=torch.bfloat16)
    for start in (16, 17):  # with and without the alignment that wide stores need
        buffer.fill_(-123)
        out = buffer[start : start + 3 * n].view(3, n)
        smallm_mxfp8_mfma_out(out, *case.args(), workspace_for(case, k_splits), 4, k_splits)
        assert_bits(out, oracle(case))
        assert (buffer[:start] == -123).all() and (buffer[start + 3 * n :] == -123).all()


def test_a_workspace_need_not_be_aligned() -> None:
    case = integers(3, 8, 256)
    workspace = torch.empty(2 * 24 + 1)[1:].view(2, 3, 8)
    out = case.out()
    smallm_mxfp8_mfma_out(out, *case.args(), workspace, 1, 2)
    assert_bits(out, oracle(case))
    assert torch.equal(workspace.double().sum(0), oracle(case))


def test_scales_need_no_alignment_and_both_spellings_of_the_dtypes_work() -> None:
    case = integers(2, 6, 640)
    spelled = Operands(
        case.xq.view(torch.float8_e4m3fn),
        embedded(case.xs, 0xFF, margin=61).view(torch.float8_e8m0fnu),
        case.wq.view(torch.float8_e4m3fn),
        embedded(case.ws, 0xFF, margin=63).view(torch.float8_e8m0fnu),
    )
    assert_bits(run(spelled), oracle(case))


def test_split_results_do_not_depend_on_the_order_of_waves() -> None:
    case = normal(9, 40, 2048)
    first = run(case, 2, 8)
    for order in ("reverse", "random"):
        with emulator.options(wave_order=order):
            assert torch.equal(run(case, 2, 8).view(torch.int16), first.view(torch.int16))


@pytest.mark.parametrize(
    ("m", "n", "k", "n_sub", "k_splits"),
    ((8, 96, 6144, 1, 8), (16, 64, 2048, 1, 4), (33, 70, 768, 2, 2), (64, 128, 3072, 4, 1), (1, 48, 8192, 1, 8)),
)
def test_real_data_is_within_the_bounds(m: int, n: int, k: int, n_sub: int, k_splits: int) -> None:
    case = normal(m, n, k)
    assert_close(run(case, n_sub, k_splits), oracle(case))


@pytest.mark.parametrize(
    ("m", "n", "k", "n_sub", "k_splits"),
    ((16, 48, 1024, 1, 1), (17, 40, 544, 2, 4), (64, 128, 512, 4, 2), (1, 1, 32, 4, 1), (5, 130, 1440, 1, 8)),
)
def test_one_mfma_per_tile_and_step(m: int, n: int, k: int, n_sub: int, k_splits: int) -> None:
    case = integers(m, n, k)
    with emulator.counters() as counters:
        run(case, n_sub, k_splits)
    assert counters.mfma_count == ceil(k / 128) * ceil(n / 16) * ceil(m / 16)


@pytest.mark.full
@pytest.mark.parametrize(("n_sub", "k_splits"), ((1, 1), (1, 8), (2, 4), (4, 2)))
def test_the_tp4_qkv_projection_takes_6912_mfmas(n_sub: int, k_splits: int) -> None:
    case = normal(16, 2304, 6144)
    with emulator.counters() as counters:
        out = run(case, n_sub, k_splits)
    assert counters.count(MFMA) == counters.mfma_count == 6912
    assert counters.tensors["Wq"].loaded == case.wq.numel()
    assert_close(out, oracle(case))


@pytest.mark.parametrize(("m", "n_sub", "k_splits"), ((16, 1, 1), (3, 2, 4), (33, 4, 2)))
def test_each_weight_byte_is_loaded_once_per_16_rows(m: int, n_sub: int, k_splits: int) -> None:
    case = integers(m, 128, 1408)
    with emulator.counters() as counters:
        run(case, n_sub, k_splits)
    weights = counters.tensors["Wq"]
    assert weights.unique_loaded == case.wq.numel()
    assert weights.loaded == ceil(m / 16) * case.wq.numel()
    assert not counters.scratch_bytes and not counters.lds_bytes


def refused(
    case: Operands,
    message: str,
    n_sub: int = 1,
    k_splits: int = 1,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> None:
    with pytest.raises(GuardError, match=message):
        smallm_mxfp8_mfma_out(case.out() if out is None else out, *case.args(), workspace, n_sub, k_splits)


GOOD = integers(2, 8, 256)


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"xq": zeros(2, 256, dtype=torch.int8)}, r"Xq holds e4m3fn elements.*got int8"),
        ({"ws": zeros(8, 8, dtype=torch.int8)}, r"Ws holds e8m0 bytes.*got int8"),
        ({"wq": zeros(8)}, r"Wq must have 2 dimensions"),
        ({"wq": zeros(8, 128)}, r"must have the same K"),
        ({"xq": zeros(2, 48), "wq": zeros(8, 48)}, r"K must be a positive multiple of 32.*got 48"),
        ({"ws": zeros(8, 9)}, r"Ws must be \[8, 8\].*got uint8 \[8, 9\]"),
        ({"wq": zeros(256, 8).t()}, r"Wq must be contiguous"),
    ),
)
def test_operands_are_guarded(changes: dict[str, torch.Tensor], message: str) -> None:
    refused(GOOD.but(**changes), message, out=GOOD.out())


@pytest.mark.parametrize("m", (0, 65, 128))
def test_m_outside_1_to_64_is_refused(m: int) -> None:
    refused(Operands(zeros(m, 256), zeros(m, 8), GOOD.wq, GOOD.ws), rf"M must be between 1 and 64; got {m}")


@pytest.mark.parametrize("n_sub", (0, 3, 8, -1))
def test_other_n_sub_are_refused(n_sub: int) -> None:
    refused(GOOD, rf"n_sub must be 1, 2 or 4.*got {n_sub}", n_sub)


@pytest.mark.parametrize("k_splits", (0, 3, 16, -2))
def test_other_k_splits_are_refused(k_splits: int) -> None:
    refused(GOOD, rf"k_splits must be 1, 2, 4 or 8; got {k_splits}", 1, k_splits)


def test_more_splits_than_steps_are_refused() -> None:
    message = r"k_splits must not exceed the number of K steps, ceil\(K/128\) = 2 for K = 256; got 4"
    refused(GOOD, message, 1, 4, torch.empty(4, 2, 8))


@pytest.mark.parametrize(
    ("workspace", "message"),
    (
        (None, r"k_splits = 2 needs a workspace: float32 \[2, 2, 8\]; got None"),
        (zeros(2, 2, 8, dtype=torch.bfloat16), r"workspace must be float32; got bfloat16"),
        (torch.zeros(2, 2, 9), r"workspace must be \[k_splits, M, N\] = \[2, 2, 8\]; got float32 \[2, 2, 9\]"),
        (torch.zeros(32), r"workspace must be \[k_splits, M, N\]"),
        (torch.zeros(2, 8, 2).transpose(1, 2), r"workspace must be contiguous"),
    ),
)
def test_the_workspace_is_guarded(workspace: torch.Tensor | None, message: str) -> None:
    refused(GOOD, message, 1, 2, workspace)


@pytest.mark.parametrize(
    ("out", "message"),
    (
        (zeros(2, 8, dtype=torch.float32), r"out must be bfloat16; got float32"),
        (zeros(8, 2, dtype=torch.bfloat16), r"out must be \[2, 8\]; got bfloat16 \[8, 2\]"),
    ),
)
def test_the_output_is_guarded(out: torch.Tensor, message: str) -> None:
    refused(GOOD, message, out=out)


def test_more_than_2_gib_of_weight_is_refused_before_anything_is_touched() -> None:
    n, k = 32769, 65536
    case = Operands(zeros(1, k), zeros(1, k // 32), zeros(1, k).expand(n, k), zeros(1, k // 32).expand(n, k // 32))
    refused(case, r"Wq has N\*K = .* = 2147549184 bytes.*2\^31 - 1", out=zeros(1, n, dtype=torch.bfloat16))


def test_another_architecture_is_refused_before_a_build_and_again_before_a_launch() -> None:
    message = "gfx950.*gfx942"
    assert re.search(message, refusal_on_gfx942("smallm_mxfp8_mfma_out", "None, 1, 1", HIPFORGE_EMULATE="gfx942"))
    # The Python side assumes a gfx950; the module asks the device itself.
    assert re.search(message, refusal_on_gfx942("smallm_mxfp8_mfma_out", "None, 1, 1"))
