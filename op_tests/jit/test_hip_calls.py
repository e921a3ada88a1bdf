"""What a module asks of HIP on a GPU, recorded by a stand-in for ``libamdhip64``: the calls, their order, the stream.

This is what graph capture asks for: everything on the caller's stream, nothing that waits or allocates.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hip_symbols import MODULES, undefined

from hipforge.emulator import library
from hipforge.jit import hip_module, host_library, obtain, registry, toolchain

CHILD = """
import ctypes, sys
import torch
from hipforge.jit.call import abi
from hipforge.jit.call.signature import signature_of

recorder = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
module = ctypes.CDLL(sys.argv[2])
plain = abi.read_tensor
abi.read_tensor = lambda tensor: (*plain(tensor)[:2], True, 1, *plain(tensor)[4:])  # as if on GPU 1
abi.read_stream = lambda index: 0x5000 + index

def fp8_quant_tensorwise_out(
    out: torch.Tensor, out_t: torch.Tensor | None, inv_scale: torch.Tensor, workspace: torch.Tensor, x: torch.Tensor
) -> None: ...

functions = [ctypes.cast(getattr(recorder, name), ctypes.c_void_p).value for name in ("hipGetDevice", "hipSetDevice")]
binder = abi.make_binder(abi.Environment("hip", hip=tuple(functions)), reading="python")
signature = signature_of(fp8_quant_tensorwise_out, mutates=("out", "out_t", "inv_scale", "workspace"))
quantise = abi.bind(module, "fp8_quant_tensorwise_out", signature, binder=binder)
out = torch.zeros(64, 64, dtype=torch.float8_e4m3fn)
quantise(out, None, torch.zeros(1), torch.zeros(1, dtype=torch.int32), torch.zeros(64, 64))
recorder.recorded.restype = ctypes.c_char_p
print(recorder.recorded().decode())
"""


@pytest.fixture(scope="module")
def module() -> Path:
    wanted = hip_module.request(registry.module("module_fp8_quant"), {"HF_INPUT": "f32"}, "gfx950")
    return obtain.binary(hip_module.specification(wanted, toolchain.select("gfx950"))).entry.library


def recorder(folder: Path) -> Path:
    # Copied, because the types it includes have no fixed place to name in a source of its own.
    source = folder / "hip_recorder.cpp"
    source.write_text((Path(__file__).parents[1] / "helpers/hip_recorder.cpp").read_text())
    (folder / "hip_types.h").write_text((library.source_dir() / "hip_types.h").read_text())
    return host_library.build("test_hip_recorder", sources=[source])


def test_a_module_calls_nothing_that_a_capturing_stream_forbids(module: Path) -> None:
    called = undefined(module)
    assert called <= set(MODULES)
    assert {"hipLaunchKernel", "hipMemsetAsync", "__hipRegisterFatBinary"} <= called


def test_kernels_are_registered_first_and_launched_on_the_callers_stream(module: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(recorder(tmp_path)), str(module)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    calls = done.stdout.split("\n")
    names = [call.split()[0] for call in calls if call]
    first_launch = names.index("__hipPushCallConfiguration")
    assert names[0] == "__hipRegisterFatBinary"
    assert "__hipRegisterFunction" in names[:first_launch]
    assert "__hipRegisterFunction" not in names[first_launch:]

    after_loading = [call.strip() for call in calls if call and not call.startswith("__hipRegister")]
    stream = "0x5001"
    launch = [f"__hipPushCallConfiguration {stream}", f"__hipPopCallConfiguration {stream}",
              f"hipLaunchKernel {stream}", "hipGetLastError"]  # fmt: skip
    assert after_loading == [
        "hipSetDevice 1",
        "hipGetDevicePropertiesR0600 1",
        f"hipMemsetAsync {stream}",
        *launch,  # the largest magnitude
        *launch,  # the cast
        "hipSetDevice 0",
    ]
