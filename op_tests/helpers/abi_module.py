"""The module that the tests of the binding call: its stubs, and fixtures that build it and bind its entries."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from hipforge.jit import host_library
from hipforge.jit.call import abi
from hipforge.jit.call.signature import signature_of

SOURCE = Path(__file__).with_name("abi_module.cpp")


def describe(out: torch.Tensor, x: torch.Tensor) -> None: ...
def scalars(
    out: torch.Tensor, maybe: torch.Tensor | None, i: int, d: float = 0.5, b: bool = True, s: str = "abc"
) -> None: ...
def read_as(x: torch.Tensor, y: torch.Tensor | None, type: str) -> None: ...
def fail_with(out: torch.Tensor, kind: int, text: str) -> None: ...
def guard(out: torch.Tensor, axis: int) -> None: ...
def wait_for_write(out: torch.Tensor) -> None: ...
def interrupted(out: torch.Tensor) -> None: ...
def handler_raised(out: torch.Tensor) -> None: ...
def renamed_add(out: torch.Tensor, x: torch.Tensor, n: int) -> None: ...
def with_stream(out: torch.Tensor) -> None: ...
def count_extents(out: torch.Tensor, x: torch.Tensor | None, y: torch.Tensor | None) -> None: ...


def build():
    return host_library.build("test_abi_module", sources=[SOURCE], cflags=["-std=c++17", "-O1", "-Wall", "-Werror"])


@pytest.fixture(scope="session")
def library():
    return ctypes.CDLL(str(build()))


@pytest.fixture(params=["functions", "table", "python"])
def reading(request):
    """How the binding reads tensors."""
    return request.param


def address(library, name):
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def environment(library, target, **more):
    return abi.Environment(
        target,
        emulator=tuple(
            address(library, name) for name in ("push", "pop", "last_error", "clear_error", "emulator_stream")
        ),
        **{"hip": tuple(address(library, name) for name in ("get_device", "set_device")), **more},
    )


@pytest.fixture
def bound(library, reading):
    """Bind a stub of this file for a target, in each way of reading tensors."""

    def bind(stub, target="host", mutates=("out",), **options):
        binder = abi.make_binder(environment(library, target), reading=reading)
        return abi.bind(library, stub.__name__, signature_of(stub, mutates=mutates), binder=binder, **options)

    return bind
