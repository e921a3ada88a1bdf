"""What an op decides before it runs, as values: the path it takes and why it takes no other.

Every op has a planner, which looks at shapes, dtypes and device and returns a :class:`Decision`. The op runs what the
decision says, and :func:`explain` shows the same decision.

Example:
    >>> from hipforge.ops.core.dispatch import Accepted, Decision, Refused
    >>> decision = Decision(None, (Refused("kernel", "M must be at most 64; got 65"),))
    >>> decision.accepted is None, decision.refused[0].reason
    (True, 'M must be at most 64; got 65')
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

import torch

from hipforge import devices
from hipforge.errors import GuardError
from hipforge.jit import registry
from hipforge.ops.core.arguments import bound
from hipforge.ops.core.tuned import TunedRow, Value

PathName = Literal["kernel", "triton", "torch", "none"]


@dataclass(frozen=True)
class Choice:
    """One kernel with its parameters: what a default rule, a tuned row or a tuner's candidate names."""

    kernel: str
    configuration: Mapping[str, int]
    contiguous: ClassVar[bool] = False  # whether the operands are known to be

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}={value}' for name, value in self.configuration.items())})"

    def __reduce__(self) -> tuple[type[Choice], tuple[str, dict[str, int]]]:
        # Workers of a tuner send it, and a read-only view cannot be pickled.
        return Choice, (self.kernel, dict(self.configuration))


@dataclass(frozen=True)
class Accepted:
    """The path that an op takes.

    Attributes:
        path: ``kernel`` (a HIP module, on a GPU or the emulator), ``triton`` or ``torch``.
        kernel: the raw op or Triton kernel that runs.
        configuration: its parameters.
        reason: why this configuration: a tuned row, or the default rule.
        row: the tuned row it comes from, or None.
        problem: the decided Problem of a tuned family, with the sizes for the call; None of other ops.
        contiguous: every tensor of the calls that this was kept for is contiguous; False if that is not known.
    """

    path: PathName
    kernel: str
    configuration: Mapping[str, int]
    reason: str
    row: TunedRow | None = None
    problem: Any = None
    contiguous: bool = False


@dataclass(frozen=True)
class Refused:
    """A path that an op does not take, and the first reason found."""

    path: PathName
    reason: str
    row: TunedRow | None = None


