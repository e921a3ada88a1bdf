// HIP entry points for recorded graphs (instantiate, launch, inspect, destroy), and the functions for Python.
#pragma once

#include <string>

#include "hip_types.h"

namespace hfemu {

// What each node of a recorded hipGraph_t does, one per line; false: there is no such graph, and the error is recorded.
bool graph_names(void* graph, std::string* names);
// hipGraphLaunch for Python: a signal handler's exception is stashed.
hipError_t launch_graph(void* executable, void* stream);

}  // namespace hfemu
