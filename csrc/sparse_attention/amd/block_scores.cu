// Scores of blocks of keys: for each index query and block, the largest product with an index key that its token sees.
//
//              index queries of a sequence, Mq tokens of `groups` each (16 kTiles of them in a launch's z)
//              0 ..          15 | 16 ..
//   keys    0  +----------------+--        a product is 16 keys x 16 queries x 32 elements; lane l has row l % 16 of either
//     ..   15  |   16 x 16      |          operand, elements 8 (l / 16) .. + 7 of 32 (of an fp8 key 16 bytes of each 64: both
//          16  +----------------+--        operands have the same elements), and of the result query l % 16, keys
//     ..   31  |                |          4 (l / 16) .. + 3
//          ..  +----------------+--
//         127  +----------------+--        largest over the wave's tiles of keys, then over the four lanes of a query
//
//   a wave owns a block of 16, 32, 64 or 128 keys; its tiles of keys may lie in as many pages. fp8 keys become bf16 or f16,
//   exactly; products are exact in fp32, sums are in fp32. The maximum keeps a NaN. Scores of keys after a token's own are
//   replaced by -inf first, whatever these keys hold.
//
// Bytes: a block's keys are read once for 16 kTiles queries (16 KiB at D = 128 in fp8, twice that in 16 bits), a score is
// written once. All of a wave's loads are under way at once, so memory is the bound from about four waves a compute unit on,
// and three trips to memory (length and pages, keys, the store) below that.
#include "../../decode_attention/amd/half_products.h"
#include "hipforge/amd/fp8.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/amd/wave.h"
#include "hipforge/device/divisor.h"
#include "hipforge/device/element.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"

#if !defined(HF_INPUT) || !defined(HF_INDEX_DIM) || !defined(HF_FP8)
#error "build with -DHF_INPUT=f16 or bf16, -DHF_INDEX_DIM=64 or 128 and -DHF_FP8=0 or 1"
#endif

namespace {

using hf::Divisor;
namespace dev = hf::dev;
using Half = HF_ELEMENT(HF_INPUT);
using Half8 = dev::Vector<Half, 8>;

constexpr int kD = HF_INDEX_DIM;
constexpr bool kFp8 = HF_FP8;
constexpr int kTile = 16;  // keys, or queries, of a product
constexpr int kMaxBlock = 128;
constexpr int kKeyTiles = kMaxBlock / kTile;
constexpr int kLoadBytes = 16, kRowStep = 4 * kLoadBytes;  // of a lane; of the four lanes of a row
constexpr int kLoads = kD * (kFp8 ? 1 : 2) / kRowStep;     // of a row by each of them
constexpr int kPieces = kD / 32;                           // products of a tile
constexpr int kMaxWaves = 4;
constexpr int64_t kManyBlocks = 1024;  // from here on several waves share a work-group
constexpr int64_t kMaxGrid = 65535;
constexpr int64_t kMaxKeys = (int64_t{1} << 31) - 1 - kMaxBlock;
static_assert(kD % 64 == 0 && kPieces == kLoads * (kFp8 ? 2 : 1));

// The kernel takes these one by one, in this order: those up to `batch_stride` are in SGPRs when a wave starts
// (kernel-argument preload).
struct Arguments {
  const int32_t* seqlens;
  const int32_t* tables;  // [B, max_pages]
  const Half* q;          // [B, queries, D]
  const uint8_t* keys;    // [pages, page_size, D]
  uint32_t max_pages, blocks, block_size, queries, tokens, slot_stride;  // slot_stride: bytes
  Divisor page_size, groups;
  int64_t page_stride;  // bytes
  float* out;           // [B, queries, blocks]
};

/// Bytes 0 and 1 of a word of fp8, or 2 and 3, as two elements, exactly.
template <bool kHigh>
__device__ inline uint32_t half_pair(uint32_t word) {
  const dev::f32x2 pair = kHigh ? dev::fp8_high_pair(word) : dev::fp8_low_pair(word);
  if constexpr (__is_same(Half, dev::f16)) return __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_pkrtz(pair[0], pair[1]));
#if defined(__gfx950__)
  const dev::bf16x2 both = __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(word, 1.f, kHigh);
  return __builtin_bit_cast(uint32_t, both);
#else
  return dev::exact_bf16_pair(pair[0], pair[1]);
#endif
}

/// Eight elements of a row for one product: piece `index` of the lane's loads.
__device__ inline Half8 piece_of(const dev::u32x4 (&loads)[kLoads], int index) {
  if constexpr (!kFp8) {
    return __builtin_bit_cast(Half8, loads[index]);
  } else {
    const uint32_t words[2] = {loads[index / 2][index % 2 * 2], loads[index / 2][index % 2 * 2 + 1]};
    dev::u32x4 pairs;
#pragma unroll
    for (int w = 0; w < 2; ++w) pairs[2 * w] = half_pair<false>(words[w]), pairs[2 * w + 1] = half_pair<true>(words[w]);
    return __builtin_bit_cast(Half8, pairs);
  }
}

