"""``bench_peers.py`` on published tables made up here: what is compared with what, and what the last line says."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import bench_peers as bench
import pytest
import torch
from click.testing import CliRunner
from helpers import published, streaming

from hipforge import emulator
from hipforge.emulator.timing import machines

ROWS = """operands,M,N,K,us,library
bf16,1,768,6144,1.0,asm
fp8 128x128-block,1,768,6144,7.5,ck
fp8 per-token,1,768,6144,5.25,flydsl
fp8 per-token,1,768,6400,1.0,flydsl
fp8 per-token,3,768,6144,1.0,flydsl
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gemm_peers_gfx950.csv").write_text(ROWS)
    return tmp_path


def test_a_cell_is_compared_with_the_fastest_fp8_operand_type(folder: Path) -> None:
    # bf16 is not fp8; K = 6400 and M = 3 are not cells of ours.
    assert bench.best_fp8(bench.peers(folder)) == {
        (1, 768, 6144): bench.Peer("fp8 per-token", 1, 768, 6144, 5.25, "flydsl")
    }


@pytest.mark.parametrize(
    ("size", "copies", "start"),
    [
        (2_534_653, 101, "mall"),  # 101 copies are 255,999,953 bytes
        (2_534_654, 101, "cold"),  # and here 256,000,054
        (1 << 30, 32, "cold"),  # 32 GiB of copies
        (64 << 30, 1, "cold"),
    ],
)
def test_operands_start_where_the_rotation_of_published_times_leaves_them(size: int, copies: int, start: str) -> None:
    assert (published.copies_of(size), published.start_of(size)) == (copies, start)


def test_the_last_line_summarises_the_rows_of_the_csv(folder: Path) -> None:
    target, picture = folder / "rows.csv", folder / "rows.png"
    arguments = ["--published", str(folder), "--only", "mxfp8", "--csv", str(target), "--plot", str(picture)]
    done = CliRunner().invoke(bench.main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    with target.open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert (row["beside"], row["their_source"], row["start"]) == ("fp8 per-token (flydsl)", "published", "cold")
    assert row["measured_us"] == ""  # nothing is measured without a GPU
    # 4.7 MB of weight in few microseconds, and no kernel takes less than the 3.4 us of the smallest published one.
    assert 3.4 < float(row["our_us"]) < 10
    ratio = round(float(row["our_us"]) / 5.25, 4)
    said = json.loads(done.output.splitlines()[-1])["mxfp8"]
    assert said == {"rows": 1, "median_ratio": ratio, "not_slower": float(ratio <= 1), "worst_ratio": ratio}


def test_floor_is_what_reading_the_weights_alone_takes(folder: Path) -> None:
    target = folder / "rows.csv"
    arguments = ["--published", str(folder), "--only", "mxfp8", "--floor", "--csv", str(target)]
    done = CliRunner().invoke(bench.main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    with target.open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    weights = 768 * 6144 * 33 // 32
    floor = streaming.least(weights, machines.MI355X).kernel_us
    assert float(row["floor_us"]) == floor
    # A launch starts, and then reads at the peak of HBM at most.
    assert (
        machines.MI355X["start_ns"] / 1e3 + weights / machines.MI355X["hbm_gbps"] / 1e3 < floor < float(row["our_us"])
    )
    assert json.loads(done.output.splitlines()[-1])["mxfp8"]["median_floor_ratio"] == round(floor / 5.25, 4)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("loads", [1, 255, 1024 + 7])
def test_the_stream_reads_every_byte_once(loads: int, in_turn: bool) -> None:
    data = torch.zeros(loads * streaming.LOAD_BYTES, dtype=torch.uint8)
    out = torch.zeros(1, dtype=torch.int32)
    with emulator.counters() as counted:
        streaming.bench_stream_out(out, data, 3, 4, in_turn)
    assert {name: tensor.loaded for name, tensor in counted.tensors.items()} == {"data": data.nbytes}
