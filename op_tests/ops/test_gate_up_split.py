"""How gate and up divide K: the rule's choice without a row, a row's for its own slots, and what the tuner checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hipforge
from hipforge import devices
from hipforge.errors import ConfigError
from hipforge.ops import fp8_grouped_gemm, moe_gate_up, mxfp4_grouped_gemm
from hipforge.ops.core import invariance
from hipforge.ops.core.tuned import read_rows
from hipforge.ops.gate_up_split import FAMILY, KERNEL_OF, split_of, split_of_four
from hipforge.tuning.families.gate_up_split import KINDS, TUNER, SplitCell
from hipforge.tuning.tuner import relative_error

CPU = torch.device("cpu")
OPS = {
    8: moe_gate_up.grouped_swiglu_mxfp8, 4: mxfp4_grouped_gemm.grouped_swiglu_mxfp4,
    128: fp8_grouped_gemm.grouped_swiglu_fp8, 32: fp8_grouped_gemm.grouped_swiglu_fp8,
}  # fmt: skip
CELL = SplitCell(64, 384, 2, False, 4, experts=6, top_k=2)


@pytest.fixture
def tables(put_table: Callable[..., Path]) -> Callable[[str], Path]:
    """Puts a row for this device into effect, given without device and evidence."""
    device = f"{devices.current().arch_of()},{devices.current().cu_count()}"
    return lambda row: put_table(FAMILY.table, f"{device},{row},,3.0,,,0.001,model:cdna4-events-3")


def call(cell: SplitCell) -> tuple[object, ...]:
    parts = TUNER.operands(cell, devices.current().arch_of(), CPU)
    return parts.a, parts.a_scale, parts.w, parts.w_scale, *parts.index, cell.m, 64, cell.a_div


def test_a_row_does_not_decide_where_results_must_not_depend_on_the_batch(tables: Callable[[str], Path]) -> None:
    given = call(CELL)
    with hipforge.batch_invariant():
        ruled = hipforge.explain(OPS[8], *given).configuration
    tables(f"{invariance.ROWS},64,384,6,8,{KERNEL_OF[8]},parts={3 - ruled['parts']};groups=1")
    with hipforge.batch_invariant():
        assert hipforge.explain(OPS[8], *given).configuration == ruled


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_decides_the_split_of_its_own_slots(kind: int, tables: Callable[[str], Path]) -> None:
    cell = dataclasses.replace(CELL, kind=kind)
    given = call(cell)
    want = OPS[kind](*given)
    ruled = hipforge.explain(OPS[kind], *given).configuration
    assert (ruled["parts"], ruled["groups"]) == ((1, 2) if kind == 128 else (1, 1))
    tables(f"4,64,384,6,{kind},{KERNEL_OF[kind]},parts=2;groups=1")
    told = hipforge.explain(OPS[kind], *given).configuration
    assert told == {**ruled, "parts": 2, "groups": 1}
    got = OPS[kind](*given)
    assert relative_error(got[0].float(), want[0].float()) < TUNER.max_error  # sums in another order
    other = call(dataclasses.replace(cell, m=2))
    assert hipforge.explain(OPS[kind], *other).configuration["parts"] == 1


def test_rows_change_nothing_in_the_batch_invariant_mode(tables: Callable[[str], Path]) -> None:
    given = call(CELL)
    with hipforge.batch_invariant():
        ruled = hipforge.explain(OPS[8], *given).configuration
    tables("4,64,384,6,8,mxfp8_gate_up,parts=2;groups=1")
    with hipforge.batch_invariant():
        assert hipforge.explain(OPS[8], *given).configuration == ruled != {"rows": 16, "parts": 2, "groups": 1}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("4,64,384,6,8,mxfp4_gate_up,parts=1;groups=1", "a row of mxfp4_gate_up needs kind of 4; got"),
        ("4,64,384,6,8,mxfp8_gate_up,parts=1;groups=3", "needs groups of 1, 2 or 4"),
        ("4,64,384,6,16,mxfp8_gate_up,parts=1;groups=1", "column kind must be one of 4, 8, 32, 128"),
    ],
)
def test_a_bad_row_is_named(row: str, said: str, tables: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=said):
        read_rows(FAMILY.table, tables(row))


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_is_the_rule_of_its_kind(kind: int) -> None:
    cell = SplitCell(1024, 6144, 9, False, 9, experts=257, top_k=9, kind=kind)
    choice = FAMILY.default_choice(cell, "gfx950", 256)
    rule = split_of_four(9, 257, 1024, 6144, 256) if kind == 128 else split_of(9, 257, 1024, 6144, 256, 1 + (kind == 4))
    assert (choice.kernel, tuple(choice.configuration.values())) == (KERNEL_OF[kind], rule)
    assert choice in FAMILY.choices(cell, "gfx950") and len(FAMILY.choices(cell, "gfx950")) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_the_tuner_sees_a_wrong_result(kind: int) -> None:
    cell, arch = dataclasses.replace(CELL, kind=kind), devices.current().arch_of()
    parts = TUNER.operands(cell, arch, CPU)
    right = TUNER.expected(cell, parts)
    (choice, *_) = FAMILY.choices(cell, arch)
    assert relative_error(TUNER.run(choice, cell, parts), right) <= TUNER.max_error
    parts.a[0] = parts.a[1]  # a token's row
    assert relative_error(TUNER.run(choice, cell, parts), right) > TUNER.max_error
