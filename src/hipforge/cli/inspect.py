"""``hipforge inspect``: per-kernel resources of a module, as its compiler states them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hipforge import devices, plots, settings
from hipforge.cli import output
from hipforge.cli.options import PICTURE_OPTION, REGISTER_OPTION, matching_variants, module_names, parse_variant
from hipforge.jit.backends import vendors
from hipforge.jit.demangle import fit

if TYPE_CHECKING:
    from hipforge.jit.hip_module import Request

@click.command("inspect")
@click.argument("module", shell_complete=module_names)
@click.option("--arch", default=None, help="Architecture; default: the device's, else the module's first.")
@click.option("--variant", "variants", multiple=True, metavar="NAME=VALUE", help="Only variants with this value.")
@REGISTER_OPTION
@output.WIDE_OPTION
@PICTURE_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(
    module: str,
    arch: str | None,
    variants: tuple[str, ...],
    wide: bool,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Show registers, spills, LDS, scratch and occupancy of MODULE's kernels; builds what is not built yet."""
    from hipforge.jit import hip_module, obtain, registry

    entry = registry.module(module)
    if arch is None:
        default = devices.current().default_arch
        arch = default if default in entry.archs else entry.archs[0]
    chosen = list(matching_variants(module, parse_variant(variants)))
    wanted = [hip_module.request(entry, variant, arch) for variant in chosen]
    _build_together(wanted)
    rows: list[dict[str, Any]] = []
    for variant, request in zip(chosen, wanted, strict=True):
        for symbol, kernel in obtain.module(request).entry.manifest.kernels.items():
            label = " ".join(f"{name}={value}" for name, value in variant.items())
            rows.append({"module": module, "variant": label, "arch": request.arch, "symbol": symbol, **kernel})
    if picture is not None:
        plots.inspect(rows, f"kernels of {module} for {arch}", picture)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        _print(rows, f"{module} for {arch}, as its compiler states them", vendors.of(arch).columns, wide)


def _build_together(wanted: Sequence[Request]) -> None:
    """Build what is missing of several requests in parallel; the error of one that fails is raised later."""
    from hipforge.cli.build_progress import BuildProgress
    from hipforge.jit import fleet

    if len(wanted) > 1 and not settings.DISABLE_JIT.get():
        with BuildProgress(output.console(stderr=True)) as progress:
            fleet.build_many(wanted, None, progress.on_event, progress.on_plan)


def _print(rows: list[dict[str, Any]], title: str, columns: Mapping[str, tuple[str, ...]], wide: bool) -> None:
    """Print one line per kernel below its variant, in 80 columns or the terminal's unless ``wide``.

    ``columns`` are each of one number of the manifest or of several, with + between them.
    """
    widths = [max(len(heading), 4) for heading in columns]
    room = None if wide else output.columns() - sum(widths) - len(widths) - 1
    click.echo(f"{title}\n")
    click.echo(" ".join(heading.rjust(width) for heading, width in zip(columns, widths, strict=True)) + "  kernel")
    variant = ""
    for row in rows:
        if row["variant"] != variant:
            variant = row["variant"]
            click.echo(variant)
        values = ("+".join(str(row[key]) for key in keys) for keys in columns.values())
        name = fit(row["name"], room)
        click.echo(" ".join(value.rjust(width) for value, width in zip(values, widths, strict=True)) + f"  {name}")
