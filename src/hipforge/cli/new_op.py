"""``hipforge new-op NAME``: write a working tuned op family as a template for a new one.

The files are a family of :mod:`hipforge.ops`, its kernel, its tuner and its test. Lists of ops are made of what those
say; the one that is kept as text, because type checkers read it, is written again by ``.ci/public_names.py``.
"""

from __future__ import annotations

import builtins
import keyword
import os
import re
import subprocess
import sys
from importlib import resources
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template

import click

from hipforge.errors import ConfigError

# template -> where its text goes in a checkout
FILES = {
    "kernel.cu.in": "csrc/{name}/amd/{name}.cu",
    "modules.json.in": "csrc/{name}/modules.json",
    "init.py.in": "ops/{name}/__init__.py",
    "family.py.in": "ops/{name}/family.py",
    "kernels.py.in": "ops/{name}/kernels.py",
    "reference.py.in": "ops/{name}/reference.py",
    "tuner.py.in": "tuning/families/{name}.py",
    "test.py.in": "op_tests/ops/test_{name}.py",
}
TYPED_NAMES = "src/hipforge/__init__.py"
_GENERATOR = ".ci/public_names.py"

# The same where the op is no part of hipforge.
FILES_HERE = {
    "here.cu.in": "{name}.cu",
    "here.json.in": "{name}.json",
    "here.py.in": "{name}.py",
    "here_test.py.in": "test_{name}.py",
}


def _render(template: str, name: str) -> str:
    """Fill in a template; its imports are sorted again, since their order depends on the name."""
    text = Template(template).substitute(name=name, NAME=name.upper())
    block = re.compile(r"(?m)(?:^from hipforge\.\S+ import .*\n)+")
    return block.sub(lambda found: "".join(sorted(found[0].splitlines(keepends=True), key=_module_of)), text)


def _module_of(line: str) -> str:
    return line.split()[1]


def write(name: str, root: Path, *, here: bool = False) -> list[Path]:
    """Write the files of an op family into a checkout, and again the names that type checkers see; return the files.

    Args:
        name: the op's and its family's name, a Python identifier in lower case.
        root: the checkout.
        here: write an op that is no part of hipforge into ``root``, whatever folder that is.

    Raises:
        ConfigError: the name is not usable or taken, or ``root`` is not a hipforge checkout; nothing is written then.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"an op's name is a Python identifier in lower case, as in rms_norm; got {name!r}")
    if here:
        where = _module_of_that_name(name, root)
        if where is not None:
            raise ConfigError(f"{name}.py would hide Python's {where}; choose another name")
        return _written({template: root / place.format(name=name) for template, place in FILES_HERE.items()}, name)
    missing = [place for place in (TYPED_NAMES, _GENERATOR) if not (root / place).is_file()]
    if missing:
        raise ConfigError(f"{root} is not a checkout of hipforge: it has no {missing[0]}; name one with --root")
    targets = {template: root / place.format(name=name) for template, place in FILES.items()}
    taken = [path for path in (*targets.values(), root / "ops" / f"{name}.py") if path.exists()]
    if taken or (root / "ops" / name).exists() or (root / "csrc" / name).exists():
        raise ConfigError(f"{name} is taken: {taken[0] if taken else name} exists; choose another name")
    written = _written(targets, name)
    environment = {**os.environ, "PYTHONPATH": str(root.resolve() / "src")}
    subprocess.run([sys.executable, str(root / _GENERATOR)], check=True, env=environment)
    return written


def _module_of_that_name(name: str, folder: Path) -> str | None:
    """Return what ``import name`` or the name alone means before ``folder`` has a file of it, or None."""
    if hasattr(builtins, name):
        return f"built-in {name}"
    if name in sys.stdlib_module_names:
        return f"own module {name}"
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != folder.resolve()]
    found = PathFinder.find_spec(name, elsewhere)
    return f"module {name}, {found.origin}" if found is not None and found.origin is not None else None


def _written(targets: dict[str, Path], name: str) -> list[Path]:
    taken = [path for path in targets.values() if path.exists()]
    if taken:
        raise ConfigError(f"{name} is taken: {taken[0]} exists; choose another name")
    templates = resources.files("hipforge.cli") / "op_template"
    for template, path in targets.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_render((templates / template).read_text(), name))
    return list(targets.values())


@click.command("new-op")
@click.argument("name")
@click.option("--root", type=click.Path(path_type=Path), default=Path(), help="The checkout; this folder by default.")
@click.option("--here", is_flag=True, help="Write an op of your own into this folder, outside any checkout.")
def command(name: str, root: Path, here: bool) -> None:
    """Write a tuned op family called NAME that works: kernel, wrapper, family, tuner and test.

    With --here, a plain op of your own: kernel, module JSON, wrapper and test.
    """
    for path in write(name, root, here=here):
        click.echo(f"wrote {path}")
    if here:
        click.echo(f"Next: pytest test_{name}.py; hipforge profile {name} 4,768 --register {name}.py")
        return
    click.echo(f"generated {root / TYPED_NAMES}")
    click.echo(f"Next: pytest op_tests/ops/test_{name}.py, then make the kernel and the reference compute your op.")
