"""Runs one of aiter's test files, unchanged, on the emulator: ``python -m hipforge.aiter_compat.runner``.

``import aiter`` finds the checkout's Python, whose ``compile_ops`` is hipforge's; "cuda" is the emulator's device
(:mod:`hipforge.aiter_compat.cuda_shim`). Each top-level ``test_*`` function is a case: it passes if it returns and
every ``checkAllclose`` in it stays below its own limit. A case that fails does not end the file. Nothing is timed:
``perftest`` calls its function once and returns not-a-number for the microseconds.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.abc
import importlib.machinery
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hipforge import aiter_compat, devices
from hipforge.aiter_compat import checkout as checkouts
from hipforge.aiter_compat import config, cuda_shim
from hipforge.aiter_compat.cases import Cases, place_of
from hipforge.errors import ConfigError, HipforgeError
from hipforge.jit import loader, registry

_CASE = "__hipforge_case__"
_HIP_VERSION = "7.0.0"  # of the headers that the triton wheel carries


class _Edited(importlib.abc.Loader):
    """Loads a module of the checkout and then changes names in it."""

    def __init__(self, loader: Any, edit: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.edit = edit

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.edit(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, edits: dict[str, Callable[[ModuleType], None]]) -> None:
        self.edits = edits

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.edits:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _Edited(spec.loader, self.edits[name])
        return spec


def _built_by_hipforge(cases: Cases, core: ModuleType) -> None:
    """Put hipforge's build in the place of ``aiter.jit.core``'s."""
    from hipforge.jit.call import python_module

    def get_module(name: str) -> ModuleType:
        if name in config.refused:
            raise ConfigError(config.refused[name])
        loaded = loader.load(name, None, devices.current().arch_of())
        return python_module.import_extension(loaded.path / "module.so", name)

    def build_module(name: str, *_: Any, **__: Any) -> None:
        raise ConfigError(f"{name}: aiter.jit.core.build_module is not used here; hipforge builds at the first call")

    core.compile_ops = functools.partial(compile_ops, cases)  # type: ignore[attr-defined]
    core.get_module = get_module  # type: ignore[attr-defined]
    core.build_module = build_module  # type: ignore[attr-defined]


def compile_ops(cases: Cases, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Decorate as hipforge does; calls see tensors where they are, on the CPU. Enumerations are types of aiter_core."""
    decorate = aiter_compat.compile_ops(*args, **kwargs)

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        made = decorate(function)
        module = str(args[0] if args else kwargs["_md_name"])
        ready = False

        @functools.wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            nonlocal ready
            with torch._C.DisableTorchFunction():
                if not ready and module in registry.modules():
                    with cases.paused(), contextlib.suppress(HipforgeError):  # the call says what is wrong
                        loader.load(module, None, devices.current().arch_of())
                ready = True
                return made(*values, **named)

        return call

    return decorated


def _untimed(cases: Cases, common: ModuleType) -> None:
    """Make ``aiter.test_common`` call a function once, and tell what its comparisons found."""
    compare = common.checkAllclose

    @functools.wraps(compare)
    def check(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        part = compare(a, b, *args, **kwargs)
        limit = kwargs.get("tol_err_ratio", args[2] if len(args) > 2 else 0.05)
        if part is not None and float(part) > limit:
            cases.note(f"{kwargs.get('msg', args[3] if len(args) > 3 else '')}{float(part):.1%} of the elements differ")
        return part

    def perftest(*_: Any, **__: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda function: functools.wraps(function)(lambda *args, **kwargs: (function(*args, **kwargs), math.nan))

    def run_perftest(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float]:
        for name in _PERFTEST:
            kwargs.pop(name, None)
        return function(*args, **kwargs), math.nan

    common.checkAllclose = check  # type: ignore[attr-defined]
    common.perftest = perftest  # type: ignore[attr-defined]
    common.run_perftest = run_perftest  # type: ignore[attr-defined]


_PERFTEST = ("num_iters", "num_warmup", "testGraph", "num_rotate_args", "needTrace", "use_cuda_event")


def _triton_on_emulator(arch: str) -> None:
    """Make the emulator Triton's device; it measures nothing, so that autotuning takes the first configuration."""
    import torch
    from triton import knobs
    from triton.runtime.driver import driver

    from hipforge.emulator import triton as emulated
    from hipforge.jit.cache import cache_dir

    class Launcher(emulated._Launcher):
        def __call__(self, *args: Any) -> None:
            with torch._C.DisableTorchFunction():
                super().__call__(*args)

    class Driver(emulated._Driver):
        launcher_cls = Launcher

        def get_benchmarker(self) -> Callable[..., Any]:
            return lambda function, quantiles=None, **_: [1.0] * len(quantiles or (0,))

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

    knobs.cache.dir = str(cache_dir.private_folder("triton"))
    driver.set_active(Driver(arch))


def _is_script(tree: ast.Module) -> bool:
    """Whether a file takes arguments or does something when it is run, and is not written for pytest."""
    imported = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    if "pytest" in imported:
        return "argparse" in imported
    working = (ast.For, ast.While, ast.With)
    return any(
        isinstance(node, working)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        or (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))
        for node in tree.body
    )


def _as_cases(tree: ast.Module) -> int:
    """Decorate the top-level ``test_*`` and ``@benchmark()`` functions of a file's tree; return how many there are."""
    found = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and (node.name.startswith("test_") or any(ast.unparse(each) == "benchmark()" for each in node.decorator_list))
    ]
    for node in found:
        decorator = ast.Call(ast.Name(_CASE, ast.Load()), [ast.Constant(node.name)], [])
        node.decorator_list.insert(0, ast.copy_location(decorator, node))
    ast.fix_missing_locations(tree)
    return len(found)


