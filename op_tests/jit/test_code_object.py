"""The device-code readers, in Python and in the emulator's library, on what clang writes."""

from __future__ import annotations

import ctypes
import random
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from helpers import hip_compile

from hipforge import emulator
from hipforge.emulator import library, runtime
from hipforge.errors import ArchError
from hipforge.jit import toolchain
from hipforge.jit.backends.amd import code_object
from hipforge.jit.backends.amd.code_object import (
    COMPRESSED_MAGIC,
    CodeObject,
    CodeObjectError,
    KernelResources,
    device_images,
    fatbin,
    read_code_objects,
)
from hipforge.jit.demangle import base_name, short_name

SOURCE = """
#include "hip.h"
struct Pair { int a; double b; };
__constant__ float table[4];
template <typename T, int N> __global__ void scale(T* y, const T* x, T a, int n, Pair p) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] * table[N & 3] + p.a;
}
template __global__ void scale<float, 2>(float*, const float*, float, int, Pair);
template __global__ void scale<double, 3>(double*, const double*, double, int, Pair);
namespace inner {
__global__ __launch_bounds__(128) void shared_sum(int* out) {
  __shared__ int s[96];
  s[threadIdx.x % 96] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[95 - threadIdx.x % 96];
}
}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("code_object")

    def sub(name: str) -> Path:
        made = directory / name
        made.mkdir()
        return made

    both = ("gfx950", "gfx942")
    same = ["-cuid=same"]  # else the hash of the path would be part of the code
    return {
        # With HIP's own headers and device libraries, which state a language.
        "elf": hip_compile.device_elf(SOURCE.replace('"hip.h"', "<hip/hip_runtime.h>"), sub("elf")),
        "bundle": hip_compile.device_bundle(SOURCE, sub("bundle"), both),
        "so": hip_compile.shared_library(SOURCE, sub("so"), both, same),
        "object": hip_compile.host_object(SOURCE, sub("object")),
        "compressed": hip_compile.shared_library(SOURCE, sub("compressed"), both, ["--offload-compress", *same]),
    }


def find(objects: list[CodeObject], arch: str) -> CodeObject:
    return next(item for item in objects if item.arch == arch)


def test_every_container_holds_the_same_kernels(built: dict[str, Path]) -> None:
    names = {
        "_Z5scaleIfLi2EEvPT_PKS0_S0_i4Pair",
        "_Z5scaleIdLi3EEvPT_PKS0_S0_i4Pair",
        "_ZN5inner10shared_sumEPi",
    }
    for kind in ("elf", "bundle", "so", "object"):
        code = find(read_code_objects(built[kind]), "gfx950")
        assert set(code.kernels) == names, kind


def test_both_architectures_are_told_apart_by_the_elf(built: dict[str, Path]) -> None:
    for kind in ("bundle", "so"):
        assert sorted(item.arch for item in read_code_objects(built[kind])) == ["gfx942", "gfx950"]


def test_arguments_and_static_resources(built: dict[str, Path]) -> None:
    code = read_code_objects(built["elf"])[0]
    kernel = code.find("scale<float, 2>")
    explicit = [(arg.offset, arg.size, arg.kind) for arg in kernel.args if not arg.hidden]
    assert explicit == [
        (0, 8, "global_buffer"), (8, 8, "global_buffer"), (16, 4, "by_value"), (20, 4, "by_value"),
        (24, 16, "by_value"),
    ]  # fmt: skip
    assert any(arg.kind == "hidden_group_size_x" for arg in kernel.args)
    assert code.find("shared_sum").lds_bytes == 96 * 4
    assert code.find("shared_sum").max_workgroup_size == 128
    assert kernel.language == "OpenCL C"


def test_resources_agree_with_llvm_readelf(built: dict[str, Path]) -> None:
    readelf = next((found for name in ("llvm-readelf-22", "llvm-readelf") if (found := shutil.which(name))), None)
    assert readelf is not None, "the clang toolchain brings llvm-readelf"
    text = subprocess.run([readelf, "--notes", built["elf"]], capture_output=True, text=True, check=True).stdout
    for block in text.split("- .agpr_count")[1:]:
        fields = dict(line.strip().split(":", 1) for line in block.splitlines() if line.strip().count(":") == 1)
        kernel = read_code_objects(built["elf"])[0].kernels[fields[".name"].strip()]
        assert kernel.vgpr == int(fields[".vgpr_count"])
        assert kernel.sgpr == int(fields[".sgpr_count"])
        assert kernel.lds_bytes == int(fields[".group_segment_fixed_size"])
        assert kernel.kernarg_bytes == int(fields[".kernarg_segment_size"])


def test_plain_names_work_where_they_are_unique(built: dict[str, Path]) -> None:
    code = read_code_objects(built["elf"])[0]
    assert code.find("shared_sum").name == "_ZN5inner10shared_sumEPi"
    assert code.find("inner::shared_sum").name == "_ZN5inner10shared_sumEPi"
    with pytest.raises(KeyError, match="names 2 kernels"):
        code.find("scale")
    with pytest.raises(KeyError, match=r"no kernel 'missing'.*scale<double, 3>"):
        code.find("missing")


@pytest.mark.parametrize(
    ("symbol", "short"),
    [
        ("plain", "plain"),
        ("_Z5plainPi", "plain"),
        ("_Z4axpyIfLi2EEvPT_PKS0_S0_i", "axpy<float, 2>"),
        ("_ZN2ns3sub4kernIDF16_Lb1ELin3EEEvPT_", "ns::sub::kern<_Float16, true, -3>"),
        ("_ZN12_GLOBAL__N_14hideIhEEvPT_", "hide<unsigned char>"),
        ("_Z4packIJifEEvDpT_", "pack<int, float>"),
        ("_Z3useIN2ns4TypeEPKS1_EvT_T0_", "use<ns::Type, ns::Type const*>"),
        ("_Z1fIXadL_Z1gvEEEvv", "f<&(g())>"),
        ("_Z4wrapI3BoxIS0_IDF16bEEEvT_PFvDF16bE", "wrap<Box<Box<__bf16>>>"),
        ("_Z9nonsense", "_Z9nonsense"),  # no name at all: the symbol remains
        ("_ZL6hiddenPi", "hidden"),
        ("void (anonymous namespace)::norm<16, ns::Out<(int)2> >(long const*, ns::P)", "norm<16, ns::Out<(int)2>>"),
    ],
)
def test_short_names(symbol: str, short: str) -> None:
    assert short_name(symbol) == short
    assert base_name(symbol) == short.split("<")[0].split("::")[-1]


def resources(**changes: int) -> KernelResources:
    values = {
        "name": "k", "vgpr": 64, "agpr": 0, "sgpr": 32, "vgpr_spills": 0, "sgpr_spills": 0, "lds_bytes": 0,
        "scratch_bytes": 0, "kernarg_bytes": 0, "max_workgroup_size": 1024, "args": (), "vgpr_allocated": 64,
    }  # fmt: skip
    return KernelResources(**{**values, **changes})


@pytest.mark.parametrize(
    ("granted", "waves"), [(8, 8), (64, 8), (72, 7), (128, 4), (136, 3), (256, 2), (264, 1), (512, 1)]
)
def test_occupancy_is_512_over_the_granted_registers(granted: int, waves: int) -> None:
    assert resources(vgpr=granted, vgpr_allocated=granted).occupancy == waves


def test_occupancy_with_many_scalar_registers() -> None:
    assert resources(sgpr=100).occupancy == 8
    assert resources(sgpr=102).occupancy == 7


def test_lds_limits_resident_work_groups() -> None:
    # 160 KiB hold two work-groups of 80 KiB; four waves each on four SIMDs are two waves per SIMD.
    assert resources(lds_bytes=80 * 1024).waves_per_simd(256) == 2
    assert resources(lds_bytes=80 * 1024).waves_per_simd(256, dynamic_lds=1) == 1
    assert resources(lds_bytes=161 * 1024).waves_per_simd(256) == 0
    # 27200 bytes take 22 granules of 1280: five work-groups in 160 KB, although six times 27200 bytes would fit.
    assert resources(lds_bytes=27200).waves_per_simd(256) == 5


def test_a_zstd_bundle_is_read(built: dict[str, Path]) -> None:
    plain = {code.arch: code.image for code in read_code_objects(built["so"])}
    assert {code.arch: code.image for code in read_code_objects(built["compressed"])} == plain
    for arch in ("gfx950", "gfx942"):
        assert emulator.CodeObject(built["compressed"], arch=arch)._parsed.image == plain[arch]


def test_a_zlib_bundle_is_read(built: dict[str, Path]) -> None:
    raw = built["bundle"].read_bytes()
    packed = zlib.compress(raw)
    header = COMPRESSED_MAGIC + struct.pack("<HHIIQ", 2, 0, 24 + len(packed), len(raw), 0)
    assert list(device_images(header + packed)) == list(device_images(raw))


def test_several_bundles_in_one_section_are_all_read(built: dict[str, Path]) -> None:
    raw = built["bundle"].read_bytes()
    padded = raw + bytes(-len(raw) % 4096)
    assert len(list(device_images(padded + raw))) == 2 * len(list(device_images(raw)))


def test_what_is_not_device_code_is_refused(built: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CodeObjectError, match="not an ELF"):
        read_code_objects(b"no such thing")
    with pytest.raises(CodeObjectError, match=r"without a \.hip_fatbin section"):
        read_code_objects(shutil.which("true") or "/bin/true")
    whole = built["elf"].read_bytes()
    damaged = tmp_path / "damaged.co"
    damaged.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CodeObjectError, match=r"damaged\.co"):
        read_code_objects(damaged)


def test_no_prefix_of_a_bundle_crashes_either_reader(built: dict[str, Path]) -> None:
    whole = built["bundle"].read_bytes()
    for length in [*range(0, 200, 7), *range(200, len(whole), 997)]:
        with pytest.raises(CodeObjectError):
            read_code_objects(whole[:length])
        with pytest.raises(CodeObjectError):
            emulator.CodeObject(whole[:length], arch="gfx950")


def test_a_truncated_image_is_refused_by_the_loader(built: dict[str, Path]) -> None:
    whole = built["elf"].read_bytes()
    native = runtime.load().library
    for length in range(1, len(whole) - 1, 331):
        handle = native.hfemu_load(whole[:length], length, b"gfx950")
        if handle:  # what is cut off may be sections that running does not need
            native.hfemu_unload(handle)
        else:
            assert library.last_error()
    assert native.hfemu_load(whole[:-1000], len(whole) - 1000, b"gfx942") == 0
    assert "no device code for gfx942; there is code for gfx950" in (library.last_error() or "")


def test_an_architecture_that_is_not_there_is_an_arch_error(built: dict[str, Path]) -> None:
    with pytest.raises(ArchError, match=r"gfx942.*it has: gfx950"):
        emulator.CodeObject(built["elf"], arch="gfx942")


@pytest.mark.parametrize("level", [1, 19])
def test_what_clangs_bundler_compresses_with_zstd_is_read(level: int, built: dict[str, Path], tmp_path: Path) -> None:
    plain = built["elf"].read_bytes()
    bundler = Path(toolchain.select("gfx950").roots()["LLVM"]) / "bin" / "clang-offload-bundler"
    command = [
        bundler, "--type=o", "--targets=host-x86_64-unknown-linux-gnu,hipv4-amdgcn-amd-amdhsa--gfx950",
        "--input=/dev/null", f"--input={built['elf']}", "--output=packed", "--compress",
        f"--compression-level={level}",
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True)
    packed = (tmp_path / "packed").read_bytes()
    assert packed.startswith(COMPRESSED_MAGIC)
    assert list(device_images(packed)) == [("hipv4-amdgcn-amd-amdhsa--gfx950", plain)]
    assert _loads(packed)


def test_damaged_zstd_data_never_crashes_a_reader(built: dict[str, Path]) -> None:
    fat = fatbin(built["compressed"].read_bytes())
    header = 32
    random_bytes = random.Random(0)
    refused = {"python": 0, "native": 0}
    for _ in range(300):
        position = random_bytes.randrange(header, len(fat))
        damaged = bytearray(fat)
        damaged[position] ^= 1 << random_bytes.randrange(8)
        try:
            read_code_objects(bytes(damaged))
        except CodeObjectError:
            refused["python"] += 1
        refused["native"] += not _loads(bytes(damaged))
    assert min(refused.values()) > 100  # the rest only changes literal bytes of the result


def test_a_machine_without_libzstd_is_told_what_to_install(
    built: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: ctypes.cdll.LoadLibrary(f"/nowhere/{name}"))
    code_object._libzstd.cache_clear()
    with pytest.raises(CodeObjectError, match=r"no libzstd\.so\.1 to read it; install libzstd1"):
        read_code_objects(built["compressed"])


def _loads(image: bytes) -> bool:
    """Whether the emulator's own reader takes some device code."""
    native = runtime.load().library
    handle = native.hfemu_load(image, len(image), b"gfx950")
    native.hfemu_unload(handle)
    return bool(handle)


