"""The safetensors files of a checkpoint: what is in them, and one tensor at a time.

A file is 8 bytes with the length of a JSON header (little endian), the header, and the tensors' bytes; the header gives
each tensor's dtype, shape and [begin, end) behind it. A tensor is read into memory of its own: a file that is mapped
whole would count against the process until its last tensor is gone, and a file that shrinks under a map kills it.
"""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hipforge.errors import ConfigError
from hipforge.jit.cache.files import is_a
from hipforge.jit.cache.files import read as read_file

_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000
_SIZES = 1 << 63
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # e8m0 bytes are uint8 everywhere in hipforge
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        key: its name there.
        kind: its dtype as the file calls it, such as ``F8_E4M3``.
        shape: its shape.
        file: the file.
        offset: of its first byte in the file.
        size: bytes.
    """

    key: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int

    @property
    def where(self) -> str:
        """What messages call it."""
        return f"{self.key} in {self.file}"

    def read(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            ConfigError: the file ends before it does, or cannot be read any more.
        """
        tensor = torch.empty(self.shape, dtype=_DTYPES[self.kind])
        if self.size:
            try:
                with self.file.open("rb") as stream:
                    stream.seek(self.offset)
                    got = stream.readinto((ctypes.c_char * self.size).from_address(tensor.data_ptr()))
            except OSError as error:
                raise ConfigError(f"{self.where} cannot be read: {error}") from None
            if got != self.size:
                raise ConfigError(f"{self.where} is cut off: {self.size} bytes were expected, {got} are there")
        return tensor


def entries_of(path: Path) -> dict[str, Entry]:
    """Return every tensor of a checkpoint by key, file by file, in the order of their bytes.

    Args:
        path: a safetensors file, or a folder of them; ``*.safetensors.index.json`` says which where there is one.

    Raises:
        ConfigError: nothing is there, a file is missing, cut off or not a safetensors file, a key is in two, or one
            that the index lists is in none.
    """
    found: dict[str, Entry] = {}
    files, listed = _files(path)
    for file in files:
        for entry in sorted(_header(file), key=lambda entry: entry.offset):
            if entry.key in found:
                raise ConfigError(f"{entry.where} is in {found[entry.key].file} too; a checkpoint has each tensor once")
            found[entry.key] = entry
    absent = [key for key in listed if key not in found]
    if absent:
        raise ConfigError(
            f"{absent[0]} is not in {path / listed[absent[0]]}, where the index lists it, one of {len(absent)} such "
            "tensors: the file is of another checkpoint, or was written in part; download it again"
        )
    return found


def configuration(path: Path) -> dict[str, Any]:
    """Return the quantisation that a checkpoint's ``config.json`` or ``hf_quant_config.json`` declares, or {}.

    Raises:
        ConfigError: one of them is not a JSON object.
    """
    folder = path if is_a(Path.is_dir, path) else path.parent
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        file = folder / name
        if is_a(Path.is_file, file):
            parsed = _json(file)
            declared = _object(file, parsed, key) or _object(file, _object(file, parsed, "text_config"), key)
            if declared:
                return {"quant_method": _object(file, parsed, "producer").get("name"), **declared}
    return {}


def _object(file: Path, parsed: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an object of a JSON document; {} where it is missing or null."""
    value = parsed.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{key} in {file} must be an object; got {value!r}")
    return value or {}


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files of a checkpoint, and the file's name of each tensor that an index lists."""
    if is_a(Path.is_file, path):
        return [path], {}
    if not is_a(Path.is_dir, path):
        raise ConfigError(f"{path} is neither a safetensors file nor a folder of them")
    for index in sorted(path.glob("*.safetensors.index.json")):
        names = _json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ConfigError(f"{index} has no weight_map from keys to the names of files")
        files = [path / name for name in dict.fromkeys(names.values())]
        for file in files:
            if not is_a(Path.is_file, file):
                raise ConfigError(f"{file} is missing; {index.name} lists it")
        return files, names
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"there is no *.safetensors file in {path}")
    for file in files:
        if not is_a(Path.is_file, file):
            raise ConfigError(f"{file} is not a regular file, or a link to none; download it again, or remove it")
    return files, {}


def _json(file: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(read_file(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{file} must hold a JSON object; got {type(parsed).__name__}")
    return parsed


def _header(file: Path) -> list[Entry]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            start = _LENGTH_BYTES + length
            if size < _LENGTH_BYTES or length > _MAX_HEADER or start > size:
                raise ConfigError(
                    f"{file} is not a whole safetensors file: its header would be {length} bytes, the file has {size}"
                )
            text = stream.read(length)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    try:
        table = json.loads(text)
        entries = [_entry(file, key, row, start) for key, row in table.items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} has no safetensors header: {error!r}") from None
    for entry in entries:
        if entry.offset + entry.size > size:
            raise ConfigError(
                f"{entry.where} is cut off: its bytes end at {entry.offset + entry.size}, the file at {size}; "
                "download the file again"
            )
    return entries


def _entry(file: Path, key: str, row: dict[str, Any], start: int) -> Entry:
    kind, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
    if not all(type(number) is int and 0 <= number < _SIZES for number in (*shape, begin, end)):
        raise ConfigError(f"{key} in {file} has shape {shape} and bytes {begin} to {end}; these are integers from 0 on")
    if kind not in _DTYPES:
        raise ConfigError(
            f"{key} in {file} has dtype {kind}, which is not known here; known are {', '.join(sorted(_DTYPES))}"
        )
    size = math.prod(shape) * _DTYPES[kind].itemsize
    if math.prod(max(one, 1) for one in shape) * _DTYPES[kind].itemsize >= _SIZES:  # torch's strides, of 0 elements too
        raise ConfigError(f"{key} in {file} has shape {shape}, of 2^63 bytes or more")
    if end - begin != size:
        raise ConfigError(f"{key} in {file} has {end - begin} bytes; {kind} of shape {shape} has {size}")
    return Entry(key, kind, shape, file, start + begin, size)
