"""Which compiler is chosen, why the others are refused, and that the real one accepts the commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from helpers.decoding.llvm import llvm_tool
from helpers.hip_compile import WITHOUT_HIP
from helpers.jit_stand_in import StandIn, real_clang

from hipforge import settings
from hipforge.errors import BuildError, ToolchainError
from hipforge.jit import toolchain, tools
from hipforge.jit.backends.amd import compilers, hip_clang, rocm_tree
from hipforge.jit.backends.amd.code_object import COMPRESSED_MAGIC, fatbin, read_code_objects
from hipforge.jit.cache import cache_dir
from hipforge.jit.toolchain import Accepted, Refused

CLANG = real_clang()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with nothing on PATH but what a test puts into ``bin``, no ROCm, and an empty cache."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("ROCM_PATH", "HIP_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compilers, "rocm_dirs", _without_opt_rocm)
    toolchain._selected.clear()
    tools._probe_store.cache_clear()
    cache_dir._store.cache_clear()
    with settings.scope(CACHE_DIR=tmp_path / "cache", HIPCC=None):
        yield tmp_path
    toolchain._selected.clear()


def _without_opt_rocm() -> list[Path]:
    named = [os.environ.get("ROCM_PATH"), os.environ.get("HIP_PATH")]
    return [Path(path) for path in named if path]


def script(path: Path, version: str, *, plan: int = 0, say: str = "") -> Path:
    """A compiler that only answers questions; each call is recorded beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {path}.calls\n'
        f'case "$*" in --version) echo "{version}"; echo "InstalledDir: {path.parent}"; exit 0;; esac\n'
        f'echo "{say}"\nexit {plan}\n'
    )
    path.chmod(0o755)
    return path


def add_llvm(folder: Path, version: str = "22") -> None:
    script(folder / "ld.lld", f"LLD {version}.1.8 (compatible with GNU linkers)")


