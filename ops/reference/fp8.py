"""fp8 matrices with scales of any kind: which kind operands have, and their product."""

from __future__ import annotations

import math
from enum import IntEnum

import torch

from hipforge.errors import GuardError
from hipforge.ops.core import checks
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.core.formats import FP8_BLOCK as STEP  # of K and of N: a block of weights
from hipforge.ops.reference.e8m0 import e8m0_to_f32, f32_to_e8m0
from hipforge.ops.reference.mxfp8 import mxfp8_mm

_E8M0 = (torch.uint8, E8M0_DTYPE)


class Scales(IntEnum):
    """What the scales of a product X @ W^T are."""

    ONCE = 0
    """float32: one, or one for each row of X and of W. Sums over K are multiplied with both."""
    BLOCKS = 1
    """float32 for each row of X, or 128 rows of W, and 128 of K."""
    BLOCKS_E8M0 = 2
    """The same in e8m0."""
    MX_SHARED = 3
    """e8m0 for each row of X, or 32 rows of W, and 32 of K."""

    @property
    def block(self) -> int:
        """Return the number of W's rows that share a scale, also that of its elements along K; 0 for all of K."""
        return (0, STEP, STEP, BLOCK)[self]


def scales_of(
    m: int, n: int, k: int, x_scale: checks.Described, w_scale: checks.Described, experts: int | None = None
) -> Scales:
    """Return the kind of scales that operands of X [m, k] @ W [n, k]^T have.

    Where two kinds fit, for K of one block and few rows of W, they mean the same. With ``experts`` there is a W for
    each of them, and ``w_scale`` has one W's scales for each; errors call the operands as the grouped GEMMs do.

    Raises:
        GuardError: no kind fits.
    """
    x, xq, wq = ("x_scale", "xq", "wq") if experts is None else ("a_scale", "a_q", "w")
    checks.require_tensor(**{x: x_scale, "w_scale": w_scale})
    shapes, dtypes = (tuple(x_scale.shape), tuple(w_scale.shape)), (x_scale.dtype, w_scale.dtype)
    given, of = shapes, "" if experts is None else f", for each of {experts} experts of {wq}"
    if experts is not None:
        shapes = shapes[0], shapes[1][1:] if shapes[1][:1] == (experts,) else (-1,)
    floats, bytes_ = dtypes == (torch.float32,) * 2, all(dtype in _E8M0 for dtype in dtypes)
    steps, columns = -(-k // STEP), -(-n // STEP)
    if floats and _once(shapes[0], m) and _once(shapes[1], n):
        return Scales.ONCE
    if shapes == ((m, steps), (columns, steps)) and (floats or bytes_):
        return Scales.BLOCKS if floats else Scales.BLOCKS_E8M0
    if bytes_ and k % BLOCK == 0 and shapes == ((m, k // BLOCK), (-(-n // BLOCK), k // BLOCK)):
        return Scales.MX_SHARED
    raise GuardError(
        f"{x} and w_scale must both be float32, of one element or one per row ([{m}] and [{n}]); or both float32 "
        f"or both e8m0 bytes, one per 128 of K and row of {xq} or 128 rows of {wq} ([{m}, {steps}] and "
        f"[{columns}, {steps}]); or e8m0 bytes, one per 32 of K and row of {xq} or 32 rows of {wq} (K a "
        f"multiple of 32){of}; got {dtypes[0]} {list(given[0])} and {dtypes[1]} {list(given[1])} for K={k}"
    )


def weight_kinds_of(
    name: str, scale: checks.Described, experts: int | None, n: int, k: int
) -> tuple[Scales, ...]:
    """Return the kinds that scales of a weight [n, k], or of experts' weights [experts, n, k], may be of.

    Where several fit, one block is the whole of a weight's rows, and they mean the same.

    Raises:
        GuardError: they are of no kind.
    """
    checks.require_tensor(**{name: scale})
    each = tuple(scale.shape)
    if experts is not None:
        each = each[1:] if each[:1] == (experts,) else (-1,)
    steps = each == (-(-n // STEP), -(-k // STEP))
    fits = {
        Scales.ONCE: scale.dtype == torch.float32 and _once(each, n),
        Scales.BLOCKS: scale.dtype == torch.float32 and steps,
        Scales.BLOCKS_E8M0: scale.dtype in _E8M0 and steps,
        Scales.MX_SHARED: scale.dtype in _E8M0 and k % BLOCK == 0 and each == (-(-n // BLOCK), k // BLOCK),
    }
    found = tuple(kind for kind, fit in fits.items() if fit)
    if found:
        return found
    of, weights = ("", [n, k]) if experts is None else (f" for each of {experts} experts", [experts, n, k])
    raise GuardError(
        f"{name} must have{of} one float32 or {n}; or [{-(-n // STEP)}, {-(-k // STEP)}] "
        f"float32 or e8m0 bytes, one per 128 x 128; or [{-(-n // BLOCK)}, {-(-k // BLOCK)}] e8m0, one per 32 x 32 "
        f"(K a multiple of 32); got {scale.dtype} {list(scale.shape)} for weights {weights}"
    )


def weight_scales_of(name: str, scale: checks.Described, experts: int | None, n: int, k: int) -> Scales:
    """Return the first of :func:`weight_kinds_of`."""
    return weight_kinds_of(name, scale, experts, n, k)[0]


def canonical_scales(name: str, scales: torch.Tensor, experts: int | None, n: int, k: int) -> torch.Tensor:
    """Return scales of a weight [n, k] or experts' [experts, n, k]; [1], [N], [E] or [E, N] where sums are scaled once.

    Raises:
        GuardError: they are of no kind.
    """
    kind = weight_scales_of(name, scales, experts, n, k)
    if kind is not Scales.ONCE or scales.shape[-2:] == (1, 1):  # a single block stays one, which is the same product
        return scales
    each, lead = (scales.numel(), ()) if experts is None else (math.prod(scales.shape[1:]), (experts,))
    return scales.reshape(*lead, *(() if each == 1 and lead else (each,)))


def _quantized(blocks: torch.Tensor, dtype: torch.dtype, e8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales [...] of float32 blocks [..., K]."""
    limit = torch.finfo(dtype).max
    amax = blocks.abs().amax(dim=-1)
    scale = amax / limit
    scale = torch.where(scale == 0, 1.0, scale)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    scales = f32_to_e8m0(scale) if e8m0 else scale
    scale = (e8m0_to_f32(scales) if e8m0 else scale)[..., None]
    codes = torch.where(scale.isnan(), 0.0, (blocks / scale).clamp(-limit, limit)).to(dtype)
    return codes, scales


def quantize_fp8_rows(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [rows, K] and float32 scales [rows] of x, float [rows, K], as ``hipforge.fp8_quant_rows`` does."""
    return _quantized(x.float(), dtype, False)


def quantize_fp8_blocks(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, e8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [rows, K] and scales [rows, ceil(K / 128)], float32 or e8m0 bytes, of x, float [rows, K]."""
    rows, k = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -k % STEP)).view(rows, -(-k // STEP), STEP)
    codes, scales = _quantized(padded, dtype, e8m0)
    return codes.flatten(1)[:, :k].contiguous(), scales


def quantize_fp8_weights(
    w: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, e8m0: bool = False, block: int = STEP
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [N, K] and scales of each ``block`` x ``block`` of w, float [N, K], float32 or e8m0 bytes."""
    n, k = w.shape
    rows, columns = -(-n // block), -(-k // block)
    padded = torch.nn.functional.pad(w.float(), (0, -k % block, 0, -n % block))
    blocks = padded.view(rows, block, columns, block).transpose(1, 2).reshape(rows, columns, -1)
    codes, scales = _quantized(blocks, dtype, e8m0)
    whole = codes.view(rows, columns, block, block).transpose(1, 2).reshape(padded.shape)
    return whole[:n, :k].contiguous(), scales


def dequantize_fp8(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a weight [N, K] of fp8 elements and scales of any kind as numbers, each product rounded once."""
    n, k = q.shape
    kind = weight_scales_of("scale", scale, None, n, k)
    factor = scale.to(dtype) if scale.dtype == torch.float32 else e8m0_to_f32(scale).to(dtype)
    if kind is Scales.ONCE:
        return q.to(dtype) * factor.reshape(-1, 1)
    spread = factor.repeat_interleave(kind.block, 0)[:n].repeat_interleave(kind.block, 1)[:, :k]
    return q.to(dtype) * spread


def quantize_fp8(
    x: torch.Tensor, dtype: torch.dtype, out_format: str, e8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of x, float [rows, K], in the format ``rows`` or ``blocks``."""
    if not x.shape[-1]:
        raise GuardError(f"a row must have at least one column to have a scale; got {tuple(x.shape)}")
    return quantize_fp8_rows(x, dtype) if out_format == "rows" else quantize_fp8_blocks(x, dtype, e8m0)


def _once(shape: tuple[int, ...], rows: int) -> bool:
    return all(size == 1 for size in shape) or shape in ((rows,), (rows, 1))


@documented_like(mxfp8_mm)
def fp8_mm(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    compute_dtype: torch.dtype = torch.float32,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor:
    """Return X @ W^T of two fp8 matrices with scales, computed in ``compute_dtype`` and rounded once.

    Args:
        xq: fp8 (or uint8 bits) [M, K].
        x_scale: its scales, see :class:`Scales`.
        w_scale: its scales.
    """
    m, n, k = checks.require_factors(xq, wq)
    scales = scales_of(m, n, k, x_scale, w_scale)
    x, w = ((q.view(fp8_dtype) if q.dtype == torch.uint8 else q).to(compute_dtype) for q in (xq, wq))
    x_factor, w_factor = (
        (scale if scale.dtype == torch.float32 else e8m0_to_f32(scale)).to(compute_dtype)
        for scale in (x_scale, w_scale)
    )
    if scales is Scales.ONCE:
        return (torch.nn.functional.linear(x, w) * (x_factor.reshape(-1, 1) * w_factor.reshape(1, -1))).to(out_dtype)
    block = scales.block
    total = torch.zeros(m, n, dtype=compute_dtype, device=xq.device)
    for index, first in enumerate(range(0, k, block)):
        rows = w_factor[:, index].repeat_interleave(block)[:n]
        product = torch.nn.functional.linear(x[:, first : first + block], w[:, first : first + block])
        total += product * (x_factor[:, index, None] * rows)
    return total.to(out_dtype)
