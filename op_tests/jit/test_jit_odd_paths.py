"""A project in a folder with an unusual name either builds or says that the name cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.jit_stand_in import StandIn, library_value, real_clang

from hipforge import settings
from hipforge.errors import BuildError, HipforgeError
from hipforge.jit import hip_module, obtain, registry, toolchain
from hipforge.jit.cache import cache_dir

# No space: the stand-in compiler splits words there; real ones do not.
NAMES = {
    "dollar": b"a$b", "quote": b"a'b\"c", "hash": b"a#b", "colon": b"a:b", "backslash": b"a\\b",
    "tab": b"a\tb", "newline": b"a\nb", "not utf-8": b"a\xffb", "percent": b"a%41b", "braces": b"a{b}c",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["project", "cache"])
def test_it_builds_and_notices_edits_or_says_what_is_wrong(tmp_path: Path, name: str, what: str) -> None:
    odd = tmp_path / os.fsdecode(NAMES[name])
    odd.mkdir()
    made = StandIn(odd if what == "project" else tmp_path / "plain")
    made.folder.mkdir(exist_ok=True)
    plain = tmp_path / "compiler"
    plain.mkdir()
    compiler = StandIn(plain)
    compiler.install()
    made.write("value.h", "#define VALUE 3\n")
    made.write("sample.cu", '#include "value.h"\nextern "C" int value() { return VALUE; }\n')
    try:
        with settings.scope(CACHE_DIR=odd / "cache" if what == "cache" else tmp_path / "cache", HIPCC=compiler.hipcc):
            try:
                made.module()
                assert library_value(made.build().entry) == 3
            except HipforgeError as error:
                assert "cannot be used" in str(error), str(error)[:400]
                return
            made.write("value.h", "#define VALUE 4\n")
            assert library_value(made.build().entry) == 4, "an edit must be noticed"
            assert not made.build().built
    finally:
        toolchain._selected.clear()


def built_by_clang(project: Path) -> int:
    """Build the sample of a folder with this machine's clang and return its value."""
    toolchain._selected.clear()
    cache_dir._store.cache_clear()
    registry._registered.clear()
    registry.register(project / "sample.json")
    return library_value(obtain.module(hip_module.request(registry.module("sample"), None, "gfx950")).entry)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("odd", ["a\\b", "a\\b\\\\c d\\"])
def test_clang_in_a_folder_with_backslashes_notices_edits_and_poisons_no_plain_folder(
    tmp_path: Path, odd: str, beside: bool
) -> None:
    """clang reports ``a\\b/value.h`` as ``a/b/value.h``, which may be there too."""
    projects = [tmp_path / odd, tmp_path / "a/b", tmp_path / "plain"]
    for project in projects if beside else (projects[0], projects[2]):
        project.mkdir(parents=True)
        (project / "sample.json").write_text('{"sample": {"srcs": ["sample.cpp"]}}')
        (project / "value.h").write_text("#define VALUE 3\n")
        (project / "sample.cpp").write_text('#include "value.h"\nextern "C" int value() { return VALUE; }\n')
    with settings.scope(CACHE_DIR=tmp_path / "cache", HIPCC=real_clang()):
        assert [built_by_clang(projects[number]) for number in (0, 2)] == [3, 3]
        for number, value in ((0, 4), (2, 5), (0, 6)):
            (projects[number] / "value.h").write_text(f"#define VALUE {value}\n")
            assert built_by_clang(projects[number]) == value
    toolchain._selected.clear()


def test_a_reported_file_that_is_not_there_fails_the_build(stand_in: StandIn) -> None:
    stand_in.install(before="trap 'test -f \"$depfile\" && echo \"x.o: /nowhere/gone.h\" >> \"$depfile\"' EXIT")
    with pytest.raises(BuildError, match=r"/nowhere/gone\.h was read by a compiler, as it reports, and is not there"):
        stand_in.build()
    assert not list(stand_in.cache.glob("gfx950/*"))
