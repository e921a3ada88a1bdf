#include "hip_graph.h"

#include <algorithm>

#include "hip_handles.h"
#include "hip_streams.h"
#include "python_poll.h"

using namespace hfemu;

// Nodes are immutable once recorded, so an executable graph shares those of the graph that it was made from.
struct hipGraphExec {
  std::vector<std::shared_ptr<hipGraphNode>> nodes;
  unsigned long long flags = 0;
};

namespace {

LiveSet<hipGraphExec>& executables() {
  static auto* const instance = new LiveSet<hipGraphExec>;
  return *instance;
}

hipError_t check_graph(hipGraph_t graph) {
  return recorded_graphs().holds(graph)
             ? hipSuccess
             : record(hipErrorInvalidValue, "the graph was not made by hipStreamEndCapture, or is destroyed");
}

hipError_t check_executable(hipGraphExec_t graph) {
  return executables().holds(graph)
             ? hipSuccess
             : record(hipErrorInvalidValue, "the executable graph was not instantiated, or is destroyed");
}

// In the list every node follows its dependencies.
hipError_t replay(const std::vector<std::shared_ptr<hipGraphNode>>& nodes) {
  for (const auto& node : nodes) {
    const hipError_t error = node->run ? node->run() : hipSuccess;
    if (error != hipSuccess) return error;
  }
  return hipSuccess;
}

// Copies up to *count of `found`; given no buffer, returns how many there are.
hipError_t hand_out(const std::vector<hipGraphNode*>& found, hipGraphNode_t* out, size_t* count) {
  if (!count) return record(hipErrorInvalidValue, "a null pointer for the number of nodes");
  if (!out) {
    *count = found.size();
    return hipSuccess;
  }
  for (size_t i = 0; i < *count; ++i) out[i] = i < found.size() ? found[i] : nullptr;
  *count = std::min(*count, found.size());
  return hipSuccess;
}

}  // namespace

HFEMU_HIP_API hipError_t hipGraphDestroy(hipGraph_t graph) {
  return recorded_graphs().destroy(graph) ? hipSuccess : check_graph(graph);
}

HFEMU_HIP_API hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t* out, hipGraph_t graph, unsigned long long flags) {
  if (!out) return record(hipErrorInvalidValue, "hipGraphInstantiate: a null result pointer");
  const hipError_t error = check_graph(graph);
  if (error != hipSuccess) return error;
  *out = executables().add(new hipGraphExec{graph->nodes, flags});
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipGraphInstantiate(hipGraphExec_t* out, hipGraph_t graph, hipGraphNode_t* failed, char* log,
                                             size_t bytes) {
  if (failed) *failed = nullptr;
  if (log && bytes) *log = 0;
  return hipGraphInstantiateWithFlags(out, graph, 0);
}

HFEMU_HIP_API hipError_t hipGraphExecGetFlags(hipGraphExec_t graph, unsigned long long* flags) {
  const hipError_t error = check_executable(graph);
  if (error == hipSuccess && flags) *flags = graph->flags;
  return error;
}

HFEMU_HIP_API hipError_t hipGraphExecDestroy(hipGraphExec_t graph) {
  return executables().destroy(graph) ? hipSuccess : check_executable(graph);
}

HFEMU_HIP_API hipError_t hipGraphUpload(hipGraphExec_t graph, hipStream_t stream) {
  const hipError_t error = check_executable(graph);
  return error == hipSuccess ? check_stream(stream) : error;
}

HFEMU_HIP_API hipError_t hipGraphLaunch(hipGraphExec_t graph, hipStream_t stream) {
  const hipError_t error = check_executable(graph);
  if (error != hipSuccess) return error;
  return on_stream("hipGraphLaunch", stream, hipGraphNodeTypeGraph, [nodes = graph->nodes] { return replay(nodes); });
}

HFEMU_HIP_API hipError_t hipGraphGetNodes(hipGraph_t graph, hipGraphNode_t* nodes, size_t* count) {
  const hipError_t error = check_graph(graph);
  if (error != hipSuccess) return error;
  std::vector<hipGraphNode*> found;
  for (const auto& node : graph->nodes) found.push_back(node.get());
  return hand_out(found, nodes, count);
}

HFEMU_HIP_API hipError_t hipGraphNodeGetDependencies(hipGraphNode_t node, hipGraphNode_t* before, size_t* count) {
  return node ? hand_out(node->after, before, count) : record(hipErrorInvalidValue, "a null node");
}

HFEMU_HIP_API hipError_t hipGraphNodeGetType(hipGraphNode_t node, hipGraphNodeType* type) {
  if (!node || !type) return record(hipErrorInvalidValue, "a null node or result pointer");
  *type = node->type;
  return hipSuccess;
}

namespace hfemu {

bool graph_names(void* graph, std::string* names) {
  if (check_graph(static_cast<hipGraph_t>(graph)) != hipSuccess) return false;
  names->clear();
  for (const auto& node : static_cast<hipGraph_t>(graph)->nodes) *names += node->name + "\n";
  return true;
}

hipError_t launch_graph(void* graph, void* stream) {
  clear_errors();
  const hipError_t error = hipGraphLaunch(static_cast<hipGraphExec_t>(graph), static_cast<hipStream_t>(stream));
  stash_exception();
  return error;
}

}  // namespace hfemu
