"""Fixtures of the ops' tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hipforge import devices, emulator
from hipforge.ops.core import dispatch


@pytest.fixture(params=["kernel", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both paths of every op, in a process that emulates."""
    if request.param == "torch":
        monkeypatch.setattr(devices, "current", lambda: devices.Device("reference", None))
    dispatch.clear_decisions()
    yield request.param
    dispatch.clear_decisions()


@pytest.fixture
def arch() -> str:
    """The architecture that this process emulates."""
    return os.environ.get("HIPFORGE_EMULATE", "gfx950")


@pytest.fixture
def every_checker() -> Iterator[None]:
    """Uninitialised reads, missing waits and LDS races are faults here, besides memory bounds."""
    with emulator.options(checks="all"):
        yield
