"""Every atomic, on global, flat, buffer, scalar and LDS addresses: lanes in turn, the old value returned."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.exec_one import EXEC, M0, Machine, from_fraction, signed, to_fraction
from helpers.exec_registry import assemble_for, holds, holds_each
from helpers.float_reference import ordered

LANE = np.arange(64)
MEETING = 4  # addresses, so that sixteen lanes meet at each
ACTIVE = 0xFFFF_FFFF_0F0F_FFFE

# (old, data, second data) -> new, for values of a given width
Update = Callable[[int, int, int, int], int]
INTEGERS: dict[str, Update] = {
    "add": lambda old, x, y, bits: old + x,
    "sub": lambda old, x, y, bits: old - x,
    "rsub": lambda old, x, y, bits: x - old,
    "smin": lambda old, x, y, bits: min(old, x, key=lambda z: signed(z, bits)),
    "smax": lambda old, x, y, bits: max(old, x, key=lambda z: signed(z, bits)),
    "umin": lambda old, x, y, bits: min(old, x),
    "umax": lambda old, x, y, bits: max(old, x),
    "and": lambda old, x, y, bits: old & x,
    "or": lambda old, x, y, bits: old | x,
    "xor": lambda old, x, y, bits: old ^ x,
    "inc": lambda old, x, y, bits: 0 if old >= x else old + 1,
    "dec": lambda old, x, y, bits: x if old == 0 or old > x else old - 1,
    "swap": lambda old, x, y, bits: x,
    "mskor": lambda old, x, y, bits: old & ~x | y,
    "wrap": lambda old, x, y, bits: old - x if old >= x else old + y,
}


def float_add(old: int, x: int, bits: int) -> int:
    total = to_fraction(old, bits) + to_fraction(x, bits)
    return from_fraction(total, bits, bool(old >> bits - 1 and x >> bits - 1))


def packed_add(old: int, x: int, add: Callable[[int, int], int]) -> int:
    return add(old & 0xFFFF, x & 0xFFFF) | add(old >> 16, x >> 16) << 16


def bf16_add(a: int, b: int) -> int:
    """The nearest of the codes around the sum's f32, ties to even."""
    total = to_fraction(a << 16, 32) + to_fraction(b << 16, 32)
    code = from_fraction(total, 32, bool(a >> 15 and b >> 15)) >> 16
    around = [x for x in (code - 1, code, code + 1) if x >= 0 and x >> 15 == code >> 15 and x & 0x7F80 != 0x7F80]
    return min(around, key=lambda x: (abs(to_fraction(x << 16, 32) - total), x & 1))


FLOATS: dict[str, tuple[int, Update]] = {
    "add_f32": (32, lambda old, x, y, bits: float_add(old, x, 32)),
    "add_f64": (64, lambda old, x, y, bits: float_add(old, x, 64)),
    "min_f32": (32, lambda old, x, y, bits: min(old, x, key=lambda z: ordered(z, 32))),
    "max_f32": (32, lambda old, x, y, bits: max(old, x, key=lambda z: ordered(z, 32))),
    "min_f64": (64, lambda old, x, y, bits: min(old, x, key=lambda z: ordered(z, 64))),
    "max_f64": (64, lambda old, x, y, bits: max(old, x, key=lambda z: ordered(z, 64))),
    "pk_add_f16": (32, lambda old, x, y, bits: packed_add(old, x, lambda a, b: float_add(a, b, 16))),
    "pk_add_bf16": (32, lambda old, x, y, bits: packed_add(old, x, bf16_add)),
}
GLOBAL = [name for name in INTEGERS if name not in ("rsub", "mskor", "wrap")]
KINDS = ("global", "flat", "buffer")
MEMORY = [f"{kind}_atomic_{name}{wide}" for kind in KINDS for name in GLOBAL for wide in ("", "_x2")]
MEMORY += [f"{kind}_atomic_{name}" for kind in KINDS for name in FLOATS if name not in ("min_f32", "max_f32")]
LDS_TYPES = {"smin": ("min", "i"), "smax": ("max", "i"), "umin": ("min", "u"), "umax": ("max", "u")}
LDS_TYPES |= {name: (name, "b") for name in ("and", "or", "xor", "mskor")}
LDS: dict[str, tuple[int, Update]] = {}
for _name, _update in INTEGERS.items():
    if _name not in ("swap", "wrap"):
        _stem, _kind = LDS_TYPES.get(_name, (_name, "u"))
        LDS |= {f"ds_{_stem}_{_kind}{_bits}": (_bits, _update) for _bits in (32, 64)}
