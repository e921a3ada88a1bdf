// Decoding of zstd frames: literals (raw, run, Huffman), sequences (FSE) and their execution.
#include "zstd.h"

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>

namespace hfemu {
namespace {

[[noreturn]] void damaged(const char* what) { throw std::runtime_error(std::string("damaged zstd data: ") + what); }

int high_bit(uint32_t value) { return 31 - __builtin_clz(value); }

struct Bytes {
  const uint8_t* at;
  const uint8_t* end;

  size_t left() const { return static_cast<size_t>(end - at); }
  const uint8_t* take(size_t count) {
    if (count > left()) damaged("it ends early");
    const uint8_t* start = at;
    at += count;
    return start;
  }
  uint64_t little_endian(int count) {
    const uint8_t* p = take(static_cast<size_t>(count));
    uint64_t value = 0;
    for (int i = 0; i < count; ++i) value |= uint64_t{p[i]} << (8 * i);
    return value;
  }
};

// Bits in writing order, for FSE table descriptions.
class ForwardBits {
 public:
  explicit ForwardBits(const Bytes& bytes) : bytes_(bytes) {}

  uint32_t peek(int count) const {
    uint32_t value = 0;
    for (int i = 0; i < count; ++i) {
      const size_t bit = position_ + static_cast<size_t>(i);
      if (bit / 8 < bytes_.left()) value |= uint32_t{(bytes_.at[bit / 8] >> (bit % 8)) & 1u} << i;
    }
    return value;
  }
  void skip(int count) { position_ += static_cast<size_t>(count); }
  uint32_t read(int count) {
    const uint32_t value = peek(count);
    skip(count);
    return value;
  }
  size_t bytes_used() const {
    if ((position_ + 7) / 8 > bytes_.left()) damaged("a table description ends early");
    return (position_ + 7) / 8;
  }

 private:
  Bytes bytes_;
  size_t position_ = 0;
};

// Bits from the end backwards, as entropy-coded streams are read; below the first bit there are zeros.
class BackwardBits {
 public:
  BackwardBits(const uint8_t* data, size_t bytes) : data_(data) {
    if (bytes == 0 || data[bytes - 1] == 0) damaged("a bit stream without its end mark");
    position_ = static_cast<int64_t>(bytes - 1) * 8 + high_bit(data[bytes - 1]);
    bytes_ = bytes;
  }
  uint64_t peek(int count) const {
    if (count == 0) return 0;
    const int64_t low = position_ - count;
    if (low >= 0 && static_cast<size_t>(low / 8) + 8 <= bytes_ && count <= 56) {
      uint64_t window;
      std::memcpy(&window, data_ + low / 8, 8);
      return window >> (low % 8) & ((uint64_t{1} << count) - 1);
    }
    uint64_t value = 0;
    for (int i = 0; i < count; ++i) {
      const int64_t bit = low + i;
      if (bit >= 0) value |= uint64_t{(data_[bit / 8] >> (bit % 8)) & 1u} << i;
    }
    return value;
  }
  void skip(int count) { position_ -= count; }
  uint64_t read(int count) {
    const uint64_t value = peek(count);
    skip(count);
    return value;
  }
  bool at_start() const { return position_ == 0; }
  bool past_start() const { return position_ < 0; }

 private:
  const uint8_t* data_;
  size_t bytes_ = 0;
  int64_t position_ = 0;
};

// --- FSE ---

struct FseTable {
  struct Entry {
    uint16_t base;
    uint8_t symbol, bits;
  };
  int accuracy = -1;  // -1: not defined yet
  std::vector<Entry> entries;

  static FseTable run(uint8_t symbol) {
    FseTable table;
    table.accuracy = 0;
    table.entries = {{0, symbol, 0}};
    return table;
  }

