"""``@operator``: one decorator makes an op of a function: planner, launch cache and torch operator.

The function's first parameter is the accepted path of its decision, which callers do not pass. An eager call looks its
decision up by shapes, dtypes and flags, plans on a miss, and runs the function, past the dispatcher. While torch traces
or a dispatch mode is active, torch sees an opaque operator ``torch.ops.hipforge.<name>``. It plans inside: one graph
serves every batch size.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from hipforge.errors import GuardError, HipforgeError
from hipforge.jit.call.binder import Binder, described, on_binder
from hipforge.jit.call.tensors import check_gradients
from hipforge.jit.call.torch_functions import active_modes
from hipforge.jit.call.torch_library import is_dispatched
from hipforge.ops.core import dispatch, invariance
from hipforge.ops.core.arguments import (
    as_floats,
    blame,
    bound,
    fake_mode_of,
    is_written,
    named_by,
    numbers_of,
    require_annotated,
    require_float32,
    require_readable_numbers,
    require_sound,
)
from hipforge.ops.core.dispatch import Accepted, Decision
from hipforge.ops.core.profiling import Idle, ranged
from hipforge.ops.core.traced import Written, traced_call

P = ParamSpec("P")
R = TypeVar("R")

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def operator(
    plan: Callable[..., Decision],
    *,
    key: Callable[..., object] | None = None,
    fake: Callable[..., Any] | None = None,
    outs: Sequence[str] = (),
    mutates: Sequence[str] = (),
    returns: Sequence[str] = (),
    adds: str | None = None,
    rows: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> Callable[[Callable[Concatenate[Accepted, P], R]], Callable[P, R]]:
    """Make an op of a function whose first parameter takes the accepted path.

    Args:
        plan: takes the arguments that it names, defaults filled in (all of them if it has ``**``), and returns its
            Decision; GuardError for malformed ones. It looks only at shapes, dtypes, devices and numbers, because
            tracing passes :class:`~hipforge.ops.core.checks.TensorSpec` values for tensors. Where nothing is accepted
            the op returns None.
        key: takes the arguments that it names and returns a hashable value, on which the decision depends; by default a
            description of all arguments. A key that leaves something out relies on the kernel's own guards for it.
        fake: takes the arguments that it names, none of ``outs`` among them, and returns new empty results; shapes may
            be symbolic. Without it torch traces through the function to its stubs, which is right if no decision
            depends on shapes.
        outs: the parameters that take tensors to write results into, in the order of the results, None by default.
        mutates: further parameters that the op writes.
        returns: the parameters among ``mutates`` that the op returns, as they are, after its new results.
        adds: the parameter, None by default, that takes a tensor to add the only result to and to return.
        rows: for an op that may return None, the parameters with M as first dimension: a trace decides for ranges of M.
            Without it a traced graph holds for the shapes that it was traced with.
        unused: the parameters that the op never looks at: any tensor is taken there, with or without memory.
    """

    def decorate(body: Callable[Concatenate[Accepted, P], R]) -> Callable[P, R]:
        name = body.__name__
        launches: dict[object, Accepted] = {}  # decisions for a kernel whose binding checks the arguments
        checked: dict[object, Accepted] = {}  # decisions before which they are checked here, at each call
        dispatch.on_clear(launches.clear)
        dispatch.on_clear(checked.clear)
        signature = _public_signature(body)
        planned = named_by(plan, signature)
        numbers = numbers_of(signature)
        floats = [each for each in numbers if "float" in str(signature.parameters[each].annotation)]
        writes = frozenset((*outs, *mutates, *(() if adds is None else (adds,))))

        def used(given: Mapping[str, Any]) -> Mapping[str, Any]:
            return {each: value for each, value in given.items() if each not in unused} if unused else given

        def planner(*args: Any, **kwargs: Any) -> Decision:
            given = bound(name, signature, args, kwargs)
            return plan(**{each: given[each] for each in planned})

        def decide(at: object, *args: Any, **kwargs: Any) -> Accepted | None:
            clearings = dispatch.clearings()
            given = bound(name, signature, args, kwargs)
            require_readable_numbers(name, given, numbers)
            accepted = checked.get(at) or plan(**{each: given[each] for each in planned}).accepted
            if accepted is None:
                for require in (require_float32, require_annotated):  # no kernel will look at them
                    require(name, signature, given)
                return None
            require_sound(name, used(given), writes)
            require_float32(name, signature, given)
            if accepted.path == "torch":
                require_annotated(name, signature, given)
                if torch.is_grad_enabled():
                    check_gradients(name, given, [each for each in writes if is_written(each, writes, given)])
            if at is not None:
                if key is None and all(x.is_contiguous() for x in given.values() if isinstance(x, torch.Tensor)):
                    accepted = dataclasses.replace(accepted, contiguous=True)  # as the description says it of each
                decisions = launches if accepted.path == "kernel" else checked
                if len(decisions) >= dispatch.MAX_DECISIONS:
                    decisions.clear()
                decisions[at] = accepted
                if dispatch.clearings() != clearings:  # another thread changed meanwhile what this was decided by
                    decisions.pop(at, None)
            return accepted

        def first(accepted: Accepted | None, *args: Any, **kwargs: Any) -> Any:
            """Run the path just decided; every call on the torch path comes here, to record no gradients."""
            if accepted is None or accepted.path != "torch":
                return None if accepted is None else body(accepted, *args, **kwargs)
            with torch.no_grad(), fake_mode_of((*args, *kwargs.values())):
                given = as_floats(bound(name, signature, args, kwargs), floats)
                return typing.cast(Callable[..., R], body)(accepted, **given)

        def constant(decision: Decision, *args: Any, **kwargs: Any) -> Any:  # of the traced graph; no cache is involved
            return None if decision.accepted is None else body(decision.accepted, *args, **kwargs)

        def failed(*args: Any, **kwargs: Any) -> None:
            blame(name, signature, args, kwargs)

        def refused(*args: Any, **kwargs: Any) -> None:
            """Raise a binding's refusal again in the op's own names, as the deciding call would have."""
            try:
                require_sound(name, used(bound(name, signature, args, kwargs)), writes)
            except GuardError as error:
                raise error from None

        def eager(*args: Any, **kwargs: Any) -> Any:
            return unnamed(*args, **kwargs)

        dispatch.register_planner(name, planner)
        traced = constant
        if fake is not None:
            written = Written(tuple(outs), tuple(mutates), tuple(returns), adds)
            traced = traced_call(name, signature, eager, fake, written, frozenset(rows))
        tracing = f"compiling() or modes() and is_dispatched({name!r})" if fake else "compiling()"
        decision = "" if fake else f"plan({', '.join(f'{each}={each}' for each in planned)}), "
        free = {
            "body": body, "plan": plan, "key_of": key or _described, "launches": launches, "decide": decide,
            "first": first, "failed": failed, "refused": refused, "traced": traced, "compiling": _is_dynamo_compiling,
            "modes": active_modes, "is_dispatched": is_dispatched, "invariance": invariance.STATE,
            "GuardError": GuardError, "HipforgeError": HipforgeError, "profiler": torch.autograd.profiler,
            "profiled": ranged(name, eager),
        }  # fmt: skip
        at = f"key_of({', '.join(named_by(key, signature) if key else signature.parameters)})"
        call = _eager_call(body, signature, free, tracing=tracing, decision=decision, key=at)
        unnamed = _without_profiler(call)
        on_binder(functools.partial(_use_binder, call, key is None))
        call.writes = writes  # type: ignore[attr-defined]
        return typing.cast(Callable[P, R], call)

    return decorate


# Generated with the op's own parameters, as dataclasses generate __init__: passing *args and **kwargs on would cost
# every call half a microsecond. The names that `make` takes are the free variables of the call.
_CALL = """
def make({free}):
    def {name}({parameters}):
        if {tracing}:
            if invariance.on:  # read, so that a traced graph is guarded by it
                pass
            return traced({decision}{passed})
        if profiler._is_profiler_enabled:
            return profiled({passed})
        try:
            try:
                at = {key}
                taken = launches[at]
            except KeyError:
                taken = decide(at, {passed})
            except (AttributeError, TypeError):  # the planner says what is wrong; unhashable ones are not cached
                taken = decide(None, {passed})
            else:
                return body(taken, {passed})
            return first(taken, {passed})
        except GuardError:
            refused({passed})
            raise
        except HipforgeError:
            raise
        except Exception:
            failed({passed})
            raise
    return {name}
