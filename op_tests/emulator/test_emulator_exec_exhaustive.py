"""Conversions from 16 bits over all 65,536 inputs, 64 registers at a time."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.exec_one import Machine, signed
from helpers.exec_registry import holds_each
from helpers.small_float_reference import encode, same_codes, small, wide_codes, wide_values

ALL_CODES = np.arange(1 << 16, dtype=np.uint32)
BLOCK = 64 * 64


def run_all(arch: str, text: str, inputs: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """The results of one instruction, with {d} and {a} for its registers and v200 for its scale, on every input."""
    machine = Machine(arch)
    machine.v[200] = np.float32(scale).view(np.uint32)
    body = "\n".join(text.format(d=f"v{64 + row}", a=f"v{row}") for row in range(64))
    results = []
    for start in range(0, len(inputs), BLOCK):
        machine.v[:64] = inputs[start : start + BLOCK].reshape(64, 64)
        machine.v[64:128] = 0
        results.append(machine.run(body).v[64:128].reshape(-1).copy())
    return np.concatenate(results)


def integers(values: np.ndarray, low: int, high: int) -> np.ndarray:
    """Toward zero, at the ends of the range beyond it, 0 for NaN."""
    return np.clip(np.trunc(np.nan_to_num(values, nan=0.0, posinf=1e9, neginf=-1e9)), low, high).astype(np.int64)


@holds_each("name", ["v_cvt_f32_f16", "v_cvt_u16_f16", "v_cvt_i16_f16", "v_cvt_f16_u16", "v_cvt_f16_i16"])
def test_half_conversions(name: str, arch: str) -> None:
    got = run_all(arch, f"{name} {{d}}, {{a}}", ALL_CODES)
    values = wide_values("f16", ALL_CODES)
    if name == "v_cvt_f32_f16":
        nan = np.isnan(values)
        np.testing.assert_array_equal(got[~nan], values[~nan].astype(np.float32).view(np.uint32))
        assert np.isnan(got[nan].view(np.float32)).all()
    elif name.endswith("_f16"):
        low, high = (0, 2**16 - 1) if "u16" in name else (-(2**15), 2**15 - 1)
        np.testing.assert_array_equal(got & 0xFFFF, integers(values, low, high) & 0xFFFF)
    else:
        numbers = np.array([signed(x, 16) if "i16" in name else x for x in range(1 << 16)], np.float64)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got & 0xFFFF, numbers.astype(np.float16).view(np.uint16))


@holds_each("name", ["v_cvt_f32_bf16"])
def test_bf16_widens_exactly(name: str, arch: str) -> None:
    got = run_all(arch, f"{name} {{d}}, {{a}}", ALL_CODES)
    nan = (ALL_CODES & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(got[~nan], ALL_CODES[~nan] << 16)
    assert np.isnan(got[nan].view(np.float32)).all()


FORMATS = [(small_name, kind) for small_name in ("fp8", "bf8", "fp4") for kind in ("f16", "bf16")]


@pytest.mark.parametrize("scale", [1.0, 0.25, 64.0])
@holds_each("target, kind", FORMATS, lambda target, kind: [f"v_cvt_scalef32_pk_{target}_{kind}"])
def test_scaled_rounding_to_small_floats(target: str, kind: str, scale: float, arch: str) -> None:
    fmt = small(target)
    reversed_codes = ALL_CODES[::-1]
    inputs = ALL_CODES | reversed_codes << 16
    got = run_all(arch, f"v_cvt_scalef32_pk_{target}_{kind} {{d}}, {{a}}, v200", inputs, scale)
    for place, codes in enumerate((ALL_CODES, reversed_codes)):
        values = wide_values(kind, codes)
        number = ~np.isnan(values)
        found = got >> np.uint32(fmt.bits * place) & np.uint32((1 << fmt.bits) - 1)
        want = encode(fmt, values[number] / scale, False)
        assert same_codes(found[number], want, fmt)
        if fmt.bits == 8:
            assert np.isnan(fmt.values[found[~number]]).all()


@holds_each("name", ["v_cvt_f16_f32"])
def test_every_half_and_the_ties_between_them_round_to_even(name: str, arch: str) -> None:
    """Every half as f32, the midpoint above it, and the f32 next to that midpoint on either side."""
    halves = wide_values("f16", ALL_CODES)
    finite = np.isfinite(halves)
    below = halves[finite].astype(np.float32)
    with np.errstate(over="ignore"):  # above the largest half is infinity
        step = np.spacing(halves[finite].astype(np.float16)).astype(np.float64)
    middle = (halves[finite] + step / 2).astype(np.float32)
    inputs = np.concatenate([below, middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)])
    padded = np.concatenate([inputs, np.zeros(-len(inputs) % BLOCK, np.float32)])
    got = run_all(arch, f"{name} {{d}}, {{a}}", padded.view(np.uint32))[: len(inputs)]
    np.testing.assert_array_equal(got & 0xFFFF, wide_codes("f16", inputs.astype(np.float64)))
