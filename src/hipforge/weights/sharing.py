"""MX-FP8 weights with one scale for as much of a row as loses nothing that a product shows."""

from __future__ import annotations

import torch

from hipforge.ops.core import checks
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.reference.e8m0 import E8M0_NAN, as_scale_bytes

_NAN_CODE = 0x7F
_NO_SCALE = 127  # of zeros: 2^0
_SPANS = (16, 4)  # MX blocks of 512 and 128 k, tried where a whole row is not of one scale
_ROWS = 1024  # at a time, so that little is held in float32


def share_scales(payload: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an MX-FP8 weight whose neighbouring blocks have one scale wherever that costs next to nothing.

    The result is MX-FP8 as the weight was, for every op and device. On sm_90 ``mxfp8_linear`` of many rows is faster
    with it (docs/measured.md), and makes this form itself in each call otherwise.

    A block takes the largest scale of its row, of 512 k or of 128 k, and its codes are divided by the ratio 2^d in
    e4m3; one that becomes subnormal is rounded. That is done where every block's largest code is 2^(d + 1) or more, so
    that a code is off by at most 2^-11 of its block's largest, a quarter of what bfloat16 would lose of that. Other
    blocks stay as they are, and so do NaN codes and the scale 255.

    Args:
        payload: float8_e4m3fn (or uint8 bits) [N, K], K a multiple of 32.
        scale: e8m0 bytes [N, K/32], uint8 or float8_e8m0fnu.

    Returns:
        The codes and the scales, of the arguments' shapes and dtypes.

    Raises:
        GuardError: a dtype or shape that is not accepted.

    Example:
        >>> import torch, hipforge.weights
        >>> codes = torch.full((1, 64), 256.0).to(torch.float8_e4m3fn)
        >>> codes, scale = hipforge.weights.share_scales(codes, torch.tensor([[120, 118]], dtype=torch.uint8))
        >>> scale, codes.float()[0, ::32]
        (tensor([[120, 120]], dtype=torch.uint8), tensor([256.,  64.]))
    """
    checks.require_dtype("payload", payload, (torch.uint8, torch.float8_e4m3fn))
    checks.require_rank("payload", payload, 2, "[N, K]")
    checks.require_last_multiple("payload", payload, BLOCK)
    rows, k = payload.shape
    checks.require_operand("scale", scale, (torch.uint8, E8M0_DTYPE), (rows, k // BLOCK), "[N, K/32]", payload.device)
    codes, scales = payload.view(torch.uint8).clone(), as_scale_bytes("scale", scale).clone()
    for at in range(0, len(codes), _ROWS):
        _share(codes[at : at + _ROWS], scales[at : at + _ROWS])
    return codes.view(payload.dtype), scales.view(scale.dtype)


def _share(codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Change some rows in place."""
    blocks = codes.view(len(codes), -1, BLOCK)
    largest = (blocks & 0x7F).amax(-1).int()
    own = scales.int()
    zero = (largest == 0) & (own != E8M0_NAN)
    wanted = own.masked_fill(zero, 0)
    whole = (own != E8M0_NAN) & (largest != _NAN_CODE)
    chosen, settled = own, torch.zeros_like(zero)
    for span in (own.shape[1], *_SPANS):
        most = _largest_of(wanted, span)
        # The exponent field of 2^(d + 1) is d + 8.
        fits = zero | (whole & ((own == most) | (largest >> 3 >= most - own + 8)))
        shared = _largest_of((~fits).int(), span) == 0
        chosen = torch.where(~settled & (shared | (zero & (span == _SPANS[-1]))), most, chosen)
        settled |= shared
    chosen = chosen.masked_fill(zero & (chosen == 0), _NO_SCALE)
    moved = ((chosen != own) & ~zero)[..., None]
    ratio = torch.exp2((own - chosen).float())[..., None]
    divided = (blocks.view(torch.float8_e4m3fn).float() * ratio).to(torch.float8_e4m3fn).view(torch.uint8)
    blocks.copy_(torch.where(moved, divided, blocks))
    scales.copy_(chosen.to(torch.uint8))


def _largest_of(values: torch.Tensor, span: int) -> torch.Tensor:
    """Return for each of ``values`` [N, blocks] the largest of its span of so many; none is below 0."""
    count = values.shape[1]
    whole = torch.nn.functional.pad(values, (0, -count % span)).unflatten(1, (-1, span))
    return whole.amax(-1, keepdim=True).expand_as(whole).flatten(1)[:, :count]
