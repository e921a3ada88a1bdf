// A zstd decoder (RFC 8878): frames without dictionaries, as clang's --offload-compress writes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hfemu {

// The decompressed bytes of every frame in `data`; throws std::runtime_error on damage, or beyond `max_bytes`.
std::vector<uint8_t> zstd_decompress(const uint8_t* data, size_t bytes, size_t max_bytes);

}  // namespace hfemu
