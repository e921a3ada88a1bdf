"""Decode attention over an fp8 cache beside Triton kernels for the same problem, on one instrument.

The Triton kernels are those of hipforge.ops.triton.decode_attention_fp8: *resident*, which keeps the words, scales and
dequantised elements of K and V of a whole block, and *streaming*, which loads, converts and multiplies part by part.
All take the same split_k and the same bits.

Each number says where it comes from. *compiled*: the code object's own metadata. *counted*: the machine code itself,
ours and Triton's, run on the emulator. *modelled*: counts over public peak rates, a bound and not a time. *measured*:
microseconds per call on a GPU, by graph replay over operands that rotate past the last-level cache. Every result is
checked against float64 first; a wrong one ends the run with status 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from helpers.rows_csv import write_csv
from rich.box import SIMPLE_HEAD
from rich.table import Table

from hipforge import devices, plots
from hipforge.cli.output import console
from hipforge.ops.core.dispatch import explain
from hipforge.ops.decode_attention.cases import AttentionCell, AttentionOperands, expected, operands
from hipforge.ops.decode_attention.counts import loaded_kernel, occupancy
from hipforge.ops.decode_attention_fp8 import decode_attention_splitk
from hipforge.ops.triton import decode_attention_fp8 as baseline
from hipforge.tuning import timing

if TYPE_CHECKING:
    from hipforge.emulator.code_object import Kernel

# Relative, Frobenius. Uniform rounding to the 8 bits of bfloat16 gives 1.7e-3; Triton rounds K, V, the weights and the
# output, 3.3e-3 together.
MAX_ERROR = 4e-3
TRITON = (baseline.RESIDENT, baseline.RESIDENT_64, baseline.STREAMING)
# What the kernels call the tensors of the problem.
TENSORS = {
    "q_ptr": "q", "k_ptr": "k", "v_ptr": "v", "k_rows_ptr": "k_rows", "v_rows_ptr": "v_rows",
    "k_scale_shift": "k_rows", "v_scale_shift": "v_rows", "seqlens_ptr": "seqlens", "tables_ptr": "block_tables",
    "partial_ptr": "partial", "partial_lse_ptr": "partial_lse", "out_ptr": "out", "lse_ptr": "lse",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One implementation; what its ``source`` does not know is None.

    Registers, scratch and LDS are those of the split kernel, per lane and per work-group, and ``occupancy`` is what
    they allow; the counts are of both launches. ``bytes_of`` has bytes by tensor and direction, as in ``k_loaded``;
    ``k_reads`` and ``v_reads`` are bytes loaded over the bytes that the cache's elements have.
    """

    implementation: str
    configuration: str
    source: str
    relative_error: float
    largest_error: float
    largest_lse_error: float
    vgprs: int | None = None
    agprs: int | None = None
    vgpr_spills: int | None = None
    sgpr_spills: int | None = None
    scratch_bytes: int | None = None
    lds_bytes: int | None = None
    occupancy: int | None = None
    instructions: int | None = None
    merge_instructions: int | None = None
    by_class: Mapping[str, int] = field(default_factory=dict)
    mfma: int | None = None
    mfma_cycles: int | None = None
    lds_traffic: int | None = None
    scratch_traffic: int | None = None
    bytes_loaded: int | None = None
    bytes_stored: int | None = None
    k_reads: float | None = None
    v_reads: float | None = None
    bytes_of: Mapping[str, int] = field(default_factory=dict)
    modelled_memory_us: float | None = None
    modelled_issue_us: float | None = None
    us: float | None = None


COMPILED = ("vgprs", "agprs", "vgpr_spills", "sgpr_spills", "scratch_bytes", "lds_bytes", "occupancy")
CHECKED = ("relative_error", "largest_error", "largest_lse_error")
COUNTED = ("instructions", "merge_instructions", "by_class", "mfma", "mfma_cycles", "lds_traffic", "scratch_traffic",
           "bytes_loaded", "bytes_stored", "k_reads", "v_reads", "bytes_of")  # fmt: skip
SECTIONS = {
    "checked": CHECKED,
    "compiled": COMPILED,
    "counted": COUNTED,
    "modelled": ("modelled_memory_us", "modelled_issue_us"),
    "measured": ("us",),
}


@dataclass(frozen=True)
class Contender:
    """``call(operands)`` returns (out, lse); ``kernel(symbol)`` the split kernel, after a call on the emulator."""

    implementation: str
    configuration: str
    call: Callable[[AttentionOperands], tuple[torch.Tensor, torch.Tensor]]
    kernel: Callable[[str], Kernel]


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