/// The element of a row at which piece `index` of lane group `group` starts.
__device__ inline uint32_t piece_start(int index, uint32_t group) {
  return kFp8 ? 64 * (index / 2) + 16 * group + 8 * (index % 2) : 32 * index + 8 * group;
}

__device__ inline float larger_or_nan(float a, float b) { return __builtin_elementwise_maximum(a, b); }

template <int kTiles>
__global__ __launch_bounds__(kMaxWaves* dev::kWaveSize) void block_scores_kernel(
    const int32_t* seqlens, const int32_t* tables, const Half* q, const uint8_t* keys, uint32_t max_pages, uint32_t blocks,
    uint32_t block_size, uint32_t queries, uint32_t tokens, uint32_t slot_stride, uint32_t page_size, uint32_t page_factor,
    uint32_t page_shift, Divisor groups, int64_t page_stride, float* out) {
  const uint32_t block = blockIdx.x * (blockDim.x / dev::kWaveSize) + dev::uniform(threadIdx.x / dev::kWaveSize);
  if (block >= blocks) return;
  const Divisor by_page{page_size, page_factor, page_shift};
  const uint32_t lane = threadIdx.x % dev::kWaveSize, group = lane / kTile, column = lane % kTile;
  const uint32_t first = block * block_size, last_tile = block_size / kTile - 1;
  const int32_t* const table = tables + uint64_t{blockIdx.y} * max_pages;

  // The length, the pages and the queries are under way at once.
  const int32_t given = dev::load_constant(seqlens + blockIdx.y);
  uint32_t pages[kKeyTiles];
#pragma unroll
  for (uint32_t t = 0; t < kKeyTiles; ++t)
    pages[t] = static_cast<uint32_t>(
        dev::load_constant(table + min(by_page.quotient(first + kTile * min(t, last_tile)), max_pages - 1)));
  const uint32_t first_query = blockIdx.z * kTiles * kTile;
  Half8 of_q[kTiles][kPieces];
#pragma unroll
  for (int c = 0; c < kTiles; ++c) {
    const uint32_t query = min(first_query + c * kTile + column, queries - 1);
    const Half* const row = q + (uint64_t{blockIdx.y} * queries + query) * kD;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) of_q[c][i] = *reinterpret_cast<const Half8*>(row + piece_start(i, group));
  }

  const uint32_t length = given < 0 ? 0 : min(static_cast<uint32_t>(given), max_pages * page_size);
  float best[kTiles];
#pragma unroll
  for (int c = 0; c < kTiles; ++c) best[c] = -__builtin_inff();
  if (first < length) {
    dev::u32x4 rows[kKeyTiles][kLoads];
#pragma unroll
    for (uint32_t t = 0; t < kKeyTiles; ++t) {
      // A tile past the end of the sequence or block may be in no page: the first tile is read instead, and its scores are
      // masked.
      const uint32_t key = first + kTile * min(t, last_tile);
      const bool there = key < length;
      const uint32_t at = there ? key : first, page = there ? pages[t] : pages[0];
      const uint8_t* const tile = keys + page * page_stride + uint64_t{at - by_page.quotient(at) * page_size} * slot_stride;
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        rows[t][i] = *reinterpret_cast<const dev::u32x4*>(tile + (column * slot_stride + kLoadBytes * group) + kRowStep * i);
    }
    // The number of the block's keys, from the lane's first one on, that the token of a column sees.
    int32_t seen[kTiles];
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
      const uint32_t token = groups.quotient(first_query + c * kTile + column);
      const int32_t in_block = static_cast<int32_t>(length + token + 1 - tokens - first);
      seen[c] = min(in_block, static_cast<int32_t>(block_size)) - static_cast<int32_t>(4 * group);
    }
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
      dev::f32x4 sums[kTiles] = {};
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const Half8 of_key = piece_of(rows[t], i);
#pragma unroll
        for (int c = 0; c < kTiles; ++c) sums[c] = hf::decode_attention::product_k32(of_key, of_q[c][i], sums[c]);
      }
#pragma unroll
      for (int c = 0; c < kTiles; ++c)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          best[c] = larger_or_nan(best[c], kTile * t + r < seen[c] ? sums[c][r] : -__builtin_inff());
    }
  }
#pragma unroll
  for (int c = 0; c < kTiles; ++c) {
    best[c] = dev::column_combined(best[c], larger_or_nan);
    const uint32_t query = first_query + c * kTile + column;
    if (group == 0 && query < queries) out[(uint64_t{blockIdx.y} * queries + query) * blocks + block] = best[c];
  }
}

