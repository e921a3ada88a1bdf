"""The emulator as HIP runtime: modules as clang builds them, bound to it at load time."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import hip_compile

from hipforge import emulator
from hipforge.emulator import library, runtime
from hipforge.jit import toolchain

SOURCE = (Path(hip_compile.__file__).parent / "hip_runtime_module.hip").read_text()

MODULE = r"""
#include "hip.h"
__device__ int bias = 1;
extern "C" __global__ void scaled_index(int* out, int factor) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = i * factor + bias;
}
"""


@pytest.fixture(scope="module")
def hip(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    runtime.load()
    built = hip_compile.shared_library(SOURCE, tmp_path_factory.mktemp("hip"), ("gfx950", "gfx942"))
    module = ctypes.CDLL(str(built))
    for name in ("error_name", "error_text"):
        getattr(module, name).restype = ctypes.c_char_p
    return module


@pytest.fixture(autouse=True)
def no_error_from_before() -> None:
    """HIP's last error stays until it is asked for, across tests too."""
    runtime.load().library.hfemu_clear_error()


class Extents:
    """Declares tensors to the emulator, as the binding does for an op's arguments."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._raw = (library.Extent * len(tensors))(
            *(
                library.Extent(name.encode(), tensor.data_ptr(), tensor.numel() * tensor.element_size(), 1, 0)
                for name, tensor in tensors.items()
            )
        )

    def __enter__(self) -> None:
        native = runtime.load().library
        native.hfemu_clear_error()
        native.hfemu_push_extents(self._raw, len(self._raw))

    def __exit__(self, *_: object) -> None:
        runtime.load().library.hfemu_pop_extents()


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def report() -> str:
    return library.last_error() or ""


INVALID_VALUE, INVALID_CONFIGURATION, ILLEGAL_ADDRESS, OUT_OF_RESOURCES, NOT_SUPPORTED = 1, 9, 700, 701, 801


def test_three_dimensional_grids_and_blocks(hip: ctypes.CDLL) -> None:
    out = torch.zeros(12 * 10 * 6 * 15 // 15 * 2, dtype=torch.int32)[: 15 * 8 * 6]
    with Extents(out=out):
        assert hip.run_where(pointer(out)) == 0
    z, y, x = torch.meshgrid(torch.arange(6), torch.arange(8), torch.arange(15), indexing="ij")
    assert torch.equal(out.view(6, 8, 15).long(), x | y << 8 | z << 16)


def test_structs_passed_by_value(hip: ctypes.CDLL) -> None:
    out = torch.zeros(4, dtype=torch.float64)
    with Extents(out=out):
        assert hip.run_by_value(pointer(out)) == 0
    assert out.tolist() == [15 + 0.25 - 7 + 65 + 0.5] * 4


def test_template_instances_and_several_launches(hip: ctypes.CDLL) -> None:
    floats, longs = torch.zeros(16), torch.zeros(24, dtype=torch.int64)
    with Extents(floats=floats, longs=longs):
        assert hip.run_templates(pointer(floats), pointer(longs)) == 0
    assert floats.tolist() == [1.5, 2.5] * 8
    assert longs.tolist() == [2**40, 2**40 + 1, 2**40 + 2] * 8


@pytest.mark.parametrize("n", [64, 256, 1000])
def test_dynamic_lds(hip: ctypes.CDLL, n: int) -> None:
    data = torch.arange(n, dtype=torch.int32)
    with Extents(data=data):
        assert hip.run_reverse(pointer(data), n, 4 * n) == 0
    assert torch.equal(data, torch.arange(n, dtype=torch.int32).flip(0))


def test_lds_beyond_the_compute_unit_is_refused(hip: ctypes.CDLL) -> None:
    data = torch.arange(64, dtype=torch.int32)
    with Extents(data=data):
        assert hip.run_reverse(pointer(data), 64, 160 * 1024) == 0
        assert hip.run_reverse(pointer(data), 64, 160 * 1024 + 4) == OUT_OF_RESOURCES
    assert "163844 dynamic LDS bytes; gfx950 has 163840" in report()


def test_blocks_larger_than_the_kernel_takes_are_refused(hip: ctypes.CDLL) -> None:
    data = torch.arange(64, dtype=torch.int32)
    with Extents(data=data):
        assert hip.run_reverse(pointer(data), 1025, 0) == INVALID_CONFIGURATION
    assert "at most 1024" in report()


def test_device_variables_keep_their_values_and_pointers_between_them_are_relocated(hip: ctypes.CDLL) -> None:
    out = torch.zeros(4, dtype=torch.int32)
    value = ctypes.c_int()
    assert hip.get_counter(ctypes.byref(value)) == 0
    before = value.value
    with Extents(out=out):
        assert hip.run_variables(pointer(out)) == 0
        assert out.tolist() == [10 + before, 20 + before, 30 + before, 40 + before]
        new = (ctypes.c_int * 2)(70, 80)
        assert hip.set_table(new, ctypes.c_size_t(2), ctypes.c_size_t(1)) == 0
        assert hip.run_variables(pointer(out)) == 0
        assert out.tolist() == [11 + before, 701 + before, 801 + before, 41 + before]
        assert hip.set_table((ctypes.c_int * 2)(2, 3), ctypes.c_size_t(2), ctypes.c_size_t(1)) == 0
    assert hip.get_counter(ctypes.byref(value)) == 0
    assert value.value == before + 2


def test_copies_past_a_device_variable_are_refused(hip: ctypes.CDLL) -> None:
    assert hip.set_table((ctypes.c_int * 4)(), ctypes.c_size_t(4), ctypes.c_size_t(1)) == INVALID_VALUE
    assert "16 bytes at offset 4 of table, which has 16 bytes" in report()
    assert hip.set_table((ctypes.c_int * 1)(), ctypes.c_size_t(1), ctypes.c_size_t(4)) == INVALID_VALUE
    assert "4 bytes at offset 16 of table" in report()
    size = ctypes.c_size_t()
    assert hip.table_size(ctypes.byref(size)) == 0
    assert size.value == 16


def test_managed_variables_are_shared_with_the_host(hip: ctypes.CDLL) -> None:
    out = (ctypes.c_int * 3)()
    assert hip.run_managed(out) == 0
    assert list(out) == [107, 150, 109]


def test_allocate_copy_launch_copy_back(hip: ctypes.CDLL) -> None:
    host = torch.arange(1000, dtype=torch.int32)
    milliseconds = ctypes.c_float(-1.0)
    assert hip.round_trip(pointer(host), 1000, 3, ctypes.byref(milliseconds)) == 0, report()
    assert torch.equal(host, 8 * torch.arange(1000, dtype=torch.int32))
    assert milliseconds.value > 0


def test_one_element_past_a_hip_allocation_is_a_fault_with_its_name(hip: ctypes.CDLL) -> None:
    assert hip.past_the_block(48, 48) == 0
    assert hip.past_the_block(48, 49) == ILLEGAL_ADDRESS
    assert re.search(r"hipMalloc#\d+", report())
    assert "twice" in report()


def test_one_element_past_a_tensor_is_a_fault_with_its_name(hip: ctypes.CDLL) -> None:
    data = torch.zeros(65, dtype=torch.int32)
    with Extents(my_tensor=data[:63]):
        assert hip.run_reverse(pointer(data), 64, 256) == ILLEGAL_ADDRESS
    assert "my_tensor" in report()
    assert "reverse" in report()


def test_an_undeclared_tensor_is_a_fault(hip: ctypes.CDLL) -> None:
    data = torch.zeros(64, dtype=torch.int32)
    assert hip.run_reverse(pointer(data), 64, 256) == ILLEGAL_ADDRESS


def test_memory_misuse_is_an_error_and_not_a_crash(hip: ctypes.CDLL) -> None:
    assert hip.use_after_free(None) == ILLEGAL_ADDRESS
    assert hip.double_free() == INVALID_VALUE
    assert "does not start a live allocation" in report()
    assert hip.copy_too_much() == INVALID_VALUE
    assert re.search(r"65 bytes at offset 0 of hipMalloc#\d+, which has 64 bytes", report())
    assert hip.stale_stream() == 400


def test_rows_and_fills(hip: ctypes.CDLL) -> None:
    to, source = ctypes.create_string_buffer(b"." * 16, 16), ctypes.create_string_buffer(b"abcdefgh", 8)
    assert hip.copy_rows(to, source) == 0
    assert to.raw == b"abc.....efg....."
    words = (ctypes.c_int * 6)()
    assert hip.fill(words) == 0
    assert list(words) == [0x01020304] * 5 + [0]


def test_pointer_attributes(hip: ctypes.CDLL) -> None:
    kinds = (ctypes.c_int * 3)()
    assert hip.pointer_kinds(kinds) == 0
    assert list(kinds) == [2, 1, 0]  # hipMemoryTypeDevice, Host, Unregistered


@pytest.mark.parametrize(("arch", "cus", "lds"), [("gfx950", 256, 160 * 1024), ("gfx942", 304, 64 * 1024)])
def test_the_device_is_the_emulated_one(hip: ctypes.CDLL, arch: str, cus: int, lds: int) -> None:
    name, values, size = ctypes.create_string_buffer(256), (ctypes.c_int * 8)(), ctypes.c_size_t()
    with emulator.options(arch=arch):
        assert hip.device(name, values, ctypes.byref(size)) == 0
    assert name.value.decode() == f"{arch}:sramecc+:xnack-"
    assert list(values) == [cus, 64, 1024, 9, cus, 64, lds, 1]
    assert size.value == lds
    assert hip.second_device() == 101
    assert "the emulator has device 0" in report()


def test_one_module_runs_on_either_architecture(hip: ctypes.CDLL) -> None:
    for arch in ("gfx942", "gfx950"):
        out = torch.zeros(15 * 8 * 6, dtype=torch.int32)
        with emulator.options(arch=arch), Extents(out=out), emulator.counters() as counted:
            assert hip.run_where(pointer(out)) == 0
        assert counted.launches == 1
        assert out[-1] == 14 | 7 << 8 | 5 << 16


def test_attributes_and_occupancy(hip: ctypes.CDLL) -> None:
    values = (ctypes.c_int * 6)()
    assert hip.kernel_attributes(values) == 0
    registers, most_threads, with_lds, without_lds, grid, block = values
    assert 1 <= registers <= 64
    assert most_threads == 1024
    assert with_lds == 2  # 160 KiB / 80 KiB
    assert without_lds == 8  # 8 waves per SIMD, 4 SIMDs, 4 waves per block
    assert (block, grid) == (1024, 2 * 256)


def test_attribute_numbers_are_those_of_the_header(hip: ctypes.CDLL) -> None:
    """Three between others: with a number that is off by one, a neighbour's value would come back."""
    value = ctypes.c_int(-1)
    for number, expected in ((3, 1), (16, 0), (90, 1)):  # CanMapHostMemory, Integrated, HostRegisterSupported
        assert runtime.load().library.hipDeviceGetAttribute(ctypes.byref(value), number, 0) == 0
        assert value.value == expected


