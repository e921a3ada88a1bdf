"""``compile_ops`` with aiter's arguments: stubs of modules that take ``torch::Tensor``, or ``aiter_tensor_t``."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hipforge import devices
from hipforge.aiter_compat import config, tensors
from hipforge.errors import ConfigError, GuardError, HipforgeError
from hipforge.jit import registry
from hipforge.jit.call import signature as signatures
from hipforge.jit.call.signature import OPTIONAL_TENSOR, TENSOR, Parameter, Signature
from hipforge.jit.compile_ops import Stub, callable_of, diverting

if TYPE_CHECKING:
    from hipforge.jit.loader import LoadedModule
    from hipforge.jit.registry import ModuleEntry

F = TypeVar("F", bound=Callable[..., Any])

_CORE = "module_aiter_core"  # it defines the Python class of aiter_tensor_t
_CAN_THROW = "_ZN12aiter_detail17g_aiter_can_throwE"
_CALLS = "hf_aiter_calls"  # csrc/aiter/abort.cpp
_ERROR_PROTOCOL = 2  # aiter_ctypes_abi_version: a status is returned, and the last error can be asked for


def compile_ops(
    _md_name: str,
    fc_name: str | None = None,
    gen_func: Callable[..., dict[str, Any]] | None = None,
    gen_fake: Callable[..., Any] | None = None,
    ffi_type: str = "pybind",
    develop: bool = False,
) -> Callable[[F], F]:
    """Make a stub call a function of a HIP module, with the arguments of ``aiter.jit.core.compile_ops``.

    Args:
        _md_name: the module, from a JSON file given to :func:`register` or to ``hipforge.jit.register``.
        fc_name: name of the function in the module, if it is not the stub's.
        gen_func: takes the call's arguments and returns build arguments for it: ``md_name``, and any of srcs,
            flags_extra_cc, flags_extra_hip, flags_extra_hip_per_source, extra_ldflags, extra_include, blob_gen_cmd,
            verbose, torch_exclude that differ from the module's entry. One module is built per ``md_name``.
        gen_fake: what a traced call returns. A stub that returns a tensor needs it under torch.compile.
        ffi_type: ``"pybind"``: the module brings its PYBIND11_MODULE. ``"ctypes"``: it has C functions that take
            ``aiter_tensor_t*``, ``int64_t``, ``float``, ``int`` for a bool, ``char*`` and the stream last; or its entry
            has ``"ffi": "abi"``, takes ``hf::Tensor`` and ends in ``HF_EXPORT``.
        develop: the functions of the PYBIND11_MODULE take ``aiter_tensor_t``, whose class ``module_aiter_core``
            defines, and launch on the stream given to ``_set_current_hip_stream``.

    A stub that returns None counts as writing every tensor it takes, as aiter's operators do, and so does every one
    that passes ``aiter_tensor_t``; another that returns a value counts as writing none. The struct is that of the
    ``aiter_tensor.h`` in the module's include folders.

    Raises:
        ConfigError: at decoration, an argument that is not supported; at the first call, a module that :func:`register`
            refused or of the other ``ffi_type``, build arguments of ``gen_func`` that are not known, or a struct of
            another form.

    Calls raise RuntimeError for an error that the module reports, also where it would end the process.
    """
    if ffi_type not in ("pybind", "ctypes"):
        raise ConfigError(f"{_md_name}: ffi_type={ffi_type!r}: expected 'pybind' or 'ctypes'")

    def decorate(function: F) -> F:
        form = "ctypes" if ffi_type == "ctypes" else "develop" if develop else "pybind"
        entry = fc_name or function.__name__
        signature = _signature(function, form)
        made: dict[str, Callable[..., Any]] = {}

        def stub_of(module: str) -> Callable[..., Any]:
            if module not in made:
                made[module] = callable_of(_Stub(module, entry, signature, form, gen_fake), function)
            return made[module]

        if gen_func is None:
            return cast(F, stub_of(_md_name))

        @functools.wraps(function)
        def generated(*args: Any, **kwargs: Any) -> Any:
            return stub_of(_derived(_md_name, gen_func(*args, **kwargs)))(*args, **kwargs)

        return cast(F, generated)

    return decorate


@dataclasses.dataclass(frozen=True)
class _Signature(Signature):
    """Any annotation is accepted: what a module takes is for its binding to say; torch is asked for the schema."""

    function: Callable[..., Any] | None = None

    def schema(self) -> str:
        """Return the torch.library schema, as aiter's own operators have it."""
        import torch

        assert self.function is not None
        written = [parameter.name for parameter in self.parameters if parameter.mutated]
        return self.name + torch.library.infer_schema(self.function, mutates_args=written)


