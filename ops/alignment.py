"""The earlier path of :mod:`hipforge.ops.core.alignment`."""

from hipforge.ops.core.alignment import *  # noqa: F403
