"""Trials of the matrix products: MX-FP8, MXFP4, fp8, skinny fp8, router, tensor-wise fp8."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from stress.case import Arguments, Op, Rng, first, is_given
from stress.floats import F32, Array, Span, e8m0, fp4_values, values
from stress.quantised import own_fp8
from stress.shuffled import shuffled_scale, shuffled_weight, unshuffled

BF16 = torch.bfloat16
FN = torch.float8_e4m3fn
NAN = (0x7F, 0xFF)
TINY = 2.0**-120
HUGE = 2.0**118  # from here on intermediate results may overflow float32


def product(a: Array, b: Array, relative: float = 0.0) -> tuple[Span, Array]:
    """a [M, K] @ b [N, K]^T with float32 sums in any order, and which elements cannot overflow on the way."""
    with np.errstate(all="ignore"):
        exact, size = a @ b.T, np.abs(a) @ np.abs(b).T
    return Span.of(exact, size * ((a.shape[1] + 8) * F32 + relative) + TINY), np.isnan(size) | (size < HUGE)


def with_bias(span: Span, bias: torch.Tensor | None) -> Span:
    """The bfloat16 result; the bias may be added before the rounding or after it."""
    if bias is None:
        return span.rounded(BF16)
    one, two = (each.plus(values(bias)).rounded(BF16) for each in (span, span.rounded(BF16)))
    return Span(np.minimum(one.low, two.low), np.maximum(one.high, two.high))


def payload(rng: Rng, *shape: int) -> torch.Tensor:
    codes = rng.codes(*shape, nan=NAN)
    return codes.view(FN) if rng.chance(0.5) else codes


def own_payload(rng: Rng, *shape: int) -> torch.Tensor:
    """Elements of the fp8 of the device."""
    return rng.codes(*shape, nan=NAN if own_fp8() == FN else (0x80,)).view(own_fp8())


def result_complaint(
    result: Any, after: Arguments, span: Span, judged: Array | bool, dtype: torch.dtype = BF16
) -> str | None:
    """What is wrong with a result that ``span`` holds as it is rounded, and that ``out`` is where it is given."""
    if result.dtype != dtype:
        return f"the result has dtype {result.dtype}"
    return first(is_given(result, after.get("out"), "out"), span.complaint("result", values(result), judged))


def mx_values(q: torch.Tensor, scale: torch.Tensor) -> Array:
    if q.dtype not in (FN, own_fp8(), torch.uint8) or scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError("these are no MX-FP8 operands")
    if q.shape[-1] != 32 * scale.shape[-1]:
        raise ValueError("scales do not fit")
    return values(q, FN) * np.repeat(e8m0(scale), 32, axis=-1)


def make_mxfp8(rng: Rng) -> Arguments:
    m, n = rng.pick((1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 48, 64, 65)), rng.pick((1, 5, 8, 16, 24, 33, 64))
    k = 32 * rng.pick((1, 2, 3, 4, 8, 12, 45))  # 45: rows of scales start between words
    return {
        "xq": rng.strided(payload(rng, m, k)), "x_scale": rng.as_scale_dtype(rng.strided(rng.scales(m, k // 32))),
        "wq": rng.strided(payload(rng, n, k)), "w_scale": rng.as_scale_dtype(rng.scales(n, k // 32)),
    }  # fmt: skip


def make_gemv(rng: Rng) -> Arguments:
    return {**make_mxfp8(rng), "out_dtype": rng.pick((BF16, BF16, BF16, torch.float16))}


def _linear(rng: Rng, given: Arguments) -> Arguments:
    m, n = given["xq"].shape[0], given["wq"].shape[0]
    bias, out = rng.finite(n, dtype=BF16), torch.full((m, n), 7.0, dtype=BF16)
    return {**given, "bias": rng.maybe(0.3, lambda: bias), "out": rng.maybe(0.3, lambda: out)}


def make_linear(rng: Rng) -> Arguments:
    return _linear(rng, make_mxfp8(rng))


def make_gemm(rng: Rng) -> Arguments:
    given = make_linear(rng)
    if rng.chance(0.3):
        m, k = rng.pick((100, 130, 257)), given["xq"].shape[1]
        given |= {"xq": payload(rng, m, k), "x_scale": rng.scales(m, k // 32), "out": None}
    return given


def judge_mxfp8(before: Arguments, result: Any, after: Arguments) -> str | None:
    if result is None:
        return None
    span, judged = product(mx_values(before["xq"], before["x_scale"]), mx_values(before["wq"], before["w_scale"]))
    dtype = before.get("out_dtype", BF16)
    return result_complaint(result, after, with_bias(span, before.get("bias")), judged, dtype)


def make_mxfp4(rng: Rng) -> Arguments:
    m, shuffled = rng.pick((1, 3, 8, 16, 17, 33, 300)), rng.chance(0.3)  # 300: tiles
    if shuffled:
        n, k = 16 * rng.integer(1, 3), 64 * rng.integer(1, 5)
    else:
        n, k = rng.pick((1, 8, 20, 48)), 32 * rng.integer(1, 9)
    wq, w_scale = rng.codes(n, k // 2), rng.scales(n, k // 32)
    if shuffled:
        wq, w_scale = shuffled_weight(wq), shuffled_scale(w_scale)
    given: Arguments = {"wq": wq, "w_scale": rng.as_scale_dtype(w_scale), "shuffled": shuffled}
    if rng.chance(0.2):  # activations that are not quantised
        return {"xq": rng.strided(rng.normal(m, k, dtype=BF16)), "x_scale": None, **given}
    return {
        "xq": rng.strided(rng.codes(m, k // 2)), "x_scale": rng.as_scale_dtype(rng.scales(m, k // 32)), **given,
    }  # fmt: skip


def make_mxfp4_gemm(rng: Rng) -> Arguments:
    return {**make_mxfp4(rng), "out_dtype": rng.pick((BF16, BF16, BF16, torch.float16))}


def make_mxfp4_linear(rng: Rng) -> Arguments:
    return _linear(rng, make_mxfp4(rng))


def judge_mxfp4(before: Arguments, result: Any, after: Arguments) -> str | None:
    if result is None:
        return None
    wq, w_scale = before["wq"], before["w_scale"]
    if bool(before.get("shuffled")):
        wq, w_scale = unshuffled(wq, w_scale)
    sides = []
    for q, scale in ((before["xq"], before["x_scale"]), (wq, w_scale)):
        if q is before["xq"] and scale is None and q.dtype == BF16:
            sides.append(values(q))
            continue
        if q.dtype not in (torch.uint8, torch.float4_e2m1fn_x2) or q.shape[-1] != 16 * scale.shape[-1]:
            raise ValueError("these are no MXFP4 operands")
        sides.append(fp4_values(q) * np.repeat(e8m0(scale), 32, axis=-1))
    span, judged = product(*sides)
    dtype = before.get("out_dtype", BF16)
    return result_complaint(result, after, with_bias(span, before.get("bias")), judged, dtype)


def make_skinny(rng: Rng) -> Arguments:
    m, n, k = rng.pick((1, 2, 5, 8, 9, 16, 20, 32)), rng.pick((2, 16, 34, 64)), 32 * rng.pick((1, 2, 8, 20))
    a, b = own_payload(rng, m, k), own_payload(rng, n, k)
    output = rng.finite(m, n, dtype=torch.float16)
    return {
        "a": rng.strided(a), "b": rng.strided(b).t(), "scale": torch.tensor([rng.pick((2.0**-12, 1e-4, 3e-5, 0.0))]),
        "output": rng.maybe(0.4, lambda: output), "split_k": rng.maybe(0.3, lambda: rng.integer(1, 9)),
        "deterministic": rng.chance(0.7),
    }  # fmt: skip


def judge_skinny(before: Arguments, result: Any, after: Arguments) -> str | None:
    a, b, scale = before["a"], before["b"], float(before["scale"].reshape(()))
    if a.dtype != b.dtype or not a.dtype.is_floating_point or a.dtype.itemsize != 1:
        raise ValueError("these are no fp8 operands")
    if result.dtype != torch.float16:
        return f"the result has dtype {result.dtype}"
    span, _ = product(values(a), values(b.t()))
    with np.errstate(all="ignore"):
        size = np.abs(values(a)) @ np.abs(values(b)) * abs(scale)
    span = span.times(np.float64(scale)).widened(2 * F32)
    output = before.get("output")
    if output is not None:
        start = values(output)
        span, size = span.plus(start).widened(2 * F32), size + np.abs(start)
    if not before.get("deterministic", True):  # an fp16 rounding for each of up to 16 splits and 16 consumers
        span = Span(span.low - size * 2.0**-3, span.high + size * 2.0**-3)
    elif output is not None:  # the product may be rounded before it is added
        span = Span(span.low - size * 2.0**-10, span.high + size * 2.0**-10)
    judged = np.isnan(size) | (size < 60000.0)
    complaint = span.widened(0.0, 2.0**-24).rounded(torch.float16).complaint("result", values(result), judged)
    return first(is_given(result, after.get("output"), "output"), complaint)


SCALES = ("one", "rows", "128", "128 e8m0", "32")


def fp8_scales(rng: Rng, kind: str, rows: int, n: int, k: int, experts: int | None = None) -> list[torch.Tensor]:
    """Scales of X [rows, K] and of W [n, K], or of each expert's."""
    lead = () if experts is None else (experts,)
    if kind in ("one", "rows"):
        alone = kind == "one"
        shapes = [(1,) if alone or rng.chance(0.2) else rng.pick(((rows,), (rows, 1)))]
        each = rng.pick((lead, (*lead, 1))) or (1,)
        shapes.append(each if alone else rng.pick(((*lead, n), (*lead, n, 1))))
    else:
        size = int(kind.split()[0])
        shapes = [(rows, -(-k // size)), (*lead, -(-n // size), -(-k // size))]
    if kind in ("128 e8m0", "32"):
        return [rng.as_scale_dtype(rng.scales(*shape)) for shape in shapes]
    scales = [rng.finite(*shape).abs() * 2.0**-6 for shape in shapes]
    if rng.chance(0.1):  # what a damaged checkpoint holds
        scales[rng.integer(0, 1)].view(-1)[:1] = rng.pick((math.nan, 0.0, -0.5))
    return scales


def make_fp8(rng: Rng) -> Arguments:
    """Operands of the scaled fp8 GEMM, with scales of each kind."""
    m, n, kind = rng.pick((1, 3, 16, 33, 64)), rng.pick((8, 17, 64, 130)), rng.pick(SCALES)
    k = 32 * rng.pick((1, 2, 5, 8)) if kind == "32" else rng.pick((16, 64, 72, 256, 300))
    payloads = [own_payload(rng, rows, k) for rows in (m, n)]
    scales = fp8_scales(rng, kind, m, n, k)
    dtype = rng.pick((BF16, torch.float16))
    return {
        "xq": rng.strided(payloads[0]), "x_scale": scales[0], "wq": payloads[1], "w_scale": scales[1],
        "out_dtype": dtype, "bias": rng.maybe(0.3, lambda: rng.finite(n, dtype=dtype)),
        "out": rng.maybe(0.3, lambda: torch.full((m, n), 7.0, dtype=dtype)),
    }  # fmt: skip


def block_of(k: int, n: int, w_scale: torch.Tensor) -> int:
    """How many rows of W, and elements of each, share a scale where more than one do."""
    return 32 if tuple(w_scale.shape) == (-(-n // 32), -(-k // 32)) and w_scale.dtype != torch.float32 else 128


def fp8_values(q: torch.Tensor, scale: torch.Tensor, height: int, size: int) -> np.ndarray:
    """Elements times their scales: one, one per row, or one for ``height`` rows and ``size`` of K."""
    real = values(scale) if scale.dtype == torch.float32 else e8m0(scale)
    if scale.numel() in (1, q.shape[0]) and (scale.dim() < 2 or scale.shape[1] == 1):
        grid = np.broadcast_to(real.reshape(-1, 1), q.shape)
    else:
        grid = np.repeat(np.repeat(real, size, axis=1)[:, : q.shape[1]], height, axis=0)[: q.shape[0]]
    return values(q, own_fp8()) * grid


def judge_fp8(before: Arguments, result: Any, after: Arguments) -> str | None:
    if result is None:
        return None
    n, k = before["wq"].shape
    size = block_of(k, n, before["w_scale"])
    heights = (("x", 1), ("w", size))
    sides = [fp8_values(before[f"{name}q"], before[f"{name}_scale"], height, size) for name, height in heights]
    span, judged = product(*sides, 8 * F32)
    if before.get("bias") is not None:
        span = span.plus(values(before["bias"])).widened(2 * F32)
    dtype = before.get("out_dtype", BF16)
    return result_complaint(result, after, span.rounded(dtype), judged, dtype)


def make_router(rng: Rng) -> Arguments:
    t, h, e = rng.pick((0, 1, 3, 17, 32, 33)), rng.pick((8, 24, 64, 200, 7)), rng.pick((1, 8, 31, 64))
    x = rng.normal(t, h, dtype=rng.pick((torch.float32, torch.float16, BF16)))
    w = rng.finite(e, h, dtype=rng.pick((torch.float32, BF16)))
    return {
        "x": rng.strided(x), "w": rng.strided(w), "bias": rng.maybe(0.3, lambda: rng.finite(e)),
        "out": rng.maybe(0.3, lambda: torch.full((t, e), 7.0)),
    }  # fmt: skip


def judge_router(before: Arguments, result: Any, after: Arguments) -> str | None:
    span, judged = product(values(before["x"]), values(before["w"]))
    if before.get("bias") is not None:
        span = span.plus(values(before["bias"])).widened(2 * F32)
    return result_complaint(result, after, span.rounded(torch.float32), judged, torch.float32)


def make_scaled_mm(rng: Rng) -> Arguments:
    m, k, n = rng.pick((1, 4, 16, 17)), rng.pick((16, 32, 48, 20)), rng.pick((16, 32, 9))
    one, two = rng.pick(((FN, FN), (torch.float8_e5m2, FN), (FN, torch.float8_e5m2)))
    a, b = (rng.finite(*shape).to(dtype) for shape, dtype in (((m, k), one), ((n, k), two)))
    scales = [torch.tensor(rng.pick((1.0, 0.5, 3e-3))) for _ in range(2)]
    return {
        "a": a, "b": b.t(), "scale_a": scales[0], "scale_b": scales[1].reshape(rng.pick(((), (1,), (1, 1)))),
        "out_dtype": rng.pick((BF16, torch.float32)), "use_fast_accum": rng.chance(0.3),
    }  # fmt: skip


def judge_scaled_mm(before: Arguments, result: Any, after: Arguments) -> str | None:
    factor = float(before["scale_a"].reshape(())) * float(before["scale_b"].reshape(()))
    span, judged = product(values(before["a"]), values(before["b"]).T)
    dtype = before.get("out_dtype", BF16)
    span = span.times(np.float64(factor)).widened(2.0**-8, 1e-30).rounded(dtype)
    return result_complaint(result, after, span, judged, dtype)


OPS = (
    Op("mxfp8_gemv", make_gemv, judge_mxfp8),
    Op("mxfp8_linear", make_linear, judge_mxfp8, writes=("out",)),
    Op("mxfp8_gemm", make_gemm, judge_mxfp8, writes=("out",)),
    Op("mxfp4_gemm", make_mxfp4_gemm, judge_mxfp4),
    Op("fp8_gemm", make_fp8, judge_fp8, writes=("out",)),
    Op("fp8_linear", make_fp8, judge_fp8, writes=("out",)),
    Op("mxfp4_linear", make_mxfp4_linear, judge_mxfp4, writes=("out",)),
    Op("skinny_gemm", make_skinny, judge_skinny, writes=("output",)),
    Op("router_gemm", make_router, judge_router, writes=("out",)),
    Op("scaled_mm", make_scaled_mm, judge_scaled_mm),
)
