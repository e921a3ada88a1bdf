"""Judge the model of time by AMD's published MI355X times: modelled against published, row by row.

    python op_tests/bench_time_model.py --published DIR [--rows N --seed S | --all] [--fit] [--cache DIR]
    python op_tests/bench_time_model.py --published DIR --whole 30     # samples against whole simulations
    python op_tests/bench_time_model.py --published DIR --rank 100     # is the published winner the fastest?

The kernels are sorted by their number of rows and dealt alternately into two halves. A row's time comes from the
parameters that were fitted on the *other* half (``helpers/time_model_halves.json``, made by ``--fit``), so that no
kernel is judged by parameters that saw it. The package ships parameters that are fitted on all kernels. The baseline,
a formula with seven parameters, is fitted and judged in the same way.

Writes a table, ``time_model.csv`` and a scatter plot to ``--out``. The last line is one JSON object. Every time from
the model is *modelled*; the published ones are AMD's (tuned tables of ROCm/aiter).
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import fit_time_model as fitting
import numpy as np
from helpers import closed_form, published
from helpers.bench import write_csv
from helpers.published import Row
from rich.table import Table

from hipforge import plots
from hipforge.cli.output import console
from hipforge.emulator.timing import machines, model
from hipforge.errors import ConfigError

HALVES = Path(__file__).parent / "helpers" / "time_model_halves.json"
DEFAULT_ROWS = 120
JUDGED = model.Sampling(rounds=(3, 6), iterations=(8, 16))
"""What is simulated of a row: within 1 % of the package's default, at half the cost."""
FIT_PER_KERNEL, FIT_SEED = 12, 7
WITHIN = 0.10
RANKED = fitting.SAMPLING
"""What is simulated of every kernel at a ranked shape, 24 times as many launches as shapes."""
WHOLE_ROUNDS, WHOLE_WORK = 64, 25_000_000
"""Rows with at most so many rounds, and so many work-groups times K, are simulated whole."""
K_PER_LOOP = 1024
"""The most of K that one iteration of a published kernel's loop takes (counted)."""


@dataclass(frozen=True)
class Judged:
    """One row: published time, and the times of the model and the baseline that have not seen its kernel."""

    kernel: str
    m: int
    n: int
    k: int
    batch: str
    published_us: float
    modelled_us: float
    closed_form_us: float

    @property
    def error(self) -> float:
        """Relative and signed: positive where the model is too slow."""
        return self.modelled_us / self.published_us - 1


def halves(rows: Sequence[Row]) -> tuple[set[str], set[str]]:
    """Deal the kernels, most rows first, alternately into two halves."""
    count: dict[str, int] = defaultdict(int)
    for row in rows:
        count[row.kernel] += 1
    ranked = sorted(count, key=lambda kernel: (-count[kernel], kernel))
    return set(ranked[::2]), set(ranked[1::2])


def fit_halves(rows: Sequence[Row], predict: fitting.Predictor, steps: int) -> dict[str, Any]:
    """Fit model and baseline on each half's rows of the fitted batch; return the parameters."""
    start = {name: machines.MI355X[name] for name in fitting.fitted_names(machines.MI355X)}
    out: dict[str, Any] = {}
    for name, kernels in zip(("first", "second"), halves(rows), strict=True):
        of = [row for row in rows if row.kernel in kernels]
        chosen = fitting.choose(of, FIT_PER_KERNEL, FIT_SEED)
        print(f"fit on the {name} half: {len(chosen)} rows of {len(kernels)} kernels")
        out[name] = {
            "kernels": sorted(kernels),
            "rows": len(chosen),
            "model": fitting.fit(chosen, predict, start, fitting.model_limits(), steps=steps),
            "closed_form": fitting.fit_closed_form([row for row in of if row.batch == fitting.BATCH]),
        }
    return out