"""


def _eager_call(
    body: Callable[..., Any], signature: inspect.Signature, free: dict[str, Any], **source: str
) -> Callable[..., Any]:
    """Return the function that callers see: it looks its decision up, decides on a miss, and runs the body.

    Args:
        body: what computes.
        signature: the call's.
        free: its free variables by name; defaults of parameters are added.
        **source: what differs between ops in the text of the call.
    """
    parameters = list(signature.parameters.values())
    passed = ", ".join(f"{each.name}=" * (each.kind is each.KEYWORD_ONLY) + each.name for each in parameters)
    free |= {f"default_{each.name}": each.default for each in parameters if each.default is not each.empty}
    bare = [
        each.replace(annotation=each.empty, default=each.default if each.default is each.empty else _Default(each.name))
        for each in parameters
    ]
    named = {"name": body.__name__, "parameters": str(inspect.Signature(bare))[1:-1], "passed": passed}
    made: dict[str, Any] = {}
    exec(_CALL.format(free=", ".join(free), **named, **source), body.__globals__, made)
    call: Any = functools.wraps(body)(made["make"](**free))
    call.__signature__ = signature
    return call


def _without_profiler(call: Any) -> Callable[..., Any]:
    """Return the same call, with the same decisions, to which no profiler ever runs."""
    named = zip(call.__code__.co_freevars, call.__closure__, strict=True)
    cells = tuple(types.CellType(Idle) if name == "profiler" else cell for name, cell in named)
    twin = types.FunctionType(call.__code__, call.__globals__, call.__name__, call.__defaults__, cells)
    twin.__kwdefaults__ = call.__kwdefaults__
    return twin


class _Default(str):
    """A default value, written as the name of its free variable."""

    def __repr__(self) -> str:
        return f"default_{self}"


def _described(*arguments: Any) -> object:
    return tuple(map(described, arguments))


def _use_binder(call: Callable[..., Any], describes: bool, binder: Binder) -> None:
    """Have a call ask the binding, in place of Python, what its arguments are and whether a mode is active."""
    made = inspect.unwrap(call, stop=lambda function: "launches" in function.__code__.co_freevars)
    cells = dict(zip(made.__code__.co_freevars, made.__closure__ or (), strict=True))
    if describes:
        cells["key_of"].cell_contents = binder.describe
    if "modes" in cells:
        cells["modes"].cell_contents = binder.modes


def _public_signature(body: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that callers see, annotations evaluated: the function's without the accepted path."""
    signature = inspect.signature(body, eval_str=True)
    return signature.replace(parameters=list(signature.parameters.values())[1:])
