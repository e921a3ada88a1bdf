"""``hipforge doctor``: what can build, what can run, which settings are in effect, and why the rest was refused."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape
from rich.table import Table

from hipforge import __version__, archs, devices, settings
from hipforge.cli import output
from hipforge.cli.options import REGISTER_OPTION
from hipforge.errors import HipforgeError, did_you_mean
from hipforge.jit.backends import vendors
from hipforge.jit.backends.vendors import Vendor
from hipforge.jit.cache import cache_dir

if TYPE_CHECKING:
    from hipforge.jit.cache.store import Entry

PREFIX = "HIPFORGE_"


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``taken``: this is the one that will be used; ``detail``: why, or why not."""

    kind: str
    name: str
    usable: bool
    taken: bool
    detail: str


def guarded(kind: str, find: Callable[[], list[Finding]]) -> list[Finding]:
    """Return what ``find`` finds; an exception of any kind becomes a refused finding that names it.

    The report must not fail on a broken installation: torch may not import, a directory may not be readable.
    """
    try:
        return find()
    except Exception as error:
        text = str(error) if isinstance(error, HipforgeError) else f"{type(error).__name__}: {error}"
        return [Finding(kind, kind, False, False, text)]


def prebuilt_findings() -> list[Finding]:
    """Report each directory of modules built ahead of time, with how many of its libraries fit this installation."""
    from hipforge.jit.cache import prebuilt

    entries = prebuilt.entries()
    findings = []
    for directory in prebuilt.directories():
        held = [entry for entry in entries if entry.path.is_relative_to(directory)]
        kernels = [entry for entry in held if entry.manifest.target != "host"]
        usable = sum(map(_fits, kernels))
        targets = ", ".join(sorted({entry.manifest.target for entry in kernels})) or "no architecture"
        detail = f"{usable} of {len(kernels)} libraries of kernels fit this installation ({targets})"
        findings.append(Finding("prebuilt", str(directory), usable > 0, usable > 0, detail))
    return findings


def _fits(entry: Entry) -> bool:
    from hipforge.jit import hip_module, registry
    from hipforge.jit.cache import prebuilt

    manifest = entry.manifest
    module = registry.modules().get(manifest.module)
    if module is None or manifest.target not in module.archs:
        return False
    request = hip_module.request(module, manifest.variant, manifest.target)
    return prebuilt.misfit(entry, request) is None


def toolchain_findings() -> list[Finding]:
    """Probe the toolchains in search order; of the vendor in use, the first usable is taken, a named one or none."""
    try:
        device = devices.current()
    except HipforgeError:  # the device's own finding says so
        device = devices.Device("reference", None)
    in_use = device.vendor if device.is_gpu else vendors.every()[0]
    return [finding for vendor in vendors.every() for finding in _toolchains_of(vendor, vendor is in_use)]


def _toolchains_of(vendor: Vendor, in_use: bool) -> list[Finding]:
    from hipforge.jit import toolchain

    named = vendor.compiler.get() is not None
    findings: list[Finding] = []
    for probe in toolchain.probe_all(next(arch for arch, info in archs.ARCHS.items() if info.vendor == vendor.name)):
        usable = isinstance(probe, toolchain.Accepted)
        detail = probe.toolchain.description if isinstance(probe, toolchain.Accepted) else probe.reason
        if named and findings:
            usable, detail = False, f"{detail} (not considered: {vendor.compiler.env} names the one to use)"
        taken = in_use and usable and not any(finding.taken for finding in findings)
        findings.append(Finding("toolchain", probe.name, usable, taken, detail))
    return findings


def header_findings() -> list[Finding]:
    """Report the header libraries that aiter's kernels or the user's may include; hipforge's include none."""
    from hipforge.aiter_compat import checkout

    folders = checkout.system_folders()
    findings = []
    for name, header in {"rocPRIM": "rocprim/rocprim.hpp", "hipCUB": "hipcub/hipcub.hpp"}.items():
        found = next((folder for folder in folders if (folder / header).is_file()), None)
        places = ", ".join(map(str, folders))
        nowhere = f"no {header} in {places}; needed by sources that use more of it than csrc/aiter/stand_ins has"
        findings.append(Finding("headers", name, found is not None, False, nowhere if found is None else str(found)))
    return findings


