"""The fixture of files with HIP kernels of their own, in SOURCE."""

from __future__ import annotations

import pytest
from helpers.hip_compile import device_elf

from hipforge import emulator


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a file's tests of its kernels on each of its ARCHITECTURES, where it names some."""
    architectures = getattr(metafunc.module, "ARCHITECTURES", ())
    if architectures and "code" in metafunc.fixturenames:
        metafunc.parametrize("code", architectures, indirect=True, scope="module")


@pytest.fixture(scope="module")
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> emulator.CodeObject:
    """The kernels of the file's SOURCE."""
    arch = getattr(request, "param", "gfx950")
    return emulator.CodeObject(device_elf(request.module.SOURCE, tmp_path_factory.mktemp("code"), arch))
