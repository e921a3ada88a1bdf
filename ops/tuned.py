"""The earlier path of :mod:`hipforge.ops.core.tuned`."""

from hipforge.ops.core.tuned import *  # noqa: F403
