"""Print what pyproject.toml asks for (dependencies and every extra), one shell-safe word each, without some names.

Needed where torch and triton come with the interpreter (ROCm builds) and pip must not see their names.
"""

import argparse
import re
import sys
from pathlib import Path


def array_entries(text: str, key: str) -> list[str]:
    """Return the strings of ``key = [...]``. Enough TOML for our own file; tomllib is missing on Python 3.10."""
    match = re.search(rf"^{re.escape(key)} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'"([^"]+)"', match.group(1)) if match else []


def main() -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--without", nargs="*", default=[])
    without = set(parser.parse_args().without)
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    wanted = ["setuptools>=77", "wheel"]
    for key in ("dependencies", "compiler", "cuda", "test", "plots", "docs"):
        wanted += array_entries(text, key)
    names = [r for r in dict.fromkeys(wanted) if re.split(r"[<>=!~\[ ]", r, maxsplit=1)[0] not in without]
    sys.stdout.write(" ".join(names) + "\n")


if __name__ == "__main__":
    main()
