// HIP entry points for streams, their captures, and events.
#include "hip_streams.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

using namespace hfemu;

namespace {

// The graph that a capture builds, and the streams that record into it.
struct Capture {
  unsigned long long id = 0;
  hipStreamCaptureMode mode = hipStreamCaptureModeGlobal;
  std::thread::id thread;
  ihipStream_t* origin = nullptr;
  std::vector<ihipStream_t*> streams;
  std::unique_ptr<ihipGraph> graph = std::make_unique<ihipGraph>();
  bool valid = true;
  std::string why;  // it is not valid any more
};

}  // namespace

struct ihipStream_t {
  unsigned flags = 0;
  int priority = 0;
  std::shared_ptr<Capture> capture;  // null: not capturing
  std::vector<hipGraphNode*> tail;   // what the next recorded node comes after
};

struct ihipEvent_t {
  unsigned flags = 0;
  bool recorded = false;
  std::chrono::steady_clock::time_point time;
  bool captured = false;  // last recorded in a capturing stream, so that it stands for these nodes
  std::weak_ptr<Capture> capture;
  std::vector<hipGraphNode*> nodes;
};

namespace {

constexpr unsigned kNonBlocking = 1, kDisableTiming = 2, kExternal = 1;

LiveSet<ihipStream_t>& streams() {
  static auto* const instance = new LiveSet<ihipStream_t>;
  return *instance;
}

LiveSet<ihipEvent_t>& events() {
  static auto* const instance = new LiveSet<ihipEvent_t>;
  return *instance;
}

// Guards every capture, and the capture fields of streams and events.
struct Captures {
  std::mutex mutex;
  std::set<std::shared_ptr<Capture>> open;
  unsigned long long next_id = 1;
};

Captures& captures() {
  static auto* const instance = new Captures;
  return *instance;
}

thread_local hipStreamCaptureMode thread_mode = hipStreamCaptureModeGlobal;
thread_local hipStream_t thread_stream = nullptr;

// Null and hipStreamLegacy (1) are the legacy stream, which waits for all blocking ones and cannot be captured.
bool is_legacy(hipStream_t stream) { return reinterpret_cast<uintptr_t>(stream) <= 1; }

// The stream behind a handle that is not the legacy one; hipStreamPerThread (2) has one per thread.
ihipStream_t* resolve(hipStream_t stream) {
  if (reinterpret_cast<uintptr_t>(stream) != 2) return stream;
  thread_local ihipStream_t* const own = new ihipStream_t;  // never destroyed: a capture may outlive the thread
  return own;
}

hipError_t check_event(hipEvent_t event) {
  return events().holds(event) ? hipSuccess
                               : record(hipErrorInvalidHandle, "the event was not created, or is destroyed");
}

void invalidate(Capture& capture, const std::string& why) {
  if (capture.valid) capture.why = why;
  capture.valid = false;
}

// Invalidates the open captures that `concerned` names and returns `error`, or hipSuccess where there are none.
template <class F>
hipError_t refuse_for(const char* call, hipError_t error, const char* reason, F&& concerned) {
  if (open_captures.load(std::memory_order_acquire) == 0) return hipSuccess;
  std::lock_guard<std::mutex> lock(captures().mutex);
  bool any = false;
  for (const auto& capture : captures().open)
    if (concerned(*capture)) {
      invalidate(*capture, std::string(call) + " " + reason);
      any = true;
    }
  return any ? record(error, std::string(call) + " " + reason + "; the capture is invalidated") : hipSuccess;
}

bool is_blocking(const Capture& capture) {
  for (const ihipStream_t* stream : capture.streams)
    if (!(stream->flags & kNonBlocking)) return true;
  return false;
}

hipError_t refuse_legacy(const char* call) {
  return refuse_for(call, hipErrorStreamCaptureImplicit,
                    "uses the legacy stream, which waits for all blocking streams, while one of them is capturing",
                    is_blocking);
}

// Takes all streams out of a capture. The caller holds the mutex.
void close(const std::shared_ptr<Capture>& capture) {
  for (ihipStream_t* stream : capture->streams) {
    stream->capture.reset();
    stream->tail.clear();
  }
  if (captures().open.erase(capture)) --open_captures;
}

// Every node is before the end of the stream that the capture began on.
bool all_joined(const Capture& capture) {
  std::set<const hipGraphNode*> before;
  std::vector<hipGraphNode*> next = capture.origin->tail;
  while (!next.empty()) {
    const hipGraphNode* const node = next.back();
    next.pop_back();
    if (before.insert(node).second) next.insert(next.end(), node->after.begin(), node->after.end());
  }
  return before.size() == capture.graph->nodes.size();
}

// For calls that query whether a stream's work is done.
hipError_t check_done(const char* call, hipStream_t stream) {
  const hipError_t error = check_stream(stream);
  if (error != hipSuccess || open_captures.load(std::memory_order_acquire) == 0) return error;
  if (is_legacy(stream)) return refuse_legacy(call);
  const ihipStream_t* const own = resolve(stream);
  return refuse_for(call, hipErrorStreamCaptureUnsupported, "was called for a stream that is capturing",
                    [&](const Capture& capture) { return own->capture.get() == &capture; });
}

hipError_t check_not_captured(const char* call, hipEvent_t event) {
  const hipError_t error = check_event(event);
  if (error != hipSuccess || !event->captured) return error;
  return record(hipErrorCapturedEvent,
                std::string(call) + ": the event was last recorded in a capturing stream, so it never happens");
}

void record_now(hipEvent_t event) {
  event->time = std::chrono::steady_clock::now();
  event->recorded = true;
}

hipError_t query_capture(const char* call, hipStream_t stream, hipStreamCaptureStatus* status, unsigned long long* id,
                         ihipGraph** graph, const hipGraphNode_t** nodes, size_t* count) {
  if (!status) return record(hipErrorInvalidValue, std::string(call) + ": a null result pointer");
  *status = hipStreamCaptureStatusNone;
  const hipError_t error = check_stream(stream);
  if (error != hipSuccess) return error;
  if (is_legacy(stream)) {
    std::lock_guard<std::mutex> lock(captures().mutex);
    for (const auto& capture : captures().open)
      if (is_blocking(*capture))
        return record(hipErrorStreamCaptureImplicit,
                      std::string(call) + ": the legacy stream cannot be asked while a blocking stream is capturing");
    return hipSuccess;
  }
  std::lock_guard<std::mutex> lock(captures().mutex);
  const ihipStream_t* const own = resolve(stream);
  if (!own->capture) return hipSuccess;
  *status = own->capture->valid ? hipStreamCaptureStatusActive : hipStreamCaptureStatusInvalidated;
  if (id) *id = own->capture->id;
  if (graph) *graph = own->capture->graph.get();
  if (nodes) *nodes = own->tail.data();
  if (count) *count = own->tail.size();
  return hipSuccess;
}

}  // namespace

