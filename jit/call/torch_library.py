"""Register stubs as torch operators, ``torch.ops.hipforge.<name>``, when tracing first needs them.

An eager call goes straight to the C ABI. torch.compile, FakeTensor, meta tensors and other dispatch modes see an
operator instead: schema from the stub's annotations, mutations declared, a fake that computes nothing (results go into
tensors that already exist) unless the stub brings one.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from hipforge.errors import GuardError
from hipforge.jit.call import tensors
from hipforge.jit.call.binder import Binder, on_binder
from hipforge.jit.call.signature import Signature

NAMESPACE = "hipforge"

_lock = threading.Lock()


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    import torch

    return torch.library.Library(NAMESPACE, "FRAGMENT")


def register(
    signature: Signature,
    kernel: Callable[..., Any],
    gen_fake: Callable[..., Any] | None = None,
    holder: dict[str, Any] | None = None,
) -> str:
    """Make an operator of a stub and return its name under ``torch.ops.hipforge``.

    ``kernel`` runs it on real tensors; ``gen_fake`` takes the stub's arguments and returns what the stub returns,
    without touching data. A name that is taken gets a number appended: two modules may have entries of one name.
    """
    schema = signature.schema().removeprefix(signature.name)
    return str(define(signature.name, schema, kernel, gen_fake or _nothing, holder)._schema.name.partition("::")[2])


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    holder: dict[str, Any] | None = None,
) -> Any:
    """Make an operator of a function and return it; ``schema`` is torch.library's, from its parenthesis on.

    ``holder["kernel"]`` is the function that ``kernel`` calls, if it changes.
    """
    import torch

    library = _library()
    with _lock:
        packet = getattr(torch.ops, NAMESPACE)
        free, number = name, 1
        while hasattr(packet, free):
            number += 1
            free = f"{name}_{number}"
        library.define(free + schema, tags=_tags())
        library.impl(free, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{free}", _lowered_with_offsets(fake), lib=library)
        _registered.append(free)
        overload = getattr(packet, free).default
        library.impl(free, _detaching(free, overload, holder or {"kernel": kernel}), "Autograd")
        _kernels[overload] = kernel
        return overload


def _lowered_with_offsets(fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fake that teaches inductor the storage offset of views first.

    torch passes inductor a written view as its base with sizes, strides and an offset. Where the offset depends on a
    dynamic dimension it is a node of the graph, ``aten.sym_storage_offset``, for which inductor (torch 2.13) has no
    lowering: its fallback measures an example that begins at 0, so the op would write another part of the base. A
    fake runs while inductor traces, before it lowers anything.
    """

    @functools.wraps(fake)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._inductor.lowering" in sys.modules:
            _lower_storage_offsets()
        return fake(*args, **kwargs)

    return call


@functools.lru_cache(maxsize=1)
def _lower_storage_offsets() -> None:
    import torch
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    offset = torch.ops.aten.sym_storage_offset.default
    if offset not in lowering.lowerings:

        @lowering.register_lowering(offset, type_promotion_kind=None)
        def _(view: object) -> Any:
            value = V.graph.current_node.meta["val"]
            return value.node.expr if isinstance(value, torch.SymInt) else int(value)


_registered: list[str] = []
_kernels: dict[Any, Callable[..., Any]] = {}


def kernel_of(overload: Any) -> Callable[..., Any] | None:
    """Return what runs an operator of :func:`define` on real tensors; None for any other operator."""
    return _kernels.get(overload)


def require_no_jit_trace(op: str) -> None:
    """Refuse a call under torch.jit.trace: it would record the allocation of the results, and not the op.

    Raises:
        GuardError: it names the op.
    """
    import torch

    if torch._C._is_tracing():
        raise GuardError(
            f"{op} is called under torch.jit.trace, which cannot record it; use torch.export.export or torch.compile"
        )


def is_dispatched(op: str) -> bool:
    """Whether torch must see a call: the innermost mode traces. Only asked where a mode is active.

    Raises:
        GuardError: it is torch.jit.trace.
    """
    require_no_jit_trace(op)
    return not recording()


def recording() -> bool:
    """Whether the innermost dispatch mode lets ops launch and records the launches (the emulator's capture).

    Only asked where a mode is active.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return getattr(_get_current_dispatch_mode(), "records_kernels", False)


def registered() -> tuple[str, ...]:
    """Return the names of the operators that exist so far."""
    return tuple(_registered)


def _detaching(name: str, overload: Any, holder: dict[str, Any]) -> Callable[..., Any]:
    """Return an operator's autograd implementation: results are detached, as those of an eager call.

    Where nothing below autograd has to see the call, the binding runs ``holder["kernel"]`` at once: a second pass
    through the dispatcher takes longer than all else.
    """
    import torch

    flags = {argument.name: argument.alias_info for argument in overload._schema.arguments}
    written = [argument for argument, alias in flags.items() if alias is not None and alias.is_write]

    level: Callable[[], object] | None = getattr(torch._C._functorch, "maybe_current_level", None)

    def slow(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            tensors.check_gradients(name, {**dict(zip(flags, args, strict=False)), **kwargs}, written)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    way = slow

    def use(binder: Binder) -> None:
        nonlocal way
        if level is not None:
            way = binder.route(holder, slow, level)

    def call(*args: Any, **kwargs: Any) -> Any:
        return way(*args, **kwargs)

    on_binder(use)
    return call if way is slow else way  # there is no binder yet: an import compiles nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an op whose results go into its arguments."""


def _tags() -> list[Any]:
    import torch

    # Kernels index with the strides they were given: inductor must not relayout arguments.
    layout = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    return [torch.Tag.pt2_compliant_tag, layout]