def emulator_findings() -> list[Finding]:
    """Report the emulator's library where kernels run on it: built already, or the C++ compiler that will build it."""
    if devices.current().kind != "emulator":
        return []
    from hipforge.emulator import library
    from hipforge.jit import host_library, obtain

    found = obtain.look(library.request(), use=False)
    if isinstance(found, obtain.Ready):
        kind = "built ahead of time" if found.prebuilt else "built"
        return [Finding("emulator", "library", True, True, f"{kind}: {found.entry.path}")]
    if isinstance(found, obtain.Failed):
        problem = str(found.error)
    elif settings.DISABLE_JIT.get():
        problem = "it is not built, and HIPFORGE_DISABLE_JIT=1 forbids building it"
    elif found.spec is None:
        problem = str(found.error)
    else:
        cache_dir.writing_root()
        detail = f"will be built by {host_library.compiler(True)} on the first launch, once per machine"
        return [Finding("emulator", "library", True, True, detail)]
    return [Finding("emulator", "library", False, False, problem)]


def device_findings() -> list[Finding]:
    """Report the GPU, the emulator and the reference, and which of them this process would use."""
    try:
        wanted, emulated = settings.DEVICE.get(), settings.EMULATE.get()
        kind: str | None = devices.current().kind
        problem = ""
    except HipforgeError as error:
        wanted, emulated = os.environ.get(settings.DEVICE.env, ""), os.environ.get(settings.EMULATE.env, "")
        kind, problem = None, str(error)
    chosen = f"HIPFORGE_DEVICE={wanted or settings.DEVICE.default}"
    all_vendors = vendors.every()
    blamed = next((vendor for vendor in all_vendors if vendor.device == wanted), all_vendors[0]) if problem else None
    gpus = [
        Finding("device", vendor.gpu.split(" ", 1)[1], vendor.torch_arch(0) is not None, kind == vendor.device,
                problem if vendor is blamed else vendor.torch_says())
        for vendor in all_vendors
    ]  # fmt: skip
    return [
        *gpus,
        Finding("device", "emulator", True, kind == "emulator",
                f"{emulated or settings.EMULATE.default} on the CPU ({chosen})"),
        Finding("device", "reference", True, kind == "reference", f"torch only, no kernels ({chosen})"),
    ]


def gpu_record_findings() -> list[Finding]:
    """Report, in a checkout, which modules a GPU has run as ``make gpu-test`` recorded it, and which are pending."""
    folder = Path(__file__).resolve().parents[3] / "op_tests" / "gpu"
    if not (folder / "record.json").is_file():
        return []
    record, pending = (json.loads((folder / f"{name}.json").read_text()) for name in ("record", "pending"))
    runs = sorted({f"{run['card']}, driver {run['driver']}, {run['date']}" for run in record.values()})
    detail = f"{len(record)} module variants ran on a GPU ({'; '.join(runs)})"
    if pending:
        detail += f"; changed since, or not run yet: {', '.join(pending)}"
    return [Finding("gpu record", "op_tests/gpu", True, False, detail)]


def setting_findings() -> list[Finding]:
    """Check every ``HIPFORGE_*`` variable that is set: is it a setting, and is its value accepted?"""
    known = {setting.env: setting for setting in settings.ALL}
    findings: list[Finding] = []
    for name, text in sorted(os.environ.items()):
        if not name.startswith(PREFIX) or not text:
            continue
        if name.startswith(settings.CONFIG_PREFIX):
            family = name.removeprefix(settings.CONFIG_PREFIX).lower()
            problem = _table_problem(settings.FORMER_TABLES.get(family, family))
            meaning = "tuned CSVs that override the shipped table"
        elif name in known:
            problem, meaning = _setting_problem(known[name]), known[name].doc
        else:
            problem = "there is no such setting" + did_you_mean(name, known)
            meaning = ""
        findings.append(Finding("setting", f"{name}={text}", not problem, not problem, problem or meaning))
    return findings


def _setting_problem(setting: settings.Setting[Any]) -> str:
    try:
        value = setting.get()
        if setting is settings.CACHE_DIR:
            cache_dir.writing_root()
    except HipforgeError as error:
        return str(error)
    if setting is settings.PREBUILT_DIR:
        missing = [str(path) for path in value if not path.is_dir()]
        return f"there is no directory {', '.join(missing)}" if missing else ""
    if setting is settings.COMPILER_LAUNCHER:
        return _launcher_problem(value)
    return ""


