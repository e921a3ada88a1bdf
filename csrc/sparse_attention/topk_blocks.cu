// The key blocks that a token attends to: of its scores the largest, its own block and those just before it always; and the
// page table and length of what it sees of them, which decode attention takes as those of a sequence.
//
//   one work-group per token and group; wave w owns blocks 256 w .. 256 w + 255, lane l of it blocks l, l + 64, l + 128, l + 192
//
//   scores row | 0 .. 255 | 256 .. 511 | ...      keys: fp32 as an unsigned integer that orders alike; a forced block has the
//                  |           |                  largest, a NaN the next, a block that the token does not see, or -inf, 0
//              16 best      16 best        ...    the 16th key of a wave, bit by bit, by counting the lanes that reach it;
//                  `-----. .---'                  then the blocks above it and the first that are equal, in order
//                  wave 0: 16 best                of those, likewise
//                     |
//              ids ascending, their pages, and (count - 1) * block_size + the keys that are seen of the last
//
// Only a token's own block is seen in part, and it is the last of those that it sees.
// Bytes: a score is read once, topk * (1 + pages of a block) + 1 words are written for each token and group. The latency of
// up to 32 dependent steps of a wave, twice with more than 256 blocks, is the bound.
#include "hipforge/device/divisor.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/device/wave.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"

namespace {

using hf::Divisor;
namespace dev = hf::dev;
constexpr int kWaveSize = dev::kWaveSize;
constexpr int kPerLane = 4;
constexpr int kPerWave = kPerLane * kWaveSize;
constexpr int kMaxWaves = 16, kMaxChoices = 16;
constexpr int kMaxBlocks = kMaxWaves * kPerWave;
static_assert(kMaxWaves * kMaxChoices == kPerWave, "one wave has the choices of all");

constexpr uint32_t kNotThere = 0, kNanKey = 0xFFFFFFFE, kForcedKey = 0xFFFFFFFF;

// The kernel takes these one by one, in this order: those up to `choices` are in SGPRs when a wave starts.
struct Arguments {
  const float* scores;  // [rows, blocks]
  const int32_t* seqlens;
  const int32_t* tables;  // [B, max_pages]
  Divisor of_sequence, groups;  // rows of a sequence; of a token
  uint32_t blocks, choices;
  uint32_t tokens, local_blocks, block_shift, page_shift, max_pages;
  int32_t* ids;      // [rows, choices]
  int32_t* pages;    // [rows, choices << (block_shift - page_shift)]
  int32_t* lengths;  // [rows]
};

/// Orders as the floats do; -0 and 0 are one, and -inf is no choice.
__device__ inline uint32_t key_of(float score) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, score == 0.f ? 0.f : score);
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return score != score ? kNanKey : score == -__builtin_inff() ? kNotThere : ordered;
}

struct Choice {
  uint32_t key, block;
};

/// Writes the best `choices` of the wave's keys and their blocks, in the order of registers, then lanes, and returns how many
/// there are; of equal ones the first are taken. The least key taken is found bit by bit from the top: with a bit set it is
/// still not too large where enough keys reach it.
__device__ inline uint32_t keep_best(const uint32_t (&keys)[kPerLane], const uint32_t (&blocks)[kPerLane], uint32_t choices,
                                     Choice* to) {
  uint32_t least = kNotThere;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t higher = least | 1u << bit;
    uint32_t reached = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) reached += dev::lane_count(dev::lanes_with(keys[j] >= higher));
    if (reached >= choices) least = higher;
    if (reached == choices) break;
  }
  uint32_t above = 0, equal = 0, count = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) above += dev::lane_count(dev::lanes_with(keys[j] > least));
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const bool same = keys[j] == least && least != kNotThere;
    const dev::LaneMask all_same = dev::lanes_with(same);
    const bool taken = keys[j] > least || (same && equal + dev::lanes_before(all_same) < choices - above);
    const dev::LaneMask all_taken = dev::lanes_with(taken);
    if (taken) to[count + dev::lanes_before(all_taken)] = {keys[j], blocks[j]};
    equal += dev::lane_count(all_same);
    count += dev::lane_count(all_taken);
  }
  return count;
}