def judge(rows: Sequence[Row], predict: fitting.Predictor, parameters: Mapping[str, Any]) -> list[Judged]:
    """Return every row's times, from parameters fitted on the half that its kernel is not in."""
    out: list[Judged] = []
    for name, other in (("first", "second"), ("second", "first")):
        of = [row for row in rows if row.kernel in set(parameters[name]["kernels"])]
        if not of:
            continue
        unseen = parameters[other]
        modelled = predict(of, unseen["model"], JUDGED)
        out += [
            Judged(
                row.short, row.m, row.n, row.k, row.batch, row.us, float(us),
                closed_form.microseconds(row, unseen["closed_form"]),
            )
            for row, us in zip(of, modelled, strict=True)
        ]  # fmt: skip
    return out


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Return the median and the 90th percentile of |error|."""
    size = np.abs(np.array(errors))
    return {"rows": len(size), "median": float(np.median(size)), "p90": float(np.quantile(size, 0.9))}


def per_kernel(rows: Sequence[Judged]) -> dict[str, dict[str, float]]:
    """Return each kernel's rows, signed median and median |error|."""
    of: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        of[row.kernel].append(row.error)
    return {
        kernel: {
            "rows": len(errors),
            "signed_median": float(np.median(errors)),
            "median": float(np.median(np.abs(errors))),
        }
        for kernel, errors in sorted(of.items(), key=lambda item: -len(item[1]))
    }


def rank(
    rows: Sequence[Row], predict: fitting.Predictor, parameters: Mapping[str, Any], count: int, seed: int
) -> dict[str, Any]:
    """Time every kernel at ``count`` published shapes: how often is the published winner within 10 % of the best?

    A winner is timed with parameters that have not seen it; so is every other kernel.
    """
    by_kernel = {kernel: name for name in ("first", "second") for kernel in parameters[name]["kernels"]}
    chosen = random.Random(seed).sample(list(rows), min(count, len(rows)))
    shapes: dict[str, list[tuple[int, Row]]] = {"first": [], "second": []}
    for number, row in enumerate(chosen):
        for kernel, half in by_kernel.items():
            shapes[half].append((number, Row(kernel, row.m, row.n, row.k, row.us, row.batch)))
    times: list[dict[str, float]] = [{} for _ in chosen]
    for half, other in (("first", "second"), ("second", "first")):
        of = [row for _number, row in shapes[half]]
        for (number, row), us in zip(shapes[half], predict(of, parameters[other]["model"], RANKED), strict=True):
            times[number][row.kernel] = float(us)
    lost = [times[number][row.kernel] / min(times[number].values()) - 1 for number, row in enumerate(chosen)]
    return {"shapes": len(chosen), "within_10_percent": sum(x <= WITHIN for x in lost) / max(1, len(lost)),
            "median_loss": float(np.median(lost))}  # fmt: skip


def against_whole(rows: Sequence[Row], predict: fitting.Predictor, count: int, seed: int) -> dict[str, Any]:
    """Time ``count`` rows by the package's sample and whole: how far apart are they?

    Rows whose sample is the whole launch are left out: they cannot differ.

    Args:
        rows: to choose from.
        predict: with recordings of at least ``WHOLE_ROUNDS`` rounds.
        count: rows to compare.
        seed: of the choice.
    """
    rounds, iterations = model.DEFAULT_SAMPLING.rounds[1], model.DEFAULT_SAMPLING.iterations[1]
    small = [
        row
        for row in rows
        if row.rounds <= WHOLE_ROUNDS
        and row.groups * row.k <= WHOLE_WORK
        and (row.rounds > rounds or row.k > iterations * K_PER_LOOP)
    ]
    chosen = random.Random(seed).sample(small, min(count, len(small)))
    times = [predict(chosen, {}, sampling) for sampling in (model.DEFAULT_SAMPLING, JUDGED, model.WHOLE_LAUNCH)]
    table = Table(title="modelled from a sample and whole")
    for column in ("row", "rounds", "whole µs", "sampled µs", "difference", "as judged"):
        table.add_column(column, justify="right")
    for row, sampled, judged, whole in zip(chosen, *times, strict=True):
        table.add_row(str(row), str(row.rounds), f"{whole:.2f}", f"{sampled:.2f}", f"{sampled / whole - 1:+.1%}",
                      f"{judged / whole - 1:+.1%}")  # fmt: skip
    console().print(table)
    off, off_judged = (np.abs(of / times[2] - 1) for of in times[:2])
    return {"rows": len(chosen), "most": float(off.max()), "median": float(np.median(off)),
            "as_judged_most": float(off_judged.max())}  # fmt: skip


def plot(rows: Sequence[Judged], path: Path) -> None:
    """Draw modelled over published times."""
    with plots.figure(path, size=(7, 7)) as (axes,):
        for batch in sorted({row.batch for row in rows}):
            of = [row for row in rows if row.batch == batch]
            axes.scatter([r.published_us for r in of], [r.modelled_us for r in of], s=8, label=f"{batch} ({len(of)})")
        span = [min(r.published_us for r in rows), max(r.published_us for r in rows)]
        for factor, style in ((1, "k-"), (0.85, "k:"), (1.15, "k:")):
            axes.plot(span, [factor * x for x in span], style, linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="published µs (MI355X)", ylabel="modelled µs, kernel not fitted")
        axes.legend(title="batch (rows)")


