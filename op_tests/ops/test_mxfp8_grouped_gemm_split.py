"""The MoE grouped GEMM with K split over the waves of a work-group, on gfx950 and on gfx942 in its own fp8 format."""

from __future__ import annotations

import pytest
import torch
from helpers.mxfp8_cases import SCALE_NAN, assert_bits, assert_close, embedded, integers, nan_byte, normal
from helpers.mxfp8_cases import oracle as product
from helpers.mxfp8_grouped_cases import UNTOUCHED, Moe, exact, oracle, random_owners, sort_slots, sparse_bytes

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.mxfp8_grouped_gemm import grouped_gemm_mxfp8, grouped_mxfp8_linear, mxfp8_grouped_split
from hipforge.ops.mxfp8_grouped_gemm.kernels import wave_split
from hipforge.ops.mxfp8_grouped_gemm.kernels.wave_split import COLUMNS, ROWS, WAVES, default_choice, fits
from hipforge.tuning.families.mxfp8_grouped_gemm import TUNER
from hipforge.tuning.grouped import MoeCell

pytestmark = pytest.mark.gfx942

INSTANCES = tuple((rows, waves) for rows in ROWS for waves in WAVES)


def expected(case: Moe, arch: str, elsewhere: float = UNTOUCHED) -> torch.Tensor:
    """The oracle reads e4m3fn; the same bytes are half as much in e4m3fnuz, and each output has two factors."""
    want = oracle(case, elsewhere)
    here = torch.tensor([0 <= owner < case.w.shape[0] for owner in case.owners])
    return torch.where(here[:, None], want / 4, want) if arch == "gfx942" else want


def run(case: Moe, rows: int = 16, waves: int = 4, out: torch.Tensor | None = None, columns: int = 16) -> torch.Tensor:
    """Run the raw op into an output full of a value that no test expects."""
    out = case.out() if out is None else out
    operands = case.a, case.a_scale, case.w, case.w_scale, *case.sorted()
    returned = mxfp8_grouped_split(
        *operands, out, case.slots, case.a_div, case.block_m, case.weights, rows=rows, waves=waves, columns=columns
    )
    assert returned is out
    return out


@pytest.mark.parametrize("order", ("forward", "reverse", "random"))
@pytest.mark.parametrize(("rows", "waves"), INSTANCES)
def test_every_instance_is_exact_on_integers_under_all_checks(arch: str, rows: int, waves: int, order: str) -> None:
    # 21 steps, the last partial: each wave has other steps than its neighbour; two tiles and a bit of columns, three of
    # slots at 16 rows and two at 32, experts with one slot, with none, and with more than a tile of 20.
    owners = (*(1,) * 35, 3, *(4,) * 5)
    case = exact(owners, 6, 37, 20 * 128 + 96, a_div=3, block_m=20, weighted=True, scales=(126, 128))
    with emulator.options(checks="all", wave_order=order):
        assert_bits(run(case, rows, waves), expected(case, arch))


WIDE = tuple((waves, columns) for waves in WAVES for columns in COLUMNS[1:] if fits(waves, columns))


@pytest.mark.parametrize("n", (15, 37, 128, 200))
@pytest.mark.parametrize(("waves", "columns"), WIDE)
def test_wide_work_groups_are_exact_and_write_nothing_else(arch: str, waves: int, columns: int, n: int) -> None:
    """Tiles past the last column among them, of one wave and of several."""
    case = exact((*(1,) * 20, 0, 2), experts=3, n=n, k=1184, a_div=2, block_m=12, weighted=True, scales=(126, 128))
    for rows in ROWS:
        buffer = torch.full((22 * n + 64,), UNTOUCHED, dtype=torch.bfloat16)
        out = buffer[32 : 32 + 22 * n].view(22, n)
        with emulator.options(checks="all", wave_order="random"):
            run(case, rows, waves, out, columns)
        assert_bits(out, expected(case, arch))
        assert (buffer[:32] == UNTOUCHED).all() and (buffer[32 + 22 * n :] == UNTOUCHED).all()


@pytest.mark.parametrize("rows", ROWS)
def test_turns_of_one_instruction_change_nothing(arch: str, rows: int) -> None:
    case = exact((0,) * (rows + 3), experts=1, n=16, k=1280)
    with emulator.options(checks="all", quantum=1):
        assert_bits(run(case, rows, 8), expected(case, arch))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("count", (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64))
