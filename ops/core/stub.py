"""Stubs of entries that share most of their parameters: a declaration of these is a text, and stubs add their own."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from hipforge.jit.compile_ops import compile_ops

_TYPES = {"Tensor?": "torch.Tensor | None", "Tensor": "torch.Tensor"}


def stub(
    name: str,
    module: str,
    declared: str,
    does: str,
    *,
    variant: Callable[..., Mapping[str, int | str]] | Mapping[str, str] | None = None,
    mutates: tuple[str, ...] = ("out",),
) -> Callable[..., None]:
    """Return the stub of an entry, as ``@compile_ops`` makes it of a function.

    Args:
        name: of the entry.
        module: that has it.
        declared: the parameters in order, by type, as in ``"out, x: Tensor; bias: Tensor?; rows, columns: int"``.
        does: the stub's docstring.
        variant: as for :func:`hipforge.jit.compile_ops`, like ``mutates``.
        mutates: the tensors that are written.

    Example:
        >>> add = stub("add_out", "module_add", "out, x: Tensor; bias: Tensor?; rows: int", "Write x + bias.")
        >>> add.stub.signature.schema()
        'add_out(Tensor(a0!) out, Tensor x, Tensor? bias, int rows) -> ()'
    """
    annotations = {}
    for part in declared.split(";"):
        names, _, kind = part.partition(":")
        annotations.update(dict.fromkeys(map(str.strip, names.split(",")), _TYPES.get(kind.strip(), kind.strip())))
    code = _nothing.__code__.replace(
        co_argcount=len(annotations), co_nlocals=len(annotations), co_varnames=tuple(annotations), co_name=name
    )
    function: Any = types.FunctionType(code, sys._getframe(1).f_globals, name)
    function.__annotations__, function.__doc__ = {**annotations, "return": "None"}, does
    return compile_ops(module, variant=variant, mutates=mutates)(function)


def _nothing() -> None: ...
