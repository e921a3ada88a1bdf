"""Copies of the fused kernels with one deliberate mistake each: what the tests compare must notice all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.fused_fp8_cases import normal
from helpers.planted_faults import planted

import hipforge.csrc
from hipforge import devices
from hipforge.ops import mx_quantize, reference, rmsnorm_fp8, swiglu_fp8
from hipforge.ops.core.fp8 import fp8_dtypes

SOURCES = Path(hipforge.csrc.__file__).parent
ARCH = devices.current().default_arch
FP8 = fp8_dtypes("cpu")[0]


def swiglu_agrees(op: Callable[..., None], interleaved: bool = False) -> bool:
    """A NaN among gates, and values that the clamps meet, give the reference's NaNs and nearly all of its codes."""
    gate_up = normal((2, 256), torch.bfloat16, 0, 8.0)
    gate_up[1, 3] = math.nan
    out = torch.empty(2, 128, dtype=FP8)
    op(out, None, gate_up, torch.tensor([0.5]), torch.finfo(FP8).max, 1.702, 1.0, 7.0, interleaved, False)
    want = reference.swiglu_fp8(gate_up, torch.tensor([0.5]), FP8, None, 1.702, 1.0, 7.0, interleaved)
    if not torch.equal(out.float().isnan(), want.float().isnan()):
        return False
    return int((out.view(torch.uint8) != want.view(torch.uint8)).sum()) <= 1 + int(want.float().isnan().sum())


def interleaved_swiglu_agrees(op: Callable[..., None]) -> bool:
    return swiglu_agrees(op, interleaved=True)


def quantise_agrees(op: Callable[..., None]) -> bool:
    """A shuffled result with a negative NaN in it, whose code has no sign, equals the reference's bit for bit."""
    x = normal((32, 320), torch.bfloat16)
    x.view(torch.int16)[5, 70] = -0x40
    packed, scales = reference.quantize_mxfp4(x)
    want = reference.shuffle_weight(packed), reference.shuffle_scale(scales)
    got = torch.empty_like(want[0]), torch.empty_like(want[1])
    op(*got, x, "even", True)
    return torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def norm_agrees(op: Callable[..., None]) -> bool:
    """1 + w is halfway between two bf16 numbers, n is 1.5 or 0.5: exact except for the one rounding of y."""
    step = torch.finfo(torch.bfloat16).eps
    x = torch.tensor([1.5] * 24 + [0.5] * 40).bfloat16()[None]
    weight = torch.full((64,), step / 2).bfloat16()
    q, scales = torch.empty(1, 64, dtype=FP8), torch.empty(1, 2, dtype=torch.uint8)
    y = torch.empty_like(x)
    op(q, scales, None, None, y, x, weight, 0.0, 1.0, False)
    want_y = torch.tensor([1.5 + step] * 24 + [0.5] * 40).bfloat16()[None]
    want = reference.quantize_mxfp8(want_y, FP8)
    return torch.equal(y, want_y) and torch.equal(q.float(), want[0].float()) and torch.equal(scales, want[1])


@dataclass(frozen=True)
class Mutant:
    """A line of a source and what takes its place; ``shipped`` is the stub of its entry."""

    name: str
    file: str
    shipped: Callable[..., None]
    agrees: Callable[[Callable[..., None]], bool]
    line: str
    becomes: str
    unit: str | None = None


SWIGLU, NORM = "swiglu_fp8/swiglu_fp8.cu", "rmsnorm_fp8/rmsnorm_fp8.cu"
QUANTISE = "mx_quantize/mx_quantize.cu"
MUTANTS = [
    Mutant("nan_lost_in_the_clamp", "include/hipforge/device/swiglu.h", swiglu_fp8.swiglu_fp8_out, swiglu_agrees,
           "return value > limit ? limit : value;", "return __builtin_fminf(value, limit);", unit=SWIGLU),
    Mutant("odd_columns_by_the_even_ones", SWIGLU, swiglu_fp8.swiglu_fp8_out, interleaved_swiglu_agrees,
           "kHighHalves = 0x07060302", "kHighHalves = 0x05040100"),
    Mutant("nans_not_patched", QUANTISE, mx_quantize.mxfp4_quantize_out, quantise_agrees,
           "if (amax > kInfinityBits &&", "if (false && amax > kInfinityBits &&"),
    Mutant("halves_of_a_scale_tile_swapped", QUANTISE, mx_quantize.mxfp4_quantize_out, quantise_agrees,
           "column % 8 / 4 * 2 + row % 32 / 16", "column % 8 / 4 + row % 32 / 16 * 2"),
    Mutant("weight_and_offset_rounded", NORM, rmsnorm_fp8.residual_rms_mxfp8_out, norm_agrees,
           "n * (offset + hf::dev::converted<Floats<kWidth>>(weight))",
           "n * hf::dev::converted<Floats<kWidth>>(hf::dev::converted<Vector<kWidth>>(offset + "
           "hf::dev::converted<Floats<kWidth>>(weight)))"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mistake_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    assert mutant.agrees(mutant.shipped)
    entry = planted(
        tmp_path / mutant.name,
        mutant.shipped,
        mutant.file,
        mutant.line,
        mutant.becomes,
        unit=mutant.unit,
        variants={"HF_INPUT": ["bf16"]},
    )
    assert not mutant.agrees(entry)
