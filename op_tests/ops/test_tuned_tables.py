"""Tuned tables: the reader, its complaints, overrides, and every CSV that the package ships."""

from importlib import resources
from pathlib import Path

import pytest

from hipforge import ops
from hipforge.cli import tune
from hipforge.errors import ConfigError
from hipforge.jit import registry
from hipforge.ops.core.tuned import BUCKET, EXACT, NEXT, clear_tables, load_table, read_rows, read_table
from hipforge.ops.mxfp8_gemm.family import FAMILY
from hipforge.ops.mxfp8_gemm.family import TABLE as MXFP8_GEMM
from hipforge.tuning.cases import DECODE_M, MINIMAX_M3, Cell, cells

HEADER = "gfx,cu_num,M,N,K,kernel,block_n,n_sub,k_splits,use_hip,us,stock_us,best_baseline_us,err,source"
GEMV = "gfx950,256,1,1536,6144,gemv,8,0,0,1,,,,0.0016,model:1"
MFMA = "gfx950,256,16,1536,6144,mfma,0,1,8,1,5.2,26.1,11.0,0.0016,measured:MI355X/torch-2.13+rocm-7.2"
UPSTREAM = "K,N,M,kernel,n_sub,k_splits,use_hip"


@pytest.fixture(autouse=True)
def fresh_tables():
    clear_tables()
    yield
    clear_tables()


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def complaint(tmp_path, *lines):
    with pytest.raises(ConfigError) as caught:
        read_rows(MXFP8_GEMM, write(tmp_path / "t.csv", *lines))
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "t.csv") + ":")
    return message.removeprefix(str(tmp_path / "t.csv"))


def test_rows_are_typed_and_remember_where_they_stand(tmp_path):
    path = write(tmp_path / "t.csv", HEADER, GEMV, "", MFMA)
    table = read_table(MXFP8_GEMM, [path])
    row = table.find("gfx950", 256, 16, 1536, 6144)
    assert (row.file, row.line) == (path, 4)
    assert (row.values["config"], row.integer("use_hip"), row.values["us"]) == ("n_sub=1;k_splits=8", 1, 5.2)
    assert table.find("gfx950", 256, 1, 1536, 6144).values["us"] is None
    assert table.find("gfx942", 256, 16, 1536, 6144) is None
    assert table.find("gfx950", 128, 16, 1536, 6144) is None
    assert len(table) == 2


def test_upstream_header_is_read_as_gfx950_for_any_number_of_compute_units(tmp_path):
    path = write(tmp_path / "t.csv", UPSTREAM, "6144,2304,1,gemv,0,0,1", "6144,2304,64,mfma,2,8,0")
    table = read_table(MXFP8_GEMM, [path])
    assert table.find("gfx950", 256, 1, 2304, 6144).values["kernel"] == "smallm_mxfp8_gemv"
    assert table.find("gfx950", 32, 64, 2304, 6144).integer("use_hip") == 0


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + f"{HEADER}\r\n{GEMV}\r\n".encode())
    assert len(read_rows(MXFP8_GEMM, path)) == 1


