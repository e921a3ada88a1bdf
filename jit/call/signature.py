"""What a stub's annotations say: names, kinds, defaults and mutations, without importing torch.

A stub is a Python function whose parameters are annotated ``torch.Tensor``, ``torch.Tensor | None``, ``int``,
``float``, ``bool`` or ``str``. Annotations may be strings (``from __future__ import annotations``); torch need not be
importable when a stub is decorated.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hipforge.errors import ConfigError

TENSOR, OPTIONAL_TENSOR, INT, FLOAT, BOOL, STR = "T", "t", "i", "d", "b", "s"

# letter -> (how a message calls it, torch.library's schema type)
KINDS: dict[str, tuple[str, str]] = {
    TENSOR: ("torch.Tensor", "Tensor"),
    OPTIONAL_TENSOR: ("torch.Tensor | None", "Tensor?"),
    INT: ("int", "int"),
    FLOAT: ("float", "float"),
    BOOL: ("bool", "bool"),
    STR: ("str", "str"),
}
# how a message says what an argument must be; binding.c has the same words
MUST_BE: dict[str, str] = {
    TENSOR: "a torch.Tensor",
    OPTIONAL_TENSOR: "a torch.Tensor or None",
    INT: "an int",
    FLOAT: "a float",
    BOOL: "True or False",
    STR: "a str",
}
_BY_NAME = {"Tensor": TENSOR, "int": INT, "float": FLOAT, "bool": BOOL, "str": STR}
_DEFAULT_TYPES: dict[str, tuple[type, ...]] = {INT: (int,), FLOAT: (int, float), BOOL: (bool,), STR: (str,)}

MAX_ARGUMENTS = 64  # MAX_ARGS of binding.c

_VARARGS, _VARKEYWORDS = 0x04, 0x08  # CO_VARARGS and CO_VARKEYWORDS; importing inspect would cost 5 ms


@dataclass(frozen=True)
class Parameter:
    """One argument: its name, signature letter, and whether the op writes it."""

    name: str
    kind: str
    mutated: bool


@dataclass(frozen=True)
class Signature:
    """The arguments of one op in order; ``defaults`` belong to the last of them."""

    name: str
    parameters: tuple[Parameter, ...]
    defaults: tuple[Any, ...]
    returns: str

    @property
    def names(self) -> tuple[str, ...]:
        """Argument names in order."""
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def letters(self) -> str:
        """The signature letters of ``abi.h``, one per argument."""
        return "".join(parameter.kind for parameter in self.parameters)

    @property
    def writable(self) -> bytes:
        """One byte per argument: 1 if the op writes it."""
        return bytes(parameter.mutated for parameter in self.parameters)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return all arguments in order, defaults filled in.

        Raises:
            TypeError: too many, missing, repeated or unknown arguments.
        """
        names = self.names
        if len(args) > len(names):
            raise TypeError(f"{self.name}() takes {len(names)} arguments but {len(args)} were given")
        values = dict(zip(names, args, strict=False))
        for key, value in kwargs.items():
            if key not in names:
                raise TypeError(f"{self.name}() got an unexpected keyword argument {key!r}; arguments: {names}")
            if key in values:
                raise TypeError(f"{self.name}() got multiple values for argument {key!r}")
            values[key] = value
        if len(values) != len(names):
            with_default = dict(zip(names[len(names) - len(self.defaults) :], self.defaults, strict=True))
            for name in names:
                if name not in values:
                    if name not in with_default:
                        raise TypeError(f"{self.name}() missing argument '{name}'")
                    values[name] = with_default[name]
        return tuple(values[name] for name in names)

    def schema(self) -> str:
        """Return the torch.library schema, mutated tensors marked: ``name(Tensor(a0!) out, int n=1) -> ()``."""
        first_default = len(self.parameters) - len(self.defaults)
        parts = []
        for index, parameter in enumerate(self.parameters):
            kind = KINDS[parameter.kind][1]
            if parameter.mutated:
                kind = f"Tensor(a{index}!)" + ("?" if parameter.kind == OPTIONAL_TENSOR else "")
            text = f"{kind} {parameter.name}"
            if index >= first_default:
                default = self.defaults[index - first_default]
                text += f"={_quoted(default)}"
            parts.append(text)
        returns = "()" if self.returns == "None" else KINDS[_kind_of(self.returns) or TENSOR][1]
        return f"{self.name}({', '.join(parts)}) -> {returns}"


