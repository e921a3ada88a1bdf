"""Which test checks the result of which operation, declared where the test is parametrised and checked when it runs.

A test names its operations through ``holds`` or ``holds_each``, which also run it on every architecture that has them.
The declaration is the parametrisation, so that it cannot outlive the test, and a run in which a declared operation is
not executed fails, so that it cannot claim more than the test does.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

from helpers import exec_one
from helpers.decoding.encodings import table

ARCHS = ("gfx950", "gfx942")
Held = set[tuple[str, str]]  # (mnemonic, architecture)
Test = TypeVar("Test", bound=Callable[..., None])


@functools.cache
def _rows() -> dict[str, tuple[str, ...]]:
    return {row.name: tuple(arch for arch in ARCHS if row.exists_on(arch)) for row in table()}


def archs_of(*mnemonics: str) -> tuple[str, ...]:
    """Return the architectures that have all of these operations.

    Raises:
        KeyError: no such mnemonic in the instruction table.
    """
    return tuple(arch for arch in ARCHS if all(arch in _rows()[name] for name in mnemonics))


def base(spelling: str) -> str:
    """Drop the encoding's suffix: v_add_f32_e64 is v_add_f32."""
    return re.sub(r"_(e32|e64|sdwa|dpp)$", "", spelling)


def _checked(test: Test, names_of: Callable[[dict[str, Any]], Iterable[str]], everything: Held) -> Test:
    @functools.wraps(test)
    def wrapper(**arguments: Any) -> None:
        arch = arguments["arch"]
        exec_one.executed.clear()
        test(**arguments)
        missing = {(name, arch) for name in names_of(arguments)} - exec_one.executed
        assert not missing, f"declared but not executed: {sorted(missing)}"

    wrapper.holds = everything  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def holds(*mnemonics: str) -> Callable[[Test], Test]:
    """Run the test, which takes ``arch``, wherever all these operations exist; each must execute."""
    archs = archs_of(*mnemonics)
    everything = {(name, arch) for name in mnemonics for arch in archs}

    def decorate(test: Test) -> Test:
        return pytest.mark.parametrize("arch", archs)(_checked(test, lambda _: mnemonics, everything))

    return decorate


def holds_each(
    argument: str, values: Iterable[Any], mnemonics: Callable[..., Sequence[str]] = lambda name: [name]
) -> Callable[[Test], Test]:
    """Run the test for each value and architecture.

    Args:
        argument: the test's parameter, or several separated by commas; it takes ``arch`` beside them.
        values: one value, or one tuple of values, per case.
        mnemonics: the operations that a case holds, from its values.
    """
    names = [name.strip() for name in argument.split(",")]
    cases = []
    everything: Held = set()
    for value in values:
        single = (value,) if len(names) == 1 else tuple(value)
        held = list(mnemonics(*single))
        for arch in archs_of(*held):
            cases.append((*single, arch))
            everything |= {(name, arch) for name in held}

    def decorate(test: Test) -> Test:
        held_by = _checked(test, lambda given: mnemonics(*(given[name] for name in names)), everything)
        return pytest.mark.parametrize((*names, "arch"), cases)(held_by)

    return decorate


def on_each_arch(test: Test) -> Test:
    """Run a test that covers no operation of its own on every architecture."""
    return pytest.mark.parametrize("arch", ARCHS)(test)


def held_by(module: object) -> Held:
    """Return what a test module's functions hold, and what its ``HELD`` adds for cases that run whole kernels."""
    found: Held = set(getattr(module, "HELD", ()))
    for value in vars(module).values():
        found |= getattr(value, "holds", set())
    return found


def assemble_for(texts: Callable[[str], str], names: Iterable[str]) -> None:
    """Assemble one text per operation, for every architecture that has it, with one process each."""
    names = list(names)
    for arch in ARCHS:
        exec_one.assemble_all((texts(name) for name in names if arch in archs_of(name)), arch)
