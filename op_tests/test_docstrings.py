"""Every public name has an example in its docstring, and the examples run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import hipforge
from hipforge.jit import registry

PACKAGES = (
    "hipforge", "hipforge.ops", "hipforge.jit", "hipforge.emulator", "hipforge.nn", "hipforge.integrations.nanochat",
    "hipforge.integrations.transformers",
)  # fmt: skip


def _public() -> dict[str, object]:
    """Every public function and class, by where it is defined."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]:
            value = getattr(module, name)
            home = str(getattr(value, "__module__", ""))
            if (inspect.isfunction(value) or inspect.isclass(value)) and home.startswith("hipforge"):
                found[f"{home}.{value.__name__}"] = value
    return found


PUBLIC = _public()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_example_of_a_public_name_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})  # an example registers its own module
    value = PUBLIC[name]
    finder = doctest.DocTestFinder(recurse=False)
    globs = dict(vars(importlib.import_module(str(value.__module__))))
    examples = [test for test in finder.find(value, name, module=False, globs=globs) if test.examples]
    assert examples, f"{name} has no example in its docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    for test in examples:
        runner.run(test, out=said.append)
    assert not runner.summarize(verbose=False).failed, "".join(said)


def test_an_example_that_prints_something_else_is_found() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None).failed == 1


def _completed() -> dict[str, Callable[..., object]]:
    """The functions whose docstrings are completed from another's, by where they are defined."""
    found: dict[str, Callable[..., object]] = {}
    for path in sorted(Path(hipforge.ops.__file__).parent.rglob("*.py")):
        names = re.findall(r"^@documented_like\(.*\n(?:@.*\n)*def (\w+)", path.read_text(), re.MULTILINE)
        parts = path.relative_to(Path(hipforge.ops.__file__).parent).with_suffix("").parts
        module = ".".join(("hipforge.ops", *(part for part in parts if part != "__init__")))
        found.update({f"{module}.{name}": getattr(importlib.import_module(module), name) for name in names})
    return found


def test_a_completed_docstring_describes_every_parameter() -> None:
    functions = _completed()
    assert len(functions) > 20
    for name, function in functions.items():
        described = set(re.findall(r"^    (?:    )?(\w+): ", str(function.__doc__), re.MULTILINE))
        parameters = set(inspect.signature(function).parameters)
        assert parameters <= described, (name, parameters - described)


def test_ops_are_among_the_public_names() -> None:
    assert {"hipforge.ops.mxfp8_gemm.mxfp8_gemv", "hipforge.jit.loader.load"} <= PUBLIC.keys()
    assert len(PUBLIC) > len(hipforge.__all__)
