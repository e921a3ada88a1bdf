"""Host-only shared libraries from C and C++ sources: the binding extension and the emulator.

They go through the same cache as HIP modules, under the target ``host``. Prebuilt ones are compiled for
``HIPFORGE_HOST_MARCH`` in place of ``-march=native`` and are used only by machines with those instructions.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hipforge import settings
from hipforge.errors import BuildError, ToolchainError
from hipforge.jit import obtain, spec
from hipforge.jit.cache import cache_dir, store
from hipforge.jit.digest import ABSENT
from hipforge.jit.host_cpu import native
from hipforge.jit.ninja import Step, body
from hipforge.jit.roots import package_roots
from hipforge.jit.spec import BuildSpec, common_ingredients, environment_ingredients
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


@dataclass(frozen=True, kw_only=True)
class Request(spec.Request):
    """One host library before any compiler is known, all paths with placeholders."""

    target: str = TARGET
    sources: tuple[str, ...]
    cflags: tuple[str, ...]
    ldflags: tuple[str, ...]
    required: Mapping[Path, str]
    source_cflags: Mapping[str, Sequence[str]]

    def how_to_get(self) -> str:
        """Return the error's text for a library that is not built where building is disabled."""
        return (
            f"the library {self.module!r} is not built and HIPFORGE_DISABLE_JIT=1; run once without that setting, or "
            "name a directory that holds it with HIPFORGE_PREBUILT_DIR"
        )

    def specify(self) -> BuildSpec:
        """Return the spec as this machine's compilers would build it.

        Raises:
            ToolchainError: there is no host compiler.
        """
        return specification(self)

    def check_buildable(self) -> None:
        """Look for the files without which a build makes no sense.

        Raises:
            ToolchainError: one of them is missing.
        """
        for path, complaint in self.required.items():
            if not path.exists():
                raise ToolchainError(complaint)

    def again(self) -> Request:
        """Return the same request with the sources as they are now."""
        sources = [Path(self.roots.show(source)) for source in self.sources]
        flags = [self.roots.show(flag) if flag.startswith("-I${INCLUDE") else flag for flag in self.cflags]
        return request(
            self.module,
            sources=sources,
            cflags=flags,
            ldflags=self.ldflags,
            required=self.required,
            source_cflags=self.source_cflags,
        )


def request(
    name: str,
    *,
    sources: Sequence[Path],
    cflags: Sequence[str],
    ldflags: Sequence[str],
    required: Mapping[Path, str] | None = None,
    source_cflags: Mapping[str, Sequence[str]] | None = None,
) -> Request:
    """Complete a request for a host library; the arguments are those of :func:`build`.

    Raises:
        BuildError: a source is missing.
    """
    digests = cache_dir.digests()
    outside = [str(source.parent) for source in sources if package_roots().hide(source) == str(source)]
    folders = [flag[2:] for flag in cflags if flag.startswith("-I/")]
    roots = package_roots().with_paths(
        **{f"SOURCE{number}": path for number, path in enumerate(dict.fromkeys(outside))},
        **{f"INCLUDE{number}": path for number, path in enumerate(dict.fromkeys(folders))},
    )
    hidden = tuple(roots.hide(source) for source in sources)
    flags = tuple(f"-I{roots.hide(flag[2:])}" if flag.startswith("-I/") else flag for flag in cflags)
    portable = common_ingredients(name, {}, TARGET)
    more = {"source_cflags": source_cflags} if source_cflags else {}
    portable["flags"] = json.dumps({"cflags": flags, "ldflags": list(ldflags), **more})
    for path, source in zip(hidden, sources, strict=True):
        portable[f"source:{path}"] = digests.of(str(source))
        if portable[f"source:{path}"] == ABSENT:
            raise BuildError(f"{name}: there is no source {source}")
    return Request(
        module=name,
        roots=roots,
        portable=portable,
        sources=hidden,
        cflags=flags,
        ldflags=tuple(ldflags),
        required=required or {},
        source_cflags=source_cflags or {},
    )


