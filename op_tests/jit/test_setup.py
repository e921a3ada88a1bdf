"""What set-up does before it has an environment: which packages it asks for, how, and that it announces it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "env", "uname", "cat", "cksum", "cut", "tee", "sed", "tail", "rm")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A PATH with a shell, python3 and an apt-get that records and fails; the user is not root."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name) or name)
    (folder / "python3").symlink_to(sys.executable)
    write(folder / "id", "echo 1000")
    write(folder / "apt-get", f'echo "apt-get $*" >> {folder}/calls\nexit 1')
    write(folder / "sudo", f'echo "sudo $*" >> {folder}/calls\nexec "$@"')
    return folder


def write(path: Path, body: str) -> None:
    path.unlink(missing_ok=True)  # or the target of a link would be written
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def set_up(machine: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    variables = {"PATH": str(machine), "HOME": str(machine), "VENV": str(machine / "venv"), **environment}
    command = [str(machine / "sh"), ".ci/setup.sh"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    calls = machine / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_all_packages_are_asked_for_in_one_step_that_is_announced(machine: Path) -> None:
    done, calls = set_up(machine)
    assert done.returncode == 1
    (install,) = [call for call in calls if call.startswith("sudo") and " install " in call]
    assert {"g++", "clang-22", "lld-22", "llvm-22", "clang-tools-22"} <= set(install.split())
    assert f"running: {install}" in done.stderr.splitlines()
    assert "could not install: " in done.stderr


def test_no_sudo_forbids_it_and_says_what_to_run(machine: Path) -> None:
    done, calls = set_up(machine, NO_SUDO="1")
    assert done.returncode == 1
    assert not calls
    assert "NO_SUDO=1 forbids" in done.stderr
    assert "Run 'apt-get install" in done.stderr
    assert "clang-22" in done.stderr


def test_a_hipcc_that_is_too_old_does_not_count(machine: Path) -> None:
    write(machine / "g++", "exit 0")
    write(machine / "hipcc", 'echo "HIP version: 5.2"; echo "clang version 14.0.6"')
    _, calls = set_up(machine)
    (install,) = [call for call in calls if call.startswith("sudo") and " install " in call]
    assert "clang-22" in install
    assert "g++" not in install.split()


def test_a_named_compiler_that_is_refused_is_an_error_and_nothing_is_installed(machine: Path) -> None:
    write(machine / "hipcc", 'echo "HIP version: 5.2"; echo "clang version 14.0.6"')
    done, calls = set_up(machine, HIPFORGE_HIPCC=str(machine / "hipcc"))
    assert done.returncode == 1
    assert not calls
    assert "it is clang 14; clang 19 or newer is needed" in done.stderr


def test_a_compiler_that_lacks_only_what_triton_brings_is_enough(machine: Path) -> None:
    write(machine / "g++", "exit 0")
    write(machine / "clang++-22", 'echo "clang version 22.1.8"')
    write(machine / "ld.lld", 'echo "LLD 22.1.8"')
    write(machine / "clang-offload-bundler", "exit 0")
    # Without site-packages, so without triton; set-up ends where it would make the environment.
    write(machine / "python3", f'case "$*" in "-m venv"*) exit 1;; esac\nexec {sys.executable} -S "$@"')
    done, calls = set_up(machine)
    assert not calls, done.stderr
    assert "setting up" in done.stderr


def test_downloads_are_shown_while_pip_runs_and_its_end_where_it_fails(machine: Path) -> None:
    write(machine / "g++", "exit 0")
    write(machine / "hipcc", 'echo "HIP version: 7.0"; echo "clang version 22.0"')
    (machine / "venv" / "bin").mkdir(parents=True)
    said = ("Collecting torch", "  Downloading torch-2.whl (200 MB)", "Installing collected packages: x", "no space")
    write(machine / "venv" / "bin" / "python", "".join(f"echo '{line}'\n" for line in said) + "exit 1")
    done, _ = set_up(machine, HIPFORGE_HIPCC=str(machine / "hipcc"))
    lines = done.stderr.splitlines()
    shown = lines.index("      torch-2.whl (200 MB)")
    assert lines[shown + 1] == "      Installing collected packages"
    assert done.returncode == 1 and "no space" in lines and lines[-1].startswith("error: pip failed")


def test_cleaning_keeps_the_environment_and_a_wheel_keeps_the_site() -> None:
    def commands(target: str) -> str:
        command = ["make", "-n", target, "-o", "setup"]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    removed = [line.split() for line in commands("clean").splitlines() if line.startswith("rm")]
    assert removed and not {".venv", ".venv-integrations"}.intersection(*removed)
    assert ".venv" in commands("distclean").split()
    assert "rm -rf build/lib" in commands("wheel") and "rm -rf build\n" not in commands("wheel")
