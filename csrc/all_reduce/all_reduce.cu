// The sum of rows over GPUs, rounded to their type: alone, or added to a residual and normalised (RMS) into 16 bits or MX-FP8,
// as rmsnorm_fp8.cu does of a sum that is there. One launch on every GPU; a GPU is a rank of `ranks`.
//
//   one work-group per row; thread t of T owns chunks t, t + T, t + 2 T, ... of 8 elements
//
//   own part    | c0 | c1 | ... |  pass 0: each chunk goes to the buffer of every other rank, as 4 units of 8 bytes:
//                                          | word 0, number | word 1, number |     | word 2, number | word 3, number |
//   own buffer  | c0 | c1 | ... |  pass 1: reads its chunk of every other rank until all units have this call's number;
//   of each rank                           sum in fp32 in the order of ranks, rounded; then as in rmsnorm_fp8.cu
//
// A unit is written and read as a whole, so that a number tells that its word is there: there is no barrier and no fence
// (the protocol that NCCL calls LL). All ranks add the same words in the same order, which gives the same bits.
//
// A buffer has for each row a header, whose first word counts the row's calls, and two slots with a place for each sender;
// call number n takes slot n % 2. When may a rank write slot n % 2 of another, P, again, for call n + 2? When P has read what
// it had of call n. The rank's launch n + 2 begins after its launch n + 1 has ended (stream order; wait_for_predecessor where it
// starts early). That one ended with P's words of n + 1 in hand, which P sent after its launch n had ended, hence read.
// Rows are independent: each has its own count, header and slots, at a place that the buffer alone decides. So calls may have
// any numbers of rows and columns, if they are the same on all ranks. A place that a call does not write keeps an older number.
// Numbers repeat after 2^32 calls.
//
// The launch itself counts: a graph may be replayed. Buffers begin as zeros; the first call has number 1.
// A rank that does not come is waited for: after `polls` reads of a chunk, about a minute by default, the launch ends with an error.
// Work-groups send before they wait, and start in the order of their rows on all GPUs of today, so that rows may be more than
// a GPU holds at once.
// Bytes per element and other rank: 4 written there, 4 read here. Latency is the bound: two of L2, one of the link.
#include "hipforge/device/early_start.h"
#include "hipforge/device/fused_fp8_guards.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/device/peer.h"
#include "hipforge/module.h"
#include "rmsnorm_fp8/row.h"

