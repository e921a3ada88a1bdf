"""Our GEMMs beside what a user would run instead: the best published MI355X time, and AMD's own kernels.

    python op_tests/bench_peers.py --published DIR [--rows N --seed S | --all] [--large] [--floor]
                                   [--csv FILE] [--plot FILE]

* MX-FP8, at the weight shapes of the tuned table x M = 1 to 64: ours, *modelled*, over the best *published* time of any
  fp8 operand type at the same M, N and K (``gemm_peers_gfx950.csv``: the fastest of AMD's kernel libraries).
* MXFP4, at published problems with M of at most 64, or of more with ``--large``: ours over AMD's own code object
  (``f4gemm_gfx950.csv``), both *modelled* in the same way, so that errors of the model cancel. ``--rows`` of them,
  drawn at random.

Published times are kernel durations over rotated operands (see the folder's README), so ours are ``kernel_us``, with
operands where that rotation leaves them: in HBM, or in the Infinity Cache where all copies fit it. A launch that splits
K counts both of its kernels.

* With ``HIPFORGE_EMULATE=gfx942``: the skinny FP8 GEMM, *modelled* for an MI300X with weights in HBM, over what a post
  gives for a kernel of the same structure in a replayed graph (``seeds.csv``), so both are ``replay_us``.

``--floor`` adds what the model gives to a kernel that reads the weights and their scales in whole cache lines and
computes nothing (``helpers/streaming.py``). The difference is what activations, sums and results cost.

On a GPU a column of times *measured* in the same way is added, by torch's profiler. The
last line is one JSON object.
"""

from __future__ import annotations

import csv
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from helpers import published, streaming
from helpers.bench import table_of, write_csv

import hipforge
from hipforge import devices, plots
from hipforge.cli.options import PICTURE_OPTION, Output
from hipforge.cli.output import console
from hipforge.emulator.timing import Capture, estimate, machines, model
from hipforge.ops.core.formats import BLOCK
from hipforge.tuning.cases import DECODE_M, MINIMAX_M3

DEFAULT_ROWS = 40
SMALL_M = 64
SKINNY_OP, SKINNY_KERNEL = "skinny FP8 GEMM", "HF skinny GEMM"
SKINNY = "skinny fp8"
BITS = {"mxfp8": 8, "mxfp4": 4, SKINNY: 8}
MX = ("mxfp8", "mxfp4")
CALLS, WARM_UP = 101, 2
"""Of a measured time: as many as the published ones have."""


@dataclass(frozen=True)
class Peer:
    """The best published time of an operand type at one problem, and the library whose kernel it is."""

    operands: str
    m: int
    n: int
    k: int
    us: float
    library: str


@dataclass(frozen=True)
class Compared:
    """Ours beside one other kernel at one problem; microseconds of kernels.

    Attributes:
        ours: our operand type.
        m: rows of the activations.
        n: rows of the weight.
        k: columns of both.
        start: where the operands are when a kernel begins.
        beside: whose time ``their_us`` is.
        figure: what the microseconds are: of the kernel, or the interval of replayed calls.
        their_us: modelled for MXFP4, else published.
        their_source: which of the two it is.
        published_us: of the other kernel.
        our_us: modelled.
        our_launches: kernels that one of our calls launches.
        measured_us: ours on the GPU; None without one.
        floor_us: modelled, of reading the weights and their scales alone; None where it was not asked for.
    """

    ours: str
    m: int
    n: int
    k: int
    start: str
    beside: str
    figure: str
    their_us: float
    their_source: str
    published_us: float
    our_us: float
    our_launches: int
    measured_us: float | None = None
    floor_us: float | None = None

    @property
    def ratio(self) -> float:
        """Ours, modelled, over theirs."""
        return self.our_us / self.their_us


def peers(folder: Path) -> list[Peer]:
    """Return the rows of ``gemm_peers_gfx950.csv``."""
    with (folder / "gemm_peers_gfx950.csv").open(newline="") as file:
        return [
            Peer(row["operands"], int(row["M"]), int(row["N"]), int(row["K"]), float(row["us"]), row["library"])
            for row in csv.DictReader(file)
        ]


def best_fp8(found: Sequence[Peer]) -> dict[tuple[int, int, int], Peer]:
    """Return the fastest fp8 peer at each (M, N, K) that is a cell of ours as well."""
    ours = {(m, n, k) for k, n in MINIMAX_M3 for m in DECODE_M}
    best: dict[tuple[int, int, int], Peer] = {}
    for peer in found:
        cell = (peer.m, peer.n, peer.k)
        if peer.operands.startswith("fp8") and cell in ours and (cell not in best or peer.us < best[cell].us):
            best[cell] = peer
    return dict(sorted(best.items(), key=lambda item: (item[0][1:], item[0][0])))


