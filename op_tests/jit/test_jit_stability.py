"""A file that changes while the compiler reads it, file systems with coarse clocks, failures that are repaired."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.jit_stand_in import StandIn, library_value

from hipforge.errors import BuildError
from hipforge.jit import digest, fleet, obtain
from hipforge.jit.cache import failures, stability
from hipforge.jit.diagnostics import StepFailure
from hipforge.jit.digest import DigestStore, text_digest

EDIT_ONCE = """
if [ ! -f "$here/edited" ]; then
  case "$line" in *"|-c|"*)
    case "$line" in *cuda-device-only*) ;; *) trap 'printf "{text}" > {path}; : > "$here/edited"' EXIT;; esac;;
  esac
fi
"""


def edit_during_the_build(box: StandIn, path: Path, text: str) -> None:
    """Have the compiler's host pass, once, end with an edit of ``path``: after it was read, before it is digested."""
    box.install(before=EDIT_ONCE.format(path=path, text=text))


# ---- edits during a build --------------------------------------------------------------------------------------------


def test_a_header_edited_during_the_build_is_compiled_again(stand_in: StandIn) -> None:
    edit_during_the_build(stand_in, stand_in.sources / "value.h", "#define VALUE 5\\n")
    entry = stand_in.build().entry
    assert (stand_in.hipcc.parent / "edited").exists()
    assert library_value(entry) == 5
    assert not stand_in.build().built
    assert len(stand_in.compiles()) == 2


def test_a_source_edited_during_the_build_is_asked_for_again(stand_in: StandIn) -> None:
    edit_during_the_build(stand_in, stand_in.sources / "sample.cu", 'extern \\"C\\" int value() { return 6; }\\n')
    assert library_value(obtain.module(stand_in.request()).entry) == 6
    stand_in.write("sample.cu", '#include "value.h"\nextern "C" int value() { return VALUE; }\n')
    again = obtain.module(stand_in.request())
    assert library_value(again.entry) == 3, "the first text's key must not lead to the second's code"


def test_the_fleet_builds_again_what_was_edited_meanwhile(stand_in: StandIn) -> None:
    edit_during_the_build(stand_in, stand_in.sources / "sample.cu", 'extern \\"C\\" int value() { return 6; }\\n')
    (outcome,) = fleet.build_many(fleet.requests(["sample"], ["gfx950"]), 1, lambda _: None)
    assert outcome.status == "built" and outcome.entry is not None
    assert library_value(outcome.entry) == 6


def test_a_failure_is_not_remembered_for_a_header_that_was_mended_during_the_build(stand_in: StandIn) -> None:
    stand_in.write("value.h", "#define VALUE broken\n")
    edit_during_the_build(stand_in, stand_in.sources / "value.h", "#define VALUE 7\\n")
    assert library_value(stand_in.build().entry) == 7


def test_a_header_that_never_rests_is_an_error_that_names_it(stand_in: StandIn) -> None:
    header = stand_in.sources / "value.h"
    stand_in.install(before=f'date +"#define VALUE 1%N" > {header}')
    with pytest.raises(BuildError, match=r"value\.h changed while it was being built; build again once nobody edits"):
        stand_in.build()
    assert not list(stand_in.cache.glob("gfx950/*"))


def test_a_header_written_just_before_the_build_costs_no_second_one(stand_in: StandIn) -> None:
    for value in range(5):
        stand_in.write("value.h", f"#define VALUE {value}\n")
        stand_in.build()
    assert len(stand_in.compiles()) == 5


def test_the_start_of_a_build_is_after_every_earlier_change_and_not_after_any_later_one(tmp_path: Path) -> None:
    for number in range(20):
        earlier, later = tmp_path / f"earlier{number}", tmp_path / f"later{number}"
        earlier.touch()
        began = stability.start()
        later.touch()
        assert earlier.stat().st_ctime_ns < began <= later.stat().st_ctime_ns


# ---- digests on file systems with whole-second timestamps ------------------------------------------------------------


class WholeSeconds:
    """``os.stat`` as a file system reports it that keeps no fractions of seconds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        stat = os.stat

        def rounded(path: object, **rest: object) -> object:
            found = stat(path, **rest)
            whole = {name: getattr(found, name) // 10**9 * 10**9 for name in ("st_mtime_ns", "st_ctime_ns")}
            return type("Stat", (), {"st_size": found.st_size, "st_ino": found.st_ino, **whole})()

        patch.setattr(digest.os, "stat", rounded)


def test_a_digest_taken_within_the_second_of_a_change_is_never_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WholeSeconds(monkeypatch)
    file, kept = tmp_path / "a.h", tmp_path / "digests.json"
    now = digest.time.time_ns()
    file.write_text("old")
    store = DigestStore(kept)
    assert store.of(str(file)) == text_digest("old")
    file.write_text("new")  # the same size, inode and second
    monkeypatch.setattr(digest.time, "time_ns", lambda: now + 10 * 10**9)  # it is saved much later
    store.save()
    assert DigestStore(kept).of(str(file)) == text_digest("new")
    assert store.of(str(file)) == text_digest("new"), "nor is it believed within the process"


# ---- failures that the user fixes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-iquote", "-idirafter", "-isystem", "-I"])
def test_a_header_that_appears_on_the_search_path_mends_the_failure(stand_in: StandIn, option: str) -> None:
    extra = stand_in.folder / "extra"
    extra.mkdir()
    stand_in.module(flags_extra_hip=[option, str(extra)])
    stand_in.write("sample.cu", '#include "late.h"\nextern "C" int value() { return LATE; }\n')
    for _ in range(2):
        with pytest.raises(BuildError, match=r"late\.h"):
            stand_in.build()
    assert len(stand_in.compiles()) == 1
    (extra / "late.h").write_text("#define LATE 4\n")
    assert library_value(stand_in.build().entry) == 4


@pytest.mark.parametrize("variable", ["CPATH", "CPLUS_INCLUDE_PATH"])
def test_a_header_that_appears_through_the_environment_mends_the_failure(
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    extra = stand_in.folder / "extra"
    extra.mkdir()
    monkeypatch.setenv(variable, str(extra))
    stand_in.write("sample.cu", '#include <late.h>\nextern "C" int value() { return LATE; }\n')
    with pytest.raises(BuildError, match=r"late\.h"):
        stand_in.build()
    (extra / "late.h").write_text("#define LATE 4\n")
    assert library_value(stand_in.build().entry) == 4


def test_a_library_that_the_linker_did_not_find_is_looked_for_again(stand_in: StandIn) -> None:
    stand_in.module(extra_ldflags=["-Wl,--no-as-needed", "-lhipforge_not_there"])
    with pytest.raises(BuildError, match="hipforge_not_there"):
        stand_in.build()
    assert failures.recall([stand_in.cache], stand_in.spec(), DigestStore(None)) is None


@pytest.mark.parametrize(
    "output",
    [
        "g++: internal compiler error: Segmentation fault signal terminated program cc1plus",
        "clang++: error: clang frontend command failed with exit code 139 (use -v to see invocation)\n"
        "PLEASE submit a bug report to https://github.com/llvm/llvm-project/issues/",
        "/usr/bin/ld: cannot find -lfoo: No such file or directory\ncollect2: error: ld returned 1 exit status",
        "ld.lld: error: unable to find library -lfoo",
    ],
)
def test_a_crashed_compiler_and_a_missing_library_are_not_remembered(output: str) -> None:
    assert not StepFailure("0", 1, "c++", output).deterministic
    assert StepFailure("0", 1, "c++", "a.cu:1:1: error: unknown type name 'x'").deterministic
