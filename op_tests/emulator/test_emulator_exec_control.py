"""Program control: branches, calls, waits, traps, clocks, VGPR indexing, and what changes nothing here."""

from __future__ import annotations

import pytest
from helpers.exec_one import EXEC, M0, VCC, Machine
from helpers.exec_registry import holds, holds_each

TAKEN_WHEN = {
    "s_branch": lambda scc, vcc, mask: True,
    "s_cbranch_scc0": lambda scc, vcc, mask: not scc,
    "s_cbranch_scc1": lambda scc, vcc, mask: bool(scc),
    "s_cbranch_vccz": lambda scc, vcc, mask: vcc == 0,
    "s_cbranch_vccnz": lambda scc, vcc, mask: vcc != 0,
    "s_cbranch_execz": lambda scc, vcc, mask: mask == 0,
    "s_cbranch_execnz": lambda scc, vcc, mask: mask != 0,
    # The debugger's conditions: false without a debugger.
    "s_cbranch_cdbgsys": lambda scc, vcc, mask: False,
    "s_cbranch_cdbguser": lambda scc, vcc, mask: False,
    "s_cbranch_cdbgsys_or_user": lambda scc, vcc, mask: False,
    "s_cbranch_cdbgsys_and_user": lambda scc, vcc, mask: False,
}


@holds_each("name", TAKEN_WHEN)
def test_branches_look_at_their_condition(name: str, arch: str) -> None:
    machine = Machine(arch)
    for scc in (0, 1):
        for vcc in (0, 1, 1 << 63):
            for mask in (0, 1 << 40, 2**64 - 1):
                machine.scc, machine.s[10], machine.s[11] = scc, 0, 0
                machine.set64(VCC, vcc)
                machine.set64(EXEC, mask)
                machine.run(f"{name} 1f\ns_mov_b32 s10, 1\n1:\ns_mov_b32 s11, 1")
                taken = TAKEN_WHEN[name](scc, vcc, mask)
                assert (int(machine.s[10]), int(machine.s[11])) == (int(not taken), 1), (scc, vcc, mask)


@holds("s_cbranch_scc1")
def test_branches_go_backwards(arch: str) -> None:
    machine = Machine(arch)
    machine.run("s_mov_b32 s10, 0\n1:\ns_add_u32 s10, s10, 3\ns_cmp_lt_u32 s10, 20\ns_cbranch_scc1 1b")
    assert machine.s[10] == 21


@holds("s_getpc_b64", "s_setpc_b64")
def test_the_program_counter_is_that_of_the_next_instruction(arch: str) -> None:
    machine = Machine(arch)
    # Four bytes each: getpc says where the add is, 20 bytes before the last instruction.
    machine.run(
        "s_getpc_b64 s[4:5]\ns_add_u32 s4, s4, 20\ns_addc_u32 s5, s5, 0\ns_setpc_b64 s[4:5]\n"
        "s_mov_b32 s10, 1\ns_mov_b32 s11, 1\ns_mov_b32 s12, 1"
    )
    assert machine.s[10:13].tolist() == [0, 0, 1]


@holds("s_swappc_b64", "s_setpc_b64", "s_getpc_b64")
def test_a_call_by_address_comes_back(arch: str) -> None:
    machine = Machine(arch)
    machine.run(
        "s_getpc_b64 s[4:5]\ns_add_u32 s4, s4, 20\ns_addc_u32 s5, s5, 0\ns_swappc_b64 s[8:9], s[4:5]\n"
        "s_mov_b32 s11, s10\ns_branch 1f\n2:\ns_mov_b32 s10, 7\ns_setpc_b64 s[8:9]\n1:\ns_nop 0"
    )
    assert machine.s[10:12].tolist() == [7, 7]
    assert machine.get64(8) == machine.get64(4) - 8  # two instructions before the function


@holds("s_call_b64", "s_setpc_b64", "s_getpc_b64")
def test_a_call_by_offset_comes_back(arch: str) -> None:
    machine = Machine(arch)
    machine.run(
        "s_call_b64 s[8:9], 2f\ns_getpc_b64 s[4:5]\ns_mov_b32 s11, s10\ns_branch 1f\n2:\ns_mov_b32 s10, 7\n"
        "s_setpc_b64 s[8:9]\n1:\ns_nop 0"
    )
    assert machine.s[10:12].tolist() == [7, 7]
    assert machine.get64(8) == machine.get64(4) - 4


@holds("s_setpc_b64")
def test_a_jump_to_nowhere_is_a_fault(arch: str) -> None:
    with pytest.raises(RuntimeError, match="not an instruction of this code object"):
        Machine(arch).run("s_mov_b64 s[4:5], 8\ns_setpc_b64 s[4:5]")


@holds("s_trap")
def test_a_trap_is_a_fault_with_its_number(arch: str) -> None:
    with pytest.raises(RuntimeError, match=r"trapped \(s_trap 3\)"):
        Machine(arch).run("s_trap 3")


