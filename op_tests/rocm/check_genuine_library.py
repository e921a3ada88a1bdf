"""For machines with ROCm or a distribution's HIP: what we call is in the genuine ``libamdhip64``, in the known version.

Not collected by a plain run, which needs no ROCm: ``pytest op_tests/rocm/check_genuine_library.py``.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from helpers.hip_symbols import BINDING, MODULES, defined, undefined

from hipforge.jit import fleet, registry
from hipforge.jit.backends.amd import runtime as hip_runtime
from hipforge.jit.backends.amd.code_object import BUNDLE_MAGIC, fatbin, read_code_objects


def test_every_function_we_call_is_in_the_library_with_its_version() -> None:
    installed = list(hip_runtime.candidates())
    assert installed, "no libamdhip64 was found on this machine"
    found = defined(installed[0])
    wanted = {**MODULES, **BINDING}
    assert {name: found.get(name) for name in wanted} == wanted


@functools.cache
def libraries() -> list[Path]:
    """Every variant that builds here; those that are built already cost nothing."""
    outcomes = fleet.build_many(fleet.requests(registry.modules(), ["gfx950", "gfx942"]), None, lambda event: None)
    return [outcome.entry.library for outcome in outcomes if outcome.entry is not None]


def test_no_module_calls_anything_else() -> None:
    assert len(libraries()) > 50
    for library in libraries():
        assert undefined(library) <= set(MODULES), library


class Data(ctypes.Structure):
    """``amd_comgr_data_t``."""

    _fields_ = [("handle", ctypes.c_uint64)]


class Found(ctypes.Structure):
    """``amd_comgr_code_object_info_t``."""

    _fields_ = [("isa", ctypes.c_char_p), ("size", ctypes.c_size_t), ("offset", ctypes.c_uint64)]


FATBIN = 0x10  # AMD_COMGR_DATA_KIND_FATBIN


def test_the_library_that_the_runtime_asks_finds_the_device_code_of_every_module() -> None:
    """Comgr, for the name that a GPU has, and for a GPU that a module is not for."""
    runtime = next(iter(hip_runtime.candidates()))
    comgr = ctypes.CDLL(str(next(iter(sorted(Path(runtime).resolve().parent.glob("libamd_comgr.so*"))))))
    for library in libraries():
        section = fatbin(library.read_bytes())
        at = -1
        for code in read_code_objects(library):
            at = section.index(BUNDLE_MAGIC, at + 1)
            bundle = section[at:]
            data = Data()
            assert comgr.amd_comgr_create_data(FATBIN, ctypes.byref(data)) == 0
            assert comgr.amd_comgr_set_data(data, ctypes.c_size_t(len(bundle)), bundle) == 0
            asked = (Found * 2)()
            asked[0].isa = f"amdgcn-amd-amdhsa--{code.arch}:sramecc+:xnack-".encode()
            asked[1].isa = b"amdgcn-amd-amdhsa--gfx90a"
            assert comgr.amd_comgr_lookup_code_object(data, asked, ctypes.c_size_t(len(asked))) == 0
            assert comgr.amd_comgr_release_data(data) == 0
            assert bundle[asked[0].offset : asked[0].offset + asked[0].size] == code.image, library
            assert asked[1].size == 0


def test_the_library_loads_every_module() -> None:
    ctypes.CDLL(str(next(iter(hip_runtime.candidates()))), mode=ctypes.RTLD_GLOBAL)
    for library in libraries():
        ctypes.CDLL(str(library))


def test_the_library_loads_and_says_that_there_is_no_device_or_how_many() -> None:
    count = ctypes.c_int(-1)
    status = hip_runtime.load().hipGetDeviceCount(ctypes.byref(count))
    assert (status, count.value) == (100, 0) or (status == 0 and count.value > 0)  # 100: hipErrorNoDevice
