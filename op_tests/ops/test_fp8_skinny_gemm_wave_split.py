"""The skinny fp8 GEMM with k split over the waves of a work-group, on both architectures: exact data, tails, faults."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
import torch
from helpers.fp8_skinny_cases import ARCH, FP8, ONE, OTHER, exact, integers, normals, relative_error
from helpers.planted_faults import planted

from hipforge import emulator, jit
from hipforge.errors import EmulatorFault, GuardError
from hipforge.ops.fp8_skinny_gemm import skinny_wave_split, skinny_wave_split_out
from hipforge.ops.fp8_skinny_gemm.kernels.wave_split import (
    ROWS,
    RULES,
    SPLIT_K,
    WAVES,
    Configuration,
    refusal,
    split_workspace,
)
from hipforge.ops.reference.skinny import skinny_gemm as reference

pytestmark = pytest.mark.gfx942

NAN_BYTE = 0x80 if ARCH == "gfx942" else 0x7F
SHAPES = tuple((rows, columns) for rows in ROWS for columns in (8, 16, 24, 32, 64) if columns <= 4 * max(rows, 8))
INSTANCES = tuple(
    c for shape in SHAPES for waves in WAVES if refusal(c := Configuration(*shape, waves), 1 << 20) is None
)


def run(
    a: torch.Tensor, b: torch.Tensor, c: Configuration, scale: torch.Tensor = ONE, output: torch.Tensor | None = None
) -> torch.Tensor:
    return skinny_wave_split(a, b, scale, output, *astuple(c))


@pytest.mark.parametrize("order", ("forward", "reverse", "random"))
@pytest.mark.parametrize("c", INSTANCES, ids=str)
def test_every_instance_is_exact_on_integers_under_all_checks(c: Configuration, order: str) -> None:
    # 17 steps, the last partial: each wave has other steps than its neighbour; a tile and a bit down, two along.
    a, b = integers(c.rows + 5, 2 * c.columns + 5, 16 * 128 + 32)
    with emulator.options(checks="all", wave_order=order):
        assert torch.equal(run(a, b, c), exact(a, b))


@pytest.mark.parametrize("split_k", SPLIT_K[1:])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_of_k_in_several_work_groups_are_exact_under_all_checks(shape: tuple[int, int], split_k: int) -> None:
    rows, columns = shape
    for waves, k in ((1, 1024), (4, 1248)):
        a, b = integers(rows + 1, columns + 3, k)
        with emulator.options(checks="all", wave_order="random"):
            assert torch.equal(run(a, b, Configuration(rows, columns, waves, split_k)), exact(a, b))


@pytest.mark.parametrize("shape", SHAPES)
def test_turns_of_one_instruction_change_nothing(shape: tuple[int, int]) -> None:
    a, b = integers(shape[0], shape[1], 1280)
    with emulator.options(checks="all", quantum=1):
        assert torch.equal(run(a, b, Configuration(*shape, waves=8, split_k=2)), exact(a, b))


@pytest.mark.parametrize("k", (32, 64, 96, 128, 160, 256, 384, 512, 640, 768, 896, 1024, 1056, 1152, 1920, 2112, 3232))
def test_every_number_of_steps_and_kind_of_tail_is_exact(k: int) -> None:
    for (rows, columns), waves in ((shape, waves) for shape in SHAPES for waves in (1, 2)):
        a, b = integers(rows, columns + 1, k)
        assert torch.equal(run(a, b, Configuration(rows, columns, waves)), exact(a, b))


@pytest.mark.parametrize("m", (*range(1, 18), 31, 32, 33, 48, 65, 100))
def test_every_m_is_taken_as_it_is(m: int) -> None:
    a, b = integers(m, 20, 480)
    for rows in ROWS:
        assert torch.equal(run(a, b, Configuration(rows, 16)), exact(a, b))


@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 63, 65))
def test_every_n_is_exact(n: int) -> None:
    a, b = integers(3, n, 352)
    for shape in SHAPES:
        assert torch.equal(run(a, b, Configuration(*shape, waves=2)), exact(a, b))


@pytest.mark.parametrize("k_index", (0, 15, 16, 63, 64, 127, 128, 511, 512, 543))
def test_a_nan_makes_exactly_its_outputs_nan(k_index: int) -> None:
    a, b = integers(3, 21, 544)
    want = exact(a, b)
    a.view(torch.uint8)[2, k_index] = NAN_BYTE
    b.view(torch.uint8)[k_index, 13] = NAN_BYTE
    want[2, :] = want[:, 13] = float("nan")
    for shape in SHAPES:
        torch.testing.assert_close(run(a, b, Configuration(*shape, waves=2)), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("k", (32, 96, 128, 544, 1056))
@pytest.mark.parametrize("m", (1, 17))
def test_neighbouring_bytes_never_take_part_and_are_never_loaded(m: int, k: int) -> None:
    n, pitch = 21, k + 48
    narrow_a, narrow_b = integers(m, n, k)
    padded = torch.full((n, pitch), NAN_BYTE, dtype=torch.uint8)
    padded[:, :k] = narrow_b.t().contiguous().view(torch.uint8)
    around = torch.full((m + 2, k), NAN_BYTE, dtype=torch.uint8)
    around[1:-1] = narrow_a.view(torch.uint8)
    a, b = around[1:-1].view(FP8), padded.view(FP8)[:, :k].t()
    for shape in SHAPES:
        with emulator.counters() as counted:
            got = run(a, b, Configuration(*shape, waves=2))
        assert torch.equal(got, exact(narrow_a, narrow_b))
        assert counted.tensors["b"].loaded == n * k * math.ceil(m / shape[0])


@pytest.mark.parametrize("n", (12, 13))
@pytest.mark.parametrize("split_k", (1, 2))
def test_output_outside_the_result_is_untouched(n: int, split_k: int) -> None:
    a, b = integers(3, n, 256)
    for start in (16, 17):  # with and without the alignment that wide stores need
        memory = torch.full((96,), 7.0).half()
        out = memory[start : start + 3 * n].view(3, n)
        c = Configuration(8, 8, 2, split_k)
        skinny_wave_split_out(out, a, b, ONE, split_workspace(3, n, c, a.device), False, *astuple(c))
        assert torch.equal(out, exact(a, b))
        assert (memory[:start] == 7).all() and (memory[start + 3 * n :] == 7).all()


@pytest.mark.parametrize("split_k", (1, 4))
@pytest.mark.parametrize("n", (48, 45))
def test_results_are_added_to_the_output(n: int, split_k: int) -> None:
    a, b = integers(19, n, 544)
    for shape in SHAPES:
        output = torch.arange(19 * n).reshape(19, n).half()
        want = exact(a, b, torch.tensor([0.5]), output)
        got = run(a, b, Configuration(*shape, 2, split_k), torch.tensor([0.5]), output)
        assert got is output and torch.equal(output, want)


@pytest.mark.parametrize(("m", "split_k"), ((1, 1), (8, 2), (16, 4), (32, 8)))
def test_random_data_is_close_to_float64_and_depends_on_no_order(m: int, split_k: int) -> None:
    # One fp16 rounding is at most 2^-11 = 4.9e-4 of each value; fp32 sums of 4096 products add less than 2^-12.
    a, b, scale = normals(m, 80, 4096, seed=m)
    want = reference(a, b, scale, None, torch.float64, torch.float64)
    c = Configuration(next(rows for rows in ROWS if m <= rows), 16, 4, split_k)
    first = run(a, b, c, scale)
    assert relative_error(first, want) <= 2.0**-11 + 2.0**-12
    for order in ("forward", "reverse", "random"):
        with emulator.options(checks="all", wave_order=order, seed=3):
            assert torch.equal(run(a, b, c, scale), first)


def test_a_split_of_k_is_one_launch_that_a_graph_can_replay() -> None:
    a, b = integers(9, 40, 1024)
    c = Configuration(16, 16, 2, 8)
    run(a, b, c)  # a module is not loaded in a capture
    with emulator.capture() as graph:
        out = run(a, b, c)
    assert len(graph.nodes) == 1
    for _ in range(3):  # each replay has the number of the launch that was captured
        a.view(torch.uint8).copy_(a.view(torch.uint8).flip(0))
        with emulator.counters() as counted:
            graph.replay()
        assert torch.equal(out, exact(a, b))
        assert counted.tensors["out"].stored == 2 * out.numel()  # one work-group of a tile was the last


def test_a_workspace_may_hold_what_another_launch_left() -> None:
    few, many = integers(5, 40, 1024), integers(30, 80, 2048)
    largest = Configuration(32, 64, 2, 8)
    workspace = split_workspace(30, 80, largest, few[0].device)
    assert workspace is not None
    for (a, b), c in (
        (many, largest),
        (few, Configuration(8, 8, 2, 2)),
        (many, Configuration(32, 32, 4, 4)),
        (few, Configuration(16, 16, 1, 8)),
    ):
        out = torch.empty(a.shape[0], b.shape[1]).half()
        with emulator.counters() as counted:
            skinny_wave_split_out(out, a, b, ONE, workspace, False, *astuple(c))
        assert torch.equal(out, exact(a, b))
        assert counted.tensors["out"].stored == 2 * out.numel()


@pytest.mark.parametrize("rows", ROWS)
def test_a_part_is_complete_and_past_the_caches_before_its_work_group_meets_another(rows: int) -> None:
    # What the emulator cannot show: its stores are complete at once and its caches are coherent.
    module = jit.load("module_fp8_skinny_gemm_wave_split", {"HF_ROWS": rows}, ARCH)
    for kernel in emulator.CodeObject(module.path / "module.so").kernels.values():
        code = [line.split(": ", 1)[1] for line in kernel.disassembly().splitlines()]
        last = max(i for i, text in enumerate(code) if text.startswith("buffer_store") and text.endswith("sc1"))
        meeting = next(i for i, text in enumerate(code) if text.startswith("global_atomic_swap_x2"))
        barrier = next(i for i in range(last, meeting) if code[i] == "s_barrier")
        assert "s_waitcnt vmcnt(0)" in code[last:barrier]
        assert any(text.startswith("buffer_load") and text.endswith("sc0 sc1") for text in code[meeting:])


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_loaded_once_in_one_launch(shape: tuple[int, int]) -> None:
    rows, columns = shape
    a, b = integers(rows, 64, 2048)
    c = Configuration(rows, columns, 4)
    with emulator.counters() as counted:
        run(a, b, c)
    groups, tiles = math.ceil(64 / columns), rows // c.edge * c.column_tiles
    assert counted.tensors["b"].loaded == 64 * 2048
    assert counted.tensors["a"].loaded == groups * rows * 2048
    # 64 k of a tile are two instructions, half of whose products count with an edge of 8; gfx950 has one for 128 k.
    each = {("gfx942", 8): 2, ("gfx942", 16): 4, ("gfx950", 8): 2, ("gfx950", 16): 1}[ARCH, c.edge]
    assert counted.mfma_count == 16 * groups * tiles * each
    assert counted.launches == 1 and not counted.scratch_bytes and not counted.lds_bank_conflicts


# Wave-instructions of a work-group of 8 waves at k = 16,384, by rows and columns.
RECORDED = {
    "gfx942": {
        (8, 8): 1690, (8, 16): 2220, (8, 24): 3110, (8, 32): 3110,
        (16, 8): 2260, (16, 16): 2260, (16, 24): 3190, (16, 32): 3190, (16, 64): 5260,
        (32, 8): 3250, (32, 16): 3250, (32, 24): 5050, (32, 32): 5050, (32, 64): 8500,
    },
    "gfx950": {
        (8, 8): 1680, (8, 16): 2220, (8, 24): 3110, (8, 32): 3110,
        (16, 8): 1800, (16, 16): 1800, (16, 24): 2300, (16, 32): 2300, (16, 64): 3540,
        (32, 8): 2430, (32, 16): 2430, (32, 24): 3290, (32, 32): 3290, (32, 64): 5080,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_one_work_group_takes_no_more_instructions_than_recorded(shape: tuple[int, int]) -> None:
    a, b, scale = normals(*shape, 16384)
    with emulator.counters() as counted:
        run(a, b, Configuration(*shape, 8), scale)
    assert counted.wave_instructions <= RECORDED[ARCH][shape]


@pytest.mark.full
@pytest.mark.parametrize("rows", ROWS)
def test_the_last_columns_of_two_gigabytes_are_read(rows: int) -> None:
    n, k, pitch = 127, 1024, 1 << 24
    storage = torch.zeros((n - 1) * pitch + k, dtype=torch.uint8)
    one = int(torch.ones(1).to(FP8).view(torch.uint8))
    a = torch.zeros(2, k, dtype=torch.uint8)
    a[1] = one
    b = storage.as_strided((k, n), (1, pitch))
    b[-1, -1] = b[0, -2] = b[5, 0] = one
    for columns in (8, 32):
        got = run(a.view(FP8), b.view(FP8), Configuration(rows, columns, 2))
        assert got.nonzero().tolist() == [[1, 0], [1, n - 2], [1, n - 1]]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 24}, "rows must be 8, 16 or 32; got 24"),
        ({"columns": 12}, "columns must be a multiple of 8, at most 32 with 8 rows; got 12"),
        ({"columns": 64}, "columns must be a multiple of 8, at most 32 with 8 rows; got 64"),
        ({"waves": 3}, "waves must be 1, 2, 4, 8 or 16, at most 16 with 8 rows and 8 columns; got 3"),
        ({"rows": 32, "waves": 16}, "waves must be 1, 2, 4, 8 or 16, at most 8 with 32 rows and 8 columns; got 16"),
        ({"split_k": 3}, "split_k must be 1, 2, 4 or 8 work-groups; got 3"),
        ({"split_k": 4}, "split_k cannot exceed the 2 steps of 128 k of k=256; got 4"),
    ],
)
def test_refused_configurations(change: dict[str, int], message: str) -> None:
    a, b = integers(4, 40, 256)
    with pytest.raises(GuardError) as caught:
        skinny_wave_split(a, b, ONE, **change)
    assert str(caught.value) == message


def test_every_rule_has_a_refusal_of_its_own_and_the_module_has_them_too() -> None:
    a, b = integers(4, 40, 256)
    broken = (Configuration(24), Configuration(8, 12), Configuration(32, 8, 16), Configuration(8, 8, 1, 4))
    assert [next(rule for rule in RULES if rule(c, 256)) for c in broken] == list(RULES)
    for c in broken:
        with pytest.raises(GuardError):
            skinny_wave_split_out(torch.empty(4, 40).half(), a, b, ONE, torch.empty(1 << 16), False, *astuple(c))


def test_the_module_accepts_what_the_rules_accept() -> None:
    a, b = integers(4, 40, 256)
    accepted = 0
    for values in itertools.product((8, 16, 32), (0, 8, 12, 40, 64), (0, 8, 16), (1, 2, 4)):
        c = Configuration(*values)
        out, reason = torch.empty(4, 40).half(), refusal(c, 256)
        try:
            skinny_wave_split_out(out, a, b, ONE, torch.empty(1 << 18), False, *astuple(c))
        except GuardError:
            assert reason is not None, c
        else:
            assert reason is None and torch.equal(out, exact(a, b)), c
            accepted += 1
    assert accepted


def test_operands_are_held_to_the_same_guards_as_the_queue_kernels() -> None:
    a, b = integers(4, 40, 256)
    out, given = torch.zeros(4, 40).half(), (8, 8, 2, 1)
    with pytest.raises(GuardError, match="b must be column-major"):
        skinny_wave_split_out(out, a, b.contiguous(), ONE, None, False, *given)
    with pytest.raises(GuardError, match="a must be float8"):
        skinny_wave_split_out(out, a.float().to(OTHER), b, ONE, None, False, *given)
    with pytest.raises(GuardError, match="out must be contiguous float16"):
        skinny_wave_split_out(out[:3], a, b, ONE, None, False, *given)
    with pytest.raises(GuardError, match="split_k = 2 needs a workspace"):
        skinny_wave_split_out(out, a, b, ONE, None, False, 8, 8, 2, 2)
    with pytest.raises(GuardError, match="or longer"):
        skinny_wave_split_out(out, a, b, ONE, torch.empty(8), False, 8, 8, 2, 2)
    with pytest.raises(GuardError, match="split_k must be 1, 2, 4 or 8; got 3"):
        skinny_wave_split_out(out, a, b, ONE, torch.empty(1 << 16), False, 8, 8, 2, 3)
    for several in (torch.tensor([8, 16]), torch.tensor(2.5), None):
        with pytest.raises(GuardError, match="argument 'rows' must be an int"):
            skinny_wave_split_out(out, a, b, ONE, None, False, several, 8, 2, 1)
    with pytest.raises(GuardError, match=r"a must be a torch\.Tensor"):
        skinny_wave_split(None, b, ONE)
    with pytest.raises(GuardError, match=r"b must be \[k, n\] \(2 dimensions\)"):
        skinny_wave_split(a, b[:, 0], ONE)
    memory = torch.zeros(40 * 256, dtype=torch.uint8)
    inside = memory.view(FP8).view(40, 256).t()
    with pytest.raises(GuardError, match="out is written and must not share memory with b"):
        skinny_wave_split_out(memory[:320].view(torch.float16).view(4, 40), a, inside, ONE, None, False, *given)
    with pytest.raises(GuardError, match="workspace is written and must not share memory with b"):
        skinny_wave_split_out(out, a, inside, ONE, memory.view(torch.float32), False, 8, 32, 2, 2)
    wide = torch.zeros((1 << 24) + 16 + 256, dtype=torch.uint8).view(FP8).as_strided((256, 2), (1, (1 << 24) + 16))
    with pytest.raises(GuardError, match=r"a column of b must take at most 2\^24 bytes"):
        skinny_wave_split_out(out[:, :2].contiguous(), a, wide, ONE, None, False, *given)


# --- planted faults ---------------------------------------------------------------------------------------------------

HEADER, UNIT = "fp8_skinny_gemm/amd/wave_split_kernel.h", "fp8_skinny_gemm/amd/skinny_wave_split.cu"


def agrees(op: Callable[..., None], c: Configuration) -> bool:
    """Integers among NaNs, with a partial last step, are exact, in any order of waves."""
    k, n = 2112, 19  # two runs of eight steps for one wave
    a, narrow = integers(c.rows, n, k)
    padded = torch.full((n, k + 96), NAN_BYTE, dtype=torch.uint8)
    padded[:, :k] = narrow.t().contiguous().view(torch.uint8)
    b = padded.view(FP8)[:, :k].t()
    for seed in range(3):
        out = torch.ones(c.rows, n).half()
        with emulator.options(wave_order="random", seed=seed):
            op(out, a, b, ONE, split_workspace(c.rows, n, c, a.device), True, *astuple(c))
        if not torch.equal(out, exact(a, narrow, ONE, torch.ones(c.rows, n).half())):
            return False
    return True


@dataclass(frozen=True)
class Mutant:
    """A line of the kernel and what takes its place, noticed in a configuration."""

    name: str
    line: str
    becomes: str
    configuration: Configuration


MUTANTS = [
    Mutant("tail_reads_the_padding", "at + chunk + i * kHalfStep < k", "at + i * kHalfStep < k",
           Configuration(8, 8, 4)),
    Mutant("halves_of_a_step_swapped", "i * kHalfStep, at + r * kEdge * k)", "(1 - i) * kHalfStep, at + r * kEdge * k)",
           Configuration(16, 16, 4)),
    Mutant("products_off_the_diagonal", "if (group * 4 / kEdge == half)", "if (group * 4 / kEdge != half)",
           Configuration(8, 16, 4)),
    Mutant("one_wave_is_left_out", "if (waves != kWaves) return", "if (waves > 2 * kWaves) return",
           Configuration(16, 16, 4)),
    Mutant("the_next_run_is_not_loaded", "if (kMore || i + kAhead < kCount) load", "if (i + kAhead < kCount) load",
           Configuration(8, 8, 1)),
    Mutant("a_step_is_multiplied_too_early", "multiply(steps[i % kAhead]);", "multiply(steps[(i + 1) % kAhead]);",
           Configuration(16, 64, 1)),
    Mutant("a_part_twice", "else if (first + i <= last)", "else", Configuration(16, 16, 2, 2)),
    Mutant("the_output_is_not_added", "total[i] += static_cast<float>(p.out[to.at + i]);", ";",
           Configuration(32, 32, 2)),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mistake_is_noticed_by_a_planted_fault(mutant: Mutant, tmp_path: Path) -> None:
    c = mutant.configuration
    assert agrees(skinny_wave_split_out, c)
    entry = planted(
        tmp_path / mutant.name, skinny_wave_split_out, HEADER, mutant.line, mutant.becomes, unit=UNIT,
        variants={"HF_ROWS": [c.rows]},
    )  # fmt: skip
    assert not agrees(entry, c)


def test_the_sums_of_the_waves_wait_for_each_other(tmp_path: Path) -> None:
    """Without the barrier the checkers see a race in LDS."""
    c = Configuration(8, 8, 4)
    entry = planted(
        tmp_path / "no_barrier", skinny_wave_split_out, HEADER, "  __syncthreads();\n\n  const auto store",
        "\n  const auto store", unit=UNIT, variants={"HF_ROWS": [c.rows]},
    )  # fmt: skip
    a, b = integers(8, 16, 1024)
    with emulator.options(checks="all"), pytest.raises(EmulatorFault, match=r"LDS race|before wave \d has waited"):
        entry(torch.empty(8, 16).half(), a, b, ONE, None, False, *astuple(c))