def rocm(folder: Path) -> Path:
    for name in ("include/hip/hip_runtime.h", "amdgcn/bitcode/ocml.bc", "share/hip/version"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def verdicts(arch: str = "gfx950") -> dict[str, Accepted | Refused]:
    return {verdict.name: verdict for verdict in toolchain.probe_all(arch)}


def test_rocms_hipcc_comes_before_any_clang(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = rocm(machine / "rocm")
    monkeypatch.setenv("ROCM_PATH", str(root))
    script(root / "bin/hipcc", "HIP version: 7.0\nAMD clang version 20.0.0git")
    script(machine / "bin/hipcc", "HIP version: 6.9\nAMD clang version 19.0.0git")
    script(root / "llvm/bin/amdclang++", "AMD clang version 20.0.0git")
    add_llvm(root / "llvm/bin", "20")
    script(machine / "bin/clang++-22", "clang version 22.1.8")
    add_llvm(machine / "bin")
    names = [f"{root}/bin/hipcc", f"{machine}/bin/hipcc", f"{root}/llvm/bin/amdclang++", f"{machine}/bin/clang++-22"]
    found = toolchain.probe_all()
    assert [verdict.name for verdict in found] == names
    assert all(isinstance(verdict, Accepted) for verdict in found), found
    chosen = toolchain.select("gfx950")
    assert chosen.roots()["HIPCXX"] == f"{root}/bin/hipcc"
    assert chosen.roots()["ROCM"] == str(root)


def test_the_setting_comes_before_everything_and_is_not_replaced_when_it_fails(machine: Path) -> None:
    script(machine / "bin/hipcc", "HIP version: 7.0\nAMD clang version 20.0.0git")
    named = script(machine / "own/hipcc", "HIP version: 7.0\nAMD clang version 20.0.0git")
    with settings.scope(HIPCC=named):
        assert toolchain.select("gfx950").roots()["HIPCXX"] == str(named)
        named.unlink()
        toolchain._selected.clear()
        with pytest.raises(ToolchainError, match=f"HIPFORGE_HIPCC={named}: there is no such file"):
            toolchain.select("gfx950")
        others = [verdict.name for verdict in toolchain.probe_all()[1:]]
        assert others == [f"{machine}/bin/hipcc", "amdclang++ or clang++"], "doctor still shows the others"


def test_the_setting_may_be_a_name_on_path_but_not_a_directory(machine: Path) -> None:
    there = script(machine / "bin/hipcc", "HIP version: 7.0\nAMD clang version 20.0.0git")
    with settings.scope(HIPCC=Path("hipcc")):
        assert toolchain.select("gfx950").roots()["HIPCXX"] == str(there)
    with settings.scope(HIPCC=machine), pytest.raises(ToolchainError, match="it is a directory; name the compiler"):
        toolchain.select("gfx950")


@pytest.mark.parametrize(
    ("version", "parts", "plan", "say", "reason"),
    [
        ("clang version 14.0.6", "22", 0, "", "it is clang 14; clang 20 or newer is needed"),
        ("gcc (Debian) 12", "22", 0, "", "its --version does not report a clang version: 'gcc (Debian) 12'"),
        ("clang version 22.1.8", None, 0, "", "ld.lld is missing: install lld-22"),
        ("clang version 22.1.8", "21", 0, "", "ld.lld is not of version 22: ['LLD 21.1.8"),
        (
            "clang version 22.1.8",
            "22",
            1,
            "clang: error: unsupported HIP gpu architecture: gfx950",
            "it cannot build for gfx950: clang: error: unsupported HIP gpu architecture: gfx950",
        ),
    ],
)
def test_a_refused_compiler_has_a_reason(
    machine: Path, monkeypatch: pytest.MonkeyPatch, version: str, parts: str | None, plan: int, say: str, reason: str
) -> None:
    monkeypatch.setenv("ROCM_PATH", str(rocm(machine / "rocm")))
    script(machine / "bin/clang++", version, plan=plan, say=say)
    if parts is not None:
        add_llvm(machine / "bin", parts)
    _, verdict = toolchain.probe_all()
    assert isinstance(verdict, Refused)
    assert reason in verdict.reason
    with pytest.raises(ToolchainError) as raised:
        toolchain.select("gfx950")
    assert reason in str(raised.value)
    assert "hipforge doctor" in str(raised.value)


def test_a_missing_linker_names_its_package(machine: Path) -> None:
    script(machine / "bin/clang++", "clang version 22.1.8")
    add_llvm(machine / "bin")
    (machine / "bin/ld.lld").unlink()
    _, verdict = toolchain.probe_all()
    assert isinstance(verdict, Refused)
    assert "ld.lld is missing: install lld-22" in verdict.reason


def test_without_rocm_and_triton_the_reason_says_what_to_install(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(machine / "bin/clang++", "clang version 22.1.8")
    add_llvm(machine / "bin")
    monkeypatch.setattr(rocm_tree, "triton_files", lambda: None)
    _, verdict = toolchain.probe_all()
    assert isinstance(verdict, Refused)
    assert "pip install triton" in verdict.reason


def test_what_is_not_there_is_a_refusal_too_and_nothing_at_all_a_typed_error(machine: Path) -> None:
    found = toolchain.probe_all()
    assert [verdict.name for verdict in found] == ["hipcc", "amdclang++ or clang++"]
    assert all(isinstance(verdict, Refused) and verdict.path is None for verdict in found)
    with pytest.raises(ToolchainError, match="not found in ROCM_PATH, HIP_PATH, /opt/rocm or PATH"):
        toolchain.select("gfx950")


def test_the_first_that_can_build_the_asked_arch_wins(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_PATH", str(rocm(machine / "rocm")))
    old = script(machine / "bin/hipcc", "HIP version: 6.3\nAMD clang version 19.0.0git")
    text = old.read_text()
    old.write_text(text.replace('case "$*" in', 'case "$*" in *gfx950*) echo "error: no gfx950"; exit 1;;', 1))
    script(machine / "bin/clang++", "clang version 22.1.8")
    add_llvm(machine / "bin")
    assert toolchain.select("gfx942").roots()["HIPCXX"] == str(old)
    assert toolchain.select("gfx950").roots()["HIPCXX"] == str(machine / "bin/clang++")


def test_answers_are_remembered_until_the_compiler_changes(machine: Path) -> None:
    compiler = script(machine / "bin/hipcc", "HIP version: 7.0\nAMD clang version 20.0.0git")

    def select_as_a_new_process() -> int:
        toolchain._selected.clear()
        tools._probe_store.cache_clear()
        toolchain.select("gfx950")
        return len(Path(f"{compiler}.calls").read_text().splitlines())

    first = select_as_a_new_process()
    assert first == 2
    assert select_as_a_new_process() == first
    script(compiler, "HIP version: 7.1\nAMD clang version 21.0.0git")
    assert select_as_a_new_process() == first + 2


def test_a_refusal_is_looked_at_again_when_the_rocm_tree_changes(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = rocm(machine / "rocm")
    monkeypatch.setenv("ROCM_PATH", str(root))
    compiler = script(root / "bin/hipcc", "HIP version: 7.0\nAMD clang version 20.0.0git")
    text = compiler.read_text()
    library = root / "amdgcn/bitcode/oclc_isa_version_950.bc"
    compiler.write_text(text.replace('case "$*" in', f'case "$*" in *-###*) test -f {library}; exit $?;;', 1))
    assert isinstance(toolchain.probe_all()[0], Refused)
    library.write_text("")
    assert isinstance(toolchain.probe_all()[0], Accepted)


@pytest.mark.parametrize("old", [True, False])
def test_headers_that_need_the_wave_size_get_it(tmp_path: Path, old: bool) -> None:
    """Those in triton 3.5 and 3.6 use a macro that clang 22 does not define."""
    bundled = tmp_path / "triton/backends/amd"
    (bundled / "include/hip").mkdir(parents=True)
    (bundled / "lib").mkdir()
    size = "__AMDGCN_WAVEFRONT_SIZE" if old else "64"
    (bundled / "include/hip/hip_runtime.h").write_text(f"constexpr int wave_size = {size};\n")
    (bundled / "include/hip/hip_version.h").write_text("#define HIP_VERSION_MAJOR 6\n")
    tree = rocm_tree.assemble(bundled, tmp_path, Path("rocm-tree/0123456789abcdef"), CLANG)
    program = "#include <hip/hip_runtime.h>\nstatic_assert(wave_size == 64);\n"
    command = [str(CLANG), "-x", "c++", "-fsyntax-only", f"-I{tree / 'include'}", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tree / "include/hip/hip_runtime.h").is_symlink() == (not old)


def test_the_description_of_a_hipcc_names_the_clang_inside(machine: Path) -> None:
    script(machine / "bin/hipcc", "HIP version: 7.2.53211\nAMD clang version 20.0.0git")
    assert toolchain.select("gfx950").description == "hipcc: HIP version: 7.2.53211, AMD clang version 20.0.0git"


def test_device_libraries_are_those_of_the_drivers_own_plan(machine: Path) -> None:
    """Debian keeps them among clang's own files, below no ROCm tree."""
    compiler = script(machine / "bin/hipcc", "HIP version: 7.2.53211\nDebian clang version 22.1.8")
    bitcode = machine / "llvm/lib/clang/22/amdgcn/bitcode"
    bitcode.mkdir(parents=True)
    for name in ("ocml", "oclc_isa_version_950", "oclc_isa_version_942"):
        (bitcode / f"{name}.bc").write_text(name)
    plan = f'echo \' "-mlink-builtin-bitcode" "{bitcode}/ocml.bc" "-o"\''
    compiler.write_text(compiler.read_text().replace('case "$*" in', f'case "$*" in *-###*) {plan}; exit 0;;', 1))
    ingredients = toolchain.select("gfx950").ingredients("gfx950")
    names = {name for name in ingredients if name.startswith("device library:")}
    assert names == {"device library:ocml.bc", "device library:oclc_isa_version_950.bc"}


def test_a_compiler_in_two_versions_named_alike_is_looked_at_once_per_file(machine: Path) -> None:
    script(machine / "bin/clang++-22", "clang version 22.1.8")
    add_llvm(machine / "bin")
    (machine / "bin/clang++").symlink_to(machine / "bin/clang++-22")
    assert [Path(verdict.name).name for verdict in toolchain.probe_all()] == ["hipcc", "clang++", "clang++-22"]


def test_hipcc_amdclang_and_clang_get_the_same_commands(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except the flags that name the ROCm tree: a hipcc finds its own."""
    root = rocm(machine / "rocm")
    monkeypatch.setenv("ROCM_PATH", str(root))
    found = {}
    for name in ("hipcc", "amdclang++", "clang++"):
        path = script(machine / "bin" / name, "AMD clang version 20.0.0git")
        add_llvm(machine / "bin", "20")
        with settings.scope(HIPCC=path):
            chosen = toolchain.select("gfx950")
        unit = toolchain.Unit(0, "${CSRC}/x.cu", True, ("-DB", "-DA"))
        compiled = chosen.compile(unit, "m", "gfx950")
        steps = [*compiled.steps, *chosen.link(compiled.objects, ["-lm"], "module.so").steps]
        named = {"--rocm-path=${ROCM}", "-isystem", "${ROCM}/include"}
        found[name] = [[word for word in step.argv if word not in named] for step in steps]
        assert ("--rocm-path=${ROCM}" in compiled.steps[0].argv) == (name != "hipcc")
    assert found["hipcc"] == found["amdclang++"] == found["clang++"]
    device = found["hipcc"][0]
    assert device.index("-O3") < device.index("-DB") < device.index("-DA"), "own flags come last and in order"


def test_the_clang_behind_a_hipcc_is_part_of_its_identity(machine: Path) -> None:
    llvm = machine / "rocm/llvm/bin"
    script(llvm / "clang++", "AMD clang version 20.0.0git")
    compiler = script(machine / "bin/hipcc", "HIP version: 7.0\nAMD clang version 20.0.0git")
    compiler.write_text(compiler.read_text().replace(f"InstalledDir: {machine}/bin", f"InstalledDir: {llvm}"))

    def ingredients() -> dict[str, str]:
        toolchain._selected.clear()
        return toolchain.select("gfx950").ingredients("gfx950")

    before = ingredients()
    assert "compiler:clang:executable" in before
    script(llvm / "clang++", "AMD clang version 20.0.0git", say="the same version, other bytes")
    after = ingredients()
    assert {name for name in before if before[name] != after.get(name)} == {"compiler:clang:executable"}


# --- the real clang -------------------------------------------------------------------------------------------------

ORDINARY = """\
#include <hip/hip_runtime.h>
__global__ void scale(float* p) { p[threadIdx.x] = expf(p[threadIdx.x]) + __shfl_xor(p[threadIdx.x], 1); }
extern "C" void launch(float* p, hipStream_t s) { scale<<<1, 64, 0, s>>>(p); }
"""
# Of a module that is bare, because HIP's own headers take seconds.
KERNEL = """\
#include "hipforge/amd/hip.h"
#if defined(__gfx950__)
#include "device_only.h"
#endif
#ifndef __HIP_DEVICE_COMPILE__
#include "host_only.h"
#endif
__global__ void scale(float* p) { p[threadIdx.x] = min(p[threadIdx.x], 1.0f); }
#ifdef VALUE
extern "C" int value() { return VALUE; }
#endif
extern "C" void launch(float* p, hipStream_t s) { scale<<<1, 64, 0, s>>>(p); }
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    """The installed clang, with the ROCm tree made from triton, in its own cache."""
    box = StandIn(tmp_path_factory.mktemp("real"))
    box.write("sample.cu", KERNEL)
    box.write("device_only.h", "#define WAVE 64\n")
    box.write("host_only.h", "#define VALUE 11\n")
    box.write("ordinary.cu", ORDINARY)
    with settings.scope(CACHE_DIR=box.cache, HIPCC=CLANG):
        yield box
    toolchain._selected.clear()


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_the_tree_made_from_triton_compiles_ordinary_hip_whatever_the_systems_headers_have(
    real: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """A distribution's /usr/include/hip does not shadow it, although clang looks there before the tree it was given."""
    (tmp_path / "hip").mkdir()
    (tmp_path / "hip/hip_runtime.h").write_text("#error the wrong HIP\n")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(tmp_path))
    real.module("ordinary", srcs=["ordinary.cu"])
    built = real.build("ordinary", arch=arch)
    (code,) = read_code_objects(built.entry.library)
    assert code.arch == arch
    assert set(built.entry.manifest.kernels) == {"_Z5scalePf"}
    assert built.entry.manifest.gfx_targets == [arch]
    listing = ["nm", "-D", "--undefined-only", built.entry.library]
    symbols = subprocess.run(listing, capture_output=True, text=True).stdout
    assert "hipLaunchKernel" in symbols, "HIP stays undefined: it is bound at load time"
    needed = subprocess.run(["readelf", "-d", built.entry.library], capture_output=True, text=True).stdout
    assert "amdhip64" not in needed
    names = {path for path, _ in built.entry.manifest.dependencies}
    assert any(name.startswith("${ROCM}/include/hip/") for name in names)
    assert any(name.startswith("${LLVM}/lib/clang/") for name in names)
    assert not any(".venv" in name or "rocm-tree" in name for name in names), "moved places have placeholders"


def test_headers_of_both_passes_are_in_the_closure(real: StandIn) -> None:
    real.module(bare=True)
    names = {path for path, _ in real.build().entry.manifest.dependencies}
    assert {"${MODULE_DIR}/device_only.h", "${MODULE_DIR}/host_only.h"} <= names


def test_editing_a_device_only_header_rebuilds(real: StandIn) -> None:
    real.module(bare=True)
    real.build()
    real.write("device_only.h", "#define WAVE 63\n")
    assert real.build().built
    real.write("device_only.h", "#define WAVE 64\n")
    assert not real.build().built


def test_two_translation_units_keep_their_own_device_code(real: StandIn) -> None:
    second = KERNEL.replace("scale", "shift").replace("value()", "value2()").replace("launch", "launch2")
    real.write("second.cu", second)
    real.module("two", srcs=["sample.cu", "second.cu"], bare=True)
    entry = real.build("two").entry
    assert set(entry.manifest.kernels) == {"_Z5scalePf", "_Z5shiftPf"}
    assert len(read_code_objects(entry.library)) == 2


def test_a_library_holds_what_clangs_bundler_writes_and_exports_nothing_for_it(real: StandIn, tmp_path: Path) -> None:
    real.module(bare=True, extra_ldflags=["-Wl,--gc-sections"])
    library = real.build().entry.library
    (code,) = read_code_objects(library)
    (tmp_path / "code").write_bytes(code.image)
    subprocess.run(
        [
            Path(toolchain.select("gfx950").roots()["LLVM"]) / "bin/clang-offload-bundler", "--type=o",
            "--targets=host-x86_64-unknown-linux-gnu-,hipv4-amdgcn-amd-amdhsa--gfx950", "--bundle-align=4096",
            "--input=/dev/null", "--input=code", "--output=bundle",
        ],
        cwd=tmp_path, check=True,
    )  # fmt: skip
    assert fatbin(library.read_bytes()) == (tmp_path / "bundle").read_bytes()
    assert "value" in (names := _exported(library)) and "_binary_" not in names


def _exported(library: Path) -> str:
    return subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout


def _readelf(library: Path, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, library], capture_output=True, text=True, check=True).stdout


def test_device_code_is_aligned_as_the_runtime_wants_it_and_read_only_once_loaded(real: StandIn) -> None:
    real.module(bare=True)
    library = real.build().entry.library
    place = re.search(r" \.hip_fatbin +PROGBITS +(\w+) \w+ (\w+) .* (\d+)$", _readelf(library, "-S"), re.MULTILINE)
    protected = re.search(r"GNU_RELRO +\w+ 0x(\w+) \w+ \w+ 0x(\w+) R ", _readelf(library, "-l"))
    assert place and protected
    start, size, alignment = int(place[1], 16), int(place[2], 16), int(place[3])
    assert start % 4096 == 0 and alignment == 4096
    first, last = start, start + size
    assert int(protected[1], 16) <= first and last <= int(protected[1], 16) + int(protected[2], 16)


@pytest.mark.parametrize("place", ["flags_extra_hip", "CCC_OVERRIDE_OPTIONS"])
def test_a_flag_that_shapes_the_bundle_still_does(real: StandIn, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    plain = real.build(real.module(bare=True)).entry
    if place == "flags_extra_hip":
        real.module("compressed", bare=True, flags_extra_hip=["--offload-compress"])
    else:
        real.module("compressed", bare=True)
        monkeypatch.setenv(place, "+--offload-compress")
    entry = real.build("compressed").entry
    assert fatbin(entry.library.read_bytes()).startswith(COMPRESSED_MAGIC)
    assert entry.manifest.kernels == plain.manifest.kernels
    assert "_binary_" not in _exported(entry.library)


def test_a_target_with_features_is_named_so_in_the_bundle(real: StandIn) -> None:
    real.module("xnack", bare=True, flags_extra_hip=["--no-offload-arch=gfx950", "--offload-arch=gfx950:xnack+"])
    (code,) = read_code_objects(real.build("xnack").entry.library)
    assert code.target == "hipv4-amdgcn-amd-amdhsa--gfx950:xnack+"


@pytest.mark.parametrize("place", ["extra_ldflags", "HIPCC_LINK_FLAGS_APPEND", "CCC_OVERRIDE_OPTIONS"])
def test_another_linker_is_refused_by_name_where_device_code_is_linked(
    real: StandIn, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    real.write("host.cpp", 'extern "C" int one() { return 1; }\n')

    def linked_with(flag: str, source: str = "sample.cu") -> bool:
        own = [] if place != "extra_ldflags" else ["-Wl,-s", flag]
        real.module("linked", bare=True, srcs=[source], extra_ldflags=own)
        if not own:
            monkeypatch.setenv(place, f"+-Wl,-s +{flag}" if place.startswith("CCC") else f"-Wl,-s {flag}")
        return bool(real.spec("linked"))

    assert linked_with("-fuse-ld=lld")
    assert linked_with("-fuse-ld=bfd", "host.cpp")
    with pytest.raises(ToolchainError, match=f"-fuse-ld=bfd of {place} names another linker than lld"):
        linked_with("-fuse-ld=bfd")
    if not place.startswith("CCC"):  # the driver itself looks for that file
        assert linked_with("--ld-path=/llvm/ld.lld-22")
        with pytest.raises(ToolchainError, match=f"--ld-path=/lld/mold of {place} names another linker than lld"):
            linked_with("--ld-path=/lld/mold")


def test_the_symbol_of_a_units_device_code_is_the_one_clang_refers_to(real: StandIn, tmp_path: Path) -> None:
    tree = toolchain.select("gfx950").roots()["ROCM"]
    flags = ["-x", "hip", "--offload-arch=gfx950", f"--rocm-path={tree}", "--cuda-host-only", "-cuid=module_7"]
    flags += [*WITHOUT_HIP, "-c", str(real.sources / "sample.cu"), "-o", str(tmp_path / "x.o")]
    subprocess.run([CLANG, *flags], check=True)
    symbols = subprocess.run(["nm", str(tmp_path / "x.o")], capture_output=True, text=True).stdout
    assert f"U {hip_clang.fatbin_symbol('module_7')}\n" in symbols


def test_the_driver_alone_would_miss_a_device_only_header(real: StandIn, tmp_path: Path) -> None:
    """Why each pass has its own depfile: if this ever fails, one command per source would do."""
    real.module(bare=True)
    tree = toolchain.select("gfx950").roots()["ROCM"]
    flags = ["-x", "hip", "--offload-arch=gfx950", f"--rocm-path={tree}", "-fPIC", "-MD", *WITHOUT_HIP]
    subprocess.run(
        [CLANG, *flags, "-MF", "x.d", "-c", str(real.sources / "sample.cu"), "-o", "x.o"], cwd=tmp_path, check=True
    )
    text = (tmp_path / "x.d").read_text()
    assert "host_only.h" in text
    assert "device_only.h" not in text


@pytest.mark.parametrize("name", ["hipcc", "amdclang++"])
def test_a_wrapper_that_records_and_calls_the_real_clang_builds_the_same_module(
    real: StandIn, tmp_path: Path, name: str
) -> None:
    real.module(flags_extra_hip=["-DFIRST=1", "-DSECOND=2"], bare=True)
    direct = real.build().entry
    # A hipcc looks for ROCm by itself (this one knows where the tree is) and links for HIP whenever there is no -c.
    tree = toolchain.select("gfx950").roots()["ROCM"]
    as_hipcc = f'extra=--rocm-path={tree}\ncase " $* " in *" -c "*) ;; *) extra="$extra --hip-link";; esac\n'
    wrapper = tmp_path / name
    record = f'printf "%s\\n" "$@" > {tmp_path}/call.$$\n'  # a file each: both passes run at once
    wrapper.write_text(f'#!/bin/sh\n{record}{as_hipcc if name == "hipcc" else "extra="}\nexec {CLANG} $extra "$@"\n')
    wrapper.chmod(0o755)
    with settings.scope(HIPCC=wrapper):
        built = real.build()
    assert built.built, "another compiler is another key"
    assert built.entry.manifest.kernels == direct.manifest.kernels
    calls = [path.read_text().splitlines() for path in tmp_path.glob("call.*")]
    compiles = [call for call in calls if "-cuid=sample_0" in call]
    assert len(compiles) == 2
    for call in compiles:
        assert call.index("-DFIRST=1") + 1 == call.index("-DSECOND=2")


def test_a_syntax_error_from_clang_is_the_last_line(real: StandIn) -> None:
    real.write("broken.cu", KERNEL.replace("1.0f)", "1.0f"))
    real.module("broken", srcs=["broken.cu"], bare=True)
    with pytest.raises(BuildError) as raised:
        real.build("broken")
    lines = str(raised.value).splitlines()
    assert lines[-1].startswith(f"{real.sources}/broken.cu:8:")
    assert "error: expected ')'" in lines[-1]
    assert CLANG.name in lines[0]


def test_no_step_of_assembling_the_tree_imports_triton(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom hipforge.jit import toolchain\n"
        "toolchain.select('gfx950')\nassert 'triton' not in sys.modules and 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "HIPFORGE_CACHE_DIR": str(tmp_path), "HIPFORGE_HIPCC": str(CLANG)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    trees = list((tmp_path / "rocm-tree").iterdir())
    assert len(trees) == 1
    bitcode = {path.name for path in (trees[0] / "amdgcn/bitcode").glob("*.bc")}
    assert {"ocml.bc", "ockl.bc", "opencl.bc", "oclc_isa_version_950.bc", "oclc_isa_version_942.bc"} <= bitcode
    assert "HIP_VERSION_MAJOR=" in (trees[0] / "share/hip/version").read_text()
    assert names_of(trees[0], ("ocml", "ockl"), "--undefined-only") <= names_of(
        trees[0], ("oclc_*_on", "oclc_isa_version_950", "oclc_abi_version_600"), "--defined-only"
    )


def names_of(tree: Path, libraries: Sequence[str], which: str) -> set[str]:
    """Return the control constants that device libraries of a tree read or define."""
    files = [str(path) for name in libraries for path in (tree / "amdgcn/bitcode").glob(f"{name}.bc")]
    command = [llvm_tool("llvm-nm"), which, "--format=just-symbols", *files]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name for name in shown.split() if name.startswith("__oclc_")}
    assert found
    return found


def test_the_build_id_of_an_elf_file_is_what_readelf_says() -> None:
    library = next(path for path in map(Path, ("/lib64/ld-linux-x86-64.so.2", sys.executable)) if path.exists())
    shown = subprocess.run(["readelf", "-n", str(library)], capture_output=True, text=True).stdout
    build_id = tools.build_id(library)
    assert build_id is not None
    assert f"Build ID: {build_id}" in shown
    assert tools.build_id(Path(__file__)) is None


def test_places_with_spaces_and_dollars_work_throughout(tmp_path: Path) -> None:
    box = StandIn(tmp_path / "a $b 'c' #d")
    box.folder.mkdir()
    box.write("sample.cu", KERNEL)
    box.write("device_only.h", "#define WAVE 64\n")
    box.write("host_only.h", "#define VALUE 11\n")
    box.module(extra_include=["an include"], bare=True)
    with settings.scope(CACHE_DIR=box.cache, HIPCC=CLANG):
        entry = box.build().entry
        assert not box.build().built
        box.write("device_only.h", "#define WAVE 32\n")
        assert box.build().built
    assert "${MODULE_DIR}/device_only.h" in {path for path, _ in entry.manifest.dependencies}
    toolchain._selected.clear()
