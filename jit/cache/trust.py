"""May code from this directory run? Loading a library is running its code, so nobody else may be able to write it.

Question: could a user other than this one and root have put these bytes here? A path is trusted when it belongs to one
of the two and nobody else can write it, by its mode. Directories above it may be written by others only if they are
sticky (``/tmp``), so that what lies in them cannot be replaced.

Known gap: access control lists are not read. A member of the owner's own group counts as another user.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from pathlib import Path

from hipforge import settings

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def problem(path: Path, *, follow: bool = False) -> str | None:
    """Return why the file or folder at ``path`` is not to be trusted, or None; a missing one is trusted."""
    try:
        found = os.stat(path, follow_symlinks=follow)
    except OSError:
        return None
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user id {found.st_uid}, not to {os.geteuid()}"
    if stat.S_ISLNK(found.st_mode):
        return "it is a symbolic link"
    if found.st_mode & _OTHERS_WRITE:
        return f"others can write it (mode {stat.S_IMODE(found.st_mode):04o}); chmod go-w {path}"
    return None


@functools.lru_cache(maxsize=64)
def problem_above(path: Path) -> str | None:
    """Return why the directories above ``path`` let others replace it, or None; looked at once per process."""
    for above in Path(os.path.realpath(path)).parents:
        try:
            found = above.stat()
        except OSError:
            continue
        if found.st_uid not in (os.geteuid(), 0):
            return f"{above} belongs to user id {found.st_uid}, who can replace what is in it"
        if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
            mode = stat.S_IMODE(found.st_mode)
            return f"others can replace it, because {above} has mode {mode:04o} and is not sticky"
    return None


def directory_problem(path: Path) -> str | None:
    """Return why a cache or prebuilt directory is not to be trusted, or None; a link to one is followed."""
    return problem(path, follow=True) or problem_above(path)


def entry_problem(entry: Path, files: tuple[str, ...]) -> str | None:
    """Return why an entry ``<root>/<target>/<name>`` may not be loaded, or None; the root is checked apart."""
    for path in (entry.parent, entry, *(entry / name for name in files)):
        found = problem(path)
        if found is not None:
            return f"{path}: {found}"
    return None


def make_directory(path: Path) -> None:
    """Make a directory and its parents writable by this user alone, whatever the umask.

    Raises:
        OSError: one cannot be made.
    """
    if not path.is_dir():
        if path.parent != path:
            make_directory(path.parent)
        path.mkdir(mode=0o755, exist_ok=True)


def own_directory(path: Path) -> None:
    """Make a folder of the cache; from one that is there, take the right to write from all others.

    Raises:
        OSError: it cannot be made, or it belongs to another user.
    """
    make_directory(path)
    if settings.TRUST_SHARED_DIRS.get() or problem(path) is None:
        return
    found = path.lstat()
    if found.st_uid not in (os.geteuid(), 0) or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(errno.EPERM, f"{path}: {problem(path)}", str(path))
    path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)


def tree_problem(directory: Path) -> str | None:
    """Return why something in a directory is not to be trusted, or None; a link counts by its owner, not its target."""
    for folder, links, names in os.walk(directory):  # folders too: links to folders are not walked into
        for path in (folder, *(os.path.join(folder, name) for name in (*links, *names))):
            found = os.lstat(path)
            if found.st_uid not in (os.geteuid(), 0):
                return f"{path} belongs to user id {found.st_uid}, not to {os.geteuid()}"
            if found.st_mode & _OTHERS_WRITE and not stat.S_ISLNK(found.st_mode):
                return f"others can write {path} (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def seal(directory: Path) -> None:
    """Finish a directory made with mode 0700: all may read it, nobody else may write what is in it, whatever the umask.

    Raises:
        OSError: a mode cannot be changed.
    """
    for folder, _, names in os.walk(directory):
        for path in (Path(folder), *(Path(folder) / name for name in names)):
            mode = path.lstat().st_mode
            if mode & _OTHERS_WRITE and not stat.S_ISLNK(mode):
                path.chmod(stat.S_IMODE(mode) & ~_OTHERS_WRITE)
    directory.chmod(0o755)
