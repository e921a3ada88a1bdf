"""A zstd decoder in plain Python (RFC 8878), for compressed offload bundles where Python itself has none.

Frames without dictionaries; checksums are not verified, since a bundle carries its own hash. About a megabyte per
second, which is enough for the code objects of a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

FRAME_MAGIC = 0xFD2FB528
SKIPPABLE_MAGIC = 0x184D2A50

# code -> (base value, extra bits)
_LITERAL_LENGTHS = tuple(
    [(i, 0) for i in range(16)]
    + [(16, 1), (18, 1), (20, 1), (22, 1), (24, 2), (28, 2), (32, 3), (40, 3), (48, 4)]
    + [(64, 6)]
    + [(1 << bits, bits) for bits in range(7, 17)]
)
_MATCH_LENGTHS = tuple(
    [(i + 3, 0) for i in range(32)]
    + [(35, 1), (37, 1), (39, 1), (41, 1), (43, 2), (47, 2), (51, 3), (59, 3), (67, 4), (83, 4), (99, 5)]
    + [((1 << bits) + 3, bits) for bits in range(7, 17)]
)
# The distributions that both sides know: (accuracy, frequencies).
_DEFAULT_LITERALS = (6, (4, 3, *[2] * 11, 1, 1, 1, *[2] * 9, 3, 2, *[1] * 5, *[-1] * 4))
_DEFAULT_MATCHES = (6, (1, 4, 3, *[2] * 6, *[1] * 37, *[-1] * 7))
_DEFAULT_OFFSETS = (5, (*[1] * 6, 2, 2, 2, *[1] * 15, *[-1] * 5))


class ZstdError(ValueError):
    """The data is damaged; the message says what does not fit."""


class _Bytes:
    """Bytes taken from the front."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def __len__(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int) -> bytes:
        if count > len(self):
            raise ZstdError("it ends early")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")


class _BackwardBits:
    """Bits from the end mark of a stream backwards; below the first bit there are zeros."""

    def __init__(self, data: bytes) -> None:
        if not data or not data[-1]:
            raise ZstdError("a bit stream without its end mark")
        self._data = data
        self.left = 8 * (len(data) - 1) + data[-1].bit_length() - 1

    def peek(self, count: int) -> int:
        low = self.left - count
        if low < 0:
            return self._window(0, max(self.left, 0)) << -low if self.left > 0 else 0
        return self._window(low, self.left)

    def _window(self, low: int, high: int) -> int:
        word = int.from_bytes(self._data[low >> 3 : (high + 7) >> 3], "little")
        return (word >> (low & 7)) & ((1 << (high - low)) - 1)

    def read(self, count: int) -> int:
        value = self.peek(count)
        self.left -= count
        return value


@dataclass(frozen=True)
class _Fse:
    """An FSE decoding table: per state its symbol, the bits to read, and the base of the next state."""

    accuracy: int
    entries: tuple[tuple[int, int, int], ...]


def _build_fse(accuracy: int, frequencies: Sequence[int]) -> _Fse:
    size = 1 << accuracy
    symbols, following, high = [0] * size, list(frequencies), size
    for symbol, frequency in enumerate(frequencies):
        if frequency == -1:
            high -= 1
            symbols[high], following[symbol] = symbol, 1
    position, step = 0, (size >> 1) + (size >> 3) + 3
    for symbol, frequency in enumerate(frequencies):
        for _ in range(max(frequency, 0)):
            symbols[position] = symbol
            position = (position + step) % size
            while position >= high:
                position = (position + step) % size
    if position:
        raise ZstdError("an FSE distribution that does not fill its table")
    entries = []
    for symbol in symbols:
        state = following[symbol]
        following[symbol] += 1
        bits = accuracy - (state.bit_length() - 1)
        entries.append((symbol, bits, (state << bits) - size))
    return _Fse(accuracy, tuple(entries))


@lru_cache(maxsize=3)
def _standard(distribution: tuple[int, tuple[int, ...]]) -> _Fse:
    return _build_fse(*distribution)


