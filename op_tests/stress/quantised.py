"""Trials of the quantisers, the norms and SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hipforge.ops.core.fp8 import fp8_dtypes
from stress.case import Arguments, Op, Rng, first, is_given
from stress.floats import (
    E2M1_FORMAT,
    F32,
    FORMATS,
    FP8_MAX,
    Array,
    Span,
    e8m0,
    fp4_values,
    plain,
    raw_bytes,
    same,
    values,
)
from stress.shuffled import unshuffled

HALVES = (torch.float16, torch.bfloat16)

REALS = (torch.float32, *HALVES)
MODES = ("round_down", "round_up", "even", "ceil", "triton")
FN = torch.float8_e4m3fn
FACTS = {FN: (8, 3, 448.0), torch.float8_e4m3fnuz: (7, 3, 240.0), "e2m1": (2, 1, 6.0)}


def own_fp8() -> torch.dtype:
    return fp8_dtypes(torch.device("cpu"))[0]


def mx_bytes(largest: Array, fmt: Any, mode: str) -> Array:
    """The scale byte of blocks whose largest magnitudes, float32, are given."""
    power, mantissa, maximum = FACTS[fmt]
    bits = largest.astype(np.float32).view(np.int32).astype(np.int64)
    special = bits >= 0x7F800000
    bits = np.where(special, 0, bits)
    if mode == "round_up":
        with np.errstate(all="ignore"):
            quotient = (bits.astype(np.int32).view(np.float32) / np.float32(maximum)).view(np.int32).astype(np.int64)
        found = (quotient >> 23) + ((quotient & 0x7FFFFF) != 0)
    elif mode in ("round_down", "ceil"):
        found = (bits >> 23) - power + ((mode == "ceil") & ((bits & 0x7FFFFF) != 0))
    else:
        up = bits + (0x200000 if mode == "triton" else 1 << (22 - mantissa))
        found = np.where(((up >> 23) == 255) & (mode == "triton" or fmt == "e2m1"), 254, (up >> 23) - power)
    keeps_254 = mode == "triton" or (mode == "even" and fmt == "e2m1")
    return np.where(special, 254 if keeps_254 else 255, np.clip(found, 0, 254))


def mx_codes(x: Array, fmt: Any, mode: str) -> tuple[Array, Array]:
    """float32 x as (element values before their scale, scales) in MX format, special blocks NaN."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    with np.errstate(all="ignore"):
        byte = mx_bytes(np.abs(blocks).max(axis=-1), fmt, mode)
        scale = np.where(byte == 255, np.nan, np.ldexp(1.0, byte - 127))
        codes = (E2M1_FORMAT if fmt == "e2m1" else FORMATS[fmt]).round(blocks.astype(np.float64) / scale[..., None])
    return codes.reshape(x.shape), scale


