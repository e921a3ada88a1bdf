// Instruction streams and memory accesses of chosen work-groups, handed to a recorder (api.h) group by group.
#pragma once

#include <mutex>
#include <vector>

#include "access.h"
#include "api.h"
#include "core.h"

namespace hfemu {

// One launch with a recorder: its static tables, shared by the launch's threads.
struct LaunchRecording {
  hfemu_recorder recorder;
  const Launch& launch;
  std::mutex mutex;
  std::vector<hfemu_instruction> instructions;
  std::vector<uint16_t> registers;
  std::vector<std::string> texts;
  std::vector<hfemu_extent> extents;
};

// The recording of a launch from this thread, or null if no recorder is set.
LaunchRecording* begin_recording(const Launch& launch, const LaunchRequest& request);
void end_recording(LaunchRecording* recording);

// Records the work-groups of one host thread.
class GroupRecorder {
 public:
  GroupRecorder(LaunchRecording& recording, uint32_t waves) : recording_(recording), waves_(waves) {}
  // False: the work-group is not executed.
  bool choose(uint64_t group);
  // True: the instruction at `index` is to be skipped.
  bool before(const Wave& w, const ExecInst& in, uint32_t index);
  void after(Wave& w);
  void end_group();
  void global(const Wave& w, const LaneAddresses& a, uint64_t exec, uint32_t bytes, Access access);
  void scalar(const Wave& w, uint64_t address, uint32_t bytes, Access access);
  void lds(const Wave& w, const uint32_t* a, uint64_t exec, uint32_t bytes);

 private:
  struct Stream {
    std::vector<uint32_t> instructions, accesses;
    size_t count_at = 0;  // of the instruction in progress
  };
  uint32_t extent_of(uint64_t address);
  void add(const Wave& w, uint32_t kind, uint64_t address, const uint64_t* sectors, uint32_t count);

  LaunchRecording& recording_;
  std::vector<Stream> waves_;
  uint64_t group_ = 0, limit_ = 0;
  bool recording_group_ = false, in_memory_ = false;
  const AddressMap::Piece* last_piece_ = nullptr;
};

}  // namespace hfemu
