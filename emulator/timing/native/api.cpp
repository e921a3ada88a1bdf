// The C interface for Python (library.py).
#include <cstring>
#include <stdexcept>
#include <string>

#include "capture.h"
#include "simulator.h"

using namespace hftime;

namespace {

thread_local std::string text;

std::string quoted(const std::string& s) {
  std::string out = "\"";
  for (const char c : s) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

template <class T, class F>
std::string list(const T& items, F each) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? "," : "") + each(item);
  return out + "]";
}

std::string number(double x) {
  char digits[40];
  std::snprintf(digits, sizeof digits, "%.10g", x);
  return digits;
}

const Launch& launch_of(const Capture* c, uint64_t launch) {
  if (launch < c->launches.size()) return c->launches[launch];
  throw std::runtime_error("the capture has " + std::to_string(c->launches.size()) + " launches, from number 0; got " +
                           std::to_string(static_cast<int64_t>(launch)));
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

Capture* hftime_capture_new() { return new Capture; }
void hftime_capture_room(Capture* c, uint64_t words) { c->max_words = words; }
void hftime_capture_free(Capture* c) { delete c; }
const hfemu_recorder* hftime_capture_recorder(Capture* c) { return c->recorder(); }
void hftime_capture_policy(Capture* c, int64_t fallback, const uint64_t* groups, const int64_t* limits, uint64_t count,
                           int32_t merge, int32_t skip_matrix) {
  c->fallback = fallback;
  c->chosen.clear();
  for (uint64_t i = 0; i < count; ++i) c->chosen[groups[i]] = limits[i];
  c->pass(merge != 0);
  c->recorder()->skip_matrix = skip_matrix;
}
int32_t hftime_capture_save(Capture* c, const char* path) { return c->save(path); }
int32_t hftime_capture_load(Capture* c, const char* path) {
  try {
    return c->load(path);
  } catch (const std::exception&) {  // a size that no memory holds
    return 0;
  }
}

// JSON of a capture: kernels, grids and what was recorded.
const char* hftime_capture_describe(Capture* c) {
  text = list(c->launches, [](const Launch& l) {
    uint64_t whole = 0;
    std::string unmatched;
    for (const auto& [index, g] : l.recorded) {
      whole += g.whole;
      if (g.of < 0) unmatched += (unmatched.empty() ? "" : ",") + std::to_string(index);
    }
    const auto size = [](uint64_t x) { return std::to_string(x); };
    return "{\"kernel\":" + quoted(l.kernel) + ",\"arch\":" + quoted(l.arch) + ",\"grid\":" + list(l.grid, size) +
           ",\"block\":" + list(l.block, size) + ",\"groups\":" + size(l.groups) + ",\"waves\":" + size(l.waves) +
           ",\"groups_per_cu\":" + size(l.groups_per_cu) + ",\"lds_bytes\":" + size(l.lds_bytes) +
           ",\"vgprs\":" + size(l.vgprs) + ",\"recorded\":" + size(l.recorded.size()) + ",\"whole\":" + size(whole) +
           ",\"extents\":" + list(l.extents, [](const Extent& e) {
             return "[" + quoted(e.name) + "," + std::to_string(e.bytes) + "]";
           }) +
           ",\"templates\":" + list(l.templates, [](const Template& t) {
             // Enough of a prefix to have touched every extent that is loaded.
             return std::to_string(t.instructions);
           }) +
           ",\"unmatched\":[" + unmatched + "]}";
  });
  return text.c_str();
}

// The instructions of each wave that reach the first load of every buffer it loads, the largest over the waves of the
// template; 0 if there is none; -1 without such a launch or template, for the reason in hftime_error.
int64_t hftime_prefix(Capture* c, uint64_t launch, uint64_t of) try {
  const Launch& l = launch_of(c, launch);
  if (of >= l.templates.size())
    throw std::runtime_error("launch " + std::to_string(launch) + " has " + std::to_string(l.templates.size()) +
                             " templates, from number 0; got " + std::to_string(static_cast<int64_t>(of)));
  uint64_t need = 0;
  for (const WaveStream& s : l.templates[of].waves) {
    std::map<uint16_t, uint64_t> first;
    size_t at = 0;
    for (uint64_t i = 0; i < s.instructions.size(); ++i) {
      const uint8_t unit = l.instructions[s.instructions[i]].unit;
      if (unit != HFEMU_SMEM && unit != HFEMU_LDS && unit != HFEMU_VMEM_LOAD && unit != HFEMU_VMEM_STORE &&
          unit != HFEMU_ATOMIC)
        continue;
      uint32_t n = s.accesses[at++];
      while (n--) {
        const uint32_t header = s.accesses[at++];
        if ((header & 3) == 3) continue;
        if ((header & 3) == 0 && (header >> 2 & 0x3FFF) != 0) first.emplace(static_cast<uint16_t>(header >> 16), i + 1);
        at += header >> 2 & 0x3FFF;
      }
    }
    for (const auto& [extent, i] : first) need = std::max(need, i);
  }
  return static_cast<int64_t>(need);
} catch (const std::exception& error) {
  text = error.what();
  return -1;
}

const char* hftime_error() { return text.c_str(); }

const char* hftime_parameter_names() {
#define HFTIME_NAME(name) #name " "
  return HFTIME_PARAMETERS(HFTIME_NAME);
#undef HFTIME_NAME
}

// JSON of one simulation, or {"error": ...}. `detail`: also per instruction and the waves of the first CU.
const char* hftime_simulate(Capture* c, uint64_t launch, const double* parameters, int32_t start, int32_t all_xcds,
                            uint64_t max_rounds, uint64_t max_iterations, int32_t detail) {
  try {
    Machine machine;
    size_t i = 0;
#define HFTIME_TAKE(name) machine.name = parameters[i++];
    HFTIME_PARAMETERS(HFTIME_TAKE)
#undef HFTIME_TAKE
    Setup setup;
    setup.start = static_cast<Level>(start);
    setup.all_xcds = all_xcds != 0;
    setup.max_rounds = max_rounds;
    setup.max_iterations = max_iterations;
    const Launch& l = launch_of(c, launch);
    const Outcome o = simulate(l, machine, setup);
    const auto whole = [](uint64_t x) { return std::to_string(x); };
    const Traffic& t = o.traffic;
    text = "{\"cycles\":" + number(o.cycles) + ",\"last_wave\":" + number(o.last_wave) +
           ",\"stalls\":" + list(o.stalls, number) + ",\"instructions\":" + whole(o.instructions) +
           ",\"rounds\":" + whole(o.rounds) + ",\"total_rounds\":" + whole(o.total_rounds) +
           ",\"iterations\":" + whole(o.iterations) + ",\"total_iterations\":" + whole(o.total_iterations) +
           ",\"l1_lines\":" + whole(t.l1_lines) + ",\"l1_hits\":" + whole(t.l1_hits) + ",\"l2_lines\":" +
           whole(t.l2_lines) + ",\"l2_hits\":" + whole(t.l2_hits) + ",\"mall_lines\":" + whole(t.mall_lines) +
           ",\"hbm_lines\":" + whole(t.hbm_lines) + ",\"hbm_bytes\":" + number(t.hbm_bytes) + ",\"stored_bytes\":" +
           whole(t.stored_bytes) + ",\"pipe_cycles\":" + number(o.pipe_cycles);
    if (detail) {
      text += ",\"hot\":[";
      bool first = true;
      for (size_t k = 0; k < o.count_of.size(); ++k) {
        if (o.count_of[k] == 0) continue;
        text += (first ? "[" : ",[") + whole(l.instructions[k].pc) + "," + quoted(l.instructions[k].text) + "," +
                whole(o.count_of[k]) + "," + number(o.stall_of[k]) + "]";
        first = false;
      }
      text += "],\"spans\":" + list(o.spans, [](const Span& s) {
        return "[" + std::to_string(s.simd) + "," + std::to_string(s.group) + "," + std::to_string(s.wave) + "," +
               number(s.begin) + "," + number(s.end) + "]";
      });
      text += ",\"phases\":" + list(o.phases, [](const Phase& p) {
        return "[" + std::to_string(p.simd) + "," + std::to_string(p.group) + "," + std::to_string(p.wave) + "," +
               number(p.begin) + "," + number(p.end) + "," + std::to_string(p.reason) + "]";
      });
    }
    text += "}";
  } catch (const std::exception& error) {
    text = "{\"error\":" + quoted(error.what()) + "}";
  }
  return text.c_str();
}

}  // extern "C"
#pragma GCC visibility pop
