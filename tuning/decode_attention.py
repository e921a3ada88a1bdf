"""The tuner of decode attention: keys of a block, waves of a work-group and splits, for each problem size.

On a GPU candidates are timed at full size, with Triton's kernels beside them. On the emulator they are ranked by the
model of :mod:`hipforge.tuning.model` over the counts of :mod:`hipforge.tuning.decode_attention_counts`. Either way
each candidate runs on real data first and is rejected if its result is wrong or its build exceeds the module's
resource limits. Caches have a scale and a shift per row, the more costly of the two kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import click
import torch

from hipforge import devices
from hipforge.errors import ConfigError, GuardError
from hipforge.ops.decode_attention_fp8_kernels import (
    BLOCK_M,
    BLOCKS_N,
    CONFIGURATION,
    MAX_SPLITS,
    WAVES,
    check_configuration,
)
from hipforge.ops.decode_attention_fp8_plan import accepts_configuration, bucket
from hipforge.ops.tables import ANY_PAGE_SIZE, DECODE_ATTENTION_FP8
from hipforge.ops.triton import decode_attention_fp8 as triton_attention
from hipforge.ops.tuned import Key
from hipforge.tuning import model, timing
from hipforge.tuning.decode_attention_cases import AttentionCell, AttentionOperands, expected, operands
from hipforge.tuning.decode_attention_counts import blocks_per_wave, ranges, run, works
from hipforge.tuning.gemm import relative_error
from hipforge.tuning.search import Candidate, Trial, search
from hipforge.tuning.table_writer import Row, merge_rows, read_existing

# Rounding the weights and the output to bfloat16 gives 1.7e-3 each, 2.4e-3 together; a key left out of 4096 with equal
# weights, the least that goes wrong, 1.6e-2.
MAX_ERROR = 4e-3

MACHINES: Mapping[str, model.Machine] = MappingProxyType({"gfx942": model.MI300X, "gfx950": model.MI355X})

# S = 2^i and 3 * 2^i; a compute unit more or less decides nothing that the model sees.
SPLITS = tuple(sorted({base << shift for base in (1, 3) for shift in range(10) if base << shift <= MAX_SPLITS}))

# (KV heads, query heads per KV head) of a layer on one GPU.
HEADS = ((1, 1), (1, 8), (1, 16), (2, 1), (2, 8))
BATCHES = tuple(1 << shift for shift in range(8))
KEYS = tuple(1 << shift for shift in range(8, 18))
HEAD_DIM = 128
# Any page size, then the pages and sizes that are common enough to have rows of their own.
DEFAULT_CELLS: tuple[AttentionCell, ...] = (
    *(
        AttentionCell(kv_heads, group, HEAD_DIM, ANY_PAGE_SIZE, keys, batch)
        for kv_heads, group in HEADS
        for keys in KEYS
        for batch in BATCHES
    ),
    *(
        AttentionCell(kv_heads, group, HEAD_DIM, page_size, keys, batch)
        for page_size in (64, 256)
        for kv_heads in (1, 2)
        for group in (1, 8)
        for keys in (2048, 8192)
        for batch in (1, 16, 64)
    ),
)


def candidates(cell: AttentionCell) -> list[Candidate]:
    """Return the configurations that the kernel has, the tuner may try and that leave no split empty.

    Fewest splits and waves and the largest block first: ties go to them.
    """
    found = []
    for split_k in SPLITS:
        for waves in WAVES:
            for block_n in sorted(BLOCKS_N, reverse=True):
                configuration = {"block_n": block_n, "waves": waves, "split_k": split_k}
                if not accepts_configuration(BLOCK_M, block_n, waves) or not _exists(configuration, cell.d):
                    continue
                of_a_split = blocks_per_wave(configuration, cell.d, cell.keys) * ranges(configuration, cell.d)
                if math.ceil(cell.keys / block_n / of_a_split) == split_k:
                    found.append(Candidate("decode_attention_fp8", MappingProxyType(configuration)))
    return found


def _exists(configuration: Mapping[str, int], d: int) -> bool:
    try:
        check_configuration(configuration, d)
    except GuardError:
        return False
    return True


class ModelledAttention:
    """Costs a candidate by the model over counts on the emulator."""

    def __init__(self, cell: AttentionCell, arch: str) -> None:
        self.cell = cell
        self.arch = arch
        self.source = MACHINES[arch].source

    def run(self, candidate: Candidate) -> float:
        """Return the relative error of the runs that the candidate's counts come from."""
        return works(self.cell, self.arch, candidate.configuration)[1]

    def cost(self, candidate: Candidate) -> tuple[float, str]:
        """Return the model's seconds of a call and the bound of each launch."""
        launches, _ = works(self.cell, self.arch, candidate.configuration)
        estimates = [model.estimate(work, MACHINES[self.arch]) for work in launches]
        note = " + ".join(f"{item.seconds * 1e6:.2f} ({item.bound})" for item in estimates)
        return model.total(estimates), note

    def baselines(self) -> tuple[float, float] | None:
        """Return None: nothing is measured without a GPU."""
        return None


