#include "disasm_immediates.h"

#include <cstdarg>
#include <cstdio>

namespace hfemu {
namespace {

__attribute__((format(printf, 1, 2))) std::string print(const char* format, ...) {
  char buffer[96];
  va_list args;
  va_start(args, format);
  std::vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  return buffer;
}

struct Name {
  unsigned id;
  const char* name;
};

const char* find(const Name* begin, const Name* end, unsigned id) {
  for (const Name* entry = begin; entry != end; ++entry) {
    if (entry->id == id) return entry->name;
  }
  return nullptr;
}

constexpr Name kHardwareRegisters[] = {
    {1, "HW_REG_MODE"}, {2, "HW_REG_STATUS"}, {3, "HW_REG_TRAPSTS"}, {4, "HW_REG_HW_ID"},
    {5, "HW_REG_GPR_ALLOC"}, {6, "HW_REG_LDS_ALLOC"}, {7, "HW_REG_IB_STS"}, {15, "HW_REG_SH_MEM_BASES"},
    {16, "HW_REG_TBA_LO"}, {17, "HW_REG_TBA_HI"}, {18, "HW_REG_TMA_LO"}, {19, "HW_REG_TMA_HI"},
    {20, "HW_REG_XCC_ID"}, {21, "HW_REG_SQ_PERF_SNAPSHOT_DATA"}, {22, "HW_REG_SQ_PERF_SNAPSHOT_DATA1"},
    {23, "HW_REG_SQ_PERF_SNAPSHOT_PC_LO"}, {24, "HW_REG_SQ_PERF_SNAPSHOT_PC_HI"}};

constexpr Name kMessages[] = {
    {1, "MSG_INTERRUPT"}, {4, "MSG_SAVEWAVE"}, {5, "MSG_STALL_WAVE_GEN"}, {6, "MSG_HALT_WAVES"},
    {7, "MSG_ORDERED_PS_DONE"}, {8, "MSG_EARLY_PRIM_DEALLOC"}, {9, "MSG_GS_ALLOC_REQ"}, {10, "MSG_GET_DOORBELL"}};

constexpr Name kDppControls[] = {
    {0x130, "wave_shl:1"}, {0x134, "wave_rol:1"}, {0x138, "wave_shr:1"}, {0x13c, "wave_ror:1"},
    {0x140, "row_mirror"}, {0x141, "row_half_mirror"}, {0x142, "row_bcast:15"}, {0x143, "row_bcast:31"}};

template <size_t N>
const char* find(const Name (&names)[N], unsigned id) {
  return find(names, names + N, id);
}

constexpr bool is_power_of_two(unsigned n) { return n != 0 && (n & (n - 1)) == 0; }

// One letter per lane bit: what a 0 and a 1 become there.
std::string bitmask_perm(unsigned and_mask, unsigned or_mask, unsigned xor_mask) {
  const unsigned of_zero = or_mask ^ xor_mask, of_one = (and_mask | or_mask) ^ xor_mask;
  std::string letters;
  for (unsigned b = 16; b != 0; b >>= 1) {
    const bool zero = (of_zero & b) != 0, one = (of_one & b) != 0;
    letters += zero ? (one ? '1' : 'i') : (one ? 'p' : '0');
  }
  return "swizzle(BITMASK_PERM,\"" + letters + "\")";
}

}  // namespace

std::string waitcnt_text(unsigned simm16) {
  const unsigned vm = (simm16 & 15) | (simm16 >> 14 & 3) << 4, exp = simm16 >> 4 & 7, lgkm = simm16 >> 8 & 15;
  const bool none = vm == 63 && exp == 7 && lgkm == 15;
  std::string text;
  auto counter = [&](const char* name, unsigned value, unsigned max) {
    if (value == max && !none) return;  // a counter at its maximum waits for nothing
    text += print("%s%s(%u)", text.empty() ? "" : " ", name, value);
  };
  counter("vmcnt", vm, 63);
  counter("expcnt", exp, 7);
  counter("lgkmcnt", lgkm, 15);
  return text;
}

std::string hwreg_text(unsigned simm16) {
  const unsigned id = simm16 & 63, offset = simm16 >> 6 & 31, size = (simm16 >> 11) + 1;
  const char* known = find(kHardwareRegisters, id);
  const std::string name = known != nullptr ? known : std::to_string(id);
  return offset == 0 && size == 32 ? "hwreg(" + name + ")" : print("hwreg(%s, %u, %u)", name.c_str(), offset, size);
}

std::string message_text(unsigned simm16) {
  const unsigned id = simm16 & 15, operation = simm16 >> 4 & 7, stream = simm16 >> 8 & 3;
  const char* name = find(kMessages, id);
  if (name != nullptr && operation == 0 && stream == 0) return print("sendmsg(%s)", name);
  const bool nothing_else = (id | operation << 4 | stream << 8) == simm16;
  return nothing_else ? print("sendmsg(%u, %u, %u)", id, operation, stream) : std::to_string(simm16);
}

std::string gpr_idx_text(unsigned mode) {
  static const char* const kNames[] = {"SRC0", "SRC1", "SRC2", "DST"};
  if (mode > 15) return print("0x%x", mode);
  std::string names;
  for (unsigned i = 0; i < 4; ++i) {
    if ((mode >> i & 1) != 0) names += (names.empty() ? "" : ",") + std::string(kNames[i]);
  }
  return "gpr_idx(" + names + ")";
}

std::string swizzle_text(unsigned offset) {
  if (offset >= 0xe000) return print("swizzle(FFT,%u)", offset & 31);
  if (offset >= 0xc000) return print("swizzle(ROTATE,%u,%u)", offset >> 10 & 1, offset >> 5 & 31);
  if ((offset & 0xff00) == 0x8000) {
    return print("swizzle(QUAD_PERM,%u,%u,%u,%u)", offset & 3, offset >> 2 & 3, offset >> 4 & 3, offset >> 6 & 3);
  }
  if (offset >= 0x8000) return std::to_string(offset);
  const unsigned and_mask = offset & 31, or_mask = offset >> 5 & 31, xor_mask = offset >> 10 & 31;
  if (and_mask == 31 && or_mask == 0 && xor_mask != 0) {
    if (is_power_of_two(xor_mask)) return print("swizzle(SWAP,%u)", xor_mask);
    if (is_power_of_two(xor_mask + 1)) return print("swizzle(REVERSE,%u)", xor_mask + 1);
  }
  const unsigned group = 32 - and_mask;
  if (group > 1 && is_power_of_two(group) && or_mask < group && xor_mask == 0) {
    return print("swizzle(BROADCAST,%u,%u)", group, or_mask);
  }
  return bitmask_perm(and_mask, or_mask, xor_mask);
}

std::string dpp_text(unsigned control) {
  const unsigned n = control & 15;
  if (control < 0x100) {
    return print("quad_perm:[%u,%u,%u,%u]", control & 3, control >> 2 & 3, control >> 4 & 3, control >> 6 & 3);
  }
  const char* name = find(kDppControls, control);
  if (name != nullptr) return name;
  static const char* const kRows[] = {"row_shl", "row_shr", "row_ror", "", "", "row_newbcast"};
  return print("%s:%u", kRows[control >> 4 & 7], n);
}

}  // namespace hfemu
