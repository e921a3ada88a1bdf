"""Only code that nobody else could have written is loaded: owners and modes of the cache, its entries and its files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.jit_stand_in import StandIn, library_value, real_clang

from hipforge import settings
from hipforge.errors import BuildError, ConfigError
from hipforge.jit import digest, maintenance, obtain, tools
from hipforge.jit.backends.amd import compilers
from hipforge.jit.cache import cache_dir, locks, prebuilt, trust

STATE = {"toolchains.json": tools.holds_answers, "digests.json": digest.holds_digests}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def others_can_write(path: Path) -> list[Path]:
    """Everything at and below ``path`` that its group or others can write, except links."""
    every = [path, *path.rglob("*")]
    return [item for item in every if item.lstat().st_mode & 0o022 and not stat.S_ISLNK(item.lstat().st_mode)]


@pytest.fixture
def home(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The default cache directory, empty, with the private one beside it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(cache_dir.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(cache_dir, "_refused", {})
    trust.problem_above.cache_clear()
    with settings.scope(CACHE_DIR=None):
        yield tmp_path / "xdg/hipforge"
    trust.problem_above.cache_clear()


# ---- what hipforge makes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["build", "probes", "failure"])
def test_whatever_the_umask_nobody_else_can_write_what_is_made(stand_in: StandIn, first: str) -> None:
    body = {
        "build": "ensure()",
        "probes": "toolchain.select('gfx950')",
        "failure": "try:\n    ensure()\nexcept HipforgeError:\n    pass\n",
    }[first]
    if first == "failure":
        stand_in.write("sample.cu", "broken\n")
    body = "import stat\nos.umask(0)\n" + body
    done = stand_in.start_child(body)
    assert done.wait(60) == 0, done.communicate()
    assert stand_in.cache.is_dir()
    assert others_can_write(stand_in.cache) == []


def test_nobody_else_can_write_a_lock_file_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for name in ("first", "second"):  # the first is made by the look for flock
            with locks.building(tmp_path, name, name):
                assert others_can_write(tmp_path / "locks") == []
    finally:
        os.umask(before)


def test_an_export_can_be_used_at_once_whatever_the_umask(stand_in: StandIn, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        prebuilt.export([stand_in.build().entry], tmp_path / "ahead")
    finally:
        os.umask(before)
    assert others_can_write(tmp_path / "ahead") == []


# ---- what it refuses -------------------------------------------------------------------------------------------------


def planted(box: StandIn, path: str) -> Path:
    """The sample's entry, or a file of it, or a directory above it, by name."""
    entry = box.build().entry.path
    return {"root": box.cache, "target": entry.parent, "entry": entry}.get(path) or entry / path


@pytest.mark.parametrize("path", ["target", "entry", "module.so", "manifest.json"])
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_an_entry_that_others_can_write_is_not_loaded(stand_in: StandIn, path: str, mode: int) -> None:
    planted(stand_in, path).chmod(mode)
    assert isinstance(obtain.look(stand_in.request()), obtain.Missing)


@needs_root
@pytest.mark.parametrize("path", ["target", "entry", "module.so", "manifest.json"])
def test_an_entry_of_another_user_is_not_loaded(stand_in: StandIn, path: str) -> None:
    os.chown(planted(stand_in, path), 12345, 12345)
    assert isinstance(obtain.look(stand_in.request()), obtain.Missing)


def test_an_entry_that_is_a_link_is_not_loaded(stand_in: StandIn, tmp_path: Path) -> None:
    entry = planted(stand_in, "entry")
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert isinstance(obtain.look(stand_in.request()), obtain.Missing)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_default_directory_that_others_can_write_is_not_used(home: Path, stand_in: StandIn, mode: int) -> None:
    entry = obtain.binary(stand_in.spec()).entry
    assert entry.path.is_relative_to(home)
    home.chmod(mode)
    cache_dir._store.cache_clear()
    made = obtain.binary(stand_in.spec())
    assert made.built
    assert made.entry.path.is_relative_to(home.parents[1] / "tmp")


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_named_directory_that_others_can_write_is_an_error_unless_the_user_says_so(
    stand_in: StandIn,
    mode: int,
) -> None:
    stand_in.build()
    stand_in.cache.chmod(mode)
    text = rf"HIPFORGE_CACHE_DIR=.*cache cannot be used: others can write it \(mode {mode:04o}\).*TRUST_SHARED_DIRS=1"
    with pytest.raises(ConfigError, match=text):
        stand_in.build()
    with settings.scope(TRUST_SHARED_DIRS=True):
        assert not stand_in.build().built


