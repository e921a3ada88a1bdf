"""Modules and stubs as aiter declares them: three kernels run, and what is refused names its replacement."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest
import torch
from helpers.draws import normal
from torch import Tensor

from hipforge import aiter_compat
from hipforge.aiter_compat import compile_ops
from hipforge.errors import ConfigError
from hipforge.jit import compile_ops as own_compile_ops
from hipforge.jit import registry

FOLDER = Path(__file__).resolve().parents[1] / "helpers" / "aiter_kernels"
MODULE = "module_aiter_sample"
aiter_compat.register(FOLDER / "modules.json", AITER_CSRC_DIR=FOLDER)


@compile_ops(MODULE)
def silu_and_mul(out: Tensor, input: Tensor) -> None: ...


@compile_ops(MODULE, fc_name="rms_norm")
def rms_norm_cu(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None: ...


@compile_ops(MODULE, ffi_type="pybind", develop=False)
def static_per_tensor_quant(out: Tensor, input: Tensor, scale: Tensor) -> None: ...


def test_the_activation_kernel_runs() -> None:
    x = normal(5, 200, seed=0).bfloat16()
    out = torch.empty(5, 100, dtype=torch.bfloat16)
    silu_and_mul(out, x)
    gate, up = x.double().chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    # float32 arithmetic and one rounding to bfloat16: half a unit in the last place is 2^-9 of the value
    assert torch.allclose(out.double(), want, rtol=2**-8, atol=1e-6)


def test_the_norm_kernel_runs_and_weighs_each_column() -> None:
    x, weight = normal(3, 300, seed=1).half(), normal(300, seed=2).half()
    out = torch.empty_like(x)
    rms_norm_cu(out, x, weight, 1e-5)
    exact = x.double()
    want = exact * torch.rsqrt(exact.square().mean(dim=1, keepdim=True) + 1e-5) * weight.double()
    # one rounding to float16: 2^-11 of the value; twice that for the float32 sum
    assert torch.allclose(out.double(), want, rtol=2**-10, atol=2**-20)


def test_the_quantisation_kernel_runs_exactly() -> None:
    x = (torch.arange(-400, 400) / 2).bfloat16()
    out = torch.empty(x.shape, dtype=torch.int8)
    static_per_tensor_quant(out, x, torch.tensor([0.5]))
    assert torch.equal(out, (x.float() / 0.5).round().clamp(-127, 127).to(torch.int8))


def test_torch_checks_of_the_module_reach_the_caller() -> None:
    with pytest.raises(RuntimeError, match="twice the columns of out; got 7"):
        silu_and_mul(torch.empty(1, 3, dtype=torch.bfloat16), torch.empty(1, 7, dtype=torch.bfloat16))


def test_every_tensor_of_a_stub_that_returns_none_counts_as_written() -> None:
    assert [item.mutated for item in silu_and_mul.stub.signature.parameters] == [True, True]


# By hand: pybind11's header takes seconds.
PLAIN = """
#include <Python.h>
static PyObject* times(PyObject*, PyObject* x) { return PyLong_FromLong(PyLong_AsLong(x) * FACTOR); }
static PyMethodDef functions[] = {{"times", times, METH_O, nullptr}, {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "plain", nullptr, -1, functions};
#define INIT(name) PyInit_##name
#define INIT_OF(name) INIT(name)
PyMODINIT_FUNC INIT_OF(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


def test_gen_func_chooses_the_flags_of_a_call_and_builds_one_module_for_each_name(tmp_path: Path) -> None:
    (tmp_path / "plain.cpp").write_text(PLAIN)
    values = {"module_plain": {"srcs": ["plain.cpp"], "ffi": "pybind11", "torch_exclude": True}}
    registry.register_values(tmp_path / "modules.json", values)

    def build_arguments(x: int) -> dict[str, object]:
        factor = 3 if x % 2 else 5
        return {"md_name": f"module_plain_{factor}", "flags_extra_cc": [f"-DFACTOR={factor}"], "verbose": False}

    @compile_ops("module_plain", fc_name="times", gen_func=build_arguments)
    def generated(x: int) -> int: ...

    assert (generated(7), generated(8), generated(9)) == (21, 40, 27)
    derived = registry.module("module_plain_3")
    assert derived.flags_extra_cc == ("-DFACTOR=3",) and derived.srcs == registry.module("module_plain").srcs


def test_what_gen_func_returns_is_checked_by_name() -> None:
    @compile_ops(MODULE, gen_func=lambda out: {"md_name": "module_x", "third": 1})
    def broken(out: Tensor) -> None: ...

    with pytest.raises(ConfigError, match="gen_func returned 'third'; accepted: md_name, srcs"):
        broken(torch.empty(1))


def test_an_argument_that_is_refused_names_what_replaces_it() -> None:
    with pytest.raises(ConfigError, match="expected 'pybind' or 'ctypes'"):
        compile_ops(MODULE, ffi_type="cffi")


def test_a_module_of_torch_tensors_is_not_called_with_structs() -> None:
    @compile_ops(MODULE, develop=True)
    def silu_and_mul(out: Tensor, input: Tensor) -> None: ...

    with pytest.raises(ConfigError, match=r"has aiter_tensor\.h, which defines aiter_tensor_t.*extra_include"):
        silu_and_mul(torch.empty(1), torch.empty(1))


def test_a_stub_of_the_other_binding_is_refused_at_its_call() -> None:
    @compile_ops(MODULE, ffi_type="ctypes")
    def silu_and_mul(out: Tensor, input: Tensor) -> None: ...

    with pytest.raises(ConfigError, match=r'has "ffi": "pybind11".*use ffi_type=.pybind.'):
        silu_and_mul(torch.empty(1), torch.empty(1))


def test_ctypes_stubs_call_entries_of_the_abi() -> None:
    @compile_ops("module_fp8_quant", ffi_type="ctypes")
    def not_there(out: Tensor) -> None: ...

    with pytest.raises(ConfigError, match="not_there"):
        not_there(torch.empty(1))
    assert own_compile_ops is not compile_ops


# ---- the JSON --------------------------------------------------------------------------------------------------------


def test_aiters_expressions_are_read_without_being_evaluated(tmp_path: Path) -> None:
    (tmp_path / "b.cu").write_text("")
    (tmp_path / "a.h").write_text("")
    entry = {
        "srcs": ["f'{AITER_CSRC_DIR}'", "'/x/c.cu'", "f'{AITER_CSRC_DIR}/a.h'"],
        "flags_extra_hip": ["'-DENABLE_FP8'"],
        "extra_ldflags": "None",
        "blob_gen_cmd": ["f'{CK_DIR}/generate.py --filter *fp16* --output_dir {{}}'"],
        "verbose": "True",
        "isASM": "False",
        "torch_exclude": "True",
    }
    places = {"AITER_CSRC_DIR": tmp_path, "CK_DIR": "/ck"}
    assert aiter_compat.convert_json({"module_a": entry}, places)["module_a"] == {
        "ffi": "pybind11",
        "srcs": [str(tmp_path / "b.cu"), "/x/c.cu"],
        "flags_extra_hip": ["-DENABLE_FP8"],
        "blob_gen_cmd": ["${PYTHON} /ck/generate.py --filter *fp16* --output_dir ${GEN}"],
        "verbose": True,
        "torch_exclude": True,
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"srcs": ["f'{AITER_META_DIR}/a.cu'"]}, "AITER_META_DIR=..."),
        ({"srcs": ["__import__('os').listdir('/')"]}, "neither a literal nor an f-string"),
        ({"srcs": ["f'{open(1)}'"]}, "is not a name"),
        ({"hip_clang_path": "'/opt/clang'"}, "HIPFORGE_HIPCC"),
        ({"is_standalone": "True"}, "executable"),
        ({"sources": []}, "unknown key 'sources'"),
    ],
)
def test_a_json_that_cannot_be_taken_says_what_to_write(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        aiter_compat.convert_json({"module_a": entry}, {})


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(ConfigError, match=r"m\.json: cannot be read as JSON"):
        aiter_compat.register(tmp_path / "m.json")
    assert json.loads((FOLDER / "modules.json").read_text())


def test_the_examples_of_the_docstrings_hold() -> None:
    assert doctest.testmod(aiter_compat.config).attempted and not doctest.testmod(aiter_compat.config).failed