def test_error_names_and_texts(hip: ctypes.CDLL) -> None:
    assert hip.error_name(0) == b"hipSuccess"
    assert hip.error_name(719) == b"hipErrorLaunchFailure"
    assert hip.error_text(700) == b"an illegal memory access was encountered"
    assert hip.error_name(12345) == b"hipErrorUnknown"
    assert hip.last_error_twice() == 0


def test_the_error_string_of_a_fault_carries_its_first_line(hip: ctypes.CDLL) -> None:
    assert hip.past_the_block(4, 5) == ILLEGAL_ADDRESS
    text = hip.error_text(ILLEGAL_ADDRESS).decode()
    assert text.startswith("an illegal memory access was encountered: ")
    assert text.endswith(report().splitlines()[0])


def test_a_call_that_is_not_provided_fails_with_its_own_name(hip: ctypes.CDLL) -> None:
    assert hip.unprovided() == NOT_SUPPORTED
    assert report() == "hipGraphCreate is not provided by hipforge's emulator"
    assert b"hipGraphCreate" in hip.error_text(NOT_SUPPORTED)


def test_modules_load_launch_and_expose_variables(hip: ctypes.CDLL, tmp_path: Path) -> None:
    image = hip_compile.device_bundle(MODULE, tmp_path).read_bytes()
    out = torch.zeros(16, dtype=torch.int32)
    with Extents(out=out):
        assert hip.run_module(image, b"scaled_index", b"bias", pointer(out)) == 0, report()
    assert out.tolist() == [i * 3 + 1000 for i in range(8)] + [i * 5 + 1000 for i in range(8)]
    assert hip.run_module(image, b"missing", b"bias", pointer(out)) == 500
    assert "no kernel missing" in report()
    assert hip.run_module(b"not an image at all", b"x", b"y", pointer(out)) == 209
    assert "neither an ELF, an offload bundle nor a compressed bundle" in report()


