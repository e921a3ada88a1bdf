"""What a witness is: a Triton kernel, data for it, the expected result, and the instructions it must have become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton

TRITON = tuple(int(number) for number in triton.__version__.split(".")[:2])
GFX950, GFX942 = "gfx950", "gfx942"
BOTH = (GFX950, GFX942)

# Copies from global memory to LDS that pass no register, in buffer and in 64-bit form.
LDS_DMA = {"use_async_copy": True}
LDS_DMA_GLOBAL = {"use_async_copy": True, "use_buffer_ops": False}

# How a result is compared with its float64 (or integer) reference.
EXACT = "exact"  # bit for bit, after one rounding of the reference to the output's dtype
BF16 = "bf16"  # within 1 bf16 ulp, and at least 99.9 % equal after rounding both to bf16


@dataclass(frozen=True)
class Approximate:
    """A bound for results of approximate instructions: |got - want| <= relative * |want| + absolute."""

    relative: float
    absolute: float = 0.0


@dataclass(frozen=True)
class Problem:
    """Arguments by parameter name, the grid in programs, and the expected contents of some of the tensors."""

    args: Mapping[str, Any]
    grid: tuple[int, ...]
    expected: Mapping[str, torch.Tensor]
    compare: str | Approximate = EXACT


@dataclass(frozen=True)
class Omission:
    """A version of a kernel that lacks one synchronisation: compile-time arguments to change, and the report expected.

    Attributes:
        name: Unique within the witness.
        args: Replace arguments of the problem.
        reason: Regular expression that the report must match.
    """

    name: str
    args: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class Witness:
    """One kernel with one set of arguments and compile options.

    Attributes:
        name: Unique; the test's id.
        kernel: The `@triton.jit` function.
        problem: Makes arguments and expectation for an architecture from a seeded generator.
        archs: Where it is run.
        options: Triton's compile options (`num_warps`, `num_stages`, `matrix_instr_nonkdim`, ...).
        knobs: Settings of `triton.knobs.amd` to compile under (`use_async_copy`: global-to-LDS copies,
            `use_buffer_ops=False`: 64-bit addresses).
        contains: Regular expressions, each of which must match a mnemonic of the machine code, by architecture;
            under "" for all. A witness that became something else proves nothing.
        broken: Versions that lack one synchronisation.
        miscompiled: The last Triton whose code for it is wrong, and what the emulator reports of that code.
    """

    name: str
    kernel: Any
    problem: Callable[[str, torch.Generator], Problem]
    archs: tuple[str, ...] = BOTH
    options: Mapping[str, Any] = field(default_factory=dict)
    knobs: Mapping[str, bool] = field(default_factory=dict)
    contains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    broken: tuple[Omission, ...] = ()
    miscompiled: tuple[tuple[int, int], str] | None = None

    @property
    def fault(self) -> str | None:
        """What the emulator must report with the Triton that is installed, or None."""
        return self.miscompiled[1] if self.miscompiled is not None and self.miscompiled[0] >= TRITON else None

    def required(self, arch: str) -> tuple[str, ...]:
        """The patterns that the machine code for `arch` must contain."""
        return tuple(self.contains.get("", ())) + tuple(self.contains.get(arch, ()))


def integers(
    g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, low: int = -4, high: int = 5
) -> torch.Tensor:
    """Integers in [low, high): exact in every element format that has three significant bits, if within -8..8."""
    return torch.randint(low, high, shape, generator=g).to(torch.float64).to(dtype)


def normal(g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Standard normal values rounded to `dtype`."""
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def cases(witnesses: Iterable[Witness], broken: bool = False) -> list[Any]:
    """Test parameters (witness, architecture), or (witness, architecture, omission) of the `broken` versions.

    Of a witness for both architectures one is tested, in turn; the other with --full.
    """
    found = []
    for number, witness in enumerate(witnesses):
        chosen = witness.archs[number % len(witness.archs)]
        for arch in witness.archs:
            marks = () if arch == chosen else (pytest.mark.full,)
            omissions = [(omission,) for omission in witness.broken] if broken else [()]
            for more in omissions:
                name = "-".join((witness.name, *(omission.name for omission in more), arch))
                found.append(pytest.param(witness, arch, *more, id=name, marks=marks))
    return found
