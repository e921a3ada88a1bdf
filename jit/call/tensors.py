"""Torch tensors with more state than data, shape and strides, for which kernels would give wrong results or crash.

Views have state beside their data: a negative or conjugate bit, a storage smaller than the shape (sharded training
frees parameters so), no storage at all, a gradient to record.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from hipforge.errors import GuardError

log = logging.getLogger("hipforge")


def problem(tensor: Any) -> str | None:
    """Return what is wrong with a strided tensor as an argument of an op, to follow the argument's name; or None.

    Tensors that torch traces with have no storage, and none is looked for.
    """
    if _is_traced(tensor):
        return None
    if tensor._is_zerotensor():
        return "is a tensor of zeros without storage (torch._efficientzerotensor); pass a clone"
    if tensor.is_neg():
        return "has its negative bit set: its elements are read with the other sign; pass resolve_neg() of it"
    if tensor.is_conj():
        return "has its conjugate bit set; pass resolve_conj() of it"
    if str(tensor.layout) != "torch.strided" or tensor.is_meta or tensor.numel() == 0:
        return None
    needed = (tensor.storage_offset() + _last_element(tensor) + 1) * tensor.element_size()
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
    kind = type(tensor)
    if kind.__module__ == "torch" or kind.__name__ == "Parameter":  # the two that nearly all are
        return False
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, FakeTensor | FunctionalTensor)


def _last_element(tensor: Any) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def may_share(one: Any, two: Any) -> bool:
    """Return whether two strided tensors with memory may have a byte in common.

    False for slices of one tensor that lie side by side, whatever their strides.
    """
    if not one.numel() or not two.numel():
        return False
    offset = two.data_ptr() - one.data_ptr()
    if offset >= _span(one) or -offset >= _span(two):
        return False
    return _may_meet(_axes(one), _axes(two), offset, one.element_size(), two.element_size())


def _span(tensor: Any) -> int:
    return (_last_element(tensor) + 1) * int(tensor.element_size())


def _axes(tensor: Any) -> list[tuple[int, int]]:
    """Return (stride in bytes, elements) of the axes of more than one element, the longest stride first."""
    size = tensor.element_size()
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    return sorted(((stride * size, count) for stride, count in axes if count > 1), reverse=True)


def _may_meet(one: list[tuple[int, int]], two: list[tuple[int, int]], offset: int, *element: int) -> bool:
    """Return whether two, which starts ``offset`` bytes after one, may share a byte with it; the longest axes first."""
    both = tuple(zip((one, two), element, strict=True))
    spans = [size + sum(stride * (count - 1) for stride, count in axes) for axes, size in both]
    if offset >= spans[0] or -offset >= spans[1]:
        return False
    if not one or not two or one[0][0] != two[0][0]:
        return True
    step = one[0][0]
    if step < spans[0] - step * (one[0][1] - 1) or step < spans[1] - step * (two[0][1] - 1):
        return True
    rest = offset % step
    return any(_may_meet(one[1:], two[1:], at, *element) for at in (rest, rest - step))


def check_gradients(op: str, arguments: Mapping[str, Any], written: Collection[str]) -> None:
    """Check gradients, which are being recorded, for a call that enters no kernel's binding.

    Raises:
        GuardError: an argument that the op writes requires grad.
    """
    import torch

    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        if name in written:
            raise GuardError(
                f"{op}: argument '{name}' is written and requires grad, which autograd would not see; pass it "
                "detached, or call under torch.no_grad()"
            )
        dropped_gradient(op, name)


_warned: set[str] = set()


def dropped_gradient(op: str, argument: str) -> None:
    """Warn once per op that the result is not connected to inputs that require grad."""
    if op not in _warned:
        _warned.add(op)
        log.warning(
            "%s: argument '%s' requires grad, but the op has no backward: its result is detached. Call it under "
            "torch.no_grad() or on detached tensors to say that this is meant (said once per op)",
            op,
            argument,
        )
