"""Typed buffer accesses: every data and number format against exact arithmetic, DST_SEL, d16, ranges, refusals."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from helpers.exec_one import Machine, from_fraction, signed, to_fraction
from helpers.exec_registry import ARCHS, holds, holds_each

UNORM, SNORM, USCALED, SSCALED, UINT, SINT, FLOAT = 0, 1, 2, 3, 4, 5, 7
# data format -> bits of its components, low ones first
FORMATS = {1: (8,), 2: (16,), 3: (8, 8), 4: (32,), 5: (16, 16), 6: (11, 11, 10), 7: (10, 11, 11), 8: (2, 10, 10, 10),
           9: (10, 10, 10, 2), 10: (8, 8, 8, 8), 11: (32, 32), 12: (16, 16, 16, 16), 13: (32, 32, 32),
           14: (32, 32, 32, 32)}  # fmt: skip
IDENTITY = 4 | 5 << 3 | 6 << 6 | 7 << 9
SUFFIX = ("x", "xy", "xyz", "xyzw")
ONE = 0x3F800000


def supported(data: int, number: int) -> bool:
    """Return whether the ISA's tables have the combination."""
    bits = FORMATS[data]
    if data in (6, 7):
        return number == FLOAT
    if bits[0] == 32:
        return number in (UINT, SINT, FLOAT)
    if number == FLOAT:
        return bits[0] == 16
    return True


CASES = [(data, number) for data in FORMATS for number in (0, 1, 2, 3, 4, 5, 7) if supported(data, number)]


def loaded(code: int, bits: int, number: int) -> int:
    """Return the register that a component's code becomes."""
    top, half = (1 << bits) - 1, (1 << bits - 1) - 1
    if number == UNORM:
        return from_fraction(Fraction(code, top), 32)
    if number == SNORM:
        return from_fraction(max(Fraction(signed(code, bits), half), Fraction(-1)), 32)
    if number in (USCALED, SSCALED):
        return from_fraction(Fraction(signed(code, bits) if number == SSCALED else code), 32)
    if number in (UINT, SINT):
        return (signed(code, bits) if number == SINT else code) & 0xFFFFFFFF
    if bits == 32:
        return code
    if bits == 16:
        single = int(np.array([code], np.uint16).view(np.float16).astype(np.float32).view(np.uint32)[0])
        return single | 1 << 22 if code & 0x7C00 == 0x7C00 and code & 0x3FF else single  # a NaN is made quiet
    mantissa = bits - 5
    exponent, fraction = code >> mantissa, code & (1 << mantissa) - 1
    if exponent == 31:
        return 0x7F800000 | fraction << 23 - mantissa | (1 << 22 if fraction else 0)
    significand = Fraction(fraction + ((1 << mantissa) if exponent else 0), 1 << mantissa)
    return from_fraction(significand * Fraction(2) ** (max(exponent, 1) - 15), 32)


class Buffer:
    """A typed buffer of 64 elements; lane i reads element i through v0."""

    def __init__(self, data: int, number: int, select: int = IDENTITY, seed: int = 1) -> None:
        self.bits = FORMATS.get(data, (32,))
        self.size = sum(self.bits) // 8
        rng = np.random.default_rng(seed)
        self.bytes = rng.integers(0, 256, 64 * self.size, dtype=np.uint8)
        self.bytes[: 2 * self.size] = np.repeat(np.array([0, 255], np.uint8), self.size)
        base = int(self.bytes.ctypes.data)
        self.machine = Machine()
        self.machine.s[8:12] = [base & 0xFFFFFFFF, base >> 32, 64 * self.size, select | number << 12 | data << 15]
        self.machine.v[0] = np.arange(64) * self.size

    def codes(self, lane: int) -> list[int]:
        element = int.from_bytes(self.bytes[lane * self.size : (lane + 1) * self.size].tobytes(), "little")
        at = np.cumsum((0, *self.bits))
        return [element >> int(at[i]) & (1 << bits) - 1 for i, bits in enumerate(self.bits)]


@holds("buffer_load_format_x", "buffer_load_format_xyzw")
@pytest.mark.parametrize(("data", "number"), CASES)
def test_loads_convert_every_component(arch: str, data: int, number: int) -> None:
    buffer = Buffer(data, number)
    machine = buffer.machine
    machine.run(
        "buffer_load_format_xyzw v[4:7], v0, s[8:11], 0 offen\nbuffer_load_format_x v8, v0, s[8:11], 0 offen", arch
    )
    one = 1 if number in (UINT, SINT) else ONE
    for lane in range(64):
        want = [loaded(code, bits, number) for code, bits in zip(buffer.codes(lane), buffer.bits, strict=True)]
        want += [0, 0, 0, one][len(want) :]
        assert machine.v[4:8, lane].tolist() == want
        assert machine.v[8, lane] == want[0]


