"""Bind ``hf_entry_*`` of a loaded module to a Python callable.

The callable is a METH_FASTCALL function of ``binding.c``, which wheels carry compiled and other installs compile once
per machine. It reads tensors as plain views, checks kinds and devices, releases the GIL around the entry and turns its
error into the exception of its kind. On the emulator it also declares the exact byte extent of every tensor argument,
under the argument's name.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from hipforge import devices
from hipforge.errors import (
    ArchError,
    ConfigError,
    EmulatorFault,
    GuardError,
    HipforgeError,
    LaunchError,
    ToolchainError,
)
from hipforge.jit.call import tensors
from hipforge.jit.call.binder import Binder, announce, described
from hipforge.jit.call.signature import KINDS, OPTIONAL_TENSOR, TENSOR, Signature
from hipforge.jit.spec import ABI_VERSION

if TYPE_CHECKING:
    from hipforge.jit.cache.store import Entry

Reading = Literal["functions", "table", "python"]
Target = Literal["host", "emulator", "hip", "cuda"]

_TARGETS: dict[str, int] = {"host": 0, "emulator": 1, "hip": 2, "cuda": 3}

# index by hf_error_kind; [0] is raised for a fault that the emulator reports
ERROR_CLASSES: tuple[type[HipforgeError], ...] = (EmulatorFault, GuardError, ArchError, LaunchError, HipforgeError)

_EMULATOR_FUNCTIONS = (
    "hfemu_push_extents",
    "hfemu_pop_extents",
    "hfemu_last_error",
    "hfemu_clear_error",
    "hfemu_stream",
)


@dataclass(frozen=True)
class Environment:
    """Where entries run: the kind of device and the addresses of its runtime's functions (0: not needed).

    ``hip``: get and set a thread's GPU. ``name_stream``: :func:`hipforge.jit.call.torch_functions.stream_namer`.
    """

    target: Target
    emulator: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    hip: tuple[int, int] = (0, 0)
    name_stream: int = 0


def process_environment() -> Environment:
    """Return the environment of this process's device, its runtime loaded.

    Raises:
        ConfigError: the device is ``reference``, which runs no kernels.
    """
    device = devices.current()
    runtime = device.load_runtime()
    library = getattr(runtime, "library", runtime)
    if device.kind == "emulator":
        push, pop, last, clear, stream = (_address(library, name) for name in _EMULATOR_FUNCTIONS)
        return Environment("emulator", emulator=(push, pop, last, clear, stream))
    import torch

    from hipforge.jit.call.torch_functions import stream_namer

    vendor = device.vendor
    get, set_ = (_address(library, name) for name in vendor.runtime_functions)
    one = torch.cuda.device_count() == 1  # the current GPU of every thread
    return Environment(vendor.device, hip=(0, 0) if one else (get, set_), name_stream=stream_namer())


def bind(
    library: ctypes.CDLL,
    entry: str,
    signature: Signature,
    *,
    divert: Callable[..., Any] | None = None,
    binder: Binder | None = None,
    module: str | None = None,
) -> Callable[..., None]:
    """Return a callable of ``hf_entry_<entry>`` in ``library``, which it keeps loaded.

    It takes the arguments of ``signature``, positional or by keyword. ``divert`` is called with them instead when a
    tensor is a subclass (such as a FakeTensor), a meta tensor, or a torch dispatch mode is active. ``module`` is the
    name that errors give the library.

    Raises:
        ConfigError: the library has no such entry, another ABI version, or the entry's own signature differs.
    """
    where = module or str(library._name)
    try:
        address = _address(library, f"hf_entry_{entry}")
    except AttributeError:
        raise ConfigError(
            f"{where} exports no entry {entry!r}; its source needs HF_EXPORT({entry}), or the stub needs fc_name="
        ) from None
    version = ctypes.c_uint32.in_dll(library, "hf_abi_version").value
    if version != ABI_VERSION:
        raise ConfigError(
            f"{where} was built for version {version} of the C ABI; this hipforge uses {ABI_VERSION}: rebuild it"
        )
    exported = (ctypes.c_char_p.in_dll(library, f"hf_signature_{entry}").value or b"").decode()
    if exported != signature.letters:
        raise ConfigError(_mismatch(where, entry, exported, signature))
    return (binder or process_binder()).bind(
        address,
        signature.name,
        signature.letters,
        signature.names,
        signature.writable,
        signature.defaults,
        divert,
        library,
    )


def wrap(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """Make a pybind11 module's function take the stub's keywords and defaults, and run under the emulator's checks."""
    environment = process_environment()
    if environment.target == "emulator":
        return _declaring_extents(function, signature, environment.emulator)
    count = len(signature.parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*(signature.bind(args, kwargs) if kwargs or len(args) != count else args))

    return call


