"""What every kernel of the dense MX-FP8 GEMM holds to, in every configuration that differs in code or in its path.

A kernel is a value (hipforge.ops.mxfp8_gemm.kernels); a new one is a line of SUBJECTS. ``every`` are all instances that
are compiled, together in all ways to share K; ``few`` has one for each path: one and several tiles, waves, parts of K
and stages in LDS. What is one kernel's own (counts, code, its parameters' refusals) is in the file named after it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import pytest
import torch
from helpers.mxfp8_cases import (
    BYTE_OF_INTEGER,
    PAYLOAD_MINUS_ZERO,
    SCALE_NAN,
    SCALE_ONE,
    Operands,
    among_nans,
    assert_bits,
    assert_close,
    assert_writes_only,
    bias_for,
    embedded,
    integers,
    nan_byte,
    normal,
    oracle,
)
from hypothesis import given as drawn
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hipforge import devices, emulator
from hipforge.errors import ArchError, GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.kernel import Configuration, Kernel, spelled
from hipforge.ops.mxfp8_gemm.kernels import KERNELS, gemv, group_split, k_packed, mfma, tiles, wave_split
from hipforge.ops.mxfp8_gemm.raw import ROWS
from hipforge.ops.smallm_gemm_mxfp8 import smallm_mxfp8_gemv_out, smallm_mxfp8_mfma_out

pytestmark = pytest.mark.gfx942("not 2_gib and not another_architecture and not workspace_of")

ARCH = devices.current().default_arch
ORDERS = ("forward", "reverse", "random")
Given = dict[str, int]


@dataclass(frozen=True)
class Subject:
    """A kernel, its instances, the rows and columns of a work-group's tile, and what K must be a multiple of."""

    kernel: Kernel
    every: tuple[Given, ...]
    few: tuple[Given, ...]
    tile: Callable[[Given], tuple[int, int]]
    k_step: Callable[[Given], int] = lambda given: 32
    most_m: Callable[[Given], int] = lambda given: 1 << 14
    scale_alignment: int = 1  # in bytes


def _product(**values: Iterable[int]) -> Iterator[Given]:
    names, rest = list(values), [{}]
    for name in names:
        rest = [{**one, name: value} for one in rest for value in values[name]]
    return iter(rest)


# Of the kernel that splits K over waves: rows, columns, waves. gfx942 has 16 columns alone.
PATHS = (
    (16, 16, 1), (16, 16, 4), (32, 16, 2), (64, 16, 4), (16, 36, 4), (16, 76, 2), (32, 24, 1), (32, 64, 4), (64, 48, 2),
)  # fmt: skip


def _waves(waves: Iterable[int]) -> tuple[Given, ...]:
    found = _product(rows=ROWS, columns=(16, 24, 32, 36, 48, 64, 76) if ARCH == "gfx950" else (16,), waves=waves)
    return tuple(one for one in found if one["waves"] <= wave_split.max_waves(one["rows"], one["columns"]))


SUBJECTS = {
    subject.kernel.name: subject
    for subject in (
        Subject(
            gemv.GEMV, tuple(_product(block_n=gemv.BLOCK_N)), ({"block_n": 8}, {"block_n": 64}),
            lambda given: (8, given["block_n"]), most_m=lambda given: gemv.MAX_M,
        ),
        Subject(
            mfma.MFMA, tuple(_product(n_sub=mfma.N_SUB, k_splits=mfma.K_SPLITS)),
            ({"n_sub": 1, "k_splits": 1}, {"n_sub": 4, "k_splits": 1}, {"n_sub": 2, "k_splits": 4}),
            lambda given: (16, 16 * given["n_sub"]), most_m=lambda given: mfma.MAX_M,
        ),
        Subject(
            wave_split.WAVE_SPLIT, _waves(wave_split.WAVES),
            tuple(one for one in _waves((1, 2, 4)) if tuple(one.values()) in PATHS),
            lambda given: (given["rows"], given["columns"]),
        ),
        Subject(
            group_split.GROUP_SPLIT,
            tuple(_product(rows=ROWS, columns=group_split.COLUMNS, k_splits=group_split.K_SPLITS)),
            tuple(dict(zip(group_split.GROUP_SPLIT.parameters, values, strict=True)) for values in
                  ((16, 24, 4), (32, 16, 2), (32, 48, 2), (64, 48, 4))),
            lambda given: (given["rows"], given["columns"]),
        ),
        Subject(
            k_packed.K_PACKED,
            tuple(dict(zip(k_packed.K_PACKED.parameters, values, strict=True)) for values in
                  ((4, 1, 1), (4, 3, 2), (4, 4, 4), (8, 1, 16), (8, 2, 8), (8, 3, 1), (8, 16, 1))),
            ({"columns": 4, "groups": 2, "waves": 2}, {"columns": 8, "groups": 3, "waves": 1}),
            lambda given: (given["columns"], given["columns"] * given["groups"]),
            k_step=lambda given: k_packed.k_step(given["columns"]), most_m=lambda given: given["columns"],
            scale_alignment=4,
        ),
        Subject(
            tiles.TILES,  # the parts of K are no matter of an instance's code
            tuple({"tile": tile, "k_splits": 1 << i % 4} for i, tile in enumerate(tiles.TILES.parameters["tile"])),
            tuple({"tile": tile, "k_splits": splits} for tile, splits in
                  ((64064, 1), (64064, 4), (128192, 1), (256256, 1))),
            lambda given: divmod(given["tile"], 1000),
        ),
    )
    if ARCH in subject.kernel.archs
}  # fmt: skip


