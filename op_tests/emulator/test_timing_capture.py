"""Recording of work-groups for the model of time: what is executed, what is recorded, what counts as a repetition."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from hipforge import emulator
from hipforge.emulator.timing import estimate
from hipforge.emulator.timing.capture import RUN, SKIP, WHOLE, Capture
from hipforge.emulator.timing.machines import MI355X
from hipforge.emulator.timing.model import DEFAULT_SAMPLING, WHOLE_LAUNCH, launch_time, simulate
from hipforge.errors import ConfigError, GuardError

SOURCE = r"""
#include "hip.h"
__global__ void twice(int* out, const int* in) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  out[i] = 2 * in[i];
}
__global__ void gather(int* out, const int* in, const int* where) {
  out[blockIdx.x * 64 + threadIdx.x] = in[where[blockIdx.x] + threadIdx.x];
}
__global__ void uneven(int* out, const int* count) {
  int sum = 0;
  for (int i = 0; i < count[blockIdx.x]; ++i) sum = sum * 3 + out[blockIdx.x * 64 + threadIdx.x];
  out[blockIdx.x * 64 + threadIdx.x] = sum;
}
// A part of the result, and a word of every work-group's own at the end of the same buffer.
__global__ void leaves_a_word(int* out, const int* in) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  out[i] = in[i];
  if (threadIdx.x == 0) atomicAdd(out + gridDim.x * 64 + blockIdx.x * 16, 1);
}
// Twenty words at irregular distances.
__global__ void scatters(int* out, const int* where) {
  if (threadIdx.x == 0)
    for (int i = 0; i < 20; ++i) out[where[i] * (blockIdx.x + 1)] = i;
}
"""
GROUPS = 12


def run_twice(code: emulator.CodeObject) -> torch.Tensor:
    out, given = torch.zeros(GROUPS * 64, dtype=torch.int32), torch.arange(GROUPS * 64, dtype=torch.int32)
    emulator.launch(code.kernels["twice"], GROUPS, 64, [out, given])
    return out.view(GROUPS, 64)


def test_recording_changes_no_result_and_counts_what_the_counters_count(code: emulator.CodeObject) -> None:
    capture = Capture()
    with emulator.counters() as counted, capture.recording():
        out = run_twice(code)
    assert torch.equal(out.flatten(), 2 * torch.arange(GROUPS * 64, dtype=torch.int32))
    (launch,) = capture.launches()
    assert (launch["groups"], launch["recorded"], launch["whole"]) == (GROUPS, GROUPS, GROUPS)
    assert launch["templates"] == [counted.wave_instructions // GROUPS]
    assert launch["groups_per_cu"] == counted.kernels[0].occupancy * 4


def test_skipped_groups_do_not_run_and_unrecorded_ones_do(code: emulator.CodeObject) -> None:
    capture = Capture()
    with capture.recording({0: WHOLE, 5: RUN}, others=SKIP):
        out = run_twice(code)
    ran = out.ne(0).any(dim=1).nonzero().flatten().tolist()
    assert ran == [0, 5]
    assert capture.launches()[0]["recorded"] == 1


def test_a_beginning_is_matched_with_the_group_that_it_repeats(code: emulator.CodeObject) -> None:
    capture = Capture()
    with capture.recording({0: WHOLE}, others=SKIP):
        run_twice(code)
    prefix = capture.prefix(0, 0)
    assert 0 < prefix < capture.launches()[0]["templates"][0]
    with capture.recording(dict.fromkeys(range(1, GROUPS), prefix), others=SKIP, merge=True):
        out = run_twice(code)
    assert not out[1:].any()  # they ended before their stores
    (launch,) = capture.launches()
    assert (launch["recorded"], launch["whole"], launch["unmatched"]) == (GROUPS, 1, [])


def test_equal_code_at_irregular_addresses_shares_a_template(code: emulator.CodeObject) -> None:
    where = torch.tensor([i * i * 64 for i in range(GROUPS)], dtype=torch.int32)
    given = torch.arange(GROUPS * GROUPS * 64, dtype=torch.int32)
    # The index of a work-group is in one of two 64-byte sectors, so `where` is read at two addresses.
    out = torch.zeros(GROUPS * 64, dtype=torch.int32)
    capture = Capture()
    with capture.recording():
        emulator.launch(code.kernels["gather"], GROUPS, 64, {"out": out, "in": given, "where": where})
    (launch,) = capture.launches()
    assert len(launch["templates"]) == 1
    assert launch["unmatched"] == []


def test_another_number_of_iterations_is_another_template(code: emulator.CodeObject) -> None:
    counts = torch.tensor([1 + i % 3 for i in range(GROUPS)], dtype=torch.int32)
    out = torch.ones(GROUPS * 64, dtype=torch.int32)
    capture = Capture()
    with capture.recording():
        emulator.launch(code.kernels["uneven"], GROUPS, 64, [out, counts])
    assert len(capture.launches()[0]["templates"]) == 3


def test_rounds_of_work_groups_that_end_at_once_are_not_extrapolated_from_others(code: emulator.CodeObject) -> None:
    groups = 32 * MI355X.cu_count
    counts = torch.tensor([20 if i < groups // 2 else 0 for i in range(groups)], dtype=torch.int32)
    out = torch.ones(groups * 64, dtype=torch.int32)
    capture = Capture()
    with capture.recording():
        emulator.launch(code.kernels["uneven"], groups, 64, [out, counts], dynamic_lds=128 << 10)  # one a CU
    sampled, whole = (launch_time(capture, 0, MI355X, sampling=of) for of in (DEFAULT_SAMPLING, WHOLE_LAUNCH))
    assert sampled.simulation["total_rounds"] > DEFAULT_SAMPLING.rounds[1]
    assert sampled.cycles == whole.cycles


def leave_words(code: emulator.CodeObject, capture: Capture, **policy: dict[int, int]) -> torch.Tensor:
    out, given = torch.zeros(GROUPS * 80, dtype=torch.int32), torch.arange(GROUPS * 64, dtype=torch.int32)
    with capture.recording(**policy):
        emulator.launch(code.kernels["leaves_a_word"], GROUPS, 64, [out, given])
    return out


def test_a_few_accesses_that_move_otherwise_share_a_stream_and_keep_their_addresses(code: emulator.CodeObject) -> None:
    shared, apart = Capture(), Capture()
    out = leave_words(code, shared)
    assert out[GROUPS * 64 :: 16].eq(1).all()
    # A pass that names work-groups may record beginnings, so it lets no access move otherwise.
    leave_words(code, apart, chosen={0: WHOLE})
    assert [len(one.launches()[0]["templates"]) for one in (shared, apart)] == [1, GROUPS]
    assert estimate(shared).as_dict() == estimate(apart).as_dict()


def test_many_accesses_that_move_otherwise_are_another_stream(code: emulator.CodeObject) -> None:
    where, capture = torch.tensor([16 * i * i for i in range(20)], dtype=torch.int32), Capture()
    with capture.recording():
        emulator.launch(code.kernels["scatters"], 3, 64, [torch.zeros(20000, dtype=torch.int32), where])
    assert len(capture.launches()[0]["templates"]) == 3


def test_a_recording_without_room_says_so(code: emulator.CodeObject) -> None:
    capture = Capture(room_mib=0)
    with capture.recording():
        run_twice(code)
    assert capture.launches()[0]["recorded"] == 1
    with pytest.raises(GuardError, match=r"group 8 was not recorded: the recording is full .* Capture\(room_mib="):
        estimate(capture)


def test_a_capture_survives_a_file(code: emulator.CodeObject, tmp_path: Path) -> None:
    capture = Capture()
    with capture.recording():
        run_twice(code)
    capture.save(tmp_path / "twice")
    assert Capture.read(tmp_path / "twice").launches() == capture.launches()
    words = Capture()
    leave_words(code, words)
    words.save(tmp_path / "words")
    assert estimate(Capture.read(tmp_path / "words")).as_dict() == estimate(words).as_dict()


def test_a_file_that_is_no_capture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("kernel,us\n")
    with pytest.raises(GuardError, match="not a capture of this version"):
        Capture.read(tmp_path / "text")


def test_a_damaged_capture_is_refused(code: emulator.CodeObject, tmp_path: Path) -> None:
    """Every byte counts: the numbers inside are sizes of each other and indices into each other."""
    capture = Capture()
    with capture.recording():
        run_twice(code)
    file = tmp_path / "capture"
    capture.save(file)
    whole = file.read_bytes()
    places = random.Random(1)
    for _ in range(200):
        damaged = bytearray(whole)
        at = places.randrange(len(whole))
        if places.random() < 0.3:
            del damaged[at:]
        else:
            damaged[at] ^= 1 << places.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(GuardError, match="or damaged"):
            Capture.read(file)
    file.write_bytes(whole)
    assert Capture.read(file).launches() == capture.launches()


def test_a_launch_that_is_not_there_is_refused(code: emulator.CodeObject) -> None:
    capture = Capture()
    with capture.recording():
        run_twice(code)
    for launch in (1, 99, -1):
        with pytest.raises(GuardError, match=f"has 1 launches, from number 0; got {launch}"):
            capture.prefix(launch, 0)
        with pytest.raises(GuardError, match=f"has 1 launches, from number 0; got {launch}"):
            simulate(capture, launch, MI355X)
    with pytest.raises(GuardError, match="launch 0 has 1 templates, from number 0; got 7"):
        capture.prefix(0, 7)
    with pytest.raises(GuardError, match="iterations must be 0 for all, or at least 2; got 1"):
        simulate(capture, 0, MI355X, iterations=1)


@pytest.mark.parametrize("name", MI355X.parameters)
def test_a_machine_of_awkward_values_is_computed_or_refused(code: emulator.CodeObject, name: str) -> None:
    capture = Capture()
    with capture.recording():
        run_twice(code)
    refused = 0
    for value in (0.0, -1.0, 0.5, 1e-300, 1e12, math.inf, math.nan):
        try:
            found = simulate(capture, 0, MI355X.with_values({name: value}))
        except ConfigError as error:
            refused += 1
            assert name in str(error)
        else:
            assert found["cycles"] > 0
    assert refused >= 3  # negative, infinite and no number
