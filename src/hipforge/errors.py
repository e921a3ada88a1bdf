"""The exception hierarchy: one root, and one type per thing a caller can do about it."""

from __future__ import annotations


class HipforgeError(RuntimeError):
    """Root of everything hipforge raises on purpose."""


class GuardError(HipforgeError, ValueError):
    """An argument was refused before any launch; the message names it, its value and what is accepted."""


class ArchError(GuardError):
    """The tensors' device has an architecture for which the module has no kernel."""


class ConfigError(HipforgeError, ValueError):
    """A setting, tuned CSV or registry JSON is malformed."""


class ToolchainError(HipforgeError):
    """No compiler on this machine can build for the asked architecture."""


class BuildError(HipforgeError):
    """A module failed to build; the message ends with the first compiler error."""


class MissingModuleError(HipforgeError):
    """The module is not built and building on first call is disabled."""


class LaunchError(HipforgeError):
    """The HIP runtime refused or aborted a launch."""


class EmulatorFault(LaunchError):
    """The emulator stopped a kernel: bad address, unknown instruction, missing wait, deadlock, and the like."""
