"""The CSV of a bench."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """Write rows, which are mappings or dataclasses; their columns may differ."""
    flat = [row if isinstance(row, Mapping) else asdict(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
