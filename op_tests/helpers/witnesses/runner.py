"""Run one witness on the emulator and compare its results with its reference."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton import knobs

from hipforge import emulator
from hipforge.emulator import triton as emulated
from hipforge.emulator.code_object import Kernel
from hipforge.errors import EmulatorFault

from .base import BF16, EXACT, Approximate, Omission, Problem, Witness
from .machine_code import Synchronisation, synchronisations, without

MIN_EQUAL = 0.999  # of the elements, after rounding both sides to bf16


def mnemonics(assembly: str) -> set[str]:
    """The instruction names in compiler output."""
    return set(re.findall(r"^\s+([a-z]\w+)", assembly, re.MULTILINE))


# The executor's plain path, and every checker with waves and work-groups in random order.
PLAIN: dict[str, Any] = {}
EVERY_CHECKER = {"checks": "all", "check_global_races": True, "wave_order": "random", "seed": 7}


@contextlib.contextmanager
def compile_settings(witness: Witness) -> Iterator[None]:
    """Compile under the witness's knobs in the block."""
    with knobs.amd.scope():
        for knob, value in witness.knobs.items():
            setattr(knobs.amd, knob, value)
        yield


def make_problem(witness: Witness, arch: str, seed: int, omission: Omission | None = None) -> Problem:
    """The witness's arguments, or those of a version that lacks a synchronisation."""
    problem = witness.problem(arch, torch.Generator().manual_seed(seed))
    return problem if omission is None else replace(problem, args={**problem.args, **omission.args})


def run(witness: Witness, arch: str, seed: int = 0) -> None:
    """Compile `witness` for `arch`, check what it became, and compare its outputs with the reference, twice.

    The first run takes the executor's plain path; the second has every checker on and advances waves and work-groups
    in random order.

    Raises:
        AssertionError: an instruction that the witness stands for is missing, or a result is wrong.
        EmulatorFault: a checker objects.
    """
    kernel = emulated.jit(witness.kernel, arch=arch)
    with compile_settings(witness):
        compiled = kernel.compile(**make_problem(witness, arch, seed).args, **witness.options)
        present = mnemonics(compiled.triton.asm["amdgcn"])
        for pattern in witness.required(arch):
            assert any(re.search(pattern, name) for name in present), f"no instruction matches {pattern!r}"
        for options in (PLAIN, EVERY_CHECKER):
            problem = make_problem(witness, arch, seed)
            with emulator.options(**options):
                kernel[problem.grid](**problem.args, **witness.options)
            for name, want in problem.expected.items():
                check(name, problem.args[name], want, problem.compare)


def run_broken(witness: Witness, arch: str, omission: Omission, seed: int = 0) -> None:
    """Run a version that lacks a synchronisation, in several orders of waves and work-groups, under every checker.

    Raises:
        AssertionError: an order in which no checker objects, or for another reason.
    """
    kernel = emulated.jit(witness.kernel, arch=arch)
    with compile_settings(witness):
        for order in ("forward", "reverse", "random"):
            problem = make_problem(witness, arch, seed, omission)
            with (
                emulator.options(**{**EVERY_CHECKER, "wave_order": order}),
                pytest.raises(EmulatorFault, match=omission.reason),
            ):
                kernel[problem.grid](**problem.args, **witness.options)


def reports_without(witness: Witness, arch: str, most: int, seed: int = 0) -> dict[Synchronisation, str | None]:
    """Run the machine code with one barrier or wait made a no-op, for each of them, under every checker.

    Args:
        witness: The kernel and its data.
        arch: What to compile for.
        most: How many instructions of each kind are left out, spread evenly over the kernel.
        seed: Of the data.

    Returns:
        The first line of the report, or None where no checker objects, by the instruction left out.
    """
    kernel = emulated.jit(witness.kernel, arch=arch)
    found: dict[Synchronisation, str | None] = {}
    with compile_settings(witness):
        compiled = kernel.compile(**make_problem(witness, arch, seed).args, **witness.options)
        record, original = compiled.triton, compiled.triton.function
        image = record.asm["hsaco"]

        def launch() -> None:
            problem = make_problem(witness, arch, seed)
            kernel[problem.grid](**problem.args, **witness.options)

        try:
            for left_out in spread(executed(original, synchronisations(original), launch), most):
                code = emulator.CodeObject(without(image, left_out))
                record.function = code.kernels[original.name]
                found[left_out] = None
                try:
                    with emulator.options(**EVERY_CHECKER):
                        launch()
                except EmulatorFault as fault:
                    found[left_out] = str(fault).splitlines()[0]
        finally:
            record.function = original
    return found


def executed(kernel: Kernel, every: list[Synchronisation], launch: Callable[[], None]) -> list[Synchronisation]:
    """Those that a launch reaches: kernels begin with a second entry for firmware that preloads no arguments."""
    with emulator.counters(per_pc=True) as counted:
        launch()
    reached = {row.pc for row in counted.per_pc if row.count and row.kernel == kernel.name}
    return [item for item in every if item.address in reached]


def spread(every: list[Synchronisation], most: int) -> list[Synchronisation]:
    """At most `most` of each kind, evenly."""
    chosen = []
    for kind in sorted({item.kind for item in every}):
        same = [item for item in every if item.kind == kind]
        count = min(most, len(same))
        chosen += [same[i * len(same) // count] for i in range(count)]
    return chosen


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
