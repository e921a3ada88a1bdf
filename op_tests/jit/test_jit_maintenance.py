"""``cache why``, listing and sizes: what changed, by name, with old and new digest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.jit_stand_in import StandIn

from hipforge import settings
from hipforge.errors import BuildError, ConfigError
from hipforge.jit import maintenance, tools
from hipforge.jit.cache import store as cache
from hipforge.jit.digest import ABSENT, file_digest
from hipforge.jit.why import Change, Explanation, explain


def why(box: StandIn, variant: dict[str, int | str] | None = None) -> Explanation:
    box.spec(variant=variant)  # asks the toolchain again
    return explain("sample", variant, "gfx950")


def test_a_module_never_built_says_so(stand_in: StandIn) -> None:
    explanation = why(stand_in)
    assert explanation.status == "miss"
    assert explanation.note == "it was never built here"
    assert explanation.changes == ()


def test_a_hit_says_where_it_lies(stand_in: StandIn) -> None:
    entry = stand_in.build().entry
    explanation = why(stand_in)
    assert (explanation.status, explanation.path) == ("hit", entry.path)


def test_an_edited_source_is_named_once_with_both_digests(stand_in: StandIn) -> None:
    stand_in.build()
    path = stand_in.sources / "sample.cu"
    old = file_digest(path)
    path.write_text('extern "C" int value() { return 1; }\n')
    explanation = why(stand_in)
    assert explanation.status == "miss"
    assert explanation.changes == (Change("source:${MODULE_DIR}/sample.cu", old, file_digest(path)),)


def test_an_edited_and_a_vanished_header_are_named(stand_in: StandIn) -> None:
    stand_in.build()
    path = stand_in.sources / "value.h"
    old = file_digest(path)
    path.write_text("#define VALUE 5\n")
    assert why(stand_in).changes == (Change("file:${MODULE_DIR}/value.h", old, file_digest(path)),)
    path.unlink()
    assert why(stand_in).changes == (Change("file:${MODULE_DIR}/value.h", old, ABSENT),)


def test_another_compiler_is_named_with_its_versions(stand_in: StandIn) -> None:
    stand_in.build()
    stand_in.install(version="20.0.1git (roc-7.0.1)")
    tools._probe_store.cache_clear()
    changes = {change.name: change for change in why(stand_in).changes}
    assert set(changes) == {"compiler:version", "compiler:executable"}
    assert "- (roc-7.0.0)" in changes["compiler:version"].detail
    assert "+ (roc-7.0.1)" in changes["compiler:version"].detail


def test_a_changed_flag_shows_the_word(stand_in: StandIn) -> None:
    stand_in.build()
    stand_in.module(flags_extra_hip=["-DFAST"])
    changes = {change.name: change for change in why(stand_in).changes}
    assert set(changes) == {"flags", "steps"}
    assert "+ -DFAST" in changes["steps"].detail


def test_a_set_variable_has_no_old_value(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.build()
    monkeypatch.setenv("CPATH", "/tmp")
    assert why(stand_in).changes == (Change("environment:CPATH", None, "/tmp"),)


def test_a_damaged_entry_says_what_is_wrong_with_it(stand_in: StandIn) -> None:
    entry = stand_in.build().entry
    entry.library.write_bytes(b"x" * entry.manifest.library_bytes)
    assert why(stand_in).note == f"{entry.path}: module.so is not what was built"
    (entry.path / cache.MANIFEST).write_text("{")
    assert "its manifest cannot be read" in why(stand_in).note


def test_a_remembered_failure_shows_its_error(stand_in: StandIn) -> None:
    stand_in.write("sample.cu", "int f() { return missing; }\n")
    with pytest.raises(BuildError) as raised:
        stand_in.build()
    explanation = why(stand_in)
    assert explanation.status == "failed"
    assert explanation.note == str(raised.value)
    assert explanation.path is not None
    assert (explanation.path / "build.log").exists()


def test_exceeded_limits_are_a_failure_that_needs_no_build(stand_in: StandIn) -> None:
    stand_in.build()
    stand_in.module(resource_limits={"max_vgprs": 1})
    explanation = why(stand_in)
    assert explanation.status == "failed"
    assert "max_vgprs is 1" in explanation.note


def test_no_compiler_is_the_reason_given(stand_in: StandIn, tmp_path: Path) -> None:
    with settings.scope(HIPCC=tmp_path / "nowhere"):
        explanation = explain("sample", None, "gfx950")
    assert explanation.status == "miss"
    assert "there is no such file" in explanation.note


def test_why_starts_no_build(stand_in: StandIn) -> None:
    why(stand_in)
    assert not stand_in.compiles()


def test_listing_and_size_agree_with_the_disk(stand_in: StandIn) -> None:
    stand_in.module(variants={"M": [1, 2]})
    for value in (1, 2):
        stand_in.build(variant={"M": value})
    listed = maintenance.entries()
    assert [item.entry.manifest.variant for item in listed if item.entry] == [{"M": 2}, {"M": 1}]
    assert sum(item.bytes for item in listed) <= maintenance.size()
    assert maintenance.size() == maintenance.tree_bytes(stand_in.cache)


def test_clearing_removes_entries_failures_and_remembered_digests(stand_in: StandIn) -> None:
    stand_in.build()
    for descriptor in cache._held.values():
        os.close(descriptor)
    cache._held.clear()
    stand_in.write("sample.cu", "int f() { return missing; }\n")
    with pytest.raises(BuildError):
        stand_in.build()
    assert len(maintenance.clear()) == 1
    assert maintenance.entries() == []
    assert not (stand_in.cache / "failed").exists()
    assert not (stand_in.cache / "digests.json").exists()


def test_files_of_others_in_the_cache_directory_are_left_alone(stand_in: StandIn) -> None:
    # HIPFORGE_CACHE_DIR=~/.cache is a plausible value; these are names that others have under such a directory.
    others = [
        stand_in.cache / name
        for name in ("pip/http/f", "staging/site/f", "staging/site.1/f", "failed/exam/f", "locks/f", "triton/src/f")
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1 << 20))
    with settings.scope(CACHE_LIMIT=0):
        stand_in.build()
    assert [item.entry is not None for item in maintenance.entries()] == [True]
    assert maintenance.size() < 1 << 20
    maintenance.prune(0)
    maintenance.clear()
    assert all(path.stat().st_size == 1 << 20 for path in others)


def test_what_triton_kept_for_the_emulator_is_an_entry_that_is_not_damaged(stand_in: StandIn) -> None:
    kept = stand_in.cache / "triton" / "ZF6ZV2UD2HGMANMJH6ZGO3LIWPKUP74RWPYNQ6DHUEYTFHV3EA7Q"
    kept.mkdir(parents=True)
    (kept / "kernel.hsaco").write_bytes(bytes(4096))
    (item,) = maintenance.entries()
    assert (item.path, item.damaged, item.bytes) == (kept, False, maintenance.size())
    assert maintenance.clear() == [kept]
    assert not kept.exists()


def test_recorded_seconds_prefer_the_same_variant(stand_in: StandIn) -> None:
    stand_in.module(variants={"M": [1, 2]})
    assert maintenance.recorded_seconds("sample", "sample-m1", "gfx950") is None
    built = stand_in.build(variant={"M": 1}).entry.manifest.build_seconds
    assert maintenance.recorded_seconds("sample", "sample-m1", "gfx950") == built
    assert maintenance.recorded_seconds("sample", "sample-m2", "gfx950") == built
    assert maintenance.recorded_seconds("sample", "sample-m1", "gfx942") is None


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("512", 512), ("1K", 1024), ("1.5M", 1572864), ("2GiB", 2 << 30), (" 3 tb ", 3 << 40)]
)
def test_sizes_are_read_with_units(text: str, size: int) -> None:
    assert settings.parse_size(text) == size


@pytest.mark.parametrize("text", ["x", "-1", "1X", "inf", "nan"])
def test_a_wrong_size_is_a_config_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPFORGE_CACHE_LIMIT", text)
    with pytest.raises(ConfigError, match="a size such as 500M or 4G"):
        settings.CACHE_LIMIT.get()
