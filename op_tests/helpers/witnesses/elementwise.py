"""Element-wise arithmetic, transcendental functions, conversions and bit operations."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .base import EXACT, GFX942, GFX950, Approximate, Problem, Witness, normal

ULP = 2.0**-23


@triton.jit
def transcendental(x_ptr, exp_ptr, exp2_ptr, log_ptr, log2_ptr, sqrt_ptr, rsqrt_ptr, sigmoid_ptr, erf_ptr, sin_ptr,
                   N, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    x = tl.load(x_ptr + at, mask=mask, other=1.0)
    tl.store(exp_ptr + at, tl.exp(x), mask=mask)
    tl.store(exp2_ptr + at, tl.exp2(x), mask=mask)
    tl.store(log_ptr + at, tl.log(x), mask=mask)
    tl.store(log2_ptr + at, tl.log2(x), mask=mask)
    tl.store(sqrt_ptr + at, tl.sqrt(x), mask=mask)
    tl.store(rsqrt_ptr + at, tl.rsqrt(x), mask=mask)
    tl.store(sigmoid_ptr + at, tl.sigmoid(x), mask=mask)
    tl.store(erf_ptr + at, tl.erf(x), mask=mask)
    tl.store(sin_ptr + at, tl.sin(x), mask=mask)


@triton.jit
def exact_float(x_ptr, y_ptr, div_ptr, root_ptr, fma_ptr, floor_ptr, low_ptr, high_ptr, clamp_ptr, abs_ptr, N,
                BLOCK: tl.constexpr):  # fmt: skip
    at = tl.arange(0, BLOCK)
    mask = at < N
    x = tl.load(x_ptr + at, mask=mask, other=1.0)
    y = tl.load(y_ptr + at, mask=mask, other=1.0)
    tl.store(div_ptr + at, tl.div_rn(x, y), mask=mask)
    tl.store(root_ptr + at, tl.sqrt_rn(tl.abs(x)), mask=mask)
    tl.store(fma_ptr + at, tl.fma(x, y, x), mask=mask)
    tl.store(floor_ptr + at, tl.floor(x) + tl.ceil(y), mask=mask)
    tl.store(low_ptr + at, tl.minimum(x, y), mask=mask)
    tl.store(high_ptr + at, tl.maximum(x, y), mask=mask)
    tl.store(clamp_ptr + at, tl.clamp(x, -0.5, 0.75), mask=mask)
    tl.store(abs_ptr + at, tl.where(x > y, tl.abs(x), -y), mask=mask)


@triton.jit
def integer_ops(x_ptr, y_ptr, div_ptr, mod_ptr, high_ptr, shift_ptr, bits_ptr, wide_ptr, unsigned_ptr,
                BLOCK: tl.constexpr):  # fmt: skip
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    tl.store(div_ptr + at, x // y)
    tl.store(mod_ptr + at, x % y)
    tl.store(high_ptr + at, tl.umulhi(x.to(tl.uint32), y.to(tl.uint32)).to(tl.int32))
    tl.store(shift_ptr + at, (x << (y & 15)) ^ (x >> (y & 7)))
    tl.store(bits_ptr + at, (x & y) | (~x ^ (y | 5)))
    tl.store(wide_ptr + at, x.to(tl.int64) * y.to(tl.int64) + (x.to(tl.int64) << 20) - y)
    tl.store(unsigned_ptr + at, (x.to(tl.uint32) // y.to(tl.uint32)).to(tl.int32))


@triton.jit
def short_ops(x_ptr, y_ptr, sum_ptr, product_ptr, shift_ptr, pick_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    tl.store(sum_ptr + at, x + y * 3)
    tl.store(product_ptr + at, x * y - (x & y))
    tl.store(shift_ptr + at, (x << 3) | (y >> 2))
    tl.store(pick_ptr + at, tl.where((x > y) & (x != 5), x, tl.maximum(y, x // 2 * 2)))


@triton.jit
def convert(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N)
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < N)


@triton.jit
def quantize_rows(x_ptr, q_ptr, scale_ptr, N: tl.constexpr, LIMIT: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, N)
    x = tl.load(x_ptr + row * N + cols).to(tl.float32)
    top = tl.max(tl.abs(x), axis=0)
    scale = tl.exp2(tl.ceil(tl.log2(top / LIMIT)))
    tl.store(q_ptr + row * N + cols, (x / scale).to(q_ptr.dtype.element_ty))
    tl.store(scale_ptr + row, scale)


@triton.jit
def double_math(x_ptr, y_ptr, sum_ptr, div_ptr, root_ptr, int_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    tl.store(sum_ptr + at, x * y + x)
    tl.store(div_ptr + at, x / y)
    tl.store(root_ptr + at, tl.sqrt(tl.abs(x)))
    tl.store(int_ptr + at, (x * 100.0).to(tl.int32))


@triton.jit
def divide(x_ptr, y_ptr, o_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    # f64 has no div_rn: its `/` is correctly rounded.
    tl.store(o_ptr + at, x / y if x.dtype == tl.float64 else tl.div_rn(x, y))


@triton.jit
def half_math(x_ptr, y_ptr, o_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    tl.store(o_ptr + at, tl.where(x > y, x * y, x + y))


@triton.jit
def random_bits(y_ptr, seed, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.randint(seed, at))


@triton.jit
def device_library(x_ptr, tanh_ptr, pow_ptr, expm1_ptr, log1p_ptr, atan_ptr, cos_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(tanh_ptr + at, libdevice.tanh(x))
    tl.store(pow_ptr + at, libdevice.pow(tl.abs(x), 1.5))
    tl.store(expm1_ptr + at, libdevice.expm1(x))
    tl.store(log1p_ptr + at, libdevice.log1p(tl.abs(x)))
    tl.store(atan_ptr + at, libdevice.atan(x))
    tl.store(cos_ptr + at, libdevice.cos(x))


def transcendental_problem(arch: str, g: torch.Generator) -> Problem:
    n = 1000
    x = torch.rand(n, generator=g) * 20 + 0.01
    d = x.double()
    want = {
        "exp_ptr": d.exp(), "exp2_ptr": d.exp2(), "log_ptr": d.log(), "log2_ptr": d.log2(), "sqrt_ptr": d.sqrt(),
        "rsqrt_ptr": d.rsqrt(), "sigmoid_ptr": d.sigmoid(), "erf_ptr": d.erf(), "sin_ptr": d.sin(),
    }  # fmt: skip
    args = {"x_ptr": x, "N": n, "BLOCK": 256} | {name: torch.zeros(n) for name in want}
    # exp(x) = exp2(x * log2 e) rounds its argument, up to 29, to 2^-20 absolutely; the others are within a few ulp, sin
    # reduces by a two-term pi (absolute error of an ulp of x), log near 1 by an ulp of its own argument.
    return Problem(args, (triton.cdiv(n, 256),), want, Approximate(2.0**-19, 32 * ULP))


def edge_floats(g: torch.Generator, n: int) -> torch.Tensor:
    """Normal values with denormals, infinities, zeros of both signs and extremes in front."""
    special = [0.0, -0.0, float("inf"), -float("inf"), 1e-40, -1e-40, 1.5, -2.5, 0.5, 3.4e38, 1.2e-38, 0.3]
    head = torch.tensor(special)
    return torch.cat([head, torch.randn(n - len(special), generator=g) * 3])


def exact_float_problem(arch: str, g: torch.Generator) -> Problem:
    n = 500
    x = edge_floats(g, n)
    y = edge_floats(g, n).roll(5)
    y[y == 0] = 0.7
    bad = torch.isinf(x) & torch.isinf(y)  # keep NaN out: its payload is not compared
    y[bad] = 2.0
    a, b = x.double(), y.double()
    want = {
        "div_ptr": a / b, "root_ptr": a.abs().sqrt(), "fma_ptr": a * b + a,
        "floor_ptr": a.floor() + b.ceil(), "low_ptr": torch.minimum(a, b), "high_ptr": torch.maximum(a, b),
        "clamp_ptr": a.clamp(-0.5, 0.75), "abs_ptr": torch.where(a > b, a.abs(), -b),
    }  # fmt: skip
    args = {"x_ptr": x, "y_ptr": y, "N": n, "BLOCK": 512} | {name: torch.zeros(n) for name in want}
    return Problem(args, (1,), want)


def integer_problem(arch: str, g: torch.Generator) -> Problem:
    n = 256
    x = torch.randint(-(2**31), 2**31, (n,), generator=g).to(torch.int32)
    y = torch.randint(1, 2**16, (n,), generator=g).to(torch.int32)
    a, b = x.long(), y.long()
    unsigned = a & 0xFFFFFFFF
    quotient = torch.div(a, b, rounding_mode="trunc")
    wrap = lambda v: ((v + 2**31) % 2**32 - 2**31).to(torch.int32)
    want = {
        "div_ptr": quotient, "mod_ptr": a - quotient * b, "high_ptr": wrap(unsigned * b >> 32),
        "shift_ptr": wrap(a << (b & 15)) ^ (x >> (y & 7)), "bits_ptr": (x & y) | (~x ^ (y | 5)),
        "wide_ptr": a * b + (a << 20) - b, "unsigned_ptr": wrap(unsigned // b),
    }  # fmt: skip
    args = {"x_ptr": x, "y_ptr": y, "BLOCK": n}
    args |= {name: torch.zeros(n, dtype=torch.int64 if name == "wide_ptr" else torch.int32) for name in want}
    return Problem(args, (1,), want)


def short_problem(dtype: torch.dtype):
    def problem(arch: str, g: torch.Generator) -> Problem:
        info = torch.iinfo(dtype)
        x, y = (torch.randint(info.min, info.max + 1, (1024,), generator=g).to(dtype) for _ in range(2))
        a, b = x.long(), y.long()
        half = torch.div(a, 2, rounding_mode="trunc") * 2
        want = {
            "sum_ptr": a + b * 3, "product_ptr": a * b - (a & b), "shift_ptr": (a << 3) | (b >> 2),
            "pick_ptr": torch.where((a > b) & (a != 5), a, torch.maximum(b, half)),
        }  # fmt: skip
        want = {name: value.to(dtype) for name, value in want.items()}
        args = {"x_ptr": x, "y_ptr": y, "BLOCK": 512} | {name: torch.zeros_like(x) for name in want}
        return Problem(args, (2,), want)

    return problem


FP8 = {GFX950: (torch.float8_e4m3fn, torch.float8_e5m2), GFX942: (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)}


def conversion_problem(source: torch.dtype | int, target: torch.dtype | int):
    """An integer names the architecture's own fp8 (0) or bf8 (1)."""

    def problem(arch: str, g: torch.Generator) -> Problem:
        src = FP8[arch][source] if isinstance(source, int) else source
        dst = FP8[arch][target] if isinstance(target, int) else target
        if isinstance(source, int):  # every code but NaN and the infinities
            codes = torch.arange(256).to(torch.uint8).view(src)
            x = codes[torch.isfinite(codes.float())]
        elif src.is_floating_point:
            limit = min(torch.finfo(dst).max if dst.is_floating_point else 1e9, 1e4)
            values = torch.randn(2000, generator=g, dtype=torch.float64) * torch.exp2(
                torch.randint(-20, 10, (2000,), generator=g).double()
            )
            x = values.clamp(-limit, limit).to(src)
        else:
            x = torch.randint(-(2**24), 2**24, (2000,), generator=g).to(src)
        n = x.numel()
        if dst.is_floating_point:
            want = x.double().to(torch.float32).to(dst) if src != torch.float64 else x.to(dst)
        else:
            want = x.double().trunc().to(dst)
        args = {"x_ptr": x, "y_ptr": torch.zeros(n, dtype=dst), "N": n, "BLOCK": 512}
        return Problem(args, (triton.cdiv(n, 512),), {"y_ptr": want}, EXACT)

    return problem


