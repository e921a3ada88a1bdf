"""File systems without flock, such as some network file systems: the soft lock is used instead."""

from __future__ import annotations

import errno
import fcntl
import json
import socket
import subprocess
from collections.abc import Iterator

import pytest
from helpers.jit_stand_in import StandIn, library_value

from hipforge import settings
from hipforge.errors import BuildError
from hipforge.jit import maintenance
from hipforge.jit.cache import locks
from hipforge.jit.cache import store as cache


@pytest.fixture(params=["ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def no_flock(request: pytest.FixtureRequest, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    def refuse(*_: object) -> None:
        raise OSError(getattr(errno, request.param), "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "_flock_works", {})
    yield stand_in


def test_a_module_is_built_found_and_removed(no_flock: StandIn) -> None:
    made = no_flock.build()
    assert made.built and library_value(made.entry) == 3
    assert not no_flock.build().built
    assert not list(no_flock.cache.glob("locks/*.soft")), "the lock must be let go"
    cache._held.clear()
    assert maintenance.clear() == [made.entry.path]


def test_the_lock_keeps_a_second_builder_out(no_flock: StandIn) -> None:
    name = cache.build_name(no_flock.spec())
    with locks.building(no_flock.cache, name, "first"):
        with locks.try_building(no_flock.cache, name) as free:
            assert not free
        with (
            settings.scope(LOCK_TIMEOUT=0.05),
            pytest.raises(BuildError, match="is building; end that process"),
            locks.building(no_flock.cache, name, "second"),
        ):
            pass
    with locks.try_building(no_flock.cache, name) as free:
        assert free


def test_the_lock_of_a_process_that_died_is_broken(no_flock: StandIn) -> None:
    name = cache.build_name(no_flock.spec())
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder = no_flock.cache / "locks"
    folder.mkdir(parents=True)
    (folder / f"{name}.soft").touch()
    (folder / f"{name}.holder").write_text(json.dumps({"pid": ended.pid, "host": socket.gethostname(), "since": 0}))
    with settings.scope(LOCK_TIMEOUT=5.0):
        assert no_flock.build().built
