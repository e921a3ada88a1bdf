"""The error of a result, as tests and benches measure it."""

from __future__ import annotations

from collections.abc import Callable

import torch

listeners: list[Callable[[float], None]] = []
"""Told of every error: ``gpu/staging.py`` notes the worst of a kernel."""


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of ``want``, in float64; 0 where both are the same."""
    want = want.double().expand_as(got)
    difference = (got.double() - want).norm()
    error = float(difference / want.norm()) if difference else 0.0
    for listener in listeners:
        listener(error)
    return error


def assert_within(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Every element is at most ``bound`` from that of ``want``, in float64; returns how far."""
    relative(got, want)
    off = (got.double() - want).abs()
    assert (off <= bound).all(), f"the worst of {off.numel()} elements is off by {(off / bound).max()} of its bound"
    return off
