"""The cells that tuners work on: (M, N, K) of X[M, K] @ W[N, K]^T, from defaults, arguments or a CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hipforge import shapes
from hipforge.errors import ConfigError


@dataclass(frozen=True, order=True)
class Cell:
    """One problem size; ordered by weight shape, then M."""

    n: int
    k: int
    m: int

    def __str__(self) -> str:
        return f"M={self.m} N={self.n} K={self.k}"

    @property
    def key(self) -> tuple[int, ...]:
        """Return M, N and K."""
        return self.m, self.n, self.k


# (K, N) of the dense layers of MiniMax-M3 at tensor-parallel degrees 1, 2, 4 and 8.
MINIMAX_M3: tuple[tuple[int, int], ...] = (
    (6144, 9216), (6144, 6144), (8192, 6144),
    (6144, 4608), (6144, 3072), (4096, 6144), (3072, 6144),
    (6144, 2304), (6144, 1536), (2048, 6144), (1536, 6144),
    (6144, 1152), (6144, 768), (1024, 6144), (768, 6144),
)  # fmt: skip
DECODE_M: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)


def cells(weights: Iterable[tuple[int, int]], ms: Sequence[int]) -> list[Cell]:
    """Return every (K, N) of ``weights`` with every M of ``ms``, without repeats, in a stable order."""
    return sorted({Cell(n, k, m) for k, n in weights for m in ms})


def parse_shape(text: str) -> tuple[int, int]:
    """Return (K, N) of a weight's shape ``N,K``, ``NxK`` or ``n=2304,k=6144``.

    Raises:
        ConfigError: the text is not two positive integers.
    """
    n, k = shapes.parse(text, ("N", "K"), (2304, 6144))
    return k, n


def parse_cell(text: str) -> Cell:
    """Return the cell of ``M,N,K`` or ``m=4,n=2304,k=6144``; raises ConfigError as :func:`parse_shape`."""
    m, n, k = shapes.parse(text, ("M", "N", "K"), (4, 2304, 6144))
    return Cell(n, k, m)


def read_untuned(path: Path) -> list[Cell]:
    """Return the cells of a CSV whose header names at least M, N and K; other columns are ignored.

    Raises:
        ConfigError: the file cannot be read, a column is missing or a value is not a positive integer; with file:line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            columns = [name.strip() for name in reader.fieldnames or ()]
            missing = [name for name in ("M", "N", "K") if name not in columns]
            if missing:
                raise ConfigError(f"{path}:1: column {missing[0]} is missing; the header is {','.join(columns)!r}")
            reader.fieldnames = columns
            found = set()
            for row in reader:
                try:
                    m, n, k = (int(row[name]) for name in ("M", "N", "K"))
                except (TypeError, ValueError):
                    raise ConfigError(f"{path}:{reader.line_num}: M, N and K must be integers") from None
                if min(m, n, k) < 1:
                    raise ConfigError(f"{path}:{reader.line_num}: M, N and K must be positive; got {m}, {n}, {k}")
                found.add(Cell(n, k, m))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot read the list of shapes: {error}") from error
    return sorted(found)
