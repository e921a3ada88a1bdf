// What the aiter_tensor.h on the include path says of aiter_tensor_t: size, place and size of each field, and the number
// of each dtype. Nothing here is launched; hipforge.aiter_compat reads the table.
#include "aiter_tensor.h"

#define FIELD(name) {#name, offsetof(aiter_tensor_t, name), sizeof(aiter_tensor_t::name)}
#define DTYPE(name) {#name, AITER_DTYPE_##name, 0}

struct Row {
  const char* name;
  long value;
  long bytes;
};

extern "C" __attribute__((visibility("default"))) const Row hf_aiter_layout[] = {
    {"aiter_tensor_t", 0, sizeof(aiter_tensor_t)},
    FIELD(ptr), FIELD(numel_), FIELD(ndim), FIELD(shape), FIELD(strides), FIELD(dtype_), FIELD(device_id),
    {nullptr, 0, 0},
    DTYPE(fp8), DTYPE(fp8_e8m0), DTYPE(fp16), DTYPE(bf16), DTYPE(fp32), DTYPE(i4x2), DTYPE(fp4x2), DTYPE(u32),
    DTYPE(i32), DTYPE(i16), DTYPE(i8), DTYPE(u8), DTYPE(i64), DTYPE(u64),
    {nullptr, 0, 0},
};
