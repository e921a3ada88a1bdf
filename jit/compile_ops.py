"""``@compile_ops``: a stub whose annotations are the signature becomes a call into a HIP module.

The first call finds the device, checks its architecture, builds or loads the module and binds the entry; every later
call is a lookup of the variant, if the module has variants, and the bound entry.
"""

from __future__ import annotations

import builtins
import functools
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hipforge import devices
from hipforge.errors import ArchError, ConfigError, GuardError
from hipforge.jit.call.signature import BOOL, FLOAT, INT, MUST_BE, OPTIONAL_TENSOR, STR, Signature, signature_of

if TYPE_CHECKING:
    from hipforge.jit.registry import ModuleEntry

F = TypeVar("F", bound=Callable[..., Any])
Variant = Callable[..., Mapping[str, int | str]]


def compile_ops(
    module_name: str,
    *,
    fc_name: str | None = None,
    variant: Variant | Mapping[str, str] | None = None,
    mutates: Sequence[str] = ("out",),
    gen_fake: Callable[..., Any] | None = None,
) -> Callable[[F], F]:
    """Make a stub call the entry of a HIP module, which is built on the first call.

    Args:
        module_name: entry of ``optCompilerConfig.json`` or of a registered file.
        fc_name: name of the exported function, if it is not the stub's.
        variant: the parameter of the stub that gives each of the module's variant parameters, as in
            ``{"BLOCK_N": "block_n"}``; or a function that takes the call's arguments and returns the values,
            ``{"M": 4, "BLOCK_N": 8}``, from shapes, strides, dtypes and numbers alone, because its answer is kept.
        mutates: the tensors that the op writes; the first parameter must be one. Empty for functions of pybind11
            modules that return a value.
        gen_fake: makes the result of a traced call, for a stub that returns something.

    The stub's parameters are annotated ``torch.Tensor``, ``torch.Tensor | None``, ``int``, ``float``, ``bool`` or
    ``str``; it returns None; its body is never run.

    Raises:
        ConfigError: at decoration, the annotations are not of that form; at the first call, the module does not exist
            or its entry's own signature differs, or ``HIPFORGE_DEVICE=reference``.

    Calls raise GuardError for refused arguments, ArchError, BuildError, ToolchainError, MissingModuleError, and
    LaunchError (EmulatorFault on the emulator).

    Example:
        >>> import torch
        >>> @compile_ops("module_fp8_quant", mutates=("out",))
        ... def fp8_quant_out(out: torch.Tensor, x: torch.Tensor) -> None: ...
        >>> fp8_quant_out.stub.module_name, fp8_quant_out.stub.signature.letters
        ('module_fp8_quant', 'TT')
    """

    def decorate(function: F) -> F:
        if "torch" in sys.modules:
            _ask_torch_directly()
        signature = signature_of(function, mutates=mutates)
        chosen = _by_parameters(signature, variant) if isinstance(variant, Mapping) else variant
        stub = Stub(module_name, fc_name or function.__name__, signature, chosen, gen_fake)

        return callable_of(stub, function)

    return decorate


def callable_of(stub: Stub, function: F) -> F:
    """Return the function that calls a stub and has the name, the parameters and the docstring of ``function``."""
    call = functools.wraps(function)(_caller(stub))
    call.stub = stub  # type: ignore[attr-defined]
    return cast(F, call)


def _caller(stub: Stub) -> Callable[..., Any]:
    """Return a function with the stub's own parameters: a call without ``*args`` costs a quarter of a microsecond less.

    Functions with equally many parameters share one code object; each has its own globals with what it calls.
    """

    def traced(*args: Any) -> Any:
        return _call_operator(stub.operator_name(), args, {})

    names, name = stub.signature.names, stub.signature.name
    _callers.append(stub.calls)
    stub.calls.update(is_dynamo_compiling=_is_dynamo_compiling, traced=traced)
    code = _caller_code(len(names)).replace(co_varnames=names, co_name=name)
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=name)
    return types.FunctionType(code, stub.calls, name, stub.signature.defaults)


_callers: list[dict[str, Any]] = []  # the globals of each


@functools.cache
def _caller_code(count: int) -> types.CodeType:
    names = ", ".join(f"a{i}" for i in range(count))
    source = f"def call({names}):\n if is_dynamo_compiling(): return traced({names})\n return eager({names})"
    scope: dict[str, Any] = {}
    exec(compile(source, "<stub>", "exec"), scope)  # of a file's name a traceback would show that file's lines
    return cast(types.CodeType, scope["call"].__code__)


