"""``hipforge doctor``: what can build, what can run, and why everything else was refused."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, dataclass

import click
from rich.table import Table

from hipforge import __version__, devices, settings
from hipforge.cli import output
from hipforge.errors import HipforgeError


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``taken``: this is the one that will be used; ``detail``: why, or why not."""

    kind: str
    name: str
    usable: bool
    taken: bool
    detail: str


def toolchain_findings() -> list[Finding]:
    """Probe every toolchain in search order; the first usable one is taken, a named one or none."""
    from hipforge.jit import toolchain

    named = settings.HIPCC.get() is not None
    findings: list[Finding] = []
    for probe in toolchain.probe_all():
        usable = isinstance(probe, toolchain.Accepted)
        detail = probe.toolchain.description if isinstance(probe, toolchain.Accepted) else probe.reason
        if named and findings:
            usable, detail = False, f"{detail} (not considered: HIPFORGE_HIPCC names the one to use)"
        taken = usable and not any(finding.taken for finding in findings)
        findings.append(Finding("toolchain", probe.name, usable, taken, detail))
    return findings


def device_findings() -> list[Finding]:
    """Report the GPU, the emulator and the reference, and which of them this process would use."""
    import torch

    wanted = settings.DEVICE.get()
    try:
        kind: str | None = devices.current().kind
        problem = ""
    except HipforgeError as error:
        kind, problem = None, str(error)
    if getattr(torch.version, "hip", None) is None:
        gpu = f"torch {torch.__version__} is not a ROCm build"
    elif not torch.cuda.is_available():
        gpu = f"torch {torch.__version__} (ROCm {torch.version.hip}) sees no GPU"
    else:
        gpu = torch.cuda.get_device_properties(0).gcnArchName
    gpu_usable = getattr(torch.version, "hip", None) is not None and torch.cuda.is_available()
    chosen = f"HIPFORGE_DEVICE={wanted}"
    return [
        Finding("device", "AMD GPU", gpu_usable, kind == "hip", problem or gpu),
        Finding("device", "emulator", True, kind == "emulator",
                f"{settings.EMULATE.get()} on the CPU ({chosen})"),
        Finding("device", "reference", True, kind == "reference", f"torch only, no kernels ({chosen})"),
    ]


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print findings as JSON.")
def command(as_json: bool) -> None:
    """List toolchains and devices, each with the reason it was taken or refused; exit 1 when nothing can build."""
    from hipforge.jit import cache_dir

    findings = [*toolchain_findings(), *device_findings()]
    can_build = any(finding.usable for finding in findings if finding.kind == "toolchain")
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _print(findings, str(cache_dir.configured()[0]))
    if not can_build:
        click.echo(
            "Nothing here can build: install ROCm, or clang, lld, llvm and clang-tools of one version >= 20 "
            "and `pip install hipforge[compiler]`; or point HIPFORGE_HIPCC at a hipcc.",
            err=True,
        )
        sys.exit(1)


def _print(findings: list[Finding], cache_root: str) -> None:
    console = output.console()
    console.print(
        f"hipforge {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    console.print(f"cache: {cache_root}", soft_wrap=True)
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("", "kind", "name", "what it is, or why it was refused"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "what it is, or why it was refused")
    for finding in findings:
        mark = "[green]in use[/]" if finding.taken else "usable" if finding.usable else "[red]refused[/]"
        table.add_row(mark, finding.kind, finding.name, finding.detail)
    console.print(table)