namespace {

using hf::dev::u32x4;
using Chunk = Vector<kChunk>;

constexpr int kMaxRanks = 8, kSlots = 2;
constexpr int64_t kHeader = 32;  // words
constexpr int kMaxChunks = 4;    // of a thread
constexpr int64_t kMaxCols = INT64_C(1) * kMaxChunks * kChunk * kMaxThreads;

struct Arguments {
  const Half* input;
  uint8_t* own;               // this rank's buffer
  const uint64_t* addresses;  // of all ranks' buffers
  int64_t pitch;              // words of a row in a buffer
  uint32_t cols;
  Half* residual;
  const Half* weight;
  void* out;
  uint8_t* block_scales;
  Half* also_out;
  uint32_t threads;  // of a work-group
  uint32_t rank, ranks;
  uint32_t polls;
  float epsilon;
  float weight_offset;
};

// The two stores of a chunk, `apart` bytes from each other, in which lanes' units are neighbours.
__device__ inline void send(uint8_t* to, uint32_t at, uint32_t apart, Chunk chunk, uint32_t number) {
  const u32x4 words = __builtin_bit_cast(u32x4, chunk);
  hf::dev::store_units(to + at, u32x4{words[0], number, words[1], number});
  hf::dev::store_units(to + apart + at, u32x4{words[2], number, words[3], number});
}

// The sum of a chunk over ranks; rank 0 writes it at `slot` + `at`, and others `sender` bytes on. At most kTogether parts are in
// registers at once.
template <int kRanks, int kTogether>
__device__ inline Chunk summed(Chunk own, const uint8_t* slot, uint32_t at, uint32_t sender, uint32_t apart, uint32_t number,
                               const Arguments& a) {
  Floats<kChunk> sum = {};
#pragma unroll 1
  for (uint32_t first = 0; first < kRanks; first += kTogether) {
    u32x4 got[kTogether][2] = {};
    const auto comes = [&](uint32_t i) { return first + i < a.ranks && first + i != a.rank; };
    for (uint32_t left = a.polls;; --left) {
      uint32_t missing = 0;
#pragma unroll
      for (uint32_t i = 0; i < kTogether; ++i)
        if (comes(i))
#pragma unroll
          for (int half = 0; half < 2; ++half)
            got[i][half] = hf::dev::load_units(slot + (first + i) * sender + half * apart + at);
#pragma unroll
      for (uint32_t i = 0; i < kTogether; ++i)
        if (comes(i))
#pragma unroll
          for (int half = 0; half < 2; ++half) missing |= (got[i][half][1] ^ number) | (got[i][half][3] ^ number);
      if (missing == 0) break;
      if (left == 0) hf::dev::give_up();
    }
#pragma unroll
    for (uint32_t i = 0; i < kTogether; ++i) {
      if (first + i >= a.ranks) continue;
      const Chunk part = comes(i) ? __builtin_bit_cast(Chunk, u32x4{got[i][0][0], got[i][0][2], got[i][1][0], got[i][1][2]}) : own;
      const auto floats = hf::dev::converted<Floats<kChunk>>(part);
      sum = first + i == 0 ? floats : sum + floats;
    }
  }
  return hf::dev::converted<Chunk>(sum);
}

// kNormed: with Output::half, whether it is the norm or the sum alone. kChunks: of a thread, at most.
template <Output kOutput, bool kNormed, int kRanks, int kChunks>
__global__ __launch_bounds__(kMaxThreads, 1) void all_reduce_kernel(Arguments a) {
  constexpr bool kAhead = kNormed && kChunks <= 2;  // weight and residual are asked for early
  constexpr int kTogether = kRanks < 4 ? kRanks : kChunks <= 2 ? 4 : 2;
  const uint32_t row = blockIdx.x, threads = a.threads, thread = threadIdx.x;
  const uint32_t count = a.cols / kChunk, apart = 16 * count;
  const auto* weight = reinterpret_cast<const Chunk*>(a.weight);
  const auto here = [&](int at) { return thread + at * threads < count; };

  Chunk weights[kChunks] = {};
  if constexpr (kAhead) {
#pragma unroll
    for (int at = 0; at < kChunks; ++at)
      if (here(at)) weights[at] = weight[thread + at * threads];
  }
  const int64_t buffer_row = row * a.pitch * 4;
  uint8_t* buffers[kRanks];
#pragma unroll
  for (uint32_t rank = 0; rank < kRanks; ++rank)
    if (rank < a.ranks && rank != a.rank) buffers[rank] = reinterpret_cast<uint8_t*>(a.addresses[rank]) + buffer_row;
  uint8_t* const own = a.own + buffer_row;
  auto* const header = reinterpret_cast<uint32_t*>(own);
  hf::dev::let_next_start();
  hf::dev::wait_for_predecessor();

  const uint32_t number = *header + 1;
  const auto* input = reinterpret_cast<const Chunk*>(a.input) + int64_t{row} * count;
  Chunk r[kChunks] = {};
#pragma unroll
  for (int at = 0; at < kChunks; ++at)
    if (here(at)) r[at] = input[thread + at * threads];
  auto* kept = reinterpret_cast<Chunk*>(a.residual) + int64_t{row} * count;
  Chunk before[kChunks] = {};
  if constexpr (kAhead) {
#pragma unroll
    for (int at = 0; at < kChunks; ++at)
      if (here(at)) before[at] = kept[thread + at * threads];
  }

  const uint32_t sender = static_cast<uint32_t>(a.pitch - kHeader) / (kSlots * a.ranks) * 4;
  const uint32_t slot = kHeader * 4 + number % kSlots * a.ranks * sender;
#pragma unroll
  for (int at = 0; at < kChunks; ++at) {
    if (!here(at)) continue;
#pragma unroll
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      if (rank < a.ranks && rank != a.rank)
        send(buffers[rank] + slot + a.rank * sender, (thread + at * threads) * 16, apart, r[at], number);
  }
#pragma unroll
  for (int at = 0; at < kChunks; ++at)
    if (here(at))
      r[at] = summed<kRanks, kTogether>(r[at], own + slot, (thread + at * threads) * 16, sender, apart, number, a);

  if constexpr (!kNormed) {
#pragma unroll
    for (int at = 0; at < kChunks; ++at)
      if (here(at)) reinterpret_cast<Chunk*>(a.out)[int64_t{row} * count + thread + at * threads] = r[at];
    __syncthreads();  // all have read the header
    if (thread == 0) *header = number;
    return;
  }

  if constexpr (!kAhead) {
#pragma unroll
    for (int at = 0; at < kChunks; ++at)
      if (here(at)) before[at] = kept[thread + at * threads], weights[at] = weight[thread + at * threads];
  }
  float squares = 0.f;  // in the order of rmsnorm_fp8.cu: the elements of two chunks by turns
#pragma unroll
  for (int pair = 0; pair < kChunks; pair += 2) {
    Floats<kChunk> x[2] = {};
#pragma unroll
    for (int half = 0; half < 2 && pair + half < kChunks; ++half) {
      r[pair + half] = add<kChunk>(r[pair + half], before[pair + half]);
      x[half] = hf::dev::converted<Floats<kChunk>>(r[pair + half]);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) squares = __builtin_fmaf(x[half][i], x[half][i], squares);
  }
#pragma unroll
  for (int at = 0; at < kChunks; ++at)
    if (here(at)) kept[thread + at * threads] = r[at];
  const float mean = group_sum(squares, threads) / static_cast<float>(a.cols);
  if (thread == 0) *header = number;  // which all have read
  const float factor = hf::dev::reciprocal_root(mean + a.epsilon);

  const int64_t first_element = int64_t{row} * a.cols;
  auto* out = static_cast<uint8_t*>(a.out) + first_element * (kOutput == Output::half ? sizeof(Half) : 1);
  auto* also = a.also_out ? reinterpret_cast<Chunk*>(a.also_out + first_element) : nullptr;
  uint8_t* block_scales = a.block_scales + first_element / hf::kMxBlock;
#pragma unroll
  for (int pair = 0; pair < kChunks; pair += 2) {
    hf::dev::u32x2 codes[2] = {};
    const uint32_t first = thread + pair * threads;
#pragma unroll
    for (int half = 0; half < 2 && pair + half < kChunks; ++half) {
      const uint32_t at = first + half * threads;
      if (at >= count) continue;
      const Chunk y = normalise<kChunk>(r[pair + half], factor, weights[pair + half], a.weight_offset);
      if constexpr (kOutput == Output::half) {
        reinterpret_cast<Chunk*>(out)[at] = y;
        continue;
      }
      if (also) also[at] = y;
      float scaled[kChunk];
      const uint32_t byte = scale_chunk<kOutput, kChunk>(y, 1.f, block_scales, at, scaled);
      codes[half] = hf::dev::encode_mx_e4m3x8(scaled, byte);
    }
    if constexpr (kOutput == Output::mx) hf::dev::store_chunk_pairs(out, count, first, threads, codes[0], codes[1]);
  }
}

template <Output kOutput, bool kNormed, int kRanks>
void launch_of(Arguments& a, int64_t rows, bool programmatic, hipStream_t stream) {
  const uint32_t count = a.cols / kChunk, waves = (count + hf::dev::kWaveSize - 1) / hf::dev::kWaveSize;
  a.threads = (waves < kMaxWaves ? waves : kMaxWaves) * hf::dev::kWaveSize;
  hf::Launch at{static_cast<uint32_t>(rows), a.threads, 0, stream};
  hf::may_start_early(at, programmatic);
  const auto kernel = count <= a.threads       ? all_reduce_kernel<kOutput, kNormed, kRanks, 1>
                      : count <= 2 * a.threads ? all_reduce_kernel<kOutput, kNormed, kRanks, 2>
                                               : all_reduce_kernel<kOutput, kNormed, kRanks, kMaxChunks>;
  hf::launch(kernel, at, a);
}

template <Output kOutput, bool kNormed>
void launch(Arguments& a, int64_t rows, bool programmatic, hipStream_t stream) {
  if (rows == 0) return;
  if (a.ranks <= 2) return launch_of<kOutput, kNormed, 2>(a, rows, programmatic, stream);
  if (a.ranks <= 4) return launch_of<kOutput, kNormed, 4>(a, rows, programmatic, stream);
  launch_of<kOutput, kNormed, kMaxRanks>(a, rows, programmatic, stream);
}

// The operands of every call; `buffer` is this rank's, or all ranks' where they are on one device.
Arguments checked(const hf::Tensor& buffer, const hf::Tensor& x, const hf::Tensor& addresses, int64_t rank, int64_t polls) {
  hf::check_operand(x, "x", kInputDtype, {"rows", "cols"}, "", hf::kAligned);
  hf::check_operand(addresses, "addresses", HF_I64, {"ranks"}, ", of the ranks' buffers");
  hf::check_operand(buffer, "buffer", HF_I32, {"buffers", "rows", "words"}, ", of hipforge.nn.Peers", hf::kAligned);
  const int64_t rows = x.size(0), cols = x.size(1), ranks = addresses.size(0), words = buffer.size(2);
  HF_CHECK(ranks >= 1 && ranks <= kMaxRanks, "ranks must be 1 to ", kMaxRanks, "; got ", ranks);
  HF_CHECK(rank >= 0 && rank < ranks, "rank must be 0 to ", ranks - 1, "; got ", rank);
  HF_CHECK(polls >= 1 && polls < INT64_C(1) << 32, "polls must be 1 to 2^32 - 1; got ", polls);
  HF_CHECK(cols >= kChunk && cols % kChunk == 0 && cols <= kMaxCols, "x must have a multiple of ", kChunk,
           " columns, at most ", kMaxCols, "; got ", cols);
  const int64_t capacity = words < kHeader ? 0 : (words - kHeader) / (kSlots * ranks);
  HF_CHECK(words % kHeader == 0 && words == kHeader + kSlots * ranks * capacity, "buffer must be made by hipforge.nn.Peers for ",
           ranks, " ranks; got ", buffer);
  HF_CHECK(buffer.size(0) == 1 || buffer.size(0) == ranks, "buffer must be this rank's or all ", ranks, " ranks'; got ", buffer);
  HF_CHECK(rows <= buffer.size(1) && cols <= capacity, "the buffer is for ", buffer.size(1), " rows of ", capacity,
           " columns; got ", x);
  Arguments a{};
  a.input = x.data<const Half>();
  a.own = static_cast<uint8_t*>(buffer.data()) + (buffer.size(0) == 1 ? 0 : rank) * buffer.size(1) * words * 4;
  a.addresses = reinterpret_cast<const uint64_t*>(addresses.data<const int64_t>());
  a.pitch = words;
  a.cols = static_cast<uint32_t>(cols);
  a.rank = static_cast<uint32_t>(rank);
  a.ranks = static_cast<uint32_t>(ranks);
  a.polls = static_cast<uint32_t>(polls);
  return a;
}

}  // namespace

