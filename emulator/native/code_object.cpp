// ELF64 of the AMDGPU machine: segments, relocations, symbols, kernel descriptors and their metadata note.
#include "code_object.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "line_table.h"
#include "memory.h"
#include "msgpack.h"

namespace hfemu {
namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kMaxImageBytes = uint64_t{1} << 32;
constexpr uint64_t kMaxKernargBytes = 1 << 16;
constexpr uint32_t kPtLoad = 1, kPtDynamic = 2, kPtNote = 4;
constexpr uint32_t kShtProgbits = 1, kShtSymtab = 2, kShtDynsym = 11;
constexpr uint64_t kShfCompressed = 0x800;
constexpr uint32_t kExecutable = 1, kWritable = 2;
constexpr uint8_t kSttObject = 1, kSttFunction = 2;
constexpr uint16_t kMachineAmdgpu = 224, kTypeDynamic = 3;
constexpr uint32_t kNoteMetadata = 32;
constexpr uint64_t kDescriptorBytes = 64;

struct ElfHeader {
  uint8_t ident[16];
  uint16_t type, machine;
  uint32_t version;
  uint64_t entry, phoff, shoff;
  uint32_t flags;
  uint16_t ehsize, phentsize, phnum, shentsize, shnum, shstrndx;
};
struct Segment {
  uint32_t type, flags;
  uint64_t offset, vaddr, paddr, filesz, memsz, align;
};
struct Section {
  uint32_t name, type;
  uint64_t flags, addr, offset, size;
  uint32_t link, info;
  uint64_t addralign, entsize;
};
struct Symbol {
  uint32_t name;
  uint8_t info, other;
  uint16_t section;
  uint64_t value, size;
};
struct Rela {
  uint64_t offset, info;
  int64_t addend;
};
struct Dynamic {
  int64_t tag;
  uint64_t value;
};
static_assert(sizeof(ElfHeader) == 64 && sizeof(Segment) == 56 && sizeof(Section) == 64 && sizeof(Symbol) == 24);

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

KernelArg parse_argument(const MsgValue& entry) {
  struct Row {
    std::string_view prefix;
    ArgKind kind;
  };
  static constexpr Row kRows[] = {
      {"hidden_block_count_", ArgKind::hidden_block_count},
      {"hidden_group_size_", ArgKind::hidden_group_size},
      {"hidden_remainder_", ArgKind::hidden_remainder},
      {"hidden_global_offset_", ArgKind::hidden_global_offset},
      {"hidden_grid_dims", ArgKind::hidden_grid_dims},
      {"hidden_dynamic_lds_size", ArgKind::hidden_dynamic_lds_size},
      {"hidden_private_base", ArgKind::hidden_private_base},
      {"hidden_shared_base", ArgKind::hidden_shared_base},
      {"hidden_hostcall_buffer", ArgKind::hidden_hostcall},
      {"hidden_printf_buffer", ArgKind::hidden_hostcall},
      {"hidden_heap_v1", ArgKind::hidden_heap},
      {"hidden_", ArgKind::hidden_none},
      {"global_buffer", ArgKind::buffer},
  };
  KernelArg arg;
  arg.offset = static_cast<uint32_t>(entry.integer_at(".offset", 0));
  arg.bytes = static_cast<uint32_t>(entry.integer_at(".size", 0));
  const std::string kind = entry.string_at(".value_kind");
  for (const Row& row : kRows)
    if (kind.rfind(row.prefix, 0) == 0) {
      arg.kind = row.kind;
      break;
    }
  if (!kind.empty() && kind.back() >= 'x' && kind.back() <= 'z' && kind[kind.size() - 2] == '_')
    arg.dimension = static_cast<uint8_t>(kind.back() - 'x');
  return arg;
}

}  // namespace

class ElfLoader {
 public:
  ElfLoader(const DeviceImage& image, const std::string& name)
      : data_(image.data), bytes_(image.bytes), object_(new CodeObject) {
    object_->code_.name = name;
  }

