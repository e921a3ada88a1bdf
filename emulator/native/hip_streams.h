// Streams and their captures: what an entry point checks before it executes or records a call.
//
// Work runs to its end inside the call that enqueues it, so the order between streams that events ask for always holds.
// A capturing stream runs nothing: its work becomes nodes of a graph (hip_graph.cpp), which replays them.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hip_handles.h"
#include "hip_types.h"
#include "runtime.h"

// One recorded operation. `after`: the nodes that precede it, all of them earlier in the graph's list.
struct hipGraphNode {
  hipGraphNodeType type = hipGraphNodeTypeEmpty;
  std::string name;  // the call that recorded it, or the kernel
  std::function<hipError_t()> run;
  std::vector<hipGraphNode*> after;
};

// The nodes in the order in which they were recorded. Executable graphs share them.
struct ihipGraph {
  std::vector<std::shared_ptr<hipGraphNode>> nodes;
};

namespace hfemu {

// Captures that have begun and not ended, in all threads; an eager call checks nothing else.
extern std::atomic<int> open_captures;

hipError_t check_stream(hipStream_t stream);

enum class Admission { run, record, refuse };
// How to treat a call that enqueues work on a live stream while there are captures; `error` says why it is refused.
Admission admit(const char* call, hipStream_t stream, hipError_t* error);
// Appends a node to the capture of `stream`, after what the stream has recorded or waited for.
hipError_t record_node(const char* call, hipStream_t stream, hipGraphNodeType type, std::string name,
                       std::function<hipError_t()> run);

// Executes, or records for later, what a call enqueues on a stream. `run` must own all that it needs.
template <class F>
hipError_t on_stream(const char* call, hipStream_t stream, hipGraphNodeType type, F&& run) {
  const bool quiet = open_captures.load(std::memory_order_acquire) == 0;
  if (quiet && !stream) return run();
  hipError_t error = check_stream(stream);
  if (error != hipSuccess) return error;
  if (quiet) return run();
  switch (admit(call, stream, &error)) {
    case Admission::run: return run();
    case Admission::record: return record_node(call, stream, type, call, std::forward<F>(run));
    default: return error;
  }
}

// For calls that are not enqueued on a stream and so could not be replayed (allocations): refused, which invalidates
// the captures in question, as the modes of the captures and of this thread say.
hipError_t refuse_unsafe(const char* call);
// For synchronous copies and fills, which are work on the legacy stream and wait for it.
hipError_t refuse_synchronous(const char* call);
// For calls that wait for all streams.
hipError_t refuse_wait(const char* call);

// The graphs that captures have ended with, until hipGraphDestroy takes their handles.
LiveSet<ihipGraph>& recorded_graphs();

// The stream that calls of ops from this thread use, as torch's current stream is on a GPU; null until set.
hipStream_t current_stream();
void set_current_stream(hipStream_t stream);
bool is_capturing(hipStream_t stream);

}  // namespace hfemu
