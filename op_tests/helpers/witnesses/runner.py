"""Run one witness on the emulator and hold its results to its reference."""

from __future__ import annotations

import re

import torch
from triton import knobs

from hipforge import emulator
from hipforge.emulator import triton as emulated

from .base import BF16, EXACT, Approximate, Witness

MIN_EQUAL = 0.999  # of the elements, after rounding both sides to bf16


def mnemonics(assembly: str) -> set[str]:
    """The instruction names in compiler output."""
    return set(re.findall(r"^\s+([a-z]\w+)", assembly, re.MULTILINE))


def run(witness: Witness, arch: str, seed: int = 0) -> None:
    """Compile `witness` for `arch`, check what it became, and hold its outputs to the reference, twice.

    The first run takes the executor's plain path; the second has every checker on and advances waves and work-groups
    in random order.

    Raises:
        AssertionError: an instruction that the witness stands for is missing, or a result is wrong.
        EmulatorFault: a checker objects.
    """
    kernel = emulated.jit(witness.kernel, arch=arch)
    with knobs.amd.scope():
        for knob, value in witness.knobs.items():
            setattr(knobs.amd, knob, value)
        problem = witness.problem(arch, torch.Generator().manual_seed(seed))
        compiled = kernel.compile(**problem.args, **witness.options)
        present = mnemonics(compiled.triton.asm["amdgcn"])
        for pattern in witness.required(arch):
            assert any(re.search(pattern, name) for name in present), f"no instruction matches {pattern!r}"
        for options in (
            {},
            {"checks": "all", "wave_order": "random", "seed": 7},
        ):
            problem = witness.problem(arch, torch.Generator().manual_seed(seed))
            with emulator.options(**options):
                kernel[problem.grid](**problem.args, **witness.options)
            for name, want in problem.expected.items():
                check(name, problem.args[name], want, problem.compare)


def check(name: str, got: torch.Tensor, want: torch.Tensor, compare: str | Approximate) -> None:
    """Compare one output with its float64 or integer reference.

    Raises:
        AssertionError: with the number of wrong elements and the first of them.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if compare == EXACT:
        rounded = want.to(got.dtype)
        wrong = (got.double() != rounded.double()) & ~(torch.isnan(got.double()) & torch.isnan(rounded.double()))
    elif compare == BF16:
        mine, reference = got.to(torch.bfloat16), want.to(torch.bfloat16)
        equal = (mine == reference).double().mean().item()
        assert equal >= MIN_EQUAL, f"{name}: only {equal:.4%} of the elements are equal as bf16"
        # 1 ulp of bf16 is at most 2^-7 of the value; below 2^-126 spacing is constant.
        wrong = (mine.double() - reference.double()).abs() > reference.double().abs() * 2.0**-7 + 2.0**-133
        wrong |= torch.isnan(mine)
    else:
        bound = compare.relative * want.double().abs() + compare.absolute
        wrong = ~((got.double() - want.double()).abs() <= bound)
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        values = f"got {got.double()[first].item()!r}, expected {want.double()[first].item()!r}"
        raise AssertionError(f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong; at {first} {values}")
