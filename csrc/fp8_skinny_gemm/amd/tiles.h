// Which tiles a work-group of the skinny GEMM computes: one contiguous run in the order m fastest, then n, then the split of k.
#pragma once

#include <cstdint>

#include "hipforge/device/divisor.h"
#include "hipforge/amd/hip.h"

namespace hf::skinny {

struct Problem {
  uint32_t m, n, k, pitch, a_bytes, b_bytes;
  Divisor row_tiles, column_tiles;
  uint32_t split_k, blocks, split_blocks;  // blocks: of the whole of k; of every split but the last
  uint32_t run, longer_runs;  // tiles of a work-group; the first `longer_runs` work-groups have one more
  uint32_t a_producers, b_producers, consumers, qsize;
};

/// The work-group's tiles, one after another.
template <class S>
class Tiles {
 public:
  __device__ explicit Tiles(const Problem& p) : p_(p) {
    const uint32_t group = blockIdx.x, before = group < p.longer_runs ? group : p.longer_runs;
    const uint32_t first = group * p.run + before, strip = p.row_tiles.quotient(first);
    left_ = p.run + (group < p.longer_runs);
    split_ = p.column_tiles.quotient(strip);
    row_ = (first - strip * p.row_tiles.value) * S::kTileM;
    column_ = (strip - split_ * p.column_tiles.value) * S::kColumns;
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
