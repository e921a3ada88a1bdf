// OCP microscaling (MX): blocks of 32 elements along K share one e8m0 scale byte b, whose value is 2^(b - 127);
// 0xFF is NaN and makes its whole block NaN.
#pragma once

namespace hf {

constexpr int kMxBlock = 32;
constexpr int kE8m0Bias = 127;
constexpr unsigned kE8m0Nan = 0xFF;

}  // namespace hf
