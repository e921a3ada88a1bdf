"""LDS operations of the emulator: widths, halves, pairs, atomics, permutations and transposing reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from exec_one import EXEC, M0, Machine, signed

LANE = np.arange(64, dtype=np.uint32)


@pytest.fixture
def machine() -> Machine:
    fresh = Machine()
    rng = np.random.default_rng(2)
    fresh.lds[:] = rng.integers(0, 256, fresh.lds.size, dtype=np.uint8)
    fresh.v[:30] = rng.integers(0, 2**32, (30, 64), dtype=np.uint32)
    fresh.v[0] = rng.permutation(64).astype(np.uint32) * 64
    return fresh


def words(machine: Machine) -> np.ndarray:
    return machine.lds.view(np.uint32)


@pytest.mark.parametrize("dwords", [1, 2, 3, 4])
def test_reads_and_writes_of_every_width(machine: Machine, dwords: int) -> None:
    data = f"v[4:{3 + dwords}]" if dwords > 1 else "v4"
    result = f"v[20:{19 + dwords}]" if dwords > 1 else "v20"
    bits = 32 * dwords
    machine.run(f"ds_write_b{bits} v0, {data} offset:16\nds_read_b{bits} {result}, v0 offset:16")
    np.testing.assert_array_equal(machine.v[20 : 20 + dwords], machine.v[4 : 4 + dwords])
    at = (machine.v[0] + 16) // 4
    for i in range(dwords):
        np.testing.assert_array_equal(words(machine)[at + i], machine.v[4 + i])


def test_unaligned_addresses_are_byte_addresses(machine: Machine) -> None:
    machine.v[0] += 3
    machine.run("ds_read_b64 v[20:21], v0")
    for lane in range(64):
        at = int(machine.v[0][lane])
        assert machine.row64(20)[lane] == int.from_bytes(machine.lds[at : at + 8].tobytes(), "little")


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("u8", lambda b, old: b[0]),
        ("i8", lambda b, old: signed(b[0], 8) & 0xFFFFFFFF),
        ("u16", lambda b, old: b[0] | b[1] << 8),
        ("i16", lambda b, old: signed(b[0] | b[1] << 8, 16) & 0xFFFFFFFF),
        ("u8_d16", lambda b, old: old & 0xFFFF0000 | b[0]),
        ("u8_d16_hi", lambda b, old: old & 0xFFFF | b[0] << 16),
        ("i8_d16_hi", lambda b, old: old & 0xFFFF | (signed(b[0], 8) & 0xFFFF) << 16),
        ("u16_d16", lambda b, old: old & 0xFFFF0000 | b[0] | b[1] << 8),
        ("u16_d16_hi", lambda b, old: old & 0xFFFF | (b[0] | b[1] << 8) << 16),
    ],
)
def test_narrow_reads(machine: Machine, name: str, want: Callable[[list[int], int], int]) -> None:
    old = machine.v[20].copy()
    machine.run(f"ds_read_{name} v20, v0 offset:2")
    for lane in range(64):
        at = int(machine.v[0][lane]) + 2
        read = [int(x) for x in machine.lds[at : at + 2]]
        assert machine.v[20][lane] == want(read, int(old[lane]))


def test_narrow_writes_touch_nothing_else(machine: Machine) -> None:
    before = machine.lds.copy()
    machine.run("ds_write_b8 v0, v4\nds_write_b16 v0, v5 offset:2\nds_write_b16_d16_hi v0, v5 offset:6")
    want = before.copy()
    for lane in range(64):
        at = int(machine.v[0][lane])
        want[at] = machine.v[4][lane] & 0xFF
        want[at + 2 : at + 4] = np.frombuffer(int(machine.v[5][lane]).to_bytes(4, "little")[:2], np.uint8)
        want[at + 6 : at + 8] = np.frombuffer(int(machine.v[5][lane]).to_bytes(4, "little")[2:], np.uint8)
    np.testing.assert_array_equal(machine.lds, want)


def test_pairs_count_their_offsets_in_elements(machine: Machine) -> None:
    machine.v[0] = LANE * 16
    machine.run("ds_write2_b32 v0, v4, v5 offset0:1 offset1:3\nds_read2_b32 v[20:21], v0 offset0:3 offset1:1")
    np.testing.assert_array_equal(machine.v[20:22], machine.v[[5, 4]])
    machine.run("ds_write2st64_b64 v0, v[4:5], v[6:7] offset1:2\nds_read2st64_b64 v[20:23], v0 offset0:2 offset1:0")
    np.testing.assert_array_equal(machine.v[20:24], machine.v[[6, 7, 4, 5]])
    np.testing.assert_array_equal(words(machine)[(LANE * 16 + 2 * 64 * 8) // 4], machine.v[6])


def test_inactive_lanes_read_and_write_nothing(machine: Machine) -> None:
    mask = 0xFF00FF00FF00FF00
    machine.set64(EXEC, mask)
    machine.v[0][0:8] = 0xFFFFFFF0  # an inactive lane's address does not matter
    before, old = machine.lds.copy(), machine.v[20].copy()
    machine.run("ds_write_b32 v0, v4\nds_read_b32 v20, v0")
    for lane in range(64):
        active = mask >> lane & 1
        assert machine.v[20][lane] == (machine.v[4][lane] if active else old[lane])
    touched = (machine.lds != before).nonzero()[0]
    assert set(touched // 64) <= {int(machine.v[0][lane]) // 64 for lane in range(64) if mask >> lane & 1}


def test_out_of_bounds_names_the_lane(machine: Machine) -> None:
    machine.v[0][37] = 65536 - 3
    with pytest.raises(RuntimeError, match="LDS access of 4 bytes at 0xfffd, but the work-group has 65536"):
        machine.run("ds_read_b32 v20, v0")


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add": lambda o, x: o + x,
    "sub": lambda o, x: o - x,
    "rsub": lambda o, x: x - o,
    "inc": lambda o, x: 0 if o >= x else o + 1,
    "dec": lambda o, x: x if o == 0 or o > x else o - 1,
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_return_the_old_value_and_serialise_lanes(machine: Machine, name: str, bits: int) -> None:
    machine.v[0] = LANE % 8 * 8  # eight lanes meet at each address
    memory = [int.from_bytes(machine.lds[8 * i : 8 * i + bits // 8].tobytes(), "little") for i in range(8)]
    data = machine.row64(4) if bits == 64 else [int(x) for x in machine.v[4]]
    result, operand = ("v[20:21]", "v[4:5]") if bits == 64 else ("v20", "v4")
    machine.run(f"ds_{name}_rtn_u{bits} {result}, v0, {operand}")
    got = machine.row64(20) if bits == 64 else machine.v[20].tolist()
    for lane in range(64):
        assert got[lane] == memory[lane % 8], lane
        memory[lane % 8] = ATOMICS[name](memory[lane % 8], data[lane]) & (1 << bits) - 1
    after = [int.from_bytes(machine.lds[8 * i : 8 * i + bits // 8].tobytes(), "little") for i in range(8)]
    assert after == memory


def test_signed_minimum_compare_and_exchange(machine: Machine) -> None:
    machine.v[0] = LANE * 4
    words(machine)[:64] = LANE - np.uint32(32)
    machine.v[4] = 0xFFFFFFF0
    machine.run("ds_min_i32 v0, v4")
    np.testing.assert_array_equal(words(machine)[:64].view(np.int32), np.minimum(np.arange(64) - 32, -16))
    words(machine)[:64] = LANE
    machine.v[4], machine.v[5] = 7, 99
    machine.run("ds_cmpst_rtn_b32 v20, v0, v4, v5")
    np.testing.assert_array_equal(machine.v[20], LANE)
    np.testing.assert_array_equal(words(machine)[:64], np.where(LANE == 7, 99, LANE))
    machine.run("ds_wrxchg_rtn_b32 v20, v0, v6")
    np.testing.assert_array_equal(words(machine)[:64], machine.v[6])


def test_float_atomics_add_in_lane_order(machine: Machine) -> None:
    machine.v[0] = 0
    values = np.random.default_rng(3).standard_normal(64).astype(np.float32)
    machine.v[4] = values.view(np.uint32)
    words(machine)[0] = 0
    machine.run("ds_add_f32 v0, v4")
    total = np.float32(0)
    for value in values:
        total = np.float32(total + value)
    assert words(machine)[:1].view(np.float32)[0] == total


def test_permutations(machine: Machine) -> None:
    index = np.random.default_rng(4).permutation(64).astype(np.uint32)
    machine.v[0] = index * 4
    machine.run("ds_bpermute_b32 v20, v0, v4")
    np.testing.assert_array_equal(machine.v[20], machine.v[4][index])
    machine.run("ds_permute_b32 v20, v0, v4")
    np.testing.assert_array_equal(machine.v[20][index], machine.v[4])
    machine.run("ds_swizzle_b32 v20, v4 offset:swizzle(QUAD_PERM, 2, 0, 3, 1)")
    np.testing.assert_array_equal(machine.v[20], machine.v[4].reshape(16, 4)[:, [2, 0, 3, 1]].reshape(64))
    machine.run("ds_swizzle_b32 v20, v4 offset:swizzle(SWAP, 16)")
    np.testing.assert_array_equal(machine.v[20], machine.v[4][LANE ^ 16])
    machine.run("ds_swizzle_b32 v20, v4 offset:swizzle(BROADCAST, 8, 3)")
    np.testing.assert_array_equal(machine.v[20], machine.v[4][LANE & ~np.uint32(7) | 3])


def test_permutations_read_zero_from_inactive_lanes(machine: Machine) -> None:
    machine.set64(EXEC, 0xFFFFFFFF)
    machine.v[0] = (LANE ^ 32) * 4
    machine.run("ds_bpermute_b32 v20, v0, v4")
    assert not machine.v[20][:32].any()


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_transposing_reads(machine: Machine, bits: int) -> None:
    """Sixteen lanes read 64 bits each; lane t gets item t % n of the lanes (16 / n) * j + t / n."""
    n = 64 // bits
    machine.run(f"ds_read_b64_tr_b{bits} v[20:21], v0")
    loaded = [int.from_bytes(machine.lds[int(at) : int(at) + 8].tobytes(), "little") for at in machine.v[0]]
    for lane in range(64):
        group, t = lane & ~15, lane & 15
        want = 0
        for j in range(n):
            source = group + (16 // n) * j + t // n
            want |= (loaded[source] >> bits * (t % n) & (1 << bits) - 1) << bits * j
        assert machine.row64(20)[lane] == want


def test_addresses_from_m0(machine: Machine) -> None:
    machine.s[M0] = 256
    machine.run("ds_write_addtid_b32 v4 offset:8\nds_read_addtid_b32 v20 offset:8")
    np.testing.assert_array_equal(machine.v[20], machine.v[4])
    np.testing.assert_array_equal(words(machine)[66 : 66 + 64], machine.v[4])
