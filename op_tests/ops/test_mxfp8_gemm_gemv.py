"""The small-M MX-FP8 GEMV kernel, called as its module exports it."""

from __future__ import annotations

import re

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
from hipforge.ops.smallm_gemm_mxfp8 import smallm_mxfp8_gemv_out

ROWS = (1, 2, 4, 8, 16)
BLOCK_N = (4, 8, 16, 32, 64)
# One lane chunk, less than a step, a step, a step and a bit, and pairs of steps with every kind of remainder.
DEPTHS = (32, 96, 1024, 1056, 2048, 2080, 3104, 4096)


def run(case: Operands, block_n: int = 8) -> torch.Tensor:
    out = case.out()
    smallm_mxfp8_gemv_out(out, *case.args(), block_n)
    return out


@pytest.mark.parametrize("block_n", BLOCK_N)
@pytest.mark.parametrize("m", ROWS)
def test_every_instance_is_exact_on_integers(m: int, block_n: int) -> None:
    case = integers(m, 2 * block_n + 3, 3104)
    with emulator.options(checks="all"):
        assert_bits(run(case, block_n), oracle(case))


@pytest.mark.parametrize("m", range(1, 17))
def test_every_m_is_taken_as_it_is(m: int) -> None:
    case = integers(m, 21, 1056)
    assert_bits(run(case, 16), oracle(case))


@pytest.mark.parametrize("m", (1, 5, 16))
@pytest.mark.parametrize("k", DEPTHS)
def test_every_kind_of_k_tail_is_exact(k: int, m: int) -> None:
    case = integers(m, 9, k)
    assert_bits(run(case, 8), oracle(case))


@pytest.mark.parametrize("block_n", BLOCK_N)
@pytest.mark.parametrize("n", (1, 2, 3, 5, 63, 64, 65))
def test_every_n_is_exact(n: int, block_n: int) -> None:
    case = integers(2, n, 96)
    assert_bits(run(case, block_n), oracle(case))


