"""What every kernel of the dense MX-FP8 and MXFP4 GEMMs holds to, in every configuration that differs in its path.

helpers/block_gemm_subjects.py has the kernels. What is one kernel's own (counts, code, its parameters' refusals) is in
the file named after it.
"""

from __future__ import annotations

import pytest
import torch
from helpers.block_gemm_subjects import ARCH, MXFP8, SUBJECTS, Given, Subject, instances
from helpers.mxfp8_cases import (
    BYTE_OF_INTEGER,
    PAYLOAD_MINUS_ZERO,
    SCALE_NAN,
    SCALE_ONE,
    Operands,
    assert_bits,
    assert_close,
    bias_for,
    embedded,
)
from hypothesis import given as drawn
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hipforge import emulator
from hipforge.ops.mxfp4_gemm.kernels import KERNELS as MXFP4_KERNELS
from hipforge.ops.mxfp8_gemm.kernels import KERNELS

pytestmark = pytest.mark.gfx942

ORDERS = ("forward", "reverse", "random")


def test_every_kernel_of_both_families_is_held_to_this() -> None:
    kernels = {kernel.name for kernel in (*KERNELS, *MXFP4_KERNELS) if ARCH in kernel.archs}
    assert {subject.kernel.name for subject in SUBJECTS.values()} == kernels


@instances("every")
def test_every_instance_is_exact_on_integers_under_all_checks(subject: Subject, given: Given) -> None:
    # 21 steps, the last partial: each of 16 waves has other steps than its neighbour; two tiles and a bit one way,
    # one and a bit the other.
    (rows, columns), number = subject.tile(given), subject.every.index(given)
    m, n = (2 - number % 2) * rows + 5, (1 + number % 2) * columns + 5
    subject.check(given, m, n, 20 * 128 + 96, checks="all", wave_order=ORDERS[number % len(ORDERS)])


@pytest.mark.parametrize("order", ORDERS)
@instances("few")
def test_the_order_of_waves_changes_nothing(subject: Subject, given: Given, order: str) -> None:
    rows, columns = subject.tile(given)
    subject.check(given, rows + 5, columns + 5, 8 * 128 + 96, checks="all", wave_order=order)


@instances("few")
def test_turns_of_one_instruction_change_nothing(subject: Subject, given: Given) -> None:
    subject.check(given, *subject.tile(given), 1280, checks="all", quantum=1)


# 2880: gpt-oss, 22.5 steps of 128.
DEPTHS = (
    32, 64, 96, 128, 160, 192, 224, 256, 384, 512, 544, 640, 768, 896, 1024, 1056, 1152, 1408, 1440, 1920, 2048, 2080,
    2304, 2880, 4096, 4224,
)  # fmt: skip


