"""Shared pytest set-up: the --full switch, quiet emulation, and an isolated cache for tests that damage theirs."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HIPFORGE_EMULATOR_QUIET", "1")
# Every kernel a test runs is checked for undefined values, missing waits and LDS races, not only for its extents.
os.environ.setdefault("HIPFORGE_EMULATOR_CHECKS", "all")

# Tests start hundreds of processes that import the package: without bytecode on disk each would compile it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Test processes side by side share the cores: torch would take all of them in each.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _PROCESSES > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // _PROCESSES)))

# A shell's background job ignores SIGINT, and so would every child of it; the Ctrl-C tests need it to arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked 'full' (long)")
    parser.addoption("--arch", help="emulate this architecture; other than gfx950, run only the tests marked with it")


def pytest_configure(config: pytest.Config) -> None:
    # A process has one device, which is chosen before anything asks for it.
    if config.getoption("--arch"):
        os.environ["HIPFORGE_EMULATE"] = config.getoption("--arch")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, unimported, what needs a GPU but in ``make gpu-test``, and files without a test for ``--arch``."""
    if collection_path.name == "helpers":  # among them a checkout with tests of its own, which tests run
        return True
    if collection_path.parent.name == "gpu" and "HIPFORGE_STAGE_RECORD" not in os.environ:
        return True
    arch = config.getoption("--arch") or "gfx950"
    without = collection_path.suffix == ".py" and f"mark.{arch}" not in collection_path.read_text()
    return True if arch != "gfx950" and without else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, rather than skip, what this run leaves out, so that a plain run reports no needless skips."""
    arch = config.getoption("--arch") or "gfx950"

    def is_wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("full") is not None and not config.getoption("--full"):
            return False
        mark = item.get_closest_marker(arch)
        return arch == "gfx950" or (mark is not None and _matches(item.name, *mark.args))

    kept = [item for item in items if is_wanted(item)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
        items[:] = kept


def _matches(name: str, expression: str = "True") -> bool:
    """Whether a test's name fits an expression of parts of names, as pytest's ``-k`` takes it."""
    words = {"and", "or", "not", "True"}
    return eval(re.sub(r"[^\s()]+", lambda word: word[0] if word[0] in words else str(word[0] in name), expression))


@pytest.fixture
def isolated_cache(tmp_path: Path) -> Iterator[Path]:
    """A fresh cache directory for one test, in effect for this process through the settings."""
    from hipforge import settings

    root = tmp_path / "cache"
    root.mkdir()
    with settings.scope(CACHE_DIR=root):
        yield root
