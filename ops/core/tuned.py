"""Tuned tables: which kernel and configuration to use for a shape, read from CSV and never written here.

A table is the shipped ``configs/<family>_tuned.csv`` overlaid by the files of ``HIPFORGE_CONFIG_<FAMILY>``, later
files winning cell by cell. Each file has one header line and one row per cell; within one file a cell may appear
once. A file is validated whole when it is read, and every complaint names file and line. Files are read once per
process; :func:`clear_tables` makes the next lookup read them again.
"""

from __future__ import annotations

import bisect
import contextlib
import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from hipforge import devices, settings
from hipforge.archs import ARCHS
from hipforge.errors import ConfigError
from hipforge.jit.cache import files

Value = int | float | str | None
Key = tuple[int | str, ...]

DEVICE_COLUMNS = ("gfx", "cu_num")
EVIDENCE_COLUMNS = ("us", "model_us", "stock_us", "best_baseline_us", "err", "source")
LATER_COLUMNS = ("model_us",)  # files from before there were such columns are read without them
ANY_CU = 0  # cu_num of rows whose file has no number of compute units

_SOURCE = re.compile(r"(measured:[^,/]+/[^,]+|model:[^,]+)")


def bucket(number: int) -> int:
    """Return the least power of two that is not below ``number``, at least 1."""
    return 1 << (max(number, 1) - 1).bit_length()


@dataclass(frozen=True)
class Reach:
    """How far a row applies along one key column.

    Attributes:
        name: ``exact``, ``next`` (up to the row's value, from the next smaller one, exclusive), or ``bucket`` (up to
            the row's value, a power of two, from half of it, exclusive).
        values: (a shape's value, the column's values in the table, ascending) -> the row values that may serve it,
            best first.
    """

    name: str
    values: Callable[[int, Sequence[int]], Iterable[int]]


def next_value(value: int, tuned: Sequence[int]) -> Sequence[int]:
    """Return the tuned values from ``value`` on."""
    return tuned[bisect.bisect_left(tuned, value) :]


EXACT = Reach("exact", lambda value, tuned: (value,))
NEXT = Reach("next", next_value)
BUCKET = Reach("bucket", lambda value, tuned: (bucket(value),))


@dataclass(frozen=True)
class Column:
    """One CSV column: its name, its type, the values it may take (None: any), and, in a key, a row's range."""

    name: str
    type: type[int] | type[float] | type[str]
    accepted: tuple[Value, ...] | None = None
    minimum: float | None = None
    optional: bool = False
    reach: Reach = EXACT


def gemm_shape(m: Reach = EXACT) -> tuple[Column, ...]:
    """Return the key columns M, N and K of a GEMM; ``m`` is the range that a row covers along M."""
    return Column("M", int, minimum=1, reach=m), Column("N", int, minimum=1), Column("K", int, minimum=1)


DEVICE = Column("gfx", str, accepted=tuple(ARCHS)), Column("cu_num", int, minimum=1)
EVIDENCE = (*(Column(name, float, minimum=0.0, optional=True) for name in EVIDENCE_COLUMNS[:-1]), Column("source", str))
GEMM_SHAPE = gemm_shape()
USE_HIP = Column("use_hip", int, accepted=(0, 1))


@dataclass(frozen=True)
class Former:
    """A former format of a family's tables: its rows are read into today's columns.

    Attributes:
        columns: in the order of its header.
        now: the values of a row -> those of today's columns, as far as it says something of them; raises ValueError
            for a row that never meant anything.
    """

    columns: tuple[Column, ...]
    now: Callable[[Mapping[str, Value]], Mapping[str, Value]]


@dataclass(frozen=True)
class TableSchema:
    """The columns of one op family's tuned table.

    Attributes:
        family: file stem and name of the override variable, as in ``mxfp8_gemm``.
        shape: key columns after ``gfx,cu_num``.
        extra_key: key columns after those.
        config: the op's configuration columns.
        check: cross-column rule; returns what is wrong with a row's values, or None.
        legacy: other headers that are understood, each with the values it implies for missing columns.
        formers: formats of other columns that are understood.
    """

    family: str
    config: tuple[Column, ...]
    shape: tuple[Column, ...] = GEMM_SHAPE
    extra_key: tuple[Column, ...] = ()
    check: Callable[[Mapping[str, Value]], str | None] = lambda values: None
    legacy: Mapping[tuple[str, ...], Mapping[str, Value]] = field(default_factory=dict)
    formers: tuple[Former, ...] = ()

    @property
    def file_name(self) -> str:
        """Return the name of the shipped CSV."""
        return f"{self.family}_tuned.csv"

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return every column in file order: key, configuration, evidence."""
        return (*DEVICE, *self.key, *self.config, *EVIDENCE)

    @property
    def header(self) -> tuple[str, ...]:
        """Return the header line's fields."""
        return tuple(column.name for column in self.columns)

    @property
    def key_names(self) -> tuple[str, ...]:
        """Return the names of the columns that identify a cell."""
        return (*DEVICE_COLUMNS, *(column.name for column in self.key))

    @property
    def key(self) -> tuple[Column, ...]:
        """Return the columns that identify a cell beside the device's."""
        return (*self.shape, *self.extra_key)


