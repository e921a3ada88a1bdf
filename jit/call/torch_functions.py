"""The functions of torch's own libraries by which the binding reads a tensor without a Python call.

Eleven are C shims that torch keeps for compiled models; four are C++ functions that take one pointer or nothing and
have had the same symbol for years. Where torch lacks one, or its answers differ from Python's on a few tensors, its
table of DLPack functions is used, else Python.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("hipforge")

# (library, symbol), in the order of binding.c's Torch
_FUNCTIONS = (
    ("torch_cpu", "aoti_torch_get_layout"),
    ("torch_cpu", "aoti_torch_get_device_type"),
    ("torch_cpu", "aoti_torch_get_device_index"),
    ("torch_cpu", "aoti_torch_get_data_ptr"),
    ("torch_cpu", "aoti_torch_get_dtype"),
    ("torch_cpu", "aoti_torch_get_dim"),
    ("torch_cpu", "aoti_torch_get_sizes"),
    ("torch_cpu", "aoti_torch_get_strides"),
    ("torch_cpu", "aoti_torch_get_storage_size"),
    ("torch_cpu", "aoti_torch_get_storage_offset"),
    ("torch_cpu", "aoti_torch_grad_mode_is_enabled"),
    ("torch_cpu", "_ZN2at6native6is_negERKNS_6TensorE"),
    ("c10", "_ZNK3c1010TensorImpl13requires_gradEv"),
    ("c10", "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv"),
    ("torch_cpu", "_ZN5torch3jit6tracer15getTracingStateEv"),
)
_MOST_DTYPES = 64  # of Torch.dtypes


def active_modes() -> int:
    """Return how many of torch's dispatch modes are active, :func:`torch.jit.trace` among them."""
    import torch

    return torch._C._len_torch_dispatch_stack() + bool(torch._C._is_tracing())


def find(codes: Mapping[Any, int]) -> tuple[Any, ...] | None:
    """Return what the binding's ``make_binder`` takes as ``torch``; ``codes`` maps torch dtypes to ``hf_dtype``.

    None where this torch lacks a function.
    """
    import torch

    folder = Path(torch.__file__).parent / "lib"
    try:
        libraries = {name: ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("torch_cpu", "c10")}
        addresses = tuple(
            ctypes.cast(getattr(libraries[name], symbol), ctypes.c_void_p).value for name, symbol in _FUNCTIONS
        )
        cpu = libraries["torch_cpu"]
        constants = tuple(
            cpu[f"aoti_torch_{name}"]() for name in ("layout_strided", "device_type_cpu", "device_type_cuda")
        )
    except (OSError, AttributeError) as error:
        log.debug("tensors are read through DLPack or Python: %s", error)
        return None
    # A Python tensor holds an at::Tensor, one pointer, whose value is its _cdata.
    sample = torch.empty(1, device="cpu")
    words = memoryview(ctypes.string_at(id(sample), torch.Tensor.__basicsize__)).cast("Q").tolist()
    if words.count(sample._cdata) != 1:
        return None
    offset = 8 * words.index(sample._cdata)
    table = bytearray(_MOST_DTYPES)
    bytes_of_any = torch.empty(16, dtype=torch.uint8, device="cpu")  # torch's deterministic mode fills no new float4
    for dtype, code in codes.items():  # not every torch has a function that says a type's number
        sample, number = bytes_of_any.view(dtype), ctypes.c_int32(-1)
        status = cpu.aoti_torch_get_dtype(ctypes.c_void_p(id(sample) + offset), ctypes.byref(number))
        if status or not 0 <= number.value < _MOST_DTYPES:
            return None
        table[number.value] = code
    return (offset, addresses, *constants, bytes(table))


def stream_namer() -> int:
    """Return the address of torch's function that names a thread's current stream of a GPU; 0 where it has none.

    It asks no driver, unlike torch's function for the stream's handle.
    """
    import torch

    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    try:
        function = ctypes.CDLL(str(library))._ZN3c104cuda20getCurrentCUDAStreamEa
    except (OSError, AttributeError) as error:
        log.debug("a stream's handle is asked for in every call: %s", error)
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def agree(facts: Callable[[Any], Any], read_tensor: Callable[[Any], Any]) -> bool:
    """Return whether ``facts`` (the binding's) says of some tensors what Python says."""
    import torch

    plain = torch.zeros(6, 5, dtype=torch.bfloat16, device="cpu")
    samples = (
        plain,
        plain[1::2, 2:].t(),
        plain.view(torch.float8_e4m3fn)[3],
        torch._neg_view(torch.ones(3, device="cpu")),
        torch.nn.Parameter(torch.ones(2, 1, 4, dtype=torch.float64, device="cpu")),
        torch.zeros(3, dtype=torch.int64, device="cpu")[1],
    )
    recording = torch.is_grad_enabled(), active_modes()
    for tensor in samples:
        storage = tensor.untyped_storage().nbytes(), tensor.storage_offset()
        wanted = (*read_tensor(tensor), *storage, tensor.is_neg(), tensor.requires_grad)
        if facts(tensor) != (wanted, *recording):
            log.debug("tensors are read through DLPack or Python: torch's functions say %s", facts(tensor))
            return False
    return True
