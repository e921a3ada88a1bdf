"""FP8 formats of devices, and tensor-wise quantisation in torch."""

from __future__ import annotations

import torch

from hipforge import archs, devices
from hipforge.ops.core.checks import require_choice, require_floating

E5M2_DTYPES = (torch.float8_e5m2, torch.float8_e5m2fnuz)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, *E5M2_DTYPES)

# Keeps the scale of an all-zero tensor finite: 448 / 1e-12 fits fp32.
AMAX_FLOOR = 1e-12


def fp8_dtypes(device_or_arch: torch.device | str) -> tuple[torch.dtype, torch.dtype]:
    """Return the (forward, gradient) FP8 dtypes of a device or an architecture.

    Args:
        device_or_arch: a ``torch.device``, a device string (``"cuda:1"``, ``"cpu"``) or an architecture name, with or
            without features (``"gfx942:sramecc+:xnack-"``). The CPU takes the emulated architecture's formats, the
            meta device those of the process's device.

    Returns:
        ``(float8_e4m3fnuz, float8_e5m2fnuz)`` on gfx942, ``(float8_e4m3fn, float8_e5m2)`` elsewhere.

    Raises:
        ConfigError: an architecture name that is not known.
    """
    key = _with_index(device_or_arch)
    if key not in _dtypes_of:
        arch = archs.get(_arch_name(device_or_arch) or "gfx950")
        _dtypes_of[key] = getattr(torch, arch.fp8_e4m3), getattr(torch, arch.fp8_e5m2)
    return _dtypes_of[key]


# torch.compile runs this while it traces: a table that grows meanwhile makes it refuse other constants.
fp8_dtypes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _with_index(device_or_arch: torch.device | str) -> str:
    key = str(device_or_arch)
    return f"cuda:{torch.cuda.current_device()}" if key == "cuda" else key


# A plain dictionary, because torch.compile reads it as a constant where it cannot trace device queries.
_dtypes_of: dict[str, tuple[torch.dtype, torch.dtype]] = {}


def _arch_name(device_or_arch: torch.device | str) -> str | None:
    if isinstance(device_or_arch, str) and device_or_arch.startswith(("gfx", "sm_")):
        return archs.get(device_or_arch).name
    device = torch.device(device_or_arch)
    if device.type == "cuda":
        found = devices.torch_arch(torch.cuda.current_device() if device.index is None else device.index)
        return found if found in archs.ARCHS else None
    current = devices.current()
    followed = device.type == "meta" or (device.type == "cpu" and current.kind == "emulator")
    return current.default_arch if followed else None


_arch_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def to_fp8(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a tensor with one scale: ``x ≈ x8.float() * inv_scale``. Device-side throughout, no host sync.

    ``scale = finfo(dtype).max / max(amax, 1e-12)`` computed in double and rounded to fp32; ``x8 = clamp(x * scale)``
    rounded to nearest even.

    Args:
        x: floating-point tensor of any shape; also empty.
        dtype: one of the four float8 dtypes.

    Returns:
        ``(x8, inv_scale)``: ``x8`` has x's shape and, where x is dense, its strides; ``inv_scale`` is a 0-dim fp32
        tensor, what ``_scaled_mm`` takes. A NaN in x makes every element NaN; an infinity makes itself NaN, all finite
        elements 0 and ``inv_scale`` infinite.

    Raises:
        GuardError: x is not floating point, or dtype is not float8.
    """
    require_floating(x=x)
    require_choice("dtype", dtype, FP8_DTYPES)
    limit = torch.finfo(dtype).max
    x32 = x.float()
    amax = x32.abs().amax() if x.numel() else x32.new_zeros(())
    scale = (limit / amax.double().clamp(min=AMAX_FLOOR)).float()
    return (x32 * scale).clamp(-limit, limit).to(dtype), scale.reciprocal()