def test_a_module_without_code_for_the_device_says_what_it_has(tmp_path: Path) -> None:
    text = MODULE + '\nextern "C" int go(int* p) { scaled_index<<<1, 1>>>(p, 1); return hipGetLastError(); }'
    runtime.load()
    module = ctypes.CDLL(str(hip_compile.shared_library(text, tmp_path, ("gfx942",))))
    assert module.go(None) == 209
    assert "no device code for gfx950; there is code for hipv4-amdgcn-amd-amdhsa--gfx942" in report()


def test_a_compressed_module_runs(tmp_path: Path) -> None:
    text = MODULE + '\nextern "C" int go(int* p) { scaled_index<<<1, 4>>>(p, 2); return hipGetLastError(); }'
    runtime.load()
    built = hip_compile.shared_library(text, tmp_path, ("gfx950",), ["--offload-compress"])
    out = torch.zeros(4, dtype=torch.int32)
    with Extents(out=out):
        assert ctypes.CDLL(str(built)).go(pointer(out)) == 0, report()
    assert out.tolist() == [1, 3, 5, 7]


def test_unloading_a_module_forgets_its_kernels(tmp_path: Path) -> None:
    import _ctypes

    text = MODULE + '\nextern "C" int go(int* p) { scaled_index<<<1, 4>>>(p, 2); return hipGetLastError(); }'
    runtime.load()
    built = hip_compile.shared_library(text, tmp_path)
    for _ in range(3):
        out = torch.zeros(4, dtype=torch.int32)
        module = ctypes.CDLL(str(built))
        with Extents(out=out):
            assert module.go(pointer(out)) == 0, report()
        assert out.tolist() == [1, 3, 5, 7]
        _ctypes.dlclose(module._handle)


