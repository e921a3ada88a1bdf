"""The tuner's parts: cells, search, rows, the merging CSV writer, the model; and the whole of it on the emulator."""

import dataclasses
import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from hipforge import devices, settings
from hipforge.cli.main import cli
from hipforge.emulator.timing import machines
from hipforge.errors import BuildError, ConfigError, EmulatorFault
from hipforge.jit.cache import locks
from hipforge.ops.core.tuned import read_rows, read_table
from hipforge.ops.mxfp4_gemm.kernels.waves import ring_steps
from hipforge.ops.mxfp8_gemm.family import TABLE as MXFP8_GEMM
from hipforge.ops.mxfp8_gemm.kernels import gemv, mfma, wave_split
from hipforge.tuning import driver, model, timing, work
from hipforge.tuning.cases import Cell, parse_shape, read_untuned
from hipforge.tuning.families import mxfp4_gemm as mxfp4_gemm
from hipforge.tuning.families import mxfp8_gemm as mxfp8_gemm
from hipforge.tuning.options import CELLS
from hipforge.tuning.search import Candidate, Trial, search
from hipforge.tuning.table_writer import merge_rows

GEMV8 = gemv.GEMV.choice({"block_n": 8})
MFMA = mfma.MFMA.choice({"n_sub": 2, "k_splits": 4})


def modelled_row(m=1, n=1536, k=6144, candidate=GEMV8, cu_num=256):
    return work.row_for(
        mxfp8_gemm.TUNER,
        Cell(n, k, m),
        ("gfx950", cu_num),
        Trial(candidate, 5e-6, 0.0017),
        model.MI355X.source,
        None,
        3.0,
    )


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(devices, "current", lambda: devices.Device("emulator", "gfx950"))


def test_the_gain_is_over_the_default_rule_or_over_what_runs_where_that_has_no_kernel():
    chosen, other = Trial(GEMV8, 5e-6, 0.0), Trial(MFMA, 10e-6, 0.0)
    assert work._gain(GEMV8, chosen, [chosen], None) == "as the default rule"
    assert work._gain(MFMA, chosen, [chosen, other], None).startswith("2.00 x as fast as the default rule's")
    assert work._gain("K is odd", chosen, [chosen], (12.0, 7.5)) == (
        "1.50 x as fast as the best of the other ways; the default rule has no kernel (K is odd)"
    )
    assert "(K is odd): without this row no kernel runs" in work._gain("K is odd", chosen, [chosen], None)


# ---- cells -----------------------------------------------------------------------------------------------------------


def test_shapes_and_untuned_files_are_read_or_refused_by_value(tmp_path):
    assert parse_shape("2304,6144") == parse_shape("2304x6144") == parse_shape("k=6144,n=2304") == (6144, 2304)
    for text in ("6144", "6144,0", "a,b", "1,2,3"):
        with pytest.raises(ConfigError, match="expected N,K"):
            parse_shape(text)
    given = {"untuned": None, "config": None, "tp": 1, "batches": (2,)}
    tuner = lambda: SimpleNamespace(cell=Cell)
    wanted = CELLS["gemm"](tuner, shapes=("1,48,256", "48x256", "m=3,n=48,k=256"), **given)
    assert wanted == [Cell(48, 256, m) for m in (1, 2, 3)]
    with pytest.raises(ConfigError, match="-m is for --shapes of N,K"):
        CELLS["gemm"](tuner, shapes=("1,48,256",), **given)
    path = tmp_path / "untuned.csv"
    path.write_text("gfx, M,N,K\ngfx950,4,64,128\ngfx950,1,64,128\ngfx950,4,64,128\n")
    assert read_untuned(path) == [Cell(64, 128, 1), Cell(64, 128, 4)]
    path.write_bytes(b"M,N,K\n\xff\xfe\n")
    with pytest.raises(ConfigError, match=r"untuned\.csv: cannot read the list of shapes: 'utf-8' codec"):
        read_untuned(path)
    path.write_text("M,N\n1,2\n")
    with pytest.raises(ConfigError, match=r"untuned\.csv:1: column K is missing"):
        read_untuned(path)
    path.write_text("M,N,K\n1,2,x\n")
    with pytest.raises(ConfigError, match=r"untuned\.csv:2: M, N and K must be integers"):
        read_untuned(path)
    path.write_text("M,N,K\n1,2,32\n1,0,32\n")
    with pytest.raises(ConfigError, match=r"untuned\.csv:3: M, N and K must be positive; got 1, 0, 32"):
        read_untuned(path)


