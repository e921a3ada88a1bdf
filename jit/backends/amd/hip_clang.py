"""clang as a HIP compiler, called as clang++, amdclang++ or through hipcc: one set of commands for all three.

A source is compiled by two commands that run side by side, one for the device and one for the host. The link puts the
device code, a file of bytes to it, into the section that HIP reads::

    x.cu ──► device code  0_x.co ─┐
      └────► host object  0_x.o ──┴─► module.so

Two reasons. The driver writes a depfile for the host pass only, so a header included under ``#if
defined(__gfx950__)`` would never be noticed; and the two passes, of about equal length for a small kernel, overlap.
The host object refers to its device code by the symbol ``__hip_fatbin_<hash of -cuid>``. A linker script defines that
symbol and writes the header of an offload bundle before the code, as clang-offload-bundler does. Both that program and
an assembler for the section took longer to start than the link takes. Where a flag shapes the bundle, the driver makes
it, and the script places it whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hipforge.errors import ToolchainError
from hipforge.jit.backends.amd.code_object import BUNDLE_MAGIC
from hipforge.jit.cache import cache_dir
from hipforge.jit.ninja import Step
from hipforge.jit.spec import environment_ingredients
from hipforge.jit.tools import Tool
from hipforge.jit.units import Compiled, Unit

_GCC_INSTALLATIONS = "/usr/lib/gcc/x86_64-linux-gnu"

# The emulator's faults, profiles and disassembly name file:line. Neither the code nor its metadata changes by a byte;
# paths are relative, so that a module's bytes do not depend on where it was built.
_LINE_TABLES = ("-gline-tables-only", "-fdebug-compilation-dir=.", "-fdebug-prefix-map=${ROCM}=rocm")

# Neither the header that clang puts before every HIP source nor the device libraries.
_BARE = ("-nogpuinc", "-nogpulib")

# The driver wants an architecture for the host pass too, which it does not affect: one for all, so that a build of a
# module for several architectures compiles its host code once.
_HOST_ARCH = "gfx942"

_PAGE = 4096
_HOST_TARGET = b"host-x86_64-unknown-linux-gnu-"

_HEADER = """\
{magic}
QUAD(2)
QUAD({page}) QUAD(0) QUAD({host_bytes}) {host}
QUAD({page}) QUAD({linker}_end - {linker}_start) QUAD({device_bytes}) {device}
. = ALIGN({page});
"""
# KEEP: a module may be linked with --gc-sections. The three names that start with {linker} are the linker's own for a
# file of bytes, which every module would export otherwise.
_PIECE = """\
. = ALIGN({page});
HIDDEN({symbol} = .);
{header}HIDDEN({linker}_start = .);
KEEP("{code}"(.data))
HIDDEN({linker}_end = .);
HIDDEN({linker}_size = 0);
"""
# The linker takes a file of bytes for writable data; what lies between these two marks is made read-only once the
# library is loaded, as the code that hipcc places is.
_SECTIONS = """\
SECTIONS {{
. = DATA_SEGMENT_ALIGN({page}, {page});
.hip_fatbin : ALIGN({page}) {{ {pieces} }}
. = DATA_SEGMENT_RELRO_END(0, .);
}} INSERT BEFORE .dynamic;
"""
_SCRIPT = "module.ld"

# Flags that shape the bundle (--offload-compress, a target with its features, -fgpu-rdc): with one of them the driver
# writes it. A flag too many here costs a program's start, no more. An edit in CCC_OVERRIDE_OPTIONS starts with + or ^.
_SHAPES_THE_BUNDLE = re.compile(r"(?:^|[\s+^'\"])--?[\w-]*(?:offload|bundle|gpu-arch|rdc)")
_OTHER_LINKER = re.compile(r"(?:^|[\s+^'\"])((?:-fuse-ld|--ld-path)=(?!(?:\S*/)?(?:ld[.])?lld(?:-\d+)?(?:\s|$))\S*)")
_FLAG_ENVIRONMENT = ("CCC_OVERRIDE_OPTIONS", "HIPCC_COMPILE_FLAGS_APPEND", "HIPCC_LINK_FLAGS_APPEND", "HIP_CLANG_FLAGS")


@dataclass(frozen=True)
class HipClang:
    """A clang with an AMDGPU target and a ROCm tree; ``inner`` is the clang behind a hipcc.

    ``bitcode`` is the folder of the device libraries, as the driver's own plan names it.
    """

    cxx: Tool
    inner: Tool
    linker: Tool | None
    llvm: Path
    rocm: Path
    is_hipcc: bool
    bitcode: Path | None = None

    @property
    def description(self) -> str:
        """Name and version, for people; of a hipcc its clang's too."""
        clang = next((line for line in self.cxx.version_text.splitlines() if "clang version" in line), "").strip()
        version = self.cxx.version if clang in self.cxx.version else f"{self.cxx.version}, {clang}"
        return f"{self.cxx.path.name}: {version}"

    def roots(self) -> dict[str, str]:
        """Return ``${HIPCXX}``, ``${ROCM}`` and ``${LLVM}``."""
        return {"HIPCXX": str(self.cxx.path), "ROCM": str(self.rocm), "LLVM": str(self.llvm)}

    def ingredients(self, arch: str) -> dict[str, str]:
        """Return versions and digests of compiler, linker and device libraries, and the compiler's environment."""
        found = {**self.cxx.ingredients("compiler"), **environment_ingredients()}
        if self.inner is not self.cxx:
            found.update(self.inner.ingredients("compiler:clang"))
        if self.linker is not None:
            found.update(self.linker.ingredients("compiler:ld.lld"))
        digests = cache_dir.digests()
        for library in self._device_libraries(arch):
            found[f"device library:{library.name}"] = digests.of(str(library))
        with contextlib.suppress(OSError):
            # clang's choice of C++ headers depends on the installed ones.
            found["host headers"] = " ".join(sorted(os.listdir(_GCC_INSTALLATIONS)))
        return found

    def _device_libraries(self, arch: str) -> list[Path]:
        if self.bitcode is None:
            return []
        other_isa = "oclc_isa_version_"
        own = f"{other_isa}{arch.removeprefix('gfx')}.bc"
        return sorted(
            path for path in self.bitcode.glob("*.bc") if not path.name.startswith(other_isa) or path.name == own
        )

    def tree_flags(self) -> tuple[str, ...]:
        """Return the flags that name the ROCm tree; a hipcc finds its own.

        clang looks into the tree's headers last, after /usr/include, where a distribution may have another HIP.
        """
        if self.is_hipcc:
            return ()
        # /usr/include itself stays where it is: the C++ library's headers must be found before the C library's.
        own = () if self.rocm == Path("/usr") else ("-isystem", "${ROCM}/include")
        return ("--rocm-path=${ROCM}", *own)

    def device_flags(self, arch: str) -> tuple[str, ...]:
        """Return the flags that make this a device compile for ``arch``."""
        return ("-x", "hip", f"--offload-arch={arch}", *self.tree_flags(), "--cuda-device-only")

    def host_flags(self) -> tuple[str, ...]:
        """Return what a source without device code needs to include the runtime's header."""
        return ("-idirafter${ROCM}/include", "-D__HIP_PLATFORM_AMD__=1")

    def compile(self, unit: Unit, module: str, arch: str) -> Compiled:
        """Return the commands that compile one source."""
        host_object = f"{unit.name}.o"
        if not unit.is_hip:
            # Explicit, because hipcc treats a C++ source as HIP and would also compile it for some GPU.
            language = "c" if unit.source.endswith(".c") else "c++"
            step = self._step(f"{unit.name}.host", ("-x", language, "-O2", *unit.flags), unit.source, host_object)
            return Compiled((step,), (host_object,), {})
        cuid = f"{module}_{unit.number}"
        code = f"{unit.name}.co"
        by_driver = _shapes_the_bundle(unit.flags)
        device_flags = (*self.device_flags(arch), "--gpu-bundle-output" if by_driver else "--no-gpu-bundle-output")
        host_flags = (*self.device_flags(_HOST_ARCH)[:-1], "--cuda-host-only")
        common = (f"-cuid={cuid}", *(_BARE if unit.bare else ()), *unit.flags)
        steps = (
            self._step(f"{unit.name}.device", (*device_flags, "-O3", *_LINE_TABLES, *common), unit.source, code),
            self._step(f"{unit.name}.host", (*host_flags, "-O1", *common), unit.source, host_object),
        )
        header = "" if by_driver else _header(code, arch)
        return Compiled(steps, (host_object, code), {_piece(code): _placed(code, fatbin_symbol(cuid), header)})

    def _step(self, name: str, flags: Sequence[str], source: str, output: str) -> Step:
        depfile = f"{name}.d"
        base = ("${HIPCXX}", *flags, "-fPIC", "-Wno-unused-command-line-argument")
        # Through the frontend, because the driver ignores -MD in a device compile and removes the file on an error.
        listing = _frontend("-dependency-file", depfile, "-MT", output, "-sys-header-deps")
        return Step(
            name=name,
            argv=(*base, *listing, "-c", source, "-o", output),
            outputs=(output,),
            depfile=depfile,
            scan=(*base, *listing, *_frontend("-MG"), "-fsyntax-only", source),
        )

    def link(self, objects: Sequence[str], ldflags: Sequence[str], library: str) -> Compiled:
        """Return the command that makes the shared library, its HIP symbols left undefined.

        Raises:
            ToolchainError: a flag asks for a linker that does not take the script.
        """
        codes = [name for name in objects if name.endswith(".co")]
        if codes:
            _require_lld(ldflags)
        argv = ("${HIPCXX}", "-shared", "-fPIC", "-fuse-ld=lld", "-no-hip-rt", "-Wno-unused-command-line-argument")
        bytes_of = (f"-Wl,--format=binary,{name},--format=default" for name in codes)
        script = (f"-Wl,-T,{_SCRIPT}",) if codes else ()
        step = Step(
            name="link",
            argv=(*argv, *(name for name in objects if name not in codes), *bytes_of, *script, *ldflags, "-o", library),
            outputs=(library,),
            inputs=tuple(objects),
            compiles=False,
        )
        pieces = " ".join(f"INCLUDE {_piece(name)}" for name in codes)
        text = _SECTIONS.format(page=_PAGE, pieces=pieces)
        return Compiled((step,), (library,), {_SCRIPT: text} if codes else {})


