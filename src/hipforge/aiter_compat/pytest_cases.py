"""Runs a file of test functions under pytest for :mod:`hipforge.aiter_compat.runner`, and records its cases."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hipforge.aiter_compat.cases import Cases


def run(arguments: Sequence[str], cases: Cases, sample: int, finder: Any) -> int:
    """Run ``sample`` of the cases that pytest collects, or all if it is 0; return 0 if it came to its end.

    ``finder`` stays the first of ``sys.meta_path``: pytest's own takes every module whose name begins with ``test_``.
    """
    code = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], [_Plugin(cases, sample, finder)])
    return 0 if code == pytest.ExitCode.TESTS_FAILED else int(code)


class _Plugin:
    """Reports pytest's cases."""

    def __init__(self, cases: Cases, sample: int, finder: Any) -> None:
        self.cases = cases
        self.sample = sample
        self.finder = finder

    def pytest_sessionstart(self) -> None:
        """Put the finder before pytest's."""
        sys.meta_path.remove(self.finder)
        sys.meta_path.insert(0, self.finder)

    @pytest.hookimpl(trylast=True)  # of the cases that -k has left
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep ``sample`` cases, spread evenly over the grid."""
        self.cases.collected = count = len(items)
        if 0 < self.sample < count:
            items[:] = [items[index * count // self.sample] for index in range(self.sample)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """Limit the time of a case and collect what its comparisons find."""
        self.cases.failures.append([])
        self.before = self.cases.building
        with self.cases.limit():
            yield

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Record one case."""
        error = call.excinfo.value if call.excinfo else None
        if call.when == "call":
            building = self.cases.building - self.before
            self.cases.record(_title(item), error, self.cases.failures.pop(), call.duration - building)
        elif call.when == "setup" and error is not None:
            self.cases.record(_title(item), error, [], call.duration)


def _title(item: Any) -> str:
    return str(item.nodeid).partition("::")[2]