def round_trip(data: int, number: int) -> list[str]:
    """Name the load and the store of just the components that a format has."""
    suffix = SUFFIX[len(FORMATS[data]) - 1]
    return [f"buffer_load_format_{suffix}", f"buffer_store_format_{suffix}"]


@holds_each("data, number", CASES, round_trip)
def test_stores_write_what_loads_read(arch: str, data: int, number: int) -> None:
    """Every loaded element is a value of its format, so storing it again gives its own bytes back (NaNs made quiet)."""
    buffer = Buffer(data, number, seed=2)
    if number == SNORM:  # the two lowest codes are both -1; the lowest one does not come back
        element_codes = [
            [code + (code == 1 << bits - 1) for code, bits in zip(buffer.codes(lane), buffer.bits, strict=True)]
            for lane in range(64)
        ]
        for lane, codes in enumerate(element_codes):
            at, element = 0, 0
            for code, bits in zip(codes, buffer.bits, strict=True):
                element |= code << at
                at += bits
            buffer.bytes[lane * buffer.size : (lane + 1) * buffer.size] = list(element.to_bytes(buffer.size, "little"))
    components = len(buffer.bits)
    suffix, data_registers = SUFFIX[components - 1], "v4" if components == 1 else f"v[4:{3 + components}]"
    machine = buffer.machine
    machine.run(f"buffer_load_format_{suffix} {data_registers}, v0, s[8:11], 0 offen", arch)
    before = [buffer.codes(lane) for lane in range(64)]
    buffer.bytes[:] = 0xAA
    machine.run(f"buffer_store_format_{suffix} {data_registers}, v0, s[8:11], 0 offen", arch)
    for lane in range(64):
        for code, again, bits in zip(before[lane], buffer.codes(lane), buffer.bits, strict=True):
            nan = number == FLOAT and bits < 32 and code >> (bits - 5 - (bits == 16)) & 31 == 31
            assert again == code or nan


@pytest.mark.parametrize("arch", ARCHS)
def test_stores_round_and_clamp(arch: str) -> None:
    buffer = Buffer(10, UNORM)
    values = np.array([0.5 / 255, 1.5 / 255, 2.0, -1.0], np.float32)
    buffer.machine.v[4:8] = values.view(np.uint32)[:, None]
    buffer.machine.run("buffer_store_format_xyzw v[4:7], v0, s[8:11], 0 offen", arch)
    exact = [round(min(max(to_fraction(int(v), 32), Fraction(0)), Fraction(1)) * 255) for v in values.view(np.uint32)]
    assert buffer.bytes[:4].tolist() == exact


@pytest.mark.parametrize("arch", ARCHS)
def test_dst_sel_reorders_and_makes_constants(arch: str) -> None:
    buffer = Buffer(10, UINT, select=7 | 1 << 3 | 4 << 6 | 0 << 9)
    buffer.machine.v[0][63] = 64 * buffer.size  # out of range: zeros, but a one where DST_SEL says so
    buffer.machine.run("buffer_load_format_xyzw v[4:7], v0, s[8:11], 0 offen", arch)
    for lane in range(63):
        codes = buffer.codes(lane)
        assert buffer.machine.v[4:8, lane].tolist() == [codes[3], 1, codes[0], 0]
    assert buffer.machine.v[4:8, 63].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("arch", ARCHS)
def test_an_element_is_in_range_as_a_whole(arch: str) -> None:
    buffer = Buffer(11, UINT)
    buffer.machine.s[10] = 64 * buffer.size - 4
    buffer.machine.v[4:6] = 5
    where = "v0, s[8:11], 0 offen"
    buffer.machine.run(f"buffer_store_format_xy v[4:5], {where}\nbuffer_load_format_xy v[6:7], {where}", arch)
    assert set(buffer.bytes[: 63 * 8].view(np.uint32).tolist()) == {5}
    assert 5 not in buffer.bytes[63 * 8 :].view(np.uint32)
    assert buffer.machine.v[6:8, 63].tolist() == [0, 0]


