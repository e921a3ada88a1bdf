"""Write tuned rows into a CSV that other tuners may also be writing; a killed tuner loses no saved row.

Each merge takes the file's lock, reads what is there, puts the new rows in, and replaces the file by a rename. The lock
is ``<file>.lock`` beside the CSV, so that tuners with different cache directories share it; the last
of them removes it.
"""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from hipforge.errors import ConfigError
from hipforge.jit.cache import locks
from hipforge.ops.core.tuned import Key, TableSchema, Value, former_of, key_of, read_rows

Row = Mapping[str, Value]


def _text(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _sort_key(key: Key) -> tuple[tuple[int, int | str], ...]:
    """Numbers in order and before texts; the batch (M or B) last: rows of one weight stand together."""
    gfx, cu_num, batch, *rest = key
    return tuple((isinstance(part, str), part) for part in (gfx, cu_num, *rest, batch))


def render(schema: TableSchema, rows: Mapping[Key, Row]) -> str:
    """Return the CSV's text: header, then rows by architecture, shape and M."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(schema.header)
    for key in sorted(rows, key=_sort_key):
        writer.writerow([_text(rows[key].get(name)) for name in schema.header])
    return stream.getvalue()


def _replace(path: Path, text: str, schema: TableSchema) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        read_rows(schema, Path(temporary))  # so that a bad row never reaches the file
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def require_writable(path: Path) -> None:
    """Refuse a table that could not be written, before what it is to hold is searched; makes its folder.

    Raises:
        ConfigError: it is a directory, a pipe or a device, or its folder takes no files.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file; name one, or a new one, as the output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error}; name an output in a folder that can be written"
        ) from None


def read_existing(schema: TableSchema, path: Path) -> dict[Key, Row]:
    """Return the rows of a table in the family's own format; none where the file does not exist.

    Raises:
        ConfigError: the file is malformed, or in another header's format, which is only read, never rewritten.
    """
    if not path.exists():
        return {}
    with path.open(encoding="utf-8-sig") as stream:
        header = tuple(name.strip() for name in stream.readline().strip().split(","))
    if former_of(schema, header) is not None:
        raise ConfigError(
            f"{path} has the header {','.join(header)}, which is read but not written; choose another output file"
        )
    return {row.key: dict(row.values) for row in read_rows(schema, path)}  # to be pickled for workers


def merge_rows(path: Path, schema: TableSchema, rows: Iterable[Row], without: Iterable[Key] = ()) -> None:
    """Put ``rows`` into the table at ``path``, replacing rows of the same cells and keeping all others.

    Args:
        path: the CSV; created if it is not there.
        schema: its family.
        rows: complete rows, one value per column of the schema.
        without: cells whose rows are taken out.

    Raises:
        ConfigError: the file that is there is malformed, a new row breaks the schema, or the lock cannot be acquired.
    """
    new = {key_of(schema, row): row for row in rows}
    path = Path(os.path.realpath(path))  # a link stays a link, and tuners that name the file differently share its lock
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = Path(f"{path}.lock")
    try:
        with locks.holding(lock, str(path), "writing", remove=True):
            merged = {**read_existing(schema, path), **new}
            for key in without:
                merged.pop(key, None)
            text = render(schema, merged)
            _replace(path, text, schema)
    except locks.Busy as error:
        raise ConfigError(f"nothing was written: waited {error.waited_s:.0f} s for {lock} of {error}") from None
    except NotImplementedError:
        raise ConfigError(f"{path}: its file system has no locks, so rows of other tuners could be lost") from None
