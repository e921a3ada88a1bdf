"""The tuned table of decode attention: which rows apply to a call, what overrides them, and rows that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from hipforge import devices, explain
from hipforge.errors import ConfigError, GuardError
from hipforge.ops.core.dispatch import Explanation
from hipforge.ops.core.kernel import parsed
from hipforge.ops.core.tuned import load_table, read_rows
from hipforge.ops.decode_attention.family import TABLE as DECODE_ATTENTION_FP8
from hipforge.ops.decode_attention.kernels import ARCH_DTYPES, accepts_configuration, split_k_heuristic
from hipforge.ops.decode_attention.kernels import FP8 as KERNEL
from hipforge.ops.decode_attention_fp8 import decode_attention_fp8

ARCH = devices.current().default_arch
CU_COUNT = devices.current().cu_count()
FP8 = ARCH_DTYPES[ARCH]
# The format before rows named their kernel, which is still read.
HEADER = "gfx,cu_num,B,Hkv,G,D,Mkv,page_size,block_n,waves,split_k,us,stock_us,best_baseline_us,err,source"
ROW = f"{ARCH},{CU_COUNT},4,2,8,128,512,0,64,1,7,,,,0.002,model:test"


Table = Callable[..., Path]
NEEDS = ":2: a row of decode_attention_fp8 needs "


@pytest.fixture
def table(put_table: Callable[..., Path]) -> Callable[..., Path]:
    return partial(put_table, DECODE_ATTENTION_FP8, header=HEADER)


def told(
    batch: int = 4, mq: int = 1, kv_heads: int = 2, group: int = 8, d: int = 128, keys: int = 512, page: int = 0,
    split_k: int | None = None, force: Mapping[str, int] | None = None,
) -> Explanation:  # fmt: skip
    """Explain a call whose data nobody reads."""
    q = torch.empty(batch, mq, kv_heads * group, d, dtype=torch.bfloat16)
    pages = -(-keys // page) if page else 1
    cache = torch.empty(batch * pages, page or keys, kv_heads, d, dtype=FP8)
    tables = torch.zeros(batch, pages, dtype=torch.int32) if page else None
    lengths = torch.zeros(batch, dtype=torch.int32)
    return explain(decode_attention_fp8, q, cache, cache, tables, lengths, split_k=split_k, force_kernel_config=force)


def test_a_row_decides_and_explain_names_it(table: Table) -> None:
    path = table(ROW)
    found = told()
    assert dict(found.configuration) == {"block_n": 64, "waves": 1, "split_k": 7}
    assert found.file == (path, 2) and found.row is not None and found.row["Mkv"] == 512
    assert "the tuned row of the shape's bucket" in str(found) and f"{path}:2" in str(found)


@pytest.mark.parametrize(
    "shape",
    [{"batch": 3}, {"keys": 257}, {"keys": 511}, {"group": 5}, {"group": 4, "mq": 2}, {"group": 2, "mq": 3}],
    ids=str,
)
def test_a_row_speaks_for_its_bucket(table: Table, shape: dict[str, int]) -> None:
    table(ROW)
    assert told(**shape).configuration["split_k"] == 7


@pytest.mark.parametrize(
    "shape",
    [{"batch": 2}, {"batch": 5}, {"keys": 256}, {"keys": 513}, {"group": 4}, {"group": 16}, {"group": 8, "mq": 2},
     {"kv_heads": 1}, {"d": 64}],
    ids=str,
)  # fmt: skip
def test_other_shapes_take_the_heuristic(
    table: Table, tmp_path: Path, shape: dict[str, int]
) -> None:
    paged = ROW.replace(",512,0,", ",512,64,")
    elsewhere = f"{'gfx942' if ARCH == 'gfx950' else 'gfx950'}{ROW[6:]}"
    table(ROW, paged, elsewhere, ROW.replace(f",{CU_COUNT},", f",{CU_COUNT + 1},"))
    found = told(**shape)
    if found.row is not None:  # a shipped one
        assert found.row["source"] != "model:test" and found.file is not None and found.file[0].parent != tmp_path
        return
    named = {"batch": 4, "kv_heads": 2, "keys": 512, **shape}
    assert found.file is None and "no tuned row" in found.reason
    assert found.configuration["split_k"] == split_k_heuristic(named["batch"], named["kv_heads"], named["keys"])


def test_a_page_size_takes_its_own_row_and_without_one_the_row_for_any(table: Table) -> None:
    table(ROW, ROW.replace(",512,0,64,1,7,", ",512,256,64,1,3,"))
    splits = [told(page=page).configuration["split_k"] for page in (0, 16, 64, 256)]
    assert splits == [7, 7, 7, 3]


def test_what_the_caller_says_comes_before_the_row(table: Table) -> None:
    table(ROW)
    given = told(split_k=2)
    assert given.configuration["split_k"] == 2 and given.row is not None
    assert given.reason == "the tuned row of the shape's bucket, with split_k as given"
    forced = told(force={"split_k": 5})
    assert forced.configuration["split_k"] == 5 and forced.row is None
    assert forced.reason == "force_kernel_config, which overrides everything"
    # What is not forced comes from the defaults, not from a row that the caller did not ask for.
    assert told(force={"waves": 1}).configuration["split_k"] == split_k_heuristic(4, 2, 512)


def test_a_call_runs_as_its_row_says(table: Table) -> None:
    from hipforge import emulator

    table(f"{ARCH},{CU_COUNT},2,1,4,64,128,0,64,1,2,,,,0.002,model:test")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 1, 4, 64, generator=generator).bfloat16()
    k, v = (torch.randn(2, 128, 1, 64, generator=generator).to(FP8) for _ in range(2))
    lengths = torch.tensor([128, 70], dtype=torch.int32)
    with emulator.counters() as counted:
        out = decode_attention_fp8(q, k, v, None, lengths)
    assert isinstance(out, torch.Tensor) and counted.result.kernels[0].grid[2] == 2
    assert torch.equal(out, decode_attention_fp8(q, k, v, None, lengths, split_k=2))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROW.replace(",4,2,", ",3,2,"), ":2: B is a bucket, the power of two that ends it; got 3"),
        (ROW.replace(",8,128,", ",12,128,"), ":2: G is a bucket, the power of two that ends it; got 12"),
        (ROW.replace(",512,", ",500,"), ":2: Mkv is a bucket, the power of two that ends it; got 500"),
        (ROW.replace(",128,512,", ",96,512,"), ":2: column D must be one of 64, 128, 192, 256; got '96'"),
        (ROW.replace(",512,0,", ",512,24,"), NEEDS + "page_size of a multiple of 16, or 0 for any; got"),
        (ROW.replace(",512,0,", ",512,-16,"), ":2: column page_size must be at least 0; got -16"),
        (ROW.replace(",0,64,1,7,", ",0,128,1,7,"), NEEDS + "block_n of 16, 32 or 64; got config=block_n=128"),
        (ROW.replace(",0,64,1,7,", ",0,64,8,7,"), NEEDS + "waves of 1, 2 or 4; got config=block_n=64;waves=8"),
        (ROW.replace(",1,7,", ",1,513,"), NEEDS + "split_k of 1 to 512; got"),
        (ROW.replace(",1,7,", ",1,0,"), ":2: column split_k must be at least 1; got 0"),
        (ROW.replace(",7,,", ",7,3.5,"), ":2: a modelled row must leave microseconds empty; got us=3.5"),
        (ROW + ",1", ":2: expected 16 fields"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_named_with_its_line(tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}\n{row}\n")
    with pytest.raises(ConfigError) as caught:
        read_rows(DECODE_ATTENTION_FP8, path)
    assert str(caught.value).startswith(f"{path}{said}")


def test_a_malformed_table_ends_the_call_and_a_forced_configuration_passes_it_by(table: Table) -> None:
    table(ROW.replace(",512,", ",500,"))
    with pytest.raises(ConfigError, match="Mkv is a bucket"):
        told()
    assert told(force={"split_k": 3}).configuration["split_k"] == 3


def test_every_shipped_row_is_one_the_tuner_may_choose() -> None:
    for row in load_table("decode_attention_fp8").rows:
        block_n, waves, split_k = KERNEL.choice(parsed(str(row.values["config"]))).configuration.values()
        assert accepts_configuration(16, block_n, waves) and split_k * block_n <= max(row.integer("Mkv"), block_n)


def test_forcing_what_the_kernel_has_not_is_refused_even_where_a_row_exists(table: Table) -> None:
    table(ROW)
    with pytest.raises(GuardError, match="waves must be 1, 2 or 4; got 8"):
        told(force={"waves": 8})
