"""Host-only libraries: the same cache and promises as HIP modules, without a GPU compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.jit_stand_in import called

from hipforge import settings
from hipforge.errors import BuildError, MissingModuleError, ToolchainError
from hipforge.jit import host_cpu, host_library, tools
from hipforge.jit.cache import cache_dir, prebuilt


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Path]:
    text = '#include "a.h"\nextern "C" int twice(int);\nextern "C" int f() { return twice(N); }\n'
    (tmp_path / "a.cpp").write_text(text)
    (tmp_path / "b.c").write_text("int twice(int x) { return 2 * x; }\n")
    (tmp_path / "a.h").write_text("#define N 21\n")
    with settings.scope(CACHE_DIR=tmp_path / "cache"):
        yield tmp_path
    host_library._entry.cache_clear()


def build(box: Path, **flags: Any) -> Path:
    host_library._entry.cache_clear()
    cache_dir._store.cache_clear()
    return host_library.build("sample", sources=[box / "a.cpp", box / "b.c"], **flags)


def value(library: Path) -> int:
    return called(library, "f")


def test_c_and_cpp_sources_become_one_library_found_again_by_content(box: Path) -> None:
    first = build(box)
    assert value(first) == 42
    assert build(box) == first
    (box / "a.h").write_text("#define N 4\n")
    second = build(box)
    assert second != first
    assert value(second) == 8
    (box / "a.h").write_text("#define N 21\n")
    assert build(box) == first


def test_flags_of_one_source_reach_it_alone_and_come_last(box: Path) -> None:
    (box / "a.cpp").write_text('extern "C" int g();\nextern "C" int f() { return WIDTH + g(); }\n')
    (box / "b.c").write_text("int g(void) { return WIDTH; }\n")
    flags = {"cflags": ["-DWIDTH=1"]}
    first = build(box, **flags, source_cflags={"b.c": ["-UWIDTH", "-DWIDTH=40"]})
    assert value(first) == 41
    assert build(box, **flags, source_cflags={"b.c": ["-UWIDTH", "-DWIDTH=40"]}) == first
    assert value(build(box, **flags, source_cflags={"a.cpp": ["-UWIDTH", "-DWIDTH=40"]})) == 41
    assert value(build(box, **flags, source_cflags={"b.c": ["-UWIDTH", "-DWIDTH=5"]})) == 6


def test_a_header_named_by_a_relative_path_is_in_the_key_too(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ccache passes them: its base_dir makes the compiler's arguments relative."""
    compiler = box / "relative-g++"
    compiler.write_text(
        "#!/bin/sh\nfor word; do\n  shift\n"
        f'  case $word in {box}/*.cpp) word=$(realpath --relative-to="$PWD" "$word");; esac\n'
        '  set -- "$@" "$word"\ndone\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    first = build(box)
    (box / "a.h").write_text("#define N 4\n")
    assert build(box) != first
    (box / "a.h").write_text("#define N 21\n")
    assert build(box) == first


def test_flags_reach_compiler_and_linker_in_order(box: Path) -> None:
    (box / "a.cpp").write_text('extern "C" int f() { return X; }\n')
    library = build(box, cflags=["-DX=1", "-UX", "-DX=7"], ldflags=["-Wl,-soname,libsample.so", "-lm"])
    assert value(library) == 7
    assert b"libsample.so\0" in library.read_bytes()


def test_a_missing_source_and_an_error_in_one_are_build_errors(box: Path) -> None:
    (box / "b.c").write_text("int twice(int x) { return y; }\n")
    with pytest.raises(BuildError, match=r"b\.c:1:.*error: .y. undeclared"):
        build(box)
    (box / "b.c").unlink()
    with pytest.raises(BuildError, match=r"sample: there is no source .*b\.c"):
        build(box)


def test_no_compiler_says_what_was_looked_for(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler: looked for CXX=no-such-compiler; install g\+\+"):
        build(box)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(box))
    with pytest.raises(ToolchainError, match=r"looked for .* on PATH"):
        build(box)


def test_the_named_compiler_is_used(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = box / "my-g++"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {box}/calls\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    assert value(build(box)) == 42
    calls = (box / "calls").read_text().splitlines()
    assert sum("-c " in call for call in calls) == 1
    assert sum("-shared" in call for call in calls) == 1


def test_a_required_file_is_only_asked_for_when_building(box: Path) -> None:
    sources = [box / "a.cpp", box / "b.c"]
    needed = {box / "needed.h": "needed.h is missing: install it"}
    with pytest.raises(ToolchainError, match=r"needed\.h is missing: install it"):
        host_library.build("sample", sources=sources, required=needed)
    build(box)
    assert host_library.build("sample", sources=sources, required=needed).exists()


def test_disabled_jit_is_a_missing_module_error_until_it_is_there(box: Path) -> None:
    with settings.scope(DISABLE_JIT=True), pytest.raises(MissingModuleError, match="HIPFORGE_DISABLE_JIT=1"):
        build(box)
    built = build(box)
    with settings.scope(DISABLE_JIT=True):
        assert build(box) == built


def test_a_named_cpu_level_replaces_native(box: Path) -> None:
    flags = ["-O2", "-march=native"]
    native = build(box, cflags=flags)
    with settings.scope(HOST_MARCH="x86-64-v2"):
        portable = build(box, cflags=flags)
        assert portable != native
    commands = (portable.parent / "build.log").read_text()
    assert "-march=x86-64-v2" in commands
    assert "-march=native" not in commands


def test_a_prebuilt_library_is_taken_without_a_compiler_if_this_cpu_can_run_it(
    box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["-march=native", f"-I{box}"]
    with settings.scope(HOST_MARCH="x86-64-v2"):
        host_library._entry.cache_clear()
        entry = host_library.entry("sample", sources=[box / "a.cpp", box / "b.c"], cflags=flags)
    prebuilt.export([entry], box / "prebuilt")
    monkeypatch.setenv("PATH", str(box / "nothing"))
    tools._probe_store.cache_clear()
    unused = box / "unused"
    with settings.scope(CACHE_DIR=unused, PREBUILT_DIR=(box / "prebuilt",)):
        library = build(box, cflags=flags)
        assert library.is_relative_to(box / "prebuilt")
        assert value(library) == 42
        assert not unused.exists(), "nothing is written"
        monkeypatch.setattr(prebuilt, "can_run", lambda cpu: False)
        with pytest.raises(ToolchainError):
            build(box, cflags=flags)
        monkeypatch.undo()
    (box / "a.h").write_text("#define N 22\n")
    with settings.scope(CACHE_DIR=unused, PREBUILT_DIR=(box / "prebuilt",)):
        assert not build(box, cflags=flags).is_relative_to(box / "prebuilt"), "its header changed"


def test_cpu_levels_are_compared_by_features(monkeypatch: pytest.MonkeyPatch) -> None:
    level_2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
    level_3 = f"{level_2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
    monkeypatch.setattr(host_cpu, "_fields", lambda: {"flags": level_3})
    assert host_cpu.can_run("x86-64")
    assert host_cpu.can_run("x86-64-v3")
    assert not host_cpu.can_run("x86-64-v4")
    assert not host_cpu.can_run("another machine's own text")
    assert host_cpu.can_run(host_cpu.native())
    monkeypatch.setattr(host_cpu, "_fields", lambda: {"flags": level_3.replace(" fma", "")})
    assert host_cpu.can_run("x86-64-v2")
    assert not host_cpu.can_run("x86-64-v3")
