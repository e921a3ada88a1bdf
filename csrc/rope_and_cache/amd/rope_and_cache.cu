// RoPE of q and k and the write of k and v into a paged cache, with an RMS norm per head of q and k before it on request.
//
//   token t    q heads  | 0 | 1 | ... |   k heads | 0 | ... |   v heads | 0 | ... |      a head is D elements
//                        `--wave 0---' ...         `-wave-'               `-wave-'
//   wave       kLanes lanes per head, 64 / kLanes heads; lane c of a head owns elements 8c .. 8c + 7 (16 bytes)
//
//   q: norm, rotation, stored                k: norm, rotation, to the cache           v: to the cache
//   norm       sum of squares over the head's lanes, y = H(x f), H(y w) or H(x f (offset + w)); H rounds to 16 bits
//   rotation   of the first rotary_dim elements, in fp32, rounded once: (a cos - b sin, b cos + a sin), where (a, b) are
//              elements (i, i + rotary_dim / 2) (neox) or (2 i, 2 i + 1) (interleaved). The partner of a neox element is
//              in another lane of the wave: heads pass through LDS, a slot per wave, without barriers.
//   cache      at slot_mapping[t] = page * page_size + slot, one of
//                half   the 16-bit element                              2 D bytes a head
//                fp8    e4m3 of x / scale, a scale per tensor or head   D
//                rows   e4m3 of (x - shift) / scale, and a word         D + 4
//                int4   a word per group and eight codes per word       D / 2 + 4 groups
//
// A wave has heads of one kind (q, k or v), so that its lanes do not diverge. A token without a slot has no work
// for k and v. Bytes: each element is read once and written once; cos and sin of a token are read by each of its waves,
// from memory once. Memory is the bound for many tokens, one wave's latency (load, reduce, LDS, store) for few.
#include <hip/hip_runtime.h>

#include "hipforge/amd/element.h"
#include "hipforge/amd/fp8_encode.h"
#include "hipforge/amd/math.h"
#include "hipforge/amd/mx_encode.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "hipforge/host/addresses.h"
#include "hipforge/module.h"

#if !defined(HF_INPUT) || !defined(HF_CACHE)
#error "build a variant: -DHF_INPUT=f16 or bf16 and -DHF_CACHE=half, fp8, rows or int4"
#endif

// Every operation rounds on its own, as torch's do.
#pragma clang fp contract(off)

