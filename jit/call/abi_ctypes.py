"""The binder in pure Python, for machines without a C compiler: the same checks and errors, more microseconds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hipforge.jit.call.signature import BOOL, FLOAT, INT, MUST_BE, OPTIONAL_TENSOR, TENSOR, Parameter, Signature

_KIND_NONE, _KIND_TENSOR, _KIND_INT, _KIND_FLOAT, _KIND_BOOL, _KIND_STRING = range(6)
_LAUNCH, _OTHER = 3, 4  # hf_error_kind
_HOST, _EMULATOR, _HIP, _CUDA = range(4)
_GPU_NAMES = {_HIP: "hip", _CUDA: "cuda"}
_FLOATS = range(7, 11)  # hf_dtype of float16, bfloat16, float32, float64
_ITEM_BYTES = (1, 1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 1, 1, 1, 1, 1)  # by hf_dtype


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
    )


class _Value(ctypes.Union):
    _fields_ = (("tensor", _Tensor), ("i", ctypes.c_int64), ("f", ctypes.c_double), ("s", ctypes.c_char_p))


class _Arg(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("reserved", ctypes.c_int32), ("value", _Value))


class _Call(ctypes.Structure):
    _fields_ = (
        ("args", ctypes.POINTER(_Arg)),
        ("num_args", ctypes.c_int32),
        ("error_kind", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("error", ctypes.c_char * 4096),
    )


class _Extent(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class _Diverted(Exception):
    """The call belongs to the torch dispatcher."""


@dataclass(frozen=True)
class CtypesBinder:
    """The Python counterpart of ``binding.c``'s binder; fields as ``make_binder`` takes them."""

    target: int
    tensor_type: Any
    errors: tuple[type[Exception], ...]
    mode_depth: Callable[[], int]
    read_tensor: Callable[[Any], tuple[int, int, bool, int, tuple[int, ...], tuple[int, ...]]]
    read_stream: Callable[[int], int]
    problem: Callable[[Any], str | None]
    grad_enabled: Callable[[], bool]
    drop_gradient: Callable[[str, str], None]
    plain_types: tuple[type, ...]
    functions: tuple[Callable[..., Any], ...]

    def bind(
        self,
        address: int,
        name: str,
        letters: str,
        names: tuple[str, ...],
        writable: bytes,
        defaults: tuple[Any, ...],
        divert: Callable[..., Any] | None,
        owner: object,
    ) -> Callable[..., None]:
        """Return a function of the entry at ``address``; ``owner`` stays alive as long as it does."""
        parameters = tuple(
            Parameter(text, kind, bool(flag)) for text, kind, flag in zip(names, letters, writable, strict=True)
        )
        signature = Signature(name, parameters, defaults, "None")
        entry = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Call))(address)

        def call(*args: Any, **kwargs: Any) -> Any:
            values = signature.bind(args, kwargs)
            try:
                if divert is not None and self.mode_depth():
                    raise _Diverted
                self._run(entry, signature, values, divert is not None)
            except _Diverted:
                if divert is None:
                    raise
                return divert(*values)
            except SystemError as error:
                # The emulator leaves a signal handler's exception set; ctypes wraps it.
                raise error.__cause__ or error from None

        call.__name__ = name
        call.__hipforge_owner__ = owner  # type: ignore[attr-defined]
        return call

    def dispatch(
        self,
        name: str,
        names: tuple[str, ...],
        defaults: tuple[Any, ...],
        variant: Callable[..., Any],
        entries: dict[Any, Callable[..., Any]],
        load: Callable[[tuple[Any, ...]], Callable[..., Any]],
    ) -> Callable[..., Any]:
        """Return a function that calls the entry which ``variant`` chooses; ``load`` finds one that is not there."""
        signature = Signature(name, tuple(Parameter(text, "", False) for text in names), defaults, "None")

        def call(*args: Any, **kwargs: Any) -> Any:
            values = signature.bind(args, kwargs)
            try:
                chosen = tuple(variant(*values).values())
                entry = entries[chosen[0] if len(chosen) == 1 else chosen]
            except Exception:  # not loaded yet, or wrong arguments: load() finds out and raises
                entry = load(values)
            return entry(*values)

        return call

    def _run(self, entry: Any, signature: Signature, values: tuple[Any, ...], can_divert: bool) -> None:
        converted = (_Arg * max(1, len(values)))()
        keep: list[Any] = []  # what the call points to
        device = -1
        for arg, parameter, value in zip(converted, signature.parameters, values, strict=False):
            self._convert(signature.name, arg, parameter, value, keep, can_divert)
            if arg.kind == _KIND_TENSOR:
                device = self._check_device(signature.name, parameter, arg.value.tensor, device)
        call = _Call(ctypes.cast(converted, ctypes.POINTER(_Arg)), len(values), 0, None)
        fault = None
        if self.target == _EMULATOR:
            kind, fault = self._run_on_emulator(entry, call, signature, converted)
        elif self.target in _GPU_NAMES:
            kind = self._run_on_gpu(entry, call, signature.name, device)
        else:
            kind = entry(ctypes.byref(call))
        if fault is not None:
            raise self.errors[0](f"{signature.name}: {fault.decode(errors='replace')}")
        if kind:
            error = self.errors[kind if 0 < kind <= _OTHER else _OTHER]
            raise error(f"{signature.name}: {call.error.decode(errors='replace')}")

    def _run_on_emulator(self, entry: Any, call: _Call, signature: Signature, args: Any) -> tuple[int, bytes | None]:
        push, pop, last_error, clear_error, stream = self.functions[:5]
        extents = (_Extent * max(1, len(signature.parameters)))()
        count = 0
        for arg, parameter in zip(args, signature.parameters, strict=False):
            if arg.kind == _KIND_TENSOR:
                tensor = arg.value.tensor
                extents[count] = _Extent(
                    parameter.name.encode(), tensor.data or 0, _extent_bytes(tensor), parameter.mutated, 0
                )
                count += 1
        if stream is not None:
            call.stream = stream()
        clear_error()
        push(extents, count)
        try:
            kind = entry(ctypes.byref(call))
        finally:
            pop()
        return kind, last_error() if kind in (0, _LAUNCH) else None

    def _run_on_gpu(self, entry: Any, call: _Call, name: str, device: int) -> int:
        get_device, set_device = self.functions[5:]
        call.stream = self.read_stream(device)
        previous = ctypes.c_int(device)
        status = get_device(ctypes.byref(previous))
        if not status and previous.value != device:
            status = set_device(device)
        if status:
            runtime = _GPU_NAMES[self.target].upper()
            raise self.errors[_LAUNCH](f"{name}: {runtime} error {status} on making GPU {device} the current one")
        try:
            return int(entry(ctypes.byref(call)))
        finally:
            if previous.value != device:
                set_device(previous.value)

    def _convert(self, op: str, arg: _Arg, parameter: Parameter, value: Any, keep: list[Any], can_divert: bool) -> None:
        kind = parameter.kind
        if kind in (TENSOR, OPTIONAL_TENSOR):
            if value is None and kind == OPTIONAL_TENSOR:
                arg.kind = _KIND_NONE
                return
            if not isinstance(value, self.tensor_type):
                raise self._refusal(op, parameter, MUST_BE[kind], value)
            if can_divert and (type(value) not in self.plain_types or value.is_meta):
                raise _Diverted
            arg.kind = _KIND_TENSOR
            arg.value.tensor = self._view(op, parameter, value, keep)
        elif kind == INT:
            arg.kind = _KIND_INT
            try:
                number = value.__index__()
            except (AttributeError, TypeError):  # a tensor of several elements has an __index__ that fails
                raise self._refusal(op, parameter, MUST_BE[kind], value) from None
            if not -(2**63) <= number < 2**63:
                raise self.errors[1](f"{op}: argument '{parameter.name}' = {value!r} does not fit 64 bits")
            arg.value.i = number
        elif kind == FLOAT:
            arg.kind = _KIND_FLOAT
            try:
                arg.value.f = float(value) if not isinstance(value, (str, bytes)) else None
            except TypeError:
                raise self._refusal(op, parameter, MUST_BE[kind], value) from None
        elif kind == BOOL:
            if not isinstance(value, bool):
                raise self._refusal(op, parameter, MUST_BE[kind], value)
            arg.kind = _KIND_BOOL
            arg.value.i = value
        else:
            if not isinstance(value, str):
                raise self._refusal(op, parameter, MUST_BE[kind], value)
            if "\0" in value:
                raise self._refusal(op, parameter, "a str without zero characters", value)
            arg.kind = _KIND_STRING
            keep.append(value.encode())
            arg.value.s = keep[-1]

    def _view(self, op: str, parameter: Parameter, value: Any, keep: list[Any]) -> _Tensor:
        try:
            data, code, on_gpu, index, shape, strides = self.read_tensor(value)
        except (BufferError, RuntimeError) as error:
            raise self.errors[1](f"{op}: argument '{parameter.name}' is not a plain strided tensor: {error}") from None
        if code == 0:
            raise self.errors[1](
                f"{op}: argument '{parameter.name}' has dtype {value.dtype}, which no kernel takes; accepted: bool, "
                "uint8, int8 to int64, float16, bfloat16, float32, float64, float8 types and float4_e2m1fn_x2"
            )
        problem = self.problem(value)
        if problem is not None:
            raise self.errors[1](f"{op}: argument '{parameter.name}' {problem}")
        self._check_gradient(op, parameter, value, code)
        if 0 in shape:  # its strides are meaningless, and torch reports it as contiguous whatever they are
            strides = _contiguous(shape)
        dims = (ctypes.c_int64 * len(shape))(*shape), (ctypes.c_int64 * len(shape))(*strides)
        keep.extend(dims)
        pointers = (ctypes.cast(item, ctypes.POINTER(ctypes.c_int64)) for item in dims)
        return _Tensor(data, *pointers, len(shape), code, on_gpu, index)

    def _check_gradient(self, op: str, parameter: Parameter, value: Any, code: int) -> None:
        if code not in _FLOATS or not (self.grad_enabled() and value.requires_grad):
            return
        if parameter.mutated:
            raise self.errors[1](
                f"{op}: argument '{parameter.name}' is written and requires grad, which autograd would not see; pass "
                "it detached, or call under torch.no_grad()"
            )
        self.drop_gradient(op, parameter.name)

    def _check_device(self, op: str, parameter: Parameter, tensor: _Tensor, device: int) -> int:
        where = f"{op}: argument '{parameter.name}' is "
        if self.target not in _GPU_NAMES:
            if tensor.device_type:
                raise self.errors[1](
                    f"{where}on GPU {tensor.device_index}, but kernels run on the emulator, which takes CPU tensors; "
                    "pass CPU tensors, or set HIPFORGE_DEVICE=hip (an AMD GPU and a ROCm build of torch) before the "
                    "first call"
                )
            return device
        if not tensor.device_type:
            raise self.errors[1](
                f"{where}a CPU tensor, but kernels run on the GPU (HIPFORGE_DEVICE={_GPU_NAMES[self.target]} or auto); "
                "move it to the GPU, or set HIPFORGE_DEVICE=emulator for CPU tensors"
            )
        if device not in (-1, tensor.device_index):
            raise self.errors[1](
                f"{where}on GPU {tensor.device_index}, an earlier one on GPU {device}; "
                "all tensors of a call share one GPU"
            )
        return int(tensor.device_index)

    def _refusal(self, op: str, parameter: Parameter, accepted: str, value: Any) -> Exception:
        got = "None" if value is None else type(value).__name__
        return self.errors[1](f"{op}: argument '{parameter.name}' must be {accepted}; got {got}")


