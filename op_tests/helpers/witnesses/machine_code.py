"""Barriers and waits in machine code, and the same code without one of them."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from hipforge.emulator.code_object import Kernel

S_NOP = 0xBF800000
PT_LOAD = 1


@dataclass(frozen=True)
class Synchronisation:
    """An `s_barrier` or `s_waitcnt`: its address in the code object, its kind, its text."""

    address: int
    kind: str
    text: str


def synchronisations(kernel: Kernel) -> list[Synchronisation]:
    """Every barrier and wait of a kernel; the kind of a wait is the counters that it names."""
    found = []
    for line in kernel.disassembly().splitlines():
        address, text = line.split(": ", 1)
        if text.startswith("s_barrier"):
            found.append(Synchronisation(int(address, 16), "barrier", text))
        elif text.startswith("s_waitcnt ") and "expcnt" not in text:  # a function waits for everything when it begins
            found.append(Synchronisation(int(address, 16), " ".join(re.findall(r"[a-z]+cnt", text)[1:]), text))
    return found


def without(image: bytes, left_out: Synchronisation) -> bytes:
    """The ELF with that instruction, which is one dword, replaced by `s_nop 0`."""
    patched = bytearray(image)
    struct.pack_into("<I", patched, _file_offset(image, left_out.address), S_NOP)
    return bytes(patched)


def _file_offset(image: bytes, address: int) -> int:
    table, (size, count) = struct.unpack_from("<Q", image, 0x20)[0], struct.unpack_from("<HH", image, 0x36)
    for at in range(table, table + size * count, size):
        kind, _, offset, begin, _, held = struct.unpack_from("<IIQQQQ", image, at)
        if kind == PT_LOAD and begin <= address < begin + held:
            return int(offset + address - begin)
    raise AssertionError(f"no segment holds 0x{address:x}")
