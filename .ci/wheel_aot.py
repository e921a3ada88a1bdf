"""Build a wheel that carries its modules, the emulator and the binding prebuilt, and so needs no compiler.

    python .ci/wheel_aot.py --arch gfx942,gfx950 --ops rms_norm,mxfp8_gemv --outdir dist
    python .ci/wheel_aot.py --binding-only     # what `make wheel` makes: modules and the emulator are compiled on use

The plain wheel is built first; then the prebuilt entries are added to it, and it is tagged for the oldest manylinux
that they run on.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import manylinux

from hipforge import settings
from hipforge.cli import output
from hipforge.cli.build_progress import BuildProgress
from hipforge.emulator import library
from hipforge.emulator.timing import library as timing_library
from hipforge.errors import ConfigError
from hipforge.jit import fleet, notices, registry
from hipforge.jit.cache import prebuilt
from hipforge.jit.cache.store import Entry
from hipforge.jit.call import abi
from hipforge.ops import public_names

PACKING_S = 15.0
ROOT = Path(__file__).resolve().parent.parent


def host_entries() -> list[Entry]:
    """Build the emulator, the model of time and the binding; returns their cache entries."""
    return [library.entry(), timing_library.entry(), abi.extension_entry()]


def module_entries(modules: list[str], archs: list[str]) -> list[Entry]:
    """Build every variant of the modules; returns their cache entries or stops with what failed."""
    with BuildProgress(output.console(stderr=True)) as progress:
        outcomes = fleet.build_many(fleet.requests(modules, archs), None, progress.on_event, progress.on_plan)
    failed = [outcome for outcome in outcomes if outcome.entry is None]
    for outcome in failed:
        sys.stderr.write(f"{outcome.planned.title}: {outcome.error}\n")
    if failed:
        raise SystemExit(1)
    return [outcome.entry for outcome in outcomes if outcome.entry is not None]


def modules_of(ops: list[str]) -> list[str]:
    """Return the registered modules that some public ops call, themselves or through other ops.

    Raises:
        ConfigError: a name is not that of a public op.
    """
    homes = public_names()
    unknown = [op for op in ops if op not in homes]
    if unknown:
        raise ConfigError(f"there is no op {unknown[0]!r}; known: {', '.join(homes)}")
    found: dict[str, None] = {}
    seen: set[str] = set()
    pending = [homes[op] for op in ops]
    while pending:
        name = pending.pop()
        if name in seen or name.startswith(("hipforge.ops.core", "hipforge.ops.reference")):
            continue
        seen.add(name)
        for value in list(vars(importlib.import_module(name)).values()):
            stub = getattr(value, "stub", None) if callable(value) else None
            if stub is not None:
                found[stub.module_name] = None
            home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(home, str) and home.startswith("hipforge.ops."):
                pending.append(home)
    return [name for name in registry.modules() if name in found]


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command; its output is shown only if it fails."""
    result = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.stderr.write(result.stdout + result.stderr)
        raise SystemExit(result.returncode)


def pack(entries: list[Entry], outdir: Path) -> Path:
    """Make the wheel with the entries in it; returns its path."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # setuptools packs what earlier builds left there
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", work, ROOT)
        (plain,) = work.glob("*.whl")
        run(sys.executable, "-m", "wheel", "unpack", "-d", work / "tree", plain)
        (tree,) = (work / "tree").iterdir()
        prebuilt.export(entries, tree / "hipforge" / "prebuilt")
        (work / "packed").mkdir()
        run(sys.executable, "-m", "wheel", "pack", "-d", work / "packed", tree)
        (packed,) = (work / "packed").glob("*.whl")
        tag = manylinux.platform(entry.library for entry in entries)
        run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, packed)
        (tagged,) = (work / "packed").glob(f"*{tag}.whl")
        outdir.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(tagged, outdir))


def main() -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="gfx950", help="architectures, separated by commas")
    parser.add_argument("--modules", nargs="*", help="default: every registered module")
    parser.add_argument("--ops", help="public ops, separated by commas: only the modules that they call")
    parser.add_argument("--binding-only", action="store_true", help="carry nothing compiled but the binding")
    parser.add_argument("--march", default="x86-64-v3", help="the CPUs that may run the emulator (or native)")
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    archs = options.arch.split(",")
    asked = [*(options.modules or []), *(modules_of(options.ops.split(",")) if options.ops else [])]
    names = asked or [name for name, entry in registry.modules().items() if set(entry.archs) & set(archs)]
    with settings.scope(HOST_MARCH=options.march):
        entries = [abi.extension_entry()] if options.binding_only else host_entries() + module_entries(names, archs)
    with notices.slow(f"packing a wheel with {len(entries)} libraries", PACKING_S):
        wheel = pack(entries, options.outdir.resolve())
    sys.stdout.write(f"{wheel} ({wheel.stat().st_size / 2**20:.1f} MiB, {len(entries)} prebuilt libraries)\n")


if __name__ == "__main__":
    main()
