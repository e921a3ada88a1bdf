"""Fit the model of time to published rows: ``python op_tests/fit_time_model.py --published DIR``.

Prints the fitted parameters of ``emulator/timing/machines.py``. The sum over rows of a robust function of
log(modelled / published) is minimised by damped Gauss-Newton steps; each row counts by one over the square root of its
kernel's number of rows, so that a kernel with many rows does not decide alone.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from helpers import closed_form, published
from helpers.published import Row

from hipforge.emulator.timing import machines, model
from hipforge.emulator.timing.capture import Capture

BATCH = "2026-02"
"""The batch that is fitted: the largest of those that agree with each other."""
HUBER = 0.08
"""Residuals beyond this count linearly: rows with a gap that the model does not explain must not bend it."""
MANY_ROWS = 50
MOST_GROUPS = 512
"""Launches of more than two rounds are not fitted: each takes as long as five others and shows nothing else."""
PRIOR = 0.3
"""How strongly a parameter is held near the middle of its plausible range, in units of its width."""
SAMPLING = model.Sampling(rounds=(2, 4), iterations=(6, 12))

Predict = Callable[[Sequence[Row], Mapping[str, float]], np.ndarray]


def fitted_names(machine: machines.Machine) -> list[str]:
    """Return the parameters that the fit may change."""
    return [name for name, parameter in machine.parameters.items() if parameter.fitted]


class Predictor:
    """Modelled times of rows, in parallel; recordings stay loaded in each worker.

    Args:
        folder: of the published rows and objects.
        cache: folder for recordings, made on the first run; None to keep none.
        workers: processes.
        rounds: of work-groups that a recording has, at least as many as are simulated.
    """

    def __init__(self, folder: Path, cache: Path | None, workers: int, rounds: int = published.ROUNDS) -> None:
        self._folder, self._cache, self._rounds = folder, cache, rounds
        self._pool = get_context("fork").Pool(workers) if workers > 1 else None
        self._workers = workers

    def __call__(
        self, rows: Sequence[Row], values: Mapping[str, float], sampling: model.Sampling = SAMPLING
    ) -> np.ndarray:
        """Return microseconds of ``rows`` under parameter ``values``."""
        parts = [
            (self._folder, self._cache, self._rounds, list(rows[w :: self._workers]), dict(values), sampling)
            for w in range(self._workers)
        ]
        times = self._pool.map(_predict, parts, chunksize=1) if self._pool else [_predict(parts[0])]
        out = np.empty(len(rows))
        for w, part in enumerate(times):
            out[w :: self._workers] = part
        return out


_loaded: dict[Row, Capture] = {}
_objects: dict[Path, published.Objects] = {}


def _predict(part: tuple[Path, Path | None, int, list[Row], dict[str, float], model.Sampling]) -> list[float]:
    folder, cache, rounds, rows, values, sampling = part
    of = machines.MI355X.with_values(values)
    objects = _objects.setdefault(folder, published.Objects(folder))
    out = []
    for row in rows:
        capture = _loaded.get(row)
        if capture is None:
            capture = published.recording(row, objects, cache, rounds)
            if len(_loaded) < 400:
                _loaded[row] = capture
        out.append(model.launch_time(capture, 0, of, row.start, sampling).kernel_us(of))
    return out


def weights(rows: Sequence[Row]) -> np.ndarray:
    """Return each row's weight: one over the square root of its kernel's number of rows, 1 on average."""
    count = Counter(row.kernel for row in rows)
    weight = np.array([count[row.kernel] ** -0.5 for row in rows])
    return weight / weight.mean()


def fit(
    rows: Sequence[Row],
    predict: Predict,
    start: Mapping[str, float],
    limits: Mapping[str, tuple[float, float]],
    *,
    steps: int = 6,
    log: Callable[[str], None] = print,
) -> dict[str, float]:
    """Return the values, each within its limits, that bring ``predict`` closest to the rows' times."""
    names = list(limits)
    low = np.array([limits[name][0] for name in names])
    high = np.array([limits[name][1] for name in names])
    width = high - low
    published_us = np.array([row.us for row in rows])
    weight = weights(rows)

    def residuals(u: np.ndarray) -> np.ndarray:
        values = dict(zip(names, low + u * width, strict=True))
        return np.log(predict(rows, {**start, **values}) / published_us)

    def loss(r: np.ndarray, u: np.ndarray) -> float:
        size = np.abs(r)
        robust = np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
        return float((weight * robust).sum() + 0.5 * (HUBER * PRIOR) ** 2 * ((u - 0.5) ** 2).sum())

    u = np.clip((np.array([start[name] for name in names]) - low) / width, 0.01, 0.99)
    r = residuals(u)
    best, damping = loss(r, u), 0.03
    jacobian, fresh = np.zeros((len(rows), len(names))), False
    for step in range(steps):
        if not jacobian.any():
            for j in range(len(names)):
                moved = u.copy()
                moved[j] += 0.06 if u[j] < 0.5 else -0.06
                jacobian[:, j] = (residuals(moved) - r) / (moved[j] - u[j])
            fresh = True
        robust = weight * np.minimum(1, HUBER / np.maximum(1e-9, np.abs(r)))
        prior = (HUBER * PRIOR) ** 2
        normal = jacobian.T @ (robust[:, None] * jacobian) + prior * np.eye(len(names))
        slope = jacobian.T @ (robust * r) + prior * (u - 0.5)
        gain = 0.0
        for _ in range(3):
            move = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope)
            there = np.clip(u + np.clip(move, -0.25, 0.25), 0, 1)
            tried = residuals(there)
            moved_by = there - u
            if moved_by @ moved_by:  # Broyden's update: what the trial showed, whether it is taken or not
                jacobian += np.outer(tried - r - jacobian @ moved_by, moved_by) / (moved_by @ moved_by)
            if loss(tried, there) < best:
                gain, u, r, best = best - loss(tried, there), there, tried, loss(tried, there)
                damping /= 3
                break
            damping *= 4
        size = np.abs(np.exp(r) - 1)
        log(f"step {step}: loss {best:.4f} median {np.median(size):.3f} p90 {np.quantile(size, 0.9):.3f}")
        if gain < 0.003 * best:
            if fresh and step:
                break
            jacobian[:] = 0  # it is stale: start again
        fresh = False
    return dict(zip(names, (low + u * width).tolist(), strict=True))


