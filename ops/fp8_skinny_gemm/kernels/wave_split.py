"""The skinny fp8 GEMM whose k is split over the waves of a work-group: its stub, raw op, configurations and value.

A work-group computes ``rows`` rows and ``columns`` columns; each of its ``waves`` takes a part of k, and their sums are
added in a fixed order through LDS. ``split_k`` work-groups share the k of a tile where there are few columns; the last
of them to arrive adds their sums in the order of the parts, in the same launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.errors import GuardError
from hipforge.ops.core.checks import require_int, require_rank
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.kernel import Configuration as Given
from hipforge.ops.core.kernel import Kernel, Pipeline
from hipforge.ops.core.stub import stub
from hipforge.ops.fp8_skinny_gemm.raw import ARCHS, MAX_K, column_major, row_major

KERNEL = "skinny_wave_split"
ROWS = (8, 16, 32)
COLUMNS = (8, 16, 32, 64)
WAVES = (1, 2, 4, 8, 16)
DEFAULT_WAVES = 4
SPLIT_K = (1, 2, 4, 8)
DEFAULT_SPLIT_K = SPLIT_K[:3]
K_STEP = 128
STEPS_AHEAD = (8, 4, 2)  # divisors of the 8 steps of straight code
SHORT_COLUMNS = 8  # a work-group's columns are a multiple of them
MOST_SHAPES = 4  # of columns and splits that tuners try


@dataclass(frozen=True)
class Configuration:
    """The parameters of one launch.

    Attributes:
        rows: of a work-group: 8, 16 or 32.
        columns: of a work-group: a multiple of 8, at most 32 with 8 rows and 64 with more.
        waves: of a work-group, each with a part of k: 1, 2, 4, 8 or, with few rows and columns, 16.
        split_k: work-groups that share the k of a tile: 1, 2, 4 or 8, at most the number of steps of 128 k.
    """

    rows: int = 8
    columns: int = 8
    waves: int = 8
    split_k: int = 1

    @property
    def edge(self) -> int:
        """Return the columns and rows of a matrix instruction's tile; 8 where two parts of k share one."""
        return 8 if self.rows == ROWS[0] else 16

    @property
    def column_tiles(self) -> int:
        """Return how many tiles the kernel has along n: 1, 2 or 4."""
        return next(tiles for tiles in (1, 2, 4) if self.columns <= tiles * self.edge or tiles == 4)

    @property
    def max_waves(self) -> int:
        """Return the largest work-group: 16 waves have 128 registers each, 8 have 256."""
        loads = self.edge // 8 * (self.rows // self.edge + self.column_tiles)
        return 16 if loads <= 4 else 8

    @property
    def steps_ahead(self) -> int:
        """Return how many steps of 128 k of its operands a wave has in flight."""
        loads = self.edge // 8 * (self.rows // self.edge + self.column_tiles)
        steps = (96 if self.max_waves == WAVES[-1] else 160) // (4 * loads)
        return next(ahead for ahead in STEPS_AHEAD if steps >= ahead)

    def parameters(self) -> dict[str, int]:
        """Return the attributes by name."""
        return asdict(self)


Rule = Callable[[Configuration, int], str | None]