namespace {

using Half = HF_ELEMENT(HF_INPUT);
enum class Storage { half, fp8, rows, int4 };
constexpr Storage kStorage = Storage::HF_CACHE;

constexpr int kChunk = 8;  // elements of a lane
constexpr int kWaveSize = hf::dev::kWaveSize;
constexpr int kMaxWaves = 4;
constexpr int64_t kManyWaves = 1024;  // from here on several waves share a work-group
constexpr int kInt4Codes = 16;

using Half8 = Half __attribute__((ext_vector_type(8)));
using F32x8 = float __attribute__((ext_vector_type(8)));

// Heads of all tokens, [tokens, heads, D] with any strides.
struct Heads {
  const Half* data;
  int64_t token_stride, head_stride;  // elements
  uint32_t count;
  bool aligned;  // every head starts at a multiple of 16 bytes
};

struct CacheRows {
  uint8_t* data;
  int64_t page_stride, slot_stride, head_stride;  // bytes
  const float* scale;                             // fp8: one, or one per head; null: scale_value
  uint32_t scale_stride;
  float scale_value;
  uint8_t* words;  // rows: float16 scale in the low half, float16 shift in the high half
  int64_t words_page_stride, words_slot_stride, words_head_stride;  // bytes
};

struct Arguments {
  Heads q, k, v;
  Half* q_out;
  int64_t q_out_token_stride, q_out_head_stride;
  bool q_out_aligned;
  CacheRows k_cache, v_cache;
  const Half* q_weight;
  const Half* k_weight;
  const void* cos_sin;
  const void* positions;
  const int64_t* slots;
  int64_t max_positions;
  int64_t cache_slots;
  uint32_t page_size;
  uint32_t chunks;  // of a head: D / 8
  uint32_t rotary_dim;
  uint32_t int4_group_lanes;
  float epsilon, weight_offset;
  bool wide_positions;     // int64
  bool half_angles;        // cos_sin has the inputs' dtype instead of float32
  bool interleaved;
  bool whole_chunks;       // a chunk's elements rotate alike, and their angles can be read at once
  uint32_t q_waves, k_waves, waves;  // of a token: those of q, of k, all
};

__device__ inline F32x8 to_f32(Half8 x) { return __builtin_convertvector(x, F32x8); }
__device__ inline Half8 to_half(F32x8 x) { return __builtin_convertvector(x, Half8); }

__device__ inline Half8 load_chunk(const Half* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const Half8*>(from);
  Half8 x;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = from[i];
  return x;
}

__device__ inline void store_chunk(Half* to, Half8 x, bool aligned) {
  if (aligned) {
    *reinterpret_cast<Half8*>(to) = x;
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) to[i] = x[i];
}

template <int kLanes>
__device__ inline float sum_of_head(float value) {
  return hf::dev::lanes_combined<kLanes>(value, [](float a, float b) { return a + b; });
}

template <int kLanes>
__device__ inline Half8 normalised(Half8 x, const Half* weight, uint32_t chunk, bool active, const Arguments& a) {
  const F32x8 values = to_f32(x);
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) squares = __builtin_fmaf(values[i], values[i], squares);
  const float mean = sum_of_head<kLanes>(squares) / static_cast<float>(a.chunks * kChunk);
  const float factor = hf::dev::reciprocal_root(mean + a.epsilon);
  F32x8 w = {};
  if (active)
#pragma unroll
    for (int i = 0; i < kChunk; ++i) w[i] = static_cast<float>(weight[chunk * kChunk + i]);
  if (a.weight_offset != 0.f) return to_half(values * factor * (w + a.weight_offset));
  return to_half(to_f32(to_half(values * factor)) * w);
}

// cos and sin of the lane's elements; an element of the second neox half has the angles of its partner.
struct Angles {
  F32x8 cos, sin;
};

template <class T>
__device__ inline Angles load_angles(const Arguments& a, int64_t position, uint32_t chunk) {
  const uint32_t half = a.rotary_dim / 2;
  const T* cos = static_cast<const T*>(a.cos_sin) + position * a.rotary_dim;
  const T* sin = cos + half;
  Angles angles = {};
  if (a.whole_chunks && !a.interleaved) {
    using T8 = T __attribute__((ext_vector_type(8)));
    const uint32_t first = chunk * kChunk < half ? chunk * kChunk : chunk * kChunk - half;
    angles.cos = __builtin_convertvector(*reinterpret_cast<const T8*>(cos + first), F32x8);
    angles.sin = __builtin_convertvector(*reinterpret_cast<const T8*>(sin + first), F32x8);
    return angles;
  }
  if (a.whole_chunks) {
    using T4 = T __attribute__((ext_vector_type(4)));
    const auto c = __builtin_convertvector(*reinterpret_cast<const T4*>(cos + chunk * 4), hf::dev::f32x4);
    const auto s = __builtin_convertvector(*reinterpret_cast<const T4*>(sin + chunk * 4), hf::dev::f32x4);
    angles.cos = __builtin_shufflevector(c, c, 0, 0, 1, 1, 2, 2, 3, 3);
    angles.sin = __builtin_shufflevector(s, s, 0, 0, 1, 1, 2, 2, 3, 3);
    return angles;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t element = chunk * kChunk + i;
    if (element >= a.rotary_dim) continue;
    const uint32_t index = a.interleaved ? element / 2 : element < half ? element : element - half;
    angles.cos[i] = static_cast<float>(cos[index]);
    angles.sin[i] = static_cast<float>(sin[index]);
  }
  return angles;
}

