"""Operations that compilers rarely or never emit: forks, relative moves, messages, byte differences, cube maps, scalar
stores and atomics through descriptors, LDS exchanges and float atomics by MODE."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from helpers.exec_one import EXEC, M0, MODE_DEFAULT, Machine, from_fraction
from helpers.exec_registry import ARCHS, holds, holds_each, on_each_arch

ALL = 2**64 - 1


def bytes_of(word: int) -> list[int]:
    return [word >> shift & 0xFF for shift in range(0, 64, 8)]


# --- control ----------------------------------------------------------------------------------------------------------

FORK = """
  s_getpc_b64 s[20:21]
anchor:
  s_add_u32 s20, s20, pass-anchor
  s_addc_u32 s21, s21, 0
  s_getreg_b32 s30, hwreg(HW_REG_MODE, 29, 3)
  {fork}
  v_mov_b32 v10, 1
  s_bcnt1_i32_b64 s22, exec
  s_branch meet
pass:
  v_mov_b32 v10, 2
  s_bcnt1_i32_b64 s23, exec
meet:
  s_cbranch_join s30
  v_mov_b32 v11, 3
  s_getreg_b32 s31, hwreg(HW_REG_MODE, 29, 3)
"""


FORKS = ("s_cbranch_g_fork s[24:25], s[20:21]", "s_cbranch_i_fork s[24:25], pass")


@holds_each("fork", FORKS, lambda fork: [fork.split()[0], "s_cbranch_join"])
@pytest.mark.parametrize("mask", [0, ALL, 0xFF, ALL ^ 0xFF, 0xFFFFFFFF])
def test_a_fork_runs_both_halves_and_joins(arch: str, fork: str, mask: int) -> None:
    machine = Machine()
    machine.set64(24, mask)
    machine.run(FORK.format(fork=fork), arch)
    want = [2 if mask >> lane & 1 else 1 for lane in range(64)]
    assert machine.v[10].tolist() == want
    halves = (mask.bit_count(), 64 - mask.bit_count())
    last = ALL if 0 in halves else mask if halves[1] < halves[0] else mask ^ ALL
    assert machine.get64(EXEC) == last, "the smaller half ran first; the program restores EXEC"
    assert machine.v[11].tolist() == [3 if last >> lane & 1 else 0 for lane in range(64)]
    assert machine.s[31] == 0, "the stack is empty again"
    assert (int(machine.s[23]) or 0, int(machine.s[22]) or 0) == halves


def test_forks_nest_six_deep() -> None:
    """Halves of 64 lanes: no wave can diverge a seventh time, unless it wrote CSP itself."""
    fork = "s_mov_b32 s40, {mask}\ns_mov_b32 s41, 0\ns_cbranch_i_fork s[40:41], 1f\ns_nop 0\n1:\n"
    nested = "".join(fork.format(mask=hex((1 << (32 >> depth)) - 1)) for depth in range(6))
    machine = Machine()
    machine.run(nested + "s_getreg_b32 s44, hwreg(HW_REG_MODE, 29, 3)")
    assert (int(machine.s[44]), machine.get64(EXEC)) == (6, 1)
    assert [machine.get64(4 * depth) for depth in range(2)] == [ALL ^ 0xFFFFFFFF, 0xFFFF0000]
    with pytest.raises(RuntimeError, match="more than 6 nested divergent forks"):
        Machine().run("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 29, 3), 6\n" + fork.format(mask=1))


def test_a_join_without_a_fork_is_a_fault() -> None:
    machine = Machine()
    machine.s[30] = 1
    with pytest.raises(RuntimeError, match="a join without a fork"):
        machine.run("s_cbranch_join s30")


@holds("s_movrels_b32", "s_movrels_b64", "s_movreld_b32", "s_movreld_b64")
def test_relative_moves_add_m0_to_the_register(arch: str) -> None:
    machine = Machine()
    machine.s[:100] = np.arange(100, dtype=np.uint32) + 1000
    machine.s[M0] = 6
    machine.run("s_movrels_b32 s50, s4\ns_movrels_b64 s[52:53], s[4:5]\n"
                "s_movreld_b32 s54, s5\ns_movreld_b64 s[56:57], s[8:9]", arch)  # fmt: skip
    assert machine.s[[50, 52, 53]].tolist() == [1010, 1010, 1011]
    assert machine.s[[60, 62, 63]].tolist() == [1005, 1008, 1009]
    assert machine.s[[54, 56, 57]].tolist() == [1054, 1056, 1057]


@pytest.mark.parametrize(("text", "m0", "why"), [
    ("s_movrels_b32 s50, s4", 98, "outside the SGPRs"), ("s_movreld_b64 s[4:5], s[6:7]", 1, "odd"),
    ("s_movrels_b32 s50, exec_lo", 0, "outside the SGPRs"),
])  # fmt: skip
def test_relative_moves_out_of_the_file_are_faults(text: str, m0: int, why: str) -> None:
    machine = Machine()
    machine.s[M0] = m0
    with pytest.raises(RuntimeError, match=why):
        machine.run(text)


@holds("s_sendmsg", "s_setkill", "s_sethalt")
def test_an_interrupt_message_has_no_receiver_and_others_are_refused(arch: str) -> None:
    Machine().run("s_sendmsg sendmsg(MSG_INTERRUPT)\ns_setkill 0\ns_sethalt 0", arch)
    refused = ("s_sendmsg sendmsg(MSG_GET_DOORBELL)", "s_sendmsg sendmsg(MSG_SAVEWAVE)",
               "s_sendmsghalt sendmsg(MSG_INTERRUPT)", "s_setkill 1", "s_sethalt 1")  # fmt: skip
    for text in refused:
        with pytest.raises(RuntimeError, match="does not support") as report:
            Machine().run(text, arch)
        assert text.split()[0] in str(report.value)


# --- vector -----------------------------------------------------------------------------------------------------------


def absolute(a: list[int], b: list[int], masked: bool) -> int:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True) if y or not masked)


@holds_each("name", ["v_qsad_pk_u16_u8", "v_mqsad_pk_u16_u8", "v_mqsad_u32_u8"])
def test_four_sums_of_byte_differences(arch: str, name: str) -> None:
    rng = np.random.default_rng(3)
    machine = Machine()
    machine.v[0:10] = rng.integers(0, 2**32, (10, 64), dtype=np.uint32)
    machine.v[2] &= rng.choice([0xFF00FF, 0xFFFFFFFF, 0], 64).astype(np.uint32)
    wide = name.endswith("u32_u8")
    third, result = ("v[4:7]", "v[20:23]") if wide else ("v[4:5]", "v[20:21]")
    machine.run(f"{name} {result}, v[0:1], v2, {third}", arch)
    masked = name.startswith("v_mq")
    for lane in range(64):
        a, b = bytes_of(machine.row64(0)[lane]), bytes_of(int(machine.v[2][lane]))[:4]
        sums = [absolute(a[i : i + 4], b, masked) for i in range(4)]
        if wide:
            want = [(int(machine.v[4 + i][lane]) + sums[i]) & 0xFFFFFFFF for i in range(4)]
            assert [int(machine.v[20 + i][lane]) for i in range(4)] == want
        else:
            addend = machine.row64(4)[lane]
            want = [((addend >> 16 * i) + sums[i]) & 0xFFFF for i in range(4)]
            assert [machine.row64(20)[lane] >> 16 * i & 0xFFFF for i in range(4)] == want


@holds("v_cvt_pkaccum_u8_f32")
def test_converted_bytes_accumulate_in_the_destination(arch: str) -> None:
    machine = Machine()
    machine.v[0] = np.linspace(-10, 300, 64).astype(np.float32).view(np.uint32)
    machine.v[1] = np.arange(64) % 4
    machine.v[10] = 0xA1B2C3D4
    machine.run("v_cvt_pkaccum_u8_f32 v10, v0, v1", arch)
    for lane in range(64):
        value = int(np.clip(np.rint(machine.v[0].view(np.float32)[lane]), 0, 255))
        shift = 8 * (lane % 4)
        assert int(machine.v[10][lane]) == 0xA1B2C3D4 & ~(0xFF << shift) | value << shift


FACES = {  # the id, then (s, t, major) as (sign, axis)
    (0, 1): (0, (-1, 2), (-1, 1)), (0, -1): (1, (1, 2), (-1, 1)),
    (1, 1): (2, (1, 0), (1, 2)), (1, -1): (3, (1, 0), (-1, 2)),
    (2, 1): (4, (1, 0), (-1, 1)), (2, -1): (5, (-1, 0), (-1, 1)),
}  # fmt: skip


@holds("v_cubeid_f32", "v_cubesc_f32", "v_cubetc_f32", "v_cubema_f32")
def test_cube_map_faces(arch: str) -> None:
    machine = Machine()
    triples = list(itertools.product([-3.0, -2.0, 2.0, 3.0], repeat=3))
    for axis in range(3):
        machine.v[axis] = np.array([triple[axis] for triple in triples], np.float32).view(np.uint32)
    machine.run(
        "\n".join(f"v_cube{part}_f32 v{10 + i}, v0, v1, v2" for i, part in enumerate(("id", "sc", "tc", "ma"))), arch
    )
    for lane, triple in enumerate(triples):
        largest = max(abs(x) for x in triple)
        axis = next(axis for axis in (2, 1, 0) if abs(triple[axis]) == largest)
        face, (s_sign, s_axis), (t_sign, t_axis) = FACES[axis, 1 if triple[axis] > 0 else -1]
        want = [face, s_sign * triple[s_axis], t_sign * triple[t_axis], 2 * triple[axis]]
        assert machine.v[10:14].view(np.float32)[:, lane].tolist() == want


# --- scalar memory ----------------------------------------------------------------------------------------------------


class Scalars:
    """Sixteen dwords of host memory: s[4:5] the base, s[8:11] a descriptor of the first 40 bytes."""

    def __init__(self) -> None:
        self.words = np.arange(100, 116, dtype=np.uint32)
        self.machine = Machine()
        base = int(self.words.ctypes.data)
        self.machine.set64(4, base)
        self.machine.s[8:12] = [base & 0xFFFFFFFF, base >> 32, 40, 0x00027000]
        self.machine.s[20:24] = [1, 2, 3, 4]


@holds("s_buffer_store_dword", "s_buffer_store_dwordx2", "s_buffer_store_dwordx4")
def test_scalar_buffer_stores_end_with_the_range(arch: str) -> None:
    memory = Scalars()
    memory.machine.run("s_buffer_store_dword s20, s[8:11], 0x4\ns_buffer_store_dwordx2 s[20:21], s[8:11], 0x8\n"
                       "s_buffer_store_dwordx4 s[20:23], s[8:11], 0x20", arch)  # fmt: skip
    assert memory.words.tolist() == [100, 1, 1, 2, 104, 105, 106, 107, 1, 2, *range(110, 116)]


@holds("s_buffer_atomic_cmpswap", "s_buffer_atomic_cmpswap_x2")
def test_scalar_buffer_atomics_return_the_old_value_and_end_with_the_range(arch: str) -> None:
    memory = Scalars()
    machine = memory.machine
    machine.s[24:26] = [7, 108]  # compare and swap: the new value, then the one compared with
    machine.s[12:16] = [8, 9, 106, 107]
    machine.run("s_buffer_atomic_add s20, s[8:11], 0x4 glc\ns_buffer_atomic_umax s23, s[8:11], 0x8\n"
                "s_buffer_atomic_cmpswap s[24:25], s[8:11], 0x20 glc\n"
                "s_buffer_atomic_swap_x2 s[22:23], s[8:11], 0x10 glc\n"
                "s_buffer_atomic_cmpswap_x2 s[12:15], s[8:11], 0x18 glc\n"
                "s_buffer_atomic_or s21, s[8:11], 0x28 glc", arch)  # fmt: skip
    assert memory.words.tolist() == [100, 102, 102, 103, 3, 4, 8, 9, 7, 109, *range(110, 116)]
    assert machine.s[12:14].tolist() == [106, 107]
    assert machine.s[20:25].tolist() == [101, 0, 104, 105, 108]


@holds(
    *(f"s_scratch_{way}_{width}" for way in ("load", "store") for width in ("dword", "dwordx2", "dwordx4")),
)
def test_scalar_scratch_counts_its_register_offset_in_64_bytes(arch: str) -> None:
    memory = Scalars()
    memory.words = np.arange(100, 164, dtype=np.uint32)
    memory.machine.set64(4, int(memory.words.ctypes.data))
    memory.machine.s[14] = 2
    memory.machine.run("s_scratch_load_dwordx2 s[30:31], s[4:5], s14\ns_scratch_load_dword s32, s[4:5], 0x8\n"
                       "s_scratch_load_dwordx4 s[36:39], s[4:5], 0x10\ns_mov_b32 m0, 1\n"
                       "s_scratch_store_dword s20, s[4:5], m0\ns_scratch_store_dwordx2 s[20:21], s[4:5], 0x20\n"
                       "s_scratch_store_dwordx4 s[20:23], s[4:5], 0x50", arch)  # fmt: skip
    assert memory.machine.s[[30, 31, 32]].tolist() == [132, 133, 102]
    assert memory.machine.s[36:40].tolist() == [104, 105, 106, 107]
    assert memory.words[[16, 8, 9]].tolist() == [1, 1, 2]
    assert memory.words[20:24].tolist() == [1, 2, 3, 4]


@holds("s_dcache_discard", "s_dcache_discard_x2", "s_atc_probe", "s_atc_probe_buffer")
def test_cache_hints_change_nothing(arch: str) -> None:
    memory = Scalars()
    before = memory.words.copy()
    memory.machine.run("s_dcache_discard s[4:5], 0x0\ns_dcache_discard_x2 s[4:5], 0x0\ns_atc_probe 1, s[4:5], 0x0\n"
                       "s_atc_probe_buffer 1, s[8:11], 0x0", arch)  # fmt: skip
    np.testing.assert_array_equal(memory.words, before)


# --- what belongs elsewhere -------------------------------------------------------------------------------------------


@on_each_arch
@pytest.mark.parametrize(("text", "why"), [
    (".long 0xd8010000, 0x00000100", "global data share on ds_add_u32"),  # the GDS bit, which the assembler refuses
    (".long 0x7e1402fe", "LDS_DIRECT or POPS_EXITING_WAVE_ID on v_mov_b32"),
    (".long 0x7e1402ef", "LDS_DIRECT or POPS_EXITING_WAVE_ID on v_mov_b32"),
    (".long 0xbe8a00ef", "LDS_DIRECT or POPS_EXITING_WAVE_ID on s_mov_b32"),
    ("v_add_co_u32_e64 v10, vcc, v0, v1 clamp", "clamp on this operation"),
    (".long 0xd3b3c00a, 0x18020500", "clamp on a move"),  # v_pk_mov_b32 with the clamp bit
])  # fmt: skip
def test_encodings_that_mean_something_else_are_refused(arch: str, text: str, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        Machine(arch).run(text)


# --- LDS --------------------------------------------------------------------------------------------------------------


@holds("ds_condxchg32_rtn_b64")
def test_conditional_exchange_writes_the_dwords_whose_top_bit_is_set(arch: str) -> None:
    machine = Machine()
    words = machine.lds.view(np.uint32)
    words[:128] = np.arange(128) + 0x80000000
    machine.v[0] = np.arange(64) * 8 + 4  # the low three bits are dropped
    machine.v[2] = np.where(np.arange(64) & 1, 0x80000011, 0x11).astype(np.uint32)
    machine.v[3] = np.where(np.arange(64) & 2, 0x80000022, 0x22).astype(np.uint32)
    machine.run("ds_condxchg32_rtn_b64 v[10:11], v0, v[2:3]", arch)
    old = np.arange(128, dtype=np.uint32) + 0x80000000
    np.testing.assert_array_equal(machine.v[10], old[0::2])
    np.testing.assert_array_equal(machine.v[11], old[1::2])
    np.testing.assert_array_equal(words[:128:2], np.where(np.arange(64) & 1, 0x11, old[0::2]))
    np.testing.assert_array_equal(words[1:128:2], np.where(np.arange(64) & 2, 0x22, old[1::2]))


@pytest.mark.parametrize("denorm", range(4))
def test_lds_float_atomics_flush_as_mode_says(denorm: int) -> None:
    """One lane: sums flush inputs and results, comparisons their inputs only, f64 sums nothing."""
    machine = Machine()
    machine.set64(EXEC, 1)
    machine.mode = MODE_DEFAULT & ~0xF0 | denorm << 4 | denorm << 6
    words = machine.lds.view(np.uint32)
    normal, denormal = 0x00800000, 0x00000003  # 2^-126; normal - 2^-149 * 3 is a denormal
    words[0], words[1], words[2], words[3] = normal, denormal, 0x00040400, 0x00000002
    machine.v[1], machine.v[2], machine.v[3], machine.v[4] = 0x80000003, 0x80000001, 0x00018001, 7
    machine.lds.view(np.uint64)[4] = 5
    machine.set_row64(6, [6] * 64)
    machine.run("v_mov_b32 v0, 0\nds_add_f32 v0, v1\nds_max_f32 v0, v2 offset:4\nds_pk_add_f16 v0, v3 offset:8\n"
                "ds_cmpst_f32 v0, v2, v4 offset:12\nds_add_f64 v0, v[6:7] offset:32")  # fmt: skip
    keep_in, keep_out = denorm & 1, denorm & 2
    added = 0x007FFFFD if keep_in else normal
    assert words[0] == (added if keep_out or not keep_in else 0)
    assert words[1] == denormal, "the larger, unchanged; with flushed inputs +0 beats -0"
    # halves: 0x0400 - 1 unit is a denormal, 4 + 1 units are one
    low = (0x03FF if keep_out else 0) if keep_in else 0x0400
    high = 0x0005 if keep_in and keep_out else 0
    assert words[2] == low | high << 16
    assert words[3] == (0x00000002 if keep_in else 0), "2 units are not -1 unit, but as zeros they are equal"
    assert machine.lds.view(np.uint64)[4] == 11


def test_lds_float_atomics_round_to_nearest_whatever_mode_says() -> None:
    machine = Machine()
    machine.set64(EXEC, 1)
    machine.mode = MODE_DEFAULT | 1 | 1 << 2
    machine.lds.view(np.uint32)[0] = 0x3F800000
    machine.v[1] = 0x33000001
    machine.run("ds_add_f32 v0, v1")
    assert machine.lds.view(np.uint32)[0] == 0x3F800000


@pytest.mark.parametrize(("text", "address"), [
    ("ds_add_u32 v0, v1", 2), ("ds_add_u64 v0, v[2:3]", 4),
    ("ds_wrxchg2_rtn_b64 v[4:7], v0, v[2:3], v[2:3] offset1:1", 4),
])  # fmt: skip
def test_a_misaligned_lds_atomic_is_a_fault(text: str, address: int) -> None:
    machine = Machine()
    machine.v[0] = address
    with pytest.raises(RuntimeError, match="misaligned LDS atomic"):
        machine.run(text)


def test_misaligned_lds_reads_and_writes_are_allowed() -> None:
    machine = Machine()
    machine.lds[:] = np.arange(65536) % 251
    machine.v[0] = np.arange(64) * 17 + 3
    machine.run("ds_read_b128 v[4:7], v0\nds_read_b64 v[8:9], v0 offset:1")
    for lane in range(64):
        at = 17 * lane + 3
        assert machine.v[4:8, lane].tobytes() == machine.lds[at : at + 16].tobytes()
        assert machine.v[8:10, lane].tobytes() == machine.lds[at + 1 : at + 9].tobytes()


# --- matrix modifiers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "why"), [
    ("v_mfma_f32_4x4x1_16b_f32 v[8:11], v0, v1, v[4:7] cbsz:2 abid:4", "ABID"),
    ("v_mfma_f32_16x16x1_4b_f32 v[16:31], v0, v1, v[32:47] cbsz:3", "CBSZ that broadcasts to more blocks"),
    ("v_mfma_f32_16x16x16_f16 v[8:11], v[0:1], v[2:3], v[4:7] cbsz:1", "CBSZ that broadcasts to more blocks"),
    ("v_mfma_f32_16x16x32_fp8_fp8 v[8:11], v[0:1], v[2:3], v[4:7] blgp:1", "8-bit float"),
    ("v_smfmac_f32_16x16x32_f16 v[8:11], v[0:1], v[2:5], v6 blgp:1", "sparse"),
])  # fmt: skip
@pytest.mark.parametrize("arch", ARCHS)
def test_undefined_matrix_modifiers_are_refused(arch: str, text: str, why: str) -> None:
    try:
        with pytest.raises(RuntimeError, match=why):
            Machine().run(text, arch)
    except AssertionError as refused:  # the assembler knows the rule too
        assert "error" in str(refused) and "RuntimeError" not in str(refused)


@pytest.mark.parametrize("arch", ARCHS)
def test_fp16_overflow_limits_finite_matrix_sums(arch: str) -> None:
    machine = Machine()
    machine.v[0], machine.v[1] = 0x7F7FFFFF, 0x40000000  # the largest f32, 2
    machine.v[2:4], machine.v[12:16] = 0x7F7F7F7F, 0x7FFFFFF0
    text = ("v_mfma_f32_16x16x4_f32 v[4:7], v0, v1, 0\nv_mfma_i32_16x16x32_i8 v[8:11], v[2:3], v[2:3], v[12:15]\n"
            "v_mov_b32 v1, 0x7f800000\nv_mfma_f32_16x16x4_f32 v[16:19], v0, v1, 0")  # fmt: skip
    wrapped = (0x7FFFFFF0 + 32 * 127 * 127) & 0xFFFFFFFF
    for overflow, single, integer in ((0, 0x7F800000, wrapped), (1, 0x7F7FFFFF, 0x7FFFFFFF)):
        machine.mode = MODE_DEFAULT | overflow << 23
        machine.v[1] = 0x40000000
        machine.run(text, arch)
        assert set(machine.v[4:8].ravel().tolist()) == {single}
        assert set(machine.v[8:12].ravel().tolist()) == {integer}
        assert set(machine.v[16:20].ravel().tolist()) == {0x7F800000}, "a true infinity"
    assert from_fraction(Fraction(2) ** 128, 32) == 0x7F800000
