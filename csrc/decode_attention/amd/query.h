// A row of q as a sum of e4m3 terms, so that K's own bytes enter the matrix instruction without a conversion.
//
//   q = 2^-exponent (t0 + t1 / 16 [+ t2 / 256])
//
// exponent puts the row's largest element into the format's second highest binade. A bf16 has 8 significant bits: t0
// takes 4 (e4m3 rounds to nearest), and what is left is at most 8 units of the last place, which t1 holds exactly. An f16
// has 11, and t2 holds the rest. Elements below 2^-13 of the row's largest lose bits below the last term's smallest step: at
// most 2^-21 (bf16) or 2^-25 (f16) of the largest element.
#pragma once

#include "hipforge/amd/fp8.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"

namespace hf::decode_attention {

template <class T, int kCount>
using Vector = T __attribute__((ext_vector_type(kCount)));

/// The larger or the sum over the four lanes that share lane % 16.
__device__ inline float column_max(float value) {
  return dev::column_combined(value, [](float a, float b) { return __builtin_fmaxf(a, b); });
}
__device__ inline float column_sum(float value) {
  return dev::column_combined(value, [](float a, float b) { return a + b; });
}

constexpr int kTermBits = 4;  // by which each term is finer than the one before

template <class Half>
constexpr int kTerms = __is_same(Half, _Float16) ? 3 : 2;

/// A lane's part of a row: elements 64 c + 16 g + j, j < 16, of the row that lanes with the same lane % 16 share. Where
/// that is more than one chunk, the finer terms stay in LDS: they are needed for K's product only, and registers are not.
template <class Half, int kChunks>
struct Query {
  static constexpr int kKept = kChunks > 1 ? 1 : kTerms<Half>;
  static constexpr uint32_t kLdsBytes = (kTerms<Half> - kKept) * kChunks * dev::kWaveSize * 16;
#if defined(__gfx950__)
  static constexpr int kTop = 8;  // e4m3fn ends at 448
#else
  static constexpr int kTop = 7;  // e4m3fnuz ends at 240
#endif

  dev::u32x4 kept[kKept][kChunks];
  int exponent;
  float sum;  // of the row's elements

  /// What a lane loads for its part.
  struct Pieces {
    Vector<Half, 8> of[kChunks][2];

    Pieces() = default;
    __device__ explicit Pieces(const Half* from) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h) of[c][h] = *reinterpret_cast<const Vector<Half, 8>*>(from + 64 * c + 8 * h);
    }
  };

  /// Waves that share `finer` (kLdsBytes in LDS) have the same rows; one of them writes it.
  __device__ Query(const Pieces& pieces, dev::u32x4* finer, uint32_t lane, bool writes) {
    float values[kChunks][16];
    float largest = 0.f, total = 0.f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto piece = pieces.of[c][h];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const auto value = static_cast<float>(piece[j]);
          values[c][8 * h + j] = value;
          largest = __builtin_fmaxf(largest, __builtin_fabsf(value));
          total += value;
        }
      }
    dev::u32x4 terms[kTerms<Half>][kChunks];
    exponent = kTop - __builtin_amdgcn_frexp_expf(column_max(largest));
    sum = column_sum(total);
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        float rest[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) rest[j] = __builtin_ldexpf(values[c][4 * word + j], exponent);
#pragma unroll
        for (int term = 0; term < kTerms<Half>; ++term) terms[term][c][word] = take_term(rest);
      }
#pragma unroll
    for (int term = 0; term < kTerms<Half>; ++term)
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (term < kKept) kept[term][c] = terms[term][c];
        if (term >= kKept && writes) finer[place(term, c, lane)] = terms[term][c];
      }
  }

  __device__ static uint32_t place(int term, int c, uint32_t lane) {
    return ((term - kKept) * kChunks + c) * dev::kWaveSize + lane;
  }

 private:
  // Four elements' nearest codes; `values` become what the codes leave, for a finer term.
  __device__ static uint32_t take_term(float (&values)[4]) {
    int codes = __builtin_amdgcn_cvt_pk_fp8_f32(values[0], values[1], 0, false);
    codes = __builtin_amdgcn_cvt_pk_fp8_f32(values[2], values[3], codes, true);
    const auto taken = static_cast<uint32_t>(codes);
    const dev::f32x2 low = dev::fp8_low_pair(taken), high = dev::fp8_high_pair(taken);
    values[0] = (values[0] - low[0]) * (1 << kTermBits);
    values[1] = (values[1] - low[1]) * (1 << kTermBits);
    values[2] = (values[2] - high[0]) * (1 << kTermBits);
    values[3] = (values[3] - high[1]) * (1 << kTermBits);
    return taken;
  }
};

}  // namespace hf::decode_attention