def _call_operator(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    return getattr(torch.ops.hipforge, name)(*args, **kwargs)


def _ask_torch() -> bool:
    import torch

    return torch.compiler.is_dynamo_compiling()


_is_dynamo_compiling: Callable[[], bool] = _ask_torch


def _ask_torch_directly() -> None:
    """Save every call a Python frame, as early as possible: torch.compile guards on the function's id."""
    global _is_dynamo_compiling
    import torch

    if _is_dynamo_compiling is not torch.compiler.is_dynamo_compiling:
        _is_dynamo_compiling = torch.compiler.is_dynamo_compiling
        for calls in _callers:
            calls["is_dynamo_compiling"] = _is_dynamo_compiling


class Stub:
    """One decorated function: where its entry is, and the two ways to call it.

    ``eager(*args)`` diverts subclasses, meta tensors and dispatch modes to the torch operator; ``kernel(*args)`` is
    that operator's implementation and diverts nothing.
    """

    def __init__(
        self,
        module_name: str,
        entry: str,
        signature: Signature,
        variant: Variant | None,
        gen_fake: Callable[..., Any] | None,
    ) -> None:
        self.module_name = module_name
        self.entry = entry
        self.signature = signature
        self.variant = variant
        self.gen_fake = gen_fake
        # eager and kernel; the globals of the decorated function, whose builtins torch.compile looks up
        self.calls: dict[str, Any] = {"__builtins__": builtins}
        self._operator_name: str | None = None
        self._lock = threading.RLock()
        self.reset()
        os.register_at_fork(after_in_child=self._renew_lock)

    def reset(self) -> None:
        """Forget what was loaded: the next call loads again, like the first one (after an edit, or in tests)."""
        self.eager = functools.partial(self._first_call, "eager")
        self.kernel = functools.partial(self._first_call, "kernel")

    @property
    def eager(self) -> Callable[..., Any]:
        """What an eager call goes to."""
        return cast(Callable[..., Any], self.calls["eager"])

    @eager.setter
    def eager(self, function: Callable[..., Any]) -> None:
        self.calls["eager"] = function

    @property
    def kernel(self) -> Callable[..., Any]:
        """What the torch operator goes to."""
        return cast(Callable[..., Any], self.calls["kernel"])

    @kernel.setter
    def kernel(self, function: Callable[..., Any]) -> None:
        self.calls["kernel"] = function

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def operator_name(self) -> str:
        """Return the name under ``torch.ops.hipforge``; the operator is registered now if it was not yet."""
        if self._operator_name is None:
            from hipforge.jit.call.torch_library import register

            with self._lock:
                if self._operator_name is None:
                    self._operator_name = register(
                        self.signature, self._run_kernel, self.gen_fake, self.calls
                    )
        return self._operator_name

    # torch.compile runs this while it traces and takes the name as a constant.
    operator_name._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def operator(self) -> Callable[..., Any]:
        """Return the torch operator of this stub."""
        import torch

        return cast(Callable[..., Any], getattr(torch.ops.hipforge, self.operator_name()).default)

    def _run_kernel(self, *args: Any, **kwargs: Any) -> Any:
        return self.kernel(*args, **kwargs)

    def _divert(self, *args: Any) -> Any:
        from hipforge.jit.call.torch_library import require_no_jit_trace

        require_no_jit_trace(self.signature.name)
        _check_meta(self.signature, args)
        return self.operator()(*args)

    def _first_call(self, way: str, *args: Any, **kwargs: Any) -> Any:
        _ask_torch_directly()
        values = self.signature.bind(args, kwargs)
        if way == "eager" and _belongs_to_dispatcher(values):
            return self._divert(*values)
        self._check(values)
        with self._lock:
            if isinstance(getattr(self, way), functools.partial):
                setattr(self, way, self._prepare(values, self._divert if way == "eager" else None))
        return getattr(self, way)(*values)

    def _check(self, values: tuple[Any, ...]) -> None:
        """Refuse arguments of a wrong kind."""
        _check_kinds(self.signature, values)

    def _prepare(self, values: tuple[Any, ...], divert: Callable[..., Any] | None) -> Callable[..., Any]:
        from hipforge.jit import registry

        device = devices.current()
        if device.kind == "reference":
            raise ConfigError(
                f"{self.signature.name} needs a device, but HIPFORGE_DEVICE=reference runs no kernels; "
                "set HIPFORGE_DEVICE to auto, hip or emulator"
            )
        module = registry.module(self.module_name)
        if module.ffi == "abi" and self.signature.returns != "None":
            raise ConfigError(
                f"stub {self.signature.name} is annotated to return {self.signature.returns}, but entries of "
                f"{self.module_name} (ffi abi) return None; pass the result's tensor as the first argument"
            )
        if self.variant is None and module.variants:
            raise ConfigError(
                f"{self.module_name} has variants {_words(module.variants)}; "
                f"stub {self.signature.name} needs compile_ops(variant=...) that returns them"
            )
        one_arch = not device.is_gpu or len(_gpu_archs(device)) == 1
        if one_arch and self.variant is None:
            return self._bind(module, {}, _arch(device, values), divert)
        return _Dispatch(self, module, device, divert).call

    def _bind(
        self, module: ModuleEntry, variant: Mapping[str, int | str], arch: str, divert: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        from hipforge.jit import loader
        from hipforge.jit.call import abi, python_module

        if module.archs and arch not in module.archs:
            raise ArchError(
                f"{self.signature.name}: {self.module_name} has kernels for {', '.join(module.archs)}; the tensors' "
                f"device is {arch}"
            )
        loaded = loader.load(self.module_name, variant, arch)
        if module.ffi == "pybind11":
            extension = python_module.import_extension(loaded.path / "module.so", module.name)
            function = abi.wrap(python_module.function_of(extension, module.name, self.entry), self.signature)
            return function if divert is None else diverting(function, self.signature, divert)
        return abi.bind(loaded.library, self.entry, self.signature, divert=divert, module=module.name)


class _Dispatch:
    """Chooses among bound variants; a variant's first use loads it."""

    def __init__(
        self, stub: Stub, module: ModuleEntry, device: devices.Device, divert: Callable[..., Any] | None
    ) -> None:
        self.stub = stub
        self.module = module
        self.device = device
        self.divert = divert
        self.entries: dict[Any, Callable[..., Any]] = {}
        self.lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew_lock)
        several_archs = device.is_gpu and len(_gpu_archs(device)) > 1
        self.call: Callable[..., Any] = self._call_by_arch
        # Without variants, the stub binds directly where there is one architecture.
        if stub.variant is not None and not several_archs:
            self.call = self._by_variant(stub.variant)

    def _renew_lock(self) -> None:
        self.lock = threading.Lock()

    def _by_variant(self, variant: Callable[..., Mapping[str, int | str]]) -> Callable[..., Any]:
        from hipforge.jit.call import abi

        signature = self.stub.signature
        return abi.process_binder().dispatch(
            signature.name, signature.names, signature.defaults, variant, self.entries, self._load
        )

    def _call_by_arch(self, *args: Any, **kwargs: Any) -> Any:
        args = self.stub.signature.bind(args, kwargs)
        return self._load(args, _arch(self.device, args))(*args)

    def _load(self, args: tuple[Any, ...], arch: str | None = None) -> Callable[..., Any]:
        """Return the entry for ``args``, loading it if it is not there; says what is wrong with the arguments.

        ``arch`` is part of the key where GPUs of several architectures are in use.
        """
        if self.divert is not None and _belongs_to_dispatcher(args):
            return self.divert
        _check_kinds(self.stub.signature, args)
        variant = self.module.with_integers(self.stub.variant(*args)) if self.stub.variant else {}
        values = tuple(variant.values())
        key = (arch, values) if arch is not None else values[0] if len(values) == 1 else values
        with self.lock:
            if key not in self.entries:
                _check_variant(self.stub, self.module, variant)
                self.entries[key] = self.stub._bind(self.module, variant, _arch(self.device, args), self.divert)
            return self.entries[key]


def _by_parameters(signature: Signature, parameters: Mapping[str, str]) -> Variant:
    """Return the function that takes each variant parameter from its named argument."""
    unknown = [name for name in parameters.values() if name not in signature.names]
    if unknown:
        raise ConfigError(
            f"stub {signature.name} takes a variant from its parameter {unknown[0]!r}, which it has not; it has "
            f"{', '.join(signature.names)}"
        )
    kinds = {parameter.name: parameter.kind for parameter in signature.parameters}
    no_value = [name for name in parameters.values() if kinds[name] not in (INT, BOOL, STR)]
    if no_value:
        raise ConfigError(
            f"stub {signature.name} takes a variant from its parameter {no_value[0]!r}, {MUST_BE[kinds[no_value[0]]]}; "
            "accepted: a parameter annotated int, bool or str"
        )
    places = [(name, signature.names.index(parameter)) for name, parameter in parameters.items()]
    return lambda *given: {name: given[place] for name, place in places}


def _check_variant(stub: Stub, module: ModuleEntry, variant: Mapping[str, int | str]) -> None:
    if set(variant) != set(module.variants):
        raise ConfigError(
            f"stub {stub.signature.name} chooses variant parameters {sorted(variant)}, but {stub.module_name} has "
            f"{_words(module.variants)}"
        )
    name = module.refused(variant)
    if name is not None:
        accepted = ", ".join(map(str, module.variants[name]))
        raise GuardError(f"{stub.signature.name}: {name} = {variant[name]!r} is not supported; accepted: {accepted}")


def _check_kinds(signature: Signature, args: tuple[Any, ...]) -> None:
    """Refuse arguments of a wrong kind before a variant function fails on them."""
    import torch

    for parameter, value in zip(signature.parameters, args, strict=True):
        if parameter.kind == OPTIONAL_TENSOR and value is None:
            continue
        if parameter.kind in _CONVERSIONS:
            fits = _converts(value, _CONVERSIONS[parameter.kind])
        else:
            fits = isinstance(value, _TYPES.get(parameter.kind, torch.Tensor))
        if not fits:
            got = "None" if value is None else type(value).__name__
            raise GuardError(
                f"{signature.name}: argument '{parameter.name}' must be {MUST_BE[parameter.kind]}; got {got}"
            )


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {INT: operator.index, FLOAT: float}
_TYPES: dict[str, type] = {BOOL: bool, STR: str}


def _converts(value: Any, conversion: Callable[[Any], Any]) -> bool:
    """Return whether the conversion takes a value; a tensor of several elements only seems to be an int."""
    if isinstance(value, str | bytes | bytearray):  # float() reads those
        return False
    try:
        conversion(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    except OverflowError:  # of the right kind; the binding says what is too large
        return True
    return True


def _belongs_to_dispatcher(values: Sequence[Any]) -> bool:
    """Whether a call must be seen by torch: a dispatch mode is active, or a tensor has no data of its own."""
    import torch

    from hipforge.jit.call.torch_functions import active_modes

    if active_modes():
        return True
    plain = (torch.Tensor, torch.nn.Parameter)
    return any(isinstance(value, torch.Tensor) and (type(value) not in plain or value.is_meta) for value in values)


def _check_meta(signature: Signature, args: tuple[Any, ...]) -> None:
    """Refuse meta tensors beside real ones: torch would take the fake, and the results would never be written."""
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)
    named = zip(signature.names, args, strict=True)
    devices_of = {name: value.device for name, value in named if type(value) in plain}
    meta = [name for name, device in devices_of.items() if device.type == "meta"]
    if meta and len(meta) < len(devices_of):
        real = next(name for name in devices_of if name not in meta)
        raise GuardError(
            f"{signature.name}: '{meta[0]}' is on the meta device, but '{real}' is on {devices_of[real]}; pass tensors "
            "of one device"
        )


def diverting(function: Callable[..., Any], signature: Signature, divert: Callable[..., Any]) -> Callable[..., Any]:
    """Do for a pybind11 module's function what the binding does for an entry: fakes go to the torch operator."""

    def call(*args: Any, **kwargs: Any) -> Any:
        values = signature.bind(args, kwargs)
        return divert(*values) if _belongs_to_dispatcher(values) else function(*values)

    return call


def _arch(device: devices.Device, values: Sequence[Any]) -> str:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return device.arch_of(value.device.index or 0)
    return device.arch_of(0)


@functools.lru_cache(maxsize=1)
def _gpu_archs(device: devices.Device) -> frozenset[str]:
    import torch

    return frozenset(device.arch_of(index) for index in range(torch.cuda.device_count()))


def _words(variants: Mapping[str, Sequence[int | str]]) -> str:
    return "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in variants.items())