class _Extent(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


def _declaring_extents(
    function: Callable[..., Any], signature: Signature, addresses: tuple[int, ...]
) -> Callable[..., Any]:
    """Wrap a function of a pybind11 module for the emulator: its tensor arguments become extents during the call.

    ``addresses`` are those of :class:`Environment`. A fault in a kernel that the function launched is raised even if
    the function did not look for it.
    """
    import torch

    push = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Extent), ctypes.c_int32)(addresses[0])
    pop, clear_error = (ctypes.CFUNCTYPE(None)(address) for address in (addresses[1], addresses[3]))
    last_error = ctypes.CFUNCTYPE(ctypes.c_char_p)(addresses[2])

    def call(*args: Any, **kwargs: Any) -> Any:
        values = signature.bind(args, kwargs)
        extents = (_Extent * max(1, len(values)))()
        count = 0
        for parameter, value in zip(signature.parameters, values, strict=True):
            if parameter.kind in (TENSOR, OPTIONAL_TENSOR) and value is not None:
                is_tensor = isinstance(value, torch.Tensor)
                wrong = tensors.problem(value) if is_tensor else f"must be a torch.Tensor; got {type(value).__name__}"
                if wrong is not None:
                    raise GuardError(f"{signature.name}: argument '{parameter.name}' {wrong}")
                size = 0
                if value.numel():
                    steps = zip(value.shape, value.stride(), strict=True)
                    size = (1 + sum((length - 1) * stride for length, stride in steps)) * value.element_size()
                extents[count] = _Extent(parameter.name.encode(), value.data_ptr(), size, parameter.mutated, 0)
                count += 1
        clear_error()
        push(extents, count)
        failure: Exception | None = None
        result = None
        try:
            result = function(*values)
        except Exception as error:  # a module may raise for the launch that failed: the fault says why it did
            failure = error
        finally:
            pop()
        fault = last_error()
        if fault is not None:
            raise EmulatorFault(f"{signature.name}: {fault.decode(errors='replace')}") from failure
        if failure is not None:
            raise failure
        return result

    call.__name__ = signature.name
    return call


def _mismatch(where: str, entry: str, exported: str, signature: Signature) -> str:
    def words(letters: str) -> str:
        return "(" + ", ".join(KINDS[letter][0] if letter in KINDS else repr(letter) for letter in letters) + ")"

    text = f"stub {signature.name} and {where} disagree: HF_EXPORT({entry}) takes {words(exported)}"
    text += f", the stub's annotations say {words(signature.letters)}"
    for index, (parameter, letter) in enumerate(zip(signature.parameters, exported, strict=False)):
        if parameter.kind != letter:
            return text + f"; first difference: argument {index}, '{parameter.name}'"
    return text + f"; {len(exported)} arguments against {len(signature.parameters)}"


_binder: Binder | None = None
_binder_lock = threading.Lock()


def _renew_lock() -> None:
    global _binder_lock
    _binder_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def process_binder() -> Binder:
    """Return the binder of this process, configured for its device; made on the first call."""
    global _binder
    if _binder is None:
        with _binder_lock:
            if _binder is None:
                _binder = make_binder(process_environment())
                announce(_binder)
    return _binder