@pytest.mark.parametrize(
    ("kernel", "config", "said"),
    [
        (
            "gemv",
            "block_n=8",
            ":2: column kernel must be one of mxfp8_wave_split, mxfp8_group_split, mxfp8_k_packed, s",
        ),
        (
            "mxfp8_k_packed",
            "columns=8;groups=2",
            ":2: a row of mxfp8_k_packed needs config of columns=...;groups=...;w",
        ),
        ("mxfp8_k_packed", "", ":2: a row of mxfp8_k_packed needs config of columns=...;groups=...;waves=...; got con"),
        ("mxfp8_k_packed", "columns=8;groups=2;waves=x", ":2: column config must read name=number;name=number ..., e"),
        ("mxfp8_k_packed", "columns=8;waves=2;waves=2", ":2: column config must read name=number;name=number ..., ea"),
        ("mxfp8_k_packed", "columns=8;groups=17;waves=1", ":2: a row of mxfp8_k_packed needs groups of 1 to 16; got"),
        ("mxfp8_k_packed", "columns=8;groups=4;waves=8", ":2: a row of mxfp8_k_packed needs groups times waves of at"),
        ("mxfp8_k_packed", "columns=4;groups=1;waves=1", ":2: a row of mxfp8_k_packed needs at least M columns, and"),
        ("mxfp8_group_split", "rows=64;columns=20;k_splits=2", ":2: a row of mxfp8_group_split needs columns of 16, "),
        ("mxfp8_group_split", "rows=48;columns=16;k_splits=2", ":2: a row of mxfp8_group_split needs rows of 16, 32 "),
        ("mxfp8_wave_split", "rows=16;columns=18;waves=2", ":2: a row of mxfp8_wave_split needs columns of a multiple"),
    ],
)
def test_a_bad_configuration_is_named_with_its_line(tmp_path, kernel, config, said):
    row = f"gfx950,256,5,64,6144,{kernel},{config},1,,,,,0.0016,model:1"
    assert complaint(tmp_path, ",".join(MXFP8_GEMM.header), row).startswith(said)


def test_a_configuration_may_name_its_parameters_in_any_order(tmp_path):
    row = "gfx950,256,5,64,6144,mxfp8_wave_split, waves=2;rows=16; columns=32,1,,,,,0.0016,model:1"
    [read] = read_rows(MXFP8_GEMM, write(tmp_path / "t.csv", ",".join(MXFP8_GEMM.header), row))
    assert str(FAMILY.choice_of(read)) == "mxfp8_wave_split(rows=16, columns=32, waves=2)"


