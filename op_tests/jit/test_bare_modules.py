"""A module that says "bare": true has hipforge/amd/hip.h in place of HIP's headers, and computes the same."""

from __future__ import annotations

import json

import pytest
import torch

from hipforge.errors import BuildError
from hipforge.jit import compile_ops, hip_module, obtain, register, registry
from hipforge.jit.backends.amd.code_object import KernelResources, read_code_objects
from hipforge.jit.obtain import Ready

SOURCE = r"""
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"

constexpr int kThreads = 24, kValues = 16;

// What every work item sees, after a sum over its work-group that needs the barrier.
__global__ __launch_bounds__(kThreads, 2) void look(int32_t* out) {
  __shared__ int32_t sum;
  const uint32_t own = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  if (own == kThreads - 1) sum = 100;
  __syncthreads();
  __hip_atomic_fetch_add(&sum, static_cast<int32_t>(own), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  __syncthreads();
  const uint32_t group = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const uint32_t values[kValues] = {threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z,
                                    blockDim.x, blockDim.y, blockDim.z, gridDim.x, gridDim.y, gridDim.z,
                                    static_cast<uint32_t>(sum), min(own, 5u), max(own, 5u),
                                    static_cast<uint32_t>(max(-3, static_cast<int>(own) - 8))};
  for (int i = 0; i < kValues; ++i) out[(group * kThreads + own) * kValues + i] = static_cast<int32_t>(values[i]);
}

void look_out(hf::Tensor out, hipStream_t stream) {
  HF_CHECK(out.numel() == int64_t{2 * 3 * 5} * kThreads * kValues, "out must have 11520 elements; got ", out.numel());
  HF_CHECK_ARCH(out, "gfx950", "gfx942");
  look<<<dim3(2, 3, 5), dim3(4, 3, 2), 0, stream>>>(out.data<int32_t>());
  HF_HIP(hipGetLastError());
}
HF_EXPORT(look_out);
"""


@compile_ops("module_test_bare", fc_name="look_out")
def look_bare(out: torch.Tensor) -> None: ...


@compile_ops("module_test_whole", fc_name="look_out")
def look_whole(out: torch.Tensor) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def registered(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bare")
    (folder / "look.cu").write_text(SOURCE)
    entries = {"module_test_bare": {"srcs": ["look.cu"], "bare": True}, "module_test_whole": {"srcs": ["look.cu"]}}
    (folder / "modules.json").write_text(json.dumps(entries))
    register(folder / "modules.json")


def expected() -> torch.Tensor:
    order = [(z, y, x) for z in range(5) for y in range(3) for x in range(2)]
    rows = []
    for bz, by, bx in order:
        for own in range(24):
            thread = (own % 4, own // 4 % 3, own // 12)
            rows.append([*thread, bx, by, bz, 4, 3, 2, 2, 3, 5, 100 + 276, min(own, 5), max(own, 5), max(-3, own - 8)])
    return torch.tensor(rows, dtype=torch.int32).flatten()


def kernel_of(module: str) -> KernelResources:
    found = obtain.look(hip_module.request(registry.module(module), None, "gfx950"))
    assert isinstance(found, Ready)
    (code,) = read_code_objects(found.entry.library)
    return code.find("look")


@pytest.mark.parametrize("look", [look_bare, look_whole])
def test_indices_sizes_and_barriers_are_those_of_hip(look):
    out = torch.full((11520,), -1, dtype=torch.int32)
    look(out)
    assert torch.equal(out, expected())


def test_bounds_of_a_launch_are_those_of_hip():
    for look in (look_bare, look_whole):
        look(torch.empty(11520, dtype=torch.int32))
    bare, whole = kernel_of("module_test_bare"), kernel_of("module_test_whole")
    assert (bare.max_workgroup_size, bare.vgpr_allocated) == (whole.max_workgroup_size, whole.vgpr_allocated)
    assert bare.max_workgroup_size == 24


def test_a_bare_source_that_needs_more_of_hip_is_told_so(tmp_path):
    (tmp_path / "more.cu").write_text(SOURCE.replace("hipforge/amd/hip.h", "hip/hip_runtime.h"))
    (tmp_path / "calls.cu").write_text(SOURCE.replace("max(own, 5u)", "__popc(own)"))
    names = ("more", "calls")
    entries = {f"module_test_{name}": {"srcs": [f"{name}.cu"], "bare": True} for name in names}
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    register(tmp_path / "modules.json")
    for name in names:
        with pytest.raises(BuildError, match=r'remove "bare" and include hip/hip_runtime\.h'):
            obtain.binary(hip_module.request(registry.module(f"module_test_{name}"), None, "gfx950").specify())


API = r"""
#include <stddef.h>
#include "hipforge/amd/hip.h"

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

static_assert(hipSuccess == 0 && sizeof(hipError_t) == 4);
static_assert(sizeof(dim3) == 12 && offsetof(dim3, y) == 4 && offsetof(dim3, z) == 8);
static_assert(same<hipStream_t, ihipStream_t*>);
static_assert(same<hipDeviceProp_t, hipDeviceProp_tR0600>);
static_assert(sizeof(hipDeviceProp_t) == 1472 && alignof(hipDeviceProp_t) == 8);
static_assert(offsetof(hipDeviceProp_t, gcnArchName) == 1160 && sizeof(hipDeviceProp_t::gcnArchName) == 256);

#define HAS(name, ...) static_assert(same<decltype(&name), __VA_ARGS__>)
HAS(hipGetDevice, hipError_t (*)(int*));
HAS(hipSetDevice, hipError_t (*)(int));
HAS(hipGetDevicePropertiesR0600, hipError_t (*)(hipDeviceProp_tR0600*, int));
HAS(hipGetLastError, hipError_t (*)());
HAS(hipGetErrorName, const char* (*)(hipError_t));
HAS(hipGetErrorString, const char* (*)(hipError_t));
HAS(hipMemsetAsync, hipError_t (*)(void*, int, size_t, hipStream_t));
HAS(__hipPushCallConfiguration, hipError_t (*)(dim3, dim3, size_t, hipStream_t));
HAS(hipLaunchKernel, hipError_t (*)(const void*, dim3, dim3, void**, size_t, hipStream_t));
"""


@pytest.mark.parametrize("whole", [False, True])
def test_the_runtime_is_declared_as_its_own_header_declares_it(tmp_path, whole):
    (tmp_path / "api.cu").write_text(API + SOURCE)
    flags = ["-DHF_WHOLE_HIP_API"] if whole else []
    entries = {"module_test_api": {"srcs": ["api.cu"], "bare": True, "flags_extra_hip": flags}}
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    register(tmp_path / "modules.json")
    entry = obtain.binary(hip_module.request(registry.module("module_test_api"), None, "gfx950").specify()).entry
    read = any("hip_runtime_api.h" in path for path, _ in entry.manifest.dependencies)
    assert read == whole


def test_every_shipped_module_is_bare():
    assert [name for name, entry in registry.shipped().items() if not entry.bare] == []