for _name, (_bits, _update) in FLOATS.items():
    _stem, _, _kind = _name.rpartition("_")
    LDS[f"ds_{_stem}_{_kind}"] = _bits, _update
LDS |= {f"{name.rpartition('_')[0]}_rtn_{name.rpartition('_')[2]}": row for name, row in LDS.items()}
for _bits in (32, 64):
    LDS[f"ds_wrxchg_rtn_b{_bits}"] = _bits, INTEGERS["swap"]
LDS["ds_wrap_rtn_b32"] = 32, INTEGERS["wrap"]


def pair(first: int, bits: int) -> str:
    return f"v[{first}:{first + 1}]" if bits == 64 else f"v{first}"


def kind_of(name: str) -> tuple[int, Update]:
    if name.startswith("ds_"):
        return LDS[name]
    operation = name.split("_atomic_")[1]
    if operation in FLOATS:
        return FLOATS[operation]
    return (64 if operation.endswith("_x2") else 32), INTEGERS[operation.removesuffix("_x2")]


def text_of(name: str) -> str:
    bits, _ = kind_of(name)
    if name.startswith("buffer"):
        return f"{name} {pair(20, bits)}, v2, s[8:11], 0 offen sc0"
    if not name.startswith("ds"):
        return f"{name} {pair(20, bits)}, v[0:1], {pair(4, bits)}{', off' if name.startswith('global') else ''} sc0"
    two = ", " + pair(6, bits) if "mskor" in name or "wrap" in name else ""
    returned = pair(20, bits) + ", " if "_rtn" in name else ""
    return f"{name} {returned}v2, {pair(4, bits)}{two}"


@pytest.fixture(scope="module", autouse=True)
def _assembled() -> None:
    assemble_for(text_of, (*MEMORY, *LDS))


