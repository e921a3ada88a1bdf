"""Cases in processes of their own, which may die, and the tally of documents that are read or refused."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hipforge.errors import HipforgeError

TESTS = Path(__file__).resolve().parents[1]


def say(**line: Any) -> None:
    """Tell the process that supervises this one that a case ``begins``, or how the case ``number`` has ``ended``."""
    print(json.dumps(line), flush=True)


def cases(program: Callable[[int], str], first: int, end: int, environment: Mapping[str, str]) -> Iterator[Any]:
    """Yield what is said of each case from ``first`` to ``end``; ``program(first)``, Python text, begins them in order.

    A process that dies is replaced, and the case that it had begun ends in ``crash``.
    """
    while first < end:
        begun = None
        text = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{program(first)}"
        command = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", text]
        with subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    said = None
                    with contextlib.suppress(ValueError):
                        said = json.loads(line)
                    if isinstance(said, dict) and "begins" in said:
                        begun = said["begins"]
                    elif isinstance(said, dict):
                        first = said["number"] + 1
                        yield said
            except GeneratorExit:  # its caller has seen enough
                process.kill()
                raise
        if begun is None:
            raise RuntimeError("no case was begun; standard error says why")
        if first < end:
            yield {"number": begun, "ended": "crash", "details": f"the process died with status {process.returncode}"}
            first = begun + 1


@dataclass
class Tally:
    """How the documents of a trial ended, and which ended in an exception that is not hipforge's."""

    seed: int
    what: str
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def case(self, number: int, raw: bytes) -> Iterator[None]:
        """Count the reading of one in the block."""
        try:
            yield
        except HipforgeError:
            self.ended["refused"] += 1
        except Exception as error:
            self.ended["raw exception"] += 1
            said = f"{type(error).__name__}: {error}: {raw[:1500]!r}"
            self.wrong.append(f"seed {self.seed}, {self.what} {number}: {said}")
        else:
            self.ended["read"] += 1
