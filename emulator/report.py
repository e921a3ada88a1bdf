"""What do the counts of a launch say? Its memory and issue bounds, and a listing with counts beside every instruction.

Counts are exact. A time appears only under a name with ``modelled`` in it: a count divided by a public peak rate, which
no launch can beat and most do not reach.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hipforge import archs
from hipforge.emulator.counting import Counters, PcCount, counted, vector_cycles
from hipforge.errors import GuardError
from hipforge.jit.demangle import short_name

LONGEST_INSTRUCTION = 16  # bytes: a scaled MFMA
VECTOR_FLOP_PER_CYCLE = 64  # of a SIMD, at most: packed float32 multiply-adds, 64 lanes in 4 cycles
_MATRIX = re.compile(r"v_(smfmac|mfma)_(?:scale_)?f\d+_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_")
_VECTOR = re.compile(r"v_(pk_)?(fma(?:c|mk|ak)?|ma[cd]|mul|add|sub|subrev|dot2c?|exp|log|rcp|rsq|sqrt)_(.*_)?b?f\d")
_VECTOR_FLOP = {"fma": 2, "mad": 2, "mac": 2, "dot": 4}  # by the first letters; 1 for the others


@dataclass(frozen=True)
class Profile:
    """Bounds of one set of counters on a device with all its CUs busy.

    Attributes:
        arch: the architecture whose rates are used.
        counters: the counts themselves.
        memory_bytes: bytes touched at least once, loads and stores apart: what must cross the memory bus (counted).
        repeated_bytes: bytes loaded or stored again, which caches may or may not absorb (counted).
        vector_cycles: issue cycles of the vector ALU over all SIMDs: 4 per wave-instruction, 16 per transcendental.
        matrix_cycles: matrix-pipe cycles as the ISA gives them (counted).
        lds_cycles: cycles of the LDS pipe: 128 bytes per cycle and CU, and the counted bank conflicts.
        matrix_flop: floating-point operations of the executed matrix instructions; a multiply-add is two, and padding
            of a tile counts (counted).
        vector_flop: those of the vector ALU on all 64 lanes of each wave-instruction (counted).
        bytes_per_vector_instruction: memory bytes per VALU wave-instruction; low values mean issue-bound code.
        modelled_memory_us: ``memory_bytes`` at peak bandwidth, in microseconds.
        modelled_issue_us: the busiest of the vector, matrix and LDS pipes, spread evenly over all CUs, at peak clock.
    """

    arch: str
    counters: Counters
    memory_bytes: int
    repeated_bytes: int
    vector_cycles: int
    matrix_cycles: int
    lds_cycles: int
    matrix_flop: int
    vector_flop: int
    bytes_per_vector_instruction: float
    modelled_memory_us: float
    modelled_issue_us: float

    @property
    def flop_per_byte(self) -> float:
        """Executed operations per byte that must cross the memory bus (counted)."""
        return (self.matrix_flop + self.vector_flop) / max(1, self.memory_bytes)

    @property
    def bound(self) -> str:
        """``memory`` or ``issue``: the larger of the two modelled times."""
        return "memory" if self.modelled_memory_us >= self.modelled_issue_us else "issue"


def flop(by_mnemonic: Mapping[str, int]) -> tuple[int, int]:
    """Return the floating-point operations that wave-instructions execute, of the matrix pipe and of the vector ALU.

    A sparse matrix instruction executes half of its operations. Conversions, comparisons, minima and maxima are none.

    Example:
        >>> flop({"v_mfma_f32_16x16x32_bf16": 1, "v_pk_fma_f32": 1, "v_lshlrev_b32": 9})
        (16384, 256)
    """
    matrix = vector = 0
    for mnemonic, count in by_mnemonic.items():
        if found := _MATRIX.match(mnemonic):
            m, n, k, blocks = (int(size or 1) for size in found.groups()[1:])
            matrix += count * m * n * k * blocks * (1 if found[1] == "smfmac" else 2)
        elif found := _VECTOR.match(mnemonic):
            vector += count * 64 * (2 if found[1] else 1) * _VECTOR_FLOP.get(found[2][:3], 1)
    return matrix, vector


def profile(counters: Counters, arch: str) -> Profile:
    """Return the bounds that ``counters`` imply on ``arch`` (``gfx950`` or ``gfx942``).

    Raises:
        ConfigError: the architecture is not known.
    """
    info = archs.get(arch)
    vector = counters.by_class.get("valu", 0) + counters.by_class.get("valu_trans", 0)
    lds_cycles = -(-counters.lds_bytes // 128) + counters.lds_bank_conflicts
    simds = info.cu_count * info.simds_per_cu
    busiest = max(vector_cycles(counters) / simds, counters.mfma_cycles / simds, lds_cycles / info.cu_count)
    memory_bytes = counters.unique_bytes
    moved = counters.bytes_loaded + counters.bytes_stored
    matrix_flop, vector_flop = flop(counters.by_mnemonic)
    return Profile(
        arch=info.name,
        counters=counters,
        memory_bytes=memory_bytes,
        repeated_bytes=moved - memory_bytes,
        vector_cycles=vector_cycles(counters),
        matrix_cycles=counters.mfma_cycles,
        lds_cycles=lds_cycles,
        matrix_flop=matrix_flop,
        vector_flop=vector_flop,
        bytes_per_vector_instruction=memory_bytes / max(1, vector),
        modelled_memory_us=memory_bytes / info.bandwidth * 1e6,
        modelled_issue_us=busiest / info.clock_hz * 1e6,
    )


def text(found: Profile, name_columns: int | None = None) -> str:
    """Return the profile as lines for a terminal: counts, traffic by tensor, then the bounds.

    Args:
        found: what to print.
        name_columns: longest kernel name; a longer one loses its middle. None: names in full.
    """
    lines = [
        f"on {found.arch}: {counted(found.counters, name_columns)}",
        "",
        f"executed FLOP            {found.matrix_flop + found.vector_flop:>14,}  ({found.flop_per_byte:.3g} per byte "
        "touched once)",
        "",
        f"modelled at peak rates of {found.arch} (a bound, not a measurement)",
        f"  memory bound           {found.modelled_memory_us:>14.3f} us",
        f"  issue bound            {found.modelled_issue_us:>14.3f} us",
        f"  the larger one         {found.bound:>14}",
    ]
    return "\n".join(lines)


def listing(counters: Counters, kernel: str = "") -> str:
    """Return every executed instruction with its counts, in address order, kernel by kernel.

    ``lanes`` is the mean of active lanes where an instruction works on lanes; ``conflicts`` are LDS cycles; a line of
    dots stands for instructions that never ran.

    Args:
        counters: collected with ``per_pc=True``.
        kernel: only kernels whose symbol contains this.

    Raises:
        GuardError: the counters were collected without ``per_pc``, or no kernel matches.
    """
    rows: dict[str, list[PcCount]] = {}
    for row in counters.per_pc:
        if kernel in row.kernel:
            rows.setdefault(row.kernel, []).append(row)
    if not rows:
        raise GuardError(
            f"no counts per instruction for {kernel!r}; collect with counters(per_pc=True), and one of: "
            + (", ".join(sorted({row.kernel for row in counters.per_pc})) or "no kernel was counted")
        )
    lines: list[str] = []
    for name, executed in rows.items():
        total = sum(row.count for row in executed)
        lines += [short_name(name), "  address       count   share  lanes         bytes  conflicts  instruction"]
        end, source = None, ""
        for row in sorted(executed, key=lambda item: item.pc):
            if end is not None and row.pc > end:
                lines.append("      ...")
            end = row.pc + LONGEST_INSTRUCTION
            if row.source and row.source != source:
                source = row.source
                lines.append(f"  ; {source}")
            lanes = "    -" if row.text.startswith("s_") else f"{row.lanes / row.count:5.1f}"
            moved = f"{row.bytes:>13,}" if row.bytes else " " * 13
            conflicts = f"{row.lds_bank_conflicts:>10,}" if row.lds_bank_conflicts else " " * 10
            share = f"{row.count / total:7.2%}"
            lines.append(f"  {row.pc:7x} {row.count:>11,} {share}  {lanes} {moved} {conflicts}  {row.text}")
    return "\n".join(lines)
