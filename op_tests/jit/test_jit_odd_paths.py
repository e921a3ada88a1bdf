"""A project in a folder with an unusual name either builds or says that the name cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.jit_stand_in import StandIn, library_value

from hipforge import settings
from hipforge.errors import HipforgeError
from hipforge.jit import toolchain

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
