#include "simulator.h"

#include <algorithm>
#include <memory>
#include <queue>
#include <stdexcept>

#include "program.h"

namespace hftime {
namespace {

constexpr uint32_t kSimds = 4, kCounterDepth = 64, kMatrixRegisters = 512;
constexpr double kNever = 1e300;

// Completion times of the operations that a counter counts, in order: none precedes an earlier one's.
struct Counter {
  double done[kCounterDepth] = {};
  uint64_t issued = 0;
  void push(double t) {
    const double last = issued ? done[(issued - 1) % kCounterDepth] : 0;
    done[issued++ % kCounterDepth] = std::max(t, last);
  }
  // When at most `left` are outstanding.
  double at_most(uint32_t left) const { return issued > left ? done[(issued - 1 - left) % kCounterDepth] : 0; }
};

struct Simd {
  double valu_free = 0, matrix_free = 0;
  uint32_t resident = 0;
};

// A miss reserves its line of L1 when it is sent, and data returns in the order of the requests, hits included: a CU
// can have as much in flight as its L1 holds.
struct Cu {
  Simd simds[kSimds];
  double vector_free = 0, lds_free = 0, returned = 0;
  Cache<4> l1;
  std::vector<double> in_flight;  // when each of the last requested lines was there
  uint64_t requested = 0;
  explicit Cu(const Machine& m)
      : l1(static_cast<uint64_t>(m.l1_bytes)), in_flight(static_cast<size_t>(m.l1_bytes) / kLineBytes, 0) {}
  // When `lines` more can be requested.
  double room(uint64_t lines) const {
    const uint64_t n = std::min<uint64_t>(lines, in_flight.size());
    return n ? in_flight[(requested + n - 1) % in_flight.size()] : 0;
  }
  double arrive(double t) {
    returned = std::max(returned, t);
    in_flight[requested++ % in_flight.size()] = returned;
    return returned;
  }
};

// The instruction and scalar caches, which two CUs share.
struct FrontEnd {
  std::vector<bool> code;
  Cache<8> scalar{16 * 1024};
  explicit FrontEnd(size_t lines) : code(lines, false) {}
};

struct GroupState;

struct WaveState {
  const Program* program = nullptr;
  const WaveProgram* stream = nullptr;
  GroupState* group = nullptr;
  uint32_t index = 0, simd = 0, xcd = 0, cu = 0;
  size_t segment = 0;
  uint32_t at = 0, end = 0, access = 0;
  double ready = 0, begun = 0, matrix_last = 0;
  uint32_t code_line = ~0u;
  Counter vm, lgkm;
  std::vector<float> matrix_ready;  // by register, relative to `begun`
  bool waits = false;               // at a barrier
};

struct GroupState {
  uint64_t order = 0;
  uint32_t slot = 0, alive = 0, arrived = 0;
  double last_arrival = 0;
  const Placement* placed = nullptr;
  std::vector<WaveState> waves;
};

struct Xcd {
  L2 l2;
  std::vector<Cu> cus;
  std::vector<FrontEnd> fronts;
  double dispatch_free = 0;
  uint64_t next = 0;  // group to dispatch
  Xcd(const Machine& m, Device& device, uint32_t active, size_t code_lines)
      : l2(m, device, active), cus(static_cast<size_t>(m.cus_per_xcd), Cu(m)),
        fronts((cus.size() + 1) / 2, FrontEnd(code_lines)) {}
};

struct Event {
  double t;
  uint64_t order;
  WaveState* wave;
  bool operator>(const Event& o) const { return t != o.t ? t > o.t : order > o.order; }
};

class Simulation {
 public:
  Simulation(const Launch& launch, const Machine& machine, const Setup& setup)
      : launch_(launch), m_(machine), setup_(setup), plan_(launch, machine, setup),
        active_(static_cast<uint32_t>(std::min<uint64_t>(static_cast<uint64_t>(machine.xcds), launch.groups))),
        device_(machine, active_, setup.all_xcds) {
    uint64_t last_pc = 0;
    for (const Instruction& i : launch.instructions) last_pc = std::max(last_pc, i.pc);
    const uint32_t simulated = setup.all_xcds ? active_ : 1;
    for (uint32_t x = 0; x < simulated; ++x)
      xcds_.push_back(std::make_unique<Xcd>(machine, device_, active_, last_pc / 128 + 1));
    out_.stall_of.assign(launch.instructions.size(), 0);
    out_.count_of.assign(launch.instructions.size(), 0);
    out_.rounds = plan_.rounds;
    out_.total_rounds = plan_.total_rounds;
    out_.iterations = plan_.iterations;
    out_.total_iterations = plan_.total_iterations;
  }

