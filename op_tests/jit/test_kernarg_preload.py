"""Modules that ask for preloaded arguments get them: the descriptors of their kernels say how many dwords."""

from __future__ import annotations

import struct

import pytest

from hipforge.jit import hip_module, obtain, registry
from hipforge.jit.backends.amd.code_object import descriptors_of, read_code_objects

FLAG = "-amdgpu-kernarg-preload-count="
ASKING = [name for name, entry in registry.shipped().items() if FLAG in " ".join(entry.flags_extra_hip)]
LENGTH_AT = 58  # KERNARG_PRELOAD_SPEC_LENGTH of a kernel descriptor: dwords, seven bits
MOST_DWORDS = 14  # 16 user SGPRs less the pointer to the arguments


def preloaded(module: str, arch: str) -> dict[str, int]:
    """Return the preloaded dwords of the kernels of a module's first variant, by symbol."""
    entry = registry.module(module)
    variant = next(iter(entry.ahead_variants(arch)))
    built = obtain.module(hip_module.request(entry, variant, arch))
    (code,) = read_code_objects(built.entry.library)
    return {
        symbol: struct.unpack_from("<H", descriptor, LENGTH_AT)[0] & 0x7F
        for symbol, descriptor in descriptors_of(code.image).items()
    }


@pytest.mark.parametrize("module", ASKING)
def test_every_kernel_of_a_module_that_asks_has_its_first_arguments_in_registers(module: str) -> None:
    found = preloaded(module, registry.module(module).archs[0])
    assert found and all(0 < dwords <= MOST_DWORDS for dwords in found.values()), found


@pytest.mark.parametrize("scales", ("mxfp8", "fp8"))
@pytest.mark.parametrize("split", ("wave_split", "group_split"))
def test_a_gemm_that_splits_k_knows_its_result_from_the_start(scales: str, split: str) -> None:
    """The pointer to it is the last of 14 dwords; loaded behind the products it would be waited for."""
    assert set(preloaded(f"module_{scales}_gemm_{split}", "gfx950").values()) == {MOST_DWORDS}


def test_modules_that_wait_for_their_arguments_are_told_apart() -> None:
    assert len(ASKING) > 10
    quiet = next(name for name in registry.shipped() if name not in ASKING)
    assert set(preloaded(quiet, registry.module(quiet).archs[0]).values()) == {0}
