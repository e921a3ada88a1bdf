"""Torch tensors that are not what their data pointer, shape and strides say; kernels would compute wrong or crash.

Views carry facts beside their data: a negative or conjugate bit that says how to read it, a storage that was resized
below what the shape reaches (as sharded training frees parameters), no storage at all, a gradient to record.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("hipforge")


def problem(tensor: Any) -> str | None:
    """Return what is wrong with a strided tensor as an argument of a kernel, to follow the argument's name; or None."""
    if tensor._is_zerotensor():
        return "is a tensor of zeros without storage (torch._efficientzerotensor); pass a clone"
    if tensor.is_neg():
        return "has its negative bit set: its elements are read with the other sign; pass resolve_neg() of it"
    if tensor.is_conj():
        return "has its conjugate bit set; pass resolve_conj() of it"
    return storage_problem(tensor)


def storage_problem(tensor: Any) -> str | None:
    """Return why a tensor's elements cannot be read from its storage, to follow the argument's name; or None.

    Tensors that torch traces with have no storage, and none is looked for.
    """
    if _is_traced(tensor):
        return None
    if str(tensor.layout) != "torch.strided" or tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    if tensor._is_zerotensor():
        return None  # torch knows its elements
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if held < needed:
        return (
            f"reaches byte {needed} of a storage of {held} bytes: the storage was resized under it "
            "(untyped_storage().resize_, as sharded training frees parameters); gather or allocate it first"
        )
    if not tensor.data_ptr():
        return "has no memory behind it; pass a clone of what it was made from"
    return None


def _is_traced(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, FakeTensor | FunctionalTensor)


_warned: set[str] = set()


def dropped_gradient(op: str, argument: str) -> None:
    """Say, once per op, that the result will not be connected to an input that requires grad."""
    if op not in _warned:
        _warned.add(op)
        log.warning(
            "%s: argument '%s' requires grad, but the op has no backward: its result is detached. Call it under "
            "torch.no_grad() or on detached tensors to say that this is meant (said once per op)",
            op,
            argument,
        )
