"""Operations that clang folds when their operands are constants, and the instructions that they become when not."""

from __future__ import annotations

import re
from dataclasses import dataclass

F32 = (
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBFC00000, 0x3F000000, 0x40490FDB,
    0x4B000001, 0xCB7FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x33D6BF95, 0x5F000000, 0x3EAAAAAB, 0xC2F6E979,
)  # fmt: skip
F64 = (
    0x0000000000000000, 0x8000000000000000, 0x0000000000000001, 0x800FFFFFFFFFFFFF, 0x0010000000000000,
    0x3FF0000000000000, 0xBFF8000000000000, 0x400921FB54442D18, 0x4330000000000001, 0x7FEFFFFFFFFFFFFF,
    0x7FF0000000000000, 0xFFF0000000000000, 0x3FD5555555555555, 0xC05EDD2F1A9FBE77, 0x41DFFFFFFFC00000,
)  # fmt: skip
F16 = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0xBE00, 0x4248, 0x6401, 0x7BFF, 0x7C00, 0xFC00, 0x3555, 0xD7B6)
I32 = (
    0x00000000, 0x00000001, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x0000001F, 0x00000020, 0x000000FF, 0x00010000,
    0xDEADBEEF, 0x12345678, 0x00800000, 0xFF7FFFFF, 0x00000018,
)  # fmt: skip
I64 = (
    0, 1, 2**64 - 1, 2**63 - 1, 2**63, 0x1F, 0x40, 0x00000000FFFFFFFF, 0x0000000100000000, 0xDEADBEEFCAFEF00D,
    0x0123456789ABCDEF, 0xFFFFFFFF00000000,
)  # fmt: skip
OPERANDS = {"f": F32, "d": F64, "h": F16, "i": I32, "l": I64}
C_TYPE = {"f": "float", "d": "double", "h": "_Float16", "i": "u32", "l": "u64"}


@dataclass(frozen=True)
class Folded:
    """One operation over a, b and c.

    Attributes:
        name: unique within its kind.
        text: the C++ expression.
        mnemonics: one of these must execute when the operands come from memory, and none when they are literals.
        kind: what the operands are: f, d, h (float, double, half), i or l (u32, u64).
        result: the kind of the result, so that any NaN equals any other; "" for bits.
        scalar: what executes when the operands are uniform; empty if that is vector code too.
        also: the instructions also make constants or addresses, and their absence proves nothing.
    """

    name: str
    text: str
    mnemonics: str
    kind: str
    result: str = ""
    scalar: str = ""
    also: bool = False

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.name}"

    @property
    def operands(self) -> int:
        return 3 if re.search(r"\bc\b", self.text) else 2 if re.search(r"\bb\b", self.text) else 1


def f(name: str, text: str, mnemonics: str, result: str = "f") -> Folded:
    return Folded(name, text, mnemonics, "f", result)


def d(name: str, text: str, mnemonics: str, result: str = "d") -> Folded:
    return Folded(name, text, mnemonics, "d", result)


def h(name: str, text: str, mnemonics: str, result: str = "h") -> Folded:
    return Folded(name, text, mnemonics, "h", result)


def i(name: str, text: str, mnemonics: str, scalar: str = "", *, also: bool = False) -> Folded:
    return Folded(name, text, mnemonics, "i", "", scalar, also)


def l(name: str, text: str, mnemonics: str, scalar: str = "", *, also: bool = False) -> Folded:  # noqa: E743
    return Folded(name, text, mnemonics, "l", "", scalar, also)


