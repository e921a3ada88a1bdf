// A product whose results are added up over GPUs, and the product behind that sum, without a launch between: the first writes its
// elements into the buffers of all ranks as it makes them (SentRows), the second polls its own buffer and makes its X, the norm of
// residual + sum, of what comes (SummedNorm).
//
//   rank 0   o_proj  --+-->  buffer 0: | of rank 0 | of rank 1 |  -->  gate_up of rank 0
//                       \ /
//   rank 1   o_proj  --+-->  buffer 1: | of rank 0 | of rank 1 |  -->  gate_up of rank 1
//
// An element is a unit of 4 bytes: its bf16 and the low half of the call's number. Units are read and written as a whole, so that a
// number tells that the element is there. Every block of the second product reads all of them, 4 bytes an element and rank from L2.
//
// Buffers are those of csrc/all_reduce, with two slots and a place for each sender; one buffer is for calls of one M and N, so that
// each call writes every unit of its slot and a unit holds this call's number or that of the call two before. The number is counted
// by two words of the first row's header: `sent`, which the first product sets to `taken` + 1 and the second reads, and `taken`,
// which the second sets to `sent` and the first reads. Neither is read and written in one launch, and launches that touch one
// follow each other: every block waits for its predecessor before it does. So a graph may be replayed.
// When may a rank write slot n % 2 of another, P, again, for call n + 2? Its first product of n + 2 begins to send behind its wait,
// when its second product of n + 1 has ended. That had P's units of n + 1, which P sent behind its own wait, when P's second
// product of n had ended, and with it all reads of slot n % 2.
#pragma once

#include "hipforge/nvidia/peer.h"
#include "row_place.h"

namespace hf::made_stream {

constexpr int kMostRanks = 8, kSlots = 2, kHeaderWords = 32;
constexpr int kSentWord = 8, kTakenWord = 9;

__device__ __forceinline__ void store_unit(uint64_t to, uint32_t unit) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(to), "r"(unit) : "memory");
}
__device__ __forceinline__ dev::u32x4 load_four_units(const uint8_t* from) {
  dev::u32x4 u;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(u[0]), "=r"(u[1]), "=r"(u[2]), "=r"(u[3]) : "l"(from) : "memory");
  return u;
}
/// A count, past L1: a line that was read before may be there.
__device__ __forceinline__ uint32_t load_count(const uint32_t* from) {
  uint32_t count;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(count) : "l"(from) : "memory");
  return count;
}

/// This rank among those of a group.
struct Group {
  uint8_t* own;               // this rank's buffer
  const uint64_t* addresses;  // of all ranks' buffers
  int64_t row_bytes;          // of a buffer
  uint32_t rank, ranks;

  __device__ __forceinline__ uint32_t* words() const { return reinterpret_cast<uint32_t*>(own); }
  /// Where `sender` writes row `row` of call `number`, from a buffer's begin; a row has n elements.
  __device__ __forceinline__ int64_t place(uint32_t number, uint32_t sender, int row, int n) const {
    return row * row_bytes + 4 * (kHeaderWords + (number % kSlots * ranks + sender) * int64_t(n));
  }
};

/// One matrix, whose products go to all ranks.
struct SentRows {
  static constexpr bool kChosen = false, kWeighed = false, kSends = true;
  using Of = OneMatrix;

  Group group;

  struct Block : Of::Block {
    __device__ __forceinline__ Block(const SentRows&, int first, int rows, int lane, int k) : Of::Block({}, first, rows, lane, k) {}
  };

