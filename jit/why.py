"""Why would a module be a hit or a miss? Names what changed since it was last built."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hipforge.jit import hip_module, maintenance, obtain, registry
from hipforge.jit.cache import cache_dir, store
from hipforge.jit.cache.store import Entry
from hipforge.jit.digest import ABSENT, text_digest
from hipforge.jit.spec import BuildSpec, VariantValue

_SHORT = 72


@dataclass(frozen=True)
class Change:
    """One changed ingredient or file: its name, its digest (or short value) then and now, and the change in words."""

    name: str
    old: str | None
    new: str | None
    detail: str = ""


@dataclass(frozen=True)
class Explanation:
    """Why a module is a hit or a miss; ``compared_with`` is the entry that the changes are relative to."""

    title: str
    status: Literal["hit", "prebuilt", "miss", "failed"]
    path: Path | None
    compared_with: Path | None
    changes: tuple[Change, ...]
    note: str


def explain(module: str, variant: Mapping[str, VariantValue] | None, arch: str) -> Explanation:
    """Return whether a module would be a hit, and if not, what exactly changed since it was last built.

    Raises:
        ArchError: the module has no code for ``arch``.
        ConfigError: the module or the variant is not known.
    """
    wanted = hip_module.request(registry.module(module), variant, arch)
    title = f"{wanted.stem} for {wanted.arch}"
    found = obtain.look(wanted, use=False)
    if isinstance(found, obtain.Failed):
        compared = None if found.entry is None else found.path
        return Explanation(title, "failed", found.path, compared, (), str(found.error))
    if isinstance(found, obtain.Missing):
        if found.spec is None:
            return Explanation(title, "miss", None, None, (), str(found.error))
        return _explain_miss(title, found.spec, cache_dir.reading_roots())
    path = found.entry.path
    if found.prebuilt:
        return Explanation(title, "prebuilt", path, path, (), "built ahead of time; no compiler is needed")
    return Explanation(title, "hit", path, path, (), "every ingredient and every file is unchanged")


def _explain_miss(title: str, spec: BuildSpec, roots: list[Path]) -> Explanation:
    found = [
        item
        for root in roots
        for item in maintenance.entries(root)
        if item.path.parent.name == spec.target and item.path.name.rsplit("-", 2)[0] == spec.stem
    ]
    readable = [(item, item.entry) for item in found if item.entry is not None]
    if not readable:
        note = f"{found[0].path} is damaged: its manifest cannot be read" if found else "it was never built here"
        return Explanation(title, "miss", None, found[0].path if found else None, (), note)
    # The same key with other headers explains more than the latest build with another key.
    item, entry = max(readable, key=lambda pair: (pair[1].manifest.key == spec.key, pair[1].manifest.built_at))
    changes = tuple(changed(entry, spec))
    note = "" if changes else f"{item.path}: {store.damage(entry, cache_dir.digests())}"
    return Explanation(title, "miss", None, item.path, changes, note)


def changed(entry: Entry, spec: BuildSpec) -> Iterator[Change]:
    """Yield every ingredient and every file whose value in ``entry`` is not the present one."""
    old, new = entry.manifest.ingredients, spec.ingredients
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield _change(name, old.get(name), new.get(name))
    digests = cache_dir.digests()
    for hidden, digest in entry.manifest.dependencies:
        try:
            now = digests.of_any(spec.roots.show(hidden))
        except KeyError:
            now = ABSENT
        if now != digest and f"source:{hidden}" not in new:
            yield Change(f"file:{hidden}", digest, now)


def _change(name: str, old: str | None, new: str | None) -> Change:
    detail = ""
    if old is not None and new is not None and max(len(old), len(new)) > _SHORT:
        words = difflib.ndiff(old.split(), new.split())
        detail = " ".join(word for word in words if word.startswith(("+ ", "- ")))
    return Change(name, _short(old), _short(new), detail)


def _short(value: str | None) -> str | None:
    return value if value is None or len(value) <= _SHORT else text_digest(value)