@pytest.mark.parametrize("m", (1, 16))
def test_each_row_and_block_uses_its_own_scale(m: int) -> None:
    # One element of each block is 1, so an output is a sum of 33 powers of two that names every scale it used.
    k, n = 1056, 33
    payload = torch.zeros(1, k, dtype=torch.uint8)
    payload[0, ::32] = BYTE_OF_INTEGER[1]
    for block in range(k // 32):
        case = Operands(
            payload.expand(m, k).contiguous(),
            torch.full((m, k // 32), SCALE_ONE, dtype=torch.uint8),
            payload.expand(n, k).contiguous(),
            torch.full((n, k // 32), SCALE_ONE, dtype=torch.uint8),
        )
        case.xs[:, block] = 130 + torch.arange(m, dtype=torch.uint8) % 4
        case.ws[:, block] = 120 + torch.arange(n, dtype=torch.uint8) % 5
        assert_bits(run(case), oracle(case))


@pytest.mark.parametrize("byte", (0, 1, 2, 126, 127, 128, 253, 254))
def test_extreme_scales_that_cancel_lose_nothing(byte: int) -> None:
    case = integers(3, 7, 1056)
    case.xs.fill_(byte)
    case.ws.fill_(254 - byte)
    case.xs[:, ::3] = 254 - byte
    case.ws[:, ::3] = byte
    assert_bits(run(case), oracle(case))


@pytest.mark.parametrize("x_byte", (0, 1, 127, 254))
@pytest.mark.parametrize("w_byte", (0, 1, 64, 127, 190, 254))
def test_extreme_scales_overflow_and_underflow_as_fp32_does(x_byte: int, w_byte: int) -> None:
    # One product of 1: 2^(xs + ws - 254) is inf above 2^127, a denormal below 2^-126 and 0 below 2^-149.
    case = integers(1, 5, 32)
    case.xq.zero_(), case.wq.zero_()
    case.xq[:, 17] = case.wq[:, 17] = BYTE_OF_INTEGER[1]
    case.xs.fill_(x_byte), case.ws.fill_(w_byte)
    want = torch.full((1, 5), 2.0 ** (x_byte + w_byte - 254) if x_byte + w_byte < 382 else float("inf"))
    assert_bits(run(case), want.double())


@pytest.mark.parametrize("block", (0, 1, 31, 32, 64))
def test_a_nan_scale_makes_exactly_its_outputs_nan(block: int) -> None:
    case = integers(3, 11, 2080)
    want = oracle(case)
    case.xs[1, block] = SCALE_NAN
    case.ws[7, block] = SCALE_NAN
    want[1, :] = want[:, 7] = float("nan")
    assert_bits(run(case), want)


def test_a_nan_scale_counts_even_where_its_block_is_zero() -> None:
    case = integers(2, 4, 64)
    case.wq[2, 32:] = 0
    case.ws[2, 1] = SCALE_NAN
    assert_bits(run(case), oracle(case))


@pytest.mark.parametrize("k_index", (0, 15, 16, 1023, 1024, 1055))
def test_nan_payload_makes_exactly_its_outputs_nan(k_index: int) -> None:
    case = integers(3, 9, 1056)
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


def test_every_payload_byte_decodes() -> None:
    case = Operands(
        torch.arange(256, dtype=torch.uint8).reshape(8, 32),
        torch.full((8, 1), SCALE_ONE, dtype=torch.uint8),
        torch.zeros(32, 32, dtype=torch.uint8),
        torch.full((32, 1), SCALE_ONE, dtype=torch.uint8),
    )
    case.wq.fill_diagonal_(BYTE_OF_INTEGER[1])
    want = oracle(case)  # 0 * NaN: a row with a NaN payload is all NaN
    assert want[:3].isfinite().all() and want[3].isnan().all()
    assert_bits(run(case), want)


@pytest.mark.parametrize("k", (32, 96, 1056, 2080))
@pytest.mark.parametrize("m", (1, 3))
def test_neighbouring_bytes_never_take_part(m: int, k: int) -> None:
    surrounded, want = among_nans(integers(2 * m, 10, k))
    assert_bits(run(surrounded, 16), want)


def test_output_outside_the_result_is_untouched() -> None:
    case = integers(3, 13, 64)
    buffer = torch.full((3 * 13 + 32,), -123.0, dtype=torch.bfloat16)
    out = buffer[16 : 16 + 39].view(3, 13)
    smallm_mxfp8_gemv_out(out, *case.args(), 64)
    assert_bits(out, oracle(case))
    assert (buffer[:16] == -123).all() and (buffer[55:] == -123).all()


def test_scales_need_no_alignment_and_both_spellings_of_the_dtypes_work() -> None:
    case = integers(2, 6, 96)
    spelled = Operands(
        case.xq.view(torch.float8_e4m3fn),
        embedded(case.xs, 0xFF, margin=61).view(torch.float8_e8m0fnu),
        case.wq.view(torch.float8_e4m3fn),
        embedded(case.ws, 0xFF, margin=63).view(torch.float8_e8m0fnu),
    )
    assert_bits(run(spelled), oracle(case))


def test_results_do_not_depend_on_the_order_of_waves() -> None:
    case = normal(5, 40, 2080)
    first = run(case, 16)
    for order in ("reverse", "random"):
        with emulator.options(wave_order=order):
            assert torch.equal(run(case, 16).view(torch.int16), first.view(torch.int16))


@pytest.mark.parametrize(
    ("m", "n", "k", "block_n"), ((1, 96, 6144, 16), (4, 64, 2048, 8), (7, 65, 768, 32), (16, 48, 3072, 64))
)
def test_real_data_is_within_the_bounds(m: int, n: int, k: int, block_n: int) -> None:
    case = normal(m, n, k)
    assert_close(run(case, block_n), oracle(case))


@pytest.mark.parametrize(("m", "block_n"), ((1, 4), (2, 16), (16, 64)))
def test_each_weight_byte_is_loaded_once_by_wide_loads(m: int, block_n: int) -> None:
    case = integers(m, 128, 3072)
    with emulator.counters() as counters:
        run(case, block_n)
    weights, scales = counters.tensors["Wq"], counters.tensors["Ws"]
    assert weights.loaded == weights.unique_loaded == case.wq.numel()
    assert scales.unique_loaded == case.ws.numel()
    # 16 bytes per lane: a full step of a row is one instruction.
    assert counters.count("buffer_load_dwordx4") >= 128 * 3
    assert not counters.scratch_bytes and not counters.lds_bytes


def counted(case: Operands, block_n: int) -> emulator.Counters:
    with emulator.counters() as collector:
        run(case, block_n)
    return collector.result


def test_instructions_per_kib_of_weight_stay_few() -> None:
    # Two more steps of 256 rows at M = 1. A step of a row costs 8 conversions, 7 packed FMAs, a packed multiplication,
    # 4 scale instructions and a quarter of X's 8 conversions: 22. Loads (1.25 wide, 0.6 of scales), their offsets,
    # waits, the watch for NaN and the loop add 7. The bandwidth of an MI355X allows 79 (gemv_kernel.h).
    shallow, deep = (counted(integers(1, 256, k, scales=(126, 128)), 16) for k in (4096, 6144))
    steps = 2 * 256
    assert deep.count("v_pk_fma_f32") - shallow.count("v_pk_fma_f32") == 7 * steps
    assert deep.count("buffer_load_dwordx4") - shallow.count("buffer_load_dwordx4") == 1.25 * steps
    assert deep.wave_instructions - shallow.wave_instructions <= 30 * steps


def refused(case: Operands, message: str, block_n: int = 8, out: torch.Tensor | None = None) -> None:
    with pytest.raises(GuardError, match=message):
        smallm_mxfp8_gemv_out(case.out() if out is None else out, *case.args(), block_n)


GOOD = integers(2, 8, 64)


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"xq": zeros(2, 64, dtype=torch.int8)}, r"Xq holds e4m3fn elements.*got int8"),
        ({"wq": zeros(8, 64, dtype=torch.float8_e5m2)}, r"Wq holds e4m3fn elements.*got float8_e5m2"),
        ({"xs": zeros(2, 2, dtype=torch.float32)}, r"Xs holds e8m0 bytes.*got float32"),
        ({"ws": zeros(8, 2, dtype=torch.float8_e4m3fn)}, r"Ws holds e8m0 bytes.*got float8_e4m3fn"),
        ({"xq": zeros(1, 2, 64)}, r"Xq must have 2 dimensions"),
        ({"wq": zeros(8)}, r"Wq must have 2 dimensions"),
        ({"wq": zeros(8, 32)}, r"must have the same K; got Xq uint8 \[2, 64\] and Wq uint8 \[8, 32\]"),
        ({"xq": zeros(2, 48), "wq": zeros(8, 48)}, r"K must be a positive multiple of 32.*got 48"),
        ({"xq": zeros(2, 0), "wq": zeros(8, 0)}, r"K must be a positive multiple of 32.*got 0"),
        ({"xs": zeros(2, 3)}, r"Xs must be \[2, 2\].*got uint8 \[2, 3\]"),
        ({"xs": zeros(4)}, r"Xs must be \[2, 2\]"),
        ({"ws": zeros(2, 8)}, r"Ws must be \[8, 2\].*got uint8 \[2, 8\]"),
        ({"wq": zeros(64, 8).t()}, r"Wq must be contiguous"),
        ({"xq": zeros(2, 128)[:, ::2]}, r"Xq must be contiguous"),
        ({"ws": zeros(2, 8).t()}, r"Ws must be contiguous"),
        ({"xs": zeros(2, 4)[:, :2]}, r"Xs must be contiguous"),
        ({"xq": zeros(136)[8:].view(2, 64)}, r"Xq must start at a multiple of 16 bytes"),
        ({"wq": zeros(520)[8:].view(8, 64)}, r"Wq must start at a multiple of 16 bytes"),
    ),
)
def test_operands_are_guarded(changes: dict[str, torch.Tensor], message: str) -> None:
    refused(GOOD.but(**changes), message, out=GOOD.out())


@pytest.mark.parametrize("m", (0, 17, 64))
def test_m_outside_1_to_16_is_refused(m: int) -> None:
    refused(Operands(zeros(m, 64), zeros(m, 2), GOOD.wq, GOOD.ws), rf"M must be between 1 and 16; got {m}")


def test_an_empty_weight_is_refused() -> None:
    refused(Operands(GOOD.xq, GOOD.xs, zeros(0, 64), zeros(0, 2)), r"N must be at least 1; got 0")


@pytest.mark.parametrize("block_n", (0, 1, 12, 128, -8))
def test_other_block_n_are_refused(block_n: int) -> None:
    refused(GOOD, rf"block_n must be 4, 8, 16, 32 or 64.*got {block_n}", block_n)


@pytest.mark.parametrize(
    ("out", "message"),
    (
        (zeros(2, 8, dtype=torch.float16), r"out must be bfloat16; got float16"),
        (zeros(2, 9, dtype=torch.bfloat16), r"out must be \[2, 8\]; got bfloat16 \[2, 9\]"),
        (zeros(16, dtype=torch.bfloat16), r"out must be \[2, 8\]"),
        (zeros(8, 2, dtype=torch.bfloat16).t(), r"out must be contiguous"),
    ),
)
def test_the_output_is_guarded(out: torch.Tensor, message: str) -> None:
    refused(GOOD, message, out=out)


def test_an_output_inside_an_operand_is_refused():
    held = GOOD.wq.view(-1)[:32].view(torch.bfloat16).view(2, 8)
    refused(GOOD, "out is written and must not share memory with Wq", out=held)


def test_more_than_2_gib_of_weight_is_refused_before_anything_is_touched() -> None:
    # Expanded views: nothing of this size is allocated.
    n, k = 32769, 65536
    case = Operands(zeros(1, k), zeros(1, k // 32), zeros(1, k).expand(n, k), zeros(1, k // 32).expand(n, k // 32))
    out = zeros(1, n, dtype=torch.bfloat16)
    refused(case, r"Wq has N\*K = 32769\*65536 = 2147549184 bytes.*2\^31 - 1.*signed 32-bit", out=out)


def test_more_than_2_gib_of_activations_is_refused() -> None:
    k = 2**28
    row, scale = zeros(1, 32).expand(8, 32), zeros(1, 1)
    case = Operands(
        row[:1, :1].expand(8, k), scale.expand(8, k // 32), row[:1, :1].expand(1, k), scale.expand(1, k // 32)
    )
    refused(case, r"Xq has M\*K = 8\*268435456 = 2147483648 bytes", out=zeros(8, 1, dtype=torch.bfloat16))


def test_another_architecture_is_refused_before_a_build_and_again_before_a_launch() -> None:
    message = "gfx950.*gfx942"
    assert re.search(message, refusal_on_gfx942("smallm_mxfp8_gemv_out", "8", HIPFORGE_EMULATE="gfx942"))
    # The Python side assumes a gfx950; the module asks the device itself.
    assert re.search(message, refusal_on_gfx942("smallm_mxfp8_gemv_out", "8"))
