"""Fixtures of the JIT's tests: the stand-in toolchain, the module of the C ABI's tests, and a registry that stays."""

from collections.abc import Iterator

import pytest
from helpers.abi_module import bound as bound
from helpers.abi_module import library as library
from helpers.abi_module import reading as reading
from helpers.jit_stand_in import stand_in as stand_in

from hipforge.jit import registry


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    """Take back what a test registers or clears: another file in this process may have registered modules too."""
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)
