// Containers of device code: offload bundles and their compressed form.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "code_object.h"
#include "zstd.h"

namespace hfemu {
namespace {

constexpr char kBundleMagic[] = "__CLANG_OFFLOAD_BUNDLE__";
constexpr size_t kBundleMagicBytes = sizeof(kBundleMagic) - 1;
constexpr char kCompressedMagic[] = "CCOB";
constexpr uint64_t kUnbounded = uint64_t{1} << 40;
constexpr uint64_t kMostRawBytes = uint64_t{1} << 32;
constexpr uint64_t kMostExpansion = 4096;  // kernels compress 3- to 30-fold

template <class T>
T read(const uint8_t* data, uint64_t bytes, uint64_t offset) {
  if (offset > bytes || sizeof(T) > bytes - offset) throw std::runtime_error("device code container is truncated");
  T value;
  std::memcpy(&value, data + offset, sizeof(T));
  return value;
}

bool starts_with(const uint8_t* data, uint64_t bytes, const char* magic, size_t magic_bytes) {
  return bytes >= magic_bytes && std::memcmp(data, magic, magic_bytes) == 0;
}

void read_bundle(const uint8_t* data, uint64_t bytes, const std::shared_ptr<std::vector<uint8_t>>& storage,
                 std::vector<DeviceImage>* out) {
  const uint64_t count = read<uint64_t>(data, bytes, kBundleMagicBytes);
  if (count > 4096) throw std::runtime_error("offload bundle claims " + std::to_string(count) + " entries");
  uint64_t at = kBundleMagicBytes + 8;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t offset = read<uint64_t>(data, bytes, at), size = read<uint64_t>(data, bytes, at + 8),
                   id_bytes = read<uint64_t>(data, bytes, at + 16);
    if (id_bytes > 4096) throw std::runtime_error("offload bundle entry with an id of " + std::to_string(id_bytes));
    read<uint8_t>(data, bytes, at + 24 + id_bytes - 1);
    DeviceImage image;
    image.target.assign(reinterpret_cast<const char*>(data) + at + 24, id_bytes);
    at += 24 + id_bytes;
    if (size == 0 || image.target.rfind("host-", 0) == 0) continue;
    if (offset > bytes || size > bytes - offset)
      throw std::runtime_error("offload bundle entry " + image.target + " reaches past the container's end");
    image.data = data + offset;
    image.bytes = size;
    image.storage = storage;
    out->push_back(image);
  }
}

std::shared_ptr<std::vector<uint8_t>> decompress(const uint8_t* data, uint64_t bytes) {
  const uint16_t version = read<uint16_t>(data, bytes, 4), method = read<uint16_t>(data, bytes, 6);
  uint64_t total = bytes, raw_bytes = 0, header = 0;
  if (version == 2) {
    total = read<uint32_t>(data, bytes, 8), raw_bytes = read<uint32_t>(data, bytes, 12), header = 24;
  } else if (version == 3) {
    total = read<uint64_t>(data, bytes, 8), raw_bytes = read<uint64_t>(data, bytes, 16), header = 32;
  } else {
    throw std::runtime_error("compressed bundle version " + std::to_string(version) + "; versions 2 and 3 are read");
  }
  if (method != 1)
    throw std::runtime_error("compressed bundle method " + std::to_string(method) + "; only 1 (zstd) is read");
  if (total > bytes || total < header) throw std::runtime_error("compressed bundle is truncated");
  if (raw_bytes > std::min(kMostRawBytes, kMostExpansion * (total - header)))
    throw std::runtime_error("a compressed bundle promises " + std::to_string(raw_bytes) + " bytes from " +
                             std::to_string(total - header) + " compressed ones");
  auto raw = std::make_shared<std::vector<uint8_t>>(zstd_decompress(data + header, total - header, raw_bytes));
  if (!starts_with(raw->data(), raw->size(), kBundleMagic, kBundleMagicBytes))
    throw std::runtime_error("a compressed bundle that does not hold an offload bundle");
  return raw;
}

uint64_t elf_bytes(const uint8_t* data) {  // through the section header table, which lld writes last
  const uint64_t table = read<uint64_t>(data, 64, 40);
  return table + uint64_t{read<uint16_t>(data, 64, 58)} * read<uint16_t>(data, 64, 60);
}

Arch arch_of_elf(const DeviceImage& image, bool* known) {
  const uint32_t machine = read<uint32_t>(image.data, image.bytes, 48) & 0xff;
  *known = machine == 0x4c || machine == 0x4f;
  return machine == 0x4c ? Arch::gfx942 : Arch::gfx950;
}

}  // namespace

const char* arch_name(Arch arch) { return arch == Arch::gfx942 ? "gfx942" : "gfx950"; }

bool parse_arch(std::string_view text, Arch* out) {
  const std::string_view name = text.substr(0, text.find(':'));
  for (Arch arch : {Arch::gfx942, Arch::gfx950})
    if (name == arch_name(arch)) {
      *out = arch;
      return true;
    }
  return false;
}

std::vector<DeviceImage> device_images(const uint8_t* data, uint64_t bytes) {
  const uint64_t limit = bytes ? bytes : kUnbounded;
  std::vector<DeviceImage> images;
  if (starts_with(data, limit, "\x7f" "ELF", 4)) {
    images.push_back({"", data, bytes ? bytes : elf_bytes(data), nullptr});
  } else if (starts_with(data, limit, kBundleMagic, kBundleMagicBytes)) {
    read_bundle(data, limit, nullptr, &images);
  } else if (starts_with(data, limit, kCompressedMagic, 4)) {
    auto raw = decompress(data, limit);
    read_bundle(raw->data(), raw->size(), raw, &images);
  } else {
    throw std::runtime_error("device code is neither an ELF, an offload bundle nor a compressed bundle");
  }
  return images;
}

DeviceImage select_image(const std::vector<DeviceImage>& images, Arch arch) {
  std::string found;
  for (const DeviceImage& image : images) {
    bool known = false;
    const bool elf = starts_with(image.data, image.bytes, "\x7f" "ELF", 4);
    // The emulated device runs with XNACK off, so code that demands it on is for another device.
    if (elf && arch_of_elf(image, &known) == arch && known && image.target.find("xnack+") == std::string::npos)
      return image;
    found += (found.empty() ? "" : ", ");
    found += !image.target.empty() ? image.target : known ? arch_name(arch_of_elf(image, &known)) : "another machine";
  }
  throw std::runtime_error(std::string("no device code for ") + arch_name(arch) + "; there is " +
                           (found.empty() ? "none at all" : "code for " + found));
}

}  // namespace hfemu
