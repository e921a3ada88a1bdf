"""What random programs are built on: types, guarded operations, and how a device and a host reach their memories."""

from __future__ import annotations

COMMON = """
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned u32; typedef unsigned long long u64;
typedef int i32; typedef long long i64; typedef short i16; typedef signed char i8;
typedef _Float16 f16; typedef __bf16 bf16; typedef float f32; typedef double f64;
template <class T, int n> using vec = T __attribute__((ext_vector_type(n)));
typedef vec<u32, 4> u32x4; typedef vec<i16, 2> i16x2; typedef vec<u8, 4> u8x4; typedef vec<i64, 2> i64x2;
typedef vec<f16, 2> f16x2; typedef vec<f32, 2> f32x2; typedef vec<f32, 4> f32x4; typedef vec<f64, 2> f64x2;
HD static inline u16 bits(f16 x) { return x != x ? (u16)0x7E00 : __builtin_bit_cast(u16, x); }
HD static inline u16 bits(bf16 x) { return (f32)x != (f32)x ? (u16)0x7FC0 : __builtin_bit_cast(u16, x); }
HD static inline u32 bits(f32 x) { return x != x ? 0x7FC00000u : __builtin_bit_cast(u32, x); }
HD static inline u64 bits(f64 x) { return x != x ? 0x7FF8000000000000ull : __builtin_bit_cast(u64, x); }
template <class T> HD static inline u64 bits(T x) { return (u64)x; }
HD static inline f16 from16(u16 x) { return __builtin_bit_cast(f16, x); }
HD static inline f32 from32(u32 x) { return __builtin_bit_cast(f32, x); }
HD static inline f64 from64(u64 x) { return __builtin_bit_cast(f64, x); }
HD static inline i32 to_i32(f32 x) { return x > -2e9f && x < 2e9f ? (i32)x : 7; }
HD static inline u32 to_u32(f32 x) { return x >= 0.0f && x < 4e9f ? (u32)x : 9u; }
HD static inline i64 to_i64(f64 x) { return x > -9e18 && x < 9e18 ? (i64)x : 11; }
HD static inline u64 to_u64(f64 x) { return x >= 0 && x < 18e18 ? (u64)x : 13; }
HD static inline i16 to_i16(f16 x) { return x > (f16)-30000 && x < (f16)30000 ? (i16)x : (i16)5; }
template <class T> HD static inline T hidden(T x) { asm volatile("" : REGISTER(x)); return x; }
template <class T> HD static inline T quotient(T a, T b) { return hidden(a) / (hidden(b) | 1); }
template <class T> HD static inline T rest(T a, T b) { return hidden(a) % (hidden(b) | 1); }
HD static inline i32 divide(i32 a, i32 b) { return a == (i32)0x80000000 && b == -1 ? 3 : a / (b | 1); }
HD static inline i32 modulo(i32 a, i32 b) { return (b | 1) == -1 ? 5 : a % (b | 1); }
HD static inline i64 divide(i64 a, i64 b) { return (u64)a == 1ull << 63 && (b | 1) == -1 ? 3 : a / (b | 1); }
HD static inline i64 modulo(i64 a, i64 b) { return (b | 1) == -1 ? 5 : a % (b | 1); }
HD static inline u64 high(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
HD static inline i64 high(i64 a, i64 b) { return (i64)((__int128)a * b >> 64); }
HD static inline f32 with_sign(f32 x, f32 y) { return y != y ? x : __builtin_copysignf(x, y); }
HD static inline f64 with_sign(f64 x, f64 y) { return y != y ? x : __builtin_copysign(x, y); }
HD static inline u32 mix(u32 h, u32 x) { h ^= x; h *= 0x9E3779B1u; return h ^ h >> 15; }
HD static inline u32 mix64(u32 h, u64 x) { return mix(mix(h, (u32)x), (u32)(x >> 32)); }
template <class T, int n> HD static inline u32 mix_all(u32 h, vec<T, n> v) {
  for (int i = 0; i < n; ++i) h = mix64(h, (u64)bits((T)v[i]));
  return h;
}
"""