  static FseTable build(const int16_t* frequencies, size_t symbols, int accuracy) {
    FseTable table;
    table.accuracy = accuracy;
    const uint32_t size = uint32_t{1} << accuracy;
    table.entries.resize(size);
    std::array<uint16_t, 256> next{};
    uint32_t high = size;
    for (size_t s = 0; s < symbols; ++s)
      if (frequencies[s] == -1) {
        table.entries[--high].symbol = static_cast<uint8_t>(s);
        next[s] = 1;
      }
    const uint32_t step = (size >> 1) + (size >> 3) + 3, mask = size - 1;
    uint32_t position = 0;
    for (size_t s = 0; s < symbols; ++s) {
      if (frequencies[s] <= 0) continue;
      next[s] = static_cast<uint16_t>(frequencies[s]);
      for (int i = 0; i < frequencies[s]; ++i) {
        table.entries[position].symbol = static_cast<uint8_t>(s);
        do position = (position + step) & mask;
        while (position >= high);
      }
    }
    if (position != 0) damaged("an FSE distribution that does not fill its table");
    for (Entry& entry : table.entries) {
      const uint32_t state = next[entry.symbol]++;
      entry.bits = static_cast<uint8_t>(accuracy - high_bit(state));
      entry.base = static_cast<uint16_t>((state << entry.bits) - size);
    }
    return table;
  }

  static FseTable read(Bytes* bytes, int max_accuracy, size_t max_symbols) {
    ForwardBits bits(*bytes);
    const int accuracy = static_cast<int>(bits.read(4)) + 5;
    if (accuracy > max_accuracy) damaged("an FSE table that is too large");
    int32_t remaining = 1 << accuracy;
    std::array<int16_t, 256> frequencies{};
    size_t symbol = 0;
    while (remaining > 0) {
      if (symbol >= max_symbols) damaged("an FSE table with too many symbols");
      const int width = high_bit(static_cast<uint32_t>(remaining + 1)) + 1;
      uint32_t value = bits.peek(width);
      const uint32_t low_mask = (1u << (width - 1)) - 1;
      const uint32_t threshold = (1u << width) - 1 - static_cast<uint32_t>(remaining + 1);
      if ((value & low_mask) < threshold) {
        value &= low_mask;
        bits.skip(width - 1);
      } else {
        if (value > low_mask) value -= threshold;
        bits.skip(width);
      }
      const int32_t frequency = static_cast<int32_t>(value) - 1;
      remaining -= frequency < 0 ? -frequency : frequency;
      frequencies[symbol++] = static_cast<int16_t>(frequency);
      if (frequency != 0) continue;
      for (uint32_t repeat = 3; repeat == 3;) {
        repeat = bits.read(2);
        symbol += repeat;
        if (symbol > max_symbols) damaged("an FSE table with too many symbols");
      }
    }
    if (remaining != 0) damaged("an FSE distribution that does not add up");
    bytes->take(bits.bytes_used());
    return build(frequencies.data(), symbol, accuracy);
  }
};

struct FseState {
  const FseTable* table;
  uint32_t state;

  FseState(const FseTable& from, BackwardBits* bits)
      : table(&from), state(static_cast<uint32_t>(bits->read(from.accuracy))) {}
  uint8_t symbol() const { return table->entries[state].symbol; }
  void advance(BackwardBits* bits) {
    const FseTable::Entry& entry = table->entries[state];
    state = entry.base + static_cast<uint32_t>(bits->read(entry.bits));
  }
};

// --- Huffman ---

struct HuffmanTable {
  struct Entry {
    uint8_t symbol, bits;
  };
  int max_bits = 0;  // 0: not defined yet
  std::vector<Entry> entries;

  static HuffmanTable read(Bytes* bytes) {
    std::array<uint8_t, 256> weights{};
    size_t count = 0;
    const uint32_t header = static_cast<uint32_t>(bytes->little_endian(1));
    if (header >= 128) {
      count = header - 127;
      const uint8_t* packed = bytes->take((count + 1) / 2);
      for (size_t i = 0; i < count; ++i) weights[i] = i % 2 ? packed[i / 2] & 15 : packed[i / 2] >> 4;
    } else {
      count = read_compressed_weights(bytes->take(header), header, &weights);
    }
    return build(&weights, count);
  }

  void decode(const uint8_t* data, size_t bytes, uint8_t* out, size_t count) const {
    BackwardBits bits(data, bytes);
    for (size_t i = 0; i < count; ++i) {
      const Entry& entry = entries[bits.peek(max_bits)];
      out[i] = entry.symbol;
      bits.skip(entry.bits);
    }
    if (!bits.at_start()) damaged("a Huffman stream of the wrong length");
  }

