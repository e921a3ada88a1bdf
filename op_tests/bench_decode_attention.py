"""Decode attention over an fp8 cache beside Triton kernels for the same problem; see helpers/bench.py.

The Triton kernels are those of hipforge.ops.triton.decode_attention_fp8: *resident*, which keeps the words, scales and
dequantised elements of K and V of a whole block, and *streaming*, which loads, converts and multiplies part by part.
All take the same split_k and the same bits, and are checked against float64. Registers, scratch and occupancy are
those of the split kernel, ``merge_instructions`` are of the kernel after it, ``k_reads`` and ``v_reads`` bytes loaded
over the bytes that the cache's elements have, ``x_loaded`` and ``x_stored`` bytes by tensor. *modelled_* columns are
counts over public peak rates: bounds and no times.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import click
import torch
from helpers import bench, errors

from hipforge import devices
from hipforge.emulator.counting import Counters
from hipforge.ops.core.dispatch import explain
from hipforge.ops.decode_attention_fp8 import decode_attention_splitk
from hipforge.ops.triton import decode_attention_fp8 as baseline
from hipforge.tuning.families.decode_attention.cases import AttentionCell, AttentionOperands, expected, operands

# Relative, Frobenius. Uniform rounding to the 8 bits of bfloat16 gives 1.7e-3; Triton rounds K, V, the weights and the
# output, 3.3e-3 together.
MAX_ERROR = 4e-3
# What the kernels call the tensors of the problem.
TENSORS = {
    "q_ptr": "q", "k_ptr": "k", "v_ptr": "v", "k_rows_ptr": "k_rows", "v_rows_ptr": "v_rows",
    "k_scale_shift": "k_rows", "v_scale_shift": "v_rows", "seqlens_ptr": "seqlens", "tables_ptr": "block_tables",
    "partial_ptr": "partial", "partial_lse_ptr": "partial_lse", "out_ptr": "out", "lse_ptr": "lse",
}  # fmt: skip


def packed(parts: AttentionOperands) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return positional and keyword arguments of ``decode_attention_splitk``."""
    kv_heads = parts.k.shape[2]
    group = parts.q.shape[2] // kv_heads

    def expanded(words: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = words.flatten(0, 1)[None, :, :, None], rows.flatten(0, 1)[None, :, :, None]
        return flat[0].expand(-1, -1, -1, group, -1), flat[1].expand(-1, -1, -1, group)

    (k, k_rows), (v, v_rows) = expanded(parts.k, parts.k_rows), expanded(parts.v, parts.v_rows)
    q = parts.q.view(1, -1, kv_heads, group, parts.q.shape[-1])
    paging = {}
    if parts.block_tables is not None:
        paging = {"block_tables": parts.block_tables, "page_size": parts.k.shape[1]}
    return (q, k, v, k_rows, v_rows, parts.seqlens), paging


def of_tensors(seen: Counters, parts: AttentionOperands) -> dict[str, Any]:
    """Return the columns of this problem alone."""
    from hipforge.emulator import report

    bounds = report.profile(seen, parts.arch)
    loaded, stored = ({TENSORS.get(name, name): getattr(traffic, which) for name, traffic in seen.tensors.items()}
                      for which in ("loaded", "stored"))  # fmt: skip
    return {
        "merge_instructions": sum(kernel.wave_instructions for kernel in seen.kernels[1:]),
        "k_reads": loaded["k"] / parts.k.nbytes,
        "v_reads": loaded["v"] / parts.v.nbytes,
        "modelled_memory_us": bounds.modelled_memory_us,
        "modelled_issue_us": bounds.modelled_issue_us,
        **{f"{name}_loaded": amount for name, amount in loaded.items() if amount},
        **{f"{name}_stored": amount for name, amount in stored.items() if amount},
    }


def problem(cell: AttentionCell, split_k: int | None = None) -> bench.Problem:
    """Return the problem of a cell, ours as dispatch configures it."""
    parts = operands(cell, devices.current().arch_of(), bench.device())
    number = bench.copies_of(parts.nbytes)
    copies = [parts, *(parts.clone() for _ in range(number - 1))]
    want = expected(parts)[0]
    positional, named = packed(parts)
    chosen = explain(decode_attention_splitk, *positional, **named, split_k=split_k)
    if chosen.path != "kernel":
        raise click.ClickException(f"the kernel does not take this problem: {chosen.refused.get('kernel')}")
    splits, binder = chosen.configuration["split_k"], bench.triton_binder()

    def ours(i: int) -> torch.Tensor:
        positional, named = packed(copies[i])
        return decode_attention_splitk(*positional, **named, split_k=split_k)[0].view(parts.q.shape)

    def triton(config: baseline.SplitConfig, i: int) -> torch.Tensor:
        bind = functools.partial(binder, arch=parts.arch) if binder else None
        return baseline.prepare(copies[i].triton_problem(splits), config).run(bind)[0]

    calls = {f"hipforge {bench.named(chosen.configuration)}": ours}
    for config in (baseline.RESIDENT, baseline.RESIDENT_64, baseline.STREAMING):
        if not cell.page_size or cell.page_size % config.block_n == 0:
            kind = "resident" if config.resident else "streaming"
            name = f"triton {kind} block_n={config.block_n} waves={config.num_warps} parts={config.parts}"
            calls[name] = lambda i, config=config: triton(config, i)
    return bench.Problem(
        {"problem": str(cell)}, calls, lambda got: errors.relative(got, want), number,
        counted=lambda seen: of_tensors(seen, parts),
    )  # fmt: skip


@bench.command("decode attention", MAX_ERROR)
@click.option("--batch", default=4, type=click.IntRange(min=1), help="Sequences.")
@click.option("--keys", default=8192, type=click.IntRange(min=1), help="Keys of each.")
@click.option("--kv-heads", default=1, type=click.IntRange(min=1), help="KV heads.")
@click.option("--group", default=8, type=click.IntRange(min=1), help="Query heads per KV head.")
@click.option("--d", default="128", type=click.Choice(["64", "128", "256"]), help="Head dimension.")
@click.option("--page-size", default=0, type=click.IntRange(min=0), help="Keys of a page; 0 for none.")
@click.option("--split-k", type=click.IntRange(1, 512), help="For all; by default what the op chooses.")
def main(
    batch: int, keys: int, kv_heads: int, group: int, d: str, page_size: int, split_k: int | None
) -> Iterator[bench.Problem]:
    """Count or time decode attention and Triton's."""
    yield problem(AttentionCell(kv_heads, group, int(d), page_size, keys, batch), split_k)


if __name__ == "__main__":
    main()
