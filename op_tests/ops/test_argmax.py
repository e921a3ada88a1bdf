"""The greedy choice on the emulated architecture: torch's own index in every case."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from stress.case import Arguments, Op, Rng, integers, is_given

import hipforge
from hipforge import emulator
from hipforge.errors import EmulatorFault, GuardError
from hipforge.nn import Peers
from hipforge.ops.argmax import argmax, argmax_of_ranks

pytestmark = pytest.mark.gfx942

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


def make(rng: Rng) -> Arguments:
    rows, columns = rng.integer(0, 4), rng.pick((1, 7, 64, 1000, 5003))
    logits = rng.normal(rows, columns).to(rng.pick(DTYPES))
    if rng.chance(0.2):
        logits[:, rng.integer(0, columns - 1)] = rng.pick((-INF, INF, NAN))
    out = torch.full((rows,), 7) if rng.chance(0.3) else None
    return {"logits": logits.round() if rng.chance(0.5) else logits, "out": out}


def judge(before: Arguments, result: Any, after: Arguments) -> str | None:
    got, want = integers(result), np.argmax(before["logits"].double().numpy(), 1)
    wrong = None if np.array_equal(got, want) else f"{got.tolist()} instead of {want.tolist()}"
    return wrong or is_given(result, after.get("out"), "out")


STRESS = (Op("argmax", make, judge, writes=("out",)),)


def random(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(logits: torch.Tensor) -> None:
    got = argmax(logits)
    assert got.dtype == torch.int64 and torch.equal(got, torch.argmax(logits, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 16, 63, 255, 256, 1024, 4099, 8192, 40_000])
def test_the_largest_wherever_it_is(columns: int, dtype: torch.dtype) -> None:
    check(random(5, columns, dtype))
    far = (0, 1, 7, 8, columns // 3, columns // 2, columns - 9, columns - 2, columns - 1)
    places = [place for place in far if 0 <= place < columns]
    logits = random(len(places), columns, dtype).clamp(-4, 4)
    logits[range(len(places)), places] = 5
    assert argmax(logits).tolist() == places
    assert argmax(logits - 9).tolist() == places  # negative numbers alone


@pytest.mark.parametrize("rows", [1, 3])
def test_one_column_whose_stride_is_another(rows: int) -> None:
    """torch calls it contiguous, whatever its stride is."""
    for logits in (torch.ones(1, rows).t(), torch.ones(rows, 4)[:, 1:2], torch.ones(rows, 4)[:, ::4]):
        check(logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [128_256, 151_936, 50_257, 300_001])
def test_the_vocabularies_of_models(columns: int, dtype: torch.dtype) -> None:
    logits = random(3, columns, dtype)  # of 16 bits the largest comes more than once in some
    logits[1] = logits[1].clamp(max=2)
    logits[2] = -INF
    logits[2, columns - 70_000 % columns :] = random(1, 70_000 % columns, dtype)[0] - 3
    check(logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [12, 333, 5000])
def test_equal_ones_and_zeros_of_both_signs_give_the_first(columns: int, dtype: torch.dtype) -> None:
    for least in range(columns - 11, columns, 3):
        logits = torch.full((4, columns), -1.0).to(dtype)
        logits[0, least:] = 3
        logits[1, least:], logits[1, least] = 0.0, -0.0
        logits[2, least:], logits[2, least] = -0.0, 0.0
        logits[3] = -INF
        assert argmax(logits).tolist() == [least, least, least, 0]
    check(random(20, columns, dtype).round())  # equal ones between lanes, waves and loads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [5, 90, 3001])
def test_the_first_nan_of_any_sign_before_infinity(columns: int, dtype: torch.dtype) -> None:
    logits = random(6, columns, dtype)
    logits[0, columns - 2] = NAN
    logits[2, columns // 2] = logits[2, columns - 1] = NAN
    logits[3, 0] = INF
    logits[4] = NAN
    logits[5], logits[5, columns - 1] = -INF, -torch.finfo(dtype).max
    signed = logits.view(torch.int32 if dtype == torch.float32 else torch.int16)
    signed[1, columns - 2] = signed[3, columns - 1] = -1
    assert bool(logits[[1, 3]].isnan().any(1).all())
    assert argmax(logits).tolist() == [columns - 2, columns - 2, columns // 2, columns - 1, 0, columns - 1]
    every = torch.arange(-(2**15), 2**15).short()  # each pattern of 16 bits behind every other
    if dtype != torch.float32:
        check(torch.stack([every.roll(turn) for turn in range(0, 2**16, 9973)]).view(dtype))
        numbers = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))].view(dtype)
        check(numbers[~numbers.isnan()].view(7, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_apart_and_off_16_bytes(dtype: torch.dtype) -> None:
    wide = random(7, 3100, dtype)
    for first, last in ((0, 3000), (1, 3001), (8, 2000), (3, 10), (5, 6), (13, 24)):
        check(wide[:, first:last])
    check(wide[:1].expand(4, -1))
    check(wide.t()[:50])  # copied
    assert argmax(wide[:0]).shape == (0,)
    out = torch.empty(7, dtype=torch.int64)
    assert argmax(wide, out) is out and torch.equal(out, torch.argmax(wide, 1))


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 17, 33, 34, 66, 67, 140])
def test_any_number_of_rows(rows: int) -> None:
    check(random(rows, 20_011, torch.bfloat16, rows))


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_wave_order_changes_nothing(order: str) -> None:
    logits = random(3, 9001, torch.bfloat16).round()
    with emulator.options(checks="all", wave_order=order, check_global_races=True):
        check(logits)


def test_a_row_is_read_once_and_the_winner_in_part_again() -> None:
    logits = random(2, 128_256, torch.bfloat16)
    with emulator.counters() as counted:
        argmax(logits)
    assert counted.launches == 1 and counted.scratch_bytes == 0
    assert logits.nbytes <= counted.tensors["logits"].loaded <= 1.1 * logits.nbytes
    assert counted.tensors["out"].stored == 2 * 8


def test_refusals_name_argument_value_and_rule() -> None:
    logits = torch.zeros(2, 16)
    for arguments, message in (
        ((logits[0],), r"logits must be \[M, V\]"),
        ((logits.double(),), "logits must be .*got float64"),
        ((logits[:, :0],), r"logits must have at least one column \(V\).*; got 0"),
        ((logits, torch.zeros(3, dtype=torch.int64)), r"out must be .*\[2\]"),
        ((logits, torch.zeros(2, dtype=torch.int32)), "out must be .*; got int32"),
        ((logits, torch.zeros(4, dtype=torch.int64)[::2]), "out must be contiguous"),
    ):
        with pytest.raises(GuardError, match=message):
            argmax(*arguments)
    columns = torch.zeros(16, 4)
    with pytest.raises(GuardError, match="memory"):
        argmax(columns.t(), columns.view(torch.int64).view(-1)[:4])


@pytest.mark.usefixtures("path")
def test_both_paths_say_which_they_are(path: str) -> None:
    logits = random(2, 64, torch.float32)
    assert hipforge.explain("argmax", logits).path == path
    check(logits)


def check_ranks(peers: list[Peers], parts: list[torch.Tensor]) -> None:
    want = torch.argmax(torch.cat(parts, 1), 1)
    with ThreadPoolExecutor(len(peers)) as threads:  # ranks wait for each other
        found = list(threads.map(argmax_of_ranks, parts, peers))
    assert all(torch.equal(got, want) for got in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_choose_what_all_columns_would(ranks: int, dtype: torch.dtype) -> None:
    peers, columns = Peers.on_one_device(ranks, 5, 8), 700
    for number, rows in enumerate((5, 1, 3, 5)):
        drawn = [random(rows, columns, dtype, 10 * number + rank) for rank in range(ranks)]
        check_ranks(peers, drawn)
        check_ranks(peers, [part.round() for part in drawn])  # equal ones on several ranks
    for place in (0, columns - 1):
        for value in (NAN, INF, -INF):
            parts = [random(2, columns, dtype, rank) for rank in range(ranks)]
            parts[-1][0, place] = parts[0][1, place] = parts[-1][1, place] = value
            check_ranks(peers, parts)
    check_ranks(peers, [torch.full((1, columns), -0.0 if rank == 0 else 0.0).to(dtype) for rank in range(ranks)])
    check_ranks(peers, [torch.full((2, columns), -INF).to(dtype)] * ranks)


def test_a_rank_that_does_not_choose_ends_the_launch() -> None:
    own = Peers.on_one_device(2, 1, 8, polls=50)[1]
    with pytest.raises(EmulatorFault, match=r"rank 1 of 2 gave up: .* 50 reads(.|\n)*trap"):
        argmax_of_ranks(random(1, 64, torch.bfloat16), own)
    own.buffer.zero_()
    units = torch.tensor([-1, 1, 3, 1], dtype=torch.int32)  # a NaN at 3 in call 1, of rank 0
    own.buffer[1, 0, 32 + 2 * 16 : 32 + 2 * 16 + 4] = units
    assert argmax_of_ranks(random(1, 64, torch.bfloat16), own).item() == 3
    own.buffer[1, 0, 0] = 2  # call 3 finds what call 1 left in its slot
    with pytest.raises(EmulatorFault, match="trap"):
        argmax_of_ranks(random(1, 64, torch.bfloat16), own)


def test_a_choice_of_ranks_refuses_what_is_not_its_memory() -> None:
    logits, own = torch.zeros(2, 16), Peers.alone(2, 8)
    for arguments, message in (
        ((logits[0], own), r"logits must be \[M, V\]"),
        ((logits.double(), own), "logits must be .*got float64"),
        ((torch.zeros(3, 16), own), "the buffer is for 2 rows; got 3"),
        ((logits, own._replace(rank=1)), "rank must be 0 to 0; got 1"),
        ((logits, own._replace(polls=0)), "polls must be 1 to"),
        ((logits, own._replace(addresses=torch.zeros(9, dtype=torch.int64))), "ranks must be 1 to 8; got 9"),
        ((logits, own._replace(buffer=own.buffer[:, :, :34].contiguous())), "made by hipforge"),
        ((logits, own._replace(buffer=torch.cat([own.buffer] * 3))), "this rank's or all 1 ranks'"),
    ):
        with pytest.raises(GuardError, match=message):
            argmax_of_ranks(*arguments)
    assert own.buffer.count_nonzero() == 0


def test_no_lane_of_a_choice_of_ranks_races_or_reads_outside_of_its_memory() -> None:
    with emulator.options(checks="all", wave_order="random", check_global_races=True):
        assert argmax_of_ranks(random(3, 9001, torch.bfloat16).round(), Peers.alone(3, 8)).shape == (3,)