def steps(k: int) -> int:
    """Return how many steps of 128 k there are; the last may be partial."""
    return -(-k // K_STEP)


def _rows(c: Configuration, k: int) -> str | None:
    return None if c.rows in ROWS else f"rows must be 8, 16 or 32; got {c.rows}"


def _columns(c: Configuration, k: int) -> str | None:
    most = 4 * c.edge
    if SHORT_COLUMNS <= c.columns <= most and c.columns % SHORT_COLUMNS == 0:
        return None
    return f"columns must be a multiple of 8, at most {most} with {c.rows} rows; got {c.columns}"


def _waves(c: Configuration, k: int) -> str | None:
    if c.waves in WAVES and c.waves <= c.max_waves:
        return None
    return (
        f"waves must be 1, 2, 4, 8 or 16, at most {c.max_waves} with {c.rows} rows and {c.columns} columns; "
        f"got {c.waves}"
    )


def _splits(c: Configuration, k: int) -> str | None:
    if c.split_k not in SPLIT_K:
        return f"split_k must be 1, 2, 4 or 8 work-groups; got {c.split_k}"
    if c.split_k <= steps(k):
        return None
    return f"split_k cannot exceed the {steps(k)} steps of {K_STEP} k of k={k}; got {c.split_k}"


# Each may rely on the checks of those before it.
RULES: tuple[Rule, ...] = (_rows, _columns, _waves, _splits)


def refusal(configuration: Configuration, k: int) -> str | None:
    """Return the first rule that a configuration breaks for operands of ``k``, or None."""
    return next((reason for rule in RULES if (reason := rule(configuration, k)) is not None), None)


# The default rule's times of a launch, in microseconds: a compute unit loads at most 32 KB in 0.6 us
# (docs/time-model.md), which overlaps with the memory's time but for a part; parts of k are stored and loaded again.
_UNIT_BYTES = 32768 / 0.6
_NOT_OVERLAPPED = 0.3
_MEETING = 1.2
_MEETING_OF_A_PART = 0.1


def _cost(configuration: Configuration, m: int, n: int, k: int, cu_count: int, bandwidth: float) -> float:
    columns, split_k = configuration.columns, configuration.split_k
    rounds = -(-(-(-n // columns) * split_k) // cu_count)
    memory = n * k / bandwidth * 1e6
    unit = rounds * (columns + min(m, configuration.rows)) * k / split_k / _UNIT_BYTES
    meeting = 0.0 if split_k == 1 else rounds * (_MEETING + _MEETING_OF_A_PART * split_k)
    return max(memory, unit) + _NOT_OVERLAPPED * min(memory, unit) + meeting


def by_cost(m: int, n: int, k: int, cu_count: int, bandwidth: float) -> list[Configuration]:
    """Return one configuration for each number of columns and splits of k, what takes least by a simple rule first.

    Many columns read a few times; few columns, or parts of k, occupy more compute units.

    Args:
        m: rows.
        n: columns.
        k: products of each sum.
        cu_count: compute units.
        bandwidth: of the memory, in bytes per second.
    """
    waves = max(waves for waves in WAVES if waves <= min(DEFAULT_WAVES, steps(k)))
    shapes = ((columns, split_k) for split_k in DEFAULT_SPLIT_K for columns in reversed(COLUMNS))
    possible = (Configuration(rows_for(m), columns, waves, split_k) for columns, split_k in shapes)
    accepted = [configuration for configuration in possible if refusal(configuration, k) is None]
    return sorted(accepted, key=lambda configuration: _cost(configuration, m, n, k, cu_count, bandwidth))


def configurations(m: int, n: int, k: int, cu_count: int, bandwidth: float) -> list[Configuration]:
    """Return what a tuner tries: the default rule's first choices with several numbers of waves; as :func:`by_cost`."""
    shapes = by_cost(m, n, k, cu_count, bandwidth)[:MOST_SHAPES] if k <= MAX_K else []
    numbers = [waves for waves in WAVES if 1 < waves <= steps(k)] or WAVES[:1]
    found = [replace(shape, waves=waves) for waves in numbers for shape in shapes]
    return [configuration for configuration in found if refusal(configuration, k) is None]


def choice(configuration: Configuration) -> Choice:
    """Return this kernel in a configuration."""
    return Choice(KERNEL, MappingProxyType(configuration.parameters()))


def rows_for(m: int) -> int:
    """Return the rows of a work-group for m rows of a: b is then loaded once for up to 32 of them."""
    return next((rows for rows in ROWS if m <= rows), ROWS[-1])


skinny_wave_split_out = stub(
    "skinny_wave_split_out",
    "module_fp8_skinny_gemm_wave_split",
    "out, a, b, scale: Tensor; workspace: Tensor?; accumulate: bool; rows, columns, waves, split_k: int",
    "Write or add (``accumulate``) scale * (a @ b) to ``out`` fp16 [m, n]; ``workspace``: :func:`split_workspace`.",
    # The module's guard refuses any other number of rows.
    variant=lambda *given: {"HF_ROWS": given[6] if given[6] in ROWS else ROWS[0]},
    mutates=("out", "workspace"),
)


def split_workspace(m: int, n: int, configuration: Configuration, device: torch.device) -> torch.Tensor | None:
    """Return the workspace for sums and counters of work-groups that share a k; None where there is one for each tile.

    Its contents mean nothing before and after a launch, and no other launch may use it at the same time.
    """
    c = configuration
    if c.split_k < 2:
        return None
    sums = c.rows * c.edge * c.column_tiles
    words = 2  # float32 of 64 bits
    blocks = -(-m // c.rows) * -(-n // c.columns)
    return torch.empty(blocks * c.split_k * (sums + words), dtype=torch.float32, device=device)


def skinny_wave_split(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None = None,
    rows: int = 8,
    columns: int = 8,
    waves: int = 8,
    split_k: int = 1,
) -> torch.Tensor:
    """Run the kernel; operands as in :mod:`hipforge.ops.fp8_skinny_gemm`, those of the kernel's own layout.

    Args:
        a: e4m3 [m, k], contiguous; any m, k a multiple of 32.
        b: e4m3 [k, n], column-major with a pitch that is a multiple of 16, at most 2^24.
        scale: one float32.
        output: float16 [m, n], added to in place; None makes a new tensor.
        rows: rows of a of a work-group: 8, 16 or 32.
        columns: columns of b of a work-group: a multiple of 8, at most 32 with 8 rows and 64 with more.
        waves: of a work-group, each with a part of k: 1, 2, 4, 8 or, with few rows and columns, 16.
        split_k: work-groups that share the k of a tile: 1, 2, 4 or 8, at most ceil(k / 128).

    Returns:
        float16 [m, n]: output + scale * (a @ b), the sums in an order that only k and the configuration decide.

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    given = [
        require_int(*item) for item in (("rows", rows), ("columns", columns), ("waves", waves), ("split_k", split_k))
    ]
    configuration = Configuration(*given)
    require_rank("a", a, 2, "[m, k]")
    require_rank("b", b, 2, "[k, n]")
    reason = refusal(configuration, a.shape[1])
    if reason is not None:
        raise GuardError(reason)
    m, n = a.shape[0], b.shape[1]
    out = torch.empty((m, n), dtype=torch.float16, device=a.device) if output is None else output
    workspace = split_workspace(m, n, configuration, a.device)
    skinny_wave_split_out(out, a, b, scale, workspace, output is not None, *given)
    return out


def _launch(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    accumulate: bool,
    deterministic: bool,
    rows: int,
    columns: int,
    waves: int,
    split_k: int,
) -> None:
    workspace = None
    if split_k > 1:
        configuration = Configuration(rows, columns, waves, split_k)
        workspace = split_workspace(out.shape[0], out.shape[1], configuration, a.device)
    left, right = row_major(a, out), column_major(b, out, MAX_K)
    skinny_wave_split_out(out, left, right, scale, workspace, accumulate, rows, columns, waves, split_k)


def _candidates(cell: Any, arch: str) -> Iterator[Given]:
    info = archs.get(arch)
    for configuration in configurations(cell.m, cell.n, cell.k, info.cu_count, info.bandwidth):
        yield configuration.parameters()


def _refusal(given: Given, key: Sequence[int], arch: str) -> str | None:
    return f"K of at most {MAX_K}" if key[2] > MAX_K else refusal(Configuration(**given), key[2])


def _pipeline(given: Given, cell: Any, arch: str) -> Pipeline:
    split = Configuration(**given)
    return Pipeline(split.steps_ahead * K_STEP * split.columns)


WAVE_SPLIT = Kernel(
    KERNEL,
    archs=ARCHS,
    parameters=MappingProxyType({name: range(1, 1 << 10) for name in Configuration().parameters()}),
    launch=_launch,
    candidates=_candidates,
    pipeline=_pipeline,
    refusal=_refusal,
)
