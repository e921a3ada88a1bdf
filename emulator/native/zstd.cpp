#include "zstd.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace hfemu {

std::vector<uint8_t> zstd_decompress(const uint8_t* data, size_t bytes, size_t max_bytes) {
  // Not linked: only compressed bundles need it, and the library is never closed again.
  static void* const library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    throw std::runtime_error(
        "this device code is compressed with zstd, and there is no libzstd.so.1 to read it; install libzstd1 (Debian, "
        "Ubuntu) or libzstd, or build without --offload-compress");
  }
  const auto decompress =
      reinterpret_cast<size_t (*)(void*, size_t, const void*, size_t)>(dlsym(library, "ZSTD_decompress"));
  const auto is_error = reinterpret_cast<unsigned (*)(size_t)>(dlsym(library, "ZSTD_isError"));
  const auto error_name = reinterpret_cast<const char* (*)(size_t)>(dlsym(library, "ZSTD_getErrorName"));
  std::vector<uint8_t> raw(max_bytes);
  const size_t written = decompress(raw.data(), raw.size(), data, bytes);
  if (is_error(written)) throw std::runtime_error(std::string("damaged zstd data: ") + error_name(written));
  raw.resize(written);
  return raw;
}

}  // namespace hfemu