def quantize_problem(kind: int):
    def problem(arch: str, g: torch.Generator) -> Problem:
        rows, n = 4, 256
        dtype = FP8[arch][kind]
        limit = torch.finfo(dtype).max
        x = normal(g, (rows, n), torch.bfloat16)
        # bf16 maxima are far enough from the powers of two that one ulp of log2 cannot move the ceiling, except on
        # them: make the maximum 1.25 * limit * 2^k.
        x[:, 0] = 1.25 * limit / 2.0 ** torch.arange(2, 6)
        x = x.to(torch.bfloat16)
        scale = torch.exp2(torch.ceil(torch.log2(x.double().abs().amax(1) / limit)))
        want = (x.double() / scale[:, None]).float().to(dtype)
        args = {"x_ptr": x, "q_ptr": torch.zeros((rows, n), dtype=dtype), "scale_ptr": torch.zeros(rows),
                "N": n, "LIMIT": limit}  # fmt: skip
        return Problem(args, (rows,), {"q_ptr": want, "scale_ptr": scale})

    return problem


def double_problem(arch: str, g: torch.Generator) -> Problem:
    n = 256
    x = torch.randint(-1000, 1000, (n,), generator=g).double() / 64
    y = torch.randint(1, 1000, (n,), generator=g).double() / 32
    # torch's own double square root is not correctly rounded everywhere; the machine code's is.
    root = torch.tensor([math.sqrt(abs(value)) for value in x.tolist()], dtype=torch.float64)
    want = {"sum_ptr": x * y + x, "div_ptr": x / y, "root_ptr": root, "int_ptr": (x * 100).trunc().int()}
    args = {"x_ptr": x, "y_ptr": y, "BLOCK": n} | {name: torch.zeros_like(value) for name, value in want.items()}
    return Problem(args, (1,), want)


