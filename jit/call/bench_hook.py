"""The bench hook: run a process in which kernel launches return success at once.

Everything before the launch is real: stub, binding, guards, architecture check, grid. A call costs as
much CPU time as on a GPU machine, without HIP's own launch. The hook is a preloaded library, because symbols are
bound when a process and its modules are loaded::

    subprocess.run([sys.executable, "my_bench.py"], env=bench_hook.environment())

The measured calls are like those on a GPU. If torch's tensors are read through Python, one check of the emulator's
calls is left out: that of each storage's size, a small cost beside launches of 50 us and more.
"""

from __future__ import annotations

import os
from pathlib import Path

from hipforge.jit import host_library


def library() -> Path:
    """Return the library whose launches do nothing, built if need be.

    Raises:
        BuildError, ToolchainError: it cannot be built.
    """
    source = Path(__file__).with_name("no_launch.c")
    return host_library.build("no_launch", sources=[source], cflags=["-O2"])


def environment() -> dict[str, str]:
    """Return this process's environment plus the preload; results of kernels are garbage in it."""
    before = os.environ.get("LD_PRELOAD")
    return {**os.environ, "LD_PRELOAD": f"{library()}{os.pathsep + before if before else ''}"}


def active() -> bool:
    """Return whether launches do nothing in this process."""
    return any("no_launch" in part for part in os.environ.get("LD_PRELOAD", "").split(os.pathsep))
