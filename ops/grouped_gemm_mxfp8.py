"""The earlier path of :mod:`hipforge.ops.mxfp8_grouped`."""

from hipforge.ops.mxfp8_grouped import *  # noqa: F403