@dataclass(frozen=True)
class TunedRow:
    """One cell of a table: every column's value (None where the file leaves it empty), and where it was read."""

    key: Key
    values: Mapping[str, Value]
    file: Path
    line: int

    def integer(self, name: str) -> int:
        """Return the value of an integer column."""
        value = self.values[name]
        if not isinstance(value, int):
            raise ConfigError(f"{self.file}:{self.line}: column {name} must be an integer; got {value!r}")
        return value

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class TunedTable:
    """The rows of one family, by key; build it with :func:`read_table` or :func:`load_table`."""

    def __init__(self, schema: TableSchema, rows: Iterable[TunedRow]) -> None:
        self.schema = schema
        self._cells: dict[Key, dict[int | str, TunedRow]] = {}
        self._values: dict[int, tuple[int, ...]] = {}
        for row in rows:  # later rows win
            gfx, cu_num, *rest = row.key
            cell = self._cells.setdefault((gfx, *rest), {})
            if cu_num == ANY_CU:  # applies to every number of compute units, so it replaces the earlier rows
                cell.clear()
            cell[cu_num] = row

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def rows(self) -> tuple[TunedRow, ...]:
        """Return every row that is in effect."""
        return tuple(row for cell in self._cells.values() for row in cell.values())

    def values(self, column: int) -> tuple[int, ...]:
        """Return the values of a key column (its place after gfx and cu_num) in the table, ascending."""
        if column not in self._values:
            found = {part for row in self.rows if isinstance(part := row.key[2 + column], int)}
            self._values[column] = tuple(sorted(found))
        return self._values[column]

    def find(self, gfx: str, cu_num: int, *rest: int | str) -> TunedRow | None:
        """Return the row of a cell (the family's shape and extra keys), or None.

        A row for exactly ``cu_num`` compute units comes before one whose file does not say.
        """
        cell = self._cells.get((gfx, *rest), {})
        return cell.get(cu_num) or cell.get(ANY_CU)


def _parse(column: Column, text: str) -> Value:
    """Return the typed value; raises ValueError with the reason."""
    if text == "":
        if column.optional:
            return None
        raise ValueError(f"column {column.name} is empty")
    value: int | float | str
    if column.type is str:
        value = text
    else:
        kind = "an integer" if column.type is int else "a number"
        try:
            if not text.isascii() or "_" in text:  # which Python accepts, but no other reader of the table
                raise ValueError
            number = int(text) if column.type is int else float(text)
        except ValueError:
            raise ValueError(f"column {column.name} must be {kind}; got {text!r}") from None
        if column.type is int and abs(number) >= 2**63:
            raise ValueError(f"column {column.name} must fit 64 bits; got {text[:40]}")
        if column.minimum is not None and not number >= column.minimum:
            raise ValueError(f"column {column.name} must be at least {column.minimum:g}; got {text}")
        if number == math.inf:  # also of 1e400
            raise ValueError(f"column {column.name} must be finite; got {text}")
        value = number
    if column.accepted is not None and value not in column.accepted:
        raise ValueError(f"column {column.name} must be one of {', '.join(map(str, column.accepted))}; got {text!r}")
    if column.reach is BUCKET and isinstance(value, int) and value & (value - 1):
        raise ValueError(f"{column.name} is a bucket, the power of two that ends it; got {text}")
    return value


def check_evidence(values: Mapping[str, Value]) -> str | None:
    """Return what is wrong with a row's evidence columns, or None."""
    source = str(values["source"])
    if not _SOURCE.fullmatch(source):
        return f"column source must read measured:<device>/<versions> or model:<version>; got {source!r}"
    timed = [name for name in ("us", "stock_us", "best_baseline_us") if values[name] is not None]
    if source.startswith("model:") and timed:
        return f"a modelled row must leave microseconds empty; got {', '.join(f'{n}={values[n]}' for n in timed)}"
    if source.startswith("model:") and values.get("use_hip") == 0:
        return "a modelled row cannot set use_hip=0: only a measurement may send a cell to the fallback"
    if source.startswith("measured:") and values["us"] is None:
        return "a measured row must fill column us"
    return None


def former_of(schema: TableSchema, header: tuple[str, ...]) -> Former | None:
    """Return the earlier format that a header is of, or None for today's and for an unknown one."""
    if header in schema.legacy:
        implied = schema.legacy[header]
        columns = {column.name: column for column in schema.columns}
        return Former(tuple(columns[name] for name in header if name in columns), lambda values: {**implied, **values})
    return next((former for former in schema.formers if _is_header(header, former.columns)), None)


def _is_header(header: tuple[str, ...], columns: Sequence[Column]) -> bool:
    names = tuple(column.name for column in columns)
    return header in (names, tuple(name for name in names if name not in LATER_COLUMNS))


