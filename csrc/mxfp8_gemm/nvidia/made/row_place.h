// Where the kernel that streams rows of W finds them: in one matrix, or in those of the experts that a token has chosen.
//
//   OneMatrix       row n                                      step j
//   ExpertRows      row n % N of expert ids[n / N]             step j                          outputs of experts side by side
//   ExpertColumns   row n of all                               step j % J of expert ids[j / J]   their weighted sum
//
// A block has rows of at most two neighbours of ExpertRows; a lane keeps the expert of one slot, up to 32.
#pragma once

#include "row_source.h"

namespace hf::made_stream {

struct OneMatrix {
  static constexpr bool kChosen = false, kWeighed = false, kSends = false;

  struct Block {
    __device__ __forceinline__ Block(const OneMatrix&, int, int, int, int) {}
    __device__ __forceinline__ static int pitch(int k) { return k; }
    __device__ __forceinline__ static size_t row(int first) { return first; }
    __device__ __forceinline__ static int64_t step_jump(int) { return 0; }
    __device__ __forceinline__ static int64_t row_jump(int) { return 0; }
    __device__ __forceinline__ static int made_rows(int m) { return m; }
    __device__ __forceinline__ static SharedX made_x(uint8_t* at, int m, int k) { return SharedX::at(at, m, k); }

    /// Asks for the scales of the block's rows, one run of bytes, and returns where they will be.
    __device__ __forceinline__ static const uint8_t* ask_scales(uint8_t* to, const uint8_t* ws, int first, int rows, int pitch,
                                                                int threads) {
      const size_t run = size_t(first) * pitch, run_end = run + size_t(rows) * pitch, run_base = run & ~size_t(15);
      for (size_t at = run_base + threadIdx.x * 16; at < run_end; at += threads * 16)
        copy_async(to + (at - run_base), ws + at, static_cast<int>(min(run_end - at, size_t(16))));
      return to + (run - run_base);
    }
  };
};

struct ExpertRows {
  static constexpr bool kChosen = true, kWeighed = false, kSends = false;

  const int32_t* ids;
  int of_expert;  // rows

  struct Block {
    size_t first_row;  // in memory
    int after;         // rows of the block that are the second expert's
    int64_t rows_on;   // from where those would be to where they are
    int k;

    __device__ __forceinline__ Block(const ExpertRows& place, int first, int rows, int, int k) : k(k) {
      const int slot = first / place.of_expert, in_expert = first - slot * place.of_expert;
      const int64_t id = place.ids[slot];
      after = max(in_expert + rows - place.of_expert, 0);
      rows_on = after > 0 ? (place.ids[slot + 1] - id - 1) * place.of_expert : 0;
      first_row = id * place.of_expert + in_expert;
    }
    __device__ __forceinline__ int pitch(int) const { return k; }
    __device__ __forceinline__ size_t row(int) const { return first_row; }
    __device__ __forceinline__ static int64_t step_jump(int) { return 0; }
    __device__ __forceinline__ int64_t row_jump(int rows_left) const { return rows_left <= after ? rows_on * k : 0; }
    __device__ __forceinline__ static int made_rows(int m) { return m; }
    __device__ __forceinline__ static SharedX made_x(uint8_t* at, int m, int k) { return SharedX::at(at, m, k); }

    /// The scales of a row are whole pieces of 16 bytes.
    __device__ __forceinline__ const uint8_t* ask_scales(uint8_t* to, const uint8_t* ws, int, int rows, int pitch, int threads) const {
      const int pieces = pitch / 16;
      for (int at = threadIdx.x; at < rows * pieces; at += threads) {
        const int row = at / pieces;
        const size_t from = first_row + row + (rows - row <= after ? rows_on : 0);
        copy_async(to + at * 16, ws + from * pitch + (at - row * pieces) * 16, 16);
      }
      return to;
    }
  };
};

struct ExpertColumns {
  static constexpr bool kChosen = true, kWeighed = true, kSends = false;

  const int32_t* ids;
  const float* weights;
  int slots, n, k;  // experts; rows and columns of one

  struct Block {
    const ExpertColumns& place;
    int64_t own_id;  // of slot `lane`
    float own_weight;
    int steps;  // of an expert

    __device__ __forceinline__ Block(const ExpertColumns& place, int, int, int lane, int)
        : place(place), own_id(lane < place.slots ? place.ids[lane] : 0), own_weight(lane < place.slots ? place.weights[lane] : 0.f),
          steps(place.k / kStep) {}
    __device__ __forceinline__ int pitch(int) const { return place.k; }
    __device__ __forceinline__ static size_t row(int first) { return first; }
    /// From step `step` of one long row to that of the expert.
    __device__ __forceinline__ int64_t step_jump(int step) const {
      const int slot = step / steps;
      return (__shfl_sync(~0u, static_cast<int>(own_id), slot) * int64_t(place.n) - slot) * place.k;
    }
    __device__ __forceinline__ static int64_t row_jump(int) { return 0; }
    __device__ __forceinline__ float weight(int step) const { return __shfl_sync(~0u, own_weight, step / steps); }
    __device__ __forceinline__ int made_rows(int) const { return place.slots; }
    __device__ __forceinline__ SharedX made_x(uint8_t* at, int, int) const { return SharedX::at<false>(at, place.slots, place.k); }

    /// The scales of a row of an expert are whole pieces of 8 bytes.
    __device__ __forceinline__ const uint8_t* ask_scales(uint8_t* to, const uint8_t* ws, int first, int rows, int pitch,
                                                         int threads) const {
      const int of_expert = place.k / kBlock, pieces = of_expert / 8, of_row = pieces * place.slots;
      for (int at = threadIdx.x; at < rows * of_row; at += threads) {
        const int row = at / of_row, in_row = at - row * of_row, slot = in_row / pieces, piece = in_row - slot * pieces;
        const uint8_t* const from = ws + (size_t(place.ids[slot]) * place.n + first + row) * of_expert + piece * 8;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to + row * pitch + in_row * 8))),
                     "l"(from));
      }
      return to;
    }
  };
};

}  // namespace hf::made_stream