  __device__ __forceinline__ static uint64_t* buffers() {
    __shared__ uint64_t at[kMostRanks];
    return at;
  }
  /// Before the block meets: the addresses, which nothing in the stream writes.
  __device__ __forceinline__ void find_buffers() const {
    if (threadIdx.x < group.ranks)
      buffers()[threadIdx.x] = threadIdx.x == group.rank ? reinterpret_cast<uint64_t>(group.own) : group.addresses[threadIdx.x];
  }
  /// Behind the wait for the predecessor: the call's number.
  __device__ __forceinline__ uint32_t begin_call() const {
    const uint32_t number = load_count(group.words() + kTakenWord) + 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) group.words()[kSentWord] = number;
    return number;
  }
  __device__ __forceinline__ void send(uint32_t number, int row, int column, int n, dev::bf16 element) const {
    const int64_t at = group.place(number, group.rank, row, n) + 4 * column;
    for (uint32_t rank = 0; rank < group.ranks; ++rank) store_unit(buffers()[rank] + at, element.bits | number << 16);
  }
};

/// X = the norm of residual + what all ranks have sent.
template <int MOST>
struct SummedNorm : NormOf<MOST> {
  using Of = NormOf<MOST>;
  using typename Of::Loaded;
  using Of::kMost;
  static constexpr bool kPolls = true;

  Group group;
  uint32_t polls;

  struct Weights : Of::Weights {
    uint32_t expected;  // the number that this call has, if the last one has ended: what is asked for first depends on it
  };

  template <int THREADS>
  __device__ __forceinline__ Weights ask_weights(int m, int k) const {
    return {Of::template ask_weights<THREADS>(m, k), load_count(group.words() + kTakenWord) + 1};
  }

  /// A chunk of every rank, added in fp32 in their order and rounded.
  __device__ __forceinline__ Chunk summed(uint32_t number, uint32_t expected, int row, int chunk, int k) const {
    float sum[kChunk] = {};
    for (uint32_t first = 0; first < group.ranks; first += 2) {
      dev::u32x4 got[2][2] = {};
      const bool two = first + 1 < group.ranks;
      for (uint32_t left = polls;; --left) {
        const uint8_t* const from = own_place(expected, first, row, k) + chunk * (4 * kChunk);
        got[0][0] = load_four_units(from), got[0][1] = load_four_units(from + 16);
        if (two) got[1][0] = load_four_units(from + 4 * int64_t(k)), got[1][1] = load_four_units(from + 4 * int64_t(k) + 16);
        uint32_t missing = expected ^ number;
        expected = number;
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int i = 0; i < kChunk; ++i)
            if (r == 0 || two) missing |= (got[r][i / 4][i % 4] ^ number << 16) >> 16;
        if (missing == 0) break;
        if (left == 0) dev::give_up();
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (r == 1 && !two) continue;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          const float element = __uint_as_float(got[r][i / 4][i % 4] << 16);
          sum[i] = first + r == 0 ? element : sum[i] + element;
        }
      }
    }
    Chunk rounded;
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) rounded[i] = rounded_pair(sum[2 * i], sum[2 * i + 1]);
    return rounded;
  }
  __device__ __forceinline__ const uint8_t* own_place(uint32_t number, uint32_t sender, int row, int k) const {
    return group.own + group.place(number, sender, row, k);
  }

  template <int THREADS>
  __device__ __forceinline__ Loaded load(const Weights& weights, int m, int k) const {
    const uint32_t number = load_count(group.words() + kSentWord);
    Loaded loaded = {};
#pragma unroll
    for (int s = 0; s < kMost; ++s)
      if (Of::template has<THREADS>(s, m, k)) {
        const size_t at = size_t(Of::template row_of<THREADS>(s, k)) * (k / kChunk) + Of::template chunk_of<THREADS>(s, k);
        loaded.residual[s] = reinterpret_cast<const Chunk*>(this->residual)[at];
      }
#pragma unroll
    for (int s = 0; s < kMost; ++s)
      if (Of::template has<THREADS>(s, m, k))
        loaded.x[s] = summed(number, weights.expected, Of::template row_of<THREADS>(s, k), Of::template chunk_of<THREADS>(s, k), k);
    if (blockIdx.x == 0 && threadIdx.x == 0) group.words()[kTakenWord] = number;
    return loaded;
  }
};

}  // namespace hf::made_stream
