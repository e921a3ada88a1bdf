"""Tuned tables in formats of earlier releases: a row means what it meant, in both forms of the evidence behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hipforge import ops
from hipforge.errors import ConfigError
from hipforge.ops.core.tuned import read_rows

# By table: the columns of its key after gfx and cu_num, and a row's; then those between configuration and use_hip.
KEYS = {
    "mxfp8_gemm": ("M,N,K", "gfx950,256,4,64,6144"),
    "mxfp4_gemm": ("M,N,K", "gfx950,256,64,768,6144"),
    "mxfp8_grouped_gemm": ("M,N,K,a_div,has_weight", "gfx950,256,64,768,256,1,1"),
    "fp8_skinny_gemm": ("M,N,K", "gfx942,304,8,2304,1024"),
}
MORE = {"mxfp8_grouped_gemm": (",min_experts", ",2")}
QUEUE = "op_m,a_lanes,b_lanes,ops,a_producers,b_producers,consumers,qsize,split_k"
OF_QUEUE = "op_m=8;a_lanes=1;b_lanes=2;ops=4;a_producers=2;b_producers=6;consumers=2;qsize=4;split_k=1"
# Table and columns of the configuration -> what a row says, the kernel, its configuration.
FORMATS = {
    ("mxfp8_gemm", "kernel,block_n,n_sub,k_splits"): (
        ("gemv,16,0,0", "smallm_mxfp8_gemv", "block_n=16"),
        ("mfma,0,2,4", "smallm_mxfp8_mfma", "n_sub=2;k_splits=4"),
        ("wave_split,0,2,8", "mxfp8_wave_split", "rows=32;columns=16;waves=8"),
        ("wave_split,36,1,4", "mxfp8_wave_split", "rows=16;columns=36;waves=4"),
        ("group_split,48,4,2", "mxfp8_group_split", "rows=64;columns=48;k_splits=2"),
        ("k_packed,8,2,4", "mxfp8_k_packed", "columns=8;groups=2;waves=4"),
        ("tiles,256,16,1", "mxfp8_gemm_tiles", "tile=256256;k_splits=1"),
    ),
    ("mxfp4_gemm", "m_sub,n_sub,k_splits"): (("4,4,2", "mxfp4_gemm", "m_sub=4;n_sub=4;k_splits=2"),),
    ("mxfp4_gemm", "kernel,m_sub,n_sub,k_splits"): (
        ("waves,1,2,8", "mxfp4_gemm", "m_sub=1;n_sub=2;k_splits=8"),
        ("tiles,4,4,1", "mxfp4_gemm_tiles", "tile=64064;k_splits=1"),
    ),
    ("mxfp8_grouped_gemm", "block_n"): (("8", "mxfp8_grouped_split", "rows=32;waves=1;columns=16"),),
    ("mxfp8_grouped_gemm", "kernel,block_n,rows,waves"): (
        ("smallm,16,0,0", "mxfp8_grouped_split", "rows=32;waves=1;columns=16"),
        ("wave_split,0,16,4", "mxfp8_grouped_split", "rows=16;waves=4;columns=16"),
        ("stream,128,16,1", "mxfp8_grouped_stream", "columns=128"),
    ),
    ("fp8_skinny_gemm", QUEUE): (("8,1,2,4,2,6,2,4,1", "skinny_gemm_fp8", OF_QUEUE),),
    ("fp8_skinny_gemm", f"kernel,rows,columns,waves,{QUEUE}"): (
        ("queue,0,0,0,8,1,2,4,2,6,2,4,1", "skinny_gemm_fp8", OF_QUEUE),
        ("wave_split,8,16,4,0,0,0,0,0,0,0,0,2", "skinny_wave_split", "rows=8;columns=16;waves=4;split_k=2"),
    ),
}
REFUSED = {
    ("mxfp8_grouped_gemm", "kernel,block_n,rows,waves"): (
        ("stream,128,16,2", "a stream row needs rows=16 and waves=1; got .*waves=2"),
        ("smallm,4,0,0", r"a smallm row needs block_n in \(8, 16\), .*block_n=4"),
        ("wave_split,64,16,4", "at most 8 waves, columns / 16 times waves; got .*waves=4"),
    ),
    ("fp8_skinny_gemm", f"kernel,rows,columns,waves,{QUEUE}"): (
        ("wave_split,8,8,4,0,0,0,0,0,0,0,0,3", "split_k must be 1, 2, 4 or 8 work-groups; got 3"),
        ("wave_split,8,64,4,0,0,0,0,0,0,0,0,1", "columns must be a multiple of 8, at most 32 with 8"),
        ("wave_split,8,8,4,8,0,0,0,0,0,0,0,1", "has 0 in the other kernel's columns; got op_m=8"),
        ("queue,8,0,0,8,1,2,4,2,6,2,4,1", "a queue row has 0 in the other kernel's columns; got rows=8"),
        ("queue,0,0,0,8,1,2,4,2,6,2,7,1", "qsize = 7 exceeds the"),
        ("gemv,8,8,4,0,0,0,0,0,0,0,0,1", "column kernel must be one of queue, wave_split; got 'gemv'"),
    ),
}


def write(path: Path, table: str, columns: str, values: str, evidence: str, figures: str) -> None:
    (names, key), (more_names, more) = KEYS[table], MORE.get(table, ("", ""))
    header = f"gfx,cu_num,{names},{columns}{more_names},use_hip,{evidence},best_baseline_us,err,source"
    path.write_text(f"{header}\n{key},{values}{more},1,{figures},,0.001,model:test\n")


@pytest.mark.parametrize(("evidence", "figures"), (("us,model_us,stock_us", ",6.1,"), ("us,stock_us", ",")))
@pytest.mark.parametrize(("table", "columns"), FORMATS)
def test_a_row_means_what_it_meant(table: str, columns: str, evidence: str, figures: str, tmp_path: Path) -> None:
    for values, kernel, config in FORMATS[table, columns]:
        write(tmp_path / "t.csv", table, columns, values, evidence, figures)
        [row] = read_rows(ops.schema_of(table), tmp_path / "t.csv")
        assert (row.values["kernel"], row.values["config"]) == (kernel, config)
        assert row.values.get("min_experts", 2) == 2


@pytest.mark.parametrize(("table", "columns"), REFUSED)
def test_a_row_that_meant_nothing_is_refused(table: str, columns: str, tmp_path: Path) -> None:
    for values, message in REFUSED[table, columns]:
        write(tmp_path / "t.csv", table, columns, values, "us,model_us,stock_us", ",,")
        with pytest.raises(ConfigError, match=message):
            read_rows(ops.schema_of(table), tmp_path / "t.csv")