def test_what_is_no_directory_is_called_that_and_its_mode_is_left_alone(stand_in: StandIn) -> None:
    text = "HIPFORGE_CACHE_DIR=/dev/null cannot be used: it is not a directory; name another"
    with settings.scope(CACHE_DIR=Path("/dev/null")), pytest.raises(ConfigError, match=text):
        stand_in.build()


def test_a_directory_whose_parent_lets_others_replace_it_is_refused_unless_sticky(
    stand_in: StandIn,
    tmp_path: Path,
) -> None:
    above = tmp_path / "shared"
    above.mkdir()
    with settings.scope(CACHE_DIR=above / "cache"):
        stand_in.build()
        above.chmod(0o777)
        trust.problem_above.cache_clear()
        with pytest.raises(ConfigError, match=r"others can replace it, because .*/shared has mode 0777"):
            stand_in.build()
        above.chmod(0o1777)
        trust.problem_above.cache_clear()
        assert not stand_in.build().built
    trust.problem_above.cache_clear()


def test_a_prebuilt_directory_that_others_can_write_is_an_error(stand_in: StandIn, tmp_path: Path) -> None:
    ahead = tmp_path / "ahead"
    prebuilt.export([stand_in.build().entry], ahead)
    wanted = stand_in.request()
    with settings.scope(PREBUILT_DIR=(ahead,)):
        found = obtain.look(wanted)
        assert isinstance(found, obtain.Ready) and found.prebuilt
        next(ahead.glob("gfx950/*/module.so")).chmod(0o666)
        found = obtain.look(wanted)
        assert isinstance(found, obtain.Ready) and not found.prebuilt
        ahead.chmod(0o777)
        with pytest.raises(ConfigError, match=r"HIPFORGE_PREBUILT_DIR=.*ahead cannot be used: others can write it"):
            obtain.look(wanted)


def test_remembered_answers_that_others_can_write_are_thrown_away(stand_in: StandIn) -> None:
    stand_in.build()
    for name, is_own in STATE.items():
        path = stand_in.cache / name
        path.write_text("{}")
        path.chmod(0o666)
        assert cache_dir.own_file(stand_in.cache, name, is_own) == path
        assert not path.exists()


