#include "capture.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>

namespace hftime {
namespace {

constexpr size_t kMostMoved = 16;  // accesses of a work-group; a meeting of 8 work-groups takes up to 6

// Whether the recorded waves equal the template's (their beginnings, if `whole` is false); finds the shifts, and up to
// `most_moved` accesses that move otherwise.
bool matches(const Template& t, const hfemu_recorded_wave* waves, bool whole, size_t most_moved, Group* g) {
  g->shift.clear();
  g->moved.clear();
  for (size_t w = 0; w < t.waves.size(); ++w) {
    const WaveStream& of = t.waves[w];
    const hfemu_recorded_wave& is = waves[w];
    if (whole ? is.instruction_count != of.instructions.size() : is.instruction_count > of.instructions.size()) return false;
    if (is.words > of.accesses.size()) return false;
    if (std::memcmp(is.instructions, of.instructions.data(), 4 * is.instruction_count) != 0) return false;
    for (uint64_t at = 0; at < is.words;) {
      uint32_t accesses = is.accesses[at];
      if (of.accesses[at] != accesses) return false;
      ++at;
      while (accesses--) {
        const uint32_t header = is.accesses[at];
        if (of.accesses[at] != header) return false;
        ++at;
        if ((header & 3) == 3) continue;
        const uint32_t count = header >> 2 & 0x3FFF;
        const auto extent = static_cast<uint16_t>(header >> 16);
        if (count == 0) continue;
        const int64_t by = int64_t{is.accesses[at]} - int64_t{of.accesses[at]};
        const int64_t usual = g->shift.emplace(extent, by).first->second;
        if (usual != by) {
          if (g->moved.size() == most_moved) return false;
          g->moved.push_back({static_cast<uint32_t>(w), static_cast<uint32_t>(at), by - usual});
        }
        for (uint32_t i = 0; i < count; ++i)
          if (int64_t{is.accesses[at + i]} - int64_t{of.accesses[at + i]} != by) return false;
        at += count;
      }
    }
  }
  return true;
}

Template make_template(const Launch& launch, const hfemu_recorded_wave* waves) {
  Template t;
  std::set<uint16_t> extents;
  for (uint32_t w = 0; w < launch.waves; ++w) {
    WaveStream s;
    s.instructions.assign(waves[w].instructions, waves[w].instructions + waves[w].instruction_count);
    s.accesses.assign(waves[w].accesses, waves[w].accesses + waves[w].words);
    for (uint64_t at = 0; at < s.accesses.size();) {
      s.access_at.push_back(static_cast<uint32_t>(at));
      uint32_t accesses = s.accesses[at++];
      while (accesses--) {
        const uint32_t header = s.accesses[at++];
        if ((header & 3) == 3) continue;
        extents.insert(static_cast<uint16_t>(header >> 16));
        at += header >> 2 & 0x3FFF;
      }
    }
    t.instructions += s.instructions.size();
    t.waves.push_back(std::move(s));
  }
  t.extents.assign(extents.begin(), extents.end());
  return t;
}

// --- a plain binary file: counts before arrays, native byte order ------------------------------------------------------
class Writer {
 public:
  explicit Writer(const std::string& path) : out_(path, std::ios::binary) {}
  template <class T> void value(const T& x) { out_.write(reinterpret_cast<const char*>(&x), sizeof x); }
  void text(const std::string& x) {
    value(uint64_t{x.size()});
    out_.write(x.data(), static_cast<std::streamsize>(x.size()));
  }
  template <class T> void array(const std::vector<T>& x) {
    value(uint64_t{x.size()});
    out_.write(reinterpret_cast<const char*>(x.data()), static_cast<std::streamsize>(sizeof(T) * x.size()));
  }
  bool good() { return out_.flush().good(); }
 private:
  std::ofstream out_;
};

class Reader {
 public:
  explicit Reader(const std::string& path) : in_(path, std::ios::binary) {}
  template <class T> T value() {
    T x{};
    in_.read(reinterpret_cast<char*>(&x), sizeof x);
    return x;
  }
  std::string text() {
    std::string x(value<uint64_t>(), 0);
    in_.read(x.data(), static_cast<std::streamsize>(x.size()));
    return x;
  }
  template <class T> std::vector<T> array() {
    const auto n = value<uint64_t>();
    std::vector<T> x(in_.good() ? n : 0);
    in_.read(reinterpret_cast<char*>(x.data()), static_cast<std::streamsize>(sizeof(T) * x.size()));
    return x;
  }
  bool good() const { return in_.good(); }
 private:
  std::ifstream in_;
};

constexpr uint32_t kMagic = 0x32544648;  // "HFT2"

void fill_access_at(Template& t, const std::vector<Instruction>&) {
  for (WaveStream& s : t.waves) {
    for (uint64_t at = 0; at < s.accesses.size();) {
      s.access_at.push_back(static_cast<uint32_t>(at));
      uint32_t accesses = s.accesses[at++];
      while (accesses--) {
        const uint32_t header = s.accesses[at++];
        if ((header & 3) != 3) at += header >> 2 & 0x3FFF;
      }
    }
  }
}

}  // namespace

Capture::Capture() {
  recorder_.context = this;
  recorder_.begin = [](void* c, const hfemu_recorded_launch* l) { static_cast<Capture*>(c)->begin(*l); };
  recorder_.choose = [](void* c, uint64_t g) { return static_cast<Capture*>(c)->choose(g); };
  recorder_.group = [](void* c, uint64_t g, const hfemu_recorded_wave* w) { static_cast<Capture*>(c)->group(g, w); };
  recorder_.end = [](void*) {};
}

void Capture::begin(const hfemu_recorded_launch& l) {
  if (next_++ < launches.size()) return;
  Launch launch;
  launch.kernel = l.kernel;
  launch.arch = l.arch;
  std::copy_n(l.grid, 3, launch.grid);
  std::copy_n(l.block, 3, launch.block);
  launch.groups = l.groups;
  launch.waves = l.waves;
  launch.groups_per_cu = std::max<uint32_t>(1, l.groups_per_cu);
  launch.lds_bytes = l.lds_bytes;
  launch.vgprs = l.vgprs;
  uint64_t registers = 0;
  for (uint64_t i = 0; i < l.instruction_count; ++i) {
    const hfemu_instruction& in = l.instructions[i];
    launch.instructions.push_back({in.pc, in.text, in.first_register, in.reads, in.writes, in.matrix_cycles, in.bytes,
                                   in.unit, in.lane_bytes, in.counters, in.immediate});
    registers = std::max<uint64_t>(registers, uint64_t{in.first_register} + in.reads + in.writes);
  }
  launch.registers.assign(l.registers, l.registers + registers);
  for (uint64_t i = 0; i < l.extent_count; ++i) launch.extents.push_back({l.extents[i].name, l.extents[i].bytes});
  launches.push_back(std::move(launch));
}

int64_t Capture::choose(uint64_t group) {
  const std::lock_guard lock(mutex_);
  const auto found = chosen.find(group);
  const int64_t wanted = found == chosen.end() ? fallback : found->second;
  if (wanted <= 0 || words_ <= max_words) return wanted;
  launches.at(next_ - 1).full = true;
  return -1;
}

void Capture::group(uint64_t index, const hfemu_recorded_wave* waves) {
  const std::lock_guard lock(mutex_);
  Launch& launch = launches.at(next_ - 1);
  Group g;
  g.index = index;
  g.whole = true;
  for (uint32_t w = 0; w < launch.waves; ++w) {
    const hfemu_recorded_wave& wave = waves[w];
    if (wave.instruction_count == 0 ||
        launch.instructions[wave.instructions[wave.instruction_count - 1]].unit != HFEMU_END)
      g.whole = false;
  }
  const size_t most_moved = may_move_ && g.whole ? kMostMoved : 0;
  for (size_t t = 0; t < launch.templates.size() && g.of < 0; ++t)
    if (matches(launch.templates[t], waves, g.whole, most_moved, &g)) g.of = static_cast<int32_t>(t);
  if (g.of < 0) {
    g.shift.clear();
    g.moved.clear();
    if (g.whole) {
      g.of = static_cast<int32_t>(launch.templates.size());
      launch.templates.push_back(make_template(launch, waves));
      for (const uint16_t e : launch.templates.back().extents) g.shift[e] = 0;
      for (const WaveStream& s : launch.templates.back().waves) words_ += s.instructions.size() + s.accesses.size();
    }
  }
  const auto old = launch.recorded.find(index);
  if (old != launch.recorded.end() && old->second.whole && !g.whole) return;
  launch.recorded[index] = std::move(g);
}

bool Capture::save(const std::string& path) const {
  Writer out(path);
  out.value(kMagic);
  out.value(uint64_t{launches.size()});
  for (const Launch& l : launches) {
    out.text(l.kernel);
    out.text(l.arch);
    out.value(l.grid);
    out.value(l.block);
    out.value(l.groups);
    for (const uint32_t x : {l.waves, l.groups_per_cu, l.lds_bytes, l.vgprs}) out.value(x);
    out.value(uint64_t{l.instructions.size()});
    for (const Instruction& i : l.instructions) {
      out.value(i.pc);
      out.text(i.text);
      out.value(i.first_register);
      for (const uint16_t x : {i.reads, i.writes, i.matrix_cycles}) out.value(x);
      for (const uint8_t x : {i.bytes, i.unit, i.lane_bytes, i.counters}) out.value(x);
      out.value(i.immediate);
    }
    out.array(l.registers);
    out.value(uint64_t{l.extents.size()});
    for (const Extent& e : l.extents) {
      out.text(e.name);
      out.value(e.bytes);
    }
    out.value(uint64_t{l.templates.size()});
    for (const Template& t : l.templates) {
      out.value(uint64_t{t.waves.size()});
      for (const WaveStream& s : t.waves) {
        out.array(s.instructions);
        out.array(s.accesses);
      }
      out.array(t.extents);
      out.value(t.instructions);
    }
    out.value(l.full);
    out.value(uint64_t{l.recorded.size()});
    for (const auto& [index, g] : l.recorded) {
      out.value(index);
      out.value(g.of);
      out.value(g.whole);
      out.value(uint64_t{g.shift.size()});
      for (const auto& [extent, by] : g.shift) {
        out.value(extent);
        out.value(by);
      }
      out.array(g.moved);
    }
  }
  return out.good();
}

bool Capture::load(const std::string& path) {
  Reader in(path);
  if (in.value<uint32_t>() != kMagic) return false;
  launches.clear();
  for (auto n = in.value<uint64_t>(); n && in.good(); --n) {
    Launch l;
    l.kernel = in.text();
    l.arch = in.text();
    for (uint32_t& x : l.grid) x = in.value<uint32_t>();
    for (uint32_t& x : l.block) x = in.value<uint32_t>();
    l.groups = in.value<uint64_t>();
    for (uint32_t* x : {&l.waves, &l.groups_per_cu, &l.lds_bytes, &l.vgprs}) *x = in.value<uint32_t>();
    for (auto k = in.value<uint64_t>(); k && in.good(); --k) {
      Instruction i;
      i.pc = in.value<uint64_t>();
      i.text = in.text();
      i.first_register = in.value<uint32_t>();
      for (uint16_t* x : {&i.reads, &i.writes, &i.matrix_cycles}) *x = in.value<uint16_t>();
      for (uint8_t* x : {&i.bytes, &i.unit, &i.lane_bytes, &i.counters}) *x = in.value<uint8_t>();
      i.immediate = in.value<int32_t>();
      l.instructions.push_back(std::move(i));
    }
    l.registers = in.array<uint16_t>();
    for (auto k = in.value<uint64_t>(); k && in.good(); --k) {
      Extent e;
      e.name = in.text();
      e.bytes = in.value<uint64_t>();
      l.extents.push_back(std::move(e));
    }
    for (auto k = in.value<uint64_t>(); k && in.good(); --k) {
      Template t;
      for (auto w = in.value<uint64_t>(); w && in.good(); --w) {
        WaveStream s;
        s.instructions = in.array<uint32_t>();
        s.accesses = in.array<uint32_t>();
        t.waves.push_back(std::move(s));
      }
      t.extents = in.array<uint16_t>();
      t.instructions = in.value<uint64_t>();
      fill_access_at(t, l.instructions);
      l.templates.push_back(std::move(t));
    }
    l.full = in.value<bool>();
    for (auto k = in.value<uint64_t>(); k && in.good(); --k) {
      Group g;
      g.index = in.value<uint64_t>();
      g.of = in.value<int32_t>();
      g.whole = in.value<bool>();
      for (auto s = in.value<uint64_t>(); s && in.good(); --s) {
        const auto extent = in.value<uint16_t>();
        g.shift[extent] = in.value<int64_t>();
      }
      g.moved = in.array<Moved>();
      l.recorded[g.index] = std::move(g);
    }
    launches.push_back(std::move(l));
  }
  return in.good();
}

}  // namespace hftime