def test_every_kernel_of_the_family_is_held_to_this() -> None:
    assert set(SUBJECTS) == {kernel.name for kernel in KERNELS if ARCH in kernel.archs}


def run(
    kernel: Kernel, given: Configuration, case: Operands, bias: torch.Tensor | None = None, out: Any = None
) -> torch.Tensor:
    out = case.out() if out is None else out
    space: tuple[torch.Tensor | None, ...] = ()
    if kernel.workspace is not None:
        space = (kernel.workspace(given, case.mnk, case.xq.device),)
        if space[0] is not None:
            space[0].fill_(float("nan"))  # what is in it beforehand must not matter
    kernel.launch(out, *case.args(), bias, *space, *kernel.choice(given).configuration.values())
    return out


def instances(which: str) -> pytest.MarkDecorator:
    """Parametrise by subject and configuration: of ``every``, ``few``, or ``one`` of each kernel."""
    found = []
    for name, subject in SUBJECTS.items():
        chosen = subject.few[:1] if which == "one" else getattr(subject, which)
        found += [pytest.param(subject, given, id=f"{name}-{spelled(given)}") for given in chosen]
    return pytest.mark.parametrize(("subject", "given"), found)


def takes(subject: Subject, given: Given, m: int, n: int, k: int) -> bool:
    own = k % subject.k_step(given) == 0 and m <= subject.most_m(given)
    return own and subject.kernel.needs(given, (m, n, k), ARCH) is None


def shape(subject: Subject, given: Given, m: int, n: int, k: int) -> tuple[int, int, int]:
    """The nearest shape that the kernel takes: no more rows than it has, K rounded up, enough steps for its parts."""
    step = max(subject.k_step(given), 128 if k >= 128 else 32) if subject.k_step(given) > 32 else subject.k_step(given)
    m, k = min(m, subject.most_m(given)), ceil(k / step) * step
    while not takes(subject, given, m, n, k):
        k += step
    return m, n, k


def exact(subject: Subject, given: Given, m: int, n: int, k: int, **options: Any) -> None:
    case = integers(*shape(subject, given, m, n, k), scales=(126, 128))
    with emulator.options(**options):
        assert_bits(run(subject.kernel, given, case), oracle(case, ARCH))


@instances("every")
def test_every_instance_is_exact_on_integers_under_all_checks(subject: Subject, given: Given) -> None:
    # 21 steps, the last partial: each of 16 waves has other steps than its neighbour; two tiles and a bit one way,
    # one and a bit the other.
    (rows, columns), number = subject.tile(given), subject.every.index(given)
    m, n = (2 - number % 2) * rows + 5, (1 + number % 2) * columns + 5
    exact(subject, given, m, n, 20 * 128 + 96, checks="all", wave_order=ORDERS[number % len(ORDERS)])


@pytest.mark.parametrize("order", ORDERS)
@instances("few")
def test_the_order_of_waves_changes_nothing(subject: Subject, given: Given, order: str) -> None:
    rows, columns = subject.tile(given)
    exact(subject, given, rows + 5, columns + 5, 8 * 128 + 96, checks="all", wave_order=order)


@instances("few")
def test_turns_of_one_instruction_change_nothing(subject: Subject, given: Given) -> None:
    exact(subject, given, *subject.tile(given), 1280, checks="all", quantum=1)