FLOATS = (
    f("add", "a + b", "v_add_f32"),
    f("sub", "a - b", "v_sub_f32"),
    f("mul", "a * b", "v_mul_f32"),
    f("div", "a / b", "v_div_fixup_f32"),
    f("fma", "__builtin_fmaf(a, b, c)", "v_fma_f32|v_fmac_f32"),
    f("min", "__builtin_fminf(a, b)", "v_min_f32"),
    f("max", "__builtin_fmaxf(a, b)", "v_max_f32"),
    f("minimum", "__builtin_elementwise_minimum(a, b)", "v_minimum3_f32|v_min_f32"),
    f("maximum", "__builtin_elementwise_maximum(a, b)", "v_maximum3_f32|v_max_f32"),
    f("floor", "__builtin_floorf(a)", "v_floor_f32"),
    f("ceil", "__builtin_ceilf(a)", "v_ceil_f32"),
    f("trunc", "__builtin_truncf(a)", "v_trunc_f32"),
    f("rint", "__builtin_rintf(a)", "v_rndne_f32"),
    f("round", "__builtin_roundf(a)", "v_trunc_f32"),
    f("fract", "__builtin_amdgcn_fractf(a)", "v_fract_f32"),
    f("ldexp", "__builtin_amdgcn_ldexpf(a, (int)(__builtin_bit_cast(unsigned, b) >> 22) - 300)", "v_ldexp_f32"),
    f("frexp_mant", "__builtin_amdgcn_frexp_mantf(a)", "v_frexp_mant_f32"),
    f("frexp_exp", "__builtin_amdgcn_frexp_expf(a)", "v_frexp_exp_i32_f32", ""),
    f("med3", "__builtin_amdgcn_fmed3f(a, b, c)", "v_med3_f32"),
    f("mul_legacy", "mul_legacy(a, b)", "v_mul_legacy_f32"),
    f("copysign", "__builtin_copysignf(a, b)", "v_bfi_b32"),
    f("pkrtz", "__builtin_bit_cast(u32, __builtin_amdgcn_cvt_pkrtz(a, b))", "v_cvt_pkrtz_f16_f32", ""),
    f("less", "a < b", "v_cmp_lt_f32|v_cmp_gt_f32|v_cmp_nlt_f32|v_cmp_ngt_f32", ""),
    f("unordered_equal", "!(a < b || a > b)", "v_cmp_nlg_f32|v_cmp_lg_f32", ""),
    f("class", "__builtin_amdgcn_classf(a, 0x2d5)", "v_cmp_class_f32", ""),
    f("subnormal", "__builtin_issubnormal(a)", "v_cmp_class_f32", ""),
    f("to_half", "(float)(_Float16)a", "v_cvt_f16_f32"),
    f("half_add", "(float)((_Float16)a + (_Float16)b)", "v_add_f16"),
    f("to_double", "(double)a", "v_cvt_f64_f32", "d"),
    f("double_mul", "(u32)(__builtin_bit_cast(unsigned long, (double)a * (double)b) >> 32)", "v_mul_f64"),
    f("double_fma", "(float)__builtin_fma((double)a, (double)b, (double)c)", "v_fma_f64|v_fmac_f64"),
    f("to_int", "a > -2e9f && a < 2e9f ? (int)a : 1", "v_cvt_i32_f32", ""),
    f("to_unsigned", "a >= 0 && a < 4e9f ? (u32)a : 1", "v_cvt_u32_f32", ""),
)
DOUBLES = (
    d("add", "a + b", "v_add_f64"),
    d("mul", "a * b", "v_mul_f64"),
    d("div", "a / b", "v_div_fixup_f64"),
    d("fma", "__builtin_fma(a, b, c)", "v_fma_f64|v_fmac_f64"),
    d("min", "__builtin_fmin(a, b)", "v_min_f64"),
    d("max", "__builtin_fmax(a, b)", "v_max_f64"),
    d("floor", "__builtin_floor(a)", "v_floor_f64"),
    d("ceil", "__builtin_ceil(a)", "v_ceil_f64"),
    d("trunc", "__builtin_trunc(a)", "v_trunc_f64"),
    d("rint", "__builtin_rint(a)", "v_rndne_f64"),
    d("fract", "__builtin_amdgcn_fract(a)", "v_fract_f64"),
    d("ldexp", "__builtin_amdgcn_ldexp(a, (int)(__builtin_bit_cast(u64, b) >> 51) - 2600)", "v_ldexp_f64"),
    d("frexp_mant", "__builtin_amdgcn_frexp_mant(a)", "v_frexp_mant_f64"),
    d("frexp_exp", "__builtin_amdgcn_frexp_exp(a)", "v_frexp_exp_i32_f64", ""),
    d("class", "__builtin_amdgcn_class(a, 0x2d5)", "v_cmp_class_f64", ""),
    d("less", "a < b", "v_cmp_lt_f64|v_cmp_gt_f64", ""),
    d("not_greater", "!(a > b)", "v_cmp_ngt_f64|v_cmp_nlt_f64", ""),
    d("to_float", "(float)a", "v_cvt_f32_f64", "f"),
    d("to_int", "a > -2e9 && a < 2e9 ? (int)a : 1", "v_cvt_i32_f64", ""),
    d("to_unsigned", "a >= 0 && a < 4e9 ? (u32)a : 1", "v_cvt_u32_f64", ""),
    d("to_half", "(_Float16)a", "v_cvt_f16_f32|v_cndmask_b32", "h"),
)
HALVES = (
    h("add", "a + b", "v_add_f16"),
    h("sub", "a - b", "v_sub_f16|v_add_f16"),
    h("mul", "a * b", "v_mul_f16"),
    h("div", "a / b", "v_div_fixup_f16"),
    h("fma", "__builtin_fmaf16(a, b, c)", "v_fma_f16|v_fmac_f16"),
    h("min", "__builtin_fminf16(a, b)", "v_min_f16"),
    h("max", "__builtin_fmaxf16(a, b)", "v_max_f16"),
    h("med3", "__builtin_amdgcn_fmed3h(a, b, c + (_Float16)1)", "v_med3_f16"),
    h("floor", "__builtin_floorf16(a)", "v_floor_f16"),
    h("ceil", "__builtin_ceilf16(a)", "v_ceil_f16"),
    h("trunc", "__builtin_truncf16(a)", "v_trunc_f16"),
    h("rint", "__builtin_rintf16(a)", "v_rndne_f16"),
    h("fract", "__builtin_amdgcn_fracth(a)", "v_fract_f16"),
    h("ldexp", "__builtin_amdgcn_ldexph(a, (int)(__builtin_bit_cast(u16, b) >> 10) - 31)", "v_ldexp_f16"),
    h("frexp_mant", "__builtin_amdgcn_frexp_manth(a)", "v_frexp_mant_f16"),
    h("frexp_exp", "(u16)__builtin_amdgcn_frexp_exph(a)", "v_frexp_exp_i16_f16", ""),
    h("class", "__builtin_amdgcn_classh(a, 0x2d5)", "v_cmp_class_f16", ""),
    h("less", "a < b", "v_cmp_lt_f16|v_cmp_gt_f16", ""),
    h("to_float", "(float)a", "v_cvt_f32_f16", "f"),
    h("to_short", "a > -3e4f && a < 3e4f ? (i16)a : 1", "v_cvt_i16_f16|v_cvt_i32_f32|v_cvt_i32_f16", ""),
    h("pair_add", "pair((half2){a, b} + (half2){b, c})", "v_pk_add_f16", "p"),
    h("pair_mul", "pair((half2){a, b} * (half2){b, c})", "v_pk_mul_f16", "p"),
    h("pair_fma", "pair(__builtin_elementwise_fma((half2){a, b}, (half2){b, c}, (half2){c, a}))", "v_pk_fma_f16", "p"),
    h("pair_min", "pair(__builtin_elementwise_minnum((half2){a, b}, (half2){b, c}))", "v_pk_min_f16", "p"),
)
WORDS = (
    i("add", "a + b", "v_add_u32", "s_add_i32|s_add_u32", also=True),
    i("sub", "a - b", "v_sub_u32", "s_sub_i32|s_sub_u32"),
    i("mul", "a * b", "v_mul_lo_u32", "s_mul_i32"),
    i("mul_hi_u", "(unsigned)(((unsigned long)a * b) >> 32)", "v_mul_hi_u32|v_mad_u64_u32", "s_mul_hi_u32"),
    i("mul_hi_i", "(unsigned)(((long)(int)a * (int)b) >> 32)", "v_mul_hi_i32|v_mad_i64_i32", "s_mul_hi_i32"),
    i("mul_u24", "(a & 0xFFFFFFu) * (b & 0xFFFFFFu)", "v_mul_u32_u24", "s_mul_i32"),
    i("mad_u24", "(a & 0xFFFFFFu) * (b & 0xFFFFFFu) + c", "v_mad_u32_u24|v_mul_u32_u24|v_mad_u64_u32", "s_mul_i32"),
    i("mul_i24", "(u32)(((int)(a << 8) >> 8) * ((int)(b << 8) >> 8))", "v_mul_i32_i24", "s_mul_i32"),
    i("and", "a & b", "v_and_b32", "s_and_b32", also=True),
    i("or", "a | b", "v_or_b32", "s_or_b32"),
    i("xor", "a ^ b", "v_xor_b32", "s_xor_b32"),
    i("xnor", "~(a ^ b)", "v_xnor_b32|v_bitop3_b32", "s_xnor_b32|s_xor_b32"),
    i("and_not", "a & ~b", "v_bfi_b32|v_bitop3_b32|v_not_b32", "s_andn2_b32", also=True),
    i("choose", "(a & b) | (~a & c)", "v_bfi_b32|v_bitop3_b32", "s_and_b32|s_andn2_b32"),
    i("or3", "a | b | c", "v_or3_b32", "s_or_b32"),
    i("add3", "a + b + c", "v_add3_u32", "s_add_i32|s_add_u32"),
    i("and_or", "(a & b) | c", "v_and_or_b32", "s_and_b32"),
    i("shl_add", "(a << 3) + b", "v_lshl_add_u32", "s_lshl3_add_u32"),
    i("add_shl", "(a + b) << (c & 31)", "v_add_lshl_u32", "s_lshl_b32"),
    i("shl_or", "(a << (b & 31)) | c", "v_lshl_or_b32", "s_lshl_b32"),
    i("shl", "a << (b & 31)", "v_lshlrev_b32", "s_lshl_b32", also=True),
    i("shr", "a >> (b & 31)", "v_lshrrev_b32", "s_lshr_b32"),
    i("sar", "(unsigned)((int)a >> (b & 31))", "v_ashrrev_i32", "s_ashr_i32"),
    i("shr64", "(unsigned)(((unsigned long)a << 32 | b) >> (c & 63))", "v_lshrrev_b64", "s_lshr_b64"),
    i("rotate", "__builtin_rotateright32(a, b)", "v_alignbit_b32", "s_lshr_b64"),
    i("ubfe", "__builtin_amdgcn_ubfe(a, b & 31, c & 31)", "v_bfe_u32"),
    i("sbfe", "__builtin_amdgcn_sbfe(a, b & 31, c & 31)", "v_bfe_i32"),
    i("alignbit", "__builtin_amdgcn_alignbit(a, b, c)", "v_alignbit_b32", "s_lshr_b64"),
    i("perm", "__builtin_amdgcn_perm(a, b, 0x0c070d02u)", "v_perm_b32"),
    i("perm_signs", "__builtin_amdgcn_perm(a, b, 0x080b090au)", "v_perm_b32"),
    i("bswap", "__builtin_bswap32(a)", "v_perm_b32"),
    i("popcount", "__builtin_popcount(a)", "v_bcnt_u32_b32", "s_bcnt1_i32_b32"),
    i("leading", "a ? __builtin_clz(a) : 32u", "v_ffbh_u32", "s_flbit_i32_b32"),
    i("leading_sign", "(u32)sffbh((int)a)", "v_ffbh_i32", "s_flbit_i32"),
    i("trailing", "a ? __builtin_ctz(a) : 32u", "v_ffbl_b32", "s_ff1_i32_b32"),
    i("reverse", "__builtin_bitreverse32(a)", "v_bfrev_b32", "s_brev_b32", also=True),
    i("absolute", "(u32)__builtin_abs((int)(a | 1))", "v_max_i32", "s_abs_i32"),
    i("min_i", "(int)a < (int)b ? a : b", "v_min_i32", "s_min_i32"),
    i("min_u", "a < b ? a : b", "v_min_u32", "s_min_u32"),
    i("max_i", "(int)a > (int)b ? a : b", "v_max_i32", "s_max_i32"),
    i("max_u", "a > b ? a : b", "v_max_u32", "s_max_u32"),
    i("max3", "(u32)larger(larger((int)a, (int)b), (int)c)", "v_max3_i32"),
    i("min3_u", "__builtin_elementwise_min(__builtin_elementwise_min(a, b), c)", "v_min3_u32"),
    i("between", "smaller(larger(a, 100u), 70000u)", "v_med3_u32|v_max_u32"),
    i("less", "a < b", "v_cmp_lt_u32|v_cmp_gt_u32", "s_cmp_lt_u32|s_cmp_gt_u32"),
    i("less_i", "(int)a < (int)b", "v_cmp_lt_i32|v_cmp_gt_i32", "s_cmp_lt_i32|s_cmp_gt_i32"),
    i("from_int", "(float)(int)a", "v_cvt_f32_i32"),
    i("from_unsigned", "(float)a", "v_cvt_f32_u32"),
    i("from_byte", "(float)(a >> 16 & 255)", "v_cvt_f32_ubyte2"),
    i("double_from_int", "(double)(int)a", "v_cvt_f64_i32"),
    i("double_from_unsigned", "(double)a", "v_cvt_f64_u32"),
    i("half_from_short", "(u16)__builtin_bit_cast(i16, (_Float16)(i16)a)", "v_cvt_f16_i16|v_cvt_f32_i32"),
    i("saturating_add", "__builtin_elementwise_add_sat(a, b)", "v_add_u32", also=True),
    i("saturating_sub", "__builtin_elementwise_sub_sat(a, b)", "v_sub_u32"),
    i("saturating_add_i", "(u32)__builtin_elementwise_add_sat((int)a, (int)b)", "v_add_i32"),
    i("short_shl", "(u16)((u16)a << (b & 15))", "v_lshlrev_b16", "s_lshl_b32"),
    i("short_max", "(u16)__builtin_elementwise_max((i16)a, (i16)b)", "v_max_i16", "s_max_i32"),
    i("pair_add", "pair(halves(a) + halves(b))", "v_pk_add_u16"),
    i("pair_sub", "pair(halves(a) - halves(b))", "v_pk_sub_i16|v_pk_sub_u16"),
    i("pair_mul", "pair(halves(a) * halves(b))", "v_pk_mul_lo_u16"),
    i("pair_shl", "pair(halves(a) << (halves(b) & (u16)15))", "v_pk_lshlrev_b16"),
    i("pair_shr", "pair(halves(a) >> (halves(b) & (u16)15))", "v_pk_lshrrev_b16"),
    i("pair_min", "pair(__builtin_elementwise_min(halves(a), halves(b)))", "v_pk_min_u16"),
)
LONGS = (
    l("add", "a + b", "v_lshl_add_u64|v_add_co_u32", "s_add_u32", also=True),
    l("sub", "a - b", "v_sub_co_u32", "s_sub_u32"),
    l("mul", "a * b", "v_mad_u64_u32", "s_mul_hi_u32"),
    l("and", "a & b", "v_and_b32", "s_and_b64"),
    l("xor", "a ^ b", "v_xor_b32", "s_xor_b64"),
    l("or_not", "a | ~b", "v_not_b32|v_bitop3_b32|v_bfi_b32", "s_orn2_b64", also=True),
    l("shl", "a << (b & 63)", "v_lshlrev_b64", "s_lshl_b64"),
    l("shr", "a >> (b & 63)", "v_lshrrev_b64", "s_lshr_b64"),
    l("sar", "(u64)((long)a >> (b & 63))", "v_ashrrev_i64", "s_ashr_i64"),
    l("popcount", "(u64)__builtin_popcountl(a)", "v_bcnt_u32_b32", "s_bcnt1_i32_b64"),
    l("leading", "(u64)(a ? __builtin_clzl(a) : 64)", "v_ffbh_u32", "s_flbit_i32_b64"),
    l("trailing", "(u64)(a ? __builtin_ctzl(a) : 64)", "v_ffbl_b32", "s_ff1_i32_b64"),
    l("reverse", "__builtin_bitreverse64(a)", "v_bfrev_b32", "s_brev_b64", also=True),
    l("less", "(u64)(a < b)", "v_cmp_lt_u64|v_cmp_gt_u64"),
    l("less_i", "(u64)((long)a < (long)b)", "v_cmp_lt_i64|v_cmp_gt_i64"),
    l("equal", "(u64)(a == b)", "v_cmp_eq_u64", "s_cmp_eq_u64"),
    l("to_float", "(float)(long)a", "v_cvt_f32_i32|v_cvt_f32_u32|v_ldexp_f32"),
    l("to_double", "(double)a", "v_cvt_f64_u32"),
)
OPERATIONS = (*FLOATS, *DOUBLES, *HALVES, *WORDS, *LONGS)


def cases(operation: Folded) -> list[tuple[int, int, int]]:
    """Operand triples: every value, with five partners each where there are several operands."""
    values = OPERANDS[operation.kind]
    steps = range(5) if operation.operands > 1 else (0,)
    count = len(values)
    return [
        (value, values[(at + step * step + 3 * step) % count], values[(at * 7 + step + 3) % count])
        for at, value in enumerate(values)
        for step in steps
    ]
