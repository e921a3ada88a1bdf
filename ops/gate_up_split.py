"""How the first product of a MoE layer with SwiGLU in its launch divides K, as a family: its table and default rules.

``csrc/mxfp8_grouped_gemm/amd/gate_up_kernel.h`` has the kernels, one for each kind of weights. The grouped GEMM's
table and rule decide whether one of them runs, and its rows; a row here decides in how many parts a work-group takes K,
and how many work-groups share the K of a block of results. It serves its own number of slots only: what is best depends
on how many blocks there are for each compute unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hipforge import devices
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.family import Family
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.core.kernel import Configuration, Kernel, Pipeline, kernel_table
from hipforge.ops.core.tuned import Column
from hipforge.ops.mxfp8_gemm.kernels.wave_split import MOST_STEPS
from hipforge.ops.mxfp8_gemm.raw import K_STEP, STEP_BYTES

MXFP4, MX_FP8 = 4, 8
# The kernels by the kind of weights: bits of an element under MX scales or, of fp8, the rows and columns that share a
# scale. With 128 of them the work-groups of four blocks of results meet in any case.
KERNEL_OF = MappingProxyType({MX_FP8: "mxfp8_gate_up", MXFP4: "mxfp4_gate_up", 32: "fp8_gate_up", 128: "fp8_gate_up"})
_SHARED_BY_FOUR = 128
PARTS, GROUPS = (1, 2), (1, 2, 4)  # of K in a work-group; work-groups that share the K of a block of results
LEAST_SHARED_STEPS = 22  # below, the sums' meeting costs more than it saves: bench_moe_peers.py --groups
LEAST_HALVED_STEPS = 11  # the same for two that meet, times the elements in a byte
MOST_BEYOND = 0.25  # blocks for each compute unit beyond a full round: with more of them memory is the bound
PACKED_ROUNDS = 3  # full rounds of blocks with two elements in a byte, beyond which memory is the bound
MOST_BEYOND_PACKED = 0.5  # the same there


def split_of(slots: int, experts: int, n: int, k: int, cu_count: int, packing: int = 1) -> tuple[int, int]:
    """Return in how many parts a work-group takes K, and how many work-groups share the K of a block of results.

    A compute unit loads what its work-groups need at one rate, however many they are: the one with the most decides. So
    four share a K where the blocks leave three quarters of them idle, or nearly, two where they leave half, and four
    again where a few have one block more than the others: a second one, of W with ``packing`` elements in a byte, 2, a
    third, or about half of them a fourth, by the number of experts that slots with uniform choices have. One part is
    enough where K is short or where work-groups fill the GPU.
    """
    steps, blocks = -(-k // K_STEP), n // (2 * BLOCK) * min(slots, experts)
    if steps <= MOST_STEPS:
        return 1, 1
    if steps >= LEAST_SHARED_STEPS and 4 * blocks <= (1 + (packing - 1) * MOST_BEYOND) * cu_count:
        return 1, 4
    if steps >= LEAST_HALVED_STEPS * packing and 2 * blocks <= cu_count:
        return 1, 2
    if steps >= LEAST_SHARED_STEPS and packing * cu_count < blocks <= (packing + MOST_BEYOND) * cu_count:
        return 1, 4
    if steps >= LEAST_SHARED_STEPS and packing == 2:
        rounds = n // (2 * BLOCK) * experts * (1 - (1 - 1 / experts) ** slots) / cu_count
        if PACKED_ROUNDS < rounds <= PACKED_ROUNDS + MOST_BEYOND_PACKED:
            return 1, 4
    return (1 if blocks >= cu_count else 2), 1


def split_of_four(slots: int, experts: int, n: int, k: int, cu_count: int) -> tuple[int, int]:
    """Return in how many parts a work-group takes K, and how many share a K, where those of four blocks meet.

    They meet anyway, so that two share a K in every case: smaller work-groups leave fewer compute units idle at the
    end. Where four times as many work-groups each find a compute unit, four share it, with eight waves each.
    """
    blocks = n // (2 * BLOCK) * min(slots, experts)
    return (2, 4) if -(-k // K_STEP) >= LEAST_SHARED_STEPS and 4 * blocks <= cu_count else (1, 2)


def split_by_rule(slots: int, experts: int, n: int, k: int, kind: int, cu_count: int) -> tuple[int, int]:
    """Return parts and groups without a tuned row, for a kind of weights."""
    if kind == _SHARED_BY_FOUR:
        return split_of_four(slots, experts, n, k, cu_count)
    return split_of(slots, experts, n, k, cu_count, 2 if kind == MXFP4 else 1)


@dataclass(frozen=True)
class Problem:
    """``slots`` rows times the gate and up [``n``, ``k``] of each one's expert, with a kind of weights."""

    slots: int
    n: int
    k: int
    experts: int
    kind: int
    device: torch.device

    @property
    def key(self) -> tuple[int, ...]:
        """Return M, N, K, E and the kind."""
        return self.slots, self.n, self.k, self.experts, self.kind


