"""Shipped kernels with one deliberate mistake: what shows that a test can fail."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hipforge.csrc
from hipforge import devices
from hipforge.jit import registry
from hipforge.jit.compile_ops import compile_ops

SOURCES = Path(hipforge.csrc.__file__).parent


def planted(
    root: Path,
    shipped: Callable[..., Any],
    source: str,
    line: str,
    becomes: str,
    *,
    unit: str | None = None,
    variants: Mapping[str, Sequence[object]] | None = None,
) -> Callable[..., Any]:
    """Return a stub like ``shipped``, built from a copy of its sources with one line replaced.

    Args:
        root: an empty directory of the test's own; the last part of its path must be unlike those of other faults.
        shipped: the stub.
        source: the file with the line, below csrc/; ``line`` occurs in it once. A header below csrc/include takes the
            shipped one's place.
        line: what is replaced; nothing if it is empty.
        becomes: by what.
        unit: the file that is compiled, below csrc/; ``source`` by default.
        variants: of the module, as in the registry.
    """
    folders = {folder.name for folder in SOURCES.iterdir() if folder.is_dir()}  # families include each other's headers
    if not source.startswith("include/"):
        folders.remove("include")
    for folder in folders:
        shutil.copytree(SOURCES / folder, root / folder)
    # A vendor's headers are included through macros that give names in angles, which would find the shipped ones.
    for path in (path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".h", ".cu")):
        text = path.read_text()
        quoted = re.sub(r"^#include HF_VENDOR_HEADER\((.*)\)", r'#include "hipforge/amd/\1"', text, flags=re.MULTILINE)
        quoted = re.sub(r"^#include HF_FAMILY_HEADER\((.*)\)", r'#include "amd/\1"', quoted, flags=re.MULTILINE)
        if quoted != text:
            path.write_text(quoted)
    edited = root / source
    text = edited.read_text()
    assert not line or text.count(line) == 1, f"{line!r} stands {text.count(line)} times in {source}"
    edited.write_text(text.replace(line, becomes) if line else text)
    entry: dict[str, object] = {"srcs": [str(root / (unit or source))], "archs": [devices.current().default_arch]}
    if "include" in folders:
        entry["flags_extra_hip"] = ["-iquote", str(root / "include")]  # searched before the shipped one
    if variants:
        entry["variants"] = variants
    module = f"module_planted_{root.parent.name}_{root.name}".replace("-", "_")
    path = root / "modules.json"
    path.write_text(json.dumps({module: entry}))
    registry.register(path)
    stub = shipped.stub  # type: ignore[attr-defined]
    mutates = tuple(one.name for one in stub.signature.parameters if one.mutated)
    return compile_ops(module, fc_name=shipped.__name__, variant=stub.variant, mutates=mutates)(
        shipped.__wrapped__  # type: ignore[attr-defined]
    )