class MeasuredAttention:
    """Times a candidate on the GPU, over rotating copies of its operands."""

    def __init__(self, cell: AttentionCell, arch: str, device: torch.device) -> None:
        self.cell = cell
        self.source = timing.measured_source(device.index or 0)
        first = operands(cell, arch, device)
        self.expected = expected(first)[0]
        free, _ = torch.cuda.mem_get_info(device)
        self.copies = [first, *(first.clone() for _ in range(timing.rotation(first.nbytes, free) - 1))]

    def run(self, candidate: Candidate) -> float:
        """Run once and return the relative Frobenius error of the output."""
        return relative_error(run(self.copies[0], candidate.configuration)[0], self.expected)

    def _time(self, call: Callable[[AttentionOperands], object]) -> float:
        return timing.microseconds_per_call(lambda i: call(self.copies[i]), len(self.copies))

    def cost(self, candidate: Candidate) -> tuple[float, str]:
        """Return the measured seconds of a call."""
        us = self._time(lambda parts: run(parts, candidate.configuration))
        return us * 1e-6, f"{us:.2f} us"

    def baselines(self) -> tuple[float, float] | None:
        """Return microseconds of Triton's resident kernel, and of its best kernel over a few numbers of splits."""
        if triton_attention.unavailable(self.copies[0].q.device) is not None:
            return None
        times = {
            config: min(
                self._time(lambda parts, c=config, s=splits: triton_attention.prepare(parts.triton_problem(s), c).run())  # type: ignore[misc]
                for splits in (4, 16, 64)
            )
            for config in (triton_attention.RESIDENT_64, triton_attention.STREAMING)
        }
        return times[triton_attention.RESIDENT_64], min(times.values())


def key_of(cell: AttentionCell, arch: str, cu_num: int) -> Key:
    """Return the key of a cell's row."""
    shape = (bucket(cell.batch), cell.kv_heads, bucket(cell.group), cell.d, bucket(cell.keys), cell.page_size)
    return (arch, cu_num, *shape)


def row_for(key: Key, trial: Trial, source: str, baselines: tuple[float, float] | None) -> Row:
    """Return the table row of a cell's best trial."""
    measured = source.startswith("measured:") and trial.seconds is not None
    stock_us, best_us = baselines if measured and baselines else (None, None)
    return {
        **dict(zip(DECODE_ATTENTION_FP8.key_names, key, strict=True)),
        **{name: trial.candidate.configuration[name] for name in CONFIGURATION},
        "us": trial.seconds * 1e6 if measured and trial.seconds is not None else None,
        "stock_us": stock_us,
        "best_baseline_us": best_us,
        "err": trial.error,
        "source": source,
    }


