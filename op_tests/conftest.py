"""Shared pytest set-up: the --full switch, quiet emulation, and an isolated cache for tests that damage theirs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HIPFORGE_EMULATOR_QUIET", "1")
# Every kernel a test runs is checked for undefined values, missing waits and LDS races, not only for its extents.
os.environ.setdefault("HIPFORGE_EMULATOR_CHECKS", "all")

# A shell's background job ignores SIGINT, and so would every child of it; the Ctrl-C tests need it to arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked 'full' (long)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect (not skip) what is marked full, so that a plain run reports no skips it did not need."""
    if config.getoption("--full"):
        return
    kept = [item for item in items if item.get_closest_marker("full") is None]
    dropped = [item for item in items if item.get_closest_marker("full") is not None]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture
def isolated_cache(tmp_path: Path) -> Iterator[Path]:
    """A fresh cache directory for one test, in effect for this process through the settings."""
    from hipforge import settings

    root = tmp_path / "cache"
    root.mkdir()
    with settings.scope(CACHE_DIR=root):
        yield root
