"""What every kernel of the skinny fp8 GEMM holds to, on both architectures, in every way that differs in code.

``every`` are all instances that are compiled and all ways to share k; ``few`` has one for each path: of the kernel that
splits k over waves, one tile and several, the last whole or in part, for each number of rows. What is one kernel's own
(its queue, counts, code, refusals, planted faults) is in the file named after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import pytest
import torch
from helpers.errors import relative
from helpers.fp8_skinny_cases import (
    ARCH,
    FP8,
    NAN_BYTE,
    ONE,
    OTHER,
    WAVE_SPLIT_SHAPES,
    exact,
    integers,
    normals,
)  # fmt: skip
from hypothesis import HealthCheck, assume, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.fp8_skinny_gemm import skinny_gemm_fp8_out, skinny_wave_split_out
from hipforge.ops.fp8_skinny_gemm.kernels import wave_split
from hipforge.ops.fp8_skinny_gemm.space import MAX_WAVES, OP_M, TILES, Configuration, refusal
from hipforge.ops.reference.skinny import skinny_gemm as reference

pytestmark = pytest.mark.gfx942

Split, Tensor = wave_split.Configuration, torch.Tensor
ORDERS = ("forward", "reverse", "random")


def _wave_split(out: Tensor, a: Tensor, b: Tensor, scale: Tensor, accumulate: bool, c: Split) -> None:
    workspace = wave_split.split_workspace(*out.shape, c, a.device)
    if workspace is not None:
        workspace.fill_(float("nan"))  # what is in it beforehand must not matter
    skinny_wave_split_out(out, a, b, scale, workspace, accumulate, *astuple(c))


def _queue(workgroups: int = 3, atomics: bool = False) -> Callable[..., None]:
    def run(out: Tensor, a: Tensor, b: Tensor, scale: Tensor, accumulate: bool, c: Configuration) -> None:
        workspace = None if atomics else torch.full((c.split_k * c.consumers, *out.shape), float("nan"))
        if atomics and not accumulate:
            out.zero_()  # they add to what is there
        roles = c.a_producers, c.b_producers, c.consumers, c.qsize
        skinny_gemm_fp8_out(
            out, a, b, scale, workspace, accumulate or atomics, c.split_k, *c.tile, *roles, workgroups
        )  # fmt: skip

    return run


@dataclass(frozen=True)
class Subject:
    """A kernel, its instances, the rows and columns of a tile, what parts of k must not exceed, and what n divides."""

    name: str
    every: tuple[Any, ...]
    few: tuple[Any, ...]
    run: Callable[..., None]
    tile: Callable[[Any], tuple[int, int]]
    parts: Callable[[Any, int], int]
    n_step: int = 1

    def call(self, c: Any, a: Tensor, b: Tensor, scale: Tensor = ONE, output: Tensor | None = None) -> Tensor:
        out = torch.full((a.shape[0], b.shape[1]), -123.0).half() if output is None else output
        self.run(out, a, b, scale, output is not None, c)
        return out

    def operands(self, m: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        return integers(m, -(-n // self.n_step) * self.n_step, k, seed)

    def exact(self, c: Any, m: int, n: int, k: int) -> None:
        a, b = self.operands(m, n, k)
        got, want = self.call(c, a, b), exact(a, b)
        assert torch.equal(got, want), (c, m, n, k)


def tiled(*tile: int) -> Configuration:
    """As many waves of each role as the tile's registers and the LDS of gfx942 let in, up to two."""
    possible = (Configuration(*tile, waves, waves, waves, waves) for waves in (2, 1))
    return next(c for c in possible if refusal(c, "gfx942", c.block_k) is None)


