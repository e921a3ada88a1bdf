"""Modules that bring their own ``PYBIND11_MODULE`` (``"ffi": "pybind11"``): imported as extension modules."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from hipforge.errors import ConfigError

_INIT = re.compile(rb"\0PyInit_(\w+)\0")


_lock = threading.RLock()


def import_extension(library: Path, module_name: str) -> ModuleType:
    """Import the built ``library`` under the name its PYBIND11_MODULE has; it is not put into ``sys.modules``.

    Once per process: threads that call two stubs of one module for the first time share the import.

    Raises:
        ConfigError: it defines no PYBIND11_MODULE, or several and none is called ``module_name``.
    """
    with _lock:
        return _import_extension(library, module_name)


@functools.cache
def _import_extension(library: Path, module_name: str) -> ModuleType:
    names = sorted({name.decode() for name in _INIT.findall(library.read_bytes())})
    name = module_name if module_name in names else names[0] if len(names) == 1 else None
    if name is None:
        raise ConfigError(
            f'{module_name} has "ffi": "pybind11" but its sources define {names or "no PYBIND11_MODULE"}; write '
            "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)"
        )
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.machinery.ModuleSpec(name, loader, origin=str(library))
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def function_of(module: ModuleType, module_name: str, name: str) -> Callable[..., Any]:
    """Return the function ``name`` of an imported module.

    Raises:
        ConfigError: there is none; the message lists what there is.
    """
    try:
        return cast(Callable[..., Any], getattr(module, name))
    except AttributeError:
        public = ", ".join(item for item in dir(module) if not item.startswith("_"))
        raise ConfigError(
            f"the PYBIND11_MODULE of {module_name} defines no {name!r}; it defines: {public or '(nothing)'}. "
            "Rename the stub or pass fc_name="
        ) from None
