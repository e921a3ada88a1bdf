"""The page of toolchains: what differs between two records, and what was refused, is in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def toolchains() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / ".ci/toolchains.py"
    spec = importlib.util.spec_from_file_location("toolchains", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(compiler: str, variants: dict[str, Any]) -> dict[str, Any]:
    packages = {"torch": "2.13.0", "triton": "3.7.1"}
    return {"compiler": compiler, "date": "2026-01-02", "commit": "abc1234", "python": "3.11.7", "packages": packages,
            "tests": "", "note": "", "registered": 9, "variants": variants}  # fmt: skip


def test_the_page_names_differences_and_refusals_and_nothing_that_is_alike(toolchains: ModuleType) -> None:
    one = made("hipcc A", {"m gfx950": {"k<1>": [80, 0, 0], "same": [8, 0, 0]}, "n gfx950": {"k": [1, 0, 0]}})
    error = ["n for gfx950 was refused", "log: /tmp/x", "kernel k spills 3 | VGPRs"]
    other = made("hipcc B", {"m gfx950": {"k<1>": [96, 2, 8], "same": [8, 0, 0]}, "n gfx950": {"error": error}})
    page = toolchains.table([one, other])
    assert "| hipcc A | 2026-01-02, abc1234 | 3.11.7, 2.13.0, 3.7.1 | 2 of 2 tried, of 9 | (reference) |" in page
    assert "| 1 of 2 tried, of 9 | 1 kernels | not run |" in page
    assert "| m gfx950 | `k<1>` | 80 / 0 / 0 | 96 / 2 / 8 |" in page
    assert "| n gfx950 | kernel k spills 3 \\| VGPRs |" in page
    assert "same" not in page


def test_a_spread_takes_each_module_and_architecture(toolchains: ModuleType) -> None:
    few, every = toolchains.chosen(3), toolchains.chosen(None)
    assert {(request.entry.name, request.arch) for request in few} == {
        (request.entry.name, request.arch) for request in every
    }
    assert len(few) < len(every)
    assert len({(request.stem, request.arch) for request in few}) == len(few)