_INSTANCES = tuple(
    c
    for shape in WAVE_SPLIT_SHAPES
    for c in (*(Split(*shape, waves) for waves in wave_split.WAVES), *(Split(*shape, 1, s) for s in (2, 4, 8)),
              *(Split(*shape, 4, s) for s in (2, 4, 8)))
    if wave_split.refusal(c, 1 << 20) is None
)  # fmt: skip
_FEW_SHAPES = ((8, 8), (8, 24), (16, 16), (16, 24), (16, 64), (32, 8), (32, 32), (32, 64))
_QUEUES = tuple(c for tile in TILES for c in (tiled(*tile), replace(tiled(*tile), split_k=2)))
_FEW_QUEUES = tuple(tiled(*next(tile for tile in TILES if tile[0] == op_m)) for op_m in OP_M)
_OF_QUEUE = {"tile": lambda c: (c.tile_m, c.tile_n), "parts": lambda c, k: c.blocks(k)}
SUBJECTS = (
    Subject(
        "wave_split", _INSTANCES, tuple(Split(*shape, waves=2) for shape in _FEW_SHAPES), _wave_split,
        lambda c: (c.rows, c.columns), lambda c, k: wave_split.steps(k),
    ),
    Subject("queue", _QUEUES, (*_FEW_QUEUES, tiled(8, 3, 2, 4), tiled(8, 2, 5, 8)), _queue(), **_OF_QUEUE),
    Subject("atomics", _QUEUES, _FEW_QUEUES, _queue(atomics=True), **_OF_QUEUE, n_step=2),
)  # fmt: skip


def instances(which: str, subjects: tuple[Subject, ...] = SUBJECTS) -> pytest.MarkDecorator:
    found = [
        pytest.param(subject, c, id=f"{subject.name}-{'-'.join(map(str, astuple(c)))}")
        for subject in subjects
        for c in getattr(subject, which)
    ]
    return pytest.mark.parametrize(("subject", "c"), found)


@instances("every")
def test_every_instance_is_exact_and_reads_what_it_needs_once(subject: Subject, c: Any) -> None:
    # 17 steps, the last partial: each wave has other steps than its neighbour. A tile and a bit down, two along; less
    # than a row, a column and a block of the queue's k; one less. Each shape in one order, over instances in all.
    (rows, columns), first = subject.tile(c), subject.every.index(c)
    shapes = ((rows + 5, 2 * columns + 5, 16 * 128 + 32), (1, 1, 32), (rows - 1, columns - 1, 352))
    for number, (m, n, k) in enumerate(shapes, first):
        order = ORDERS[number % len(ORDERS)]
        fitting = replace(c, split_k=min(c.split_k, 1 << (subject.parts(c, k).bit_length() - 1)))
        a, b = subject.operands(m, n, k)
        with emulator.options(checks="all", wave_order=order), emulator.counters() as counted:
            got = subject.call(fitting, a, b)
        assert torch.equal(got, exact(a, b)), (m, n, k)
        assert counted.tensors["b"].loaded == b.numel() * math.ceil(m / rows)
        assert counted.tensors["a"].loaded == a.numel() * math.ceil(b.shape[1] / columns)
        assert counted.lds_bank_conflicts == 0


@instances("few", SUBJECTS[:1])
def test_turns_of_one_instruction_change_nothing(subject: Subject, c: Any) -> None:
    with emulator.options(checks="all", quantum=1):
        subject.exact(replace(c, waves=8, split_k=2), *subject.tile(c), 1280)


@instances("few")
def test_every_number_of_steps_and_kind_of_tail_is_exact(subject: Subject, c: Any) -> None:
    rows, columns = subject.tile(c)
    # 2880: gpt-oss
    for k in (32, 64, 96, 128, 160, 256, 384, 512, 640, 768, 896, 1024, 1056, 1152, 1920, 2112, 2880, 3232):
        for waves in (1, 2) if subject.name == "wave_split" else (None,):
            subject.exact(replace(c, waves=waves) if waves else c, rows, columns + 1, k)