def _programs(folder: Path, arch: str, cu_count: int) -> None:
    """Write the programs that aiter's Python starts to learn about GPU and ROCm."""
    folder.mkdir()
    agent = f"Agent 1\\n  Name: {arch}\\n  Device Type: GPU\\n  Compute Unit: {cu_count}"
    for name, text in {"rocminfo": agent, "hipconfig": _HIP_VERSION}.items():
        (folder / name).write_text(f"#!/bin/sh\nprintf '{text}\\n'\n")
        (folder / name).chmod(0o755)


def main(argv: Sequence[str]) -> int:
    """Run ``checkout folder report seconds sample include file [arguments]``; return 0 if the file came to its end."""
    checkout, folder, report, seconds, sample, include, test, *arguments = argv
    root, path = Path(checkout), Path(test)
    cases = Cases(Path(report), float(seconds))
    arch = devices.current().arch_of()
    cuda_shim.install()
    _programs(Path(folder) / "bin", arch, devices.current().cu_count())
    os.environ.update(
        PATH=f"{folder}/bin:{os.environ.get('PATH', '')}", ROCM_HOME=folder,
        GPU_ARCHS=arch, CU_NUM=str(devices.current().cu_count()), AITER_JIT_DIR=f"{folder}/jit", ENABLE_CK="0",
        AITER_LOG_LEVEL=os.environ.get("AITER_LOG_LEVEL", "INFO"),
    )  # fmt: skip
    _triton_on_emulator(arch)
    for module in checkouts.modules(root, [Path(item) for item in include.split(os.pathsep) if item]):
        if module.state != checkouts.BUILDS:
            config.refused.setdefault(module.name, f"{module.name} {module.state}: {module.reason}")
    edits = {"aiter.jit.core": _built_by_hipforge, "aiter.test_common": _untimed}
    finder = _Finder({name: functools.partial(edit, cases) for name, edit in edits.items()})
    sys.meta_path.insert(0, finder)
    sys.path[:0] = [os.fspath(root), os.fspath(path.parent)]
    sys.argv = [os.fspath(path), *arguments]
    os.chdir(folder)
    try:
        _run(path, cases, int(sample), finder)
    except SystemExit as stop:
        cases.save("" if stop.code in (None, 0) else f"exit {stop.code}")
        return 0 if stop.code in (None, 0) else 1
    except BaseException as error:
        traceback.print_exc()
        cases.save(place_of(error))
        return 1
    cases.save()
    return 0


def _run(path: Path, cases: Cases, sample: int, finder: _Finder) -> None:
    tree = ast.parse(path.read_text(), str(path))
    if not _is_script(tree):
        from hipforge.aiter_compat import pytest_cases

        sys.exit(pytest_cases.run([os.fspath(path), *sys.argv[1:]], cases, sample, finder))
    module = type(sys)("__main__")
    module.__dict__.update({"__file__": os.fspath(path), _CASE: lambda title: functools.partial(cases.case, title)})
    sys.modules["__main__"] = module
    several = _as_cases(tree)
    code = compile(tree, str(path), "exec")

    def whole_file() -> None:
        exec(code, module.__dict__)

    (whole_file if several else cases.case(path.stem, whole_file))()
    if not cases.done:  # its functions are for pytest, and what it does itself has come to its end
        cases.record(path.stem, None, [], 0.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
