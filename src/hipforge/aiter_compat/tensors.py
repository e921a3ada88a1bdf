"""``aiter_tensor_t``: the plain struct in which aiter's modules take tensors, as the user's own header defines it.

The header is compiled once into a table of field offsets and dtype numbers; a struct of another form is refused.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipforge import devices
from hipforge.errors import BuildError, ConfigError, GuardError
from hipforge.jit import loader, registry
from hipforge.jit.registry import ModuleEntry

_HEADER = "aiter_tensor.h"
_FORMATS = {"ptr": "Q", "numel_": "Q", "ndim": "i", "dtype_": "i", "device_id": "i"}
_ALIGNMENT = 8
# aiter's name -> torch's; fp8 is of the architecture's own format
_DTYPES = {
    "fp8_e8m0": ("float8_e8m0fnu",), "fp16": ("float16",), "bf16": ("bfloat16",), "fp32": ("float32",),
    "fp4x2": ("float4_e2m1fn_x2",), "u32": ("uint32",), "i32": ("int32",), "i16": ("int16",), "i8": ("int8",),
    "u8": ("uint8",), "i64": ("int64",), "u64": ("uint64",), "fp8": ("float8_e4m3fn", "float8_e4m3fnuz"),
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """The struct as one header defines it: offsets in bytes by field, dimensions at most, numbers of torch's dtypes."""

    header: Path
    size: int
    offsets: Mapping[str, int]
    dimensions: int
    dtypes: Mapping[Any, int]

    def describe(self, where: str, tensor: Any) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...], int, int]:
        """Return address, elements, dimensions, shape, strides, dtype number and device of a torch tensor.

        On the emulator tensors of the CPU are those of device 0: modules refuse tensors that are on no GPU.

        Raises:
            GuardError: it is no tensor, has more dimensions than the struct has, or a dtype that has no number there.
        """
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise GuardError(f"{where} must be a torch.Tensor; got {type(tensor).__name__}")
        shape = tuple(tensor.shape)
        if len(shape) > self.dimensions:
            raise GuardError(f"{where} has {len(shape)} dimensions; aiter_tensor_t holds at most {self.dimensions}")
        if tensor.dtype not in self.dtypes:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            raise GuardError(f"{where} is {tensor.dtype}, which aiter_tensor_t does not have; it has {accepted}")
        device = tensor.get_device() if devices.current().is_gpu else 0
        return (
            tensor.data_ptr(), tensor.numel(), len(shape), shape, tuple(tensor.stride()), self.dtypes[tensor.dtype],
            device,
        )  # fmt: skip

    def pack(self, where: str, tensor: Any) -> ctypes.Array[ctypes.c_char]:
        """Return the struct for a torch tensor, as bytes that a C function may be given the address of.

        Raises:
            GuardError: as :meth:`describe`.
        """
        ptr, numel, ndim, shape, strides, dtype, device = self.describe(where, tensor)
        made = ctypes.create_string_buffer(self.size)
        scalars = {"ptr": ptr, "numel_": numel, "ndim": ndim, "dtype_": dtype, "device_id": device}
        for name, value in scalars.items():
            struct.pack_into(_FORMATS[name], made, self.offsets[name], value)
        struct.pack_into(f"{ndim}q", made, self.offsets["shape"], *shape)
        struct.pack_into(f"{ndim}q", made, self.offsets["strides"], *strides)
        return made


def layout_of(entry: ModuleEntry, arch: str) -> Layout:
    """Return the struct of the header that a module's sources include.

    Raises:
        ConfigError: no ``extra_include`` of the module has the header, or its struct is not the one that hipforge
            fills.
    """
    folders = [Path(text.replace("${MODULE_DIR}", str(entry.module_dir))) for text in entry.extra_include]
    header = next((folder / _HEADER for folder in folders if (folder / _HEADER).is_file()), None)
    if header is None:
        raise ConfigError(
            f"{entry.name}: none of its include folders has {_HEADER}, which defines aiter_tensor_t; looked in "
            f"{', '.join(map(str, folders)) or 'none'}: name aiter's csrc/include in extra_include"
        )
    return _layout(header, arch)


@functools.cache
def _layout(header: Path, arch: str) -> Layout:
    name = f"aiter_layout_{hashlib.sha256(os.fspath(header).encode()).hexdigest()[:12]}"
    values = {
        "srcs": ["${CSRC}/aiter/layout.cu"], "ffi": "pybind11", "torch_exclude": True,
        "extra_include": [os.fspath(header.parent)], "flags_extra_hip": ["-std=c++20", "-DENABLE_CK=0"],
    }  # fmt: skip
    registry.register_values(header, {name: values})
    try:
        library = loader.load(name, None, arch).library
    except BuildError as error:
        raise ConfigError(
            f"{header}: aiter_tensor_t or its dtypes are not those that hipforge fills (pointer, elements, dimensions, "
            f"shape, strides, dtype, device): {error}"
        ) from error
    return _checked(header, _rows(library))


class _Row(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_long), ("bytes", ctypes.c_long))


def _rows(library: ctypes.CDLL) -> list[dict[str, tuple[int, int]]]:
    """Return the two parts of the table: fields and dtypes."""
    table = (_Row * 64).in_dll(library, "hf_aiter_layout")
    parts: list[dict[str, tuple[int, int]]] = [{}]
    for row in table:
        if row.name is not None:
            parts[-1][row.name.decode()] = (row.value, row.bytes)
        elif len(parts) == 2:
            break
        else:
            parts.append({})
    return parts


def _checked(header: Path, rows: list[dict[str, tuple[int, int]]]) -> Layout:
    import torch

    fields, numbers = rows
    _, size = fields.pop("aiter_tensor_t")
    for name, code in _FORMATS.items():
        if fields[name][1] != struct.calcsize(code):
            raise ConfigError(
                f"{header}: aiter_tensor_t.{name} has {fields[name][1]} bytes; hipforge fills {struct.calcsize(code)}"
            )
    end = 0
    for name, (offset, width) in sorted(fields.items(), key=lambda item: item[1]):
        if offset - end >= _ALIGNMENT:
            raise ConfigError(
                f"{header}: aiter_tensor_t has {offset - end} bytes before {name} that hipforge does not know; this "
                "commit of aiter has a struct of another form"
            )
        end = offset + width
    if size - end >= _ALIGNMENT or fields["shape"][1] != fields["strides"][1]:
        raise ConfigError(
            f"{header}: aiter_tensor_t has {size} bytes, of which hipforge knows {end}; this commit of aiter has a "
            "struct of another form"
        )
    dtypes = {
        getattr(torch, dtype): numbers[name][0]
        for name, dtypes in _DTYPES.items()
        for dtype in dtypes
        if hasattr(torch, dtype)
    }
    offsets = {name: offset for name, (offset, _) in fields.items()}
    return Layout(header, size, offsets, fields["shape"][1] // 8, dtypes)
