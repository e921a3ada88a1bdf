"""``hipforge explain``: which path an op takes at a shape, and why not the others; nothing is built or run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from hipforge import archs
from hipforge.cli.profile_subjects import SHAPES_HELP, SUBJECTS, call_of

if TYPE_CHECKING:
    from hipforge.ops.core.dispatch import Explanation


@click.command("explain", epilog=SHAPES_HELP)
@click.argument("op", type=click.Choice(sorted(SUBJECTS)), metavar="OP")
@click.argument("shape")
@click.option("--arch", type=click.Choice(list(archs.ARCHS)), help="Emulate it; default as HIPFORGE_EMULATE says.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(op: str, shape: str, arch: str | None, as_json: bool) -> None:
    """Say which kernel and configuration OP takes at SHAPE, where that comes from, and why not another path."""
    from hipforge.ops.core.dispatch import explain

    if arch is not None:
        os.environ["HIPFORGE_EMULATE"] = arch
    call = call_of(op, shape)
    found = explain(call.func, *call.args, **call.keywords)
    click.echo(json.dumps(asdict(_plain(found)), indent=1, default=str) if as_json else str(found))


def _plain(found: Explanation) -> Explanation:
    """Return the explanation with ordinary dictionaries, which asdict can copy."""
    row = None if found.row is None else dict(found.row)
    return replace(found, configuration=dict(found.configuration), row=row, refused=dict(found.refused))
