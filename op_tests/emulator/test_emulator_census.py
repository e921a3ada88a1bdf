"""Every mnemonic that compilers and hand-written kernels for these GPUs were seen to emit decodes and executes."""

from __future__ import annotations

import re

import pytest

from hipforge.emulator import library

# Counted over Triton and HIP code objects for gfx942 and gfx950 and over vendors' assembly kernels; 342 spellings.
CENSUS = """
buffer_atomic_pk_add_bf16 buffer_inv buffer_load_dword buffer_load_dwordx2 buffer_load_dwordx4 buffer_load_ubyte
buffer_load_ushort buffer_store_dword buffer_store_dwordx2 buffer_store_dwordx4 buffer_store_short buffer_wbl2
ds_add_rtn_u32 ds_bpermute_b32 ds_read2_b32 ds_read2_b64 ds_read2st64_b32 ds_read2st64_b64 ds_read_b128 ds_read_b32
ds_read_b64 ds_read_b64_tr_b16 ds_read_b64_tr_b4 ds_read_b64_tr_b8 ds_read_u16 ds_read_u8 ds_write2_b32 ds_write_b128
ds_write_b16 ds_write_b32 ds_write_b64 ds_write_b8 flat_load_dword flat_store_dword global_atomic_add
global_atomic_add_f32 global_atomic_add_f64 global_atomic_add_x2 global_atomic_cmpswap global_atomic_cmpswap_x2
global_atomic_or global_atomic_pk_add_bf16 global_atomic_smax global_atomic_swap global_load_dword global_load_dwordx2
global_load_dwordx4 global_load_lds_dword global_load_lds_dwordx4 global_load_ubyte global_load_ushort
global_store_byte global_store_dword global_store_dwordx2 global_store_dwordx3 global_store_dwordx4 global_store_short
global_store_short_d16_hi s_abs_i32 s_add_i32 s_add_u32 s_addc_u32 s_addk_i32 s_and_b32 s_and_b64 s_and_saveexec_b64
s_andn2_b64 s_andn2_saveexec_b64 s_ashr_i32 s_atomic_dec s_barrier s_bcnt1_i32_b64 s_bfe_i32 s_bfe_u32 s_bfm_b64
s_bitset1_b32 s_branch s_brev_b32 s_cbranch_execnz s_cbranch_execz s_cbranch_scc0 s_cbranch_scc1 s_cbranch_vccnz
s_cmp_eq_i32 s_cmp_eq_u32 s_cmp_eq_u64 s_cmp_ge_i32 s_cmp_ge_u32 s_cmp_gt_i32 s_cmp_gt_u32 s_cmp_le_i32 s_cmp_le_u32
s_cmp_lg_u32 s_cmp_lg_u64 s_cmp_lt_i32 s_cmp_lt_u32 s_cmpk_eq_u32 s_cmpk_gt_i32 s_cmpk_lt_i32 s_cselect_b32
s_cselect_b64 s_endpgm s_ff1_i32_b64 s_getpc_b64 s_load_dword s_load_dwordx2 s_load_dwordx4 s_load_dwordx8
s_lshl1_add_u32 s_lshl2_add_u32 s_lshl3_add_u32 s_lshl4_add_u32 s_lshl_b32 s_lshl_b64 s_lshr_b32 s_max_i32 s_min_u32
s_mov_b32 s_mov_b64 s_movk_i32 s_mul_hi_i32 s_mul_hi_u32 s_mul_i32 s_nop s_or_b32 s_or_b64 s_or_saveexec_b64
s_orn2_b64 s_set_gpr_idx_off s_set_gpr_idx_on s_setpc_b64 s_setprio s_sleep s_store_dword s_sub_i32 s_sub_u32
s_subb_u32 s_swappc_b64 s_waitcnt s_xor_b32 s_xor_b64 scratch_load_dword scratch_load_dwordx2 scratch_store_dword
scratch_store_dwordx2 v_accvgpr_read_b32 v_accvgpr_write_b32 v_add3_u32 v_add_co_u32_e32 v_add_f32_dpp v_add_f32_e32
v_add_f32_e64 v_add_i32 v_add_lshl_u32 v_add_u16_e32 v_add_u32_e32 v_add_u32_e64 v_add_u32_sdwa v_addc_co_u32_e32
v_addc_co_u32_e64 v_alignbit_b32 v_and_b32_e32 v_and_b32_e64 v_and_b32_sdwa v_and_or_b32 v_ashrrev_i32_e32
v_bcnt_u32_b32 v_bfe_u32 v_bfi_b32 v_bfrev_b32_e32 v_bitop3_b16 v_bitop3_b32 v_cmp_class_f32_e32 v_cmp_class_f32_e64
v_cmp_eq_f32_e64 v_cmp_eq_u16_e32 v_cmp_eq_u16_e64 v_cmp_eq_u16_sdwa v_cmp_eq_u32_e32 v_cmp_eq_u32_e64
v_cmp_ge_f32_e64 v_cmp_gt_f32_e32 v_cmp_gt_f32_e64 v_cmp_gt_i32_e32 v_cmp_gt_i32_e64 v_cmp_gt_u32_e32 v_cmp_le_i32_e32
v_cmp_le_i32_e64 v_cmp_le_u32_e32 v_cmp_le_u32_e64 v_cmp_lt_f32_e32 v_cmp_lt_f32_e64 v_cmp_lt_i32_e32 v_cmp_lt_i32_e64
v_cmp_lt_u32_e32 v_cmp_lt_u32_e64 v_cmp_ne_u32_e32 v_cmp_ne_u32_e64 v_cmp_ne_u64_e32 v_cmp_nge_f32_e32
v_cmp_ngt_f32_e32 v_cmp_ngt_f32_e64 v_cmp_nlt_f32_e32 v_cmp_nlt_f32_e64 v_cmp_u_f32_e32 v_cmp_u_f32_e64
v_cndmask_b32_e32 v_cndmask_b32_e64 v_cvt_f32_i32_e32 v_cvt_f32_u32_e32 v_cvt_f32_ubyte0_e32 v_cvt_f64_u32_e32
v_cvt_i32_f32_e32 v_cvt_pk_bf16_f32 v_cvt_pk_f32_bf8_e32 v_cvt_pk_f32_bf8_sdwa v_cvt_pk_f32_fp8_e32
v_cvt_pk_f32_fp8_sdwa v_cvt_pk_fp8_f32 v_cvt_pk_u8_f32 v_cvt_scalef32_pk_bf16_fp8 v_cvt_scalef32_pk_f32_fp4
v_cvt_scalef32_pk_f32_fp8 v_cvt_scalef32_pk_fp4_f32 v_cvt_scalef32_pk_fp8_f32 v_cvt_u32_f32_e32 v_div_fixup_f32
v_div_fmas_f32 v_div_scale_f32 v_exp_f32_e32 v_ffbh_u32_e32 v_ffbl_b32_e32 v_fma_f16 v_fma_f32 v_fmaak_f32
v_fmac_f32_e32 v_fmamk_f32 v_frexp_exp_i32_f32_e32 v_ldexp_f32 v_log_f32_e32 v_lshl_add_u32 v_lshl_add_u64
v_lshl_or_b32 v_lshlrev_b16_e32 v_lshlrev_b16_sdwa v_lshlrev_b32_e32 v_lshlrev_b32_e64 v_lshlrev_b64 v_lshrrev_b16_e32
v_lshrrev_b32_e32 v_lshrrev_b32_e64 v_lshrrev_b64 v_mad_i64_i32 v_mad_u64_u32 v_max3_f32 v_max_f32_dpp v_max_f32_e32
v_max_f32_e64 v_max_i32_e32 v_max_u16_sdwa v_max_u32_e32 v_mbcnt_hi_u32_b32 v_mbcnt_lo_u32_b32 v_med3_f32
v_mfma_f32_16x16x128_f8f6f4 v_mfma_f32_16x16x16_bf16 v_mfma_f32_16x16x16_f16 v_mfma_f32_16x16x32_bf16
v_mfma_f32_16x16x32_bf8_bf8 v_mfma_f32_16x16x32_f16 v_mfma_f32_16x16x32_fp8_bf8 v_mfma_f32_16x16x32_fp8_fp8
v_mfma_f32_16x16x4_f32 v_mfma_f32_32x32x16_bf16 v_mfma_f32_32x32x16_bf8_bf8 v_mfma_f32_32x32x16_f16
v_mfma_f32_32x32x16_fp8_fp8 v_mfma_f32_32x32x2_f32 v_mfma_f32_32x32x64_f8f6f4 v_mfma_f32_32x32x8_bf16
v_mfma_f32_32x32x8_f16 v_mfma_i32_16x16x32_i8 v_mfma_i32_16x16x64_i8 v_mfma_i32_32x32x16_i8 v_mfma_i32_32x32x32_i8
v_mfma_scale_f32_16x16x128_f8f6f4 v_mfma_scale_f32_32x32x64_f8f6f4 v_min_f32_e32 v_min_u32_e32 v_mov_b32_dpp
v_mov_b32_e32 v_mov_b64_e32 v_mul_f32_dpp v_mul_f32_e32 v_mul_f32_e64 v_mul_hi_i32 v_mul_hi_i32_i24_e32 v_mul_hi_u32
v_mul_i32_i24_dpp v_mul_i32_i24_e32 v_mul_i32_i24_e64 v_mul_lo_u16_sdwa v_mul_lo_u32 v_mul_u32_u24_dpp
v_mul_u32_u24_e32 v_not_b32_e32 v_or3_b32 v_or_b32_e32 v_or_b32_e64 v_perm_b32 v_permlane16_swap_b32_e32
v_permlane32_swap_b32_e32 v_pk_add_f32 v_pk_fma_f32 v_pk_mul_f32 v_rcp_f32_e32 v_rcp_iflag_f32_e32 v_readfirstlane_b32
v_readlane_b32 v_rndne_f32_e32 v_rsq_f32_e32 v_sad_u8 v_smfmac_f32_16x16x128_fp8_fp8 v_smfmac_f32_16x16x64_fp8_fp8
v_sqrt_f32_e32 v_sub_co_u32_e32 v_sub_f32_e32 v_sub_i32 v_sub_u16_e32 v_sub_u32_e32 v_subb_co_u32_e32
v_subb_co_u32_e64 v_subbrev_co_u32_e32 v_subbrev_co_u32_e64 v_subrev_co_u32_e64 v_subrev_f32_dpp v_subrev_f32_e32
v_subrev_u32_e32 v_trunc_f32_e32 v_writelane_b32 v_xad_u32 v_xor_b32_e32
"""

