// Source lines of machine code, from a DWARF line table (.debug_line, versions 4 and 5).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hfemu {

class LineTable {
 public:
  // The sections' bytes. Unreadable parts are skipped: a program runs without line numbers too.
  LineTable(std::string_view lines, std::string_view strings, std::string_view line_strings);
  // "kernel.cu:42" with the path that the compiler recorded, for a virtual address; empty if no line is known.
  std::string at(uint64_t address) const;
  bool empty() const { return rows_.empty(); }

 private:
  struct Row {
    uint64_t address;
    uint32_t file, line;  // line 0: the end of a sequence, or code without a line
  };
  class Reader;
  void read_unit(Reader& unit, std::string_view strings, std::string_view line_strings);

  std::vector<Row> rows_;  // by address
  std::vector<std::string> files_;
};

}  // namespace hfemu
