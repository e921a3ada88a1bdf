"""The MoE grouped GEMM whose rows of W stream past slots that stay in registers, on gfx950."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.grouped_formats import FORMATS
from helpers.mxfp8_cases import BYTE_OF_INTEGER, SCALE_ONE, assert_bits, embedded
from helpers.mxfp8_grouped_cases import UNTOUCHED, Moe, exact, oracle, random_owners, sort_slots, sparse_bytes

import hipforge
from hipforge import emulator
from hipforge.errors import ConfigError, GuardError
from hipforge.ops.mxfp8_grouped_gemm import grouped_mxfp8_linear, mxfp8_grouped_stream
from hipforge.ops.mxfp8_grouped_gemm.family import TABLE
from hipforge.ops.mxfp8_grouped_gemm.kernels import stream
from hipforge.tuning import work
from hipforge.tuning.families.mxfp8_grouped_gemm import TUNER
from hipforge.tuning.grouped import MoeCell
from hipforge.tuning.search import Trial
from hipforge.tuning.table_writer import merge_rows

MXFP4 = FORMATS["mxfp4"]
KS = (128, 256, 384, 512)
# One slot of an expert, none, 16, and more than a tile of 20, of which 35 are three passes.
OWNERS = (*(1,) * 35, 3, *(4,) * 5, *(5,) * 16)


def run(case: Moe, columns: int = 64, out: torch.Tensor | None = None) -> torch.Tensor:
    """Run the raw op into an output full of a value that no test expects."""
    out = case.out() if out is None else out
    operands = case.a, case.a_scale, case.w, case.w_scale, *case.sorted()
    returned = mxfp8_grouped_stream(*operands, out, case.slots, case.a_div, case.block_m, case.weights, columns=columns)
    assert returned is out
    return out


@pytest.mark.parametrize("k", KS)
def test_every_k_is_exact_on_integers_under_all_checks(k: int) -> None:
    case = exact(OWNERS, 7, 661, k, a_div=3, block_m=20, weighted=True, scales=(126, 128))
    want = oracle(case)
    for columns in (64, 128, 512):
        for order in ("forward", "reverse", "random") if columns == 128 else ("random",):
            with emulator.options(checks="all", wave_order=order):
                assert_bits(run(case, columns), want)


@pytest.mark.parametrize("columns", stream.COLUMNS)
@pytest.mark.parametrize("n", (1, 15, 16, 37, 64, 65, 200, 512, 700))
def test_every_width_is_exact_and_writes_nothing_else(n: int, columns: int) -> None:
    case = exact((2, 0, 2, 1, 2), 3, n, 256, a_div=1, block_m=8)
    buffer = torch.full((case.slots * n + 33,), UNTOUCHED, dtype=torch.bfloat16)
    for start in (16, 17):  # with and without the alignment of wide stores
        out = buffer[start : start + case.slots * n].view(case.slots, n)
        with emulator.options(checks="all"):
            assert_bits(run(case, columns, out), oracle(case))
        assert (buffer[:start] == UNTOUCHED).all() and (buffer[start + case.slots * n :] == UNTOUCHED).all()
        buffer.fill_(UNTOUCHED)


@pytest.mark.parametrize("k", KS)
def test_turns_of_one_instruction_change_nothing(k: int) -> None:
    case = exact(OWNERS, 7, 150, k, a_div=3, block_m=20, scales=(126, 128))
    with emulator.options(checks="all", quantum=1):
        assert_bits(run(case, 128), oracle(case))


@pytest.mark.parametrize("columns", (64, 256))
def test_what_is_loaded_and_issued(columns: int) -> None:
    case = exact(tuple(range(8)) * 2, 8, 1024, 256, a_div=1, block_m=16)
    with emulator.counters() as counted:
        assert_bits(run(case, columns), oracle(case))
    assert counted.launches == 1 and counted.scratch_bytes == 0
    assert counted.tensors["w"].loaded == case.w.numel()
    # Each wave multiplies whole rounds of the three tiles that it has in flight.
    assert counted.mfma_count == 8 * (1024 // columns) * 4 * 3 * -(-columns // (64 * 3)) * 2


def test_the_default_streams_short_ks_of_many_experts() -> None:
    def columns(slots: int, experts: int, k: int, n: int = 6144) -> int | None:
        found = stream.default_choice(slots, experts, n, k, 256)
        return None if found is None else found.configuration["columns"]

    assert [columns(slots, 257, 256) for slots in (9, 18, 36, 72, 144)] == [None, 128, 256, 512, 512]
    assert [columns(slots, 257, 512) for slots in (9, 72, 144, 288)] == [None, None, 512, 512]
    packed = [stream.default_choice(slots, 33, 7168, 512, 256, packing) for slots in (9, 144) for packing in (1, 2)]
    assert [one and one.configuration["columns"] for one in packed] == [None, None, None, 256]
    assert columns(64, 257, 768) is None and columns(144, 257, 224) is None and columns(144, 257, 8192) is None


def test_the_linear_streams_and_copies_what_the_kernel_refuses() -> None:
    case = exact(random_owners(32, 16), 16, 6144, 128, a_div=1, block_m=16)
    want = oracle(case)
    index = case.sorted()
    operands = case.a, case.a_scale, case.w, case.w_scale, *index, case.slots, case.block_m, 1
    assert hipforge.explain(grouped_mxfp8_linear, *operands).kernel == stream.KERNEL
    assert_bits(grouped_mxfp8_linear(*operands), want)
    moved = case.a, embedded(case.a_scale, 0xFF, margin=63), case.w, embedded(case.w_scale, 0xFF, margin=61)
    assert_bits(grouped_mxfp8_linear(*moved, *operands[4:]), want)


@pytest.mark.parametrize("k", KS)
def test_rows_in_e2m1_stream_as_those_in_e4m3(k: int) -> None:
    case = MXFP4.case(OWNERS, 7, 661, k, a_div=3, weighted=True)
    bias = torch.randint(-8, 9, (7, 661), generator=torch.Generator().manual_seed(2)) * 0.5
    for columns, order in ((64, "random"), (512, "reverse")):
        with emulator.options(checks="all", wave_order=order), emulator.counters() as counted:
            got = MXFP4.stream(case, columns, bias)
        assert_bits(got, MXFP4.oracle(case, bias, UNTOUCHED))
        assert counted.launches == 1 and not counted.scratch_bytes
        assert counted.tensors["w"].unique_loaded == 4 * 661 * k // 2


def test_a_short_k_of_many_experts_in_mxfp4_streams() -> None:
    case = MXFP4.case(random_owners(32, 16), 16, 6144, 128)
    assert MXFP4.told(case).kernel == "mxfp4_grouped_stream"
    assert_bits(MXFP4.linear(case), MXFP4.oracle(case))


def test_weights_of_more_than_2_gib_are_read_to_the_last_expert() -> None:
    experts, n, k = 1025, 4096, 512
    w, w_scale = sparse_bytes(experts, n, k), sparse_bytes(experts, n, k // 32)
    assert w.numel() > 2**31
    w[-1, -1, -1] = BYTE_OF_INTEGER[3]
    w_scale[-1, -1] = SCALE_ONE
    a = torch.zeros(1, k, dtype=torch.uint8)
    a[0, -1] = BYTE_OF_INTEGER[1]
    a_scale = torch.full((1, k // 32), SCALE_ONE, dtype=torch.uint8)
    out = torch.full((1, n), UNTOUCHED, dtype=torch.bfloat16)
    index = sort_slots((experts - 1,), 16, experts)
    mxfp8_grouped_stream(a, a_scale, w, w_scale, *index, out, 1, 1, 16, columns=512)
    assert out[0, -1] == 3 and not out[0, :-1].any()


def test_a_row_of_another_k_is_refused(tmp_path: Path) -> None:
    trial = Trial(stream.choice(64), 1e-6, 0.001)
    row = work.row_for(TUNER, MoeCell(6144, 768, 1, True, 64), ("gfx950", 256), trial, "model:test", None, 3.0)
    with pytest.raises(ConfigError, match=r"K a multiple of 128 up to 512; got .*K=768"):
        merge_rows(tmp_path / "rows.csv", TABLE, [row])


GOOD = exact((2, 0, 2, 1, 2), 3, 37, 256, a_div=1, block_m=8)


@pytest.mark.parametrize("columns", (0, 16, 96, 576, -64))
def test_other_widths_are_refused(columns: int) -> None:
    with pytest.raises(GuardError, match=f"columns must be a multiple of 64 up to 512; got {columns}"):
        run(GOOD, columns)


@pytest.mark.parametrize("k", (32, 160, 640))
def test_another_k_is_refused(k: int) -> None:
    with pytest.raises(GuardError, match=f"K must be a multiple of 128, at most 512; .*; got {k}"):
        run(exact((2, 0, 2, 1, 2), 3, 37, k, a_div=1, block_m=8))


def test_unaligned_scales_are_refused_by_the_raw_op() -> None:
    with pytest.raises(GuardError, match="a_scale and w_scale must start at a multiple of 4 bytes"):
        run(replace(GOOD, w_scale=embedded(GOOD.w_scale, 0xFF, margin=61)))
