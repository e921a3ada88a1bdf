"""What is wanted (:class:`Request`, before any compiler is known) and all that determines it (:class:`BuildSpec`).

``ingredients`` is a flat table of names and short texts: digests, versions, commands with placeholders. The key is its
digest, so that everything in the key has a name that ``hipforge cache why`` can print. Facts that only a compiler's run
shows (the headers it read, a generator's output) are in the entry's manifest and in the second half of its directory
name.
"""

from __future__ import annotations

import abc
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import hipforge
from hipforge.jit.digest import text_digest
from hipforge.jit.ninja import Step, body
from hipforge.jit.roots import Roots

FORMAT = 2
"""Raised when a new hipforge would misread an older entry."""

ABI_VERSION = 1
"""``HF_ABI_VERSION`` of csrc/include/hipforge/host/abi.h."""

KEY_ENVIRONMENT = (
    "CCC_OVERRIDE_OPTIONS",
    "COMPILER_PATH",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "C_INCLUDE_PATH",
    "DEVICE_LIB_PATH",
    "GCC_EXEC_PREFIX",
    "HIPCC_COMPILE_FLAGS_APPEND",
    "HIPCC_LINK_FLAGS_APPEND",
    "HIP_CLANG_FLAGS",
    "HIP_CLANG_PATH",
    "HIP_DEVICE_LIB_PATH",
    "HIP_PLATFORM",
    "LIBRARY_PATH",
    "SOURCE_DATE_EPOCH",
)
"""Environment variables that change what a compiler emits."""

INGREDIENTS = (
    "format",
    "hipforge",
    "abi",
    "module",
    "target",
    "variant",
    "flags",
    "source",
    "generator",
    "steps",
    "files",
    "compiler",
    "device library",
    "host headers",
    "host cpu",
    "environment",
    "python",
    "pybind11",
    "torch",
)
"""Every name an ingredient may have; one that exists per file or variable continues after a colon."""

PORTABLE = (
    "format", "abi", "module", "target", "variant", "flags", "source", "generator", "python", "pybind11", "torch",
)  # fmt: skip
"""What a module built elsewhere must agree on: all but this machine's tools."""

VariantValue = int | str


def variant_label(variant: Mapping[str, VariantValue]) -> str:
    """Return a file-name-safe label of a variant: ``{"M": 4, "BLOCK_N": 8}`` → ``m4-block_n8``."""
    return "-".join(re.sub(r"[^a-z0-9_.+]", "_", f"{name}{value}".lower()) for name, value in variant.items())


def category(ingredient: str) -> str:
    """Return the part of an ingredient's name before the colon."""
    return ingredient.split(":", 1)[0]


@dataclass(frozen=True)
class Generator:
    """Commands that write sources into the folder ``output`` of the build directory, and the build of those.

    ``plan`` takes the names of the sources written and returns all steps and files of the build.
    """

    commands: tuple[tuple[str, ...], ...]
    output: str
    suffixes: tuple[str, ...]
    plan: Callable[[tuple[str, ...]], tuple[tuple[Step, ...], Mapping[str, str]]]


@dataclass(frozen=True, kw_only=True)
class Binary:
    """The name of one binary, and what is fixed about it before any compiler is known.

    ``target`` is an architecture or ``host``; ``limits`` are the ``resource_limits`` of its registry entry; ``roots``
    say where the files of this installation are.
    """

    module: str
    variant: Mapping[str, VariantValue] = field(default_factory=dict)
    target: str
    roots: Roots
    limits: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def stem(self) -> str:
        """The first part of an entry's directory name: ``<module>[-<variant>]``."""
        label = variant_label(self.variant)
        return f"{self.module}-{label}" if label else self.module

    @property
    def title(self) -> str:
        """What messages call it: ``module_x (M=4) for gfx950``."""
        values = ", ".join(f"{name}={value}" for name, value in self.variant.items())
        return f"{self.module}{f' ({values})' if values else ''} for {self.target}"


@dataclass(frozen=True, kw_only=True)
class Request(Binary, abc.ABC):
    """A request for a HIP module or a host library. ``portable`` are the ingredients that need no compiler."""

    portable: Mapping[str, str]

    @abc.abstractmethod
    def specify(self) -> BuildSpec:
        """Return the spec, as the compiler that is selected for it would build it.

        Raises:
            ToolchainError: no compiler can build it.
        """

    @abc.abstractmethod
    def again(self) -> Request:
        """Return the same request with the files as they are now."""

    @abc.abstractmethod
    def how_to_get(self) -> str:
        """Return what to say when it is missing and may not be built."""

    def check_buildable(self) -> None:
        """Look for what only a build needs: here nothing but the compiler.

        Raises:
            ToolchainError: something is missing; the message says what to install.
        """


@dataclass(frozen=True, kw_only=True)
class BuildSpec(Binary):
    """One binary to build: its name, how it is made, and what determines it.

    ``steps`` run in an empty directory in which ``files`` have been written; the last output is ``library``. With a
    ``generator``, they are known only once it ran.
    """

    steps: tuple[Step, ...]
    files: Mapping[str, str]
    ingredients: Mapping[str, str]
    toolchain: str
    generator: Generator | None = None
    is_device_code: bool = True
    verbose: bool = False

    library = "module.so"

    @functools.cached_property
    def key(self) -> str:
        """The digest of all ingredients, in hexadecimal."""
        return ingredients_digest(self.ingredients)

    def ninja_body(self) -> str:
        """Return the location-free ninja text."""
        return body(self.steps, self.stem)


def ingredients_digest(ingredients: Mapping[str, str]) -> str:
    """Return the digest of a table of ingredients, whatever its order."""
    return text_digest(json.dumps(sorted(ingredients.items())))


def environment_ingredients(names: Iterable[str] = KEY_ENVIRONMENT) -> dict[str, str]:
    """Return the compiler-affecting environment variables that are set."""
    return {f"environment:{name}": value for name in names if (value := os.environ.get(name))}


def common_ingredients(module: str, variant: Mapping[str, VariantValue], target: str) -> dict[str, str]:
    """Return what every binary depends on."""
    return {
        "format": str(FORMAT),
        "hipforge": hipforge.__version__,
        "abi": str(ABI_VERSION),
        "module": module,
        "target": target,
        "variant": json.dumps(dict(variant)),
    }