  Outcome run() {
    for (uint32_t x = 0; x < xcds_.size(); ++x) {
      const uint32_t slots = static_cast<uint32_t>(m_.cus_per_xcd) * launch_.groups_per_cu;
      for (uint32_t s = 0; s < slots && xcds_[x]->next < plan_.order[x].size(); ++s) dispatch(x, s, 0);
    }
    while (!events_.empty()) {
      const Event e = events_.top();
      events_.pop();
      advance(*e.wave, e.t);
    }
    double end = out_.last_wave;
    for (const auto& x : xcds_) {
      end = std::max(end, x->l2.drained());
      const Traffic& t = x->l2.traffic;
      out_.traffic.l2_hits += t.l2_hits;
      out_.traffic.l2_lines += t.l2_lines;
      out_.traffic.mall_lines += t.mall_lines;
      out_.traffic.hbm_lines += t.hbm_lines;
      out_.traffic.hbm_bytes += t.hbm_bytes;
      out_.traffic.stored_bytes += t.stored_bytes;
    }
    out_.stalls[tail] += end - out_.last_wave;
    out_.cycles = end;
    return std::move(out_);
  }

 private:
  // --- work-groups ---------------------------------------------------------------------------------------------------
  void dispatch(uint32_t x, uint32_t slot, double t) {
    Xcd& xcd = *xcds_[x];
    const uint64_t order = xcd.next++;
    const double start = std::max(t, xcd.dispatch_free);
    xcd.dispatch_free = start + m_.dispatch_ns * m_.clock_ghz;
    groups_.push_back(std::make_unique<GroupState>());
    GroupState& g = *groups_.back();
    g.order = order;
    g.slot = slot;
    g.placed = &plan_.order[x][order];
    const Program& program = *g.placed->program;
    g.alive = static_cast<uint32_t>(program.waves.size());
    g.waves.resize(program.waves.size());
    const uint32_t cu = slot % static_cast<uint32_t>(m_.cus_per_xcd);
    for (uint32_t i = 0; i < g.waves.size(); ++i) {
      WaveState& w = g.waves[i];
      w.program = &program;
      w.stream = &program.waves[i];
      w.group = &g;
      w.index = i;
      w.xcd = x;
      w.cu = cu;
      // Waves of further work-groups start where the last one ended.
      w.simd = (i + slot / static_cast<uint32_t>(m_.cus_per_xcd) * static_cast<uint32_t>(g.waves.size())) % kSimds;
      w.begun = w.ready = start;
      w.matrix_ready.assign(kMatrixRegisters, 0);
      ++xcd.cus[cu].simds[w.simd].resident;
      enter(w, 0);
      push(w, start);
    }
  }

  void enter(WaveState& w, size_t segment) {
    w.segment = segment;
    const Segment& s = w.stream->segments[segment];
    w.at = s.begin;
    w.end = s.end;
    w.access = s.access;
  }

  void push(WaveState& w, double t) { events_.push({t, sequence_++, &w}); }

  void finish(WaveState& w, double t) {
    GroupState& g = *w.group;
    Xcd& xcd = *xcds_[w.xcd];
    --xcd.cus[w.cu].simds[w.simd].resident;
    // A wave ends when its stores are acknowledged.
    const double end = std::max(t, w.vm.at_most(0));
    out_.last_wave = std::max(out_.last_wave, end);
    if (w.xcd == 0 && w.cu == 0)
      out_.spans.push_back({w.simd, static_cast<uint32_t>(g.placed->group), w.index, w.begun, end});
    g.last_arrival = std::max(g.last_arrival, end);
    w.matrix_ready = {};
    if (--g.alive) {
      release(g, t);
      return;
    }
    if (xcd.next < plan_.order[w.xcd].size()) dispatch(w.xcd, g.slot, g.last_arrival);
  }

