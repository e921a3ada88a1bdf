"""A test checks the result of every operation that executes, on every architecture that has it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from helpers.exec_registry import ARCHS, Held, archs_of, held_by

from hipforge.emulator import library

FOLDER = Path(__file__).parent
MODULES = sorted(
    path.stem
    for path in FOLDER.glob("test_emulator_*.py")
    if re.search("@holds|^HELD", path.read_text(), re.MULTILINE) and path.stem != Path(__file__).stem
)


# What decodes, so that a fault can name it, but has no meaning in a compute wave here: return from a trap handler
# (there is none), the ends of a context save and of a pixel shader, halting for a debugger, global wave sync (which
# needs the driver's set-up and waves of other work-groups in step), and a partition of the screen.
NOT_EXECUTED = re.compile(
    r"s_rfe(_restore)?_b64|s_endpgm_(saved|ordered_ps_done)|s_sendmsghalt|ds_gws_\w+|v_screen_partition_4se_b32"
)


def mnemonics(executable: bool) -> set[str]:
    return set(library.load().hfemu_mnemonics(int(executable)).decode().split())


@pytest.fixture(scope="module")
def held() -> dict[str, Held]:
    return {name: held_by(importlib.import_module(f"{__package__}.{name}")) for name in MODULES}


@pytest.mark.parametrize("arch", ARCHS)
def test_every_executable_operation_is_held_by_a_test(held: dict[str, Held], arch: str) -> None:
    everything = set().union(*held.values())
    missing = sorted(name for name in mnemonics(True) if arch in archs_of(name) and (name, arch) not in everything)
    assert not missing, f"{len(missing)} operations execute on {arch} without a test: {' '.join(missing)}"


def test_every_module_that_registers_holds_something(held: dict[str, Held]) -> None:
    assert {name for name, operations in held.items() if not operations} == set()


def test_nothing_is_held_that_does_not_execute(held: dict[str, Held]) -> None:
    assert {name for operations in held.values() for name, _ in operations} - mnemonics(True) == set()


def test_what_does_not_execute_is_just_what_is_listed() -> None:
    assert {name for name in mnemonics(False) if not NOT_EXECUTED.fullmatch(name)} == set()
    assert {name for name in mnemonics(True) if NOT_EXECUTED.fullmatch(name)} == set()
    assert len(mnemonics(True)) > 1100
