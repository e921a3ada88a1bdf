"""What the adapters of inference servers share: what is taken, what is refused and why, and the calls of the ops.

Nothing here imports a server. A function named ``..._refusal`` returns the reason why hipforge does not take something,
or None; an adapter hands the reason to its server, which falls back to a kernel of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from hipforge import archs, devices
from hipforge.errors import GuardError
from hipforge.nn.experts import Activation
from hipforge.nn.payload import accepted_fp8, accepted_mxfp4
from hipforge.ops.core import invariance
from hipforge.ops.core.checks import require_rank
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.decode_attention import decode_attention_fp8
from hipforge.ops.decode_attention.kernels import (
    GATHERED_ARCHS,
    GATHERED_DIMS,
    GATHERED_RULE,
    HEAD_DIMS,
    PAGE_MULTIPLE,
    gathers,
)
from hipforge.ops.decode_attention.layout import MAX_MQ, Scale
from hipforge.ops.fp8_gemm import fp8_linear as fp8_product
from hipforge.ops.fp8_quant import QUANTISERS
from hipforge.ops.moe import fused_moe_fp8, fused_moe_mxfp4, fused_moe_mxfp8
from hipforge.ops.mx_quantize import mxfp8_quantize
from hipforge.ops.mxfp8_gemm import mxfp8_linear
from hipforge.ops.reference.e8m0 import e8m0_to_f32, f32_to_e8m0
from hipforge.ops.reference.fnuz import mx_fn_to_fnuz
from hipforge.ops.reference.fp8 import weight_scales_of
from hipforge.ops.rope_and_cache import rope_and_cache

BIAS_DTYPE = torch.bfloat16
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DECODE_TOKENS = MAX_MQ  # query tokens per sequence that one call of decode attention takes
FP8_RESULTS = (torch.bfloat16, torch.float16)  # what the fp8 GEMM writes
# The names that servers give to the dtype of a cache whose layout and scales are taken.
CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
_ROW_BYTES = 16  # rows of a cache start at multiples of so many bytes
_GATHERED_ROW_BYTES = 8  # those that a kernel finds one by one


def device_refusal() -> str | None:
    """Return why no kernel of hipforge runs on this process's device, or None."""
    current = devices.current()
    if current.kind == "reference":
        return "HIPFORGE_DEVICE=reference runs no kernels"
    arch = current.arch_of()
    return None if arch in archs.ARCHS else f"hipforge has kernels for {', '.join(archs.ARCHS)}; this GPU is {arch}"


def follow_batch_invariance(variable: str) -> None:
    """Turn on :func:`hipforge.batch_invariant` for this process where a server's own variable asks for it."""
    if os.environ.get(variable, "").strip().lower() in ("1", "true", "yes"):
        invariance.STATE.turn(True)


def linear_refusal(outputs: int, inputs: int) -> str | None:
    """Return why a linear layer [N, K] is not taken, or None."""
    if outputs < 1 or inputs < BLOCK or inputs % BLOCK:
        return f"MX-FP8 has one scale per {BLOCK} weights of a row: K must be a multiple of {BLOCK}; got {inputs}"
    return None


def bias_refusal(bias: torch.Tensor | None) -> str | None:
    """Return why a bias of a linear layer is not taken, or None."""
    if bias is None or bias.dtype == BIAS_DTYPE:
        return None
    short = str(bias.dtype).removeprefix("torch.")
    return f"{short} bias: it is added in float32 from bfloat16, and rounding it to that would change the model"


def scale_refusal(weight: torch.Tensor, scale: torch.Tensor) -> str | None:
    """Return why the scales of an MX-FP8 weight [..., N, K] are not taken, or None.

    One e8m0 byte per 32 weights of a row is taken, [..., N, K/32], in a buffer that may be padded at the end of either
    dimension. Named refusals: *compact* (one row of scales for several rows of weights), *swizzled* (one dimension, in
    the order of another kernel), another dtype, another block.
    """
    if weight.element_size() != 1:
        return f"the weight is {weight.dtype}, not e4m3 elements"
    if scale.dtype not in (torch.uint8, E8M0_DTYPE):
        return f"scales of {scale.dtype}: e8m0 bytes (uint8 or float8_e8m0fnu) are taken"
    if scale.dim() == 1 and weight.dim() > 1:
        return f"swizzled scales of shape {tuple(scale.shape)}: rows of scales [N, K/{BLOCK}] are taken"
    rows, blocks = weight.shape[-2], weight.shape[-1] // BLOCK
    if scale.dim() != weight.dim() or scale.shape[:-2] != weight.shape[:-2]:
        return f"scales of shape {tuple(scale.shape)} for a weight of shape {tuple(weight.shape)}"
    if scale.shape[-2] < rows:
        return (
            f"compact scales: {scale.shape[-2]} rows of scales for {rows} rows of weights; one row each is taken "
            "(repeat the rows)"
        )
    if scale.shape[-1] < blocks:
        return f"{scale.shape[-1]} scales in a row of {weight.shape[-1]} weights: one per {BLOCK} is taken, {blocks}"
    return None


