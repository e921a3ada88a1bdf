"""``bench_time_model.py`` with times made up here: what is ranked, and compared with whole launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import bench_time_model as bench
import fit_time_model as fitting
import numpy as np
import pytest
from helpers.published import Row

from hipforge.emulator.timing import model

SMALL, LARGE = "gemm_32x128", "gemm_256x256"
PARAMETERS = {
    "first": {"kernels": [SMALL], "model": {"us": 1.0}},
    "second": {"kernels": [LARGE], "model": {"us": 2.0}},
}


def row(kernel: str, m: int, n: int, k: int, batch: str = fitting.BATCH) -> Row:
    return Row(kernel, m, n, k, 10.0, batch)


@pytest.mark.parametrize(("slower", "share"), [(1.0, 1.0), (1.09, 1.0), (1.11, 0.5)])
def test_a_winner_is_within_ten_percent_of_the_fastest_modelled_kernel(slower: float, share: float) -> None:
    def predict(rows: Sequence[Row], values: Mapping[str, float], _sampling: model.Sampling) -> np.ndarray:
        # Each half is timed with the parameters of the other: the first kernel with 2, the second with 1.
        assert {of.kernel for of in rows} == {SMALL if values["us"] == 2.0 else LARGE}
        return np.array([slower * 5 if of.kernel == SMALL else 5.0 for of in rows])

    found = bench.rank([row(SMALL, 8, 128, 256), row(LARGE, 256, 256, 256)], predict, PARAMETERS, 9, seed=1)
    assert (found["shapes"], found["within_10_percent"]) == (2, share)


def test_whole_launches_are_compared_where_a_sample_leaves_something_out() -> None:
    seen: list[Row] = []

    def predict(rows: Sequence[Row], _values: Mapping[str, float], sampling: model.Sampling) -> np.ndarray:
        seen.extend(rows)
        return np.full(len(rows), {model.WHOLE_LAUNCH: 100.0, model.DEFAULT_SAMPLING: 101.0}.get(sampling, 97.0))

    most = model.DEFAULT_SAMPLING.rounds[1] * 256 * 32  # rows of D that the sample's rounds hold
    long, deep = row(SMALL, 8, 128, 25 * 1024), row(SMALL, most + 1, 128, 256)
    left_out = [row(SMALL, 8, 128, 24 * 1024), row(SMALL, most, 128, 256), row(LARGE, 65536, 65536, 8192)]
    found = bench.against_whole([long, deep, *left_out], predict, 30, seed=1)
    assert set(seen) == {long, deep}
    assert found == pytest.approx({"rows": 2, "most": 0.01, "median": 0.01, "as_judged_most": 0.03})
