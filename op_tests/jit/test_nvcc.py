"""nvcc as a toolchain: what it is told, what its report says, and why one is refused. Nothing here runs on a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hipforge import settings
from hipforge.errors import BuildError, ConfigError, ToolchainError
from hipforge.jit import hip_module, obtain, registry, toolchain
from hipforge.jit.backends.nvidia import compilers, nvcc, resources

Module = Callable[..., registry.ModuleEntry]

SOURCE = """
#include <hip/hip_runtime.h>
#include "hipforge/module.h"
#if defined(__CUDA_ARCH__)
#include "on_device.h"
#else
#include "on_host.h"
#endif
__global__ void fill(float* out, float value) { out[blockIdx.x * blockDim.x + threadIdx.x] = value; }
void fill_out(hf::Tensor out, double value, hipStream_t stream) {
  HF_CHECK_ARCH(out, HF_ARCHS);
  fill<<<1, 32, 0, stream>>>(out.data<float>(), static_cast<float>(value));
  HF_HIP(hipGetLastError());
}
HF_EXPORT(fill_out);
"""

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4fillPff' for 'sm_90a'
ptxas info    : Function properties for _Z4fillPff
    8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 20 registers, used 1 barriers, 8 bytes cumulative stack size, 400 bytes smem
"""


@pytest.fixture
def module(tmp_path: Path, isolated_cache: Path) -> Iterator[Module]:
    """Makes a module of SOURCE in a folder of its own."""

    def make(**more: object) -> registry.ModuleEntry:
        (tmp_path / "fill.cu").write_text(SOURCE)
        for header in ("on_device.h", "on_host.h"):
            (tmp_path / header).touch()
        entry = {"srcs": ["fill.cu"], **more}
        registry.register_values(tmp_path / "modules.json", {"module_fill": entry})
        return registry.module("module_fill")

    yield make
    registry._registered.pop("module_fill", None)


def test_the_report_of_ptxas_is_read_by_kernel() -> None:
    kernels, targets = resources.parse(REPORT)
    assert targets == {"sm_90"} and kernels == {
        "_Z4fillPff": {
            "name": "fill",
            "registers": 20, "spill_bytes": 16, "stack_bytes": 8, "shared_bytes": 400, "barriers": 1,
        }
    }  # fmt: skip


def test_what_a_called_function_needs_is_added_to_its_kernel() -> None:
    """ptxas reports a function that is not inlined behind the kernel that calls it, whose own spills must stay."""
    called = """ptxas info    : Function properties for _Z6scaledff
    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads
"""
    for numbers, spilled, stack in (((0, 0, 0), 16, 8), ((16, 4, 8), 28, 24)):
        (kernel,) = resources.parse(REPORT + called.format(*numbers))[0].values()
        assert kernel["spill_bytes"] == spilled and kernel["stack_bytes"] == stack


def test_flags_of_gxx_reach_the_host_compiler_and_own_ones_do_not() -> None:
    given = ("-I/x", "-fno-rtti", "-Wall", "-fmad=true", "-isystem/y", "-DA=1", "-Wl,--as-needed")
    assert nvcc._translated(given) == (
        "-I/x", "-Xcompiler", "-fno-rtti", "-Xcompiler", "-Wall", "-fmad=true", "-isystem", "/y", "-DA=1",
        "-Xlinker", "--as-needed",
    )  # fmt: skip


def test_a_module_is_built_without_a_gpu_and_its_manifest_says_with_what(module: Module) -> None:
    entry = obtain.module(hip_module.request(module(), {}, "sm_90")).entry
    (kernel,) = entry.manifest.kernels.values()
    assert kernel["registers"] > 0 and kernel["stack_bytes"] == 0 and entry.manifest.gfx_targets == ["sm_90"]
    names = {Path(path).name for path, _ in entry.manifest.dependencies}
    assert {"fill.cu", "on_device.h", "on_host.h", "module.h"} <= names  # whichever pass reads a header
    undefined = {"compiler:ptxas:executable", "compiler:cicc:executable", "compiler:host compiler:version"}
    assert undefined <= entry.manifest.ingredients.keys()


