"""Damaged JSON: registries that users write and manifests of the cache, changed in shape and in bytes.

A registry is read or refused with a ConfigError; a manifest that is not what was written makes a miss, never an error,
and never gives another library than the one that was built.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from helpers.json_mutants import mutant

from hipforge import settings
from hipforge.errors import HipforgeError
from hipforge.jit import hip_module, maintenance, obtain, registry, toolchain, why
from hipforge.jit.cache import cache_dir, prebuilt, store
from stress.processes import stand_in


def _text(choose: random.Random, document: Any) -> bytes:
    """A damaged document as bytes: most of them still JSON."""
    raw = bytearray(json.dumps(mutant(choose, document)).encode("utf-8", "surrogatepass"))
    if choose.random() < 0.2:
        for _ in range(choose.randrange(1, 4)):
            raw[choose.randrange(len(raw))] = choose.randrange(256)
    if choose.random() < 0.05:
        del raw[choose.randrange(len(raw)) :]
    if choose.random() < 0.02:
        raw = bytearray(b"[" * 100_000)  # deeper than a parser goes
    return bytes(raw)


def registries(seed: int, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Read ``count`` damaged registries and request a module of each that is accepted."""
    choose = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    shipped = json.loads((Path(registry.__file__).parent / registry.SHIPPED).read_text())
    more = {
        "blob_gen_cmd": ["${PYTHON} x.py ${GEN}"], "extra_include": ["/x"], "extra_ldflags": ["-lx"], "ffi": "abi",
        "flags_extra_cc": ["-O2"], "verbose": False,
    }  # fmt: skip
    path = folder / "own.json"
    ended: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(count):
        name = choose.choice(sorted(shipped))
        raw = _text(choose, {name: {**shipped[name], **(more if choose.random() < 0.5 else {})}})
        path.write_bytes(raw)
        try:
            for entry in registry.read_file(path).values():
                variant = next(entry.all_variants(), None)
                if variant is not None and entry.archs:
                    hip_module.request(entry, variant, entry.archs[0])
            ended["read"] += 1
        except HipforgeError:
            ended["refused"] += 1
        except Exception as error:
            ended["raw exception"] += 1
            wrong.append(f"seed {seed}, registry {number}: {type(error).__name__}: {error}: {raw[:1500]!r}")
    return ended, wrong


def manifests(seed: int, count: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Damage the manifest of one entry ``count`` times and look for the entry in every way there is."""
    choose = random.Random(seed)
    box = stand_in(folder / "manifests")
    ended: Counter[str] = Counter()
    wrong: list[str] = []
    name = "sample0"
    registry.register(box.sources / f"{name}.json")
    try:
        with settings.scope(CACHE_DIR=box.cache, HIPCC=box.hipcc):
            cache_dir._store.cache_clear()
            toolchain._selected.clear()
            entry, spec = box.build(name).entry, box.spec(name)
            wanted = hip_module.request(registry.module(name), None, "gfx950")
            whole = (entry.path / store.MANIFEST).read_bytes()
            library = entry.manifest.library_sha256
            for number in range(count):
                raw = _text(choose, json.loads(whole))
                (entry.path / store.MANIFEST).write_bytes(raw)
                try:
                    found = obtain.look(wanted, use=False)
                    maintenance.entries()
                    maintenance.recorded_seconds(name, name, "gfx950")
                    why.explain(name, None, "gfx950")
                    read = store.read_entry(entry.path)
                    if read is not None:
                        list(why.changed(read, spec))
                        prebuilt.misfit(read, wanted)
                except Exception as error:
                    ended["raw exception"] += 1
                    wrong.append(f"seed {seed}, manifest {number}: {type(error).__name__}: {error}: {raw[:1500]!r}")
                    continue
                ended[type(found).__name__] += 1
                if isinstance(found, obtain.Ready) and found.entry.manifest.library_sha256 != library:
                    wrong.append(f"seed {seed}, manifest {number}: another library is accepted")
    finally:
        registry._registered.pop(name, None)
        toolchain._selected.clear()
    return ended, wrong
