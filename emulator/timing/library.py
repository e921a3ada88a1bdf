"""The model's shared library: captures of launches and their simulation. Built on first use, like the emulator's."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hipforge.jit.cache import store

CFLAGS = (
    "-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
    "-Wall", "-Wextra", "-I${EMULATOR}",
)  # fmt: skip

_text = ctypes.c_char_p
_handle = ctypes.c_void_p
_u64, _i32, _i64 = ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64

_PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    "hftime_capture_new": (_handle, ()),
    "hftime_capture_room": (None, (_handle, _u64)),
    "hftime_capture_free": (None, (_handle,)),
    "hftime_capture_recorder": (_handle, (_handle,)),
    "hftime_capture_policy": (
        None,
        (_handle, _i64, ctypes.POINTER(_u64), ctypes.POINTER(_i64), _u64, _i32, _i32),
    ),
    "hftime_capture_save": (_i32, (_handle, _text)),
    "hftime_capture_load": (_i32, (_handle, _text)),
    "hftime_capture_describe": (_text, (_handle,)),
    "hftime_prefix": (_i64, (_handle, _u64, _u64)),
    "hftime_error": (_text, ()),
    "hftime_parameter_names": (_text, ()),
    "hftime_simulate": (_text, (_handle, _u64, ctypes.POINTER(ctypes.c_double), _i32, _i32, _u64, _u64, _i32)),
}


def entry() -> store.Entry:
    """Return the library's cache entry, building it if there is none for these sources and this CPU.

    Raises:
        BuildError: a source does not compile.
        ToolchainError: there is no host C++ compiler.
    """
    from hipforge.jit import host_library

    sources = sorted((Path(__file__).parent / "native").glob("*.cpp"))
    return host_library.entry("emulator_timing", sources=sources, cflags=CFLAGS)


def build() -> Path:
    """Return the library's path, building it like :func:`entry`."""
    return entry().library


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Build if need be and load the library; once per process.

    Raises:
        BuildError, ToolchainError: as :func:`build`.
    """
    library = ctypes.CDLL(str(build()))
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
