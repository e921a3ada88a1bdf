"""What the decoder tells the executor and the text does not show: operands, widths, constants, lengths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.decoding.encodings import table
from helpers.decoding.llvm import assemble
from helpers.decoding.ours import decoder

from hipforge.emulator import library

CONSTANT_CASES: tuple[tuple[str, int, int], ...] = (
    # instruction, source, the value an executor must see
    ("v_mov_b32 v0, -16", 0, 0xFFFFFFF0),
    ("v_mov_b32 v0, 0.5", 0, 0x3F000000),
    ("v_add_f32 v0, 0.15915494, v1", 0, 0x3E22F983),
    ("v_add_f32 v0, 0x12345678, v1", 0, 0x12345678),
    ("v_add_f16 v0, -4.0, v1", 0, 0xC400),
    ("v_add_f16 v0, 0x1234, v1", 0, 0x1234),
    ("v_add_u16 v0, -1, v1", 0, 0xFFFF),
    ("v_add_f64 v[0:1], v[2:3], 1.0", 1, 0x3FF0000000000000),
    ("v_add_f64 v[0:1], v[2:3], -3", 1, 0xFFFFFFFFFFFFFFFD),  # an integer is the integer's bits, also for f64
    ("v_cvt_f32_f64 v0, 0x40100001", 0, 0x4010000100000000),  # a literal is the high half of an f64
    ("s_mov_b64 s[0:1], 0x80000000", 0, 0x80000000),  # and is zero-extended for unsigned 64-bit operands
    ("v_cmp_lt_i64 vcc, 0x80000001, v[2:3]", 0, 0xFFFFFFFF80000001),  # but sign-extended for signed ones
    ("s_ashr_i64 s[0:1], 0x80000001, s2", 0, 0xFFFFFFFF80000001),
    ("s_mov_b64 s[0:1], -2", 0, 0xFFFFFFFFFFFFFFFE),
    ("s_mov_b64 s[0:1], 2.0", 0, 0x4000000000000000),
    ("v_pk_add_f16 v0, v1, 1.0", 1, 0x00003C00),  # packed 16-bit: op_sel_hi chooses, the constant is not repeated
    ("v_pk_add_u16 v0, v1, -2", 1, 0xFFFFFFFE),
    ("v_pk_add_u16 v0, v1, 7", 1, 7),
    ("v_pk_add_u16 v0, v1, 1.0", 1, 0x3F800000),  # LLVM's getInlineEncodingV216: f32 for packed integers
    ("v_pk_mul_f32 v[0:1], v[2:3], 4.0", 1, 0x4080000040800000),
    ("v_fmaak_f32 v0, v1, v2, 0x3f800001", 2, 0x3F800001),
    ("v_fmamk_f32 v0, v1, 0x3f800001, v2", 1, 0x3F800001),
    ("v_mfma_f32_16x16x4_f32 v[0:3], v4, v5, 1.0", 2, 0x3F800000),
    ("v_fma_mix_f32 v0, v1, v2, 1.0 op_sel_hi:[0,0,1]", 2, 0x3C00),
    ("v_fma_mix_f32 v0, v1, v2, 1.0", 2, 0x3F800000),
    ("s_setreg_imm32_b32 hwreg(HW_REG_MODE), 0x12", 0, 0x12),
)


@pytest.mark.parametrize(("text", "index", "value"), CONSTANT_CASES, ids=[case[0] for case in CONSTANT_CASES])
def test_constants_are_widened_for_their_operand(text: str, index: int, value: int, tmp_path: Path) -> None:
    assert decoder().constant(assemble(text, "gfx950", tmp_path), "gfx950", index) == value


ONE = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000, "f64": 0x3FF0000000000000}
WIDE = re.compile(r"scalef32_(2xpk16|pk32|sr_pk32)|^v_fma_mix")  # registers only; both widths in one instruction


def test_the_mnemonic_names_the_type_of_the_first_source() -> None:
    seen = 0
    for row in table():
        bases = {"VOP1": 0xD1400000, "VOP2": 0xD1000000, "VOPC": 0xD0000000, "VOP3": 0xD0000000, "VOP3P": 0xD3800000}
        suffix = re.search(r"_(bf16|f16|f32|f64)$", row.name)
        if row.encoding not in bases or suffix is None or "e32_only" in row.arguments or WIDE.search(row.name):
            continue
        code = (bases[row.encoding] + (row.opcode << 16) + (242 << 32)).to_bytes(8, "little")  # 242 is 1.0
        packed_f32 = row.encoding == "VOP3P" or "sr_pk_fp4_f32" in row.name
        one = ONE["f32"] * 0x1_0000_0001 if suffix[1] == "f32" and packed_f32 else ONE[suffix[1]]
        arch = "gfx942" if row.exists_on("gfx942") else "gfx950"
        assert decoder().constant(code, arch, 0) == one, row
        seen += 1
    assert seen > 250


OPERAND_CASES: tuple[tuple[str, str], ...] = (
    # Registers are numbered s0.. (vcc 106, m0 124, exec 126), v0.., a0..; +n is the number of dwords.
    ("v_addc_co_u32_e32 v0, vcc, v1, v2, vcc", "dst=v0+1 dst2=s106+2 src0=v1+1 src1=v2+1 src2=s106+2"),
    ("v_addc_co_u32_e64 v0, s[2:3], v1, v2, s[4:5]", "dst=v0+1 dst2=s2+2 src0=v1+1 src1=v2+1 src2=s4+2"),
    ("v_add_co_u32_e32 v0, vcc, v1, v2", "dst=v0+1 dst2=s106+2 src0=v1+1 src1=v2+1"),
    ("v_cndmask_b32_e32 v0, v1, v2, vcc", "dst=v0+1 src0=v1+1 src1=v2+1 src2=s106+2"),
    ("v_cndmask_b32_dpp v0, v1, v2, vcc quad_perm:[0,0,0,0]", "dst=v0+1 src0=v1+1 src1=v2+1 src2=s106+2"),
    ("v_fmac_f32_e32 v0, v1, v2", "dst=v0+1 src0=v1+1 src1=v2+1 src2=v0+1"),
    ("v_fmac_f64_e64 v[2:3], v[4:5], v[6:7]", "dst=v2+2 src0=v4+2 src1=v6+2 src2=v2+2"),
    ("v_dot2c_f32_f16_dpp v5, v1, v2 row_mirror", "dst=v5+1 src0=v1+1 src1=v2+1 src2=v5+1"),
    ("v_cmp_eq_u16_sdwa s[8:9], v1, s2 src0_sel:BYTE_0 src1_sel:DWORD", "dst=s8+2 src0=v1+1 src1=s2+1"),
    ("v_cmp_eq_u64_e32 vcc, s[4:5], v[2:3]", "dst=s106+2 src0=s4+2 src1=v2+2"),
    ("v_div_scale_f64 v[0:1], vcc, v[2:3], v[4:5], v[2:3]", "dst=v0+2 dst2=s106+2 src0=v2+2 src1=v4+2 src2=v2+2"),
    ("v_mad_u64_u32 v[0:1], s[2:3], v4, s5, v[6:7]", "dst=v0+2 dst2=s2+2 src0=v4+1 src1=s5+1 src2=v6+2"),
    ("v_readlane_b32 s1, v2, m0", "dst=s1+1 src0=v2+1 src1=s124+1"),
    ("v_accvgpr_read_b32 v1, a2", "dst=v1+1 src0=a2+1"),
    ("v_accvgpr_write_b32 a1, s2", "dst=a1+1 src0=s2+1"),
    ("v_accvgpr_mov_b32 a1, a2", "dst=a1+1 src0=a2+1"),
    ("s_swappc_b64 s[30:31], s[4:5]", "dst=s30+2 src0=s4+2"),
    ("s_and_saveexec_b64 s[2:3], vcc", "dst=s2+2 src0=s106+2"),
    ("s_cmpk_lt_i32 s5, 0x7", "src0=s5+1"),
    ("s_load_dwordx4 s[4:7], s[2:3], 0x10", "dst=s4+4 saddr=s2+2"),
    ("s_load_dword s4, s[2:3], s7", "dst=s4+1 saddr=s2+2 soffset=s7+1"),
    ("s_buffer_load_dwordx2 s[4:5], s[8:11], 0x10", "dst=s4+2 srsrc=s8+4"),
    ("s_store_dword s4, s[2:3], 0x0", "saddr=s2+2 vdata=s4+1"),
    ("s_atomic_dec s4, s[2:3], 0x0 glc", "dst=s4+1 saddr=s2+2 vdata=s4+1"),
    ("ds_read_b128 a[4:7], v1", "dst=a4+4 vaddr=v1+1"),
    ("ds_write2_b64 v0, v[2:3], v[4:5] offset0:1 offset1:2", "vaddr=v0+1 vdata=v2+2 vdata2=v4+2"),
    ("ds_bpermute_b32 v0, v1, v2", "dst=v0+1 vaddr=v1+1 vdata=v2+1"),
    ("global_load_dwordx4 v[4:7], v1, s[2:3] offset:16", "dst=v4+4 vaddr=v1+1 saddr=s2+2"),
    ("global_load_dwordx4 a[4:7], v[0:1], off", "dst=a4+4 vaddr=v0+2"),
    ("global_load_lds_dwordx4 v[2:3], off", "vaddr=v2+2"),
    ("global_atomic_cmpswap_x2 v[0:1], v2, v[4:7], s[2:3] sc0", "dst=v0+2 vaddr=v2+1 saddr=s2+2 vdata=v4+4"),
    ("global_atomic_add v[0:1], v2, off", "vaddr=v0+2 vdata=v2+1"),
    ("flat_store_dwordx3 v[0:1], v[4:6]", "vaddr=v0+2 vdata=v4+3"),
    ("scratch_load_dword v0, off, s33 offset:4", "dst=v0+1 saddr=s33+1"),
    ("scratch_store_dwordx2 v3, v[0:1], off", "vaddr=v3+1 vdata=v0+2"),
    ("scratch_load_dword v0, off, off offset:4", "dst=v0+1"),
    ("buffer_load_dwordx4 v[0:3], v[4:5], s[8:11], s3 idxen offen", "dst=v0+4 vaddr=v4+2 srsrc=s8+4 soffset=s3+1"),
    ("buffer_load_dword v4, s[8:11], 0 offen lds", "vaddr=v4+1 srsrc=s8+4 soffset=i0+1"),
    ("buffer_store_short a2, off, s[8:11], m0", "vdata=a2+1 srsrc=s8+4 soffset=s124+1"),
    ("buffer_atomic_pk_add_bf16 v1, v2, s[4:7], 0 offen sc0", "dst=v1+1 vaddr=v2+1 vdata=v1+1 srsrc=s4+4 soffset=i0+1"),
    ("v_smfmac_f32_16x16x64_fp8_fp8 a[0:3], v[4:5], v[8:11], v12", "dst=a0+4 src0=v4+2 src1=v8+4 src2=v12+1"),
    (
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:9], a[12:15], v[0:3], v20, v21 cbsz:2 blgp:4",
        "dst=v0+4 src0=v4+6 src1=a12+4 src2=v0+4 scale_a=v20+1 scale_b=v21+1",
    ),
)


@pytest.mark.parametrize(("text", "operands"), OPERAND_CASES, ids=[case[0] for case in OPERAND_CASES])
def test_operands_are_explicit(text: str, operands: str, tmp_path: Path) -> None:
    assert decoder().operands(assemble(text, "gfx950", tmp_path), "gfx950") == operands


def test_two_unscaled_matrix_instructions_are_two(tmp_path: Path) -> None:
    plain = assemble("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3]", "gfx950", tmp_path)
    assert decoder()(plain + plain, "gfx950")[0] == 8


def test_instructions_of_the_other_architecture_are_refused(tmp_path: Path) -> None:
    only_gfx950 = assemble("v_permlane32_swap_b32 v0, v1", "gfx950", tmp_path)
    only_gfx942 = assemble("v_mfma_f32_16x16x8_xf32 v[0:3], v[4:5], v[6:7], v[0:3]", "gfx942", tmp_path)
    assert decoder()(only_gfx950, "gfx942") == (0, "")
    assert decoder()(only_gfx942, "gfx950") == (0, "")


def test_truncated_instructions_are_refused(tmp_path: Path) -> None:
    texts = ("s_mov_b32 s0, 0x12345", "v_add3_u32 v0, v1, v2, v3", "v_mov_b32_dpp v0, v1 row_shr:1")
    scaled = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21"
    for text in (*texts, scaled):
        code = assemble(text, "gfx950", tmp_path)
        assert decoder()(code, "gfx950")[0] == len(code)
        assert all(decoder()(code[:size], "gfx950") == (0, "") for size in range(len(code)))


def test_the_emulator_library_disassembles_bytes(tmp_path: Path) -> None:
    texts = ("v_add_f32_e32 v0, v1, v2", "ds_read_b128 v[4:7], v1 offset:16", "s_endpgm")
    code = b"".join(assemble(text, "gfx950", tmp_path) for text in texts) + bytes([0xFF] * 4)
    output = library.load().hfemu_disassemble_bytes(code, len(code), b"gfx950").decode()
    lines = [line.split(": ", 1) for line in output.splitlines()]
    assert [text for _, text in lines] == [*texts, "<unknown>"]
    assert [int(address, 16) for address, _ in lines] == [0, 4, 12, 16]
