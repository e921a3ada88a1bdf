// Quantisation to MX-FP8 (e4m3) and MXFP4 (e2m1): blocks of 32 elements along the rows share an e8m0 scale.
//
//   x flat, in chunks of 8:     | work-group 0: 512 chunks | work-group 1 | ... |
//   thread t of a work-group:   chunk t and chunk t + 256; a block is 4 neighbouring chunks, held by the 4 lanes of a quad
//
//   lane        4i        4i + 1    4i + 2    4i + 3
//   chunk       c0        c1        c2        c3         amax: 8 elements in the lane, then 2 DPP steps over the quad
//   e4m3        8 B       8 B       8 B       8 B        lane pairs exchange chunks, so that a lane stores 16 bytes
//   e2m1        4 B       4 B       4 B       4 B        the same, 8 bytes; a block is 16 bytes
//
// Shuffled (e2m1): chunks are numbered in the order of the shuffled payload, whose pieces of 16 bytes, one per block, come
// from 16 rows in turn. Stores stay contiguous; loads are 64 bytes (16-bit elements) of each row, and the 8 pieces that a
// row gives to a work-group fill whole cache lines. The bytes of the scales are scattered; threads left over fill the padding.
// Bytes per element of e bytes: e read, 1 + 1/32 or 1/2 + 1/32 written; memory is the bound. The scale rule is four numbers
// (mx_encode.h), so that every mode costs the same.
#include "hipforge/device/element.h"
#include "hipforge/device/fp4_codes.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/device/mx_shuffled.h"
#include "hipforge/device/vector.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"

#if !defined(HF_INPUT)
#error "build with -DHF_INPUT=f32, f16 or bf16"
#endif

namespace {

using Input = HF_ELEMENT(HF_INPUT);
constexpr hf_dtype kInputDtype = hf::dev::dtype_of<Input>;

constexpr int kThreads = 256;
constexpr int kPerThread = 2;  // chunks
constexpr int kChunk = 8;      // elements
constexpr int kPerBlock = hf::kMxBlock / kChunk;
constexpr uint32_t kInfinityBits = 0x7F800000;

static_assert(kPerBlock == 4, "a block is held by a quad of lanes");
static_assert(kThreads % kPerBlock == 0, "a work-group holds whole blocks");

constexpr uint8_t kScalePad = 127;  // of the rows and columns that shuffled scales have more

enum class Element { e4m3, e2m1 };

// The kernel takes these one by one, in this order: those up to `scale_columns` are in SGPRs when a
// wave starts (kernel-argument preload), the rule is loaded meanwhile.
struct Arguments {
  const Input* x;
  uint32_t chunks;
  bool vector_in, vector_out;
  uint8_t* out;
  uint8_t* scales;
  uint32_t blocks_of_row;
  uint32_t rows;
  uint32_t scale_rows, scale_columns;  // shuffled: of the padded scales
  hf::dev::ScaleRule rule;
};

typedef hf::dev::Vector<Input, kChunk> Chunk __attribute__((aligned(16)));

__device__ inline Chunk load_chunk(const Input* x, bool vector) {
  if (vector) return *reinterpret_cast<const Chunk*>(x);
  Chunk chunk;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) chunk[i] = x[i];
  return chunk;
}

// Where the block that fills piece `piece` of a shuffled payload stands in x: tile (row / 16, block / 2), half block % 2,
// row % 16.
__device__ inline uint32_t block_of_piece(uint32_t piece, uint32_t blocks_of_row) {
  const uint32_t strip = blocks_of_row * hf::kShuffledRows;  // pieces of 16 rows
  const uint32_t in_strip = piece % strip;
  const uint32_t row = piece / strip * hf::kShuffledRows + in_strip % hf::kShuffledRows;
  return row * blocks_of_row + in_strip / hf::kShuffledRows;
}

__device__ inline int64_t shuffled_scale(uint32_t row, uint32_t column, uint32_t columns) {
  return static_cast<int64_t>(row / 32) * 32 * columns + column / 8 * 256 + column % 4 * 64 + row % 16 * 4 +
         column % 8 / 4 * 2 + row % 32 / 16;
}

