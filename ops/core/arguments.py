"""What made an op fail: an argument, or too little memory. It is asked after the failure: a good call pays nothing.

Planners and kernels check what they rely on. Other mistakes (a nested tensor, a list for a number) fail somewhere in
torch or Python, with an error that names no argument. This module checks arguments against the op's annotations.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from numbers import Complex, Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import profiler

from hipforge.errors import GuardError, HipforgeError, OutOfMemoryError
from hipforge.jit.call import tensors
from hipforge.jit.call.torch_functions import active_modes
from hipforge.jit.call.torch_library import is_dispatched, recording
from hipforge.ops.core.checks import SHOWN, require_in_float32, require_unexpanded, shown
from hipforge.ops.core.profiling import ranged

P = ParamSpec("P")
R = TypeVar("R")

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack


def is_traced(op: str) -> bool:
    """Whether torch records a call and does not run it: it compiles, or a dispatch mode other than a capture is active.

    Raises:
        GuardError: it is torch.jit.trace.
    """
    return _is_dynamo_compiling() or (active_modes() > 0 and is_dispatched(op))


class TorchOutOfMemoryError(OutOfMemoryError, torch.OutOfMemoryError):
    """Raised when memory runs out: both hipforge's error and torch's, which torch itself raises only on GPUs."""


def blame(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for what made an op fail, while its error is handled; return if neither memory nor an argument did.

    Raises:
        OutOfMemoryError: more memory was requested than there is.
        GuardError: names the first argument that does not fit its annotation, its value, and what is accepted.
    """
    error = sys.exc_info()[1]
    wanted = None if error is None else _memory_wanted(error)
    if wanted is not None:
        raise TorchOutOfMemoryError(
            f"{name} needs more memory than there is: {wanted}. Free memory, or call it on fewer rows at a time; "
            f"it was given {_sizes(signature, args, kwargs)}"
        ) from error
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # too many, missing or unknown arguments: Python's own message is right
        return
    require_annotated(name, signature, given)
    found = tensors_of(given)
    _require_together(name, found)
    for parameter, value in found.items():
        if isinstance(value, FakeTensor) and not _dispatch_modes():
            raise GuardError(f"{name}: {parameter} is a FakeTensor; make the call under its FakeTensorMode")


def _require_together(name: str, found: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors of two devices, and fake ones among real ones."""
    for parameter, value in found.items():
        first = next(iter(found))
        if value.device != found[first].device:
            raise GuardError(
                f"{name}: {parameter} is on {value.device}, but {first} is on {found[first].device}; pass tensors of "
                "one device"
            )
        if isinstance(value, FakeTensor) != isinstance(found[first], FakeTensor):
            fake, real = (parameter, first) if isinstance(value, FakeTensor) else (first, parameter)
            raise GuardError(
                f"{name}: {fake} is a FakeTensor, which has no elements, but {real} is a real one; pass real tensors, "
                "or make all of them with one FakeTensorMode"
            )


def tensors_of(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among arguments by name; those of a tuple under its name and theirs."""
    found = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, tuple):
            fields = getattr(value, "_fields", range(len(value)))
            parts = zip(fields, value, strict=True)
            found |= {f"{name}.{field}": item for field, item in parts if isinstance(item, torch.Tensor)}
    return found


def is_written(name: str, writes: Collection[str], given: Mapping[str, Any]) -> bool:
    """Return whether a call writes the argument ``name``: one that ``writes`` says, unless its ``*_out`` is given."""
    owner = name.partition(".")[0]
    return owner in writes and given.get(f"{owner}_out") is None


def require_sound(name: str, given: Mapping[str, Any], writes: Collection[str] = ()) -> None:
    """Refuse tensors without the memory that their shape needs, before any of it is read or written.

    These are a freed or shortened storage, a pending sign or conjugate, and written memory that another argument
    shares. ``x_out`` may be ``x`` itself: ops that have both may work in place.

    Args:
        name: the op's name.
        given: its arguments by name.
        writes: the names of those that it may write.

    Raises:
        GuardError: it names the argument, or both of them.
    """
    if _is_dynamo_compiling() or (_dispatch_modes() and not recording()):  # traced tensors have no storage
        return
    found = tensors_of(given)
    for parameter, value in found.items():
        wrong = _tensor_problem(value)
        if wrong is not None:
            raise GuardError(f"{name}{': ' * bool(name)}argument '{parameter}' {wrong}")
    _require_together(name, found)
    memory = {parameter: value for parameter, value in found.items() if has_memory(value)}
    written = {parameter: value for parameter, value in memory.items() if is_written(parameter, writes, given)}
    require_unexpanded(**written)
    for parameter, value in written.items():
        for other, read in memory.items():
            if other == parameter or not tensors.may_share(value, read):
                continue
            in_place = parameter == f"{other}_out"
            if in_place and is_same_view(value, read):
                continue
            raise GuardError(
                f"{name}: {parameter} is written and must not share memory with {other}"
                f"{f', unless it is {other}' * in_place}; pass a tensor of its own"
            )


