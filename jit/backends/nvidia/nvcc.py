"""nvcc as a toolchain: one command compiles a source for device and host, one links.

The runtime is not linked (``-cudart none``): its symbols stay undefined and bind to the libcudart that torch loaded.
nvcc's depfile lists what either pass read. ptxas's report on each kernel stays in the step's log, from which
:mod:`hipforge.jit.backends.nvidia.resources` takes it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hipforge.jit.cache import cache_dir
from hipforge.jit.ninja import Step
from hipforge.jit.spec import KEY_ENVIRONMENT, environment_ingredients
from hipforge.jit.tools import Tool
from hipforge.jit.units import Compiled, Unit

ENVIRONMENT = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")
"""Variables that change what nvcc emits, beside those of its host compiler."""

# A multiply and an add round once each, so that results have one value on every vendor; kernels name a fused operation
# where they want one.
DEVICE_FLAGS = (
    "-fmad=false", "--expt-relaxed-constexpr", "-Xptxas", "-v", "-DHF_VENDOR=nvidia",
    "-I${CSRC}/include/hipforge/nvidia/include",
)  # fmt: skip
BARE = "${CSRC}/include/hipforge/nvidia/bare"
"""The folder whose ``cuda_runtime.h`` is read in place of CUDA's by a module that is bare."""

# crt/common_functions.h, which the host compiler's pass over nvcc's own text includes, brings CUDA's mathematics.
BARE_FLAGS = (f"-I{BARE}", "-Xcompiler", "-D__COMMON_FUNCTIONS_H__")
_HOST_OPTIONS = ("-f", "-W", "-m", "-idirafter")
_OWN_OPTIONS = ("-fmad", "-ftz", "-maxrregcount", "-minimal")


def gencode(arch: str) -> str:
    """Return the option for exactly one architecture, with its own instructions (``a``) and no PTX."""
    number = arch.removeprefix("sm_")
    return f"-gencode=arch=compute_{number}a,code=sm_{number}a"


@dataclass(frozen=True)
class Nvcc:
    """An nvcc: ``top`` is its toolkit's folder, ``parts`` are the programs it calls, its host compiler included.

    ``bare``: whether it takes the headers in ``BARE`` for CUDA's.
    """

    tool: Tool
    top: Path
    parts: dict[str, Tool]
    release: str
    bare: bool = True

    @property
    def description(self) -> str:
        """Name and version, for people."""
        return f"nvcc {self.release} with {self.parts['host compiler'].version}: {self.tool.path}"

    def roots(self) -> dict[str, str]:
        """Return ``${NVCC}`` and ``${CUDA}``."""
        return {"NVCC": str(self.tool.path), "CUDA": str(self.top)}

    def ingredients(self, arch: str) -> dict[str, str]:
        """Return versions and digests of nvcc and what it calls, libdevice, and the compilers' environment."""
        names = (*KEY_ENVIRONMENT, *ENVIRONMENT)
        found = {**self.tool.ingredients("compiler"), **environment_ingredients(names)}
        for name, part in self.parts.items():
            found.update(part.ingredients(f"compiler:{name}"))
        for library in sorted((self.top / "nvvm/libdevice").glob("*.bc")):
            found[f"device library:{library.name}"] = cache_dir.digests().of(str(library))
        return found

    def host_flags(self) -> tuple[str, ...]:
        """Return what a source without device code needs to include the runtime's header."""
        return ("-I${CSRC}/include/hipforge/nvidia/include", "-isystem${CUDA}/include")

    def compile(self, unit: Unit, module: str, arch: str) -> Compiled:
        """Return the command that compiles one source."""
        output = f"{unit.name}.o"
        language = "cu" if unit.is_hip else "c" if unit.source.endswith(".c") else "c++"
        bare = BARE_FLAGS if unit.bare and self.bare else ()
        # -O1 is for the host's code: ptxas and cicc optimise fully without being told.
        device = (gencode(arch), "-O1", *DEVICE_FLAGS, *bare) if unit.is_hip else ("-O2",)
        name = f"{unit.name}.device" if unit.is_hip else f"{unit.name}.host"
        base = ("${NVCC}", "-x", language, *device, "-Xcompiler", "-fPIC", *_translated(unit.flags))
        listing = ("-MF", f"{name}.d", "-MT", output)
        step = Step(
            name=name,
            argv=(*base, "-MD", *listing, "-c", unit.source, "-o", output),
            outputs=(output,),
            depfile=f"{name}.d",
            scan=(*base, "-M", *listing, unit.source),  # fails where a header is missing, which nvcc cannot list
        )
        return Compiled((step,), (output,), {})

    def link(self, objects: Sequence[str], ldflags: Sequence[str], library: str) -> Compiled:
        """Return the command that makes the shared library, the runtime's symbols left undefined."""
        argv = ("${NVCC}", "-shared", "-cudart", "none", "-Xcompiler", "-fPIC")
        flags = tuple(part for flag in ldflags for part in _one(flag))
        step = Step(
            name="link",
            argv=(*argv, *objects, *flags, "-o", library),
            outputs=(library,),
            inputs=tuple(objects),
            compiles=False,
        )
        return Compiled((step,), (library,), {})


def _translated(flags: Sequence[str]) -> tuple[str, ...]:
    """Return g++'s flags in nvcc's spelling."""
    return tuple(part for flag in flags for part in _one(flag))


def _one(flag: str) -> Iterator[str]:
    if flag.startswith("-Wl,"):
        yield from ("-Xlinker", flag.removeprefix("-Wl,"))
    elif flag.startswith("-isystem") and len(flag) > len("-isystem"):
        yield from ("-isystem", flag.removeprefix("-isystem"))
    elif flag.startswith(_HOST_OPTIONS) and not flag.startswith(_OWN_OPTIONS):
        yield from ("-Xcompiler", flag)
    else:
        yield flag


def host_compiler(plan: str) -> str | None:
    """Return the host compiler that a dry run of nvcc names."""
    for line in plan.splitlines():
        if " -E " in line and "-D__CUDACC__" in line:
            return shlex.split(line.removeprefix("#$ "))[0]
    return None
