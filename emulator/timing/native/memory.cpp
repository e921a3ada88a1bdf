#include "memory.h"

#include <algorithm>

namespace hftime {

Device::Device(const Machine& m, uint32_t active_xcds, bool all_xcds)
    : all_xcds_(all_xcds), hbm_latency_(m.hbm_latency_ns * m.clock_ghz), mall_latency_(m.mall_latency_ns * m.clock_ghz) {
  // One XCD alone sees its part of the bandwidth.
  const double gbps = all_xcds ? m.hbm_gbps : m.hbm_gbps / active_xcds;
  hbm_cycles_ = kLineBytes / gbps * m.clock_ghz;
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
    const double start = std::max(t, hbm_free_);
    hbm_free_ = start + hbm_cycles_;
    ++traffic.hbm_lines;
    return at->second = start + hbm_latency_;
  }
  const double start = std::max(t, hbm_free_);
  hbm_free_ = start + hbm_cycles_ * origin.share;
  ++traffic.hbm_lines;
  return start + hbm_latency_;
}

L2::L2(const Machine& m, Device& device, uint32_t active_xcds)
    : device_(device), cache_(static_cast<uint64_t>(m.l2_bytes)), latency_(m.l2_latency_ns * m.clock_ghz),
      line_cycles_(kLineBytes / m.l2_bytes_per_cycle * m.l2_channels), miss_extra_(m.l2_miss_extra),
      fabric_cycles_(kLineBytes / m.fabric_gbps_per_xcd * m.clock_ghz),
      store_cycles_per_byte_(m.clock_ghz / (m.store_gbps / active_xcds)),
      channel_free_(static_cast<size_t>(m.l2_channels), 0) {}

double L2::load(uint64_t line, uint64_t hash, double t, Origin origin) {
  double& free = channel(hash);
  const double start = std::max(t, free);
  ++traffic.l2_lines;
  if (double* ready = cache_.find(line, hash)) {
    ++traffic.l2_hits;
    free = start + line_cycles_;
    return std::max(start, *ready) + latency_;
  }
  free = start + line_cycles_ * (1 + miss_extra_);
  double* ready = cache_.insert(line, hash);
  if (origin.level == Level::l2) {
    ++traffic.l2_hits;
    *ready = start;
  } else {
    const double sent = std::max(start, fabric_free_);
    fabric_free_ = sent + fabric_cycles_;
    *ready = device_.fetch(line, sent, origin, traffic);
  }
  return *ready + latency_;
}

double L2::store(uint64_t line, uint64_t hash, double t, double bytes) {
  double& free = channel(hash);
  const double start = std::max(t, free);
  free = start + line_cycles_;
  if (cache_.find(line, hash) == nullptr) *cache_.insert(line, hash) = start;
  drain_free_ = std::max(drain_free_, start) + bytes * store_cycles_per_byte_;
  traffic.stored_bytes += static_cast<uint64_t>(bytes);
  return start + latency_;
}

// Read, changed and written back in its channel: nothing else passes meanwhile.
double L2::atomic(uint64_t line, uint64_t hash, double t, Origin origin) {
  const double at = load(line, hash, t, origin);
  channel(hash) += line_cycles_;
  return at;
}

}  // namespace hftime