def values(name: str, bits: int, count: int, rng: np.random.Generator) -> list[int]:
    """Data that an operation can tell apart: any integers, finite floats of moderate and of tiny size."""
    if "bf16" in name or "f16" in name:
        halves = [
            int(x) for x in rng.choice([0x3C00, 0xBC00, 0x0001, 0x8000, 0x3555, 0x4248, 0xC3F0, 0x0400], 2 * count)
        ]
        return [low | high << 16 for low, high in zip(halves[::2], halves[1::2], strict=True)]
    if "_f32" in name or "_f64" in name:
        numbers = rng.standard_normal(count) * 2.0 ** rng.integers(-20, 20, count)
        codes = numbers.astype(np.float32).view(np.uint32) if bits == 32 else numbers.view(np.uint64)
        return [int(x) for x in codes]
    edges = (0, 1, 2, 2**bits - 1, 1 << bits - 1, (1 << bits - 1) - 1)
    makers = (
        lambda: int(rng.integers(3)),
        lambda: edges[int(rng.integers(6))],
        lambda: int.from_bytes(rng.bytes(bits // 8), "little"),
    )
    return [makers[kind]() for kind in rng.integers(0, 3, count)]


def put(machine: Machine, register: int, row: list[int], bits: int) -> None:
    if bits == 64:
        machine.set_row64(register, row)
    else:
        machine.v[register] = row


def get(machine: Machine, register: int, bits: int) -> list[int]:
    return machine.row64(register) if bits == 64 else machine.v[register].tolist()


@holds_each("name", [*MEMORY, *LDS])
def test_atomics_take_lanes_in_turn_and_return_the_old_value(name: str, arch: str) -> None:
    bits, update = kind_of(name)
    rng = np.random.default_rng(5)
    machine = Machine(arch)
    memory = np.array(values(name, bits, MEETING, rng), np.uint64)
    storage = memory.copy()  # eight bytes per address
    base = storage.ctypes.data
    machine.set_row64(0, [base + 8 * (lane % MEETING) for lane in range(64)])
    machine.v[2] = LANE % MEETING * 8
    machine.s[8:12] = [base & 0xFFFFFFFF, base >> 32, 8 * MEETING, 0x00027000]
    machine.lds[: 8 * MEETING] = storage.view(np.uint8)
    data, second = values(name, bits, 64, rng), values(name, bits, 64, rng)
    put(machine, 4, data, bits)
    put(machine, 6, second, bits)
    put(machine, 20, data if name.startswith("buffer") else [77] * 64, bits)
    machine.set64(EXEC, ACTIVE)
    machine.run(text_of(name))
    cells = memory.tolist()
    returned = get(machine, 20, bits)
    mask = 2**bits - 1
    for lane in range(64):
        at = lane % MEETING
        if not ACTIVE >> lane & 1:
            assert returned[lane] == (data[lane] if name.startswith("buffer") else 77)
            continue
        if not name.startswith("ds") or "_rtn" in name:
            assert returned[lane] == cells[at] & mask, lane
        cells[at] = cells[at] & ~mask | update(cells[at] & mask, data[lane], second[lane], bits) & mask
    after = machine.lds[: 8 * MEETING].view(np.uint64) if name.startswith("ds") else storage
    assert after.tolist() == cells


COMPARES = [f"{kind}_atomic_cmpswap{wide}" for kind in ("global", "flat", "buffer") for wide in ("", "_x2")]


@holds_each("name", COMPARES)
def test_compare_and_swap_takes_the_new_value_first(name: str, arch: str) -> None:
    bits = 64 if name.endswith("x2") else 32
    machine = Machine(arch)
    storage = np.arange(64, dtype=np.uint64) << np.uint64(32 if bits == 64 else 0)
    base = storage.ctypes.data
    machine.set_row64(0, [base + 8 * lane for lane in range(64)])
    machine.v[2] = LANE * 8
    machine.s[8:12] = [base & 0xFFFFFFFF, base >> 32, 512, 0x00027000]
    new = [1000 + lane for lane in range(64)]
    expected = [(lane & ~1) << (32 if bits == 64 else 0) for lane in range(64)]
    put(machine, 4, new, bits)
    put(machine, 4 + bits // 32, expected, bits)
    machine.v[20:24] = machine.v[4:8]
    wide = bits // 16
    if name.startswith("buffer"):
        machine.run(f"{name} v[20:{19 + wide}], v2, s[8:11], 0 offen sc0")
    else:
        off = ", off" if name.startswith("global") else ""
        machine.run(f"{name} {pair(20, bits)}, v[0:1], v[4:{3 + wide}]{off} sc0")
    for lane in range(64):
        old = lane << (32 if bits == 64 else 0)
        assert get(machine, 20, bits)[lane] == old
        assert int(storage[lane]) == (old if lane & 1 else 1000 + lane)


LDS_COMPARES = [f"ds_cmpst{rtn}_{kind}" for rtn in ("", "_rtn") for kind in ("b32", "b64", "f32", "f64")]


@holds_each("name", LDS_COMPARES)
def test_lds_compare_and_store_takes_the_compared_value_first(name: str, arch: str) -> None:
    bits = int(name[-2:])
    machine = Machine(arch)
    machine.v[2] = LANE * 8
    zero, minus_zero, one = 0, 1 << bits - 1, 0x3FF << 52 if bits == 64 else 0x3F800000
    stored = [zero, minus_zero, one, 3][:4] * 16
    compared = [minus_zero if lane % 8 < 4 else one for lane in range(64)]
    machine.lds[:512] = np.array(stored, np.uint64).view(np.uint8)
    put(machine, 4, compared, bits)
    put(machine, 6, [900 + lane for lane in range(64)], bits)
    machine.run(f"{name} {pair(20, bits) + ', ' if 'rtn' in name else ''}v2, {pair(4, bits)}, {pair(6, bits)}")
    for lane, (old, want) in enumerate(zip(stored, compared, strict=True)):
        same = old == want or (name[-3] == "f" and {old, want} == {zero, minus_zero})
        assert int(machine.lds[:512].view(np.uint64)[lane]) == (900 + lane if same else old), lane
        if "rtn" in name:
            assert get(machine, 20, bits)[lane] == old


@holds_each("bits, stride", [(32, 1), (32, 64), (64, 1), (64, 64)],
            lambda bits, stride: [f"ds_wrxchg2{'st64' if stride == 64 else ''}_rtn_b{bits}"])  # fmt: skip
def test_exchange_of_two_places(bits: int, stride: int, arch: str) -> None:
    machine = Machine(arch)
    size = bits // 8
    rng = np.random.default_rng(7)
    machine.lds[:] = rng.integers(0, 256, machine.lds.size, dtype=np.uint8)
    before = machine.lds.copy()
    machine.v[2] = LANE * 4 * size
    put(machine, 4, [1000 + lane for lane in range(64)], bits)
    put(machine, 6, [2000 + lane for lane in range(64)], bits)
    suffix = "st64" if stride == 64 else ""
    last = 20 + bits // 16 - 1
    machine.run(
        f"ds_wrxchg2{suffix}_rtn_b{bits} v[20:{last}], v2, {pair(4, bits)}, {pair(6, bits)} offset0:1 offset1:3"
    )
    for lane in range(64):
        for place, data, register in ((1, 1000, 20), (3, 2000, 20 + bits // 32)):
            at = lane * 4 * size + place * stride * size
            if stride == 1:  # lanes do not share places
                assert get(machine, register, bits)[lane] == int.from_bytes(before[at : at + size].tobytes(), "little")
                assert int.from_bytes(machine.lds[at : at + size].tobytes(), "little") == data + lane
    if stride == 64:
        first = 64 * size
        assert get(machine, 20, bits)[0] == int.from_bytes(before[first : first + size].tobytes(), "little")
        assert int.from_bytes(machine.lds[first : first + size].tobytes(), "little") == 1000


@holds("ds_append", "ds_consume")
def test_append_and_consume_move_a_counter_by_the_active_lanes(arch: str) -> None:
    machine = Machine(arch)
    machine.s[M0] = 0x0040_0000
    machine.lds[0x48:0x4C] = [10, 0, 0, 0]
    machine.set64(EXEC, 0xFF)
    machine.run("ds_append v20 offset:8")
    assert machine.v[20][:9].tolist() == [10] * 8 + [0]
    assert machine.lds[0x48] == 18
    machine.run("ds_consume v20 offset:8")
    assert machine.v[20][0] == 18
    assert machine.lds[0x48] == 10


SCALAR = [f"s_{kind}atomic_{name}{wide}" for kind in ("", "buffer_") for name in GLOBAL for wide in ("", "_x2")]


@holds_each("name", SCALAR)
def test_scalar_atomics(name: str, arch: str) -> None:
    bits = 64 if name.endswith("_x2") else 32
    update = INTEGERS[name.removesuffix("_x2").split("_")[-1]]
    rng = np.random.default_rng(9)
    machine = Machine(arch)
    register = "s[20:21]" if bits == 64 else "s20"
    base = "s[4:7]" if "buffer" in name else "s[4:5]"  # a descriptor of 16 bytes begins with their address
    machine.s[6] = 16
    for old, x in zip(values(name, bits, 40, rng), values(name, bits, 40, rng), strict=True):
        cell = np.array([0, old], np.uint64)
        machine.set64(4, int(cell.ctypes.data))
        machine.set64(20, x)
        machine.run(f"{name} {register}, {base}, 0x8 glc")
        assert machine.get64(20) & 2**bits - 1 == old
        assert int(cell[1]) == update(old, x, 0, bits) & 2**bits - 1, (old, x)


@holds("s_atomic_cmpswap", "s_atomic_cmpswap_x2")
def test_scalar_compare_and_swap(arch: str) -> None:
    machine = Machine(arch)
    for bits in (32, 64):
        for old in (5, 6):
            cell = np.array([old], np.uint64)
            machine.set64(4, int(cell.ctypes.data))
            if bits == 64:
                machine.set64(20, 99)
                machine.set64(22, 5)
                machine.run("s_atomic_cmpswap_x2 s[20:23], s[4:5], 0x0 glc")
            else:
                machine.s[20:22] = [99, 5]
                machine.run("s_atomic_cmpswap s[20:21], s[4:5], 0x0 glc")
            assert machine.s[20] == old
            assert int(cell[0]) == (99 if old == 5 else old)


@holds("global_atomic_add")
def test_without_sc0_nothing_is_returned_and_misaligned_is_a_fault(arch: str) -> None:
    machine = Machine(arch)
    cell = np.zeros(2, np.uint32)
    machine.set_row64(0, [int(cell.ctypes.data)] * 64)
    machine.v[4], machine.v[20] = 1, 7
    machine.run("global_atomic_add v[0:1], v4, off")
    assert cell.tolist() == [64, 0]
    assert set(machine.v[20].tolist()) == {7}
    machine.set_row64(0, [int(cell.ctypes.data) + 2] * 64)
    with pytest.raises(RuntimeError, match="misaligned atomic"):
        machine.run("global_atomic_add v[0:1], v4, off")
