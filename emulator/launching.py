"""``launch``: one kernel, on CPU tensors, with every argument laid out as the kernel's metadata says."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hipforge.emulator import configuration, counting, library, runtime
from hipforge.emulator.code_object import Kernel
from hipforge.emulator.configuration import Options
from hipforge.emulator.counting import Counters
from hipforge.errors import GuardError
from hipforge.jit.backends.amd.code_object import KernelArg
from hipforge.jit.call import tensors as storage

if TYPE_CHECKING:
    import torch

Arguments = Sequence[Any] | Mapping[str, Any]

_TRITON_SCRATCH_ARGS = 2  # global scratch and profile scratch, which Triton's compiler adds at the end
_POINTER_BYTES = 8
_MOST_KERNARG_BYTES = 1 << 16
_FLOAT_CODES = {2: "<e", 4: "<f", 8: "<d"}


@dataclass(frozen=True)
class _Prepared:
    kernarg: bytes
    extents: list[library.Extent]


def launch(
    kernel: Kernel,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Arguments = (),
    dynamic_lds: int = 0,
    options: Options | None = None,
    *,
    kernarg: bytes | None = None,
    tensors: Mapping[int, torch.Tensor] | None = None,
) -> Counters:
    """Run a kernel to its end and return what it did.

    Args:
        kernel: of ``CodeObject(...).kernels``.
        grid: blocks in x, y, z (a number, or one to three of them).
        block: work items per block in x, y, z.
        args: one value per explicit argument: a torch CPU tensor, an int, a float (the width is the kernel's own), a
            bool, None for a null pointer, or bytes for a struct passed by value. Metadata tells the width of a number
            but not its kind: for a float parameter pass 2.0, because 2 is the integer. A mapping names them: faults and
            counters then print its keys, else ``arg0``, ``arg1``, ... Triton's two trailing scratch pointers may be
            left out.
        dynamic_lds: bytes of LDS per block beyond the static ones.
        kernarg: instead of ``args``, the kernel-argument segment without its hidden part, for kernels whose metadata
            does not describe their arguments (hand-written ones).
        tensors: with ``kernarg``, CPU tensors by the byte offset at which the kernel finds their address; it is written
            there, and what the kernel may touch is their exact extent. Faults and counters call them ``kernarg+0x10``.
        options: for this launch; by default those in effect, with the architecture that the code object is for.

    Returns:
        The counters of this launch.

    Raises:
        GuardError: an argument does not fit the kernel's parameter.
        EmulatorFault: the kernel was stopped; the message is the whole report.
        LaunchError: the launch was refused (block too large, too much LDS).
        KeyboardInterrupt: on Ctrl-C, which ends the launch.

    Example:
        >>> import hipforge, torch
        >>> from hipforge import devices, emulator
        >>> runtime, arch = devices.current().load_runtime(), devices.current().arch_of()
        >>> module = hipforge.jit.load("module_fp8_quant", {"HF_INPUT": "f32"}, arch)
        >>> kernel = emulator.CodeObject(module.path / "module.so").kernels["amax_kernel"]
        >>> x, amax = torch.tensor([1.0, -3.0]), torch.zeros(1)
        >>> done = emulator.launch(kernel, grid=1, block=256, args=[x, 2, False, amax])
        >>> amax.item(), done.tensors["arg0"].loaded
        (3.0, 8)
    """
    if options is not None:
        with configuration.options(**{name: getattr(options, name) for name in Options.__dataclass_fields__}):
            return launch(kernel, grid, block, args, dynamic_lds, kernarg=kernarg, tensors=tensors)
    emulator = runtime.load().library
    device = configuration.current()
    arch = kernel.code_object.arch
    if device.arch != arch:
        with configuration.options(arch=arch):
            return launch(kernel, grid, block, args, dynamic_lds, kernarg=kernarg, tensors=tensors)
    if kernarg is None and tensors is not None:
        raise GuardError("tensors= goes with kernarg=; without it, pass them in args")
    if not 0 <= dynamic_lds < 2**32:
        raise GuardError(f"dynamic_lds={dynamic_lds}; accepted: bytes from 0 to {2**32 - 1}")
    prepared = _prepare(kernel, args) if kernarg is None else _prepare_raw(kernel, args, kernarg, tensors or {})
    handle = kernel.code_object.handle
    extents = (library.Extent * max(1, len(prepared.extents)))(*prepared.extents)
    emulator.hfemu_clear_error()
    with counting.counters() as collected:
        emulator.hfemu_push_extents(extents, len(prepared.extents))
        try:
            status = emulator.hfemu_launch(
                handle, kernel.name.encode(), _dim3("grid", grid), _dim3("block", block), prepared.kernarg,
                len(prepared.kernarg), dynamic_lds,
            )  # fmt: skip
        finally:
            emulator.hfemu_pop_extents()
    if status:
        refused = status in _REFUSALS
        library.raise_last_error(f"launch of {kernel.short_name}", fault=not refused)
    return collected.result


# hipErrorInvalidValue, InvalidConfiguration, InvalidHandle, NotFound, LaunchOutOfResources: no kernel ran.
_REFUSALS = frozenset({1, 9, 400, 500, 701})


def _dim3(role: str, sizes: int | Sequence[int]) -> ctypes.Array[ctypes.c_uint32]:
    given = (sizes,) if isinstance(sizes, int) else tuple(int(size) for size in sizes)
    if not 1 <= len(given) <= 3 or min(given) < 1 or max(given) >= 2**32:
        raise GuardError(f"{role}={sizes!r}: one to three sizes from 1 to 2**32 - 1 are accepted")
    return library.Dim3(*given, *(1,) * (3 - len(given)))


def _prepare(kernel: Kernel, args: Arguments) -> _Prepared:
    named = list(args.items()) if isinstance(args, Mapping) else [(f"arg{i}", arg) for i, arg in enumerate(args)]
    explicit = kernel.explicit_args
    missing = len(explicit) - len(named)
    if missing == _TRITON_SCRATCH_ARGS and not kernel.language and _are_pointers(explicit[-_TRITON_SCRATCH_ARGS:]):
        named += [("global_scratch", None), ("profile_scratch", None)]
    elif missing:
        raise GuardError(
            f"{kernel.short_name} takes {len(explicit)} arguments; got {len(named)}. Its parameters: "
            + ", ".join(f"{arg.kind} of {arg.size} bytes" for arg in explicit)
        )
    kernarg = bytearray(max((arg.offset + arg.size for arg in explicit), default=0))
    extents: list[library.Extent] = []
    for (name, value), arg in zip(named, explicit, strict=True):
        where = f"{kernel.short_name}, argument {name}"
        if _is_tensor(value):
            if arg.size != _POINTER_BYTES:
                raise GuardError(f"{where}: a tensor for a parameter of {arg.size} bytes that is not a pointer")
            extents.append(_extent(where, name, value))
            value = int(extents[-1].base)
        kernarg[arg.offset : arg.offset + arg.size] = _encode(where, value, arg)
    return _Prepared(bytes(kernarg), extents)


def _prepare_raw(kernel: Kernel, args: Arguments, given: bytes, tensors: Mapping[int, torch.Tensor]) -> _Prepared:
    if len(args):
        raise GuardError(f"{kernel.short_name}: both args and kernarg; pass one of them")
    if len(given) > _MOST_KERNARG_BYTES:
        raise GuardError(
            f"{kernel.short_name}: kernarg of {len(given)} bytes; at most {_MOST_KERNARG_BYTES} are possible"
        )
    kernarg = bytearray(given)
    extents = []
    for offset, tensor in tensors.items():
        where = f"{kernel.short_name}, tensor at kernarg offset {offset}"
        if not 0 <= offset <= len(kernarg) - _POINTER_BYTES:
            raise GuardError(f"{where}: a pointer does not fit there; kernarg has {len(kernarg)} bytes")
        if not _is_tensor(tensor):
            raise GuardError(f"{where}: {type(tensor).__name__} is not accepted; pass a tensor")
        extent = _extent(where, f"kernarg+{offset:#x}", tensor)
        kernarg[offset : offset + _POINTER_BYTES] = int(extent.base).to_bytes(_POINTER_BYTES, "little")
        extents.append(extent)
    return _Prepared(bytes(kernarg), extents)


def _are_pointers(args: Sequence[KernelArg]) -> bool:
    return all(arg.kind == "global_buffer" and arg.size == _POINTER_BYTES for arg in args)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr") and hasattr(value, "untyped_storage")


def _encode(where: str, value: Any, arg: KernelArg) -> bytes:
    if value is None:
        if arg.size != _POINTER_BYTES:
            raise GuardError(f"{where}: None for a parameter of {arg.size} bytes; only pointers may be null")
        return bytes(_POINTER_BYTES)
    if isinstance(value, (bytes, bytearray)):
        if len(value) != arg.size:
            raise GuardError(f"{where}: {len(value)} bytes for a parameter of {arg.size}")
        return bytes(value)
    if isinstance(value, int):
        low, high = -(1 << (8 * arg.size - 1)), (1 << (8 * arg.size)) - 1
        if not low <= value <= high:
            raise GuardError(f"{where}: {value} does not fit {arg.size} bytes ({low} to {high})")
        return (value & high).to_bytes(arg.size, "little")
    if isinstance(value, float):
        if arg.size not in _FLOAT_CODES:
            raise GuardError(f"{where}: a float for a parameter of {arg.size} bytes; 2, 4 and 8 are floats")
        return struct.pack(_FLOAT_CODES[arg.size], value)
    raise GuardError(f"{where}: {type(value).__name__} is not accepted; pass a tensor, int, float, bool, None or bytes")


def _extent(where: str, name: str, tensor: torch.Tensor) -> library.Extent:
    """Return the bytes from the first to the last element, whatever the strides; they must lie in the storage."""
    if tensor.device.type != "cpu":
        raise GuardError(f"{where}: a tensor on {tensor.device}; the emulator takes CPU tensors")
    wrong = storage.problem(tensor)
    if wrong is not None:
        raise GuardError(f"{where}: it {wrong}")
    elements = 0
    if tensor.numel():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return library.Extent(name.encode(), tensor.data_ptr(), elements * tensor.element_size(), 1, 0)