def _launcher_problem(command: str) -> str:
    words = shlex.split(command)
    return "" if words and shutil.which(words[0]) else f"there is no executable {words[0] if words else command}"


def _table_problem(family: str) -> str:
    from hipforge import ops
    from hipforge.ops.core import tuned

    if family not in ops.families():
        return f"there is no tuned table {family!r}; known: {', '.join(ops.families())}"
    tuned.clear_tables()  # what the variable names now, not what was read before
    try:
        tuned.load_table(family)
    except HipforgeError as error:
        return str(error)
    return ""


@click.command("doctor")
@REGISTER_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print findings as JSON.")
def command(as_json: bool) -> None:
    """List toolchains, prebuilt modules, devices and settings, each with the reason it was taken or refused.

    Exit 0 where ops can run: there is a device, kernels for it are built or can be, and so is the emulator where that
    is the device. Exit 1 otherwise, and when a setting is refused.
    """
    findings = [
        *guarded("toolchain", toolchain_findings),
        *guarded("headers", header_findings),
        *guarded("prebuilt", prebuilt_findings),
        *guarded("device", device_findings),
        *guarded("emulator", emulator_findings),
        *guarded("gpu record", gpu_record_findings),
        *guarded("setting", setting_findings),
    ]

    def of(kind: str) -> list[Finding]:
        return [finding for finding in findings if finding.kind == kind]

    has_compiler = any(finding.taken for finding in of("toolchain"))
    may_build = not _is_on(settings.DISABLE_JIT)
    needs_kernels = not any(finding.taken and finding.name == "reference" for finding in of("device"))
    # An entry of the cache is found by the compiler that made it; one built ahead of time needs none.
    has_kernels = any(finding.usable for finding in of("prebuilt"))
    has_kernels = has_kernels or (has_compiler and (may_build or _built_kernels() > 0))
    has_device = any(finding.taken for finding in of("device")) and all(finding.usable for finding in of("emulator"))
    can_run = has_device and (has_kernels or not needs_kernels)
    refused = any(not finding.usable for finding in of("setting"))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _print(findings, _cache_root())
    if not may_build:
        click.echo("HIPFORGE_DISABLE_JIT=1: nothing is built; only modules that are there already run.", err=True)
    elif not has_compiler:
        ahead = " Modules built ahead of time run without." if can_run and needs_kernels else ""
        click.echo(_advice() + ahead, err=True)
    if refused or not can_run:
        sys.exit(1)


def _is_on(setting: settings.Setting[bool]) -> bool:
    try:
        return setting.get()
    except HipforgeError:
        return False


def _built_kernels() -> int:
    """Return how many libraries of kernels the cache holds."""
    from hipforge.jit import maintenance

    try:
        held = [item.entry for item in maintenance.entries() if item.entry is not None]
    except (HipforgeError, OSError):
        return 0
    return sum(entry.manifest.target != "host" for entry in held)


def _advice() -> str:
    """Return one sentence on why nothing can be built here and what to do about it."""
    if _setting_problem(settings.CACHE_DIR):
        return "Nothing can be built with this HIPFORGE_CACHE_DIR: correct it, or unset it."
    if os.environ.get(settings.HIPCC.env):
        return "Nothing can be built with this HIPFORGE_HIPCC: correct it, or unset it."
    return (
        "Nothing here can build: install ROCm, or clang, lld and llvm of one version >= 20 "
        "and `pip install triton`; or point HIPFORGE_HIPCC at a hipcc."
    )


def _cache_root() -> str:
    try:
        return str(cache_dir.configured()[0])
    except (HipforgeError, OSError) as error:
        return f"cannot be used: {error}"


def _print(findings: list[Finding], cache_root: str) -> None:
    console = output.console()
    console.print(
        f"hipforge {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    console.print(f"cache: {cache_root}", markup=False, soft_wrap=True)
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("", "kind", "name", "what it is, or why it was refused"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "what it is, or why it was refused")
    for finding in findings:
        mark = "[green]in use[/]" if finding.taken else "usable" if finding.usable else "[red]refused[/]"
        table.add_row(mark, finding.kind, escape(finding.name), escape(finding.detail))
    console.print(table)