def test_every_number_of_slots_in_a_tile_is_exact(arch: str, count: int, rows: int) -> None:
    case = exact([1] * count, experts=3, n=20, k=416, weighted=count % 2 == 0)
    for waves in (1, 4):
        assert_bits(run(case, rows, waves), expected(case, arch))


def test_a_k_that_ends_within_a_step_is_about_as_fast_as_the_next_whole_one() -> None:
    # 22.5 and 23 steps (modelled) of 2 experts; where each step waits for its own loads, it takes twice as long.
    def us(k: int) -> float:
        case = exact((0,) * 16 + (1,) * 16, experts=2, n=64, k=k, scales=(126, 128))
        run(case, 16, 1)
        with emulator.timed() as timed:
            run(case, 16, 1)
        return timed.result.replay_us

    assert us(2880) < 1.25 * us(2944)


# Runs of 48, 24 and 12 steps of 128 and what is left, one block of scales and several, and scales whose rows are not
# aligned. 2880, 22.5 steps: gpt-oss.
STEPS = (*range(13), 16, 17, 22, 23, 24, 25, 36, 47, 48, 85)


@pytest.mark.parametrize("k", [128 * steps + tail for steps in STEPS for tail in (0, 32, 64, 96) if steps + tail])
def test_every_length_of_a_run_and_kind_of_tail_is_exact(arch: str, k: int) -> None:
    case = exact((*(0,) * 5, *(1,) * 18), experts=2, n=18, k=k, scales=(126, 128))
    for rows in ROWS:
        for waves in (1, 2) if k < 1280 else (1,):
            assert_bits(run(case, rows, waves), expected(case, arch))


@pytest.mark.parametrize("waves", (1, 4))
@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 15, 16, 17, 20, 33))
def test_every_n_is_exact_and_writes_nothing_else(arch: str, n: int, waves: int) -> None:
    case = exact([1] * 4, experts=2, n=n, k=160)
    for start in (16, 17):  # with and without the alignment that wide stores need
        buffer = torch.full((4 * n + 33,), UNTOUCHED, dtype=torch.bfloat16)
        out = buffer[start : start + 4 * n].view(4, n)
        run(case, 16, waves, out)
        assert_bits(out, expected(case, arch))
        assert (buffer[:start] == UNTOUCHED).all() and (buffer[start + 4 * n :] == UNTOUCHED).all()


@pytest.mark.parametrize("a_div", (1, 2, 3, 4, 5, 7, 8))
def test_a_slot_reads_row_slot_over_a_div(arch: str, a_div: int) -> None:
    case = exact(random_owners(a_div * 5, 4), experts=4, n=24, k=96, a_div=a_div)
    assert_bits(run(case), expected(case, arch))


@pytest.mark.parametrize("block_m", (4, 8, 20, 64, 68, 128, 192))
def test_every_block_m_is_exact(arch: str, block_m: int) -> None:
    case = exact([*random_owners(30, 3), *[1] * 70], experts=3, n=24, k=96, block_m=block_m)
    for rows in ROWS:
        assert_bits(run(case, rows), expected(case, arch))


@pytest.mark.parametrize("count", (1, 2, 6, 30))
def test_slots_may_lie_anywhere_in_a_tile(arch: str, count: int) -> None:
    generator = torch.Generator().manual_seed(5)
    case = exact([0] * count, experts=1, n=24, k=160)
    ids = torch.full((64,), count, dtype=torch.int32)
    ids[torch.randperm(64, generator=generator)[:count]] = torch.randperm(count, generator=generator).int()
    index = (ids, torch.zeros(1, dtype=torch.int32), torch.tensor([64], dtype=torch.int32))
    assert_bits(run(case.but(index=index)), expected(case, arch))


@pytest.mark.parametrize("pad", (9, 1 << 24, 2**31 - 1, -1, -(2**31)))
def test_any_id_that_is_no_slot_is_padding(arch: str, pad: int) -> None:
    owners = random_owners(9, 3)
    case = exact(owners, experts=3, n=16, k=96, block_m=16)
    assert_bits(run(case.but(index=sort_slots(owners, 16, 3, pad))), expected(case, arch))


@pytest.mark.parametrize("elsewhere", (-1, 3, 2**31 - 1, -(2**31)))
def test_tiles_of_experts_elsewhere_are_left_alone(arch: str, elsewhere: int) -> None:
    owners = (0, 1, 2, 2, 1, 0)
    case = exact(owners, experts=3, n=16, k=96, block_m=4)
    ids, experts, padded = sort_slots(owners, 4, 3)
    experts[experts == 1] = elsewhere
    got = run(case.but(index=(ids, experts, padded)))
    assert_bits(got, expected(case.but(owners=(0, -1, 2, 2, -1, 0)), arch))


