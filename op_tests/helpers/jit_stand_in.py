"""Stand-in compilers for tests of the build machinery: they record their arguments and answer in milliseconds.

``hipcc`` here is a shell script that answers like ROCm's: it knows ``--version``, plans (``-###``), compiles the device
pass by copying canned device code, the host pass with gcc, assembles, and links with lld. As the real one does, it
takes an assembly file in a call without ``-c`` as a HIP source and compiles it twice, and C++ without ``-x`` as HIP.
The sources of these tests are therefore plain C++ without HIP; that the real clang obeys the same commands is tested
in test_jit_toolchain.py.
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hipforge import settings
from hipforge.jit import hip_module, obtain, registry, toolchain
from hipforge.jit.cache import cache_dir
from hipforge.jit.cache import store as cache
from hipforge.jit.spec import BuildSpec

HIPCC = r"""#!/bin/sh
# stand-in hipcc, version {version}
here=$(cd "$(dirname "$0")" && pwd)
line=
for word in "$@"; do line="$line$word|"; done
echo "$line" >> "$here/calls"
case "$line" in
  --version*)
    echo "HIP version: 7.0.51831"
    echo "AMD clang version {version}"
    echo "Target: x86_64-unknown-linux-gnu"
    echo "InstalledDir: $here"
    exit 0;;
  *"|-###|"*) exit 0;;
esac
{before}
depfile= output= kind=compile plain= assembly= named=
while [ $# -gt 0 ]; do
  case "$1" in
    -Xclang) shift; if [ "$1" = -dependency-file ]; then depfile="$3"; shift; shift; fi
             if [ "$1" = -MT ]; then shift 2; fi; if [ "$1" = -MG ]; then plain="$plain -MG"; fi;;
    -x) named="$2"; shift;;
    -o) output="$2"; shift;;
    --cuda-device-only) kind=device;;
    -shared) kind=link; plain="$plain $1";;
    -fsyntax-only) kind=scan;;
    --offload-arch=*) arch="${{1#*=}}";;
    -gline-tables-only|-fdebug-compilation-dir=*) ;;
    --*|-cuid=*|-fuse-ld=*|-no-hip-rt|-Wno-unused-command-line-argument|-c) ;;
    *.cu) plain="$plain -x c++ $1";;
    *.s) assembly="$1";;
    *.cpp) [ "$named" ] || plain="$plain -D__HIP__"; plain="$plain $1";;
    *) plain="$plain $1";;
  esac
  shift
done
case $kind in
  device) gcc $plain -D__{macro}__ -fsyntax-only -MD -MF "$depfile" || exit 1
          cp "$here/$arch.co" "$output";;
  compile) if [ "$assembly" ]; then gcc -c "$assembly" -o "$output"
           else gcc $plain -c -MD -MF "$depfile" -o "$output"; fi;;
  scan) gcc $plain -M -MF "$depfile";;
  link) gcc -B{llvm} -fuse-ld=lld $plain $assembly $assembly -o "$output";;
esac
"""

VERSION = "20.0.0git (roc-7.0.0)"


@functools.cache
def real_clang() -> Path:
    """The clang++ that the product would take here if there were no hipcc."""
    verdicts = toolchain.probe_all()
    usable = [verdict for verdict in verdicts if isinstance(verdict, toolchain.Accepted)]
    clangs = [verdict.path for verdict in usable if "hipcc" not in verdict.path.name]
    assert clangs, f"no usable clang++: {verdicts}"
    return clangs[0]


@functools.cache
def device_code(arch: str) -> bytes:
    """Real device code for ``arch``: one empty kernel, made once by the machine's clang."""
    source = 'extern "C" __attribute__((global)) void empty() {}\n'
    flags = ["-x", "hip", f"--offload-arch={arch}", "-nogpulib", "-nogpuinc", "--cuda-device-only"]
    flags.append("--no-gpu-bundle-output")
    command = [str(real_clang()), *flags, "-O1", "-c", "-", "-o", "-"]
    return subprocess.run(command, input=source.encode(), stdout=subprocess.PIPE, check=True).stdout


