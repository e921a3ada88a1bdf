"""Modules that bring their own PYBIND11_MODULE: built like any other, called through their own binding."""

from __future__ import annotations

import json

import pytest
import torch

from hipforge.errors import ConfigError, EmulatorFault
from hipforge.jit import registry
from hipforge.jit.compile_ops import compile_ops

KERNEL = r"""
#include "hipforge/amd/hip.h"
__global__ void add(const float* x, float* out, float value, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + value;
}
int launch_add(const float* x, float* out, float value, int64_t n) {
  add<<<(n + 63) / 64, 64>>>(x, out, value, n);
  return hipGetLastError();
}
"""

# One translation unit with pybind11.h, no torch: tensors arrive as Python objects or as addresses.
BINDING = r"""
#include <pybind11/pybind11.h>
#include <cstdint>
namespace py = pybind11;
int launch_add(const float* x, float* out, float value, int64_t n);

static float* address(const py::object& tensor) {
  return reinterpret_cast<float*>(tensor.attr("data_ptr")().cast<uintptr_t>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("add_objects", [](py::object out, py::object x, double value) {
    const auto n = out.attr("numel")().cast<int64_t>();
    if (x.attr("numel")().cast<int64_t>() < n) throw std::invalid_argument("x is shorter than out");
    launch_add(address(x), address(out), static_cast<float>(value), n);
  });
  m.def("sum_addresses", [](uintptr_t x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += reinterpret_cast<const float*>(x)[i];
    return sum;
  });
  m.def("overrun", [](py::object out) {
    launch_add(address(out), address(out), 1, out.attr("numel")().cast<int64_t>() + 1);
  });
}
"""


@pytest.fixture(scope="module", autouse=True)
def registered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pybind11")
    (folder / "kernel.cu").write_text(KERNEL)
    (folder / "binding.cpp").write_text(BINDING)
    (folder / "modules.json").write_text(
        json.dumps({"module_test_pybind11": {"srcs": ["kernel.cu", "binding.cpp"], "ffi": "pybind11", "bare": True}})
    )
    registry.register(folder / "modules.json")


@compile_ops("module_test_pybind11")
def add_objects(out: torch.Tensor, x: torch.Tensor, value: float = 1.0) -> None: ...


@compile_ops("module_test_pybind11", fc_name="sum_addresses", mutates=())
def total(x: int, n: int = 2) -> float: ...


@compile_ops("module_test_pybind11")
def overrun(out: torch.Tensor) -> None: ...


def test_a_kernel_behind_pybind11_computes_exactly():
    x, out = torch.arange(100, dtype=torch.float32), torch.empty(100)
    assert add_objects(out, x, 3.0) is None
    assert torch.equal(out, x + 3)


def test_keywords_and_the_stubs_own_defaults_apply():
    out = torch.zeros(4)
    for _ in range(2):  # the first call and a later one take different paths
        add_objects(x=torch.ones(4), out=out)
        assert out.tolist() == [2, 2, 2, 2]


def test_a_function_may_return_a_value_and_take_addresses():
    x = torch.tensor([1.5, 2.0, 4.0])
    assert total(x.data_ptr(), 3) == 7.5
    assert total(x.data_ptr()) == 3.5


def test_an_exception_of_the_module_is_its_own():
    with pytest.raises(ValueError, match="x is shorter than out"):
        add_objects(torch.empty(4), torch.empty(3))


def test_the_emulator_still_checks_every_tensor_argument():
    with pytest.raises(EmulatorFault, match=r"overrun: (.|\n)*\bout\b"):
        overrun(torch.zeros(64))


def test_a_function_that_is_not_defined_lists_those_that_are():
    @compile_ops("module_test_pybind11")
    def missing(out: torch.Tensor) -> None: ...

    with pytest.raises(ConfigError, match="defines no 'missing'; it defines: add_objects, overrun, sum_addresses"):
        missing(torch.empty(1))


def test_fake_tensors_run_nothing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    add_objects(torch.empty(2), torch.ones(2))
    with FakeTensorMode():
        add_objects(torch.empty(2), torch.empty(2))
    add_objects(torch.empty(2, device="meta"), torch.empty(2, device="meta"))


def test_torch_compile_takes_it_too():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(x):
        out = torch.empty_like(x)
        add_objects(out, x, 5.0)
        return 2 * out

    assert function(torch.ones(3)).tolist() == [12, 12, 12]
