"""RMS norms, SwiGLU and MX quantisation in one launch, beside Triton kernels and the same steps as torch operations.

On a GPU every row is *measured*: microseconds per call by graph replay over operands that rotate past the last-level
cache. Without one the kernel is *counted* on the emulator, with no time given: bytes that cross the memory bus over the
least possible, instructions per wave and per element, of ours and of Triton's (helpers/fused_fp8_triton.py). Either way
each result is checked first; a wrong one ends the run with status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import click
import torch
from helpers import fused_fp8_triton as baseline
from helpers.rows_csv import write_csv
from rich.table import Table

from hipforge import devices, plots
from hipforge.cli.output import console
from hipforge.ops import reference
from hipforge.ops.fp8_linear import fp8_dtypes
from hipforge.ops.mx_quantize import mxfp4_quantize, mxfp8_quantize
from hipforge.ops.rmsnorm_fp8 import residual_rms, residual_rms_mxfp8, rms_norm_fp8, rms_norm_mxfp8
from hipforge.ops.swiglu_fp8 import swiglu_fp8, swiglu_mxfp8
from hipforge.tuning import timing

# Memory bandwidth in bytes a second, from the vendor's data sheets.
BANDWIDTH = {"gfx942": 5.3e12, "gfx950": 8.0e12}
EPSILON = 1e-5
Results = tuple[torch.Tensor, ...]
# Only sums in another order and instructions one unit off: a relative 4e-6 against fp8 steps of 2^-4 or more.
MAX_DIFFERENT = 1e-3


@dataclass(frozen=True)
class Row:
    """One kernel at one shape; what does not apply to its ``source`` is None.

    ``different`` is the share of bytes that differ from torch's; ``floor_us`` the time that the least possible bytes
    take; ``excess`` the bytes moved over that least, minus 1. ``slots_per_result`` is instructions executed by a wave,
    64 lanes each, over elements of the result.
    """

    op: str
    kernel: str
    rows: int
    cols: int
    different: float
    floor_us: float
    source: str
    us: float | None = None
    torch_us: float | None = None
    excess: float | None = None
    slots_per_result: float | None = None
    waves: int | None = None


@dataclass(frozen=True)
class Case:
    """``call(i)`` runs our kernel on copy ``i``, ``triton_call(i)`` Triton's and ``torch_call(i)`` the reference.

    Each returns codes and any scales.

    A copy's residual grows with every call, which changes no time; the check is of the first.
    """

    op: str
    rows: int
    cols: int
    results: int
    least_bytes: int
    call: Callable[[int], Results]
    triton_call: Callable[[int], Results]
    torch_call: Callable[[int], Results]


def norm_case(rows: int, cols: int, copies: int, device: str, mx: bool, with_residual: bool = True) -> Case:
    """Return the norm over [rows, cols] float16, of the sum with a residual or alone."""
    dtype = fp8_dtypes(device)[0]
    x, residual = (torch.randn(copies, rows, cols, device=device).half() for _ in range(2))
    weight = torch.randn(cols, device=device).half()
    scale = torch.full((1,), 0.02, device=device)
    kept, tritons = residual.clone(), residual.clone()

    def call(i: int) -> Results:
        if with_residual:
            if mx:
                return residual_rms_mxfp8(x[i], kept[i], weight, EPSILON)[:2]
            return residual_rms(x[i], kept[i], weight, EPSILON, scale)[:1]
        return rms_norm_mxfp8(x[i], weight, EPSILON) if mx else (rms_norm_fp8(x[i], weight, EPSILON, scale),)

    def triton_call(i: int) -> Results:
        given = tritons[i] if with_residual else None
        return baseline.run_norm(x[i], given, weight, EPSILON, dtype, None if mx else scale)

    def torch_call(i: int) -> Results:
        r = x[i] + residual[i] if with_residual else x[i]
        if mx:
            return reference.rms_norm_mxfp8(r, weight, EPSILON, dtype)
        return (reference.rms_norm_fp8(r, weight, EPSILON, scale, dtype),)

    least = (7 if with_residual else 3) * rows * cols + 2 * cols + (rows * cols // 32 if mx else 0)
    name = "residual_rms" if with_residual else "rms_norm" if mx else "rms_norm_fp8"
    return Case(name + ("_mxfp8" if mx else ""), rows, cols, rows * cols, least, call, triton_call, torch_call)


def activation_case(rows: int, cols: int, copies: int, device: str, mx: bool) -> Case:
    """Return the activation of gate_up [rows, cols] float16; its result has cols / 2 columns."""
    dtype = fp8_dtypes(device)[0]
    gate_up = torch.randn(copies, rows, cols, device=device).half()
    scale = torch.full((1,), 0.02, device=device)

    def call(i: int) -> Results:
        return swiglu_mxfp8(gate_up[i]) if mx else (swiglu_fp8(gate_up[i], scale),)

    def triton_call(i: int) -> Results:
        return baseline.run_activation(gate_up[i], dtype, None if mx else scale)

    def torch_call(i: int) -> Results:
        return reference.swiglu_mxfp8(gate_up[i], dtype) if mx else (reference.swiglu_fp8(gate_up[i], scale, dtype),)

    outputs = rows * cols // 2
    least = 5 * outputs + (outputs // 32 if mx else 0)
    return Case("swiglu_mxfp8" if mx else "swiglu_fp8", rows, cols, outputs, least, call, triton_call, torch_call)


def quantize_case(rows: int, cols: int, copies: int, device: str, mx: bool) -> Case:
    """Return the quantisation of [rows, cols] bfloat16 to MX-FP8 (``mx``), or to MXFP4."""
    dtype = fp8_dtypes(device)[0]
    x = torch.randn(copies, rows, cols, device=device).bfloat16()

    def call(i: int) -> Results:
        return mxfp8_quantize(x[i]) if mx else mxfp4_quantize(x[i])

    def triton_call(i: int) -> Results:
        return baseline.run_quantize(x[i], dtype if mx else None)

    def torch_call(i: int) -> Results:
        return reference.quantize_mxfp8(x[i], dtype) if mx else reference.quantize_mxfp4(x[i])

    stored = rows * cols if mx else rows * cols // 2
    least = 2 * rows * cols + stored + rows * cols // 32
    name = "mxfp8_quantize" if mx else "mxfp4_quantize"
    return Case(name, rows, cols, rows * cols, least, call, triton_call, torch_call)


def norm_alone_case(rows: int, cols: int, copies: int, device: str, mx: bool) -> Case:
    """Return the norm without a residual."""
    return norm_case(rows, cols, copies, device, mx, with_residual=False)


CASES = (norm_case, norm_alone_case, activation_case, quantize_case)


def bytes_of(results: Results) -> torch.Tensor:
    """Return all bytes of the results in one row."""
    return torch.cat([result.view(torch.uint8).flatten() for result in results])


def measure(case: Case, copies: int, arch: str) -> list[Row]:
    """Check one case, then time it on a GPU or count it on the emulator: our kernel's row and Triton's."""
    floor = case.least_bytes / BANDWIDTH[arch] * 1e6
    want = bytes_of(case.torch_call(0))
    on_gpu = devices.current().kind != "emulator"
    rows = []
    for kernel, call in (("hipforge", case.call), ("triton", case.triton_call)):
        if on_gpu:
            got = call(0)
        else:
            from hipforge import emulator

            with emulator.counters() as counted:
                got = call(0)
        different = float((bytes_of(got) != want).float().mean())
        row = Row(case.op, kernel, case.rows, case.cols, different, floor, "measured" if on_gpu else "counted")
        if on_gpu:
            torch_us = timing.microseconds_per_call(case.torch_call, copies) if kernel == "hipforge" else None
            row = replace(row, us=timing.microseconds_per_call(call, copies), torch_us=torch_us)
        else:
            row = replace(
                row, excess=counted.unique_bytes / case.least_bytes - 1, waves=counted.waves,
                slots_per_result=64 * counted.wave_instructions / case.results,
            )  # fmt: skip
        rows.append(row)
    return rows


def show(rows: list[Row]) -> Table:
    """Return the table."""
    table = Table(title=f"fused FP8 on {devices.current().kind} {devices.current().arch_of()}")
    for field in fields(Row):
        table.add_column(field.name, justify="left" if field.name in ("op", "kernel", "source") else "right")
    for row in rows:
        table.add_row(
            *("-" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v) for v in asdict(row).values())
        )
    return table


@click.command()
@click.option("--rows", "row_counts", multiple=True, type=int, help="Rows; default: 1, 8 and 32, on a GPU to 2048.")
@click.option("--cols", default=16384, show_default=True, help="Columns of input and of gate_up; a multiple of 64.")
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Also write the table here.")
@plots.OPTION
def main(row_counts: tuple[int, ...], cols: int, csv_path: Path | None, picture: Path | None) -> None:
    """Bench the fused kernels; exit 1 if a result is wrong."""
    if cols < 64 or cols % 64:
        raise click.BadParameter(f"{cols} is not a positive multiple of 64", param_hint="--cols")
    device = devices.current()
    if device.kind == "reference":
        raise click.ClickException("HIPFORGE_DEVICE=reference runs no kernels; set it to auto, hip or emulator")
    on_gpu = device.kind == "hip"
    torch.manual_seed(0)
    rows = []
    for count in row_counts or ((1, 8, 32, 128, 512, 2048) if on_gpu else (1, 8, 32)):
        copies = timing.rotation(4 * count * cols, torch.cuda.mem_get_info()[0]) if on_gpu else 1
        for make in CASES:
            for mx in (False, True):
                case = make(count, cols, copies, "cuda" if on_gpu else "cpu", mx)
                rows += measure(case, copies, device.arch_of())
    console().print(show(rows))
    if csv_path:
        write_csv(csv_path, rows)
    if picture:
        values = [
            plots.Bar(f"{row.op}\n{row.rows} × {row.cols}", row.kernel, value)
            for row in rows
            if (value := row.us if on_gpu else row.slots_per_result)
        ]
        unit = "µs (measured)" if on_gpu else "issue slots per result (counted)"
        plots.bars(values, f"fused FP8 on {device.arch_of()}", unit, picture)
    if any(row.different > MAX_DIFFERENT for row in rows):
        sys.exit("a kernel and its reference disagree: see column different")


if __name__ == "__main__":
    main()
