"""The interface of ``binding.c``, and callbacks for the moment of its load: ops may be imported before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Binder(Protocol):
    """Makes callables of entry addresses; ``binding.c`` has it."""

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
        """Return a function of the entry at ``address``, which keeps ``owner`` alive."""
        ...

    def describe(self, *arguments: Any) -> object:
        """Return :func:`described` of all arguments as one hashable value."""
        ...

    def modes(self) -> int:
        """Return what :func:`hipforge.jit.call.torch_functions.active_modes` does."""
        ...

    def route(
        self, holder: dict[str, Any], slow: Callable[..., Any], level: Callable[[], object]
    ) -> Callable[..., Any]:
        """Return a function that calls ``holder["kernel"]``, or ``slow`` if torch must see the call.

        Torch need not see a call without a mode, a subclass, a gradient to record or a ``level`` of torch.func's
        transforms.
        """
        ...

    def dispatch(
        self,
        name: str,
        names: tuple[str, ...],
        defaults: tuple[Any, ...],
        variant: Callable[..., Any],
        entries: dict[Any, Callable[..., Any]],
        load: Callable[[tuple[Any, ...]], Callable[..., Any]],
    ) -> Callable[..., Any]:
        """Return a function that calls the entry of the variant for the arguments.

        ``entries`` is keyed by the one value, or the tuple of values, of the dict that ``variant`` returns.
        ``load(arguments)`` returns an entry that is missing, or raises for wrong arguments.
        """
        ...


_hooks: list[Callable[[Binder], None]] = []
_made: list[Binder] = []


def on_binder(hook: Callable[[Binder], None]) -> None:
    """Have ``hook`` called with the process's binder as soon as it is made."""
    _hooks.append(hook)
    for binder in _made:
        hook(binder)


def announce(binder: Binder) -> None:
    """Say that the process's binder is made."""
    _made.append(binder)
    for hook in _hooks:
        hook(binder)


def described(value: Any) -> object:
    """Return the hashable facts of one argument that a decision may depend on.

    These are a tensor's shape, dtype, device and contiguity, or class and value of anything else.

    Without its class 2.0 would find the decision of 2, and True that of 1.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        return value.__class__, value
    return value.shape, value.dtype, value.device, value.is_contiguous()