// The elements that those of the lane's chunk rotate with. `head` is the wave's slot in LDS, where the head starts.
__device__ inline Half8 partners(Half8 x, Half8* head, uint32_t chunk, const Arguments& a) {
  if (a.interleaved) return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
  const uint32_t half = a.rotary_dim / 2;
  head[chunk] = x;
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  if (a.whole_chunks) return head[chunk * kChunk < half ? chunk + half / kChunk : chunk - half / kChunk];
  const Half* elements = reinterpret_cast<const Half*>(head);
  Half8 other = x;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t element = chunk * kChunk + i;
    if (element < a.rotary_dim) other[i] = elements[element < half ? element + half : element - half];
  }
  return other;
}

__device__ inline Half8 rotated(Half8 x, Half8* head, uint32_t chunk, bool active, int64_t position, const Arguments& a) {
  if (!active || chunk * kChunk >= a.rotary_dim) return x;
  const Half8 other = partners(x, head, chunk, a);
  Angles angles;
  if (position < 0 || position >= a.max_positions) {
    angles.cos = angles.sin = F32x8(__builtin_nanf(""));
  } else if (a.half_angles) {
    angles = load_angles<Half>(a, position, chunk);
  } else {
    angles = load_angles<float>(a, position, chunk);
  }
  const F32x8 values = to_f32(x), others = to_f32(other);
  const uint32_t half = a.rotary_dim / 2;
  Half8 result = x;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t element = chunk * kChunk + i;
    const float turned = others[i] * angles.sin[i];
    const bool first = a.interleaved ? i % 2 == 0 : element < half;
    const float sum = values[i] * angles.cos[i] + (first ? -turned : turned);
    if (element < a.rotary_dim) result[i] = static_cast<Half>(sum);
  }
  return result;
}

constexpr float kFp8Max =
#if defined(__gfx942__)
    240.f;
#else
    448.f;
#endif

__device__ inline uint32_t word_of(_Float16 scale, _Float16 shift) {
  return static_cast<uint32_t>(__builtin_bit_cast(uint16_t, shift)) << 16 | __builtin_bit_cast(uint16_t, scale);
}

__device__ inline void store_codes(uint8_t* row, uint32_t chunk, F32x8 scaled) {
  float values[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) values[i] = scaled[i];
  reinterpret_cast<hf::dev::u32x2*>(row)[chunk] = hf::dev::encode_e4m3x8(values, kFp8Max);
}

// A head to its row of the cache; all lanes of the wave take part in the reductions, `active` ones store.
template <int kLanes>
__device__ inline void store_head(const CacheRows& cache, int64_t slot, uint32_t page_size, uint32_t head, Half8 x,
                                  uint32_t chunk, bool active, const Arguments& a) {
  const uint32_t page = static_cast<uint32_t>(slot) / page_size, in_page = static_cast<uint32_t>(slot) - page * page_size;
  uint8_t* row = cache.data + page * cache.page_stride + in_page * cache.slot_stride + head * cache.head_stride;
  const F32x8 values = to_f32(x);
  if constexpr (kStorage == Storage::half) {
    if (active) *reinterpret_cast<Half8*>(row + chunk * sizeof(Half8)) = x;
  } else if constexpr (kStorage == Storage::fp8) {
    if (!active) return;
    const float scale = cache.scale ? cache.scale[head * cache.scale_stride] : cache.scale_value;
    store_codes(row, chunk, values * hf::dev::inverse_scale(scale));
  } else if constexpr (kStorage == Storage::rows) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum = sum + values[i];
    const auto shift = static_cast<_Float16>(sum_of_head<kLanes>(sum) / static_cast<float>(a.chunks * kChunk));
    const F32x8 centred = values - static_cast<float>(shift);
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (active) amax = hf::dev::larger(amax, hf::dev::magnitude_bits(centred[i]));
    amax = hf::dev::lanes_combined<kLanes>(amax, hf::dev::larger);
    auto scale = static_cast<_Float16>(__builtin_bit_cast(float, amax) / kFp8Max);
    const float wide = static_cast<float>(scale);
    // A row of equal values, and one whose range leaves float16, keep their mean alone. A NaN fails both comparisons.
    if (!(wide > 0.f && wide < __builtin_inff())) scale = static_cast<_Float16>(1.f);
    if (!active) return;
    store_codes(row, chunk, centred / static_cast<float>(scale));
    if (chunk == 0)
      *reinterpret_cast<uint32_t*>(cache.words + page * cache.words_page_stride + in_page * cache.words_slot_stride +
                                   head * cache.words_head_stride) = word_of(scale, shift);
  } else {
    float least = __builtin_inff(), largest = -__builtin_inff();
    bool nan = false;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (!active) continue;
      least = __builtin_fminf(least, values[i]);
      largest = __builtin_fmaxf(largest, values[i]);
      nan = nan || values[i] != values[i];
    }
    least = nan ? __builtin_nanf("") : least;
    largest = nan ? __builtin_nanf("") : largest;
    const auto smaller = [](float x, float y) { return x != x || x < y ? x : y; };  // keeps a NaN, as fminf does not
    const auto greater = [](float x, float y) { return x != x || x > y ? x : y; };
