"""Inputs of a build that no compiler reports, and places that a user may name by mistake."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from helpers.jit_stand_in import StandIn, library_value

from hipforge import settings
from hipforge.errors import ConfigError
from hipforge.jit.cache import cache_dir


def static_library(folder: Path, value: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "part.c").write_text(f"int part(void) {{ return {value}; }}\n")
    subprocess.run(["gcc", "-fPIC", "-c", "part.c", "-o", "part.o"], cwd=folder, check=True)
    (folder / "libpart.a").unlink(missing_ok=True)
    subprocess.run(["ar", "rc", "libpart.a", "part.o"], cwd=folder, check=True)
    return folder / "libpart.a"


@pytest.mark.parametrize("how", ["by path", "by name", "beside the module"])
def test_a_static_library_that_changes_is_linked_again(stand_in: StandIn, how: str) -> None:
    folder = stand_in.sources / "parts"
    library = static_library(folder, 4)
    flags = {
        "by path": [str(library)],
        "by name": [f"-L{folder}", "-lpart"],
        "beside the module": ["${MODULE_DIR}/parts/libpart.a"],
    }[how]
    stand_in.module(extra_ldflags=flags)
    stand_in.write("sample.cu", 'extern "C" int part(); extern "C" int value() { return part(); }\n')
    assert library_value(stand_in.build().entry) == 4
    assert not stand_in.build().built
    static_library(folder, 5)
    assert library_value(stand_in.build().entry) == 5


def test_an_embedded_file_that_changes_is_embedded_again(stand_in: StandIn) -> None:
    stand_in.write("table.bin", "A")
    stand_in.module(extra_include=["."])
    stand_in.write(
        "sample.cu",
        """
        asm(".section .rodata\\ntable: .incbin \\"table.bin\\"\\n.previous");
        extern "C" const char table;
        extern "C" int value() { char c; asm("movb table(%%rip), %0" : "=r"(c)); return c; }
        """,
    )
    assert library_value(stand_in.build().entry) == ord("A")
    assert not stand_in.build().built
    stand_in.write("table.bin", "B")
    assert library_value(stand_in.build().entry) == ord("B")


@pytest.mark.parametrize("where", ["beside the source", "earlier on the path", "beside another header"])
def test_a_new_header_that_shadows_a_known_one_is_compiled(stand_in: StandIn, where: str) -> None:
    stand_in.module(extra_include=["first", "second"])
    stand_in.write("first/empty.h", "")
    stand_in.write("second/deep/part.h", '#include "inner.h"\n')
    stand_in.write("second/inner.h", "#define VALUE 3\n")
    text = "<deep/part.h>" if where == "earlier on the path" else '"deep/part.h"'
    stand_in.write("sample.cu", f'#include {text}\nextern "C" int value() {{ return VALUE; }}\n')
    assert library_value(stand_in.build().entry) == 3
    assert not stand_in.build().built
    new = {
        "beside the source": "deep/part.h",
        "earlier on the path": "first/deep/part.h",
        "beside another header": "second/deep/inner.h",
    }[where]
    stand_in.write(new, "#define VALUE 8\n")
    assert library_value(stand_in.build().entry) == 8
    assert not stand_in.build().built


@pytest.mark.parametrize("form", ["<extra.h>", '"extra.h"', '"deep/extra.h"'])
def test_a_header_that_makes_a_has_include_true_is_compiled(stand_in: StandIn, form: str) -> None:
    stand_in.module(extra_include=["own"])
    stand_in.write("own/asks.h", f"#if __has_include({form})\n#include {form}\n#else\n#define VALUE 3\n#endif\n")
    stand_in.write("sample.cu", '#include "asks.h"\nextern "C" int value() { return VALUE; }\n')
    assert library_value(stand_in.build().entry) == 3
    assert not stand_in.build().built
    stand_in.write(f"own/{form[1:-1]}", "#define VALUE 6\n")
    assert library_value(stand_in.build().entry) == 6


@pytest.mark.parametrize("bad", ["-DX=1\nbuild x: run", "-DX=\t", "-I\x00"])
def test_a_flag_with_a_control_character_never_reaches_ninja(stand_in: StandIn, bad: str) -> None:
    with pytest.raises(ConfigError, match="no line breaks, tabs or other control characters"):
        stand_in.module(flags_extra_cc=[bad])


def test_a_relative_xdg_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/cache")
    with settings.scope(CACHE_DIR=None):
        assert cache_dir.configured() == (tmp_path / ".cache/hipforge", False)


def test_the_home_of_nobody_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFORGE_CACHE_DIR", "~nosuchuserhere/cache")
    with pytest.raises(ConfigError, match="HIPFORGE_CACHE_DIR"):
        settings.CACHE_DIR.get()


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_squatter_on_the_private_directorys_name_is_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(cache_dir.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cache_dir.tempfile, "tempdir", str(tmp_path))
    cache_dir._one_time_dir.cache_clear()
    name = tmp_path / f"hipforge-{cache_dir.os.geteuid()}"
    if kind == "file":
        name.write_text("squatter")
    else:
        name.symlink_to(tmp_path / "nowhere")
    chosen = cache_dir.private_dir()
    cache_dir._one_time_dir.cache_clear()
    assert chosen != name and chosen.is_dir() and chosen.stat().st_mode & 0o077 == 0
