"""``hipforge disasm``: the instructions of a module's kernels, with their source lines where there are any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from hipforge import devices
from hipforge.cli import output
from hipforge.cli.options import REGISTER_OPTION, matching_variants, module_names, parse_variant
from hipforge.emulator.code_object import CodeObject
from hipforge.errors import ConfigError
from hipforge.jit.demangle import fit


@click.command("disasm")
@click.argument("module", shell_complete=module_names)
@click.option("--kernel", default="", help="Only kernels whose name contains this.")
@click.option("--arch", default=None, help="Architecture; default: the device's, else the module's first.")
@click.option("--variant", "variants", multiple=True, metavar="NAME=VALUE", help="Only variants with this value.")
@REGISTER_OPTION
@output.WIDE_OPTION
def command(module: str, kernel: str, arch: str | None, variants: tuple[str, ...], wide: bool) -> None:
    """Print the machine code of MODULE, a registered module (built if need be) or a file with device code.

    A line of a file compiled with -gline-tables-only stands before the instructions that it became.
    """
    columns = output.name_columns(wide)
    if columns is not None:
        columns -= len(" (gfx950):")
    printed = False
    for code in _objects(module, arch, variants):
        for name, found in code.kernels.items():
            if kernel not in name and kernel not in found.short_name:
                continue
            printed = True
            click.echo(f"{fit(found.short_name, columns)} ({code.arch}):")
            source = None
            for instruction, line in zip(found.disassembly().splitlines(), found.source_lines(), strict=True):
                if line and line != source:
                    click.echo(f"; {line}")
                    source = line
                click.echo(f"  {instruction}")
    if not printed:
        raise ConfigError(f"{module} has no kernel whose name contains {kernel!r}")


def _objects(module: str, arch: str | None, variants: tuple[str, ...]) -> Iterator[CodeObject]:
    if Path(module).is_file():
        yield CodeObject(Path(module), arch)
        return
    from hipforge.jit import hip_module, obtain, registry

    entry = registry.module(module)
    default = devices.current().default_arch
    chosen = arch or (default if default in entry.archs else entry.archs[0])
    for variant in matching_variants(module, parse_variant(variants)):
        yield CodeObject(obtain.module(hip_module.request(entry, variant, chosen)).entry.library, chosen)