@pytest.mark.parametrize(
    ("cell", "gemv", "mfma", "by_waves", "tiles"),
    [
        (Cell(64, 1024, 1), 5, 12, 12, 0),
        (Cell(64, 256, 16), 5, 6, 6, 0),
        (Cell(64, 32, 32), 0, 3, 3, 1),
        (Cell(64, 32, 64), 0, 3, 6, 1),
    ],
)
def test_candidates_are_what_the_kernels_accept(cell, gemv, mfma, by_waves, tiles):
    kernels = [
        candidate.kernel.removeprefix("smallm_mxfp8_") for candidate in mxfp8_gemm.FAMILY.choices(cell, "gfx950")
    ]
    names = ("gemv", "mfma", "mxfp8_wave_split", "mxfp8_gemm_tiles")
    assert tuple(kernels.count(name) for name in names) == (gemv, mfma, by_waves, tiles)


# ---- search ----------------------------------------------------------------------------------------------------------


class FakeProblem:
    source = model.MI355X.source

    def __init__(self, outcomes):
        self.outcomes = outcomes

    def run(self, candidate):
        error = self.outcomes[str(candidate)][0]
        if isinstance(error, Exception):
            raise error
        return error

    def cost(self, candidate):
        return self.outcomes[str(candidate)][1], "fake"


def test_wrong_and_unbuildable_candidates_are_rejected_with_the_reason_and_never_timed():
    problem = FakeProblem(
        {
            "a()": (0.002, 3.0),
            "b()": (0.004, 1.0),
            "c()": (float("nan"), 1.0),
            "d()": (BuildError("resource_limits exceeded:\nvgpr 300 > 256"), 1.0),
            "e()": (0.001, 2.0),
        }
    )
    trials = search(problem, [Candidate(name, {}) for name in "abcde"], max_error=3e-3)
    assert [trial.candidate.kernel for trial in trials if not trial.rejected] == ["e", "a"]
    reasons = {trial.candidate.kernel: trial.rejected for trial in trials if trial.rejected}
    assert reasons["b"] == "wrong result: relative error 0.004 > 0.003"
    assert reasons["c"].startswith("wrong result: relative error nan")
    assert reasons["d"].startswith("BuildError: resource_limits exceeded")
    assert all(trial.seconds is None for trial in trials if trial.rejected)


def test_a_device_fault_ends_the_search():
    with pytest.raises(EmulatorFault):
        search(FakeProblem({"a()": (EmulatorFault("out of bounds"), 1.0)}), [Candidate("a", {})], 3e-3)


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("best_baseline", "use_hip"), [(None, 1), (26.0, 1), (7.22, 1), (7.2, 0), (5.0, 0)])
def test_use_hip_asks_for_3_percent_over_the_best_measured_baseline(best_baseline, use_hip):
    baselines = None if best_baseline is None else (30.0, best_baseline)
    row = work.row_for(
        mxfp8_gemm.TUNER, Cell(64, 128, 1), ("gfx950", 256), Trial(GEMV8, 7e-6, 0.001), "measured:X/y", baselines, 3.0
    )
    assert row["use_hip"] == use_hip and row["us"] == pytest.approx(7.0)
    assert row["stock_us"] == (None if baselines is None else 30.0)


def test_modelled_rows_have_no_microseconds_and_use_hip():
    row = modelled_row()
    assert (row["us"], row["stock_us"], row["best_baseline_us"], row["use_hip"]) == (None, None, None, 1)
    assert row["source"] == "model:cdna4-counts-1" and row["err"] == 0.0017


