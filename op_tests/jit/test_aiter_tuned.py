"""aiter's tuned tables: each kind is a family's, and what is none of them is refused with the column or the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hipforge.aiter_compat.tuned import TunedRow, read_tuned
from hipforge.errors import ConfigError

KEY = "gfx,cu_num,M,N,K"
REST = "kernelId,splitK,us,kernelName,tflops,bw,errRatio"


def table(folder: Path, *lines: str) -> Path:
    path = folder / "table.csv"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("kinds", "values", "family", "block"),
    [
        ("", "", "mxfp4_gemm", 32),
        ("libtype,", "ck,", "fp8_gemm", 128),
        ("q_dtype_w,", "torch.float8_e4m3fn,", "fp8_gemm", 0),
        ("q_dtype_w,libtype,", "torch.float8_e4m3fnuz,asm,", "fp8_gemm", 0),
    ],
)
def test_the_columns_say_whose_rows_they_are(tmp_path: Path, kinds: str, values: str, family: str, block: int) -> None:
    path = table(tmp_path, f"{KEY},{kinds}{REST}", f"gfx950,256,16,2048,4096,{values}21,2,5.5,a_kernel,1.5,20.25,0.0")
    (row,) = read_tuned(path).rows
    assert row == TunedRow(family, block, "gfx950", 256, 16, 2048, 4096, 5.5, "a_kernel", 2)


def test_rows_without_an_op_are_counted_by_reason(tmp_path: Path) -> None:
    lines = [f"gfx942,80,1,128,256,{kind},1,0,2.5,name,1,1,0.0" for kind in ("torch.int8", "torch.float8_e4m3fnuz")]
    none = "gfx942,80,1,128,256,torch.float8_e4m3fn,-1,-1,inf,,0,0,1.0"
    found = read_tuned(table(tmp_path, f"{KEY},q_dtype_w,{REST}", *lines, lines[0], none))
    assert len(found.rows) == 1
    assert found.left_out == {"weights of int8": 2, "no kernel worked (us is inf)": 1}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f"{KEY},B,{REST}", "column 'B' says that this is a table of batched GEMMs"),
        (f"gfx,b,m,n,k,{REST}", "column 'b' says that this is a table of batched GEMMs"),
        (f"M,N,K,bias,outdtype,{REST}", "column 'bias' says that this is a table of int8 GEMMs"),
        (f"{KEY},libtyp,{REST}", "unknown column 'libtyp'; did you mean|unknown column 'libtyp'.*libtype"),
        (f"gfx,cu_num,M,N,{REST}", "there is no column 'K'"),
        (f"{KEY},K,{REST}", "a column appears twice"),
    ],
)
def test_columns_of_another_table_are_refused_by_name(tmp_path: Path, header: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tuned(table(tmp_path, header))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gfx950,256,x,2048,4096,1,0,5.5,k,1,1,0", r"table\.csv:2: M is 'x'; expected an integer, 1 or more"),
        ("gfx950,256,0,2048,4096,1,0,5.5,k,1,1,0", r"M is '0'"),
        ("gfx950,256,1,2048,4096,1,0,nan,k,1,1,0", r"us is 'nan'; expected microseconds"),
        ("mi355,256,1,2048,4096,1,0,5.5,k,1,1,0", r"gfx is 'mi355'"),
        ("gfx950,256,1,2048", r"us is ''"),
        ("gfx950,256,1,2048,,1,0,5.5,k,1,1,0", r"K is ''"),
        ("gfx950,256,1,2048,4096,1,0,5.5,k,1,1,0,9", r"table\.csv:2: more values than the 12 columns"),
    ],
)
def test_a_wrong_value_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tuned(table(tmp_path, f"{KEY},{REST}", line))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read"):
        read_tuned(tmp_path / "none.csv")
