"""RMS norms, SwiGLU and MX quantisation in one launch, beside Triton kernels and the same steps as torch operations.

Triton's kernels are those of helpers/fused_fp8_triton.py; helpers/bench.py says what is counted or measured. ``error``
is the share of bytes that differ from torch's, ``floor_us`` the time that the least possible bytes take, ``excess`` the
bytes moved over that least, minus 1, and ``slots_per_result`` instructions of a wave, 64 lanes each, over elements of
the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click
import torch
from helpers import bench
from helpers import fused_fp8_triton as baseline

from hipforge import devices
from hipforge.ops import reference
from hipforge.ops.fp8_linear import fp8_dtypes
from hipforge.ops.mx_quantize import mxfp4_quantize, mxfp8_quantize
from hipforge.ops.rmsnorm_fp8 import residual_rms, residual_rms_mxfp8, rms_norm_fp8, rms_norm_mxfp8
from hipforge.ops.swiglu_fp8 import swiglu_fp8, swiglu_mxfp8

# Memory bandwidth in bytes a second, from the vendor's data sheets.
BANDWIDTH = {"gfx942": 5.3e12, "gfx950": 8.0e12}
EPSILON = 1e-5
Results = tuple[torch.Tensor, ...]
# Only sums in another order and instructions one unit off: a relative 4e-6 against fp8 steps of 2^-4 or more.
MAX_DIFFERENT = 1e-3


def problem(
    op: str, rows: int, cols: int, copies: int, results: int, least_bytes: int, call: Callable[[int], Results],
    triton_call: Callable[[int], Results], torch_call: Callable[[int], Results],
) -> bench.Problem:  # fmt: skip
    """Return a case whose calls, on copy ``i``, return codes and any scales; a residual grows with each call."""
    want = bytes_of(torch_call(0))
    return bench.Problem(
        {"op": op, "rows": rows, "cols": cols},
        {"hipforge": call, "triton": triton_call} | ({"torch": torch_call} if bench.on_gpu() else {}),
        lambda got: float((bytes_of(got) != want).float().mean()),
        copies,
        {"floor_us": least_bytes / BANDWIDTH[devices.current().arch_of()] * 1e6},
        lambda seen: {
            "excess": seen.unique_bytes / least_bytes - 1,
            "slots_per_result": 64 * seen.wave_instructions / results,
        },
    )


def norm_case(rows: int, cols: int, copies: int, device: str, mx: bool, with_residual: bool = True) -> bench.Problem:
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
    return problem(
        name + ("_mxfp8" if mx else ""), rows, cols, copies, rows * cols, least, call, triton_call, torch_call
    )


def activation_case(rows: int, cols: int, copies: int, device: str, mx: bool) -> bench.Problem:
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
    return problem(
        "swiglu_mxfp8" if mx else "swiglu_fp8", rows, cols, copies, outputs, least, call, triton_call, torch_call
    )


def quantize_case(rows: int, cols: int, copies: int, device: str, mx: bool) -> bench.Problem:
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
    return problem(name, rows, cols, copies, rows * cols, least, call, triton_call, torch_call)


def norm_alone_case(rows: int, cols: int, copies: int, device: str, mx: bool) -> bench.Problem:
    """Return the norm without a residual."""
    return norm_case(rows, cols, copies, device, mx, with_residual=False)


CASES = (norm_case, norm_alone_case, activation_case, quantize_case)


def bytes_of(results: Results) -> torch.Tensor:
    """Return all bytes of the results in one row."""
    return torch.cat([result.view(torch.uint8).flatten() for result in results])


@bench.command("fused FP8", MAX_DIFFERENT)
@click.option("--rows", "row_counts", multiple=True, type=int, help="Rows; default: 1, 8 and 32, on a GPU to 2048.")
@click.option("--cols", default=16384, help="Columns of input and of gate_up; a multiple of 64.")
def main(row_counts: tuple[int, ...], cols: int) -> Iterator[bench.Problem]:
    """Bench the fused kernels beside Triton's and the same steps in torch."""
    if cols < 64 or cols % 64:
        raise click.BadParameter(f"{cols} is not a positive multiple of 64", param_hint="--cols")
    torch.manual_seed(0)
    for count in row_counts or ((1, 8, 32, 128, 512, 2048) if bench.on_gpu() else (1, 8, 32)):
        copies = bench.copies_of(4 * count * cols)
        for make in CASES:
            for mx in (False, True):
                yield make(count, cols, copies, str(bench.device()), mx)


if __name__ == "__main__":
    main()