def test_compare_keeps_the_old_configuration_unless_it_is_beaten_clearly():
    fast, slow = Trial(MFMA, 1.00e-6, 0.001), Trial(GEMV8, 1.02e-6, 0.001)
    old = modelled_row(candidate=GEMV8)

    def kept(row, gain):
        return work.keep_old(mxfp8_gemm.TUNER, row, [fast, slow], lambda old, new: gain)

    assert kept(old, 0.03) is slow
    assert kept(old, 0.01) is None
    assert kept(None, 0.03) is None
    assert kept(modelled_row(candidate=gemv.GEMV.choice({"block_n": 16})), 0.03) is None


# ---- the writer ------------------------------------------------------------------------------------------------------


def test_merging_replaces_equal_cells_keeps_others_and_sorts(tmp_path):
    path = tmp_path / "deep" / "t.csv"
    merge_rows(path, MXFP8_GEMM, [modelled_row(m=16), modelled_row(m=2), modelled_row(m=1, n=768)])
    merge_rows(path, MXFP8_GEMM, [modelled_row(m=2, candidate=MFMA)])
    rows = read_rows(MXFP8_GEMM, path)
    assert [row.key[2:] for row in rows] == [(1, 768, 6144), (2, 1536, 6144), (16, 1536, 6144)]
    assert [row.values["kernel"] for row in rows] == [GEMV8.kernel, MFMA.kernel, GEMV8.kernel]


def test_what_is_written_reads_back_the_same(tmp_path):
    path = tmp_path / "t.csv"
    row = work.row_for(
        mxfp8_gemm.TUNER,
        Cell(64, 512, 8),
        ("gfx950", 256),
        Trial(MFMA, 7.125e-6, 1.5e-3),
        "measured:X/y",
        (30.5, 20.25),
        3.0,
    )
    merge_rows(path, MXFP8_GEMM, [row])
    assert dict(read_rows(MXFP8_GEMM, path)[0].values) == row