def _compressed(raw_bytes: int, payload: bytes, version: int = 2) -> bytes:
    form = "<4sHHIIQ" if version == 2 else "<4sHHQQQ"
    return struct.pack(form, COMPRESSED_MAGIC, version, 0, struct.calcsize(form) + len(payload), raw_bytes, 0) + payload


def test_a_header_that_promises_more_than_any_compressor_gains_is_refused_before_memory_is_taken() -> None:
    payload = zlib.compress(bytes(100_000))
    for version in (2, 3):
        with pytest.raises(CodeObjectError, match=f"promises 4294967295 bytes from {len(payload)} compressed ones"):
            read_code_objects(_compressed(2**32 - 1, payload, version))
    for version in (2, 3):
        damaged = _compressed(2**32 - 1, payload, version)
        assert not _loads(damaged[:6] + b"\1" + damaged[7:])  # as zstd: the emulator reads nothing else
        assert f"promises 4294967295 bytes from {len(payload)} " in (library.last_error() or "")
    with pytest.raises(CodeObjectError, match="gave 1001 bytes where its header promises 1000"):
        read_code_objects(_compressed(1000, payload))


def test_a_table_of_sections_past_any_address_is_damage(built: dict[str, Path]) -> None:
    raw = bytearray(built["so"].read_bytes())
    struct.pack_into("<Q", raw, 40, 2**64 - 1)
    with pytest.raises(CodeObjectError, match="damaged or truncated"):
        read_code_objects(bytes(raw))
