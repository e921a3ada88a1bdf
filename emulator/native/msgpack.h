// A reader of the part of msgpack that AMDGPU metadata uses: maps, arrays, strings, integers, booleans, nil.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hfemu {

struct MsgValue {
  enum class Kind : uint8_t { nil, boolean, integer, string, array, map };
  Kind kind = Kind::nil;
  int64_t integer = 0;  // also booleans
  std::string_view string;
  std::vector<MsgValue> items;                             // array
  std::vector<std::pair<std::string_view, MsgValue>> map;  // keys that are not strings are dropped

  const MsgValue* find(std::string_view key) const {
    for (const auto& entry : map)
      if (entry.first == key) return &entry.second;
    return nullptr;
  }
  int64_t integer_at(std::string_view key, int64_t fallback) const {
    const MsgValue* value = find(key);
    return value && value->kind <= Kind::integer && value->kind != Kind::nil ? value->integer : fallback;
  }
  std::string string_at(std::string_view key) const {
    const MsgValue* value = find(key);
    return value ? std::string(value->string) : std::string();
  }
};

// Strings point into the input, which must outlive the values. Throws std::runtime_error on damage.
class MsgReader {
 public:
  MsgReader(const uint8_t* data, size_t bytes) : at_(data), end_(data + bytes) {}

  MsgValue read(int depth = 0) {
    if (depth > 32) throw std::runtime_error("AMDGPU metadata nests deeper than 32 levels");
    const uint8_t tag = byte();
    if (tag <= 0x7f) return integer(tag);
    if (tag >= 0xe0) return integer(static_cast<int8_t>(tag));
    if (tag <= 0x8f) return map(tag & 0xf, depth);
    if (tag <= 0x9f) return array(tag & 0xf, depth);
    if (tag <= 0xbf) return string(tag & 0x1f);
    switch (tag) {
      case 0xc0: return {};
      case 0xc2:
      case 0xc3: {
        MsgValue value = integer(tag == 0xc3);
        value.kind = MsgValue::Kind::boolean;
        return value;
      }
      case 0xcc: return integer(static_cast<int64_t>(big_endian(1)));
      case 0xcd: return integer(static_cast<int64_t>(big_endian(2)));
      case 0xce: return integer(static_cast<int64_t>(big_endian(4)));
      case 0xcf: return integer(static_cast<int64_t>(big_endian(8)));
      case 0xd0: return integer(static_cast<int8_t>(big_endian(1)));
      case 0xd1: return integer(static_cast<int16_t>(big_endian(2)));
      case 0xd2: return integer(static_cast<int32_t>(big_endian(4)));
      case 0xd3: return integer(static_cast<int64_t>(big_endian(8)));
      case 0xd9: return string(big_endian(1));
      case 0xda: return string(big_endian(2));
      case 0xdb: return string(big_endian(4));
      case 0xdc: return array(big_endian(2), depth);
      case 0xdd: return array(big_endian(4), depth);
      case 0xde: return map(big_endian(2), depth);
      case 0xdf: return map(big_endian(4), depth);
      default: throw std::runtime_error("AMDGPU metadata holds msgpack tag " + std::to_string(tag));
    }
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;

  const uint8_t* take(uint64_t bytes) {
    if (bytes > static_cast<uint64_t>(end_ - at_)) throw std::runtime_error("AMDGPU metadata is truncated");
    const uint8_t* start = at_;
    at_ += bytes;
    return start;
  }
  uint8_t byte() { return *take(1); }
  uint64_t big_endian(int bytes) {
    uint64_t value = 0;
    for (const uint8_t* p = take(static_cast<uint64_t>(bytes)); bytes-- > 0; ++p) value = value << 8 | *p;
    return value;
  }
  static MsgValue integer(int64_t number) {
    MsgValue value;
    value.kind = MsgValue::Kind::integer;
    value.integer = number;
    return value;
  }
  MsgValue string(uint64_t bytes) {
    MsgValue value;
    value.kind = MsgValue::Kind::string;
    value.string = {reinterpret_cast<const char*>(take(bytes)), bytes};
    return value;
  }
  MsgValue array(uint64_t count, int depth) {
    MsgValue value;
    value.kind = MsgValue::Kind::array;
    while (count-- > 0) value.items.push_back(read(depth + 1));
    return value;
  }
  MsgValue map(uint64_t count, int depth) {
    MsgValue value;
    value.kind = MsgValue::Kind::map;
    while (count-- > 0) {
      const MsgValue key = read(depth + 1);
      MsgValue item = read(depth + 1);
      if (key.kind == MsgValue::Kind::string) value.map.emplace_back(key.string, std::move(item));
    }
    return value;
  }
};

}  // namespace hfemu