// The e2m1 code of a value that a block's scale brought into range, without its sign: ties to even, saturated at 6.
__device__ inline uint32_t e2m1_magnitude(float value) {
  constexpr float kHalfSteps = 0x1p22f;  // whose last place is 1/2, the step below 2
  const float magnitude = __builtin_fminf(__builtin_fabsf(value), 6.f);
  const uint32_t bits = __builtin_bit_cast(uint32_t, magnitude);
  const uint32_t below_2 = __builtin_bit_cast(uint32_t, magnitude + kHalfSteps) & 7;
  const uint32_t rounded = (bits + 0x1FFFFF + (bits >> 22 & 1)) >> 22;  // exponent and one bit of the mantissa
  return magnitude < 1.f ? below_2 : rounded - (126 << 1);
}

// Four bytes in memory order, the even element in the low nibble.
__device__ inline uint32_t encode_e2m1x8(const float (&scaled)[kChunk]) {
  if constexpr (hf::dev::kConvertsToE2m1) return hf::dev::e2m1_codes(scaled);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t sign = __builtin_bit_cast(uint32_t, scaled[i]) >> 31;
    word |= (e2m1_magnitude(scaled[i]) | sign << 3) << (4 * i);
  }
  return word;
}

// The codes of NaNs, which only blocks with a NaN have: positive, and in e2m1 the largest value.
template <Element kElement>
__device__ inline void patch_nans(const float (&values)[kChunk], hf::dev::u32x2& codes) {
  constexpr int kBits = kElement == Element::e4m3 ? 8 : 4, kPerWord = 32 / kBits;
  constexpr uint32_t kMask = (1u << kBits) - 1, kNan = kElement == Element::e4m3 ? hf::dev::kE4m3Nan : 7;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const int shift = i % kPerWord * kBits;
    const uint32_t word = codes[i / kPerWord];
    codes[i / kPerWord] = values[i] == values[i] ? word : (word & ~(kMask << shift)) | kNan << shift;
  }
}

// One chunk: its block's scale byte, and its codes (e2m1: in the first word).
template <Element kElement>
__device__ inline uint32_t quantize_chunk(const float (&values)[kChunk], const hf::dev::ScaleRule& rule,
                                          hf::dev::u32x2& codes) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) amax = hf::dev::larger(amax, hf::dev::magnitude_bits(values[i]));
  amax = hf::dev::largest_of_lanes<kPerBlock>(amax);
  const uint32_t byte = hf::dev::block_scale(amax, rule);
  const float inverse = hf::dev::e8m0_inverse(byte);
  float scaled[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) scaled[i] = values[i] * inverse;
  if constexpr (kElement == Element::e4m3) {
    codes = hf::dev::encode_mx_e4m3x8(scaled, byte);
  } else {
    codes = {encode_e2m1x8(scaled), 0};
  }
  if (amax > kInfinityBits && (kElement == Element::e2m1 || byte != hf::kE8m0Nan)) patch_nans<kElement>(values, codes);
  return byte;
}

__device__ inline void store_bytes(uint8_t* out, uint32_t word) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = static_cast<uint8_t>(word >> (8 * i));
}

// As store_chunk_pairs, for chunks of 4 bytes; `chunks` is even.
__device__ inline void store_word_pairs(uint8_t* out, uint32_t chunks, uint32_t at, uint32_t step, uint32_t low,
                                        uint32_t high) {
  const bool odd = threadIdx.x & 1;
  const uint32_t given = odd ? low : high, kept = odd ? high : low;
  const uint32_t taken = hf::dev::from_pair_partner(given);
  const uint32_t first = odd ? at + step - 1 : at;
  if (first < chunks)
    *reinterpret_cast<hf::dev::u32x2*>(out + 4 * static_cast<int64_t>(first)) =
        odd ? hf::dev::u32x2{taken, kept} : hf::dev::u32x2{kept, taken};
}

