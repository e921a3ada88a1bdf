"""``hipforge cache``: what is cached, how large it is, and why a module would be built again."""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from hipforge import devices, settings
from hipforge.cli import output
from hipforge.cli.options import REGISTER_OPTION, matching_variants, module_names, parse_variant

if TYPE_CHECKING:
    from hipforge.jit.cache.store import Entry
    from hipforge.jit.why import Explanation

UNFOLDED_COLUMNS = 1000
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")


class Size(click.ParamType):
    """A size in bytes, as :func:`hipforge.settings.parse_size` reads it."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes; another text is a usage error."""
        try:
            return settings.parse_size(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a size: give bytes, or a number with K, M, G or T, as in 500M", param, ctx)


def human(count: float) -> str:
    """Return a byte count for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


@click.group("cache")
def command() -> None:
    """List, measure, prune or clear the cache, or explain a miss."""


@command.command("list")
@JSON_OPTION
def list_entries(as_json: bool) -> None:
    """List every entry, most recently used first, after the modules that were built ahead of time."""
    from hipforge.jit import maintenance
    from hipforge.jit.cache import prebuilt

    ahead = prebuilt.entries()
    found = maintenance.entries()
    if as_json:
        rows: list[dict[str, Any]] = [_prebuilt_row(entry) for entry in ahead]
        rows += [
            {
                "path": str(item.path),
                "module": item.entry.manifest.module if item.entry else None,
                "variant": item.entry.manifest.variant if item.entry else None,
                "target": item.entry.manifest.target if item.entry else None,
                "bytes": item.bytes,
                "build_seconds": item.entry.manifest.build_seconds if item.entry else None,
                "last_used": item.last_used,
                "in_use": item.in_use,
                "prebuilt": False,
            }
            for item in found
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("entry", overflow="fold")  # names take what the numbers leave
    for heading in ("size", "build", "last used", ""):
        table.add_column(heading, no_wrap=True)
    for entry in ahead:
        row = _prebuilt_row(entry)
        name = f"{row['target']}/{entry.path.name}"
        table.add_row(name, human(row["bytes"]), f"{row['build_seconds']:.1f} s", "", "prebuilt")
    for item in found:
        state = "damaged" if item.damaged else ""
        seconds = f"{item.entry.manifest.build_seconds:.1f} s" if item.entry else state
        when = datetime.datetime.fromtimestamp(item.last_used).isoformat(" ", "minutes")
        name = f"{item.path.parent.name}/{item.path.name}"
        table.add_row(name, human(item.bytes), seconds, when, "in use" if item.in_use else "")
    console = output.console()
    if not console.is_terminal:  # an entry is one line of what reads it
        console.width = UNFOLDED_COLUMNS
    console.print(table)


def _prebuilt_row(entry: Entry) -> dict[str, Any]:
    from hipforge.jit import maintenance

    manifest = entry.manifest
    return {
        "path": str(entry.path),
        "module": manifest.module,
        "variant": manifest.variant,
        "target": manifest.target,
        "bytes": maintenance.tree_bytes(entry.path),
        "build_seconds": manifest.build_seconds,
        "last_used": None,
        "in_use": False,
        "prebuilt": True,
    }


@command.command("size")
@JSON_OPTION
def show_size(as_json: bool) -> None:
    """Print the size of the whole cache on disk."""
    from hipforge.jit import maintenance

    total = maintenance.size()
    click.echo(json.dumps({"bytes": total}) if as_json else human(total))


@command.command("prune")
@click.option("--max-size", required=True, type=Size(), help="Keep at most this much, such as 500M or 4G.")
@JSON_OPTION
def prune(max_size: int, as_json: bool) -> None:
    """Remove least recently used entries until the cache fits; entries in use stay."""
    from hipforge.jit import maintenance

    _report_removed([str(path) for path in maintenance.prune(max_size)], as_json)


@command.command("clear")
@JSON_OPTION
def clear(as_json: bool) -> None:
    """Remove every entry that is not in use, and the records of failed builds."""
    from hipforge.jit import maintenance

    _report_removed([str(path) for path in maintenance.clear()], as_json)


def _report_removed(paths: list[str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"removed": paths}, indent=1))
    else:
        click.echo(f"removed {len(paths)} entries")


@command.command("why")
@click.argument("module", shell_complete=module_names)
@click.option("--arch", default=None, help="Architecture; default: the device's, else the module's first.")
@click.option("--variant", "variants", multiple=True, metavar="NAME=VALUE", help="Only variants with this value.")
@REGISTER_OPTION
@JSON_OPTION
def why(module: str, arch: str | None, variants: tuple[str, ...], as_json: bool) -> None:
    """Say whether MODULE would be a hit, and if not, the exact field or file that changed, old and new digest."""
    from hipforge.jit import registry, why

    entry = registry.module(module)
    if arch is None:
        default = devices.current().default_arch
        arch = default if default in entry.archs else entry.archs[0]
    found = [
        why.explain(module, variant, arch) for variant in matching_variants(module, parse_variant(variants))
    ]
    if as_json:
        click.echo(json.dumps([_as_dict(item) for item in found], indent=1))
        return
    for item in found:
        click.echo(f"{item.title}: {item.status}" + (f" ({item.note})" if item.note else ""))
        for change in item.changes:
            detail = f"  {change.detail}" if change.detail else ""
            click.echo(f"  {change.name}: {change.old or 'absent'} -> {change.new or 'absent'}{detail}")


def _as_dict(item: Explanation) -> dict[str, object]:
    return {
        "title": item.title,
        "status": item.status,
        "path": None if item.path is None else str(item.path),
        "compared_with": None if item.compared_with is None else str(item.compared_with),
        "note": item.note,
        "changes": [vars(change) for change in item.changes],
    }
