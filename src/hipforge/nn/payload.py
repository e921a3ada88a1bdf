"""Quantised weights as buffers of a module: which format they are in, and what may be done to them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.arguments import naming_arguments, require_readable
from hipforge.ops.core.checks import (
    as_text,
    described,
    require_dtype,
    require_floating,
    require_last_multiple,
    require_real,
    require_shape,
    require_tensor,
)
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.fp8_quant import fp8_quant_rows
from hipforge.ops.mx_quantize import mxfp4_quantize, mxfp8_quantize
from hipforge.ops.mxfp4_gemm.raw import PAYLOADS
from hipforge.ops.reference.fnuz import mx_fn_to_fnuz, scaled_fn_to_fnuz
from hipforge.ops.reference.fp8 import canonical_scales

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)
Pair = tuple[torch.Tensor, torch.Tensor]


def place_of(device: torch.device | str | None) -> torch.device:
    """Return where a module's buffers go; the default device for None.

    Raises:
        GuardError: no device that torch knows.
    """
    if device is None:
        return torch.get_default_device()
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise GuardError(f"device must be one that torch knows; got {as_text(device)}") from error


def bias_of(bias: torch.Tensor, n: int, dtypes: Collection[torch.dtype]) -> torch.Tensor:
    """Return a checkpoint's bias [n], rounded to bfloat16 unless it is of ``dtypes``.

    Raises:
        GuardError: not floating point, or of another shape.
    """
    require_floating(bias=bias)
    require_shape("bias", bias, (n,), "[N]")
    return bias.detach().to(bias.dtype if bias.dtype in dtypes else torch.bfloat16)


def _stored(own: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of e4m3 elements that a device takes whose own e4m3 is ``own``."""
    return tuple(dict.fromkeys((torch.float8_e4m3fn, own, torch.uint8)))