template <Element kElement, bool kShuffled>
__global__ __launch_bounds__(kThreads) void quantize_kernel(
    const Input* x, uint32_t chunk_count, bool vector_in, bool vector_out, uint8_t* out_chunks, uint8_t* scales,
    uint32_t blocks_of_row, uint32_t rows, uint32_t scale_rows, uint32_t scale_columns, const hf::dev::ScaleRule rule) {
  const Arguments arguments{x,    chunk_count, vector_in,     vector_out, out_chunks, scales, blocks_of_row,
                            rows, scale_rows,  scale_columns, rule};
  constexpr int kChunkBytes = kElement == Element::e4m3 ? 8 : 4;
  const uint32_t first = blockIdx.x * (kThreads * kPerThread) + threadIdx.x;
  Chunk loaded[kPerThread] = {};
  uint32_t source[kPerThread] = {};  // the block in x
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t at = first + i * kThreads;
    if (at >= arguments.chunks) continue;
    const uint32_t block = at / kPerBlock;
    source[i] = kShuffled ? block_of_piece(block, arguments.blocks_of_row) : block;
    const int64_t chunk = static_cast<int64_t>(source[i]) * kPerBlock + at % kPerBlock;
    loaded[i] = load_chunk(arguments.x + chunk * kChunk, arguments.vector_in);
  }
  if constexpr (kShuffled) {
    const uint32_t padded = arguments.scale_rows * arguments.scale_columns;
    for (uint32_t at = blockIdx.x * kThreads + threadIdx.x; at < padded; at += gridDim.x * kThreads) {
      const uint32_t row = at / arguments.scale_columns, column = at % arguments.scale_columns;
      if (row >= arguments.rows || column >= arguments.blocks_of_row)
        arguments.scales[shuffled_scale(row, column, arguments.scale_columns)] = kScalePad;
    }
  }
  hf::dev::u32x2 codes[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t at = first + i * kThreads;
    float values[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) values[j] = static_cast<float>(loaded[i][j]);
    const uint32_t byte = quantize_chunk<kElement>(values, arguments.rule, codes[i]);
    if (at >= arguments.chunks || at % kPerBlock) continue;
    int64_t place = source[i];
    if constexpr (kShuffled)
      place = shuffled_scale(source[i] / arguments.blocks_of_row, source[i] % arguments.blocks_of_row,
                             arguments.scale_columns);
    arguments.scales[place] = static_cast<uint8_t>(byte);
  }
  if (arguments.vector_out) {
    if constexpr (kElement == Element::e4m3) {
      hf::dev::store_chunk_pairs(arguments.out, arguments.chunks, first, kThreads, codes[0], codes[1]);
    } else {
      store_word_pairs(arguments.out, arguments.chunks, first, kThreads, codes[0][0], codes[1][0]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t at = first + i * kThreads;
    if (at >= arguments.chunks) continue;
    uint8_t* out = arguments.out + static_cast<int64_t>(at) * kChunkBytes;
#pragma unroll
    for (int word = 0; word < kChunkBytes / 4; ++word) store_bytes(out + 4 * word, codes[i][word]);
  }
}

hf::dev::ScaleMode mode_of(const char* name) {
  using hf::dev::ScaleMode;
  constexpr struct { const char* name; ScaleMode mode; } kModes[] = {{"round_down", ScaleMode::round_down},
                                                                     {"round_up", ScaleMode::round_up},
                                                                     {"even", ScaleMode::even},
                                                                     {"ceil", ScaleMode::ceil},
                                                                     {"triton", ScaleMode::triton}};
  for (const auto& known : kModes)
    if (__builtin_strcmp(name, known.name) == 0) return known.mode;
  HF_FAIL(HF_ERROR_GUARD, "mode must be round_down, round_up, even, ceil or triton; got ", name);
}

// The checks that both entries share; out's are the caller's.
Arguments checked(hf::Tensor out, hf::Tensor scales, hf::Tensor x) {
  HF_CHECK_ARCH(x, HF_ARCHS);
  hf::check_operand(x, "x", kInputDtype, {"rows", "K"});
  const int64_t rows = x.size(0), k = x.size(1);
  HF_CHECK(k >= hf::kMxBlock && k % hf::kMxBlock == 0, "K must be a positive multiple of ", hf::kMxBlock,
           ", the block that shares a scale; got ", k);
  constexpr int64_t kMost = (INT64_C(1) << 32) - kThreads * kPerThread;
  HF_CHECK(x.numel() / kChunk < kMost, "x must have fewer than ", kMost, " pieces of 8 elements; got ",
           x.numel() / kChunk);
  Arguments arguments{};
  arguments.x = x.data<const Input>();
  arguments.out = out.data<uint8_t>();
  arguments.scales = scales.data<uint8_t>();
  arguments.chunks = static_cast<uint32_t>(x.numel() / kChunk);
  arguments.blocks_of_row = static_cast<uint32_t>(k / hf::kMxBlock);
  arguments.rows = static_cast<uint32_t>(rows);
  arguments.vector_in = hf::aligned_to(x.data(), 16);
  arguments.vector_out = hf::aligned_to(out.data(), 16);
  return arguments;
}

void check_plain_scales(hf::Tensor scales, hf::Tensor x) {
  hf::check_operand(scales, "scale_out", hf::kE8m0, {x.size(0), x.size(1) / hf::kMxBlock});
}

template <Element kElement, bool kShuffled>
void launch(const Arguments& a, hipStream_t stream) {
  if (a.chunks == 0) return;
  constexpr int kPerGroup = kThreads * kPerThread;
  const uint32_t groups = a.chunks / kPerGroup + (a.chunks % kPerGroup ? 1 : 0);
  hf::launch(quantize_kernel<kElement, kShuffled>, {groups, kThreads, 0, stream}, a.x, a.chunks, a.vector_in, a.vector_out,
             a.out, a.scales, a.blocks_of_row, a.rows, a.scale_rows, a.scale_columns, a.rule);
}

}  // namespace