def hip_contender(parts: AttentionOperands, split_k: int | None) -> tuple[Contender, int]:
    """Return the op as dispatch configures it, and its split_k."""
    arguments, keywords = packed(parts)
    decision = explain(decode_attention_splitk, *arguments, **keywords, split_k=split_k)
    if decision.path != "kernel":
        raise click.ClickException(f"the kernel does not take this problem: {decision.refused.get('hip')}")
    configuration = dict(decision.configuration)

    def call(given: AttentionOperands) -> tuple[torch.Tensor, torch.Tensor]:
        positional, named = packed(given)
        out, lse = decode_attention_splitk(*positional, **named, split_k=split_k)
        return out.view(given.q.shape), lse.view(given.q.shape[0], -1, 1)

    text = " ".join(f"{name}={value}" for name, value in configuration.items())
    return Contender("hipforge", text, call, loaded_kernel), configuration["split_k"]


def triton_contender(config: baseline.SplitConfig, parts: AttentionOperands, split_k: int, on_gpu: bool) -> Contender:
    """Return a Triton kernel, on the GPU or compiled for the emulated architecture."""

    def prepared(given: AttentionOperands) -> baseline.Call:
        return baseline.prepare(given.triton_problem(split_k), config)

    def bind(kernel: Any) -> Any:
        if on_gpu:
            return kernel
        from hipforge.emulator import triton as emulated

        return emulated.jit(kernel, arch=parts.arch)

    def compiled(_symbol: str) -> Kernel:
        split = prepared(parts).split
        kernel: Kernel = bind(split.kernel).compile(*split.arguments, **split.constants).kernel
        return kernel

    name = "triton " + ("resident" if config.resident else "streaming")
    text = f"block_n={config.block_n} waves={config.num_warps} parts={config.parts} split_k={split_k}"
    return Contender(name, text, lambda given: prepared(given).run(bind), compiled)


def counted(contender: Contender, parts: AttentionOperands) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    """Run once on the emulator; return the result and the compiled, counted and modelled fields of a row."""
    from hipforge import emulator
    from hipforge.emulator import report

    with emulator.counters() as collector:
        result = contender.call(parts)
    counts = collector.result
    bounds = report.profile(counts, parts.arch)
    split = counts.kernels[0]
    kernel = contender.kernel(split.name)
    by_tensor = {
        f"{TENSORS.get(name, name)}_{direction}": amount
        for name, traffic in counts.tensors.items()
        for direction, amount in (("loaded", traffic.loaded), ("stored", traffic.stored))
        if amount
    }
    return result, {
        "source": "counted",
        "vgprs": kernel.vgpr,
        "agprs": kernel.agpr,
        "vgpr_spills": kernel.vgpr_spills,
        "sgpr_spills": kernel.sgpr_spills,
        "scratch_bytes": kernel.scratch_bytes,
        "lds_bytes": split.lds_bytes,
        "occupancy": occupancy(kernel, split),
        "instructions": counts.wave_instructions,
        "merge_instructions": sum(kernel.wave_instructions for kernel in counts.kernels[1:]),
        "by_class": {name: amount for name, amount in counts.by_class.items() if amount},
        "mfma": counts.mfma_count,
        "mfma_cycles": counts.mfma_cycles,
        "lds_traffic": counts.lds_bytes,
        "scratch_traffic": counts.scratch_bytes,
        "bytes_loaded": counts.bytes_loaded,
        "bytes_stored": counts.bytes_stored,
        "k_reads": by_tensor["k_loaded"] / parts.k.nbytes,
        "v_reads": by_tensor["v_loaded"] / parts.v.nbytes,
        "bytes_of": by_tensor,
        "modelled_memory_us": bounds.modelled_memory_us,
        "modelled_issue_us": bounds.modelled_issue_us,
    }


def measured(
    contender: Contender, parts: AttentionOperands
) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    """Run and time on the GPU; return the result and the measured fields of a row."""
    result = contender.call(parts)
    free, _ = torch.cuda.mem_get_info()
    copies = [parts, *(parts.clone() for _ in range(timing.rotation(parts.nbytes, free) - 1))]
    us = timing.microseconds_per_call(lambda i: contender.call(copies[i]), len(copies))
    return result, {"source": timing.measured_source(), "us": us}


def bench(cell: AttentionCell, arch: str, on_gpu: bool, split_k: int | None = None) -> list[Row]:
    """Return a row per implementation, ours first."""
    parts = operands(cell, arch, "cuda" if on_gpu else "cpu")
    want, want_lse = expected(parts)
    ours, splits = hip_contender(parts, split_k)
    contenders = [ours]
    for config in TRITON:
        if not cell.page_size or cell.page_size % config.block_n == 0:
            contenders.append(triton_contender(config, parts, splits, on_gpu))
    rows = []
    for contender in contenders:
        (out, lse), values = (measured if on_gpu else counted)(contender, parts)
        error = out.double() - want
        rows.append(
            Row(
                implementation=contender.implementation,
                configuration=contender.configuration,
                relative_error=float(error.norm() / want.norm()),
                largest_error=float(error.abs().max()),
                largest_lse_error=float((lse.double() - want_lse).abs().max()),
                **values,
            )
        )
    return rows


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _lines(rows: Sequence[Row], name: str) -> list[tuple[str, list[Any]]]:
    """Return what a field shows: one line, or one per key of a mapping."""
    values = [getattr(row, name) for row in rows]
    if not isinstance(values[0], Mapping):
        return [] if all(value is None for value in values) else [(name, values)]
    keys = sorted({key for value in values for key in value})
    prefix = "" if name == "bytes_of" else "  "
    return [(f"{prefix}{key}", [value.get(key, 0) for value in values]) for key in keys]