__global__ __launch_bounds__(kMaxWaves* kWaveSize) void topk_blocks_kernel(
    const float* scores, const int32_t* seqlens, const int32_t* tables, uint32_t sequence_rows, uint32_t sequence_factor,
    uint32_t sequence_shift, uint32_t groups, uint32_t groups_factor, uint32_t groups_shift, uint32_t blocks,
    uint32_t choices, uint32_t tokens, uint32_t local_blocks, uint32_t block_shift, uint32_t page_shift, uint32_t max_pages,
    int32_t* ids, int32_t* pages, int32_t* lengths) {
  __shared__ Choice of_waves[kMaxWaves * kMaxChoices];
  const uint32_t lane = threadIdx.x % kWaveSize, wave = dev::uniform(threadIdx.x / kWaveSize);
  const uint32_t row = blockIdx.x;
  const uint32_t sequence = Divisor{sequence_rows, sequence_factor, sequence_shift}.quotient(row);
  const uint32_t token = Divisor{groups, groups_factor, groups_shift}.quotient(row - sequence * sequence_rows);
  const int32_t given = dev::load_constant(seqlens + sequence);
  uint32_t here[kPerLane], keys[kPerLane];
  float values[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) here[j] = wave * kPerWave + j * kWaveSize + lane;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) values[j] = scores[uint64_t{row} * blocks + min(here[j], blocks - 1)];
  const uint32_t length = given < 0 ? 0 : min(static_cast<uint32_t>(given), max_pages << page_shift);
  const uint32_t seen = length + token + 1 > tokens ? length + token + 1 - tokens : 0;  // keys that the token sees
  const uint32_t seen_blocks = (seen + (1u << block_shift) - 1) >> block_shift;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j)
    keys[j] = here[j] >= seen_blocks ? kNotThere : here[j] + local_blocks >= seen_blocks ? kForcedKey : key_of(values[j]);

  Choice* const own = of_waves + wave * kMaxChoices;
  uint32_t count = keep_best(keys, here, choices, own);
  if (blockDim.x > kWaveSize) {
    if (lane >= count && lane < kMaxChoices) own[lane] = {kNotThere, 0};
    __syncthreads();
    if (wave > 0) return;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const uint32_t at = j * kWaveSize + lane;
      const bool known = at < blockDim.x / kWaveSize * kMaxChoices;
      keys[j] = known ? of_waves[at].key : kNotThere;
      here[j] = known ? of_waves[at].block : 0;
    }
    dev::wave_fence();
    count = keep_best(keys, here, choices, of_waves);
  }
  dev::wave_fence();
  if (lane < choices) ids[uint64_t{row} * choices + lane] = lane < count ? static_cast<int32_t>(of_waves[lane].block) : -1;
  const uint32_t last = count ? of_waves[count - 1].block : 0;
  const uint32_t of_last = min(seen - (last << block_shift), 1u << block_shift);
  if (lane == 0) lengths[row] = count ? static_cast<int32_t>(((count - 1) << block_shift) + of_last) : 0;
  const uint32_t per_block = block_shift - page_shift, entries = choices << per_block;
  for (uint32_t at = lane; at < entries; at += kWaveSize) {
    const uint32_t place = at >> per_block, in_block = at & ((1u << per_block) - 1);
    const uint32_t entry = place < count ? (of_waves[place].block << per_block) + in_block : 0;
    const bool there = place < count && entry << page_shift < seen;
    const int32_t page = tables[uint64_t{sequence} * max_pages + (there ? entry : 0)];
    pages[uint64_t{row} * entries + at] = there ? page : 0;
  }
}

}  // namespace