def split_of_problem(problem: Problem) -> Configuration:
    """Return parts and groups: those of a tuned row or, without one and in the batch-invariant mode, of the rule."""
    taken = FAMILY.decide(problem).accepted
    return _by_rule(problem, devices.current().cu_count()) if taken is None else taken.configuration


def _by_rule(problem: Any, cu_count: int) -> Configuration:
    found = split_by_rule(problem.slots, problem.experts, problem.n, problem.k, problem.kind, cu_count)
    return dict(zip(_PARAMETERS, found, strict=True))


def _launch(*given: Any) -> None:
    raise NotImplementedError("the ops launch these kernels, with rows that the grouped GEMM's choice has")


def _candidates(kinds: Sequence[int]) -> Callable[[Any, str], Iterator[Configuration]]:
    def found(cell: Any, arch: str) -> Iterator[Configuration]:
        for parts in PARTS if cell.kind in kinds else ():
            for groups in GROUPS:
                if parts * groups <= -(-cell.k // K_STEP):
                    yield {"parts": parts, "groups": groups}

    return found


def _refusal(kinds: Sequence[int]) -> Callable[[Configuration, Sequence[int], str], str | None]:
    return lambda given, key, arch: None if key[4] in kinds else f"kind of {' or '.join(map(str, kinds))}"


def _kernel(name: str) -> Kernel:
    kinds = [kind for kind, kernel in KERNEL_OF.items() if kernel == name]
    return Kernel(
        name,
        archs=("gfx950", "gfx942"),
        parameters=_PARAMETERS,
        launch=_launch,
        candidates=_candidates(kinds),
        pipeline=lambda given, cell, arch: Pipeline(_STEPS_AHEAD * STEP_BYTES),
        refusal=_refusal(kinds),
        loop="wave_split_kernel.h",
    )


def _default(problem: Any, arch: str, cu_count: int) -> Choice:
    kernel = next(kernel for kernel in KERNELS if kernel.name == KERNEL_OF[problem.kind])
    return kernel.choice(_by_rule(problem, cu_count))


_PARAMETERS = MappingProxyType({"parts": PARTS, "groups": GROUPS})
_STEPS_AHEAD = 3  # of 128 k that a wave has in flight
KERNELS = tuple(_kernel(name) for name in dict.fromkeys(KERNEL_OF.values()))

FAMILY = Family(
    problem=Problem,
    table=kernel_table(
        "gate_up_split",
        KERNELS,
        extra_key=(Column("experts", int, minimum=1), Column("kind", int, accepted=tuple(sorted(KERNEL_OF)))),
        more=(),
    ),
    kernels=KERNELS,
    archs=("gfx950", "gfx942"),
    envelope=lambda problem, arch: None,
    default=_default,
    invariant=_default,
    reference="swiglu_ref",
)
