"""How launches run: the emulated device, the checkers, the order of waves, the instruction budget."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from hipforge import archs, settings
from hipforge.emulator import library
from hipforge.errors import ConfigError

Checks = Literal["off", "memory", "all", "strict"]
WaveOrder = Literal["forward", "reverse", "random"]

WAVE_ORDERS: tuple[WaveOrder, ...] = ("forward", "reverse", "random")


@dataclass(frozen=True)
class Options:
    """Settings of the emulator, process-wide.

    Attributes:
        arch: ``gfx950`` or ``gfx942``: the device that the HIP runtime presents.
        cu_count: its compute units.
        threads: worker threads of one launch, 0 for one per core.
        check_memory: global and scratch accesses outside live allocations and the arguments' exact extents.
        check_uninit: reads of registers or LDS that were never written.
        check_waits: uses of a result before ``s_waitcnt`` has waited for it.
        check_races: LDS accesses of different waves that no barrier, flag or lock orders (rules:
            ``emulator/native/lds_shadow.h``).
        check_global_races: accesses of global memory by different work-groups that no atomic with its fences orders
            (``emulator/native/global_races.h``). Runs work-groups one after another on one thread and remembers every
            writable dword, so it is never part of ``checks="all"``.
        check_strict: with ``check_races``, also LDS reads that a wave has not waited for when it reaches a barrier
            behind which another wave overwrites them. The LDS unit executes them in order, so such a kernel
            gives right results, but another compiler may move the read.
        max_reports: how many reports of checkers, at most one per instruction, a launch collects before it stops.
            Memory faults stop it at once.
        wave_order: the order in which waves and work-groups advance.
        quantum: instructions that a wave executes before the next wave's turn, 1 to 4096; with
            ``wave_order="random"`` each turn has 1 to ``quantum``. Hand-written kernels that pass data between
            waves without a barrier rely on short turns: they are right at 16 and below.
        seed: of ``wave_order="random"``.
        instruction_budget: wave-instructions per launch before it counts as hung, 0 for the default.

    Example:
        >>> Options("gfx950", 256).with_checks("all").check_waits
        True
    """

    arch: str
    cu_count: int
    threads: int = 0
    check_memory: bool = True
    check_uninit: bool = False
    check_waits: bool = False
    check_races: bool = False
    check_global_races: bool = False
    check_strict: bool = False
    max_reports: int = 1
    wave_order: WaveOrder = "forward"
    quantum: int = 16
    seed: int = 0
    instruction_budget: int = 0

    def with_checks(self, checks: Checks) -> Options:
        """Return the same options with a named set of checkers.

        ``off``: none; ``memory``: bounds only; ``all``: all but global races; ``strict``: ``all`` and ``check_strict``.

        Raises:
            ConfigError: ``checks`` is none of them.
        """
        if checks not in get_args(Checks):
            raise ConfigError(f"checks={checks!r}; accepted: {', '.join(repr(name) for name in get_args(Checks))}")
        every = checks in ("all", "strict")
        return replace(
            self, check_memory=checks != "off", check_uninit=every, check_waits=every, check_races=every,
            check_strict=checks == "strict",
        )  # fmt: skip


def from_settings() -> Options:
    """Return the options that the environment asks for (``HIPFORGE_EMULATE``, ``HIPFORGE_EMULATOR_*``)."""
    info = archs.get(settings.EMULATE.get())
    base = Options(arch=info.name, cu_count=info.cu_count, threads=settings.EMULATOR_THREADS.get())
    return base.with_checks(cast(Checks, settings.EMULATOR_CHECKS.get()))


@functools.lru_cache(maxsize=1)
def configured_library() -> ctypes.CDLL:
    """Load the library with global symbols and set its options from the environment; once per process.

    Raises:
        BuildError, ToolchainError: the library is not built yet and cannot be.
        ConfigError: an ``HIPFORGE_EMULATOR_*`` setting is not valid.
    """
    loaded = library.load()
    apply(from_settings(), to=loaded)
    return loaded


def current() -> Options:
    """Return the options in effect."""
    raw = library.RawOptions()
    configured_library().hfemu_get_options(ctypes.byref(raw))
    values = {name: getattr(raw, name) for name, _ in library.RawOptions._fields_}
    flags = {name: bool(value) for name, value in values.items() if name.startswith("check_")}
    values.update(flags, arch=raw.arch.decode(), wave_order=WAVE_ORDERS[raw.wave_order])
    return Options(**values)


def apply(wanted: Options, *, to: ctypes.CDLL | None = None) -> None:
    """Put ``wanted`` into effect for the process.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """
    to = to or configured_library()
    if wanted.wave_order not in WAVE_ORDERS:
        raise ConfigError(f"wave_order={wanted.wave_order!r}; accepted: {', '.join(WAVE_ORDERS)}")
    for name in ("cu_count", "threads", "quantum", "max_reports", "seed", "instruction_budget"):
        value = getattr(wanted, name)
        if not isinstance(value, int):
            raise ConfigError(f"{name}={value!r}; accepted: an integer, 0 or more")
    values: dict[str, Any] = {name: getattr(wanted, name) for name, _ in library.RawOptions._fields_}
    values.update(arch=wanted.arch.encode(), wave_order=WAVE_ORDERS.index(wanted.wave_order))
    if to.hfemu_set_options(ctypes.byref(library.RawOptions(**values))):
        raise ConfigError(library.last_error() or "the emulator refused its options")


_entered: list[Options] = []  # by blocks that are not over, after the options of outside
_entering = threading.Lock()


@contextlib.contextmanager
def options(
    *, checks: Checks | None = None, arch: str | None = None, cu_count: int | None = None, **changes: Any
) -> Iterator[Options]:
    """Change options for a ``with`` block: ``options(checks="all", wave_order="random", seed=7)``.

    They are the process's, not a thread's: of several blocks the one entered last decides until it is over.

    Args:
        checks: a named set of checkers (:meth:`Options.with_checks`), applied before the single ones in ``changes``.
        arch: another emulated device; its own CU count comes with it unless ``cu_count`` is given.
        cu_count: compute units.
        changes: any other field of :class:`Options`.

    Raises:
        ConfigError: an unknown field or a value out of range.

    Example:
        >>> import torch, hipforge
        >>> with hipforge.emulator.options(checks="all", threads=1):
        ...     hipforge.moe_combine(torch.ones(2, 64), top_k=2)[0, 0].item()
        2.0
    """
    unknown = sorted(set(changes) - set(Options.__dataclass_fields__))
    if unknown:
        raise ConfigError(f"unknown emulator option {unknown[0]!r}; known: {', '.join(Options.__dataclass_fields__)}")
    with _entering:
        before = current()
        after = before if checks is None else before.with_checks(checks)
        if arch is not None:
            info = archs.get(arch)
            after = replace(after, arch=info.name, cu_count=info.cu_count)
        if cu_count is not None:
            after = replace(after, cu_count=cu_count)
        after = replace(after, **changes)
        apply(after)
        _entered.extend([after] if _entered else [before, after])
    try:
        yield after
    finally:
        with _entering:
            # From the end, by identity: blocks may ask for equal options.
            del _entered[next(at for at in reversed(range(len(_entered))) if _entered[at] is after)]
            apply(_entered[-1])
            if len(_entered) == 1:
                _entered.clear()
