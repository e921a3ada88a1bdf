"""What a launch is given: tensors by their storage, raw argument segments, sizes that no machine has."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
import torch
from helpers.emulator_asm import POINTER, whole_kernel

from hipforge import emulator
from hipforge.errors import EmulatorFault, GuardError, HipforgeError

SOURCE = r"""
#include "hip.h"
#define AGENT __HIP_MEMORY_SCOPE_AGENT
extern "C" __global__ void add(float* y, const float* x, int n) {
  if (threadIdx.x < n) y[threadIdx.x] += x[threadIdx.x];
}
extern "C" __global__ void add_half(_Float16* y, int at) {
  if (threadIdx.x == 0) __hip_atomic_fetch_add(y + at, (_Float16)1, __ATOMIC_RELAXED, AGENT);
}
extern "C" __global__ void dword_at(int* y, const _Float16* x, int at) { y[0] = *(const int*)(x + at); }
extern "C" __global__ void swap_dword(unsigned* x, unsigned compare, unsigned value) {
  if (threadIdx.x == 0) atomicCAS(x + 2, compare, value);
}
"""


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
    wanted = r"argument arg1: it (reaches byte 256 of a storage|is a tensor of zeros without)"
    with pytest.raises(GuardError, match=wanted):
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


# --- atomics on less than a dword -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 3, 4])
def test_an_atomic_on_the_last_half_of_an_odd_tensor(code: emulator.CodeObject, at: int) -> None:
    held = torch.zeros(8, dtype=torch.float16)
    with emulator.options(checks="all"):
        emulator.launch(code.kernels["add_half"], 1, 64, [held[:5], at])
    assert held.tolist() == [float(i == at) for i in range(8)]


def test_an_atomic_past_the_end_is_still_a_fault(code: emulator.CodeObject) -> None:
    with pytest.raises(EmulatorFault, match="past the end of arg0"):
        emulator.launch(code.kernels["add_half"], 1, 64, [torch.zeros(8, dtype=torch.float16)[:5], 6])


def test_a_plain_dword_across_the_end_is_still_a_fault(code: emulator.CodeObject) -> None:
    held = torch.zeros(8, dtype=torch.float16)
    with pytest.raises(EmulatorFault, match="the last 2 bytes lie past the end of arg1"):
        emulator.launch(code.kernels["dword_at"], 1, 64, [torch.zeros(1, dtype=torch.int32), held[:5], 4])


def test_an_exchange_may_not_change_the_bytes_past_the_end(code: emulator.CodeObject) -> None:
    held = torch.zeros(8, dtype=torch.float16)
    emulator.launch(code.kernels["swap_dword"], 1, 64, [held[:5], 0, 0x3C00])
    assert held[4] == 1
    with pytest.raises(EmulatorFault, match="the last 2 bytes lie past the end of arg0"):
        emulator.launch(code.kernels["swap_dword"], 1, 64, [held[:5], 0x3C00, 0x10000])


# --- headers ----------------------------------------------------------------------------------------------------------

STALE = """
  s_load_dwordx2 s[2:3], s[0:1], 0
  s_load_dword s4, s[0:1], 0x18
  v_lshlrev_b32 v0, 2, v0
  s_waitcnt lgkmcnt(0)
  v_mov_b32 v1, s4
  global_store_dword v0, v1, s[2:3]
