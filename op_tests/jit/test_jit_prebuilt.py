"""Modules built ahead of time, loading, and what happens when building is disabled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.jit_stand_in import StandIn

from hipforge import devices, settings
from hipforge.errors import ArchError, BuildError, MissingModuleError, ToolchainError
from hipforge.jit import hip_module, host_library, loader, obtain, registry, tools
from hipforge.jit.cache import prebuilt
from hipforge.jit.cache import store as cache


class NoRuntime:
    """A device whose runtime needs no loading: the samples here call no HIP function."""

    kind = "emulator"

    def load_runtime(self) -> None: ...

    def is_capturing(self) -> bool:
        return False


@pytest.fixture
def loading(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(devices, "current", NoRuntime)
    monkeypatch.setattr(loader, "_loaded", {})
    yield stand_in


@pytest.fixture
def ahead(loading: StandIn) -> StandIn:
    """The sample prebuilt into ``ahead``; no compiler, and a cache directory that does not exist."""
    entry = loading.build().entry
    prebuilt.export([entry], loading.folder / "ahead")
    settings._overrides["HIPFORGE_PREBUILT_DIR"] = (loading.folder / "ahead",)
    settings._overrides["HIPFORGE_HIPCC"] = loading.folder / "no-compiler"
    settings._overrides["HIPFORGE_CACHE_DIR"] = loading.folder / "unused"
    tools._probe_store.cache_clear()
    return loading


def test_a_module_is_loaded_once_per_process_and_listed(loading: StandIn) -> None:
    first = loader.load("sample", None, "gfx950")
    assert first.built
    assert first.library.value() == 3
    assert first.manifest.gfx_targets == ["gfx950"]
    assert loader.load("sample", None, "gfx950") is first
    assert loader.loaded() == (first,)
    assert first.handle != 0
    assert first.seconds > 0


def test_a_module_that_cannot_be_loaded_is_the_same_error_again_without_another_build(loading: StandIn) -> None:
    loading.write("sample.cu", 'extern "C" int nowhere();\nextern "C" int value() { return nowhere(); }\n')
    for _ in range(2):
        with pytest.raises(BuildError, match="undefined symbol: nowhere"):
            loader.load("sample", None, "gfx950")
    assert len(loading.compiles()) == 1
    assert loader.loaded() == ()
    loading.write("sample.cu", 'extern "C" int value() { return 8; }\n')
    assert loader.load("sample", None, "gfx950").library.value() == 8


def test_the_command_for_a_shipped_module_registers_nothing() -> None:
    wanted = hip_module.request(registry.module("module_fp8_quant"), {"HF_INPUT": "f32"}, "gfx942")
    assert wanted.how_to_get().endswith("hipforge build module_fp8_quant --arch gfx942")


def test_disabled_jit_names_the_exact_command(loading: StandIn) -> None:
    loading.module(variants={"M": [1, 2]})
    with settings.scope(DISABLE_JIT=True):
        with pytest.raises(MissingModuleError) as raised:
            loader.load("sample", {"M": 2}, "gfx950")
        assert str(raised.value) == (
            "sample-m2 for gfx950 is not built and HIPFORGE_DISABLE_JIT=1; "
            f"build it ahead of time: hipforge build sample --arch gfx950 --register {loading.sources / 'sample.json'}"
        )
        with settings.scope(HIPCC=loading.folder / "no-compiler"), pytest.raises(MissingModuleError):
            loader.load("sample", {"M": 2}, "gfx950")
    assert not loading.compiles()
    loading.build(variant={"M": 2})
    with settings.scope(DISABLE_JIT=True):
        assert not loader.load("sample", {"M": 2}, "gfx950").built


def test_no_compiler_is_a_toolchain_error_when_building_is_allowed(loading: StandIn) -> None:
    with settings.scope(HIPCC=loading.folder / "no-compiler"), pytest.raises(ToolchainError):
        loader.load("sample", None, "gfx950")


def test_a_prebuilt_module_needs_no_compiler_and_writes_nothing(ahead: StandIn) -> None:
    loaded = loader.load("sample", None, "gfx950")
    assert loaded.library.value() == 3
    assert not loaded.built
    assert loaded.path.is_relative_to(ahead.folder / "ahead")
    assert not (ahead.folder / "unused").exists()
    with settings.scope(DISABLE_JIT=True):
        assert loader.load("sample", None, "gfx950") is loaded


def test_a_prebuilt_module_travels_to_another_place(ahead: StandIn) -> None:
    moved = ahead.folder / "site-packages"
    (ahead.folder / "ahead").rename(moved)
    settings._overrides["HIPFORGE_PREBUILT_DIR"] = (ahead.folder / "missing", moved)
    assert loader.load("sample", None, "gfx950").path.is_relative_to(moved)


def damage_library(box: StandIn) -> None:
    (library,) = (box.folder / "ahead").rglob("module.so")
    library.write_bytes(library.read_bytes()[:-1] + b"x")


def change_manifest(box: StandIn, **keys: Any) -> None:
    (path,) = (box.folder / "ahead").rglob(cache.MANIFEST)
    raw = json.loads(path.read_text())
    for name, value in keys.items():
        raw["ingredients"][name] = value
    path.write_text(json.dumps(raw))


MISFITS: dict[str, Callable[[StandIn], object]] = {
    "source": lambda box: box.write("sample.cu", '#include "value.h"\nextern "C" int value() { return VALUE + 0; }\n'),
    "header": lambda box: box.write("value.h", "#define VALUE 4\n"),
    "flags": lambda box: box.module(flags_extra_hip=["-DX"]),
    "library": damage_library,
    "abi": lambda box: change_manifest(box, abi="0"),
    "target": lambda box: change_manifest(box, target="gfx942"),
}


@pytest.mark.parametrize("change", MISFITS)
def test_a_prebuilt_module_that_does_not_fit_is_not_taken(ahead: StandIn, change: str) -> None:
    MISFITS[change](ahead)
    with pytest.raises(ToolchainError):
        loader.load("sample", None, "gfx950")


def test_compiler_and_system_headers_of_the_builder_do_not_matter(ahead: StandIn) -> None:
    change_manifest(ahead, **{"compiler:version": "another", "device library:ocml.bc": "another"})
    (path,) = (ahead.folder / "ahead").rglob(cache.MANIFEST)
    raw = json.loads(path.read_text())
    raw["dependencies"].append(["/usr/include/no/such.h", "0" * 64])
    raw["dependencies"].append(["${ROCM}/include/no/such.h", "0" * 64])
    path.write_text(json.dumps(raw))
    assert loader.load("sample", None, "gfx950").library.value() == 3


def test_a_module_for_one_arch_is_refused_on_another_before_anything_else(loading: StandIn) -> None:
    loading.module(archs=["gfx942"])
    with pytest.raises(ArchError, match="sample is built for gfx942; this device is gfx950"):
        loader.load("sample", None, "gfx950")
    assert not loading.calls()


END_TO_END = """
import os, shutil
assert shutil.which("clang++-22") is None and shutil.which("g++") is None and shutil.which("ninja") is None
import torch, hipforge
from hipforge.jit import loader, obtain
from hipforge.ops.reference import quantize_mxfp8
x = torch.randint(-4, 5, (1, 64)).float()
w = torch.randint(-4, 5, (32, 64)).float()
(xq, xs), (wq, ws) = quantize_mxfp8(x), quantize_mxfp8(w)
got = hipforge.mxfp8_gemv(xq, xs, wq, ws)
assert torch.equal(got.float(), (x @ w.t()).bfloat16().float()), got
assert [module.built for module in loader.loaded()] == [False]
print(loader.loaded()[0].path)
"""


def test_an_op_runs_from_prebuilt_modules_without_any_compiler_and_writes_nothing(tmp_path: Path) -> None:
    """The emulator, the binding and one kernel, as a wheel built ahead of time carries them."""
    from hipforge.emulator import library as emulator_library
    from hipforge.jit import hip_module, registry, toolchain
    from hipforge.jit.call import abi

    emulator_entry = cache.read_entry(emulator_library.build().parent)
    assert emulator_entry is not None
    entries = [emulator_entry, abi.extension_entry()]
    wanted = hip_module.request(registry.module("module_mxfp8_gemm_wave_split"), {"HF_ROWS": 16}, "gfx950")
    entries.append(obtain.binary(hip_module.specification(wanted, toolchain.select("gfx950"))).entry)
    prebuilt.export(entries, tmp_path / "prebuilt")
    unused = tmp_path / "unused"
    environment = {
        "PATH": "/nonexistent",
        "HOME": str(unused),
        "HIPFORGE_PREBUILT_DIR": str(tmp_path / "prebuilt"),
        "HIPFORGE_DISABLE_JIT": "1",
        "HIPFORGE_DEVICE": "emulator",
        "HIPFORGE_EMULATOR_QUIET": "1",
        "HIPFORGE_HIPCC": "/nonexistent/hipcc",
    }
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "HIPFORGE_CACHE_DIR"):
        if name in os.environ and name != "HIPFORGE_CACHE_DIR":
            environment[name] = os.environ[name]
    before = sorted(path for path in (tmp_path / "prebuilt").rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", END_TO_END], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "prebuilt/gfx950/module_mxfp8_gemm_wave_split-hf_rows16-"))
    assert "warning" not in done.stderr.lower(), done.stderr
    assert not unused.exists()
    assert sorted(path for path in (tmp_path / "prebuilt").rglob("*")) == before
    assert host_library.TARGET in {path.name for path in (tmp_path / "prebuilt").iterdir()}
