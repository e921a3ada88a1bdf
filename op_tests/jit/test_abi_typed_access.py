"""``x.data<T>()`` gives only what the tensor holds, and the host's side of the ABI is free of vendors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from helpers.abi_module import read_as

import hipforge.csrc
from hipforge.errors import GuardError

HOST = Path(hipforge.csrc.__file__).parent / "include" / "hipforge" / "host"
EXACT = {
    "bool": torch.bool, "int8_t": torch.int8, "int16_t": torch.int16, "int32_t": torch.int32, "int64_t": torch.int64,
    "float": torch.float32, "double": torch.float64,
}  # fmt: skip
BITS = {"uint8_t": 1, "uint16_t": 2, "uint32_t": 4, "uint64_t": 8}
DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)  # fmt: skip


def may_be_read(dtype: torch.dtype, type_name: str) -> bool:
    if type_name == "char":
        return True
    if type_name in BITS:
        return dtype.itemsize == BITS[type_name]
    return EXACT[type_name] == dtype


@pytest.mark.parametrize("type_name", ["char", *BITS, *EXACT])
def test_a_tensor_is_read_only_as_what_it_holds(bound, type_name):
    call = bound(read_as, mutates=("x",))
    for dtype in DTYPES:
        x = torch.zeros(16, dtype=torch.uint8).view(dtype)
        if may_be_read(dtype, type_name):
            call(x, None, type_name)
            call(x, x, type_name)
        else:
            with pytest.raises(GuardError, match=r"the kernel reads .*; got a tensor of \w+ \[\d+\]\. Convert it"):
                call(x, None, type_name)


def test_an_optional_tensor_is_held_to_its_type_too_and_may_be_absent(bound):
    call = bound(read_as, mutates=("x",))
    x = torch.zeros(2)
    call(x, None, "float")
    with pytest.raises(GuardError, match=r"the kernel reads float32; got a tensor of float64 \[2\]"):
        call(x, x.double(), "float")


def test_a_type_that_is_no_element_type_does_not_compile(tmp_path):
    from hipforge.errors import BuildError
    from hipforge.jit import host_library

    source = tmp_path / "pairs.cpp"
    source.write_text(
        '#include "hipforge/host/export.h"\nstruct Pair { float a, b; };\n'
        "static void f(hf::Tensor x) { (void)x.data<Pair>(); }\nHF_EXPORT(f);\n"
    )
    with pytest.raises(BuildError, match=r"for another type take data\(\) and cast"):
        host_library.build("pairs", sources=[source], cflags=["-std=c++17"])


def test_the_hosts_headers_name_no_vendor_runtime_or_architecture():
    words = re.compile(r"\b(hip\w*|ihip\w*|amd\w*|rocm\w*|cuda\w*|gfx\w*|sm_\d+|vgpr\w*|lds)\b", re.IGNORECASE)
    for path in HOST.glob("*.h"):
        text = re.sub(r"hipforge|hip_bfloat16", "", path.read_text(), flags=re.IGNORECASE)
        assert words.findall(text) == [], path