def test_a_cell_given_twice_names_both_lines(tmp_path):
    message = complaint(tmp_path, HEADER, GEMV, MFMA, GEMV.replace(",8,", ",16,"))
    assert message == (
        ":4: gfx=gfx950, cu_num=256, M=1, N=1536, K=6144 is already given in line 2; keep one of the two"
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (GEMV.replace("gemv", "wvsplitk"), ":2: column kernel must be one of gemv, mfma, wave_split, group_split, k_"),
        (GEMV.replace("256,1,", "256,one,"), ":2: column M must be an integer; got 'one'"),
        (GEMV.replace("256,1,", "256,1_0,"), ":2: column M must be an integer; got '1_0'"),
        (GEMV.replace("256,1,", "256,\u0663,"), ":2: column M must be an integer; got '\u0663'"),
        (GEMV.replace("256,1,", "256,9223372036854775808,"), ":2: column M must fit 64 bits; got 9223372036854775808"),
        (GEMV.replace("gfx950", "gfx951"), ":2: column gfx must be one of gfx950, gfx942"),
        (GEMV.replace("256,1,", "256,0,"), ":2: column M must be at least 1; got 0"),
        (GEMV.replace("256,1,", "256,,"), ":2: column M is empty"),
        (GEMV + ",7", ":2: expected 15 fields"),
        (
            GEMV.replace(",8,0,0,", ",12,0,0,"),
            ":2: a row of smallm_mxfp8_gemv needs block_n of 4, 8, 16, 32 or 64; got config=block_n=12, gfx=",
        ),
        (GEMV.replace(",8,0,0,", ",8,1,1,"), ":2: gemv has no n_sub, which must be 0; got 1"),
        (GEMV.replace("256,1,", "256,17,"), ":2: a row of smallm_mxfp8_gemv needs M of at most 16"),
        (MFMA.replace("0,1,8,", "0,3,8,"), ":2: a row of smallm_mxfp8_mfma needs n_sub of 1, 2 or 4"),
        (MFMA.replace("0,1,8,", "8,1,8,"), ":2: mfma has no block_n, which must be 0; got 8"),
        (MFMA.replace("256,16,", "256,65,"), ":2: a row of smallm_mxfp8_mfma needs M of at most 64"),
        (MFMA.replace("mfma,0,1,8", "wave_split,0,3,8"), ":2: a row of mxfp8_wave_split needs rows of 16, 32 or"),
        (MFMA.replace("mfma,0,1,8", "wave_split,0,2,16"), ":2: a row of mxfp8_wave_split needs at most 8 waves"),
        (
            MFMA.replace("mfma,0,1,8", "wave_split,0,1,8").replace("6144", "512"),
            ":2: a row of mxfp8_wave_split needs K of",
        ),
        (MFMA.replace("mfma,0,1,8", "tiles,64,2,8"), ":2: a row of mxfp8_gemm_tiles needs tile of 25"),
        (MFMA.replace("mfma,0,1,8", "tiles,64,4,3"), ":2: a row of mxfp8_gemm_tiles needs k_splits of"),
        (MFMA.replace("mfma,0,1,8", "tiles,64,4,8").replace("6144", "512"), ":2: a row of mxfp8_gemm_tiles ne"),
        (MFMA.replace("6144", "512"), ":2: a row of smallm_mxfp8_mfma needs no more k_splits than th"),
        (GEMV.replace("model:1", "guess"), ":2: column source must read measured:<device>/<versions> or model:"),
        (GEMV.replace(",,,,0", ",7.2,,,0"), ":2: a modelled row must leave microseconds empty; got us=7.2"),
        (GEMV.replace(",1,,,,", ",0,,,,"), ":2: a modelled row cannot set use_hip=0"),
        (MFMA.replace("5.2,", ","), ":2: a measured row must fill column us"),
        (MFMA.replace("5.2,", "-5.2,"), ":2: column us must be at least 0; got -5.2"),
        (MFMA.replace("5.2,", "nan,"), ":2: column us must be at least 0; got nan"),
        (MFMA.replace("5.2,", "1e400,"), ":2: column us must be finite; got 1e400"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, row, said):
    assert complaint(tmp_path, HEADER, row).startswith(said)


def test_bad_headers_and_files_are_named(tmp_path):
    former = HEADER.replace(",us,", ",us,model_us,")  # HEADER is that of files from before the column
    accepted = f"{','.join(MXFP8_GEMM.header)} or {former} or {UPSTREAM}"
    assert complaint(tmp_path, "gfx,M,N") == f":1: unknown header gfx,M,N; accepted: {accepted}"
    assert complaint(tmp_path, "").startswith(":1: the file is empty; expected the header gfx,cu_num")
    with pytest.raises(ConfigError, match=r"absent\.csv:1: cannot read the tuned table of mxfp8_gemm"):
        read_rows(MXFP8_GEMM, tmp_path / "absent.csv")
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"t\.csv:1: cannot read"):
        read_rows(MXFP8_GEMM, tmp_path / "t.csv")


def test_overrides_win_over_shipped_rows_and_later_files_over_earlier(tmp_path, monkeypatch):
    shipped = {row.key: row for row in load_table("mxfp8_gemm").rows}
    first = write(tmp_path / "a.csv", HEADER, GEMV.replace(",8,", ",16,"), MFMA)
    second = write(tmp_path / "b.csv", HEADER, GEMV.replace(",8,", ",32,"))
    monkeypatch.setenv("HIPFORGE_CONFIG_MXFP8_GEMM", f"{first}:{second}")
    clear_tables()
    table = load_table("mxfp8_gemm")
    assert table.find("gfx950", 256, 1, 1536, 6144).file == second
    assert table.find("gfx950", 256, 16, 1536, 6144).file == first
    untouched = [key for key in shipped if key[2:] not in ((1, 1536, 6144), (16, 1536, 6144))]
    assert all(table.find(*key) == shipped[key] for key in untouched)


