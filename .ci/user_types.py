"""Check a user's file with mypy and pyright: each must refuse the lines marked ``# error`` and no other.

The package is the one that this environment has installed. pyright is basedpyright, whose wheel and whose node come
from the package index.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from typecheck import ROOT

SAMPLE = ROOT / "op_tests" / "helpers" / "user_code.py"


def run(top: Path, *command: str) -> str:
    """Run a checker in ``top`` and return what it prints; its exit status is 1 for the errors that are wanted."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=top, text=True, capture_output=True, check=False)
    if done.returncode > 1:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def mypy(top: Path) -> dict[int, str]:
    """Return mypy's errors by line."""
    shared = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"))
    out = run(top, "mypy", *shared, SAMPLE.name)  # as typecheck.py, whose cache holds what is known of torch
    found = re.findall(rf"^{SAMPLE.name}:(\d+): error: (.*)$", out, re.MULTILINE)
    return {int(line): text for line, text in found}


def pyright(top: Path) -> dict[int, str]:
    """Return pyright's errors by line."""
    (top / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    out = run(top, "basedpyright", "--outputjson", "--pythonpath", sys.executable, SAMPLE.name)
    found = json.loads(out)["generalDiagnostics"]
    return {
        item["range"]["start"]["line"] + 1: item["message"]
        for item in found
        if item["severity"] == "error" and item["file"].endswith(SAMPLE.name)
    }


def wanted() -> set[int]:
    """Return the lines that a checker must refuse."""
    return {number for number, line in enumerate(SAMPLE.read_text().splitlines(), 1) if line.endswith("# error")}


def main() -> int:
    """Return 0 when both checkers refuse exactly the marked lines."""
    checkers: tuple[Callable[[Path], dict[int, str]], ...] = (mypy, pyright)
    status = 0
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        (top / SAMPLE.name).write_text(SAMPLE.read_text())
        for check in checkers:
            errors = check(top)
            for line in sorted(wanted() ^ set(errors)):
                what = f"unexpected: {errors[line]}" if line in errors else "no error was found"
                sys.stdout.write(f"{check.__name__}: {SAMPLE.name}:{line}: {what}\n")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
