"""Where global, flat and buffer accesses go: offsets, ranges, records, apertures."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.exec_one import EXEC, Machine
from helpers.exec_registry import on_each_arch

LANE = np.arange(64, dtype=np.uint32)
RECORDS = 4096  # bytes of the buffer that a descriptor covers


class Memory:
    """Random bytes in host memory, and a machine with pointers to them: v[0:1] per lane, s[4:5] the base."""

    def __init__(self, arch: str) -> None:
        rng = np.random.default_rng(5)
        self.bytes = rng.integers(0, 256, 2 * RECORDS, dtype=np.uint8)
        self.base = int(self.bytes.ctypes.data)
        self.machine = Machine(arch)
        self.machine.v[2:30] = rng.integers(0, 2**32, (28, 64), dtype=np.uint32)
        self.offsets = rng.permutation(64).astype(np.uint32) * 32
        self.machine.set_row64(0, [self.base + int(x) for x in self.offsets])
        self.machine.set64(4, self.base)
        self.machine.s[8:12] = [self.base & 0xFFFFFFFF, self.base >> 32, RECORDS, 0x00027000]

    @property
    def words(self) -> np.ndarray:
        return self.bytes.view(np.uint32)


@pytest.fixture
def memory(arch: str) -> Memory:
    return Memory(arch)


@on_each_arch
def test_scalar_base_with_signed_offset_and_partial_exec(memory: Memory, arch: str) -> None:
    machine = memory.machine
    machine.v[3] = memory.offsets + 64
    machine.set64(EXEC, 0xF0F0F0F0F0F0F0F0)
    old = machine.v[20].copy()
    machine.run("global_load_dword v20, v3, s[4:5] offset:-64")
    active = (LANE & 4) != 0
    np.testing.assert_array_equal(machine.v[20], np.where(active, memory.words[memory.offsets // 4], old))


@on_each_arch
def test_a_buffer_ends_dword_by_dword(memory: Memory, arch: str) -> None:
    machine = memory.machine
    machine.v[0] = RECORDS - 16 + 4 * (LANE % 8)  # 16 bytes of which 4, 3, 2, 1, 0 dwords are in range
    machine.run("buffer_load_dwordx4 v[20:23], v0, s[8:11], 0 offen")
    for i in range(4):
        at = machine.v[0] + 4 * np.uint32(i)
        want = np.where(at + 4 <= RECORDS, memory.words[np.minimum(at, RECORDS) // 4], 0)
        np.testing.assert_array_equal(machine.v[20 + i], want)
    before = memory.bytes.copy()
    machine.v[4:8] = 0x11111111
    machine.run("buffer_store_dwordx4 v[4:7], v0, s[8:11], 0 offen")
    before[RECORDS - 16 : RECORDS] = 0x11
    np.testing.assert_array_equal(memory.bytes, before)


@on_each_arch
def test_the_scalar_offset_counts_for_the_range(memory: Memory, arch: str) -> None:
    machine = memory.machine
    machine.v[0], machine.s[6] = 4 * LANE, RECORDS - 128
    machine.run("buffer_load_dword v20, v0, s[8:11], s6 offen")
    want = np.where(LANE < 32, memory.words[(RECORDS - 128) // 4 + LANE], 0)
    np.testing.assert_array_equal(machine.v[20], want)
    machine.v[0] = 0x80000000  # how compilers mask a lane off
    machine.run("buffer_load_dword v20, v0, s[8:11], 0 offen")
    assert not machine.v[20].any()


@on_each_arch
def test_an_indexed_buffer_counts_records(memory: Memory, arch: str) -> None:
    machine = memory.machine
    machine.s[9] |= 32 << 16  # stride
    machine.s[10] = 40
    machine.v[0] = LANE
    machine.run("buffer_load_dword v20, v0, s[8:11], 0 idxen offset:4")
    np.testing.assert_array_equal(machine.v[20], np.where(LANE < 40, memory.words[LANE * 8 + 1], 0))
    # A stride without an index: still bytes.
    machine.run("buffer_load_dword v20, v0, s[8:11], 0 offen")
    read = memory.bytes[np.add.outer(LANE, np.arange(4, dtype=np.uint32))].copy().view(np.uint32).reshape(64)
    np.testing.assert_array_equal(machine.v[20], np.where(LANE + 4 <= 40, read, 0))


@on_each_arch
def test_flat_addresses_reach_lds_through_the_aperture(memory: Memory, arch: str) -> None:
    machine = memory.machine
    machine.lds[:] = np.random.default_rng(6).integers(0, 256, machine.lds.size, dtype=np.uint8)
    machine.run("s_mov_b64 s[20:21], src_shared_base")
    even = (LANE & 1) == 0
    aperture = machine.get64(20)
    machine.set_row64(0, [(aperture if e else memory.base) + int(x) for e, x in zip(even, memory.offsets, strict=True)])
    machine.run("flat_load_dword v20, v[0:1]")
    at = memory.offsets // 4
    np.testing.assert_array_equal(machine.v[20], np.where(even, machine.lds.view(np.uint32)[at], memory.words[at]))
