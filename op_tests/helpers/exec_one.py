"""Runs single instructions on given registers: clang assembles them, the emulator's test hook executes them.

Every operation test stands on this: 64 lanes are 64 cases, and the expected bits come from Python's own integers,
``fractions`` or numpy.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from helpers.clang import clang
from hipforge.emulator import library

LANES = 64
ACC = 256  # row of a[0]
VCC, M0, EXEC = 106, 124, 126
MODE_DEFAULT = 0x3F0  # nearest even, all denormals, dx10_clamp, ieee: what compilers set
MODE_IEEE = 0x200
ALL = 2**64 - 1

Words = npt.NDArray[np.uint32]


@functools.lru_cache(maxsize=1)
def _hook() -> Callable[..., bytes | None]:
    function = library.load().hfemu_exec_one
    function.restype = ctypes.c_char_p
    return function


_assembled: dict[tuple[str, str], bytes] = {}
executed: set[tuple[str, str]] = set()  # mnemonic without its encoding's suffix, architecture


def assemble(text: str, arch: str = "gfx950") -> bytes:
    """Return the machine code of assembly text.

    Raises:
        AssertionError: the assembler refused it.
    """
    if (text, arch) not in _assembled:
        assemble_all([text], arch)
    return _assembled[text, arch]


def assemble_all(texts: Iterable[str], arch: str = "gfx950") -> None:
    """Assemble many texts in one process, each into its own section, for later ``assemble`` calls."""
    wanted = [text for text in dict.fromkeys(texts) if (text, arch) not in _assembled]
    source = "".join(f'.section .t{index},"ax"\n{text}\n' for index, text in enumerate(wanted))
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "text.o"
        done = subprocess.run(
            [clang(arch), "-x", "assembler", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-c", "-", "-o", str(made)],
            input=source, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        sections = _sections(made.read_bytes())
    for index, text in enumerate(wanted):
        _assembled[text, arch] = sections[f".t{index}"]


def _sections(elf: bytes) -> dict[str, bytes]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * index) for index in range(count)]
    strings = headers[names][4]
    found = {}
    for name, _, _, _, offset, length in headers:
        start = strings + name
        found[elf[start : elf.index(b"\0", start)].decode()] = elf[offset : offset + length]
    return found


class Machine:
    """One wave's registers and 64 KiB of LDS."""

    def __init__(self, arch: str = "gfx950") -> None:
        """Zero everything; all lanes are active."""
        self.arch = arch
        self.v: Words = np.zeros((512, LANES), np.uint32)
        self.s: Words = np.zeros(128, np.uint32)
        self.lds: npt.NDArray[np.uint8] = np.zeros(65536, np.uint8)
        self.scc = 0
        self.private_bytes = 0  # scratch of each lane, which lasts for one run
        self.mode = MODE_DEFAULT
        self.set64(EXEC, ALL)

    def set64(self, register: int, value: int) -> None:
        """Write an SGPR pair."""
        self.s[register], self.s[register + 1] = value & 0xFFFFFFFF, value >> 32

    def get64(self, register: int) -> int:
        """Read an SGPR pair."""
        return int(self.s[register]) | int(self.s[register + 1]) << 32

    def set_row64(self, register: int, values: Sequence[int]) -> None:
        """Write a VGPR pair from one 64-bit integer per lane."""
        wide = np.array([value & ALL for value in values], np.uint64)
        self.v[register], self.v[register + 1] = wide.astype(np.uint32), (wide >> np.uint64(32)).astype(np.uint32)

    def row64(self, register: int) -> list[int]:
        """Read a VGPR pair as one integer per lane."""
        return [int(low) | int(high) << 32 for low, high in zip(self.v[register], self.v[register + 1], strict=True)]

    def run(self, text: str, arch: str | None = None) -> Machine:
        """Execute assembly text, by default for the machine's architecture.

        Raises:
            RuntimeError: the emulator's fault report.
        """
        arch = arch or self.arch
        names = re.findall(r"^\s*([a-z]\w+?)(?:_e32|_e64|_sdwa|_dpp)?(?:\s|$)", text, re.MULTILINE)
        executed.update((name, arch) for name in names)
        code = assemble(text, arch)
        scc = ctypes.c_uint32(self.scc)
        report = _hook()(
            code, ctypes.c_uint64(len(code)), int(arch[3:]), self.mode, self.s.ctypes.data_as(ctypes.c_void_p),
            self.v.ctypes.data_as(ctypes.c_void_p), ctypes.byref(scc), self.lds.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_uint32(self.lds.size), ctypes.c_uint32(self.private_bytes),
        )  # fmt: skip
        if report is not None:
            raise RuntimeError(report.decode())
        self.scc = scc.value
        return self


