"""Write the imports that type checkers see in hipforge/__init__.py; with --check, say whether they are up to date.

python .ci/public_names.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

FACE = Path(__file__).resolve().parent.parent / "src" / "hipforge" / "__init__.py"
BEGIN, END = "    # begin generated\n", "    # end generated\n"


def imports() -> str:
    """Return one import per public name, from the module that defines it, and one per submodule; imports no torch."""
    import hipforge

    lines = [f"    from hipforge import {name} as {name}\n" for name in hipforge._SUBMODULES if name != "errors"]
    homes = sorted((module, name) for name, module in hipforge._LAZY.items())
    lines += [f"    from {module} import {name} as {name}\n" for module, name in homes]
    return "".join(lines)


def with_imports(text: str) -> str:
    """Return the text of hipforge/__init__.py with the generated part renewed."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + imports() + END + after


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    present = FACE.read_text()
    wanted = with_imports(present)
    if check:
        sys.stdout.write("" if present == wanted else "hipforge/__init__.py: run python .ci/public_names.py\n")
        return int(present != wanted)
    FACE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
