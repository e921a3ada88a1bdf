"""Options that several commands share: a module's architecture, its variants, and JSON files of the user's own."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from hipforge.errors import ConfigError, HipforgeError, did_you_mean


def _register(ctx: click.Context, param: click.Parameter, paths: tuple[Path, ...]) -> None:
    for path in paths:
        if path.suffix == ".py":
            add_calls_of(path)
        else:
            from hipforge.jit import registry

            registry.register(path)


def add_calls_of(path: Path) -> None:
    """Import a Python file, and add the ops of its ``CALLS``.

    By an op's name that has a function which takes a shape's numbers, each with an example as its default, makes the
    operands and returns the call.

    Raises:
        ConfigError: it cannot be imported, or ``CALLS`` is not of this form.
    """
    from hipforge.cli.operands import SUBJECTS, Subject

    name = f"hipforge registered {path.stem}"  # that no import has: torch.py must not become torch
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--register {path}: there is no such Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, HipforgeError):
            raise
        frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        line = frames[-1] if frames else getattr(error, "lineno", None)
        place = "" if line is None else f" in line {line}"
        raise ConfigError(f"--register {path} cannot be imported: {type(error).__name__}{place}: {error}") from error
    for op, call in getattr(module, "CALLS", {}).items():
        numbers = inspect.signature(call).parameters.values()
        example = tuple(number.default for number in numbers)
        if not example or not all(isinstance(number, int) for number in example):
            raise ConfigError(f"{path}: CALLS[{op!r}] takes the numbers of a shape, each with an int as its default")
        if op in SUBJECTS and not SUBJECTS[op].own:
            raise ConfigError(f"{path}: CALLS[{op!r}]: hipforge has an op of that name; choose another")
        SUBJECTS[op] = Subject(tuple(number.name.upper() for number in numbers), example, call, own=True)


# Eager: what it registers is known when the other arguments are read.
REGISTER_OPTION = click.option(
    "--register", multiple=True, type=click.Path(path_type=Path), callback=_register, is_eager=True, expose_value=False,
    help="Ops of your own: a JSON file of modules, or a Python file that registers one.",
)  # fmt: skip


class Output(click.Path):
    """A file that a command writes last: one that cannot be written is a usage error before the work for it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; the file need not exist, its folder must, and take files."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"{path} cannot be written: there is no folder {path.parent}; make it first", param, ctx)
        if not path.exists() and not os.access(path.parent, os.W_OK | os.X_OK):
            self.fail(f"{path} cannot be written: no permission to write into {path.parent}", param, ctx)
        return path


class Picture(Output):
    """A picture that a command draws last: also a suffix without a format, or no matplotlib, is refused first."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path."""
        path = super().convert(value, param, ctx)
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError:
            self.fail("a plot needs matplotlib: pip install matplotlib", param, ctx)
        formats = FigureCanvasBase.get_supported_filetypes()
        if path.suffix and path.suffix[1:].lower() not in formats:
            self.fail(f"{path} cannot be written: formats are {', '.join(formats)}; got {path.suffix}", param, ctx)
        return path


PICTURE_OPTION = click.option("--plot", "picture", type=Picture(), help="Also write a picture (needs matplotlib).")


class SuggestingGroup(click.Group):
    """A group of commands that are imported on use."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return name, command and further arguments; a mistyped name is a usage error that says what is near."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def module_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the registered modules that start with ``incomplete``: what a shell completes."""
    from hipforge.jit import registry

    return [name for name in registry.modules() if name.startswith(incomplete)]


def parse_variant(texts: tuple[str, ...]) -> dict[str, str]:
    """Return ``{"M": "4"}`` for ``("M=4",)``.

    Raises:
        ConfigError: a text has no ``=``.
    """
    variant: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--variant {text!r}: expected NAME=VALUE, as in M=4")
        variant[name] = value
    return variant


def matching_variants(module: str, wanted: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the module's variants whose values agree with ``wanted``; names left out match all.

    Raises:
        ConfigError: the module has no such variant name, or no variant with such a value.
    """
    from hipforge.jit import registry

    entry = registry.module(module)
    unknown = set(wanted) - set(entry.variants)
    if unknown:
        names = ", ".join(entry.variants) or "none"
        raise ConfigError(f"{module} has no variant parameter {sorted(unknown)[0]!r}; it has: {names}")
    found = [
        variant
        for variant in entry.all_variants()
        if all(str(variant[name]) == value for name, value in wanted.items())
    ]
    if not found:
        raise ConfigError(f"{module} has no variant with {dict(wanted)}; its values: {dict(entry.variants)}")
    yield from found
