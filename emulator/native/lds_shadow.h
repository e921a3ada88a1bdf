// The checkers' record of a work-group's LDS, and the rules that order two accesses of different waves.
//
// Two accesses of one byte by different waves, one of them a write, race unless one happens before the other. Order
// between waves comes from
//   barriers          every wave knows afterwards what every wave had complete when it reached the barrier;
//   atomics           release what the issuing wave knows into the word, on top of what earlier atomics left there, and,
//                     if they return a value, acquire what the word holds;
//   plain reads       of a word that an atomic wrote acquire what it holds;
//   polls             reads that spin (polls.cpp) acquire what the last write left, also that of a plain store.
// A release covers what is *complete*: accesses that an s_waitcnt of their wave has waited for (lgkmcnt for DS and FLAT,
// vmcnt for LDS DMA), and what that wave had acquired. The LDS unit executes the operations of all waves in one order
// (LLVM's AMDGPU memory model), so an unwaited DS access would in fact precede the signal. The wait is required
// nevertheless: it is the only trace of a fence in machine code, and without the fence a compiler may move the access past
// the signal. For DMA and FLAT the hardware itself needs the wait.
// Reads before a barrier are an exception: the LDS unit's order suffices unless the strict level is on.
// An acquire takes effect once its wave has waited for the value.
//
// Which accesses never race with each other:
//   - atomics with atomics, and plain reads with atomics: machine code shows no difference between an atomic load and a
//     plain one. So a plain read of a total that other waves still add to is not reported.
//   - polls with anything, and the store that releases a lock with the failed attempts of those who want it. A poll is
//     a load (or an atomic of constant operands) at an address that its loop does not change, in a loop that stores
//     nothing and has no barrier and whose end depends on the value: a compiler would have moved a load of ordinary
//     data out of such a loop. FLAT loads marked sc0 or sc1, as atomic ones are, count as polls; those with both marks,
//     as volatile ones are, only where their value can end a loop: a volatile access orders nothing. A flag written
//     by plain stores of more than 8 bytes, or tested without a loop, or code compiled at -O0 (addresses reloaded from
//     the stack) is not recognised, and reported.
//   - stores of different waves that write the value already there: the word is the same in every order, and compilers
//     do let every wave store one uniform value. A reader must still be ordered after the last of them.
#pragma once

#include <array>

#include "access.h"
#include "clocks.h"
#include "core.h"
#include "usage.h"

namespace hfemu {

struct LdsRecord {
  uint32_t group = 0;              // stamp of the work-group; another one: the record is void
  uint32_t write_seq = 0, write_pc = 0, write_epoch = 0;
  uint32_t read_seq = 0, read_pc = 0, read_epoch = 0;
  uint32_t sync = 0;               // clock that the last write released
  uint32_t readers = 0;            // index of a WaveSet, if `several`: reads since the last write
  uint32_t writers = 0;            // the same, if `several_atomics`: atomics since the last plain write
  uint32_t parts = 0;              // index of the bytes' own records, if `split`
  uint8_t write_wave = 0, write_lane = 0, read_wave = 0, read_lane = 0;
  uint8_t defined = 0;             // bytes ever written
  bool has_write = false, has_read = false;
  bool atomic = false, polled = false, dma = false;  // the last write: atomic, in a poll, by LDS DMA
  bool several = false, several_atomics = false, split = false;
  bool own_readers = false, own_writers = false, own_parts = false;  // the indices above are taken
  uint16_t seen = 0;               // waves that acquired the last write: what they store there comes after it
};

struct WaveSet {
  uint32_t seq[kMaxWaves], pc[kMaxWaves];  // 0: none by this wave
  uint8_t lane[kMaxWaves];
};

// A store follows an unordered store: a race if it changes the bytes.
struct StoreConflict {
  LdsRecord before;
  uint32_t address, bytes;
  int lane;
  uint8_t old[4];
};

struct WaveShadow;

struct LdsShadow {
  std::vector<LdsRecord> dwords;
  std::vector<std::array<LdsRecord, 4>> parts;
  std::vector<WaveSet> sets;
  std::vector<StoreConflict> conflicts;  // of the instruction in progress
  ClockPool clocks;
  uint32_t group = 0, epoch = 1;         // epoch: counts barriers
  const UsageTable* usage = nullptr;
  bool orders = false;                   // order between waves is wanted: for races of LDS or of global memory
  bool plain_flags = false;              // the program has polls: plain stores may be releases
  WaveShadow* const* waves = nullptr;    // by wave index
  uint32_t wave_count = 0;

  void begin_group();
  void barrier();
};

// The clock that wave `index` would release now.
Clock released_clock(const WaveShadow& s, uint32_t index);
// Acquires whose value the wave has waited for.
void apply_acquires(LdsShadow& lds, WaveShadow& s);
// Faults if one of the instruction's stores changed what an unordered store had written.
void resolve_conflicts(Wave& w, const ExecInst& in);

// Called from note_lds when the work-group has a shadow.
void check_lds_access(Wave& w, const ExecInst& in, const uint32_t* a, uint64_t exec, uint32_t bytes, Access access);

}  // namespace hfemu