@instances("few")
def test_every_m_and_n_is_exact(subject: Subject, c: Any) -> None:
    for m in (*range(1, 18), 31, 32, 33, 48, 65, 100):
        subject.exact(c, m, 20, 480)
    for n in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 63, 65, 129):
        subject.exact(c, 3, n, 352)


@instances("few")
def test_a_nan_makes_exactly_its_outputs_nan(subject: Subject, c: Any) -> None:
    for at in (0, 15, 16, 63, 64, 127, 128, 511, 512, 543):
        a, b = subject.operands(3, 21, 544)
        want = exact(a, b)
        a.view(torch.uint8)[2, at] = NAN_BYTE
        b.view(torch.uint8)[at, 13] = NAN_BYTE
        want[2, :] = want[:, 13] = float("nan")
        torch.testing.assert_close(subject.call(c, a, b), want, rtol=0, atol=0, equal_nan=True)


@instances("few")
def test_neighbouring_bytes_never_take_part_and_are_never_loaded(subject: Subject, c: Any) -> None:
    for m, k in ((1, 32), (17, 96), (1, 128), (17, 544), (17, 608), (1, 1056)):
        narrow_a, narrow_b = subject.operands(m, 21, k)
        n = narrow_b.shape[1]
        padded = torch.full((n + 2, k + 48), NAN_BYTE, dtype=torch.uint8)
        padded[1:-1, :k] = narrow_b.t().contiguous().view(torch.uint8)
        around = torch.full((m + 2, k), NAN_BYTE, dtype=torch.uint8)
        around[1:-1] = narrow_a.view(torch.uint8)
        a, b = around[1:-1].view(FP8), padded[1:-1].view(FP8)[:, :k].t()
        with emulator.options(checks="all"), emulator.counters() as counted:
            got = subject.call(c, a, b)
        assert torch.equal(got, exact(narrow_a, narrow_b))
        assert counted.tensors["b"].loaded == n * k * math.ceil(m / subject.tile(c)[0])


@instances("few")
def test_results_go_or_are_added_to_their_place_alone(subject: Subject, c: Any) -> None:
    for n, start, split_k in ((12, 16, 1), (13, 16, 2), (12, 17, 2), (13, 17, 1)):  # wide stores need alignment
        start -= start % subject.n_step  # as atomics of pairs do
        a, b = subject.operands(19, n, 1056)
        chosen, n = replace(c, split_k=min(split_k, subject.parts(c, 1056))), b.shape[1]
        for factor in (None, torch.tensor([0.5])):
            memory = torch.full((start + 19 * n + 32,), 7.0).half()
            out = memory[start : start + 19 * n].view(19, n)
            if factor is not None:
                out.copy_(torch.arange(19 * n).view(19, n))
            want = exact(a, b) if factor is None else exact(a, b, factor, out)
            subject.run(out, a, b, ONE if factor is None else factor, factor is not None, chosen)
            assert torch.equal(out, want)
            assert (memory[:start] == 7).all() and (memory[start + 19 * n :] == 7).all()


@pytest.mark.parametrize(("m", "split_k"), ((1, 1), (8, 2), (16, 4), (32, 8)))
@pytest.mark.parametrize("subject", SUBJECTS[:2], ids=lambda subject: subject.name)
def test_random_data_is_close_to_float64_and_depends_on_no_order(subject: Subject, m: int, split_k: int) -> None:
    # One fp16 rounding is at most 2^-11 = 4.9e-4 of each value; fp32 sums of 4096 products add less than 2^-12.
    a, b, scale = normals(m, 80, 4096, seed=m)
    want = reference(a, b, scale, None, torch.float64, torch.float64)
    c = replace(next(c for c in subject.few if m <= subject.tile(c)[0]), split_k=split_k)
    first = subject.call(c, a, b, scale)
    assert relative(first, want) <= 2.0**-11 + 2.0**-12
    for order in ORDERS:
        with emulator.options(checks="all", wave_order=order, seed=3):
            assert torch.equal(subject.call(c, a, b, scale), first)
    if subject.name == "queue":
        for workgroups in (1, 2, 5):
            assert torch.equal(replace(subject, run=_queue(workgroups)).call(c, a, b, scale), first)


