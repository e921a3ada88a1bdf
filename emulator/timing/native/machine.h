// The parameters of the model. Their values and sources are in machines.py, which fills the array by these names.
#pragma once

namespace hftime {

#define HFTIME_PARAMETERS(X)                                                                                           \
  X(clock_ghz) X(xcds) X(cus_per_xcd) X(start_ns) X(dispatch_ns) X(issue_cycles) X(transcendental_cycles)              \
  X(matrix_extra_cycles) X(matrix_result_cycles) X(branch_cycles) X(barrier_cycles) X(fetch_ns) X(lds_bytes_per_cycle) \
  X(lds_latency_cycles) X(vector_bytes_per_cycle) X(vector_queue_cycles) X(l1_bytes) X(l1_latency_cycles)              \
  X(scalar_latency_cycles) X(l2_bytes) X(l2_channels) X(l2_latency_ns) X(l2_bytes_per_cycle) X(l2_miss_extra)          \
  X(fabric_gbps_per_xcd) X(hbm_latency_ns) X(dram_ns) X(hbm_gbps) X(hbm_channels) X(store_gbps) X(replay_gap_ns)

struct Machine {
#define HFTIME_FIELD(name) double name = 0;
  HFTIME_PARAMETERS(HFTIME_FIELD)
#undef HFTIME_FIELD
};

}  // namespace hftime
