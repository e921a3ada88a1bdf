"""One walk for all: prebuilt, cached, remembered failure, build. Loader, fleet, ``why`` and ``inspect`` agree."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from click.testing import CliRunner
from helpers.jit_stand_in import StandIn

from hipforge import settings
from hipforge.cli.main import cli
from hipforge.errors import BuildError, MissingModuleError
from hipforge.jit import fleet, obtain, registry, tools
from hipforge.jit.cache import prebuilt
from hipforge.jit.cache import store as cache

WALK = Path(obtain.__file__).resolve()
PACKAGE = WALK.parents[1]


def answer(*words: object) -> list[dict[str, object]]:
    result = CliRunner().invoke(cli, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def ahead(stand_in: StandIn) -> Iterator[StandIn]:
    """The sample prebuilt into ``ahead``; no compiler, and a cache directory that does not exist."""
    prebuilt.export([stand_in.build().entry], stand_in.folder / "ahead")
    with settings.scope(
        PREBUILT_DIR=(stand_in.folder / "ahead",),
        HIPCC=stand_in.folder / "no-compiler",
        CACHE_DIR=stand_in.folder / "unused",
    ):
        tools._probe_store.cache_clear()
        yield stand_in
    tools._probe_store.cache_clear()


# ---- a hit that another process made while the fleet waited for its lock ---------------------------------------------


@pytest.fixture
def built_meanwhile(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A fleet that planned a miss, and finds the module built by another process once it has the lock."""
    locked = fleet.try_building

    @contextlib.contextmanager
    def after_another_built_it(root: Path, name: str) -> Iterator[bool]:
        stand_in.start_child("ensure()").communicate(timeout=60)
        with locked(root, name) as free:
            yield free

    monkeypatch.setattr(fleet, "try_building", after_another_built_it)
    return stand_in


def test_a_hit_after_the_lock_is_held_to_the_limits(built_meanwhile: StandIn) -> None:
    built_meanwhile.module(resource_limits={"max_vgprs": 1})
    (outcome,) = fleet.build_many(fleet.requests(["sample"], ["gfx950"]), 1, lambda _: None)
    assert outcome.status == "failed"
    assert "max_vgprs is 1" in str(outcome.error)
    assert len(built_meanwhile.compiles()) == 1


def test_a_hit_after_the_lock_is_held_open_against_pruning(built_meanwhile: StandIn) -> None:
    (outcome,) = fleet.build_many(fleet.requests(["sample"], ["gfx950"]), 1, lambda _: None)
    assert outcome.status == "hit" and outcome.entry is not None
    assert outcome.entry.path in cache._held


def test_what_the_fleet_built_or_found_at_once_is_held_open_too(stand_in: StandIn) -> None:
    for status in ("built", "hit"):
        (outcome,) = fleet.build_many(fleet.requests(["sample"], ["gfx950"]), 1, lambda _: None)
        assert outcome.status == status and outcome.entry is not None
        assert cache._held.pop(outcome.entry.path) > 0


# ---- inspect and why on modules built ahead --------------------------------------------------------------------------


def test_inspect_reads_a_prebuilt_module_without_a_compiler(ahead: StandIn) -> None:
    (row,) = answer("inspect", "sample")
    assert row["symbol"] == "empty.kd" or row["name"] == "empty"
    assert not (ahead.folder / "unused").exists()


def test_inspect_does_not_build_where_building_is_disabled(stand_in: StandIn) -> None:
    with settings.scope(DISABLE_JIT=True):
        result = CliRunner().invoke(cli, ["inspect", "sample"])
        assert result.exit_code == 1
        assert "HIPFORGE_DISABLE_JIT=1; build it ahead of time: hipforge build sample" in result.output
        assert not stand_in.compiles()
    answer("inspect", "sample")
    with settings.scope(DISABLE_JIT=True):
        answer("inspect", "sample")


