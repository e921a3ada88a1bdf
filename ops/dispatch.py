"""The earlier path of :mod:`hipforge.ops.core.dispatch`."""

from hipforge.ops.core.dispatch import *  # noqa: F403
