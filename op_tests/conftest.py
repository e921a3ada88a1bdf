"""Shared pytest set-up: the --full switch, quiet emulation, and an isolated cache for tests that damage theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HIPFORGE_EMULATOR_QUIET", "1")
# Every kernel a test runs is checked for undefined values, missing waits and LDS races, not only for its extents.
os.environ.setdefault("HIPFORGE_EMULATOR_CHECKS", "all")

# Test processes side by side share the cores: torch would take all of them in each.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _PROCESSES > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // _PROCESSES)))

# A shell's background job ignores SIGINT, and so would every child of it; the Ctrl-C tests need it to arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked 'full' (long)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, rather than skip, what this run leaves out, so that a plain run reports no needless skips."""

    def is_wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("full") is not None and not config.getoption("--full"):
            return False
        # The gfx942 process of the fixture below must not start another.
        return not (os.environ.get("HIPFORGE_EMULATE") == "gfx942" and "on_gfx942" in getattr(item, "fixturenames", ()))

    kept = [item for item in items if is_wanted(item)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
        items[:] = kept


@pytest.fixture
def on_gfx942(request: pytest.FixtureRequest) -> Callable[..., str]:
    """Runs the tests of this file again in a process that emulates gfx942, since a process has one device.

    The arguments are pytest's (``"-k", "exact"``); tests that use this fixture are left out. Returns the output;
    fails unless every test passed and at least one ran.
    """

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(request.path)]
        environment = {**os.environ, "HIPFORGE_EMULATE": "gfx942"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-3000:] + result.stderr[-1000:]
        return result.stdout

    return run


@pytest.fixture
def isolated_cache(tmp_path: Path) -> Iterator[Path]:
    """A fresh cache directory for one test, in effect for this process through the settings."""
    from hipforge import settings

    root = tmp_path / "cache"
    root.mkdir()
    with settings.scope(CACHE_DIR=root):
        yield root