  std::unique_ptr<CodeObject> load() {
    header_ = at<ElfHeader>(0);
    if (std::memcmp(header_.ident, "\x7f" "ELF\x02\x01", 6) != 0 || header_.machine != kMachineAmdgpu)
      fail("not a 64-bit little-endian AMDGPU ELF");
    if (header_.type != kTypeDynamic) fail("a relocatable device object; it must be linked before it can run");
    const uint32_t machine = header_.flags & 0xff;
    if (machine != 0x4c && machine != 0x4f)
      fail("code for another processor (e_flags " + hex(header_.flags) + "); gfx942 and gfx950 are emulated");
    object_->code_.arch = machine == 0x4c ? Arch::gfx942 : Arch::gfx950;
    map_segments();
    read_symbols();
    relocate();
    read_kernels();
    register_extents();
    read_lines();
    return std::move(object_);
  }

 private:
  const uint8_t* data_;
  uint64_t bytes_;
  ElfHeader header_{};
  std::unique_ptr<CodeObject> object_;
  std::vector<Segment> segments_;
  struct NamedSymbol {
    std::string name;
    Symbol symbol;
  };
  std::vector<NamedSymbol> dynamic_;

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("code object " + object_->code_.name + ": " + what);
  }
  const uint8_t* file(uint64_t offset, uint64_t count) const {
    if (offset > bytes_ || count > bytes_ - offset) fail("truncated: " + hex(offset) + " lies past its end");
    return data_ + offset;
  }
  template <class T>
  T at(uint64_t offset) const {
    T value;
    std::memcpy(&value, file(offset, sizeof(T)), sizeof(T));
    return value;
  }
  // A place in the mapped image, by virtual address.
  uint8_t* mapped(uint64_t vaddr, uint64_t count) const {
    if (vaddr > object_->memory_bytes_ || count > object_->memory_bytes_ - vaddr)
      fail("virtual address " + hex(vaddr) + " lies outside its segments");
    return object_->memory_ + vaddr;
  }

  void map_segments() {
    uint64_t top = 0;
    for (uint16_t i = 0; i < header_.phnum; ++i) {
      const Segment segment = at<Segment>(header_.phoff + uint64_t{i} * header_.phentsize);
      segments_.push_back(segment);
      if (segment.type != kPtLoad) continue;
      if (segment.filesz > segment.memsz || segment.vaddr > kMaxImageBytes || segment.memsz > kMaxImageBytes)
        fail("a segment of " + hex(segment.memsz) + " bytes at " + hex(segment.vaddr));
      top = std::max(top, segment.vaddr + segment.memsz);
    }
    const uint64_t size = (top + kPageBytes) / kPageBytes * kPageBytes;
    // Pages of zeros until they are touched: headers may request far more memory than the file has.
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for its " + std::to_string(size) + " bytes");
    object_->memory_ = static_cast<uint8_t*>(memory);
    object_->memory_bytes_ = size;
    LoadedCode& code = object_->code_;
    code.base = object_->memory_;
    for (const Segment& segment : segments_) {
      if (segment.type != kPtLoad) continue;
      if (segment.filesz) std::memcpy(mapped(segment.vaddr, segment.memsz), file(segment.offset, segment.filesz),
                                      segment.filesz);
      if (!(segment.flags & kExecutable)) continue;
      if (code.text_end) fail("two executable segments");
      code.text_begin = segment.vaddr;
      code.text_end = segment.vaddr + segment.filesz;
    }
  }

  void read_symbols() {
    for (uint16_t i = 0; i < header_.shnum; ++i) {
      const Section table = at<Section>(header_.shoff + uint64_t{i} * header_.shentsize);
      if (table.type != kShtSymtab && table.type != kShtDynsym) continue;
      const Section strings = at<Section>(header_.shoff + uint64_t{table.link} * header_.shentsize);
      for (uint64_t k = 0; k < table.size / sizeof(Symbol); ++k) {
        const Symbol symbol = at<Symbol>(table.offset + k * sizeof(Symbol));
        if ((symbol.info & 15) == kSttFunction && symbol.section) object_->code_.functions.push_back(symbol.value);
        if (table.type != kShtDynsym) continue;
        if (symbol.name >= strings.size) fail("a symbol name outside its string table");
        const char* name = reinterpret_cast<const char*>(file(strings.offset + symbol.name, 1));
        dynamic_.push_back({std::string(name, strnlen(name, strings.size - symbol.name)), symbol});
      }
    }
    std::vector<uint64_t>& functions = object_->code_.functions;
    std::sort(functions.begin(), functions.end());
    functions.erase(std::unique(functions.begin(), functions.end()), functions.end());
  }

  uint64_t symbol_address(uint32_t index) const {
    if (index >= dynamic_.size()) fail("a relocation against a symbol that is not there");
    const NamedSymbol& named = dynamic_[index];
    if (named.symbol.section) return reinterpret_cast<uint64_t>(mapped(named.symbol.value, 0));
    if (named.symbol.info >> 4 == 2 || index == 0) return 0;  // weak, or none
    fail("undefined symbol " + named.name);
  }

  void relocate() {
    uint64_t table = 0, size = 0;
    for (const Segment& segment : segments_) {
      if (segment.type != kPtDynamic) continue;
      for (uint64_t at_byte = 0; at_byte + sizeof(Dynamic) <= segment.filesz; at_byte += sizeof(Dynamic)) {
        const Dynamic entry = at<Dynamic>(segment.offset + at_byte);
        if (entry.tag == 7) table = entry.value;
        if (entry.tag == 8) size = entry.value;
      }
    }
    for (uint64_t i = 0; i < size / sizeof(Rela); ++i) {
      Rela rela;
      std::memcpy(&rela, mapped(table + i * sizeof(Rela), sizeof(Rela)), sizeof(Rela));
      apply(rela);
    }
  }

  void apply(const Rela& rela) {
    enum : uint32_t { none = 0, abs32_lo = 1, abs32_hi = 2, abs64 = 3, rel32 = 4, rel64 = 5, abs32 = 6, relative64 = 13 };
    const uint32_t type = static_cast<uint32_t>(rela.info);
    if (type == none) return;
    uint64_t value = static_cast<uint64_t>(rela.addend);
    if (type == relative64) {
      value += reinterpret_cast<uint64_t>(object_->memory_);
    } else {
      value += symbol_address(static_cast<uint32_t>(rela.info >> 32));
    }
    size_t width = 4;
    switch (type) {
      case abs64:
      case relative64: width = 8; break;
      case rel64: width = 8; [[fallthrough]];
      case rel32: value -= reinterpret_cast<uint64_t>(mapped(rela.offset, 0)); break;
      case abs32_hi: value >>= 32; break;
      case abs32_lo:
      case abs32: break;
      default: fail("relocation type " + std::to_string(type));
    }
    std::memcpy(mapped(rela.offset, width), &value, width);
  }

  void read_kernels() {
    bool found = false;
    for (const Segment& segment : segments_) {
      if (segment.type != kPtNote) continue;
      uint64_t at_byte = segment.offset;
      const uint64_t end = segment.offset + segment.filesz;
      while (at_byte + 12 <= end) {
        const uint32_t name_bytes = at<uint32_t>(at_byte), size = at<uint32_t>(at_byte + 4),
                       type = at<uint32_t>(at_byte + 8);
        const uint64_t start = at_byte + 12 + ((uint64_t{name_bytes} + 3) & ~uint64_t{3});
        const bool ours = name_bytes >= 6 && std::memcmp(file(at_byte + 12, 6), "AMDGPU", 6) == 0;
        if (ours && type == kNoteMetadata) {
          read_metadata(file(start, size), size);
          found = true;
        }
        at_byte = start + ((uint64_t{size} + 3) & ~uint64_t{3});
      }
    }
    if (!found) fail("no AMDGPU metadata note");
  }

  void read_metadata(const uint8_t* note, uint64_t size) {
    const MsgValue root = MsgReader(note, size).read();
    const MsgValue* kernels = root.find("amdhsa.kernels");
    if (!kernels) return;  // a code object with device variables only
    for (const MsgValue& entry : kernels->items) {
      Kernel kernel;
      const std::string symbol = entry.string_at(".symbol");
      kernel.info.name = symbol.substr(0, symbol.rfind(".kd"));
      kernel.info.kernarg_bytes = static_cast<uint32_t>(entry.integer_at(".kernarg_segment_size", 0));
      kernel.info.lds_bytes = static_cast<uint32_t>(entry.integer_at(".group_segment_fixed_size", 0));
      kernel.info.private_bytes = static_cast<uint32_t>(entry.integer_at(".private_segment_fixed_size", 0));
      kernel.info.dynamic_stack = entry.integer_at(".uses_dynamic_stack", 0) != 0;
      kernel.info.max_workgroup = static_cast<uint32_t>(entry.integer_at(".max_flat_workgroup_size", 1024));
      kernel.info.vgprs = static_cast<uint32_t>(entry.integer_at(".vgpr_count", 0));
      kernel.info.sgprs = static_cast<uint32_t>(entry.integer_at(".sgpr_count", 0));
      if (const MsgValue* args = entry.find(".args"))
        for (const MsgValue& arg : args->items) {
          kernel.args.push_back(parse_argument(arg));
          const uint64_t end = uint64_t{kernel.args.back().offset} + kernel.args.back().bytes;
          // Some hand-written kernels list arguments past the size that they state; the arguments decide.
          if (end > kMaxKernargBytes) fail("an argument of " + symbol + " at byte " + std::to_string(end) + " of its kernarg segment");
          kernel.info.kernarg_bytes = std::max(kernel.info.kernarg_bytes, static_cast<uint32_t>(end));
        }
      read_descriptor(symbol, &kernel.info);
      object_->kernels_.emplace(kernel.info.name, kernel);
    }
  }

  void read_descriptor(const std::string& symbol, KernelInfo* info) {
    const auto found = std::find_if(dynamic_.begin(), dynamic_.end(),
                                    [&](const NamedSymbol& named) { return named.name == symbol; });
    if (found == dynamic_.end()) fail("no kernel descriptor " + symbol);
    const uint64_t vaddr = found->symbol.value;
    const uint8_t* descriptor = mapped(vaddr, kDescriptorBytes);
    const auto field = [&](uint64_t offset, auto zero) {
      std::memcpy(&zero, descriptor + offset, sizeof zero);
      return zero;
    };
    info->entry = vaddr + static_cast<uint64_t>(field(16, int64_t{0}));
    info->rsrc3 = field(44, uint32_t{0});
    info->rsrc1 = field(48, uint32_t{0});
    info->rsrc2 = field(52, uint32_t{0});
    info->properties = field(56, uint16_t{0});
    const uint16_t preload = field(58, uint16_t{0});
    info->preload_dwords = preload & 0x7f;
    info->preload_offset = preload >> 7;
    const LoadedCode& code = object_->code_;
    if (info->entry < code.text_begin || info->entry >= code.text_end)
      fail("kernel " + info->name + " starts at " + hex(info->entry) + ", outside its code");
  }

  // A damaged line table is ignored.
  void read_lines() {
    try {
      const Section names = at<Section>(header_.shoff + uint64_t{header_.shstrndx} * header_.shentsize);
      std::string_view found[3];
      for (uint16_t i = 0; i < header_.shnum; ++i) {
        const Section section = at<Section>(header_.shoff + uint64_t{i} * header_.shentsize);
        if (section.type != kShtProgbits || section.flags & kShfCompressed || section.name >= names.size) continue;
        const char* name = reinterpret_cast<const char*>(file(names.offset + section.name, 1));
        const std::string_view text(name, strnlen(name, names.size - section.name));
        const int which = text == ".debug_line" ? 0 : text == ".debug_str" ? 1 : text == ".debug_line_str" ? 2 : -1;
        if (which >= 0)
          found[which] = {reinterpret_cast<const char*>(file(section.offset, section.size)), section.size};
      }
      auto lines = std::make_shared<const LineTable>(found[0], found[1], found[2]);
      if (!lines->empty()) object_->code_.lines = std::move(lines);
    } catch (const std::runtime_error&) {
    }
  }

  // Disjoint extents: each variable by its own name, what lies between as the segment's.
  void register_extents() {
    std::vector<NamedSymbol> variables;
    for (const NamedSymbol& named : dynamic_) {
      const bool descriptor = named.name.size() > 3 && named.name.compare(named.name.size() - 3, 3, ".kd") == 0;
      if ((named.symbol.info & 15) != kSttObject || !named.symbol.section || !named.symbol.size || descriptor) continue;
      object_->variables_[named.name] = {reinterpret_cast<uint64_t>(mapped(named.symbol.value, named.symbol.size)),
                                         named.symbol.size};
      variables.push_back(named);
    }
    std::sort(variables.begin(), variables.end(), [](const NamedSymbol& a, const NamedSymbol& b) {
      return a.symbol.value < b.symbol.value;
    });
    const std::string owner = " of " + object_->code_.name;
    for (const Segment& segment : segments_) {
      if (segment.type != kPtLoad) continue;
      const bool writable = segment.flags & kWritable;
      const std::string rest = (segment.flags & kExecutable ? "code" : writable ? "data" : "constants") + owner;
      uint64_t from = segment.vaddr;
      const uint64_t end = segment.vaddr + segment.memsz;
      for (const NamedSymbol& variable : variables) {
        const uint64_t value = variable.symbol.value, top = value + variable.symbol.size;
        if (value < from || top > end) continue;
        add(rest, from, value - from, writable);
        add(variable.name, value, variable.symbol.size, writable);
        from = top;
      }
      add(rest, from, end - from, writable);
    }
  }

  void add(const std::string& name, uint64_t vaddr, uint64_t count, bool writable) {
    if (count == 0) return;
    const uint64_t base = reinterpret_cast<uint64_t>(object_->memory_) + vaddr;
    add_allocation({name, base, count, writable});
    object_->registered_.push_back(base);
  }
};

