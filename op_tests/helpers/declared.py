"""What the tests of single ops declare for those of all ops, so that a new op needs no entry elsewhere."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "ops"


def declared(name: str) -> Iterator[Any]:
    """The value of ``name`` in every file of op_tests/ops that has a line ``NAME = ...``."""
    for path in sorted(TESTS.glob("test_*.py")):
        if re.search(rf"^{name} = ", path.read_text(), re.MULTILINE):
            spec = importlib.util.spec_from_file_location(f"declared_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module.__name__] = module  # where dataclasses look for their annotations
            spec.loader.exec_module(module)
            yield getattr(module, name)
