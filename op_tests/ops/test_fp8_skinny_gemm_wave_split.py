"""The skinny fp8 GEMM with k split over the waves of a work-group, on both architectures: counts, refusals, faults.

What both kernels hold to is in test_fp8_skinny_gemm_kernels.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import astuple

import pytest
import torch
from helpers.fp8_skinny_cases import ARCH, FP8, ONE, WAVE_SPLIT_SHAPES, exact, integers, normals

from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.fp8_skinny_gemm import skinny_wave_split, skinny_wave_split_out
from hipforge.ops.fp8_skinny_gemm.kernels.wave_split import (
    RULES,
    Configuration,
    refusal,
)

pytestmark = pytest.mark.gfx942


def run(
    a: torch.Tensor, b: torch.Tensor, c: Configuration, scale: torch.Tensor = ONE, output: torch.Tensor | None = None
) -> torch.Tensor:
    return skinny_wave_split(a, b, scale, output, *astuple(c))


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", WAVE_SPLIT_SHAPES)
def test_weights_are_loaded_once_in_one_launch(shape: tuple[int, int]) -> None:
    rows, columns = shape
    a, b = integers(rows, 64, 2048)
    c = Configuration(rows, columns, 4)
    with emulator.counters() as counted:
        run(a, b, c)
    groups, tiles = math.ceil(64 / columns), rows // c.edge * c.column_tiles
    assert counted.tensors["b"].loaded == 64 * 2048
    assert counted.tensors["a"].loaded == groups * rows * 2048
    # 64 k of a tile are two instructions, half of whose products count with an edge of 8; gfx950 has one for 128 k.
    each = {("gfx942", 8): 2, ("gfx942", 16): 4, ("gfx950", 8): 2, ("gfx950", 16): 1}[ARCH, c.edge]
    assert counted.mfma_count == 16 * groups * tiles * each
    assert counted.launches == 1 and not counted.scratch_bytes and not counted.lds_bank_conflicts


# Wave-instructions of a work-group of 8 waves at k = 16,384, by rows and columns.
RECORDED = {
    "gfx942": {
        (8, 8): 1690, (8, 16): 2220, (8, 24): 3110, (8, 32): 3110,
        (16, 8): 2260, (16, 16): 2260, (16, 24): 3190, (16, 32): 3190, (16, 64): 5260,
        (32, 8): 3250, (32, 16): 3250, (32, 24): 5050, (32, 32): 5050, (32, 64): 8500,
    },
    "gfx950": {
        (8, 8): 1680, (8, 16): 2220, (8, 24): 3110, (8, 32): 3110,
        (16, 8): 1800, (16, 16): 1800, (16, 24): 2300, (16, 32): 2300, (16, 64): 3540,
        (32, 8): 2430, (32, 16): 2430, (32, 24): 3290, (32, 32): 3290, (32, 64): 5080,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", WAVE_SPLIT_SHAPES)
def test_one_work_group_takes_no_more_instructions_than_recorded(shape: tuple[int, int]) -> None:
    a, b, scale = normals(*shape, 16384)
    with emulator.counters() as counted:
        run(a, b, Configuration(*shape, 8), scale)
    assert counted.wave_instructions <= RECORDED[ARCH][shape]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 24}, "rows must be 8, 16 or 32; got 24"),
        ({"columns": 12}, "columns must be a multiple of 8, at most 32 with 8 rows; got 12"),
        ({"columns": 64}, "columns must be a multiple of 8, at most 32 with 8 rows; got 64"),
        ({"waves": 3}, "waves must be 1, 2, 4, 8 or 16, at most 16 with 8 rows and 8 columns; got 3"),
        ({"rows": 32, "waves": 16}, "waves must be 1, 2, 4, 8 or 16, at most 8 with 32 rows and 8 columns; got 16"),
        ({"split_k": 3}, "split_k must be 1, 2, 4 or 8 work-groups; got 3"),
        ({"split_k": 4}, "split_k cannot exceed the 2 steps of 128 k of k=256; got 4"),
    ],
)
def test_refused_configurations(change: dict[str, int], message: str) -> None:
    a, b = integers(4, 40, 256)
    with pytest.raises(GuardError) as caught:
        skinny_wave_split(a, b, ONE, **change)
    assert str(caught.value) == message


def test_every_rule_has_a_refusal_of_its_own_and_the_module_has_them_too() -> None:
    a, b = integers(4, 40, 256)
    broken = (Configuration(24), Configuration(8, 12), Configuration(32, 8, 16), Configuration(8, 8, 1, 4))
    assert [next(rule for rule in RULES if rule(c, 256)) for c in broken] == list(RULES)
    for c in broken:
        with pytest.raises(GuardError):
            skinny_wave_split_out(torch.empty(4, 40).half(), a, b, ONE, torch.empty(1 << 16), False, *astuple(c))


def test_the_module_accepts_what_the_rules_accept() -> None:
    a, b = integers(4, 40, 256)
    accepted = 0
    for values in itertools.product((8, 16, 32), (0, 8, 12, 40, 64), (0, 8, 16), (1, 2, 4)):
        c = Configuration(*values)
        out, reason = torch.empty(4, 40).half(), refusal(c, 256)
        try:
            skinny_wave_split_out(out, a, b, ONE, torch.empty(1 << 18), False, *astuple(c))
        except GuardError:
            assert reason is not None, c
        else:
            assert reason is None and torch.equal(out, exact(a, b)), c
            accepted += 1
    assert accepted


def test_its_own_workspace_parameters_and_operands_are_guarded() -> None:
    a, b = integers(4, 40, 256)
    out, given = torch.zeros(4, 40).half(), (8, 8, 2, 1)
    with pytest.raises(GuardError, match="split_k = 2 needs a workspace"):
        skinny_wave_split_out(out, a, b, ONE, None, False, 8, 8, 2, 2)
    with pytest.raises(GuardError, match="or longer"):
        skinny_wave_split_out(out, a, b, ONE, torch.empty(8), False, 8, 8, 2, 2)
    with pytest.raises(GuardError, match="split_k must be 1, 2, 4 or 8; got 3"):
        skinny_wave_split_out(out, a, b, ONE, torch.empty(1 << 16), False, 8, 8, 2, 3)
    for several in (torch.tensor([8, 16]), torch.tensor(2.5), None):
        with pytest.raises(GuardError, match="argument 'rows' must be an int"):
            skinny_wave_split_out(out, a, b, ONE, None, False, several, 8, 2, 1)
    with pytest.raises(GuardError, match=r"a must be a torch\.Tensor"):
        skinny_wave_split(None, b, ONE)
    with pytest.raises(GuardError, match=r"b must be \[k, n\]"):
        skinny_wave_split(a, b[:, 0], ONE)
    wide = torch.zeros((1 << 24) + 16 + 256, dtype=torch.uint8).view(FP8).as_strided((256, 2), (1, (1 << 24) + 16))
    with pytest.raises(GuardError, match=r"a column of b must take at most 2\^24 bytes"):
        skinny_wave_split_out(out[:, :2].contiguous(), a, wide, ONE, None, False, *given)
