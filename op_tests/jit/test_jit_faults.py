"""Many processes at once, killed builders, and cache directories that cannot be used."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.jit_stand_in import StandIn, library_value, wait_until

from hipforge import settings
from hipforge.errors import BuildError, ConfigError
from hipforge.jit import obtain
from hipforge.jit.cache import cache_dir, failures, locks
from hipforge.jit.cache import store as cache

PROCESSES = 8

REPORT = """
try:
    built = ensure()
except HipforgeError as error:
    print(type(error).__name__, str(error).splitlines()[-1])
else:
    import ctypes
    print(built.built, ctypes.CDLL(str(built.entry.library)).value())
"""


def _all_at_once(box: StandIn) -> list[str]:
    children = [box.start_child(REPORT) for _ in range(PROCESSES)]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0] * PROCESSES, outputs
    return sorted(out for out, _ in outputs)


def test_eight_processes_make_one_build_and_all_get_it(stand_in: StandIn) -> None:
    stand_in.install(before="sleep 0.3")
    assert _all_at_once(stand_in) == ["False 3\n"] * (PROCESSES - 1) + ["True 3\n"]
    assert len(stand_in.compiles()) == 1
    assert not list((stand_in.cache / "staging").iterdir())


def test_eight_processes_make_one_failing_attempt_and_all_get_its_error(stand_in: StandIn) -> None:
    stand_in.write("sample.cu", 'extern "C" int value() { return missing; }\n')
    outputs = _all_at_once(stand_in)
    assert len(set(outputs)) == 1
    assert outputs[0].startswith("BuildError")
    assert "'missing' was not declared" in outputs[0]
    assert len(stand_in.compiles()) == 1


def test_a_failed_build_is_not_tried_again_until_something_it_read_changes(stand_in: StandIn) -> None:
    stand_in.write("value.h", "#define VALUE missing\n")
    with pytest.raises(BuildError) as first:
        stand_in.build()
    with pytest.raises(BuildError) as second:
        stand_in.build()
    assert str(second.value) == str(first.value)
    assert len(stand_in.compiles()) == 1
    stand_in.write("value.h", "#define VALUE 6\n")
    assert library_value(stand_in.build().entry) == 6
    assert len(stand_in.compiles()) == 2
    assert not failures.directory(stand_in.cache, stand_in.spec()).exists(), "a success must clear the record"


def test_a_missing_header_is_tried_again_when_it_appears(stand_in: StandIn) -> None:
    (stand_in.sources / "value.h").unlink()
    for _ in range(2):
        with pytest.raises(BuildError, match=r"value\.h"):
            stand_in.build()
    assert len(stand_in.compiles()) == 1
    stand_in.write("value.h", "#define VALUE 4\n")
    assert library_value(stand_in.build().entry) == 4


@pytest.mark.parametrize(
    "fault",
    [
        "echo 'sample.cu:1:1: fatal error: cannot allocate memory'; exit 1",
        "echo 'clang: error: unable to execute command: Killed'; exit 1",
        "echo 'sample.cu:1:1: error: who knows' >&2; kill -9 $$",
        "exit 1",
    ],
    ids=["out of memory", "killed by the kernel", "killed by a signal", "says nothing"],
)
def test_a_build_that_failed_for_want_of_resources_is_tried_again(stand_in: StandIn, fault: str) -> None:
    # The compiler's bytes are in the key, so what makes it fail lies outside of it.
    stand_in.install(before='if [ -f "$here/fault" ]; then . "$here/fault"; fi')
    switch = stand_in.hipcc.parent / "fault"
    switch.write_text(fault + "\n")
    with pytest.raises(BuildError):
        stand_in.build()
    with pytest.raises(BuildError):
        stand_in.build()
    switch.unlink()
    assert library_value(stand_in.build().entry) == 3


def _processes_in(folder: Path) -> list[str]:
    """The processes that work in a folder or below it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if entry.readlink().is_relative_to(folder):
                found.append(entry.parent.name)
    return found


