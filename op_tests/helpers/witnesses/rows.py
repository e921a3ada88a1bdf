"""Reductions and scans: lane exchanges of every kind (DPP, permlane, bpermute, LDS)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .base import Approximate, Problem, Witness, integers, normal

# v_exp_f32, v_log_f32, v_rcp_f32, v_sqrt_f32 and v_rsq_f32 are within 1 ulp (2^-23); a chain of a few of them with an
# f32 sum of n terms stays within (n + 8) half-ulps.
ULP = 2.0**-23


@triton.jit
def reduce_rows(x_ptr, sum_ptr, max_ptr, argmax_ptr, min_ptr, xor_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    tl.store(sum_ptr + rows, tl.sum(x, axis=1))
    tl.store(max_ptr + rows, tl.max(x, axis=1))
    tl.store(argmax_ptr + rows, tl.argmax(x, axis=1))
    tl.store(min_ptr + rows, tl.min(x, axis=1))
    tl.store(xor_ptr + rows, tl.xor_sum(x.to(tl.int32), axis=1))


@triton.jit
def reduce_columns(x_ptr, sum_ptr, max_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :]).to(tl.float32)
    tl.store(sum_ptr + cols, tl.sum(x, axis=0))
    tl.store(max_ptr + cols, tl.max(x, axis=0))


@triton.jit
def softmax(x_ptr, y_ptr, N, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * stride + cols, e / tl.sum(e, axis=0), mask=cols < N)


@triton.jit
def _keep_last(a, b):
    return b


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def scans(x_ptr, sum_ptr, product_ptr, reverse_ptr, last_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    at = rows[:, None] * N + cols[None, :]
    x = tl.load(x_ptr + at)
    tl.store(sum_ptr + at, tl.cumsum(x, axis=1))
    tl.store(product_ptr + at, tl.associative_scan((x % 3) - 1, 1, _multiply))
    tl.store(reverse_ptr + at, tl.cumsum(x, axis=1, reverse=True))
    tl.store(last_ptr + at, tl.associative_scan(x, 0, _keep_last))


@triton.jit
def _welford(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    delta = mean_b - mean_a
    n = n_a + n_b
    share = tl.where(n == 0.0, 0.0, n_b / n)
    return mean_a + delta * share, m2_a + m2_b + delta * delta * n_a * share, n


@triton.jit
def welford_rows(x_ptr, mean_ptr, var_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :])
    mean, m2, n = tl.reduce((x, tl.zeros_like(x), tl.full(x.shape, 1.0, tl.float32)), 1, _welford)
    tl.store(mean_ptr + rows, mean)
    tl.store(var_ptr + rows, m2 / n)


@triton.jit
def histogram(x_ptr, y_ptr, N: tl.constexpr, BINS: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(y_ptr + tl.arange(0, BINS), tl.histogram(x, BINS))


def reduction_problem(rows: int, cols: int):
    def problem(arch: str, g: torch.Generator) -> Problem:
        x = torch.stack([torch.randperm(cols, generator=g) for _ in range(rows)]).float() - cols // 3
        i32 = torch.int32
        args = {"x_ptr": x, "M": rows, "N": cols}
        f32 = torch.float32
        outputs = {"sum_ptr": f32, "max_ptr": f32, "argmax_ptr": i32, "min_ptr": f32, "xor_ptr": i32}
        args |= {name: torch.zeros(rows, dtype=dtype) for name, dtype in outputs.items()}
        xor = torch.zeros(rows, dtype=i32)
        for column in x.to(i32).T:
            xor ^= column
        want = {"sum_ptr": x.sum(1), "max_ptr": x.amax(1), "argmax_ptr": x.argmax(1).to(i32), "min_ptr": x.amin(1)}
        return Problem(args, (1,), {**want, "xor_ptr": xor})

    return problem


def column_problem(arch: str, g: torch.Generator) -> Problem:
    x = integers(g, (64, 128), torch.bfloat16)
    args = {"x_ptr": x, "sum_ptr": torch.zeros(128), "max_ptr": torch.zeros(128), "M": 64, "N": 128}
    return Problem(args, (1,), {"sum_ptr": x.double().sum(0), "max_ptr": x.double().amax(0)})


def softmax_problem(dtype: torch.dtype, n: int, block: int):
    def problem(arch: str, g: torch.Generator) -> Problem:
        x = normal(g, (5, n), dtype) * 4
        y = torch.zeros((5, n))
        args = {"x_ptr": x, "y_ptr": y, "N": n, "stride": n, "BLOCK": block}
        # x - max is exact to 2^-24 * 32 absolutely, which e^x turns into a relative error of 2^-19.
        return Problem(args, (5,), {"y_ptr": torch.softmax(x.double(), 1)}, Approximate(2.0**-19 + 16 * ULP, 1e-30))

    return problem


def scan_problem(arch: str, g: torch.Generator) -> Problem:
    rows, cols = 8, 128
    x = torch.randint(0, 100, (rows, cols), generator=g, dtype=torch.int32)
    args = {"x_ptr": x, "M": rows, "N": cols}
    args |= {name: torch.zeros_like(x) for name in ("sum_ptr", "product_ptr", "reverse_ptr", "last_ptr")}
    want = {
        "sum_ptr": x.cumsum(1), "product_ptr": (x % 3 - 1).cumprod(1),
        "reverse_ptr": x.flip(1).cumsum(1).flip(1), "last_ptr": x,
    }  # fmt: skip
    return Problem(args, (1,), want)


def welford_problem(arch: str, g: torch.Generator) -> Problem:
    x = normal(g, (4, 256), torch.float32) + 10
    args = {"x_ptr": x, "mean_ptr": torch.zeros(4), "var_ptr": torch.zeros(4), "M": 4, "N": 256}
    want = {"mean_ptr": x.double().mean(1), "var_ptr": x.double().var(1, unbiased=False)}
    # Eight combining levels of a few roundings each, all of terms below 16.
    return Problem(args, (1,), want, Approximate(0.0, 8 * 8 * 16 * ULP))


def histogram_problem(arch: str, g: torch.Generator) -> Problem:
    x = torch.randint(0, 64, (512,), generator=g, dtype=torch.int32)
    args = {"x_ptr": x, "y_ptr": torch.zeros(64, dtype=torch.int32), "N": 512, "BINS": 64}
    return Problem(args, (1,), {"y_ptr": torch.bincount(x, minlength=64)})


def witnesses() -> list[Witness]:
    """Every reduction and scan."""
    exchange, barrier, exp = ({"": (x,)} for x in ("dpp|permlane|bpermute|swizzle", "s_barrier", "v_exp_f32"))
    one, two, four = ({"num_warps": n} for n in (1, 2, 4))
    return [
        Witness("reduce_one_wave", reduce_rows, reduction_problem(8, 64), options=one, contains=exchange),
        Witness("reduce_across_waves", reduce_rows, reduction_problem(2, 512), options=four, contains=barrier),
        Witness("reduce_columns", reduce_columns, column_problem, options=four),
        Witness("softmax_f32", softmax, softmax_problem(torch.float32, 1000, 1024), options=four, contains=exp),
        Witness("softmax_bf16_one_wave", softmax, softmax_problem(torch.bfloat16, 100, 128), options=one),
        Witness("scans", scans, scan_problem, options=two),
        Witness("welford", welford_rows, welford_problem, options=four),
        Witness("histogram", histogram, histogram_problem, options=four, contains={"": ("ds_add",)}),
    ]
