"""RoPE with the cache write, gating, sorted slots, the sum over experts and the router's product beside Triton kernels.

The Triton kernels are those of hipforge.ops.triton.{rope_and_cache,routing}: the same job in one launch each. Every
result is checked against the reference first; a wrong one ends the run with status 1.

On the emulator both are *counted*: wave-instructions, waves, bytes that lanes load and store, and bytes that cross the
memory bus at least once. On a GPU both are *measured*: microseconds per call by graph replay. The operands of a decode
step are small and stay in the caches of a GPU; nothing is rotated past them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click
import torch
from helpers.rows_csv import write_csv
from rich.table import Table

from hipforge import devices, plots
from hipforge.cli.output import console
from hipforge.ops import reference
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.moe_align import moe_align_block_size
from hipforge.ops.moe_combine import moe_combine
from hipforge.ops.rope_and_cache import rope_and_cache
from hipforge.ops.router_gemm import router_gemm
from hipforge.ops.topk_gating import topk_gating
from hipforge.ops.triton import rope_and_cache as triton_rope
from hipforge.ops.triton import routing
from hipforge.tuning import timing

Results = tuple[torch.Tensor, ...]
BLOCK_M = 64
# Sums in another order and functions one unit off change the last bits; fp8 codes and ids differ rarely.
MAX_ERROR = 2e-3


@dataclass(frozen=True)
class Case:
    """``ours()`` and ``triton(bind)`` run one call each and return the results, ``wanted()`` those of the reference."""

    op: str
    shape: str
    ours: Callable[[], Results]
    triton: Callable[[Any], Results]
    wanted: Callable[[], Results]


@dataclass(frozen=True)
class Row:
    """One implementation at one shape; what its ``source`` does not know is None. Bytes are of one call."""

    op: str
    shape: str
    implementation: str
    source: str
    error: float
    instructions: int | None = None
    waves: int | None = None
    loaded: int | None = None
    stored: int | None = None
    unique_bytes: int | None = None
    us: float | None = None


def rope_case(tokens: int, q_heads: int, kv_heads: int, rotary: int, norm: bool, device: str) -> Case:
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

    kind = "norm, " if norm else ""
    return Case("rope_and_cache", f"{kind}T={tokens} Hq={q_heads} Hkv={kv_heads} rotary={rotary}", ours, triton, wanted)


def gating_case(tokens: int, experts: int, k: int, groups: tuple[int, int] | None, device: str) -> Case:
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

    return Case(
        "topk_gating", f"T={tokens} E={experts} k={k}" + (f" groups={split[1]}/{split[0]}" if groups else ""),
        lambda: topk_gating(logits, k, scoring="sigmoid", bias=bias, scale=2.5, out=weights, ids_out=ids, **grouped),
        triton,
        lambda: reference.topk_gating(logits, k, scoring="sigmoid", bias=bias, scale=2.5, **grouped),
    )  # fmt: skip


def align_case(tokens: int, top_k: int, experts: int, device: str) -> Case:
    """Return the slots of random distinct experts."""
    ids = torch.rand(tokens, experts, device=device).topk(top_k).indices.to(torch.int32)
    out = moe_align_block_size(ids, BLOCK_M, experts)

    def triton(bind: Any) -> Results:
        routing.moe_align_block_size(*out, ids, None, BLOCK_M, experts, bind=bind)
        return out

    return Case(
        "moe_align_block_size", f"T={tokens} k={top_k} E={experts} block_m={BLOCK_M}",
        lambda: moe_align_block_size(ids, BLOCK_M, experts, out=out), triton,
        lambda: reference.moe_align_block_size(ids, BLOCK_M, experts),
    )  # fmt: skip


def combine_case(tokens: int, top_k: int, n: int, device: str) -> Case:
    """Return bf16 rows of all slots, weighted."""
    rows = torch.randn(tokens * top_k, n, device=device).bfloat16()
    weights = torch.rand(tokens, top_k, device=device)
    ids = torch.randint(0, 128, (tokens, top_k), device=device, dtype=torch.int32)
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device=device)

    def triton(bind: Any) -> Results:
        routing.moe_combine(out, rows, weights, ids, None, top_k, 128, bind=bind)
        return (out,)

    return Case(
        "moe_combine", f"T={tokens} k={top_k} N={n}",
        lambda: (moe_combine(rows, weights, ids, out=out, num_experts=128),), triton,
        lambda: (reference.moe_combine(rows, top_k, weights, ids, num_experts=128),),
    )  # fmt: skip


def router_case(tokens: int, hidden: int, experts: int, w_dtype: torch.dtype, device: str) -> Case:
    """Return bf16 activations times a router's weight."""
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    w = (torch.randn(experts, hidden, device=device) * hidden**-0.5).to(w_dtype)
    out = torch.empty(tokens, experts, device=device)

    def triton(bind: Any) -> Results:
        routing.router_gemm(out, x, w, None, bind=bind)
        return (out,)

    name = str(w_dtype).removeprefix("torch.")
    return Case(
        "router_gemm", f"T={tokens} H={hidden} E={experts} w={name}", lambda: (router_gemm(x, w, out=out),), triton,
        lambda: (reference.router_gemm(x, w),),
    )  # fmt: skip