def test_atomics_stay_within_one_fp16_rounding_per_addition() -> None:
    for m in (8, 16):
        a, b, scale = normals(m, 96, 4096, seed=m)
        want = reference(a, b, scale, None, torch.float64, torch.float64)
        got = SUBJECTS[2].call(Configuration(m, split_k=4), a, b, scale)
        # Eight pairs of roundings (each summand and each sum), every one 2^-11 of a value no larger than the partial
        # sums, whose norm is at most that of the result in expectation.
        assert relative(got, want) <= 16 * 2.0**-11


def test_a_split_of_k_is_one_launch_that_a_graph_can_replay() -> None:
    a, b = integers(9, 40, 1024)
    c, out = Split(16, 16, 2, 8), torch.empty(9, 40).half()
    workspace = wave_split.split_workspace(9, 40, c, a.device)
    skinny_wave_split_out(out, a, b, ONE, workspace, False, *astuple(c))  # a module is not loaded in a capture
    with emulator.capture() as graph:
        skinny_wave_split_out(out, a, b, ONE, workspace, False, *astuple(c))
    assert len(graph.nodes) == 1
    for _ in range(3):  # each replay has the number of the launch that was captured
        a.view(torch.uint8).copy_(a.view(torch.uint8).flip(0))
        with emulator.counters() as counted:
            graph.replay()
        assert torch.equal(out, exact(a, b))
        assert counted.tensors["out"].stored == 2 * out.numel()  # one work-group of a tile was the last


def test_a_workspace_may_hold_what_another_launch_left() -> None:
    few, many = integers(5, 40, 1024), integers(30, 80, 2048)
    largest = Split(32, 64, 2, 8)
    workspace = wave_split.split_workspace(30, 80, largest, few[0].device)
    for (a, b), c in ((many, largest), (few, Split(8, 8, 2, 2)), (many, Split(32, 32, 4, 4)),
                      (few, Split(16, 16, 1, 8))):  # fmt: skip
        out = torch.empty(a.shape[0], b.shape[1]).half()
        with emulator.counters() as counted:
            skinny_wave_split_out(out, a, b, ONE, workspace, False, *astuple(c))
        assert torch.equal(out, exact(a, b))
        assert counted.tensors["out"].stored == 2 * out.numel()


@st.composite
def configurations(draw: st.DrawFn, k: int) -> tuple[Subject, Any]:
    """A kernel and a configuration that its rules accept for k."""
    subject = draw(st.sampled_from(SUBJECTS))
    if subject.name == "wave_split":
        c = replace(draw(st.sampled_from(subject.every)), split_k=draw(st.sampled_from(wave_split.SPLIT_K)))
        assume(wave_split.refusal(c, k) is None)
        return subject, c
    tile, qsize = Configuration(*draw(st.sampled_from(TILES))), draw(st.integers(1, 4))
    most = qsize * tile.a_lanes, qsize * tile.b_lanes, qsize
    waves = [draw(st.integers(1, each)) for each in most]
    assume(sum(waves) <= MAX_WAVES)
    c = Configuration(*tile.tile, *waves, qsize, draw(st.integers(1, min(4, tile.blocks(k)))))
    assume(refusal(c, ARCH, k) is None)
    return replace(subject, run=_queue(draw(st.integers(1, 7)), atomics=subject.name == "atomics")), c


