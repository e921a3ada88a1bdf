"""Plants the faults of ``faults.py``, one at a time, and runs the tests that must notice.

    python op_tests/mutants/run.py [--list] [--only PATTERN ...] [--unplanted]

The working tree is copied first; a fault is planted in the copy and taken out again. Exit status 1 if a fault goes
unnoticed, its text is not there exactly once, or, with --unplanted, a test that must notice fails without any fault.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mutants.fault import Fault
from mutants.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")


def problem(fault: Fault, root: Path = ROOT) -> str | None:
    """Return why a fault cannot be planted, or None."""
    path = root / fault.file
    count = path.read_text().count(fault.text) if path.is_file() else 0
    if count != 1:
        return f"the text occurs {count} times in {fault.file}"
    if any(not list((root / "op_tests").glob(pattern)) for pattern in fault.tests.partition(" -k ")[0].split()):
        return f"no test file is called {fault.tests}"
    return None


def run_tests(root: Path, tests: str, arch: str) -> tuple[int, str]:
    """Run test files in a copy until one fails; returns pytest's exit status and the first failure."""
    patterns, _, chosen = tests.partition(" -k ")
    files = [str(path) for pattern in patterns.split() for path in sorted((root / "op_tests").glob(pattern))]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--arch", arch, "-k", chosen]
    command = [sys.executable, "-m", "pytest", *options, *files]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (failed or done.stdout.splitlines()[-1:] or [done.stderr[-300:]])[0]


def unnoticed(root: Path, fault: Fault) -> str | None:
    """Plant a fault in a copy and run its tests; returns why it counts as unnoticed, or None, and says what failed."""
    why_not = problem(fault, root)
    if why_not is not None:
        return why_not
    path = root / fault.file
    before = path.read_text()
    path.write_text(before.replace(fault.text, fault.becomes))
    started = time.monotonic()
    try:
        status, line = run_tests(root, fault.tests, fault.arch)
    finally:
        path.write_text(before)
    print(f"{fault.name:45} {time.monotonic() - started:5.0f} s  {line[:150]}", flush=True)
    return None if status == 1 else f"pytest ended with {status}: {line}"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the faults and whether each can be planted")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of faults, as dense/*")
    parser.add_argument("--unplanted", action="store_true", help="run the tests without a fault: all must pass")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if any(fnmatch.fnmatch(fault.name, pattern) for pattern in given.only)]
    if given.list:
        for fault in chosen:
            print(f"{fault.name:45} {fault.arch} {fault.file}: {problem(fault) or fault.tests}")
        return int(any(problem(fault) for fault in chosen))
    with tempfile.TemporaryDirectory(prefix="hipforge-mutants-") as folder:
        root = Path(folder) / "tree"
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        if given.unplanted:
            wrong = {}
            for tests, arch in sorted({(fault.tests, fault.arch) for fault in chosen}):
                status, line = run_tests(root, tests, arch)
                print(f"{arch} {tests}: {line}", flush=True)
                if status != 0:
                    wrong[tests] = line
        else:
            wrong = {fault.name: why for fault in chosen if (why := unnoticed(root, fault)) is not None}
    for name, why in wrong.items():
        print(f"NOT NOTICED {name}: {why}" if not given.unplanted else f"FAILS WITHOUT A FAULT {name}: {why}")
    print(f"{len(chosen)} faults, {len(wrong)} problems")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
