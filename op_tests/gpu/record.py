"""The record of the last run on a GPU: which sources of which module variants were tested, where, and how.

``record.json`` maps a module variant to the digest of its sources, the card, the driver, the date, how many tests
called it and passed, and the worst relative error of its results: the largest ``helpers/errors.py`` saw beside what a
test expected, float64's result or its rounding; null where the run saw none, as where all tests compare bit for bit.
``pending.json`` maps a module to the reason why no GPU has run its present sources. :func:`unrecorded` says what
neither of the two covers, and ``.ci/run`` fails on it.

    python op_tests/gpu/record.py            build every module for sm_90 and compare with the record
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hipforge import archs
from hipforge.jit import fleet, hip_module, obtain, registry
from hipforge.jit.cache.store import Manifest
from hipforge.jit.digest import ABSENT, text_digest

FOLDER = Path(__file__).parent
RECORD, PENDING = FOLDER / "record.json", FOLDER / "pending.json"
ARCHS = tuple(name for name, info in archs.ARCHS.items() if not info.emulated)
"""Architectures whose kernels only a GPU can run."""


def label(module: str, variant: dict[str, int | str]) -> str:
    """Return what the record calls a variant: ``module_x-HF_INPUT=bf16``."""
    return "-".join([module, *(f"{name}={value}" for name, value in variant.items())])


def digest(manifest: Manifest) -> str:
    """Return the digest of what determines a variant's code but for the compiler: its sources, headers and commands.

    Files count by content: whether a source is named below ``csrc`` or below its module's folder depends on which
    description of the module built it first.
    """
    own = ("${CSRC}/", "${MODULE_DIR}/")
    sources = sorted(of for name, of in manifest.dependencies if name.startswith(own) and of != ABSENT)
    return text_digest(json.dumps([sources, manifest.commands]))[:16]


def requests() -> Iterator[hip_module.Request]:
    """Yield every variant of every module for the architectures of the record."""
    for entry in registry.shipped().values():
        for arch in ARCHS:
            if arch in entry.archs:
                yield from (hip_module.request(entry, variant, arch) for variant in entry.ahead_variants(arch))


def digests() -> dict[str, str]:
    """Return the present digest of each variant; builds what is not built."""
    wanted = list(requests())
    fleet.build_many(wanted, None, lambda *_: None, lambda *_: None)
    manifests = (obtain.module(request).entry.manifest for request in wanted)
    return {label(manifest.module, manifest.variant): digest(manifest) for manifest in manifests}


def read(path: Path) -> dict[str, Any]:
    """Return a JSON file's object; empty where there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def unrecorded(present: dict[str, str], record: dict[str, Any], pending: dict[str, str]) -> list[str]:
    """Return one line for each variant whose present sources no GPU has run, and for each reason that is stale."""
    lines, used = [], set()
    for name, now in present.items():
        module = name.split("-", 1)[0]
        run = record.get(name)
        if run is not None and run["digest"] == now:
            continue
        if module in pending:
            used.add(module)
            continue
        changed = "its sources have changed since" if run else "there is no run of it"
        lines.append(f"{name}: {changed}; run `make gpu-test` on a GPU, or give the reason in pending.json")
    lines += [f"{module}: pending.json names it, but the record covers it" for module in pending if module not in used]
    return lines


def main() -> int:
    """Compare with the record; returns the exit status."""
    record, pending = read(RECORD), read(PENDING)
    present = digests()
    lines = unrecorded(present, record, pending)
    for line in lines:
        sys.stdout.write(f"gpu record: {line}\n")
    covered = sum(name in record and record[name]["digest"] == now for name, now in present.items())
    by_reason: dict[str, list[str]] = {}
    for module, reason in pending.items():
        by_reason.setdefault(reason, []).append(module)
    waiting = "".join(f"; pending: {', '.join(modules)} ({reason})" for reason, modules in by_reason.items())
    sys.stdout.write(f"gpu record: {covered} of {len(present)} module variants as last run on a GPU{waiting}\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
