"""RoPE with the cache write, gating, sorted slots, the sum over experts and the router's product beside Triton kernels.

The Triton kernels are those of hipforge.ops.triton.{rope_and_cache,routing}: the same job in one launch each. The
operands of a decode step are small and stay in the caches of a GPU; nothing is rotated past them. See helpers/bench.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from helpers import bench, errors

from hipforge.ops import reference
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.moe_align import moe_align_block_size
from hipforge.ops.moe_combine import moe_combine
from hipforge.ops.rope_and_cache import rope_and_cache
from hipforge.ops.router_gemm import router_gemm
from hipforge.ops.topk_gating import topk_gating
from hipforge.ops.triton import rope_and_cache as triton_rope
from hipforge.ops.triton import routing

Results = tuple[torch.Tensor, ...]
BLOCK_M = 64
# Sums in another order and functions one unit off change the last bits; fp8 codes and ids differ rarely.
MAX_ERROR = 2e-3


def problem(
    op: str,
    shape: str,
    ours: Callable[[], Results],
    triton: Callable[[Any], Results],
    wanted: Callable[[], Results],
) -> bench.Problem:
    """Return a case: ``ours()`` and ``triton(bind)`` run one call each, ``wanted()`` the reference's."""
    want, bind = wanted(), bench.triton_binder()
    calls = {"hipforge": lambda _: ours(), "triton": lambda _: triton(bind)}
    return bench.Problem({"op": op, "shape": shape}, calls, lambda got: error_of(got, want))


def rope_case(tokens: int, q_heads: int, kv_heads: int, rotary: int, norm: bool, device: str) -> bench.Problem:
    """Return a decode step's q, k and v of heads of 128, into a paged fp8 cache with a scale per tensor."""
    dim, page_size = 128, 64
    fp8 = fp8_dtypes(device)[0]
    heads = q_heads + 2 * kv_heads
    q, k, v = torch.randn(tokens, heads, dim, device=device).bfloat16().split((q_heads, kv_heads, kv_heads), dim=1)
    pages = -(-tokens // page_size) + 1
    shape = (pages, page_size, kv_heads, dim)
    caches = [torch.zeros(shape, dtype=torch.uint8, device=device).view(fp8) for _ in "kv"]
    table = torch.randn(4096, rotary, device=device)
    positions = torch.randint(0, 4096, (tokens,), device=device)
    slots = torch.randperm(pages * page_size, device=device)[:tokens]
    weight = torch.randn(dim, device=device).bfloat16() if norm else None
    q_out = torch.empty(tokens, q_heads, dim, dtype=torch.bfloat16, device=device)
    scale = torch.full((1,), 0.02, device=device)
    operands = (q, k, v, table, positions, *caches, slots)
    shared: dict[str, Any] = {
        "q_weight": weight, "k_weight": weight, "weight_offset": 1.0, "epsilon": 1e-6,
        "k_scale": scale, "v_scale": scale,
    }  # fmt: skip

    def ours() -> Results:
        return rope_and_cache(*operands, **shared, q_out=q_out), *caches

    def triton(bind: Any) -> Results:
        triton_rope.rope_and_cache(
            q_out, *operands, interleaved=False, k_scale_shift=None, v_scale_shift=None, fp8_dtype=fp8, bind=bind,
            **shared,
        )  # fmt: skip
        return q_out, *caches

    def wanted() -> Results:
        own = [cache.clone() for cache in caches]
        turned = reference.rope_and_cache(*operands[:5], *own, slots, fp8_dtype=fp8, **shared)
        return turned, *own

    shape = f"{'norm, ' if norm else ''}T={tokens} Hq={q_heads} Hkv={kv_heads} rotary={rotary}"
    return problem("rope_and_cache", shape, ours, triton, wanted)


def gating_case(tokens: int, experts: int, k: int, groups: tuple[int, int] | None, device: str) -> bench.Problem:
    """Return sigmoid scores with a bias, as in DeepSeek (groups) and MiniMax-M3."""
    logits = torch.randn(tokens, experts, device=device)
    bias = torch.randn(experts, device=device) * 0.1
    weights = torch.empty(tokens, k, device=device)
    ids = torch.empty(tokens, k, dtype=torch.int32, device=device)
    split = (1, 1) if groups is None else groups
    grouped = {} if groups is None else {"groups": groups[0], "topk_groups": groups[1]}

    def triton(bind: Any) -> Results:
        routing.topk_gating(weights, ids, logits, bias, k, True, True, *split, 2.5, 0, bind=bind)
        return weights, ids

    return problem(
        "topk_gating", f"T={tokens} E={experts} k={k}" + (f" groups={split[1]}/{split[0]}" if groups else ""),
        lambda: topk_gating(logits, k, scoring="sigmoid", bias=bias, scale=2.5, out=weights, ids_out=ids, **grouped),
        triton,
        lambda: reference.topk_gating(logits, k, scoring="sigmoid", bias=bias, scale=2.5, **grouped),
    )  # fmt: skip


def align_case(tokens: int, top_k: int, experts: int, device: str) -> bench.Problem:
    """Return the slots of random distinct experts."""
    ids = torch.rand(tokens, experts, device=device).topk(top_k).indices.to(torch.int32)
    out = moe_align_block_size(ids, BLOCK_M, experts)

    def triton(bind: Any) -> Results:
        routing.moe_align_block_size(*out, ids, None, BLOCK_M, experts, bind=bind)
        return out

    return problem(
        "moe_align_block_size", f"T={tokens} k={top_k} E={experts} block_m={BLOCK_M}",
        lambda: moe_align_block_size(ids, BLOCK_M, experts, out=out), triton,
        lambda: reference.moe_align_block_size(ids, BLOCK_M, experts),
    )  # fmt: skip


def combine_case(tokens: int, top_k: int, n: int, device: str) -> bench.Problem:
    """Return bf16 rows of all slots, weighted."""
    rows = torch.randn(tokens * top_k, n, device=device).bfloat16()
    weights = torch.rand(tokens, top_k, device=device)
    ids = torch.randint(0, 128, (tokens, top_k), device=device, dtype=torch.int32)
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device=device)

    def triton(bind: Any) -> Results:
        routing.moe_combine(out, rows, weights, ids, None, top_k, 128, bind=bind)
        return (out,)

    return problem(
        "moe_combine", f"T={tokens} k={top_k} N={n}",
        lambda: (moe_combine(rows, weights, ids, out=out, num_experts=128),), triton,
        lambda: (reference.moe_combine(rows, top_k, weights, ids, num_experts=128),),
    )  # fmt: skip


