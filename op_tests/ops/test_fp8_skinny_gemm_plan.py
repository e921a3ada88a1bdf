"""Which configuration the skinny GEMM runs with: the caller's split_k, then the tuned table, then the default rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hipforge
from hipforge import devices, explain
from hipforge.emulator.timing.context import gpu_of
from hipforge.emulator.timing.machines import MACHINES as GPUS
from hipforge.errors import GuardError
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.kernel import spelled
from hipforge.ops.core.tuned import read_rows, shipped_path
from hipforge.ops.fp8_skinny_gemm.family import FAMILY, default_choice
from hipforge.ops.fp8_skinny_gemm.family import TABLE as FP8_SKINNY_GEMM
from hipforge.ops.fp8_skinny_gemm.kernels import wave_split
from hipforge.ops.fp8_skinny_gemm.kernels.queue import MAX_SPLIT_K, QUEUE, default_configuration
from hipforge.ops.fp8_skinny_gemm.raw import FORMATS
from hipforge.ops.fp8_skinny_gemm.space import Configuration
from hipforge.ops.reference.skinny import skinny_gemm as reference
from hipforge.tuning.cases import Cell
from hipforge.tuning.families import fp8_skinny_gemm as tuner
from hipforge.tuning.tuner import MACHINES, Modelled

pytestmark = pytest.mark.gfx942

ARCH = devices.current().default_arch
OTHER = next(arch for arch in FORMATS if arch != ARCH)
CU_COUNT = devices.current().cu_count(0)
N, K = 96, 1056
TUNED = Configuration(b_lanes=3, a_producers=1, b_producers=4, consumers=3, qsize=3, split_k=2)
SPLIT = wave_split.Configuration(16, 32, 2, 4)
MODELLED = ["", "", "", "", "0.0002", "model:test"]


def queue(configuration: Configuration) -> Choice:
    return QUEUE.choice(configuration.parameters())


def row(m: int, choice: Choice | Configuration, arch: str = ARCH, cu_count: int = CU_COUNT) -> list[object]:
    named = queue(choice) if isinstance(choice, Configuration) else choice
    return [arch, cu_count, m, N, K, named.kernel, spelled(named.configuration), 1, *MODELLED]


@pytest.fixture
def table(put_table: Callable[..., Path]) -> Path:
    """A table with rows for m = 3 and 8 and, for m = 2, only rows that are not for this device."""
    rows = [
        row(3, TUNED),
        row(8, Configuration(split_k=5)),
        row(2, Configuration(split_k=1), arch=OTHER),
        row(2, Configuration(split_k=1), cu_count=CU_COUNT - 1),
        [*row(16, Configuration(16))[:-7], 0, "9", "", "8", "8", "0.0002", "measured:a/b"],
        row(24, wave_split.choice(SPLIT)),
    ]
    return put_table(FP8_SKINNY_GEMM, *(",".join(map(str, line)) for line in rows))


def operands(m: int, n: int = N, k: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.randint(-2, 3, (rows, k), generator=generator).float() for rows in (m, n))
    return a.to(FORMATS[ARCH]), b.to(FORMATS[ARCH]).t(), torch.ones(1)


@pytest.mark.parametrize(
    ("m", "line", "reason"),
    [
        (3, 2, "the tuned row of this shape"),
        (1, 2, "the tuned row of the next larger M (3)"),
        (2, 2, "the tuned row of the next larger M (3)"),
        (8, 3, "the tuned row of this shape"),
        (4, 3, "the tuned row of the next larger M (8)"),
    ],
)
def test_the_row_of_the_shape_or_of_the_next_larger_m_decides_and_is_named(table, m, line, reason):
    found = explain("skinny_gemm", *operands(m))
    want = TUNED if line == 2 else Configuration(split_k=5)
    assert (found.path, dict(found.configuration)) == ("kernel", want.parameters())
    assert (found.file, found.reason) == ((table, line), reason)
    a, b, scale = operands(m)
    exact = reference(a, b, scale, None, torch.float64, torch.float64)
    assert torch.equal(hipforge.skinny_gemm(a, b, scale).double(), exact)


def test_without_a_row_the_default_rule_decides(table):
    for m, n in [(25, N), (3, N + 1)]:
        found = explain("skinny_gemm", *operands(m, n))
        want = default_choice(m, n, K, ARCH, CU_COUNT)
        assert (found.kernel, dict(found.configuration)) == (wave_split.KERNEL, dict(want.configuration))
        assert (found.file, found.reason) == (None, "no tuned row; the default rule")


def test_a_row_may_name_the_kernel_that_splits_k_over_waves(table):
    found = explain("skinny_gemm", *operands(20))
    assert (found.kernel, dict(found.configuration)) == (wave_split.KERNEL, SPLIT.parameters())
    assert found.file == (table, 7)
    a, b, scale = operands(20)
    want = reference(a, b, scale, None, torch.float64, torch.float64)
    assert torch.equal(hipforge.skinny_gemm(a, b, scale).double(), want)
    assert torch.equal(hipforge.skinny_gemm(a, b, scale, deterministic=False).double(), want)
    output = torch.ones(20, N).half()
    assert hipforge.skinny_gemm(a, b, scale, output) is output and torch.equal(output.double(), want + 1)


def test_a_column_too_far_from_the_next_is_copied_for_the_kernel_that_splits_k_over_waves(table):
    a, b, scale = operands(20)
    pitch = wave_split.MAX_K + 16
    storage = torch.zeros((N - 1) * pitch + K, dtype=torch.uint8)
    wide = storage.as_strided((N, K), (pitch, 1))
    wide.copy_(b.t().contiguous().view(torch.uint8))
    want = reference(a, b, scale)
    assert torch.equal(hipforge.skinny_gemm(a, wide.view(FORMATS[ARCH]).t(), scale), want)


def test_the_callers_split_k_comes_before_the_table_and_the_rule(table):
    found = explain("skinny_gemm", *operands(3), split_k=4)
    assert dict(found.configuration) == {**TUNED.parameters(), "split_k": 4}
    assert (found.file, found.reason) == ((table, 2), "the tuned row of this shape with the caller's split_k")
    for m in (20, 30):  # a row of the other kernel, and none
        found = explain("skinny_gemm", *operands(m), split_k=3)
        assert dict(found.configuration) == {**default_configuration(m, N, K, CU_COUNT).parameters(), "split_k": 3}
        assert found.kernel == QUEUE.name
        assert found.reason == "the caller's split_k, with the queue kernel's default rule"


def test_more_splits_than_blocks_are_as_many_as_there_are_blocks(table):
    found = explain("skinny_gemm", *operands(3), split_k=1000)
    assert found.configuration["split_k"] == TUNED.blocks(K) == 5
    a, b, scale = operands(3)
    assert torch.equal(hipforge.skinny_gemm(a, b, scale, split_k=1000), hipforge.skinny_gemm(a, b, scale, split_k=5))
    with pytest.raises(GuardError, match=r"split_k must be at least 1; got -1"):
        hipforge.skinny_gemm(a, b, scale, split_k=-1)


def test_a_measured_row_can_send_a_shape_to_torch(table):
    for m in (9, 16):
        found = explain("skinny_gemm", *operands(m))
        assert found.path == "torch" and "use_hip=0" in found.refused["kernel"]
        a, b, scale = operands(m)
        assert torch.equal(hipforge.skinny_gemm(a, b, scale), reference(a, b, scale))


@pytest.mark.parametrize(("arch", "cu_count"), [("gfx942", 304), ("gfx950", 256)])
def test_the_default_rule_is_within_the_rules_and_is_the_first_that_a_tuner_tries(arch, cu_count):
    for m in (1, 8, 9, 16, 17, 32):
        for n, k in [(1, 32), (7, 160), (2304, 16384), (13312, 16384), (16384, 6656), (100_000, 64), (3, 1 << 24)]:
            chosen = default_choice(m, n, k, arch, cu_count)
            c = wave_split.Configuration(**chosen.configuration)
            assert wave_split.refusal(c, k) is None and c.rows >= m
            if m in (1, 32) and k >= 256:
                assert chosen in tuner.TUNER.candidates(Cell(n=n, k=k, m=m), arch)
            groups = -(-n // c.columns) * c.split_k
            assert 2 * groups >= cu_count or c.columns == 8 or n < 2304, (m, n, k, c)
        assert default_choice(m, 3, 1 << 25, arch, cu_count).kernel == QUEUE.name


def test_the_queue_kernels_default_rule_fills_the_compute_units_within_the_rules():
    for arch, cu_count in (("gfx942", 304), ("gfx950", 256)):
        for m in (1, 8, 9, 16, 17, 32):
            for n, k in [(1, 32), (2304, 16384), (13312, 16384), (16384, 6656), (100_000, 64)]:
                c = default_configuration(m, n, k, cu_count)
                assert hipforge.ops.fp8_skinny_gemm.space.refusal(c, arch, k) is None
                assert c.tile_m >= m
                tiles = c.tiles(m, n)
                rounds = -(-tiles // cu_count)
                assert tiles >= 0.8 * rounds * cu_count or c.split_k in (MAX_SPLIT_K, c.blocks(k)), (m, n, k, c)


# ---- the shipped table -----------------------------------------------------------------------------------------------


def test_the_shipped_table_has_the_models_rows_for_both_architectures():
    rows = {tuned.key: tuned for tuned in read_rows(FP8_SKINNY_GEMM, shipped_path(FP8_SKINNY_GEMM))}
    cells = {
        (arch, MACHINES[arch].cu_count, cell.m, cell.n, cell.k)
        for arch in FORMATS
        for cell in tuner.TUNER.default_cells
    }
    assert set(rows) == cells and len(cells) == 24
    for key, tuned in rows.items():
        # By the model of time.
        assert tuned.values["source"] == f"model:{GPUS[gpu_of(key[0])].version}"
        assert tuned.values["model_us"] > 5
        assert tuned.values["us"] is None and tuned.integer("use_hip") == 1
        # One fp16 rounding is at most 2^-11 of each value; fp32 sums of 16384 products add less than half of that.
        assert 0 < tuned.values["err"] <= 2.0**-11 + 2.0**-12 < tuner.MAX_ERROR
        # Reads of the weights are not repeated, whatever batch the row applies to.
        assert FAMILY.choice_of(tuned).configuration["rows"] >= key[2]


@pytest.mark.parametrize("m", [1, 5, 8, 12, 32])
def test_the_planner_takes_the_shipped_rows_for_the_model(m):
    for k, n in tuner.LLAMA_405B:
        a, b = (torch.empty(rows, k, dtype=FORMATS[ARCH]) for rows in (m, n))
        found = explain("skinny_gemm", a, b.t(), torch.ones(1))
        assert found.path == "kernel" and found.file is not None and found.file[0] == shipped_path(FP8_SKINNY_GEMM)
        assert found.row["M"] == min(rows for rows in tuner.ROWS if rows >= m)


@pytest.mark.parametrize("m", [1, 32])
def test_the_error_of_a_shipped_row_is_that_of_the_kernel(m):
    rows = {tuned.key: tuned for tuned in read_rows(FP8_SKINNY_GEMM, shipped_path(FP8_SKINNY_GEMM))}
    tuned = rows[ARCH, CU_COUNT, m, 2304, 16384]
    problem = Modelled(tuner.TUNER, Cell(n=2304, k=16384, m=m), ARCH)
    error = problem.run(FAMILY.choice_of(tuned))
    # The kernel's sums are the same on every host, the reference's are not: torch's float32 product is off by up to
    # 2^-24 sqrt(K) = 8e-6, which adds in squares, 7e-4 of an error of 2e-4. Another row's error is 2e-3 off.
    assert error == pytest.approx(tuned.values["err"], rel=1e-3)
