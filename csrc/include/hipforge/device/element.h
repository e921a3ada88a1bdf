// The element types that a variant names: -DHF_INPUT=bf16 and `using Input = HF_ELEMENT(HF_INPUT);`.
#pragma once

#include "hipforge/device/vector.h"
#include "hipforge/host/abi.h"

namespace hf::dev {

struct element_f32 { using type = float; };
struct element_f16 { using type = f16; };
struct element_bf16 { using type = bf16; };

template <class T>
constexpr hf_dtype dtype_of = __is_same(T, float) ? HF_F32 : __is_same(T, f16) ? HF_F16 : HF_BF16;

}  // namespace hf::dev

#define HF_ELEMENT_(name) ::hf::dev::element_##name::type
#define HF_ELEMENT(name) HF_ELEMENT_(name)