def division_problem(dtype: torch.dtype):
    """Random bit patterns: quotients far beyond the range, denormal operands and denormal results are all common."""
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]

    def problem(arch: str, g: torch.Generator) -> Problem:
        n, info = 1 << 15, torch.iinfo(integer)
        x, y = (torch.randint(info.min, info.max, (n,), generator=g, dtype=integer).view(dtype) for _ in range(2))
        args = {"x_ptr": x, "y_ptr": y, "o_ptr": torch.zeros_like(x), "BLOCK": 1024}
        return Problem(args, (n // 1024,), {"o_ptr": x / y})

    return problem


def half_problem(dtype: torch.dtype):
    def problem(arch: str, g: torch.Generator) -> Problem:
        x, y = normal(g, (1024,), dtype), normal(g, (1024,), dtype)
        want = torch.where(x > y, x.double() * y.double(), x.double() + y.double())
        return Problem({"x_ptr": x, "y_ptr": y, "o_ptr": torch.zeros_like(x), "BLOCK": 1024}, (1,), {"o_ptr": want})

    return problem


def philox(seed: int, counter: int) -> int:
    """The first word of Philox 4x32-10 with key (seed, 0) and counter (counter, 0, 0, 0)."""
    c = [counter, 0, 0, 0]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


def random_problem(arch: str, g: torch.Generator) -> Problem:
    want = torch.tensor([philox(1234, i) for i in range(128)]).to(torch.int32)
    args = {"y_ptr": torch.zeros(128, dtype=torch.int32), "seed": 1234, "BLOCK": 128}
    return Problem(args, (1,), {"y_ptr": want})


def library_problem(arch: str, g: torch.Generator) -> Problem:
    x = torch.randn(256, generator=g) * 3
    d = x.double()
    want = {"tanh_ptr": d.tanh(), "pow_ptr": d.abs() ** 1.5, "expm1_ptr": d.expm1(), "log1p_ptr": d.abs().log1p(),
            "atan_ptr": d.atan(), "cos_ptr": d.cos()}  # fmt: skip
    args = {"x_ptr": x, "BLOCK": 256} | {name: torch.zeros(256) for name in want}
    # OpenCL's bounds: at most 16 ulp (pow); absolute near the zeros of cos and of expm1 for small results.
    return Problem(args, (1,), want, Approximate(16 * ULP, 4 * ULP))


def witnesses() -> list[Witness]:
    """Every element-wise witness."""
    wide = (torch.float32, torch.bfloat16, torch.float16)
    names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int32: "i32", 0: "fp8", 1: "bf8",
             torch.float64: "f64"}  # fmt: skip
    approximate = ("v_exp_f32", "v_log_f32", "v_sqrt_f32")
    found = [
        Witness("transcendental", transcendental, transcendental_problem, contains={"": approximate}),
        Witness("exact_float", exact_float, exact_float_problem, contains={"": ("v_div_fixup_f32", "v_fma")}),
        Witness("integer_ops", integer_ops, integer_problem, contains={"": ("v_mul_hi_u32",)}),
        Witness("short_ops_i16", short_ops, short_problem(torch.int16)),
        Witness("short_ops_u8", short_ops, short_problem(torch.uint8)),
        Witness("short_ops_i8", short_ops, short_problem(torch.int8)),
        Witness("double_math", double_math, double_problem, contains={"": ("v_div_fixup_f64",)}),
        Witness("divide_f32", divide, division_problem(torch.float32), contains={"": ("v_div_scale_f32",)}),
        Witness("divide_f64", divide, division_problem(torch.float64), contains={"": ("v_div_scale_f64",)}),
        Witness("half_math_f16", half_math, half_problem(torch.float16)),
        Witness("half_math_bf16", half_math, half_problem(torch.bfloat16)),
        Witness("random_bits", random_bits, random_problem),
        Witness("device_library", device_library, library_problem),
        Witness("quantize_fp8", quantize_rows, quantize_problem(0), contains={"": ("cvt_.*fp8_f32",)}),
        Witness("quantize_bf8", quantize_rows, quantize_problem(1), contains={"": ("cvt_.*bf8_f32",)}),
    ]  # fmt: skip
    for small in (0, 1):
        for other in wide:
            for pair in ((small, other), (other, small)):
                name = f"convert_{names[pair[0]]}_to_{names[pair[1]]}"
                found.append(Witness(name, convert, conversion_problem(*pair)))
    for pair in ((torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float16, torch.float32),
                 (torch.bfloat16, torch.float32), (torch.int32, torch.float32), (torch.float32, torch.int32),
                 (torch.float64, torch.float32)):  # fmt: skip
        found.append(Witness(f"convert_{names[pair[0]]}_to_{names[pair[1]]}", convert, conversion_problem(*pair)))
    return found