def make_mx(rng: Rng) -> Arguments:
    rows, k = rng.pick((0, 1, 3, 16)), 32 * rng.pick((1, 2, 5))
    x = rng.normal(rows, k, dtype=rng.pick(REALS), sigma=rng.pick((1.0, 1e-3, 300.0)))
    own = {"out": torch.zeros(rows, k, dtype=own_fp8()), "scale_out": torch.zeros(rows, k // 32, dtype=torch.uint8)}
    return {"x": x, "mode": rng.pick(MODES), **(own if rng.chance(0.3) else {})}


def judge_mxfp8(before: Arguments, result: Any, after: Arguments) -> str | None:
    q, scale = result
    x, mode = plain(before["x"]).float().numpy(), before.get("mode", "round_up")
    codes, wanted = mx_codes(x, own_fp8(), mode)
    special = np.repeat(~np.isfinite(x.reshape(len(x), x.shape[-1] // 32, 32)).all(axis=-1), 32, axis=-1)
    # In mode triton a block with an infinity keeps scale 254, and its elements saturate.
    got = values(q)
    return first(
        same("scale", e8m0(scale), wanted), is_given(q, after.get("out"), "out"),
        is_given(scale, after.get("scale_out"), "scale_out"),
        same("q", np.where(special, 0, got), np.where(special, 0, codes)),
        None if mode == "triton" else same("NaN", np.isnan(got[special]), np.ones(special.sum(), bool)),
        same("NaN of q", np.isnan(got[np.isnan(x)]), np.ones(np.isnan(x).sum(), bool)),
    )  # fmt: skip


def make_mxfp4(rng: Rng) -> Arguments:
    shuffled = rng.chance(0.3)
    rows, k = (
        (16 * rng.integer(1, 2), 64 * rng.integer(1, 3))
        if shuffled
        else (rng.pick((0, 1, 3, 16)), 32 * rng.integer(1, 5))
    )
    x = rng.normal(rows, k, dtype=rng.pick(REALS), sigma=rng.pick((1.0, 1e-3, 300.0)))
    places = (-(-rows // 256) * 256, -(-k // 256) * 8) if shuffled else (rows, k // 32)
    return {
        "x": x, "mode": rng.pick(MODES), "shuffled": shuffled,
        "out": rng.maybe(0.3, lambda: torch.full((rows, k // 2), 9, dtype=torch.uint8)),
        "scale_out": rng.maybe(0.3, lambda: torch.full(places, 9, dtype=torch.uint8)),
    }  # fmt: skip


def judge_mxfp4(before: Arguments, result: Any, after: Arguments) -> str | None:
    packed, scale = result
    given = is_given(packed, after.get("out"), "out") or is_given(scale, after.get("scale_out"), "scale_out")
    if before.get("shuffled"):
        packed, scale = unshuffled(packed, scale)
    x = plain(before["x"]).float().numpy()
    codes, wanted = mx_codes(x, "e2m1", before.get("mode", "even"))
    special = np.repeat(~np.isfinite(x.reshape(len(x), x.shape[-1] // 32, 32)).all(axis=-1), 32, axis=-1)
    got, bits = fp4_values(packed), raw_bytes(packed)
    signs = np.stack((bits >> 3 & 1, bits >> 7), axis=-1).reshape(x.shape).astype(bool)
    return first(
        given, same("scale", e8m0(scale), wanted),
        same("packed", np.where(special, 0, got), np.where(special, 0, codes)),
        same("sign", np.where(special, False, signs), np.where(special, False, np.signbit(x))),
    )  # fmt: skip


def make_tensorwise(rng: Rng) -> Arguments:
    transpose = rng.chance(0.4)
    shape = (
        (rng.pick((1, 3, 40)), rng.pick((1, 7, 64))) if transpose else rng.pick(((0,), (5,), (3, 17), (2, 3, 8), ()))
    )
    x = rng.normal(*shape, dtype=rng.pick(REALS), sigma=rng.pick((1.0, 1e-9, 1e3)))
    return {"x": x, "dtype": rng.pick((None, *fp8_dtypes(torch.device("cpu")))), "transpose": transpose}


def judge_tensorwise(before: Arguments, result: Any, after: Arguments) -> str | None:
    x8, inverse, x8_t = result
    x, dtype = plain(before["x"]).float().numpy(), before.get("dtype") or own_fp8()
    with np.errstate(all="ignore"):
        largest = np.abs(x.astype(np.float64)).max(initial=0.0)
        scale = np.float32(FP8_MAX[dtype] / np.maximum(largest, 1e-12))
        codes = FORMATS[dtype].round((x * scale).astype(np.float64))
        # A NaN makes the scale NaN; an infinity makes it 0, and itself NaN.
        codes = np.where(np.isnan(scale), np.nan, codes)
        wanted = Span.of(np.float64(1 / np.float64(scale))).widened(2 * F32)
    if x8.shape != before["x"].shape or x8.dtype != dtype:
        return f"x8 is {x8.dtype} {tuple(x8.shape)}"
    transposed = None if not before.get("transpose") else same("x8_t", values(x8_t), values(x8).T)
    return first(
        same("x8", values(x8), codes), transposed,
        Span(np.atleast_1d(wanted.low), np.atleast_1d(wanted.high)).complaint("inv_scale", values(inverse).reshape(1)),
    )  # fmt: skip


def make_scaled_fp8(rng: Rng, blocks: bool) -> Arguments:
    rows, k, e8m0_scales = rng.pick((0, 1, 3, 9)), rng.pick((1, 17, 64, 128, 200, 384)), blocks and rng.chance(0.5)
    x = rng.normal(rows, k, dtype=rng.pick(REALS), sigma=rng.pick((1.0, 1e-4, 300.0)))
    scales = (rows, -(-k // 128)) if blocks else (rows,)
    return {
        "x": x, **({"e8m0": e8m0_scales} if blocks else {}),
        "out": rng.maybe(0.3, lambda: torch.zeros(rows, k, dtype=own_fp8())),
        "scale_out": rng.maybe(0.3, lambda: torch.zeros(scales, dtype=torch.uint8 if e8m0_scales else torch.float32)),
    }  # fmt: skip


def judge_scaled_fp8(before: Arguments, result: Any, after: Arguments) -> str | None:
    (q, scales), x, fp8 = result, plain(before["x"]).float().numpy(), own_fp8()
    size = 128 if "e8m0" in before else x.shape[1]
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % size))).reshape(len(x), -(-x.shape[1] // size), size)
    with np.errstate(all="ignore"):
        largest = np.abs(padded).max(axis=-1)
        wanted = largest / np.float32(FP8_MAX[fp8])
        wanted = np.where(np.isfinite(largest), np.where(wanted == 0, np.float32(1), wanted), np.nan)
        if before.get("e8m0"):
            wanted = np.exp2(np.ceil(np.log2(wanted.astype(np.float64))))
        codes = padded / wanted.astype(np.float32)[..., None]
        codes = FORMATS[fp8].round(np.clip(codes, -FP8_MAX[fp8], FP8_MAX[fp8]).astype(np.float64))
    codes = np.where(np.isnan(wanted)[..., None], 0.0, codes)
    codes = codes.reshape(len(x), padded.shape[1] * size)[:, : x.shape[1]]
    got = e8m0(scales) if before.get("e8m0") else values(scales)
    return first(
        same("scales", got.reshape(wanted.shape), wanted), same("q", np.abs(values(q)), np.abs(codes)),
        is_given(q, after.get("out"), "out"), is_given(scales, after.get("scale_out"), "scale_out"),
    )  # fmt: skip


# ---- norms -----------------------------------------------------------------------------------------------------------


def _norm_of(x: Span, weight: torch.Tensor, epsilon: float, offset: float, dtype: torch.dtype) -> Span:
    """y of rows that are known exactly (a sum of two halves is, once it is rounded)."""
    row = x.low
    with np.errstate(all="ignore"):
        mean = (row * row).mean(axis=-1, keepdims=True)
        inverse = Span.of(1 / np.sqrt(mean + epsilon)).widened((row.shape[-1] + 8) * F32)
        n = Span(row * inverse.low, row * inverse.high)
        n = Span(np.minimum(n.low, n.high), np.maximum(n.low, n.high)).widened(4 * F32, 1e-40)
        if offset == 0.0:
            return n.rounded(dtype).times(values(weight)).widened(F32).rounded(dtype)
        return (
            n.times((values(weight).astype(np.float32) + np.float32(offset)).astype(np.float64))
            .widened(4 * F32)
            .rounded(dtype)
        )


def judged_rows(row: Array) -> Array:
    """Rows without NaN and infinity whose squares neither overflow nor vanish."""
    with np.errstate(all="ignore"):
        size = np.abs(row).max(axis=-1, keepdims=True, initial=0.0)
    return np.broadcast_to((size < 1e18) & (size > 1e-15), row.shape)


def make_norm(rng: Rng, residual: bool, quantised: str) -> Arguments:
    dtype, rows = rng.pick(HALVES), rng.pick((0, 1, 2, 5))
    cols = 32 * rng.pick((1, 2, 8)) if quantised == "mx" else rng.pick((1, 8, 24, 33, 64, 256))
    x = rng.normal(rows, cols, dtype=dtype)
    given: Arguments = {"input" if residual else "x": x, "weight": rng.finite(cols, dtype=dtype)}
    given["epsilon"] = rng.pick((1e-5, 1e-6, 0.1, 0.0, 2.0**-149))
    given["weight_offset"] = rng.pick((0.0, 0.0, 1.0))
    if residual:
        given["residual"] = rng.normal(rows, cols, dtype=dtype)
        given["force_scalar"] = rng.chance(0.2)
        given["next_buffer"] = rng.maybe(
            0.3, lambda: torch.full((rows, rng.pick((1, 8, 57))), 7.0, dtype=torch.float16)
        )
    if quantised == "fp8":
        given["scale_tensor"] = torch.tensor([rng.pick((0.5, 3e-2, 0.0, 1.7))])
        given["fp8_max"] = rng.maybe(0.2, lambda: rng.pick((1.0, 200.0, FP8_MAX[own_fp8()])))
    if quantised and rng.chance(0.3):
        given["also_out"] = torch.zeros(rows, cols, dtype=dtype)
    if rng.chance(0.3):
        given["out"] = torch.zeros(rows, cols, dtype=own_fp8() if quantised else dtype)
    if quantised == "mx":
        given["scale_out"] = rng.maybe(0.3, lambda: torch.zeros(rows, cols // 32, dtype=torch.uint8))
    return given


def mx_complaint(y: Span, judged: Array, q: torch.Tensor, scale: torch.Tensor) -> str | None:
    """What is wrong with an MX-FP8 result of values that are known up to a span; RCEIL scales."""
    low, high = (part.reshape(*part.shape[:-1], part.shape[-1] // 32, 32) for part in (y.low, y.high))
    good = judged.reshape(low.shape) & np.isfinite(low) & np.isfinite(high)
    sound = good.all(axis=-1)
    fmt = own_fp8()
    with np.errstate(all="ignore"):
        least = np.where((low <= 0) & (high >= 0), 0, np.minimum(np.abs(low), np.abs(high))).max(axis=-1)
        most = np.maximum(np.abs(low), np.abs(high)).max(axis=-1)
        bytes_low, bytes_high = (
            mx_bytes(np.where(sound, part, 1).astype(np.float32), fmt, "round_up") for part in (least, most)
        )
        given = raw_bytes(scale).astype(np.int64)
        factor = np.ldexp(1.0, 127 - given)[..., None]
        codes = Span(low * factor, high * factor).rounded(fmt)
    wrong = Span(bytes_low, bytes_high).complaint("scale", given, sound)
    nan = np.isnan(y.low).reshape(low.shape).any(axis=-1) & (judged | np.isnan(y.low)).reshape(low.shape).all(axis=-1)
    got = values(q).reshape(low.shape)
    return first(
        wrong, codes.complaint("q", got, np.broadcast_to(sound[..., None], got.shape)),
        same("scale of a block with NaN", given[nan], np.full(nan.sum(), 255)),
    )  # fmt: skip


def static_complaint(y: Span, judged: Array, q: torch.Tensor, scale: torch.Tensor, fp8_max: float | None) -> str | None:
    """What is wrong with a result quantised by one scale."""
    factor = np.float32(scale.reshape(()).item())
    with np.errstate(all="ignore"):
        inverse = np.float64(np.float32(1 / factor)) if factor else np.float64(1.0)  # infinite of a denormal one
        z = y.times(inverse).widened(4 * F32, 1e-40)
        limit = FP8_MAX[own_fp8()] if fp8_max is None else float(fp8_max)
        codes = z.map(lambda x: np.clip(x, -limit, limit)).rounded(own_fp8())
        judged = judged & ~(np.isinf(inverse) & (y.low <= 0) & (y.high >= 0))  # 0 times infinity
    return codes.complaint("q", values(q), judged)


def dynamic_complaint(y: Span, judged: Array, before: Arguments, q: torch.Tensor, scale: torch.Tensor) -> str | None:
    """What is wrong with fp8 and its scale, one per row or 128 of it, of values that are known up to a span."""
    columns, fp8 = y.low.shape[1], own_fp8()
    size = 128 if before["out_format"] == "blocks" else columns
    blocks = -(-columns // size)
    padding = ((0, 0), (0, blocks * size - columns))
    low, high = (np.pad(part, padding).reshape(len(part), blocks, size) for part in (y.low, y.high))
    sound = np.pad(judged & np.isfinite(y.low) & np.isfinite(y.high), padding, constant_values=True)
    sound = sound.reshape(low.shape).all(axis=-1)
    largest = np.maximum(np.abs(low), np.abs(high)).max(axis=-1) / FP8_MAX[fp8]
    real = (e8m0(scale) if before["e8m0"] else values(scale)).reshape(len(low), blocks)
    with np.errstate(all="ignore"):
        # Elements that are near are rounded by half a unit, an 8th to a 16th, or by half of the smallest one.
        room = np.maximum(np.abs(low), np.abs(high)) * 2.0**-3.9 + real[..., None] * 2.0**-9
        got = np.pad(values(q), padding).reshape(low.shape) * real[..., None]
        span = Span(low - room, high + room)
    nonzero = ((low > 0) | (high < 0)).any(axis=-1)  # zeros have scale 1
    wide = np.where(sound & nonzero, largest * (2.02 if before["e8m0"] else 1.01), np.inf)
    return first(
        Span(np.zeros_like(wide), wide).complaint("scales", real, sound),
        span.complaint("q times scales", got, np.broadcast_to(sound[..., None], low.shape)),
    )


def stored_complaint(y: Span, judged: Array, before: Arguments, parts: Sequence[Any], after: Arguments) -> str | None:
    """What is wrong with how y is stored: in the memory that was given, with its scales or without, and its buffer."""
    if after.get("next_buffer") is not None and after["next_buffer"].any():
        return "the next buffer is not zero"
    if "out_format" in before:
        wrong = dynamic_complaint(y, judged, before, *parts)
    elif len(parts) == 2:
        wrong = mx_complaint(y, judged, *parts)
    elif before.get("scale_tensor") is not None:
        wrong = static_complaint(y, judged, parts[0], before["scale_tensor"], before.get("fp8_max"))
    else:
        wrong = y.complaint("result", values(parts[0]), judged)
    memory = zip(parts, ("out", "scale_out"), strict=False)
    return first(*(is_given(part, after.get(name), name) for part, name in memory), wrong)


def judge_norm(before: Arguments, result: Any, after: Arguments) -> str | None:
    x = before["input"] if "input" in before else before["x"]
    dtype, row = x.dtype, values(x)
    if dtype not in HALVES:
        raise ValueError("no norm of this dtype")
    complaints: list[str | None] = []
    residual = before.get("residual")
    parts = list(result) if isinstance(result, tuple) else [result]
    if residual is not None:
        exact = Span.of(row + values(residual)).widened(F32).rounded(dtype)
        complaints += [
            exact.complaint("residual", values(after["residual"])),
            is_given(parts.pop(), after["residual"], "residual"),
        ]
        row = values(after["residual"])  # rounded: exact from here on
    y = _norm_of(
        Span.of(row), before["weight"], float(before["epsilon"]), float(before.get("weight_offset", 0.0)), dtype
    )
    judged = judged_rows(row)
    if after.get("also_out") is not None:
        complaints.append(y.complaint("also_out", values(after["also_out"]), judged))
    return first(*complaints, stored_complaint(y, judged, before, parts, after))


# ---- SwiGLU ----------------------------------------------------------------------------------------------------------


def make_swiglu(rng: Rng, mx: bool) -> Arguments:
    dtype, rows = rng.pick(HALVES), rng.pick((0, 1, 3))
    d = 32 * rng.pick((1, 2, 5)) if mx else rng.pick((1, 8, 17, 64, 200))
    given: Arguments = {"gate_up": rng.normal(rows, 2 * d, dtype=dtype, sigma=rng.pick((1.0, 6.0)))}
    if not mx:
        given["scale_tensor"] = torch.tensor([rng.pick((0.5, 3e-2, 0.0, 1.7))])
        given["fp8_max"] = rng.maybe(0.2, lambda: rng.pick((1.0, 200.0, FP8_MAX[own_fp8()])))
    if rng.chance(0.4):
        given |= {
            "alpha": rng.pick((1.702, 1.0, 0.5)), "beta": rng.pick((1.0, 0.0, -0.25)),
            "limit": rng.pick((7.0, None, 0.5)),
        }  # fmt: skip
    given["next_buffer"] = rng.maybe(0.3, lambda: torch.full((rows, rng.pick((1, 8, 57))), 7.0, dtype=torch.float16))
    given["out"] = rng.maybe(0.3, lambda: torch.zeros(rows, d).to(own_fp8()))
    if mx:
        given["scale_out"] = rng.maybe(0.3, lambda: torch.zeros(rows, d // 32, dtype=torch.uint8))
    return {**given, "interleaved": rng.chance(0.3), "force_scalar": rng.chance(0.2)}


def judge_swiglu(before: Arguments, result: Any, after: Arguments) -> str | None:
    if before["gate_up"].dtype not in HALVES:
        raise ValueError("no SwiGLU of this dtype")
    both = values(before["gate_up"])
    d = both.shape[1] // 2
    gate, up = (both[:, ::2], both[:, 1::2]) if before.get("interleaved") else (both[:, :d], both[:, d:])
    judged = ~(np.isinf(gate) | np.isinf(up))
    limit = before.get("limit")
    if limit is not None:
        limit = float(limit)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    alpha, beta = float(before.get("alpha", 1.0)), float(before.get("beta", 0.0))
    with np.errstate(all="ignore"):
        exact = gate / (1 + np.exp(-alpha * gate)) * (up + beta)
        # exp of an argument that is off by its own rounding; sums, products, a quotient, each a few roundings.
        error = np.abs(exact) * (np.abs(alpha * gate) * 4 * F32 + 24 * F32) + np.abs(gate) * np.abs(beta) * F32
    y = Span.of(exact, error + 1e-37)
    return stored_complaint(y, judged, before, result if isinstance(result, tuple) else (result,), after)


def make_dynamic(rng: Rng, given: Arguments) -> Arguments:
    """The arguments of a norm or SwiGLU with a scale that the launch chooses."""
    for name in ("scale_tensor", "fp8_max"):
        given.pop(name, None)
    blocks = rng.chance(0.5)
    e8m0_scales = blocks and rng.chance(0.5)
    x = next(given[name] for name in ("x", "input", "gate_up") if name in given)
    columns = x.shape[1] // (2 if "gate_up" in given else 1)
    shape = (len(x), -(-columns // 128)) if blocks else (len(x),)
    scales = torch.zeros(shape, dtype=torch.uint8 if e8m0_scales else torch.float32)
    return {
        **given, "out_format": "blocks" if blocks else "rows", "e8m0": e8m0_scales,
        "scale_out": rng.maybe(0.3, lambda: scales),
    }  # fmt: skip


WRITES = ("out", "scale_out", "also_out", "next_buffer", "residual")
OPS = (
    Op("mxfp8_quantize", make_mx, judge_mxfp8, writes=WRITES),
    Op("mxfp4_quantize", make_mxfp4, judge_mxfp4, writes=WRITES),
    Op("fp8_quant_tensorwise", make_tensorwise, judge_tensorwise),
    Op("fp8_quant_rows", lambda rng: make_scaled_fp8(rng, False), judge_scaled_fp8, writes=WRITES),
    Op("fp8_quant_blocks", lambda rng: make_scaled_fp8(rng, True), judge_scaled_fp8, writes=WRITES),
    Op("residual_rms", lambda rng: make_norm(rng, True, rng.pick(("fp8", ""))), judge_norm, writes=WRITES),
    Op("residual_rms_mxfp8", lambda rng: make_norm(rng, True, "mx"), judge_norm, writes=WRITES),
    Op("rms_norm", lambda rng: make_norm(rng, False, ""), judge_norm, writes=WRITES),
    Op("rms_norm_fp8", lambda rng: make_norm(rng, False, "fp8"), judge_norm, writes=WRITES),
    Op("rms_norm_mxfp8", lambda rng: make_norm(rng, False, "mx"), judge_norm, writes=WRITES),
    Op("swiglu_fp8", lambda rng: make_swiglu(rng, False), judge_swiglu, writes=WRITES),
    Op(
        "residual_rms_fp8_dynamic", lambda rng: make_dynamic(rng, make_norm(rng, True, "fp8")), judge_norm,
        writes=WRITES,
    ),
    Op("rms_norm_fp8_dynamic", lambda rng: make_dynamic(rng, make_norm(rng, False, "fp8")), judge_norm, writes=WRITES),
    Op("swiglu_fp8_dynamic", lambda rng: make_dynamic(rng, make_swiglu(rng, False)), judge_swiglu, writes=WRITES),
    Op("swiglu_mxfp8", lambda rng: make_swiglu(rng, True), judge_swiglu, writes=WRITES),
)