@pytest.mark.parametrize("used", (-5, 0, 1, 4, 5, 8, 12, 100))
def test_tiles_past_num_tokens_post_padded_are_left_alone(arch: str, used: int) -> None:
    case = exact((0, 1, 2), experts=3, n=16, k=96, block_m=4)
    ids, experts, _ = sort_slots((0, 1, 2), 4, 3)
    garbage = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 5, 0, 1], dtype=torch.int32)
    index = torch.cat((ids, garbage)), torch.cat((experts, garbage)), torch.tensor([min(used, 12)], dtype=torch.int32)
    in_use = tuple(owner if 4 * tile < used else -1 for tile, owner in enumerate((0, 1, 2)))
    assert_bits(run(case.but(index=index)), expected(case.but(owners=in_use), arch))


def test_more_tiles_than_slots_are_all_walked(arch: str) -> None:
    # Tiles of nothing but padding in front: the slots' tile is the last of 40, the grid has two rows.
    case = exact((1, 1), experts=2, n=16, k=96, block_m=4)
    ids = torch.full((40, 4), 2, dtype=torch.int32)
    ids[39, 1:3] = torch.tensor([1, 0])
    index = (ids.flatten(), torch.ones(40, dtype=torch.int32), torch.tensor([160], dtype=torch.int32))
    assert_bits(run(case.but(index=index)), expected(case, arch))


def test_no_tiles_or_no_slots_leave_the_output_alone() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    case = exact((0,), experts=1, n=16, k=96)
    assert (run(case.but(index=(none, none, torch.tensor([0], dtype=torch.int32)))) == UNTOUCHED).all()
    assert run(case.but(owners=(), index=sort_slots((0,), 64, 1))).shape == (0, 16)


