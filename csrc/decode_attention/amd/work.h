// Which keys a wave of decode attention works on.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/wave.h"
#include "../problem.h"

namespace hf::decode_attention {

constexpr uint32_t kOwnScale = 1, kOwnKeys = 2;

/// What a wave's first loads need. The kernels of the splits take it as arguments before the problem, one by one and in this
/// order: only such, at most 14 dwords of them, are in scalar registers when a wave starts.
struct First {
  const int32_t *seqlens, *q_starts;
  const void* q;
  const float* k_scale;
  Divisor kv_heads;
  uint32_t group, mq;
  uint32_t per_head;  // what each KV head has of its own: kOwnScale | kOwnKeys
};
static_assert(sizeof(First) == 14 * sizeof(uint32_t) && sizeof(First) % alignof(Problem) == 0);

/// Tells the compiler that a pointer is to global memory, which it infers only for a kernel's arguments.
template <class T>
__device__ __forceinline__ T* global_pointer(T* pointer) {
  return (T*)(__attribute__((address_space(1))) T*)pointer;
}

/// The problem, read in place from the kernel arguments behind First. Otherwise members that only a kernel's end needs would
/// occupy scalar registers that the tiles' buffers need.
__device__ __forceinline__ Problem problem_here() {
  using Constant = const __attribute__((address_space(4))) Problem;
  auto at = reinterpret_cast<uint64_t>(__builtin_amdgcn_kernarg_segment_ptr()) + sizeof(First);
  asm volatile("" : "+s"(at));
  Problem problem = *(const Problem*)reinterpret_cast<Constant*>(at);
  problem.out = global_pointer(problem.out);
  problem.out_scale = global_pointer(problem.out_scale);
  problem.block_scales = global_pointer(problem.block_scales);
  problem.lse = global_pointer(problem.lse);
  problem.partial = global_pointer(problem.partial);
  problem.partial_lse = global_pointer(problem.partial_lse);
  problem.sinks = global_pointer(problem.sinks);
  return problem;
}

/// A float that the kernel never writes, at an address that is the same in all lanes.
__device__ __forceinline__ float load_constant(const float* address) {
  return __builtin_bit_cast(float, dev::load_constant(reinterpret_cast<const int32_t*>(address)));
}

/// The query tokens of a sequence, at most p.mq. Each has one of the sequence's last keys; in a sequence with fewer keys than
/// tokens the first tokens see no key.
struct Tokens {
  uint32_t first, count;

  /// `p`: a Problem, or First.
  template <class P>
  __device__ __forceinline__ Tokens(const P& p, uint32_t batch) : first(batch * p.mq), count(p.mq) {
    if (!p.q_starts) return;
    const int32_t begin = dev::load_constant(p.q_starts + batch), end = dev::load_constant(p.q_starts + batch + 1);
    first = static_cast<uint32_t>(begin);
    count = end > begin ? min(static_cast<uint32_t>(end - begin), p.mq) : 0;
  }
};

/// The sequence of a list of keys.
__device__ __forceinline__ uint32_t sequence_of(const Problem& p, uint32_t list) { return p.lists.quotient(list); }

/// Tiles of a list of `length` keys: some tokens of the sequence see those from `begin` on, of which `first` is the first key
/// that one sees, and all tokens those from whole_begin to before whole_end.
struct Sight {
  uint32_t first, begin, whole_begin, whole_end;

  __device__ Sight(const Problem& p, uint32_t list, uint32_t length)
      : first(0), begin(0), whole_begin(0), whole_end(length) {
    if (p.all_seen) return;
    const uint32_t hidden = p.causal ? Tokens(p, sequence_of(p, list)).count - 1 : 0;  // keys after the first token's own
    first = length > hidden + p.window ? length - hidden - p.window : 0;
    begin = tile_down(first);
    whole_begin = tile_down((length > p.window ? length - p.window : 0) + kTileN - 1);
    whole_end = max(whole_begin, hidden == 0 ? length : tile_down(length > hidden ? length - hidden : 0));
  }

 private:
  __device__ static uint32_t tile_down(uint32_t key) { return key / kTileN * kTileN; }
};

/// What a wave works on, the same in all lanes. The tokens of its sequence are not kept: scalar registers are short, and
/// tokens_here has them where they are needed.
template <int kBlockN>
struct Work {
  uint32_t list, head;  // of keys, of the sequence's or of the KV head's own; and this head
  uint32_t length;      // keys of the list
  uint32_t begin, end;  // keys of this wave
  uint32_t split_begin, split_end;  // keys of the work-group; the end may lie past the sequence's
  uint32_t trips;       // blocks of the work-group's first range, which has the most
  uint32_t whole_begin, whole_end;  // of these, the keys that every token sees

