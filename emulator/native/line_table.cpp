#include "line_table.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace hfemu {

class LineTable::Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  bool done() const { return at_ >= bytes_.size(); }
  std::string_view take(uint64_t count) {
    if (count > bytes_.size() - at_) throw std::runtime_error("truncated line table");
    at_ += count;
    return bytes_.substr(at_ - count, count);
  }
  template <class T>
  T get() {
    T x;
    std::memcpy(&x, take(sizeof x).data(), sizeof x);
    return x;
  }
  uint64_t uleb() {
    uint64_t x = 0;
    for (uint32_t shift = 0;; shift += 7) {
      const uint8_t b = get<uint8_t>();
      if (shift < 64) x |= uint64_t{b & 127u} << shift;
      if (b < 128) return x;
    }
  }
  int64_t sleb() {
    uint64_t x = 0;
    for (uint32_t shift = 0;;) {
      const uint8_t b = get<uint8_t>();
      if (shift < 64) x |= uint64_t{b & 127u} << shift;
      shift += 7;
      if (b >= 128) continue;
      if ((b & 64) && shift < 64) x |= ~uint64_t{0} << shift;
      return static_cast<int64_t>(x);
    }
  }
  std::string_view text() {
    const size_t end = bytes_.find('\0', at_);
    if (end == std::string_view::npos) throw std::runtime_error("truncated line table");
    const std::string_view s = take(end - at_);
    take(1);
    return s;
  }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
};

namespace {

std::string_view text_at(std::string_view section, uint64_t offset) {
  if (offset >= section.size()) throw std::runtime_error("a string outside its section");
  const std::string_view rest = section.substr(offset);
  return rest.substr(0, rest.find('\0'));
}

std::string joined(std::string_view directory, std::string_view name) {
  if (directory.empty() || name.starts_with('/')) return std::string(name);
  return std::string(directory) + "/" + std::string(name);
}

}  // namespace

LineTable::LineTable(std::string_view lines, std::string_view strings, std::string_view line_strings) {
  try {
    Reader all(lines);
    while (!all.done()) {
      const auto length = all.get<uint32_t>();
      if (length >= 0xFFFFFFF0) break;  // 64-bit DWARF
      Reader unit(all.take(length));
      read_unit(unit, strings, line_strings);
    }
  } catch (const std::runtime_error&) {
    // The units before it stay.
  }
  std::stable_sort(rows_.begin(), rows_.end(), [](const Row& a, const Row& b) {
    return a.address < b.address || (a.address == b.address && a.line == 0 && b.line != 0);
  });
}

void LineTable::read_unit(Reader& unit, std::string_view strings, std::string_view line_strings) {
  const auto version = unit.get<uint16_t>();
  if (version < 4 || version > 5) return;
  if (version == 5) unit.take(2);  // sizes of addresses and segment selectors
  Reader header(unit.take(unit.get<uint32_t>()));
  const uint32_t shortest = header.get<uint8_t>();
  header.take(2);  // operations per instruction, default_is_stmt
  const auto line_base = header.get<int8_t>();
  const uint32_t line_range = header.get<uint8_t>(), opcode_base = header.get<uint8_t>();
  if (line_range == 0 || opcode_base == 0) return;
  const std::string_view operand_counts = header.take(opcode_base - 1);

  std::vector<std::string> directories;
  const auto first_file = static_cast<uint32_t>(files_.size());
  if (version == 4) {
    directories.emplace_back();
    for (std::string_view s = header.text(); !s.empty(); s = header.text()) directories.emplace_back(s);
    files_.emplace_back();  // files are counted from 1
    for (std::string_view s = header.text(); !s.empty(); s = header.text()) {
      const uint64_t directory = header.uleb();
      header.uleb();
      header.uleb();
      files_.push_back(joined(directory < directories.size() ? directories[directory] : "", s));
    }
  } else {
    for (const bool is_file : {false, true}) {
      std::vector<std::pair<uint64_t, uint64_t>> formats(header.get<uint8_t>());
      for (auto& [content, form] : formats) {
        content = header.uleb();
        form = header.uleb();
      }
      for (uint64_t left = header.uleb(); left != 0; --left) {
        std::string_view path;
        uint64_t directory = 0;
        for (const auto& [content, form] : formats) {
          std::string_view text;
          uint64_t value = 0;
          switch (form) {
            case 0x08: text = header.text(); break;
            case 0x0e: text = text_at(strings, header.get<uint32_t>()); break;
            case 0x1f: text = text_at(line_strings, header.get<uint32_t>()); break;
            case 0x0b: value = header.get<uint8_t>(); break;
            case 0x05: value = header.get<uint16_t>(); break;
            case 0x06: value = header.get<uint32_t>(); break;
            case 0x07: value = header.get<uint64_t>(); break;
            case 0x0f: value = header.uleb(); break;
            case 0x1e: header.take(16); break;
            case 0x09: header.take(header.uleb()); break;
            default: throw std::runtime_error("a form that line tables do not have");
          }
          if (content == 1) path = text;
          if (content == 2) directory = value;
        }
        if (is_file) files_.push_back(joined(directory < directories.size() ? directories[directory] : "", path));
        else directories.emplace_back(path);
      }
    }
  }
  const auto files = static_cast<uint32_t>(files_.size()) - first_file;

  uint64_t address = 0, line = 1, file = 1;
  const auto row = [&](bool known) {
    const bool named = known && file < files;
    rows_.push_back({address, static_cast<uint32_t>(first_file + (named ? file : 0)), named ? static_cast<uint32_t>(line) : 0});
  };
  const auto advance = [&](uint64_t count) { address += count * shortest; };
  while (!unit.done()) {
    const uint32_t opcode = unit.get<uint8_t>();
    if (opcode >= opcode_base) {
      advance((opcode - opcode_base) / line_range);
      line += static_cast<uint64_t>(int64_t{line_base} + (opcode - opcode_base) % line_range);
      row(true);
      continue;
    }
    switch (opcode) {
      case 0: {
        Reader extended(unit.take(unit.uleb()));
        const uint32_t kind = extended.get<uint8_t>();
        if (kind == 1) {
          row(false);
          address = 0, line = 1, file = 1;
        } else if (kind == 2) {
          address = extended.get<uint64_t>();
        }
        break;
      }
      case 1: row(true); break;
      case 2: advance(unit.uleb()); break;
      case 3: line += static_cast<uint64_t>(unit.sleb()); break;
      case 4: file = unit.uleb(); break;
      case 8: advance((255 - opcode_base) / line_range); break;
      case 9: address += unit.get<uint16_t>(); break;
      default:
        for (int left = operand_counts[opcode - 1]; left > 0; --left) unit.uleb();
    }
  }
}

std::string LineTable::at(uint64_t address) const {
  const auto after = std::upper_bound(rows_.begin(), rows_.end(), address,
                                      [](uint64_t a, const Row& r) { return a < r.address; });
  if (after == rows_.begin()) return {};
  const Row& row = *(after - 1);
  return row.line == 0 ? std::string() : files_[row.file] + ":" + std::to_string(row.line);
}

}  // namespace hfemu