  void release(GroupState& g, double t) {
    if (g.arrived == 0 || g.arrived < g.alive) return;
    g.arrived = 0;
    for (WaveState& w : g.waves) {
      if (!w.waits) continue;
      w.waits = false;
      const double at = t + m_.barrier_cycles;
      note(w, barrier, at - w.ready, w.at - 1);
      w.ready = at;
      push(w, at);
    }
  }

  void note(const WaveState& w, Stall reason, double cycles, uint32_t at) {
    if (cycles <= 0) return;
    out_.stalls[reason] += cycles;
    out_.stall_of[w.stream->instructions[at]] += cycles;
    if (w.xcd == 0 && w.cu == 0)
      out_.phases.push_back({{w.simd, static_cast<uint32_t>(w.group->placed->group), w.index, w.ready, w.ready + cycles},
                             reason});
  }

  // --- one wave, until something else comes first ----------------------------------------------------------------------
  void advance(WaveState& w, double t) {
    w.ready = std::max(w.ready, t);
    for (;;) {
      while (w.at == w.end) enter(w, w.segment + 1);
      const uint32_t index = w.stream->instructions[w.at];
      const Static& in = plan_.statics[index];
      const bool alone = xcds_[w.xcd]->cus[w.cu].simds[w.simd].resident == 1;
      if (in.shared || (in.port && !alone)) {
        if (!events_.empty() && events_.top().t < w.ready) {
          push(w, w.ready);
          return;
        }
        // The port is busy: other waves may come first.
        const double free = port_free(w, in);
        if (free > w.ready && (in.shared || !alone)) {
          note(w, in.stall, free - w.ready, w.at);
          w.ready = free;
          push(w, free);
          return;
        }
      }
      if (!execute(w, in, index)) return;
    }
  }

  double port_free(const WaveState& w, const Static& in) const {
    const Simd& s = xcds_[w.xcd]->cus[w.cu].simds[w.simd];
    switch (in.unit) {
      case HFEMU_VMEM_LOAD: return memory_free(w);
      case HFEMU_VALU: case HFEMU_TRANSCENDENTAL: return s.valu_free;
      case HFEMU_MATRIX: return std::max(s.valu_free, s.matrix_free);
      default: return 0;
    }
  }

  // When the CU's vector memory pipe takes the load at w.at: its lines have room, and the queue before it is short.
  double memory_free(const WaveState& w) const {
    const Cu& cu = xcds_[w.xcd]->cus[w.cu];
    const std::vector<uint32_t>& words = w.stream->source->accesses;
    uint32_t at = w.access, lines = 0;
    for (uint32_t n = words[at++]; n--;) {
      const uint32_t header = words[at++];
      if ((header & 3) == 3) continue;
      const uint32_t count = header >> 2 & 0x3FFF;
      lines += (count + 1) / 2;
      at += count;
    }
    return std::max(cu.room(lines), cu.vector_free - m_.vector_queue_cycles);
  }