def test_why_knows_a_prebuilt_module_without_a_compiler(ahead: StandIn) -> None:
    (found,) = answer("cache", "why", "sample")
    assert found["status"] == "prebuilt"
    assert str(found["path"]).startswith(str(ahead.folder / "ahead"))


def test_inspect_and_why_take_modules_that_a_user_registers(stand_in: StandIn) -> None:
    own = stand_in.sources / "sample.json"
    for words in (("inspect", "sample"), ("cache", "why", "sample")):
        registry._registered.clear()
        result = CliRunner().invoke(cli, list(words))
        assert result.exit_code == 1 and "there is no module 'sample'" in result.output
        (row,) = answer(*words, "--register", own)
        assert row


# ---- look ------------------------------------------------------------------------------------------------------------


def test_look_answers_ready_failed_or_missing_and_builds_nothing(stand_in: StandIn) -> None:
    missing = obtain.look(stand_in.request())
    assert isinstance(missing, obtain.Missing) and missing.spec is not None and missing.error is None
    assert not stand_in.compiles()
    stand_in.build()
    ready = obtain.look(stand_in.request())
    assert isinstance(ready, obtain.Ready) and not ready.prebuilt
    stand_in.module(resource_limits={"max_vgprs": 1})
    refused = obtain.look(stand_in.request())
    assert isinstance(refused, obtain.Failed) and refused.entry == ready.entry
    stand_in.module()
    stand_in.write("sample.cu", "broken\n")
    with pytest.raises(BuildError):
        stand_in.build()
    failed = obtain.look(stand_in.request())
    assert isinstance(failed, obtain.Failed) and failed.entry is None and (failed.path / "build.log").exists()


def test_look_without_a_compiler_is_missing_with_the_reason(stand_in: StandIn) -> None:
    with settings.scope(HIPCC=stand_in.folder / "no-compiler"):
        found = obtain.look(stand_in.request())
    assert isinstance(found, obtain.Missing) and found.spec is None
    assert "no-compiler" in str(found.error)


def test_look_leaves_no_trace_unless_the_entry_will_be_used(stand_in: StandIn) -> None:
    entry = stand_in.build().entry
    cache._held.pop(entry.path)
    assert isinstance(obtain.look(stand_in.request(), use=False), obtain.Ready)
    assert entry.path not in cache._held
    assert isinstance(obtain.look(stand_in.request()), obtain.Ready)
    assert entry.path in cache._held


def test_a_prebuilt_module_is_held_to_the_limits_like_any_other(ahead: StandIn) -> None:
    ahead.module(resource_limits={"max_vgprs": 1})
    found = obtain.look(ahead.request())
    assert isinstance(found, obtain.Failed)
    assert "max_vgprs is 1" in str(found.error)


def test_a_remembered_failure_with_building_disabled_still_says_that_the_module_is_missing(
    stand_in: StandIn,
) -> None:
    stand_in.write("sample.cu", "broken\n")
    with pytest.raises(BuildError):
        obtain.module(stand_in.request())
    with settings.scope(DISABLE_JIT=True), pytest.raises(MissingModuleError):
        obtain.module(stand_in.request())


# ---- how a module is obtained is read in one file --------------------------------------------------------------------


def test_the_walk_is_one_file_and_short(stand_in: StandIn) -> None:
    """The functions of the walk's file, and those that it calls by itself, on a miss that is built."""
    stops: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        here, caller = frame.f_code.co_filename, frame.f_back
        if event == "call" and PACKAGE in Path(here).parents and not frame.f_code.co_name.startswith("<"):
            from_walk = caller is not None and Path(caller.f_code.co_filename).resolve() == WALK
            if from_walk or Path(here).resolve() == WALK:
                stops.add((here, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        built = obtain.module(stand_in.request())
    finally:
        sys.setprofile(None)
    assert built.built and obtain.module.__code__.co_name in {name for _, name in stops}
    assert len(stops) <= 24, sorted(stops)
