"""``hipforge inspect``: per-kernel resources of a module, as its code objects state them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from hipforge import devices
from hipforge.cli import output
from hipforge.errors import ConfigError

COLUMNS = ("vgpr", "agpr", "sgpr", "vgpr_spills", "sgpr_spills", "lds_bytes", "scratch_bytes", "occupancy")
HEADINGS = ("VGPR", "of it AGPR", "SGPR", "VGPR spills", "SGPR spills", "LDS B", "scratch B", "waves/SIMD")


REGISTER_OPTION = click.option(
    "--register", "registries", multiple=True, type=click.Path(path_type=Path), help="A module JSON file of your own."
)


def parse_variant(texts: tuple[str, ...]) -> dict[str, str]:
    """Return ``{"M": "4"}`` for ``("M=4",)``.

    Raises:
        ConfigError: a text has no ``=``.
    """
    variant: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--variant {text!r}: expected NAME=VALUE, as in M=4")
        variant[name] = value
    return variant


def matching_variants(module: str, wanted: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the module's variants whose values agree with ``wanted``; names left out match all.

    Raises:
        ConfigError: the module has no such variant name, or no variant with such a value.
    """
    from hipforge.jit import registry

    entry = registry.module(module)
    unknown = set(wanted) - set(entry.variants)
    if unknown:
        names = ", ".join(entry.variants) or "none"
        raise ConfigError(f"{module} has no variant parameter {sorted(unknown)[0]!r}; it has: {names}")
    found = [
        variant
        for variant in entry.all_variants()
        if all(str(variant[name]) == value for name, value in wanted.items())
    ]
    if not found:
        raise ConfigError(f"{module} has no variant with {dict(wanted)}; its values: {dict(entry.variants)}")
    yield from found


@click.command("inspect")
@click.argument("module")
@click.option("--arch", default=None, help="gfx950 or gfx942; default: the device's, else the module's first.")
@click.option("--variant", "variants", multiple=True, metavar="NAME=VALUE", help="Only variants with this value.")
@REGISTER_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(
    module: str, arch: str | None, variants: tuple[str, ...], registries: tuple[Path, ...], as_json: bool
) -> None:
    """Show registers, spills, LDS, scratch and occupancy of MODULE's kernels; builds what is not built yet."""
    from hipforge.jit import hip_module, ladder, registry

    for path in registries:
        registry.register(path)
    entry = registry.module(module)
    if arch is None:
        default = devices.current().default_arch
        arch = default if default in entry.archs else entry.archs[0]
    rows: list[dict[str, Any]] = []
    for variant in matching_variants(module, parse_variant(variants)):
        wanted = hip_module.request(entry, variant, arch)
        for symbol, kernel in ladder.obtain(wanted).entry.manifest.kernels.items():
            label = " ".join(f"{name}={value}" for name, value in variant.items())
            rows.append({"module": module, "variant": label, "arch": wanted.arch, "symbol": symbol, **kernel})
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        _print(rows, module, arch)


def without_parameters(name: str) -> str:
    """Return a demangled kernel name without its parameter list: ``k<(E)1>(int*)`` → ``k<(E)1>``."""
    depth = 0
    for at in range(len(name) - 1, 0, -1):
        depth += (name[at] == ")") - (name[at] == "(")
        if depth <= 0:
            return name[:at] if name.endswith(")") else name
    return name


def _print(rows: list[dict[str, Any]], module: str, arch: str) -> None:
    table = Table(title=f"{module} for {arch}, from the code objects' own metadata", show_edge=False, pad_edge=False)
    table.add_column("variant", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in rows:
        kernel = escape(without_parameters(row["name"]))
        table.add_row(row["variant"], kernel, *(str(row[column]) for column in COLUMNS))
    output.console().print(table)