def test_the_library_has_its_own_soname() -> None:
    readelf = subprocess.run(["readelf", "-d", library.build()], capture_output=True, text=True, check=True).stdout
    assert "soname: [libhipforge_emulator.so]" in readelf
    assert "libamdhip64" not in readelf


def hip_headers() -> Path:
    """The headers that modules are compiled with: ROCm's or a distribution's where there are any, else triton's."""
    return Path(toolchain.select("gfx950").roots()["ROCM"]) / "include"


def test_every_function_of_the_hip_api_is_there() -> None:
    """What the emulator lacks must fail by name at run time, never as an undefined symbol at load time."""
    header = (hip_headers() / "hip" / "hip_runtime_api.h").read_text()
    declared = set(re.findall(r"^(?:hipError_t|const char\s?\*|int)\s+(hip[A-Za-z0-9_]+)\(", header, re.MULTILINE))
    assert len(declared) > 400
    native = runtime.load().library
    in_cplusplus_namespace = {"hip_init"}
    missing = {name for name in declared if not hasattr(native, name)}
    assert missing == in_cplusplus_namespace


def test_types_agree_with_the_hip_headers(tmp_path: Path) -> None:
    """Compiles emulator/native/hip_types.h beside the real headers and compares every size and offset."""
    own = library.source_dir() / "hip_types.h"
    fields = re.findall(r"struct (\w+) \{(.*?)\n\};", own.read_text(), re.DOTALL)
    checks = []
    for struct, body in fields:
        checks.append(f"static_assert(sizeof(ours::{struct}) == sizeof(::{struct}));")
        for line in body.splitlines():
            found = re.match(r"\s+[\w ]+[\s*]+(\w+)(\[\w+\])?;", line)
            if found and found[1] != "textureAndSurfaceLimits":
                checks.append(
                    f"static_assert(offsetof(ours::{struct}, {found[1]}) == offsetof(::{struct}, {found[1]}));"
                )
    assert len(checks) > 100
    errors = re.findall(r"HFEMU_HIP_ERROR\((\w+), (\d+),", (own.parent / "hip_errors.inc").read_text())
    checks += [f"static_assert(int(::{name}) == {code});" for name, code in errors]
    constants = re.findall(r"(hip(?:Mem|DeviceAttribute)\w+) = (\d+)", own.read_text())
    assert len(constants) > 50
    checks += [f"static_assert(int(::{name}) == {value});" for name, value in constants]
    text = re.sub(r"#pragma once|#include <\w+>", "", own.read_text())
    text = text.replace('extern "C" {', "namespace ours {", 1)
    source = tmp_path / "types.cpp"
    headers = "#define __HIP_PLATFORM_AMD__\n#include <cstddef>\n#include <hip/hip_runtime_api.h>\n"
    source.write_text(headers + text + "\n".join(checks))
    compiler = ["g++", "-std=c++20", "-fsyntax-only", "-w", f"-I{hip_headers()}", str(source)]
    done = subprocess.run(compiler, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SPIN = r"""
#include "hip.h"
__global__ void spin(volatile int* flag) { while (*flag == 0) {} }
extern "C" int go(int* p) { spin<<<1, 64>>>(p); return hipGetLastError(); }
"""

INTERRUPTED = """
import ctypes, os, signal, sys, threading, time
import torch
from hipforge import emulator
from hipforge.emulator import runtime
code = emulator.CodeObject(sys.argv[1])
flag = torch.zeros(1, dtype=torch.int32)
ticks = 0
def interrupt():
    global ticks
    for ticks in range(5):  # this thread runs during the launch only if the GIL is free
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
runtime.load()
threading.Thread(target=interrupt).start()
try:
    emulator.launch(code.kernels["spin"], 1, 64, {"flag": flag})
except KeyboardInterrupt:
    print("interrupted after", ticks)
flag.fill_(1)
print(emulator.launch(code.kernels["spin"], 1, 64, {"flag": flag}).launches)
"""


def test_ctrl_c_ends_a_launch_and_the_emulator_goes_on(tmp_path: Path) -> None:
    built = hip_compile.device_elf(SPIN, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(built)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split("\n")[:2] == ["interrupted after 4", "1"], done.stdout + done.stderr
