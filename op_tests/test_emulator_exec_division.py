"""The steps of IEEE division: each alone, and the sequence that compilers emit."""

from __future__ import annotations

import pytest
from exec_one import INTERESTING_16, Machine, cases, from_fraction, is_infinite, is_nan, to_fraction
from exec_registry import holds_each
from float_reference import INFINITY, INTERESTING, load, register, sign


@holds_each("bits", [32, 64], lambda bits: [f"v_div_{step}_f{bits}" for step in ("scale", "fmas", "fixup")])
def test_the_division_sequence_gives_the_rounded_quotient(bits: int, arch: str) -> None:
    """The instructions a compiler emits for IEEE division, on operands whose scaling all differs."""
    d, n = register(0, bits), register(2, bits)
    wide = "f64" if bits == 64 else "f32"
    text = f"""
      v_div_scale_{wide} v[4:5], s[20:21], {d}, {d}, {n}
      v_div_scale_{wide} v[6:7], vcc, {n}, {d}, {n}
      v_rcp_{wide} v[8:9], v[4:5]
      v_fma_{wide} v[10:11], -v[4:5], v[8:9], 1.0
      v_fma_{wide} v[8:9], v[10:11], v[8:9], v[8:9]
      v_mul_{wide} v[10:11], v[6:7], v[8:9]
      v_fma_{wide} v[12:13], -v[4:5], v[10:11], v[6:7]
      v_fma_{wide} v[10:11], v[12:13], v[8:9], v[10:11]
      v_fma_{wide} v[12:13], -v[4:5], v[10:11], v[6:7]
      v_div_fmas_{wide} v[10:11], v[12:13], v[8:9], v[10:11]
      v_div_fixup_{wide} v[10:11], v[10:11], {d}, {n}"""
    if bits == 32:
        for pair in range(4, 14, 2):
            text = text.replace(f"v[{pair}:{pair + 1}]", f"v{pair}")
    machine = Machine(arch)
    for rows in cases(INTERESTING[bits], bits, 2, 11, rounds=30):
        for i in (0, 1):
            if bits == 64:
                machine.set_row64(2 * i, rows[i])
            else:
                machine.v[2 * i] = rows[i]
        machine.run(text)
        got = machine.row64(10) if bits == 64 else machine.v[10].tolist()
        for lane, (a, b) in enumerate(zip(*rows, strict=True)):  # b / a
            negative = sign(a, bits) ^ sign(b, bits)
            zero_a, zero_b = (not x & (1 << bits - 1) - 1 for x in (a, b))
            if (
                is_nan(a, bits)
                or is_nan(b, bits)
                or (zero_a and zero_b)
                or (is_infinite(a, bits) and is_infinite(b, bits))
            ):
                assert is_nan(got[lane], bits), (hex(b), hex(a))
                continue
            if zero_a or is_infinite(b, bits):
                want = INFINITY[bits] | negative << bits - 1
            elif zero_b or is_infinite(a, bits):
                want = negative << bits - 1
            else:
                want = from_fraction(to_fraction(b, bits) / to_fraction(a, bits), bits, bool(negative))
                want |= negative << bits - 1
            assert got[lane] == want, f"{b:#x} / {a:#x}: {got[lane]:#x}, expected {want:#x}"


@pytest.mark.parametrize("name", ["v_div_fixup_f16", "v_div_fixup_legacy_f16"])
def test_division_fixup_replaces_special_quotients(name: str) -> None:
    machine = Machine()
    for rows in cases(INTERESTING_16, 16, 3, 15, rounds=2):
        load(machine, rows, 16)
        machine.run(f"{name} v10, v0, v2, v4")
        for lane, (quotient, below, above) in enumerate(zip(*rows, strict=True)):
            zeros = [not x & 0x7FFF for x in (below, above)]
            infinite = [is_infinite(x, 16) for x in (below, above)]
            negative = (below ^ above) & 0x8000
            if is_nan(below, 16) or is_nan(above, 16) or all(zeros) or all(infinite):
                want = -1
            elif zeros[0] or infinite[1]:
                want = INFINITY[16] | negative
            elif zeros[1] or infinite[0]:
                want = negative
            elif is_nan(quotient, 16):
                continue  # dividing finite numbers through f32 gives none, so that no program depends on it
            else:
                want = quotient & 0x7FFF | negative
            got = int(machine.v[10][lane]) & 0xFFFF
            assert is_nan(got, 16) if want == -1 else got == want, (hex(quotient), hex(below), hex(above), hex(got))
