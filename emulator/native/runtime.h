// Shared by the HIP entry points and the C interface: options, reports, launching.
#pragma once

#include <cstdint>
#include <string>

#include "code_object.h"
#include "hip_types.h"

#define HFEMU_HIP_API extern "C" __attribute__((visibility("default")))

namespace hfemu {

#define HFEMU_HIP_ERROR(name, code, text) constexpr hipError_t name = code;
#include "hip_errors.inc"
#undef HFEMU_HIP_ERROR

// --- process-wide -----------------------------------------------------------------------------------------------------
Options current_options();
void set_options(const Options& options);
void set_trace(const TraceRequest& trace);
void set_poll(Poll poll);

// LDS of one compute unit, the most that a work-group may use.
uint32_t lds_limit(Arch arch);

// --- per thread: the report of the last failure, and HIP's last error ---------------------------------------------------
// Empty: none. A failed launch counts until the next launch, another call's failure while HIP's last error does.
const std::string& pending_report();
// The report behind `error`, whether taken or not; empty if there is none.
const std::string& report_of(hipError_t error);
void clear_errors();

// Both remember a failure for hipGetLastError and return `error`; the second also sets the report.
hipError_t record(hipError_t error);
hipError_t record(hipError_t error, std::string report);
// The last recorded failure was a launch's; returns its error.
hipError_t launch_failed();
hipError_t peek_error();
hipError_t take_error();  // and forget it
// record(hipErrorNotSupported) with a report that names the call.
hipError_t not_provided(const char* call);

// --- launching --------------------------------------------------------------------------------------------------------
// Refuses a geometry with which no launch of the kernel could run.
hipError_t check_launch(const CodeObject& object, const Kernel& kernel, const uint32_t grid[3], const uint32_t block[3],
                        uint64_t dynamic_lds);
// Runs to the end. `explicit_bytes`: the kernarg segment without its hidden arguments.
hipError_t launch(CodeObject& object, const Kernel& kernel, const uint32_t grid[3], const uint32_t block[3],
                  const void* explicit_bytes, size_t count, uint64_t dynamic_lds);

// Resident work-groups of `threads` per compute unit, from registers, LDS and the limit of 8 waves per SIMD.
int blocks_per_cu(const CodeObject& object, const Kernel& kernel, uint32_t threads, uint64_t dynamic_lds);

}  // namespace hfemu
