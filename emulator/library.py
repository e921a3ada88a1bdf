"""The emulator's shared library: built on its first use on a machine, loaded once per process with global symbols.

Modules leave their HIP symbols undefined; loading this library first makes the dynamic linker bind them to it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hipforge.errors import EmulatorFault, LaunchError

if TYPE_CHECKING:
    from hipforge.jit import host_library
    from hipforge.jit.cache import store

SONAME = "libhipforge_emulator.so"

# -O3 and the machine's widest vectors: a wave is 64 lanes, and every handler is a loop over them. Never -ffast-math:
# the handlers must round as the ISA says, so contraction is off too.
CFLAGS = (
    "-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-pthread", "-Wall", "-Wextra", "-Wno-subobject-linkage",
)  # fmt: skip
# What is compiled: native/units/<name>.cpp, each of which includes several sources, because most of a small source's
# compile time is that of the headers. The order is that of the link, too: of an inline function that several units
# have, the first copy is kept, so units at -O3 come first.
UNITS = ("loop", "matrix", "float", "checkers", "memory", "integer", "rare", "code", "host")
_UNHURRIED = ("rare", "code", "host")
UNIT_CFLAGS = {f"{name}.cpp": ("-O1",) for name in _UNHURRIED}
LDFLAGS = (f"-Wl,-soname,{SONAME}", "-Wl,-z,defs", "-pthread", "-ldl")

c_text = ctypes.c_char_p


class Extent(ctypes.Structure):
    """``hfemu_extent``: a named range of host memory that kernels may access."""

    _fields_ = (
        ("name", c_text),
        ("base", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class RawOptions(ctypes.Structure):
    """``hfemu_options``; :class:`hipforge.emulator.configuration.Options` is its public face."""

    _fields_ = (
        ("arch", c_text),
        ("cu_count", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("check_memory", ctypes.c_int32),
        ("check_uninit", ctypes.c_int32),
        ("check_waits", ctypes.c_int32),
        ("check_races", ctypes.c_int32),
        ("check_global_races", ctypes.c_int32),
        ("check_strict", ctypes.c_int32),
        ("max_reports", ctypes.c_int32),
        ("wave_order", ctypes.c_int32),
        ("quantum", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("instruction_budget", ctypes.c_uint64),
    )


TRACE_SINK = ctypes.CFUNCTYPE(None, c_text, ctypes.c_void_p)
Dim3 = ctypes.c_uint32 * 3

_PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    "hfemu_get_options": (None, (ctypes.POINTER(RawOptions),)),
    "hfemu_set_options": (ctypes.c_int, (ctypes.POINTER(RawOptions),)),
    "hfemu_push_extents": (None, (ctypes.POINTER(Extent), ctypes.c_int32)),
    "hfemu_pop_extents": (None, ()),
    "hfemu_last_error": (c_text, ()),
    "hfemu_clear_error": (None, ()),
    "hfemu_poll_python": (ctypes.c_int32, ()),
    "hfemu_load": (ctypes.c_int64, (c_text, ctypes.c_uint64, c_text)),
    "hfemu_unload": (None, (ctypes.c_int64,)),
    "hfemu_launch": (
        ctypes.c_int32,
        (ctypes.c_int64, c_text, Dim3, Dim3, c_text, ctypes.c_uint64, ctypes.c_uint64),
    ),
    "hfemu_set_stream": (None, (ctypes.c_void_p,)),
    "hfemu_stream": (ctypes.c_void_p, ()),
    "hfemu_capturing": (ctypes.c_int32, ()),
    "hfemu_graph_launch": (ctypes.c_int32, (ctypes.c_void_p, ctypes.c_void_p)),
    "hfemu_graph_nodes": (c_text, (ctypes.c_void_p,)),
    "hfemu_counters_begin": (ctypes.c_int64, (ctypes.c_int32,)),
    "hfemu_counters_end": (c_text, (ctypes.c_int64,)),
    "hfemu_mnemonics": (c_text, (ctypes.c_int32,)),
    "hfemu_disassemble": (c_text, (ctypes.c_int64, c_text)),
    "hfemu_source_lines": (c_text, (ctypes.c_int64, c_text)),
    "hfemu_disassemble_bytes": (c_text, (c_text, ctypes.c_uint64, c_text)),
    "hfemu_set_trace": (
        None,
        (TRACE_SINK, ctypes.c_void_p, c_text, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32),
    ),
    "hfemu_set_recorder": (None, (ctypes.c_void_p,)),
}


def source_dir() -> Path:
    """Return the folder of the emulator's C++ sources."""
    return Path(__file__).parent / "native"


def _recipe() -> dict[str, Any]:
    sources = [source_dir() / "units" / f"{name}.cpp" for name in UNITS]
    return {"sources": sources, "cflags": CFLAGS, "ldflags": LDFLAGS, "source_cflags": UNIT_CFLAGS}


def request() -> host_library.Request:
    """Return what :func:`entry` asks of the cache, to look it up without building it."""
    from hipforge.jit import host_library

    return host_library.request("emulator", **_recipe())


def entry() -> store.Entry:
    """Return the library's cache entry, building it if there is none for these sources and this CPU.

    Raises:
        BuildError: a source does not compile.
        ToolchainError: there is no host C++ compiler.
    """
    from hipforge.jit import host_library

    return host_library.entry("emulator", **_recipe())


def build() -> Path:
    """Return the library's path, building it like :func:`entry`."""
    return entry().library


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Build if need be and load the library with global symbols; once per process.

    Raises:
        BuildError, ToolchainError: as :func:`build`.
    """
    library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.lru_cache(maxsize=1)
def _restore_exception() -> Callable[[], int]:
    # A "Python API" prototype: called with the GIL held, and an exception that it leaves set is raised here.
    restore: Callable[[], int] = ctypes.PYFUNCTYPE(ctypes.c_int)(("hfemu_restore_exception", load()))
    return restore


def last_error() -> str | None:
    """Return why this thread's last call into the emulator failed, if it did."""
    text = load().hfemu_last_error()
    return None if text is None else text.decode(errors="replace")


def raise_last_error(what: str, *, fault: bool) -> None:
    """Raise what stopped a call: a signal handler's own exception, else the emulator's report.

    Args:
        what: a description of the call for failures without a report.
        fault: whether a kernel was running, which makes it an :class:`EmulatorFault`.

    Raises:
        BaseException: what a signal handler raised during a launch (``KeyboardInterrupt``, a test's timeout).
        EmulatorFault: a kernel was stopped.
        LaunchError: the call was refused.
    """
    if fault:
        _restore_exception()()
    error = EmulatorFault if fault else LaunchError
    raise error(last_error() or f"{what} failed without a report")