  /// `given`: keys of the list, as the caller has it.
  __device__ Work(const Problem& p, uint32_t list, uint32_t head, int32_t given, uint32_t split, uint32_t range)
      : list(list), head(head) {
    length = given < 0 ? 0 : min(static_cast<uint32_t>(given), p.max_keys);
    const Sight sight(p, list, length);
    const uint32_t seen_from = sight.begin;
    const uint32_t blocks = (length - seen_from + kBlockN - 1) / kBlockN;
    const uint32_t each = p.parts.quotient(blocks + p.parts.value - 1);
    const uint32_t first = split * p.ranges * each;
    split_begin = seen_from + first * kBlockN;
    split_end = split_begin + p.ranges * each * kBlockN;
    trips = first < blocks ? min(each, blocks - first) : 0;
    begin = min(seen_from + (first + range * each) * kBlockN, length);
    end = min(begin + each * kBlockN, length);
    whole_begin = max(begin, sight.whole_begin);
    whole_end = min(end, sight.whole_end);
  }
};

/// The query tokens of a wave's sequence, loaded again at each use to save registers.
template <int kBlockN>
__device__ Tokens tokens_here(const Problem& p, const Work<kBlockN>& work) {
  return Tokens(p, sequence_of(p, dev::wave_value_here(work.list)));
}

/// Which keys of a tile a lane's row sees: those from `first` to before `end`, counted from the lane's first key on.
struct Seen {
  int32_t first, end;

  __device__ bool operator()(int key) const { return key >= first && key < end; }
  /// The same, compared again at each use: a kept comparison takes two scalar registers.
  __device__ Seen here() const {
    return {static_cast<int32_t>(dev::lane_value_here(static_cast<uint32_t>(first))),
            static_cast<int32_t>(dev::lane_value_here(static_cast<uint32_t>(end)))};
  }
};

/// A tile of 16 keys, the same in all lanes.
struct Tile {
  uint32_t page;
  uint32_t slot;  // of its first key in the page
  uint32_t keys;  // that the wave works on, from the first one on; 0 past the end
};

/// The tile at `key` of the list, for any wave; `keys` as Cursor's.
template <int kBlockN>
__device__ Tile tile_at(const Problem& p, const Work<kBlockN>& work, uint32_t key) {
  const bool any = key >= work.begin && key < work.end;
  const uint32_t index = p.page_size.quotient(key);
  const auto listed =
      static_cast<uint32_t>(dev::load_constant(p.block_tables + uint64_t{work.list} * p.max_pages + index));
  return {p.max_pages ? listed : work.list, key - index * p.page_size.value,
          any ? min(work.end - key, static_cast<uint32_t>(kTileN)) : 0};
}

/// Walks the tiles of a wave, the same in all lanes and without branches, which would cut the schedule of the products
/// into pieces. Past the end it stays at the last tile that has keys.
class Cursor {
 public:
  __device__ Cursor(const Problem& problem, uint32_t list, uint32_t begin, uint32_t end, uint32_t length)
      : p(problem), list(list), key(begin), end(end), table(problem.block_tables + uint64_t{list} * problem.max_pages) {
    const uint32_t first = begin < length ? begin : length ? length - 1 : 0;
    index = p.page_size.quotient(first);
    slot = first - index * p.page_size.value;
  }

  /// The page of the next tile, where the problem has a page table.
  __device__ uint32_t listed() const { return static_cast<uint32_t>(dev::load_constant(table + index)); }

  __device__ Tile next() {
    const uint32_t listed = this->listed();
    const Tile tile = {p.max_pages ? listed : list, slot,
                       key < end ? min(end - key, static_cast<uint32_t>(kTileN)) : 0};
    key += kTileN;
    slot += key < end ? kTileN : 0;
    const bool turned = slot >= p.page_size.value;
    slot = turned ? 0 : slot;
    index += turned ? 1 : 0;
    return tile;
  }

 private:
  const Problem& p;
  const uint32_t list;
  uint32_t key;
  const uint32_t end;
  const int32_t* const table;  // of the list
  uint32_t index, slot;
};

}  // namespace hf::decode_attention
