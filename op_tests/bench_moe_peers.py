"""The two GEMMs of a MoE layer, modelled, beside published times of AMD's MX-FP8 kernels on an MI355X.

``--published DIR`` holds ``moe_mxfp8_peers_gfx950.csv``: microseconds per stage for the tokens, widths, experts and
choices of each row. A published figure is the mean duration of one kernel under a profiler, with operands rotated so
that they come from HBM; so ours is ``kernel_us`` of one launch with cold operands, never a replay. Stage one is gate
and up with the activation, stage two the product with the routing weights; sorting, the layer's quantisation and the
sum over choices are in neither. Routing is uniform with a fixed seed; ``distinct`` is the number of experts reached.

``--waves`` shows what the default number of waves was chosen on, ``--groups`` how many work-groups share a K,
``--columns`` how many columns of a short K a work-group streams, ``--fused`` what SwiGLU in the first product's launch
gains over one of its own, for fp8 with scales per 128 x 128.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from helpers.bench import TO_CSV, table_of, write_csv

from hipforge.cli.output import console
from hipforge.emulator.timing import Capture, estimate
from hipforge.emulator.timing.machines import MI355X
from hipforge.ops import fp8_grouped_gemm as fp8
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.gate_up_split import GROUPS
from hipforge.ops.moe import DEFAULT_BLOCK_M, SortedSlots, moe_align_block_size
from hipforge.ops.moe_gate_up import grouped_swiglu_mxfp8, mxfp8_gate_up_out, split_workspace
from hipforge.ops.mxfp8_grouped_gemm import grouped_mxfp8_linear
from hipforge.ops.mxfp8_grouped_gemm.kernels import launch, stream, wave_split
from hipforge.ops.mxfp8_grouped_gemm.reference import Operands
from hipforge.ops.reference.fp8 import Scales
from hipforge.ops.swiglu_fp8 import swiglu_fp8_dynamic
from hipforge.tuning.grouped import route

FILE = "moe_mxfp8_peers_gfx950.csv"
SEED = 2


@dataclass(frozen=True)
class Row:
    """One published row beside ours; times in microseconds, ``distinct`` the experts that the routing reaches."""

    tokens: int
    width: int
    inner: int
    experts: int
    top_k: int
    distinct: int
    gemm1_us: float
    gemm1_published_us: float
    gemm1_ratio: float
    gemm2_us: float
    gemm2_published_us: float
    gemm2_ratio: float
    both_ratio: float


def _zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)  # pages that are never written take no memory; times do not depend on values


def replay_us(call: Callable[[], object], figure: str = "replay_us") -> float:
    """Return the modelled interval of the launches of a call in a graph, with operands in HBM."""
    capture = Capture()
    with capture.recording():
        call()
    return float(getattr(estimate(capture, MI355X, "cold"), figure))


def kernel_us(call: Callable[[], object]) -> float:
    """Return the modelled time of the launches of a call, with operands in HBM."""
    return replay_us(call, "kernel_us")


def routed(tokens: int, top_k: int, experts: int) -> tuple[SortedSlots, int]:
    """Return the sorted slots of a uniform routing and how many experts have one."""
    ids = route(tokens * top_k, top_k, experts, SEED)
    return moe_align_block_size(ids, DEFAULT_BLOCK_M, experts), len(ids.unique())


def compared(published: dict[str, str]) -> Row:
    """Return a published row beside the modelled times of our two GEMMs."""
    names = "tokens", "model_dim", "inter_dim", "experts", "topk"
    tokens, width, inner, experts, top_k = (int(published[name]) for name in names)
    index, distinct = routed(tokens, top_k, experts)
    slots = tokens * top_k
    hidden = _zeros(tokens, width), _zeros(tokens, width // 32)
    w1 = _zeros(experts, 2 * inner, width), _zeros(experts, 2 * inner, width // 32)
    w2 = _zeros(experts, width, inner), _zeros(experts, width, inner // 32)
    activated = _zeros(slots, inner), _zeros(slots, inner // 32)
    weights = _zeros(slots, dtype=torch.float32)
    first = kernel_us(lambda: grouped_swiglu_mxfp8(*hidden, *w1, *index, slots, DEFAULT_BLOCK_M, top_k))
    second = kernel_us(
        lambda: grouped_mxfp8_linear(*activated, *w2, *index, slots, DEFAULT_BLOCK_M, 1, weights, uncovered="undefined")
    )
    theirs = float(published["us_gemm1"]), float(published["us_gemm2"])
    return Row(
        tokens, width, inner, experts, top_k, distinct, first, theirs[0], first / theirs[0], second, theirs[1],
        second / theirs[1], (first + second) / sum(theirs),
    )  # fmt: skip


# (tokens, N, K, experts, top_k): what the default number of waves was chosen on.
WAVE_CELLS = ((4, 1536, 6144, 8, 2), (8, 1536, 6144, 32, 2), (1, 768, 6144, 128, 4), (8, 768, 6144, 128, 4))


def by_waves(cell: tuple[int, int, int, int, int]) -> dict[str, float]:
    """Return kernel microseconds of the first GEMM without its activation: by waves."""
    tokens, n, k, experts, top_k = cell
    index, _ = routed(tokens, top_k, experts)
    slots = tokens * top_k
    out = _zeros(slots, n, dtype=torch.bfloat16)
    operands = _zeros(tokens, k), _zeros(tokens, k // 32), _zeros(experts, n, k), _zeros(experts, n, k // 32)
    parts = Operands(*operands, *index, slots, DEFAULT_BLOCK_M, top_k)

    def time(choice: Choice) -> float:
        return kernel_us(lambda: launch(choice.kernel, choice.configuration, out, parts))

    return {f"{waves} waves": time(wave_split.choice(16, waves)) for waves in wave_split.WAVES}


# (tokens, inner size, experts, choices) with a hidden size of 6144.
GROUP_CELLS = ((1, 384, 128, 4), (1, 256, 257, 9), (1, 512, 257, 9), (2, 512, 257, 9), (8, 512, 257, 9))


def by_groups(cell: tuple[int, int, int, int]) -> dict[str, float]:
    """Return kernel microseconds of the first GEMM with its activation, by the work-groups that share a block's K."""
    tokens, inner, experts, top_k = cell
    width, slots = 6144, tokens * top_k
    index, distinct = routed(tokens, top_k, experts)
    hidden = _zeros(tokens, width, dtype=torch.float8_e4m3fn), _zeros(tokens, width // 32)
    w = _zeros(experts, 2 * inner, width, dtype=torch.float8_e4m3fn), _zeros(experts, 2 * inner, width // 32)
    out = _zeros(slots, inner, dtype=torch.float8_e4m3fn), _zeros(slots, inner // 32)
    sizes = experts, 2 * inner, width, slots, tokens, top_k, DEFAULT_BLOCK_M

    def time(groups: int) -> float:
        parts = 2 if groups == 1 and inner // 32 * distinct < MI355X.cu_count else 1
        workspace = split_workspace(slots, 2 * inner, groups, torch.device("cpu"))
        configuration = 1.0, 0.0, float("inf"), False, workspace, 16, parts, groups
        return kernel_us(lambda: mxfp8_gate_up_out(*out, *hidden, *w, *index, None, *sizes, *configuration))

    return {"blocks": inner // 32 * distinct} | {f"{groups} groups": time(groups) for groups in GROUPS}


# (tokens, inner size) with a hidden size of 6144, 257 experts and 9 choices.
COLUMN_CELLS = ((1, 256), (4, 256), (16, 256), (32, 256), (8, 512), (16, 512), (32, 512))


def by_columns(cell: tuple[int, int]) -> dict[str, float]:
    """Return kernel microseconds of the second GEMM: with K split over waves by default, and streamed by columns."""
    tokens, inner = cell
    width, experts, top_k = 6144, 257, 9
    slots = tokens * top_k
    index, _ = routed(tokens, top_k, experts)
    out = _zeros(slots, width, dtype=torch.bfloat16)
    operands = _zeros(slots, inner), _zeros(slots, inner // 32), _zeros(experts, width, inner)
    parts = Operands(
        *operands, _zeros(experts, width, inner // 32), *index, slots, DEFAULT_BLOCK_M, 1,
        _zeros(slots, dtype=torch.float32),
    )  # fmt: skip

    def time(choice: Choice) -> float:
        return kernel_us(lambda: launch(choice.kernel, choice.configuration, out, parts))

    split = time(wave_split.default_choice(slots, experts, width, inner, MI355X.cu_count))
    return {"split": split} | {f"{columns} columns": time(stream.choice(columns)) for columns in (128, 256, 512)}


# (tokens, inner size, hidden size, experts, choices): Qwen3-235B-A22B at TP 8, 4 and 1, DeepSeek-V3 at TP 8.
FUSED_CELLS = (
    (1, 192, 4096, 128, 8), (1, 384, 4096, 128, 8), (1, 1536, 4096, 128, 8), (1, 256, 7168, 256, 8),
    (4, 384, 4096, 128, 8), (16, 192, 4096, 128, 8), (16, 384, 4096, 128, 8), (16, 256, 7168, 256, 8),
    (64, 192, 4096, 128, 8), (64, 384, 4096, 128, 8), (64, 256, 7168, 256, 8),
)  # fmt: skip


def by_fusing(cell: tuple[int, int, int, int, int]) -> dict[str, float]:
    """Return microseconds of gate and up with SwiGLU, replayed: in two launches, and in one by its split of K."""
    tokens, inner, width, experts, top_k = cell
    slots, (index, distinct), kind = tokens * top_k, routed(tokens, top_k, experts), Scales.BLOCKS
    f8, f32 = torch.float8_e4m3fn, torch.float32
    hidden = _zeros(tokens, width, dtype=f8), _zeros(tokens, -(-width // 128), dtype=f32)
    w_scale = _zeros(experts, -(-2 * inner // 128), -(-width // 128), dtype=f32)
    operands = *hidden, _zeros(experts, 2 * inner, width, dtype=f8), w_scale, *index
    out = _zeros(slots, inner, dtype=f8), _zeros(slots, -(-inner // 128), dtype=f32)
    sizes = experts, 2 * inner, width, slots, tokens, top_k, DEFAULT_BLOCK_M

    def two_launches() -> object:
        counts = slots, DEFAULT_BLOCK_M, top_k
        product = fp8.grouped_fp8_linear(*operands, *counts, uncovered="undefined")
        return swiglu_fp8_dynamic(product, out_format="blocks")

    def time(parts: int, groups: int) -> float:
        workspace = split_workspace(slots, 2 * inner, groups, torch.device("cpu"), kind.block)
        activation = 1.0, 0.0, float("inf"), False
        launch = None, *sizes, *activation, int(kind), workspace, 16, parts, groups
        return replay_us(lambda: fp8.fp8_gate_up_out(*out, *operands, *launch))

    splits = {"1, 1": (1, 1), "1, 2": (1, 2), "2, 2": (2, 2), "2, 4": (2, 4)}
    times = {name: time(*split) for name, split in splits.items()}
    return {"blocks": inner // 32 * distinct, "two launches": replay_us(two_launches)} | times


TABLES: dict[str, tuple[str, Callable[..., dict[str, float]], tuple[tuple[int, ...], ...]]] = {
    "waves": ("tokens, N, K, E, top_k", by_waves, WAVE_CELLS),
    "groups": ("tokens, inner, E, top_k", by_groups, GROUP_CELLS),
    "columns": ("tokens, inner", by_columns, COLUMN_CELLS),
    "fused": ("tokens, inner, hidden, E, top_k", by_fusing, FUSED_CELLS),
}


@click.command()
@click.option("--published", type=click.Path(exists=True, path_type=Path), help=f"Folder with {FILE}.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=16, show_default=True, help="Most tokens of a row.")
@click.option("--waves", is_flag=True, help="Times by waves for each 16 columns instead.")
@click.option("--groups", is_flag=True, help="Times by the work-groups that share the K of a block instead.")
@click.option("--columns", is_flag=True, help="Times by the columns that a work-group streams instead.")
@click.option("--fused", is_flag=True, help="Times of fp8 gate and up with SwiGLU, in one launch and two, instead.")
@TO_CSV
def main(published: Path | None, max_tokens: int, csv_path: Path | None, **tables: bool) -> None:
    """Print modelled times, beside published ones, or by a parameter; the last line is a JSON object."""
    asked = [name for name, given in tables.items() if given]
    if len(asked) > 1:
        raise click.UsageError("--waves, --groups, --columns and --fused are separate tables: give one of them")
    if asked:
        heading, by, cells = TABLES[asked[0]]
        found = {" ".join(map(str, cell)): by(cell) for cell in cells}
        console().print(table_of([{heading: name, **times} for name, times in found.items()], "modelled microseconds"))
        click.echo(json.dumps({"version": MI355X.version, "kernel_us": found}))
        return
    if published is None:
        raise click.UsageError(
            f"--published is missing: the folder that holds {FILE}, or --waves, --groups, --columns or --fused"
        )
    with (published / FILE).open(newline="") as file:
        rows = [compared(row) for row in csv.DictReader(file) if int(row["tokens"]) <= max_tokens]
    console().print(table_of([asdict(row) for row in rows], "microseconds, ours modelled"))
    if csv_path:
        write_csv(csv_path, rows)
    click.echo(json.dumps({"version": MI355X.version, "figure": "kernel_us", "seed": SEED, "rows": len(rows),
                           "worst": max((row.both_ratio for row in rows), default=None)}))  # fmt: skip


if __name__ == "__main__":
    main()