def numbers_of(signature: inspect.Signature) -> frozenset[str]:
    """Return the parameters that take no tensor."""
    return frozenset(name for name, one in signature.parameters.items() if "Tensor" not in str(one.annotation))


def require_readable_numbers(name: str, given: Mapping[str, Any], numbers: Set[str]) -> None:
    """Refuse a tensor in a number's place whose memory is gone, before a planner reads it.

    Raises:
        GuardError: it names the argument.
    """
    for parameter in numbers & given.keys():
        value = given[parameter]
        wrong = tensors.problem(value) if isinstance(value, torch.Tensor) else None
        if wrong is not None:
            raise GuardError(f"{name}: argument '{parameter}' {wrong}")


def require_float32(name: str, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    """Refuse numbers that become infinite, or 0, in float32, the ops' arithmetic.

    Raises:
        GuardError: it names the argument.
    """
    for parameter, value in given.items():
        if isinstance(value, bool | str) or "float" not in str(signature.parameters[parameter].annotation):
            continue
        require_in_float32(f"{name}: {parameter}", value)


def as_floats(given: Mapping[str, Any], floats: Collection[str]) -> dict[str, Any]:
    """Return arguments with floats for the integers among ``floats``: torch takes no integer beyond int64 for one."""
    return {
        each: float(value) if each in floats and isinstance(value, int) else value for each, value in given.items()
    }


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are in memory: neither meta nor fake."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor | FunctionalTensor)


def fake_mode_of(values: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return the mode of the fake tensors among arguments, in which torch makes fakes of its own constants."""
    fakes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    return next(fakes, None) or contextlib.nullcontext()


def is_same_view(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements in the same places."""
    return one is two or (
        one.data_ptr() == two.data_ptr() and one.shape == two.shape and one.stride() == two.stride()
    )


def require_annotated(name: str, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    """Refuse arguments that do not fit their annotations, as a kernel's binding does.

    Raises:
        GuardError: it names the argument, the value and what is accepted.
    """
    for parameter, value in given.items():
        wrong = _problem(signature.parameters[parameter].annotation, value)
        if wrong is not None:
            raise GuardError(f"{name}: {parameter} {wrong}")


def named_by(function: Callable[..., Any], signature: inspect.Signature) -> tuple[str, ...]:
    """Return the op's parameters in the order in which its planner, key or fake names them; all for one with ``**``."""
    named = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
        return tuple(signature.parameters)
    if not named.keys() <= signature.parameters.keys():
        raise TypeError(f"{function.__qualname__} names {sorted(named.keys() - signature.parameters.keys())}")
    return tuple(named)


def bound(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the op ``name`` by their parameters, defaults filled in.

    Raises:
        TypeError: arguments are missing, unknown or too many.
    """
    try:
        given = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None
    given.apply_defaults()
    return given.arguments


_TORCH_WANTS = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|[KMGT]?iB)", re.IGNORECASE)
_OVERFLOWS = ("Storage size calculation overflowed", "integer multiplication overflow")


def _memory_wanted(error: BaseException) -> str | None:
    """Return a text for the memory that an error says was requested, or None for an error of another kind."""
    text = str(error)
    if isinstance(error, RuntimeError):
        found = _TORCH_WANTS.search(text)
        if found is not None:
            amount, unit = found.groups()
            return f"{amount} {unit}" + (f" ({int(amount) / 2**30:.1f} GiB)" if unit == "bytes" else "")
        if any(words in text for words in _OVERFLOWS):
            return f"a tensor of 2^63 bytes or more was asked for ({text.splitlines()[0][:SHOWN]})"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return text[:SHOWN] or "an allocation of Python's failed"
    return None


def _sizes(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = signature.bind(*args, **kwargs).arguments
    return ", ".join(
        f"{name} {value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{name} {value}"
        for name, value in given.items()
        if isinstance(value, torch.Tensor) or (_is_int(value) and not isinstance(value, bool))
    )


def require_readable(**named: object) -> None:
    """Refuse tensors that torch cannot read, each given under its name, as :func:`require_sound` does."""
    require_sound("", named)


def require_one_kind(name: str, **named: torch.Tensor | None) -> None:
    """Refuse tensors, each given under its name, that torch.func has wrapped, and fake ones among real ones."""
    if _is_dynamo_compiling():
        return
    found = tensors_of(named)
    for parameter, value in found.items():
        if _is_transformed(value):
            raise GuardError(f"{name}: argument '{parameter}' {_TRANSFORMED}")
    if not _dispatch_modes():
        _require_together(name, found)


_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_TRANSFORMED = "is inside a transform of torch.func (grad, vmap, jvp), which ops do not support; call it outside of one"


def naming_arguments(function: Callable[P, R], name: str | None = None) -> Callable[P, R]:
    """Make a function outside ``@operator`` say, under its name or ``name``, which argument made it fail.

    A profile names it too.
    """
    name = function.__name__ if name is None else name
    signature = inspect.signature(function, eval_str=True)
    profiled = ranged(name, function)
    names, numbers = list(signature.parameters), numbers_of(signature)
    before = next((at for at, each in enumerate(names) if each in numbers), len(names))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_dynamo_compiling():
            return function(*args, **kwargs)
        try:
            for each, value in (*zip(names[before:], args[before:], strict=False), *kwargs.items()):
                if each in numbers and isinstance(value, torch.Tensor):
                    require_readable_numbers(name, {each: value}, numbers)
            if profiler._is_profiler_enabled:
                return profiled(*args, **kwargs)
            return function(*args, **kwargs)
        except HipforgeError:
            raise
        except Exception:
            blame(name, signature, args, kwargs)
            raise

    return call


def _problem(annotation: Any, value: Any) -> str | None:
    """Return what is wrong with a value, to follow the argument's name; or None."""
    members = _members(annotation)
    if value is None and type(None) in members:
        return None
    problems = [_problem_of_one(member, value) for member in members if member is not type(None)]
    if not problems or None in problems:
        return None
    return problems[0] if len(problems) == 1 else f"must be one of {_words(members)}; got {shown(value)}"


def _members(annotation: Any) -> tuple[Any, ...]:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return typing.get_args(annotation)
    return (annotation,)


def _problem_of_one(kind: Any, value: Any) -> str | None:
    if kind is torch.Tensor:
        return _tensor_problem(value)
    accepted = _SCALARS.get(kind)
    if accepted is not None:
        words, test = accepted
        return None if test(value) else f"must be {words}; got {shown(value)}"
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        fits = isinstance(value, str) and value in choices
        return None if fits else f"must be one of {', '.join(map(repr, choices))}; got {shown(value)}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        fits = isinstance(value, Mapping) and all(isinstance(key, str) and _is_int(item) for key, item in value.items())
        return None if fits else f"must be a dict of integers by name; got {shown(value)}"
    if isinstance(kind, type) and issubclass(kind, tuple):
        fits = isinstance(value, tuple) and all(_tensor_problem(item) is None for item in value)
        return None if fits else f"must be a {kind.__name__}; got {shown(value)}"
    return None


def _tensor_problem(value: Any) -> str | None:
    if not isinstance(value, torch.Tensor):
        return f"must be a torch.Tensor; got {shown(value)}"
    if torch.nn.parameter.is_lazy(value):
        return "must have elements; got an uninitialized parameter: call the layer that owns it once"
    if _is_transformed(value):
        return _TRANSFORMED
    if value.is_nested:
        return "must be a plain tensor; got a nested one"
    if value.layout is not torch.strided:
        return f"must be a strided tensor; got layout {value.layout}: pass to_dense() of it"
    if value.is_quantized:
        return f"must be a plain tensor; got the quantized {value.dtype}: pass dequantize() of it"
    return tensors.problem(value)


def _is_int(value: Any) -> bool:
    if isinstance(value, torch.Tensor) and _tensor_problem(value) is not None:
        return False
    try:
        return -(2**63) <= operator.index(value) < 2**63
    except (TypeError, ValueError, RuntimeError):
        return False


def _is_float(value: Any) -> bool:
    if isinstance(value, torch.Tensor) and (value.is_complex() or _tensor_problem(value) is not None):
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False
    return not isinstance(value, (str, bytes)) and (isinstance(value, Real) or not isinstance(value, Complex))


_SCALARS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("an int of 64 bits", _is_int),
    float: ("a float", _is_float),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("a str", lambda value: isinstance(value, str)),
    torch.dtype: ("a torch.dtype, as torch.bfloat16", lambda value: isinstance(value, torch.dtype)),
}


def _words(members: tuple[Any, ...]) -> str:
    return ", ".join("None" if member is type(None) else getattr(member, "__name__", str(member)) for member in members)
