// Open collectors of each thread, and their JSON.
#include "counters.h"

#include <map>
#include <memory>

#include "collect.h"
#include "decode.h"
#include "stats.h"

namespace hfemu {
namespace {

const char* const kClassNames[] = {"salu", "smem", "valu", "valu_trans", "mfma", "lds", "vmem_load", "vmem_store",
                                   "atomic", "branch", "barrier", "waitcnt", "other"};
static_assert(std::size(kClassNames) == static_cast<size_t>(OpClass::count));

struct Tensor {
  uint64_t bytes = 0, loaded = 0, stored = 0, unique_loaded = 0, unique_stored = 0;
};

struct KernelTotals {
  std::string name;
  uint32_t grid[3], block[3];
  uint32_t vgprs, lds_bytes, scratch_bytes, groups_per_cu;
  uint64_t launches = 0, wave_instructions = 0;
  double seconds = 0;
};

struct PcTotals {
  std::string text, source;
  uint64_t count = 0, lanes = 0, bytes = 0, conflicts = 0;
};

struct Collector {
  int64_t id;
  bool per_pc;
  uint64_t launches = 0, workgroups = 0, waves = 0, wave_instructions = 0, active_lanes = 0, lane_slots = 0;
  double seconds = 0;
  uint64_t by_class[static_cast<size_t>(OpClass::count)] = {};
  std::map<std::string, uint64_t> by_mnemonic;
  uint64_t bytes_loaded = 0, bytes_stored = 0, scalar_bytes = 0, scratch_bytes = 0;
  uint64_t lds_bytes = 0, lds_accesses = 0, lds_conflicts = 0, mfma_count = 0, mfma_cycles = 0;
  uint32_t lds_banks = 0;
  LineCount lines;
  std::map<std::string, Tensor> tensors;
  std::vector<KernelTotals> kernels;
  std::map<std::pair<std::string, uint64_t>, PcTotals> pcs;
};

std::vector<std::unique_ptr<Collector>>& open_collectors() {
  thread_local std::vector<std::unique_ptr<Collector>> open;
  return open;
}

uint64_t ones(const std::vector<uint64_t>& bits) {
  uint64_t n = 0;
  for (const uint64_t x : bits) n += static_cast<uint64_t>(std::popcount(x));
  return n;
}

bool is_vector(OpClass c) {
  switch (c) {
    case OpClass::valu: case OpClass::valu_trans: case OpClass::lds: case OpClass::vmem_load:
    case OpClass::vmem_store: case OpClass::atomic: return true;
    default: return false;
  }
}

void add_instructions(Collector& c, const Launch& launch, const Stats& s, uint64_t* executed) {
  const Program& p = *launch.program;
  for (size_t i = 0; i < p.insts.size(); ++i) {
    const uint64_t n = s.count_[i];
    if (n == 0) continue;
    const Inst& inst = p.insts[i];
    const OpClass op_class = p.code[i].op_class;
    *executed += n;
    c.by_class[static_cast<size_t>(op_class)] += n;
    c.by_mnemonic[op_name(inst.op)] += n;
    if (is_vector(op_class)) {
      c.active_lanes += s.lanes_[i];
      c.lane_slots += n * kLanes;
    }
    if (op_class == OpClass::mfma) {
      c.mfma_count += n;
      c.mfma_cycles += n * static_cast<uint64_t>(matrix_cycles(inst.op, inst.cbsz, inst.blgp, p.arch));
    }
    if (c.per_pc) {
      PcTotals& pc = c.pcs[{launch.kernel->name, inst.pc}];
      if (pc.text.empty()) {
        pc.text = instruction_text(inst, nullptr);
        pc.source = launch.program->source(inst);
      }
      pc.count += n;
      pc.lanes += s.lanes_[i];
      pc.bytes += s.bytes_[i];
      pc.conflicts += s.conflicts_[i];
    }
  }
}

void add_launch(Collector& c, const Launch& launch, const Stats& s, const LaunchRequest& r, uint64_t groups,
                double seconds) {
  uint64_t executed = 0;
  add_instructions(c, launch, s, &executed);
  ++c.launches;
  c.workgroups += groups;
  const uint64_t items = uint64_t{r.block[0]} * r.block[1] * r.block[2];
  c.waves += groups * ((items + kLanes - 1) / kLanes);
  c.wave_instructions += executed;
  c.seconds += seconds;
  c.bytes_loaded += s.bytes_loaded_;
  c.bytes_stored += s.bytes_stored_;
  c.scalar_bytes += s.scalar_bytes_;
  c.scratch_bytes += s.scratch_bytes_;
  c.lds_bytes += s.lds_bytes_;
  c.lds_accesses += s.lds_accesses_;
  c.lds_conflicts += s.lds_conflicts_;
  c.lds_banks = s.lds_banks_;
  c.lines.lines64 += s.lines_.lines64;
  c.lines.lines128 += s.lines_.lines128;
  c.lines.accesses += s.lines_.accesses;
  c.lines.bytes += s.lines_.bytes;
  for (const auto& [index, count] : s.tensors_) {
    const Extent& e = launch.map.extents()[index];
    Tensor& t = c.tensors[e.name];
    t.bytes = e.bytes;
    t.loaded += count.loaded;
    t.stored += count.stored;
    t.unique_loaded += ones(count.loaded_bits);
    t.unique_stored += ones(count.stored_bits);
  }
  KernelTotals* k = nullptr;
  const uint32_t lds = launch.kernel->lds_bytes + r.dynamic_lds;
  for (KernelTotals& known : c.kernels)
    if (known.name == launch.kernel->name && known.lds_bytes == lds && std::equal(r.grid, r.grid + 3, known.grid) &&
        std::equal(r.block, r.block + 3, known.block))
      k = &known;
  if (k == nullptr) {
    const uint32_t fit =
        groups_per_cu(*launch.kernel, launch.program->arch, static_cast<uint32_t>(items), r.dynamic_lds);
    c.kernels.push_back({launch.kernel->name, {r.grid[0], r.grid[1], r.grid[2]}, {r.block[0], r.block[1], r.block[2]},
                         launch.kernel->vgprs, lds, launch.kernel->private_bytes, fit});
    k = &c.kernels.back();
  }
  ++k->launches;
  k->wave_instructions += executed;
  k->seconds += seconds;
}

// --- JSON -------------------------------------------------------------------------------------------------------------

std::string quoted(const std::string& s) {
  std::string out = "\"";
  for (const char ch : s) {
    if (ch == '"' || ch == '\\') out += '\\', out += ch;
    else if (static_cast<unsigned char>(ch) < 0x20) out += format("\\u%04x", ch);
    else out += ch;
  }
  return out + "\"";
}
std::string number(const char* key, uint64_t x) { return format("\"%s\":%llu", key, static_cast<unsigned long long>(x)); }
std::string real(const char* key, double x) { return format("\"%s\":%.9g", key, x); }

std::string joined(const std::vector<std::string>& parts, char open, char close) {
  std::string s(1, open);
  for (size_t i = 0; i < parts.size(); ++i) s += (i ? "," : "") + parts[i];
  return s + close;
}
std::string object(const std::vector<std::string>& fields) { return joined(fields, '{', '}'); }

std::string lines_json(const LineCount& l, uint64_t lines, uint64_t size) {
  const double moved = static_cast<double>(lines * size);
  return object({number("accesses", l.accesses), number("bytes", l.bytes), number("lines", lines),
                 real("efficiency", moved > 0 ? static_cast<double>(l.bytes) / moved : 0)});
}

std::string three(const char* key, const uint32_t* x) { return format("\"%s\":[%u,%u,%u]", key, x[0], x[1], x[2]); }

std::string json(const Collector& c) {
  std::vector<std::string> classes, mnemonics, tensors, kernels, pcs;
  for (size_t i = 0; i < std::size(kClassNames); ++i) classes.push_back(number(kClassNames[i], c.by_class[i]));
  for (const auto& [name, n] : c.by_mnemonic) mnemonics.push_back(number(name.c_str(), n));
  for (const auto& [name, t] : c.tensors)
    tensors.push_back(quoted(name) + ":" +
                      object({number("bytes", t.bytes), number("loaded", t.loaded), number("stored", t.stored),
                              number("unique_loaded", t.unique_loaded), number("unique_stored", t.unique_stored)}));
  for (const KernelTotals& k : c.kernels)
    kernels.push_back(object({"\"name\":" + quoted(k.name), three("grid", k.grid), three("block", k.block),
                              number("launches", k.launches), number("wave_instructions", k.wave_instructions),
                              number("vgprs", k.vgprs), number("lds_bytes", k.lds_bytes),
                              number("scratch_bytes", k.scratch_bytes), number("workgroups_per_cu", k.groups_per_cu),
                              real("seconds", k.seconds)}));
  for (const auto& [key, p] : c.pcs)
    pcs.push_back(object({"\"kernel\":" + quoted(key.first), number("pc", key.second), "\"text\":" + quoted(p.text),
                          number("count", p.count), number("lanes", p.lanes), number("bytes", p.bytes),
                          number("lds_bank_conflicts", p.conflicts), "\"source\":" + quoted(p.source)}));
  std::vector<std::string> fields = {
      number("launches", c.launches),
      number("workgroups", c.workgroups),
      number("waves", c.waves),
      real("seconds", c.seconds),
      number("wave_instructions", c.wave_instructions),
      number("active_lanes", c.active_lanes),
      number("lane_slots", c.lane_slots),
      "\"by_class\":" + object(classes),
      "\"by_mnemonic\":" + object(mnemonics),
      number("bytes_loaded", c.bytes_loaded),
      number("bytes_stored", c.bytes_stored),
      "\"tensors\":" + object(tensors),
      "\"lines64\":" + lines_json(c.lines, c.lines.lines64, 64),
      "\"lines128\":" + lines_json(c.lines, c.lines.lines128, 128),
      number("scalar_bytes", c.scalar_bytes),
      number("scratch_bytes", c.scratch_bytes),
      number("lds_bytes", c.lds_bytes),
      number("lds_accesses", c.lds_accesses),
      number("lds_bank_conflicts", c.lds_conflicts),
      number("lds_banks", c.lds_banks),
      number("mfma_count", c.mfma_count),
      number("mfma_cycles", c.mfma_cycles),
      "\"kernels\":" + joined(kernels, '[', ']'),
  };
  if (c.per_pc) fields.push_back("\"per_pc\":" + joined(pcs, '[', ']'));
  return object(fields);
}

}  // namespace

bool collecting() { return !open_collectors().empty(); }

void collect_launch(const Launch& launch, const Stats& stats, const LaunchRequest& request, uint64_t groups,
                    double seconds) {
  for (const auto& c : open_collectors()) add_launch(*c, launch, stats, request, groups, seconds);
}

int64_t counters_begin(bool per_pc) {
  static std::atomic<int64_t> next{1};
  auto c = std::make_unique<Collector>();
  c->id = next++;
  c->per_pc = per_pc;
  open_collectors().push_back(std::move(c));
  return open_collectors().back()->id;
}

std::string counters_end(int64_t id) {
  auto& open = open_collectors();
  for (auto it = open.begin(); it != open.end(); ++it) {
    if ((*it)->id != id) continue;
    std::string text = json(**it);
    open.erase(it);
    return text;
  }
  return {};
}

}  // namespace hfemu
