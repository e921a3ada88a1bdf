"""The skinny GEMM over a grid of m, n, k, splits of k and tile widths, in both modes and on both architectures.

The grid has 8 x 4 x 3 x 6 x 2 = 1,152 cases. ``--full`` runs them all; without it a subset runs in which every value of
one parameter meets every value of each other one, but for the two largest weights. Cases go through ``skinny_gemm``: a
tuned table sets the width of the tiles, the caller's argument the splits. k = 256 is one block and k = 1024 four, so
that there the larger splits are as many as there are blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from helpers.errors import relative

import hipforge
from hipforge import devices
from hipforge.ops.core.dispatch import clear_decisions
from hipforge.ops.core.kernel import spelled
from hipforge.ops.core.tuned import clear_tables
from hipforge.ops.fp8_skinny_gemm.family import TABLE as FP8_SKINNY_GEMM
from hipforge.ops.fp8_skinny_gemm.raw import FORMATS
from hipforge.ops.fp8_skinny_gemm.space import Configuration

pytestmark = pytest.mark.gfx942("part or whole")

ARCH = devices.current().default_arch
CU_COUNT = devices.current().cu_count(0)
MS = (1, 2, 3, 4, 5, 6, 7, 8)
NS = (128, 1024, 6656, 13312)
KS = (256, 1024, 16384)
SPLITS = (1, 2, 3, 4, 6, 8)
TILES = {  # by b_lanes
    3: Configuration(b_lanes=3, a_producers=2, b_producers=6, consumers=2, qsize=4),
    5: Configuration(b_lanes=5, a_producers=2, b_producers=10, consumers=2, qsize=2),
}
GRID = list(itertools.product(MS, NS, KS, SPLITS, TILES))
SHAPES = list(itertools.product(NS, KS))
ATOMIC_ERROR = 0.125
DETERMINISTIC_ERROR = 2e-3

Case = tuple[int, int, int, int, int]


def too_large(case: Case) -> bool:
    return case[1] * case[2] > 1024 * 16384


def pairs(case: Case) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(case), 2))


def covering(cases: list[Case]) -> list[Case]:
    """Return few of the cases, small ones first, that hold every pair of values that some case holds."""
    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: (len(pairs(case) & missing), -case[1] * case[2]))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


QUICK = covering([case for case in GRID if not too_large(case)])


@pytest.fixture(scope="module", autouse=True, params=TILES, ids=lambda lanes: f"b_lanes{lanes}")
def b_lanes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The planner's table in effect: a row for each m, n and k of the grid, over those that are shipped."""
    path = tmp_path_factory.mktemp("table") / "t.csv"
    parameters = "skinny_gemm_fp8", spelled(TILES[request.param].parameters())
    evidence = ["", "", "", "", "0.0002", "model:test"]  # us, model_us, stock_us, best_baseline_us, err, source
    rows = [[ARCH, CU_COUNT, *cell, *parameters, 1, *evidence] for cell in itertools.product(MS, NS, KS)]
    path.write_text("\n".join(",".join(map(str, row)) for row in [FP8_SKINNY_GEMM.header, *rows]) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIPFORGE_CONFIG_FP8_SKINNY_GEMM", str(path))
        clear_tables()
        clear_decisions()
        yield request.param
    clear_tables()
    clear_decisions()


def operands(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normal data and a scale that makes results normal too: below 8 in size, which the bound on atomics rests on."""
    generator = torch.Generator().manual_seed(n + k)
    a = torch.randn(max(MS), k, generator=generator).to(FORMATS[ARCH])
    b = torch.randn(n, k, generator=generator).to(FORMATS[ARCH]).t()
    return a, b, torch.tensor([k**-0.5])


def check(n: int, k: int, b_lanes: int, cases: list[tuple[int, int]]) -> None:
    """Run (m, split_k) cases of one weight; a result's rows do not depend on m, so one reference serves them all."""
    a, b, scale = operands(n, k)
    one = torch.ones(1)
    torchs = torch._scaled_mm(a, b, scale, one, out_dtype=torch.float16).double()
    left = a.double()
    exact = torch.cat([left @ part.double() for part in b.split(1024, dim=1)], dim=1) * scale.double()
    assert exact.abs().max() < 8
    for m, split_k in cases:
        found = hipforge.explain("skinny_gemm", a[:m], b, scale, split_k=split_k).configuration
        blocks = -(-k // TILES[b_lanes].block_k)
        assert (found["b_lanes"], found["split_k"]) == (b_lanes, min(split_k, blocks))

        got = hipforge.skinny_gemm(a[:m], b, scale, split_k=split_k).double()
        # One fp16 rounding is at most 2^-11 = 4.9e-4 of a value; fp32 sums of 16384 products add less than half of it.
        assert relative(got, exact[:m]) <= 2.0**-11 + 2.0**-12 < DETERMINISTIC_ERROR, (m, split_k)

        # Up to 8 splits x 2 consumers add a sum rounded to fp16 and round the result: 32 roundings of values below 8,
        # each at most 2^-9; torch rounds once more. That is 0.065.
        got = hipforge.skinny_gemm(a[:m], b, scale, split_k=split_k, deterministic=False).double()
        assert (got - torchs[:m]).abs().max() <= ATOMIC_ERROR, (m, split_k)


@pytest.mark.parametrize(("n", "k"), sorted({case[1:3] for case in QUICK}))
def test_a_quick_part_of_the_grid(n: int, k: int, b_lanes: int) -> None:
    check(n, k, b_lanes, [(m, split_k) for m, *shape, split_k, lanes in QUICK if (*shape, lanes) == (n, k, b_lanes)])


@pytest.mark.full
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_whole_grid(n: int, k: int, b_lanes: int) -> None:
    check(n, k, b_lanes, list(itertools.product(MS, SPLITS)))


def test_the_quick_part_holds_every_pair_of_values_but_the_largest_weights(b_lanes: int) -> None:
    assert len(GRID) == 1152 and len(QUICK) < 80
    covered = set().union(*map(pairs, QUICK))
    left_out = set().union(*map(pairs, GRID)) - covered
    assert left_out == {((1, n), (2, 16384)) for n in (6656, 13312)}
