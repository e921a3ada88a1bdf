"""Did a file change while a compiler was reading it? Then the digest taken afterwards is of other contents.

A change is seen from the status-change time, which no program can set. Where that leaves a doubt (the file system has
another clock, or the file changed just before the build), the build is repeated between two looks at the contents.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

from hipforge.errors import BuildError
from hipforge.jit.digest import ABSENT
from hipforge.jit.spec import BuildSpec, category

_SECOND_NS = 1_000_000_000
_COARSE = 5  # Linux's CLOCK_REALTIME_COARSE, the time of the last tick; the time module has no name for it


NO_SUCH_FILE = "was read by a compiler, as it reports, and is not there; rename it if its name is unusual"


class InputsChanged(BuildError):
    """A file that determines the binary changed during the build.

    ``dependencies`` are the files that were read with their digests after the build; ``in_key``: one of them is a
    source, and the key no longer describes what was compiled.
    """

    def __init__(
        self, title: str, changed: list[str], dependencies: list[tuple[str, str]], in_key: bool, how: str = ""
    ) -> None:
        it = "it" if len(changed) == 1 else "them"
        how = how or f"changed while it was being built; build again once nobody edits {it}"
        super().__init__(f"{title}: {', '.join(changed)} {how}")
        self.dependencies = dependencies
        self.in_key = in_key


def start() -> int:
    """Return a time in nanoseconds later than every past change of a file and not later than any coming change.

    The kernel stamps files with the time of its last tick, or, since Linux 6.13, with the exact time where somebody
    looked at the file's times before. So this waits until the tick's time is past the exact time of now (two ticks,
    20 ms at most): else a file written just before a build would look as if it had changed during it.
    """
    exact = time.time_ns()
    while (now := time.clock_gettime_ns(_COARSE)) <= exact:
        time.sleep(0.0005)
    return now


def check(spec: BuildSpec, dependencies: Iterable[tuple[str, str]], began_ns: int, before: Mapping[str, str]) -> None:
    """Make sure that no file has changed since it was read.

    Args:
        spec: what was built.
        dependencies: every file read, by placeholder, with its digest after the build.
        began_ns: when the build began, as :func:`start` gives it.
        before: digests of files from just before it, where they are known.

    Raises:
        InputsChanged: a file changed meanwhile.
    """
    found = list(dependencies)
    now = dict(found)
    sources = _digests_in_key(spec)
    changed = [path for path, digest in sources.items() if now.get(path, digest) != digest]
    if changed:
        raise InputsChanged(spec.title, changed, found, in_key=True)
    known = {**before, **sources}
    changed = [
        path
        for path, digest in found
        if (known[path] != digest if path in known else _touched_since(spec.roots.show(path), digest, began_ns))
    ]
    if changed:
        raise InputsChanged(spec.title, changed, found, in_key=False)


def _digests_in_key(spec: BuildSpec) -> dict[str, str]:
    named = (name.partition(":")[2] for name in spec.ingredients if category(name) == "source")
    return {path: spec.ingredients[f"source:{path}"] for path in named}


def _touched_since(path: str, digest: str, began_ns: int) -> bool:
    try:
        changed_at = os.stat(path).st_ctime_ns
    except OSError:
        return digest != ABSENT
    # A stamp without a fraction may mean any time within its second.
    return changed_at >= began_ns if changed_at % _SECOND_NS else changed_at + _SECOND_NS > began_ns
