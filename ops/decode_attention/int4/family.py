"""The family of the int4 cache under the name that the list of families looks for."""

from hipforge.ops.decode_attention.family import INT4_FAMILY as FAMILY

__all__ = ["FAMILY"]
