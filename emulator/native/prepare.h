#pragma once

#include <unordered_map>

#include "core.h"

namespace hfemu {

// Turns decoded instructions into executable ones; constants are spread into rows that live with the program.
class Preparer {
 public:
  explicit Preparer(Program& program) : program_(program) {}
  // `inst` must stay where it is: the result points to it.
  ExecInst prepare(const Inst& inst);

 private:
  Source source(const Operand& o);
  const uint32_t* constant(uint64_t value);
  static uint16_t destination(const Operand& o);

  Program& program_;
  std::unordered_map<uint64_t, const uint32_t*> constants_;
};

}  // namespace hfemu