  // The instruction at w.at; false: the wave does not go on by itself.
  bool execute(WaveState& w, const Static& in, uint32_t index) {
    Xcd& xcd = *xcds_[w.xcd];
    Cu& cu = xcd.cus[w.cu];
    Simd& simd = cu.simds[w.simd];
    ++out_.instructions;
    ++out_.count_of[index];
    if (in.code_line != w.code_line) {
      w.code_line = in.code_line;
      std::vector<bool>& code = xcd.fronts[w.cu / 2].code;
      if (!code[in.code_line]) {
        code[in.code_line] = true;
        const double cost = m_.fetch_ns * m_.clock_ghz;
        note(w, fetch, cost, w.at);
        w.ready += cost;
      }
    }
    if (w.matrix_last > w.ready) {
      double until = 0;
      for (const uint16_t* r = in.reads; r != in.reads_end; ++r)
        if (*r < kMatrixRegisters) until = std::max<double>(until, w.matrix_ready[*r]);
      if (until > 0) {
        // Matrix instructions take a result over earlier than others.
        until += w.begun + (in.unit == HFEMU_MATRIX ? 0 : m_.matrix_result_cycles);
        if (until > w.ready) {
          note(w, matrix, until - w.ready, w.at);
          w.ready = until;
        }
      }
    }
    double t = w.ready, next = t + m_.issue_cycles;
    switch (in.unit) {
      case HFEMU_VALU: case HFEMU_TRANSCENDENTAL: {
        t = wait_for(w, simd.valu_free, valu);
        const double pass = in.unit == HFEMU_VALU ? m_.issue_cycles : m_.transcendental_cycles;
        simd.valu_free = t + pass;
        out_.pipe_cycles += pass;
        next = t + m_.issue_cycles;
        if (pass > m_.issue_cycles) {
          note(w, valu, pass - m_.issue_cycles, w.at);
          next = t + pass;
        }
        break;
      }
      case HFEMU_MATRIX: {
        t = wait_for(w, std::max(simd.valu_free, simd.matrix_free), matrix);
        const double cycles = in.matrix_cycles + m_.matrix_extra_cycles;
        simd.valu_free = t + m_.issue_cycles;
        simd.matrix_free = t + cycles;
        out_.pipe_cycles += cycles;
        next = t + m_.issue_cycles;
        const double done = t + cycles + m_.issue_cycles;
        for (const uint16_t* r = in.reads_end; r != in.writes_end; ++r)
          if (*r < kMatrixRegisters) w.matrix_ready[*r] = static_cast<float>(done - w.begun);
        w.matrix_last = done + m_.matrix_result_cycles;
        break;
      }
      case HFEMU_LDS: next = access_lds(w, in, cu); break;
      case HFEMU_SMEM: access_scalar(w, in, xcd); break;
      case HFEMU_VMEM_LOAD: case HFEMU_VMEM_STORE: case HFEMU_ATOMIC: next = access_vector(w, in, xcd, cu); break;
      case HFEMU_BRANCH:
        if (taken(w, index)) next += m_.branch_cycles;
        break;
      case HFEMU_WAITCNT: {
        t = wait_for(w, w.vm.at_most(in.vmcnt), vmcnt);
        t = wait_for(w, w.lgkm.at_most(in.lgkmcnt), lgkmcnt);
        next = t + m_.issue_cycles;
        break;
      }
      case HFEMU_NOP: next = t + in.nop_cycles; break;
      case HFEMU_BARRIER: {
        ++w.at;
        out_.stalls[issue] += m_.issue_cycles;
        w.ready = next;
        w.waits = true;
        ++w.group->arrived;
        release(*w.group, w.ready);
        return false;
      }
      case HFEMU_END:
        finish(w, t);
        return false;
      default: break;
    }
    out_.stalls[issue] += m_.issue_cycles;
    ++w.at;
    w.ready = next;
    return true;
  }

  double wait_for(WaveState& w, double until, Stall reason) {
    if (until > w.ready) {
      note(w, reason, until - w.ready, w.at);
      w.ready = until;
    }
    return w.ready;
  }

  bool taken(const WaveState& w, uint32_t index) const {
    return w.at + 1 < w.end && w.stream->instructions[w.at + 1] != index + 1;
  }

  // Calls `each(header, first word)` for the accesses of the instruction and steps over them.
  template <class F>
  void accesses(WaveState& w, F each) {
    const std::vector<uint32_t>& words = w.stream->source->accesses;
    uint32_t n = words[w.access++];
    while (n--) {
      const uint32_t header = words[w.access++];
      each(header, &words[w.access]);
      if ((header & 3) != 3) w.access += header >> 2 & 0x3FFF;
    }
  }

  // Of the access that `accesses` is at.
  static Shift shift_of(const WaveState& w, uint32_t header) {
    return w.group->placed->shift_of(header >> 16, w.index, w.access);
  }

  double access_lds(WaveState& w, const Static& in, Cu& cu) {
    double cycles = 0;
    accesses(w, [&](uint32_t header, const uint32_t*) { cycles += header >> 2 & 0x3FFF; });
    cycles = std::max(cycles, 64 * in.lane_bytes / m_.lds_bytes_per_cycle);
    // A short queue per CU: when it is full the wave cannot issue.
    const double t = wait_for(w, cu.lds_free - m_.vector_queue_cycles, lds);
    const double start = std::max(t, cu.lds_free);
    cu.lds_free = start + cycles;
    if (in.lgkm) w.lgkm.push(start + cycles + m_.lds_latency_cycles);
    return t + m_.issue_cycles;
  }

