"""The long trial, ``make stress``, and parts of it: ``python op_tests/stress/run.py [part ...] [--seed N] [--small]``.

Parts: kills, races, calls, tables, writers, registries, manifests, checkpoints, checkouts, objects. ``--case N`` makes
one call of the fuzzer again and shows it. Ends with status 1 where anything was found.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Found = tuple["Counter[str]", list[str]]
SIZES = {
    # part: (the long trial, the small one)
    "kills": (60, 2),
    "races": (16, 4),
    "calls": (15_000, 270),
    "tables": (10_000, 300),
    "writers": (12, 3),
    "registries": (3_000, 300),
    "manifests": (3_000, 300),
    "checkpoints": (10_000, 600),
    "checkouts": (3_000, 100),
    "objects": (3_500, 100),
}
SHARES = {"gfx950": 0.4, "gfx942": 0.2, "torch": 0.4}  # of the calls
SHOWN = 20


def calls(seed: int, count: int, folder: Path) -> Found:
    """Fuzzed calls on both architectures and on torch."""
    return drawn(seed, count)


def drawn(seed: int, count: int, found: threading.Event | None = None) -> Found:
    """Draw calls in two processes at a time; up to the first that is wrong, which sets ``found``, if it is given."""
    from stress import calls as trial

    ended: Counter[str] = Counter()
    wrong: list[str] = []
    parts = []
    for where, share in SHARES.items():
        end = round(count * share)
        step = max(500, -(-end // 4))  # a process takes as long to start as 300 calls
        parts += [(first, where, min(first + step, end)) for first in range(0, end, step)]
    if found is not None:
        parts.sort()  # each of the three from the beginning
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda part: trial.run(seed, part[0], part[2], part[1], found), parts))
    for (_, where, _), (outcomes, bad) in zip(parts, results, strict=True):
        ended.update({f"{where}: {outcome}": number for outcome, number in outcomes.items()})
        wrong += ["\n    ".join(f"{name}: {value}" for name, value in line.items()) for line in bad]
    return ended, wrong


def trial_of(part: str) -> Callable[[int, int, Path], Found]:
    """Return the function of a part: (seed, size, folder) -> (how its cases ended, what was wrong)."""
    from stress import documents, objects, processes, tables

    parts: dict[str, Callable[[int, int, Path], Found]] = {
        "kills": processes.kills,
        "races": lambda seed, size, folder: processes.races(seed, size, 3, folder),
        "calls": calls,
        "tables": tables.reads,
        "writers": lambda seed, size, folder: tables.writes(seed, size, 25, folder),
        "registries": documents.registries,
        "manifests": documents.manifests,
        "checkpoints": documents.checkpoints,
        "checkouts": documents.checkouts,
        "objects": objects.run,
    }
    return parts[part]


def run(part: str, seed: int, size: int) -> Found:
    """Run one part in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="hipforge-stress-") as folder:
        return trial_of(part)(seed, size, Path(folder) / part)


def main() -> int:
    """Run the parts asked for and report them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help="all of them by default")
    parser.add_argument("--seed", type=int, default=None, help="by default one that is drawn and printed")
    parser.add_argument("--small", action="store_true", help="the sizes of the test suite")
    parser.add_argument("--size", type=int, help="cases of each part")
    parser.add_argument("--case", type=int, help="make one call of the fuzzer again")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else int.from_bytes(os.urandom(3), "big")
    unknown = [part for part in given.parts if part not in SIZES]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; parts: {', '.join(SIZES)}")
    if given.case is not None:
        from stress import calls as trial

        made = trial.arguments_of(trial.Rng(seed, given.case), given.case)
        print(trial.OPS[given.case % len(trial.OPS)].name, trial.describe(made))
        print(*trial.one_call(seed, given.case), sep="\n")
        return 0
    print(f"seed {seed}", flush=True)
    failed = 0
    for part in given.parts or SIZES:
        size = given.size or SIZES[part][given.small]
        began = time.monotonic()
        ended, wrong = run(part, seed, size)
        failed += len(wrong)
        tally = ", ".join(f"{number} {outcome}" for outcome, number in sorted(ended.items()))
        print(f"{part}: {size} in {time.monotonic() - began:.0f} s: {tally}; {len(wrong)} wrong", flush=True)
        for text in wrong[:SHOWN]:
            print(f"  {text[:3000]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
