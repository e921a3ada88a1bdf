// zstd frames, as clang's --offload-compress writes them, through the system's libzstd.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hfemu {

// The decompressed bytes of every frame in `data`; throws std::runtime_error on damage, beyond `max_bytes`, or where
// there is no libzstd.
std::vector<uint8_t> zstd_decompress(const uint8_t* data, size_t bytes, size_t max_bytes);

}  // namespace hfemu
