"""LDS operations of the emulator: widths, halves, pairs, permutations and transposing reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.exec_one import EXEC, M0, Machine, signed
from helpers.exec_registry import holds, holds_each, on_each_arch

LANE = np.arange(64, dtype=np.uint32)


@pytest.fixture
def machine(arch: str) -> Machine:
    fresh = Machine(arch)
    rng = np.random.default_rng(2)
    fresh.lds[:] = rng.integers(0, 256, fresh.lds.size, dtype=np.uint8)
    fresh.v[:30] = rng.integers(0, 2**32, (30, 64), dtype=np.uint32)
    fresh.v[0] = rng.permutation(64).astype(np.uint32) * 64
    return fresh


def words(machine: Machine) -> np.ndarray:
    return machine.lds.view(np.uint32)


@holds_each("dwords", [1, 2, 3, 4], lambda dwords: [f"ds_{way}_b{32 * dwords}" for way in ("read", "write")])
def test_reads_and_writes_of_every_width(machine: Machine, arch: str, dwords: int) -> None:
    data = f"v[4:{3 + dwords}]" if dwords > 1 else "v4"
    result = f"v[20:{19 + dwords}]" if dwords > 1 else "v20"
    bits = 32 * dwords
    machine.run(f"ds_write_b{bits} v0, {data} offset:16\nds_read_b{bits} {result}, v0 offset:16")
    np.testing.assert_array_equal(machine.v[20 : 20 + dwords], machine.v[4 : 4 + dwords])
    at = (machine.v[0] + 16) // 4
    for i in range(dwords):
        np.testing.assert_array_equal(words(machine)[at + i], machine.v[4 + i])


@on_each_arch
def test_unaligned_addresses_are_byte_addresses(machine: Machine, arch: str) -> None:
    machine.v[0] += 3
    machine.run("ds_read_b64 v[20:21], v0")
    for lane in range(64):
        at = int(machine.v[0][lane])
        assert machine.row64(20)[lane] == int.from_bytes(machine.lds[at : at + 8].tobytes(), "little")


@holds_each(
    "name, want",
    [
        ("u8", lambda b, old: b[0]),
        ("i8", lambda b, old: signed(b[0], 8) & 0xFFFFFFFF),
        ("u16", lambda b, old: b[0] | b[1] << 8),
        ("i16", lambda b, old: signed(b[0] | b[1] << 8, 16) & 0xFFFFFFFF),
        ("u8_d16", lambda b, old: old & 0xFFFF0000 | b[0]),
        ("u8_d16_hi", lambda b, old: old & 0xFFFF | b[0] << 16),
        ("i8_d16", lambda b, old: old & 0xFFFF0000 | signed(b[0], 8) & 0xFFFF),
        ("i8_d16_hi", lambda b, old: old & 0xFFFF | (signed(b[0], 8) & 0xFFFF) << 16),
        ("u16_d16", lambda b, old: old & 0xFFFF0000 | b[0] | b[1] << 8),
        ("u16_d16_hi", lambda b, old: old & 0xFFFF | (b[0] | b[1] << 8) << 16),
    ],
    lambda name, want: [f"ds_read_{name}"],
)
def test_narrow_reads(machine: Machine, arch: str, name: str, want: Callable[[list[int], int], int]) -> None:
    old = machine.v[20].copy()
    machine.run(f"ds_read_{name} v20, v0 offset:2")
    for lane in range(64):
        at = int(machine.v[0][lane]) + 2
        read = [int(x) for x in machine.lds[at : at + 2]]
        assert machine.v[20][lane] == want(read, int(old[lane]))


@holds("ds_write_b8", "ds_write_b16", "ds_write_b16_d16_hi", "ds_write_b8_d16_hi")
def test_narrow_writes_touch_nothing_else(machine: Machine, arch: str) -> None:
    before = machine.lds.copy()
    machine.run("ds_write_b8 v0, v4\nds_write_b16 v0, v5 offset:2\nds_write_b16_d16_hi v0, v5 offset:6\n"
                "ds_write_b8_d16_hi v0, v4 offset:9")  # fmt: skip
    want = before.copy()
    for lane in range(64):
        at = int(machine.v[0][lane])
        want[at] = machine.v[4][lane] & 0xFF
        want[at + 9] = machine.v[4][lane] >> 16 & 0xFF
        want[at + 2 : at + 4] = np.frombuffer(int(machine.v[5][lane]).to_bytes(4, "little")[:2], np.uint8)
        want[at + 6 : at + 8] = np.frombuffer(int(machine.v[5][lane]).to_bytes(4, "little")[2:], np.uint8)
    np.testing.assert_array_equal(machine.lds, want)


@holds_each(
    "bits, far",
    [(32, False), (32, True), (64, False), (64, True)],
    lambda bits, far: [f"ds_{way}2{'st64' if far else ''}_b{bits}" for way in ("read", "write")],
)
def test_pairs_count_their_offsets_in_elements(machine: Machine, bits: int, far: bool, arch: str) -> None:
    size, suffix = bits // 8, f"2{'st64' if far else ''}_b{bits}"
    unit = size * (64 if far else 1)
    first, second = (f"v[{at}:{at + 1}]" if bits == 64 else f"v{at}" for at in (4, 6))
    count = bits // 32
    stride = size if far else 32  # no two lanes share a place
    machine.v[0] = LANE * stride
    machine.run(
        f"ds_write{suffix} v0, {first}, {second} offset0:1 offset1:3\n"
        f"ds_read{suffix} v[20:{19 + 2 * count}], v0 offset0:3 offset1:1"
    )
    np.testing.assert_array_equal(machine.v[20 : 20 + count], machine.v[6 : 6 + count])
    np.testing.assert_array_equal(machine.v[20 + count : 20 + 2 * count], machine.v[4 : 4 + count])
    np.testing.assert_array_equal(words(machine)[(LANE * stride + 3 * unit) // 4], machine.v[6])


@on_each_arch
def test_inactive_lanes_read_and_write_nothing(machine: Machine, arch: str) -> None:
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


@on_each_arch
def test_out_of_bounds_names_the_lane(machine: Machine, arch: str) -> None:
    machine.v[0][37] = 65536 - 3
    with pytest.raises(RuntimeError, match="LDS access of 4 bytes at 0xfffd, but the work-group has 65536"):
        machine.run("ds_read_b32 v20, v0")


@holds("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32")
def test_permutations(machine: Machine, arch: str) -> None:
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


@on_each_arch
def test_permutations_read_zero_from_inactive_lanes(machine: Machine, arch: str) -> None:
    machine.set64(EXEC, 0xFFFFFFFF)
    machine.v[0] = (LANE ^ 32) * 4
    machine.run("ds_bpermute_b32 v20, v0, v4")
    assert not machine.v[20][:32].any()


def transposing(bits: int) -> str:
    return "ds_read_b96_tr_b6" if bits == 6 else f"ds_read_b64_tr_b{bits}"


@holds_each("bits", [4, 6, 8, 16], lambda bits: [transposing(bits)])
def test_transposing_reads(machine: Machine, bits: int, arch: str) -> None:
    """Sixteen lanes read n items each; lane t gets item t % n of the lanes (16 / n) * j + t / n."""
    size = 12 if bits == 6 else 8
    n = 8 * size // bits
    machine.run(f"{transposing(bits)} v[20:{19 + size // 4}], v0")
    loaded = [int.from_bytes(machine.lds[int(at) : int(at) + size].tobytes(), "little") for at in machine.v[0]]
    for lane in range(64):
        group, t = lane & ~15, lane & 15
        want = 0
        for j in range(n):
            source = group + (16 // n) * j + t // n
            want |= (loaded[source] >> bits * (t % n) & (1 << bits) - 1) << bits * j
        assert sum(int(machine.v[20 + i][lane]) << 32 * i for i in range(size // 4)) == want


@holds("ds_write_addtid_b32", "ds_read_addtid_b32")
def test_addresses_from_m0(machine: Machine, arch: str) -> None:
    machine.s[M0] = 256
    machine.run("ds_write_addtid_b32 v4 offset:8\nds_read_addtid_b32 v20 offset:8")
    np.testing.assert_array_equal(machine.v[20], machine.v[4])
    np.testing.assert_array_equal(words(machine)[66 : 66 + 64], machine.v[4])
