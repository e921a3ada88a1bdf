"""Captures: what the work-groups of launches execute, recorded by the emulator for the simulator."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hipforge.emulator.timing import library
from hipforge.errors import GuardError

WHOLE = 1 << 62
"""Record a work-group to its end."""
RUN = -1
"""Execute a work-group without recording it."""
SKIP = 0
"""Do not execute a work-group."""
ROOM_MIB = 256
"""Enough for about a thousand different work-groups of a GEMM."""
_WORD_BYTES = 4


class Capture:
    """Recorded launches. Work-groups that differ only in their addresses share one instruction stream.

    Args:
        room_mib: memory for the streams; when it is full, further work-groups are executed without being recorded.
    """

    def __init__(self, room_mib: int = ROOM_MIB) -> None:
        self._library = library.load()
        self.handle = self._library.hftime_capture_new()
        self._library.hftime_capture_room(self.handle, (room_mib << 20) // _WORD_BYTES)
        weakref.finalize(self, self._library.hftime_capture_free, self.handle)

    @contextlib.contextmanager
    def recording(
        self,
        chosen: Mapping[int, int] | None = None,
        *,
        others: int = WHOLE,
        merge: bool = False,
        skip_matrix: bool = False,
    ) -> Iterator[None]:
        """Record this thread's launches for a ``with`` block.

        Args:
            chosen: by work-group, the instructions of each wave to execute and record, or WHOLE, RUN or SKIP.
            others: the same for work-groups that ``chosen`` does not name.
            merge: add to the launches of the blocks before, since one that did not; they must be the same launches in
                the same order.
            skip_matrix: do not compute matrix products. Nothing but values may depend on them.
        """
        from hipforge.emulator import runtime

        emulator = runtime.load().library
        picked = chosen or {}
        count = len(picked)
        groups = (ctypes.c_uint64 * max(1, count))(*picked.keys())
        limits = (ctypes.c_int64 * max(1, count))(*picked.values())
        self._library.hftime_capture_policy(self.handle, others, groups, limits, count, merge, skip_matrix)
        emulator.hfemu_set_recorder(self._library.hftime_capture_recorder(self.handle))
        try:
            yield
        finally:
            emulator.hfemu_set_recorder(None)

    def launches(self) -> list[dict[str, Any]]:
        """Return each launch's kernel, grid, block, resources, buffers, and how much of it is recorded."""
        found: list[dict[str, Any]] = json.loads(self._library.hftime_capture_describe(self.handle))
        return found

    def prefix(self, launch: int, template: int) -> int:
        """Return after how many instructions every wave of a template has loaded from each buffer that it loads.

        Raises:
            GuardError: there is no such launch, or no such template of it.
        """
        found = int(self._library.hftime_prefix(self.handle, launch, template))
        if found < 0:
            raise GuardError(self._library.hftime_error().decode())
        return found

    def save(self, path: Path) -> None:
        """Write the capture to a file, with a digest at its end.

        Raises:
            OSError: it cannot be written.
        """
        if not self._library.hftime_capture_save(self.handle, os.fsencode(path)):
            raise OSError(f"cannot write {path}")
        digest = hashlib.sha256(Path(path).read_bytes()).digest()
        with Path(path).open("ab") as file:
            file.write(digest)

    @staticmethod
    def read(path: Path) -> Capture:
        """Return the capture that :meth:`save` wrote.

        Raises:
            GuardError: the file is not a capture of this version, or damaged.
            OSError: it cannot be read.
        """
        capture, content = Capture(), Path(path).read_bytes()
        size = hashlib.sha256().digest_size
        # The numbers inside index each other, so that a damaged file must not be parsed.
        whole = hashlib.sha256(memoryview(content)[:-size]).digest() == content[-size:]
        if not whole or not capture._library.hftime_capture_load(capture.handle, os.fsencode(path)):
            raise GuardError(f"{path} is not a capture of this version, or damaged; record the launch again")
        return capture


def sample(launch: Callable[[], object], whole: Iterable[int], groups: Iterable[int] | None = None) -> Capture:
    """Record launches of which only a few work-groups run to their end.

    Of the others only the beginning is executed, up to the first load of every operand: it shows which one they repeat,
    and at which addresses. Those that repeat none run to their end too, until all are known. Matrix products are not
    computed.

    Args:
        launch: makes the launches, the same ones at each call; it is called several times.
        whole: work-groups that run to their end. A work-group that begins like one of them and goes on differently must
            be among them: its beginning does not show it.
        groups: those to record, by default all.
    """
    capture, told = Capture(), set(whole)
    todo: set[int] | None = None if groups is None else set(groups)
    merge = False
    while todo is None or todo:
        with capture.recording(dict.fromkeys(told, WHOLE), others=SKIP, merge=merge, skip_matrix=True):
            launch()
        merge = True
        launches = capture.launches()
        if todo is None:
            todo = set(range(max(one["groups"] for one in launches)))
        limit = max(
            capture.prefix(number, template)
            for number, one in enumerate(launches)
            for template in range(len(one["templates"]))
        )
        if not todo - told:
            break
        with capture.recording(dict.fromkeys(sorted(todo - told), limit), others=SKIP, merge=True, skip_matrix=True):
            launch()
        todo = {group for one in capture.launches() for group in one["unmatched"]}
        told = set(sorted(todo)[:: max(1, len(todo) // 4)])
    return capture