#pragma unroll
    for (uint32_t lanes = 1; lanes < kLanes; lanes *= 2) {
      if (lanes >= a.int4_group_lanes) break;
      const uint32_t other = hf::dev::lane_index() ^ lanes;
      const auto from = [&](float x) {
        return __builtin_bit_cast(float, hf::dev::from_lane(__builtin_bit_cast(uint32_t, x), other));
      };
      const float low = from(least), high = from(largest);
      least = smaller(least, low);
      largest = greater(largest, high);
    }
    if (!active) return;
    const auto shift = static_cast<_Float16>(least);
    auto scale = static_cast<_Float16>((largest - least) / static_cast<float>(kInt4Codes - 1));
    const float wide = static_cast<float>(scale);
    if (!(__builtin_fabsf(wide) < __builtin_inff())) scale = static_cast<_Float16>(0.f);
    const bool flat = !(static_cast<float>(scale) > 0.f);
    const F32x8 steps = (values - static_cast<float>(shift)) / (flat ? 1.f : static_cast<float>(scale));
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float code = __builtin_floorf(steps[i] + 0.5f);
      const auto limited = static_cast<uint32_t>(__builtin_fminf(__builtin_fmaxf(code, 0.f), kInt4Codes - 1.f));
      word |= (flat ? 0u : limited) << (4 * i);
    }
    uint32_t* words = reinterpret_cast<uint32_t*>(row);
    const uint32_t groups = a.chunks / a.int4_group_lanes;
    if (chunk % a.int4_group_lanes == 0) words[chunk / a.int4_group_lanes] = word_of(scale, shift);
    words[groups + chunk] = word;
  }
}

template <int kLanes>
__global__ __launch_bounds__(kMaxWaves* kWaveSize) void rope_and_cache_kernel(const Arguments a) {
  __shared__ Half8 lds[kMaxWaves * kWaveSize];
  const uint32_t in_group = hf::dev::uniform(threadIdx.x / kWaveSize);
  const uint32_t lane = threadIdx.x % kWaveSize;
  const uint32_t token = blockIdx.x;
  const uint32_t wave = blockIdx.y * (blockDim.x / kWaveSize) + in_group;
  if (wave >= a.waves) return;
  const bool is_q = wave < a.q_waves, is_k = !is_q && wave < a.q_waves + a.k_waves;

  // Ahead of every store, so that these are scalar loads.
  const int64_t slot = a.slots[token];
  const int64_t position = a.wide_positions ? static_cast<const int64_t*>(a.positions)[token]
                                            : static_cast<const int32_t*>(a.positions)[token];
  if (!is_q && (slot < 0 || slot >= a.cache_slots)) return;
  const Heads& from = is_q ? a.q : is_k ? a.k : a.v;
  const uint32_t first_wave = is_q ? 0 : is_k ? a.q_waves : a.q_waves + a.k_waves;
  const uint32_t head = (wave - first_wave) * (kWaveSize / kLanes) + lane / kLanes;
  const uint32_t chunk = lane % kLanes;
  const bool active = head < from.count && chunk < a.chunks;

  Half8 x = {};
  if (active)
    x = load_chunk(from.data + token * from.token_stride + head * from.head_stride + chunk * kChunk, from.aligned);
  if (is_q || is_k) {
    const Half* weight = is_q ? a.q_weight : a.k_weight;
    if (weight) x = normalised<kLanes>(x, weight, chunk, active, a);
    x = rotated(x, lds + threadIdx.x - chunk, chunk, active, position, a);
  }
  if (is_q) {
    if (active)
      store_chunk(a.q_out + token * a.q_out_token_stride + head * a.q_out_head_stride + chunk * kChunk, x, a.q_out_aligned);
    return;
  }
  store_head<kLanes>(is_k ? a.k_cache : a.v_cache, slot, a.page_size, head, x, chunk, active, a);
}

