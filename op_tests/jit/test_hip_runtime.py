"""Which ``libamdhip64`` is loaded, with stand-ins for the library: found where ROCm keeps it, or an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hipforge.errors import LaunchError
from hipforge.jit import host_library
from hipforge.jit.backends.amd import runtime as hip_runtime
from hipforge.jit.backends.nvidia import runtime as cuda_runtime


@pytest.fixture
def rocm(tmp_path, monkeypatch):
    """A ROCm folder whose libamdhip64 has hipGetDevice and answers 7."""
    source = tmp_path / "hip.c"
    source.write_text("int hipGetDevice(int* out) { *out = 7; return 0; }\nint hipSetDevice(int i) { return i; }\n")
    (tmp_path / "lib").mkdir()
    shutil.copy(host_library.build("test_hip_runtime", sources=[source]), tmp_path / "lib" / "libamdhip64.so.7")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    hip_runtime.load.cache_clear()
    yield tmp_path
    hip_runtime.load.cache_clear()


def test_the_library_of_rocm_path_is_a_candidate(rocm):
    assert rocm / "lib" / "libamdhip64.so.7" in list(hip_runtime.candidates())


def test_the_library_of_a_distribution_is_a_candidate_after_rocms(rocm, monkeypatch):
    """Debian's libamdhip64 lies in the multiarch folder."""
    folder = rocm / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    shutil.copy(rocm / "lib" / "libamdhip64.so.7", folder / "libamdhip64.so.6")
    assert Path("/usr/lib/x86_64-linux-gnu") in hip_runtime._DISTRIBUTION_DIRS
    monkeypatch.setattr(hip_runtime, "_DISTRIBUTION_DIRS", (folder,))
    found = list(hip_runtime.candidates())
    assert found.index(rocm / "lib" / "libamdhip64.so.7") < found.index(folder / "libamdhip64.so.6")


def test_the_library_is_loaded_with_global_symbols(rocm):
    """In a new process that knows only this candidate, whatever else the machine has."""
    code = (
        "import ctypes, pathlib; from hipforge.jit.backends.amd import runtime as hip_runtime;"
        f"hip_runtime.candidates = lambda: iter([pathlib.Path({str(rocm / 'lib' / 'libamdhip64.so.7')!r})]);"
        "hip_runtime.load(); index = ctypes.c_int();"
        "ctypes.CDLL(None).hipGetDevice(ctypes.byref(index)); print(index.value)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "7"


def test_a_library_that_is_already_mapped_wins_over_any_other(rocm):
    """As with a ROCm torch: its own copy is in the process, and a second one would be a second HIP."""
    (rocm / "torch").mkdir()
    mapped = rocm / "torch" / "libamdhip64.so"
    shutil.copy(rocm / "lib" / "libamdhip64.so.7", mapped)
    code = (
        f"import ctypes; ctypes.CDLL({str(mapped)!r}); from hipforge.jit.backends.amd import runtime as hip_runtime;"
        "print(next(hip_runtime.candidates())); print(hip_runtime.load()._name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(mapped)] * 2


@pytest.mark.parametrize(("runtime", "soname"), [(hip_runtime, "libamdhip64.so"), (cuda_runtime, "libcudart.so")])
def test_a_machine_without_the_library_is_told_what_was_tried(runtime, soname, tmp_path, monkeypatch):
    broken = tmp_path / soname
    broken.write_text("not a library")
    runtime.load.cache_clear()
    monkeypatch.setattr(runtime, "candidates", lambda: iter([broken]))
    with pytest.raises(LaunchError, match=rf"{soname}: .*HIPFORGE_DEVICE=emulator"):
        runtime.load()
    monkeypatch.setattr(runtime, "candidates", lambda: iter([]))
    with pytest.raises(LaunchError, match=rf"no {soname} in this process"):
        runtime.load()
