"""The tuner of decode attention: its candidates, that counts at a reduced size are those at full size, and its rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hipforge import decode_attention_splitk, devices, emulator, explain
from hipforge.emulator.counting import PcCount
from hipforge.emulator.timing import Capture, estimate
from hipforge.emulator.timing.context import gpu_of
from hipforge.emulator.timing.machines import MACHINES
from hipforge.errors import ConfigError
from hipforge.ops.core.kernel import parsed, spelled
from hipforge.ops.decode_attention import family, kernels
from hipforge.ops.decode_attention.family import TABLE as DECODE_ATTENTION_FP8
from hipforge.ops.decode_attention.kernels import BLOCKS_N, FP8, WAVES
from hipforge.tuning import driver
from hipforge.tuning.families import decode_attention as tuner
from hipforge.tuning.families.decode_attention import counts as counting
from hipforge.tuning.families.decode_attention import int4 as int4_tuner
from hipforge.tuning.families.decode_attention import recording
from hipforge.tuning.families.decode_attention.cases import AttentionCell, operands
from hipforge.tuning.search import Candidate, Trial
from hipforge.tuning.table_writer import merge_rows, read_existing
from hipforge.tuning.work import row_for

ARCH = devices.current().default_arch
CU_COUNT = devices.current().cu_count()
SMALL = AttentionCell(1, 4, 64, 0, 256, 2)
KEY = (ARCH, CU_COUNT, 2, 1, 4, 64, 256, 0)


def test_candidates_pass_the_filter_and_leave_no_split_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCKS_N", (*BLOCKS_N, 128))
    monkeypatch.setattr(kernels, "WAVES", (*WAVES, 8))
    monkeypatch.setattr(kernels, "refusal", lambda configuration, key: None)
    found = family.FAMILY.choices(AttentionCell(1, 8, 128, 0, 8192 - 64, 4), ARCH)
    tried = {(one.configuration["block_n"], one.configuration["waves"]) for one in found}
    assert tried == {(block_n, waves) for block_n in BLOCKS_N for waves in WAVES}
    for one in found:
        block_n, waves, split_k = (one.configuration[name] for name in FP8.parameters)
        blocks = math.ceil((8192 - 64) / block_n)
        each = math.ceil(blocks / (split_k * waves)) * waves
        assert (split_k - 1) * each < blocks <= split_k * each


def test_one_block_of_keys_has_nothing_to_split() -> None:
    found = family.FAMILY.choices(AttentionCell(1, 8, 128, 0, min(BLOCKS_N), 4), ARCH)
    splits = {one.configuration["split_k"] for one in found}
    assert splits == {1}


def assert_counts_agree(predicted, counted, whole) -> None:
    """Compare the work that a tuner extrapolates with the counts of the launches and those of the full size."""
    for work, launch, full in zip(predicted, counted.kernels, whole, strict=True):
        assert full is not None
        assert work.workgroups == math.prod(launch.grid) and 64 * work.waves_per_workgroup == math.prod(launch.block)
        assert work.instructions == launch.wave_instructions == full.instructions
        assert (work.vector_instructions, work.matrix_cycles) == (full.vector, full.matrix_cycles)
        assert (work.loaded_bytes, work.occupancy) == (full.loaded, full.occupancy)


@pytest.mark.parametrize("page_size", [0, 64], ids=["dense", "paged"])
@pytest.mark.parametrize("group", [4, 24], ids=["one tile", "two tiles"])
@pytest.mark.parametrize("blocks", [1, 3, 11])
def test_counts_at_a_reduced_size_are_those_at_full_size(page_size: int, group: int, blocks: int) -> None:
    first = family.FAMILY.choices(AttentionCell(1, group, 64, 0, 1 << 16, 1), ARCH)[0].configuration
    configuration = {**first, "split_k": 4}
    keys = 4 * counting.ranges(configuration, 64) * blocks * configuration["block_n"]
    cell = AttentionCell(2, group, 64, page_size, keys, 3)
    predicted, error = counting.works(cell, ARCH, configuration)
    with emulator.counters(per_pc=True) as counted:
        counting.run(operands(cell, ARCH), configuration)
    whole = counting.count(cell, ARCH, configuration)
    assert error < tuner.MAX_ERROR
    assert_counts_agree(predicted, counted.result, whole)
    for work, full in zip(predicted, whole, strict=True):
        assert work.in_flight_bytes == round(work.streamed_bytes / full.trips)
    traffic = counted.result.tensors
    cache = sum(traffic[name].loaded for name in ("k", "v"))
    assert predicted[0].streamed_bytes == cache
    per_row = sum(traffic[name].unique_loaded for name in ("k", "v", "k_scale_shift", "v_scale_shift", "q"))
    written = sum(traffic[name].unique_stored for name in ("partial", "partial_lse"))
    assert predicted[0].unique_bytes == per_row + written
    assert predicted[1].unique_bytes == written + traffic["out"].unique_stored + traffic["lse"].unique_stored
    assert predicted[1].streamed_bytes == sum(traffic[name].unique_loaded for name in ("partial", "partial_lse"))


def test_a_trip_is_a_wait_for_loads_issued_since_the_last_one() -> None:
    texts = (
        "s_load_dwordx4 s[0:3], s[4:5], 0x0", "s_waitcnt lgkmcnt(0)", "global_load_dword v1, v0, s[0:1]",
        "buffer_load_dword v2, v0, s[0:3], 0 offen", "s_waitcnt vmcnt(1)", "s_waitcnt vmcnt(0)",
        "buffer_load_dword v2, v0, s[0:3], 0 offen", "s_waitcnt lgkmcnt(0)", "s_waitcnt vmcnt(0) lgkmcnt(0)",
    )  # fmt: skip
    rows = [PcCount("k", 4 * pc, text, 10 + pc, 0, 0) for pc, text in enumerate(texts)]
    assert counting.trips(reversed(rows), scalar=False) == 14 + 18
    assert counting.trips(rows, scalar=True) == 11 + 14 + 17  # a scalar one too, and the next wait of either kind


def test_the_tuner_writes_modelled_rows_resumes_and_leaves_measured_ones(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    said: list[str] = []
    assert driver.tune(tuner.TUNER, [SMALL], table, say=said.append) == 1
    row = dict(read_existing(DECODE_ATTENTION_FP8, table)[KEY])
    assert row["us"] is None and row["source"] == f"model:{MACHINES[gpu_of(ARCH)].version}"
    assert isinstance(row["model_us"], float) and f"replayed in a graph {row['model_us']:.2f} us" in said[-1]
    assert isinstance(row["err"], float) and 0 < row["err"] < tuner.MAX_ERROR
    assert "decode_attention_fp8(block_n=" in said[-1]
    assert driver.tune(tuner.TUNER, [SMALL], table, resume=True, say=said.append) == 0 and "already in" in said[-1]
    merge_rows(table, DECODE_ATTENTION_FP8, [{**row, "us": 5.0, "source": "measured:GPU/versions"}])
    assert driver.tune(tuner.TUNER, [SMALL], table, say=said.append) == 0 and "a model does not replace" in said[-1]
    assert read_existing(DECODE_ATTENTION_FP8, table)[KEY]["us"] == 5.0


@pytest.mark.parametrize(
    ("batch", "page_size", "split_k"),
    [(8, 0, 4), (8, 64, 3), (16, 0, 6)],
    ids=["equal splits", "paged, a shorter last split", "dense, a shorter last split"],
)
def test_a_few_work_groups_stand_for_all(batch: int, page_size: int, split_k: int) -> None:
    cell = AttentionCell(1, 8, 64, page_size, 2048, batch)
    configuration = {"block_n": 64, "waves": 2, "split_k": split_k}
    capture, all_run = recording.record(cell, ARCH, configuration), Capture()
    with all_run.recording():
        counting.run(recording.reserved(cell, ARCH), configuration)
    for few, every in zip(capture.launches(), all_run.launches(), strict=True):
        assert few["groups"] == every["groups"] > 2 * few["whole"]
        assert few["unmatched"] == [] and set(few["templates"]) == set(every["templates"])
    whole = estimate(all_run, gpu_of(ARCH)).replay_us
    # What other XCDs read of q and of the block tables in the same round is not known to be shared: 0.3 % here.
    assert estimate(capture, gpu_of(ARCH)).replay_us == pytest.approx(whole, rel=0.01)


def test_a_long_call_is_modelled_at_two_smaller_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, configuration = AttentionCell(1, 8, 64, 0, 8192, 4), {"block_n": 32, "waves": 2, "split_k": 6}
    blocks = kernels.blocks_per_wave(configuration, 64, 8192)
    assert blocks > 2 * recording.MODELLED_BLOCKS[1]
    shortened, _ = recording.modelled(cell, ARCH, configuration)
    monkeypatch.setattr(recording, "MODELLED_BLOCKS", (1, blocks))
    assert shortened == pytest.approx(recording.modelled(cell, ARCH, configuration)[0], rel=0.02)


def test_a_wrong_result_cannot_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = counting.run
    monkeypatch.setattr(counting, "run", lambda parts, configuration: (right(parts, configuration)[0] * 1.01, None))
    counting.sampled_blocks.cache_clear()
    counting.sampled_merge.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"no candidate is usable: wrong result"):
            driver.tune(tuner.TUNER, [SMALL], tmp_path / "table.csv")
    finally:
        counting.sampled_blocks.cache_clear()
        counting.sampled_merge.cache_clear()
    assert not (tmp_path / "table.csv").exists()


def test_a_measured_row_has_its_microseconds_and_triton_s() -> None:
    trial = Trial(Candidate("decode_attention_fp8", {"block_n": 64, "waves": 1, "split_k": 2}), 7e-6, 0.002)
    row = row_for(tuner.TUNER, SMALL, KEY[:2], trial, "measured:GPU/versions", (30.0, 20.0), 3.0)
    assert (row["us"], row["stock_us"], row["best_baseline_us"]) == (pytest.approx(7.0), 30.0, 20.0)
    modelled = row_for(tuner.TUNER, SMALL, KEY[:2], trial, "model:1", None, 3.0)
    assert (modelled["us"], modelled["stock_us"]) == (None, None)
    assert modelled["config"] == "block_n=64;waves=1;split_k=2"


def test_the_default_cells_hold_the_shapes_of_the_tests_and_of_the_known_benchmark() -> None:
    shapes = {(cell.batch, cell.keys, cell.kv_heads, cell.group, cell.page_size) for cell in tuner.DEFAULT_CELLS}
    assert shapes >= {
        (batch, keys, kv_heads, group, page_size)
        for batch in (1, 16, 64) for keys in (2048, 8192) for kv_heads in (1, 2) for group in (1, 8)
        for page_size in (64, 256)
    }  # fmt: skip
    benchmark = {(max(1, 65536 >> log2), 1 << log2) for log2 in range(9, 18)}
    assert shapes >= {(b, keys, heads, 16 // heads, 0) for b, keys in benchmark for heads in (1, 2)}


INT4_CELL = AttentionCell(1, 4, 64, 0, 512, 2, 4)


def test_int4_candidates_leave_no_split_empty() -> None:
    found = family.INT4_FAMILY.choices(AttentionCell(1, 8, 128, 0, 8192 - 32, 4, 4), ARCH)
    assert {one.configuration["waves"] for one in found} == set(WAVES) and len(found) < 60
    for one in found:
        waves, split_k = one.configuration.values()
        blocks = (8192 - 32) // kernels.INT4_BLOCK_N
        each = math.ceil(blocks / (split_k * waves)) * waves
        assert (split_k - 1) * each < blocks <= split_k * each


@pytest.mark.parametrize(("page_size", "blocks", "waves"), [(0, 1, 1), (64, 3, 2), (0, 11, 4)])
def test_int4_counts_at_a_reduced_size_are_those_at_full_size(page_size: int, blocks: int, waves: int) -> None:
    configuration = {"waves": waves, "split_k": 4}
    cell = AttentionCell(2, 24, 64, page_size, 4 * waves * blocks * kernels.INT4_BLOCK_N, 3, 4)
    predicted, error = counting.works(cell, ARCH, configuration)
    with emulator.counters(per_pc=True) as counted:
        counting.run(operands(cell, ARCH), configuration)
    whole = counting.count(cell, ARCH, configuration)
    assert error < int4_tuner.MAX_ERROR
    assert_counts_agree(predicted, counted.result, whole)
    traffic = counted.result.tensors
    read = sum(traffic[name].unique_loaded for name in ("k", "v", "q"))
    written = sum(traffic[name].unique_stored for name in ("partial", "partial_lse"))
    assert predicted[0].unique_bytes == read + written


def test_int4_counts_do_not_depend_on_the_number_of_scales() -> None:
    """Which is why a row applies to any number."""
    counted = [
        counting.works(AttentionCell(1, 8, 64, 0, 512, 2, groups), ARCH, {"waves": 2, "split_k": 4})[0][0]
        for groups in (1, 2, 4, 8)
    ]
    assert len({(work.instructions, work.vector_instructions, work.loaded_bytes) for work in counted}) == 1


def test_the_int4_tuner_writes_a_row_that_calls_of_its_bucket_take(
    tmp_path: Path, put_table: Callable[..., Path]
) -> None:
    table = tmp_path / "table.csv"
    assert driver.tune(int4_tuner.TUNER, [INT4_CELL], table) == 1
    (row,) = read_existing(family.INT4_FAMILY.table, table).values()
    merge_rows(
        table, family.INT4_FAMILY.table, [{**row, "config": spelled({**parsed(str(row["config"])), "split_k": 3})}]
    )
    put_table(family.INT4_FAMILY.table, path=table)
    for keys, num_groups, split_k in ((512, 4, 3), (400, 1, 3), (512, 8, 3), (256, 4, None)):
        q = torch.empty(1, 2, 1, 4, 64, dtype=torch.bfloat16)
        cache = torch.empty(1, 2 * keys, 1, 1, num_groups + 8, dtype=torch.int32).expand(-1, -1, -1, 4, -1)
        lengths = torch.zeros(2, dtype=torch.int32)
        told = explain(decode_attention_splitk, q, cache, cache, None, None, lengths, num_groups=num_groups)
        assert told.kernel == "decode_attention_int4"
        assert (told.file == (table, 2)) == (split_k == 3), told
        assert split_k is None or told.configuration["split_k"] == split_k
