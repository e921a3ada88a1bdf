"""The MODE register and its neighbours: changed at run time, per wave and by descriptors; what faults by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import hip_compile
from helpers.emulator_asm import whole_kernel
from helpers.exec_one import M0, MODE_DEFAULT, VCC, Machine, from_fraction, to_fraction

from hipforge import emulator
from hipforge.errors import LaunchError

DOWN = 2
FP16_OVFL = 1 << 23


# --- changing it ------------------------------------------------------------------------------------------------------


def test_rounding_changes_between_two_instructions() -> None:
    machine = Machine()
    machine.v[0], machine.v[1] = 0x3F800000, 0x33000001  # 1 + a little more than 2^-25
    machine.run(
        "v_add_f32 v10, v0, v1\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 1\nv_add_f32 v11, v0, v1\n"
        "s_mov_b32 s4, 2\ns_setreg_b32 hwreg(HW_REG_MODE, 0, 2), s4\nv_add_f32 v12, v0, v1\n"
        "s_getreg_b32 s5, hwreg(HW_REG_MODE)\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 0\nv_add_f32 v13, v0, v1"
    )
    got = [int(machine.v[register][0]) for register in (10, 11, 12, 13)]
    assert got == [0x3F800000, 0x3F800001, 0x3F800000, 0x3F800000]
    assert int(machine.s[5]) == MODE_DEFAULT | DOWN


def test_every_modelled_field_reads_back() -> None:
    modelled = 0x3FF | FP16_OVFL | 1 << 26 | 7 << 29
    machine = Machine()
    machine.s[4] = modelled
    machine.run("s_setreg_b32 hwreg(HW_REG_MODE), s4\ns_getreg_b32 s5, hwreg(HW_REG_MODE)\n"
                "s_getreg_b32 s6, hwreg(HW_REG_MODE, 29, 3)")  # fmt: skip
    assert (int(machine.s[5]), int(machine.s[6])) == (modelled, 7)


@pytest.mark.parametrize(
    ("bit", "field"), [(11, "DEBUG"), *((bit, "EXCP_EN") for bit in range(12, 21)), (10, "reserved"), (24, "reserved")]
)
def test_a_field_that_is_not_modelled_is_refused_by_name(bit: int, field: str) -> None:
    machine = Machine()
    machine.s[4] = 1
    with pytest.raises(RuntimeError, match=f"MODE.*{field}.*set"):
        machine.run(f"s_setreg_b32 hwreg(HW_REG_MODE, {bit}, 1), s4")
    machine.s[4] = 0
    machine.run(f"s_setreg_b32 hwreg(HW_REG_MODE, {bit}, 1), s4")


@pytest.mark.parametrize("name", ["TRAPSTS", "GPR_ALLOC", "LDS_ALLOC", "IB_STS", "SH_MEM_BASES", "TBA_LO", "TMA_HI"])
def test_other_hardware_registers_are_refused_by_name(name: str) -> None:
    for text in (f"s_getreg_b32 s5, hwreg(HW_REG_{name})", f"s_setreg_b32 hwreg(HW_REG_{name}), s5"):
        with pytest.raises(RuntimeError, match=name):
            Machine().run(text)


def test_status_shows_conditions_and_priority() -> None:
    machine = Machine()
    machine.scc = 1
    machine.set64(VCC, 1)
    machine.run("s_setprio 2\ns_getreg_b32 s5, hwreg(HW_REG_STATUS)\ns_mov_b64 s[6:7], exec\ns_mov_b64 exec, 0\n"
                "s_mov_b64 vcc, 0\ns_getreg_b32 s8, hwreg(HW_REG_STATUS, 9, 2)\ns_mov_b64 exec, s[6:7]")  # fmt: skip
    assert int(machine.s[5]) == 1 | 2 << 3 | 1 << 6 | 1 << 16
    assert int(machine.s[8]) == 3


def test_vgpr_indexing_is_a_bit_of_mode_and_outlives_a_sleep() -> None:
    machine = Machine()
    machine.v[3] = 5
    machine.s[4] = 3
    machine.run("s_set_gpr_idx_on s4, gpr_idx(SRC0)\ns_getreg_b32 s5, hwreg(HW_REG_MODE, 27, 1)\ns_sleep 1\n"
                "v_mov_b32 v10, v0\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 27, 1), 0\nv_mov_b32 v11, v0")  # fmt: skip
    assert (int(machine.s[5]), int(machine.v[10][0]), int(machine.v[11][0])) == (1, 5, 0)
    assert int(machine.s[M0]) >> 12 & 15 == 1


def test_indexing_moves_an_accumulator_with_its_destination() -> None:
    machine = Machine()
    machine.v[0], machine.v[1], machine.v[10], machine.v[12] = 0x40000000, 0x40400000, 0x3F800000, 0x41200000
    machine.s[4] = 2
    machine.run("s_set_gpr_idx_on s4, gpr_idx(DST)\nv_fmac_f32 v10, v0, v1\ns_set_gpr_idx_off")
    assert machine.v[12][0] == 0x41800000, "2 * 3 + 10"
    assert machine.v[10][0] == 0x3F800000


# --- whole kernels ----------------------------------------------------------------------------------------------------

BODY = """
  s_load_dwordx2 s[2:3], s[0:1], 0
  v_mov_b32 v1, 0x3f800000
  v_mov_b32 v2, 0x33000001
  v_readfirstlane_b32 s4, v0
  s_waitcnt lgkmcnt(0)
  s_cmp_lg_u32 s4, 0
  s_cbranch_scc0 first
{second}
first:
  s_barrier
  v_add_f32 v3, v1, v2
  v_lshlrev_b32 v0, 2, v0
  global_store_dword v0, v3, s[2:3]
