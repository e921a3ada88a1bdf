"""Flash attention, forward and backward, with a causal mask and several heads."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .base import Approximate, Omission, Problem, Witness, normal

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def flash_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, T, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; lse is the natural logarithm of each row's sum of exponentials."""
    start, head = tl.program_id(0) * BLOCK_M, tl.program_id(1) * T
    rows, d, ns = start + tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, BLOCK_N)
    q = tl.load(q_ptr + (head + rows)[:, None] * D + d[None, :])
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for first in range(0, start + BLOCK_M, BLOCK_N):
        cols = first + ns
        k = tl.load(k_ptr + (head + cols)[:, None] * D + d[None, :])
        s = tl.dot(q, tl.trans(k)) * (scale * LOG2E)
        s = tl.where(rows[:, None] >= cols[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        v = tl.load(v_ptr + (head + cols)[:, None] * D + d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(o_ptr + (head + rows)[:, None] * D + d[None, :], acc / total[:, None])
    tl.store(lse_ptr + head + rows, (top + tl.log2(total)) / LOG2E)


@triton.jit
def flash_backward(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, T, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """One block of keys of one head: dk and dv in registers, its share of dq added to what other programs add."""
    start, head = tl.program_id(0) * BLOCK_N, tl.program_id(1) * T
    cols, d, ms = start + tl.arange(0, BLOCK_N), tl.arange(0, D), tl.arange(0, BLOCK_M)
    k = tl.load(k_ptr + (head + cols)[:, None] * D + d[None, :])
    v = tl.load(v_ptr + (head + cols)[:, None] * D + d[None, :])
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    for first in range(start // BLOCK_M * BLOCK_M, T, BLOCK_M):
        rows = first + ms
        at = (head + rows)[:, None] * D + d[None, :]
        q, do = tl.load(q_ptr + at), tl.load(do_ptr + at)
        s = tl.dot(q, tl.trans(k)) * (scale * LOG2E)
        p = tl.exp2(s - tl.load(lse_ptr + head + rows)[:, None] * LOG2E)
        p = tl.where(rows[:, None] >= cols[None, :], p, 0.0)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv)
        ds = p * (tl.dot(do, tl.trans(v)) - tl.load(delta_ptr + head + rows)[:, None]) * scale
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk)
        dq = tl.dot(ds.to(k.dtype), k)
        if ATOMIC:
            tl.atomic_add(dq_ptr + at, dq, sem="relaxed")
        else:
            tl.store(dq_ptr + at, tl.load(dq_ptr + at) + dq)
    tl.store(dk_ptr + (head + cols)[:, None] * D + d[None, :], dk)
    tl.store(dv_ptr + (head + cols)[:, None] * D + d[None, :], dv)


def attention(
    g: torch.Generator, heads: int, t: int, d: int, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """(inputs and the backward pass's helpers, float64 results, scale): causal attention on normal data."""
    q, k, v, do = (normal(g, (heads, t, d), dtype) for _ in range(4))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scale = 1 / math.sqrt(d)
    s = (leaves[0] @ leaves[1].transpose(1, 2)) * scale
    s = s.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
    o, lse = torch.softmax(s, 2) @ leaves[2], torch.logsumexp(s, 2)
    dq, dk, dv = torch.autograd.grad(o, leaves, do.double())
    delta = (o.detach() * do.double()).sum(2)
    inputs = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "do_ptr": do, "lse_ptr": lse.detach().float(),
              "delta_ptr": delta.float()}  # fmt: skip
    return inputs, {"o_ptr": o.detach(), "lse_ptr": lse.detach(), "dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv}, scale


def rounding(dtype: torch.dtype) -> float:
    """Half an ulp of `dtype`, relative: what storing p or ds in it loses."""
    return torch.finfo(dtype).eps / 2


def forward_problem(dtype: torch.dtype, heads: int, t: int, d: int, block: tuple[int, int]):
    def problem(arch: str, g: torch.Generator) -> Problem:
        inputs, want, scale = attention(g, heads, t, d, dtype)
        args = {name: inputs[name] for name in ("q_ptr", "k_ptr", "v_ptr")}
        args |= {"o_ptr": torch.zeros(heads, t, d), "lse_ptr": torch.zeros(heads, t), "T": t, "scale": scale, "D": d,
                 "BLOCK_M": block[0], "BLOCK_N": block[1]}  # fmt: skip
        # Rows of p sum to 1 and |v| stays below 6, so rounding p moves an element of o by 6 half-ulps at most.
        bound = Approximate(2.0**-18, 6 * rounding(dtype))
        return Problem(args, (t // block[0], heads), {name: want[name] for name in ("o_ptr", "lse_ptr")}, bound)

    return problem


def backward_problem(dtype: torch.dtype, heads: int, t: int, d: int, block: tuple[int, int]):
    def problem(arch: str, g: torch.Generator) -> Problem:
        inputs, want, scale = attention(g, heads, t, d, dtype)
        outputs = {name: want[name] for name in ("dq_ptr", "dk_ptr", "dv_ptr")}
        args = {**inputs, **{name: torch.zeros(heads, t, d) for name in outputs}, "T": t, "scale": scale, "D": d,
                "BLOCK_M": block[0], "BLOCK_N": block[1], "ATOMIC": True}  # fmt: skip
        # p and ds are rounded before their products: with |do|, |q|, |k| < 6, sum |p| over a row = 1 and over a column
        # below 8, |ds| < 8 |p|, an element moves by at most 6 * 8 * 8 half-ulps.
        return Problem(args, (t // block[1], heads), outputs, Approximate(2.0**-16, 384 * rounding(dtype)))

    return problem


def witnesses() -> list[Witness]:
    """Every attention witness."""
    unatomic = Omission("plain_sum_of_dq", {"ATOMIC": False}, "global race")
    four, two = {"num_warps": 4}, {"num_warps": 2}
    f16, bf16 = torch.float16, torch.bfloat16
    exchange = {"": ("mfma", "ds_write", "ds_read", "s_barrier")}
    adds = {"": ("mfma", "atomic_(pk_)?add_f32|atomic_cmpswap")}
    return [
        Witness("flash_forward_f16", flash_forward, forward_problem(f16, 2, 128, 64, (64, 32)), options=four,
                contains=exchange),
        Witness("flash_forward_bf16_pipelined", flash_forward, forward_problem(bf16, 1, 192, 32, (64, 64)),
                options={"num_warps": 4, "num_stages": 3}, contains=exchange),
        Witness("flash_backward_f16", flash_backward, backward_problem(f16, 2, 64, 64, (32, 32)), options=four,
                contains=adds, broken=(unatomic,)),
        Witness("flash_backward_bf16", flash_backward, backward_problem(bf16, 1, 96, 32, (32, 32)), options=two,
                contains=adds, broken=(unatomic,)),
    ]  # fmt: skip