@dataclass
class StandIn:
    """A folder with a stand-in hipcc, a module that it builds, and its own cache directory."""

    folder: Path

    @property
    def hipcc(self) -> Path:
        return self.folder / "bin/hipcc"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def sources(self) -> Path:
        return self.folder / "sources"

    def install(self, *, version: str = VERSION, before: str = "") -> None:
        """Write the compiler; ``before`` is shell code that runs ahead of every compile and link."""
        self.hipcc.parent.mkdir(exist_ok=True)
        for arch in ("gfx950", "gfx942"):
            (self.hipcc.parent / f"{arch}.co").write_bytes(device_code(arch))
        llvm = Path(os.path.realpath(real_clang())).parent
        text = HIPCC.format(version=version, before=before, macro="gfx950", llvm=llvm)
        # A new file, as a package manager would install it, so that a running shell keeps reading the old one.
        fresh = self.hipcc.with_name("hipcc.new")
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.replace(self.hipcc)

    def write(self, name: str, text: str) -> Path:
        """Write one file beside the module's JSON."""
        path = self.sources / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def module(self, name: str = "sample", **keys: Any) -> str:
        """Describe a module in its own JSON and register it."""
        keys.setdefault("srcs", ["sample.cu"])
        path = self.write(f"{name}.json", json.dumps({name: keys}))
        registry._registered.pop(name, None)
        registry.register(path)
        return name

    def calls(self) -> list[list[str]]:
        """Return the arguments of every call of the compiler so far."""
        try:
            lines = (self.hipcc.parent / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line.split("|")[:-1] for line in lines]

    def compiles(self) -> list[list[str]]:
        """Return the calls that compiled a device pass: one for each build of a one-source module."""
        device = [call for call in self.calls() if "--cuda-device-only" in call]
        return [call for call in device if not {"-###", "-fsyntax-only"}.intersection(call)]

    def request(
        self, name: str = "sample", variant: dict[str, int | str] | None = None, arch: str = "gfx950"
    ) -> hip_module.Request:
        return hip_module.request(registry.module(name), variant, arch)

    def spec(
        self, name: str = "sample", variant: dict[str, int | str] | None = None, arch: str = "gfx950"
    ) -> BuildSpec:
        toolchain._selected.clear()
        return hip_module.specification(self.request(name, variant, arch), toolchain.select(arch))

    def build(
        self, name: str = "sample", variant: dict[str, int | str] | None = None, arch: str = "gfx950"
    ) -> obtain.Ready:
        cache_dir._store.cache_clear()
        return obtain.binary(self.spec(name, variant, arch))

    def environment(self) -> dict[str, str]:
        """Return what a child process needs to use this compiler and cache."""
        return {**os.environ, "HIPFORGE_HIPCC": str(self.hipcc), "HIPFORGE_CACHE_DIR": str(self.cache)}

    def child_code(self, body: str, name: str = "sample", *, first: str = "") -> str:
        """Return a program for ``python -c`` that imports, runs ``first``, registers the module and runs ``body``."""
        return (
            "import logging, os, sys, time\n"
            "from hipforge.errors import HipforgeError\n"
            "from hipforge.jit import build, hip_module, maintenance, obtain, registry, toolchain\n"
            "from hipforge.jit.cache import cache_dir\nfrom hipforge.jit.cache import store as cache\n"
            f"{first}"
            f"registry.register({str(self.sources / (name + '.json'))!r})\n"
            "def ensure():\n"
            f"    wanted = hip_module.request(registry.module({name!r}), None, 'gfx950')\n"
            "    return obtain.binary(hip_module.specification(wanted, toolchain.select('gfx950')))\n"
            + textwrap.dedent(body)
        )

    def start_child(self, body: str, name: str = "sample", **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", self.child_code(body, name)],
            env={**self.environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return as soon as ``condition()`` is true; fail when it never is."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.01)


def library_value(entry: cache.Entry) -> int:
    """Call ``value()`` of a built sample."""
    return called(entry.library, "value")


def called(library: Path, name: str) -> int:
    """Call a function of a library: of a copy, as dlopen takes two files of one name and inode for one; none stays."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = ctypes.CDLL(shutil.copy(library, folder))
        result = int(getattr(loaded, name)())
        _ctypes.dlclose(loaded._handle)
    return result


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    """A stand-in compiler, a registered module ``sample`` whose ``value()`` is 3, and an empty cache, all in effect."""
    made = StandIn(tmp_path / "stand-in")
    made.folder.mkdir()
    made.install()
    registry._registered.clear()  # the JIT's conftest restores it
    made.write("value.h", "#define VALUE 3\n")
    made.write("sample.cu", '#include "value.h"\nextern "C" int value() { return VALUE; }\n')
    made.module()
    with settings.scope(CACHE_DIR=made.cache, HIPCC=made.hipcc):
        yield made
    toolchain._selected.clear()
