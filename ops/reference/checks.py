"""The earlier path of :mod:`hipforge.ops.core.checks`."""

from hipforge.ops.core.checks import *  # noqa: F403
