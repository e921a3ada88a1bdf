"""The entries for other frameworks: what apache-tvm-ffi passes arrives as a call of ours does."""

from __future__ import annotations

import ctypes
import importlib
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import tvm_ffi
from helpers.abi_module import SOURCE

import hipforge
from hipforge import jit
from hipforge.errors import ConfigError
from hipforge.jit import host_library, registry

INT, BOOL, FLOAT, TENSOR, TEXT, SMALL_TEXT = 1, 2, 3, 7, 8, 11


class Any(ctypes.Structure):
    """One argument as apache-tvm-ffi's ABI documents it."""

    _fields_ = (("type", ctypes.c_int32), ("size", ctypes.c_uint32), ("value", ctypes.c_uint64))


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror"]
    return ctypes.CDLL(str(host_library.build("test_abi_module", sources=[SOURCE], cflags=flags)))


def call(library: ctypes.CDLL, name: str, *arguments: object) -> int:
    """Call an entry as a framework does; what a tensor is converted to lives as long as the call."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsules, given = [], (Any * len(arguments))()
    for slot, argument in zip(given, arguments, strict=True):
        match argument:
            case torch.Tensor():
                capsules.append(torch.utils.dlpack.to_dlpack(argument))
                slot.type, slot.value = TENSOR, pointer_of(capsules[-1], b"dltensor")
            case bool():
                slot.type, slot.value = BOOL, argument
            case int():
                slot.type, slot.value = INT, argument & (2**64 - 1)
            case float():
                slot.type, slot.value = FLOAT, ctypes.c_uint64.from_buffer(ctypes.c_double(argument)).value
            case bytes():
                slot.type, slot.value = SMALL_TEXT, int.from_bytes(argument, "little")
    return getattr(library, f"__tvm_ffi_{name}")(None, given, len(arguments), None)


NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize(("code", "dtype"), list(enumerate(NAMES, 1)))
def test_a_tensor_arrives_with_its_dtype_place_and_strides(library: ctypes.CDLL, code: int, dtype: str) -> None:
    x = torch.zeros(4, 6).to(getattr(torch, dtype))[1:, ::2]
    facts = torch.zeros(16, dtype=torch.int64)
    assert call(library, "describe", facts, x) == 0
    assert facts[:12].tolist() == [code, 2, x.data_ptr(), 0, 9, x.element_size(), 0, 0, 3, 3, 6, 2]


def test_numbers_texts_and_none_arrive(library: ctypes.CDLL) -> None:
    out = torch.zeros(6, dtype=torch.float64)
    assert call(library, "scalars", out, None, -5, 0.25, True, b"abc") == 0
    assert out[:5].tolist() == [0, -5, 0.25, 1, 3]
    assert call(library, "scalars", out, out, 2**62, 3, False, b"") == 0  # an integer for a float
    assert out[:5].tolist() == [1, 2.0**62, 3, 0, 0]


def test_a_wrong_call_fails_and_does_not_run(library: ctypes.CDLL) -> None:
    out = torch.zeros(6, dtype=torch.float64)
    wrong = [
        (out, None, 0.5, 0.5, True, b""),
        (None, None, 1, 0.5, True, b""),
        (out, 1, 1, 0.5, True, b""),
        (out,),
        (out,) * 65,
    ]
    assert [call(library, "scalars", *arguments) for arguments in wrong] == [-1] * 5
    assert not out.any()


def test_a_framework_loads_a_module_and_launches_on_the_emulator() -> None:
    x = torch.randn(5, 96)
    expected, scales = hipforge.fp8_quant_rows(x)
    own = ("module_fp8_quant_rows", {"HF_INPUT": "f32"})
    (path,) = (one.path for one in jit.loader.loaded() if (one.name, one.manifest.variant) == own)
    module = tvm_ffi.load_module(str(path / "module.so"))
    out, scale_out = torch.empty_like(expected), torch.empty_like(scales)
    module.fp8_quant_rows_out(out, scale_out, x)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale_out, scales)
    with pytest.raises(ValueError, match="scale"):
        module.fp8_quant_rows_out(out, scale_out[1:], x)
    with pytest.raises(TypeError, match="argument 0 must be a tensor"):
        module.fp8_quant_rows_out(None, scale_out, x)


def test_a_module_as_a_project_of_the_kernels_hub_builds_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tomllib = pytest.importorskip("tomllib")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / ".ci"))
    hub = importlib.import_module("hub")
    project = hub.lay_out("module_moe_align", ["moe_align_block_size_out"], tmp_path)
    stated = tomllib.loads((project / "build.toml").read_text())
    assert stated["kernel"]["moe_align_cuda"]["cuda-capabilities"] == ["9.0"]
    assert "-DHF_VENDOR=nvidia" in stated["kernel"]["moe_align_cuda"]["cuda-flags"]
    rocm = stated["kernel"]["moe_align_rocm"]
    assert rocm["rocm-archs"] == ["gfx950", "gfx942"]
    include = [str(project / folder) for folder in rocm["include"]]
    own = {"srcs": rocm["src"], "extra_include": include, "flags_extra_hip": rocm["hip-flags"]}
    (project / "modules.json").write_text(json.dumps({"module_hub": own}))
    with mock.patch.dict(registry._registered):
        jit.register(project / "modules.json")
        loaded = jit.load("module_hub", {}, "gfx950")
    ids = torch.tensor([[0, 1], [1, 2]])
    expected = hipforge.moe_align_block_size(ids, 4, 3)
    outs = [torch.empty_like(one) for one in expected]
    tvm_ffi.load_module(str(loaded.path / "module.so")).moe_align_block_size_out(*outs, ids, None, 4, 3, False)
    assert all(map(torch.equal, outs, expected))
    with pytest.raises(ConfigError, match="module_fp8_quant has variants"):
        hub.lay_out("module_fp8_quant", [], tmp_path)