# One slice of LDS and of global memory for every work-item: words, 64-bit words, bytes and 16-byte vectors.
DEVICE = """
#define HD __attribute__((device))
#define REGISTER(x) "+v"(x)
#define SHARED __attribute__((shared)) static
#define LANE (__builtin_amdgcn_workitem_id_x() & 63)
#define ATOMIC(op, p, x) __hip_atomic_##op(p, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)
""" + COMMON + """
SHARED u32 lds_words[64 * 8]; SHARED u64 lds_wide[64 * 4];
SHARED u8 lds_bytes[64 * 8]; SHARED f32x4 lds_vectors[64 * 2];
#define WORD(i) lds_words[8 * LANE + (i)]
#define WIDE(i) lds_wide[64 * (i) + LANE]
#define BYTE(i) lds_bytes[8 * LANE + (i)]
#define VECTOR(i) lds_vectors[2 * LANE + (i)]
"""  # fmt: skip

HOST = """
#define HD
#define REGISTER(x) "+r"(x)
#define ATOMIC(op, p, x) __atomic_##op(p, x, __ATOMIC_RELAXED)
""" + COMMON + """
static u32 lds_words[8]; static u64 lds_wide[4]; static u8 lds_bytes[8]; static f32x4 lds_vectors[2];
#define WORD(i) lds_words[i]
#define WIDE(i) lds_wide[i]
#define BYTE(i) lds_bytes[i]
#define VECTOR(i) lds_vectors[i]
// What x86 calls to round a float to bf16, which older libraries lack: the code is the low half of the result register.
extern "C" f32 round_to_bf16(f32 x) asm("__truncsfbf2");
f32 round_to_bf16(f32 x) {
  u32 b = __builtin_bit_cast(u32, x);
  return from32(x != x ? 0x7FC0u : (b + 0x7FFF + (b >> 16 & 1)) >> 16);
}
"""  # fmt: skip

START = """  u32 table[8];
  for (u32 i = 0; i < 8; ++i) {
    table[i] = w0 * i + w1;
    WORD(i) = w1 + i; BYTE(i) = (u8)(w2 >> i);
  }
  for (u32 i = 0; i < 4; ++i) WIDE(i) = (u64)w0 * (i + 3) + w3;
  for (u32 i = 0; i < 2; ++i) VECTOR(i) = (f32x4){(f32)w0, (f32)i, 0.5f, (f32)(i32)w3};
  i32 i0 = (i32)w2;
  f32 f0 = from32(w3), f1 = (f32)(i32)w1 * 0.01f;
  f64 d0 = from64((u64)w0 << 32 | w1);
  u64 q0 = (u64)w2 << 32 | w3;
  i64 j0 = (i64)q0;
  u16 h0 = (u16)w0; i16 k0 = (i16)w1;
  u8 c0 = (u8)w2; i8 b0 = (i8)w3;
  f16 e0 = from16((u16)w1), e1 = (f16)f1;
  bf16 g0 = (bf16)f0;
  u32x4 v0 = {w0, w1, w2, w3};
  f32x2 v1 = {f0, f1};
  f16x2 v2 = {e0, e1};
  i16x2 v3 = {k0, (i16)h0};
"""
STARTING = {
    "u32": ["w0", "w1", "w2", "w3"], "i32": ["i0"], "f32": ["f0", "f1"], "f64": ["d0"], "u64": ["q0"], "i64": ["j0"],
    "u16": ["h0"], "i16": ["k0"], "u8": ["c0"], "i8": ["b0"], "f16": ["e0", "e1"], "bf16": ["g0"],
    "u32x4": ["v0"], "f32x2": ["v1"], "f16x2": ["v2"], "i16x2": ["v3"],
}  # fmt: skip
END = """  for (u32 i = 0; i < 8; ++i) h = mix64(mix(h, table[i]), (u64)WORD(i) << 32 | BYTE(i));
  for (u32 i = 0; i < 4; ++i) h = mix64(h, WIDE(i));
  for (u32 i = 0; i < 2; ++i) h = mix_all<f32, 4>(h, VECTOR(i));
  return h;
"""
