"""What does a compiled module hold: which architectures, which kernels, with which resources?

Reads, without any LLVM tool, every container of AMD device code::

    module.so / host .o  ── section .hip_fatbin ──┐
    offload bundle  "__CLANG_OFFLOAD_BUNDLE__"  ──┼──► ELF code object (EM_AMDGPU) ──► AMDGPU note (msgpack)
    compressed      "CCOB" (zlib or zstd)       ──┘                                     kernel descriptors

A fat section may hold several bundles one after another (one per translation unit); all of them are read. Relocatable
device objects (``-fgpu-rdc``) are refused by name: they hold no kernels yet.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hipforge.archs import ARCHS, ArchInfo
from hipforge.errors import HipforgeError
from hipforge.jit.demangle import base_name, short_name

ELF_MAGIC = b"\x7fELF"
_MOST_BUNDLE_BYTES = 1 << 32
_MOST_EXPANSION = 4096  # kernels compress 3- to 30-fold; zlib cannot expand more than 1032-fold
BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED_MAGIC = b"CCOB"
EM_AMDGPU = 224
FATBIN_SECTION = b".hip_fatbin"
NT_AMDGPU_METADATA = 32
SHT_SYMTAB = 2
SHT_NOBITS = 8
SHT_NOTE = 7
SHT_DYNSYM = 11
SHF_EXECINSTR = 4
STT_NOTYPE = 0
STT_FUNC = 2
ET_REL = 1
DESCRIPTOR_BYTES = 64

# e_flags & 0xff of the processors this package emulates or builds for; others keep their number as a name.
ARCH_OF_FLAGS: Mapping[int, str] = MappingProxyType(
    {0x2F: "gfx906", 0x30: "gfx908", 0x3F: "gfx90a", 0x4C: "gfx942", 0x4F: "gfx950"}
)

# One SIMD's register file: 512 unified VGPRs per lane (arch + accumulation), handed out in granules of 8; 800 SGPRs,
# of which LLVM's table for GFX9 lets 100 per wave still reach 8 waves.
VGPR_FILE = 512
VGPR_GRANULE = 8
MAX_WAVES_PER_SIMD = 8
SGPRS_FOR_EIGHT_WAVES = 100


class CodeObjectError(HipforgeError, ValueError):
    """The bytes are no readable device code; the message says what was found instead."""


@dataclass(frozen=True)
class KernelArg:
    """One kernel argument: ``offset`` and ``size`` in bytes within the kernarg segment; ``kind`` is its value_kind."""

    offset: int
    size: int
    kind: str
    name: str = ""

    @property
    def hidden(self) -> bool:
        """True for arguments that the runtime fills in (block counts, group sizes, ...)."""
        return self.kind.startswith("hidden_")


@dataclass(frozen=True)
class KernelResources:
    """What one kernel needs of the hardware, from the code object's own metadata and kernel descriptor.

    ``vgpr`` is the unified count per lane (architected plus accumulation, of which ``agpr`` are the latter);
    ``vgpr_allocated`` is that count as the descriptor grants it, a multiple of 8. Spills count registers. Bytes:
    ``lds_bytes`` per work-group (static), ``scratch_bytes`` per lane, ``kernarg_bytes`` with hidden arguments.
    ``language`` is what the compiler wrote there: ``OpenCL C`` for HIP, nothing for Triton.
    """

    name: str
    vgpr: int
    agpr: int
    sgpr: int
    vgpr_spills: int
    sgpr_spills: int
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    max_workgroup_size: int
    args: tuple[KernelArg, ...]
    vgpr_allocated: int
    wavefront_size: int = 64
    language: str = ""
    device: ArchInfo = field(default=ARCHS["gfx950"], repr=False)

    @property
    def short_name(self) -> str:
        """The readable name: ``axpy<float, 2>`` for ``_Z4axpyIfLi2EEvPT_...``."""
        return short_name(self.name)

    @property
    def occupancy(self) -> int:
        """Waves per SIMD that the registers allow: ``min(8, 512 // roundup(vgpr, 8))``, 7 above 100 SGPRs."""
        granted = max(self.vgpr_allocated, VGPR_GRANULE)
        by_vgpr = VGPR_FILE // granted
        by_sgpr = MAX_WAVES_PER_SIMD if self.sgpr <= SGPRS_FOR_EIGHT_WAVES else MAX_WAVES_PER_SIMD - 1
        return min(MAX_WAVES_PER_SIMD, by_vgpr, by_sgpr)

    def waves_per_simd(self, threads: int, dynamic_lds: int = 0) -> int:
        """Return waves per SIMD for work-groups of ``threads`` work items, LDS counted too.

        Only whole work-groups fit: ``groups = min(register waves, LDS)`` per CU of four SIMDs, and the answer
        is the average ``groups * waves // 4``, at least 0 (0: the work-group cannot run at all).
        """
        waves = -(-threads // self.wavefront_size)
        groups = self.occupancy * self.device.simds_per_cu // waves
        lds = self.lds_bytes + dynamic_lds
        if lds:
            granule = self.device.lds_granule_bytes
            groups = min(groups, self.device.lds_bytes // (-(-lds // granule) * granule))
        resident = groups * waves
        return max(1, resident // self.device.simds_per_cu) if resident else 0


@dataclass(frozen=True, eq=False)
class CodeObject:
    """One device ELF: its architecture, its kernels by symbol, and its bytes.

    ``target`` is the bundle entry's id (``hipv4-amdgcn-amd-amdhsa--gfx950``), empty for a bare ELF; ``arch`` comes
    from the ELF's own e_flags.
    """

    arch: str
    target: str
    kernels: Mapping[str, KernelResources]
    image: bytes = field(repr=False)

    @cached_property
    def _by_base_name(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for symbol in self.kernels:
            for spoken in {base_name(symbol), short_name(symbol)}:
                names.setdefault(spoken, []).append(symbol)
        return names

    def find(self, name: str) -> KernelResources:
        """Return the kernel with the symbol ``name``, or with that plain or short name if only one has it.

        Raises:
            KeyError: no kernel has that name, or several have; the message lists the candidates.
        """
        if name in self.kernels:
            return self.kernels[name]
        matches = self._by_base_name.get(name, [])
        if len(matches) == 1:
            return self.kernels[matches[0]]
        if matches:
            listing = "\n  ".join(f"{symbol}  ({short_name(symbol)})" for symbol in matches)
            raise KeyError(f"{name!r} names {len(matches)} kernels; give the symbol:\n  {listing}")
        listing = ", ".join(sorted(short_name(symbol) for symbol in self.kernels)) or "none"
        raise KeyError(f"no kernel {name!r} in this {self.arch} code object; it holds: {listing}")


def read_code_objects(source: str | Path | bytes) -> list[CodeObject]:
    """Return every device code object in a file or in bytes, in file order.

    Args:
        source: a path, or the bytes, of a host ``.so`` or ``.o`` with a ``.hip_fatbin`` section, an offload bundle,
            a compressed bundle, or a bare AMDGPU ELF.

    Raises:
        CodeObjectError: the bytes are none of these, or are damaged.
    """
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    where = "the given bytes" if isinstance(source, bytes) else str(source)
    try:
        return [_read_elf(image, target) for target, image in device_images(data)]
    except CodeObjectError as error:
        raise CodeObjectError(f"{where}: {error}") from None
    except (struct.error, zlib.error, LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise CodeObjectError(f"{where}: damaged or truncated device code ({error})") from None
    except (MemoryError, RecursionError) as error:
        raise CodeObjectError(f"{where}: device code that takes more memory than there is ({error})") from None


def device_images(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield ``(target, ELF bytes)`` of every device image in ``data``, see :func:`read_code_objects`.

    Raises:
        CodeObjectError: ``data`` is not a container of device code.
    """
    if data.startswith(ELF_MAGIC):
        if _machine(data) == EM_AMDGPU:
            yield "", data
            return
        yield from _bundles(fatbin(data))
    elif data.startswith((BUNDLE_MAGIC, COMPRESSED_MAGIC)):
        yield from _bundles(data)
    else:
        raise CodeObjectError(
            f"not an ELF, offload bundle or compressed bundle; it starts with {data[:8]!r} and has {len(data)} bytes"
        )


def _bundles(fat: bytes) -> Iterator[tuple[str, bytes]]:
    position, found = 0, False
    while (position := _next_bundle(fat, position)) >= 0:
        found = True
        if fat.startswith(COMPRESSED_MAGIC, position):
            bundle, used = _decompress(fat, position)
            yield from _bundle_entries(bundle)[0]
        else:
            entries, used = _bundle_entries(fat[position:])
            yield from entries
        position += used
    if not found:
        raise CodeObjectError("the .hip_fatbin section has no offload bundle")


def _next_bundle(fat: bytes, start: int) -> int:
    hits = [hit for magic in (BUNDLE_MAGIC, COMPRESSED_MAGIC) if (hit := fat.find(magic, start)) >= 0]
    return min(hits, default=-1)


def _bundle_entries(bundle: bytes) -> tuple[list[tuple[str, bytes]], int]:
    """Return the device entries of a bundle and the bytes it covers (bundle entries: offset, size, id)."""
    (count,) = struct.unpack_from("<Q", bundle, len(BUNDLE_MAGIC))
    position, end = len(BUNDLE_MAGIC) + 8, 0
    entries: list[tuple[str, bytes]] = []
    for _ in range(count):
        offset, size, id_bytes = struct.unpack_from("<QQQ", bundle, position)
        target = bundle[position + 24 : position + 24 + id_bytes].decode(errors="replace")
        position += 24 + id_bytes
        if offset + size > len(bundle):
            raise CodeObjectError(f"bundle entry {target} ends at {offset + size}, past the {len(bundle)} bytes there")
        end = max(end, offset + size)
        if size and not target.startswith("host-"):
            entries.append((target, bundle[offset : offset + size]))
    return entries, max(position, end)


def _decompress(fat: bytes, position: int) -> tuple[bytes, int]:
    version, method = struct.unpack_from("<HH", fat, position + 4)
    if version == 1:
        raw_bytes, header = struct.unpack_from("<I", fat, position + 8)[0], 20
        total = len(fat) - position
    elif version == 2:
        total, raw_bytes = struct.unpack_from("<II", fat, position + 8)
        header = 24
    elif version == 3:
        total, raw_bytes = struct.unpack_from("<QQ", fat, position + 8)
        header = 32
    else:
        raise CodeObjectError(f"compressed bundle version {version} is unknown; versions 1 to 3 are read")
    payload = fat[position + header : position + total]
    if raw_bytes > _MOST_BUNDLE_BYTES:
        raise CodeObjectError(f"a compressed bundle promises {raw_bytes} bytes; at most {_MOST_BUNDLE_BYTES} are read")
    if raw_bytes > _MOST_EXPANSION * len(payload):
        raise CodeObjectError(f"a compressed bundle promises {raw_bytes} bytes from {len(payload)} compressed ones")
    if method == 0:
        bundle = zlib.decompressobj().decompress(payload, raw_bytes + 1)  # no more than shows that the header is wrong
    elif method == 1:
        bundle = _zstd(payload, raw_bytes)
    else:
        raise CodeObjectError(f"compressed bundle method {method} is unknown; 0 (zlib) and 1 (zstd) are read")
    if len(bundle) != raw_bytes or not bundle.startswith(BUNDLE_MAGIC):
        raise CodeObjectError(f"a compressed bundle gave {len(bundle)} bytes where its header promises {raw_bytes}")
    return bundle, total


def _zstd(payload: bytes, raw_bytes: int) -> bytes:
    library = _libzstd()
    out = ctypes.create_string_buffer(raw_bytes)
    written = library.ZSTD_decompress(out, ctypes.c_size_t(raw_bytes), payload, ctypes.c_size_t(len(payload)))
    if library.ZSTD_isError(ctypes.c_size_t(written)):
        raise CodeObjectError(f"damaged zstd data: {library.ZSTD_getErrorName(ctypes.c_size_t(written)).decode()}")
    return out.raw[:written]


@lru_cache(maxsize=1)
def _libzstd() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libzstd.so.1")
    except OSError:
        raise CodeObjectError(
            "this device code is compressed with zstd, and there is no libzstd.so.1 to read it; install libzstd1 "
            "(Debian, Ubuntu) or libzstd, or build without --offload-compress"
        ) from None
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_getErrorName.restype = ctypes.c_char_p
    return library


# --- ELF ---


@dataclass(frozen=True)
class _Section:
    name: bytes
    kind: int
    address: int
    data: bytes
    link: int
    executable: bool


def _machine(elf: bytes) -> int:
    if len(elf) < 64 or elf[4] != 2 or elf[5] != 1:
        raise CodeObjectError("an ELF that is not 64-bit little-endian")
    return int(struct.unpack_from("<H", elf, 18)[0])


def _sections(elf: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", elf, 58)
    rows = [struct.unpack_from("<IIQQQQII", elf, table + i * entry_bytes) for i in range(count)]
    if not rows:
        return []
    names = elf[rows[names_index][4] : rows[names_index][4] + rows[names_index][5]]
    return [
        _Section(
            name=names[name : names.index(b"\0", name)],
            kind=kind,
            address=address,
            data=b"" if kind == SHT_NOBITS else elf[offset : offset + size],
            link=link,
            executable=bool(flags & SHF_EXECINSTR),
        )
        for name, kind, flags, address, offset, size, link, _info in rows
    ]


def fatbin(library: bytes) -> bytes:
    """Return the section of a host ELF that has its offload bundles.

    Raises:
        CodeObjectError: there is none.
    """
    found = next((section.data for section in _sections(library) if section.name == FATBIN_SECTION), None)
    if found is None:
        raise CodeObjectError("a host ELF without a .hip_fatbin section: it has no device code")
    return found


def _read_elf(image: bytes, target: str) -> CodeObject:
    if not image.startswith(ELF_MAGIC) or _machine(image) != EM_AMDGPU:
        raise CodeObjectError(f"bundle entry {target or '(none)'} is not an AMDGPU ELF")
    (kind,) = struct.unpack_from("<H", image, 16)
    if kind == ET_REL:
        raise CodeObjectError("a relocatable device object (-fgpu-rdc): it must be linked before it can be read")
    (flags,) = struct.unpack_from("<I", image, 48)
    arch = ARCH_OF_FLAGS.get(flags & 0xFF, f"amdgpu-0x{flags & 0xFF:02x}")
    sections = _sections(image)
    descriptors = _descriptors(sections)
    kernels = {
        kernel.name: kernel for kernel in (_kernel(entry, descriptors, arch) for entry in _metadata(sections))
    }
    return CodeObject(arch=arch, target=target, kernels=MappingProxyType(kernels), image=image)


def _metadata(sections: list[_Section]) -> list[dict[str, Any]]:
    import msgpack

    for section in sections:
        if section.kind != SHT_NOTE:
            continue
        position = 0
        while position + 12 <= len(section.data):
            name_bytes, size, kind = struct.unpack_from("<III", section.data, position)
            name = section.data[position + 12 : position + 12 + name_bytes].rstrip(b"\0")
            start = position + 12 + (name_bytes + 3 & ~3)
            if name == b"AMDGPU" and kind == NT_AMDGPU_METADATA:
                root = msgpack.unpackb(section.data[start : start + size], raw=False)
                return list(root.get("amdhsa.kernels", ()))
            position = start + (size + 3 & ~3)
    raise CodeObjectError("an AMDGPU ELF without its metadata note")


@dataclass(frozen=True)
class _Symbol:
    name: str
    kind: int
    address: int
    section: _Section


def _symbols(sections: list[_Section], table_kind: int) -> Iterator[_Symbol]:
    """Yield the symbols that a section of the file defines, from tables of one kind."""
    for table in (section for section in sections if section.kind == table_kind):
        names = sections[table.link].data
        for position in range(0, len(table.data), 24):
            name, info, _other, index, value, _size = struct.unpack_from("<IBBHQQ", table.data, position)
            if 0 < index < len(sections):
                text = names[name : names.index(b"\0", name)].decode(errors="replace")
                yield _Symbol(text, info & 15, value, sections[index])


def descriptors_of(image: bytes) -> dict[str, bytes]:
    """Return the 64-byte kernel descriptors of a code object by symbol (``NAME.kd``)."""
    return _descriptors(_sections(image))


def _descriptors(sections: list[_Section]) -> dict[str, bytes]:
    """Return the 64-byte kernel descriptors by symbol (``NAME.kd``)."""
    found: dict[str, bytes] = {}
    for symbol in _symbols(sections, SHT_DYNSYM):
        if symbol.name.endswith(".kd"):
            offset = symbol.address - symbol.section.address
            found[symbol.name] = symbol.section.data[offset : offset + DESCRIPTOR_BYTES]
    return found


@dataclass(frozen=True)
class Function:
    """The machine code from one label of a code object to the next; ``symbol`` is empty for code ahead of any label."""

    symbol: str
    code: bytes = field(repr=False)


def functions(image: bytes) -> Iterator[Function]:
    """Yield all machine code of a device ELF, function by function.

    Raises:
        CodeObjectError: ``image`` is not a 64-bit little-endian ELF.
    """
    _machine(image)
    sections = _sections(image)
    symbols = [symbol for kind in (SHT_SYMTAB, SHT_DYNSYM) for symbol in _symbols(sections, kind)]
    for section in sections:
        if not section.executable:
            continue
        labels = {0: "", **{symbol.address - section.address: symbol.name for symbol in symbols
                            if symbol.section is section and symbol.kind in (STT_NOTYPE, STT_FUNC)}}  # fmt: skip
        starts = [*sorted(labels), len(section.data)]
        for start, end in itertools.pairwise(starts):
            if start < end:
                yield Function(labels[start], section.data[start:end])


def _kernel(entry: dict[str, Any], descriptors: dict[str, bytes], arch: str) -> KernelResources:
    symbol = str(entry[".symbol"])
    descriptor = descriptors.get(symbol)
    if descriptor is None or len(descriptor) != DESCRIPTOR_BYTES:
        raise CodeObjectError(f"kernel {entry['.name']} has no descriptor {symbol}")
    (rsrc1,) = struct.unpack_from("<I", descriptor, 48)
    return KernelResources(
        name=symbol.removesuffix(".kd"),
        vgpr=int(entry[".vgpr_count"]),
        agpr=int(entry.get(".agpr_count", 0)),
        sgpr=int(entry[".sgpr_count"]),
        vgpr_spills=int(entry.get(".vgpr_spill_count", 0)),
        sgpr_spills=int(entry.get(".sgpr_spill_count", 0)),
        lds_bytes=int(entry[".group_segment_fixed_size"]),
        scratch_bytes=int(entry[".private_segment_fixed_size"]),
        kernarg_bytes=int(entry[".kernarg_segment_size"]),
        max_workgroup_size=int(entry[".max_flat_workgroup_size"]),
        args=tuple(
            KernelArg(arg[".offset"], arg[".size"], str(arg[".value_kind"]), str(arg.get(".name", "")))
            for arg in entry.get(".args", ())
        ),
        vgpr_allocated=((rsrc1 & 0x3F) + 1) * VGPR_GRANULE,
        wavefront_size=int(entry.get(".wavefront_size", 64)),
        language=str(entry.get(".language", "")),
        device=ARCHS.get(arch, ARCHS["gfx942"]),
    )
