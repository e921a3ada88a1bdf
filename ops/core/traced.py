"""What torch sees of an op while it traces: an opaque operator that plans inside, so that one graph serves every batch.

An operator may neither return its inputs nor answer None. So three things happen around the operator, in the traced
graph: results go into the caller's tensors, returned inputs are returned, and None is decided.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import typing
from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple

import torch

from hipforge.errors import GuardError
from hipforge.jit.call import torch_library
from hipforge.ops.core import dispatch
from hipforge.ops.core.arguments import bound, named_by
from hipforge.ops.core.checks import TensorSpec
from hipforge.ops.core.outputs import written_into

_EVERY_M_TO = 256
_LARGEST_M = 1 << 30

Ranges = tuple[tuple[int, float], ...]


class Written(NamedTuple):
    """Parameters that an op writes; :func:`hipforge.ops.core.operator.operator` says what each means."""

    outs: tuple[str, ...]
    mutates: tuple[str, ...]
    returns: tuple[str, ...]
    adds: str | None


def traced_call(
    name: str,
    public: inspect.Signature,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    written: Written,
    rows: frozenset[str],
) -> Callable[..., Any]:
    """Register the torch operator of an op and return the function that calls it while torch traces.

    Args:
        name: the op's name, under which its planner is registered.
        public: its signature, annotations evaluated.
        eager: the op on real tensors.
        fake: the arguments that it names, without ``outs`` -> new empty results.
        written: what it writes.
        rows: parameters whose first dimension is M, where it may return None.
    """
    outs, mutates, returned, adds = written
    names = tuple(public.parameters)
    inputs = [parameter for each, parameter in public.parameters.items() if each not in outs]
    annotation, may_be_none = _without_none(public.return_annotation)
    names_in = tuple(parameter.name for parameter in inputs)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        numbers, which = kwargs.pop("numbers", None), kwargs.pop("numbers_of", "")
        if numbers is not None:
            kwargs = {**dict(zip(names_in, args)), **kwargs}  # noqa: B905
            args = ()
            kwargs |= zip(which.split(), numbers.tolist(), strict=True)
        if adds is not None:  # the result is added to a copy, which `traced` copies back
            kwargs = {**dict(zip(names_in, args)), **kwargs}  # noqa: B905
            args = ()
            kwargs[adds] = None if kwargs.get(adds) is None else kwargs[adds].clone()
        result = eager(*args, **kwargs)
        if result is None and may_be_none:
            refused = dispatch.planner_of(name)(*args, **kwargs).refused
            raise GuardError(f"{name}: {refused[0].reason}")
        if returned:
            result = result[: -len(returned)]
            return result if len(result) > 1 else result[0]
        return result

    floats = tuple([each.name for each in inputs if each.annotation in _FLOATS])
    described_inputs = [*inputs, *(_NUMBERS if floats else ())]
    signature = inspect.Signature(described_inputs, return_annotation=_without_last(annotation, len(returned)))
    named = named_by(fake, signature)

    def new(*args: Any, **kwargs: Any) -> Any:
        given = bound(name, signature, args, kwargs)
        return fake(**{each: given[each] for each in named})

    described: Any = kernel
    described.__signature__ = signature
    schema = torch.library.infer_schema(described, mutates_args=mutates)
    overload = torch_library.define(name, schema, kernel, new)

    # torch traces what follows: lists where it would not inline a generator, and zip without strict=.
    def traced(*args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(names, args)), **kwargs}  # noqa: B905
        given = [values.pop(each) for each in outs]
        numbers = [each for each in floats if is_symbolic(values.get(each))]
        if may_be_none:  # whatever numbers are that change from call to call
            m = [values[each].shape[0] for each in names_in if each in rows][:1]
            known = {**values, **dict.fromkeys(numbers, 0.0)}
            parts = tuple([(each, _constant(value, each in rows)) for each, value in known.items()])
            ranges = _accepted_rows(name, parts)
            if not (ranges if not m else any([low <= m[0] <= high for low, high in ranges])):  # noqa: C419
                return None
        if numbers:
            values |= {"numbers": _as_tensor([values[each] for each in numbers]), "numbers_of": " ".join(numbers)}
            values |= dict.fromkeys(numbers, 0.0)
        results = overload(**values)
        if adds is not None:
            target = values[adds]
            return written_into(target, results)
        if not given and not returned:
            return results
        several = results if isinstance(results, tuple) else (results,)
        if given:
            several = tuple([_written(out, each) for out, each in zip(given, several)])  # noqa: B905
        several = (*several, *[values[each] for each in returned])
        return several if len(several) > 1 else several[0]

    return traced


def _copy_bytes(out: torch.Tensor, value: torch.Tensor) -> None:
    out.view(torch.uint8).copy_(value.view(torch.uint8))


_copied = torch_library.define("copy_bytes", "(Tensor(a!) out, Tensor value) -> ()", _copy_bytes, lambda *_: None)


def _written(out: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return ``out`` with ``value`` in it: by an operator for fp8, of which inductor cannot put a part back."""
    if out is None or not (out.dtype.is_floating_point and out.dtype.itemsize == 1):
        return written_into(out, value)
    _copied(out, value)
    return out


