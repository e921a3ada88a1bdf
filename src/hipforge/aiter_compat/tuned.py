"""aiter's tuned GEMM tables, ``aiter/configs/*.csv`` of 2026, as rows of the hipforge family with the same semantics.

A table's kernels are aiter's own; its shapes and its measured microseconds are of use here: as shapes to tune, and as
what to compare with.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hipforge.errors import ConfigError, did_you_mean

_KEY = ("gfx", "cu_num", "M", "N", "K")
_MEASURED = ("kernelId", "splitK", "us", "kernelName", "tflops", "bw", "errRatio")
_KINDS = ("q_dtype_w", "libtype")  # which of them a table has says what it is a table of
_FAMILIES: Mapping[tuple[bool, bool], tuple[str, int]] = {
    (False, False): ("mxfp4_gemm", 32),
    (False, True): ("fp8_gemm", 128),
    (True, False): ("fp8_gemm", 0),
    (True, True): ("fp8_gemm", 0),
}
_OTHERS = {
    "B": "a table of batched GEMMs, for which hipforge has no op",
    "b": "a table of batched GEMMs, for which hipforge has no op",
    "scaleAB": "a table of bfloat16 GEMMs, for which hipforge has no tuned op",
    "bias": "a table of int8 GEMMs with a bias, for which hipforge has no op",
    "token": "a table of fused MoE layers, whose weights hipforge takes in other formats",
    "BT": "a table of gated delta rules, for which hipforge has no op",
}


@dataclass(frozen=True)
class TunedRow:
    """One row: the family's name, its block of scales (0: per row or tensor), the key, and what aiter measured.

    ``us`` is in microseconds, as the table has it; ``kernel`` and ``split_k`` are aiter's.
    """

    family: str
    block: int
    gfx: str
    cu_num: int
    m: int
    n: int
    k: int
    us: float
    kernel: str
    split_k: int


@dataclass(frozen=True)
class TunedTable:
    """The rows of a table, and how many were left out, by reason."""

    rows: tuple[TunedRow, ...]
    left_out: Mapping[str, int]


def read_tuned(path: str | Path) -> TunedTable:
    """Read one of aiter's tuned GEMM tables.

    ``a4w4_blockscale`` becomes rows of ``mxfp4_gemm``, ``a8w8``, ``a8w8_bpreshuffle`` and ``a8w8_blockscale`` rows of
    ``fp8_gemm``; rows of int8, and rows for which no kernel worked, are left out.

    Raises:
        ConfigError: the file cannot be read, its columns are not those of such a table, or a value is not a number of
            the kind that its column holds.

    Example::

        from hipforge.aiter_compat.tuned import read_tuned

        table = read_tuned("/src/aiter/aiter/configs/a8w8_blockscale_tuned_gemm.csv")
        shapes = sorted({(row.m, row.n, row.k) for row in table.rows})  # for hipforge tune fp8_gemm --shapes M,N,K
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or ())
            family, block = _family(path, columns)
            rows: list[TunedRow] = []
            left_out: dict[str, int] = {}
            for values in reader:
                if None in values:
                    raise ConfigError(f"{path}:{reader.line_num}: more values than the {len(columns)} columns")
                kind = values.get("q_dtype_w") or ""
                reason = None
                if kind and not kind.startswith("torch.float8_e4m3"):
                    reason = f"weights of {kind.removeprefix('torch.')}"
                elif (values["us"] or "").strip() == "inf":
                    reason = "no kernel worked (us is inf)"
                if reason is not None:
                    left_out[reason] = left_out.get(reason, 0) + 1
                    continue
                rows.append(_row(f"{path}:{reader.line_num}", family, block, values))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return TunedTable(tuple(rows), left_out)


def _family(path: Path, columns: list[str]) -> tuple[str, int]:
    for name, reason in _OTHERS.items():
        if name in columns:
            raise ConfigError(f"{path}: column {name!r} says that this is {reason}")
    known = (*_KEY, *_KINDS, *_MEASURED)
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise ConfigError(
            f"{path}: unknown column {unknown[0]!r}{did_you_mean(unknown[0], known)}; known: {', '.join(known)}"
        )
    missing = [name for name in (*_KEY, "us", "kernelName", "splitK") if name not in columns]
    if missing:
        raise ConfigError(f"{path}: there is no column {missing[0]!r}; a tuned table has {', '.join(known)}")
    if len(set(columns)) != len(columns):
        raise ConfigError(f"{path}: a column appears twice: {', '.join(columns)}")
    return _FAMILIES["q_dtype_w" in columns, "libtype" in columns]


def _row(where: str, family: str, block: int, values: Mapping[str, str | None]) -> TunedRow:
    def number(name: str, least: int) -> int:
        text = (values[name] or "").strip()
        if not text.isdecimal() or int(text) < least:
            raise ConfigError(f"{where}: {name} is {text!r}; expected an integer, {least} or more")
        return int(text)

    gfx = (values["gfx"] or "").strip()
    if not gfx.startswith("gfx"):
        raise ConfigError(f"{where}: gfx is {gfx!r}; expected an architecture such as gfx950")
    text = (values["us"] or "").strip()
    try:
        us = float(text)
    except ValueError:
        us = -1.0
    if not 0 < us < 1e9:
        raise ConfigError(f"{where}: us is {text!r}; expected microseconds, more than 0")
    return TunedRow(
        family, block, gfx, number("cu_num", 1), number("M", 1), number("N", 1), number("K", 1), us,
        (values["kernelName"] or "").strip(), number("splitK", 0),
    )  # fmt: skip