void all_reduce_out(hf::Tensor out, hf::Tensor buffer, hf::Tensor x, hf::Tensor addresses, int64_t rank, int64_t polls,
                    bool programmatic, hipStream_t stream) {
  HF_CHECK_ARCH(x, HF_ARCHS);
  Arguments a = checked(buffer, x, addresses, rank, polls);
  hf::check_operand(out, "out", kInputDtype, {x.size(0), x.size(1)}, ", of x's dtype", hf::kAligned);
  a.out = out.data();
  launch<Output::half, false>(a, x.size(0), programmatic, stream);
}
HF_EXPORT(all_reduce_out);

/// Without block_scales, out is of x's dtype.
void all_reduce_rms_out(hf::Tensor out, hf::OptionalTensor block_scales, hf::Tensor residual, hf::OptionalTensor also_out,
                        hf::Tensor buffer, hf::Tensor x, hf::Tensor weight, hf::Tensor addresses, double epsilon,
                        double weight_offset, int64_t rank, int64_t polls, bool programmatic, hipStream_t stream) {
  const hf::fused_fp8::Format format = hf::fused_fp8::format_of(x);
  Arguments a = checked(buffer, x, addresses, rank, polls);
  const int64_t rows = x.size(0), cols = x.size(1);
  hf::check_operand(residual, "residual", kInputDtype, {rows, cols}, ", x's shape and dtype", hf::kAligned);
  hf::check_not_in_place({residual, "residual"}, {{x, "x"}});
  hf::check_operand(weight, "weight", kInputDtype, {cols}, ", of x's dtype", hf::kAligned);
  HF_CHECK(epsilon >= 0 && epsilon < __builtin_inf(), "epsilon must be finite and at least 0; got ", epsilon);
  HF_CHECK(__builtin_isfinite(weight_offset), "weight_offset must be finite; got ", weight_offset);
  a.residual = residual.data<Half>();
  a.weight = weight.data<const Half>();
  a.out = out.data();
  a.epsilon = static_cast<float>(epsilon);
  a.weight_offset = static_cast<float>(weight_offset);
  if (!block_scales) {
    HF_CHECK(!also_out, "also_out is the 16-bit copy of a quantised result; without block_scales, out is that already");
    hf::check_operand(out, "out", kInputDtype, {rows, cols}, ", of x's dtype", hf::kAligned);
    return launch<Output::half, true>(a, rows, programmatic, stream);
  }
  hf::check_operand(out, "out", format.dtype(), {rows, cols}, hf::kOfDevice, hf::kAligned);
  if (also_out) hf::check_operand(*also_out, "also_out", kInputDtype, {rows, cols}, ", x's shape and dtype", hf::kAligned);
  a.also_out = also_out.data<Half>();
  a.block_scales = hf::fused_fp8::block_scales_of(*block_scales, out, hf::kMxBlock, "cols");
  launch<Output::mx, true>(a, rows, programmatic, stream);
}
HF_EXPORT(all_reduce_rms_out);
