"""The scaled fp8 GEMM with every kind of scales, on gfx950 and on gfx942 in its own fp8 format."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.errors import assert_within, relative
from helpers.fp8_cases import KINDS, NUMBERS, case_of, surrounded
from helpers.mxfp8_cases import FORMATS, assert_bits

import hipforge
from hipforge import emulator
from hipforge.errors import ArchError, GuardError
from hipforge.ops.fp8_gemm import FAMILY, fp8_gemm, fp8_group_split_out, fp8_linear, fp8_wave_split_out
from hipforge.ops.fp8_gemm.kernels import TILES
from hipforge.ops.mxfp8_gemm.kernels.group_split import split_workspace
from hipforge.ops.reference import fp8_mm
from hipforge.ops.reference.fp8 import Scales

pytestmark = pytest.mark.gfx942("not test_tiles")  # gfx950 has that kernel alone

def sizes(kind: str) -> tuple[tuple[int, int, int], ...]:
    """Short and long K, partial steps (2880: gpt-oss), waves without steps, several work-groups each way, odd N."""
    k = (48, 368, 2224) if kind != "mx" else (32, 352, 2208)
    sizes = (1, 40, k[1]), (5, 131, 1024), (16, 260, k[2]), (17, 33, k[0]), (64, 136, 512), (100, 24, 640)
    return (*sizes, (9, 52, 2880))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(7))
def test_sums_are_exact_and_rounded_once(arch: str, kind: str, index: int) -> None:
    case = case_of(kind, *sizes(kind)[index], arch)
    assert hipforge.explain(fp8_gemm, *case.typed()).path == "kernel"
    got = fp8_gemm(*case.typed())
    assert got is not None
    assert_bits(got, case.oracle())
    assert torch.equal(fp8_linear(*case.typed()), got)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "waves"), ((16, 16, 1), (16, 76, 4), (32, 36, 2), (64, 16, 8), (64, 64, 4))
)
def test_every_shape_of_work_group(arch: str, kind: str, rows: int, columns: int, waves: int) -> None:
    columns = columns if arch == "gfx950" else 16
    case = case_of(kind, rows + 3, 150, 2208, arch)
    out = torch.empty(rows + 3, 150, dtype=torch.bfloat16)
    with emulator.counters() as counters:
        fp8_wave_split_out(out, *case.typed(), None, NUMBERS[kind], rows, columns, waves)
    assert_bits(out, case.oracle())
    assert counters.launches == 1 and not counters.scratch_bytes and not counters.lds_bank_conflicts


# One step a wave; runs of 2 to 5 with a partial last step; runs of 8. The last work-groups have few rows and columns.
LONG_STORES = ((32, 48, 512, 128), (16, 76, 1056, 152), (64, 64, 2208, 152), (32, 36, 4064, 152), (32, 80, 2208, 84))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "k", "n"), LONG_STORES)
def test_four_waves_store_neighbouring_columns(arch: str, kind: str, rows: int, columns: int, k: int, n: int) -> None:
    columns = columns if arch == "gfx950" else 16
    case = case_of(kind, rows + 3, n, k, arch)
    out = torch.empty(rows + 3, n, dtype=torch.bfloat16)
    with emulator.counters() as counters:
        fp8_wave_split_out(out, *case.typed(), None, NUMBERS[kind], rows, columns, 4)
    assert_bits(out, case.oracle())
    assert counters.launches == 1 and not counters.scratch_bytes and not counters.lds_bank_conflicts


SHARED = ((16, 24, 4), (32, 16, 2), (64, 48, 2))


# A module for each height and kind of scales: by default each kind with one height, and each height with two kinds.
@pytest.mark.parametrize(
    ("kind", "rows", "columns", "k_splits"),
    [
        pytest.param(kind, *given, marks=() if given[0] == 32 or kind in ("rows", "mx") else pytest.mark.full)
        for kind in KINDS
        for given in SHARED
    ],
)
def test_work_groups_that_share_k(arch: str, kind: str, rows: int, columns: int, k_splits: int) -> None:
    case = case_of(kind, rows + 3, 150, 2208, arch)
    out = torch.empty(rows + 3, 150, dtype=torch.bfloat16)
    workspace = split_workspace(rows + 3, 150, rows, columns, k_splits, out.device)
    run = partial(fp8_group_split_out, out, *case.typed(), None, NUMBERS[kind], workspace, rows, columns, k_splits)
    if arch == "gfx942":
        with pytest.raises(ArchError, match="gfx950"):
            run()
        return
    run()
    assert_bits(out, case.oracle())


@pytest.mark.parametrize("tile", TILES.parameters["tile"])
@pytest.mark.parametrize("kind", ("rows", "tensor"))
def test_tiles(arch: str, kind: str, tile: int) -> None:
    m, n = tile // 1000 + 19, tile % 1000 + 37
    for k_splits, k, dtype in ((1, 432, torch.bfloat16), (2, 656, torch.float16)):
        case = case_of(kind, m, n, k, arch)
        bias = (torch.arange(n) % 7 / 8).to(dtype)
        out = torch.empty(m, n, dtype=dtype)
        given = {"tile": tile, "k_splits": k_splits}
        with emulator.counters() as counters:
            TILES.run(given, (m, n, k), out, *case.typed(), bias, 0)
        assert torch.equal(out, (case.oracle() + bias.double()).to(dtype))
        assert counters.launches == 1 and not counters.scratch_bytes


def test_many_rows_take_tiles_where_they_exist(arch: str) -> None:
    for kind in KINDS:
        case = case_of(kind, 200, 264, 512, arch)
        assert_bits(fp8_linear(*case.typed()), case.oracle())
        large = case_of(kind, 1024, 4096, 2048, arch)
        taken = hipforge.explain(fp8_gemm, *large.typed())
        assert (taken.kernel == "fp8_tiles") == (arch == "gfx950" and kind in ("rows", "tensor"))


@pytest.mark.parametrize("kind", KINDS)
def test_bias_is_added_before_the_one_rounding_into_either_type(arch: str, kind: str) -> None:
    case = case_of(kind, 7, 52, 416, arch)
    for dtype in (torch.bfloat16, torch.float16):
        bias = (torch.arange(52) * 0.37 + 1e-3).to(dtype)
        want = case.oracle() + bias.double()
        if dtype is torch.bfloat16:  # float16 holds the sums, integers or few halves, exactly
            assert (want.to(dtype) != case.oracle().to(dtype) + bias).any(), "rounding twice would pass"
        buffer = torch.full((7 * 52 + 9,), -123.0, dtype=dtype)
        out = buffer[3:-6].view(7, 52)  # off the boundary at which four outputs are stored at once
        got = fp8_gemm(*case.typed(), out_dtype=dtype, bias=bias, out=out)
        assert got is out
        assert torch.equal(out, want.to(dtype))
        assert (buffer[:3] == -123).all() and (buffer[-6:] == -123).all()


@pytest.mark.parametrize("k", (1, 47, 129))
def test_rows_of_any_length(arch: str, k: int) -> None:
    for kind in ("rows", "blocks"):
        case = case_of(kind, 3, 20, k, arch)
        assert_bits(fp8_linear(*case.typed()), case.oracle())


def test_one_scale_beside_one_per_row(arch: str) -> None:
    case = case_of("rows", 6, 40, 256, arch)
    for changed in (
        replace(case, xs=torch.tensor(0.5)),
        replace(case, ws=torch.tensor([[2.0]])),
        replace(case, xs=case.xs[:, None], ws=case.ws[:, None]),
    ):
        wide = replace(changed, xs=changed.xs.reshape(-1).expand(6), ws=changed.ws.reshape(-1).expand(40))
        assert_bits(fp8_linear(*changed.typed()), wide.oracle())


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_nan_makes_its_outputs_nan_and_no_other(arch: str, kind: str) -> None:
    case = case_of(kind, 20, 200, 384, arch)
    for scales in (case.xs, case.ws):
        scales.view(-1)[-1] = 255 if scales.dtype == torch.uint8 else float("nan")
    want = case.oracle()
    assert want.isnan().any() and (kind == "tensor" or not want.isnan().all())
    assert_bits(fp8_linear(*case.typed()), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", (368, 1024))
def test_what_lies_around_the_operands_is_not_read(arch: str, kind: str, k: int) -> None:
    case = case_of(kind, 5, 131, k // 32 * 32 if kind == "mx" else k, arch)
    guarded = surrounded(case)
    # The emulator refuses an access outside the tensor; the NaNs would show one that it missed.
    assert_bits(fp8_linear(*guarded.typed()), case.oracle())


# float32 sums of K products, of which the partial ones stay below 4 sqrt(K) rms, are off by less than
# 64 * 2^-24 * 4 sqrt(K) rms: 1.2e-3 * 2^-8 rms at K = 6144; the scales' product adds 2^-23 of the result, and the one
# rounding to bf16 2^-9 of it, 1.66e-3 in the norm.
MAX_RELF, ELEMENT = 1.8e-3, 2.0**-8


@pytest.mark.parametrize("kind", ("rows", "blocks", "blocks_e8m0"))
def test_real_data_meets_the_bound_of_float32_sums(arch: str, kind: str) -> None:
    case = case_of(kind, 9, 300, 3000 if kind == "rows" else 2944, arch, seed=3)
    generator = torch.Generator().manual_seed(4)
    finite = (~FORMATS[arch].isnan()).nonzero().flatten().to(torch.uint8)

    def any_bytes(like: torch.Tensor) -> torch.Tensor:
        return finite[torch.randint(0, len(finite), like.shape, generator=generator)]

    def any_scales(like: torch.Tensor) -> torch.Tensor:
        if like.dtype == torch.uint8:
            return like
        return torch.rand(like.shape, generator=generator) + 0.5

    case = replace(case, xq=any_bytes(case.xq), wq=any_bytes(case.wq), xs=any_scales(case.xs), ws=any_scales(case.ws))
    want = case.oracle()
    got = fp8_linear(*case.typed()).double()
    assert relative(got, want) <= MAX_RELF
    rms = want.square().mean().sqrt()
    assert_within(got, want, ELEMENT * want.abs() + 0.01 * ELEMENT * rms)
    assert torch.equal(
        fp8_mm(*case.typed(), out_dtype=torch.float64, compute_dtype=torch.float64).bfloat16(), want.bfloat16()
    )


def test_what_no_kernel_takes_is_none_and_the_total_function_computes_it(arch: str) -> None:
    case = case_of("blocks", 3, 24, 200, arch)
    assert fp8_gemm(*case.typed(), out_dtype=torch.float32) is None
    assert torch.equal(fp8_linear(*case.typed(), out_dtype=torch.float32), case.oracle().float())
    empty = tuple(tensor[:0] if index < 2 else tensor for index, tensor in enumerate(case.typed()))
    assert fp8_gemm(*empty) is None and fp8_linear(*empty).shape == (0, 24)
    # Bytes without a type are e4m3fn everywhere; gfx942 has no kernel for those.
    assert (fp8_gemm(case.xq, case.xs, case.wq, case.ws) is None) == (arch == "gfx942")


GOOD = case_of("rows", 2, 8, 64, "gfx950")


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"xs": torch.ones(3)}, "one per row"),
        ({"xs": torch.ones(2, dtype=torch.float16)}, "both be float32"),
        ({"xs": torch.ones(2, 1), "ws": torch.ones(1, 1, dtype=torch.uint8)}, "both float32 or both e8m0"),
        ({"ws": torch.ones(8, 2, dtype=torch.uint8), "xs": torch.ones(2, 2, dtype=torch.uint8)}, r"32 rows of wq"),
        ({"wq": GOOD.wq[:, :32]}, "its K is that of xq"),
    ),
)
def test_scales_of_no_kind_are_refused(changes: dict[str, torch.Tensor], message: str) -> None:
    case = replace(GOOD, **changes)
    for op in (fp8_gemm, fp8_linear):
        with pytest.raises(GuardError, match=message):
            op(case.xq, case.xs, case.wq, case.ws)


def test_the_entry_refuses_what_the_kernel_does_not_take(arch: str) -> None:
    case = case_of("rows", 2, 8, 64, arch)
    out = torch.empty(2, 8, dtype=torch.bfloat16)
    blocks = replace(case, xs=torch.ones(2, 1), ws=torch.ones(2, 1))
    for operands, scales, message in (
        (case, 1, "Xs must be contiguous float32 .2, 1., one scale per 128 elements of K"),
        (blocks, 1, "Ws must be contiguous float32 .1, 1., one scale per 128 elements of K"),
        (replace(case, xq=case.xq[:, :40].contiguous(), wq=case.wq[:, :40].contiguous()), 0, "multiple of 16"),
        (replace(case, ws=torch.ones(3)), 0, "one scale or .8., one per row"),
    ):
        with pytest.raises(GuardError, match=message):
            fp8_wave_split_out(out, *operands.typed(), None, scales, 16, 16, 1)
    with pytest.raises(GuardError, match="bias must be"):
        fp8_wave_split_out(out, *case.typed(), torch.ones(8).half(), 0, 16, 16, 1)


def test_a_row_of_the_table_says_how_a_shape_is_computed(arch: str) -> None:
    problem = FAMILY.problem(*case_of("blocks", 2, 8, 256, arch).typed())
    assert problem.key == (2, 8, 256, 128) and problem.scales is Scales.BLOCKS
