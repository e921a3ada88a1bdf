"""Global, flat, buffer and scalar memory operations of the emulator on a numpy array: widths, ranges, atomics, DMA."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from exec_one import EXEC, M0, Machine, signed

LANE = np.arange(64, dtype=np.uint32)
RECORDS = 4096  # bytes of the buffer that a descriptor covers


class Memory:
    """Random bytes in host memory, and a machine with pointers to them: v[0:1] per lane, s[4:5] the base."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.bytes = rng.integers(0, 256, 2 * RECORDS, dtype=np.uint8)
        self.base = int(self.bytes.ctypes.data)
        self.machine = Machine()
        self.machine.v[2:30] = rng.integers(0, 2**32, (28, 64), dtype=np.uint32)
        self.offsets = rng.permutation(64).astype(np.uint32) * 32
        self.machine.set_row64(0, [self.base + int(x) for x in self.offsets])
        self.machine.set64(4, self.base)
        self.machine.s[8:12] = [self.base & 0xFFFFFFFF, self.base >> 32, RECORDS, 0x00027000]

    @property
    def words(self) -> np.ndarray:
        return self.bytes.view(np.uint32)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.mark.parametrize("dwords", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["global", "flat", "buffer"])
def test_every_width_loads_what_it_stores(memory: Memory, kind: str, dwords: int) -> None:
    machine = memory.machine
    suffix = "dword" if dwords == 1 else f"dwordx{dwords}"
    data = "v4" if dwords == 1 else f"v[4:{3 + dwords}]"
    result = "v20" if dwords == 1 else f"v[20:{19 + dwords}]"
    if kind == "buffer":
        machine.v[0] = memory.offsets
        where = "v0, s[8:11], 0 offen offset:8"
        text = f"buffer_store_{suffix} {data}, {where}\nbuffer_load_{suffix} {result}, {where}"
    else:
        tail = ", off" if kind == "global" else ""
        text = (
            f"{kind}_store_{suffix} v[0:1], {data}{tail} offset:8\n{kind}_load_{suffix} {result}, v[0:1]{tail} offset:8"
        )
    machine.run(text)
    np.testing.assert_array_equal(machine.v[20 : 20 + dwords], machine.v[4 : 4 + dwords])
    for i in range(dwords):
        np.testing.assert_array_equal(memory.words[(memory.offsets + 8) // 4 + i], machine.v[4 + i])


def test_scalar_base_with_signed_offset_and_partial_exec(memory: Memory) -> None:
    machine = memory.machine
    machine.v[3] = memory.offsets + 64
    machine.set64(EXEC, 0xF0F0F0F0F0F0F0F0)
    old = machine.v[20].copy()
    machine.run("global_load_dword v20, v3, s[4:5] offset:-64")
    active = (LANE & 4) != 0
    np.testing.assert_array_equal(machine.v[20], np.where(active, memory.words[memory.offsets // 4], old))


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("ubyte", lambda b, old: b[0]),
        ("sbyte", lambda b, old: signed(b[0], 8) & 0xFFFFFFFF),
        ("ushort", lambda b, old: b[0] | b[1] << 8),
        ("sshort", lambda b, old: signed(b[0] | b[1] << 8, 16) & 0xFFFFFFFF),
        ("ubyte_d16_hi", lambda b, old: old & 0xFFFF | b[0] << 16),
        ("sbyte_d16", lambda b, old: old & 0xFFFF0000 | signed(b[0], 8) & 0xFFFF),
        ("short_d16", lambda b, old: old & 0xFFFF0000 | b[0] | b[1] << 8),
        ("short_d16_hi", lambda b, old: old & 0xFFFF | (b[0] | b[1] << 8) << 16),
    ],
)
def test_narrow_loads(memory: Memory, name: str, want: Callable[[list[int], int], int]) -> None:
    machine = memory.machine
    old = machine.v[20].copy()
    machine.v[3] = memory.offsets
    for text in (
        f"global_load_{name} v20, v[0:1], off offset:1",
        f"buffer_load_{name} v20, v3, s[8:11], 0 offen offset:1",
    ):
        machine.v[20] = old
        machine.run(text)
        for lane in range(64):
            at = int(memory.offsets[lane]) + 1
            assert machine.v[20][lane] == want([int(x) for x in memory.bytes[at : at + 2]], int(old[lane])), text


def test_a_buffer_ends_dword_by_dword(memory: Memory) -> None:
    machine = memory.machine
    machine.v[0] = RECORDS - 16 + 4 * (LANE % 8)  # 16 bytes that lie inside by 4, 3, 2, 1, 0 dwords
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


def test_the_scalar_offset_counts_for_the_range(memory: Memory) -> None:
    machine = memory.machine
    machine.v[0], machine.s[6] = 4 * LANE, RECORDS - 128
    machine.run("buffer_load_dword v20, v0, s[8:11], s6 offen")
    want = np.where(LANE < 32, memory.words[(RECORDS - 128) // 4 + LANE], 0)
    np.testing.assert_array_equal(machine.v[20], want)
    machine.v[0] = 0x80000000  # how compilers mask a lane off
    machine.run("buffer_load_dword v20, v0, s[8:11], 0 offen")
    assert not machine.v[20].any()


def test_an_indexed_buffer_counts_records(memory: Memory) -> None:
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


def test_flat_addresses_reach_lds_through_the_aperture(memory: Memory) -> None:
    machine = memory.machine
    machine.lds[:] = np.random.default_rng(6).integers(0, 256, machine.lds.size, dtype=np.uint8)
    machine.run("s_mov_b64 s[20:21], src_shared_base")
    even = (LANE & 1) == 0
    aperture = machine.get64(20)
    machine.set_row64(0, [(aperture if e else memory.base) + int(x) for e, x in zip(even, memory.offsets, strict=True)])
    machine.run("flat_load_dword v20, v[0:1]")
    at = memory.offsets // 4
    np.testing.assert_array_equal(machine.v[20], np.where(even, machine.lds.view(np.uint32)[at], memory.words[at]))


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add": lambda o, x: o + x,
    "sub": lambda o, x: o - x,
    "smin": lambda o, x: min(o, x, key=lambda y: signed(y, 32)),
    "smax": lambda o, x: max(o, x, key=lambda y: signed(y, 32)),
    "umin": min,
    "umax": max,
    "and": lambda o, x: o & x,
    "or": lambda o, x: o | x,
    "xor": lambda o, x: o ^ x,
    "inc": lambda o, x: 0 if o >= x else o + 1,
    "dec": lambda o, x: x if o == 0 or o > x else o - 1,
    "swap": lambda o, x: x,
}


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("kind", ["global", "flat", "buffer"])
def test_atomics_serialise_lanes_and_return_the_old_value(memory: Memory, name: str, kind: str) -> None:
    machine = memory.machine
    meeting = LANE % 4 * 4
    machine.set_row64(0, [memory.base + int(x) for x in meeting])
    machine.v[20] = machine.v[4]
    if kind == "buffer":
        machine.v[0] = meeting
        machine.run(f"buffer_atomic_{name} v20, v0, s[8:11], 0 offen sc0")
    else:
        expected_memory = [int(x) for x in memory.words[:4]]
        machine.run(f"{kind}_atomic_{name} v20, v[0:1], v4{', off' if kind == 'global' else ''} sc0")
    expected_memory = [int(x) for x in Memory().words[:4]]
    for lane in range(64):
        assert machine.v[20][lane] == expected_memory[lane % 4]
        new = ATOMICS[name](expected_memory[lane % 4], int(machine.v[4][lane]))
        expected_memory[lane % 4] = new & 0xFFFFFFFF
    assert memory.words[:4].tolist() == expected_memory


def test_compare_and_swap_and_float_atomics(memory: Memory) -> None:
    machine = memory.machine
    memory.words[:64] = LANE
    machine.set_row64(0, [memory.base + 4 * lane for lane in range(64)])
    machine.v[4], machine.v[5] = 1000, LANE & ~np.uint32(1)
    machine.run("global_atomic_cmpswap v20, v[0:1], v[4:5], off sc0")
    np.testing.assert_array_equal(machine.v[20], LANE)
    np.testing.assert_array_equal(memory.words[:64], np.where(LANE & 1, LANE, 1000))
    memory.words[:64] = np.linspace(0, 9, 64).astype(np.float32).view(np.uint32)
    machine.v[4] = np.float32(0.1).view(np.uint32)
    machine.run("global_atomic_add_f32 v[0:1], v4, off")
    want = np.linspace(0, 9, 64).astype(np.float32) + np.float32(0.1)
    np.testing.assert_array_equal(memory.words[:64].view(np.float32), want)


def test_a_misaligned_atomic_is_a_fault(memory: Memory) -> None:
    memory.machine.set_row64(0, [memory.base + 2] * 64)
    with pytest.raises(RuntimeError, match="misaligned atomic"):
        memory.machine.run("global_atomic_add v[0:1], v4, off")


@pytest.mark.parametrize(("name", "dwords", "stride"), [("dword", 1, 4), ("dwordx3", 3, 16), ("dwordx4", 4, 16)])
def test_lds_dma_places_lanes_after_m0_and_the_offset(memory: Memory, name: str, dwords: int, stride: int) -> None:
    machine = memory.machine
    machine.s[M0] = 512
    machine.set64(EXEC, 2**64 - 1 - (1 << 5))
    machine.lds[:] = 0xEE
    machine.run(f"global_load_lds_{name} v[0:1], off offset:16")
    words = machine.lds.view(np.uint32)
    for lane in range(64):
        for i in range(dwords):
            want = 0xEEEEEEEE if lane == 5 else memory.words[(int(memory.offsets[lane]) + 16) // 4 + i]
            assert words[(512 + 16 + stride * lane) // 4 + i] == want


def test_buffer_dma_writes_zeros_for_lanes_out_of_range(memory: Memory) -> None:
    machine = memory.machine
    machine.s[M0] = 0
    machine.lds[:] = 0xEE
    machine.v[0] = np.where(LANE < 60, 4 * LANE, RECORDS)
    machine.run("buffer_load_dword v0, s[8:11], 0 offen lds")
    np.testing.assert_array_equal(machine.lds.view(np.uint32)[:64], np.where(LANE < 60, memory.words[:64], 0))


def test_scalar_loads_drop_two_address_bits_and_end_with_the_buffer(memory: Memory) -> None:
    machine = memory.machine
    machine.set64(4, memory.base + 2)
    machine.run("s_load_dwordx8 s[20:27], s[4:5], 0x20")
    np.testing.assert_array_equal(machine.s[20:28], memory.words[8:16])
    machine.s[6] = RECORDS - 8
    machine.run("s_buffer_load_dwordx4 s[20:23], s[8:11], s6")
    np.testing.assert_array_equal(machine.s[20:24], [*memory.words[RECORDS // 4 - 2 : RECORDS // 4], 0, 0])