@pytest.mark.parametrize("k", (96, 1056))
@pytest.mark.parametrize("count", (1, 5, 20))
def test_bytes_that_do_not_belong_to_a_row_never_take_part(arch: str, count: int, k: int) -> None:
    # Around each tensor, in other experts' weights and in activation rows that no slot reads: NaN elements and scales.
    case = exact([1] * count, experts=3, n=10, k=k)
    want, nan = expected(case, arch), nan_byte(arch)
    for expert in (0, 2):
        case.w[expert], case.w_scale[expert] = nan, SCALE_NAN
    surrounded = case.but(
        a=embedded(torch.cat((case.a, torch.full((3, k), nan, dtype=torch.uint8))), nan | 0x80),
        a_scale=embedded(torch.cat((case.a_scale, torch.full((3, k // 32), SCALE_NAN, dtype=torch.uint8))), SCALE_NAN),
        w=embedded(case.w, nan | 0x80),
        w_scale=embedded(case.w_scale, SCALE_NAN, margin=63),
    )
    for rows in ROWS:
        assert_bits(run(surrounded, rows, 2), want)


@pytest.mark.parametrize("waves", (1, 4))
@pytest.mark.parametrize("count", (1, 20))
@pytest.mark.parametrize("block", (0, 5, 32))
def test_a_nan_scale_or_element_reaches_exactly_its_outputs(arch: str, block: int, count: int, waves: int) -> None:
    case = exact([1] * count, experts=2, n=20, k=1056)
    want = expected(case, arch)
    case.a_scale[0, block] = SCALE_NAN
    case.w[1, 3, 32 * block + 7] = nan_byte(arch)
    case.w_scale[1, 17, block] = SCALE_NAN
    case.w[1, 17, 32 * block : 32 * block + 32] = 0  # even where its block is zero
    want[0] = want[:, 3] = want[:, 17] = float("nan")
    for rows in ROWS:
        assert_bits(run(case, rows, waves), want)


@pytest.mark.parametrize("byte", (0, 1, 126, 254))
def test_extreme_scales_that_cancel_lose_nothing(arch: str, byte: int) -> None:
    case = exact((0, 0, 0), experts=1, n=7, k=544)
    case.a_scale.fill_(byte), case.w_scale.fill_(254 - byte)
    case.a_scale[:, ::3], case.w_scale[:, :, ::3] = 254 - byte, byte
    assert_bits(run(case), expected(case, arch))


@pytest.mark.parametrize("waves", (1, 8))
def test_results_do_not_depend_on_the_order_of_waves(arch: str, waves: int) -> None:
    data = normal(12, 40, 2080)
    case = Moe(data.xq, data.xs, data.wq[None], data.ws[None], (0,) * 12, 1, 64)
    if arch == "gfx942":  # no -0, which is its NaN
        case = case.but(a=case.a.masked_fill(case.a == 0x80, 0), w=case.w.masked_fill(case.w == 0x80, 0))
    first = run(case, 16, waves)
    assert_close(first, product(data) / (4 if arch == "gfx942" else 1))
    for order in ("forward", "reverse", "random"):
        with emulator.options(wave_order=order):
            assert torch.equal(run(case, 16, waves).view(torch.int16), first.view(torch.int16))


def test_an_expert_past_4_gib_is_reached_by_its_own_address(arch: str) -> None:
    experts, n, k = 2300, 24, 96 * 1024
    data = integers(6, n, k // 32, scales=(126, 127))
    w, w_scale = sparse_bytes(experts, n, k), sparse_bytes(experts, n, k // 32)
    assert w.numel() > 2**32
    a, a_scale = torch.zeros(6, k, dtype=torch.uint8), torch.zeros(6, k // 32, dtype=torch.uint8)
    a[:, -k // 32 :], a_scale[:, -k // 1024 :] = data.xq, data.xs
    for expert in (1, experts - 1):
        w[expert, :, -k // 32 :], w_scale[expert, :, -k // 1024 :] = data.wq.roll(expert, 0), data.ws.roll(expert, 0)
    owners = (experts - 1, 1, experts - 1, experts - 1, 1, experts - 1)
    whole = product(data) / (4 if arch == "gfx942" else 1)
    want = torch.stack([whole[slot].roll(owner) for slot, owner in enumerate(owners)])
    with emulator.options(checks="memory"):
        assert_bits(run(Moe(a, a_scale, w, w_scale, owners, 1, 8), 16, 8), want)


@pytest.mark.parametrize(("count", "rows", "loads"), ((1, 16, 1), (16, 16, 1), (17, 16, 2), (32, 32, 1), (64, 32, 2)))
def test_weights_are_loaded_once_per_pass_in_one_launch(arch: str, count: int, rows: int, loads: int) -> None:
    case = exact([1] * count, experts=3, n=64, k=1024)
    with emulator.counters() as counted:
        run(case, rows, 4)
    weight = counted.tensors["w"]
    assert weight.unique_loaded == 64 * 1024, "only the one expert is touched"
    assert weight.loaded == loads * weight.unique_loaded
    assert counted.launches == 1 and not counted.scratch_bytes and not counted.lds_bank_conflicts
    assert counted.mfma_count == 4 * 8 * loads * rows // 16 * (1 if arch == "gfx950" else 4)


def typed(case: Moe, arch: str) -> Moe:
    own = torch.float8_e4m3fn if arch == "gfx950" else torch.float8_e4m3fnuz
    return case.but(a=case.a.view(own), w=case.w.view(own))


def call(case: Moe) -> torch.Tensor | None:
    operands = case.a, case.a_scale, case.w, case.w_scale, *case.sorted(), case.slots
    return grouped_gemm_mxfp8(*operands, 4, case.block_m, torch.bfloat16, case.a_div, case.weights)


def test_on_gfx942_the_ops_take_it_for_every_number_of_slots(arch: str) -> None:
    for count in (1, 20, 300):
        case = exact(random_owners(count, 4), experts=4, n=24, k=96, weighted=True)
        own = typed(case, arch)
        operands = own.a, own.a_scale, own.w, own.w_scale, *own.sorted(), own.slots, own.block_m, own.a_div
        told = hipforge.explain(grouped_mxfp8_linear, *operands, own.weights)
        assert told.path == "kernel"
        if arch == "gfx942":
            assert told.kernel == "mxfp8_grouped_split" and "the table is for gfx950" in told.reason
            got = call(own)
            assert got is not None
            assert_bits(got, expected(case, arch))
        assert_bits(grouped_mxfp8_linear(*operands, own.weights), expected(case, arch))


def test_bytes_without_a_type_mean_e4m3fn_everywhere(arch: str) -> None:
    case = exact((0, 1, 1), experts=2, n=16, k=96)
    operands = case.a, case.a_scale, case.w, case.w_scale, *case.sorted(), case.slots, case.block_m, case.a_div
    assert_bits(grouped_mxfp8_linear(*operands), oracle(case))
    told = hipforge.explain(grouped_mxfp8_linear, *operands)
    if arch == "gfx942":
        assert call(case) is None and told.path == "torch"
        assert "on gfx942 the kernel reads float8_e4m3fnuz" in told.refused["kernel"]


def test_the_default_takes_rows_for_twice_the_mean_and_few_waves() -> None:
    cells = [(slots, experts) for slots in (1, 16, 17, 64, 640) for experts in (2, 128)]
    rows = {cell: default_choice(*cell, 64, 768, 256).configuration["rows"] for cell in cells}
    assert rows == {(1, 2): 16, (1, 128): 16, (16, 2): 16, (16, 128): 16, (17, 2): 32, (17, 128): 16, (64, 2): 32,
                    (64, 128): 16, (640, 2): 32, (640, 128): 16}  # fmt: skip
    waves = {k: default_choice(16, 128, 64, k, 256).configuration["waves"] for k in (32, 768, 1536, 6144, 16384)}
    assert waves == {32: 1, 768: 1, 1536: 2, 6144: 8, 16384: 8}
    # Work-groups that fill 256 compute units by themselves take one wave each.
    filled = {slots: default_choice(slots, 128, 768, 6144, 256).configuration["waves"] for slots in (1, 4, 8, 16)}
    assert filled == {1: 8, 4: 4, 8: 2, 16: 1}
    # Wide work-groups where waves do not wait for each other and two work-groups are left for each unit, less where K
    # is long enough for their start to matter little.
    wide = {slots: default_choice(slots, 128, 6144, 384, 256).configuration["columns"] for slots in (1, 2, 3, 6, 64)}
    assert wide == {1: 16, 2: 16, 3: 32, 6: 64, 64: 64}
    assert default_choice(64, 128, 6144, 512, 256).configuration["columns"] == 32
    assert default_choice(8, 128, 768, 6144, 256).configuration == {"rows": 16, "waves": 2, "columns": 16}


GOOD = exact((0, 1, 1, 0), experts=2, n=8, k=64, block_m=8)


@pytest.mark.parametrize(("rows", "waves"), ((16, 0), (16, 3), (16, 16), (32, 16)))
def test_other_numbers_of_waves_are_refused(rows: int, waves: int) -> None:
    most = f"at most 8 with {rows} rows and 16 columns"
    with pytest.raises(GuardError, match=rf"waves must be 1, 2, 4, 8 or 16, {most}; got {waves}"):
        run(GOOD, rows, waves)


@pytest.mark.parametrize(("waves", "columns"), ((1, 0), (1, 24), (1, 48), (1, 256), (2, 128), (8, 32)))
def test_other_widths_of_a_work_group_are_refused(waves: int, columns: int) -> None:
    most = 8 // waves * 16
    message = rf"columns must be 16, 32, 64 or 128, at most {most} with {waves} waves for each 16; got {columns}"
    with pytest.raises(GuardError, match=message):
        run(GOOD, 16, waves, columns=columns)


def test_other_rows_and_an_endless_k_are_refused_by_name() -> None:
    with pytest.raises(GuardError, match=r"rows must be 8, 16 or 32; got 64"):
        run(GOOD, 64)
    k = (1 << 22) + 32
    row, scale = sparse_bytes(1, k), sparse_bytes(1, k // 32)
    case = Moe(row, scale, row[None], scale[None], (0,), 1, 8, index=sort_slots((0,), 8, 1))
    with pytest.raises(GuardError, match=r"K must be at most 4194304; got 4194336"):
        run(case)


def test_the_other_architecture_s_format_is_refused(arch: str) -> None:
    other = torch.float8_e4m3fnuz if arch == "gfx950" else torch.float8_e4m3fn
    with pytest.raises(GuardError, match=r"w must be contiguous float8_e4m3fn"):
        run(GOOD.but(w=GOOD.w.view(other)))
    with pytest.raises(GuardError, match=r"a_q must be contiguous float8_e4m3fn"):
        run(GOOD.but(a=GOOD.a.view(other)))


# Most wave instructions by slots: what the short prologue leaves of a wave that owns 16 columns and a K of 768.
RECORDED = {"gfx950": {8: 820_000, 64: 5_500_000}, "gfx942": {8: 2_720_000, 64: 17_600_000}}


@pytest.mark.parametrize("slots", (8, 64))
def test_the_second_gemm_takes_no_more_instructions_than_recorded(arch: str, slots: int) -> None:
    cell = MoeCell(6144, 768, 1, True, slots, experts=128)
    parts = TUNER.operands(cell, arch, torch.device("cpu"))
    with emulator.options(checks="off"), emulator.counters() as counted:
        TUNER.run(wave_split.choice(16, 1), cell, parts)
    assert counted.wave_instructions <= RECORDED[arch][slots]