def signature_of(function: Callable[..., Any], *, mutates: Sequence[str]) -> Signature:
    """Read the signature of the stub ``function``.

    With ``mutates`` empty (stubs of pybind11 modules) there is no ``out`` and a value may be returned; otherwise the
    first parameter is a tensor that the op writes, and nothing is returned.

    Raises:
        ConfigError: a parameter has no annotation, or one that does not cross the C ABI; or the shape of the stub is
            not the one described above.
    """
    name = function.__name__
    code = function.__code__
    if code.co_flags & (_VARARGS | _VARKEYWORDS) or code.co_kwonlyargcount or code.co_posonlyargcount:
        raise ConfigError(f"stub {name}: parameters must be plain positional-or-keyword ones (no *, / or **)")
    annotations = _annotations(function)
    parameters = []
    for parameter in code.co_varnames[: code.co_argcount]:
        if parameter not in annotations:
            raise ConfigError(f"stub {name}: parameter '{parameter}' has no annotation; {_accepted()}")
        text = _as_text(annotations[parameter])
        kind = _kind_of(text)
        if kind is None:
            raise ConfigError(f"stub {name}: parameter '{parameter}' is annotated {text!r}; {_accepted()}")
        mutated = parameter in mutates
        if mutated and kind not in (TENSOR, OPTIONAL_TENSOR):
            raise ConfigError(f"stub {name}: mutates names '{parameter}', which is {text!r}, not a tensor")
        parameters.append(Parameter(parameter, kind, mutated))
    names = [parameter.name for parameter in parameters]
    unknown = [item for item in mutates if item not in names]
    if unknown:
        raise ConfigError(f"stub {name}: mutates names {unknown}, but the parameters are {names}")
    returns = _as_text(annotations.get("return", "None"))
    if mutates and (not parameters or not parameters[0].mutated or parameters[0].kind != TENSOR):
        raise ConfigError(
            f"stub {name}: the first parameter must be the output, a torch.Tensor that mutates={tuple(mutates)} names"
        )
    if mutates and returns != "None":
        raise ConfigError(f"stub {name}: must return None (results go into the first parameter); annotated {returns!r}")
    if returns != "None" and _kind_of(returns) is None:
        raise ConfigError(f"stub {name}: return annotation {returns!r}; {_accepted()}")
    if len(parameters) > MAX_ARGUMENTS:
        raise ConfigError(f"stub {name}: has {len(parameters)} parameters; at most {MAX_ARGUMENTS} cross the C ABI")
    defaults = function.__defaults__ or ()
    for owner, default in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True):
        _check_default(name, owner, default)
    return Signature(name, tuple(parameters), defaults, returns)


def _check_default(stub: str, parameter: Parameter, default: Any) -> None:
    accepted = _DEFAULT_TYPES.get(parameter.kind)
    fits = default is None if accepted is None else isinstance(default, accepted)
    if parameter.kind == TENSOR or not fits or (parameter.kind in (INT, FLOAT) and isinstance(default, bool)):
        raise ConfigError(
            f"stub {stub}: default {default!r} of '{parameter.name}' does not fit its annotation; "
            f"it must be {MUST_BE[parameter.kind]}"
        )


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    if sys.version_info >= (3, 14):  # evaluating them could need names that exist for type checkers only
        import annotationlib

        return annotationlib.get_annotations(function, format=annotationlib.Format.STRING)
    return dict(function.__annotations__)


def _as_text(annotation: Any) -> str:
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, str):
        return annotation.strip()
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " | ".join(_as_text(item) for item in typing.get_args(annotation))
    return getattr(annotation, "__qualname__", str(annotation))


def _kind_of(text: str) -> str | None:
    text = text.strip().strip("'\"")
    optional = False
    for prefix in ("typing.", "t."):
        text = text.removeprefix(prefix)
    if text.startswith("Optional[") and text.endswith("]"):
        text, optional = text[len("Optional[") : -1], True
    members = [member.strip() for member in text.split("|")]
    if "None" in members:
        members.remove("None")
        optional = True
    if len(members) != 1:
        return None
    kind = _BY_NAME.get(members[0].removeprefix("torch."))
    if not optional:
        return kind
    return OPTIONAL_TENSOR if kind == TENSOR else None


def _accepted() -> str:
    return "accepted: " + ", ".join(words for words, _ in KINDS.values())


def _quoted(value: Any) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)
