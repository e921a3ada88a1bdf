"""A Triton launch as a value, so that a GPU and the emulator run the same one.

Triton is imported on first use, never with this module.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hipforge.errors import GuardError

Bind = Callable[[Any], Any]  # a kernel -> one for another runtime, such as the emulator's


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def unavailable(device: torch.device) -> str | None:
    """Return why Triton cannot run on tensors on ``device``, or None where it can."""
    if device.type != "cuda":
        return f"Triton runs on GPU tensors; these are on {device}"
    return None if _installed() else "the triton package is not installed"


@dataclass(frozen=True)
class Launch:
    """One kernel call: ``kernel[grid](*arguments, **constants)``."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self, bind: Bind | None = None) -> Any:
        """Launch, on the GPU or through ``bind``, which turns a kernel into one for another runtime (the emulator's).

        Raises:
            GuardError: Triton cannot run where the first argument is.
        """
        if 0 in self.grid:
            return None
        if bind is None:
            device = next(x.device for x in self.arguments if isinstance(x, torch.Tensor))
            reason = unavailable(device)
            if reason is not None:
                raise GuardError(reason)
        kernel = self.kernel if bind is None else bind(self.kernel)
        return kernel[self.grid](*self.arguments, **self.constants)


def power_of_two(count: int) -> int:
    """Return the least power of two that is at least ``count``."""
    return 1 << max(count - 1, 0).bit_length()