  void access_scalar(WaveState& w, const Static& in, Xcd& xcd) {
    double done = w.ready + m_.scalar_latency_cycles;
    accesses(w, [&](uint32_t header, const uint32_t* words) {
      const uint32_t count = header >> 2 & 0x3FFF;
      const Shift shift = shift_of(w, header);
      for (uint32_t i = 0; i < count; ++i) {
        const uint64_t line = shift.line(words[i]), hash = mix(line);
        Cache<8>& cache = xcd.fronts[w.cu / 2].scalar;
        Line* found = cache.find(line, hash);
        if (found == nullptr) {
          const double at = xcd.l2.load(line, hash, w.ready + m_.scalar_latency_cycles, shift.origin);
          (found = cache.insert(line, hash))->ready = at;
        }
        done = std::max(done, found->ready + m_.scalar_latency_cycles);
      }
    });
    if (in.lgkm) w.lgkm.push(done);
  }

  double access_vector(WaveState& w, const Static& in, Xcd& xcd, Cu& cu) {
    // vmcnt holds 63.
    double t = wait_for(w, w.vm.at_most(kCounterDepth - 2), vector_memory);
    t = wait_for(w, cu.vector_free - m_.vector_queue_cycles, vector_memory);
    const double start = std::max(t, cu.vector_free);
    double done = start, cycles = m_.issue_cycles;  // addresses of 16 lanes a cycle
    accesses(w, [&](uint32_t header, const uint32_t* words) {
      const uint32_t kind = header & 3, count = header >> 2 & 0x3FFF;
      if (kind == 3) {
        cu.lds_free = std::max(cu.lds_free, start) + (header >> 2 & 0x3FFF);
        return;
      }
      const Shift shift = shift_of(w, header);
      cycles = std::max(cycles, count * 64 / m_.vector_bytes_per_cycle);
      const double lookup = start + cycles;
      for (uint32_t i = 0; i < count;) {
        const uint64_t line = shift.line(words[i]);
        uint32_t sectors = 1;
        while (i + sectors < count && shift.line(words[i + sectors]) == line) ++sectors;
        i += sectors;
        const uint64_t hash = mix(line);
        if (kind == 1) {
          done = std::max(done, xcd.l2.store(line, hash, lookup, sectors * 64));
        } else if (kind == 2) {
          done = std::max(done, xcd.l2.atomic(line, hash, lookup, shift.origin));
        } else {
          ++out_.traffic.l1_lines;
          const Line* found = cu.l1.find(line, hash);
          if (found == nullptr) {
            const double at = cu.arrive(xcd.l2.load(line, hash, lookup, shift.origin));
            cu.l1.insert(line, hash)->ready = at;
            done = std::max(done, at);
          } else {
            ++out_.traffic.l1_hits;
            cu.returned = std::max({cu.returned, found->ready, lookup + m_.l1_latency_cycles});
            done = std::max(done, cu.returned);
          }
        }
      }
    });
    cycles = std::max(cycles, in.moves_all_lanes ? 64 * in.lane_bytes / m_.vector_bytes_per_cycle : 0.0);
    cu.vector_free = start + cycles;
    done = std::max(done, start + cycles + m_.l1_latency_cycles);
    if (in.vm) w.vm.push(done);
    if (in.lgkm) w.lgkm.push(done);
    return t + m_.issue_cycles;
  }

  const Launch& launch_;
  const Machine& m_;
  const Setup setup_;
  const Plan plan_;
  const uint32_t active_;
  Device device_;
  std::vector<std::unique_ptr<Xcd>> xcds_;
  std::vector<std::unique_ptr<GroupState>> groups_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint64_t sequence_ = 0;
  Outcome out_;
};

}  // namespace

Outcome simulate(const Launch& launch, const Machine& machine, const Setup& setup) {
  return Simulation(launch, machine, setup).run();
}

}  // namespace hftime
