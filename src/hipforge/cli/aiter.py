"""``hipforge aiter``: the modules and tests of an aiter checkout, unchanged."""

from __future__ import annotations

import collections
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hipforge.cli import output
from hipforge.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_CHECKS = ("memory", "all")
_INCLUDE = click.option(
    "--include", "include", multiple=True, type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A further folder of headers, such as rocPRIM's; may be repeated.",
)  # fmt: skip
_MARKDOWN = click.option("--markdown", is_flag=True, help="Print the result as a table in Markdown.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.group("aiter")
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.pass_context
def command(context: click.Context, checkout: Path) -> None:
    """Work with an aiter CHECKOUT: list what its modules need, build them, run its own tests on the emulator."""
    context.obj = checkout.resolve()


@command.command("list")
@_INCLUDE
@_JSON
@click.pass_obj
def list_(checkout: Path, include: tuple[Path, ...], as_json: bool) -> None:
    """Say of each module whether it builds here, and what it needs otherwise; nothing is compiled."""
    from hipforge.aiter_compat import checkout as checkouts

    found = checkouts.modules(checkout, include)
    if as_json:
        click.echo(json.dumps([asdict(module) for module in found], indent=1))
        return
    width = max(len(module.name) for module in found)
    for module in found:
        click.echo(f"{module.name:{width}}  {module.state}{f': {module.reason}' if module.reason else ''}")
    counts = collections.Counter(module.state for module in found)
    click.echo(f"{len(found)} modules: " + ", ".join(f"{count} {state}" for state, count in counts.most_common()))


@command.command("build")
@click.argument("modules", nargs=-1)
@click.option("--arch", default="gfx950", show_default=True, help="Architectures, separated by commas.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Compile jobs; default from cores and free memory.")
@_INCLUDE
@_MARKDOWN
@click.pass_obj
def build(
    checkout: Path, modules: tuple[str, ...], arch: str, jobs: int | None, include: tuple[Path, ...], markdown: bool
) -> None:
    """Build MODULES, or all that need nothing that is missing; failures do not stop the others (exit 1)."""
    from hipforge.aiter_compat import checkout as checkouts
    from hipforge.cli.build import _summarise
    from hipforge.cli.build_progress import BuildProgress
    from hipforge.jit import fleet

    found = {module.name: module for module in checkouts.modules(checkout, include)}
    for name in modules:
        if name not in found or found[name].state == checkouts.REFUSED:
            unknown = f"the checkout has no such module; it has {', '.join(found)}"
            raise ConfigError(f"{name}: {found[name].reason if name in found else unknown}")
    names = modules or [name for name, module in found.items() if module.state == checkouts.BUILDS]
    wanted = fleet.requests(list(names), [item.strip() for item in arch.split(",") if item.strip()])
    with BuildProgress(output.console(stderr=True)) as progress:
        outcomes = fleet.build_many(wanted, jobs, progress.on_event, progress.on_plan)
    if markdown:
        click.echo(build_table([(each.planned.title, each.status, each.seconds, str(each.error)) for each in outcomes]))
    _summarise(output.console(stderr=markdown), outcomes)
    if any(outcome.status == "failed" for outcome in outcomes):
        sys.exit(1)


@command.command("test", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.option("--checks", type=click.Choice(_CHECKS), default="memory", show_default=True, help="Checkers of kernels.")
@click.option("--case-seconds", default=60.0, show_default=True, help="Stop a case after so long; 0 is never.")
@click.option("--sample", type=click.IntRange(min=0), default=0, help="Of a pytest file so many cases, evenly spread.")
@_INCLUDE
@_MARKDOWN
@_JSON
@click.pass_obj
def test(
    checkout: Path, words: tuple[str, ...], checks: str, case_seconds: float, sample: int, include: tuple[Path, ...],
    markdown: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run aiter's test files op_tests/test_x.py [-- ARGUMENTS] on the emulator, each in a process of its own."""
    from hipforge.aiter_compat.checkout import config_of

    config_of(checkout)
    files = [word for word in words if word.endswith(".py") and not word.startswith("-")]
    arguments = [word for word in words if word not in files]
    paths = [path if (path := Path(word)).is_file() else checkout / word for word in files]
    missing = [path for path in paths if not path.is_file()]
    if not paths or missing:
        wanted = "name a test file, such as op_tests/test_activation.py"
        raise ConfigError(f"there is no {missing[0]}" if missing else wanted)
    table = markdown or as_json
    console = output.console(stderr=table)
    reports = []
    for path in paths:
        reports.append(_run(checkout, path.resolve(), arguments, checks, case_seconds, sample, include, table))
        _show(console, reports[-1])
    if as_json:
        click.echo(json.dumps(reports, indent=1))
    elif markdown:
        click.echo(test_table(reports))
    if any(report["end"] or report["passed"] + report["skipped"] < report["cases"] for report in reports):
        sys.exit(1)


def _run(
    checkout: Path, path: Path, arguments: list[str], checks: str, seconds: float, sample: int,
    include: tuple[Path, ...], apart: bool,
) -> dict[str, Any]:  # fmt: skip
    """Run one test file in a process and return what became of its cases, also if the process died."""
    environment = {**os.environ, "HIPFORGE_DEVICE": "emulator", "PYTHONUNBUFFERED": "1"}
    if checks == "all":
        environment["HIPFORGE_EMULATOR_CHECKS"] = "all"
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hipforge-aiter-") as folder:
        report = Path(folder) / "report.json"
        folders = os.pathsep.join(os.fspath(each.resolve()) for each in include)
        settings = [os.fspath(checkout), folder, os.fspath(report), str(seconds), str(sample), folders]
        command_line = [sys.executable, "-m", "hipforge.aiter_compat.runner", *settings, os.fspath(path), *arguments]
        # Python looks for modules in its working directory first, where a csrc of somebody else's may be.
        # What a file prints must not stand between the lines of a report.
        done = subprocess.run(command_line, env=environment, cwd=folder, stdout=2 if apart else None, check=False)
        nothing: dict[str, Any] = {"cases": [], "end": ""}
        found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else nothing
    if done.returncode < 0:
        found["end"] = f"the process ended with signal {-done.returncode}"
    elif done.returncode and not found["end"]:
        found["end"] = f"exit {done.returncode}"
    counts = collections.Counter(case["status"] for case in found["cases"])
    return {
        "test": os.path.relpath(path, checkout), "arguments": shlex.join(arguments), "checks": checks,
        "cases": len(found["cases"]), "collected": found.get("collected", 0),
        "passed": counts["passed"], "failed": counts["failed"] + counts["fault"], "skipped": counts["skipped"],
        "unfinished": counts["unfinished"], "not_built": counts["not built"],
        "seconds": round(time.perf_counter() - started, 1), "end": found["end"],
        "problems": [case for case in found["cases"] if case["status"] not in ("passed", "skipped")],
    }  # fmt: skip


def _show(console: Console, report: dict[str, Any]) -> None:
    console.print(
        f"{report['test']}: {report['cases']} cases, {report['passed']} passed, {report['failed']} failed, "
        f"{report['skipped']} skipped, {report['unfinished']} unfinished, {report['not_built']} not built, "
        f"{report['seconds']} s",
        highlight=False,
    )
    for case in report["problems"]:
        console.print(f"  {case['status']}: {case['case']}\n    {case['detail']}", markup=False, highlight=False)
    if report["end"]:
        console.print(f"  the file did not come to its end: {report['end']}", markup=False, highlight=False)


def test_table(reports: list[dict[str, Any]]) -> str:
    """Return reports of test files as a table in Markdown, with the first reason of each kind of ending."""
    lines = ["| file | arguments | cases | passed | else | seconds |", "|---|---|---|---|---|---|"]
    for report in reports:
        kinds = collections.Counter(case["status"] for case in report["problems"])
        first = {case["status"]: case["detail"] for case in reversed(report["problems"])}
        ends = [f"{count} {status}: {_cell(first[status])}" for status, count in kinds.items()]
        ends += [f"{report['skipped']} skipped"] if report["skipped"] else []
        ends += [f"the file did not come to its end: {_cell(report['end'])}"] if report["end"] else []
        of = f" of {report['collected']}" if report["collected"] > report["cases"] else ""
        arguments = f"`{report['arguments']}`" if report["arguments"] else ""
        lines.append(
            f"| `{report['test']}` | {arguments} | {report['cases']}{of} | {report['passed']} | {'; '.join(ends)} | "
            f"{report['seconds']:.0f} |"
        )
    return "\n".join(lines)


def build_table(outcomes: list[tuple[str, str, float, str]]) -> str:
    """Return builds, as ``("module arch", status, seconds, error)``, as a table in Markdown: a row per module."""
    found: dict[str, dict[str, str]] = {}
    for title, status, seconds, error in outcomes:
        name, _, arch = title.rpartition(" ")
        reason = next((line for line in error.splitlines() if " error: " in line), error)
        found.setdefault(name, {})[arch] = f"failed: {_cell(reason)}" if status == "failed" else f"{seconds:.0f} s"
    archs = list(dict.fromkeys(arch for row in found.values() for arch in row))
    lines = [f"| module | {' | '.join(archs)} |", "|---|" + "---|" * len(archs)]
    lines += [f"| `{name}` | {' | '.join(row.get(arch, '') for arch in archs)} |" for name, row in found.items()]
    return "\n".join(lines)


def _cell(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    return lines[0][:200].replace("|", "\\|")
