"""aiter's way of declaring ops, on hipforge's build: ``compile_ops`` with aiter's arguments, and its module JSON.

A package that was written against ``aiter.jit.core`` changes one import. Its modules build and load as they are, with
``torch::Tensor`` or with the struct ``aiter_tensor_t`` of the user's own aiter; what hipforge does not support is
refused, with the name of its replacement. docs/guide/moving-from-aiter.md walks through one kernel.
"""

from hipforge.aiter_compat.config import Registered, convert_json, register
from hipforge.aiter_compat.stubs import compile_ops

__all__ = ["Registered", "compile_ops", "convert_json", "register"]