def signed(value: int, bits: int = 32) -> int:
    """Two's complement reading of the low ``bits``."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


# --- floats as exact rationals ----------------------------------------------------------------------------------------

_FORMATS = {16: (10, 15), 32: (23, 127), 64: (52, 1023)}


def is_nan(code: int, bits: int) -> bool:
    """Whether the code is a NaN of the IEEE format with ``bits`` bits."""
    mantissa, bias = _FORMATS[bits]
    return code & ((1 << (bits - 1)) - 1) > (2 * bias + 1) << mantissa


def is_infinite(code: int, bits: int) -> bool:
    """Whether the code is an infinity."""
    mantissa, bias = _FORMATS[bits]
    return code & ((1 << (bits - 1)) - 1) == (2 * bias + 1) << mantissa


def to_fraction(code: int, bits: int) -> Fraction:
    """The exact value of a finite code."""
    mantissa, bias = _FORMATS[bits]
    field, fraction = (code >> mantissa) & (2 * bias + 1), code & ((1 << mantissa) - 1)
    exponent = max(field, 1) - bias - mantissa
    value = Fraction(fraction + ((1 << mantissa) if field else 0)) * Fraction(2) ** exponent
    return -value if code >> (bits - 1) else value


def from_fraction(value: Fraction, bits: int, negative_zero: bool = False) -> int:
    """Round to nearest even; ``negative_zero`` is the sign of an exact zero."""
    mantissa, bias = _FORMATS[bits]
    sign = 1 << (bits - 1)
    if value == 0:
        return sign if negative_zero else 0
    size = abs(value)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length(), 1 - bias)
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    while exponent > 1 - bias and Fraction(2) ** exponent > size:
        exponent -= 1
    units = size / Fraction(2) ** (exponent - mantissa)
    count = round(units)  # Python rounds halves to even
    code = count + ((exponent - 1 + bias) << mantissa)
    if exponent == 1 - bias:
        code = count
    code = min(code, (2 * bias + 1) << mantissa)
    return code | (sign if value < 0 else 0)


INTERESTING_32 = (
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, 0x3F800000,
    0xBF800000, 0x3F7FFFFF, 0x3F800001, 0x40000000, 0xC0400000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
    0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF, 0x4B000001, 0x4B7FFFFF, 0x3EFFFFFF, 0x3F000000, 0x4F000000,
    0xCF000000, 0x4F800000, 0x0000FFFF, 0x7FFFFFFF, 0xFFFFFFFF,
)  # fmt: skip
INTERESTING_64 = (
    0, 1 << 63, 1, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x3FF0000000000000, 0xBFF0000000000000,
    0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0x7FF0000000000001,
    0x4330000000000001, 0x41DFFFFFFFC00000, 0xFFFFFFFFFFFFFFFF, 0x7FFFFFFFFFFFFFFF,
)  # fmt: skip
INTERESTING_16 = (
    0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7D01, 0xFFFF,
    0x3800, 0x6400,
)  # fmt: skip


def cases(interesting: Sequence[int], bits: int, sources: int, seed: int, rounds: int = 6) -> Iterable[list[list[int]]]:
    """Yield lists of 64 operands per source: pairs of special values first, then random ones of every exponent."""
    rng = np.random.default_rng(seed)
    pairs = [(a, b) for a in interesting for b in interesting]
    rng.shuffle(pairs)
    count = min(len(pairs), 8 * LANES) // LANES * LANES
    for start in range(0, count, LANES):
        chunk = pairs[start : start + LANES]
        rows = [
            [int(a) for a, _ in chunk],
            [int(b) for _, b in chunk],
            [interesting[i] for i in rng.integers(0, len(interesting), LANES)],
        ]
        yield rows[:sources]
    for _ in range(rounds):
        yield [[int(x) for x in rng.integers(0, 2**bits, LANES, dtype=np.uint64)] if bits == 64
               else [int(x) for x in rng.integers(0, 2**bits, LANES)] for _ in range(sources)]  # fmt: skip