namespace hfemu {

LiveSet<ihipGraph>& recorded_graphs() {
  static auto* const instance = new LiveSet<ihipGraph>;
  return *instance;
}

std::atomic<int> open_captures{0};

hipError_t check_stream(hipStream_t stream) {
  if (reinterpret_cast<uintptr_t>(stream) <= 2 || streams().holds(stream)) return hipSuccess;
  return record(hipErrorInvalidHandle, "the stream was not created, or is destroyed");
}

Admission admit(const char* call, hipStream_t stream, hipError_t* error) {
  if (is_legacy(stream)) {
    *error = refuse_legacy(call);
    return *error == hipSuccess ? Admission::run : Admission::refuse;
  }
  std::lock_guard<std::mutex> lock(captures().mutex);
  const Capture* const capture = resolve(stream)->capture.get();
  if (!capture) return Admission::run;
  if (capture->valid) return Admission::record;
  *error = record(hipErrorStreamCaptureInvalidated,
                  std::string(call) + ": the stream's capture was invalidated: " + capture->why);
  return Admission::refuse;
}

hipError_t record_node(const char* call, hipStream_t stream, hipGraphNodeType type, std::string name,
                       std::function<hipError_t()> run) {
  std::lock_guard<std::mutex> lock(captures().mutex);
  ihipStream_t* const own = resolve(stream);
  if (!own->capture || !own->capture->valid)  // another thread ended or invalidated it meanwhile
    return record(hipErrorStreamCaptureInvalidated, std::string(call) + ": the stream's capture ended during the call");
  auto node = std::make_shared<hipGraphNode>(hipGraphNode{type, std::move(name), std::move(run), own->tail});
  own->tail = {node.get()};
  own->capture->graph->nodes.push_back(std::move(node));
  return hipSuccess;
}

hipError_t refuse_unsafe(const char* call) {
  if (thread_mode == hipStreamCaptureModeRelaxed) return hipSuccess;
  const std::thread::id here = std::this_thread::get_id();
  return refuse_for(call, hipErrorStreamCaptureUnsupported,
                    "is not enqueued on a stream, so a graph could not replay it, and a capture that is not relaxed is "
                    "going on",
                    [&](const Capture& capture) {
                      const bool ours = capture.thread == here && capture.mode != hipStreamCaptureModeRelaxed;
                      return ours || (thread_mode == hipStreamCaptureModeGlobal &&
                                      capture.mode == hipStreamCaptureModeGlobal);
                    });
}

hipError_t refuse_synchronous(const char* call) {
  const hipError_t error = refuse_legacy(call);
  return error == hipSuccess ? refuse_unsafe(call) : error;
}

hipError_t refuse_wait(const char* call) {
  return refuse_for(call, hipErrorStreamCaptureUnsupported, "waits for all streams while one of them is capturing",
                    [](const Capture&) { return true; });
}

hipStream_t current_stream() { return thread_stream; }
void set_current_stream(hipStream_t stream) { thread_stream = stream; }

bool is_capturing(hipStream_t stream) {
  if (open_captures.load(std::memory_order_acquire) == 0 || is_legacy(stream) || check_stream(stream) != hipSuccess)
    return false;
  std::lock_guard<std::mutex> lock(captures().mutex);
  return resolve(stream)->capture != nullptr;
}

}  // namespace hfemu

