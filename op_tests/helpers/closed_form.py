"""The baseline: microseconds from a formula with seven parameters, fitted like the model's.

start + rounds * (prologue + iterations * (latency term + issue term + bandwidth term)) + stores.
"""

from __future__ import annotations

from collections.abc import Mapping

from helpers.published import CUS_PER_XCD, XCDS, Row

K_PER_ITERATION = 256
START: Mapping[str, float] = {
    "start_us": 3.0,
    "prologue_us": 1.0,
    "latency_us": 0.2,
    "matrix_cycles": 20.0,
    "cu_bytes_per_ns": 60.0,
    "memory_bytes_per_ns": 5500.0,
    "store_bytes_per_ns": 4000.0,
}


def microseconds(row: Row, p: Mapping[str, float]) -> float:
    """Return the formula's time of a row."""
    rows, columns = row.tile
    slots = XCDS * CUS_PER_XCD
    groups = row.groups
    rounds = -(-groups // slots)
    iterations = row.k / K_PER_ITERATION
    matrix = rows * columns * K_PER_ITERATION / (16 * 16 * 128) / 4 * p["matrix_cycles"] / 2400
    loaded = (min(rows, row.m) + columns) * K_PER_ITERATION * 17 / 32
    # Bytes that all work-groups of a round read at least once.
    unique = (row.m + row.n) * K_PER_ITERATION * 17 / 32 / rounds
    bandwidth = max(loaded / p["cu_bytes_per_ns"], unique / p["memory_bytes_per_ns"]) / 1e3
    per_iteration = max(p["latency_us"], matrix) + bandwidth
    stores = row.m * row.n * 2 / p["store_bytes_per_ns"] / 1e3
    return p["start_us"] + rounds * (p["prologue_us"] + iterations * per_iteration) + stores