@pytest.mark.parametrize("when", ["at once", "compiling", "linking"])
def test_after_sigkill_the_next_caller_builds_at_once_and_sweeps(stand_in: StandIn, when: str) -> None:
    pause = {"at once": "*", "compiling": '*"|--cuda-host-only|"*', "linking": "-shared*"}
    stand_in.install(before=f'if [ -f "$here/slow" ]; then case "$line" in {pause[when]}) sleep 300;; esac; fi')
    slow = stand_in.hipcc.parent / "slow"
    slow.touch()
    victim = stand_in.start_child("ensure()")
    wanted = {"at once": 0, "compiling": 2, "linking": 3}[when]
    staging = stand_in.cache / "staging"

    def reached() -> bool:
        busy = [call for call in stand_in.calls() if "-###" not in call and call != ["--version"]]
        return staging.exists() and any(staging.iterdir()) and len(busy) >= wanted

    wait_until(reached)
    assert when == "at once" or _processes_in(staging)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    slow.unlink()
    assert not list(stand_in.cache.glob("gfx950/*")), "nothing half-written is ever visible"
    started = time.monotonic()
    assert library_value(stand_in.build().entry) == 3
    assert time.monotonic() - started < 120, "the next caller must not wait for a dead one"
    assert not list(staging.iterdir())
    wait_until(lambda: not _processes_in(staging))
    assert not list(staging.iterdir()), "a compiler that lived on wrote into it"
    victim.communicate()


def test_leftovers_of_another_module_are_swept_too_but_not_those_of_a_live_builder(stand_in: StandIn) -> None:
    staging = stand_in.cache / "staging"
    dead = staging / f"gfx950-other-{'0' * 24}.abcd1234"
    alive = staging / f"gfx950-third-{'4' * 24}.abcd1234"
    for path in (dead, alive):
        path.mkdir(parents=True)
    with locks.building(stand_in.cache, alive.stem, "third"):
        stand_in.build()
    assert not dead.exists()
    assert alive.exists()


