"""Run mypy over a link tree shaped like the installed package, since mypy cannot follow the folder mapping.

A planted error is checked first: a run that cannot fail proves nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("jit", "csrc", "emulator", "ops", "tuning", "configs")


def link_tree(top: Path) -> Path:
    """Make ``top/hipforge`` with a link for every file and folder of the package."""
    package = top / "hipforge"
    package.mkdir()
    for source in (ROOT / "src" / "hipforge").iterdir():
        (package / source.name).symlink_to(source)
    for name in MAPPED:
        (package / name).symlink_to(ROOT / name)
    return package


def run_mypy(top: Path) -> subprocess.CompletedProcess[str]:
    """Check the package below ``top``; the cache is kept in the checkout so that a second run is quick."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"),
               "--cache-dir", str(ROOT / ".mypy_cache"), "-p", "hipforge"]
    return subprocess.run(command, cwd=top, text=True, capture_output=True, check=False)


def main() -> int:
    """Return 0 when the package is clean and the planted error was caught."""
    with tempfile.TemporaryDirectory() as name:
        package = link_tree(Path(name))
        planted = package / "planted.py"
        planted.write_text("value: int = 'not an int'\n")
        result = run_mypy(Path(name))
        caught = "planted.py:1: error" in result.stdout
        planted.unlink()
        if not caught:
            sys.stderr.write(f"mypy missed a planted error, so it checked nothing:\n{result.stdout}{result.stderr}")
            return 1
        result = run_mypy(Path(name))
        sys.stdout.write(result.stdout)
        sys.stderr.write(result.stderr)
        return result.returncode


if __name__ == "__main__":
    sys.exit(main())