"""


def stale_kernel(folder: Path, more: str = "") -> Path:
    """Return a code object whose kernel states 8 bytes of arguments and reads 28; ``more`` instructions end it."""
    return whole_kernel(STALE + more, folder, name="stale", args=(POINTER, (16, "by_value"), (4, "by_value")))


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stale_kernel(tmp_path_factory.mktemp("stale"))


def test_arguments_past_the_stated_segment_are_passed(stale: Path) -> None:
    kernel = emulator.CodeObject(stale).kernels["stale"]
    y = torch.zeros(64, dtype=torch.int32)
    emulator.launch(kernel, 1, 64, [y, bytes(16), 7])
    assert y.tolist() == [7] * 64
    emulator.launch(kernel, 1, 64, kernarg=bytes(24) + struct.pack("<i", 9), tensors={0: y})
    assert y.tolist() == [9] * 64


def test_program_headers_that_ask_for_gigabytes_take_no_memory(stale: Path) -> None:
    image = bytearray(stale.read_bytes())
    offset, size, count = struct.unpack_from("<Q", image, 0x20)[0], *struct.unpack_from("<HH", image, 0x36)
    loads = [offset + i * size for i in range(count) if struct.unpack_from("<I", image, offset + i * size)[0] == 1]
    struct.pack_into("<Q", image, loads[-1] + 0x28, 0xF000_0000)  # p_memsz
    before = resident_bytes()
    code = emulator.CodeObject(bytes(image))
    y = torch.zeros(64, dtype=torch.int32)
    emulator.launch(code.kernels["stale"], 1, 64, [y, bytes(16), 5])
    assert y.tolist() == [5] * 64
    assert resident_bytes() - before < 2**28


def test_a_descriptor_whose_entry_is_no_instruction_has_no_disassembly_and_no_launch(stale: Path) -> None:
    image = bytearray(stale.read_bytes())
    table, size, count, names = struct.unpack_from("<Q", image, 0x28)[0], *struct.unpack_from("<HHH", image, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    (rodata,) = (row[4] for row in rows if image.startswith(b".rodata\0", rows[names][4] + row[0]))
    (entry,) = struct.unpack_from("<q", image, rodata + 16)  # of the only kernel's descriptor
    struct.pack_into("<q", image, rodata + 16, entry + 2)
    kernel = emulator.CodeObject(bytes(image)).kernels["stale"]
    assert kernel.disassembly() == "" and kernel.source_lines() == []
    with pytest.raises(HipforgeError, match="its entry point is not an instruction"):
        emulator.launch(kernel, 1, 64, [torch.zeros(64, dtype=torch.int32), bytes(16), 7])


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


@pytest.mark.parametrize(("register", "accepted"), [("v7", True), ("v8", False), ("v200", False), ("a0", False)])
def test_registers_beyond_the_descriptors_are_reported(register: str, accepted: bool, tmp_path: Path) -> None:
    write = f"v_accvgpr_write_b32 {register}, 1" if register[0] == "a" else f"v_mov_b32 {register}, 1"
    kernel = emulator.CodeObject(stale_kernel(tmp_path, write)).kernels["stale"]
    arguments = [torch.zeros(64, dtype=torch.int32), bytes(16), 7]
    with emulator.options(checks="memory"):
        emulator.launch(kernel, 1, 64, arguments)
    with emulator.options(checks="all"):
        if accepted:
            emulator.launch(kernel, 1, 64, arguments)
        else:
            with pytest.raises(EmulatorFault, match=f"{register} is beyond the 8 registers that the kernel descriptor"):
                emulator.launch(kernel, 1, 64, arguments)


@pytest.mark.parametrize(("index", "accepted"), [(6, True), (7, False), (254, False)])
@pytest.mark.parametrize("operand", ["DST", "SRC0"])
def test_indexed_registers_beyond_the_descriptors_are_reported(
    operand: str, index: int, accepted: bool, tmp_path: Path
) -> None:
    moves = "\n".join(f"  v_mov_b32 v{i}, 1" for i in range(2, 8))
    moves += f"\n  s_movk_i32 s5, {index}\n  s_set_gpr_idx_on s5, gpr_idx({operand})\n  v_mov_b32 v1, v1"
    kernel = emulator.CodeObject(stale_kernel(tmp_path, f"{moves}\n  s_set_gpr_idx_off")).kernels["stale"]
    arguments = [torch.zeros(64, dtype=torch.int32), bytes(16), 7]
    with emulator.options(checks="all"):
        if accepted:
            emulator.launch(kernel, 1, 64, arguments)
        else:
            with pytest.raises(EmulatorFault, match=rf"v{index + 1}, moved by the index {index}, is beyond the 8 reg"):
                emulator.launch(kernel, 1, 64, arguments)