def _signature(function: Callable[..., Any], form: str) -> _Signature:
    code = function.__code__
    notes = {name: signatures._as_text(note) for name, note in signatures._annotations(function).items()}
    kinds = {name: signatures._kind_of(note) or _letter(note) for name, note in notes.items()}
    returns = notes.get("return", "None")
    writes = returns == "None" or form != "pybind"
    parameters = tuple(
        Parameter(name, kinds.get(name, "x"), writes and kinds.get(name) in (TENSOR, OPTIONAL_TENSOR))
        for name in code.co_varnames[: code.co_argcount]
    )
    return _Signature(function.__name__, parameters, function.__defaults__ or (), returns, function)


def _letter(note: str) -> str:
    """Return the letter of ``int | None`` and ``str | None``; x for what only pybind11 converts."""
    members = {member.strip() for member in note.removeprefix("Optional[").removesuffix("]").split("|")} - {"None"}
    return {"int": "I", "str": "S"}.get(next(iter(members)), "x") if len(members) == 1 else "x"


class _Stub(Stub):
    """A stub whose tensors may have to become structs first."""

    def __init__(
        self, module: str, entry: str, signature: _Signature, form: str, gen_fake: Callable[..., Any] | None
    ) -> None:
        super().__init__(module, entry, signature, None, gen_fake)
        self.form = form

    def _check(self, values: tuple[Any, ...]) -> None:
        """Refuse what is no tensor where one belongs; the module's own binding checks the rest."""
        import torch

        for parameter, value in zip(self.signature.parameters, values, strict=True):
            optional = parameter.kind == OPTIONAL_TENSOR
            fits = parameter.kind not in (TENSOR, OPTIONAL_TENSOR) or isinstance(value, torch.Tensor)
            if not fits and not (optional and value is None):
                raise GuardError(
                    f"{self.signature.name}: argument '{parameter.name}' must be a torch.Tensor"
                    f"{' or None' if optional else ''}; got {type(value).__name__}"
                )

    def _prepare(self, values: tuple[Any, ...], divert: Callable[..., Any] | None) -> Callable[..., Any]:
        if self.module_name in config.refused:
            raise ConfigError(config.refused[self.module_name])
        entry = registry.module(self.module_name)
        if entry.ffi == "abi" and self.form != "ctypes":
            raise ConfigError(
                f'{entry.name} has "ffi": "abi" in {entry.origin}, and its stub says ffi_type=\'pybind\'; '
                "use ffi_type='ctypes' or change the entry"
            )
        return super()._prepare(values, divert)

    def _bind(
        self, module: ModuleEntry, variant: Mapping[str, Any], arch: str, divert: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        from hipforge.jit import loader
        from hipforge.jit.call import abi

        if module.ffi == "abi":
            return super()._bind(module, variant, arch, divert)
        make = {"ctypes": _c_function, "develop": _taking_structs, "pybind": _taking_tensors}[self.form]
        function = abi.wrap(make(self, module, loader.load(module.name, variant, arch), arch), self.signature)
        return function if divert is None else diverting(function, self.signature, divert)


def _taking_tensors(stub: _Stub, module: ModuleEntry, loaded: LoadedModule, arch: str) -> Callable[..., Any]:
    return _of_extension(stub, module, loaded)[1]


def _of_extension(stub: _Stub, module: ModuleEntry, loaded: LoadedModule) -> tuple[Any, Callable[..., Any]]:
    from hipforge.jit.call import python_module

    extension = python_module.import_extension(loaded.path / "module.so", module.name)
    function = python_module.function_of(extension, module.name, stub.entry)
    guard = _guard(loaded.library)

    def call(*args: Any) -> Any:
        with guard():
            return function(*args)

    return extension, call


def _taking_structs(stub: _Stub, module: ModuleEntry, loaded: LoadedModule, arch: str) -> Callable[..., Any]:
    """Return the function of a module in the form ``develop=True``."""
    from hipforge.jit import loader
    from hipforge.jit.call import python_module

    layout = tensors.layout_of(module, arch)
    if _CORE in config.refused:
        raise ConfigError(config.refused[_CORE])
    core = python_module.import_extension(loader.load(_CORE, None, arch).path / "module.so", _CORE)
    made = python_module.function_of(core, _CORE, "aiter_tensor_t")
    extension, function = _of_extension(stub, module, loaded)
    if not hasattr(extension, "_set_current_hip_stream"):
        raise ConfigError(
            f"{module.name}: its PYBIND11_MODULE defines no _set_current_hip_stream, by which a module that takes "
            "aiter_tensor_t is given its stream; leave develop=True out if it takes torch::Tensor"
        )
    set_stream, stream = extension._set_current_hip_stream, _stream_getter()
    name, parameters = stub.signature.name, stub.signature.parameters

    def call(*args: Any) -> Any:
        set_stream(stream(args))
        return function(
            *(
                made(*layout.describe(f"{name}: argument '{parameter.name}'", value))
                if parameter.kind in (TENSOR, OPTIONAL_TENSOR) and value is not None
                else value
                for parameter, value in zip(parameters, args, strict=True)
            )
        )

    return call


def _c_function(stub: _Stub, module: ModuleEntry, loaded: LoadedModule, arch: str) -> Callable[..., Any]:
    """Return the C function of a module, with aiter's error protocol."""
    library, name = loaded.library, stub.signature.name
    function = getattr(library, stub.entry, None)
    if function is None:
        raise ConfigError(
            f'{module.name} has "ffi": "pybind11" in {module.origin}, and its library exports no C function '
            f"{stub.entry!r}: declare it AITER_C_ITFS, or use ffi_type='pybind' if its PYBIND11_MODULE defines it"
        )
    layout = tensors.layout_of(module, arch)
    protocol = _optional(library, "aiter_ctypes_abi_version", ctypes.c_int)
    status = protocol is not None and protocol() >= _ERROR_PROTOCOL
    last_error, clear_error = _optional(library, "aiter_get_last_error", ctypes.c_char_p), _optional(
        library, "aiter_clear_last_error", None
    )
    returns = stub.signature.returns
    value = returns == "int"
    function.restype = ctypes.c_int if status or value else ctypes.c_float if returns == "float" else None
    kinds = [parameter.kind for parameter in stub.signature.parameters]
    function.argtypes = [_C_TYPES.get(kind, ctypes.c_void_p) for kind in kinds] + [ctypes.c_void_p]
    stream = _stream_getter()
    guard = _guard(library) if status else _no_guard
    where = [f"{name}: argument '{item}'" for item in stub.signature.names]

    def call(*args: Any) -> Any:
        structs = []
        given: list[Any] = []
        for kind, text, item in zip(kinds, where, args, strict=True):
            if kind in (TENSOR, OPTIONAL_TENSOR) and item is not None:
                structs.append(layout.pack(text, item))
                item = ctypes.addressof(structs[-1])
            elif kind == "I" and item is None:
                item = -1
            elif kind in (signatures.STR, "S") and item is not None:
                item = item.encode()
            elif kind == signatures.BOOL:
                item = bool(item)
            given.append(item)
        if clear_error is not None:
            clear_error()
        try:
            with guard():
                result = function(*given, stream(args))
        except ctypes.ArgumentError as error:
            raise GuardError(f"{name}: {error}; the stub takes ({', '.join(stub.signature.names)})") from error
        said = last_error() if last_error is not None else None
        if said:
            raise HipforgeError(f"{name} failed: {said.decode(errors='replace')}")
        if status and not value and result != 0:
            raise HipforgeError(f"{name} failed with status {result} and gave no reason")
        return None if status and not value else result

    return call


_C_TYPES: dict[str, Any] = {
    signatures.INT: ctypes.c_int64, "I": ctypes.c_int64, signatures.FLOAT: ctypes.c_float,
    signatures.BOOL: ctypes.c_int, signatures.STR: ctypes.c_char_p, "S": ctypes.c_char_p,
}  # fmt: skip


def _optional(library: ctypes.CDLL, name: str, restype: Any) -> Any:
    function = getattr(library, name, None)
    if function is not None:
        function.argtypes, function.restype = [], restype
    return function


def _guard(library: ctypes.CDLL) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return what makes a module's failed checks raise in this thread, where its own code would end the process."""
    flags_of = ((_CAN_THROW, ctypes.c_bool), (_CALLS, ctypes.c_int))
    there = [(name, kind) for name, kind in flags_of if _has(library, name)]
    if not there:
        return _no_guard

    @contextlib.contextmanager
    def throwing() -> Iterator[None]:
        # Thread-local: the address is that of the thread which asks.
        flags = [kind.in_dll(library, name) for name, kind in there]
        before = [flag.value for flag in flags]
        for flag in flags:
            flag.value = 1
        try:
            yield
        finally:
            for flag, value in zip(flags, before, strict=True):
                flag.value = value

    return throwing


def _no_guard() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _has(library: ctypes.CDLL, name: str) -> bool:
    try:
        ctypes.c_char.in_dll(library, name)
    except ValueError:
        return False
    return True


def _stream_getter() -> Callable[[tuple[Any, ...]], int]:
    """Return a function of a call's arguments that gives the address of the stream to launch on."""
    from hipforge.jit.call import abi

    if not devices.current().is_gpu:
        current = ctypes.CFUNCTYPE(ctypes.c_void_p)(abi.process_environment().emulator[4])
        return lambda args: current() or 0

    import torch

    def of_tensors(args: tuple[Any, ...]) -> int:
        found = next((item.get_device() for item in args if isinstance(item, torch.Tensor)), None)
        return abi.read_stream(torch.cuda.current_device() if found is None else found)

    return of_tensors


def _derived(base: str, changes: Mapping[str, Any]) -> str:
    """Register the module that ``changes`` make of ``base``, once, and return its name."""
    name = str(changes.get("md_name", base))
    values = {key: value for key, value in changes.items() if key != "md_name"}
    unknown = sorted(set(values) - set(config.BUILD_ARGUMENTS))
    if unknown:
        raise ConfigError(
            f"{base}: gen_func returned {unknown[0]!r}; accepted: md_name, {', '.join(config.BUILD_ARGUMENTS)}"
        )
    if name in registry.modules():
        return name
    if base in config.refused:
        raise ConfigError(config.refused[base])
    entry = registry.module(base)
    fields = {item.name: getattr(entry, item.name) for item in dataclasses.fields(entry)}
    kept = {key: config.json_value(fields[key]) for key in fields if key not in ("name", "origin", "by_vendor")}
    kept.update(config.json_value(entry.by_vendor))
    made = {key: config.plain_value(key, value) for key, value in values.items()}
    registry.register_values(entry.origin, {name: {**kept, **{k: v for k, v in made.items() if v is not None}}})
    return name