def tune(
    wanted: list[AttentionCell], output: Path, *, resume: bool = False, say: Callable[[str], None] = lambda text: None
) -> int:
    """Tune cells one by one, merging rows into ``output``; a model does not replace a measured row.

    Args:
        wanted: the cells; their batch, group and keys are rounded up to the bucket that the row speaks for.
        output: the table; rows of other cells stay.
        resume: skip cells that ``output`` already has a row for.
        say: takes progress, one line at a time.

    Returns:
        How many rows were written.

    Raises:
        ConfigError: the device has no such kernel, ``output`` is malformed, or no candidate of a cell is usable.
    """
    device = devices.current()
    arch = device.kind if device.kind == "reference" else device.arch_of()
    if arch not in MACHINES:
        raise ConfigError(
            f"the kernel is for {', '.join(MACHINES)}; the device is {arch} (HIPFORGE_DEVICE, HIPFORGE_EMULATE)"
        )
    existing = read_existing(DECODE_ATTENTION_FP8, output)
    rows = []
    for number, cell in enumerate(wanted, 1):
        where = f"[{number}/{len(wanted)}] {cell}"
        key = key_of(cell, arch, device.cu_count())
        old = existing.get(key)
        if resume and old is not None:
            say(f"{where}: already in {output}")
            continue
        if old is not None and str(old["source"]).startswith("measured:") and device.kind != "hip":
            say(f"{where}: {output} has a measured row, which a model does not replace")
            continue
        problem: MeasuredAttention | ModelledAttention = (
            MeasuredAttention(cell, arch, torch.device("cuda", 0))
            if device.kind == "hip"
            else ModelledAttention(cell, arch)
        )
        trials = search(problem, candidates(cell), MAX_ERROR)
        for trial in trials:
            if trial.rejected:
                say(f"    rejected {trial.candidate}: {trial.rejected}")
        if trials[0].rejected:
            raise ConfigError(f"{cell}: no candidate is usable: {trials[0].rejected}")
        rows.append(row_for(key, trials[0], problem.source, problem.baselines()))
        if device.kind == "hip":  # hours of measuring are not to be lost
            merge_rows(output, DECODE_ATTENTION_FP8, rows[-1:])
        say(f"{where}: {trials[0].candidate}, {trials[0].note}")
    if rows and device.kind != "hip":
        merge_rows(output, DECODE_ATTENTION_FP8, rows)
    return len(rows)


@click.command(
    DECODE_ATTENTION_FP8.family,
    help="Choose block_n, waves and split_k of decode attention for each problem size; by default B 1 to 128 x keys "
    "256 to 131072 x the usual heads at D = 128, for any page size. On a GPU cells are measured; elsewhere a model "
    "ranks them and rows say so.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Table to merge rows into.")
@click.option("-b", "--batch", "batches", multiple=True, type=click.IntRange(min=1), help="B; may be repeated.")
@click.option("--keys", multiple=True, type=click.IntRange(min=1), help="Mkv; may be repeated.")
@click.option("--heads", multiple=True, type=(int, int), metavar="HKV G", help="KV heads, query heads of each.")
@click.option("--page-size", "page_sizes", multiple=True, type=click.IntRange(min=0), help="0 stands for any.")
@click.option("--d", "dims", multiple=True, type=click.IntRange(min=1), help="Head dimension.")
@click.option("--resume", is_flag=True, help="Skip cells that the output already has.")
def command(
    output: Path,
    batches: tuple[int, ...],
    keys: tuple[int, ...],
    heads: tuple[tuple[int, int], ...],
    page_sizes: tuple[int, ...],
    dims: tuple[int, ...],
    resume: bool,
) -> None:
    """Tune the default cells, or every combination of what is given with defaults for the rest."""
    wanted: Iterable[AttentionCell] = DEFAULT_CELLS
    if batches or keys or heads or page_sizes or dims:
        wanted = sorted(
            AttentionCell(kv_heads, group, d, page_size, length, batch)
            for kv_heads, group in heads or HEADS
            for d in dims or (HEAD_DIM,)
            for page_size in page_sizes or (ANY_PAGE_SIZE,)
            for length in keys or KEYS
            for batch in batches or BATCHES
        )
    count_written = tune(list(wanted), output, resume=resume, say=click.echo)
    click.echo(f"{count_written} rows written to {output}")
