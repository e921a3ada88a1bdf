"""Check what `make wheel` left in dist/ as an index and a stranger's machine would; nothing is uploaded.

    python .ci/release.py

The wheel and the source distribution of this version must render and be complete (twine), hold the licence and no path
of this machine, and the wheel must work in an environment that has nothing else.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import hipforge

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"


def contents(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel or a source distribution."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    with tarfile.open(path) as archive:
        found = {member.name: archive.extractfile(member) for member in archive.getmembers() if member.isfile()}
        return {name: stream.read() for name, stream in found.items() if stream is not None}


def problems(path: Path) -> list[str]:
    """Return what is wrong with the contents of one distribution."""
    files = contents(path)
    here = str(ROOT).encode()
    found = [f"{path.name}: {name} holds {ROOT}" for name, data in files.items() if here in data]
    metadata = [data for name, data in files.items() if name.endswith(("dist-info/METADATA", f"{stem(path)}/PKG-INFO"))]
    if len(metadata) != 1:
        return [*found, f"{path.name}: one metadata file was expected; got {len(metadata)}"]
    stated = message_from_bytes(metadata[0])
    wanted = {"Name": "hipforge", "Version": hipforge.__version__, "License-Expression": "MIT"}
    found += [
        f"{path.name}: {key} is {stated[key]!r}, not {value!r}" for key, value in wanted.items() if stated[key] != value
    ]
    if not any(name.endswith("LICENSE") for name in files):
        found.append(f"{path.name}: there is no LICENSE")
    return found


def stem(path: Path) -> str:
    """Return the folder that a source distribution unpacks to."""
    return path.name.removesuffix(".tar.gz")


def main() -> None:
    """Command-line entry: exit status 1 and a line for each thing that is wrong."""
    version = hipforge.__version__
    of_version = [*DIST.glob(f"hipforge-{version}-*.whl"), *DIST.glob(f"hipforge-{version}.tar.gz")]
    if len(of_version) != 2:
        names = ", ".join(path.name for path in of_version) or "nothing"
        raise SystemExit(f"dist/ should have one wheel and one source distribution of {version}; got {names}")
    found = [problem for path in of_version for problem in problems(path)]
    with tempfile.TemporaryDirectory() as name:
        venv.create(name, with_pip=True)
        python = Path(name, "bin", "python")
        (wheel,) = (path for path in of_version if path.suffix == ".whl")
        for step in (
            ["-m", "pip", "install", "-q", "--no-deps", wheel],
            ["-c", "import hipforge, hipforge.archs, hipforge.jit; print(hipforge.__version__)"],
            ["-m", "pip", "install", "-q", "twine"],
            ["-m", "twine", "check", "--strict", *of_version],
        ):
            done = subprocess.run([python, "-I", *step], cwd=name, capture_output=True, text=True, check=False)
            if done.returncode:
                found.append(f"{' '.join(map(str, step[:3]))}: {(done.stdout + done.stderr)[-1000:]}")
    if found:
        raise SystemExit("\n".join(found))
    sys.stdout.write("\n".join(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, ready" for path in of_version) + "\n")


if __name__ == "__main__":
    main()