def test_a_changed_flag_of_the_environment_is_another_build(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = hip_module.request(module(), {}, "sm_90")
    before = wanted.specify().key
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    toolchain._selected.clear()
    spec = wanted.specify()
    assert spec.key != before and spec.ingredients["environment:NVCC_APPEND_FLAGS"] == "-lineinfo"
    toolchain._selected.clear()


def test_a_failed_build_is_tried_again_when_a_header_appears_and_when_it_is_mended(
    module: Module, tmp_path: Path
) -> None:
    entry, header, said = module(), tmp_path / "on_device.h", []
    header.unlink()
    for _ in range(2):
        for _ in range(2):
            with pytest.raises(BuildError, match=r"on_device\.h") as raised:
                obtain.module(hip_module.request(entry, {}, "sm_90"))
            said.append(str(raised.value))
        header.write_text("int wrong = ;")
    assert said[0] == said[1] != said[2] == said[3]
    header.write_text("")
    assert obtain.module(hip_module.request(entry, {}, "sm_90")).entry.manifest.kernels


def test_a_source_by_vendor_and_a_limit_in_the_vendors_words(module: Module) -> None:
    entry = module(
        srcs={"nvidia": ["fill.cu"], "amd": ["absent.cu"]},
        flags_extra_hip={"amd": ["-mllvm", "-x"]},
        resource_limits={"max_registers": 4, "max_vgprs": 1},
    )
    assert entry.srcs == ("${MODULE_DIR}/absent.cu",) and entry.for_vendor("nvidia").flags_extra_hip == ()
    assert module(srcs={"nvidia": ["fill.cu"]}).archs == ("sm_90",)
    with pytest.raises(ConfigError, match=r"archs: gfx942 has no sources: srcs has none for amd; leave it out"):
        module(srcs={"nvidia": ["fill.cu"]}, archs=["gfx942", "sm_90"])
    with pytest.raises(ConfigError, match=r"srcs: at least one source"):
        module(srcs={"nvidia": []})
    with pytest.raises(Exception, match=r"fill.*: registers is \d+, max_registers is 4"):
        obtain.module(hip_module.request(entry, {}, "sm_90"))


def test_keys_by_vendor_name_known_vendors(module: Module) -> None:
    with pytest.raises(ConfigError, match=r"srcs: expected a list, or an object with keys among amd, nvidia"):
        module(srcs={"intel": ["fill.cu"]})


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_old_nvcc_and_one_without_its_parts_say_what_to_install(tmp_path: Path, isolated_cache: Path) -> None:
    old = _script(tmp_path / "old", "echo 'Cuda compilation tools, release 11.8, V11.8.89'")
    get_it = "pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"
    with pytest.raises(ToolchainError, match=rf"it is nvcc 11\.8; 12\.0 or newer is needed: {get_it}"):
        compilers.inspect(old, "sm_90")
    bare = _script(tmp_path / "bare", f"echo 'release 13.0, V'; echo '#$ TOP={tmp_path}'")
    with pytest.raises(ToolchainError, match=rf"nvvm/bin/cicc is missing: {get_it} \(or nvidia-nvvm\)"):
        compilers.inspect(bare, "sm_90")


def test_a_refused_host_compiler_is_named(
    tmp_path: Path, isolated_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc_here = toolchain.select("sm_90").tool.path
    real = shutil.which("g++")
    _script(tmp_path / "g++", f'exec {real} -U__GNUC__ -D__GNUC__=99 -Wno-builtin-macro-redefined "$@"')
    monkeypatch.setenv("NVCC_CCBIN", str(tmp_path / "g++"))
    with pytest.raises(ToolchainError, match=r"it refuses the host compiler .*g\+\+: .*set NVCC_CCBIN"):
        compilers.inspect(nvcc_here, "sm_90")


def test_without_any_nvcc_the_error_says_what_to_install(isolated_cache: Path) -> None:
    with settings.scope(NVCC=Path("/no/such/nvcc")), pytest.raises(ToolchainError) as caught:
        toolchain.select("sm_90")
    text = str(caught.value)
    assert "no compiler can build for sm_90" in text and "pip install nvidia-cuda-nvcc " in text


def test_the_emulator_has_no_sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFORGE_EMULATE", "sm_90")
    with pytest.raises(ConfigError, match="HIPFORGE_EMULATE='sm_90' is not valid: expected gfx950 or gfx942"):
        settings.EMULATE.get()
