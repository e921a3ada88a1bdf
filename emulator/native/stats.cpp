#include "stats.h"

#include <algorithm>

namespace hfemu {

Stats::Stats(const Launch& launch) : lds_banks_(lds_banks(launch.program->arch)), map_(launch.map) {
  const size_t n = launch.program->insts.size();
  count_.assign(n, 0);
  lanes_.assign(n, 0);
  bytes_.assign(n, 0);
  conflicts_.assign(n, 0);
}

namespace {

void set_bits(std::vector<uint64_t>& bits, uint64_t begin, uint64_t end) {
  while (begin < end) {
    const uint64_t word = begin / 64, first = begin % 64, n = std::min<uint64_t>(64 - first, end - begin);
    bits[word] |= (n == 64 ? ~uint64_t{0} : ((uint64_t{1} << n) - 1)) << first;
    begin += n;
  }
}

}  // namespace

// Bytes [begin, end) of one access; they may cross pieces of overlapping extents.
void Stats::span(uint64_t begin, uint64_t end, Access access) {
  while (begin < end) {
    if (last_piece_ == nullptr || begin < last_piece_->begin || begin >= last_piece_->end) {
      last_piece_ = map_.piece(begin);
      if (last_piece_ == nullptr) return;  // unchecked mode: unregistered memory
      const Extent& e = map_.extents()[last_piece_->extent];
      last_tensor_ = &tensors_[last_piece_->extent];
      if (last_tensor_->loaded_bits.empty()) {
        last_tensor_->loaded_bits.assign((e.bytes + 63) / 64, 0);
        last_tensor_->stored_bits.assign((e.bytes + 63) / 64, 0);
      }
    }
    const uint64_t base = map_.extents()[last_piece_->extent].base;
    const uint64_t stop = std::min(end, last_piece_->end);
    if (access != Access::store) {
      last_tensor_->loaded += stop - begin;
      set_bits(last_tensor_->loaded_bits, begin - base, stop - base);
    }
    if (access != Access::load) {
      last_tensor_->stored += stop - begin;
      set_bits(last_tensor_->stored_bits, begin - base, stop - base);
    }
    begin = stop;
  }
}

void Stats::global(uint32_t index, const LaneAddresses& a, uint64_t exec, uint32_t bytes, Access access) {
  const uint64_t total = uint64_t{bytes} * static_cast<uint32_t>(std::popcount(exec));
  bytes_[index] += total;
  if (access != Access::store) bytes_loaded_ += total;
  if (access != Access::load) bytes_stored_ += total;
  // Neighbouring lanes that continue each other are one span.
  struct Span {
    uint64_t begin, end;
  };
  Span spans[kLanes];
  uint64_t lines[2 * kLanes];
  uint32_t span_count = 0, count = 0;
  uint64_t begin = 0, end = 0;
  const auto flush = [&] {
    if (begin == end) return;
    span(begin, end, access);
    spans[span_count++] = {begin, end};
    for (uint64_t line = begin / 64; line <= (end - 1) / 64; ++line)
      if (count == 0 || lines[count - 1] != line) lines[count++] = line;
  };
  for (uint64_t left = exec; left; left &= left - 1) {
    const uint64_t at = a.at[std::countr_zero(left)];
    if (at == end && begin != end) {
      end += bytes;
      continue;
    }
    flush();
    begin = at;
    end = at + bytes;
  }
  flush();
  const auto before = [](const Span& x, const Span& y) { return x.begin < y.begin; };
  if (!std::is_sorted(spans, spans + span_count, before)) std::sort(spans, spans + span_count, before);
  uint64_t reached = 0;  // bytes that several lanes access count once
  for (uint32_t i = 0; i < span_count; ++i) {
    const uint64_t from = std::max(spans[i].begin, reached);
    reached = std::max(reached, spans[i].end);
    lines_.bytes += reached - std::min(from, reached);
  }
  if (!std::is_sorted(lines, lines + count)) std::sort(lines, lines + count);
  count = static_cast<uint32_t>(std::unique(lines, lines + count) - lines);
  lines_.lines64 += count;
  for (uint32_t i = 0; i < count; ++i) lines_.lines128 += i == 0 || lines[i] / 2 != lines[i - 1] / 2;
  lines_.accesses += 1;
}

void Stats::scalar(uint32_t index, uint64_t address, uint32_t bytes, Access access) {
  bytes_[index] += bytes;
  scalar_bytes_ += bytes;
  if (access != Access::store) bytes_loaded_ += bytes;
  if (access != Access::load) bytes_stored_ += bytes;
  span(address, address + bytes, access);
}

void Stats::lds(uint32_t index, const uint32_t* a, uint64_t exec, uint32_t bytes) {
  const uint32_t active = static_cast<uint32_t>(std::popcount(exec));
  bytes_[index] += uint64_t{bytes} * active;
  lds_bytes_ += uint64_t{bytes} * active;
  ++lds_accesses_;
  const uint32_t conflicts = lds_conflict_cycles(a, exec, bytes, lds_banks_);
  lds_conflicts_ += conflicts;
  conflicts_[index] += conflicts;
}

// Lanes are served in consecutive groups that could use every bank once; a group takes as many cycles as its busiest
// bank has different dwords. Lanes that read the same dword share it. Groups of neighbouring lanes are an assumption:
// AMD's documentation of CK Tile confirms it for 128-bit writes, but pairs lanes 0-3 with 20-23, 4-7 with 16-19 and so
// on for 128-bit reads. The transposing reads (ds_read_b64_tr_*) are counted as plain 64-bit reads of their lanes'
// addresses. AMD's documents do not say whether the exchange between lanes takes LDS cycles; none are assumed.
uint32_t lds_conflict_cycles(const uint32_t* a, uint64_t exec, uint32_t bytes, uint32_t banks) {
  uint32_t conflicts = 0;
  const uint32_t dwords = std::max<uint32_t>(1, bytes / 4), group = std::max<uint32_t>(1, banks / dwords);
  for (uint32_t first = 0; first < kLanes; first += group) {
    uint32_t seen[64][8];
    uint8_t depth[64] = {};
    uint32_t worst = 1;
    for (uint32_t l = first; l < first + group && l < kLanes; ++l) {
      if (!(exec >> l & 1)) continue;
      for (uint32_t d = 0; d < dwords; ++d) {
        const uint32_t word = a[l] / 4 + d, bank = word % banks;
        bool known = false;
        const uint32_t kept = std::min<uint32_t>(depth[bank], 8);
        for (uint32_t k = 0; k < kept && !known; ++k) known = seen[bank][k] == word;
        if (known) continue;
        if (depth[bank] < 8) seen[bank][depth[bank]] = word;
        ++depth[bank];
        worst = std::max<uint32_t>(worst, depth[bank]);
      }
    }
    conflicts += worst - 1;
  }
  return conflicts;
}

void Stats::scratch(uint32_t index, uint64_t exec, uint32_t bytes) {
  const uint64_t total = uint64_t{bytes} * static_cast<uint32_t>(std::popcount(exec));
  bytes_[index] += total;
  scratch_bytes_ += total;
}

void Stats::merge(const Stats& o) {
  const auto add = [](std::vector<uint64_t>& to, const std::vector<uint64_t>& from) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
  };
  add(count_, o.count_);
  add(lanes_, o.lanes_);
  add(bytes_, o.bytes_);
  add(conflicts_, o.conflicts_);
  for (const auto& [extent, from] : o.tensors_) {
    TensorCount& to = tensors_[extent];
    to.loaded += from.loaded;
    to.stored += from.stored;
    const auto unite = [](std::vector<uint64_t>& bits, const std::vector<uint64_t>& more) {
      if (bits.empty()) bits.assign(more.size(), 0);
      for (size_t i = 0; i < more.size(); ++i) bits[i] |= more[i];
    };
    unite(to.loaded_bits, from.loaded_bits);
    unite(to.stored_bits, from.stored_bits);
  }
  lines_.lines64 += o.lines_.lines64;
  lines_.lines128 += o.lines_.lines128;
  lines_.accesses += o.lines_.accesses;
  lines_.bytes += o.lines_.bytes;
  scalar_bytes_ += o.scalar_bytes_;
  scratch_bytes_ += o.scratch_bytes_;
  lds_bytes_ += o.lds_bytes_;
  lds_accesses_ += o.lds_accesses_;
  lds_conflicts_ += o.lds_conflicts_;
  bytes_loaded_ += o.bytes_loaded_;
  bytes_stored_ += o.bytes_stored_;
}

}  // namespace hfemu
