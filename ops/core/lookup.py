"""Which row of a tuned table applies to a shape: the schema's key columns say what range a row covers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hipforge.ops.core.tuned import TableSchema, TunedRow, TunedTable, load_table


def find_row(schema: TableSchema, arch: str, cu_count: int, key: Sequence[int]) -> tuple[TunedRow | None, str]:
    """Return the row of the table in effect that applies to a shape, as :func:`row_in` does."""
    return row_in(load_table(schema), arch, cu_count, key)


def row_in(table: TunedTable, arch: str, cu_count: int, key: Sequence[int]) -> tuple[TunedRow | None, str]:
    """Return the row that applies to a shape and its name in a reason; None if no row does.

    Args:
        table: the family's.
        arch: architecture of the device.
        cu_count: its compute units.
        key: the shape, one value per key column of the schema.
    """
    schema = table.schema
    reaching = (
        column.reach.values(value, table.values(place))
        for place, (column, value) in enumerate(zip(schema.key, key, strict=True))
    )
    for cell in itertools.product(*reaching):
        row = table.find(arch, cu_count, *cell)
        if row is not None:
            return row, _describe(schema, key, cell)
    return None, "no tuned row"


def _describe(schema: TableSchema, key: Sequence[int], cell: Sequence[int]) -> str:
    for column, asked, found in zip(schema.key, key, cell, strict=True):
        if column.reach.name == "next" and asked != found:
            return f"the tuned row of the next larger {column.name} ({found})"
    exact = all(column.reach.name != "bucket" for column in schema.key)
    return "the tuned row of this shape" if exact else "the tuned row of the shape's bucket"