// --- streams ---

HFEMU_HIP_API hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned flags, int priority) {
  if (!stream || flags > kNonBlocking)
    return record(hipErrorInvalidValue, "hipStreamCreate: a null result pointer, or flags other than hipStreamDefault "
                                        "(0) and hipStreamNonBlocking (1)");
  *stream = streams().create();
  (*stream)->flags = flags;
  (*stream)->priority = priority;
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags) {
  return hipStreamCreateWithPriority(stream, flags, 0);
}
HFEMU_HIP_API hipError_t hipStreamCreate(hipStream_t* stream) { return hipStreamCreateWithPriority(stream, 0, 0); }
HFEMU_HIP_API hipError_t hipStreamDestroy(hipStream_t stream) {
  if (!streams().holds(stream)) return record(hipErrorInvalidHandle, "the stream was not created, or is destroyed");
  {
    std::lock_guard<std::mutex> lock(captures().mutex);
    if (const std::shared_ptr<Capture> capture = stream->capture) {
      invalidate(*capture, "hipStreamDestroy of a stream that was capturing");
      if (capture->origin == stream) {
        close(capture);
      } else {
        std::erase(capture->streams, stream);
      }
    }
  }
  streams().destroy(stream);
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipStreamSynchronize(hipStream_t stream) { return check_done("hipStreamSynchronize", stream); }
HFEMU_HIP_API hipError_t hipStreamQuery(hipStream_t stream) { return check_done("hipStreamQuery", stream); }

// Between eager streams the order holds anyway. Waiting for an event of a capture adds the stream to that capture.
HFEMU_HIP_API hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags) {
  const char* const call = "hipStreamWaitEvent";
  hipError_t error = check_stream(stream);
  if (error == hipSuccess) error = check_event(event);
  if (error != hipSuccess) return error;
  if (flags > kExternal) return record(hipErrorInvalidValue, "hipStreamWaitEvent: flags " + std::to_string(flags));
  std::unique_lock<std::mutex> lock(captures().mutex);
  ihipStream_t* const own = is_legacy(stream) ? nullptr : resolve(stream);
  if (!event->captured) {
    if (!own || !own->capture || !event->recorded) return hipSuccess;
    if (flags & kExternal) {
      lock.unlock();
      return record_node(call, stream, hipGraphNodeTypeWaitEvent, call, [] { return hipSuccess; });
    }
    invalidate(*own->capture, "hipStreamWaitEvent for an event that was recorded outside of the capture");
    return record(hipErrorStreamCaptureIsolation,
                  "hipStreamWaitEvent: a capturing stream cannot wait for an event that was recorded outside of its "
                  "capture; the capture is invalidated");
  }
  const std::shared_ptr<Capture> capture = event->capture.lock();
  if (!capture || !captures().open.count(capture))
    return record(hipErrorCapturedEvent, "hipStreamWaitEvent: the event was recorded in a capture that has ended");
  if (!own) {
    invalidate(*capture, "hipStreamWaitEvent of the legacy stream for one of its events");
    return record(hipErrorStreamCaptureImplicit,
                  "hipStreamWaitEvent: the legacy stream cannot wait for an event of a capture, which is invalidated");
  }
  if (own->capture && own->capture != capture) {
    for (const auto& each : {own->capture, capture}) invalidate(*each, "hipStreamWaitEvent between two captures");
    return record(hipErrorStreamCaptureMerge,
                  "hipStreamWaitEvent: the stream and the event belong to two captures; both are invalidated");
  }
  if (!own->capture) {
    own->capture = capture;
    own->tail.clear();
    capture->streams.push_back(own);
  }
  for (hipGraphNode* node : event->nodes)
    if (std::find(own->tail.begin(), own->tail.end(), node) == own->tail.end()) own->tail.push_back(node);
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipStreamGetFlags(hipStream_t stream, unsigned* flags) {
  *flags = streams().holds(stream) ? stream->flags : 0;
  return check_stream(stream);
}
HFEMU_HIP_API hipError_t hipStreamGetPriority(hipStream_t stream, int* priority) {
  *priority = streams().holds(stream) ? stream->priority : 0;
  return check_stream(stream);
}
HFEMU_HIP_API hipError_t hipStreamGetDevice(hipStream_t stream, hipDevice_t* device) {
  *device = 0;
  return check_stream(stream);
}
HFEMU_HIP_API int hipGetStreamDeviceId(hipStream_t) { return 0; }
HFEMU_HIP_API hipError_t hipLaunchHostFunc(hipStream_t stream, void (*function)(void*), void* data) {
  if (!function) return record(hipErrorInvalidValue, "hipLaunchHostFunc: a null function");
  return on_stream("hipLaunchHostFunc", stream, hipGraphNodeTypeHost, [=] {
    function(data);
    return hipSuccess;
  });
}
HFEMU_HIP_API hipError_t hipStreamAddCallback(hipStream_t stream, void (*function)(hipStream_t, hipError_t, void*),
                                              void* data, unsigned) {
  const hipError_t error = check_done("hipStreamAddCallback", stream);
  if (error == hipSuccess) function(stream, hipSuccess, data);
  return error;
}

// --- captures ---

HFEMU_HIP_API hipError_t hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode) {
  if (is_legacy(stream))
    return record(hipErrorStreamCaptureUnsupported, "hipStreamBeginCapture: the legacy stream cannot be captured");
  if (mode < hipStreamCaptureModeGlobal || mode > hipStreamCaptureModeRelaxed)
    return record(hipErrorInvalidValue, "hipStreamBeginCapture: mode " + std::to_string(mode));
  const hipError_t error = check_stream(stream);
  if (error != hipSuccess) return error;
  std::lock_guard<std::mutex> lock(captures().mutex);
  ihipStream_t* const own = resolve(stream);
  if (own->capture) return record(hipErrorIllegalState, "hipStreamBeginCapture: the stream is capturing already");
  own->capture = std::make_shared<Capture>();
  own->capture->id = captures().next_id++;
  own->capture->mode = mode;
  own->capture->thread = std::this_thread::get_id();
  own->capture->origin = own;
  own->capture->streams = {own};
  own->tail.clear();
  captures().open.insert(own->capture);
  ++open_captures;
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t* graph) {
  if (!graph) return record(hipErrorInvalidValue, "hipStreamEndCapture: a null result pointer");
  *graph = nullptr;
  if (is_legacy(stream)) return record(hipErrorIllegalState, "hipStreamEndCapture: the legacy stream never captures");
  const hipError_t error = check_stream(stream);
  if (error != hipSuccess) return error;
  std::lock_guard<std::mutex> lock(captures().mutex);
  ihipStream_t* const own = resolve(stream);
  const std::shared_ptr<Capture> capture = own->capture;
  if (!capture) return record(hipErrorIllegalState, "hipStreamEndCapture: the stream is not capturing");
  if (capture->origin != own)
    return record(hipErrorStreamCaptureUnmatched, "hipStreamEndCapture: the capture began on another stream");
  if (capture->mode != hipStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return record(hipErrorStreamCaptureWrongThread,
                  "hipStreamEndCapture: a capture that is not relaxed ends in the thread in which it began");
  const bool joined = all_joined(*capture);
  close(capture);
  if (!capture->valid)
    return record(hipErrorStreamCaptureInvalidated,
                  "hipStreamEndCapture: the capture was invalidated: " + capture->why);
  if (!joined)
    return record(hipErrorStreamCaptureUnjoined,
                  "hipStreamEndCapture: a stream that joined the capture did work for which the first stream never "
                  "waited");
  *graph = recorded_graphs().add(capture->graph.release());
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status) {
  return query_capture("hipStreamIsCapturing", stream, status, nullptr, nullptr, nullptr, nullptr);
}
HFEMU_HIP_API hipError_t hipStreamGetCaptureInfo(hipStream_t stream, hipStreamCaptureStatus* status,
                                                 unsigned long long* id) {
  return query_capture("hipStreamGetCaptureInfo", stream, status, id, nullptr, nullptr, nullptr);
}
HFEMU_HIP_API hipError_t hipStreamGetCaptureInfo_v2(hipStream_t stream, hipStreamCaptureStatus* status,
                                                    unsigned long long* id, hipGraph_t* graph,
                                                    const hipGraphNode_t** nodes, size_t* count) {
  return query_capture("hipStreamGetCaptureInfo_v2", stream, status, id, graph, nodes, count);
}
HFEMU_HIP_API hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode* mode) {
  if (!mode || *mode < hipStreamCaptureModeGlobal || *mode > hipStreamCaptureModeRelaxed)
    return record(hipErrorInvalidValue, "hipThreadExchangeStreamCaptureMode: no mode, or one that does not exist");
  std::swap(*mode, thread_mode);
  return hipSuccess;
}