def test_former_names_of_a_table_and_its_modules_are_accepted(tmp_path, monkeypatch):
    first = write(tmp_path / "a.csv", HEADER, GEMV, MFMA)
    second = write(tmp_path / "b.csv", HEADER, GEMV)
    monkeypatch.setenv("HIPFORGE_CONFIG_SMALLM_MXFP8", str(first))
    monkeypatch.setenv("HIPFORGE_CONFIG_MXFP8_GEMM", str(second))
    clear_tables()
    table = load_table("mxfp8_gemm")
    assert table.find("gfx950", 256, 16, 1536, 6144).file == first
    assert table.find("gfx950", 256, 1, 1536, 6144).file == second
    command = tune.command.get_command(None, "smallm_mxfp8")
    assert command is not None and command is tune.command.get_command(None, "mxfp8_gemm")
    first.write_text("no header\n")
    clear_tables()
    with pytest.raises(ConfigError, match="HIPFORGE_CONFIG_SMALLM_MXFP8 names this file"):
        load_table("mxfp8_gemm")
    for former, name in registry.FORMER_NAMES.items():
        assert registry.module(former) is registry.module(name)


def test_a_later_upstream_file_wins_over_rows_for_exact_compute_units(tmp_path):
    ours = write(tmp_path / "a.csv", HEADER, GEMV)
    theirs = write(tmp_path / "b.csv", UPSTREAM, "6144,1536,1,gemv,0,0,0")
    assert read_table(MXFP8_GEMM, [ours, theirs]).find("gfx950", 256, 1, 1536, 6144).file == theirs
    assert read_table(MXFP8_GEMM, [theirs, ours]).find("gfx950", 256, 1, 1536, 6144).file == ours
    assert read_table(MXFP8_GEMM, [theirs, ours]).find("gfx950", 304, 1, 1536, 6144).file == theirs


def test_reading_leaves_files_as_they_are(tmp_path, monkeypatch):
    path = write(tmp_path / "a.csv", UPSTREAM, "6144,1536,1,gemv,0,0,1")
    path.chmod(0o444)
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    monkeypatch.setenv("HIPFORGE_CONFIG_MXFP8_GEMM", str(path))
    clear_tables()
    load_table("mxfp8_gemm")
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert list(tmp_path.iterdir()) == [path]


def shipped_csvs() -> list[Path]:
    return sorted(Path(str(resources.files("hipforge.configs"))).glob("*.csv"))


@pytest.mark.parametrize("path", shipped_csvs(), ids=lambda path: path.name)
def test_every_shipped_csv_has_a_schema_and_is_valid(path):
    schemas = [ops.schema_of(table) for table in ops.families()]
    by_file = {schema.file_name: schema for schema in schemas}
    assert path.name in by_file, f"{path.name} belongs to no family of hipforge.ops"
    rows = read_rows(by_file[path.name], path)  # also rejects duplicates
    assert rows
    assert all(not str(row.values["source"]).startswith("model:") or row.values["us"] is None for row in rows)


def test_the_shipped_smallm_table_is_the_model_over_all_default_cells():
    shipped = Path(str(resources.files("hipforge.configs"))) / MXFP8_GEMM.file_name
    rows = {row.key: row for row in read_rows(MXFP8_GEMM, shipped)}
    by_rule = {Cell(6144, 8192, 2)}  # the default rule says what its row said
    assert set(rows) == {("gfx950", 256, *cell.key) for cell in {*cells(MINIMAX_M3, DECODE_M)} - by_rule}
    for row in rows.values():
        assert str(row.values["source"]).startswith("model:") and row.integer("use_hip") == 1
        assert 0 < row.values["err"] < 3e-3


@pytest.mark.parametrize(
    ("reach", "value", "served_by"),
    [(NEXT, 4, [4, 8]), (NEXT, 5, [8]), (NEXT, 9, []), (EXACT, 4, [4]), (BUCKET, 4, [4]), (BUCKET, 5, [8])],
)
def test_a_row_serves_its_own_value_and_those_that_it_reaches(reach, value, served_by):
    assert list(reach.values(value, (1, 4, 8))) == served_by