void mxfp8_quantize_out(hf::Tensor out, hf::Tensor scale_out, hf::Tensor x, const char* mode, hipStream_t stream) {
  Arguments arguments = checked(out, scale_out, x);
  const bool fnuz = hf::has_fnuz(x);
  hf::check_operand(out, "out", hf::e4m3_of(fnuz), {x.size(0), x.size(1)}, hf::kOfDevice);
  check_plain_scales(scale_out, x);
  arguments.rule = hf::dev::scale_rule(mode_of(mode), fnuz ? hf::dev::kE4m3fnuz : hf::dev::kE4m3fn);
  launch<Element::e4m3, false>(arguments, stream);
}
HF_EXPORT(mxfp8_quantize_out);

void mxfp4_quantize_out(hf::Tensor out, hf::Tensor scale_out, hf::Tensor x, const char* mode, bool shuffled,
                        hipStream_t stream) {
  Arguments arguments = checked(out, scale_out, x);
  const int64_t rows = x.size(0), k = x.size(1);
  hf::check_operand(out, "out", {HF_U8, HF_E2M1FN_X2}, {rows, k / 2});
  arguments.rule = hf::dev::scale_rule(mode_of(mode), hf::dev::kE2m1);
  if (!shuffled) {
    check_plain_scales(scale_out, x);
    return launch<Element::e2m1, false>(arguments, stream);
  }
  HF_CHECK(rows % hf::kShuffledRows == 0 && k % (2 * hf::kMxBlock) == 0,
           "a shuffled result needs rows in multiples of 16 and K in multiples of 64; got ", rows, " and ", k);
  const int64_t blocks = k / hf::kMxBlock;
  const int64_t scale_rows = (rows + hf::kShuffledPaddedRows - 1) / hf::kShuffledPaddedRows * hf::kShuffledPaddedRows;
  const int64_t columns = (blocks + hf::kShuffledScaleColumns - 1) / hf::kShuffledScaleColumns * hf::kShuffledScaleColumns;
  hf::check_operand(scale_out, "scale_out", hf::kE8m0, {scale_rows, columns}, ", padded to 256 rows and 8 columns");
  HF_CHECK(scale_rows * columns < INT64_C(1) << 31, "shuffled scales must have fewer than 2^31 bytes; got ",
           scale_rows * columns);
  arguments.scale_rows = static_cast<uint32_t>(scale_rows);
  arguments.scale_columns = static_cast<uint32_t>(columns);
  launch<Element::e2m1, true>(arguments, stream);
}
HF_EXPORT(mxfp4_quantize_out);
