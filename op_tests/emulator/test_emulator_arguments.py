"""What a launch is given: tensors by their storage, raw argument segments, sizes that no machine has."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
import torch
from helpers.hip_compile import device_elf

from hipforge import emulator
from hipforge.errors import EmulatorFault, GuardError, HipforgeError

SOURCE = r"""
#include <hip/hip_runtime.h>
extern "C" __global__ void add(float* y, const float* x, int n) {
  if (threadIdx.x < n) y[threadIdx.x] += x[threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> emulator.CodeObject:
    return emulator.CodeObject(device_elf(SOURCE, tmp_path_factory.mktemp("arguments")))


def shrunk() -> torch.Tensor:
    tensor = torch.ones(64)
    tensor.untyped_storage().resize_(128)
    return tensor


def freed() -> torch.Tensor:
    tensor = torch.ones(64)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "make", [shrunk, freed, lambda: torch._efficientzerotensor(64)], ids=["shrunk", "freed", "zero"]
)
def test_tensors_whose_storage_does_not_hold_them_are_refused(code: emulator.CodeObject, make: object) -> None:
    with pytest.raises(
        GuardError, match=r"argument arg1: it (reaches byte 256 of a storage|is a tensor of zeros without)"
    ):
        emulator.launch(code.kernels["add"], 1, 64, [torch.zeros(64), make(), 64])


def test_a_view_of_what_is_left_of_a_storage_is_accepted(code: emulator.CodeObject) -> None:
    y = torch.zeros(32)
    emulator.launch(code.kernels["add"], 1, 64, [y, shrunk()[:32], 32])
    assert y.tolist() == [1] * 32


def test_a_raw_argument_segment_with_tensors_in_it(code: emulator.CodeObject) -> None:
    y, x = torch.zeros(10), torch.arange(10.0)
    given = struct.pack("<QQi", 0, 0, 10)
    done = emulator.launch(code.kernels["add"], 1, 64, kernarg=given, tensors={0: y, 8: x})
    assert torch.equal(y, x)
    assert done.tensors["kernarg+0x8"].loaded == 40
    with pytest.raises(EmulatorFault, match=r"past the end of kernarg\+0x"):
        emulator.launch(code.kernels["add"], 1, 64, kernarg=struct.pack("<QQi", 0, 0, 11), tensors={0: y, 8: x})


def test_a_raw_argument_segment_is_checked(code: emulator.CodeObject) -> None:
    kernel, y = code.kernels["add"], torch.zeros(4)
    with pytest.raises(GuardError, match="offset 16: a pointer does not fit there; kernarg has 20 bytes"):
        emulator.launch(kernel, 1, 64, kernarg=bytes(20), tensors={16: y})
    with pytest.raises(GuardError, match="offset 0: list is not accepted"):
        emulator.launch(kernel, 1, 64, kernarg=bytes(20), tensors={0: [1.0]})
    with pytest.raises(GuardError, match="offset 0: it reaches byte 256"):
        emulator.launch(kernel, 1, 64, kernarg=bytes(20), tensors={0: freed()})
    with pytest.raises(GuardError, match="both args and kernarg"):
        emulator.launch(kernel, 1, 64, [y, y, 4], kernarg=bytes(20))
    with pytest.raises(GuardError, match="tensors= goes with kernarg="):
        emulator.launch(kernel, 1, 64, [y, y, 4], tensors={0: y})


@pytest.mark.parametrize("dynamic_lds", [2**32, 2**64 - 4096, -1])
def test_lds_sizes_past_32_bits_are_refused(code: emulator.CodeObject, dynamic_lds: int) -> None:
    with pytest.raises(HipforgeError, match="dynamic"):
        emulator.launch(code.kernels["add"], 1, 64, [torch.zeros(4), torch.zeros(4), 4], dynamic_lds=dynamic_lds)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_compressed_bundle_expands_no_further_than_its_header_says() -> None:
    payload = zlib.compress(b"__CLANG_OFFLOAD_BUNDLE__" + bytes(2**28), 9)
    fat = b"CCOB" + struct.pack("<HHIIQ", 2, 0, 24 + len(payload), 4096, 0) + payload
    before = resident_bytes()
    with pytest.raises(HipforgeError, match="4096"):
        emulator.CodeObject(fat)
    assert resident_bytes() - before < 2**26
    with pytest.raises(HipforgeError, match="promises"):
        emulator.CodeObject(b"CCOB" + struct.pack("<HHQQQ", 3, 1, 32 + len(payload), 2**60, 0) + payload)
