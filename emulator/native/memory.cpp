#include "memory.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "core.h"

namespace hfemu {
namespace {

std::mutex allocations_mutex;
std::map<uint64_t, Extent>& allocations() {
  static auto* map = new std::map<uint64_t, Extent>();
  return *map;
}

std::vector<std::vector<Extent>>& pushed() {
  thread_local std::vector<std::vector<Extent>> stack;
  return stack;
}

}  // namespace

void add_allocation(const Extent& extent) {
  const std::lock_guard lock(allocations_mutex);
  allocations()[extent.base] = extent;
}

bool remove_allocation(uint64_t base) {
  const std::lock_guard lock(allocations_mutex);
  return allocations().erase(base) != 0;
}

bool find_allocation(uint64_t address, Extent* out) {
  const std::lock_guard lock(allocations_mutex);
  auto& map = allocations();
  auto it = map.upper_bound(address);
  if (it == map.begin()) return false;
  --it;
  if (address - it->second.base >= it->second.bytes) return false;
  *out = it->second;
  return true;
}

void push_extents(const Extent* extents, size_t count) { pushed().emplace_back(extents, extents + count); }
void pop_extents() {
  if (!pushed().empty()) pushed().pop_back();
}

std::vector<Extent> pushed_extents() {
  std::vector<Extent> all;
  for (const auto& level : pushed()) all.insert(all.end(), level.begin(), level.end());
  return all;
}

AddressMap AddressMap::snapshot(const std::vector<Extent>& extra) {
  AddressMap map;
  std::vector<Extent>& all = map.extents_;
  {
    const std::lock_guard lock(allocations_mutex);
    for (const auto& [base, extent] : allocations()) all.push_back(extent);
  }
  for (const auto& level : pushed()) all.insert(all.end(), level.begin(), level.end());
  all.insert(all.end(), extra.begin(), extra.end());
  std::erase_if(all, [](const Extent& e) { return e.bytes == 0; });

  std::vector<uint64_t> cuts;
  for (const Extent& e : all) {
    cuts.push_back(e.base);
    cuts.push_back(e.base + e.bytes);
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  // Sweep over the cuts with the extents that are open at each.
  std::vector<uint32_t> by_base(all.size());
  for (uint32_t i = 0; i < all.size(); ++i) by_base[i] = i;
  std::sort(by_base.begin(), by_base.end(), [&](uint32_t a, uint32_t b) { return all[a].base < all[b].base; });
  std::vector<uint32_t> open;
  size_t next = 0;
  for (size_t c = 0; c + 1 < cuts.size(); ++c) {
    const uint64_t begin = cuts[c];
    std::erase_if(open, [&](uint32_t i) { return all[i].base + all[i].bytes <= begin; });
    bool joins = !open.empty();  // an extent spans this cut
    for (; next < by_base.size() && all[by_base[next]].base == begin; ++next) open.push_back(by_base[next]);
    if (open.empty()) continue;
    Piece piece{begin, cuts[c + 1], open[0], false};
    for (const uint32_t i : open) {
      if (all[i].bytes <= all[piece.extent].bytes) piece.extent = i;
      piece.writable |= all[i].writable;
    }
    if (!joins || map.runs_.empty()) {
      map.runs_.push_back({begin, piece.end, piece.writable});
    } else {
      Run& run = map.runs_.back();
      run.end = piece.end;
      run.all_writable = run.all_writable && piece.writable;
    }
    map.pieces_.push_back(piece);
  }
  return map;
}

const AddressMap::Run* AddressMap::find(uint64_t address, uint64_t bytes) const {
  auto it = std::upper_bound(runs_.begin(), runs_.end(), address, [](uint64_t a, const Run& r) { return a < r.begin; });
  if (it == runs_.begin()) return nullptr;
  --it;
  return address < it->end && bytes <= it->end - address ? &*it : nullptr;
}

const AddressMap::Piece* AddressMap::piece(uint64_t address) const {
  auto it =
      std::upper_bound(pieces_.begin(), pieces_.end(), address, [](uint64_t a, const Piece& p) { return a < p.begin; });
  if (it == pieces_.begin()) return nullptr;
  --it;
  return address < it->end ? &*it : nullptr;
}

bool AddressMap::writable(uint64_t address, uint64_t bytes) const {
  for (uint64_t a = address; a < address + bytes;) {
    const Piece* p = piece(a);
    if (p == nullptr || !p->writable) return false;
    a = p->end;
  }
  return true;
}

std::string AddressMap::describe(uint64_t address, uint64_t bytes) const {
  const Extent* best = nullptr;
  uint64_t best_distance = ~uint64_t{0};
  for (const Extent& e : extents_) {
    const uint64_t end = e.base + e.bytes;
    const uint64_t distance = address >= end ? address - end + 1 : address < e.base ? e.base - address : 0;
    if (distance < best_distance || (distance == best_distance && best && e.bytes < best->bytes)) {
      best = &e;
      best_distance = distance;
    }
  }
  if (best == nullptr) return "there is no live allocation";
  const uint64_t end = best->base + best->bytes;
  const char* name = best->name.c_str();
  if (best_distance == 0 && address + bytes > end)
    return format("the last %llu bytes lie past the end of %s (0x%llx, %llu bytes; offset %llu)",
                  static_cast<unsigned long long>(address + bytes - end), name,
                  static_cast<unsigned long long>(best->base), static_cast<unsigned long long>(best->bytes),
                  static_cast<unsigned long long>(address - best->base));
  if (best_distance == 0)
    return format("inside %s at offset %llu", name, static_cast<unsigned long long>(address - best->base));
  if (address >= end)
    return format("%llu bytes past the end of %s (0x%llx, %llu bytes)", static_cast<unsigned long long>(address - end),
                  name, static_cast<unsigned long long>(best->base), static_cast<unsigned long long>(best->bytes));
  return format("%llu bytes before the start of %s (0x%llx, %llu bytes)",
                static_cast<unsigned long long>(best->base - address), name,
                static_cast<unsigned long long>(best->base), static_cast<unsigned long long>(best->bytes));
}

}  // namespace hfemu
