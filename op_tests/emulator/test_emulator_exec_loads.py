"""Loads and stores of every width through every kind of address: global, flat, buffer and scratch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.exec_one import EXEC, M0, Machine, signed
from helpers.exec_registry import archs_of, assemble_for, holds, holds_each

LANE = np.arange(64, dtype=np.uint32)
RECORDS = 4096
M32 = 2**32 - 1

# suffix: bytes read, what a register that held `old` holds afterwards (one per dword)
LOADS: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "ubyte": (1, lambda x, old: x),
    "sbyte": (1, lambda x, old: signed(x, 8) & M32),
    "ushort": (2, lambda x, old: x),
    "sshort": (2, lambda x, old: signed(x, 16) & M32),
    "ubyte_d16": (1, lambda x, old: old & 0xFFFF0000 | x),
    "ubyte_d16_hi": (1, lambda x, old: old & 0xFFFF | x << 16),
    "sbyte_d16": (1, lambda x, old: old & 0xFFFF0000 | signed(x, 8) & 0xFFFF),
    "sbyte_d16_hi": (1, lambda x, old: old & 0xFFFF | (signed(x, 8) & 0xFFFF) << 16),
    "short_d16": (2, lambda x, old: old & 0xFFFF0000 | x),
    "short_d16_hi": (2, lambda x, old: old & 0xFFFF | x << 16),
    "dword": (4, lambda x, old: x),
    "dwordx2": (8, lambda x, old: x),
    "dwordx3": (12, lambda x, old: x),
    "dwordx4": (16, lambda x, old: x),
}
# suffix: bytes written, the value of the data registers that is written
STORES: dict[str, tuple[int, Callable[[int], int]]] = {
    "byte": (1, lambda x: x & 0xFF),
    "byte_d16_hi": (1, lambda x: x >> 16 & 0xFF),
    "short": (2, lambda x: x & 0xFFFF),
    "short_d16_hi": (2, lambda x: x >> 16 & 0xFFFF),
    "dword": (4, lambda x: x & M32),
    "dwordx2": (8, lambda x: x & 2**64 - 1),
    "dwordx3": (12, lambda x: x & 2**96 - 1),
    "dwordx4": (16, lambda x: x),
}
KINDS = ("global", "flat", "buffer", "scratch")
OFFSET = 5  # bytes are addressed one by one


def registers(first: int, bytes_moved: int) -> str:
    count = max(bytes_moved // 4, 1)
    return f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}"


def text_of(name: str) -> str:
    kind, what, suffix = name.split("_", 2)
    data = registers(20, LOADS[suffix][0]) if what == "load" else registers(4, STORES[suffix][0])
    if kind == "buffer":
        return f"{name} {data}, v2, s[8:11], 0 offen offset:{OFFSET}"
    address = "v2" if kind == "scratch" else "v[0:1]"
    tail = "" if kind == "flat" else ", off"
    return f"{name} {data}, {address}{tail} offset:{OFFSET}" if what == "load" else (
        f"{name} {address}, {data}{tail} offset:{OFFSET}"
    )  # fmt: skip


NAMES = [f"{kind}_load_{suffix}" for kind in KINDS for suffix in LOADS]
NAMES += [f"{kind}_store_{suffix}" for kind in KINDS for suffix in STORES]


@pytest.fixture(scope="module", autouse=True)
def _assembled() -> None:
    assemble_for(text_of, [name for name in NAMES if not name.startswith("scratch")])


class Memory:
    """Random bytes that each lane reaches at its own place: v[0:1] its address, v2 its offset."""

    def __init__(self, arch: str) -> None:
        rng = np.random.default_rng(5)
        self.bytes = rng.integers(0, 256, 2 * RECORDS, dtype=np.uint8)
        base = int(self.bytes.ctypes.data)
        self.machine = Machine(arch)
        self.machine.private_bytes = 256
        self.machine.v[3:30] = rng.integers(0, 2**32, (27, 64), dtype=np.uint32)
        self.offsets = rng.permutation(64).astype(np.uint32) * 32
        self.machine.v[2] = self.offsets
        self.machine.set_row64(0, [base + int(x) for x in self.offsets])
        self.machine.s[8:12] = [base & M32, base >> 32, RECORDS, 0x00027000]

    def at(self, lane: int, count: int) -> int:
        start = int(self.offsets[lane]) + OFFSET
        return int.from_bytes(self.bytes[start : start + count].tobytes(), "little")


def row(machine: Machine, first: int, count: int, lane: int) -> int:
    return sum(int(machine.v[first + i][lane]) << 32 * i for i in range(count))


def loaded(suffix: str, memory: int, old: int) -> int:
    width, function = LOADS[suffix]
    return memory if width > 4 else function(memory, old)


ACTIVE = 0xFFFF_FFFF_0F0F_FFFE


@holds_each("name", [name for name in NAMES if "_load_" in name and not name.startswith("scratch")])
def test_loads_put_bytes_where_they_belong(name: str, arch: str) -> None:
    memory = Memory(arch)
    machine, suffix = memory.machine, name.split("_load_")[1]
    width = LOADS[suffix][0]
    count = max(width // 4, 1)
    old = machine.v[20:24].copy()
    machine.set64(EXEC, ACTIVE)
    machine.run(text_of(name))
    for lane in range(64):
        before = sum(int(old[i][lane]) << 32 * i for i in range(count))
        want = loaded(suffix, memory.at(lane, width), before) if ACTIVE >> lane & 1 else before
        assert row(machine, 20, count, lane) == want, lane


@holds_each("name", [name for name in NAMES if "_store_" in name and not name.startswith("scratch")])
def test_stores_touch_nothing_else(name: str, arch: str) -> None:
    memory = Memory(arch)
    machine, suffix = memory.machine, name.split("_store_")[1]
    width, function = STORES[suffix]
    want = memory.bytes.copy()
    machine.set64(EXEC, ACTIVE)
    for lane in range(64):
        if ACTIVE >> lane & 1:
            start = int(memory.offsets[lane]) + OFFSET
            value = function(row(machine, 4, max(width // 4, 1), lane))
            want[start : start + width] = np.frombuffer(value.to_bytes(width, "little"), np.uint8)
    machine.run(text_of(name))
    np.testing.assert_array_equal(memory.bytes, want)


# Scratch lasts for one run: every load finds what stores of dwords left, every store is read back by a dword.
FILL = "scratch_store_dwordx4 v2, v[4:7], off offset:4\nscratch_store_dword v2, v8, off offset:20\n"


@holds_each("suffix", LOADS, lambda suffix: [f"scratch_load_{suffix}"])
def test_scratch_loads(suffix: str, arch: str) -> None:
    machine = Memory(arch).machine
    machine.v[2] = LANE % 32 * 4
    width = LOADS[suffix][0]
    count = max(width // 4, 1)
    old = machine.v[20:24].copy()
    machine.run(FILL + text_of(f"scratch_load_{suffix}"))
    for lane in range(64):
        before = sum(int(old[i][lane]) << 32 * i for i in range(count))
        memory = row(machine, 4, 5, lane) >> 8 * (OFFSET - 4) & 2 ** (8 * width) - 1
        assert row(machine, 20, count, lane) == loaded(suffix, memory, before), lane


@holds_each("suffix", STORES, lambda suffix: [f"scratch_store_{suffix}"])
def test_scratch_stores(suffix: str, arch: str) -> None:
    machine = Memory(arch).machine
    machine.v[2] = LANE % 32 * 4
    machine.v[8:12] = 0x5A5A5A5A
    fill = "scratch_store_dwordx4 v2, v[8:11], off offset:4\nscratch_store_dwordx2 v2, v[8:9], off offset:20\n"
    back = "\nscratch_load_dwordx4 v[20:23], v2, off offset:4\nscratch_load_dwordx2 v[24:25], v2, off offset:20"
    machine.run(fill + text_of(f"scratch_store_{suffix}") + back)
    width, function = STORES[suffix]
    for lane in range(64):
        value = function(row(machine, 4, max(width // 4, 1), lane))
        field = (1 << 8 * width) - 1 << 8 * (OFFSET - 4)
        want = int("5A" * 24, 16) & ~field | value << 8 * (OFFSET - 4)
        assert row(machine, 20, 6, lane) == want, lane


@holds("scratch_load_dword", "scratch_store_dword", "flat_load_dword")
def test_scratch_is_private_and_flat_reaches_it_through_its_aperture(arch: str) -> None:
    machine = Machine(arch)
    machine.private_bytes = 256
    machine.v[4] = LANE * 3
    machine.s[6] = 16
    machine.run(
        "scratch_store_dword off, v4, s6 offset:8\nscratch_load_dword v20, off, off offset:24\n"
        "s_mov_b64 s[20:21], src_private_base\nv_mov_b32 v0, 24\nv_mov_b32 v1, s21\nflat_load_dword v21, v[0:1]"
    )
    np.testing.assert_array_equal(machine.v[20], LANE * 3)
    np.testing.assert_array_equal(machine.v[21], LANE * 3)
    with pytest.raises(RuntimeError, match="scratch"):
        machine.run("scratch_load_dwordx2 v[20:21], off, off offset:252")


DMA = {"dword": 4, "dwordx3": 12, "dwordx4": 16, "ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2}


@holds_each("suffix", DMA, lambda suffix: [f"global_load_lds_{suffix}"])
def test_lds_dma_places_lanes_after_m0_and_the_offset(suffix: str, arch: str) -> None:
    memory = Memory(arch)
    machine, width = memory.machine, DMA[suffix]
    stride = 16 if width > 4 else 4
    machine.s[M0] = 512
    machine.set64(EXEC, 2**64 - 1 - (1 << 5))
    machine.lds[:] = 0xEE
    machine.run(f"global_load_lds_{suffix} v[0:1], off offset:16")
    for lane in range(64):
        start = int(memory.offsets[lane]) + 16
        value = int.from_bytes(memory.bytes[start : start + width].tobytes(), "little")
        if suffix[0] == "s":
            value = signed(value, 8 * width) & M32
        count = max(width, 4)
        at = 512 + 16 + stride * lane
        want = int("EE" * count, 16) if lane == 5 else value
        assert int.from_bytes(machine.lds[at : at + count].tobytes(), "little") == want, lane


BUFFER_DMA = [(suffix, arch) for suffix in DMA for arch in archs_of(f"global_load_lds_{suffix}")]


@pytest.mark.parametrize(("suffix", "arch"), BUFFER_DMA)
def test_buffer_dma_writes_zeros_for_lanes_out_of_range(suffix: str, arch: str) -> None:
    memory = Memory(arch)
    machine, width = memory.machine, DMA[suffix]
    stride = 16 if width > 4 else 4
    machine.s[M0] = 0
    machine.lds[:] = 0xEE
    machine.v[2] = np.where(LANE < 60, stride * LANE, RECORDS)
    machine.run(f"buffer_load_{suffix} v2, s[8:11], 0 offen lds")
    for lane in range(64):
        value = int.from_bytes(memory.bytes[stride * lane : stride * lane + width].tobytes(), "little")
        if suffix[0] == "s":
            value = signed(value, 8 * width) & M32
        count = max(width, 4)
        got = int.from_bytes(machine.lds[stride * lane : stride * lane + count].tobytes(), "little")
        assert got == (value if lane < 60 else 0), lane


SCALAR_LOADS = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}


@holds_each("suffix", SCALAR_LOADS, lambda suffix: [f"s_load_{suffix}", f"s_buffer_load_{suffix}"])
def test_scalar_loads_drop_two_address_bits_and_buffers_end(suffix: str, arch: str) -> None:
    memory = Memory(arch)
    machine, count = memory.machine, SCALAR_LOADS[suffix]
    words = memory.bytes.view(np.uint32)
    to = f"s[32:{31 + count}]" if count > 1 else "s32"
    machine.set64(4, int(memory.bytes.ctypes.data) + 2)
    machine.run(f"s_load_{suffix} {to}, s[4:5], 0x20")
    np.testing.assert_array_equal(machine.s[32 : 32 + count], words[8 : 8 + count])
    machine.s[6] = 8
    machine.run(f"s_load_{suffix} {to}, s[4:5], s6")
    np.testing.assert_array_equal(machine.s[32 : 32 + count], words[2 : 2 + count])
    machine.s[6] = RECORDS - 4 * max(count // 2, 1)
    machine.run(f"s_buffer_load_{suffix} {to}, s[8:11], s6")
    inside = max(count // 2, 1)
    want = [*words[RECORDS // 4 - inside : RECORDS // 4], *[0] * (count - inside)]
    np.testing.assert_array_equal(machine.s[32 : 32 + count], want)


@holds("s_store_dword", "s_store_dwordx2", "s_store_dwordx4")
def test_scalar_stores(arch: str) -> None:
    memory = Memory(arch)
    machine = memory.machine
    machine.set64(4, int(memory.bytes.ctypes.data))
    machine.s[20:24] = [11, 22, 33, 44]
    want = memory.bytes.view(np.uint32).copy()
    want[1], want[4:6], want[8:12] = 11, [11, 22], [11, 22, 33, 44]
    machine.run("s_store_dword s20, s[4:5], 4\ns_store_dwordx2 s[20:21], s[4:5], 16\n"
                "s_store_dwordx4 s[20:23], s[4:5], 32")  # fmt: skip
    np.testing.assert_array_equal(memory.bytes.view(np.uint32), want)