# 2880: gpt-oss, 22.5 steps of 128.
DEPTHS = (
    32, 64, 96, 128, 160, 256, 384, 512, 544, 640, 768, 896, 1024, 1056, 1152, 1408, 1440, 1920, 2048, 2080, 2304, 2880,
    4096, 4224,
)  # fmt: skip


@instances("few")
def test_every_number_of_steps_and_kind_of_tail_is_exact(subject: Subject, given: Given) -> None:
    rows, columns = subject.tile(given)
    of_step = {k * subject.k_step(given) // 128 for k in DEPTHS} if subject.k_step(given) > 32 else DEPTHS
    for k in of_step:
        if takes(subject, given, 1, 1, k):
            exact(subject, given, min(rows, 16) + 3, min(columns, 16) + 1, k)


@instances("few")
def test_every_m_and_n_is_exact(subject: Subject, given: Given) -> None:
    rows, columns = subject.tile(given)
    # Whether n is a multiple of 4 or 8 decides how outputs are stored.
    for n in sorted({1, 2, 3, 4, 5, 15, 16, 17, 20, 63, 64, 65, columns - 1, columns, columns + 1}):
        exact(subject, given, 3, n, 256)
    for m in sorted({*range(1, 9), 15, 16, 17, 33, 64, rows - 1, rows, rows + 1}):
        if m <= subject.most_m(given):
            exact(subject, given, m, 20, 256)


@instances("few")
def test_each_row_and_block_uses_its_own_scale(subject: Subject, given: Given) -> None:
    rows, columns = subject.tile(given)
    case = integers(*shape(subject, given, rows, columns, 1088), scales=(126, 128))
    m, n, k = case.mnk
    at_rows, blocks = torch.arange(max(m, n))[:, None], torch.arange(k // 32)
    case.xs.copy_((126 + (at_rows[:m] + 2 * blocks) % 3).to(torch.uint8))
    case.ws.copy_((126 + (at_rows[:n] // 2 + blocks) % 3).to(torch.uint8))
    assert_bits(run(subject.kernel, given, case), oracle(case, ARCH))


@instances("few")
def test_each_element_meets_its_own_counterpart(subject: Subject, given: Given) -> None:
    # Row m of X selects one element of W's rows, whose elements are all different within 17.
    m, n, k = shape(subject, given, 128, subject.tile(given)[1], 160)
    table = torch.tensor([BYTE_OF_INTEGER[value] for value in range(-8, 9)], dtype=torch.uint8)
    w = table[(torch.arange(n)[:, None] * 5 + torch.arange(k) * 7) % 17]
    scales = [torch.full((size, k // 32), byte, dtype=torch.uint8) for size, byte in ((m, 128), (n, SCALE_ONE))]
    for first in range(0, k, m):
        x = torch.zeros(m, k, dtype=torch.uint8)
        at = torch.arange(first, min(first + m, k))
        x[at - first, at] = BYTE_OF_INTEGER[1]
        case = Operands(x, scales[0], w, scales[1])
        assert_bits(run(subject.kernel, given, case), oracle(case, ARCH))
        if k > 1024 and first > 4 * m:  # a sample of a long K
            break


@pytest.mark.parametrize("byte", (0, 1, 2, 126, 127, 128, 253, 254))
@instances("one")
def test_extreme_scales_that_cancel_lose_nothing(subject: Subject, given: Given, byte: int) -> None:
    case = integers(*shape(subject, given, 3, 7, 544))
    case.xs.fill_(byte)
    case.ws.fill_(254 - byte)
    case.xs[:, ::3] = 254 - byte
    case.ws[:, ::3] = byte
    assert_bits(run(subject.kernel, given, case), oracle(case, ARCH))


@instances("one")
def test_extreme_scales_overflow_and_underflow_as_fp32_does(subject: Subject, given: Given) -> None:
    # One product: 2^(xs + ws - 254) is inf above 2^127, a denormal below 2^-126 and 0 below 2^-149.
    case = integers(*shape(subject, given, 1, 5, 32))
    case.xq.zero_(), case.wq.zero_()
    case.xq[:, 17] = case.wq[:, 17] = BYTE_OF_INTEGER[1 if ARCH == "gfx950" else 2]
    for x_byte in (0, 1, 127, 254):
        for w_byte in (0, 1, 64, 127, 190, 254):
            case.xs.fill_(x_byte), case.ws.fill_(w_byte)
            want = torch.full((1, 5), 2.0 ** (x_byte + w_byte - 254) if x_byte + w_byte < 382 else float("inf"))
            assert_bits(run(subject.kernel, given, case), want.double())


@instances("few")
def test_nans_make_exactly_their_outputs_nan(subject: Subject, given: Given) -> None:
    clean = integers(*shape(subject, given, 20, 23, 576))
    m, _, k = clean.mnk
    for block in sorted({0, 3, 4, 15, 16, k // 32 - 1}):
        case = clean.but(xs=clean.xs.clone(), ws=clean.ws.clone(), xq=clean.xq.clone(), wq=clean.wq.clone())
        case.xs[m - 2, block] = SCALE_NAN
        case.ws[17, block] = SCALE_NAN
        case.wq[17, 32 * block : 32 * block + 32] = 0  # even where its block is zero
        case.xq[0, 32 * block + 5] = nan_byte(ARCH)
        case.wq[5, 32 * block + 31] = nan_byte(ARCH)
        want = oracle(clean, ARCH)
        want[m - 2, :] = want[0, :] = want[:, 17] = want[:, 5] = float("nan")
        assert_bits(run(subject.kernel, given, case), want)


@instances("few")
def test_every_payload_byte_decodes_and_minus_zero_is_zero(subject: Subject, given: Given) -> None:
    m, n, k = shape(subject, given, 8, 32, 32)
    for first in range(0, 8, m):
        x, w = torch.zeros(m, k, dtype=torch.uint8), torch.zeros(n, k, dtype=torch.uint8)
        x[: 8 - first, :32] = torch.arange(256, dtype=torch.uint8).reshape(8, 32)[first : first + m]
        w[:, :32].fill_diagonal_(BYTE_OF_INTEGER[1])
        ones = [torch.full((size, k // 32), SCALE_ONE, dtype=torch.uint8) for size in (m, n)]
        case = Operands(x, ones[0], w, ones[1])
        assert_bits(run(subject.kernel, given, case), oracle(case, ARCH))  # 0 * NaN: a row with a NaN is all NaN
    case = integers(*shape(subject, given, 2, 4, 96))
    if ARCH == "gfx950":
        zeroed = case.but(xq=case.xq.masked_fill(case.xq == 0, PAYLOAD_MINUS_ZERO))
        assert_bits(run(subject.kernel, given, zeroed), oracle(case))


@instances("few")
def test_neighbouring_bytes_never_take_part(subject: Subject, given: Given) -> None:
    # K of 90, 47, 33 and 130 blocks: rows of scales have 1, 2 or 3 bytes past whole words and begin at any of them.
    for m, k in ((1, 32), (17, 96), (1, 544), (17, 1056), (3, 1504), (17, 2880), (3, 4160)):
        case = integers(*shape(subject, given, 2 * m, 52, k), scales=(126, 128))
        surrounded, want = among_nans(case, ARCH)
        assert_bits(run(subject.kernel, given, surrounded), want)


@instances("few")
def test_output_outside_the_result_is_untouched(subject: Subject, given: Given) -> None:
    for n in (12, 13):
        for start in (16, 17):  # with and without the alignment that wide stores need
            case = integers(*shape(subject, given, 3, n, 256))
            write = lambda out, case=case: run(subject.kernel, given, case, out=out)
            assert_writes_only(write, case, start, ARCH)


@instances("few")
def test_scales_start_anywhere_and_dtypes_have_two_spellings(subject: Subject, given: Given) -> None:
    case = integers(*shape(subject, given, 35, 20, 640))
    own = torch.float8_e4m3fn if ARCH == "gfx950" else torch.float8_e4m3fnuz
    margins = (61, 63) if subject.scale_alignment == 1 else (64, 68)
    xs, ws = (embedded(scales, 0xFF, margin) for scales, margin in zip((case.xs, case.ws), margins, strict=True))
    spelt = case.but(
        xq=case.xq.view(own), wq=case.wq.view(own), xs=xs.view(torch.float8_e8m0fnu), ws=ws.view(torch.float8_e8m0fnu)
    )
    assert_bits(run(subject.kernel, given, spelt), oracle(case, ARCH))


@instances("few")
def test_the_bias_is_added_once_before_the_only_rounding(subject: Subject, given: Given) -> None:
    for n in (40, 37):
        case = integers(*shape(subject, given, 66, n, 256))
        bias, want = bias_for(case, ARCH)
        assert_bits(run(subject.kernel, given, case, bias), want)


@instances("few")
def test_real_data_is_within_the_bounds_whatever_the_order(subject: Subject, given: Given) -> None:
    case = normal(*shape(subject, given, 33, 70, 2080))
    if ARCH == "gfx942":  # bytes that e4m3fnuz has too: no -0
        case = case.but(xq=case.xq.masked_fill(case.xq == 0x80, 0), wq=case.wq.masked_fill(case.wq == 0x80, 0))
    first = run(subject.kernel, given, case)
    assert_close(first, oracle(case, ARCH))
    for order in ORDERS:
        with emulator.options(wave_order=order):
            assert torch.equal(run(subject.kernel, given, case).view(torch.int16), first.view(torch.int16))


@drawn(st.data())
@hypothesis_settings(max_examples=80, deadline=None, derandomize=True)
def test_any_shape_and_place_is_exact(data: st.DataObject) -> None:
    """(M, N, K), where operands and output start, and a bias, for any kernel in any configuration."""
    subject = data.draw(st.sampled_from(list(SUBJECTS.values())))
    given = data.draw(st.sampled_from(subject.every))
    m = data.draw(st.integers(1, min(subject.most_m(given), 140)))
    n, blocks = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 72))
    m, n, k = shape(subject, given, m, n, 32 * blocks)
    case = integers(m, n, k, seed=m + n + k, scales=(126, 128))
    offset = subject.scale_alignment * data.draw(st.integers(0, 8))
    moved = case.but(xs=embedded(case.xs, 0xFF, 64 + offset), ws=embedded(case.ws, 0xFF, 64 + offset))
    buffer = torch.full((m * n + 40,), -123.0, dtype=torch.bfloat16)
    start = data.draw(st.integers(0, 8))
    bias = data.draw(st.sampled_from((None, (torch.arange(n) % 9 - 4).bfloat16())))
    run(subject.kernel, given, moved, bias, buffer[start : start + m * n].view(m, n))
    want = oracle(case, ARCH) + (0 if bias is None else bias.double())
    assert_bits(buffer[start : start + m * n].view(m, n), want)
    assert (buffer[:start] == -123).all() and (buffer[start + m * n :] == -123).all()


# --- refusals of every kernel's module --------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def good(subject: Subject, given: Given) -> Operands:
    return integers(*shape(subject, given, 2, 8, 1024))


# What replaces an operand of M = 2, N = 8 and a K; the message.
WRONG: tuple[tuple[str, Callable[[int], torch.Tensor], str], ...] = (
    ("xq", lambda k: zeros(2, k, dtype=torch.int8), r"Xq must be contiguous float8_e4m3fn(uz)? or uint8 .*got int8"),
    ("wq", lambda k: zeros(8, k, dtype=torch.float8_e5m2), r"Wq must be .*float8_e4m3fn(uz)? or uint8.* float8_e5m2"),
    (
        "xs",
        lambda k: zeros(2, k // 32, dtype=torch.float32),
        r"Xs must be contiguous uint8 or float8_e8m0fnu .*one e8m0.*got float32",
    ),
    (
        "ws",
        lambda k: zeros(8, k // 32, dtype=torch.float8_e4m3fn),
        r"Ws must be contiguous uint8 or float8_e8m0fnu .*got float8_e4m3fn",
    ),
    ("xq", lambda k: zeros(1, 2, k), r"Xq must be .*\[rows, K\].*; got uint8 \[1, 2, \d+\]"),
    ("wq", lambda k: zeros(8), r"Wq must be .*\[rows, K\].*; got uint8 \[8\]"),
    ("wq", lambda k: zeros(8, k // 2), r"must have the same K; got Xq uint8 \[2, \d+\] and Wq uint8 \[8, \d+\]"),
    ("xs", lambda k: zeros(2, k // 32 + 1), r"Xs must be .*float8_e8m0fnu \[2, \d+\].*got uint8 \[2, \d+\]"),
    ("xs", lambda k: zeros(k // 16), r"Xs must be .*float8_e8m0fnu \[2, \d+\].*got uint8 \[\d+\]"),
    ("ws", lambda k: zeros(k // 32, 8), r"Ws must be .*float8_e8m0fnu \[8, \d+\].*got uint8 \[\d+, 8\]"),
    ("wq", lambda k: zeros(k, 8).t(), r"Wq must be contiguous"),
    ("xq", lambda k: zeros(2, 2 * k)[:, ::2], r"Xq must be contiguous"),
    ("ws", lambda k: zeros(k // 32, 8).t(), r"Ws must be contiguous.*with other strides"),
    ("xs", lambda k: zeros(2, k // 16)[:, : k // 32], r"Xs must be contiguous.*with other strides"),
    ("xq", lambda k: zeros(2 * k + 8)[8:].view(2, k), r"Xq must start at a multiple of 16 bytes"),
    ("wq", lambda k: zeros(8 * k + 8)[8:].view(8, k), r"Wq must start at a multiple of 16 bytes"),
    ("out", lambda k: zeros(2, 8, dtype=torch.float16), r"out must be contiguous bfloat16 \[2, 8\]; got float16"),
    (
        "out",
        lambda k: zeros(2, 9, dtype=torch.bfloat16),
        r"out must be contiguous bfloat16 \[2, 8\]; got bfloat16 \[2, 9\]",
    ),
    (
        "out",
        lambda k: zeros(16, dtype=torch.bfloat16),
        r"out must be contiguous bfloat16 \[2, 8\]; got bfloat16 \[16\]",
    ),
    ("out", lambda k: zeros(8, 2, dtype=torch.bfloat16).t(), r"out must be contiguous.*with other strides"),
    ("bias", lambda k: torch.zeros(8), r"bias must be contiguous bfloat16 \[8\].*; got float32"),
    (
        "bias",
        lambda k: zeros(9, dtype=torch.bfloat16),
        r"bias must be contiguous bfloat16 \[8\] = \[N\]; got bfloat16 \[9\]",
    ),
    ("bias", lambda k: zeros(16, dtype=torch.bfloat16)[::2], r"bias must be contiguous.*with other strides"),
)


def refused(subject: Subject, given: Given, case: Operands, message: str, **others: Any) -> None:
    with pytest.raises(GuardError, match=message):
        run(subject.kernel, given, case, **others)


@instances("one")
def test_operands_are_guarded(subject: Subject, given: Given) -> None:
    case = good(subject, given)
    for name, wrong, message in WRONG:
        changed = wrong(case.mnk[2])
        if name in ("out", "bias"):
            refused(subject, given, case, message, **{name: changed})
        else:
            refused(subject, given, case.but(**{name: changed}), message, out=case.out())
    for k in (48, 0):
        short = case.but(xq=zeros(2, k), wq=zeros(8, k))
        refused(subject, given, short, rf"K must be a positive multiple of 32.*got {k}", out=case.out())
    k = case.mnk[2]
    refused(subject, given, case.but(wq=zeros(0, k), ws=zeros(0, k // 32)), "N must be at least 1; got 0")
    most = subject.most_m(given)
    for m in (0, *(() if most > 64 else (most + 1, 128))):
        rows = case.but(xq=zeros(m, k), xs=zeros(m, k // 32))
        refused(subject, given, rows, rf"M must be between 1 and \d+; got {m}")


@instances("one")
def test_an_output_inside_an_operand_is_refused(subject: Subject, given: Given) -> None:
    for name in ("xq", "xs", "wq", "ws"):
        case = good(subject, given)
        held = zeros(getattr(case, name).numel())
        inside = held[:32].view(torch.bfloat16).view(2, 8)
        case = case.but(**{name: held.view(getattr(case, name).shape)})
        refused(subject, given, case, f"out is written and must not share memory with {name.capitalize()}", out=inside)


# Kernel, what its configuration becomes, M and K, the message.
OTHERS = (
    ("smallm_mxfp8_gemv", {"block_n": 12}, 2, 64, "block_n must be 4, 8, 16, 32 or 64.*got 12"),
    ("smallm_mxfp8_gemv", {"block_n": -8}, 2, 64, "block_n must be 4, 8, 16, 32 or 64.*got -8"),
    ("smallm_mxfp8_mfma", {"n_sub": 3}, 2, 64, "n_sub must be 1, 2 or 4.*got 3"),
    ("smallm_mxfp8_mfma", {"n_sub": -1}, 2, 64, "n_sub must be 1, 2 or 4.*got -1"),
    ("smallm_mxfp8_mfma", {"k_splits": 3}, 2, 512, "k_splits must be 1, 2, 4 or 8; got 3"),
    ("smallm_mxfp8_mfma", {"k_splits": -2}, 2, 512, "k_splits must be 1, 2, 4 or 8; got -2"),
    ("smallm_mxfp8_mfma", {"k_splits": 4}, 2, 256,
     r"k_splits must not exceed the number of K steps, ceil\(K/128\) = 2 for K = 256; got 4"),
    ("mxfp8_group_split", {"columns": 40}, 2, 512, "columns must be 16, 24, 32 or 48; got 40"),
    ("mxfp8_group_split", {"k_splits": 8}, 2, 2048, "k_splits must be 2 or 4; got 8"),
    ("mxfp8_group_split", {"k_splits": 4}, 2, 256, "k_splits must not exceed the number of K steps"),
    ("mxfp8_k_packed", {"columns": 4}, 5, 2048, "M must be between 1 and 4; got 5"),
    ("mxfp8_k_packed", {"columns": 8}, 9, 2048, "M must be between 1 and 8; got 9"),
    ("mxfp8_k_packed", {"columns": 4, "waves": 1}, 4, 256, "K must be a multiple of 512 with 4 columns"),
    ("mxfp8_k_packed", {"columns": 8}, 4, 2176, "K must be a multiple of 256 with 8 columns"),
    ("mxfp8_k_packed", {"waves": 3}, 4, 2048, "waves must be 1, 2, 4, 8 or 16; got 3"),
    ("mxfp8_k_packed", {"groups": 5, "waves": 4}, 4, 2048, "groups times waves at most 16; got groups = 5, waves = 4"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "m", "k", "message"), [one for one in OTHERS if one[0] in SUBJECTS], ids=lambda part: str(part)
)
def test_other_configurations_are_refused(name: str, changes: Given, m: int, k: int, message: str) -> None:
    subject = SUBJECTS[name]
    refused(subject, {**subject.few[0], **changes}, integers(m, 16, k, scales=(127, 127)), message)


def workspace_of(kernel: Kernel, given: Given, case: Operands) -> torch.Tensor:
    made = None if kernel.workspace is None else kernel.workspace(given, case.mnk, case.xq.device)
    assert made is not None
    return made


@pytest.mark.parametrize("name", ("smallm_mxfp8_mfma", "mxfp8_group_split", "mxfp8_gemm_tiles"))
def test_the_workspace_of_a_split_k_is_guarded(name: str) -> None:
    kernel = SUBJECTS[name].kernel
    given = next(one for one in SUBJECTS[name].every if one.get("k_splits", 1) == 2)
    case = integers(60, 40, 256)
    bias = torch.zeros(40, dtype=torch.bfloat16)
    needed = workspace_of(kernel, given, case)

    def call(workspace: torch.Tensor | None, given_case: Operands = case, **others: torch.Tensor) -> None:
        out, added = others.get("out", case.out()), others.get("bias", bias)
        kernel.launch(out, *given_case.args(), added, workspace, *kernel.choice(given).configuration.values())

    wrong: tuple[tuple[torch.Tensor | None, str], ...] = (
        (None, rf"k_splits = 2 needs a workspace: float32 \[{', '.join(map(str, needed.shape))}\]; got None"),
        (needed.bfloat16(), "workspace must be .*float32 .*; got bfloat16"),
        (needed.flatten()[1:], rf"workspace must be .*\[{', '.join(map(str, needed.shape))}\].*got float32"),
        (torch.cat((needed, needed), -1)[..., ::2], "workspace must be contiguous.*with other strides"),
    )
    for workspace, message in wrong:
        with pytest.raises(GuardError, match=message):
            call(workspace)
    space = torch.empty(needed.shape)
    inside = space.view(torch.uint8).flatten()
    held = {name: inside[: part.nbytes].view(part.dtype).view(part.shape) for name, part in vars(case).items()}
    for operand, part in held.items():
        with pytest.raises(GuardError, match=rf"must not share memory with .*({operand.capitalize()}|workspace)"):
            call(space, case.but(**{operand: part}))
    for other, part in (("out", case.out()), ("bias", bias)):
        with pytest.raises(GuardError, match="must not share memory with"):
            call(space, **{other: inside[: part.nbytes].view(part.dtype).view(part.shape)})


def split(name: str, k_splits: int, which: int = 0) -> tuple[Kernel, Given]:
    """A kernel whose work-groups share K and meet in one launch, and one of its instances."""
    found = [one for one in SUBJECTS[name].every if one["k_splits"] == k_splits]
    return SUBJECTS[name].kernel, found[which]


MEETING = pytest.mark.parametrize("name", ("mxfp8_group_split", "mxfp8_gemm_tiles"))


@MEETING
def test_the_workspace_of_a_split_serves_each_replay_of_its_one_launch(name: str) -> None:
    kernel, given = split(name, 4, -1)
    case = integers(70, 40, 1024)
    space, out = workspace_of(kernel, given, case), case.out()
    launch = lambda: kernel.launch(out, *case.args(), None, space, *kernel.choice(given).configuration.values())
    launch()  # a module is not loaded in a capture
    with emulator.capture() as graph:
        launch()
    assert len(graph.nodes) == 1
    for _ in range(3):  # each replay has the number of the launch that was captured
        case.xq.copy_(case.xq.flip(0))
        with emulator.counters() as counted:
            graph.replay()
        assert_bits(out, oracle(case))
        assert counted.tensors["out"].stored == 2 * out.numel(), "more than one work-group took itself for the last"


@MEETING
def test_the_workspace_of_a_split_may_hold_what_another_launch_left(name: str) -> None:
    few, many = integers(40, 70, 1024), integers(100, 100, 2048)
    sizes = [workspace_of(*split(name, k_splits), many) for k_splits in (2, 4)]
    space = max(sizes, key=torch.Tensor.numel).flatten()
    for case, k_splits in ((many, 4), (few, 2), (many, 2), (few, 4)):
        kernel, given = split(name, k_splits)
        needed = workspace_of(kernel, given, case)
        out, part = case.out(), space[: needed.numel()].view(needed.shape)
        with emulator.counters() as counted:
            kernel.launch(out, *case.args(), None, part, *kernel.choice(given).configuration.values())
        assert_bits(out, oracle(case))
        assert counted.tensors["out"].stored == 2 * out.numel()


@pytest.mark.parametrize("name", ("smallm_mxfp8_gemv", "smallm_mxfp8_mfma"))
def test_more_than_2_gib_is_refused_before_anything_is_touched(name: str) -> None:
    # Nothing of this size is written, so that the system gives no memory for it.
    subject = SUBJECTS[name]
    n, k = 32769, 65536
    case = Operands(*(torch.empty(rows, of, dtype=torch.uint8) for rows in (1, n) for of in (k, k // 32)))
    refused(subject, subject.few[0], case, r"Wq has N\*K = 32769\*65536 = 2147549184 bytes.*2\^31 - 1.*signed 32-bit")
    k = 2**28
    case = Operands(*(torch.empty(rows, of, dtype=torch.uint8) for rows in (8, 1) for of in (k, k // 32)))
    refused(subject, subject.few[0], case, r"Xq has M\*K = 8\*268435456 = 2147483648 bytes")


def test_another_architecture_is_refused_before_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current", lambda: devices.Device("emulator", "gfx942"))
    operands = zeros(2, 8, dtype=torch.bfloat16), zeros(2, 64), zeros(2, 2), zeros(8, 64), zeros(8, 2)
    for shipped, more in ((smallm_mxfp8_gemv_out, (8,)), (smallm_mxfp8_mfma_out, (None, 1, 1))):
        stub = shipped.stub
        mutated = tuple(one.name for one in stub.signature.parameters if one.mutated)
        unbound = compile_ops(stub.module_name, fc_name=stub.entry, variant=stub.variant, mutates=mutated)
        with pytest.raises(ArchError, match=r"gfx950.*gfx942"):
            unbound(shipped.__wrapped__)(*operands, *more)


def test_another_architecture_is_refused_again_before_a_launch() -> None:
    """The module asks the device itself, once in a process."""
    program = """
import torch
from hipforge import emulator
from hipforge.errors import ArchError
from hipforge.ops.smallm_gemm_mxfp8 import smallm_mxfp8_gemv_out, smallm_mxfp8_mfma_out
zeros = lambda *shape: torch.zeros(shape, dtype=torch.uint8)
operands = torch.zeros(2, 8, dtype=torch.bfloat16), zeros(2, 64), zeros(2, 2), zeros(8, 64), zeros(8, 2)
with emulator.options(arch="gfx942"):
    for stub, more in ((smallm_mxfp8_gemv_out, (8,)), (smallm_mxfp8_mfma_out, (None, 1, 1))):
        try:
            stub(*operands, *more)
        except ArchError as error:
            print(" ".join(str(error).split()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2 and all(re.search("gfx950.*gfx942", line) for line in said)