def _row_values(
    schema: TableSchema, header: tuple[str, ...], former: Former | None, fields: list[str]
) -> dict[str, Value]:
    """Return a row's values; raises ValueError with the reason."""
    if len(fields) != len(header):
        raise ValueError(f"expected {len(header)} fields ({','.join(header)}); got {len(fields)}")
    by_name = dict(zip(header, (text.strip() for text in fields), strict=True))
    columns = schema.columns if former is None else former.columns
    given = {column.name: _parse(column, by_name[column.name]) for column in columns if column.name in by_name}
    said = given if former is None else former.now(given)
    values = {column.name: said.get(column.name) for column in schema.columns}
    complaint = schema.check(values) or (check_evidence(values) if "source" in header else None)
    if complaint:
        raise ValueError(complaint)
    return values


def read_rows(schema: TableSchema, path: Path) -> list[TunedRow]:
    """Read and validate one CSV.

    Raises:
        ConfigError: the file cannot be read, its header is not one of the family's, a value is not accepted, or a
            cell appears twice; the message starts with ``file:line``.
    """
    try:
        reader = csv.reader(io.StringIO(files.read(path).decode("utf-8-sig"), newline=""))
        lines = [(reader.line_num, fields) for fields in reader if fields]
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path}:1: cannot read the tuned table of {schema.family}: {error}") from error
    if not lines:
        raise ConfigError(f"{path}:1: the file is empty; expected the header {','.join(schema.header)}")
    header_line, header_fields = lines[0]
    header = tuple(name.strip() for name in header_fields)
    former = former_of(schema, header)
    if former is None and not _is_header(header, schema.columns):
        formers = (tuple(column.name for column in one.columns) for one in schema.formers)
        accepted = " or ".join(",".join(names) for names in (schema.header, *schema.legacy, *formers))
        raise ConfigError(f"{path}:{header_line}: unknown header {','.join(header)}; accepted: {accepted}")
    rows: list[TunedRow] = []
    first_seen: dict[Key, int] = {}
    for line, fields in lines[1:]:
        try:
            values = _row_values(schema, header, former, fields)
        except ValueError as error:
            raise ConfigError(f"{path}:{line}: {error}") from None
        key = key_of(schema, values)
        if key in first_seen:
            cell = ", ".join(f"{name}={part}" for name, part in zip(schema.key_names, key, strict=True))
            raise ConfigError(f"{path}:{line}: {cell} is already given in line {first_seen[key]}; keep one of the two")
        first_seen[key] = line
        rows.append(TunedRow(key, MappingProxyType(values), path, line))
    return rows


def key_of(schema: TableSchema, values: Mapping[str, Value]) -> Key:
    """Return the cell of a row's values; raises ConfigError for a key that is no integer or text."""
    parts: list[int | str] = []
    for name in schema.key_names:
        value = values[name]
        if not isinstance(value, (int, str)):
            raise ConfigError(f"row of {schema.family}: key column {name} holds {value!r}")
        parts.append(value)
    return tuple(parts)


def shipped_path(schema: TableSchema) -> Path:
    """Return where the package keeps the family's CSV (which may not exist)."""
    return Path(str(resources.files("hipforge.configs") / schema.file_name))


def read_table(schema: TableSchema, paths: Iterable[Path]) -> TunedTable:
    """Read several files into one table; rows of later files win.

    Raises:
        ConfigError: as :func:`read_rows`.
    """
    return TunedTable(schema, [row for path in paths for row in read_rows(schema, path)])


_tables: dict[str, TunedTable] = {}


def load_table(table: TableSchema | str) -> TunedTable:
    """Return the table in effect, read once per process: shipped rows (none where no file is shipped), then overrides.

    Args:
        table: its schema, or its name in the list of op families.

    Raises:
        ConfigError: a file is malformed, or an override names a file that does not exist.
        HipforgeError: it is not read yet, and the current stream is being captured into a graph.
    """
    if isinstance(table, str):
        from hipforge import ops

        return load_table(ops.schema_of(table))
    if table.family not in _tables:
        devices.refuse_in_capture(f"read the tuned table of {table.family}")
        shipped = shipped_path(table)
        rows = read_rows(table, shipped) if shipped.is_file() else []
        for variable, path in settings.config_override(table.family):
            try:
                rows += read_rows(table, path)
            except ConfigError as error:
                raise ConfigError(f"{error} ({variable} names this file; correct it, or unset the variable)") from None
        _tables[table.family] = TunedTable(table, rows)
    return _tables[table.family]


@contextlib.contextmanager
def in_effect(table: TunedTable) -> Iterator[None]:
    """Make a table that of its family for a while: what would dispatch do with these rows?"""
    family, before = table.schema.family, _tables.get(table.schema.family)
    _tables[family] = table
    try:
        yield
    finally:
        if before is None:
            del _tables[family]
        else:
            _tables[family] = before


def clear_tables() -> None:
    """Forget the tables, so that the next lookup reads the files and the override variables again."""
    _tables.clear()
