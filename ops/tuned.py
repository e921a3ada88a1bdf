"""Tuned tables: which kernel and configuration to use for a shape, read from CSV and never written here.

A table is the shipped ``configs/<family>_tuned.csv`` overlaid by the files of ``HIPFORGE_CONFIG_<FAMILY>``, later
files winning cell by cell. Each file has one header line and one row per cell; within one file a cell may appear
once. A file is validated whole when it is read, and every complaint names file and line. Files are read once per
process; :func:`clear_tables` makes the next lookup read them again.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from hipforge import settings
from hipforge.errors import ConfigError

Value = int | float | str | None
Key = tuple[int | str, ...]

DEVICE_COLUMNS = ("gfx", "cu_num")
EVIDENCE_COLUMNS = ("us", "stock_us", "best_baseline_us", "err", "source")
ANY_CU = 0  # cu_num of rows whose file does not say for which number of compute units they were tuned

_SOURCE = re.compile(r"(measured:[^,/]+/[^,]+|model:[^,]+)")


@dataclass(frozen=True)
class Column:
    """One CSV column: its name, its type, and the values it may take (None: any)."""

    name: str
    type: type[int] | type[float] | type[str]
    accepted: tuple[Value, ...] | None = None
    minimum: float | None = None
    optional: bool = False


GEMM_SHAPE = tuple(Column(name, int, minimum=1) for name in ("M", "N", "K"))


@dataclass(frozen=True)
class TableSchema:
    """The columns of one op family's tuned table.

    Attributes:
        family: file stem and name of the override variable, as in ``smallm_mxfp8``.
        shape: key columns after ``gfx,cu_num``.
        extra_key: key columns after those.
        config: the op's configuration columns.
        check: cross-column rule; returns what is wrong with a row's values, or None.
        legacy: other headers that are understood, each with the values it implies for missing columns.
    """

    family: str
    config: tuple[Column, ...]
    shape: tuple[Column, ...] = GEMM_SHAPE
    extra_key: tuple[Column, ...] = ()
    check: Callable[[Mapping[str, Value]], str | None] = lambda values: None
    legacy: Mapping[tuple[str, ...], Mapping[str, Value]] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Return the name of the shipped CSV."""
        return f"{self.family}_tuned.csv"

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return every column in file order: key, configuration, evidence."""
        key = (
            Column("gfx", str),
            Column("cu_num", int, minimum=1),
        )
        evidence = (
            *(Column(name, float, minimum=0.0, optional=True) for name in EVIDENCE_COLUMNS[:-1]),
            Column("source", str),
        )
        return (*key, *self.shape, *self.extra_key, *self.config, *evidence)

    @property
    def header(self) -> tuple[str, ...]:
        """Return the header line's fields."""
        return tuple(column.name for column in self.columns)

    @property
    def key_names(self) -> tuple[str, ...]:
        """Return the names of the columns that identify a cell."""
        return (*DEVICE_COLUMNS, *(column.name for column in (*self.shape, *self.extra_key)))


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
            raise ConfigError(f"{self.file}:{self.line}: column {name} holds no integer but {value!r}")
        return value

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class TunedTable:
    """The rows of one family, by key; build it with :func:`read_table` or :func:`load_table`."""

    def __init__(self, schema: TableSchema, rows: Iterable[TunedRow]) -> None:
        self.schema = schema
        self._cells: dict[Key, dict[int | str, TunedRow]] = {}
        for row in rows:  # later rows win
            gfx, cu_num, *rest = row.key
            cell = self._cells.setdefault((gfx, *rest), {})
            if cu_num == ANY_CU:  # speaks for every number of compute units, so for the earlier rows' too
                cell.clear()
            cell[cu_num] = row

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def rows(self) -> tuple[TunedRow, ...]:
        """Return every row that is in effect."""
        return tuple(row for cell in self._cells.values() for row in cell.values())

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
            number = int(text) if column.type is int else float(text)
        except ValueError:
            raise ValueError(f"column {column.name} must be {kind}; got {text!r}") from None
        if column.minimum is not None and not number >= column.minimum:
            raise ValueError(f"column {column.name} must be at least {column.minimum:g}; got {text}")
        value = number
    if column.accepted is not None and value not in column.accepted:
        raise ValueError(f"column {column.name} must be one of {', '.join(map(str, column.accepted))}; got {text!r}")
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