// --- events: the host's clock, so elapsed times are the emulation's own, not a GPU's ---

HFEMU_HIP_API hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags) {
  if (!event) return record(hipErrorInvalidValue);
  *event = events().create();
  (*event)->flags = flags;
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipEventCreate(hipEvent_t* event) { return hipEventCreateWithFlags(event, 0); }
HFEMU_HIP_API hipError_t hipEventDestroy(hipEvent_t event) {
  return events().destroy(event) ? hipSuccess : check_event(event);
}
HFEMU_HIP_API hipError_t hipEventRecordWithFlags(hipEvent_t event, hipStream_t stream, unsigned flags) {
  const char* const call = "hipEventRecord";
  hipError_t error = check_event(event);
  if (error == hipSuccess) error = check_stream(stream);
  if (error != hipSuccess) return error;
  if (flags > kExternal) return record(hipErrorInvalidValue, "hipEventRecord: flags " + std::to_string(flags));
  switch (open_captures.load(std::memory_order_acquire) ? admit(call, stream, &error) : Admission::run) {
    case Admission::refuse: return error;
    case Admission::run:
      event->captured = false;
      record_now(event);
      return hipSuccess;
    case Admission::record: break;
  }
  if (flags & kExternal)
    return record_node(call, stream, hipGraphNodeTypeEventRecord, call, [event] {
      const hipError_t stale = check_event(event);
      if (stale == hipSuccess) record_now(event);
      return stale;
    });
  std::lock_guard<std::mutex> lock(captures().mutex);
  const ihipStream_t* const own = resolve(stream);
  event->captured = true;
  event->capture = own->capture;
  event->nodes = own->tail;
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  return hipEventRecordWithFlags(event, stream, 0);
}
HFEMU_HIP_API hipError_t hipEventSynchronize(hipEvent_t event) {
  return check_not_captured("hipEventSynchronize", event);
}
HFEMU_HIP_API hipError_t hipEventQuery(hipEvent_t event) { return check_not_captured("hipEventQuery", event); }
HFEMU_HIP_API hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t start, hipEvent_t stop) {
  if (!milliseconds) return record(hipErrorInvalidValue);
  for (hipEvent_t event : {start, stop}) {
    const hipError_t error = check_not_captured("hipEventElapsedTime", event);
    if (error != hipSuccess) return error;
    if (!event->recorded || event->flags & kDisableTiming)
      return record(hipErrorInvalidHandle, "hipEventElapsedTime: an event that was not recorded, or without timing");
  }
  *milliseconds = std::chrono::duration<float, std::milli>(stop->time - start->time).count();
  return hipSuccess;
}