std::unique_ptr<CodeObject> CodeObject::load(const DeviceImage& image, const std::string& name) {
  return ElfLoader(image, name).load();
}

CodeObject::~CodeObject() {
  for (uint64_t base : registered_) remove_allocation(base);
  if (memory_) munmap(memory_, memory_bytes_);
}

const Kernel* CodeObject::find_kernel(const std::string& symbol) const {
  const auto found = kernels_.find(symbol);
  return found == kernels_.end() ? nullptr : &found->second;
}

const Variable* CodeObject::find_variable(const std::string& name) const {
  const auto found = variables_.find(name);
  return found == variables_.end() ? nullptr : &found->second;
}

std::vector<uint8_t> build_kernarg(const Kernel& kernel, const void* explicit_bytes, size_t count,
                                   const uint32_t grid[3], const uint32_t block[3], uint32_t dynamic_lds) {
  // Everything before the hidden arguments, whatever the metadata lists there: it may be stale.
  size_t copied = std::min<size_t>(count, kMaxKernargBytes);
  for (const KernelArg& arg : kernel.args)
    if (arg.hidden()) copied = std::min<size_t>(copied, arg.offset);
  std::vector<uint8_t> segment(std::max<size_t>(kernel.info.kernarg_bytes, copied), 0);
  if (copied) std::memcpy(segment.data(), explicit_bytes, copied);
  const uint32_t dimensions = grid[2] > 1 || block[2] > 1 ? 3 : grid[1] > 1 || block[1] > 1 ? 2 : 1;
  for (const KernelArg& arg : kernel.args) {
    uint64_t value = 0;
    switch (arg.kind) {
      case ArgKind::hidden_block_count: value = grid[arg.dimension]; break;
      case ArgKind::hidden_group_size: value = block[arg.dimension]; break;
      case ArgKind::hidden_grid_dims: value = dimensions; break;
      case ArgKind::hidden_dynamic_lds_size: value = dynamic_lds; break;
      case ArgKind::hidden_private_base: value = kPrivateApertureHigh; break;
      case ArgKind::hidden_shared_base: value = kSharedApertureHigh; break;
      case ArgKind::hidden_hostcall: value = kHostcallAddress; break;
      case ArgKind::hidden_heap: value = kHeapAddress; break;
      default: continue;  // explicit, or a hidden argument that is zero: whole groups, no offset, no queue
    }
    std::memcpy(segment.data() + arg.offset, &value, std::min<size_t>(arg.bytes, sizeof value));
  }
  return segment;
}

std::vector<uint8_t> gather_arguments(const Kernel& kernel, void* const* pointers) {
  std::vector<uint8_t> bytes(kernel.info.kernarg_bytes, 0);
  size_t index = 0;
  for (const KernelArg& arg : kernel.args)
    if (!arg.hidden()) std::memcpy(bytes.data() + arg.offset, pointers[index++], arg.bytes);
  return bytes;
}

}  // namespace hfemu
