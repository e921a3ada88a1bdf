"""Build the documentation: write the pages of ops, draw the pictures, run mkdocs over docs/, every warning an error.

    python .ci/docs.py [--site DIR]

A page of ops has the docstrings of its module's ops, whose examples the tests run, and the modelled times of
docs/op_times.json, which .ci/docs_times.py writes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from typecheck import ROOT, SOURCE

DOCS = ROOT / "docs"


def homes() -> dict[str, list[str]]:
    """Return the public ops by the module that defines them."""
    from hipforge.ops import public_names

    found: dict[str, list[str]] = {}
    for name, module in public_names().items():
        found.setdefault(module, []).append(name)
    return found


def time_table(ops: list[str], times: dict[str, Any]) -> list[str]:
    """Return the table of modelled times of some ops; empty where none has any."""
    rows = [
        f"| `{op}` | `{one['shape']}` | {one['gpu']} | {one['kernel_us']:.2f} | {one['replay_us']:.2f} | "
        f"{one['launches']} | {one['bound']} |"
        for op in ops
        for one in (times[arch].get(op) for arch in times)
        if one is not None
    ]
    if not rows:
        return []
    first = rows[0].split("`")
    return [
        "## Modelled times", "",
        "Microseconds from [the model of time](../time-model.md), operands in HBM at the start. Not measured.", "",
        "| op | shape | GPU | kernels, µs | replayed in a graph, µs | launches | bound |",
        "|---|---|---|---|---|---|---|", *rows, "",
        f"`hipforge time {first[1]} {first[3]}` prints them with what the waves wait for.", "",
    ]  # fmt: skip


def page(module: str, ops: list[str], times: dict[str, Any]) -> str:
    """Return the page of one module's ops."""
    from hipforge.cli.profile_subjects import SUBJECTS

    lines = [f"# {module.rpartition('.')[2]}", "", f"::: {module}", "    options:", "      members: []",
             "      show_root_heading: false", "      show_root_toc_entry: false", ""]  # fmt: skip
    for op in ops:
        lines += [f"::: {module}.{op}", ""]
        if op in SUBJECTS:
            subject = SUBJECTS[op]
            example = ",".join(map(str, subject.example))
            lines += [f"On the command line a shape of `{op}` is `{','.join(subject.shape)}`, as in `{example}`.", ""]
    return "\n".join([*lines, *time_table(ops, times)])


def write_pages(folder: Path) -> None:
    """Write the pages of ops and their index below ``folder``."""
    folder.mkdir(parents=True)
    times = json.loads((DOCS / "op_times.json").read_text())
    index = ["# Ops", "", "| page | what it has | ops |", "|---|---|---|"]
    for module, ops in homes().items():
        name = module.rpartition(".")[2]
        (folder / f"{name}.md").write_text(page(module, ops, times))
        sentence = (importlib.import_module(module).__doc__ or "").partition("\n")[0]
        index.append(f"| [{name}]({name}.md) | {sentence} | {', '.join(f'`{op}`' for op in ops)} |")
    every = sorted({op for arch in times.values() for op in arch})
    (folder / "index.md").write_text("\n".join([*index, "", *time_table(every, times)]))


def gpu_page() -> str:
    """Return the page of the module variants that a GPU ran, and of the modules whose present sources none has."""
    folder = ROOT / "op_tests" / "gpu"
    record, pending = (json.loads((folder / f"{name}.json").read_text()) for name in ("record", "pending"))
    lines = [
        "# Kernels run on a GPU", "",
        "`make gpu-test` runs the tests of the sm_90 modules on the GPU that is there and writes this record.",
        "A module named below it has changed since, or has not run yet.", "",
        "An error is the Frobenius norm of what a result is off over that of what a test expects: float64's result, or",
        "its rounding. It is empty where a run saw none, as where all tests compare bit for bit.", "",
        "| module variant | card | driver | date | tests passed | worst relative error |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, run in record.items():
        error = "" if run["worst_error"] is None else f"{run['worst_error']:.1e}"
        lines.append(f"| `{name}` | {run['card']} | {run['driver']} | {run['date']} | {run['tests']} | {error} |")
    lines += ["", *(f"- `{module}` is pending: {reason}." for module, reason in pending.items())]
    return "\n".join([*lines, ""])


def draw(pictures: Path) -> None:
    """Make the pictures of the page about them by the commands that it names, on the emulator."""
    environment = {**os.environ, "HIPFORGE_DEVICE": "emulator", "HIPFORGE_EMULATOR_QUIET": "1"}
    page = (DOCS / "guide" / "pictures.md").read_text()
    for line in re.findall(r"^(?:hipforge|python) .* --plot \S+$", page, re.MULTILINE):
        program, *words, picture = shlex.split(line)
        before = [sys.executable, *(["-c", "from hipforge.cli import main; main()"] if program == "hipforge" else [])]
        words = [str(pictures / word) if word.endswith(".csv") else word for word in words]
        command = [*before, *words, pictures / picture]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def with_example_sections(ops: Path) -> None:
    """Rewrite a copied folder of ops so that mkdocstrings reads it as a reader should.

    ``Examples:`` is the section that it knows (``Example:`` would become text, its prompts quotations), Sphinx's roles
    become code, and the parameter that takes the decided path, which callers do not pass, is left out.
    """
    for path in ops.rglob("*.py"):
        text = path.read_text()
        text = re.sub(r"^( +)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
        text = re.sub(r":(?:func|class|meth|mod|data):`~?([^`]+)`", r"`\1`", text)
        text = re.sub(r"^    _?taken: Accepted,\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"^        _?taken: the path that was decided.*\n", "", text, flags=re.MULTILINE)
        path.write_text(text)


def build(site: Path) -> int:
    """Build the site and return mkdocs's exit status."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        source, tree = top / "docs", top / "tree"
        shutil.copytree(DOCS, source, ignore=shutil.ignore_patterns("*.json", "*.py"))
        shutil.copyfile(ROOT / "CHANGELOG.md", source / "changelog.md")
        write_pages(source / "ops")
        (source / "gpu-record.md").write_text(gpu_page())
        draw(source / "pictures")
        pages = json.dumps(["ops/index.md", *sorted(f"ops/{path.name}" for path in (source / "ops").glob("[!i]*.md"))])
        configuration = top / "mkdocs.yml"
        configuration.write_text((ROOT / "mkdocs.yml").read_text().replace("[ops/index.md]", pages))
        shutil.copytree(SOURCE, tree, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))  # follows the links
        with_example_sections(tree / "hipforge" / "ops")
        environment = {
            **os.environ,
            "HIPFORGE_DOCS_SOURCE": str(source), "HIPFORGE_DOCS_TREE": str(tree), "HIPFORGE_DOCS_SITE": str(site),
            "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true",
        }  # fmt: skip
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "-f", str(configuration)]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    """Command-line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site")
    return build(parser.parse_args().site.resolve())


if __name__ == "__main__":
    sys.exit(main())