def router_case(tokens: int, hidden: int, experts: int, w_dtype: torch.dtype, device: str) -> bench.Problem:
    """Return bf16 activations times a router's weight."""
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    w = (torch.randn(experts, hidden, device=device) * hidden**-0.5).to(w_dtype)
    out = torch.empty(tokens, experts, device=device)

    def triton(bind: Any) -> Results:
        routing.router_gemm(out, x, w, None, bind=bind)
        return (out,)

    name = str(w_dtype).removeprefix("torch.")
    return problem(
        "router_gemm", f"T={tokens} H={hidden} E={experts} w={name}", lambda: (router_gemm(x, w, out=out),), triton,
        lambda: (reference.router_gemm(x, w),),
    )  # fmt: skip


def cases(device: str) -> Iterator[bench.Problem]:
    """Yield the cases, those of MiniMax-M3 (TP8), Llama-405B (TP8) and DeepSeek among them."""
    for tokens in (1, 32):
        yield rope_case(tokens, 8, 1, 64, True, device)
        yield rope_case(tokens, 16, 1, 128, False, device)
    for tokens in (1, 32):
        yield gating_case(tokens, 128, 4, None, device)
        yield gating_case(tokens, 256, 8, (8, 4), device)
    for tokens in (1, 32):
        yield align_case(tokens, 4, 128, device)
    yield align_case(64, 8, 256, device)
    for tokens in (1, 32):
        yield combine_case(tokens, 4, 6144, device)
    for tokens in (1, 8, 32):
        yield router_case(tokens, 6144, 128, torch.float32, device)
    yield router_case(1, 6144, 256, torch.bfloat16, device)


def error_of(got: Results, want: Results) -> float:
    """Return the largest relative Frobenius error of the results, or the share of integers that differ."""

    def error(one: torch.Tensor, other: torch.Tensor) -> float:
        if not other.is_floating_point():
            return float((one != other).float().mean())
        return errors.relative(one, other) if other.double().norm() else float(one.double().norm())

    return max(error(one, other) for one, other in zip(got, want, strict=True))


@bench.command("decode ops", MAX_ERROR)
@click.option("--op", "ops", multiple=True, help="Ops; default: all.")
def main(ops: tuple[str, ...]) -> list[bench.Problem]:
    """Bench the ops of a decode step beside Triton kernels."""
    torch.manual_seed(0)
    found = [case for case in cases(str(bench.device())) if not ops or case.of["op"] in ops]
    if not found:
        raise click.BadParameter(f"no op is called {', '.join(ops)}", param_hint="--op")
    return found


if __name__ == "__main__":
    main()