def declaring_extents(
    function: Callable[..., Any],
    signature: Signature,
    *,
    addresses: tuple[int, ...],
    fault_error: type[Exception],
    guard_error: type[Exception],
    problem: Callable[[Any], str | None],
    read_tensor: Callable[[Any], tuple[int, int, bool, int, tuple[int, ...], tuple[int, ...]]],
) -> Callable[..., Any]:
    """Wrap a function of a pybind11 module for the emulator: its tensor arguments become extents during the call.

    ``addresses``: push, pop, last_error, clear_error and stream of the emulator. A fault in a kernel that the function
    launched is raised as ``fault_error`` even if the function did not look for it; a tensor that is not what its data
    pointer says, as ``problem`` tells, is a ``guard_error`` before.
    """
    push, pop, last_error, clear_error, _ = _prototyped(addresses)

    def call(*args: Any, **kwargs: Any) -> Any:
        values = signature.bind(args, kwargs)
        extents = (_Extent * max(1, len(values)))()
        count = 0
        for parameter, value in zip(signature.parameters, values, strict=True):
            if parameter.kind in (TENSOR, OPTIONAL_TENSOR) and value is not None:
                wrong = problem(value)
                if wrong is not None:
                    raise guard_error(f"{signature.name}: argument '{parameter.name}' {wrong}")
                data, code, _, _, shape, strides = read_tensor(value)
                size = _bytes_of(code, shape, strides)
                extents[count] = _Extent(parameter.name.encode(), data, size, parameter.mutated, 0)
                count += 1
        clear_error()
        push(extents, count)
        try:
            result = function(*values)
        finally:
            pop()
        fault = last_error()
        if fault is not None:
            raise fault_error(f"{signature.name}: {fault.decode(errors='replace')}")
        return result

    call.__name__ = signature.name
    return call


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def _extent_bytes(tensor: _Tensor) -> int:
    return _bytes_of(tensor.dtype, tensor.shape[: tensor.ndim], tensor.strides[: tensor.ndim])


