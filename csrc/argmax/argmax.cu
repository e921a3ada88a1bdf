// out[m] = the first index of the largest of logits[m], or of the first NaN: what torch.argmax(logits, 1) is.
//
//   a row has up to 64 waves (16 on AMD's GPUs) in one block, or on sm_90 in a cluster of blocks where there are few rows
//
//   row  | head | chunk 0 1 2 ... |        | ... |        | tail |    chunks of 16 bytes at multiples of 16; head and tail
//               |     wave 0      | wave 1 |     | last   |           are shorter than one
//                 lane l: chunks l, l + W, l + 2 W, ... of its wave's, kAhead of them in flight
//
// Pass 1 finds each lane's largest value without its place: a quarter of an instruction per 16-bit element on sm_90, one and a
// half on AMD's GPUs. Waves exchange theirs as keys: unsigned integers that order alike, NaN above all. Waves have the row in
// order, so that pass 2 is of the first one alone that has the row's largest: it looks for the first element with that key. If
// one of its lanes has it, as usual, the wave reads all chunks of that lane at once.
// Where ranks have columns of a row each, a GPU a rank, that wave then sends its key and its index to all ranks and takes the
// first of the largest that it has from all: two units of 8 bytes, with the number of the call as in csrc/all_reduce, whose
// buffers and slots these are.
// Bytes: the row once; in pass 2 a lane's chunks, from L1 or L2. L2, in which a step leaves its logits, is the bound.
#include "hipforge/device/early_start.h"
#include "hipforge/device/element.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/device/math.h"
#include "hipforge/device/peer.h"
#include "hipforge/device/wave.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"

#if !defined(HF_INPUT)
#error "build with -DHF_INPUT=f32, f16 or bf16"
#endif

namespace {

using Input = HF_ELEMENT(HF_INPUT);
constexpr uint32_t kWaveSize = hf::dev::kWaveSize;
constexpr uint32_t kChunk = 16 / sizeof(Input);  // elements
using Chunk = hf::dev::Vector<Input, kChunk>;
constexpr uint32_t kAhead = 8;        // chunks of a lane in flight
constexpr uint32_t kMaxThreads = 1024, kWavesOfBlock = kMaxThreads / kWaveSize;
constexpr uint32_t kLine = 8;         // chunks: a wave's span is whole lines of 128 bytes
constexpr uint32_t kLeastChunks = 4;  // of a lane, before a row has another wave
constexpr uint32_t kNoIndex = 0xFFFFFFFF, kNanKey = 0xFFFFFFFF;
// The least number, with which a pass begins.
constexpr uint32_t kMinusInfinity = __is_same(Input, float) ? 0xFF800000 : __is_same(Input, hf::dev::f16) ? 0xFC00 : 0xFF80;

// Orders as the floats do; -0 and 0 are one. No element has key 0.
__device__ inline uint32_t key_of(Input element) {
  const float value = static_cast<float>(element);
  const uint32_t bits = __builtin_bit_cast(uint32_t, value == 0.f ? 0.f : value);
  return value != value ? kNanKey : bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ inline uint32_t least_of_wave(uint32_t value) { return ~hf::dev::largest_of_wave(~value); }

/// This rank among those that have columns of the same rows.
struct Group {
  uint8_t* own;               // this rank's buffer
  const uint64_t* addresses;  // of all ranks' buffers
  int64_t row_bytes;          // of a buffer
  uint32_t rank, ranks, polls;
};
constexpr uint32_t kMaxRanks = 8, kSlots = 2;
constexpr int64_t kHeader = 32, kUnits = 4;  // words: of a row of a buffer; of what a rank sends

/// The index of the first largest element of a row, of whose columns here the first largest is `index`, with `key`. One wave.
__device__ inline uint32_t first_of_ranks(const Group& group, int64_t row, uint32_t key, uint32_t index, uint32_t lane) {
  const int64_t at = row * group.row_bytes;
  auto* const header = reinterpret_cast<uint32_t*>(group.own + at);
  const uint32_t number = *header + 1;
  const int64_t place = (group.row_bytes - kHeader * 4) / (kSlots * group.ranks);
  const int64_t slot = at + kHeader * 4 + number % kSlots * group.ranks * place;
  const bool is_rank = lane < group.ranks;
  hf::dev::u32x4 units = {key, number, index, number};
  if (is_rank && lane != group.rank) {
    hf::dev::store_units(reinterpret_cast<uint8_t*>(group.addresses[lane]) + slot + group.rank * place, units);
    for (uint32_t left = group.polls;; --left) {
      units = hf::dev::load_units(group.own + slot + lane * place);
      if (units[1] == number && units[3] == number) break;
      if (left == 0) hf::dev::give_up();
    }
  }
  if (lane == 0) *header = number;
  const uint32_t best = hf::dev::largest_of_wave(is_rank ? units[0] : 0);
  return least_of_wave(is_rank && units[0] == best ? units[2] : kNoIndex);
}

}  // namespace

#include HF_FAMILY_HEADER(row_waves.h)

namespace {

/// kOfRanks: the columns are those of one rank of `group`.
// The second bound lets a thread have 64 registers: without it ptxas keeps to 32, and loads one after another.
template <bool kOfRanks>
__global__ __launch_bounds__(kMaxThreads, 1) void argmax_kernel(const Input* logits, int64_t pitch, int64_t* out, uint32_t cols,
                                                                uint32_t blocks, uint32_t waves, const Group group) {
  __shared__ uint32_t keys[kMostWaves];
  hf::dev::let_next_start();
  const uint32_t total = blocks * waves;
  const RowWaves row_waves(blocks, total);
  hf::dev::wait_for_predecessor();
  const uint32_t row = blockIdx.x / blocks, lane = threadIdx.x % kWaveSize;
  const uint32_t wave = hf::dev::uniform(blockIdx.x % blocks * waves + threadIdx.x / kWaveSize);
  const Input* const from = logits + row * pitch;
  const uint32_t head = min(static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(from) % 16 / sizeof(Input)), cols);
  const uint32_t chunks = (cols - head) / kChunk, tail = cols - head - chunks * kChunk;
  const auto* const body = reinterpret_cast<const Chunk*>(from + head);
  const uint32_t span = ((chunks + total - 1) / total + kLine - 1) / kLine * kLine;
  const uint32_t begin = min(wave * span, chunks), end = min(begin + span, chunks);

