"""Every environment variable hipforge reads, typed, in one table.

A setting is read from the environment when it is asked for, so a change takes effect at once except where its
description says "fixed at first use". :func:`scope` overrides settings for a ``with`` block without touching
``os.environ``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hipforge.archs import EMULATED
from hipforge.errors import ConfigError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable: its name, default, parser and one-line description."""

    env: str
    default: T
    parse: Callable[[str], T]
    accepts: str
    doc: str

    def get(self) -> T:
        """Return the overridden, else the environment's, else the default value.

        Raises:
            ConfigError: the environment holds a value the setting does not accept.
        """
        if self.env in _overrides:
            value: T = _overrides[self.env]
            return value
        text = os.environ.get(self.env, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigError(f"{self.env}={text!r} is not valid: expected {self.accepts}") from None


_overrides: dict[str, Any] = {}


def _choice(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(text)
        return text

    return parse


def _flag(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Return a size in bytes: ``"500M"`` → 524288000. K, M, G and T are powers of 1024.

    Raises:
        ValueError: it is not a number with such a unit.
    """
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    value = float(number.removesuffix(unit))
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return int(value * _UNITS[unit])


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~name of a user that does not exist
        raise ValueError(str(error)) from None


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(_path(part) for part in text.split(os.pathsep) if part)


def _command(text: str) -> str:
    shlex.split(text)  # ValueError for an open quote
    return text


_FLAG = "0 or 1"

DEVICE = Setting(
    "HIPFORGE_DEVICE", "auto", _choice("auto", "hip", "cuda", "emulator", "reference"),
    "auto, hip, cuda, emulator or reference",
    "Where kernels run: auto takes an AMD GPU if torch sees one, else an NVIDIA GPU that has "
    "kernels, else the emulator; reference runs no kernel. "
    "Fixed at first use.",
)
EMULATE = Setting(
    "HIPFORGE_EMULATE", "gfx950", _choice(*EMULATED), " or ".join(EMULATED),
    "The architecture that the emulator presents. Fixed at first use.",
)
EMULATOR_CHECKS = Setting(
    "HIPFORGE_EMULATOR_CHECKS", "memory", _choice("off", "memory", "all"), "off, memory or all",
    "Emulator checkers: memory bounds only, or also uninitialised reads, missing waits and races.",
)
EMULATOR_THREADS = Setting(
    "HIPFORGE_EMULATOR_THREADS", 0, _count, "an integer, 0 = one per core",
    "Worker threads of one emulated launch.",
)
EMULATOR_QUIET = Setting(
    "HIPFORGE_EMULATOR_QUIET", False, _flag, _FLAG,
    "Silence the log line that says emulation is in use.",
)
BATCH_INVARIANT = Setting(
    "HIPFORGE_BATCH_INVARIANT", False, _flag, _FLAG,
    "Start with hipforge.batch_invariant() on: a row's result does not depend on its batch. Fixed at first use.",
)
QUIET = Setting(
    "HIPFORGE_QUIET", False, _flag, _FLAG,
    "Say nothing on stderr about builds that start, how far they are and that emulation is in use.",
)
CACHE_DIR = Setting[Path | None](
    "HIPFORGE_CACHE_DIR", None, _path, "a directory",
    "Where built modules are kept; default $XDG_CACHE_HOME/hipforge.",
)
PREBUILT_DIR = Setting[tuple[Path, ...]](
    "HIPFORGE_PREBUILT_DIR", (), _paths, "directories separated by ':'",
    "Read-only directories of modules built ahead of time, searched before the cache.",
)
TRUST_SHARED_DIRS = Setting(
    "HIPFORGE_TRUST_SHARED_DIRS", False, _flag, _FLAG,
    "Load code from a named cache or prebuilt directory that other users own or can write; they can then run code as "
    "this user.",
)
DISABLE_JIT = Setting(
    "HIPFORGE_DISABLE_JIT", False, _flag, _FLAG,
    "Never build: a module that is not there is a MissingModuleError naming the build command.",
)
HIPCC = Setting[Path | None](
    "HIPFORGE_HIPCC", None, _path, "path, or name on PATH, of a hipcc or HIP-capable clang++",
    "The compiler to use, before any that is found.",
)
NVCC = Setting[Path | None](
    "HIPFORGE_NVCC", None, _path, "path, or name on PATH, of an nvcc",
    "The compiler for NVIDIA GPUs, before any that is found.",
)
COMPILER_LAUNCHER = Setting(
    "HIPFORGE_COMPILER_LAUNCHER", "", _command,
    "a command such as ccache; with an open quote it cannot be split into words",
    "Put in front of every compiler command.",
)
HOST_MARCH = Setting(
    "HIPFORGE_HOST_MARCH", "native", _choice("native", "x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"),
    "native, x86-64, x86-64-v2, x86-64-v3 or x86-64-v4",
    "CPU for which host libraries (the emulator) are built; a level such as x86-64-v3 for ones that travel.",
)
CACHE_LIMIT = Setting[int | None](
    "HIPFORGE_CACHE_LIMIT", None, parse_size, "a size such as 500M or 4G",
    "After a build, remove least recently used entries beyond this size; default no limit.",
)
MAX_JOBS = Setting[int | None](
    "HIPFORGE_MAX_JOBS", None, _positive_int, "a positive integer",
    "Parallel compile jobs; default from cores and free memory.",
)
LOCK_TIMEOUT = Setting(
    "HIPFORGE_LOCK_TIMEOUT", 1800.0, _positive_float, "seconds, greater than 0",
    "How long to wait for another process that builds the same module, in seconds.",
)
VERBOSE = Setting(
    "HIPFORGE_VERBOSE", False, _flag, _FLAG,
    "Print compiler commands and their output as they run.",
)

ALL: tuple[Setting[Any], ...] = tuple(value for value in list(globals().values()) if isinstance(value, Setting))


@contextlib.contextmanager
def scope(**values: Any) -> Iterator[None]:
    """Override settings for a ``with`` block, by their Python names: ``scope(DISABLE_JIT=True)``.

    Values are taken as they are, already parsed. Not thread-safe: meant for tests and command-line tools.

    Raises:
        ConfigError: a name is not a setting.
    """
    settings = {key: item for key, item in globals().items() if isinstance(item, Setting)}
    for name in values:
        if name not in settings:
            raise ConfigError(f"there is no setting {name!r}; known: {', '.join(settings)}")
    saved = dict(_overrides)
    _overrides.update({settings[name].env: value for name, value in values.items()})
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(saved)


def unknown() -> dict[str, str]:
    """Return the ``HIPFORGE_`` variables that are set and no settings, each with the setting it may be meant for."""
    known = [setting.env for setting in ALL]
    names = (name for name in os.environ if name.startswith("HIPFORGE_") and not name.startswith(CONFIG_PREFIX))
    return {name: did_you_mean(name, known) for name in sorted(names) if name not in known and os.environ[name]}


@functools.cache
def warn_of_mistyped() -> None:
    """Log, once, each variable that is no setting but almost the name of one; nothing else would read it."""
    for name, near in unknown().items():
        if did_you_mean(name.removeprefix("HIPFORGE_"), [setting.env.removeprefix("HIPFORGE_") for setting in ALL]):
            logging.getLogger("hipforge").warning("there is no setting %s%s", name, near)
    for name, near in _mistyped_tables().items():
        logging.getLogger("hipforge").warning("no tuned table is read from %s%s", name, near)


def _mistyped_tables() -> dict[str, str]:
    """Return the variables of tuned tables that are almost the name of a family's, each with that one."""
    given = [name for name in os.environ if name.startswith(CONFIG_PREFIX) and os.environ[name]]
    if not given:
        return {}
    from hipforge import ops

    known = [family.upper() for family in (*ops.families(), *FORMER_TABLES)]
    near = {name: did_you_mean(name.removeprefix(CONFIG_PREFIX), known) for name in sorted(given)}
    return {name: text for name, text in near.items() if text and name.removeprefix(CONFIG_PREFIX) not in known}


# Per-family overrides of tuned tables have names made from the family, so they are not in ALL.
CONFIG_PREFIX = "HIPFORGE_CONFIG_"
FORMER_TABLES = {  # names that tuned tables had before: still accepted
    "smallm_mxfp8": "mxfp8_gemm",
    "smallm_mxfp8_moe": "mxfp8_grouped_gemm",
    "skinny_gemm_fp8": "fp8_skinny_gemm",
}


def config_override(family: str) -> list[tuple[str, Path]]:
    """Return the tuned CSVs of ``HIPFORGE_CONFIG_<FAMILY>``, each with the variable that names it; later files win.

    Raises:
        ConfigError: a path begins with ``~`` and a user who does not exist.
    """
    names = [*(former for former, now in FORMER_TABLES.items() if now == family), family]
    variables = [CONFIG_PREFIX + name.upper() for name in names]
    found: list[tuple[str, Path]] = []
    for variable in variables:
        text = os.environ.get(variable, "")
        try:
            found += [(variable, path) for path in _paths(text)]
        except ValueError as error:
            problem = f"{variable}={text!r} is not valid: expected CSV files separated by ':' ({error})"
            raise ConfigError(problem) from None
    return found
