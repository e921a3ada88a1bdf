"""Pictures: what is drawn and labelled, read back from SVG text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hipforge import devices, plots
from hipforge.errors import ConfigError
from hipforge.tuning import driver, pool
from hipforge.tuning.cases import Cell
from hipforge.tuning.families.mxfp8_gemm import TUNER
from hipforge.tuning.search import Candidate, Trial
from hipforge.tuning.work import Done


@pytest.fixture
def picture(tmp_path: Path) -> Iterator[Path]:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        yield tmp_path / "picture.svg"


def texts(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())


def test_bars_say_their_ratio_to_the_first_of_their_group(picture: Path) -> None:
    values = [
        plots.Bar("1 × 2", "ours", 10), plots.Bar("1 × 2", "theirs", 25),
        plots.Bar("3 × 4", "ours", 8), plots.Bar("3 × 4", "theirs", 6),
    ]  # fmt: skip
    plots.bars(values, "GEMM", "µs", picture)
    found = texts(picture)
    assert [text for text in found if re.fullmatch(r"\d\.\d\d", text)] == ["1.00", "1.00", "2.50", "0.75"]
    assert {"ours", "theirs", "1 × 2", "3 × 4", "µs"} <= set(found)


def test_panels_are_titled_and_a_series_may_lack_a_group(picture: Path) -> None:
    plots.bars([plots.Bar("a", "x", 1, "M = 1"), plots.Bar("b", "y", 2, "M = 4")], "GEMM", "µs", picture)
    assert {"GEMM M = 1", "M = 4"} <= set(texts(picture))


def test_launches_of_a_kernel_share_a_line_in_the_order_of_the_first(picture: Path) -> None:
    plots.kernels([("norm", 0.0, 2.0), ("product<8, 2>", 1.5, 9.0), ("norm", 11.0, 2.5)], "a step", picture)
    found = texts(picture)
    assert [text for text in found if not re.fullmatch(r"[\d.]+", text)] == [
        "µs (measured)", "norm", "product&lt;8, 2&gt;", "a step",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: plots.bars([], "t", "µs", path),
        lambda path: plots.curves([], "t", "M", "µs", path),
        lambda path: plots.landscapes([], path),
    ],
)
def test_an_empty_picture_is_an_error(draw, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would be empty"):
        draw(tmp_path / "picture.png")


def trial(name: str, us: float | None, model_us: float | None = None) -> Trial:
    refused = None if us is not None else "spills"
    return Trial(Candidate(name, {}), None if us is None else us / 1e6, 0.0, refused, model_us=model_us)


def test_a_landscape_shows_what_the_model_of_time_saw_where_it_saw_anything() -> None:
    trials = [trial("a", 3.0, 7.5), trial("b", 4.0, 5.0), trial("c", 9.0), trial("d", None)]
    shown = driver.landscape("N=16", Done({"source": "model:1"}, trials=trials, chosen=trials[0]))
    assert shown == plots.Landscape("N=16 (model:1)", [(str(Candidate("b", {})), 5.0), (str(Candidate("a", {})), 7.5)],
                                    str(Candidate("a", {})), 1)  # fmt: skip
    counted = driver.landscape("N=16", Done({"source": "model:1"}, trials=[trial("a", 3.0), trial("b", 4.0)]))
    assert [us for _, us in counted.times] == pytest.approx([3.0, 4.0])


def test_tune_draws_the_cells_that_it_searched(picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current", lambda: devices.Device("emulator", "gfx950"))
    monkeypatch.setattr(driver, "merge_rows", lambda *_: None)
    trials = [trial(f"candidate {number}", 2.0 + number) for number in range(plots.MOST_CANDIDATES + 3)]
    done = Done({"source": "model:1"}, ["taken"], trials=trials, chosen=trials[1])
    monkeypatch.setattr(pool, "here", lambda tasks, _work: ((number, done) for number in reversed(range(len(tasks)))))
    cells = [Cell(16, 256, 1), Cell(48, 256, 1)]
    assert driver.tune(TUNER, cells, picture.parent / "t.csv", picture=picture) == 2
    found = texts(picture)
    titles = [text for text in found if "rejected" in text]
    assert titles == [f"{cell} (model:1): 0 rejected, 3 slower ones not shown" for cell in cells]
    assert found.count("1.50") == 2  # 3 µs over 2 µs, once for each cell
