"""One source of a module, and how a toolchain compiles it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hipforge.jit.ninja import Step


@dataclass(frozen=True)
class Unit:
    """One source: its number, its path with placeholders, whether it holds device code, and its flags in order.

    ``bare``: device code that needs none of the headers and device libraries a compiler adds by itself.
    """

    number: int
    source: str
    is_hip: bool
    flags: tuple[str, ...]
    bare: bool = False

    @property
    def name(self) -> str:
        """A name for files made from this source."""
        return f"{self.number}_{re.sub(r'[^A-Za-z0-9_]', '_', Path(self.source).stem)}"


@dataclass(frozen=True)
class Compiled:
    """How one source is compiled: steps, objects to link, and text files the steps need."""

    steps: tuple[Step, ...]
    objects: tuple[str, ...]
    files: Mapping[str, str]
