"""Run gfx950 and gfx942 code objects on the CPU, check what they do, and count it.

The machine code that hipcc or Triton produced runs wave by wave; nothing is recompiled for the host::

    from hipforge import emulator

    code = emulator.CodeObject("module.so")
    done = emulator.launch(code.kernels["axpy"], grid=4, block=256, args=[y, x, 2.0, n])
    with emulator.options(checks="all"), emulator.counters() as c:
        hipforge.mxfp8_gemv(...)
    print(c.bytes_loaded)

It is a functional model with exact counts. ``timed()`` adds the model of time, whose microseconds are *modelled*
(:mod:`hipforge.emulator.timing`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# public name -> (module, name there); loaded on first use, so that importing the package needs neither torch nor g++
_LAZY = {
    "CodeObject": ("hipforge.emulator.code_object", "CodeObject"),
    "Counters": ("hipforge.emulator.counting", "Counters"),
    "EmulatorFault": ("hipforge.errors", "EmulatorFault"),
    "Graph": ("hipforge.emulator.graphs", "Graph"),
    "Kernel": ("hipforge.emulator.code_object", "Kernel"),
    "Options": ("hipforge.emulator.configuration", "Options"),
    "capture": ("hipforge.emulator.graphs", "capture"),
    "counters": ("hipforge.emulator.counting", "counters"),
    "launch": ("hipforge.emulator.launching", "launch"),
    "options": ("hipforge.emulator.configuration", "options"),
    "timed": ("hipforge.emulator.timing.context", "timed"),
    "trace": ("hipforge.emulator.tracing", "trace"),
    "uncounted": ("hipforge.emulator.counting", "uncounted"),
}

__all__ = list(_LAZY)

if TYPE_CHECKING:
    from hipforge.emulator.code_object import CodeObject as CodeObject
    from hipforge.emulator.code_object import Kernel as Kernel
    from hipforge.emulator.configuration import Options as Options
    from hipforge.emulator.configuration import options as options
    from hipforge.emulator.counting import Counters as Counters
    from hipforge.emulator.counting import counters as counters
    from hipforge.emulator.counting import uncounted as uncounted
    from hipforge.emulator.graphs import Graph as Graph
    from hipforge.emulator.graphs import capture as capture
    from hipforge.emulator.launching import launch as launch
    from hipforge.emulator.timing.context import timed as timed
    from hipforge.emulator.tracing import trace as trace
    from hipforge.errors import EmulatorFault as EmulatorFault


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
