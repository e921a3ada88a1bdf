"""Say whether the toolchain search accepts a compiler here; exit 0 if it does, else 1 with the reasons.

    python3 .ci/find_compiler.py [--before-setup]

Runs from the checkout with the standard library alone. ``--before-setup``: a compiler that lacks nothing but the HIP
headers is accepted too, because the triton that set-up installs brings them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before-setup", action="store_true")
    options = parser.parse_args()
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(SOURCE))
    from hipforge import settings
    from hipforge.errors import ToolchainError
    from hipforge.jit import toolchain

    if options.before_setup:
        considered = toolchain.probe_all()[: 1 if settings.HIPCC.get() else None]
        if any(isinstance(verdict, toolchain.Refused) and verdict.lacks_headers_only for verdict in considered):
            return 0
    try:
        sys.stdout.write(toolchain.select("gfx950").description + "\n")
    except ToolchainError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