@instances("few")
def test_every_number_of_steps_and_kind_of_tail_is_exact(subject: Subject, given: Given) -> None:
    rows, columns = subject.tile(given)
    of_step = {k * subject.k_step(given) // 128 for k in DEPTHS} if subject.k_step(given) > 64 else DEPTHS
    for k in of_step:
        if subject.takes(given, 1, 1, k):
            subject.check(given, min(rows, 16) + 3, min(columns, 16) + 1, k)


@instances("few")
def test_every_m_and_n_is_exact(subject: Subject, given: Given) -> None:
    rows, columns = subject.tile(given)
    # Whether n is a multiple of 4 or 8 decides how outputs are stored.
    sizes = {1, 2, 3, 4, 5, 15, 16, 17, 20, 63, 64, 65, columns - 1, columns, columns + 1}
    for n in sorted({subject.shape(given, 3, n, 256)[1] for n in sizes}):
        subject.check(given, 3, n, 256)
    for m in sorted({*range(1, 9), 15, 16, 17, 33, 64, rows - 1, rows, rows + 1}):
        if m <= subject.most_m(given):
            subject.check(given, m, 20, 256)


@instances("few")
def test_each_row_and_block_uses_its_own_scale(subject: Subject, given: Given) -> None:
    rows, columns = subject.tile(given)
    case = subject.format.exact(*subject.shape(given, rows, columns, 1088), scales=(126, 128))
    m, n, k = case.mnk
    at_rows, blocks = torch.arange(max(m, n))[:, None], torch.arange(k // 32)
    case.xs.copy_((126 + (at_rows[:m] + 2 * blocks) % 3).to(torch.uint8))
    case.ws.copy_((126 + (at_rows[:n] // 2 + blocks) % 3).to(torch.uint8))
    assert_bits(subject.run(given, case), subject.format.oracle(case))


def with_scales_of(subject: Subject, x: torch.Tensor, w: torch.Tensor, x_byte: int = SCALE_ONE) -> Operands:
    """Elements, as integers, and one scale for all of X and of W."""
    (m, k), n = x.shape, len(w)
    scales = [torch.full((size, k // 32), byte, dtype=torch.uint8) for size, byte in ((m, x_byte), (n, SCALE_ONE))]
    return subject.format.operands(subject.format.pack(x), scales[0], subject.format.pack(w), scales[1])


@instances("few")
def test_each_element_meets_its_own_counterpart(subject: Subject, given: Given) -> None:
    # Row m of X selects one element of W's rows, whose elements are all different within 13 or 17.
    m, n, k = subject.shape(given, 128, subject.tile(given)[1], 160)
    numbers = torch.tensor(subject.format.numbers)
    w = numbers[(torch.arange(n)[:, None] * 5 + torch.arange(k) * 7) % len(numbers)]
    for first in range(0, k, m):
        x = torch.zeros(m, k, dtype=torch.int64)
        at = torch.arange(first, min(first + m, k))
        x[at - first, at] = subject.format.one
        case = with_scales_of(subject, x, w, x_byte=128)
        assert_bits(subject.run(given, case), subject.format.oracle(case))
        if k > 1024 and first > 4 * m:  # a sample of a long K
            break


@pytest.mark.parametrize("byte", (0, 1, 2, 126, 127, 128, 253, 254))
@instances("one")
def test_extreme_scales_that_cancel_lose_nothing(subject: Subject, given: Given, byte: int) -> None:
    case = subject.format.exact(*subject.shape(given, 3, 7, 544))
    case.xs.fill_(byte)
    case.ws.fill_(254 - byte)
    case.xs[:, ::3] = 254 - byte
    case.ws[:, ::3] = byte
    assert_bits(subject.run(given, case), subject.format.oracle(case))


@instances("one")
def test_extreme_scales_overflow_and_underflow_as_fp32_does(subject: Subject, given: Given) -> None:
    # One product: 2^(xs + ws - 254) is inf above 2^127, a denormal below 2^-126 and 0 below 2^-149.
    m, n, k = subject.shape(given, 1, 5, 32)
    x, w = torch.zeros(m, k, dtype=torch.int64), torch.zeros(n, k, dtype=torch.int64)
    x[:, 17] = w[:, 17] = subject.format.one if ARCH == "gfx950" else BYTE_OF_INTEGER[2]
    case = with_scales_of(subject, x, w)
    for x_byte in (0, 1, 127, 254):
        for w_byte in (0, 1, 64, 127, 190, 254):
            case.xs.fill_(x_byte), case.ws.fill_(w_byte)
            want = torch.full((m, n), 2.0 ** (x_byte + w_byte - 254) if x_byte + w_byte < 382 else float("inf"))
            assert_bits(subject.run(given, case), want.double())


@instances("few")
def test_nans_make_exactly_their_outputs_nan(subject: Subject, given: Given) -> None:
    clean = subject.format.exact(*subject.shape(given, 20, 23, 576))
    m, _, k = clean.mnk
    for block in sorted({0, 3, 4, 15, 16, k // 32 - 1}):
        case = clean.but(xs=clean.xs.clone(), ws=clean.ws.clone(), xq=clean.xq.clone(), wq=clean.wq.clone())
        want = subject.format.oracle(clean)
        case.xs[m - 2, block] = SCALE_NAN
        case.ws[17, block] = SCALE_NAN
        case.wq[17] = 0  # even where its blocks are zero
        want[m - 2, :] = want[:, 17] = float("nan")
        if subject.format.nan is not None:
            case.xq[0, 32 * block + 5] = case.wq[5, 32 * block + 31] = subject.format.nan
            want[0, :] = want[:, 5] = float("nan")
        assert_bits(subject.run(given, case), want)


@instances("few")
def test_every_element_decodes_and_minus_zero_is_zero(subject: Subject, given: Given) -> None:
    m, n, k = subject.shape(given, 8, 32, 32)
    for first in range(0, 8, m):
        x, w = torch.zeros(m, k, dtype=torch.int64), torch.zeros(n, k, dtype=torch.int64)
        x[: 8 - first, :32] = (torch.arange(256) % subject.format.elements).view(8, 32)[first : first + m]
        w[:, :32].fill_diagonal_(subject.format.one)
        case = with_scales_of(subject, x, w)
        assert_bits(subject.run(given, case), subject.format.oracle(case))  # 0 * NaN: a row with a NaN is all NaN
    if subject.format is MXFP8 and ARCH == "gfx950":
        case = subject.format.exact(*subject.shape(given, 2, 4, 96))
        zeroed = case.but(xq=case.xq.masked_fill(case.xq == 0, PAYLOAD_MINUS_ZERO))
        assert_bits(subject.run(given, zeroed), subject.format.oracle(case))


@instances("few")
def test_neighbouring_bytes_never_take_part(subject: Subject, given: Given) -> None:
    # K of 90, 47, 33 and 130 blocks: rows of scales have 1, 2 or 3 bytes past whole words and begin at any of them.
    for m, k in ((1, 32), (17, 96), (1, 544), (17, 1056), (3, 1504), (17, 2880), (3, 4160)):
        case = subject.format.exact(*subject.shape(given, 2 * m, 52, k), scales=(126, 128))
        surrounded, want = subject.format.among_nans(case)
        assert_bits(subject.run(given, surrounded), want)


@instances("few")
def test_output_outside_the_result_is_untouched(subject: Subject, given: Given) -> None:
    for n in (12, 13):
        for start in (16, 17):  # with and without the alignment that wide stores need
            case = subject.format.exact(*subject.shape(given, 3, n, 256))
            written_alone(subject, given, case, start, subject.format.oracle(case))


def written_alone(
    subject: Subject, given: Given, case: Operands, start: int, want: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """A call writes ``want`` into the tensor it is given, element ``start`` of a buffer and on, and no more."""
    m, n, _ = case.mnk
    buffer = torch.full((m * n + 40,), -123.0, dtype=torch.bfloat16)
    out = buffer[start : start + m * n].view(m, n)
    subject.run(given, case, bias, out)
    assert_bits(out, want)
    assert (buffer[:start] == -123).all() and (buffer[start + m * n :] == -123).all()


@instances("few")
def test_scales_start_anywhere_and_dtypes_have_two_spellings(subject: Subject, given: Given) -> None:
    case = subject.format.exact(*subject.shape(given, 35, 20, 640))
    own = subject.format.dtype
    margins = (61, 63) if subject.scale_alignment == 1 else (64, 68)
    xs, ws = (embedded(scales, 0xFF, margin) for scales, margin in zip((case.xs, case.ws), margins, strict=True))
    spelt = case.but(
        xq=case.xq.view(own), wq=case.wq.view(own), xs=xs.view(torch.float8_e8m0fnu), ws=ws.view(torch.float8_e8m0fnu)
    )
    assert_bits(subject.run(given, spelt), subject.format.oracle(case))


@instances("few", MXFP8)
def test_the_bias_is_added_once_before_the_only_rounding(subject: Subject, given: Given) -> None:
    for n in (40, 37):
        case = subject.format.exact(*subject.shape(given, 66, n, 256))
        bias, want = bias_for(case, ARCH)
        assert_bits(subject.run(given, case, bias), want)


@instances("few")
def test_rounded_sums_are_within_the_bounds_whatever_the_order(subject: Subject, given: Given) -> None:
    case = subject.format.rounded(*subject.shape(given, 33, 70, 2080))
    first = subject.run(given, case)
    assert_close(first, subject.format.oracle(case))
    for order in ORDERS:
        with emulator.options(wave_order=order):
            assert torch.equal(subject.run(given, case).view(torch.int16), first.view(torch.int16))


LARGE = {
    "mxfp8_wave_split": (2049, 1 << 20, {"rows": 16, "columns": 16, "waves": 16}),
    "mxfp8_gemm_tiles": (2049, 1 << 20, {"tile": 128192, "k_splits": 1}),
    "smallm_mxfp8_gemv": (65535, 1 << 15, {"block_n": 8}),  # the most that these two take
    "smallm_mxfp8_mfma": (65535, 1 << 15, {"n_sub": 1, "k_splits": 1}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in LARGE if name in SUBJECTS])
def test_a_weight_of_2_gib_or_more_is_read_to_its_last_row(name: str) -> None:
    n, k, given = LARGE[name]
    scales = [torch.full((rows, k // 32), SCALE_ONE, dtype=torch.uint8) for rows in (1, n)]
    case = Operands(torch.zeros(1, k, dtype=torch.uint8), scales[0], torch.zeros(n, k, dtype=torch.uint8), scales[1])
    assert case.wq.numel() > 2**31 - 1 - k
    case.xq[0, -1] = case.wq[-1, -1] = case.wq[5, -1] = BYTE_OF_INTEGER[2]
    out = SUBJECTS[name].run(given, case)
    assert out[0].nonzero().flatten().tolist() == [5, n - 1] and out[0, -1] == (4 if ARCH == "gfx950" else 1)


@drawn(st.data())
@hypothesis_settings(max_examples=120, deadline=None, derandomize=True)
def test_any_shape_and_place_is_exact(data: st.DataObject) -> None:
    """(M, N, K), where operands and output start, and a bias, for any kernel in any configuration."""
    subject = data.draw(st.sampled_from(list(SUBJECTS.values())))
    given = data.draw(st.sampled_from(subject.every))
    m = data.draw(st.integers(1, min(subject.most_m(given), 140)))
    n, blocks = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 72))
    m, n, k = subject.shape(given, m, n, 32 * blocks)
    case = subject.format.exact(m, n, k, seed=m + n + k, scales=(126, 128))
    offset = subject.scale_alignment * data.draw(st.integers(0, 8))
    moved = case.but(xs=embedded(case.xs, 0xFF, 64 + offset), ws=embedded(case.ws, 0xFF, 64 + offset))
    start, with_bias = data.draw(st.integers(0, 8)), data.draw(st.booleans())
    bias = (torch.arange(n) % 9 - 4).bfloat16() if with_bias and subject.format is MXFP8 else None
    want = subject.format.oracle(case) + (0 if bias is None else bias.double())
    written_alone(subject, given, moved, start, want, bias)