def test_a_bad_row_never_reaches_the_file(tmp_path):
    path = tmp_path / "t.csv"
    merge_rows(path, MXFP8_GEMM, [modelled_row()])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="use_hip=0"):
        merge_rows(path, MXFP8_GEMM, [{**modelled_row(m=2), "use_hip": 0}])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_files_in_another_format_or_with_errors_are_not_overwritten(tmp_path):
    path = tmp_path / "t.csv"
    for text, said in (
        ("K,N,M,kernel,n_sub,k_splits,use_hip\n6144,768,1,gemv,0,0,1\n", "which is read but not written"),
        ("what,is,this\n", "unknown header what,is,this"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            merge_rows(path, MXFP8_GEMM, [modelled_row()])
        assert path.read_text() == text


@pytest.mark.parametrize("place", ["folder", "pipe", "file/t.csv"])
def test_an_output_that_cannot_be_written_is_refused_before_the_search(tmp_path, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    said = []
    with pytest.raises(ConfigError, match=rf"{place} (is not a regular file|cannot be written: File exists); name"):
        driver.tune(mxfp8_gemm.TUNER, [Cell(1, 64, 128)], tmp_path / place, say=said.append)
    assert not said and sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "pipe"]


def test_a_lock_that_is_never_released_ends_with_its_name(tmp_path):
    path = tmp_path / "t.csv"
    said = r"nothing was written: waited 0 s for .*t\.csv\.lock of .*t\.csv, which process \d+ on .* is writing"
    holder = locks.holding(Path(f"{path}.lock"), str(path), "writing")
    with holder, settings.scope(LOCK_TIMEOUT=0.05), pytest.raises(ConfigError, match=said):
        merge_rows(path, MXFP8_GEMM, [modelled_row()])
    assert not path.exists()


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def test_a_file_system_without_flock_has_a_lock_all_the_same(tmp_path, monkeypatch, error):
    def refuse(*_):
        raise OSError(getattr(errno, error), "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "_flock_works", {})
    path = tmp_path / "t.csv"
    merge_rows(path, MXFP8_GEMM, [modelled_row()])
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]
    with (
        locks.holding(Path(f"{path}.lock"), str(path), "writing"),
        settings.scope(LOCK_TIMEOUT=0.05),
        pytest.raises(ConfigError, match="nothing was written"),
    ):
        merge_rows(path, MXFP8_GEMM, [modelled_row(m=2)])
    merge_rows(path, MXFP8_GEMM, [modelled_row(m=2)])
    assert len(read_rows(MXFP8_GEMM, path)) == 2


@pytest.mark.parametrize("kind", ["there", "dangling", "chain"])
def test_a_link_stays_a_link_and_what_it_leads_to_is_written_with_its_permissions(tmp_path, kind):
    real, link = tmp_path / "real" / "tuned.csv", tmp_path / "mine" / "t.csv"
    real.parent.mkdir()
    link.parent.mkdir()
    target = real
    if kind == "chain":
        target = tmp_path / "between.csv"
        target.symlink_to(real)
    link.symlink_to(target)
    if kind == "there":
        merge_rows(real, MXFP8_GEMM, [modelled_row()])
        real.chmod(0o640)
    merge_rows(link, MXFP8_GEMM, [modelled_row(m=2)])
    assert link.readlink() == target and not real.is_symlink()
    assert len(read_rows(MXFP8_GEMM, real)) == (2 if kind == "there" else 1)
    assert [p.name for p in real.parent.iterdir()] == ["tuned.csv"]
    assert [p.name for p in link.parent.iterdir()] == ["t.csv"]
    assert kind != "there" or real.stat().st_mode & 0o777 == 0o640


WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from hipforge.ops.mxfp4_gemm.family import TABLE as MXFP4_GEMM
    from hipforge.ops.mxfp8_gemm.family import TABLE as MXFP8_GEMM
    from hipforge.tuning.table_writer import merge_rows

    path, first = Path(sys.argv[1]), int(sys.argv[2])
    row = dict(gfx="gfx950", cu_num=256, M=1, K=6144, kernel="smallm_mxfp8_gemv", config="block_n=8", use_hip=1,
               us=None, stock_us=None, best_baseline_us=None, err=0.001, source="model:test")
    print("ready", flush=True)
    for n in range(first, first + int(sys.argv[3])):
        merge_rows(path, MXFP8_GEMM, [{**row, "N": n}])
    """
)


def writer(path, first, count):
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})


def test_a_killed_tuner_leaves_a_valid_file_and_a_free_lock(tmp_path):
    path = tmp_path / "t.csv"
    process = writer(path, 1, 1_000_000)
    assert process.stdout.readline() == b"ready\n"
    while not path.exists() or len(path.read_text().splitlines()) < 5:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {row.key[3] for row in read_rows(MXFP8_GEMM, path)}
    assert done == set(range(1, len(done) + 1)) and len(done) >= 4
    with settings.scope(LOCK_TIMEOUT=5.0):
        merge_rows(path, MXFP8_GEMM, [modelled_row(n=5000)])
    assert len(read_rows(MXFP8_GEMM, path)) == len(done) + 1


# ---- timing ----------------------------------------------------------------------------------------------------------


def test_rotation_covers_twice_the_cache_within_half_of_the_free_memory():
    mib = 1 << 20
    assert timing.rotation(64 * mib, free_bytes=1 << 40) == 9
    assert timing.rotation(1024 * mib, free_bytes=1 << 40) == 2
    assert timing.rotation(64 * mib, free_bytes=300 * mib) == 2
    assert timing.rotation(64 * mib, free_bytes=1) == 1
    with pytest.raises(ConfigError, match="at least 1 byte; got 0"):
        timing.rotation(0, free_bytes=1)


def test_timing_without_a_gpu_says_what_is_missing():
    if torch.cuda.is_available():
        assert 0 < timing.microseconds_per_call(lambda i: torch.zeros(1, device="cuda"), 1) < 1e4
    else:
        with pytest.raises(ConfigError, match="timing needs a GPU"):
            timing.microseconds_per_call(lambda i: None, 1)


# ---- the model -------------------------------------------------------------------------------------------------------

STREAMING = model.Work(
    workgroups=2560,
    waves_per_workgroup=4,
    vector_instructions=2560 * 4 * 100,
    instructions=2560 * 4 * 150,
    matrix_cycles=0,
    loaded_bytes=80_000_000,
    unique_bytes=80_000_000,
    streamed_bytes=80_000_000,
    occupancy=4,
    in_flight_bytes=4096,
)


def test_a_kernel_with_enough_in_flight_takes_bytes_over_bandwidth():
    # 256 CUs x 16 waves x 4096 bytes = 16.8 MB in flight, over 0.8 us: more than the 6.4 MB that 8 TB/s need.
    got = model.estimate(STREAMING)
    assert (got.bound, got.memory) == ("memory", pytest.approx(80_000_000 / 8e12))
    hidden = got.latency + got.issue + got.cache
    assert got.seconds == pytest.approx(model.MI355X.launch_s + 10e-6 + 0.1 * hidden)


@pytest.mark.parametrize(
    ("change", "bound", "seconds"),
    [
        # 10 work-groups: 40 waves with 4096 bytes each move 163,840 bytes per 0.8 us.
        ({"workgroups": 10}, "latency", (1 + -(-2_000_000 // 4096)) * 0.8e-6),
        # 10 work-groups on the busiest CU, 10 waves on its SIMD, 4 cycles an instruction.
        ({"vector_instructions": 2560 * 4 * 5000, "instructions": 2560 * 4 * 5000}, "issue", 10 * 5000 * 4 / 2.4e9),
        ({"matrix_cycles": 2560 * 4 * 20000}, "issue", 10 * 20000 / 2.4e9),
        # Repeats come from cache: the busiest CU loads 10 of 2560 shares at 64 bytes per cycle.
        ({"loaded_bytes": 8_000_000_000}, "cache", 8_000_000_000 / 2560 * 10 / 64 / 2.4e9),
    ],
)
def test_each_bound_shows_where_it_dominates(change, bound, seconds):
    got = model.estimate(dataclasses.replace(STREAMING, **change))
    assert got.bound == bound and getattr(got, bound) == pytest.approx(seconds)


def test_one_work_group_too_many_costs_a_whole_round_of_the_busiest_cu():
    full = dataclasses.replace(STREAMING, workgroups=256, vector_instructions=256 * 4 * 50_000)
    over = dataclasses.replace(STREAMING, workgroups=257, vector_instructions=257 * 4 * 50_000)
    assert model.estimate(over).issue == pytest.approx(2 * model.estimate(full).issue)


def test_every_restart_of_the_pipeline_costs_a_trip():
    few = dataclasses.replace(STREAMING, streamed_bytes=2560 * 4 * 8192)
    assert model.estimate(few).latency == pytest.approx(3 * 3 * 0.8e-6)
    assert model.estimate(dataclasses.replace(few, restarts=4)).latency == pytest.approx(3 * 5 * 0.8e-6)


def test_the_model_knows_the_pipelines_that_the_kernels_have():
    sources = Path(str(resources.files("hipforge.csrc"))) / "mxfp8_gemm" / "amd"

    def choice(text, function):  # of "constexpr int f(int x) { return x <= A ? B : C; }"
        found = re.search(function + r"\(int \w+\) \{ return \w+ <= (\d+) \? (\d+) : (\d+); \}", text)
        limit, below, above = map(int, found.groups())
        return lambda value: below if value <= limit else above

    vector = (sources / "gemv_kernel.h").read_text()
    columns = choice(vector, "most_columns")
    ring = choice((sources / "mfma_kernel.h").read_text(), "ring_steps")
    assert {rows: columns(rows) for rows in (1, 2, 4, 8, 16)} == gemv.MOST_COLUMNS
    assert {n_sub: ring(n_sub) for n_sub in (1, 2, 4)} == mfma.STEPS_AHEAD
    waves = (sources / "wave_split_kernel.h").read_text()
    several = "column_tiles > 2 ? 3 : column_tiles > 1 ? (row_tiles == 4 ? 2 : 3)"
    assert f"return {several} : row_tiles == 1 ? 4 : row_tiles == 2 ? 6 : 3;" in waves
    assert [wave_split.steps_ahead(rows, 48) for rows in (16, 32, 64)] == [3, 3, 3]
    runs = "return row_tiles == 1 && columns == 16 && __clang_major__ >= 22 ? 12 : 8;"
    assert runs in waves and wave_split.RUN_STEPS == {16: 12, 32: 8, 64: 8}
    assert [wave_split.steps_ahead(rows) for rows in (16, 32, 64)] == [4, 6, 3]
    assert [wave_split.steps_ahead(rows, 24) for rows in (16, 32, 64)] == [3, 3, 2]
    assert "dev::u32x4 w_even[kCols], w_odd[kCols];" in vector  # two steps of W ahead
    mxfp4 = (sources.parents[1] / "mxfp4_gemm" / "amd" / "mxfp4_kernel.h").read_text()
    assert "ring_steps(int m_sub, int n_sub) { return m_sub + n_sub <= 4 ? 4 : 2; }" in mxfp4
    assert [ring_steps(a, b) for a, b in ((1, 1), (2, 2), (1, 4), (4, 4))] == [4, 4, 2, 2]


# ---- end to end on the emulator --------------------------------------------------------------------------------------


def test_the_command_tunes_on_the_emulator_resumes_and_compares(tmp_path, emulated):
    path = tmp_path / "t.csv"
    arguments = ["tune", "mxfp8_gemm", "-o", str(path), "--shapes", "n=48,k=256", "-m", "1", "-m", "16", "-m", "33"]
    first = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert first.exit_code == 0, first.output
    table = read_table(MXFP8_GEMM, [path])
    assert {row.key for row in table.rows} == {("gfx950", 256, m, 48, 256) for m in (1, 16, 33)}
    assert all(row.values["source"] == f"model:{machines.MI355X.version}" for row in table.rows)
    assert all(row.values["us"] is None and 1 < row.values["model_us"] < 20 for row in table.rows)
    assert all(0 < row.values["err"] < 3e-3 for row in table.rows)
    assert table.find("gfx950", 256, 33, 48, 256).values["kernel"] in (
        "smallm_mxfp8_mfma",
        "mxfp8_wave_split",
        "mxfp8_gemm_tiles",
    )
    assert first.output.count("default rule") == 3
    assert first.output.endswith(f"3 rows written to {path}; HIPFORGE_CONFIG_MXFP8_GEMM={path} makes ops use them\n")
    resumed = CliRunner().invoke(cli, [*arguments, "--resume"], catch_exceptions=False)
    assert "0 rows written" in resumed.output and resumed.output.count("already in") == 3
    compared = CliRunner().invoke(cli, [*arguments, "--compare"], catch_exceptions=False)
    assert compared.exit_code == 0 and compared.output.count("kept") == 3
    # The modelled time depends a little on where operands lie in memory; what was chosen and its error do not.
    after = read_table(MXFP8_GEMM, [path])
    unmoved = [name for name in MXFP8_GEMM.header if name != "model_us"]
    assert [[row.values[name] for name in unmoved if name in row.values] for row in after.rows] == [
        [row.values[name] for name in unmoved if name in row.values] for row in table.rows
    ]


def test_the_command_refuses_other_devices_and_mixed_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "current", lambda: devices.Device("emulator", "gfx942"))
    result = CliRunner().invoke(cli, ["tune", "mxfp8_gemm", "-o", str(tmp_path / "t.csv")])
    assert result.exit_code == 1 and "the kernels are for gfx950, sm_90; the device is gfx942" in result.output
    arguments = ["-i", str(tmp_path / "u.csv"), "-m", "1", "-o", str(tmp_path / "t.csv")]
    result = CliRunner().invoke(cli, ["tune", "mxfp8_gemm", *arguments])
    assert result.exit_code == 1 and "not both" in result.output
