// Which kernel or variable does a host symbol or a module name mean?
#pragma once

#include <memory>
#include <string>

#include "code_object.h"
#include "hip_types.h"

// HIP's opaque handles, as the emulator fills them.
struct ihipModuleSymbol_t {
  hfemu::CodeObject* object = nullptr;
  const hfemu::Kernel* kernel = nullptr;
};

namespace hfemu {

// The kernel behind the host stub `host`, loading its code object on first use; null with a report on failure.
hipFunction_t function_of(const void* host);
// The variable behind the host shadow `host`; false with a report on failure.
bool variable_of(const void* host, Variable* out, std::string* name);
// "smallm-1f2e/module.so" of the library that holds `address`.
std::string owner_name(const void* address);

}  // namespace hfemu
