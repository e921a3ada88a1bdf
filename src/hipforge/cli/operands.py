"""What a profiled op is, and the data that its operands are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hipforge import archs, devices

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Subject:
    """An op that can be profiled: its shape's numbers, by name and with an example, and what makes the call of them.

    ``own`` is one that ``--register`` brought.
    """

    shape: tuple[str, ...]
    example: tuple[int, ...]
    call: Callable[..., partial[Any]]
    own: bool = False


SUBJECTS: dict[str, Subject] = {}
"""By op's name: those of hipforge, from :mod:`hipforge.cli.profile_subjects`, and those that ``--register`` brought."""


def normal(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Return bfloat16 data N(0, scale), the same for a shape and a seed on every run."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def e4m3_dtype() -> torch.dtype:
    """Return the e4m3 format of the device."""
    import torch

    fnuz = archs.get(devices.current().arch_of()).fp8_fnuz
    return torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn


def e4m3(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Return :func:`normal` in the e4m3 format of the device."""
    return normal(*shape, seed=seed, scale=scale).to(e4m3_dtype())


def of_experts(experts: int, *weight: torch.Tensor) -> list[torch.Tensor]:
    """Return [E, ...] of one expert's weight and scales: all have the same, since making hundreds takes minutes."""
    return [part.expand(experts, *part.shape).contiguous() for part in weight]


def routed(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """Return uniform choices [T, top_k] that reach about as many experts as such choices reach on average.

    Weights of these experts are nearly all that a layer reads, and one draw is off by several percent: 64 tokens that
    choose 9 of 257 reach 231 experts on average and 240 with seed 2. So the nearest of some draws is taken.
    """
    import torch

    from hipforge.ops.core.arguments import has_memory

    def draw(seed: int) -> torch.Tensor:
        scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
        return scores.topk(top_k, dim=1).indices.int()

    first = draw(2)
    if not has_memory(first):  # a fake tensor, whose shape alone is asked for
        return first
    mean = experts * (1 - (1 - top_k / experts) ** tokens)
    return min(map(draw, range(2, 34)), key=lambda ids: abs(len(ids.unique()) - mean))


def mxfp8(*shape: int, seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`normal` as MX-FP8 in the e4m3 format of the device: elements and e8m0 scales."""
    from hipforge.ops.reference import quantize_mxfp8

    return quantize_mxfp8(normal(*shape, seed=seed, scale=scale), e4m3_dtype())
