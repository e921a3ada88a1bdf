"""Build a wheel that carries its modules, the emulator and the binding prebuilt, and so needs no compiler.

    python .ci/wheel_aot.py --arch gfx950 --outdir dist

The plain wheel is built first; then the prebuilt entries are added to it and it is tagged for this platform.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hipforge import settings
from hipforge.emulator import library
from hipforge.jit import fleet, host_library, registry
from hipforge.jit.cache import prebuilt
from hipforge.jit.cache.store import Entry
from hipforge.jit.call import abi

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = "linux_x86_64"


def host_entries() -> list[Entry]:
    """Build the emulator and the binding; returns their cache entries."""
    sources = sorted(library.source_dir().glob("*.cpp"))
    emulator = host_library.entry("emulator", sources=sources, cflags=library.CFLAGS, ldflags=library.LDFLAGS)
    return [emulator, abi.extension_entry()]


def module_entries(modules: list[str], archs: list[str]) -> list[Entry]:
    """Build every variant of the modules; returns their cache entries or stops with what failed."""
    outcomes = fleet.build_many(fleet.requests(modules, archs), None, lambda event: None)
    failed = [outcome for outcome in outcomes if outcome.entry is None]
    for outcome in failed:
        sys.stderr.write(f"{outcome.planned.title}: {outcome.error}\n")
    if failed:
        raise SystemExit(1)
    return [outcome.entry for outcome in outcomes if outcome.entry is not None]


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
        shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools packs what earlier builds left there
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", work, ROOT)
        (plain,) = work.glob("*.whl")
        run(sys.executable, "-m", "wheel", "unpack", "-d", work / "tree", plain)
        (tree,) = (work / "tree").iterdir()
        prebuilt.export(entries, tree / "hipforge" / "prebuilt")
        (work / "packed").mkdir()
        run(sys.executable, "-m", "wheel", "pack", "-d", work / "packed", tree)
        (packed,) = (work / "packed").glob("*.whl")
        run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", PLATFORM, packed)
        (tagged,) = (work / "packed").glob(f"*{PLATFORM}.whl")
        outdir.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(tagged, outdir))


def main() -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="gfx950", help="architectures, separated by commas")
    parser.add_argument("--modules", nargs="*", help="default: every registered module")
    parser.add_argument("--march", default="x86-64-v3", help="the CPUs that may run the emulator (or native)")
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    archs = options.arch.split(",")
    names = options.modules or [
        name for name, entry in registry.modules().items() if set(entry.archs) & set(archs)
    ]
    with settings.scope(HOST_MARCH=options.march):
        entries = host_entries() + module_entries(names, archs)
    wheel = pack(entries, options.outdir.resolve())
    sys.stdout.write(f"{wheel} ({wheel.stat().st_size / 2**20:.1f} MiB, {len(entries)} prebuilt libraries)\n")


if __name__ == "__main__":
    main()
