"""Helpers of tests, with the names and the arguments of aiter's."""

from collections.abc import Callable
from typing import Any

import torch


def checkAllclose(
    a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-2, atol: float = 1e-2, tol_err_ratio: float = 0.05, msg: str = ""
) -> float:
    return (~torch.isclose(a, b, rtol=rtol, atol=atol)).float().mean().item()


def run_perftest(function: Callable[..., Any], *args: Any, num_iters: int = 101, **kwargs: Any) -> None:
    raise AssertionError("the original, which needs a GPU's profiler")


def benchmark() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda function: lambda *args: dict(function(*args))
