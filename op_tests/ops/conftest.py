"""Fixtures of the ops' tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hipforge import devices, emulator
from hipforge.ops.core import dispatch
from hipforge.ops.core.tuned import TableSchema, clear_tables


@pytest.fixture(params=["kernel", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both paths of every op, in a process that emulates."""
    if request.param == "torch":
        monkeypatch.setattr(devices, "current", lambda: devices.Device("reference", None))
    dispatch.clear_decisions()
    yield request.param
    dispatch.clear_decisions()


@pytest.fixture
def put_table(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Put a table into effect until the test ends: ``put(schema, *rows)``, or a file that is there."""

    def put(schema: TableSchema, *rows: str, header: str = "", path: Path = tmp_path / "table.csv") -> Path:
        if rows:
            path.write_text("\n".join((header or ",".join(schema.header), *rows)) + "\n")
        patch.setenv(f"HIPFORGE_CONFIG_{schema.family.upper()}", str(path))
        clear_tables()
        dispatch.clear_decisions()
        return path

    with pytest.MonkeyPatch.context() as patch:
        yield put
    clear_tables()
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