def report(rows: Sequence[Judged]) -> dict[str, Any]:
    """Print the tables and return their figures."""
    table = Table(title="error of modelled times on kernels that were not fitted")
    for column in ("rows of", "rows", "median", "p90", "closed form median", "p90"):
        table.add_column(column, justify="right")
    figures: dict[str, Any] = {}
    groups = {"all": list(rows)} | {b: [r for r in rows if r.batch == b] for b in sorted({r.batch for r in rows})}
    for name, of in groups.items():
        of_model = summary([row.error for row in of])
        of_form = summary([row.closed_form_us / row.published_us - 1 for row in of])
        shown = [f"{s[key]:.1%}" for s in (of_model, of_form) for key in ("median", "p90")]
        table.add_row(name, str(len(of)), *shown)
        figures[name] = {**of_model, "closed_form": of_form}
    console().print(table)
    kernels = per_kernel(rows)
    table = Table(title="by kernel, not fitted")
    for column in ("kernel", "rows", "signed median", "median"):
        table.add_column(column, justify="right")
    for kernel, of_kernel in kernels.items():
        table.add_row(
            kernel, str(int(of_kernel["rows"])), f"{of_kernel['signed_median']:+.1%}", f"{of_kernel['median']:.1%}"
        )
    console().print(table)
    figures["median_of_kernels"] = float(np.median([of["median"] for of in kernels.values()]))
    figures["worst_signed_median"] = max((abs(of["signed_median"]) for of in kernels.values()), default=0.0)
    return figures


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option("--published", "folder", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--rows", "count", default=DEFAULT_ROWS, show_default=True, help="how many rows, drawn at random")
@click.option("--all", "every", is_flag=True, help="all rows")
@click.option("--seed", default=1, show_default=True)
@click.option("--fit", "refit", is_flag=True, help=f"fit both halves again and write {HALVES.name}")
@click.option("--steps", default=5, show_default=True, help="of each fit")
@click.option("--rank", "ranked", default=0, help="only rank all kernels at so many shapes; 100 for the goal")
@click.option("--whole", "wholes", default=0, help="only compare so many rows with whole simulations; 30 for the goal")
@click.option("--cache", type=click.Path(path_type=Path), help="folder for recordings, made on the first run")
@click.option("--workers", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path(), help="folder of the CSV and the plot")
def main(
    folder: Path, count: int, every: bool, seed: int, refit: bool, steps: int, ranked: int, wholes: int,
    cache: Path | None, workers: int, out: Path,
) -> None:  # fmt: skip
    began = time.perf_counter()
    everything = published.rows(folder)
    if wholes:
        predict = fitting.Predictor(folder, cache, workers, WHOLE_ROUNDS)
        finish({"whole": against_whole(everything, predict, wholes, seed)}, began)
        return
    predict = fitting.Predictor(folder, cache, workers)
    if refit:
        HALVES.write_text(json.dumps(fit_halves(everything, predict, steps), indent=1) + "\n")
    if not HALVES.exists():
        raise click.ClickException(f"{HALVES} is missing: run with --fit once, which fits both halves")
    parameters = json.loads(HALVES.read_text())
    if ranked:
        few = fitting.Predictor(folder, cache, workers, RANKED.rounds[1])
        finish({"ranking": rank(everything, few, parameters, ranked, seed)}, began)
        return
    rows = everything if every else random.Random(seed).sample(everything, min(count, len(everything)))
    judged = judge(rows, predict, parameters)
    figures = report(judged)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "time_model.csv", [{**asdict(row), "error": f"{row.error:.4f}"} for row in judged])
    try:
        plot(judged, out / "time_model.png")
    except ConfigError as error:
        console().print(f"no plot: {error}")
    overall = figures["all"]
    finish({"rows": len(judged), "median": overall["median"], "p90": overall["p90"], **figures}, began)


def finish(figures: Mapping[str, Any], began: float) -> None:
    """Print the last line: the figures, the seconds of the run and the version of the parameters."""
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({**figures, "seconds": seconds, "machine": machines.MI355X.version}))


if __name__ == "__main__":
    main()