def _piece(code: str) -> str:
    """Return the name of the part of the linker script that places one unit's device code."""
    return f"{code}.ld"


def _placed(code: str, symbol: str, header: str) -> str:
    """Return that part: ``header`` at ``symbol``, and the bytes of the file ``code`` after it."""
    return _PIECE.format(page=_PAGE, symbol=symbol, header=header, code=code, linker=_linkers_name(code))


def _header(code: str, arch: str) -> str:
    """Return the header of an offload bundle with an empty entry for the host and one for ``arch``."""
    device = f"hipv4-amdgcn-amd-amdhsa--{arch}".encode()
    return _HEADER.format(
        page=_PAGE,
        magic=_bytes(BUNDLE_MAGIC),
        host=_bytes(_HOST_TARGET),
        host_bytes=len(_HOST_TARGET),
        device=_bytes(device),
        device_bytes=len(device),
        linker=_linkers_name(code),
    )


def _linkers_name(code: str) -> str:
    return "_binary_" + re.sub(r"[^A-Za-z0-9]", "_", code)


def _shapes_the_bundle(flags: Sequence[str]) -> bool:
    return any(_SHAPES_THE_BUNDLE.search(text) for text in (*flags, *_environment_flags().values()))


def _require_lld(ldflags: Sequence[str]) -> None:
    for place, text in (*(("extra_ldflags", flag) for flag in ldflags), *_environment_flags().items()):
        if found := _OTHER_LINKER.search(text):
            raise ToolchainError(
                f"{found[1]} of {place} names another linker than lld, and device code is linked by a script that only "
                "lld takes; remove the flag"
            )


def _environment_flags() -> dict[str, str]:
    return {name: os.environ.get(name, "") for name in _FLAG_ENVIRONMENT}


def _bytes(data: bytes) -> str:
    return " ".join(f"BYTE({byte})" for byte in data)


def _frontend(*words: str) -> tuple[str, ...]:
    return tuple(part for word in words for part in ("-Xclang", word))


def fatbin_symbol(cuid: str) -> str:
    """Return the symbol by which a host object refers to the device code of the unit ``cuid``."""
    return f"__hip_fatbin_{int.from_bytes(hashlib.md5(cuid.encode()).digest()[:8], 'little'):x}"


def bitcode_dir(tree: Path) -> Path | None:
    """Return where a ROCm tree keeps its device libraries, or None."""
    with contextlib.suppress(OSError):
        inside = sorted((tree / "lib/llvm/lib/clang").glob("*/lib/amdgcn/bitcode"))
        for folder in (tree / "amdgcn/bitcode", *inside):
            if (folder / "ocml.bc").is_file():
                return folder
    return None