def quantized(weight: torch.Tensor, name: str = "weight") -> Pair:
    """Return (elements, scales) of a weight [..., K] in the format of its device, each matrix in a launch of its own.

    Args:
        weight: float32, float16 or bfloat16, K a multiple of 32.
        name: what errors call it.
    """
    require_real(name, weight)
    require_last_multiple(name, weight, BLOCK)
    flat = weight.detach().reshape(math.prod(weight.shape[:-2]), *weight.shape[-2:])  # of no elements -1 says nothing
    elements = torch.empty(flat.shape, dtype=fp8_dtypes(weight.device)[0], device=weight.device)
    scales = flat.new_empty((*flat.shape[:-1], flat.shape[-1] // BLOCK), dtype=torch.uint8)
    for matrix, out, scale_out in zip(flat, elements, scales, strict=True):
        mxfp8_quantize(matrix.contiguous(), out=out, scale_out=scale_out)
    return elements.view(weight.shape), scales.view(*weight.shape[:-1], scales.shape[-1])


def accepted(elements: torch.Tensor, scales: torch.Tensor, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """Return checked MX-FP8 tensors in the format of their device: e4m3fn becomes e4m3fnuz on gfx942.

    Args:
        elements: float8_e4m3fn, float8_e4m3fnuz on gfx942, or uint8 with e4m3fn's bits; [..., K], K a multiple of 32.
        scales: uint8 or float8_e8m0fnu [..., K / 32].
        name: what errors call ``elements``.

    Raises:
        GuardError: a dtype or shape that is not accepted, or a scale byte of 254, which e4m3fnuz has no place for.
    """
    require_tensor(**{name: elements, f"{name}_scale": scales})
    own = fp8_dtypes(elements.device)[0]
    require_dtype(name, elements, _stored(own))
    require_dtype(f"{name}_scale", scales, (torch.uint8, E8M0_DTYPE))
    require_last_multiple(name, elements, BLOCK)
    expected = (*elements.shape[:-1], elements.shape[-1] // BLOCK)
    require_shape(f"{name}_scale", scales, expected, f"one byte per {BLOCK} elements of {name}")
    scales = scales.view(torch.uint8)
    if elements.dtype == torch.uint8:
        elements = elements.view(torch.float8_e4m3fn)
    if elements.dtype != own:  # without values there is only the dtype to change
        elements, scales = (elements.view(own), scales) if elements.is_meta else mx_fn_to_fnuz(elements, scales, name)
    return elements.contiguous(), scales.contiguous()


def quantized_rows(weight: torch.Tensor, name: str = "weight") -> Pair:
    """Return (elements, float32 scales [..., N]) of a weight [..., N, K] in fp8, a scale per row.

    Args:
        weight: float32, float16 or bfloat16.
        name: what errors call it.
    """
    require_real(name, weight)
    elements, scales = fp8_quant_rows(weight.detach().flatten(0, -2).contiguous())
    return elements.view(weight.shape), scales.view(weight.shape[:-1])


def accepted_fp8(elements: torch.Tensor, scales: torch.Tensor, name: str = "weight") -> Pair:
    """Return checked fp8 tensors in the format of their device: e4m3fn becomes e4m3fnuz on gfx942.

    Args:
        elements: float8_e4m3fn, float8_e4m3fnuz on gfx942, or uint8 with e4m3fn's bits; [N, K] or [E, N, K].
        scales: of a kind that :mod:`hipforge.ops.fp8_gemm` lists for weights, for experts that of each; float16 and
            bfloat16 count as float32.
        name: what errors call ``elements``.

    Returns:
        The elements, and scales as float32 or uint8: [1] or [N], [E] or [E, N] where sums over K are scaled once.

    Raises:
        GuardError: a dtype or shape that is not accepted, or a scale that e4m3fnuz, whose scales are twice as large,
            has no place for.
    """
    require_tensor(**{name: elements, f"{name}_scale": scales})
    own = fp8_dtypes(elements.device)[0]
    require_dtype(name, elements, _stored(own))
    require_dtype(f"{name}_scale", scales, (*_FLOAT_SCALES, torch.uint8, E8M0_DTYPE))
    if elements.dim() not in (2, 3):
        raise GuardError(f"{name} must be [N, K], or [E, N, K] for experts; got shape {tuple(elements.shape)}")
    scales = scales.float() if scales.dtype in _FLOAT_SCALES else scales.view(torch.uint8)
    experts = elements.shape[0] if elements.dim() == 3 else None
    n, k = elements.shape[-2:]
    scales = canonical_scales(f"{name}_scale", scales, experts, n, k)
    if elements.dtype == torch.uint8:
        elements = elements.view(torch.float8_e4m3fn)
    if elements.dtype != own:
        if elements.is_meta:  # without values there is only the dtype to change
            elements = elements.view(own)
        else:
            elements, scales = scaled_fn_to_fnuz(elements, scales, name)
    return elements.contiguous(), scales.contiguous()


def quantized_mxfp4(weight: torch.Tensor, name: str = "weight") -> Pair:
    """Return (uint8 [..., K / 2], e8m0 bytes [..., K / 32]) of a weight [..., K] in MXFP4.

    Args:
        weight: float32, float16 or bfloat16, K a multiple of 32.
        name: what errors call it.
    """
    require_real(name, weight)
    require_last_multiple(name, weight, BLOCK)
    elements, scales = mxfp4_quantize(weight.detach().flatten(0, -2).contiguous())
    rows = weight.shape[:-1]
    return elements.view(*rows, elements.shape[-1]), scales.view(*rows, scales.shape[-1])


def accepted_mxfp4(elements: torch.Tensor, scales: torch.Tensor, name: str = "weight") -> Pair:
    """Return checked MXFP4 tensors: uint8 [..., K / 2], two elements in a byte, and e8m0 bytes [..., K / 32].

    Args:
        elements: uint8, int8 or float4_e2m1fn_x2, the even element in the low nibble; [..., K / 32, 16] too.
        scales: uint8 or float8_e8m0fnu.
        name: what errors call ``elements``.

    Raises:
        GuardError: a dtype or shape that is not accepted.
    """
    require_tensor(**{name: elements, f"{name}_scale": scales})
    require_dtype(name, elements, (*PAYLOADS, torch.int8))
    require_dtype(f"{name}_scale", scales, (torch.uint8, E8M0_DTYPE))
    if elements.dim() == scales.dim() + 1:
        elements = elements.flatten(-2)
    require_last_multiple(name, elements, BLOCK // 2)
    expected = (*elements.shape[:-1], elements.shape[-1] * 2 // BLOCK)
    require_shape(f"{name}_scale", scales, expected, f"one byte per {BLOCK} elements, {BLOCK // 2} bytes, of {name}")
    return elements.view(torch.uint8).contiguous(), scales.view(torch.uint8).contiguous()


class Quantized(torch.nn.Module):
    """A module with quantised weights: every buffer keeps its format under casts, and is read back checked.

    ``model.half()`` and ``model.to(torch.bfloat16)`` convert every floating-point buffer, which fp8 counts as, and
    ``model.type(dtype)`` every buffer. The buffers' dtypes are those that the kernels read, whatever the activations
    are, so casts only move them; weights that reach a gfx942 device as e4m3fn become e4m3fnuz there.
    """

    @staticmethod
    def accepted(elements: torch.Tensor, scales: torch.Tensor, name: str = "weight") -> Pair:
        """Return checked elements and scales in the format of their device: MX-FP8, or what a subclass holds."""
        return accepted(elements, scales, name)

    def input_like(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros that :meth:`forward` takes, [rows, width] on the module's device."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Quantized:
        held, self._buffers = self._buffers, {}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers = held
        unset = {name for name, buffer in held.items() if buffer is not None and buffer.is_meta}
        held.update({name: None if buffer is None else _moved(buffer, fn) for name, buffer in held.items()})
        for name, buffer in held.items():
            scale = held.get(f"{name}_scale")
            if buffer is None or scale is None or buffer.dtype != torch.float8_e4m3fn:
                continue
            own = fp8_dtypes(buffer.device)[0]
            if name in unset:
                held[name] = buffer.view(own)
            elif buffer.dtype != own:
                held[name], held[f"{name}_scale"] = self.accepted(buffer, scale, name)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Take a checkpoint of another architecture, or of a model that was cast, in the buffers' own formats.

        Raises:
            GuardError: elements or scales of another format, where one of them alone cannot be converted.
        """
        converted = dict(state_dict)
        assign = local_metadata.get("assign_to_params_buffers", False)
        for name, buffer in self._buffers.items():
            held, key = self._buffers.get(f"{name}_scale"), f"{prefix}{name}"
            given, scale = (
                each if isinstance(each, torch.Tensor) else None
                for each in (state_dict.get(key), state_dict.get(f"{key}_scale"))
            )
            if buffer is None or name.endswith("_scale"):  # scales go with the elements
                continue
            if held is None:
                if given is not None and buffer.is_floating_point() and given.is_floating_point():
                    converted[key] = given.to(buffer.dtype)
                continue
            place = given.device if assign and given is not None else buffer.device
            own = fp8_dtypes(place)[0] if buffer.dtype in FP8 else buffer.dtype
            if given is None:
                if scale is not None:
                    converted[f"{key}_scale"] = _scale_alone(f"{key}_scale", scale, held.dtype)
            elif scale is None:
                converted[key] = _elements_alone(key, given, own)
            elif given.dtype != own or scale.dtype != held.dtype or _is_reshaped(scale, held):
                pair = self.accepted(given.to(place), scale.to(place), key)
                if not assign and pair[1].dtype != held.dtype:
                    raise GuardError(
                        f"{key}_scale is {described(scale)}, but the layer holds {described(held)}; make a layer with "
                        "such scales, or load with assign=True"
                    )
                converted[key], converted[f"{key}_scale"] = pair
        super()._load_from_state_dict(converted, prefix, local_metadata, *rest)


def _is_reshaped(scale: torch.Tensor, held: torch.Tensor) -> bool:
    """Return whether scales have only another shape than those that are held, as [N, 1] for [N]."""
    return scale.shape != held.shape and scale.numel() == held.numel()


def _elements_alone(name: str, elements: torch.Tensor, own: torch.dtype) -> torch.Tensor:
    """Return elements whose scales come in another state dict as the dtype that a layer holds, bit for bit.

    Raises:
        GuardError: another dtype, or e4m3fn for e4m3fnuz, where the scales change too.
    """
    if elements.dtype == own:
        return elements
    if own in FP8:
        require_dtype(name, elements, _stored(own))
    else:
        require_dtype(name, elements, (*PAYLOADS, torch.int8))
    if own == torch.float8_e4m3fnuz:
        raise GuardError(
            f"{name} is {described(elements)}, without {name}_scale in the same state dict; in e4m3fnuz both change: "
            "give both to one load_state_dict"
        )
    return elements.view(own)


def _scale_alone(name: str, scale: torch.Tensor, own: torch.dtype) -> torch.Tensor:
    """Return scales whose elements come in another state dict as the dtype that a layer holds.

    Raises:
        GuardError: floats for e8m0 bytes, or bytes for floats.
    """
    if own == torch.uint8:
        require_dtype(name, scale, (torch.uint8, E8M0_DTYPE))
        return scale.view(torch.uint8)
    require_dtype(name, scale, _FLOAT_SCALES)
    return scale.to(own)


def _moved(buffer: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return what a function of ``Module._apply`` makes of a buffer's bytes, dtype unchanged; itself if it stays."""
    content = buffer.contiguous().view(torch.uint8)
    moved = fn(content)
    if moved is content:
        return buffer
    if moved.dtype != torch.uint8:  # Module.type, which may name a device too
        moved = content.to(moved.device)
    return moved.view(buffer.dtype)


@functools.partial(naming_arguments, name="hipforge.nn")
def input_rows(x: torch.Tensor, width: int, module: str) -> torch.Tensor:
    """Return the input [..., width] of a module that computes no gradients as contiguous [rows, width].

    Raises:
        GuardError: no tensor of that width, one without its memory, or one of which a gradient is expected.
        OutOfMemoryError: a copy needs more memory than there is.
    """
    require_tensor(x=x)
    require_readable(x=x)
    if x.requires_grad and torch.is_grad_enabled():
        raise GuardError(f"{module} computes no gradients, and its input requires one; call it under torch.no_grad()")
    if not x.dim() or x.shape[-1] != width:
        raise GuardError(f"x must have {width} elements in its last dimension; got {tuple(x.shape)}")
    return x.reshape(-1, width).contiguous()
