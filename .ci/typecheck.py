"""Run mypy over the package, and over a planted error beside it: a run that cannot fail proves nothing."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PLANTED = "planted"


def main() -> int:
    """Return 0 when the package is clean and the planted error was caught."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / f"{PLANTED}.py").write_text("from hipforge import shapes\n\nvalue: int = shapes.__doc__\n")
        # The cache is kept in the checkout so that a second run is quick.
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"),
                   "--cache-dir", str(ROOT / ".mypy_cache"), "-p", "hipforge", "-m", PLANTED]  # fmt: skip
        environment = {"MYPYPATH": f"{SOURCE}:{name}", "PATH": "/usr/bin:/bin"}
        result = subprocess.run(command, cwd=name, env=environment, text=True, capture_output=True, check=False)
    lines = result.stdout.splitlines()
    errors = [line for line in lines if f"{PLANTED}.py:" not in line and not line.startswith("Found ")]
    sys.stdout.write("".join(f"{line}\n" for line in errors))
    sys.stderr.write(result.stderr)
    if not any(f"{PLANTED}.py:3: error" in line for line in lines):
        sys.stderr.write(f"mypy missed a planted error, so it checked nothing:\n{result.stdout}")
        return 1
    return 1 if errors or result.returncode > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