"""


def kernel(folder: Path, second: str = "", directives: str = "") -> emulator.Kernel:
    """Assemble a kernel of two waves that store 1 + 2^-25 and a bit."""
    directives = f".amdhsa_float_denorm_mode_32 3\n{directives}"
    image = whole_kernel(BODY.format(second=second), folder, directives=directives, work_group=128)
    return emulator.CodeObject(image).kernels["k"]


def launch(made: emulator.Kernel) -> list[int]:
    out = torch.zeros(128, dtype=torch.int32)
    emulator.launch(made, 1, 128, [out])
    return out[[0, 64]].tolist()


def test_the_kernel_descriptor_sets_the_mode(tmp_path: Path) -> None:
    assert launch(kernel(tmp_path)) == [0x3F800000] * 2
    assert launch(kernel(tmp_path, directives=".amdhsa_float_round_mode_32 1")) == [0x3F800001] * 2
    assert launch(kernel(tmp_path, directives=".amdhsa_float_round_mode_16_64 1")) == [0x3F800000] * 2


def test_each_wave_has_its_own_mode(tmp_path: Path) -> None:
    second = "  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 1"
    made = kernel(tmp_path, second=second)
    for order in ("forward", "reverse", "random"):
        with emulator.options(wave_order=order):
            assert launch(made) == [0x3F800000, 0x3F800001]


def test_a_careful_wave_is_observed_like_any_other(tmp_path: Path) -> None:
    made = kernel(tmp_path, directives=".amdhsa_float_round_mode_32 1")
    with emulator.options(checks="all"), emulator.counters() as counted:
        assert launch(made) == [0x3F800001] * 2
    plain = kernel(tmp_path)
    with emulator.options(checks="all"), emulator.counters() as same:
        launch(plain)
    assert counted.wave_instructions == same.wave_instructions


@pytest.mark.parametrize("exception", ["fp_ieee_invalid_op", "fp_denorm_src", "fp_ieee_div_zero", "fp_ieee_overflow",
                                       "fp_ieee_underflow", "fp_ieee_inexact", "int_div_zero"])  # fmt: skip
def test_a_descriptor_that_enables_exceptions_is_refused(tmp_path: Path, exception: str) -> None:
    made = kernel(tmp_path, directives=f".amdhsa_exception_{exception} 1")
    with pytest.raises(LaunchError, match="ENABLE_EXCEPTION"):
        launch(made)


DIVISION = """
#include "hip.h"
extern "C" __global__ void divide(float* q, const float* a, const float* b) {
  const int i = threadIdx.x;
  q[i] = a[i] / b[i];
}
"""


def test_compiled_division_switches_denormals_on_where_it_needs_them(tmp_path: Path) -> None:
    """clang brackets the Newton steps with s_setreg on MODE where f32 denormals are off: quotients stay exact."""
    made = hip_compile.device_elf(DIVISION, tmp_path, flags=["-fgpu-flush-denormals-to-zero"])
    code = emulator.CodeObject(made)
    assert "s_setreg" in code.kernels["divide"].disassembly()
    rng = np.random.default_rng(11)
    exponents = rng.integers(-126, 127, (2, 64))
    a, b = (rng.uniform(1, 2, 64).astype(np.float32) * np.exp2(e).astype(np.float32) for e in exponents)
    q = torch.zeros(64)
    emulator.launch(code.kernels["divide"], 1, 64, [q, torch.from_numpy(a), torch.from_numpy(b)])
    for got, x, y in zip(q.numpy().view(np.uint32), a.view(np.uint32), b.view(np.uint32), strict=True):
        exact = from_fraction(to_fraction(int(x), 32) / to_fraction(int(y), 32), 32)
        assert int(got) == (exact if exact & 0x7F800000 else exact & 0x80000000)