def _read_fse(source: _Bytes, max_accuracy: int, max_symbols: int) -> _Fse:
    word = int.from_bytes(source.data[source.at :], "little")
    accuracy, used = (word & 15) + 5, 4
    if accuracy > max_accuracy:
        raise ZstdError("an FSE table that is too large")
    remaining, frequencies = 1 << accuracy, list[int]()
    while remaining > 0:
        if len(frequencies) >= max_symbols:
            raise ZstdError("an FSE table with too many symbols")
        width = (remaining + 1).bit_length()
        value = (word >> used) & ((1 << width) - 1)
        low_mask, threshold = (1 << (width - 1)) - 1, (1 << width) - 2 - remaining
        if value & low_mask < threshold:
            value &= low_mask
            used += width - 1
        else:
            value -= threshold if value > low_mask else 0
            used += width
        frequencies.append(value - 1)
        remaining -= abs(value - 1)
        if value == 1:
            repeat = 3
            while repeat == 3:
                repeat = (word >> used) & 3
                used += 2
                frequencies += [0] * repeat
                if len(frequencies) > max_symbols:
                    raise ZstdError("an FSE table with too many symbols")
    if remaining:
        raise ZstdError("an FSE distribution that does not add up")
    source.take((used + 7) // 8)
    return _build_fse(accuracy, frequencies)


class _State:
    """One FSE state walking over a backward bit stream."""

    def __init__(self, table: _Fse, bits: _BackwardBits) -> None:
        self._entries, self._bits = table.entries, bits
        self._state = bits.read(table.accuracy)

    @property
    def symbol(self) -> int:
        return self._entries[self._state][0]

    def advance(self) -> None:
        _symbol, bits, base = self._entries[self._state]
        self._state = base + self._bits.read(bits)


@dataclass(frozen=True)
class _Huffman:
    """A Huffman table indexed by the next ``max_bits`` bits: (symbol, length)."""

    max_bits: int
    entries: tuple[tuple[int, int], ...]

    def decode(self, stream: bytes, count: int) -> bytes:
        bits, out = _BackwardBits(stream), bytearray()
        for _ in range(count):
            symbol, length = self.entries[bits.peek(self.max_bits)]
            out.append(symbol)
            bits.left -= length
        if bits.left != 0:
            raise ZstdError("a Huffman stream of the wrong length")
        return bytes(out)


def _read_huffman(source: _Bytes) -> _Huffman:
    header = source.number(1)
    if header >= 128:
        count = header - 127
        weights = [part for byte in source.take((count + 1) // 2) for part in (byte >> 4, byte & 15)][:count]
    else:
        weights = _compressed_weights(source.take(header))
    if max(weights, default=0) > 12:
        raise ZstdError("a Huffman weight above 12")
    total = sum(1 << (weight - 1) for weight in weights if weight)
    if not total:
        raise ZstdError("a Huffman table without symbols")
    max_bits = total.bit_length()
    missing = (1 << max_bits) - total
    if max_bits > 12 or missing & (missing - 1):
        raise ZstdError("Huffman weights that do not add up")
    weights.append(missing.bit_length())
    entries: list[tuple[int, int]] = []
    for weight in range(1, max_bits + 1):
        for symbol, own in enumerate(weights):
            if own == weight:
                entries += [(symbol, max_bits + 1 - weight)] * (1 << (weight - 1))
    return _Huffman(max_bits, tuple(entries))


def _compressed_weights(data: bytes) -> list[int]:
    source = _Bytes(data)
    table = _read_fse(source, 6, 256)
    bits = _BackwardBits(source.take(len(source)))
    states = [_State(table, bits), _State(table, bits)]
    weights: list[int] = []
    while len(weights) < 254:
        current, other = states[len(weights) % 2], states[1 - len(weights) % 2]
        weights.append(current.symbol)
        current.advance()
        if bits.left < 0:
            return [*weights, other.symbol]
    raise ZstdError("too many Huffman weights")


class _Frame:
    """Decodes the blocks of one frame; tables and recent offsets carry over from block to block."""

    def __init__(self, limit: int) -> None:
        self.out = bytearray()
        self._limit = limit
        self._huffman: _Huffman | None = None
        self._tables: list[_Fse | None] = [None, None, None]
        self._recent = [1, 4, 8]

    def read(self, source: _Bytes) -> None:
        descriptor = source.number(1)
        single_segment = bool(descriptor & 0x20)
        if not single_segment:
            source.take(1)  # the window size: all output is kept, so any window will do
        if source.number((0, 1, 2, 4)[descriptor & 3]):
            raise ZstdError("it asks for a dictionary")
        size_flag = descriptor >> 6
        source.take(1 if size_flag == 0 and single_segment else (0, 2, 4, 8)[size_flag])
        last = False
        while not last:
            header = source.number(3)
            last = bool(header & 1)
            self._block(header >> 1 & 3, header >> 3, source)
            if len(self.out) > self._limit:
                raise ZstdError("it holds more than its container says")
        if descriptor & 4:
            source.take(4)

    def _block(self, kind: int, size: int, source: _Bytes) -> None:
        if kind == 0:
            self.out += source.take(size)
        elif kind == 1:
            self.out += source.take(1) * min(size, self._limit + 1)
        elif kind == 2:
            body = _Bytes(source.take(size))
            self._sequences(body, self._literals(body))
        else:
            raise ZstdError("a reserved block type")

    def _literals(self, body: _Bytes) -> bytes:
        if not len(body):
            raise ZstdError("an empty compressed block")
        kind, form = body.data[body.at] & 3, body.data[body.at] >> 2 & 3
        if kind < 2:
            size, shift = ((1, 3), (2, 4), (1, 3), (3, 4))[form]
            count = body.number(size) >> shift
            return body.take(count) if kind == 0 else body.take(1) * count
        size, bits = ((3, 10), (3, 10), (4, 14), (5, 18))[form]
        header = body.number(size) >> 4
        count, packed = header & ((1 << bits) - 1), header >> bits
        streams = _Bytes(body.take(packed))
        if kind == 2:
            self._huffman = _read_huffman(streams)
        if self._huffman is None:
            raise ZstdError("literals that reuse a Huffman table that was never sent")
        if form == 0:
            return self._huffman.decode(streams.take(len(streams)), count)
        sizes, each = [streams.number(2) for _ in range(3)], (count + 3) // 4
        if 3 * each > count:
            raise ZstdError("four Huffman streams for too few literals")
        parts = [self._huffman.decode(streams.take(one), each) for one in sizes]
        return b"".join([*parts, self._huffman.decode(streams.take(len(streams)), count - 3 * each)])

    def _table(self, which: int, mode: int, body: _Bytes) -> _Fse:
        accuracy, symbols, standard = (
            (9, len(_LITERAL_LENGTHS), _DEFAULT_LITERALS),
            (8, 32, _DEFAULT_OFFSETS),
            (9, len(_MATCH_LENGTHS), _DEFAULT_MATCHES),
        )[which]
        if mode == 0:
            self._tables[which] = _standard(standard)
        elif mode == 1:
            symbol = body.number(1)
            if symbol >= symbols:
                raise ZstdError("a sequence code out of range")
            self._tables[which] = _Fse(0, ((symbol, 0, 0),))
        elif mode == 2:
            self._tables[which] = _read_fse(body, accuracy, symbols)
        table = self._tables[which]
        if table is None:
            raise ZstdError("sequences that reuse a table that was never sent")
        return table

    def _sequences(self, body: _Bytes, literals: bytes) -> None:
        count = body.number(1)
        if count == 255:
            count = body.number(2) + 0x7F00
        elif count >= 128:
            count = ((count - 128) << 8) + body.number(1)
        at = 0
        if count:
            modes = body.number(1)
            tables = [self._table(which, modes >> shift & 3, body) for which, shift in enumerate((6, 4, 2))]
            bits = _BackwardBits(body.take(len(body)))
            runs, offsets, matches = (_State(table, bits) for table in tables)
            for index in range(count):
                code = offsets.symbol
                value = (1 << code) + bits.read(code)
                base, extra = _MATCH_LENGTHS[matches.symbol]
                match = base + bits.read(extra)
                base, extra = _LITERAL_LENGTHS[runs.symbol]
                run = base + bits.read(extra)
                if run > len(literals) - at:
                    raise ZstdError("sequences that use more literals than there are")
                self.out += literals[at : at + run]
                at += run
                self._copy(self._offset(value, run), match)
                if index + 1 < count:
                    runs.advance()
                    matches.advance()
                    offsets.advance()
            if bits.left != 0:
                raise ZstdError("a sequence stream of the wrong length")
        self.out += literals[at:]

    def _offset(self, value: int, run: int) -> int:
        first, second, third = self._recent
        if value > 3:
            self._recent = [value - 3, first, second]
        else:
            index = value - (1 if run else 0)
            if index == 1:
                self._recent = [second, first, third]
            elif index == 2:
                self._recent = [third, first, second]
            elif index == 3:
                self._recent = [first - 1, first, second]
        return self._recent[0]

    def _copy(self, offset: int, count: int) -> None:
        start = len(self.out) - offset
        if offset <= 0 or start < 0:
            raise ZstdError("a match before the frame's start")
        if offset >= count:
            self.out += self.out[start : start + count]
        else:
            piece = bytes(self.out[start:])
            self.out += (piece * (count // offset + 1))[:count]


def decompress(data: bytes, limit: int) -> bytes:
    """Return the contents of every frame in ``data``.

    Args:
        data: whole zstd frames, one after another.
        limit: the most bytes that may come out.

    Raises:
        ZstdError: the data is damaged, or holds more than ``limit`` bytes.
    """
    source, out = _Bytes(data), bytearray()
    while len(source):
        magic = source.number(4)
        if magic == FRAME_MAGIC:
            frame = _Frame(limit - len(out))
            frame.read(source)
            out += frame.out
        elif magic & 0xFFFFFFF0 == SKIPPABLE_MAGIC:
            source.take(source.number(4))
        else:
            raise ZstdError("a frame without the zstd magic")
    return bytes(out)
