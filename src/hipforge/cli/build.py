"""``hipforge build``: modules ahead of their first call, with live progress and a summary of what failed."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from hipforge.cli import output
from hipforge.cli.build_progress import BuildProgress
from hipforge.cli.options import REGISTER_OPTION, module_names
from hipforge.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from hipforge.jit.fleet import BuildOutcome, Planned


@click.command("build")
@click.argument("modules", nargs=-1, shell_complete=module_names)
@click.option("--all", "everything", is_flag=True, help="Every registered module.")
@click.option("--arch", default="gfx950", show_default=True, help="Architectures, separated by commas.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Compile jobs; default from cores and free memory.")
@click.option("--every-variant", is_flag=True, help="Also variants that only tuners and explicit calls use.")
@REGISTER_OPTION
@click.option("--dry-run", is_flag=True, help="Show hits, misses and how long a build would take; build nothing.")
@click.option("-v", "--verbose", is_flag=True, help="With --dry-run, show the commands too.")
@click.option("--json", "as_json", is_flag=True, help="Print outcomes as JSON.")
def command(
    modules: tuple[str, ...],
    everything: bool,
    arch: str,
    jobs: int | None,
    every_variant: bool,
    dry_run: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Build MODULES for the given architectures ahead of their first call; failures do not stop the others (exit 1)."""
    from hipforge.jit import fleet, registry

    if everything == bool(modules):
        raise ConfigError("name the modules to build, or give --all (not both)")
    names = list(registry.modules()) if everything else list(modules)
    archs = [name.strip() for name in arch.split(",") if name.strip()]
    wanted = fleet.requests(names, archs, every_variant=every_variant)
    console = output.console(stderr=as_json)
    if dry_run:
        planned = fleet.plan(wanted)
        _show_plan(console, planned, as_json, verbose)
        if not as_json:
            _summarise_plan(console, planned, jobs)
        return
    with BuildProgress(output.console(stderr=True)) as progress:
        outcomes = fleet.build_many(wanted, jobs, progress.on_event, progress.on_plan)
    if as_json:
        click.echo(json.dumps([_as_dict(outcome) for outcome in outcomes], indent=1))
    _summarise(console, outcomes)
    if any(outcome.status == "failed" for outcome in outcomes):
        sys.exit(1)


def _show_plan(console: Console, planned: list[Planned], as_json: bool, verbose: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "module": item.title,
            "state": "hit" if item.entry is not None else "problem" if item.problem is not None else "miss",
            "estimate_seconds": item.estimate,
            "problem": None if item.problem is None else str(item.problem),
            "commands": list(item.commands) if item.entry is None else [],
        }
        for item in planned
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        estimate = "" if row["estimate_seconds"] is None else f"  about {row['estimate_seconds']:.1f} s"
        console.print(f"{row['state']:8}{row['module']}{estimate}", highlight=False)
        for line in row["commands"] if verbose else ():
            console.print(f"        {line}", markup=False, highlight=False, soft_wrap=True)
        if row["problem"]:
            console.print(f"        {row['problem']}", markup=False, highlight=False, soft_wrap=True, style="red")


def _summarise_plan(console: Console, planned: list[Planned], jobs: int | None) -> None:
    from hipforge.jit import build, fleet

    hits = sum(item.entry is not None for item in planned)
    problems = sum(item.problem is not None for item in planned)
    at_once = build.capped_jobs(jobs)
    console.print(
        f"{hits} hits, {len(planned) - hits - problems} misses, {problems} problems; a build would take about "
        f"{fleet.expected_seconds(planned, at_once):.0f} s with {at_once} {'job' if at_once == 1 else 'jobs'}",
        highlight=False,
    )


def _as_dict(outcome: BuildOutcome) -> dict[str, Any]:
    return {
        "module": outcome.planned.title,
        "status": outcome.status,
        "seconds": round(outcome.seconds, 3),
        "path": None if outcome.entry is None else str(outcome.entry.path),
        "error": None if outcome.error is None else str(outcome.error),
    }


def _summarise(console: Console, outcomes: list[BuildOutcome]) -> None:
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in ("hit", "built", "failed")}
    seconds = sum(outcome.seconds for outcome in outcomes)
    console.print(
        f"{counts['built']} built ({seconds:.1f} s of module builds), {counts['hit']} already there, "
        f"{counts['failed']} failed",
        highlight=False,
    )
    for outcome in outcomes:
        if outcome.error is not None:
            console.print(f"\n[red]{outcome.planned.title}[/]", highlight=False, soft_wrap=True)
            console.print(str(outcome.error), markup=False, highlight=False, soft_wrap=True)
