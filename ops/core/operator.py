"""``@operator``: one decorator makes an op of a function: planner, launch cache and torch operator.

The function's first parameter is the accepted path of its decision, which callers do not pass. An eager call looks its
decision up by shapes, dtypes and flags, plans on a miss, and runs the function, past the dispatcher. Where torch traces
or a dispatch mode is active, it sees an opaque operator ``torch.ops.hipforge.<name>`` that plans inside, so one graph
serves every batch size.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from hipforge.errors import GuardError
from hipforge.jit.call import torch_library
from hipforge.ops.core import dispatch
from hipforge.ops.core.checks import TensorSpec
from hipforge.ops.core.dispatch import Accepted, Decision

P = ParamSpec("P")
R = TypeVar("R")

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack


def operator(
    plan: Callable[..., Decision],
    *,
    key: Callable[..., object] | None = None,
    fake: Callable[..., Any] | None = None,
    outs: Sequence[str] = (),
    mutates: Sequence[str] = (),
    adds: str | None = None,
) -> Callable[[Callable[Concatenate[Accepted, P], R]], Callable[P, R]]:
    """Make an op of a function whose first parameter takes the accepted path.

    Args:
        plan: the op's arguments, by name and with defaults filled in -> its Decision; GuardError for malformed ones. It
            looks at shapes, dtypes, devices and numbers alone, because tracing passes
            :class:`~hipforge.ops.core.checks.TensorSpec` values for tensors. Where nothing is accepted the op returns
            None.
        key: what the decision depends on, hashable; everything the arguments say by default. A key that leaves
            something out relies on the kernel's own guards for it.
        fake: the op's arguments without ``outs`` -> new empty results, from shapes that may be symbolic. Without it
            torch traces through the function to the stubs that it calls, which is right where nothing that is decided
            depends on shapes.
        outs: the parameters that take tensors to write results into, in the order of the results, None by default.
        mutates: further parameters that the op writes.
        adds: the parameter, None by default, that takes a tensor to add the only result to and to return.
    """

    def decorate(body: Callable[Concatenate[Accepted, P], R]) -> Callable[P, R]:
        name = body.__name__
        launches: dict[object, Accepted] = {}
        dispatch.on_clear(launches.clear)
        signature = _public_signature(body)

        def planner(*args: Any, **kwargs: Any) -> Decision:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return plan(**given.arguments)

        dispatch.register_planner(name, planner)
        key_of: Callable[..., object] = key or describe

        def decide(args: tuple[Any, ...], kwargs: dict[str, Any], at: object) -> Accepted | None:
            accepted = planner(*args, **kwargs).accepted
            if accepted is not None and at is not None:
                if len(launches) >= dispatch.MAX_DECISIONS:
                    launches.clear()
                launches[at] = accepted
            return accepted

        @functools.wraps(body)
        def call(*args: Any, **kwargs: Any) -> Any:
            if traced is not None and (_is_dynamo_compiling() or _dispatch_modes()):
                return traced(*args, **kwargs)
            if _is_dynamo_compiling():  # what is decided becomes a constant of the graph; the cache stays as it is
                accepted: Accepted | None = plan(*args, **kwargs).accepted
                return None if accepted is None else body(accepted, *args, **kwargs)
            at = None
            try:
                at = key_of(*args, **kwargs)
                accepted = launches[at]
            except KeyError:
                accepted = decide(args, kwargs, at)
            except (AttributeError, TypeError):  # the planner says what is wrong; what cannot be hashed is planned anew
                accepted = decide(args, kwargs, None)
            return None if accepted is None else body(accepted, *args, **kwargs)

        traced = None if fake is None else _traced(body, signature, call, fake, tuple(outs), tuple(mutates), adds)
        call.__signature__ = signature  # type: ignore[attr-defined]
        return typing.cast(Callable[P, R], call)

    return decorate


def describe(*args: Any, **kwargs: Any) -> tuple[object, ...]:
    """Return all that arguments say to a planner: shape, dtype and device of tensors, other values with their types.

    Without its type 2.0 would find the decision of 2, and True that of 1, although the planner refuses them.
    """
    return (*map(_part, args), *kwargs, *map(_part, kwargs.values()))


def _part(value: Any) -> object:
    return (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else (value.__class__, value)


def _public_signature(body: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that callers see, annotations evaluated: the function's without the accepted path."""
    signature = inspect.signature(body, eval_str=True)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _traced(
    body: Callable[..., Any],
    public: inspect.Signature,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    outs: tuple[str, ...],
    mutates: tuple[str, ...],
    adds: str | None,
) -> Callable[..., Any]:
    """Register the torch operator of an op and return the function that calls it while torch traces."""
    names = tuple(public.parameters)
    inputs = [parameter for name, parameter in public.parameters.items() if name not in outs]
    returns, may_be_none = _without_none(public.return_annotation)

    names_in = tuple(parameter.name for parameter in inputs)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if adds is not None:  # an operator may not return its input, so it adds to a copy, which `traced` copies back
            kwargs = {**dict(zip(names_in, args)), **kwargs}  # noqa: B905
            args = ()
            kwargs[adds] = None if kwargs.get(adds) is None else kwargs[adds].clone()
        result = eager(*args, **kwargs)
        if result is None:
            refused = dispatch.planner_of(body.__name__)(*args, **kwargs).refused
            raise GuardError(f"{body.__name__}: {refused[0].reason}")
        return result

    kernel.__signature__ = inspect.Signature(inputs, return_annotation=returns)  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(kernel, mutates_args=mutates)
    overload = torch_library.define(body.__name__, schema, kernel, fake)

    def traced(*args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in zip(names, args) if name in outs}  # noqa: B905
        given.update({name: value for name, value in kwargs.items() if name in outs})
        positional = [value for name, value in zip(names, args) if name not in outs]  # noqa: B905
        keywords = {name: value for name, value in kwargs.items() if name not in outs}
        if may_be_none:
            parts = tuple([_constant(value) for value in positional])
            more = tuple([_constant(value) for value in keywords.values()])
            if not _accepts(body.__name__, parts, tuple(keywords), more):
                return None
        results = overload(*positional, **keywords)
        if adds is not None:
            target = keywords.get(adds, dict(zip(names_in, positional)).get(adds))  # noqa: B905
            return results if target is None else target.copy_(results)
        if not given:
            return results
        several = results if isinstance(results, tuple) else (results,)
        written = [
            result if given.get(name) is None else given[name].copy_(result)
            for name, result in zip(outs, several)  # noqa: B905
        ]
        return tuple(written) if isinstance(results, tuple) else written[0]

    return traced


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Return a return annotation without its ``| None``, and whether it had one."""
    members = typing.get_args(annotation)
    if type(None) not in members:
        return annotation, False
    (only,) = (member for member in members if member is not type(None))
    return only, True


def _constant(value: Any) -> object:
    """Return what a planner may know of an argument as constants, which specialises a traced graph on them."""
    if not isinstance(value, torch.Tensor):
        return value
    return "tensor", dispatch.constant_shape(value), value.dtype, value.device


def _accepts(name: str, parts: tuple[Any, ...], keywords: tuple[str, ...], more: tuple[Any, ...]) -> bool:
    """Return whether the op's planner accepts arguments given as :func:`_constant` describes them."""
    args = [_spec(part) for part in parts]
    kwargs = dict(zip(keywords, map(_spec, more), strict=True))
    return dispatch.planner_of(name)(*args, **kwargs).accepted is not None


_accepts._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _spec(part: Any) -> Any:
    return TensorSpec(*part[1:]) if isinstance(part, tuple) and part[:1] == ("tensor",) else part
