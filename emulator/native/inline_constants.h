// The floating-point inline constants of operand codes 240..248, in every width and as LLVM prints them.
#pragma once

#include <cstdint>

namespace hfemu {

struct InlineFloat {
  uint64_t f64;
  uint32_t f32;
  uint16_t f16, bf16;
  const char* text;
};

constexpr InlineFloat kInlineFloats[] = {
    {0x3fe0000000000000, 0x3f000000, 0x3800, 0x3f00, "0.5"},
    {0xbfe0000000000000, 0xbf000000, 0xb800, 0xbf00, "-0.5"},
    {0x3ff0000000000000, 0x3f800000, 0x3c00, 0x3f80, "1.0"},
    {0xbff0000000000000, 0xbf800000, 0xbc00, 0xbf80, "-1.0"},
    {0x4000000000000000, 0x40000000, 0x4000, 0x4000, "2.0"},
    {0xc000000000000000, 0xc0000000, 0xc000, 0xc000, "-2.0"},
    {0x4010000000000000, 0x40800000, 0x4400, 0x4080, "4.0"},
    {0xc010000000000000, 0xc0800000, 0xc400, 0xc080, "-4.0"},
    {0x3fc45f306dc9c882, 0x3e22f983, 0x3118, 0x3e22, "0.15915494"},  // 1 / (2 pi)
};

}  // namespace hfemu
