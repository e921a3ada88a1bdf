// What the emulator recorded of a launch, reduced to templates: work-groups whose waves execute the same instructions
// and whose accesses differ by a constant per buffer share one template. A few accesses may differ by another constant: where
// work-groups share K, the words at which they meet lie in the same buffer as their sums, at another distance per tile.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "native/api.h"

namespace hftime {

struct Instruction {
  uint64_t pc = 0;
  std::string text;
  uint32_t first_register = 0;
  uint16_t reads = 0, writes = 0, matrix_cycles = 0;
  uint8_t bytes = 0, unit = 0, lane_bytes = 0, counters = 0;
  int32_t immediate = 0;
};

struct Extent {
  std::string name;
  uint64_t bytes = 0;
};

// The dynamic instructions of one wave. Accesses are as in api.h; `access_at` has the first word of every instruction
// of a memory unit, in order.
struct WaveStream {
  std::vector<uint32_t> instructions, accesses, access_at;
};

struct Template {
  std::vector<WaveStream> waves;
  std::vector<uint16_t> extents;  // that it touches
  uint64_t instructions = 0;
};

// An access that does not move with the others of its extent.
struct Moved {
  uint32_t wave = 0, at = 0;      // at: its first sector among the access words of the template's wave
  int64_t by = 0;                 // sectors, beside the shift of its extent
};

struct Group {
  uint64_t index = 0;
  int32_t of = -1;                // template; -1: recorded in part and equal to none
  bool whole = false;             // recorded to the end
  std::map<uint16_t, int64_t> shift;  // by extent, in sectors, relative to the template
  std::vector<Moved> moved;       // in the order of the waves and their accesses
};

struct Launch {
  std::string kernel, arch;
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  uint64_t groups = 0;
  uint32_t waves = 0, groups_per_cu = 1, lds_bytes = 0, vgprs = 0;
  std::vector<Instruction> instructions;
  std::vector<uint16_t> registers;
  std::vector<Extent> extents;
  std::vector<Template> templates;
  std::map<uint64_t, Group> recorded;
  bool full = false;              // a work-group was only executed because the templates had reached Capture::max_words
};

// Filled by the emulator's recorder; several passes over one launch add up.
class Capture {
 public:
  Capture();
  hfemu_recorder* recorder() { return &recorder_; }
  // What to do with work-groups that `choose` does not name: 0 skip, -1 execute, else record that many instructions.
  int64_t fallback = 0;
  std::map<uint64_t, int64_t> chosen;
  uint64_t max_words = 0;  // of templates, then work-groups are executed only
  std::vector<Launch> launches;

  // Begins a pass. One that merges adds to the launches of the passes before it, in their order, since one that did not.
  void pass(bool merge) {
    if (!merge) first_ = launches.size();
    next_ = first_;
    may_move_ = !merge && chosen.empty() && fallback > 0;
  }
  bool save(const std::string& path) const;
  bool load(const std::string& path);

 private:
  void begin(const hfemu_recorded_launch& launch);
  int64_t choose(uint64_t group);
  void group(uint64_t index, const hfemu_recorded_wave* waves);

  hfemu_recorder recorder_{};
  std::mutex mutex_;
  uint64_t words_ = 0;
  size_t first_ = 0, next_ = 0;  // launches: the first that a merging pass adds to, the next one to begin
  bool may_move_ = false;  // every work-group is recorded to its end: of a beginning, each access has to say which one it repeats
};

}  // namespace hftime
