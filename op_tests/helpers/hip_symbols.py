"""The HIP functions that our code calls: the version each has in the genuine library, and whether a graph may hold it.

Versions as ``nm -D libamdhip64.so`` prints them, the same in 6.4 and 7.2.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

MODULES = {
    "__hipPopCallConfiguration": "hip_4.2",
    "__hipPushCallConfiguration": "hip_4.2",
    "__hipRegisterFatBinary": "hip_4.2",
    "__hipRegisterFunction": "hip_4.2",
    "__hipUnregisterFatBinary": "hip_4.2",
    "hipGetDevicePropertiesR0600": "hip_6.0",
    "hipGetErrorName": "hip_4.2",
    "hipGetErrorString": "hip_4.2",
    "hipGetLastError": "hip_4.2",
    "hipLaunchKernel": "hip_4.2",
    "hipMemsetAsync": "hip_4.2",
}
"""What a built module leaves undefined. None of them waits for the device, allocates, or touches another stream than
the one it is given, which is what a stream that captures a graph forbids."""

BINDING = {"hipGetDevice": "hip_4.2", "hipSetDevice": "hip_4.2"}
"""What the binding asks of the library by name."""


def undefined(library: Path) -> set[str]:
    """Return the HIP functions that a library expects from elsewhere."""
    listing = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    names = {line.split()[-1].partition("@")[0] for line in listing.stdout.splitlines()}
    return {name for name in names if name.startswith(("hip", "__hip"))}


def defined(library: Path) -> dict[str, str]:
    """Return the functions of a library with their default versions."""
    listing = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    found = (line.split()[-1].partition("@@") for line in listing.stdout.splitlines())
    return {name: version for name, _, version in found}