def make_binder(environment: Environment, *, reading: Reading = "functions") -> Binder:
    """Return a new binder for ``environment``.

    ``reading``: how tensors are read: by the functions of :mod:`hipforge.jit.call.torch_functions`, else by torch's
    table of DLPack functions, else in Python.

    Raises:
        BuildError, MissingModuleError, ToolchainError: the binding is not there and cannot be built.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    from hipforge.jit.call import bench_hook, torch_functions
    from hipforge.jit.call.python_module import import_extension
    from hipforge.jit.call.torch_functions import active_modes

    maker: Callable[..., Any] = import_extension(extension_entry().library, "hipforge_binding").make_binder
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) if reading != "python" else None
    arguments = (
        _TARGETS[environment.target],
        torch.Tensor,
        torch.nn.Parameter,
        ERROR_CLASSES,
        active_modes,
        read_tensor,
        read_stream,
        table,
        (*environment.emulator, *environment.hip, environment.name_stream),
        (
            tensors.problem,
            torch.Tensor.is_neg,
            None if bench_hook.active() else torch.Tensor.untyped_storage,
            torch.UntypedStorage.nbytes,
            torch.Tensor.storage_offset,
            torch.is_grad_enabled,
            tensors.dropped_gradient,
            described,
            torch.dtype,
        ),
    )
    with _disable_current_modes():
        functions = torch_functions.find(dtype_codes()) if reading == "functions" else None
        if functions is not None:
            binder = maker(*arguments, functions)
            if torch_functions.agree(binder.facts, read_tensor):
                return cast(Binder, binder)
    return cast(Binder, maker(*arguments, None))


def extension_entry() -> Entry:
    """Return the compiled binding: prebuilt, cached, or built now.

    Raises:
        BuildError, MissingModuleError, ToolchainError: it is not there and cannot be built.
    """
    from hipforge.jit import host_library

    here = Path(__file__).parent
    include = Path(sysconfig.get_path("include"))
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise ToolchainError(
            f"this Python {sysconfig.get_python_version()} is a free-threaded build, and the binding uses the limited "
            f"API, which such builds lack; use the ordinary python{sysconfig.get_python_version()}"
        )
    missing = f"no Python.h in {include}; Debian and Ubuntu have it in python3-dev"
    try:
        return host_library.entry(
            "hipforge_binding",
            sources=[here / "binding.c"],
            # The limited API makes one binary for all Pythons from 3.10 on.
            cflags=["-O2", "-DPy_LIMITED_API=0x030A0000", f"-I{include}"],
            required={include / "Python.h": missing},
        )
    except ToolchainError as error:
        raise ToolchainError(
            f"the binding that calls kernels is compiled once per machine, and cannot be: {error}. A wheel of "
            "`make wheel` carries it compiled"
        ) from None


def _address(library: ctypes.CDLL, symbol: str) -> int:
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0


@functools.lru_cache(maxsize=1)
def dtype_codes() -> dict[Any, int]:
    """Return torch dtype -> ``hf_dtype`` for the dtypes that this torch has."""
    import torch

    names = (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    )
    return {getattr(torch, name): code for code, name in enumerate(names, start=1) if hasattr(torch, name)}


def read_tensor(tensor: Any) -> tuple[int, int, bool, int, tuple[int, ...], tuple[int, ...]]:
    """Return (data address, hf_dtype, on a GPU, device index, shape, strides in elements) of a torch tensor.

    Raises:
        BufferError: the tensor has no plain strided storage on a CPU or GPU.
    """
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise BufferError(f"its device is {device}, neither a CPU nor a GPU")
    if str(tensor.layout) != "torch.strided":
        raise BufferError(f"its layout is {tensor.layout}, not strided")
    index = device.index or 0
    code = dtype_codes().get(tensor.dtype, 0)
    return tensor.data_ptr(), code, device.type == "cuda", index, tuple(tensor.shape), tuple(tensor.stride())


def read_stream(device_index: int) -> int:
    """Return torch's current stream of GPU ``device_index`` as an address."""
    import torch

    return int(torch.cuda.current_stream(device_index).cuda_stream)
