"""One binding for all Pythons from 3.10 on: the one built here is loaded by every interpreter of this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from hipforge.errors import ToolchainError
from hipforge.jit.call import abi

MINORS = range(10, 15)
SCRIPT = Path(__file__).parent.parent / "helpers" / "binding_elsewhere.py"


def interpreters() -> dict[str, str]:
    """Return "3.10" -> executable for the versions that this machine has: on PATH, or in pyenv's folder."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for minor in MINORS:
        own = sorted(map(str, pyenv.glob(f"3.{minor}.*/bin/python3.{minor}")))
        for candidate in filter(None, [*own, shutil.which(f"python3.{minor}")]):
            asked = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
            if re.match(rf"Python 3\.{minor}\.\d+$", asked.stdout.strip()):
                found[f"3.{minor}"] = candidate
    return found


@pytest.mark.parametrize("version", [f"3.{minor}" for minor in MINORS])
def test_the_binding_built_here_works_in_another_python(library, version):
    python = interpreters().get(version)
    if python is None:
        pytest.skip(f"this machine has no Python {version}")
    done = subprocess.run(
        [python, SCRIPT, str(abi.extension_entry().library), library._name],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_free_threaded_python_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    with pytest.raises(ToolchainError, match=r"this Python 3\.\d+ is a free-threaded build.*use the ordinary python3"):
        abi.extension_entry()
