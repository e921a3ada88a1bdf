"""Record what one toolchain makes of this checkout, and print records side by side as docs/toolchains.md.

    python .ci/toolchains.py record OUT.json [--at-most N | --built] [--tests 'TEXT'] [--note 'TEXT']
    python .ci/toolchains.py table REFERENCE.json [OTHER.json ...] > docs/toolchains.md

``record`` builds what is missing: every variant, or N of each module and architecture, spread evenly; with ``--built``
it builds nothing and takes what is in the cache. Registers and spills are compared with the first record's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from hipforge.jit import fleet, registry, toolchain
from hipforge.jit.hip_module import Request

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ("gfx950", "gfx942")

_HEAD = """\
# Toolchains

What each compiler makes of the modules for gfx950 and gfx942, written by `.ci/toolchains.py`; `.ci/rocm`
repeats a column on any machine where a Debian root can be made. Registers, spills and LDS are *compiled*: they are read
from the code objects. Nothing here ran on a GPU: tests and demo run the built code on the emulator.
"""


def chosen(at_most: int | None) -> list[Request]:
    """Return the requests to record: of each module and architecture all, or ``at_most`` spread evenly."""
    wanted = []
    for name, entry in registry.modules().items():
        for arch in (arch for arch in ARCHS if arch in entry.archs):
            found = fleet.requests([name], [arch])
            count = min(at_most or len(found), len(found))
            wanted += [found[number * len(found) // count] for number in range(count)]
    return wanted


def cached() -> list[Request]:
    """Return the requests whose modules are in the cache."""
    planned = fleet.plan(fleet.requests(registry.modules(), ARCHS))
    return [plan.request for plan in planned if plan.entry is not None]


def record(out: Path, requests: list[Request], tests: str, note: str) -> None:
    """Build the variants with the toolchain in use and write what came out."""
    def report(event: fleet.Event) -> None:
        sys.stderr.write(f"{event.kind} {event.planned.title}\n")

    outcomes = fleet.build_many(requests, None, report)
    variants: dict[str, Any] = {}
    for outcome in outcomes:
        if outcome.entry is None:
            variants[outcome.planned.title] = {"error": str(outcome.error).splitlines()}
        else:
            kernels = outcome.entry.manifest.kernels.values()
            variants[outcome.planned.title] = {
                kernel["name"]: [kernel["vgpr"], kernel["vgpr_spills"], kernel["scratch_bytes"]] for kernel in kernels
            }
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%h"]
    made = {
        "compiler": toolchain.select("gfx950").description,
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in ("torch", "triton")},
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "tests": tests,
        "note": note,
        "registered": len(fleet.requests(registry.modules(), ARCHS)),
        "variants": variants,
    }
    out.write_text(json.dumps(made, indent=1) + "\n")
    refused = sum("error" in kernels for kernels in variants.values())
    sys.stdout.write(f"{made['compiler']}: {len(variants) - refused} of {len(variants)} variants built\n")


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, str, list[int], list[int]]]:
    """Yield (variant, kernel, ours, theirs) where registers, spills or scratch of two records differ."""
    for title, kernels in one["variants"].items():
        theirs = other["variants"].get(title, {})
        if "error" in kernels or "error" in theirs:
            continue
        for name, figures in kernels.items():
            if name in theirs and theirs[name] != figures:
                yield title, name, figures, theirs[name]


def table(records: list[dict[str, Any]]) -> str:
    """Return the page for records, the first of which is the reference."""
    lines = [_HEAD, "| compiler | date, commit | Python, torch, triton | variants built | VGPRs differ | tests |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for made in records:
        variants = made["variants"]
        good = sum("error" not in kernels for kernels in variants.values())
        changed = "(reference)" if made is records[0] else f"{len(list(differences(records[0], made)))} kernels"
        packages = made["packages"]
        lines.append(
            f"| {made['compiler']} | {made['date']}, {made['commit']} "
            f"| {made['python']}, {packages['torch']}, {packages['triton']} "
            f"| {good} of {len(variants)} tried, of {made['registered']} | {changed} | {made['tests'] or 'not run'} |"
        )
    lines += [f"\n{made['compiler']}: {made['note']}" for made in records if made["note"]]
    for made in records:
        errors = {title: kernels["error"] for title, kernels in made["variants"].items() if "error" in kernels}
        if errors:
            lines += [f"\n## Refused with {made['compiler']}\n", "| variant | why |", "|---|---|"]
            lines += [f"| {title} | {_reason(text)} |" for title, text in errors.items()]
    for made in records[1:]:
        found = list(differences(records[0], made))
        if found:
            lines += [f"\n## {made['compiler']} beside {records[0]['compiler']}\n",
                      "VGPRs, spilled VGPRs and bytes of scratch of the kernels that differ.\n",
                      "| variant | kernel | reference | here |", "|---|---|---|---|"]  # fmt: skip
            lines += [
                f"| {title} | `{name}` | {' / '.join(map(str, ours))} | {' / '.join(map(str, theirs))} |"
                for title, name, ours, theirs in found
            ]
    return "\n".join(lines) + "\n"


def _reason(text: list[str]) -> str:
    said = [line for line in text if line.strip() and not line.startswith(("log:", "rerun:"))]
    return " ".join(said[1:] or said)[:240].replace("|", "\\|")


def main() -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--at-most", type=int, help="variants of each module and architecture; default all")
    recording.add_argument("--built", action="store_true", help="only what is in the cache")
    recording.add_argument("--tests", default="", help="what the tests gave, for the table")
    recording.add_argument("--note", default="")
    printing = commands.add_parser("table")
    printing.add_argument("records", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "record":
        requests = cached() if options.built else chosen(options.at_most)
        record(options.out, requests, options.tests, options.note)
    else:
        sys.stdout.write(table([json.loads(path.read_text()) for path in options.records]))


if __name__ == "__main__":
    main()