using hf::OptionalTensor;
using hf::Tensor;

constexpr uint32_t kMaxGridY = 65535;
constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxCacheSlots = (int64_t{1} << 31) - 1;

bool sixteen_byte_rows(const Tensor& x) {
  return hf::aligned_to(x.data(), 16) && x.stride(0) % kChunk == 0 && x.stride(1) % kChunk == 0;
}

void check_heads(const Tensor& x, const char* name, int64_t tokens, int64_t dim) {
  HF_CHECK(x.dtype() == hf::dev::dtype_of<Half>, name, " must have q's dtype, ", hf::dev::dtype_of<Half>, "; got ", x);
  HF_CHECK(x.dim() == 3 && x.size(0) == tokens && x.size(1) >= 1 && x.size(2) == dim, name, " must be [", tokens,
           ", heads, ", dim, "] (tokens and D of q); got ", x);
  HF_CHECK(x.stride(2) == 1, name, " must have its last dimension contiguous; got stride ", x.stride(2));
}

Heads heads_of(const Tensor& x) {
  return {x.data<const Half>(), x.stride(0), x.stride(1), static_cast<uint32_t>(x.size(1)), sixteen_byte_rows(x)};
}

CacheRows cache_of(const Tensor& cache, const char* name, const OptionalTensor& scale, double scale_value,
                   const OptionalTensor& words, int64_t heads, int64_t dim, int64_t groups, bool fnuz) {
  const int64_t last = kStorage == Storage::int4 ? groups + dim / kChunk : dim;
  if constexpr (kStorage == Storage::half) {
    HF_CHECK(cache.dtype() == hf::dev::dtype_of<Half>, name, " must have q's dtype, ", hf::dev::dtype_of<Half>, "; got ", cache);
  } else if constexpr (kStorage == Storage::int4) {
    HF_CHECK(cache.dtype() == HF_I32, name, " must hold int32 words of int4 codes; got ", cache);
  } else {
    HF_CHECK(cache.dtype() == HF_U8 || cache.dtype() == (fnuz ? HF_E4M3FNUZ : HF_E4M3FN), name, " must be ",
             fnuz ? "float8_e4m3fnuz on gfx942" : "float8_e4m3fn on gfx950", ", or uint8 with its bits; got ", cache);
  }
  HF_CHECK(cache.dim() == 4 && cache.size(2) == heads && cache.size(3) == last, name, " must be [pages, page_size, ", heads,
           ", ", last, "] (heads of k and v); got ", cache);
  HF_CHECK(cache.stride(3) == 1, name, " must have its last dimension contiguous; got stride ", cache.stride(3));
  const int64_t bytes = cache.element_bytes();
  for (int axis = 0; axis < 3 && kStorage != Storage::int4; ++axis)
    HF_CHECK(cache.stride(axis) * bytes % 16 == 0, name, " must have strides that are multiples of 16 bytes; got ",
             cache.stride(axis) * bytes, " along axis ", axis);
  HF_CHECK(kStorage == Storage::int4 || hf::aligned_to(cache.data(), 16), name,
           " must start at a multiple of 16 bytes; pass a copy");
  HF_CHECK(hf::Footprint(cache).distinct(), name, " must not be expanded: its rows share memory");
  CacheRows rows = {};
  rows.data = static_cast<uint8_t*>(cache.data());
  rows.page_stride = cache.stride(0) * bytes;
  rows.slot_stride = cache.stride(1) * bytes;
  rows.head_stride = cache.stride(2) * bytes;
  HF_CHECK(!scale || kStorage == Storage::fp8, name, " has no scale per tensor or head in this variant");
  HF_CHECK(words.has_value() == (kStorage == Storage::rows), name, " has a word per row in the variant rows alone");
  rows.scale_value = static_cast<float>(scale_value);
  if (scale) {
    const Tensor given = *scale;
    HF_CHECK(given.dtype() == HF_F32 && given.is_contiguous() && (given.numel() == 1 || given.is_shape(heads)), name,
             "'s scale must be float32, one element or [", heads, "] (one per KV head); got ", given);
    rows.scale = given.data<const float>();
    rows.scale_stride = given.numel() == 1 ? 0 : 1;
  }
  if (words) {
    const Tensor given = *words;
    HF_CHECK(given.dtype() == HF_I32 && given.is_shape(cache.size(0), cache.size(1), heads), name,
             "'s scale_shift must be int32 [", cache.size(0), ", ", cache.size(1), ", ", heads, "]; got ", given);
    HF_CHECK(hf::Footprint(given).distinct(), name, "'s scale_shift must not be expanded: its words share memory");
    rows.words = static_cast<uint8_t*>(given.data());
    rows.words_page_stride = 4 * given.stride(0);
    rows.words_slot_stride = 4 * given.stride(1);
    rows.words_head_stride = 4 * given.stride(2);
  }
  return rows;
}