# What decodes, so that a fault can name it, but has no meaning in a compute wave here: return from a trap handler
# (there is none), the ends of a context save and of a pixel shader, halting for a debugger, global wave sync (which
# needs the driver's set-up and waves of other work-groups in step), and a partition of the screen.
NOT_EXECUTED = re.compile(
    r"s_rfe(_restore)?_b64|s_endpgm_(saved|ordered_ps_done)|s_sendmsghalt|ds_gws_\w+|v_screen_partition_4se_b32"
)


def mnemonics(executable: bool) -> set[str]:
    return set(library.load().hfemu_mnemonics(int(executable)).decode().split())


def base(spelling: str) -> str:
    return re.sub(r"_(e32|e64|sdwa|dpp)$", "", spelling)


def test_the_census_is_complete():
    assert len(CENSUS.split()) == len(set(CENSUS.split())) == 342


@pytest.mark.parametrize("spelling", CENSUS.split())
def test_a_mnemonic_of_the_census_executes(spelling):
    assert base(spelling) in mnemonics(True)


def test_what_does_not_execute_is_just_what_is_listed():
    refused = mnemonics(False)
    assert {name for name in refused if not NOT_EXECUTED.fullmatch(name)} == set()
    assert {name for name in mnemonics(True) if NOT_EXECUTED.fullmatch(name)} == set()
    assert len(mnemonics(True)) > 1100
