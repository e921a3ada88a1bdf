"""The exception hierarchy: one root, and one type per thing a caller can do about it."""

from __future__ import annotations

from collections.abc import Iterable

# A table instead of a regular expression, which every `import hipforge` would compile.
_CONTROL = ((0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F), (0x2028, 0x202E), (0x2066, 0x2069))
_ESCAPES = {code: repr(chr(code))[1:-1] for first, last in _CONTROL for code in range(first, last + 1)}


def printable(text: str) -> str:
    """Return ``text`` with control characters, but for line breaks and tabs, as escapes, as ``x1b``.

    Messages quote files, arguments and compilers; what those hold must not move a terminal's cursor or hide a line.
    """
    return text.translate(_ESCAPES)


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return `` (did you mean x?)`` for the known name that ``text`` is most like, or nothing."""
    import difflib  # not for `import hipforge`, which needs none of it

    near = difflib.get_close_matches(text, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


class HipforgeError(RuntimeError):
    """Root of everything hipforge raises on purpose; its message is printable whatever it quotes.

    Example:
        >>> issubclass(GuardError, HipforgeError), issubclass(BuildError, HipforgeError)
        (True, True)
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(item) if isinstance(item, str) else item for item in args))


class GuardError(HipforgeError, ValueError):
    """An argument was refused before any launch; the message names it, its value and what is accepted.

    Example:
        >>> import torch, hipforge
        >>> try:
        ...     hipforge.rms_norm(torch.ones(4), torch.ones(4), 1e-6)
        ... except hipforge.GuardError as error:
        ...     print(error)
        x must be float16 or bfloat16; got float32 [4]
    """


class ArchError(GuardError):
    """The tensors' device has an architecture for which the module has no kernel.

    Example:
        >>> issubclass(ArchError, GuardError)
        True
    """


class ConfigError(HipforgeError, ValueError):
    """A setting, tuned CSV or registry JSON is malformed.

    Example:
        >>> issubclass(ConfigError, ValueError)
        True
    """


class ToolchainError(HipforgeError):
    """No compiler on this machine can build for the asked architecture.

    Example:
        >>> issubclass(ToolchainError, HipforgeError)
        True
    """


class BuildError(HipforgeError):
    """A module failed to build; the message ends with the first compiler error.

    Example:
        >>> issubclass(BuildError, GuardError)
        False
    """


class MissingModuleError(HipforgeError):
    """The module is not built and building on first call is disabled.

    Example:
        >>> issubclass(MissingModuleError, HipforgeError)
        True
    """


class LaunchError(HipforgeError):
    """The HIP runtime refused or aborted a launch.

    Example:
        >>> issubclass(EmulatorFault, LaunchError)
        True
    """


class EmulatorFault(LaunchError):
    """The emulator stopped a kernel: bad address, unknown instruction, missing wait, deadlock, and the like.

    Example:
        >>> issubclass(EmulatorFault, LaunchError)
        True
    """


class OutOfMemoryError(HipforgeError, MemoryError):
    """A call needs more memory than there is; the message names the op and the bytes that were asked for.

    What ops raise is a ``torch.OutOfMemoryError`` too, so that callers who catch that need no second clause.

    Example:
        >>> issubclass(OutOfMemoryError, MemoryError)
        True
    """