def device_weights(
    weight: torch.Tensor, scale: torch.Tensor, name: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (elements, scales) in the format of their device, contiguous and without padding of the scales.

    Args:
        weight: float8_e4m3fn, or the device's e4m3, [..., N, K].
        scale: e8m0 bytes as :func:`scale_refusal` takes them.
        name: what errors call the weight.

    Raises:
        GuardError: what :func:`scale_refusal` says, or a scale of 2^127 on gfx942, whose format has no place for it.
    """
    reason = scale_refusal(weight, scale)
    if reason is not None:
        raise GuardError(f"{name}: {reason}")
    scale = scale.view(torch.uint8)[..., : weight.shape[-2], : weight.shape[-1] // BLOCK]
    own = fp8_dtypes(weight.device)[0]
    if weight.dtype == torch.uint8:
        weight = weight.view(torch.float8_e4m3fn)
    if weight.dtype != own:
        weight, scale = mx_fn_to_fnuz(weight, scale, name)
    return weight.contiguous(), scale.contiguous()


def fp8_device_weights(
    weight: torch.Tensor, scale: torch.Tensor, name: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (elements, scales) of an fp8 weight [N, K] or experts' [E, N, K] in the format of their device.

    Args:
        weight: float8_e4m3fn, or the device's e4m3.
        scale: of a kind that :func:`hipforge.fp8_gemm` takes for weights; or float32, powers of two per 32 x 32, or
            one for each of several equal parts of the rows, such as gate and up.
        name: what errors call the weight.

    Raises:
        GuardError: scales of no kind, or one that has no double, on gfx942.
    """
    parts, rows = scale.shape[-1] if scale.dim() == weight.dim() - 1 else 1, weight.shape[-2]
    if scale.dtype == torch.float32 and 1 < parts < rows and rows % parts == 0:
        scale = scale.repeat_interleave(rows // parts, -1)
    if scale.dtype == torch.float32 and scale.shape[-2:] == (-(-rows // BLOCK), weight.shape[-1] // BLOCK) != (1, 1):
        scale = _exponents(scale, name)
    return accepted_fp8(weight, scale, name)


def mxfp4_device_weights(
    weight: torch.Tensor, scale: torch.Tensor, name: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (elements, e8m0 bytes) of an MXFP4 weight [..., N, K/2] whose scales may be float32 powers of two.

    Raises:
        GuardError: a scale that e8m0 does not hold, or shapes that do not fit each other.
    """
    return accepted_mxfp4(weight, _exponents(scale, name) if scale.dtype == torch.float32 else scale, name)


def _exponents(scale: torch.Tensor, name: str) -> torch.Tensor:
    exponents = f32_to_e8m0(scale)
    if not torch.equal(e8m0_to_f32(exponents), scale):
        raise GuardError(f"{name}: scales that are no powers of two: e8m0 does not hold them")
    return exponents


def in_device_format(weight: torch.Tensor, scale: torch.Tensor, converted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stacked weights [E, N, K] and their scales in the device's format, in the memory that they are in.

    On gfx950 they are returned as they are. On gfx942 the first call overwrites e4m3fn by the same numbers in e4m3fnuz.

    Args:
        weight: float8_e4m3fn, contiguous.
        scale: e8m0 bytes [E, N, K/32], contiguous.
        converted: whether an earlier call has overwritten them.

    Raises:
        GuardError: what :func:`scale_refusal` says, or a scale of 2^127 on gfx942.
    """
    own = fp8_dtypes(weight.device)[0]
    scale = scale.view(torch.uint8)
    if not converted:
        reason = scale_refusal(weight, scale)
        if reason is not None:
            raise GuardError(reason)
        if weight.dtype != own:
            elements, exponents = mx_fn_to_fnuz(weight.view(torch.float8_e4m3fn), scale)
            weight.view(torch.uint8).copy_(elements.view(torch.uint8))
            scale.copy_(exponents)
    return weight.view(own), scale


def linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T + bias in x's dtype: x is quantised to MX-FP8 in one launch and multiplied in another.

    Args:
        x: bfloat16, float16 or float32 [..., K].
        weight: the device's e4m3 [N, K], as :func:`device_weights` returns it.
        scale: e8m0 bytes [N, K/32].
        bias: bfloat16 [N].

    Returns:
        [..., N]; float32 sums rounded to bfloat16, then to x's dtype.

    Raises:
        GuardError: a bias that :func:`bias_refusal` refuses, or operands that do not fit each other.
    """
    reason = bias_refusal(bias)
    if reason is not None:
        raise GuardError(reason)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = mxfp8_linear(*mxfp8_quantize(rows), weight, scale, bias)
    return y.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)


# gpt-oss's, which servers hard-code in their kernels: models only name the activation
_OPEN_AI = Activation(1.702, 1.0, 7.0, interleaved=True)
ACTIVATIONS = ("silu", "swigluoai", "swigluoai_uninterleave")


def fp8_linear_refusal(outputs: int, inputs: int, dtype: torch.dtype) -> str | None:
    """Return why a linear layer [N, K] over fp8, with results of a dtype, is not taken, or None."""
    if outputs < 1 or inputs < 1:
        return f"an empty weight [{outputs}, {inputs}]"
    return None if dtype in FP8_RESULTS else f"results of {dtype}: {', '.join(map(str, FP8_RESULTS))} are taken"


def fp8_weight_refusal(weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Return why a loaded fp8 weight [N, K] is not taken, or None.

    Its scales are float32, one or one per row or per 128 x 128 weights, or e8m0 per 128 x 128 or 32 x 32.
    """
    own = fp8_dtypes(weight.device)[0]
    if weight.dtype != own or weight.dim() != 2:
        return f"a weight of {weight.dtype} {tuple(weight.shape)}: {own} [N, K] is taken"
    try:
        weight_scales_of("its scales", scale, None, *weight.shape)
    except GuardError as error:
        return str(error)
    if bias is not None and bias.dtype not in FP8_RESULTS:
        return f"a bias of {bias.dtype}: {', '.join(map(str, FP8_RESULTS))} are taken"
    return None


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return x W^T + bias over fp8: x is quantised in one launch, as the scales of W ask, and multiplied in another.

    Args:
        x: bfloat16, float16 or float32 [..., K]; with ``x_scale`` e4m3 elements.
        weight: the device's e4m3 [N, K], any strides.
        scale: its scales, as :func:`fp8_weight_refusal` takes them.
        bias: of ``dtype`` [N].
        x_scale: float32, one or one per row of x.
        dtype: of the result, bfloat16 or float16; default x's.
    """
    rows = x.reshape(-1, x.shape[-1])
    result = x.dtype if dtype is None else dtype
    if x_scale is None:
        kind = weight_scales_of("scale", scale, None, *weight.shape)
        rows, x_scale = QUANTISERS[kind](rows.contiguous())
    return fp8_product(rows, x_scale, weight, scale, out_dtype=result, bias=bias).view(*x.shape[:-1], -1)


def swiglu_parameters(
    activation: str, alpha: float | None = None, beta: float | None = None, limit: float | None = None
) -> Activation | str:
    """Return the parameters of a server's activation, or the reason why it is not taken.

    Args:
        activation: ``silu`` (gate, then up; an alpha makes it the next but one), ``swigluoai`` (gpt-oss: interleaved,
            1.702, 1 and 7 unless given) or ``swigluoai_uninterleave`` (gate, then up: needs a limit).
        alpha: ``gemm1_alpha``.
        beta: ``gemm1_beta``; missing where there is an alpha, it is 1.
        limit: ``gemm1_clamp_limit``.
    """
    if activation not in ACTIVATIONS:
        return f"activation {activation!r}: {', '.join(ACTIVATIONS)} are taken"
    if limit is not None and not limit > 0:
        return f"gemm1_clamp_limit must be positive, or None; got {limit}"
    if activation == "swigluoai":
        return replace(
            _OPEN_AI,
            alpha=_OPEN_AI.alpha if alpha is None else float(alpha),
            beta=_OPEN_AI.beta if beta is None else float(beta),
            limit=_OPEN_AI.limit if limit is None else float(limit),
        )
    if activation == "swigluoai_uninterleave" and limit is None:
        return "swigluoai_uninterleave without gemm1_clamp_limit: its definition has one"
    if alpha is None:
        return Activation(1.0, 0.0 if beta is None else float(beta), limit)
    return Activation(float(alpha), 1.0 if beta is None else float(beta), limit)


def moe_refusal(hidden: int, inner: int, dtype: torch.dtype, multiple: int = BLOCK) -> str | None:
    """Return why experts of widths [H] and [I] are not taken, or None; both must be multiples of a number."""
    for name, width in {"hidden": hidden, "intermediate": inner}.items():
        if width < multiple or width % multiple:
            why = "the block of MX formats" if multiple == BLOCK else "as its scales and kernels need it"
            return f"{name} size {width} is not a multiple of {multiple}, {why}"
    return None if dtype in ACTIVATION_DTYPES else f"activations of {dtype}"


EXPERTS: dict[str, Callable[..., torch.Tensor]] = {
    "mxfp8": fused_moe_mxfp8,
    "fp8": fused_moe_fp8,
    "mxfp4": fused_moe_mxfp4,
}


def experts(
    hidden: torch.Tensor,
    w1: tuple[torch.Tensor, torch.Tensor],
    w2: tuple[torch.Tensor, torch.Tensor],
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu: Activation,
    *,
    expert_map: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    weighted_input: bool = False,
    out: torch.Tensor | None = None,
    form: str = "mxfp8",
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts, as :func:`hipforge.fused_moe_mxfp8` does.

    Args:
        hidden: bfloat16, float16 or float32 [T, H].
        w1: elements [E, 2·I, H] and scales [E, 2·I, H/32] in the format of the device.
        w2: elements [E, H, I] and scales [E, H, I/32].
        topk_weights: [T, top_k], floating point.
        topk_ids: integers [T, top_k], of all ranks' experts where there is a map.
        swiglu: the activation's parameters.
        expert_map: integers, the place of each expert in ``w1``, -1 where it is not on this rank.
        w1_bias: floating point [E, 2·I].
        w2_bias: floating point [E, H].
        weighted_input: the caller has multiplied the routing weights into ``hidden``; they are not applied again.
        out: contiguous [T, H] to write into.
        form: of the weights: ``mxfp8``; ``fp8`` or ``mxfp4``, with elements and scales that
            :func:`hipforge.fused_moe_fp8` and :func:`hipforge.fused_moe_mxfp4` take.
    """
    weights = torch.ones_like(topk_weights, dtype=torch.float32) if weighted_input else topk_weights
    ids = topk_ids if topk_ids.dtype in (torch.int32, torch.int64) else topk_ids.to(torch.int32)
    return EXPERTS[form](
        hidden, *w1, *w2, weights, ids, expert_map, alpha=swiglu.alpha, beta=swiglu.beta, limit=swiglu.limit,
        interleaved=swiglu.interleaved, w1_bias=None if w1_bias is None else w1_bias.float(),
        w2_bias=None if w2_bias is None else w2_bias.float(), out=out,
    )  # fmt: skip


def cache_refusal(head_dim: int, page_size: int | None, cache_dtype: str | None) -> str | None:
    """Return why a paged cache is not taken, or None; ``page_size`` and ``cache_dtype`` are None where undecided."""
    gathered = devices.current().default_arch in GATHERED_ARCHS
    if head_dim not in (GATHERED_DIMS if gathered else HEAD_DIMS):
        dims = GATHERED_RULE if gathered else ", ".join(map(str, HEAD_DIMS))
        return f"head size {head_dim}: decode attention has kernels for {dims}"
    if page_size is not None and page_size % PAGE_MULTIPLE and not gathered:
        return f"blocks of {page_size} tokens: multiples of {PAGE_MULTIPLE} are taken"
    if cache_dtype is not None and cache_dtype not in CACHE_DTYPES:
        return f"cache of {cache_dtype}: {', '.join(CACHE_DTYPES)} are taken, with one scale per tensor or KV head"
    return None


def caches_refusal(k_cache: torch.Tensor, v_cache: torch.Tensor) -> str | None:
    """Return why two caches [pages, page_size, Hkv, D] are not read as they lie, or None."""
    for name, cache in {"K": k_cache, "V": v_cache}.items():
        if cache.dim() != 4:
            return f"{name} cache of {cache.dim()} dimensions: [pages, page_size, Hkv, D] is taken, nothing packed"
        if cache.stride(3) != 1:
            return f"{name} cache whose elements of a head lie {cache.stride(3)} apart: they must be neighbours"
        steps = [stride * cache.element_size() for stride in cache.stride()[:3]]
        unit = _GATHERED_ROW_BYTES if gathers(cache.shape[3], cache.shape[1]) else _ROW_BYTES
        if any(step % unit for step in steps) or cache.storage_offset() * cache.element_size() % unit:
            return f"{name} cache with strides of {steps} bytes: multiples of {unit} are taken"
    return None


def tokens_per_sequence(tokens: int, sequences: int, longest: int) -> int | None:
    """Return the query tokens that every sequence of a batch has, where attention takes it in one call; else None."""
    if 1 <= longest <= MAX_DECODE_TOKENS and sequences >= 1 and tokens == sequences * longest:
        return longest
    return None


def _flat(scale: Scale) -> Scale:
    return scale.reshape(-1) if isinstance(scale, torch.Tensor) else scale


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tokens: int,
    *,
    scale: float,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of the last tokens of every sequence over its cached keys, causally.

    Args:
        q: bfloat16 or float16 [B * tokens, Hq, D]; with ``cu_seqlens_q`` [T, Hq, D].
        k_cache: [pages, page_size, Hkv, D], views as servers keep them.
        v_cache: like ``k_cache``.
        block_table: int32 [B, max_pages].
        seq_lens: int32 [B], the new tokens included; 0 for a row that pads the batch.
        tokens: query tokens of each sequence, 1 to 16; with ``cu_seqlens_q`` the most that one has.
        scale: factor of q.k.
        k_scale: of an fp8 cache, a number or float32 of one element or [Hkv]; nothing else of a 16-bit one.
        v_scale: the same of V.
        window: keys that a token sees at most, its own among them.
        sinks: floating point [Hq].
        softcap: None or 0 for none.
        cu_seqlens_q: int32 [B + 1], the first token of each sequence in q, and the end, where they have unequally many.
        out_scale: float32 of one element: the result is the device's e4m3, of the attention over this scale.
        out: [T, Hq, D] or [T, Hq * D] of q's dtype, or of the device's e4m3 with a scale, to write into.

    Returns:
        Of q's shape; ``out`` in that shape where it is given.
    """
    ragged = cu_seqlens_q is not None
    batched = q.shape if ragged else (-1, tokens, *q.shape[1:])
    half = k_cache.dtype in (torch.float16, torch.bfloat16)
    k_factor, v_factor = (1.0 if half else _flat(each) for each in (k_scale, v_scale))
    found = decode_attention_fp8(
        q.contiguous().view(batched), k_cache, v_cache, block_table, seq_lens, k_factor, v_factor, scale, window=window,
        sinks=None if sinks is None else sinks.float(), softcap=softcap or None, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=tokens if ragged else None, out_scale=None if out_scale is None else out_scale.reshape(1),
        out=None if out is None else out.view(batched),
    )  # fmt: skip
    assert isinstance(found, torch.Tensor)
    return found.view(q.shape)


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    neox: bool,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> torch.Tensor:
    """Rotate q in place and store the rotated k and v, in one launch; k itself keeps its values.

    Args:
        q: bfloat16 or float16 [T, Hq, D].
        k: [T, Hkv, D].
        v: like k.
        cos_sin: [positions, rotary_dim]: cosines, then sines.
        positions: int32 or int64 [T].
        k_cache: [pages, page_size, Hkv, D].
        v_cache: like ``k_cache``.
        slots: int64 [S], S at most T: tokens past it pad the batch and are not touched; -1 stores nothing.
        neox: elements (i, i + rotary_dim / 2) rotate together, else (2i, 2i + 1).
        k_scale: of an fp8 cache, a number or float32 of one element or [Hkv].
        v_scale: the same of V.

    Returns:
        q.
    """
    require_rank("q", q, 3, "[T, Hq, D]")
    count = slots.shape[0]
    fp8 = k_cache.dtype not in (torch.float16, torch.bfloat16)
    rope_and_cache(
        q[:count], k[:count], v[:count], cos_sin, positions[:count], k_cache, v_cache, slots,
        style="neox" if neox else "interleaved", k_scale=_flat(k_scale) if fp8 else None,
        v_scale=_flat(v_scale) if fp8 else None,
    )  # fmt: skip
    return q
