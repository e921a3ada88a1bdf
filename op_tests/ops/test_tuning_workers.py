"""Tuning in several processes and on a Ray cluster: the same rows, nothing lost when a worker dies."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.dying_workers import die_always, die_once, task

from hipforge import devices
from hipforge.cli.main import cli
from hipforge.errors import ConfigError
from hipforge.ops.core.tuned import read_rows
from hipforge.ops.mxfp8_gemm.family import TABLE as MXFP8_GEMM
from hipforge.tuning import driver, pool
from hipforge.tuning.cases import Cell
from hipforge.tuning.families.mxfp8_gemm import TUNER
from hipforge.tuning.work import Done

SHAPES = ["--shapes", "n=48,k=256", "--shapes", "n=16,k=256", "-m", "1"]


def test_a_worker_that_dies_loses_nothing(tmp_path: Path) -> None:
    assert dict(pool.processes([task(n, tmp_path) for n in range(3)], 2, die_once)) == {n: n for n in range(3)}
    assert len(list(tmp_path.glob("2.*"))) == 2  # it was run again, by another process


def test_a_task_that_kills_every_worker_is_given_up_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MOST_DEATHS", 1)
    # As many workers as tasks: the one that dies takes the other with it before it ends, until each runs alone.
    results = dict(pool.processes([task(n, tmp_path) for n in range(2)], 2, die_always))
    assert results[0] == 0 and len(results) == 2
    assert results[1].row is None and "workers died 2 times in a row" in results[1].error


def test_workers_write_the_rows_that_one_process_writes_and_resume(tmp_path: Path) -> None:
    command = ["tune", "mxfp8_gemm", "-o"]
    alone, together = tmp_path / "alone.csv", tmp_path / "together.csv"
    for path, more in ((alone, []), (together, ["--workers", "2"])):
        done = CliRunner().invoke(cli, [*command, str(path), *SHAPES, *more])
        assert done.exit_code == 0, done.output
    assert "(2 of 2 done)" in done.output
    assert alone.read_bytes() == together.read_bytes()
    assert len(read_rows(MXFP8_GEMM, together)) == 2
    again = CliRunner().invoke(
        cli, ["tune", "mxfp8_gemm", "-o", str(together), *SHAPES, "--workers", "2", "--resume"]
    )
    assert "0 rows written" in again.output
    # Rows that the table has already travel to the workers.
    compared = CliRunner().invoke(cli, [*command, str(together), *SHAPES, "--workers", "2", "--compare"])
    assert compared.exit_code == 0 and "2 rows written" in compared.output, compared.output
    assert alone.read_bytes() == together.read_bytes()


def test_a_cell_that_fails_leaves_the_others_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current", lambda: devices.Device("emulator", "gfx950"))

    def results(tasks, work):
        yield 1, Done(None, [], "N=16: no candidate is usable")
        yield 0, work(tasks[0])

    monkeypatch.setattr(pool, "here", results)
    path = tmp_path / "t.csv"
    with pytest.raises(ConfigError, match="N=16: no candidate is usable"):
        driver.tune(TUNER, [Cell(48, 256, 1), Cell(16, 256, 1)], path)
    assert [row.key[3] for row in read_rows(MXFP8_GEMM, path)] == [48]


def test_a_gpu_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.Device, "arch_of", lambda self, index=0: "gfx950")
    monkeypatch.setattr(devices.Device, "cu_count", lambda self, index=0: 256)
    monkeypatch.setattr(devices, "current", lambda: devices.Device("hip", "gfx950"))
    with pytest.raises(ConfigError, match="disturb each other"):
        driver.tune(TUNER, [Cell(48, 256, 1)], tmp_path / "t.csv", workers=2)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_command_says_what_to_install(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["tune", "mxfp8_gemm", "-o", str(tmp_path / "t.csv"), *SHAPES, "--ray", "auto"])
    assert done.exit_code == 1 and "pip install ray" in done.output


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_ray_cluster_of_two_nodes_tunes_and_survives_a_dead_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)  # where the workers find die_once
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        assert dict(pool.ray_cluster([task(n, tmp_path) for n in range(4)], cluster.address, die_once)) == {
            n: n for n in range(4)
        }
        table = tmp_path / "t.csv"
        done = CliRunner().invoke(cli, ["tune", "mxfp8_gemm", "-o", str(table), *SHAPES, "--ray", cluster.address])
        assert done.exit_code == 0, done.output
        assert len(read_rows(MXFP8_GEMM, table)) == 2
    finally:
        cluster.shutdown()