 private:
  static size_t read_compressed_weights(const uint8_t* data, size_t size, std::array<uint8_t, 256>* weights) {
    Bytes bytes{data, data + size};
    const FseTable table = FseTable::read(&bytes, 6, 256);
    BackwardBits bits(bytes.at, bytes.left());
    FseState states[2] = {{table, &bits}, {table, &bits}};
    size_t count = 0;
    for (int turn = 0;; turn ^= 1) {
      if (count + 2 > 255) damaged("too many Huffman weights");
      (*weights)[count++] = states[turn].symbol();
      states[turn].advance(&bits);
      if (bits.past_start()) {
        (*weights)[count++] = states[turn ^ 1].symbol();
        return count;
      }
    }
  }

  static HuffmanTable build(std::array<uint8_t, 256>* weights, size_t count) {
    uint32_t total = 0;
    for (size_t i = 0; i < count; ++i) {
      if ((*weights)[i] > 12) damaged("a Huffman weight above 12");
      if ((*weights)[i]) total += 1u << ((*weights)[i] - 1);
    }
    if (total == 0) damaged("a Huffman table without symbols");
    HuffmanTable table;
    table.max_bits = high_bit(total) + 1;
    const uint32_t size = 1u << table.max_bits, missing = size - total;
    if (table.max_bits > 12 || (missing & (missing - 1))) damaged("Huffman weights that do not add up");
    (*weights)[count++] = static_cast<uint8_t>(high_bit(missing) + 1);
    table.entries.reserve(size);
    for (int weight = 1; weight <= table.max_bits; ++weight)
      for (size_t s = 0; s < count; ++s)
        if ((*weights)[s] == weight)
          table.entries.insert(table.entries.end(), size_t{1} << (weight - 1),
                               {static_cast<uint8_t>(s), static_cast<uint8_t>(table.max_bits + 1 - weight)});
    return table;
  }
};

// --- sequences: code -> base value and extra bits ---

struct CodeRange {
  uint32_t base;
  uint8_t bits;
};

constexpr CodeRange kLiteralLengths[] = {
    {0, 0},    {1, 0},    {2, 0},    {3, 0},     {4, 0},     {5, 0},     {6, 0},     {7, 0},      {8, 0},
    {9, 0},    {10, 0},   {11, 0},   {12, 0},    {13, 0},    {14, 0},    {15, 0},    {16, 1},     {18, 1},
    {20, 1},   {22, 1},   {24, 2},   {28, 2},    {32, 3},    {40, 3},    {48, 4},    {64, 6},     {128, 7},
    {256, 8},  {512, 9},  {1024, 10}, {2048, 11}, {4096, 12}, {8192, 13}, {16384, 14}, {32768, 15}, {65536, 16}};

constexpr CodeRange kMatchLengths[] = {
    {3, 0},    {4, 0},    {5, 0},    {6, 0},     {7, 0},     {8, 0},     {9, 0},      {10, 0},     {11, 0},
    {12, 0},   {13, 0},   {14, 0},   {15, 0},    {16, 0},    {17, 0},    {18, 0},     {19, 0},     {20, 0},
    {21, 0},   {22, 0},   {23, 0},   {24, 0},    {25, 0},    {26, 0},    {27, 0},     {28, 0},     {29, 0},
    {30, 0},   {31, 0},   {32, 0},   {33, 0},    {34, 0},    {35, 1},    {37, 1},     {39, 1},     {41, 1},
    {43, 2},   {47, 2},   {51, 3},   {59, 3},    {67, 4},    {83, 4},    {99, 5},     {131, 7},    {259, 8},
    {515, 9},  {1027, 10}, {2051, 11}, {4099, 12}, {8195, 13}, {16387, 14}, {32771, 15}, {65539, 16}};

constexpr int16_t kDefaultLiteralLengths[] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1,  2,  2,
                                              2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
constexpr int16_t kDefaultOffsets[] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1,  1,  1,  1,  1, 1,
                                       1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};
constexpr int16_t kDefaultMatchLengths[] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1,  1,  1,  1,  1,
                                            1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,
                                            1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};

template <size_t N>
constexpr size_t length(const CodeRange (&)[N]) {
  return N;
}
template <size_t N>
FseTable default_table(const int16_t (&frequencies)[N], int accuracy) {
  return FseTable::build(frequencies, N, accuracy);
}

class FrameDecoder {
 public:
  FrameDecoder(std::vector<uint8_t>* out, size_t max_bytes)
      : out_(*out), frame_start_(out->size()), max_bytes_(max_bytes) {}