@holds("s_endpgm", "s_barrier")
def test_nothing_runs_after_the_end_nor_before_the_others_reach_the_barrier(arch: str) -> None:
    for text in ("s_endpgm", "s_barrier"):
        machine = Machine(arch).run(f"s_mov_b32 s10, 1\n{text}\ns_mov_b32 s11, 1")
        assert machine.s[10:12].tolist() == [1, 0]


@holds("s_memtime", "s_memrealtime")
def test_clocks_run_forward(arch: str) -> None:
    machine = Machine(arch)
    for name in ("s_memtime", "s_memrealtime"):
        machine.run(f"{name} s[10:11]\ns_waitcnt lgkmcnt(0)")
        machine.run(f"{name} s[12:13]\ns_waitcnt lgkmcnt(0)")
        assert 0 < machine.get64(10) < machine.get64(12)


WITHOUT_EFFECT = {
    "s_nop": "s_nop 7",
    "s_sethalt": "s_sethalt 0",
    "s_setprio": "s_setprio 3",
    "s_sleep": "s_sleep 2",
    "s_wakeup": "s_wakeup",
    "s_waitcnt": "s_waitcnt vmcnt(0) expcnt(0) lgkmcnt(0)",
    "s_icache_inv": "s_icache_inv",
    "s_incperflevel": "s_incperflevel 5",
    "s_decperflevel": "s_decperflevel 5",
    "s_ttracedata": "s_ttracedata",
    "s_dcache_inv": "s_dcache_inv",
    "s_dcache_wb": "s_dcache_wb",
    "s_dcache_inv_vol": "s_dcache_inv_vol",
    "s_dcache_wb_vol": "s_dcache_wb_vol",
    "v_nop": "v_nop",
    "v_clrexcp": "v_clrexcp",
    "ds_nop": "ds_nop",
    "buffer_inv": "buffer_inv sc0 sc1",
    "buffer_wbl2": "buffer_wbl2 sc0 sc1",
}


@holds_each("name", WITHOUT_EFFECT)
def test_what_orders_or_measures_changes_no_register_and_goes_on(name: str, arch: str) -> None:
    machine = Machine(arch)
    machine.v[:] = 0xA5A5A5A5
    machine.s[:100] = 0x5A5A5A5A
    machine.lds[:] = 0x11
    machine.scc = 1
    v, s, lds = machine.v.copy(), machine.s.copy(), machine.lds.copy()
    machine.run(f"{WITHOUT_EFFECT[name]}\ns_mov_b32 s20, 1")
    s[20] = 1
    assert (machine.v == v).all()
    assert (machine.s == s).all()
    assert (machine.lds == lds).all()
    assert machine.scc == 1


@holds("s_set_gpr_idx_on", "s_set_gpr_idx_idx", "s_set_gpr_idx_mode", "s_set_gpr_idx_off")
def test_the_index_and_what_it_moves_change_within_indexing_mode(arch: str) -> None:
    machine = Machine(arch)
    for register in range(30):
        machine.v[register] = 100 + register
    machine.s[4], machine.s[5] = 3, 0x1234_5607
    machine.run(
        "s_set_gpr_idx_on s4, gpr_idx(SRC0)\nv_mov_b32 v40, v1\ns_set_gpr_idx_idx s5\nv_mov_b32 v41, v1\n"
        "s_set_gpr_idx_mode gpr_idx(DST)\nv_mov_b32 v42, v1\ns_set_gpr_idx_mode gpr_idx(SRC1)\n"
        "v_add_u32 v43, v1, v2\ns_set_gpr_idx_off\nv_mov_b32 v44, v1"
    )
    assert [int(machine.v[i][0]) for i in (40, 41, 49, 43, 44)] == [104, 108, 101, 101 + 109, 101]
    assert machine.v[42][0] == 0
    assert machine.s[M0] & 0xF0FF == 0x2007


@holds("s_setreg_b32", "s_getreg_b32")
def test_a_field_of_mode_is_written_from_a_register(arch: str) -> None:
    machine = Machine(arch)
    for value in (0, 5, 0xF, 0xFFFFFFF6):
        machine.s[4] = value
        machine.run("s_setreg_b32 hwreg(HW_REG_MODE, 4, 4), s4\ns_getreg_b32 s10, hwreg(HW_REG_MODE, 0, 10)")
        assert machine.s[10] == machine.mode & 0x3FF & ~0xF0 | (value & 15) << 4


@holds("s_setvskip")
def test_vector_instructions_are_skipped_on_request(arch: str) -> None:
    machine = Machine(arch)
    machine.s[4], machine.v[0] = 1 << 7, 7
    machine.run("s_setvskip s4, 7\nv_mov_b32 v10, v0\nds_write_b32 v9, v0\ns_mov_b32 s10, 1\n"
                "s_getreg_b32 s11, hwreg(HW_REG_MODE, 28, 1)\ns_setvskip s4, 6\nv_mov_b32 v11, v0")  # fmt: skip
    assert not machine.v[10].any() and machine.lds[0] == 0 and set(machine.v[11].tolist()) == {7}
    assert machine.s[10:12].tolist() == [1, 1]