# A float that changes from call to call is a symbol to torch, which would compile a graph for each value of it. So it
# enters as an element of a tensor on the CPU, "numbers", with its name in "numbers_of". One that has never changed
# stays a constant of the graph.
_FLOATS = (float, float | None)
_NUMBERS = tuple(
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, default, annotation in (("numbers", None, torch.Tensor | None), ("numbers_of", "", str))
)


def is_symbolic(value: Any) -> bool:
    """Return whether torch traces a float as a symbol; of a constant it knows the sign. No guard is added."""
    if not isinstance(value, float):
        return False
    # It brings sympy, a quarter of the time that torch itself takes to import; where torch traces it is there already.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    known = statically_known_true(value > 0) or statically_known_true(value < 0) or statically_known_true(value == 0)
    return not known


def _as_tensor(numbers: list[float]) -> torch.Tensor:
    """Return float64 [n] of symbols, in the only form from which torch makes no guards: products with tensors."""
    one = torch.ones((1,), dtype=torch.float64, device="cpu")
    return torch.cat([one * number for number in numbers])


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Return a return annotation without its ``| None``, and whether it had one."""
    members = typing.get_args(annotation)
    if type(None) not in members:
        return annotation, False
    (only,) = (member for member in members if member is not type(None))
    return only, True


def _without_last(annotation: Any, count: int) -> Any:
    """Return a tuple's annotation without its last members; the only one left stands for itself."""
    if not count:
        return annotation
    members = typing.get_args(annotation)[:-count]
    return members[0] if len(members) == 1 else tuple.__class_getitem__(members)


def _constant(value: Any, has_rows: bool) -> object:
    """Return a planner's constants of an argument; a traced graph is specialised on them.

    The first dimension of a tensor that has rows is left out.
    """
    if isinstance(value, torch.Tensor):
        shape = value.shape[1:] if has_rows else value.shape
        return "tensor", has_rows, tuple([index(size) for size in shape]), value.dtype, value.device
    return index(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _accepted_rows(name: str, parts: tuple[tuple[str, Any], ...]) -> Ranges:
    return _ranges(name, parts)


_accepted_rows._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1024)
def _ranges(name: str, parts: tuple[tuple[str, Any], ...]) -> Ranges:
    """Return the ranges of M, ends included, for which an op's planner accepts arguments described by `_constant`.

    Every M to 256 is tried, then powers of two; between two different answers the change is found by halving.
    Where no argument has rows the only range says whether the arguments are accepted as they are.
    """

    def accepts(m: int) -> bool:
        return dispatch.planner_of(name)(**{each: _spec(part, m) for each, part in parts}).accepted is not None

    if not any(_is_tensor(part) and part[1] for _, part in parts):
        return ((0, float("inf")),) if accepts(0) else ()
    probes = list(range(1, _EVERY_M_TO + 1))
    while probes[-1] < _LARGEST_M:
        probes.append(2 * probes[-1])
    answers = {m: accepts(m) for m in probes}
    starts = [(1, answers[1])]  # where a run of equal answers begins
    for low, high in itertools.pairwise(probes):
        if answers[low] != answers[high]:
            before = answers[low]
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if accepts(middle) == before else (low, middle)
            starts.append((high, not starts[-1][1]))
    ends = [float(start - 1) for start, _ in starts[1:]] + [float("inf")]
    return tuple((start, end) for (start, accepted), end in zip(starts, ends, strict=True) if accepted)


dispatch.on_clear(_ranges.cache_clear)


def _is_tensor(part: Any) -> bool:
    return isinstance(part, tuple) and part[:1] == ("tensor",)


def _spec(part: Any, m: int) -> Any:
    if not _is_tensor(part):
        return part
    _, has_rows, shape, dtype, device = part
    return TensorSpec((m, *shape) if has_rows else shape, dtype, device)
