"""A pytest plugin that runs the ops' tests, as they are, on the GPU: ``HIPFORGE_DEVICE=cuda pytest -p gpu.staging``.

The tests make CPU tensors and compare with references on the CPU. Here, below the ops, each kernel's call copies the
storages of its tensors to the GPU, calls the entry on views with the same offsets, sizes and strides, so that aliases
and alignment stay what they are, and copies all storages back. What a test asserts is asserted of the GPU's results.

What needs the emulator itself (its counters, its checks of races) has no meaning here and is deselected, and so is what
writes to memory by an address that a tensor holds: that memory stays on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import errors

from hipforge import devices, emulator
from hipforge.jit.backends.vendors import every
from hipforge.ops.core import dispatch

PLACE = os.environ.get("HIPFORGE_STAGE", "cuda")
"""Where storages are copied to; ``cpu`` tries the copying itself beside the emulator."""

_ONLY_EMULATED = (
    "emulator.counters", "gfx942", "EmulatorFault", "timing.", "trace(", "HIPFORGE_EMULATOR", "Watch(",
    'checks="memory"', "Peers.",
)  # fmt: skip
_calls: dict[str, float | None] = {}
"""The variants that the test has called, the last one last, with the worst relative error of their results."""
_test = ""


def _on_cpu(value: Any) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return plain and value.device.type == "cpu" and value.layout is torch.strided


def staged(name: str, function: Callable[..., Any], signature: Any, divert: Any) -> Callable[..., Any]:
    """Return ``function`` with its CPU tensors on the GPU; ``divert`` takes tensors that torch must see first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        values = signature.bind(args, kwargs)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if torch._C._len_torch_dispatch_stack():
            return (divert or function)(*values)
        if name not in _calls:  # ahead of the call, which may never return
            _note_calls({name: None})
        _calls[name] = _calls.pop(name, None)
        if not all(map(_on_cpu, tensors)):
            return (divert or function)(*values)
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        moved = [_moved(value, copies) if isinstance(value, torch.Tensor) else value for value in values]
        function(*moved)
        if PLACE == "cuda":
            torch.cuda.synchronize()
        for here, there in copies.values():
            here.copy_(there)
        return None

    return call


def _moved(tensor: torch.Tensor, copies: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in copies:
        with torch.no_grad():
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            copies[key] = here, here.to(PLACE, copy=True)
    there = torch.empty(0, dtype=tensor.dtype, device=PLACE)
    there.set_(copies[key][1].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return there.requires_grad_() if tensor.requires_grad else there


def pytest_configure(config: pytest.Config) -> None:
    """Put the copying below the ops."""
    errors.listeners.append(note_error)
    stubs: Any = importlib.import_module("hipforge.jit.compile_ops").Stub
    bind = stubs._bind

    def bound(self: Any, module: Any, variant: Any, arch: str, divert: Any) -> Any:
        label = "-".join([module.name, *(f"{key}={value}" for key, value in variant.items())])
        return staged(label, bind(self, module, variant, arch, divert), self.signature, divert)

    stubs._bind = bound
    find = dispatch.target_of

    def target_of(device: torch.device) -> Any:
        current = devices.current()
        if current.is_gpu and device.type == "cpu":
            return current.arch_of(0), current.cu_count(0)
        return find(device)

    dispatch.target_of = target_of
    if PLACE == "cuda":
        emulator.options = lambda **given: contextlib.nullcontext()  # type: ignore[assignment]
        for vendor in every():
            if vendor.torch_arch(0) is not None:
                os.environ["HIPFORGE_DEVICE"] = vendor.device


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is about the emulator."""
    if PLACE != "cuda":
        return
    left_out = [item for item in items if _is_emulated(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _is_emulated(item: pytest.Item) -> bool:
    if item.path.parent.name == "gpu":  # written for a GPU
        return False
    function = getattr(item, "function", None)
    text = inspect.getsource(function) if function else ""
    return any(word in text for word in _ONLY_EMULATED)


def note_error(error: float) -> None:
    """Keep the worst error of the kernel that was called last: a test compares what it has just computed."""
    if _calls and math.isfinite(error):
        name = next(reversed(_calls))
        _calls[name] = max(error, _calls[name] or 0.0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget what the test before called."""
    global _test
    _test = item.nodeid
    _calls.clear()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Write down at once what a test called and how far off it was: a run may be cut off."""
    if _calls:
        _note_calls(_calls)


def _note_calls(variants: dict[str, float | None]) -> None:
    _write(f"calls-{os.getpid()}.jsonl", {"test": _test, "variants": variants})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write each outcome down, a failure with its end."""
    if "PYTEST_XDIST_WORKER" in os.environ or not (report.failed or report.when == "call"):
        return
    words = report.longreprtext[-1500:] if report.failed else ""
    _write("outcomes.jsonl", {"test": report.nodeid, "outcome": report.outcome, "words": words})


def _write(name: str, line: object) -> None:
    folder = os.environ.get("HIPFORGE_STAGE_RECORD")
    if folder:
        with Path(folder, name).open("a") as file:
            file.write(json.dumps(line) + "\n")
