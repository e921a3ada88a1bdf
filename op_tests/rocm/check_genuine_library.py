"""For machines with ROCm or a distribution's HIP: what we call is in the genuine ``libamdhip64``, in the known version.

Not collected by a plain run, which needs no ROCm: ``pytest op_tests/rocm/check_genuine_library.py``.
"""

from __future__ import annotations

import ctypes

from helpers.hip_symbols import BINDING, MODULES, defined, undefined

from hipforge.jit import fleet, registry
from hipforge.jit.backends.amd import runtime as hip_runtime


def test_every_function_we_call_is_in_the_library_with_its_version() -> None:
    libraries = list(hip_runtime.candidates())
    assert libraries, "no libamdhip64 was found on this machine"
    found = defined(libraries[0])
    wanted = {**MODULES, **BINDING}
    assert {name: found.get(name) for name in wanted} == wanted


def test_no_module_calls_anything_else() -> None:
    """Every variant that builds here; those that are built already cost nothing."""
    outcomes = fleet.build_many(fleet.requests(registry.modules(), ["gfx950", "gfx942"]), None, lambda event: None)
    libraries = [outcome.entry.library for outcome in outcomes if outcome.entry is not None]
    assert len(libraries) > 50
    for library in libraries:
        assert undefined(library) <= set(MODULES), library


def test_the_library_loads_and_says_that_there_is_no_device_or_how_many() -> None:
    count = ctypes.c_int(-1)
    status = hip_runtime.load().hipGetDeviceCount(ctypes.byref(count))
    assert (status, count.value) == (100, 0) or (status == 0 and count.value > 0)  # 100: hipErrorNoDevice