  // The one element of the head or the tail that a lane has: of the first wave the lanes from 0 on, of the last from 16 on.
  static_assert(kChunk <= 16 && kWaveSize >= 32);
  uint32_t edge = kNoIndex, edge_key = 0;
  if (wave == 0 && lane < head) edge = lane;
  if (wave == total - 1 && lane >= 16 && lane - 16 < tail) edge = cols - tail + lane - 16;
  if (edge != kNoIndex) edge_key = key_of(from[edge]);

  Largest largest;
  for (uint32_t base = begin + lane; base < end; base += kAhead * kWaveSize) {
    Chunk ahead[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) ahead[i] = body[min(base + i * kWaveSize, end - 1)];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) largest.add(ahead[i]);
  }
  const uint32_t body_key = largest.key();  // of a lane without chunks -inf: where that is the largest, wave 0 has it too
  row_waves.exchange(keys, wave, hf::dev::largest_of_wave(max(body_key, edge_key)), lane);

  uint32_t best = 0, first_wave = kNoIndex;
  for (uint32_t i = lane; i < total; i += kWaveSize)
    if (keys[i] > best) best = keys[i], first_wave = i;
  const uint32_t of_lane = best;
  best = hf::dev::largest_of_wave(best);
  if (least_of_wave(of_lane == best ? first_wave : kNoIndex) != wave) return;

  uint32_t first = edge_key == best ? edge : kNoIndex, found = kNoIndex;
  const hf::dev::LaneMask lanes = hf::dev::lanes_with(body_key == best);
  if (lanes) {
    const bool alone = (lanes & (lanes - 1)) == 0;
    uint32_t at = begin + (alone ? hf::dev::lowest_bit(lanes) + lane * kWaveSize : lane);
    do {
      if (at < end) {
        const Chunk chunk = body[at];
#pragma unroll
        for (int i = kChunk - 1; i >= 0; --i)
          if (key_of(chunk[i]) == best) found = head + at * kChunk + i;
      }
      at += alone ? kWaveSize * kWaveSize : kWaveSize;
    } while (hf::dev::lanes_with(found != kNoIndex) == 0 && hf::dev::lanes_with(at < end) != 0);
  }
  first = least_of_wave(min(first, found));
  if constexpr (kOfRanks) first = first_of_ranks(group, row, best, group.rank * cols + first, lane);
  if (lane == 0) out[row] = first;
}