def any_call(data: st.DataObject) -> None:
    """Integers of -1 to 1: sums of at most 1600 products and what they are added to are below 2^11, exact in fp16."""
    k, m, n = 32 * data.draw(st.integers(1, 50)), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 150))
    subject, c = data.draw(configurations(k))
    n, seed, padding = n + n % subject.n_step, data.draw(st.integers(0, 2**16)), data.draw(st.sampled_from([0, 16, 64]))
    generator = torch.Generator().manual_seed(seed)
    a, values = (torch.randint(-1, 2, (rows, k), generator=generator).float().to(FP8) for rows in (m, n))
    stored = torch.full((n, k + padding), NAN_BYTE, dtype=torch.uint8)
    stored[:, :k] = values.view(torch.uint8)
    output = torch.randint(-9, 10, (m, n), generator=generator).half()
    want = reference(a, values.t(), ONE, output, torch.float64, torch.float64)
    assert want.abs().max() < 2**11
    with emulator.options(checks="all", wave_order=data.draw(st.sampled_from(ORDERS)), seed=seed):
        got = subject.call(c, a, stored.view(FP8)[:, :k].t(), ONE, output)
    assert torch.equal(got.double(), want)


COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.filter_too_much, HealthCheck.too_slow]}


@settings(max_examples=80, derandomize=True, **COMMON)
@drawn(st.data())
def test_any_call_is_exact(data: st.DataObject) -> None:
    any_call(data)


@pytest.mark.full
@settings(max_examples=500, **COMMON)
@drawn(st.data())
def test_more_calls_are_exact(data: st.DataObject) -> None:
    any_call(data)


@pytest.mark.full
@pytest.mark.parametrize("rows", wave_split.ROWS)
def test_the_last_columns_of_two_gigabytes_are_read(rows: int) -> None:
    n, k, pitch = 127, 1024, 1 << 24
    storage = torch.zeros((n - 1) * pitch + k, dtype=torch.uint8)
    one = int(torch.ones(1).to(FP8).view(torch.uint8))
    a = torch.zeros(2, k, dtype=torch.uint8)
    a[1] = one
    b = storage.as_strided((k, n), (1, pitch))
    b[-1, -1] = b[0, -2] = b[5, 0] = one
    for columns in (8, 32):
        got = SUBJECTS[0].call(Split(rows, columns, 2), a.view(FP8), b.view(FP8))
        assert got.nonzero().tolist() == [[1, 0], [1, n - 2], [1, n - 1]]


@pytest.mark.parametrize("c", _FEW_QUEUES, ids=lambda c: c.op_m)
def test_lanes_past_the_last_column_load_nothing_however_large_the_pitch(c: Configuration) -> None:
    # 15 times this pitch is 2^32 plus an offset inside b: what wraps would be read.
    n, k, pitch = 2, 32, 301_989_888
    a, narrow = integers(1, n, k)
    b = torch.empty(pitch + k, dtype=torch.uint8).as_strided((k, n), (1, pitch)).view(FP8)
    b.copy_(narrow)
    with emulator.counters() as counted:
        got = SUBJECTS[1].call(c, a, b)
    assert torch.equal(got, exact(a, narrow))
    assert counted.tensors["b"].loaded == n * k


RAW = {
    "queue": (skinny_gemm_fp8_out, (1, 8, 1, 2, 4, 1, 1, 1, 1, 1), (1, 4, 40)),
    "wave_split": (skinny_wave_split_out, (8, 8, 2, 2), (40 * 256 // 4,)),
}


@pytest.mark.parametrize("name", RAW)
def test_operands_have_one_layout(name: str) -> None:
    raw, given, workspace_shape = RAW[name]
    a, b = integers(4, 40, 256)
    out, space = torch.zeros(4, 40).half(), torch.zeros(workspace_shape)
    for operands, message in (
        ((out, a, b.contiguous()), "b must be column-major"), ((out[:3], a, b), "out must be contiguous float16"),
        ((out, a.float().to(OTHER), b), "a must be contiguous float8"),
    ):  # fmt: skip
        with pytest.raises(GuardError, match=message):
            raw(*operands, ONE, space, name == "queue", *given)