@holds(*(f"buffer_load_format_d16_{suffix}" for suffix in ("x", "hi_x", "xy", "xyz", "xyzw")))
@pytest.mark.parametrize(("data", "number"), [(12, FLOAT), (10, UNORM), (10, SNORM), (12, UINT), (12, SINT)])
def test_d16_packs_two_components_to_a_register(arch: str, data: int, number: int) -> None:
    buffer = Buffer(data, number, seed=4)
    machine = buffer.machine
    machine.v[4:20] = 0x12345678
    loads = {"xyzw": "v[4:5]", "x": "v6", "hi_x": "v7", "xyz": "v[8:9]", "xy": "v10"}
    machine.run("\n".join(f"buffer_load_format_d16_{s} {r}, v0, s[8:11], 0 offen" for s, r in loads.items()), arch)
    for lane in range(64):
        wide = [loaded(code, bits, number) for code, bits in zip(buffer.codes(lane), buffer.bits, strict=True)]
        if number in (UINT, SINT):
            want = [x & 0xFFFF for x in wide]
        else:
            want = np.array(wide, np.uint32).view(np.float32).astype(np.float16).view(np.uint16).tolist()
            if data == 12:
                codes = buffer.codes(lane)
                want = [c | 0x200 if c & 0x7C00 == 0x7C00 and c & 0x3FF else c for c in codes]
        assert machine.v[4, lane] == want[0] | want[1] << 16
        assert machine.v[5, lane] == want[2] | want[3] << 16
        assert (machine.v[6, lane], machine.v[7, lane]) == (0x12340000 | want[0], want[0] << 16 | 0x5678)
        assert (machine.v[8, lane], machine.v[9, lane] & 0xFFFF, machine.v[10, lane]) == (
            want[0] | want[1] << 16, want[2], want[0] | want[1] << 16,
        )  # fmt: skip


# A mnemonic's suffix and a format whose elements f16 or 16-bit integers hold exactly.
NARROW = [("x", 2, UINT), ("x", 2, SINT), ("hi_x", 2, FLOAT), ("xy", 5, UINT), ("xy", 3, UNORM), ("xyz", 6, FLOAT),
          ("xyz", 7, FLOAT), ("xyzw", 12, SINT), ("xyzw", 12, FLOAT), ("xyzw", 10, UNORM)]  # fmt: skip


def narrow_names(suffix: str, *_: int) -> list[str]:
    return [f"buffer_{way}_format_d16_{suffix}" for way in ("load", "store")]


@holds_each("suffix, data, number", NARROW, narrow_names)
def test_d16_stores_write_what_d16_loads_read(arch: str, suffix: str, data: int, number: int) -> None:
    buffer = Buffer(data, number, seed=6)
    before = [buffer.codes(lane) for lane in range(64)]
    registers = "v[4:5]" if len(suffix) > 2 and suffix != "hi_x" else "v4"
    load, store = (f"{name} {registers}, v0, s[8:11], 0 offen" for name in narrow_names(suffix))
    buffer.machine.run(load, arch)
    buffer.bytes[:] = 0xAA
    buffer.machine.run(store, arch)
    for lane in range(64):
        for code, again, bits in zip(before[lane], buffer.codes(lane), buffer.bits, strict=True):
            nan = number == FLOAT and code >> (bits - 5 - (bits == 16)) & 31 == 31
            assert again == code or nan


@pytest.mark.parametrize("arch", ARCHS)
def test_what_no_table_has_is_refused(arch: str) -> None:
    unknown = [(0, UINT, "data format 0"), (15, UINT, "data format 15"), (1, FLOAT, "number format 7"),
               (4, UNORM, "number format 0"), (2, 6, "number format 6"), (6, UINT, "data format 6")]  # fmt: skip
    for data, number, why in unknown:
        with pytest.raises(RuntimeError, match=why):
            Buffer(data, number).machine.run("buffer_load_format_x v4, v0, s[8:11], 0 offen", arch)
    with pytest.raises(RuntimeError, match="DST_SEL 2"):
        Buffer(10, UINT, select=2).machine.run("buffer_load_format_x v4, v0, s[8:11], 0 offen", arch)
    with pytest.raises(RuntimeError, match="1 of the 4 components"):
        Buffer(10, UINT).machine.run("buffer_store_format_x v4, v0, s[8:11], 0 offen", arch)
    with pytest.raises(RuntimeError, match="through DST_SEL"):
        Buffer(3, UINT, select=5 | 4 << 3).machine.run("buffer_store_format_xy v[4:5], v0, s[8:11], 0 offen", arch)
    big = Buffer(1, UINT)
    big.machine.v[4] = 256
    with pytest.raises(RuntimeError, match="8 bits cannot hold"):
        big.machine.run("buffer_store_format_x v4, v0, s[8:11], 0 offen", arch)
    wide = Buffer(4, UINT)
    with pytest.raises(RuntimeError, match="16 bits cannot hold"):
        wide.machine.run("buffer_load_format_d16_x v4, v0, s[8:11], 0 offen", arch)
    odd = Buffer(4, UINT)
    odd.machine.v[0] += 2
    with pytest.raises(RuntimeError, match="misaligned typed access"):
        odd.machine.run("buffer_load_format_x v4, v0, s[8:11], 0 offen", arch)
