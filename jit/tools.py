"""An executable's identity: its own version text and digests of its bytes.

Asking a compiler for its version starts a process, so the answer is kept in the cache directory beside the stat of
the executable; a warm path only looks at the stat.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipforge.jit import children
from hipforge.jit.cache import cache_dir, files
from hipforge.jit.cache.shapes import fits
from hipforge.jit.cache.trust import make_directory
from hipforge.jit.digest import DigestStore

_VERSION_TIMEOUT_S = 20
_SIGNAL_STATUS = 128


@dataclass(frozen=True)
class Tool:
    """An executable: its path, the text of ``--version``, and digests of it and of the libraries it is made of."""

    path: Path
    version_text: str
    digest: str
    parts: Mapping[str, str]

    @property
    def version(self) -> str:
        """The first line of ``--version``."""
        return self.version_text.splitlines()[0].strip() if self.version_text.strip() else "unknown version"

    def ingredients(self, name: str) -> dict[str, str]:
        """Return what of this tool enters a key; its path does not."""
        text = "\n".join(line for line in self.version_text.splitlines() if not line.startswith("InstalledDir:"))
        parts = {f"{name}:{part}": digest for part, digest in self.parts.items()}
        return {f"{name}:version": text.strip(), f"{name}:executable": self.digest, **parts}


class ProbeStore:
    """Remembered answers of programs, with the stat of the program's file: ``{question: [stamp, answer]}``."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._answers = self._read() or {}

    def _read(self) -> dict[str, Any] | None:
        """Return the answers in the file, none where there is no file, or None for a file of something else."""
        try:
            loaded = json.loads(files.read(self.file)) if self.file else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError):
            return None
        return loaded if holds_answers(loaded) else None

    def get(self, question: str, stamp: list[int]) -> Any | None:
        """Return the remembered answer, if the program is the one that gave it."""
        kept = self._answers.get(question)
        return kept[1] if isinstance(kept, list) and len(kept) == 2 and kept[0] == stamp else None

    def put(self, question: str, stamp: list[int], answer: Any) -> None:
        """Remember an answer; failing to write it is not an error."""
        self._answers[question] = [stamp, answer]
        there = self._read()
        if self.file is None or there is None:  # somebody else's file of that name stays as it is
            return
        self._answers = {**there, **self._answers}
        with contextlib.suppress(OSError):
            make_directory(self.file.parent)
            files.write(self.file, json.dumps(self._answers))


def holds_answers(document: object) -> bool:
    """Return whether parsed JSON is what a store of answers writes."""
    return isinstance(document, dict) and all(
        type(kept) is list and len(kept) == 2 and type(kept[0]) is list for kept in document.values()
    )


@functools.lru_cache(maxsize=8)
def _probe_store(root: Path | None) -> ProbeStore:
    return ProbeStore(cache_dir.own_file(root, "toolchains.json", holds_answers))


def probes() -> ProbeStore:
    """Return the remembered answers of the cache directory in use."""
    return _probe_store(cache_dir.state_dir())


def stamp(path: Path) -> list[int]:
    """Return size, mtime, inode and ctime of the file behind ``path``; empty if there is none."""
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns]


def ask(question: str, argv: list[str], program: Path, extra_stamps: tuple[Path, ...] = ()) -> tuple[int, str]:
    """Return exit status and output (both streams) of a command, remembered for as long as ``program`` is unchanged.

    ``extra_stamps`` are other files and folders the answer depends on. A command that a signal ended is asked again.

    Raises:
        OSError: the command cannot be started.
    """
    mark = [number for path in (program, *extra_stamps) for number in stamp(path)]
    kept: Any = probes().get(question, mark)
    if fits(kept, (int, str)):
        status, text = kept
        return int(status), str(text)
    if os.sep in argv[0]:
        argv = [os.path.abspath(argv[0]), *argv[1:]]
    try:
        # TMPDIR may not be there, and clang takes each % in it for a random digit.
        with children.waited_for():
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_VERSION_TIMEOUT_S,
                cwd=cache_dir.temporary_dir(),
                env={**os.environ, "LC_ALL": "C", "TMPDIR": "."},
            )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {_VERSION_TIMEOUT_S} s"
    text = done.stdout.decode(errors="replace")
    if 0 <= done.returncode < _SIGNAL_STATUS:
        probes().put(question, mark, [done.returncode, text])
    return done.returncode, text


def identify(path: Path, digests: DigestStore) -> Tool:
    """Return the identity of the tool at ``path``.

    Raises:
        OSError: it cannot be run.
    """
    real = Path(os.path.realpath(path))
    _, text = ask(f"{path} --version", [str(path), "--version"], real)
    parts: dict[str, str] = {}
    for library in compiler_libraries(real):
        parts[library.name] = build_id(library) or digests.of(str(library))
    for name in (f"{path.name}.cfg", "clang.cfg", "clang++.cfg", "rocm.cfg"):
        config = real.parent / name
        if config.exists():
            parts[name] = digests.of(str(config))
    return Tool(path, text, digests.of(str(real)), parts)


_COMPILER_LIBRARY = re.compile(r"lib(LLVM|clang-cpp)[-.\w]*\.so[.\d]*$")


def compiler_libraries(real: Path) -> list[Path]:
    """Return the files in which a compiler's work is done when its executable is only a driver."""
    found: list[Path] = []
    if "clang" in real.name:
        with contextlib.suppress(OSError):
            found += [item for item in (real.parent.parent / "lib").iterdir() if _COMPILER_LIBRARY.match(item.name)]
    return sorted({Path(os.path.realpath(item)) for item in found})


_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3


def build_id(path: Path) -> str | None:
    """Return the GNU build-id of an ELF file, which its linker made from the contents; None if it has none.

    Reading it costs 20 µs where a digest of libLLVM costs 0.3 s.
    """
    with contextlib.suppress(OSError, struct.error), path.open("rb") as file:
        header = file.read(64)
        if header[:5] != b"\x7fELF\x02":
            return None
        (table,), size, count = struct.unpack_from("<Q", header, 32), *struct.unpack_from("<HH", header, 54)
        file.seek(table)
        programs = file.read(size * count)
        for number in range(count):
            kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", programs, number * size)
            if kind == _PT_NOTE:
                file.seek(offset)
                found = _note_build_id(file.read(min(length, 4096)))
                if found:
                    return found
    return None


def _note_build_id(notes: bytes) -> str | None:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        name_end = at + 12 + (name_size + 3) // 4 * 4
        if kind == _NT_GNU_BUILD_ID and notes[at + 12 : at + 16] == b"GNU\0":
            return notes[name_end : name_end + size].hex()
        at = name_end + (size + 3) // 4 * 4
    return None
