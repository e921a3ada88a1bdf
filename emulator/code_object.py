"""A code object that can be launched: its kernels by symbol or plain name, with resources and disassembly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

from hipforge.emulator import library, runtime
from hipforge.errors import ArchError
from hipforge.jit.backends.amd import code_object as reader
from hipforge.jit.backends.amd.code_object import KernelArg, KernelResources


@dataclass(frozen=True, kw_only=True)
class Kernel(KernelResources):
    """One kernel of a :class:`CodeObject`: what :func:`hipforge.emulator.launch` takes.

    Example:
        >>> import hipforge, torch
        >>> from hipforge import devices, emulator
        >>> runtime, arch = devices.current().load_runtime(), devices.current().arch_of()
        >>> module = hipforge.jit.load("module_fp8_quant", {"HF_INPUT": "f32"}, arch)
        >>> kernel = emulator.CodeObject(module.path / "module.so").kernels["amax_kernel"]
        >>> [argument.size for argument in kernel.explicit_args]
        [8, 8, 1, 8]
    """

    code_object: CodeObject = field(repr=False, compare=False)

    @property
    def explicit_args(self) -> tuple[KernelArg, ...]:
        """The arguments that a caller passes, in order; the runtime fills in the hidden ones."""
        return tuple(arg for arg in self.args if not arg.hidden)

    def disassembly(self) -> str:
        """Return the kernel's instructions, ``address: text`` per line, in llvm-objdump's spelling."""
        return self._ask(runtime.load().library.hfemu_disassemble)

    def source_lines(self) -> list[str]:
        """Return ``file:line`` of each of these instructions; empty where the compiler recorded none.

        Compile with ``-gline-tables-only`` to have them; the machine code stays the same.
        """
        return self._ask(runtime.load().library.hfemu_source_lines).splitlines()

    def _ask(self, question: Callable[[int, bytes], bytes | None]) -> str:
        text = question(self.code_object.handle, self.name.encode())
        if text is None:
            library.raise_last_error(f"disassembly of {self.name}", fault=False)
            raise AssertionError
        return text.decode()


class Kernels(Mapping[str, Kernel]):
    """Kernels by symbol; ``kernels["axpy"]`` and ``kernels["axpy<float, 2>"]`` work where they are unique."""

    def __init__(self, parsed: reader.CodeObject, owner: CodeObject) -> None:
        self._parsed = parsed
        names = [item.name for item in fields(KernelResources)]
        self._kernels = {
            symbol: Kernel(**{name: getattr(resources, name) for name in names}, code_object=owner)
            for symbol, resources in parsed.kernels.items()
        }

    def __getitem__(self, name: str) -> Kernel:
        return self._kernels[self._parsed.find(name).name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)


class CodeObject:
    """Device code from a host ``.so`` or ``.o``, an offload bundle (compressed or not), or a bare AMDGPU ELF.

    Args:
        source: a path or the bytes.
        arch: which image to take where there are several; by default the emulated architecture
            (``HIPFORGE_EMULATE``) if the file has it, else its only image.

    Raises:
        CodeObjectError: the bytes hold no readable device code.
        ArchError: there is no image for ``arch``, or several and none was chosen.

    Example:
        >>> import hipforge
        >>> from hipforge import devices, emulator
        >>> runtime, arch = devices.current().load_runtime(), devices.current().arch_of()
        >>> module = hipforge.jit.load("module_fp8_quant", {"HF_INPUT": "f32"}, arch)
        >>> code = emulator.CodeObject(module.path / "module.so")
        >>> code.kernels["amax_kernel"].vgpr > 0
        True
    """

    def __init__(self, source: str | Path | bytes, arch: str | None = None) -> None:
        found = reader.read_code_objects(source)
        self._parsed = _choose(found, arch, "the given bytes" if isinstance(source, bytes) else str(source))
        self.arch: str = self._parsed.arch
        self.kernels = Kernels(self._parsed, self)

    @cached_property
    def handle(self) -> int:
        """The loaded code object in the emulator's library; loads it on first use."""
        emulator = runtime.load().library
        handle = int(emulator.hfemu_load(self._parsed.image, len(self._parsed.image), self.arch.encode()))
        if not handle:
            library.raise_last_error("loading the code object", fault=False)
        weakref.finalize(self, emulator.hfemu_unload, handle)
        return handle

    def __repr__(self) -> str:
        return f"CodeObject(arch={self.arch!r}, kernels={[kernel.short_name for kernel in self.kernels.values()]})"


def _choose(found: list[reader.CodeObject], arch: str | None, where: str) -> reader.CodeObject:
    names = ", ".join(item.arch for item in found) or "none"
    if arch is not None:
        wanted = arch.split(":", 1)[0]
    elif len(found) == 1:
        return found[0]
    else:
        from hipforge import settings

        wanted = settings.EMULATE.get()
    for item in found:
        if item.arch == wanted:
            return item
    raise ArchError(f"{where} has no device code for {wanted}; it has: {names}")
