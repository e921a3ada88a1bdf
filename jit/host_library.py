"""Host-only shared libraries from C and C++ sources: the binding extension and the emulator.

They go through the same cache as HIP modules, under the target ``host``.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from hipforge.errors import ToolchainError
from hipforge.jit import cache_dir
from hipforge.jit.build import ensure
from hipforge.jit.ninja import Step, body
from hipforge.jit.roots import Roots, package_roots
from hipforge.jit.spec import BuildSpec, common_ingredients, environment_ingredients, host_cpu
from hipforge.jit.tools import identify

TARGET = "host"

_COMPILERS = {True: ("CXX", ("g++", "clang++", "c++")), False: ("CC", ("gcc", "clang", "cc"))}


def compiler(cplusplus: bool) -> Path:
    """Return the host's C++ or C compiler: ``CXX``/``CC``, else the first of the usual names on ``PATH``.

    Raises:
        ToolchainError: there is none.
    """
    variable, names = _COMPILERS[cplusplus]
    wanted = os.environ.get(variable)
    for name in [wanted] if wanted else names:
        found = shutil.which(name)
        if found:
            return Path(found)
    looked = f"{variable}={wanted}" if wanted else f"{', '.join(names)} on PATH"
    raise ToolchainError(
        f"no {'C++' if cplusplus else 'C'} compiler: looked for {looked}; install g++ or set {variable}"
    )


def _is_cplusplus(source: Path) -> bool:
    return source.suffix != ".c"


def specification(name: str, *, sources: Sequence[Path], cflags: Sequence[str], ldflags: Sequence[str]) -> BuildSpec:
    """Return the spec of a host library; the arguments are those of :func:`build`."""
    roots = package_roots()
    digests = cache_dir.digests()
    ingredients = common_ingredients(name, {}, TARGET)
    ingredients["flags"] = json.dumps({"cflags": list(cflags), "ldflags": list(ldflags)})
    versions: list[str] = []
    linker_is_cplusplus = any(map(_is_cplusplus, sources))
    for cplusplus in sorted({linker_is_cplusplus, *map(_is_cplusplus, sources)}):
        path = compiler(cplusplus)
        variable = _COMPILERS[cplusplus][0]
        roots = roots.with_paths(**{variable: path})
        tool = identify(path, digests)
        versions.append(f"{path.name}: {tool.version}")
        ingredients.update(tool.ingredients(f"compiler:{variable}"))
    ingredients["compiler:version"] = ingredients[f"compiler:{_COMPILERS[linker_is_cplusplus][0]}:version"]
    roots, hidden = _hide_sources(roots, sources)
    steps = tuple(_compile(number, path, cflags) for number, path in enumerate(hidden))
    objects = [step.outputs[0] for step in steps]
    steps += (_link(linker_is_cplusplus, objects, ldflags),)
    for path, source in zip(hidden, sources, strict=True):
        ingredients[f"source:{path}"] = digests.of(str(source))
    if any("-march=native" in flag or "-mtune=native" in flag for flag in cflags):
        ingredients["host cpu"] = host_cpu()
    ingredients.update(environment_ingredients())
    ingredients["steps"] = body(steps, name)
    return BuildSpec(
        module=name, variant={}, target=TARGET, roots=roots, steps=steps, files={}, ingredients=ingredients,
        toolchain=", ".join(versions), is_device_code=False,
    )


def _hide_sources(roots: Roots, sources: Sequence[Path]) -> tuple[Roots, list[str]]:
    outside = [str(source.parent) for source in sources if roots.hide(source) == str(source)]
    roots = roots.with_paths(**{f"SOURCE{number}": path for number, path in enumerate(dict.fromkeys(outside))})
    return roots, [roots.hide(source) for source in sources]


def _compile(number: int, source: str, cflags: Sequence[str]) -> Step:
    name = f"{number}_{Path(source).stem}"
    tool = "${CXX}" if _is_cplusplus(Path(source)) else "${CC}"
    flags = ("-fPIC", "-I${CSRC}/include", "-ffile-prefix-map=${CSRC}=csrc", "-ffile-prefix-map=${JIT}=jit", *cflags)
    depfile = f"{name}.d"
    return Step(
        name=name,
        argv=(tool, *flags, "-MD", "-MF", depfile, "-c", source, "-o", f"{name}.o"),
        outputs=(f"{name}.o",),
        depfile=depfile,
        scan=(tool, *flags, "-M", "-MG", "-MF", depfile, source),
    )


def _link(cplusplus: bool, objects: Sequence[str], ldflags: Sequence[str]) -> Step:
    tool = "${CXX}" if cplusplus else "${CC}"
    return Step(
        name="link",
        argv=(tool, "-shared", *objects, *ldflags, "-o", BuildSpec.library),
        outputs=(BuildSpec.library,),
        inputs=tuple(objects),
        launcher=False,
    )


def build(
    name: str, *, sources: Sequence[Path], cflags: Sequence[str] = (), ldflags: Sequence[str] = ()
) -> Path:
    """Return the shared library made of ``sources``, building it if the cache has none with these contents.

    Compiled with ``-fPIC -I<package>/csrc/include`` and then ``cflags``, in order; linked with ``-shared``, the
    objects and then ``ldflags``. Flags may use ``${CSRC}`` and ``${JIT}``.

    Raises:
        BuildError: a source does not compile.
        ToolchainError: there is no host compiler.
    """
    resolved = [Path(os.path.realpath(source)) for source in sources]
    return _build_library(name, tuple(resolved), tuple(cflags), tuple(ldflags))


@functools.cache
def _build_library(name: str, sources: tuple[Path, ...], cflags: tuple[str, ...], ldflags: tuple[str, ...]) -> Path:
    spec = specification(name, sources=sources, cflags=cflags, ldflags=ldflags)
    return ensure(spec).entry.library