  void frame(Bytes* bytes) {
    const uint32_t descriptor = static_cast<uint32_t>(bytes->little_endian(1));
    const bool single_segment = descriptor & 0x20;
    static constexpr int kDictionaryBytes[] = {0, 1, 2, 4}, kSizeBytes[] = {0, 2, 4, 8};
    if (!single_segment) bytes->take(1);  // the window size: all output is kept, so any window will do
    if (bytes->little_endian(kDictionaryBytes[descriptor & 3]) != 0) damaged("it asks for a dictionary");
    const int size_flag = static_cast<int>(descriptor >> 6);
    bytes->take(size_flag == 0 && single_segment ? 1 : static_cast<size_t>(kSizeBytes[size_flag]));
    for (bool last = false; !last;) {
      const uint32_t header = static_cast<uint32_t>(bytes->little_endian(3));
      last = header & 1;
      block((header >> 1) & 3, header >> 3, bytes);
    }
    if (descriptor & 4) bytes->take(4);  // checksum; the container carries its own hash
  }

 private:
  std::vector<uint8_t>& out_;
  size_t frame_start_;
  size_t max_bytes_;
  HuffmanTable huffman_;
  FseTable literal_lengths_, offsets_, match_lengths_;
  uint32_t recent_[3] = {1, 4, 8};
  std::vector<uint8_t> literals_;

  void reserve(size_t more) {
    if (more > max_bytes_ - out_.size()) damaged("it holds more than its container says");
  }

  void block(uint32_t type, uint32_t size, Bytes* bytes) {
    if (type == 0) {
      reserve(size);
      const uint8_t* raw = bytes->take(size);
      out_.insert(out_.end(), raw, raw + size);
    } else if (type == 1) {
      reserve(size);
      out_.insert(out_.end(), size, *bytes->take(1));
    } else if (type == 2) {
      const uint8_t* start = bytes->take(size);
      Bytes body{start, start + size};
      read_literals(&body);
      read_sequences(&body);
    } else {
      damaged("a reserved block type");
    }
  }

  void read_literals(Bytes* bytes) {
    if (bytes->left() == 0) damaged("an empty compressed block");
    const uint32_t first = *bytes->at, type = first & 3, format = (first >> 2) & 3;
    if (type < 2) {
      static constexpr int kHeaderBytes[] = {1, 2, 1, 3}, kShift[] = {3, 4, 3, 4};
      const size_t count = bytes->little_endian(kHeaderBytes[format]) >> kShift[format];
      reserve(count);
      if (type == 0) {
        const uint8_t* raw = bytes->take(count);
        literals_.assign(raw, raw + count);
      } else {
        literals_.assign(count, *bytes->take(1));
      }
      return;
    }
    static constexpr int kHeaderBytes[] = {3, 3, 4, 5}, kSizeBits[] = {10, 10, 14, 18};
    const uint64_t header = bytes->little_endian(kHeaderBytes[format]) >> 4;
    const uint64_t mask = (uint64_t{1} << kSizeBits[format]) - 1;
    const size_t count = header & mask, packed = (header >> kSizeBits[format]) & mask;
    reserve(count);
    const uint8_t* start = bytes->take(packed);
    Bytes body{start, start + packed};
    if (type == 2) huffman_ = HuffmanTable::read(&body);
    if (huffman_.max_bits == 0) damaged("literals that reuse a Huffman table that was never sent");
    literals_.resize(count);
    if (format == 0) {
      huffman_.decode(body.at, body.left(), literals_.data(), count);
      return;
    }
    size_t sizes[4];
    for (int i = 0; i < 3; ++i) sizes[i] = body.little_endian(2);
    const size_t each = (count + 3) / 4;
    if (3 * each > count) damaged("four Huffman streams for too few literals");
    for (size_t i = 0; i < 4; ++i) {
      const size_t size = i < 3 ? sizes[i] : body.left();
      huffman_.decode(body.take(size), size, literals_.data() + i * each, i < 3 ? each : count - 3 * each);
    }
  }

  static void update_table(FseTable* table, uint32_t mode, Bytes* bytes, int max_accuracy, size_t symbols,
                           const FseTable& standard) {
    if (mode == 0) *table = standard;
    if (mode == 1) {
      const uint8_t symbol = *bytes->take(1);
      if (symbol >= symbols) damaged("a sequence code out of range");
      *table = FseTable::run(symbol);
    }
    if (mode == 2) *table = FseTable::read(bytes, max_accuracy, symbols);
    if (table->accuracy < 0) damaged("sequences that reuse a table that was never sent");
  }