template <bool kOfRanks>
void launch(hf::Tensor out, hf::Tensor logits, const Group& group, int64_t most_rows, bool programmatic, hipStream_t stream) {
  HF_CHECK_ARCH(logits, HF_ARCHS);
  constexpr int64_t kBytes = sizeof(Input);
  hf::check_operand(logits, "logits", hf::dev::dtype_of<Input>, {"M", "V"}, "", {kBytes, kBytes});
  const int64_t rows = logits.size(0), cols = logits.size(1);
  HF_CHECK(cols >= 1 && cols < int64_t{1} << 31, "logits must have 1 to 2^31 - 1 columns (V); got ", cols);
  if (kOfRanks) {
    HF_CHECK(cols * group.ranks < int64_t{1} << 31, "logits must have at most 2^31 - 1 columns on all ", group.ranks, " ranks; got ", cols);
    HF_CHECK(rows <= most_rows, "the buffer is for ", most_rows, " rows; got ", rows);
  }
  constexpr int64_t kMaxRows = (int64_t{1} << 31) / kMostBlocks - 1;
  HF_CHECK(rows <= kMaxRows, "logits must have at most ", kMaxRows, " rows; got ", rows);
  hf::check_operand(out, "out", HF_I64, {rows});
  hf::check_not_in_place({out, "out"}, {{logits, "logits"}});
  if (rows == 0) return;
  const int64_t useful = (cols / kChunk + kLeastChunks * kWaveSize - 1) / (kLeastChunks * kWaveSize);
  const auto wanted = static_cast<uint32_t>(useful < 1 ? 1 : useful < kMostWaves ? useful : kMostWaves);
  uint32_t blocks = 1;
  while (blocks < kMostBlocks && 2 * blocks <= wanted && 2 * blocks * rows <= kEnoughBlocks) blocks *= 2;
  uint32_t waves = (wanted + blocks - 1) / blocks;
  if (waves > kWavesOfBlock) waves = kWavesOfBlock;
  hf::Launch at{static_cast<uint32_t>(rows) * blocks, waves * kWaveSize, 0, stream};
  in_one_cluster(at, blocks);
  hf::may_start_early(at, programmatic);
  hf::launch(argmax_kernel<kOfRanks>, at, logits.data<const Input>(), logits.stride(0), out.data<int64_t>(),
             static_cast<uint32_t>(cols), blocks, waves, group);
}

}  // namespace

/// out int64 [M]; logits [M, V], rows contiguous.
void argmax_out(hf::Tensor out, hf::Tensor logits, bool programmatic, hipStream_t stream) {
  launch<false>(out, logits, {}, 0, programmatic, stream);
}
HF_EXPORT(argmax_out);

/// out int64 [M], of V x ranks columns; logits [M, V], those of `rank`; buffer, addresses: of hipforge.nn.Peers.
void argmax_of_ranks_out(hf::Tensor out, hf::Tensor logits, hf::Tensor buffer, hf::Tensor addresses, int64_t rank, int64_t polls,
                         bool programmatic, hipStream_t stream) {
  hf::check_operand(addresses, "addresses", HF_I64, {"ranks"}, ", of the ranks' buffers");
  hf::check_operand(buffer, "buffer", HF_I32, {"buffers", "rows", "words"}, ", of hipforge.nn.Peers", hf::kAligned);
  const int64_t ranks = addresses.size(0), words = buffer.size(2), most = buffer.size(1);
  HF_CHECK(ranks >= 1 && ranks <= kMaxRanks, "ranks must be 1 to ", kMaxRanks, "; got ", ranks);
  HF_CHECK(rank >= 0 && rank < ranks, "rank must be 0 to ", ranks - 1, "; got ", rank);
  HF_CHECK(polls >= 1 && polls < int64_t{1} << 32, "polls must be 1 to 2^32 - 1; got ", polls);
  const int64_t place = words < kHeader ? 0 : (words - kHeader) / (kSlots * ranks);
  HF_CHECK(place >= kUnits && place % kUnits == 0 && words == kHeader + kSlots * ranks * place,
           "buffer must be made by hipforge.nn.Peers for ", ranks, " ranks; got ", buffer);
  HF_CHECK(buffer.size(0) == 1 || buffer.size(0) == ranks, "buffer must be this rank's or all ", ranks, " ranks'; got ", buffer);
  uint8_t* const own = static_cast<uint8_t*>(buffer.data()) + (buffer.size(0) == 1 ? 0 : rank) * most * words * 4;
  const Group group{own, reinterpret_cast<const uint64_t*>(addresses.data<const int64_t>()), words * 4, static_cast<uint32_t>(rank),
                    static_cast<uint32_t>(ranks), static_cast<uint32_t>(polls)};
  launch<true>(out, logits, group, most, programmatic, stream);
}
HF_EXPORT(argmax_of_ranks_out);