def cases(device: str) -> Iterator[Case]:
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
    worst = 0.0
    for one, other in zip(got, want, strict=True):
        if not other.is_floating_point():
            worst = max(worst, float((one != other).float().mean()))
            continue
        difference, size = (one.double() - other.double()).norm(), other.double().norm()
        worst = max(worst, float(difference / size) if float(size) else float(difference))
    return worst


def rows_of(case: Case) -> Iterator[Row]:
    """Run one case with both implementations."""
    on_gpu = devices.current().kind == "hip"
    bind = None
    if not on_gpu:
        from hipforge.emulator import triton as emulated

        bind = emulated.jit
    want = case.wanted()
    calls: dict[str, Callable[[], Results]] = {"hip": case.ours, "triton": lambda: case.triton(bind)}
    for name, call in calls.items():
        if on_gpu:
            error = error_of(call(), want)
            us = timing.microseconds_per_call(lambda _, call=call: call(), 1)
            yield Row(case.op, case.shape, name, "measured", error, us=us)
            continue
        from hipforge import emulator

        with emulator.counters() as collector:
            got = call()
        counted = collector.result
        tensors = counted.tensors.values()
        yield Row(
            case.op, case.shape, name, "counted", error_of(got, want), counted.wave_instructions, counted.waves,
            sum(tensor.loaded for tensor in tensors), sum(tensor.stored for tensor in tensors), counted.unique_bytes,
        )  # fmt: skip


def show(rows: list[Row]) -> Table:
    """Return the table."""
    table = Table(title=f"decode ops on {devices.current().kind} {devices.current().arch_of()}")
    for field in fields(Row):
        table.add_column(field.name, justify="left" if field.type == "str" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            *("-" if v is None else f"{v:.2g}" if isinstance(v, float) else str(v) for v in asdict(row).values())
        )
    return table


@click.command()
@click.option("--op", "ops", multiple=True, help="Ops; default: all.")
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Also write the table here.")
@plots.OPTION
def main(ops: tuple[str, ...], csv_path: Path | None, picture: Path | None) -> None:
    """Bench the decode ops; exit 1 if a result is wrong."""
    device = devices.current()
    if device.kind == "reference":
        raise click.ClickException("HIPFORGE_DEVICE=reference runs no kernels; set it to auto, hip or emulator")
    torch.manual_seed(0)
    rows: list[Row] = []
    for case in cases("cuda" if device.kind == "hip" else "cpu"):
        if not ops or case.op in ops:
            rows.extend(rows_of(case))
    if not rows:
        raise click.BadParameter(f"no op is called {', '.join(ops)}", param_hint="--op")
    console().print(show(rows))
    if csv_path:
        write_csv(csv_path, rows)
    if picture:
        measured = device.kind == "hip"
        values = [
            plots.Bar(f"{row.op}\n{row.shape}", row.implementation, value)
            for row in rows
            if (value := row.us if measured else row.instructions)
        ]
        unit = "µs (measured)" if measured else "wave-instructions (counted)"
        plots.bars(values, f"decode ops on {device.arch_of()}", unit, picture)
    if any(row.error > MAX_ERROR for row in rows):
        sys.exit("an implementation and the reference disagree: see column error")


if __name__ == "__main__":
    main()