def _row_values(schema: TableSchema, header: tuple[str, ...], fields: list[str]) -> dict[str, Value]:
    """Return a row's values; raises ValueError with the reason."""
    if len(fields) != len(header):
        raise ValueError(f"expected {len(header)} fields ({','.join(header)}); got {len(fields)}")
    by_name = dict(zip(header, (text.strip() for text in fields), strict=True))
    legacy = schema.legacy.get(header)
    values: dict[str, Value] = {}
    for column in schema.columns:
        if column.name in by_name:
            values[column.name] = _parse(column, by_name[column.name])
        else:
            values[column.name] = (legacy or {}).get(column.name)
    complaint = schema.check(values) or (None if legacy is not None else check_evidence(values))
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
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            lines = [(reader.line_num, fields) for fields in reader if fields]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}:1: cannot read the tuned table of {schema.family}: {error}") from error
    if not lines:
        raise ConfigError(f"{path}:1: the file is empty; expected the header {','.join(schema.header)}")
    header_line, header_fields = lines[0]
    header = tuple(name.strip() for name in header_fields)
    if header != schema.header and header not in schema.legacy:
        accepted = " or ".join(",".join(names) for names in (schema.header, *schema.legacy))
        raise ConfigError(f"{path}:{header_line}: unknown header {','.join(header)}; accepted: {accepted}")
    rows: list[TunedRow] = []
    first_seen: dict[Key, int] = {}
    for line, fields in lines[1:]:
        try:
            values = _row_values(schema, header, fields)
        except ValueError as error:
            raise ConfigError(f"{path}:{line}: {error}") from None
        key: Key = tuple(_key_part(values[name]) for name in schema.key_names)
        if key in first_seen:
            cell = ", ".join(f"{name}={part}" for name, part in zip(schema.key_names, key, strict=True))
            raise ConfigError(f"{path}:{line}: {cell} is already given in line {first_seen[key]}; keep one of the two")
        first_seen[key] = line
        rows.append(TunedRow(key, MappingProxyType(values), path, line))
    return rows


def _key_part(value: Value) -> int | str:
    if isinstance(value, (int, str)):
        return value
    raise ValueError(f"a key column holds {value!r}")


def shipped_path(schema: TableSchema) -> Path:
    """Return where the package keeps the family's CSV (which may not exist)."""
    return Path(str(resources.files("hipforge.configs") / schema.file_name))


def read_table(schema: TableSchema, paths: Iterable[Path]) -> TunedTable:
    """Read several files into one table; rows of later files win.

    Raises:
        ConfigError: as :func:`read_rows`.
    """
    return TunedTable(schema, [row for path in paths for row in read_rows(schema, path)])


_SCHEMAS: dict[str, TableSchema] = {}


def families() -> tuple[str, ...]:
    """Return the names of the families that have a tuned table, as far as their modules are imported."""
    return tuple(_SCHEMAS)


def register_schema(schema: TableSchema) -> TableSchema:
    """Make a family known by name; returns the schema, for use in an assignment."""
    _SCHEMAS[schema.family] = schema
    return schema


@functools.cache
def load_table(family: str) -> TunedTable:
    """Return the family's table in effect: shipped rows (none where no file is shipped), then the overrides.

    Raises:
        ConfigError: a file is malformed, or an override names a file that does not exist.
    """
    schema = _SCHEMAS[family]
    shipped = shipped_path(schema)
    rows = read_rows(schema, shipped) if shipped.is_file() else []
    for path in settings.config_override(family):
        try:
            rows += read_rows(schema, path)
        except ConfigError as error:
            variable = settings.CONFIG_PREFIX + family.upper()
            raise ConfigError(f"{error} ({variable} names this file; correct it, or unset the variable)") from None
    return TunedTable(schema, rows)


def clear_tables() -> None:
    """Forget the tables, so that the next lookup reads the files and the override variables again."""
    load_table.cache_clear()