def _bytes_of(code: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Exact bytes from the first element to the end of the last one."""
    if 0 in shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * _ITEM_BYTES[code]


_PROTOTYPES = (
    ctypes.CFUNCTYPE(None, ctypes.POINTER(_Extent), ctypes.c_int32),
    ctypes.CFUNCTYPE(None),
    ctypes.CFUNCTYPE(ctypes.c_char_p),
    ctypes.CFUNCTYPE(None),
    ctypes.CFUNCTYPE(ctypes.c_void_p),
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int)),
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int),
)


def _prototyped(addresses: Sequence[int]) -> tuple[Any, ...]:
    pairs = zip(_PROTOTYPES, addresses, strict=False)
    return tuple(prototype(address) if address else None for prototype, address in pairs)


def make_binder(
    target: int,
    tensor_type: type,
    parameter_type: type,
    errors: tuple[type[Exception], ...],
    mode_depth: Callable[[], int],
    read_tensor: Callable[[Any], tuple[int, int, bool, int, tuple[int, ...], tuple[int, ...]]],
    read_stream: Callable[[int], int],
    table_capsule: object,
    addresses: tuple[int, ...],
    checks: tuple[Any, ...],
) -> CtypesBinder:
    """Return a binder; arguments as ``binding.c``'s ``make_binder`` takes them (the table is not used)."""
    del table_capsule
    problem, *_, grad_enabled, drop_gradient = checks
    return CtypesBinder(
        target,
        tensor_type,
        errors,
        mode_depth,
        read_tensor,
        read_stream,
        problem,
        grad_enabled,
        drop_gradient,
        (tensor_type, parameter_type),
        _prototyped(addresses),
    )