def operands(m: int, n: int, k: int, bits: int, device: str) -> tuple[torch.Tensor, ...]:
    """Return payloads and scales of X[M, K] and W[N, K]; time does not depend on their values."""
    out: list[torch.Tensor] = []
    for rows in (m, n):
        out.append(torch.zeros((rows, k * bits // 8), dtype=torch.uint8, device=device))
        out.append(torch.full((rows, k // BLOCK), 127, dtype=torch.uint8, device=device))
    return tuple(out)


def modelled(call: Callable[[], Any], gpu: str, start: model.Start) -> tuple[model.Timing, int]:
    """Return the modelled times of a call and its number of launches."""
    capture = Capture()
    with capture.recording(skip_matrix=True):
        result = call()
    if result is None:
        raise click.ClickException("the call left the problem to its fallback: no kernel of ours ran")
    return estimate(capture, gpu, start), len(capture.launches())


def measured(call: Callable[..., Any], copies: Sequence[tuple[torch.Tensor, ...]]) -> float:
    """Return the mean kernel time of a call on the GPU, in microseconds, each call on the next copy of its operands."""
    from torch.profiler import ProfilerActivity, profile

    for i in range(WARM_UP):
        call(*copies[i % len(copies)])
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for i in range(CALLS):
            call(*copies[i % len(copies)])
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiled.key_averages()) / CALLS


def ours(op: Callable[..., Any], m: int, n: int, k: int, bits: int) -> tuple[float, int, model.Start, float | None]:
    """Return our modelled time, launches and start; and the measured time where there is a GPU."""
    parts = operands(m, n, k, bits, "cpu")
    touched = sum(part.nbytes for part in parts) + 2 * m * n
    start = published.start_of(touched)
    timing, launches = modelled(lambda: op(*parts), "MI355X", start)
    us = timing.kernel_us
    if devices.current().kind != "hip":
        return us, launches, start, None
    copies = [operands(m, n, k, bits, "cuda") for _ in range(published.copies_of(touched))]
    return us, launches, start, measured(op, copies)


def mxfp8(folder: Path) -> list[Compared]:
    """Return every cell of ours that has a published fp8 time."""
    rows = []
    for (m, n, k), peer in best_fp8(peers(folder)).items():
        us, launches, start, on_gpu = ours(hipforge.mxfp8_gemm, m, n, k, 8)
        beside = f"{peer.operands} ({peer.library})"
        rows.append(
            Compared("mxfp8", m, n, k, start, beside, "kernel_us", peer.us, "published", peer.us, us, launches, on_gpu)
        )
    return rows


def mxfp4(folder: Path, count: int | None, seed: int, large: bool) -> list[Compared]:
    """Return ``count`` published MXFP4 problems of few or many rows (None: all), AMD's kernel modelled beside ours."""
    found = [row for row in published.rows(folder) if (row.m > SMALL_M) == large]
    chosen = found if count is None else random.Random(seed).sample(found, min(count, len(found)))
    objects = published.Objects(folder)
    rows = []
    for row in sorted(chosen, key=lambda row: (row.n, row.k, row.m)):
        recorded = objects.record(row, rounds=model.DEFAULT_SAMPLING.rounds[1])
        theirs = model.launch_time(recorded, 0, machines.MI355X, row.start).kernel_us(machines.MI355X)
        us, launches, start, on_gpu = ours(hipforge.mxfp4_gemm, row.m, row.n, row.k, 4)
        rows.append(
            Compared("mxfp4", row.m, row.n, row.k, start, row.short, "kernel_us", theirs, "modelled", row.us, us,
                     launches, on_gpu)
        )  # fmt: skip
    return rows


def skinny(folder: Path) -> list[Compared]:
    """Return the skinny GEMM's rows of ``seeds.csv``; operands in HBM, as the post rotates over several weights."""
    with (folder / "seeds.csv").open(newline="") as file:
        seeds = [row for row in csv.DictReader(file) if row["op"] == SKINNY_OP and row["kernel"] == SKINNY_KERNEL]
    rows = []
    for seed in seeds:
        m, n, k, us = int(seed["M_or_rows"]), int(seed["N"]), int(seed["K"]), float(seed["us"])
        a, b = (torch.zeros((size, k), dtype=torch.float8_e4m3fnuz) for size in (m, n))
        scale = torch.ones(1)
        timing, launches = modelled(lambda a=a, b=b, s=scale: hipforge.skinny_gemm(a, b.t(), s), "MI300X", "cold")
        rows.append(
            Compared(SKINNY, m, n, k, "cold", SKINNY_KERNEL, "replay_us", us, "published", us, timing.replay_us,
                     launches)
        )  # fmt: skip
    return rows


def machine_of(kind: str) -> machines.Machine:
    """Return the GPU that an operand type of ours is modelled on."""
    return machines.MI300X if kind == SKINNY else machines.MI355X


def with_floor(row: Compared) -> Compared:
    """Return the row with the modelled time of reading its weights and scales once."""
    weights = row.n * row.k * BITS[row.ours] // 8
    scales = row.n * row.k // BLOCK if row.ours in MX else 0
    timing = streaming.least(weights + scales, machine_of(row.ours), row.start)
    return replace(row, floor_us=timing.replay_us if row.figure == "replay_us" else timing.kernel_us)


def summary(rows: Sequence[Compared]) -> dict[str, float]:
    """Return how many rows there are, the median ratio, and the share of rows in which we are not slower."""
    ratios = [row.ratio for row in rows]
    floors = [row.floor_us / row.their_us for row in rows if row.floor_us is not None]
    return {
        "rows": len(rows),
        "median_ratio": round(statistics.median(ratios), 4),
        "not_slower": round(sum(ratio <= 1 for ratio in ratios) / len(ratios), 4),
        "worst_ratio": round(max(ratios), 4),
        **({"median_floor_ratio": round(statistics.median(floors), 4)} if floors else {}),
    }


def plot(rows: Sequence[Compared], path: Path) -> None:
    """Draw ours over theirs by weight shape, one panel per operand type."""
    kinds = list(dict.fromkeys(row.ours for row in rows))
    with plots.figure(path, len(kinds), down=True, size=(9, 4)) as all_axes:
        for axes, kind in zip(all_axes, kinds, strict=True):
            of = [row for row in rows if row.ours == kind]
            shapes = list(dict.fromkeys((row.n, row.k) for row in of))
            for m in sorted({row.m for row in of}):
                at = [row for row in of if row.m == m]
                axes.scatter(
                    [shapes.index((row.n, row.k)) for row in at], [row.ratio for row in at], s=12, label=f"M = {m}"
                )
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_xticks(range(len(shapes)), [f"{n} × {k}" for n, k in shapes], rotation=90, fontsize=6)
            axes.set(title=f"{kind}: ours (modelled) over {of[0].their_source} time", ylabel="ratio", ylim=(0, None))
            axes.legend(fontsize="x-small", ncol=4)


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option("--published", "folder", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--only", type=click.Choice(["mxfp8", "mxfp4"]), help="one of the two parts")
@click.option("--rows", "count", default=DEFAULT_ROWS, show_default=True, help="MXFP4 problems, drawn at random")
@click.option("--all", "every", is_flag=True, help="all MXFP4 problems")
@click.option("--large", is_flag=True, help=f"MXFP4 problems with M above {SMALL_M}")
@click.option("--floor", is_flag=True, help="also model a kernel that only reads the weights")
@click.option("--seed", default=1, show_default=True)
@click.option("--csv", "csv_path", type=Output(), help="also write the table here")
@PICTURE_OPTION
def main(
    folder: Path,
    only: str | None,
    count: int,
    every: bool,
    large: bool,
    floor: bool,
    seed: int,
    csv_path: Path | None,
    picture: Path | None,
) -> None:
    if devices.current().arch_of() == machines.MI300X.arch:
        rows = skinny(folder)
    else:
        rows = [] if only == "mxfp4" else mxfp8(folder)
        if only != "mxfp8":
            rows += mxfp4(folder, None if every else count, seed, large)
    if floor:
        rows = [with_floor(row) for row in rows]
    shown = [{**asdict(row), "ratio": round(row.ratio, 4)} for row in rows]
    console().print(table_of(shown, "microseconds: ours (modelled) beside others"))
    if csv_path is not None:
        write_csv(csv_path, shown)
    if picture is not None:
        plot(rows, picture)
    kinds = dict.fromkeys(row.ours for row in rows)
    figures = {kind: summary([row for row in rows if row.ours == kind]) for kind in kinds}
    versions = sorted({machine_of(kind).version for kind in kinds})
    print(json.dumps({**figures, "machine": ", ".join(versions)}))


if __name__ == "__main__":
    main()
