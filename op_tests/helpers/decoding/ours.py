"""The emulator's decoder, compiled on its own."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import hipforge.emulator
from hipforge.jit import host_library

SOURCES = Path(hipforge.emulator.__file__).parent / "native"
ARCHS = ("gfx942", "gfx950")


@dataclass(frozen=True)
class Decoder:
    """Our decoder, compiled on its own."""

    library: ctypes.CDLL

    def __call__(self, code: bytes, arch: str) -> tuple[int, str]:
        """Return the length and the text of the first instruction; (0, "") if there is none."""
        text = ctypes.create_string_buffer(400)
        size = self.library.disassemble_one(code, len(code), ARCHS.index(arch), text, len(text))
        return size, text.value.decode()

    def constant(self, code: bytes, arch: str, index: int) -> int:
        return self.library.source_constant(code, len(code), ARCHS.index(arch), index)

    def operands(self, code: bytes, arch: str) -> str:
        text = ctypes.create_string_buffer(400)
        self.library.operands(code, len(code), ARCHS.index(arch), text, len(text))
        return text.value.decode().strip()


@functools.cache
def decoder() -> Decoder:
    """Return the decoder, built if the cache has none for these sources."""
    names = ("isa", "decode", "decode_vector", "decode_memory", "disasm", "disasm_immediates")
    sources = [SOURCES / f"{name}.cpp" for name in names]
    path = host_library.build(
        "emulator_decoder",
        sources=[*sources, Path(__file__).with_name("shim.cpp")],
        cflags=("-std=c++20", "-O1", "-I${EMULATOR}/native", "-Wall", "-Wextra", "-Werror"),
    )
    library = ctypes.CDLL(str(path))
    pointer, size = ctypes.c_char_p, ctypes.c_size_t
    library.disassemble_one.argtypes = (pointer, size, ctypes.c_int, pointer, size)
    library.source_constant.argtypes = (pointer, size, ctypes.c_int, ctypes.c_int)
    library.source_constant.restype = ctypes.c_uint64
    library.operands.argtypes = (pointer, size, ctypes.c_int, pointer, size)
    library.operands.restype = None
    return Decoder(library)
