"""The earlier path of :mod:`hipforge.ops.decode_attention`."""

from hipforge.ops.decode_attention import *  # noqa: F403