def choose(rows: Sequence[Row], per_kernel: int, seed: int) -> list[Row]:
    """Return up to ``per_kernel`` rows of each kernel in the fitted batch, spread over short and long times.

    Kernels with many rows give twice as many.
    """
    rng = random.Random(seed)
    fitted = [row for row in rows if row.batch == BATCH and row.groups <= MOST_GROUPS]
    out = []
    for kernel in sorted({row.kernel for row in fitted}):
        of = sorted((row for row in fitted if row.kernel == kernel), key=lambda row: row.us)
        wanted = per_kernel * (2 if len(of) >= MANY_ROWS else 1)
        if len(of) > wanted:
            cuts = [round(i * len(of) / wanted) for i in range(wanted + 1)]
            of = [rng.choice(of[a:b]) for a, b in itertools.pairwise(cuts)]
        out += of
    return out


def model_limits() -> dict[str, tuple[float, float]]:
    """Return the plausible range of every fitted parameter."""
    table = machines.MI355X.parameters
    return {name: (table[name].low, table[name].high) for name in fitted_names(machines.MI355X)}


def closed_form_limits() -> dict[str, tuple[float, float]]:
    """Return ranges for the baseline, a factor of six around its start."""
    return {name: (value / 6, value * 6) for name, value in closed_form.START.items()}


def fit_closed_form(rows: Sequence[Row]) -> dict[str, float]:
    """Return the baseline's parameters for ``rows``."""

    def predict(of: Sequence[Row], values: Mapping[str, float]) -> np.ndarray:
        return np.array([closed_form.microseconds(row, values) for row in of])

    return fit(rows, predict, closed_form.START, closed_form_limits(), steps=60, log=lambda _line: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="folder for recordings, made on the first run")
    parser.add_argument("--per-kernel", type=int, default=8, help="rows per kernel")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    rows = choose(published.rows(args.published), args.per_kernel, args.seed)
    predict = Predictor(args.published, args.cache, args.workers)
    start = {name: machines.MI355X[name] for name in fitted_names(machines.MI355X)}
    found = fit(rows, predict, start, model_limits(), steps=args.steps)
    for name, value in found.items():
        parameter = machines.MI355X.parameters[name]
        print(f"{name} = {value:.4g} {parameter.unit} (plausible: {parameter.low:g} to {parameter.high:g})")
    times = predict(rows, found)
    for kernel in sorted({row.kernel for row in rows}):
        signed = [time / row.us - 1 for row, time in zip(rows, times, strict=True) if row.kernel == kernel]
        print(f"{kernel.rsplit('_', 1)[1]:>9} rows {len(signed):3d} signed median {np.median(signed):+.1%}")
    assert math.isfinite(float(times.sum()))


if __name__ == "__main__":
    main()
