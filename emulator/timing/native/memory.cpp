#include "memory.h"

#include <algorithm>

namespace hftime {

// Assumptions: consecutive addresses stay in one channel of HBM for 4 KB and in one of L2 for 256 bytes, and a hash of the
// rest chooses it (without one, rows with power-of-two strides would be several times slower). The MI300's documented
// interleaving, 256 bytes in HBM too, fits the published times less well: docs/time-model.md.
constexpr uint64_t kHbmInterleave = 4096 / kLineBytes, kL2Interleave = 256 / kLineBytes;

uint64_t pick(uint64_t block, uint64_t channels) { return (mix(block) >> 48) * channels >> 16; }

Device::Device(const Machine& m, uint32_t active_xcds, bool all_xcds)
    : all_xcds_(all_xcds), hbm_latency_(m.hbm_latency_ns * m.clock_ghz),
      mall_latency_((m.hbm_latency_ns - m.dram_ns) * m.clock_ghz),
      // A single simulated XCD has its share of the channels.
      hbm_free_(static_cast<size_t>(all_xcds ? m.hbm_channels : m.hbm_channels / active_xcds), 0) {
  hbm_cycles_ = kLineBytes / (m.hbm_gbps / m.hbm_channels) * m.clock_ghz;
}

// A line's path through its channel; neighbouring lines share a channel, as the addresses interleave.
double Device::transfer(uint64_t line, double t, double share) {
  double& free = hbm_free_[pick(line / kHbmInterleave, hbm_free_.size())];
  const double start = std::max(t, free);
  free = start + hbm_cycles_ * share;
  return start + hbm_latency_;
}

double Device::fetch(uint64_t line, double t, Origin origin, Traffic& traffic) {
  if (origin.level != Level::hbm) {
    ++traffic.mall_lines;
    return t + mall_latency_;
  }
  if (all_xcds_) {
    const auto [at, fresh] = mall_.try_emplace(line, 0);
    if (!fresh) {
      ++traffic.mall_lines;
      return std::max(t + mall_latency_, at->second);
    }
    ++traffic.hbm_lines;
    traffic.hbm_bytes += kLineBytes;
    return at->second = transfer(line, t, 1);
  }
  ++traffic.hbm_lines;
  traffic.hbm_bytes += kLineBytes * origin.share;
  return transfer(line, t, origin.share);
}

double& L2::channel(uint64_t line) { return channel_free_[pick(line / kL2Interleave, channel_free_.size())]; }

L2::L2(const Machine& m, Device& device, uint32_t active_xcds)
    : device_(device), cache_(static_cast<uint64_t>(m.l2_bytes)), latency_(m.l2_latency_ns * m.clock_ghz),
      line_cycles_(kLineBytes / m.l2_bytes_per_cycle * m.l2_channels), miss_extra_(m.l2_miss_extra),
      fabric_cycles_(kLineBytes / m.fabric_gbps_per_xcd * m.clock_ghz),
      store_cycles_per_byte_(m.clock_ghz / (m.store_gbps / active_xcds)),
      channel_free_(static_cast<size_t>(m.l2_channels), 0) {}

double L2::load(uint64_t line, uint64_t hash, double t, Origin origin) {
  double& free = channel(line);
  const double start = std::max(t, free);
  ++traffic.l2_lines;
  if (Line* found = cache_.find(line, hash)) {
    ++traffic.l2_hits;
    free = start + line_cycles_;
    return std::max(start, found->ready) + latency_;
  }
  free = start + line_cycles_ * (1 + miss_extra_);
  Line* fresh = cache_.insert(line, hash);
  if (origin.level == Level::l2) {
    ++traffic.l2_hits;
    fresh->ready = start;
  } else {
    const double sent = std::max(start, fabric_free_);
    fabric_free_ = sent + fabric_cycles_;
    fresh->ready = device_.fetch(line, sent, origin, traffic);
  }
  return fresh->ready + latency_;
}

double L2::store(uint64_t line, uint64_t hash, double t, double bytes) {
  double& free = channel(line);
  const double start = std::max(t, free);
  free = start + line_cycles_;
  // Assumption: lines that were only written are replaced first.
  if (cache_.find(line, hash, true) == nullptr) *cache_.insert(line, hash, true) = {start};
  drain_free_ = std::max(drain_free_, start) + bytes * store_cycles_per_byte_;
  traffic.stored_bytes += static_cast<uint64_t>(bytes);
  return drain_free_ + latency_;
}

// Read, changed and written back in its channel, which is busy meanwhile.
double L2::atomic(uint64_t line, uint64_t hash, double t, Origin origin) {
  const double at = load(line, hash, t, origin);
  channel(line) += line_cycles_;
  return at;
}

}  // namespace hftime