def test_a_waiter_says_whom_it_waits_for_and_gives_up_naming_them(
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = stand_in.spec()
    holder = stand_in.start_child(
        f"from hipforge.jit.cache import locks\nfrom pathlib import Path\n"
        f"with locks.building(Path({str(stand_in.cache)!r}), {cache.build_name(spec)!r}, 'x'):\n"
        "    print('held', flush=True)\n    time.sleep(60)\n"
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    monkeypatch.setattr(locks, "_SPEAK_EVERY_S", 0.2)
    caplog.set_level(logging.INFO, logger="hipforge")
    try:
        with settings.scope(LOCK_TIMEOUT=1.0), pytest.raises(BuildError) as raised:
            obtain.binary(spec)
    finally:
        holder.kill()
        holder.communicate()
    message = str(raised.value)
    assert f"process {holder.pid} on " in message
    assert "sample for gfx950" in message
    assert "HIPFORGE_LOCK_TIMEOUT" in message
    spoken = [record.getMessage() for record in caplog.records if record.getMessage().startswith("waiting for")]
    assert len(spoken) >= 3
    assert f"process {holder.pid} on " in spoken[0]
    assert "s so far)" in spoken[0]
    levels = [record.levelno for record in caplog.records if record.getMessage().startswith("waiting for")]
    assert max(levels) >= logging.WARNING, "a wait that takes long is told without any set-up of logging"
    assert obtain.binary(spec).built, "the holder is dead, so its lock is free"


# --- directories that cannot be used --------------------------------------------------------------------------------

NOBODY = 65534


def _as_nobody(box: StandIn, body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``body`` as a user who owns nothing, since root may write anywhere; that user may not even see Python."""
    leave = f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
    drop = f"import filelock, msgpack\nif os.geteuid() == 0:\n    {leave}\n"
    return subprocess.run(
        [sys.executable, "-c", box.child_code(body, first=drop)],
        env={**box.environment(), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def open_to_all(stand_in: StandIn, tmp_path: Path) -> StandIn:
    """The stand-in, readable by every user, and a world-writable temporary directory."""
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and path.name.startswith(("pytest-", "popen-", "test_")):
            path.chmod(0o755)
    (stand_in.hipcc.parent / "calls").touch()
    (stand_in.hipcc.parent / "calls").chmod(0o666)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o777)
    return stand_in


DEFAULT_DIR = """
logging.basicConfig(level=logging.WARNING, format="%(message)s")
first = ensure()
again = ensure()
print(first.built, again.built, first.entry.path)
"""


def _home(box: StandIn, tmp_path: Path, **environment: str) -> dict[str, str]:
    places = {"XDG_CACHE_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    return {"HIPFORGE_CACHE_DIR": "", **places, **environment}


def test_a_read_only_default_directory_falls_back_with_one_warning(open_to_all: StandIn, tmp_path: Path) -> None:
    (tmp_path / "home/hipforge").mkdir(parents=True)
    (tmp_path / "home/hipforge").chmod(0o555)
    done = _as_nobody(open_to_all, DEFAULT_DIR, **_home(open_to_all, tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"True False {tmp_path}/tmp/hipforge-")
    assert done.stderr.count("cannot be used") == 1
    assert "Permission denied" in done.stderr
    second = _as_nobody(open_to_all, DEFAULT_DIR, **_home(open_to_all, tmp_path))
    assert second.stdout.startswith("False False"), "a second process must find what the first one built"


def test_a_default_directory_that_cannot_be_made_falls_back(open_to_all: StandIn, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where a directory should be")
    done = _as_nobody(open_to_all, DEFAULT_DIR, **_home(open_to_all, tmp_path))
    assert done.stdout.startswith(f"True False {tmp_path}/tmp/hipforge-"), done.stderr
    assert done.stderr.count("cannot be used") == 1


def test_a_default_directory_of_a_third_party_is_neither_read_nor_written(open_to_all: StandIn, tmp_path: Path) -> None:
    home = tmp_path / "home/hipforge"
    home.mkdir(parents=True)
    with settings.scope(CACHE_DIR=home):
        planted = open_to_all.build().entry
    answers = home / "toolchains.json"
    answers.write_text(answers.read_text().replace("clang version 20", "clang version 14"))
    if os.geteuid() == 0:
        for path in [home, *home.rglob("*")]:
            os.chown(path, 12345, 12345)
    home.chmod(0o777)
    # Only root can change the owner of a directory; for others, pretend that theirs belongs to somebody else.
    body = ("" if os.geteuid() == 0 else "os.geteuid = lambda: 4242\n") + DEFAULT_DIR
    done = _as_nobody(open_to_all, body, **_home(open_to_all, tmp_path))
    assert done.stdout.startswith(f"True False {tmp_path}/tmp/hipforge-"), done.stderr
    assert f"it belongs to user id {home.stat().st_uid}" in done.stderr
    assert planted.library.exists()


@pytest.mark.parametrize("state", ["read-only", "missing", "a file"])
def test_a_named_directory_that_cannot_be_used_is_an_error_that_says_so(
    open_to_all: StandIn, tmp_path: Path, state: str
) -> None:
    named = tmp_path / "named"
    if state == "read-only":
        named.mkdir(mode=0o555)
    elif state == "missing":
        named = tmp_path / "stand-in/not/there"
    else:
        named.write_text("")
    body = "try:\n    ensure()\nexcept HipforgeError as error:\n    print(type(error).__name__, error)\n"
    done = _as_nobody(open_to_all, body, HIPFORGE_CACHE_DIR=str(named), TMPDIR=str(tmp_path / "tmp"))
    assert done.stdout.startswith(f"ConfigError HIPFORGE_CACHE_DIR={named} cannot be used: "), done.stderr
    assert not list((tmp_path / "tmp").glob("hipforge-*")), "a named directory is never silently replaced"


def test_a_read_only_named_directory_with_the_module_in_it_is_used(open_to_all: StandIn, tmp_path: Path) -> None:
    open_to_all.build()
    body = "print(ensure().built)"
    done = _as_nobody(open_to_all, body, TMPDIR=str(tmp_path / "tmp"))
    assert done.stdout == "False\n", done.stderr


def test_a_private_directory_planted_by_someone_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_dir.tempfile, "gettempdir", lambda: str(tmp_path))
    cache_dir._one_time_dir.cache_clear()
    planted = tmp_path / f"hipforge-{os.geteuid()}"
    (tmp_path / "trap").mkdir()
    planted.symlink_to(tmp_path / "trap")
    chosen = cache_dir.private_dir()
    assert chosen != planted
    assert chosen.stat().st_mode & 0o077 == 0
    planted.unlink()
    planted.mkdir(mode=0o700)
    planted.chmod(0o777)
    assert cache_dir.private_dir() != planted
    planted.chmod(0o700)
    assert cache_dir.private_dir() == planted


def _full_disk(under: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every rename and every new directory below ``under`` fail as on a full disk."""
    mkdir, rename = os.mkdir, os.rename

    def check(path: object) -> None:
        if str(path).startswith(str(under)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(os, "mkdir", lambda path, *rest, **more: (check(path), mkdir(path, *rest, **more))[1])
    monkeypatch.setattr(os, "rename", lambda source, target, **more: (check(target), rename(source, target, **more))[1])


@pytest.fixture
def default_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where caches go where none is named, and what is taken instead."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(cache_dir.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setattr(cache_dir, "_refused", {})
    return home, temporary


@pytest.mark.parametrize("named", [False, True])
def test_a_disk_that_fills_up_before_publication(
    stand_in: StandIn,
    default_dirs: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    named: bool,
) -> None:
    home, temporary = default_dirs
    with settings.scope(CACHE_DIR=home / "hipforge" if named else None):
        spec = stand_in.spec()
        _full_disk(home / "hipforge/gfx950", monkeypatch)
        if named:
            with pytest.raises(ConfigError, match="No space left on device"):
                obtain.binary(spec)
            assert not temporary.exists() or not list(temporary.iterdir())
        else:
            entry = obtain.binary(spec).entry
            assert entry.path.is_relative_to(temporary)
            assert library_value(entry) == 3
            assert sum("No space left" in record.getMessage() for record in caplog.records) == 1
            assert not obtain.binary(stand_in.spec()).built


def test_a_disk_that_is_full_for_the_compiler(stand_in: StandIn, default_dirs: tuple[Path, Path]) -> None:
    """The compiler writes into the cache directory too; what it says about a full disk counts as the directory's."""
    home, temporary = default_dirs
    stand_in.install(before=f"case $PWD in {home}/*) echo 'error: x.o: No space left on device'; exit 1;; esac")
    with settings.scope(CACHE_DIR=None):
        entry = obtain.binary(stand_in.spec()).entry
    assert entry.path.is_relative_to(temporary)


def test_a_named_full_directory_is_an_error_and_leaves_nothing_behind(stand_in: StandIn) -> None:
    stand_in.install(before="echo 'error: x.o: No space left on device'; exit 1")
    with pytest.raises(ConfigError, match=r"HIPFORGE_CACHE_DIR=.*No space left on device"):
        stand_in.build()
    assert not list((stand_in.cache / "staging").iterdir())
    stand_in.install()
    assert stand_in.build().built


def test_a_compiler_that_could_not_write_its_words_either_was_on_a_full_disk(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(before="exit 1")
    with pytest.raises(BuildError, match="exited with status 1 and no output"):
        stand_in.build()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(ConfigError, match=r"HIPFORGE_CACHE_DIR=.*No space left on device"):
        stand_in.build()


def test_locks_that_do_not_work_do_not_stop_a_build(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object, **__: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(locks.FileLock, "acquire", unsupported)
    assert library_value(stand_in.build().entry) == 3


def test_an_interrupted_build_leaves_nothing_and_is_not_remembered(stand_in: StandIn) -> None:
    stand_in.install(before='if [ -f "$here/slow" ]; then sleep 30; fi')
    slow = stand_in.hipcc.parent / "slow"
    slow.touch()
    child = stand_in.start_child("ensure()")
    wait_until(stand_in.compiles)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert not list((stand_in.cache / "staging").iterdir())
    slow.unlink()
    assert stand_in.build().built


def test_a_library_that_cannot_be_read_is_built_again(stand_in: StandIn) -> None:
    code = stand_in.hipcc.parent / "gfx950.co"
    whole = code.read_bytes()
    code.write_bytes(b"what a full or broken disk may leave")
    with pytest.raises(BuildError, match="no readable device code"):
        stand_in.build()
    code.write_bytes(whole)
    assert library_value(stand_in.build().entry) == 3


def test_lock_files_that_nobody_uses_are_removed_by_a_later_build(stand_in: StandIn) -> None:
    stand_in.build()
    (lock,) = (stand_in.cache / "locks").glob("*.lock")
    foreign = stand_in.cache / "locks/notes.lock"
    foreign.write_text("not ours")
    for path in (lock, foreign):
        os.utime(path, (0, 0))
    stand_in.write("value.h", "#define VALUE 9\n")
    held = locks.building(stand_in.cache, lock.stem, "held")
    with held:
        os.utime(lock, (0, 0))
        locks.remove_idle(stand_in.cache, 0.0)
        assert lock.exists(), "somebody holds it"
    os.utime(lock, (0, 0))
    stand_in.module("other", srcs=["sample.cu"])
    stand_in.build("other")
    assert not lock.exists()
    assert foreign.exists()


def test_a_lock_file_removed_between_opening_and_locking_it_guards_nothing(
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Removing lock files must never lead to two builders of one key at once."""
    name = cache.build_name(stand_in.spec())
    path = stand_in.cache / "locks" / f"{name}.lock"
    make = locks._lock
    removed = []

    def removed_meanwhile(where: Path) -> object:
        lock = make(where)
        acquire = lock.acquire

        def slow(*args: object, **named: object) -> object:
            found = acquire(*args, **named)
            if not removed:
                removed.append(where.unlink())  # as if it had been idle when it was opened
            return found

        lock.acquire = slow
        return lock

    monkeypatch.setattr(locks, "_lock", removed_meanwhile)
    with locks.building(stand_in.cache, name, "first"):
        assert removed == [None]
        monkeypatch.setattr(locks, "_lock", make)
        with locks.try_building(stand_in.cache, name) as free:
            assert not free, "the first builder holds the lock of this name"
        assert path.exists()
