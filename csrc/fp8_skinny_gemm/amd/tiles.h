// Which tiles a work-group of the skinny GEMM computes: m fastest, then n, then the split of k; one contiguous run each.
#pragma once


#include <cstdint>

#include "hipforge/amd/hip.h"

namespace hf::skinny {

/// Division by a number known on the host as one multiplication, exact for dividends below 2^31.
struct Divider {
  uint32_t multiplier, shift;

  static constexpr Divider by(uint32_t divisor) {
    uint32_t log = 0;
    while ((uint64_t{1} << log) < divisor) ++log;
    const uint64_t power = uint64_t{1} << (31 + log);
    return {static_cast<uint32_t>((power + divisor - 1) / divisor), 31 + log};
  }
  __host__ __device__ constexpr uint32_t operator()(uint32_t dividend) const {
    return static_cast<uint32_t>(uint64_t{dividend} * multiplier >> shift);
  }
};

constexpr uint32_t kLastDividend = 0x7FFFFFFF;
static_assert(Divider::by(1)(kLastDividend) == kLastDividend && Divider::by(kLastDividend)(kLastDividend) == 1);
static_assert(Divider::by(3)(kLastDividend - 2) == (kLastDividend - 2) / 3 && Divider::by(7)(6) == 0);
static_assert(Divider::by(832)(831) == 0 && Divider::by(832)(832 * 1000 - 1) == 999);

struct Problem {
  uint32_t m, n, k, pitch, a_bytes, b_bytes;
  uint32_t row_tiles, column_tiles, split_k, blocks, split_blocks;  // blocks: of the whole of k; of every split but the last
  uint32_t run, longer_runs;  // tiles of a work-group; the first `longer_runs` work-groups have one more
  Divider row_divider, column_divider;
  uint32_t a_producers, b_producers, consumers, qsize;
};

/// The work-group's tiles, one after another.
template <class S>
class Tiles {
 public:
  __device__ explicit Tiles(const Problem& p) : p_(p) {
    const uint32_t group = blockIdx.x, before = group < p.longer_runs ? group : p.longer_runs;
    const uint32_t first = group * p.run + before, strip = p.row_divider(first);
    left_ = p.run + (group < p.longer_runs);
    split_ = p.column_divider(strip);
    row_ = (first - strip * p.row_tiles) * S::kTileM;
    column_ = (strip - split_ * p.column_tiles) * S::kColumns;
  }

  __device__ bool any() const { return left_ != 0; }
  __device__ uint32_t row() const { return row_; }
  __device__ uint32_t column() const { return column_; }
  __device__ uint32_t split() const { return split_; }
  __device__ uint32_t first_block() const { return split_ * p_.split_blocks; }
  __device__ uint32_t blocks() const { return split_ + 1 == p_.split_k ? p_.blocks - first_block() : p_.split_blocks; }

  __device__ void next() {
    --left_;
    row_ += S::kTileM;
    if (row_ < p_.m) return;
    row_ = 0;
    column_ += S::kColumns;
    if (column_ < p_.n) return;
    column_ = 0;
    ++split_;
  }

 private:
  const Problem& p_;
  uint32_t left_, row_, column_, split_;
};

}  // namespace hf::skinny
