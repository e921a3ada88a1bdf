"""Operand stages of the emulator: neg, abs, clamp, omod, op_sel, SDWA, DPP, EXEC, and lanes that trade places."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import hip_compile
from helpers.exec_one import ACC, EXEC, M0, MODE_IEEE, VCC, Machine
from helpers.exec_registry import holds, on_each_arch

from hipforge import emulator

LANE = np.arange(64, dtype=np.uint32)
M32 = 2**32 - 1
M64 = 2**64 - 1


def floats(values: list[float] | np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def as_float(machine: Machine, register: int = 10) -> np.ndarray:
    return machine.v[register].view(np.float32)


@pytest.fixture
def machine(arch: str) -> Machine:
    fresh = Machine(arch)
    rng = np.random.default_rng(1)
    fresh.v[:20] = rng.integers(0, 2**32, (20, 64), dtype=np.uint32)
    fresh.v[30] = floats(np.linspace(-3, 3, 64))
    fresh.v[31] = floats(np.linspace(5, -5, 64))
    return fresh


@holds("v_cndmask_b32")
def test_negation_and_magnitude_of_sources(machine: Machine, arch: str) -> None:
    a, b = as_float(machine, 30).copy(), as_float(machine, 31).copy()
    machine.run("v_add_f32 v10, -v30, |v31|")
    np.testing.assert_array_equal(as_float(machine), -a + abs(b))
    machine.run("v_mul_f32 v10, -|v30|, v31")
    np.testing.assert_array_equal(as_float(machine), -abs(a) * b)
    machine.run("v_cndmask_b32 v10, -v30, |v31|, exec")
    np.testing.assert_array_equal(as_float(machine), abs(b))


@holds("v_cndmask_b32")
def test_masks_that_begin_anywhere_choose_lane_by_lane(machine: Machine, arch: str) -> None:
    random = np.random.default_rng(2).integers(0, 2**64, 32, dtype=np.uint64).tolist()
    for mask in [M64 << shift & M64 for shift in range(65)] + [M64 >> shift for shift in range(65)] + random:
        set_lanes = np.array([mask >> lane & 1 for lane in range(64)], bool)
        machine.set64(VCC, mask)
        machine.run("v_cndmask_b32 v10, v30, v31, vcc")
        np.testing.assert_array_equal(machine.v[10], np.where(set_lanes, machine.v[31], machine.v[30]))
        old = machine.v[11].copy()
        machine.set64(EXEC, mask)
        machine.run("v_mov_b32 v11, v31")
        machine.set64(EXEC, M64)
        np.testing.assert_array_equal(machine.v[11], np.where(set_lanes, machine.v[31], old))


@on_each_arch
def test_clamp_to_the_unit_interval_makes_nan_zero(machine: Machine, arch: str) -> None:
    machine.v[30] = floats(np.linspace(-2, 2, 64))
    machine.v[30][0] = 0x7FC00000
    machine.run("v_mul_f32 v10, 1.0, v30 clamp")
    want = np.clip(np.linspace(-2, 2, 64).astype(np.float32), 0, 1)
    want[0] = 0
    np.testing.assert_array_equal(as_float(machine), want)


@pytest.mark.parametrize(("text", "factor"), [("mul:2", 2), ("mul:4", 4), ("div:2", 0.5)])
@on_each_arch
def test_output_multiplier_works_only_where_denormals_are_flushed(
    machine: Machine, arch: str, text: str, factor: float
) -> None:
    a = as_float(machine, 30).copy()
    machine.run(f"v_add_f32 v10, 1.0, v30 {text}")
    np.testing.assert_array_equal(as_float(machine), a + 1)
    machine.mode = 0x1C0  # f32 denormals flushed, no IEEE mode
    machine.run(f"v_add_f32 v10, 1.0, v30 {text}")
    np.testing.assert_array_equal(as_float(machine), (a + 1) * np.float32(factor))
    assert not machine.mode & MODE_IEEE


@on_each_arch
def test_inactive_lanes_keep_their_value(machine: Machine, arch: str) -> None:
    mask = 0x0F0F_F0F0_00FF_FF00
    machine.set64(EXEC, mask)
    before = machine.v[10].copy()
    machine.run("v_add_u32 v10, v0, v1")
    active = np.array([bool(mask >> lane & 1) for lane in range(64)])
    np.testing.assert_array_equal(machine.v[10], np.where(active, machine.v[0] + machine.v[1], before))


@on_each_arch
def test_vcc_source_is_read_before_the_compare_writes_it(machine: Machine, arch: str) -> None:
    machine.set64(VCC, 0x5)
    machine.run("v_cmp_eq_u32_e64 vcc, vcc_lo, 5")
    assert machine.get64(VCC) == 2**64 - 1


@on_each_arch
def test_op_sel_reads_and_writes_halves(machine: Machine, arch: str) -> None:
    a, b, old = machine.v[0].copy(), machine.v[1].copy(), machine.v[10].copy()
    machine.run("v_add_i16 v10, v0, v1 op_sel:[1,0,0]")
    np.testing.assert_array_equal(machine.v[10], old & 0xFFFF0000 | (a >> 16) + b & 0xFFFF)
    machine.v[10] = old
    machine.run("v_add_i16 v10, v0, v1 op_sel:[0,1,1]")
    np.testing.assert_array_equal(machine.v[10], old & 0xFFFF | ((a + (b >> 16) & 0xFFFF) << 16))
    machine.run("v_pk_add_u16 v10, v0, v1 op_sel:[1,0] op_sel_hi:[0,1]")
    np.testing.assert_array_equal(machine.v[10], (a >> 16) + b & 0xFFFF | (((a & 0xFFFF) + (b >> 16) & 0xFFFF) << 16))


SELECTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "BYTE_0": lambda x: x & 0xFF,
    "BYTE_1": lambda x: x >> 8 & 0xFF,
    "BYTE_2": lambda x: x >> 16 & 0xFF,
    "BYTE_3": lambda x: x >> 24,
    "WORD_0": lambda x: x & 0xFFFF,
    "WORD_1": lambda x: x >> 16,
    "DWORD": lambda x: x,
}
FIELDS = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
}


@pytest.mark.parametrize("select", SELECTS)
@on_each_arch
def test_sdwa_sources(machine: Machine, arch: str, select: str) -> None:
    machine.run(f"v_add_u32_sdwa v10, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{select} src1_sel:DWORD")
    np.testing.assert_array_equal(machine.v[10], SELECTS[select](machine.v[0]) + machine.v[1])
    if select == "DWORD":
        return
    bits = FIELDS[select][1]
    machine.run(
        f"v_add_u32_sdwa v10, sext(v0), v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{select} src1_sel:DWORD"
    )
    shift = np.uint32(32 - bits)
    extended = ((SELECTS[select](machine.v[0]) << shift).view(np.int32) >> shift.astype(np.int32)).view(np.uint32)
    np.testing.assert_array_equal(machine.v[10], extended + machine.v[1])


@pytest.mark.parametrize("select", FIELDS)
@on_each_arch
def test_sdwa_destinations(machine: Machine, arch: str, select: str) -> None:
    low, width = FIELDS[select]
    old = machine.v[10].copy()
    field = np.uint32((1 << width) - 1)
    part = (machine.v[0] + machine.v[1]) & field
    sources = "src0_sel:DWORD src1_sel:DWORD"
    machine.run(f"v_add_u32_sdwa v10, v0, v1 dst_sel:{select} dst_unused:UNUSED_PRESERVE {sources}")
    np.testing.assert_array_equal(machine.v[10], old & ~(field << np.uint32(low)) | part << np.uint32(low))
    machine.run(f"v_add_u32_sdwa v10, v0, v1 dst_sel:{select} dst_unused:UNUSED_PAD {sources}")
    np.testing.assert_array_equal(machine.v[10], part << np.uint32(low))
    machine.run(f"v_add_u32_sdwa v10, v0, v1 dst_sel:{select} dst_unused:UNUSED_SEXT {sources}")
    above = 32 - low - width
    want = part << np.uint32(low)
    if above:
        sign = (part >> np.uint32(width - 1) & 1).astype(bool)
        want = np.where(sign, want | np.uint32(M32 << (low + width) & M32), want)
    np.testing.assert_array_equal(machine.v[10], want)


@on_each_arch
def test_sdwa_compare_and_float_modifiers(machine: Machine, arch: str) -> None:
    machine.run("v_cmp_eq_u16_sdwa vcc, v0, v0 src0_sel:BYTE_1 src1_sel:BYTE_1")
    assert machine.get64(VCC) == 2**64 - 1
    machine.run("v_add_f32_sdwa v10, -v30, |v31| dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD")
    np.testing.assert_array_equal(as_float(machine), -as_float(machine, 30) + abs(as_float(machine, 31)))


# control: lane -> source lane, None outside
DPP: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[3,1,0,2]": lambda lane: lane & ~3 | (3, 1, 0, 2)[lane & 3],
    "row_shl:3": lambda lane: lane + 3 if lane % 16 < 13 else None,
    "row_shr:5": lambda lane: lane - 5 if lane % 16 >= 5 else None,
    "row_ror:4": lambda lane: lane & ~15 | (lane - 4) % 16,
    "wave_shl:1": lambda lane: lane + 1 if lane < 63 else None,
    "wave_rol:1": lambda lane: (lane + 1) % 64,
    "wave_shr:1": lambda lane: lane - 1 if lane else None,
    "wave_ror:1": lambda lane: (lane - 1) % 64,
    "row_mirror": lambda lane: lane & ~15 | 15 - lane % 16,
    "row_half_mirror": lambda lane: lane & ~7 | 7 - lane % 8,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
    "row_newbcast:6": lambda lane: lane & ~15 | 6,
}


@pytest.mark.parametrize("control", DPP)
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("mask", [2**64 - 1, 0xFFFF00FF0FF0F731])
@on_each_arch
def test_dpp(machine: Machine, arch: str, control: str, bound: bool, mask: int) -> None:
    machine.set64(EXEC, mask)
    source, old = machine.v[0].copy(), machine.v[10].copy()
    rows, banks = 0xB, 0xE
    machine.run(
        f"v_mov_b32_dpp v10, v0 {control} row_mask:{rows:#x} bank_mask:{banks:#x}{' bound_ctrl:1' if bound else ''}"
    )
    for lane in range(64):
        origin = DPP[control](lane)
        valid = origin is not None and mask >> origin & 1
        enabled = mask >> lane & 1 and rows >> lane // 16 & 1 and banks >> lane // 4 % 4 & 1
        want = old[lane]
        if enabled and valid:
            want = source[origin]
        elif enabled and bound:
            want = 0
        assert machine.v[10][lane] == want, lane


@on_each_arch
def test_dpp_modifies_only_the_first_source(machine: Machine, arch: str) -> None:
    machine.run("v_sub_u32_dpp v10, v0, v1 row_ror:1 row_mask:0xf bank_mask:0xf")
    rotated = machine.v[0].reshape(4, 16)[:, (LANE[:16] - 1) % 16].reshape(64)
    np.testing.assert_array_equal(machine.v[10], rotated - machine.v[1])


@holds("v_readlane_b32", "v_readfirstlane_b32", "v_writelane_b32")
def test_reading_and_writing_lanes_ignores_exec(machine: Machine, arch: str) -> None:
    machine.set64(EXEC, 0)
    machine.run("v_readlane_b32 s4, v0, 17\nv_readfirstlane_b32 s5, v0")
    assert (machine.s[4], machine.s[5]) == (machine.v[0][17], machine.v[0][0])
    machine.s[6] = 64 + 9  # the lane number wraps
    machine.run("v_readlane_b32 s4, v0, s6\nv_writelane_b32 v10, 33, 63")
    assert (machine.s[4], machine.v[10][63]) == (machine.v[0][9], 33)
    machine.set64(EXEC, 1 << 40 | 1 << 50)
    machine.run("v_readfirstlane_b32 s5, v0")
    assert machine.s[5] == machine.v[0][40]


@holds("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def test_counting_lanes_below(machine: Machine, arch: str) -> None:
    machine.run("v_mbcnt_lo_u32_b32 v10, -1, 0\nv_mbcnt_hi_u32_b32 v10, -1, v10")
    np.testing.assert_array_equal(machine.v[10], LANE)


@holds("v_swap_b32")
def test_swap(machine: Machine, arch: str) -> None:
    a, b = machine.v[0].copy(), machine.v[1].copy()
    machine.run("v_swap_b32 v0, v1")
    np.testing.assert_array_equal(machine.v[0:2], [b, a])


@holds("v_permlane32_swap_b32", "v_permlane16_swap_b32")
def test_rows_trade_places(machine: Machine, arch: str) -> None:
    a, b = machine.v[0].copy(), machine.v[1].copy()
    machine.run("v_permlane32_swap_b32 v0, v1")
    np.testing.assert_array_equal(machine.v[0], np.concatenate([a[:32], b[:32]]))
    np.testing.assert_array_equal(machine.v[1], np.concatenate([a[32:], b[32:]]))
    machine.v[0], machine.v[1] = a, b
    machine.run("v_permlane16_swap_b32 v0, v1")
    np.testing.assert_array_equal(machine.v[0], np.concatenate([a[:16], b[:16], a[32:48], b[32:48]]))
    np.testing.assert_array_equal(machine.v[1], np.concatenate([a[16:32], b[16:32], a[48:], b[48:]]))


@holds("v_accvgpr_write_b32", "v_accvgpr_mov_b32", "v_accvgpr_read_b32")
def test_accumulation_registers_are_a_second_file(machine: Machine, arch: str) -> None:
    machine.run("v_accvgpr_write_b32 a3, v0\nv_accvgpr_mov_b32 a4, a3\nv_accvgpr_read_b32 v10, a4")
    np.testing.assert_array_equal(machine.v[ACC + 3], machine.v[0])
    np.testing.assert_array_equal(machine.v[10], machine.v[0])


@holds("s_set_gpr_idx_on", "s_set_gpr_idx_off")
def test_register_indexing_moves_what_it_is_told_to(machine: Machine, arch: str) -> None:
    machine.s[4] = 5
    machine.run("s_set_gpr_idx_on s4, gpr_idx(SRC0)\nv_mov_b32 v10, v1\ns_set_gpr_idx_off\nv_mov_b32 v11, v1")
    np.testing.assert_array_equal(machine.v[10], machine.v[6])
    np.testing.assert_array_equal(machine.v[11], machine.v[1])
    machine.run("s_set_gpr_idx_on s4, gpr_idx(DST)\nv_mov_b32 v10, v2\ns_set_gpr_idx_off")
    np.testing.assert_array_equal(machine.v[15], machine.v[2])
    assert machine.s[M0] & 0xFF == 5


@on_each_arch
def test_register_indexing_past_the_file_is_a_fault(machine: Machine, arch: str) -> None:
    machine.s[4] = 255
    with pytest.raises(RuntimeError, match="outside the register file"):
        machine.run("s_set_gpr_idx_on s4, gpr_idx(SRC0)\nv_mov_b32 v10, v1\ns_set_gpr_idx_off")


@on_each_arch
def test_an_instruction_without_a_handler_is_named(machine: Machine, arch: str) -> None:
    with pytest.raises(RuntimeError, match=r"instruction s_rfe_b64\n.*s_rfe_b64 s\[4:5\]"):
        machine.run("s_rfe_b64 s[4:5]")


@on_each_arch
def test_bytes_that_are_no_instruction_are_shown(machine: Machine, arch: str) -> None:
    with pytest.raises(RuntimeError, match="no instruction"):
        machine.run(".long 0xbfff0000")


PACKED = """
#include "hip.h"
typedef unsigned short u16x2 __attribute__((ext_vector_type(2)));
extern "C" __global__ void scale(u16x2* p) { p[threadIdx.x] = p[threadIdx.x] * (u16x2){0x3f80, 0}; }
"""


def test_float_constants_of_packed_integers_are_single_precision(tmp_path: Path) -> None:
    """LLVM writes the pair (0x3f80, 0) as the halves of 1.0, 0x3f800000, swapped by op_sel: so must the operand be."""
    code = emulator.CodeObject(hip_compile.device_elf(PACKED, tmp_path))
    assert re.search(r"v_pk_mul_lo_u16 .*1\.0", code.kernels["scale"].disassembly())
    values = torch.arange(128, dtype=torch.int16)
    emulator.launch(code.kernels["scale"], 1, 64, [values])
    want = np.where(np.arange(128) % 2 == 0, np.arange(128) * 0x3F80, 0).astype(np.uint16)
    np.testing.assert_array_equal(values.numpy().view(np.uint16), want)
    machine = Machine()
    machine.v[1] = 0x00020003
    assert machine.run("v_pk_add_u16 v0, v1, 1.0").v[0][0] == 0x3F820003
    assert machine.run("v_pk_add_u16 v0, v1, 1.0 op_sel_hi:[1,0]").v[0][0] == 0x00020003
    assert machine.run("v_pk_add_u16 v0, v1, -2 op_sel_hi:[1,1]").v[0][0] == 0x00010001
    assert machine.run("v_pk_add_f16 v0, 0, 1.0 op_sel_hi:[0,0]").v[0][0] == 0x3C003C00
    assert machine.run("v_add_u16_e32 v0, 1.0, v1").v[0][0] & 0xFFFF == 0x3C03
