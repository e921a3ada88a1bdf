"""Ways to spoil an argument: what a caller may pass by mistake, and what nobody would."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hipforge.jit.call.tensors import problem
from stress.case import Arguments, Op, Rng

DTYPES = tuple(
    getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "float16", "bfloat16", "float32",
        "float64", "complex64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
)  # fmt: skip


class Subclass(torch.Tensor):
    """A tensor of another type."""


class Odd:
    """No number, no tensor, and not hashable."""

    __hash__ = None  # type: ignore[assignment]  # how Python says that a class is not hashable

    def __eq__(self, other: object) -> bool:
        return False


class Untrue:
    """Neither true nor false, as a comparison of arrays: asking raises."""

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")


def _freed() -> torch.Tensor:
    x = torch.ones(1)
    x.untyped_storage().resize_(0)
    return x


WILD: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: -1, lambda: 0, lambda: 1, lambda: 3, lambda: 17, lambda: 64, lambda: 2**31 - 1,
    lambda: 2**31, lambda: 2**63, lambda: -(2**70), lambda: 2.0, lambda: 2.5, lambda: float("nan"),
    lambda: float("inf"), lambda: -1e30, lambda: True, lambda: False, lambda: "", lambda: "8", lambda: "neox",
    lambda: b"x", lambda: [], lambda: [1], lambda: {}, lambda: {"a": 1}, lambda: Odd(), lambda: object(),
    lambda: torch.tensor(2), lambda: torch.tensor(2.5), lambda: torch.zeros(2), lambda: np.int64(4),
    lambda: np.float32(0.5), lambda: np.zeros(3), lambda: 1j, lambda: torch.float16, lambda: torch.bfloat16,
    lambda: "bfloat16", lambda: torch.device("cpu"), lambda: (1, 2), lambda: range(3), lambda: len,
    lambda: 1e39, lambda: -1e39, lambda: 1e-50, lambda: 5e-324, lambda: -0.0, lambda: 65536.0, lambda: 10**400,
    lambda: torch._efficientzerotensor((), dtype=torch.int64), lambda: torch._efficientzerotensor(()),
    lambda: torch.nn.UninitializedParameter(), lambda: FAKE.from_tensor(torch.zeros(2)),
    lambda: torch.zeros((), device="meta"), _freed, _freed,
)  # fmt: skip

AWKWARD = (1e39, -1e39, 1e38, 1e-50, 5e-324, -0.0, 0.0, -1.0, 65536.0, float("nan"), float("inf"))


def _cast(rng: Rng, x: torch.Tensor) -> Any:
    dtype = rng.pick(DTYPES)
    same_size = [other for other in DTYPES if other.itemsize == x.dtype.itemsize]
    return x.view(rng.pick(same_size)) if rng.chance(0.5) else x.to(dtype)


def _reshape(rng: Rng, x: torch.Tensor) -> Any:
    ways: list[Callable[[], torch.Tensor]] = [lambda: x[None], lambda: x.reshape(-1), lambda: torch.cat((x, x))]
    if x.dim():
        axis = rng.integer(0, x.dim() - 1)
        size = x.shape[axis]
        ways += [
            lambda: x.narrow(axis, 0, max(size - 1, 0)), lambda: x.narrow(axis, 0, 0),
            lambda: torch.cat((x, x), dim=axis),
            lambda: x.select(axis, 0) if size else x, lambda: x.transpose(axis, 0), lambda: x.unsqueeze(axis),
        ]  # fmt: skip
    return rng.pick(ways)()


def _restride(rng: Rng, x: torch.Tensor) -> Any:
    flat = x.contiguous().reshape(-1)

    def off_alignment() -> torch.Tensor:
        wide = torch.zeros(flat.numel() + 1, dtype=x.dtype)
        wide[1:].view(x.shape).copy_(x)
        return wide[1:].view(x.shape)

    def every_other() -> torch.Tensor:
        wide = torch.zeros((*x.shape, 2), dtype=x.dtype)
        wide[..., 0] = x
        return wide[..., 0]

    def expanded() -> torch.Tensor:
        axis = rng.integer(0, x.dim() - 1)
        return x.narrow(axis, 0, 1).expand(x.shape)

    def backwards() -> torch.Tensor:
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)

    return rng.pick((off_alignment, every_other, expanded, backwards))()


def _storage(rng: Rng, x: torch.Tensor) -> Any:
    kind = rng.pick((0, 1, 1, 2, 3, 4, 5, 6))
    if kind == 0:
        return torch._efficientzerotensor(x.shape, dtype=x.dtype)
    if kind == 1:
        return torch._neg_view(x.clone(memory_format=torch.contiguous_format))
    if kind == 2:
        return torch.zeros(x.shape, dtype=torch.complex64).conj().imag
    own = _restride(rng, x.clone()) if rng.chance(0.6) else x.clone(memory_format=torch.contiguous_format)
    held = own.untyped_storage().nbytes()
    own.untyped_storage().resize_(rng.pick((0, 0, held // 2, max(held - 1, 0))))
    return own


def _shared(rng: Rng, x: torch.Tensor, other: torch.Tensor) -> Any:
    """(x, other) with the same elements, both in one memory where bytes of theirs meet."""
    sizes = [part.numel() * part.element_size() for part in (x, other)]
    starts = (0, rng.integer(0, max(sizes[0] - 1, 0)) // 16 * 16)
    if rng.chance(0.5):
        starts = (rng.integer(0, max(sizes[1] - 1, 0)) // 16 * 16, 0)
    pool = torch.zeros(max(start + size for start, size in zip(starts, sizes, strict=True)), dtype=torch.uint8)
    both = []
    for part, start, size in zip((x, other), starts, sizes, strict=True):
        view = pool[start : start + size].view(part.dtype).view(part.shape)
        both.append(view.copy_(part))
    return both


def _sized(rng: Rng, x: torch.Tensor) -> Any:
    """The first elements with a size of 0, or past what 31 or 47 bits count, along one axis; in no new memory."""
    axis = rng.integer(0, x.dim() - 1)
    if rng.chance(0.5):
        shape = list(x.shape)
        shape[axis] = 0
        if x.dim() > 1 and rng.chance(0.5):
            shape[axis - 1] = rng.pick((2**31, 2**40))
        return x.new_empty(shape)
    return x.narrow(axis, 0, 1).expand([-1 if at != axis else 2**46 for at in range(x.dim())])


def _layout(rng: Rng, x: torch.Tensor) -> Any:
    return rng.pick(
        (
            lambda: x.to_sparse(), lambda: x.to_sparse_csr(), lambda: x.to("meta"), lambda: x.to_mkldnn(),
            lambda: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
            lambda: torch.nested.nested_tensor([x, x]),
        )
    )()  # fmt: skip


def _type(rng: Rng, x: torch.Tensor) -> Any:
    return rng.pick(
        (
            lambda: torch.nn.Parameter(x.clone(), requires_grad=False), lambda: x.clone().as_subclass(Subclass),
            lambda: x.clone().requires_grad_(), lambda: (x.clone().requires_grad_() * 1), lambda: x.tolist(),
            lambda: x.numpy(), lambda: x.numpy().tobytes(), lambda: (x, x), lambda: None,
            lambda: FAKE.from_tensor(x), lambda: torch.nn.UninitializedParameter(dtype=x.dtype),
        )
    )()  # fmt: skip


def _values(rng: Rng, x: torch.Tensor) -> Any:
    if x.dtype.is_floating_point or x.dtype == torch.uint8:
        changed = x.clone(memory_format=torch.contiguous_format)
        bits = changed.view(torch.uint8).numpy().reshape(-1)
        if not bits.size:
            return x
        bits[rng.numbers.integers(0, bits.size, rng.integer(1, 4))] = rng.numbers.integers(0, 256)
        return changed
    changed = x.clone()
    if changed.numel():
        at = rng.integer(0, changed.numel() - 1)
        top = torch.iinfo(x.dtype).max if not x.dtype.is_complex and x.dtype != torch.bool else 1
        changed.view(-1)[at] = rng.pick((-1, 0, 1, 5, 1000, top, -top - 1 if top > 1 else 0))
    return changed


TENSOR_WAYS = (
    _cast, _cast, _reshape, _reshape, _restride, _restride, _storage, _storage, _storage, _storage, _sized, _layout,
    _type, _values, _values,
)  # fmt: skip
FAKE = FakeTensorMode()


def spoilt(rng: Rng, given: Arguments, op: Op) -> Arguments:
    """Return arguments with one to three of them changed; changes that torch itself refuses to make are left out."""
    if op.mistake is not None and rng.chance(0.2):
        return op.mistake(rng, dict(given))
    changed, fixed = dict(given), op.fixed
    outputs = [name for name in op.writes if isinstance(changed.get(name), torch.Tensor)]
    flags = [name for name, value in given.items() if isinstance(value, bool) and name not in fixed]
    if outputs and flags and rng.chance(0.25):
        return {**given, rng.pick(flags): Untrue()}
    for _ in range(rng.pick((1, 1, 1, 2, 3))):
        name = rng.pick([key for key in changed if key not in fixed])
        if outputs and rng.chance(0.2):
            name = rng.pick(outputs)
        value = changed[name]
        tensors = [key for key, other in changed.items() if isinstance(other, torch.Tensor) and key != name]
        if isinstance(value, torch.Tensor) and rng.chance(0.85):
            other = rng.pick(tensors) if tensors and rng.chance(0.5 if name in outputs else 0.2) else None
            if other is not None and rng.chance(0.2):
                changed[name] = changed[other]  # of another shape, most often
                continue
            way = rng.pick(TENSOR_WAYS)
            # Torch has no such tensor, or it was spoilt so that torch itself would crash on it: it stays as it is.
            with contextlib.suppress(Exception):
                if problem(value) is not None or value.is_quantized:
                    continue
                if other is None:
                    changed[name] = way(rng, value)
                elif problem(changed[other]) is None and other not in fixed:
                    changed[name], changed[other] = _shared(rng, value, changed[other])
        elif isinstance(value, float | bool) and rng.chance(0.5):
            changed[name] = Untrue() if isinstance(value, bool) else rng.pick(AWKWARD)
        else:
            changed[name] = rng.pick(WILD)()
    return changed