def show(cell: AttentionCell, arch: str, rows: Sequence[Row]) -> Table:
    """Return a table with a column per implementation and a section per kind of evidence."""
    table = Table(title=f"decode attention, {cell}, {arch}", box=SIMPLE_HEAD)
    table.add_column("")
    for row in rows:
        table.add_column(f"{row.implementation}\n{row.configuration.replace(' ', chr(10))}", justify="right")
    for section, names in SECTIONS.items():
        lines = [line for name in names for line in _lines(rows, name)]
        if not lines:
            continue
        table.add_row(f"[bold]{section}[/bold]" + (" (against float64)" if section == "checked" else ""))
        for number, (label, values) in enumerate(lines, 1):
            table.add_row(label, *map(_text, values), end_section=number == len(lines))
    return table


def sections(row: Row) -> dict[str, Any]:
    """Return a row's numbers under the kind of evidence that they are, without what it does not know."""
    values = asdict(row)
    found: dict[str, Any] = {name: values[name] for name in ("implementation", "configuration", "source")}
    for section, names in SECTIONS.items():
        known = {name: values[name] for name in names if values[name] not in (None, {})}
        if known:
            found[section] = known
    return found


def flat(cell: AttentionCell, arch: str, row: Row) -> dict[str, Any]:
    """Return a row as one level of columns such as ``counted.mfma``, the problem's numbers first."""
    columns: dict[str, Any] = {**asdict(cell), "arch": arch}
    for name, value in sections(row).items():
        if not isinstance(value, Mapping):
            columns[name] = value
            continue
        for key, inner in value.items():
            nested = inner if isinstance(inner, Mapping) else {"": inner}
            columns.update({f"{name}.{key}{'.' if part else ''}{part}": number for part, number in nested.items()})
    return columns


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--batch", default=4, type=click.IntRange(min=1), help="Sequences.")
@click.option("--keys", default=8192, type=click.IntRange(min=1), help="Keys of each.")
@click.option("--kv-heads", default=1, type=click.IntRange(min=1), help="KV heads.")
@click.option("--group", default=8, type=click.IntRange(min=1), help="Query heads per KV head.")
@click.option("--d", default=128, type=click.Choice(["64", "128", "256"]), help="Head dimension.")
@click.option("--page-size", default=0, type=click.IntRange(min=0), help="Keys of a page; 0 for none.")
@click.option("--split-k", type=click.IntRange(1, 512), help="For all; by default what the op chooses.")
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Also write the rows here.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="The same as JSON.")
@plots.OPTION
def main(
    batch: int, keys: int, kv_heads: int, group: int, d: str, page_size: int, split_k: int | None,
    csv_path: Path | None, json_path: Path | None, picture: Path | None,
) -> None:  # fmt: skip
    """Count or time decode attention and Triton's; exit 1 if a result is wrong."""
    device = devices.current()
    if device.kind == "reference":
        raise click.ClickException("HIPFORGE_DEVICE=reference runs no kernels; set it to auto, hip or emulator")
    arch = device.arch_of()
    cell = AttentionCell(kv_heads, group, int(d), page_size, keys, batch)
    rows = bench(cell, arch, device.kind == "hip", split_k)
    console().print(show(cell, arch, rows))
    if csv_path:
        write_csv(csv_path, [flat(cell, arch, row) for row in rows])
    if json_path:
        text = json.dumps({"arch": arch, "problem": asdict(cell), "rows": [sections(row) for row in rows]}, indent=1)
        json_path.write_text(text + "\n", encoding="utf-8")
    if picture:
        measured = device.kind == "hip"
        values = [
            plots.Bar(str(cell), f"{row.implementation} {row.configuration}", value)
            for row in rows
            if (value := row.us if measured else row.instructions)
        ]
        unit = "µs (measured)" if measured else "wave-instructions (counted)"
        plots.bars(values, f"decode attention on {arch}", unit, picture)
    if any(not row.relative_error <= MAX_ERROR for row in rows):
        sys.exit(f"a result is wrong: see relative_error, which must be at most {MAX_ERROR}")


if __name__ == "__main__":
    main()