@dataclass(frozen=True)
class Decision:
    """The outcome of a planner: the accepted path (None: the op returns None) and the refused ones."""

    accepted: Accepted | None
    refused: tuple[Refused, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` returns; ``print`` it for the text form.

    Attributes:
        op: the op's name.
        path: the path taken; ``none`` where the op returns None.
        kernel: what runs, or None.
        configuration: its parameters.
        reason: where the configuration comes from, or why the op returns None.
        row: values of the tuned row that decided, or None.
        file: the file of that row and its line, or None.
        refused: reason per path that was not taken.
    """

    op: str
    path: PathName
    kernel: str | None
    configuration: Mapping[str, int]
    reason: str
    row: Mapping[str, Value] | None
    file: tuple[Path, int] | None
    refused: Mapping[str, str]

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.configuration.items())
        lines = [f"{self.op}: {self.path}" + (f", {self.kernel}({settings})" if self.kernel else " (returns None)")]
        lines.append(f"  because {self.reason}")
        if self.file:
            lines.append(f"  tuned row {self.file[0]}:{self.file[1]}")
        lines += [f"  not {path}: {reason}" for path, reason in self.refused.items()]
        return "\n".join(lines)


Planner = Callable[..., Decision]
_planners: dict[str, Planner] = {}
_clear_hooks: list[Callable[[], None]] = []
MAX_DECISIONS = 1 << 16  # per op; a server sees few shapes, this is an upper bound

F = TypeVar("F", bound=Callable[..., Any])


def planned_by(planner: Planner) -> Callable[[F], F]:
    """Name the planner of an op, as a decorator; the planner takes the op's arguments by their names."""

    def register(op: F) -> F:
        name, signature = op.__name__, inspect.signature(op)
        register_planner(name, lambda *args, **kwargs: planner(**bound(name, signature, args, kwargs)))
        return op

    return register


def register_planner(name: str, planner: Planner) -> None:
    """Make ``planner`` the one that :func:`explain` asks about the op called ``name``."""
    _planners[name] = planner


def planner_of(name: str) -> Planner:
    """Return the planner of an op whose module is imported."""
    return _planners[name]


def explain(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Explanation:
    """Return what ``op(*args, **kwargs)`` would run and why, without running it.

    Args:
        op: an op of hipforge, or its name.
        *args: the op's arguments.
        **kwargs: the op's keyword arguments.

    Raises:
        GuardError: the op has no planner, or the arguments are ones that the op itself refuses.
        TypeError: arguments are missing, unknown or too many, as in a call of the op.

    Example:
        >>> import torch, hipforge
        >>> told = hipforge.explain(hipforge.rms_norm, torch.ones(1, 8).half(), torch.ones(8).half(), 1e-6)
        >>> print(told)
        rms_norm: kernel, rms_norm()
          because the kernel runs on this device
          not torch: the kernel takes this call
    """
    import hipforge

    name = name_of(op)
    if isinstance(op, str):
        getattr(hipforge, op, None)  # an op is known from the import of its module on
    planner = _planners.get(name)
    if planner is None:
        for public in dir(hipforge):
            getattr(hipforge, public)
        known = ", ".join(sorted(_planners.keys() & set(dir(hipforge))))
        raise GuardError(f"explain knows {known}; got {name}")
    decision = planner(*args, **kwargs)
    taken = decision.accepted
    refused: dict[str, str] = {refusal.path: refusal.reason for refusal in decision.refused}
    if taken is not None:
        row, reason = taken.row, taken.reason
    else:
        row = next((refusal.row for refusal in decision.refused if refusal.row is not None), None)
        reason = decision.refused[0].reason if decision.refused else "no path applies"
    return Explanation(
        op=name,
        path=taken.path if taken else "none",
        kernel=taken.kernel if taken else None,
        configuration=taken.configuration if taken else MappingProxyType({}),
        reason=reason,
        row=row.values if row else None,
        file=(row.file, row.line) if row else None,
        refused=MappingProxyType(refused),
    )


def name_of(op: Callable[..., Any] | str) -> str:
    """Return the name of an op that is given as itself or by its name.

    Raises:
        GuardError: another library's function, as ``torch.argmax``, which has an op's name.
    """
    from hipforge.ops import public_names

    if isinstance(op, str):
        return op
    name, home = getattr(op, "__name__", repr(op)), str(getattr(op, "__module__", None))
    if name in public_names() and home.partition(".")[0] != "hipforge":
        raise GuardError(f"op must be hipforge.{name} or its name; got {name} of {home}, another function of that name")
    return name


def on_clear(hook: Callable[[], None]) -> None:
    """Have ``hook`` called by :func:`clear_decisions`; ops register the clearing of their caches."""
    _clear_hooks.append(hook)


_clearings = 0


def clearings() -> int:
    """Return how often :func:`clear_decisions` has begun: a decision begun before the last of them may be outdated."""
    return _clearings


def clear_decisions() -> None:
    """Forget every cached decision, so that changed tables or settings take effect in this process."""
    global _clearings
    _clearings += 1
    for hook in _clear_hooks:
        hook()


NO_TRITON = ""  # a refusal that is not reported


def plan_kernel(
    op: str,
    device: torch.device,
    refusal: str | None = None,
    triton_refusal: str | None = NO_TRITON,
    module: str | None = None,
) -> Decision:
    """Return a total op's decision: the HIP kernel, else Triton if it has a kernel, else torch.

    Args:
        op: the op's name.
        device: where its tensors are.
        refusal: why the HIP kernel does not take the call, or None.
        triton_refusal: why the Triton kernel does not take it, or None; ``NO_TRITON`` for an op without one.
        module: the HIP kernel's, if it is not for every architecture.

    Raises:
        GuardError: the tensors are where no kernel runs, though moving them would help.
    """
    target = target_of(device)
    why_not_kernel = target.reason if isinstance(target, Refused) else refusal
    if module is not None and not isinstance(target, Refused):
        archs = registry.module(module).archs
        if target[0] not in archs:
            why_not_kernel = f"the kernel is for {' and '.join(archs)}"
    nothing: Mapping[str, int] = MappingProxyType({})
    if why_not_kernel is None:
        below: tuple[PathName, ...] = ("torch",) if triton_refusal == NO_TRITON else ("triton", "torch")
        taken = Accepted("kernel", op, nothing, "the kernel runs on this device")
        return Decision(taken, tuple(Refused(path, "the kernel takes this call") for path in below))
    refused = (Refused("kernel", why_not_kernel),)
    if triton_refusal == NO_TRITON:
        return Decision(Accepted("torch", op, nothing, "torch runs on every device"), refused)
    if devices.current().kind == "reference":
        triton_refusal = why_not_kernel
    if triton_refusal is None:
        taken = Accepted("triton", op, nothing, "Triton runs on this device")
        return Decision(taken, (*refused, Refused("torch", "Triton runs on this device")))
    taken = Accepted("torch", op, nothing, "neither the kernel nor Triton applies")
    return Decision(taken, (*refused, Refused("triton", triton_refusal)))


# torch.compile runs this while it traces and keeps the answer as a constant of the graph.
plan_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


def target_of(device: torch.device) -> tuple[str, int] | Refused:
    """Return (architecture, number of compute units) of the tensors' device, or why no HIP kernel runs there.

    Raises:
        GuardError: the tensors are not where kernels run, though moving them would help: CPU tensors while a GPU is
            the device, or the other way round.
    """
    current = devices.current()
    if current.kind == "reference":
        return Refused("kernel", "HIPFORGE_DEVICE=reference runs no kernels")
    if device.type == "cuda":
        if not current.is_gpu and getattr(torch.version, "hip", None) is None:
            return Refused("kernel", "the tensors are on an NVIDIA device")
        if current.kind == "emulator":
            raise GuardError(
                f"the tensors are on {device} but kernels run on the emulator; pass CPU tensors, "
                "or set HIPFORGE_DEVICE=hip to run on the GPU"
            )
    elif device.type != "cpu":
        return Refused("kernel", f"the tensors are on {device}, where no HIP kernel runs")
    elif current.is_gpu:
        raise GuardError(
            "the tensors are on the CPU but kernels run on the GPU; move them with .cuda(), "
            "or set HIPFORGE_DEVICE=emulator to run on the emulator"
        )
    index = device.index or 0
    return current.arch_of(index), current.cu_count(index)
