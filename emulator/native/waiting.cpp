#include "waiting.h"

#include "addressing.h"
#include "exec.h"
#include "lds.h"
#include "smem.h"

namespace hfemu {
namespace {

// A longer loop does not count as waiting, nor a loop that passes its first instruction this often in other states.
constexpr uint32_t kLongestWait = 1024, kMostHashes = 8;
constexpr size_t kLargestScratch = 1 << 16;

bool reads_memory(const ExecInst& in) {
  switch (in.inst->format) {
    case Format::FLAT: case Format::GLOBAL: case Format::MUBUF: case Format::DS: case Format::SMEM:
      return in.inst->dst.kind != OperandKind::none;
    default: return false;
  }
}

// Writes memory that other waves can see. The effect of a returning atomic shows in the value that it returns next.
bool stores(const Wave& w, const ExecInst& in) {
  const Inst& i = *in.inst;
  if (i.format == Format::SCRATCH) return w.launch->private_bytes * size_t{kLanes} > kLargestScratch;
  return i.lds || (i.vdata.kind != OperandKind::none && i.dst.kind == OperandKind::none);
}

uint64_t hash_words(const void* data, size_t bytes, uint64_t seed) {
  constexpr uint64_t prime = 0x9E3779B97F4A7C15;
  uint64_t h[4] = {seed, seed ^ prime, ~seed, seed * prime};
  const auto* p = static_cast<const uint8_t*>(data);
  for (size_t at = 0; at + 32 <= bytes; at += 32) {
    uint64_t x[4];
    std::memcpy(x, p + at, sizeof x);
    for (int i = 0; i < 4; ++i) h[i] = (h[i] ^ x[i]) * prime ^ h[i] >> 29;
  }
  return ((h[0] * prime ^ h[1]) * prime ^ h[2]) * prime ^ h[3];
}

WaveWait wait_of(const Wave& w, const ExecInst& in) {
  WaveWait found;
  found.instruction = static_cast<uint32_t>(in.inst - w.launch->program->insts.data());
  const uint64_t exec = w.exec();
  const Format format = in.inst->format;
  if (format == Format::SMEM) {
    found.global = true;
    found.address = in.inst->saddr.kind != OperandKind::none ? scalar_address(w, in)
                                                             : scalar_buffer(w, in).base + scalar_buffer(w, in).offset;
    return found;
  }
  if (exec == 0) return found;
  const int lane = std::countr_zero(exec);
  if (format == Format::DS) {
    found.address = w.v[in.address.reg][lane] + static_cast<uint32_t>(in.offset);
  } else if (format == Format::MUBUF) {
    const uint64_t base = (uint64_t{w.s[in.sbase]} | uint64_t{w.s[in.sbase + 1]} << 32) & 0xFFFFFFFFFFFF;
    const uint32_t offset = in.inst->offen && !in.inst->idxen ? w.v[in.address.reg][lane] : 0;
    found.global = true;
    found.address = base + static_cast<uint64_t>(in.offset) + offset + static_cast<uint32_t>(scalar_source(w, in.src[0]));
  } else {
    LaneAddresses a;
    global_addresses(w, in, a, exec);
    found.address = a.at[lane];
    found.global = static_cast<uint32_t>(found.address >> 32) != kSharedApertureHigh;
    if (!found.global) found.address &= 0xFFFFFFFF;
  }
  return found;
}

}  // namespace

void WaitWatch::begin(const Wave* waves, uint32_t count, uint32_t rows) {
  waves_ = waves;
  count_ = count;
  rows_ = rows;
  verdict_ = Verdict::open;
  found_.assign(count, WaveWait{});
  current_ = ~0u;
  circles_ = 0;
  next_wave();
}

void WaitWatch::next_wave() {
  ++current_;
  anchored_ = false;
  steps_ = hashes_ = 0;
  round();
}

// Waves that have ended or stand at a barrier need no watching.
void WaitWatch::round() {
  while (open() && current_ < count_ &&
         (waves_[current_].state == WaveState::ended || waves_[current_].state == WaveState::barrier)) {
    ++current_;
    anchored_ = false;
    steps_ = hashes_ = 0;
  }
  // If no wave is in a loop, all are at one barrier and about to pass it.
  if (open() && current_ >= count_ && circles_ != 0) verdict_ = Verdict::waits;
}

uint64_t WaitWatch::hash_of(const Wave& w) const {
  uint64_t h = hash_words(w.v, size_t{rows_} * sizeof(Row), 1);
  h = hash_words(w.v[kAcc], size_t{rows_} * sizeof(Row), h);
  return hash_words(w.scratch, w.launch->private_bytes * size_t{kLanes}, h);
}

void WaitWatch::before(const Wave& w, const ExecInst& in) {
  if (!open() || w.index != current_) return;
  if (!anchored_) {
    anchored_ = true;
    pc_ = w.pc;
    scc_ = w.scc;
    std::memcpy(sgprs_, w.s, sizeof sgprs_);
    hash_ = hash_of(w);
  }
  if (reads_memory(in)) found_[current_] = wait_of(w, in);
}

void WaitWatch::after(const Wave& w, const ExecInst& in) {
  if (!open()) return;
  if (stores(w, in) || (w.index == current_ && ++steps_ > kLongestWait)) {
    verdict_ = Verdict::advances;
    return;
  }
  if (w.index != current_ || w.pc != pc_ || w.scc != scc_ || std::memcmp(sgprs_, w.s, sizeof sgprs_) != 0) return;
  if (hash_of(w) == hash_) {
    ++circles_;
    next_wave();
  } else if (++hashes_ == kMostHashes) {
    verdict_ = Verdict::advances;
  }
}

std::string describe_waits(const Launch& launch, const Workgroup& group, const Wave* waves, uint32_t count,
                           const std::vector<WaveWait>& found) {
  const Program& p = *launch.program;
  std::string text = format("  work-group (%u, %u, %u)\n", group.id[0], group.id[1], group.id[2]);
  const auto of_wave = [&](uint32_t i) -> std::string {
    const Wave& w = waves[i];
    if (w.state == WaveState::ended) return "ended";
    const bool stands = w.state == WaveState::barrier;
    const WaveWait& wait = found[i];
    const bool reads = !stands && wait.instruction != ~0u;
    const uint32_t at = reads ? wait.instruction : stands && w.pc ? w.pc - 1 : w.pc;
    std::string s = stands ? "at a barrier that the other waves have not reached, " : "";
    if (reads) {
      uint32_t value;
      const uint8_t* from = wait.global ? reinterpret_cast<const uint8_t*>(wait.address) : group.lds + wait.address;
      const bool readable = wait.global ? launch.map.find(wait.address, 4) != nullptr : wait.address + 4 <= group.lds_bytes;
      s = wait.global ? format("waits for 0x%llx (%s) to change", static_cast<unsigned long long>(wait.address),
                               launch.map.describe(wait.address, 1).c_str())
                      : format("waits for LDS 0x%llx to change", static_cast<unsigned long long>(wait.address));
      if (readable) {
        std::memcpy(&value, from, 4);
        s += format(" from 0x%08x", value);
      }
      s += ", ";
    } else if (!stands) {
      s = "runs a loop that reads no memory, ";
    }
    const std::string source = p.source(p.insts[at]);
    return s + format("pc 0x%llx: %s%s%s", static_cast<unsigned long long>(p.insts[at].pc),
                      instruction_text(p.insts[at], nullptr).c_str(), source.empty() ? "" : " in ", source.c_str());
  };
  for (uint32_t first = 0; first < count;) {
    const std::string what = of_wave(first);
    uint32_t last = first;
    while (last + 1 < count && of_wave(last + 1) == what) ++last;
    text += first == last ? format("    wave %u: ", first) : format("    waves %u-%u: ", first, last);
    text += what + "\n";
    first = last + 1;
  }
  return text;
}

}  // namespace hfemu