@pytest.mark.parametrize("others", ["nothing", "the file", "its directory"])
def test_a_file_of_remembered_answers_may_be_a_link_to_a_trusted_place(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    monkeypatch.setattr(digest, "_RACE_NS", 0)
    stand_in.cache.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    for name in STATE:
        (elsewhere / name).write_text("{}")
        (elsewhere / name).chmod(0o666 if others == "the file" else 0o644)
        (stand_in.cache / name).symlink_to(elsewhere / name)
    elsewhere.chmod(0o777 if others == "its directory" else 0o755)
    tools._probe_store.cache_clear()
    cache_dir._store.cache_clear()
    assert stand_in.build().built
    cache_dir.digests().save()
    for name in STATE:
        assert (stand_in.cache / name).readlink() == elsewhere / name
        assert ((elsewhere / name).read_text() == "{}") == (others != "nothing")
    assert {path.name for path in elsewhere.iterdir()} == set(STATE)


def test_a_cache_directory_may_be_a_link(stand_in: StandIn, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o755)
    stand_in.cache.symlink_to(real)
    assert stand_in.build().built
    assert not stand_in.build().built
    assert stand_in.cache.readlink() == real
    assert len(list(real.glob("gfx950/*/manifest.json"))) == 1 and not list((real / "staging").iterdir())


@pytest.mark.parametrize("mode", [0o644, 0o666])
@pytest.mark.parametrize("text", ['{"project": {"version": 3}}', "[1, 2]", "no JSON at all", ""])
def test_a_foreign_file_with_a_name_of_ours_is_neither_read_nor_written_nor_removed(
    stand_in: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    mode: int,
) -> None:
    monkeypatch.setattr(digest, "_RACE_NS", 0)
    stand_in.cache.mkdir()
    for name in STATE:
        (stand_in.cache / name).write_text(text)
        (stand_in.cache / name).chmod(mode)
    tools._probe_store.cache_clear()
    cache_dir._store.cache_clear()
    assert stand_in.build().built
    assert not stand_in.build().built
    cache_dir.digests().save()
    maintenance.clear(stand_in.cache)
    assert [(stand_in.cache / name).read_text() for name in STATE] == [text, text]


@needs_root
def test_the_code_of_another_user_in_a_directory_open_to_all_never_runs(home: Path, stand_in: StandIn) -> None:
    """The whole attack: the default directory is open to all, and somebody else swaps the library in an entry."""
    entry = obtain.binary(stand_in.spec()).entry
    (home / "digests.json").unlink(missing_ok=True)
    for path in [home, *home.rglob("*")]:
        path.chmod(0o777)
    for path in entry.path.rglob("*"):
        os.chown(path, 12345, 12345)
    code = stand_in.child_code("print(ensure().entry.path)")
    environment = {**stand_in.environment(), "XDG_CACHE_HOME": str(home.parent), "TMPDIR": str(home.parents[1] / "tmp")}
    del environment["HIPFORGE_CACHE_DIR"]
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert not done.stdout.startswith(str(home)), done.stderr
    assert library_value(entry) == 3


# ---- what compilers read ---------------------------------------------------------------------------------------------

NOBODY = 65534


def as_nobody(code: str) -> str:
    """Run Python code as a user without rights; returns what it prints."""
    body = f"import os\nos.setgroups([])\nos.setgid({NOBODY})\nos.setuid({NOBODY})\n{code}"
    return subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def open_place() -> Iterator[Path]:
    """An empty directory that every user can reach, as pytest's own are not, in effect as the cache directory."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        with settings.scope(CACHE_DIR=Path(name) / "cache"):
            yield Path(name) / "cache"


def assembled(cache: Path) -> Path:
    """The ROCm tree as a build with clang finds or makes it."""
    found = compilers.inspect(real_clang(), "gfx950")
    assert found.rocm.is_relative_to(cache)
    return found.rocm


@needs_root
def test_no_other_user_can_write_a_file_of_the_rocm_tree_whatever_the_umask(open_place: Path) -> None:
    before = os.umask(0)  # which forbids nothing
    try:
        tree = assembled(open_place)
    finally:
        os.umask(before)
    assert others_can_write(open_place / "rocm-tree") == []
    written = as_nobody(
        f"for folder, folders, names in os.walk({str(tree)!r}):\n"
        "    for path in (os.path.join(folder, name) for name in (*folders, *names)):\n"
        "        if not os.path.islink(path) and os.access(path, os.W_OK):\n"
        "            print(path)\n"
    )
    assert written == ""


@needs_root
@pytest.mark.parametrize("still_open", [True, False])
def test_a_header_that_another_user_has_replaced_in_the_rocm_tree_is_not_compiled(
    open_place: Path, still_open: bool
) -> None:
    tree = assembled(open_place)
    header = tree / "include/hip/hip_fp16.h"
    text = header.read_text()
    for path in [tree, *tree.rglob("*")]:  # as a process with umask 000 made it before
        if not path.is_symlink():
            path.chmod(0o777)
    as_nobody(f"os.unlink({str(header)!r})\nopen({str(header)!r}, 'w').write('#error planted')\n")
    if not still_open:
        for path in [tree, *tree.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755)
    again = assembled(open_place)
    assert (again / "include/hip/hip_fp16.h").read_text() == text
    assert others_can_write(open_place / "rocm-tree") == []


def test_a_folder_link_of_another_user_makes_a_tree_untrusted(tmp_path: Path) -> None:
    (tmp_path / "include").symlink_to("/usr/include")
    assert trust.tree_problem(tmp_path) is None
    if os.geteuid() == 0:
        os.lchown(tmp_path / "include", NOBODY, NOBODY)
        assert "include belongs to user id 65534" in str(trust.tree_problem(tmp_path))


@pytest.mark.parametrize("what", ["build", "generated", "export"])
def test_nobody_else_can_enter_a_directory_while_it_is_being_filled(
    stand_in: StandIn, tmp_path: Path, what: str
) -> None:
    """Compilers and generators make their files by the umask; what keeps others out is the directory."""
    seen = tmp_path / "modes"
    note = f'stat -c "%a" . >> {seen}'
    if what == "build":
        stand_in.install(before=note)
    if what == "generated":
        stand_in.write("sample.cu", 'extern "C" int value() { return 5; }\n')
        stand_in.module(blob_gen_cmd=[f"sh -c '{note}; cp ${{MODULE_DIR}}/sample.cu ${{GEN}}/made.cu'"], srcs=[])
    before = os.umask(0)
    try:
        entry = stand_in.build().entry
        if what == "export":
            entry.library.chmod(0o666)  # copied with the mode that a umask of 000 gives
            made = trust.seal

            def sealing(path: Path) -> None:
                seen.write_text(f"{path.stat().st_mode & 0o777:o}")
                made(path)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trust, "seal", sealing)
                prebuilt.export([entry], tmp_path / "ahead")
            assert (next((tmp_path / "ahead").glob("*/*")).stat().st_mode & 0o777) == 0o755
    finally:
        os.umask(before)
    assert set(seen.read_text().split()) == {"700"}
    assert (entry.path.stat().st_mode & 0o777) == 0o755


@pytest.mark.parametrize("folder", ["staging", "locks", "gfx950", "failed"])
def test_a_folder_of_the_cache_that_others_can_write_is_closed_before_use(stand_in: StandIn, folder: str) -> None:
    stand_in.write("sample.cu", "broken\n")
    with pytest.raises(BuildError):
        stand_in.build()
    stand_in.write("sample.cu", 'extern "C" int value() { return 5; }\n')
    (stand_in.cache / folder).mkdir(exist_ok=True)
    (stand_in.cache / folder).chmod(0o777)
    if folder == "failed":
        stand_in.write("sample.cu", "broken again\n")
        with pytest.raises(BuildError):
            stand_in.build()
    else:
        stand_in.build()
    assert others_can_write(stand_in.cache) == []


@needs_root
def test_a_folder_of_the_cache_that_belongs_to_another_user_is_named(stand_in: StandIn) -> None:
    stand_in.build()
    stand_in.write("value.h", "#define VALUE 4\n")
    os.chown(stand_in.cache / "staging", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=r"cache/staging: it belongs to user id 65534"):
        stand_in.build()


def test_a_remembered_failure_that_others_can_write_is_not_believed(stand_in: StandIn) -> None:
    stand_in.write("sample.cu", "broken\n")
    for mode, compiles in ((0o644, 1), (0o666, 1), (0o644, 2)):  # the mode from then on, and the compiles until then
        with pytest.raises(BuildError):
            stand_in.build()
        assert len(stand_in.compiles()) == compiles
        next(stand_in.cache.glob("failed/*/failure.json")).chmod(mode)


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_the_folder_of_tritons_kernels_is_private_and_emptied_if_others_could_write_it(
    stand_in: StandIn, mode: int
) -> None:
    folder = cache_dir.private_folder("triton")
    assert (folder.stat().st_mode & 0o777) == 0o700
    (folder / "kernel").write_text("code")
    (folder / "kernel").chmod(0o644)
    folder.chmod(mode)
    assert cache_dir.private_folder("triton") == folder
    assert (folder.stat().st_mode & 0o777) == 0o700
    assert (folder / "kernel").exists() == (mode == 0o755)