template <int kTiles>
void launch(const Arguments& a, int64_t batch, hipStream_t stream) {
  const uint32_t waves = batch * a.blocks < kManyBlocks ? 1 : kMaxWaves, columns = kTiles * kTile;
  const dim3 grid((a.blocks + waves - 1) / waves, static_cast<uint32_t>(batch), (a.queries + columns - 1) / columns);
  hf::launch(block_scores_kernel<kTiles>, {grid, waves * dev::kWaveSize, 0, stream}, a.seqlens, a.tables, a.q, a.keys,
             a.max_pages, a.blocks, a.block_size, a.queries, a.tokens, a.slot_stride, a.page_size.value,
             a.page_size.factor, a.page_size.shift, a.groups, a.page_stride, a.out);
}

}  // namespace

/// out float32 [B, Mq, groups, ceil(max_pages * page_size / block_size)]; q [B, Mq, groups, D]; index_cache of q's dtype, or
/// fp8 (HF_FP8), [pages, page_size, D]; block_tables int32 [B, max_pages]; seqlens int32 [B].
void sparse_block_scores_out(hf::Tensor out, hf::Tensor q, hf::Tensor index_cache, hf::Tensor block_tables, hf::Tensor seqlens,
                             int64_t block_size, hipStream_t stream) {
  HF_CHECK_ARCH(q, HF_ARCHS);
  hf::check_operand(q, "q", dev::dtype_of<Half>, {"B", "Mq", "groups", kD}, " for this variant", hf::kAligned);
  const int64_t batch = q.size(0), tokens = q.size(1), groups = q.size(2), queries = tokens * groups;
  const hf::Dtypes dtypes = kFp8 ? hf::Dtypes{hf::e4m3_of(hf::has_fnuz(q)), HF_U8} : hf::Dtypes{dev::dtype_of<Half>};
  hf::check_operand(index_cache, "index_cache", dtypes, {"pages", "page_size", kD}, " for this variant", {16, kLoadBytes});
  const int64_t bytes = index_cache.element_bytes(), page_size = index_cache.size(1);
  HF_CHECK(index_cache.stride(1) * bytes < int64_t{1} << 27, "index_cache must have keys less than 2^27 bytes apart; got ",
           index_cache.stride(1) * bytes);
  HF_CHECK(block_size == 16 || block_size == 32 || block_size == 64 || block_size == kMaxBlock,
           "block_size must be 16, 32, 64 or ", kMaxBlock, "; got ", block_size);
  HF_CHECK(page_size >= kTile && page_size % kTile == 0, "page_size must be a positive multiple of ", kTile, "; got ", page_size);
  hf::check_operand(block_tables, "block_tables", HF_I32, {batch, "max_pages"});
  const int64_t max_pages = block_tables.size(1), blocks = (max_pages * page_size + block_size - 1) / block_size;
  hf::check_operand(seqlens, "seqlens", HF_I32, {batch});
  HF_CHECK(max_pages * page_size <= kMaxKeys, "a sequence may have at most ", kMaxKeys, " keys; got room for ",
           max_pages * page_size);
  HF_CHECK(batch <= kMaxGrid && queries <= kMaxGrid, "B and Mq * groups must be at most ", kMaxGrid, "; got ", q);
  hf::check_operand(out, "out", HF_F32, {batch, tokens, groups, blocks});
  hf::check_not_in_place({out, "out"}, {{q, "q"}, {index_cache, "index_cache"}});
  if (batch == 0 || queries == 0 || blocks == 0) return;
  const Arguments a{.seqlens = seqlens.data<const int32_t>(),
                    .tables = block_tables.data<const int32_t>(),
                    .q = q.data<const Half>(),
                    .keys = static_cast<const uint8_t*>(index_cache.data()),
                    .max_pages = static_cast<uint32_t>(max_pages),
                    .blocks = static_cast<uint32_t>(blocks),
                    .block_size = static_cast<uint32_t>(block_size),
                    .queries = static_cast<uint32_t>(queries),
                    .tokens = static_cast<uint32_t>(tokens),
                    .slot_stride = static_cast<uint32_t>(index_cache.stride(1) * bytes),
                    .page_size = Divisor::of(static_cast<uint32_t>(page_size)),
                    .groups = Divisor::of(static_cast<uint32_t>(groups)),
                    .page_stride = index_cache.stride(0) * bytes,
                    .out = out.data<float>()};
  if (queries <= kTile) return launch<1>(a, batch, stream);
  if (queries <= 2 * kTile) return launch<2>(a, batch, stream);
  launch<4>(a, batch, stream);
}
HF_EXPORT(sparse_block_scores_out);