const Half* weight_of(const OptionalTensor& weight, const char* name, int64_t dim) {
  if (!weight) return nullptr;
  const Tensor given = *weight;
  HF_CHECK(given.dtype() == hf::dev::dtype_of<Half> && given.is_shape(dim) && given.is_contiguous(), name,
           " must be contiguous [", dim, "] of q's dtype; got ", given);
  return given.data<const Half>();
}

template <int kLanes>
void launch(Arguments a, int64_t tokens, hipStream_t stream) {
  constexpr uint32_t kHeads = kWaveSize / kLanes;
  a.q_waves = (a.q.count + kHeads - 1) / kHeads;
  a.k_waves = (a.k.count + kHeads - 1) / kHeads;
  a.waves = a.q_waves + a.k_waves + (a.v.count + kHeads - 1) / kHeads;
  const uint32_t in_group = tokens * a.waves < kManyWaves ? 1 : kMaxWaves;
  const uint32_t groups = (a.waves + in_group - 1) / in_group;
  HF_CHECK(groups <= kMaxGridY, "q, k and v have too many heads for one launch: ", a.waves, " waves of ", kHeads, " a token");
  rope_and_cache_kernel<kLanes><<<dim3(static_cast<uint32_t>(tokens), groups), in_group * kWaveSize, 0, stream>>>(a);
  HF_HIP(hipGetLastError());
}

}  // namespace