def specification(wanted: Request) -> BuildSpec:
    """Return the spec of ``wanted`` as this machine's compilers would build it.

    Raises:
        ToolchainError: there is no host compiler.
    """
    ingredients = {**wanted.portable, **environment_ingredients()}
    roots = wanted.roots
    versions: list[str] = []
    is_cplusplus = [_is_cplusplus(Path(source)) for source in wanted.sources]
    for cplusplus in sorted({any(is_cplusplus), *is_cplusplus}):
        path = compiler(cplusplus)
        variable = _COMPILERS[cplusplus][0]
        roots = roots.with_paths(**{variable: path})
        tool = identify(path, cache_dir.digests())
        versions.append(f"{path.name}: {tool.version}")
        ingredients.update(tool.ingredients(f"compiler:{variable}"))
    march = settings.HOST_MARCH.get()
    cflags = tuple(flag.replace("-march=native", f"-march={march}") for flag in wanted.cflags)
    if any("-march=native" in flag for flag in wanted.cflags):
        ingredients["host cpu"] = native() if march == "native" else march
    steps = tuple(
        _compile(number, path, (*cflags, *wanted.source_cflags.get(Path(path).name, ())))
        for number, path in enumerate(wanted.sources)
    )
    steps += (_link(any(is_cplusplus), [step.outputs[0] for step in steps], wanted.ldflags),)
    ingredients["steps"] = body(steps, wanted.module)
    return BuildSpec(
        module=wanted.module,
        target=TARGET,
        roots=roots,
        steps=steps,
        files={},
        ingredients=ingredients,
        toolchain=", ".join(versions),
        is_device_code=False,
    )


def _compile(number: int, source: str, cflags: Sequence[str]) -> Step:
    name = f"{number}_{Path(source).stem}"
    tool = "${CXX}" if _is_cplusplus(Path(source)) else "${CC}"
    maps = (f"-ffile-prefix-map=${{{name}}}={name.lower()}" for name in ("CSRC", "JIT", "EMULATOR"))
    flags = ("-fPIC", "-I${CSRC}/include", *maps, *cflags)
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
        compiles=False,
    )


def build(
    name: str,
    *,
    sources: Sequence[Path],
    cflags: Sequence[str] = (),
    ldflags: Sequence[str] = (),
    required: Mapping[Path, str] | None = None,
    source_cflags: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Return the shared library made of ``sources``: prebuilt, else cached, else built now.

    Compiled with ``-fPIC -I<package>/csrc/include`` and then ``cflags``, in order; linked with ``-shared``, the
    objects and then ``ldflags``. Flags may use ``${CSRC}``, ``${JIT}`` and ``${EMULATOR}``. ``required`` names files
    that a build needs, each with the message for its absence; a library that is built needs none. ``source_cflags`` are
    further flags of single sources, by file name; they come last.

    Raises:
        BuildError: a source does not compile or is missing.
        MissingModuleError: it is not built and ``HIPFORGE_DISABLE_JIT=1``.
        ToolchainError: there is no host compiler, or a required file is missing.
    """
    return entry(
        name, sources=sources, cflags=cflags, ldflags=ldflags, required=required, source_cflags=source_cflags
    ).library


def entry(
    name: str,
    *,
    sources: Sequence[Path],
    cflags: Sequence[str] = (),
    ldflags: Sequence[str] = (),
    required: Mapping[Path, str] | None = None,
    source_cflags: Mapping[str, Sequence[str]] | None = None,
) -> store.Entry:
    """Like :func:`build`, but return the whole entry: its manifest says how and in how many seconds it was built."""
    resolved = tuple(Path(os.path.realpath(source)) for source in sources)
    needs = tuple((required or {}).items())
    more = tuple((source, tuple(flags)) for source, flags in (source_cflags or {}).items())
    return _entry(name, resolved, tuple(cflags), tuple(ldflags), needs, more, cache_dir.configured()[0])


@functools.cache
def _entry(
    name: str,
    sources: tuple[Path, ...],
    cflags: tuple[str, ...],
    ldflags: tuple[str, ...],
    required: tuple[tuple[Path, str], ...],
    source_cflags: tuple[tuple[str, tuple[str, ...]], ...],
    _root: Path,
) -> store.Entry:
    wanted = request(
        name,
        sources=sources,
        cflags=cflags,
        ldflags=ldflags,
        required=dict(required),
        source_cflags=dict(source_cflags),
    )
    return obtain.module(wanted).entry
