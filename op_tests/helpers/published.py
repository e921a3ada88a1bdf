"""AMD's published MI355X times and code objects, for judging the model of time: rows, launches, recordings.

The folder is not part of this repository; its path comes from ``--published`` or ``HIPFORGE_TEST_PUBLISHED``. It holds
``f4gemm_gfx950.csv`` (kernel, M, N, K, log2_split, us, batch) and ``objects/<kernel>.co``, taken from ROCm/aiter.
"""

from __future__ import annotations

import csv
import ctypes
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hipforge.emulator import CodeObject, library, runtime
from hipforge.emulator.timing.capture import Capture, sample
from hipforge.emulator.timing.model import Start

XCDS, CUS_PER_XCD = 8, 32
ROUNDS = 8
"""Rounds of work-groups that a recording has by default: enough for what is fitted and judged."""
KERNARG_BYTES = 384
MALL_BYTES = 256e6
ROTATED_BYTES, ROTATED_COPIES = 32 << 30, 101
"""aiter times a kernel on as many copies of its arguments as fill 32 GiB, 101 at most."""


def copies_of(bytes_touched: int) -> int:
    """Return on how many copies of a call's arguments the published times rotate."""
    return max(1, min(ROTATED_COPIES, ROTATED_BYTES // bytes_touched))


def start_of(bytes_touched: int) -> Start:
    """Return where a timed call finds its operands: in the Infinity Cache only if all rotated copies fit it."""
    return "mall" if copies_of(bytes_touched) * bytes_touched < MALL_BYTES else "cold"


@dataclass(frozen=True)
class Row:
    """One published time of ``D[M, N] = A[M, K] . B[N, K]^T``, both operands MXFP4, the result bf16."""

    kernel: str
    m: int
    n: int
    k: int
    us: float
    batch: str

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a work-group's part of D."""
        rows, columns = self.kernel.rsplit("_", 1)[1].split("x")
        return int(rows), int(columns)

    @property
    def short(self) -> str:
        """The kernel's tile, which is the end of its name."""
        return self.kernel.rsplit("_", 1)[1]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Work-groups in x (N) and y (M)."""
        rows, columns = self.tile
        return -(-self.n // columns), -(-self.m // rows), 1

    @property
    def groups(self) -> int:
        """Work-groups of the launch."""
        return self.grid[0] * self.grid[1]

    @property
    def rounds(self) -> int:
        """Rounds of work-groups over the compute units, the last one perhaps partly filled."""
        return -(-self.groups // (XCDS * CUS_PER_XCD))

    @property
    def bytes_touched(self) -> int:
        """Operands, scales and result of one call."""
        return (self.m + self.n) * self.k // 2 + (self.m + self.n) * self.k // 32 + self.m * self.n * 2

    @property
    def start(self) -> Start:
        """Where a call finds its operands: in the Infinity Cache only if all rotated copies fit it."""
        return start_of(self.bytes_touched)

    def __str__(self) -> str:
        return f"{self.short} M={self.m} N={self.n} K={self.k}"


def rows(folder: Path) -> list[Row]:
    """Return the published rows without a K split."""
    with (folder / "f4gemm_gfx950.csv").open(newline="") as file:
        return [
            Row(row["kernel"], int(row["M"]), int(row["N"]), int(row["K"]), float(row["us"]), row["batch"])
            for row in csv.DictReader(file)
            if row["log2_split"] == "0"
        ]


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


class _Reserved:
    """Zeroed memory that takes space only where a kernel writes."""

    def __init__(self, name: str, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, max(size, 1) + mmap.PAGESIZE, flags=flags)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.extent = library.Extent(name.encode(), self.address, size, 1, 0)


def _kernarg(row: Row, buffers: Sequence[_Reserved], scale_columns: int) -> bytes:
    d, a, b, scale_a, scale_b = buffers
    slots: dict[int, bytes] = {
        0: struct.pack("<Q", d.address),
        32: struct.pack("<Q", a.address),
        48: struct.pack("<Q", b.address),
        64: struct.pack("<f", 1.0),
        128: struct.pack("<I", row.n),
        160: struct.pack("<I", row.k),
        192: struct.pack("<I", row.k),
        224: struct.pack("<I", row.m),
        240: struct.pack("<I", row.n),
        256: struct.pack("<I", row.k),
        272: struct.pack("<Q", scale_a.address),
        288: struct.pack("<Q", scale_b.address),
        304: struct.pack("<I", scale_columns),
        336: struct.pack("<I", scale_columns),
    }
    out = bytearray(KERNARG_BYTES)
    for offset, value in slots.items():
        out[offset : offset + len(value)] = value
    return bytes(out)


class Objects:
    """The published code objects, loaded on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "objects"
        self._loaded: dict[str, CodeObject] = {}

    def launch(self, row: Row) -> None:
        """Launch a row's kernel on zeroed operands, under whatever recording is in effect."""
        code = self._loaded.setdefault(row.kernel, CodeObject(self._folder / f"{row.kernel}.co"))
        kernel = next(iter(code.kernels.values()))
        scale_columns = _round_up(row.k // 32, 8)
        buffers = [
            _Reserved("D", row.grid[1] * row.tile[0] * row.n * 2),
            _Reserved("A", row.m * row.k // 2),
            _Reserved("B", row.n * row.k // 2),
            _Reserved("scale A", _round_up(row.m, 256) * scale_columns),
            _Reserved("scale B", _round_up(row.n, 256) * scale_columns),
        ]
        emulator = runtime.load().library
        extents = (library.Extent * len(buffers))(*(buffer.extent for buffer in buffers))
        emulator.hfemu_clear_error()
        emulator.hfemu_push_extents(extents, len(buffers))
        try:
            status = emulator.hfemu_launch(
                code.handle, kernel.name.encode(), library.Dim3(*row.grid), library.Dim3(256, 1, 1),
                _kernarg(row, buffers, scale_columns), KERNARG_BYTES, 0,
            )  # fmt: skip
        finally:
            emulator.hfemu_pop_extents()
        if status:
            library.raise_last_error(f"launch of {row}", fault=True)

    def record(self, row: Row, *, every_group: bool = False, rounds: int = ROUNDS) -> Capture:
        """Record what the model needs of a row.

        The first and the last work-group of the first rounds run to their end, the others as :func:`sample` has it.

        Args:
            row: the problem.
            every_group: run every work-group to its end.
            rounds: of work-groups that are recorded; no simulation of the recording can have more.
        """
        if every_group:
            capture = Capture()
            with capture.recording(skip_matrix=True):
                self.launch(row)
            return capture
        kept = min(row.groups, row.groups - (row.rounds - rounds) * XCDS * CUS_PER_XCD)
        return sample(lambda: self.launch(row), (0, kept - 1), range(kept))


def recording(row: Row, objects: Objects, cache: Path | None, rounds: int = ROUNDS) -> Capture:
    """Return a row's recording from the cache folder, or make it and keep it there."""
    if cache is None:
        return objects.record(row, rounds=rounds)
    path = cache / f"{row.short}_{row.m}_{row.n}_{row.k}"
    has = min(row.rounds, ROUNDS)
    if min(row.rounds, rounds) > has or (rounds < has and not path.exists()):
        path = cache / f"{path.name}_{rounds}rounds"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = objects.record(row, rounds=rounds)
        made.save(path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        return made
    return Capture.read(path)