  void read_sequences(Bytes* bytes) {
    uint32_t count = static_cast<uint32_t>(bytes->little_endian(1));
    if (count == 255) {
      count = static_cast<uint32_t>(bytes->little_endian(2)) + 0x7f00;
    } else if (count >= 128) {
      count = ((count - 128) << 8) + static_cast<uint32_t>(bytes->little_endian(1));
    }
    size_t literal = 0;
    if (count > 0) {
      static const FseTable standard_literals = default_table(kDefaultLiteralLengths, 6);
      static const FseTable standard_offsets = default_table(kDefaultOffsets, 5);
      static const FseTable standard_matches = default_table(kDefaultMatchLengths, 6);
      const uint32_t modes = static_cast<uint32_t>(bytes->little_endian(1));
      update_table(&literal_lengths_, modes >> 6, bytes, 9, length(kLiteralLengths), standard_literals);
      update_table(&offsets_, (modes >> 4) & 3, bytes, 8, 32, standard_offsets);
      update_table(&match_lengths_, (modes >> 2) & 3, bytes, 9, length(kMatchLengths), standard_matches);
      BackwardBits bits(bytes->at, bytes->left());
      FseState literals(literal_lengths_, &bits), offsets(offsets_, &bits), matches(match_lengths_, &bits);
      for (uint32_t i = 0; i < count; ++i) {
        const uint8_t code = offsets.symbol();
        const uint32_t offset_value = (uint32_t{1} << code) + static_cast<uint32_t>(bits.read(code));
        const CodeRange match_range = kMatchLengths[matches.symbol()];
        const uint32_t match = match_range.base + static_cast<uint32_t>(bits.read(match_range.bits));
        const CodeRange literal_range = kLiteralLengths[literals.symbol()];
        const uint32_t run = literal_range.base + static_cast<uint32_t>(bits.read(literal_range.bits));
        copy_literals(&literal, run);
        copy_match(offset_of(offset_value, run), match);
        if (i + 1 == count) break;
        literals.advance(&bits);
        matches.advance(&bits);
        offsets.advance(&bits);
      }
      if (!bits.at_start()) damaged("a sequence stream of the wrong length");
    }
    copy_literals(&literal, literals_.size() - literal);
  }

  uint32_t offset_of(uint32_t value, uint32_t literal_run) {
    if (value > 3) {
      recent_[2] = recent_[1], recent_[1] = recent_[0], recent_[0] = value - 3;
      return recent_[0];
    }
    const uint32_t index = value - (literal_run != 0);
    const uint32_t offset = index == 3 ? recent_[0] - 1 : recent_[index];
    if (index >= 2) recent_[2] = recent_[1];
    if (index >= 1) recent_[1] = recent_[0];
    return recent_[0] = offset;
  }

  void copy_literals(size_t* from, size_t count) {
    if (count > literals_.size() - *from) damaged("sequences that use more literals than there are");
    reserve(count);
    out_.insert(out_.end(), literals_.begin() + static_cast<ptrdiff_t>(*from),
                literals_.begin() + static_cast<ptrdiff_t>(*from + count));
    *from += count;
  }

  void copy_match(uint32_t offset, uint32_t count) {
    if (offset == 0 || offset > out_.size() - frame_start_) damaged("a match before the frame's start");
    reserve(count);
    size_t from = out_.size() - offset;
    for (uint32_t i = 0; i < count; ++i) out_.push_back(out_[from++]);
  }
};

}  // namespace

std::vector<uint8_t> zstd_decompress(const uint8_t* data, size_t bytes, size_t max_bytes) {
  constexpr uint32_t kFrameMagic = 0xFD2FB528, kSkippableMagic = 0x184D2A50;
  std::vector<uint8_t> out;
  Bytes input{data, data + bytes};
  while (input.left() > 0) {
    const uint32_t magic = static_cast<uint32_t>(input.little_endian(4));
    if (magic == kFrameMagic) {
      FrameDecoder(&out, max_bytes).frame(&input);
    } else if ((magic & 0xFFFFFFF0u) == kSkippableMagic) {
      input.take(input.little_endian(4));
    } else {
      damaged("a frame without the zstd magic");
    }
  }
  return out;
}

}  // namespace hfemu