/// ids int32 [B, Mq, groups, topk], tables_out int32 [B * Mq, groups, topk * block_size / page_size] and lengths int32
/// [B * Mq, groups]; scores float32 [B, Mq, groups, blocks]; block_tables int32 [B, max_pages]; seqlens int32 [B].
void sparse_topk_blocks_out(hf::Tensor ids, hf::Tensor tables_out, hf::Tensor lengths, hf::Tensor scores,
                            hf::Tensor block_tables, hf::Tensor seqlens, int64_t page_size, int64_t topk, int64_t local_blocks,
                            int64_t block_size, hipStream_t stream) {
  HF_CHECK_ARCH(scores, HF_ARCHS);
  hf::check_operand(scores, "scores", HF_F32, {"B", "Mq", "groups", "blocks"});
  const int64_t batch = scores.size(0), tokens = scores.size(1), groups = scores.size(2), blocks = scores.size(3);
  const auto power = [](int64_t x) { return x > 0 && x <= int64_t{1} << 30 && (x & (x - 1)) == 0; };
  HF_CHECK(power(block_size) && power(page_size) && page_size <= block_size,
           "block_size and page_size must be powers of two, page_size at most block_size; got ", block_size, " and ", page_size);
  HF_CHECK(topk >= 1 && topk <= kMaxChoices, "topk must be 1 to ", kMaxChoices, "; got ", topk);
  HF_CHECK(local_blocks >= 0 && local_blocks <= topk, "local_blocks must be 0 to topk = ", topk, "; got ", local_blocks);
  hf::check_operand(block_tables, "block_tables", HF_I32, {batch, "max_pages"});
  const int64_t max_pages = block_tables.size(1);
  hf::check_operand(seqlens, "seqlens", HF_I32, {batch});
  HF_CHECK(blocks == (max_pages * page_size + block_size - 1) / block_size && blocks <= kMaxBlocks, "scores must have the ",
           (max_pages * page_size + block_size - 1) / block_size, " blocks that block_tables has room for, at most ",
           kMaxBlocks, "; got ", blocks);
  const int64_t rows = batch * tokens * groups;
  HF_CHECK(rows < int64_t{1} << 31, "B * Mq * groups must be less than 2^31; got ", rows);
  hf::check_operand(ids, "ids", HF_I32, {batch, tokens, groups, topk});
  hf::check_operand(tables_out, "tables_out", HF_I32, {batch * tokens, groups, topk * (block_size / page_size)});
  hf::check_operand(lengths, "lengths", HF_I32, {batch * tokens, groups});
  hf::check_not_in_place({tables_out, "tables_out"}, {{block_tables, "block_tables"}});
  if (rows == 0) return;
  const auto shift = [](int64_t x) { return static_cast<uint32_t>(__builtin_ctzll(static_cast<uint64_t>(x))); };
  const Arguments a{.scores = scores.data<const float>(),
                    .seqlens = seqlens.data<const int32_t>(),
                    .tables = block_tables.data<const int32_t>(),
                    .of_sequence = Divisor::of(static_cast<uint32_t>(tokens * groups)),
                    .groups = Divisor::of(static_cast<uint32_t>(groups)),
                    .blocks = static_cast<uint32_t>(blocks),
                    .choices = static_cast<uint32_t>(topk),
                    .tokens = static_cast<uint32_t>(tokens),
                    .local_blocks = static_cast<uint32_t>(local_blocks),
                    .block_shift = shift(block_size),
                    .page_shift = shift(page_size),
                    .max_pages = static_cast<uint32_t>(max_pages),
                    .ids = ids.data<int32_t>(),
                    .pages = tables_out.data<int32_t>(),
                    .lengths = lengths.data<int32_t>()};
  const auto waves = static_cast<uint32_t>((blocks + kPerWave - 1) / kPerWave);
  hf::launch(topk_blocks_kernel, {static_cast<uint32_t>(rows), (waves ? waves : 1) * kWaveSize, 0, stream}, a.scores, a.seqlens,
             a.tables, a.of_sequence.value, a.of_sequence.factor, a.of_sequence.shift, a.groups.value, a.groups.factor,
             a.groups.shift, a.blocks, a.choices, a.tokens, a.local_blocks, a.block_shift, a.page_shift, a.max_pages, a.ids,
             a.pages, a.lengths);
}
HF_EXPORT(sparse_topk_blocks_out);