/// q_out like q [T, Hq, D] (q itself to write in place); k, v [T, Hkv, D]; caches [pages, page_size, Hkv, D] (int4:
/// num_groups + D / 8 words), scales float32 [1] or [Hkv] or numbers, words int32 [pages, page_size, Hkv]; cos_sin
/// [max_pos, rotary_dim] float32 or q's dtype; positions int32 or int64 [T]; slot_mapping int64 [T].
void rope_and_cache_out(Tensor q_out, Tensor k_cache, Tensor v_cache, OptionalTensor k_scale_shift,
                        OptionalTensor v_scale_shift, Tensor q, Tensor k, Tensor v, Tensor cos_sin, Tensor positions,
                        Tensor slot_mapping, OptionalTensor q_weight, OptionalTensor k_weight, OptionalTensor k_scale,
                        OptionalTensor v_scale, double k_scale_value, double v_scale_value, bool interleaved,
                        double weight_offset, double epsilon, int64_t num_groups, hipStream_t stream) {
  HF_CHECK_ARCH(q, "gfx950", "gfx942");
  const bool fnuz = hf::arch_of(q.device_index()).is("gfx942");
  HF_CHECK(q.dim() == 3, "q must be [T, Hq, D]; got ", q);
  const int64_t tokens = q.size(0), dim = q.size(2);
  HF_CHECK(dim % kChunk == 0 && dim >= kChunk && dim <= kMaxHeadDim, "D must be a multiple of ", kChunk, ", at most ",
           kMaxHeadDim, "; got ", dim);
  HF_CHECK(tokens < int64_t{1} << 31, "q must have fewer than 2^31 tokens; got ", tokens);
  check_heads(q, "q", tokens, dim);
  check_heads(k, "k", tokens, dim);
  check_heads(v, "v", tokens, dim);
  HF_CHECK(v.size(1) == k.size(1), "v must have the heads of k, ", k.size(1), "; got ", v.size(1));
  check_heads(q_out, "q_out", tokens, dim);
  HF_CHECK(q_out.size(1) == q.size(1), "q_out must have the heads of q, ", q.size(1), "; got ", q_out.size(1));
  HF_CHECK(hf::Footprint(q_out).distinct(), "q_out must not be expanded: its rows share memory");
  const int64_t heads = k.size(1);

  HF_CHECK(cos_sin.dim() == 2 && cos_sin.is_contiguous(), "cos_sin must be contiguous [max_pos, rotary_dim]; got ", cos_sin);
  HF_CHECK(cos_sin.dtype() == HF_F32 || cos_sin.dtype() == hf::dev::dtype_of<Half>,
           "cos_sin must be float32 or of q's dtype; got ", cos_sin);
  const int64_t rotary_dim = cos_sin.size(1);
  HF_CHECK(rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= dim, "rotary_dim must be even, 2 to D = ", dim, "; got ",
           rotary_dim);
  HF_CHECK((positions.dtype() == HF_I32 || positions.dtype() == HF_I64) && positions.is_shape(tokens) &&
               positions.is_contiguous(),
           "positions must be contiguous int32 or int64 [", tokens, "]; got ", positions);
  HF_CHECK(slot_mapping.dtype() == HF_I64 && slot_mapping.is_shape(tokens) && slot_mapping.is_contiguous(),
           "slot_mapping must be contiguous int64 [", tokens, "]; got ", slot_mapping);
  HF_CHECK(epsilon >= 0 && epsilon < __builtin_inf(), "epsilon must be finite and at least 0; got ", epsilon);
  HF_CHECK(weight_offset - weight_offset == 0, "weight_offset must be finite; got ", weight_offset);
  if constexpr (kStorage == Storage::int4) {
    HF_CHECK(num_groups == 1 || num_groups == 2 || num_groups == 4 || num_groups == 8, "num_groups must be 1, 2, 4 or 8; got ",
             num_groups);
    HF_CHECK((dim & (dim - 1)) == 0 && dim / num_groups >= kChunk, "D must be a power of two with at least ", kChunk,
             " elements in each of ", num_groups, " groups for an int4 cache; got ", dim);
  }

  Arguments a = {};
  a.q = heads_of(q);
  a.k = heads_of(k);
  a.v = heads_of(v);
  a.q_out = q_out.data<Half>();
  a.q_out_token_stride = q_out.stride(0);
  a.q_out_head_stride = q_out.stride(1);
  a.q_out_aligned = sixteen_byte_rows(q_out);
  a.k_cache = cache_of(k_cache, "k_cache", k_scale, k_scale_value, k_scale_shift, heads, dim, num_groups, fnuz);
  a.v_cache = cache_of(v_cache, "v_cache", v_scale, v_scale_value, v_scale_shift, heads, dim, num_groups, fnuz);
  HF_CHECK(v_cache.size(0) == k_cache.size(0) && v_cache.size(1) == k_cache.size(1),
           "v_cache must have the pages and page_size of k_cache, ", k_cache, "; got ", v_cache);
  a.q_weight = weight_of(q_weight, "q_weight", dim);
  a.k_weight = weight_of(k_weight, "k_weight", dim);
  a.cache_slots = k_cache.size(0) * k_cache.size(1);
  HF_CHECK(a.cache_slots <= kMaxCacheSlots, "k_cache must have fewer than 2^31 slots; got ", a.cache_slots);

  const bool in_place = q_out.data() == q.data() && q_out.stride(0) == q.stride(0) && q_out.stride(1) == q.stride(1);
  HF_CHECK(in_place || !hf::may_share(q_out, q), "q_out is written and must not share memory with q, unless it is q");
  const struct { const OptionalTensor* tensor; const char* name; } optional[] = {
      {&q_weight, "q_weight"}, {&k_weight, "k_weight"}, {&k_scale, "k_scale"}, {&v_scale, "v_scale"},
      {&k_scale_shift, "k_scale_shift"}, {&v_scale_shift, "v_scale_shift"}};
  for (const hf::Named& written : {hf::Named{q_out, "q_out"}, hf::Named{k_cache, "k_cache"}, hf::Named{v_cache, "v_cache"}}) {
    hf::check_slices_apart(written, {{k, "k"}, {v, "v"}, {cos_sin, "cos_sin"}, {positions, "positions"},
                                     {slot_mapping, "slot_mapping"}});
    for (const auto& [tensor, name] : optional)
      if (*tensor) hf::check_slices_apart(written, {{**tensor, name}});
  }
  hf::check_slices_apart({k_cache, "k_cache"}, {{q, "q"}, {q_out, "q_out"}, {v_cache, "v_cache"}});
  hf::check_slices_apart({v_cache, "v_cache"}, {{q, "q"}, {q_out, "q_out"}});
  for (const OptionalTensor* words : {&k_scale_shift, &v_scale_shift})
    if (*words)
      hf::check_slices_apart({**words, words == &k_scale_shift ? "k_scale_shift" : "v_scale_shift"},
                             {{q, "q"}, {k, "k"}, {v, "v"}, {cos_sin, "cos_sin"}, {positions, "positions"},
                              {slot_mapping, "slot_mapping"}});
  if (k_scale_shift) hf::check_slices_apart({*k_scale_shift, "k_scale_shift"}, {{*v_scale_shift, "v_scale_shift"}});
  if (tokens == 0) return;

  a.cos_sin = cos_sin.data();
  a.max_positions = cos_sin.size(0);
  a.positions = positions.data();
  a.wide_positions = positions.dtype() == HF_I64;
  a.slots = slot_mapping.data<const int64_t>();
  a.page_size = static_cast<uint32_t>(k_cache.size(1));
  a.chunks = static_cast<uint32_t>(dim / kChunk);
  a.rotary_dim = static_cast<uint32_t>(rotary_dim);
  a.int4_group_lanes = kStorage == Storage::int4 ? static_cast<uint32_t>(dim / kChunk / num_groups) : 0;
  a.epsilon = static_cast<float>(epsilon);
  a.weight_offset = static_cast<float>(weight_offset);
  a.half_angles = cos_sin.dtype() != HF_F32;
  a.interleaved = interleaved;
  a.whole_chunks = hf::aligned_to(cos_sin.data(), 16) && rotary_dim % (interleaved ? kChunk : 2 * kChunk) == 0;
  if (a.chunks <= 8) return launch<8>(a, tokens, stream);
  if (a.chunks <= 16) return launch<16>(a, tokens, stream);
  if (a.chunks <= 32) return launch<32>(a, tokens, stream);
  launch<64>(a, tokens, stream);
}
HF_EXPORT(rope_and_cache_out);
