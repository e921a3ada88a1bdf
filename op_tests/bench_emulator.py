"""How fast the emulator is on this machine: wave-instructions per second, scaled MFMAs, a whole GEMM, its own build.

    python op_tests/bench_emulator.py [--repeats 5] [--json FILE]

Every figure is *measured* here and is a median over the repeats; it says nothing about a GPU. The cost of short
turns of waves is the ratio of two minima of CPU time over alternating calls, so other work hardly counts. Instruction
counts come from one more run under the counters, since counting itself costs time. Exit status 1 if a bound is missed.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from helpers import hip_compile
from helpers.bench import Figure, finish

from hipforge import devices, emulator
from hipforge.cli.options import PICTURE_OPTION, Output
from hipforge.emulator import library
from hipforge.emulator import triton as emulated
from hipforge.emulator.configuration import Options
from hipforge.jit.cache import store as cache
from hipforge.ops.mxfp8_gemm import mxfp8_gemm_tiles, smallm_mxfp8_gemv
from hipforge.ops.reference import mxfp8_mm, quantize_mxfp8
from hipforge.ops.triton import mxfp8_dot_scaled as dot_scaled
from hipforge.ops.triton.mxfp8_kernels import mxfp8_dot_scaled_kernel

GEMV = (1, 3072, 6144)  # M, N, K
GEMM = (64, 5120, 6144)
TILE_K = 2048
TILES = {64064: 15.0, 128128: 7.0, 256256: 4.0}  # M wave-instructions per second on one thread, at least
MFMAS = 4000
DEFAULT_QUANTUM, LONG_QUANTUM = Options.quantum, 48

MFMA_KERNEL = """
#include "hip.h"
typedef int i32x8 __attribute__((ext_vector_type(8)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
__global__ void mfmas(f32x4* out, const i32x8* in, int count) {
  const i32x8 a = in[threadIdx.x], b = in[threadIdx.x + 64];
  f32x4 acc = {};
  for (int i = 0; i < count; ++i)
    acc = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, acc, 0, 0, 0, 127 + (i & 1), 0, 126 - (i & 1));
  out[threadIdx.x] = acc;
}
int main() { return 0; }
"""


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    """Return MX-FP8 operands of normal data, seed 0."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(m, k, generator=generator) * 0.5).bfloat16()
    w = (torch.randn(n, k, generator=generator) * 0.1).bfloat16()
    return (*quantize_mxfp8(x), *quantize_mxfp8(w))


def quantum_row(name: str, call: Callable[[], object], repeats: int, bound: float) -> Figure:
    """Speed at the default quantum as a share of the speed in long turns: least CPU times of calls that alternate."""
    best = dict.fromkeys((DEFAULT_QUANTUM, LONG_QUANTUM), float("inf"))
    call()
    for _ in range(3 * repeats):
        for quantum in best:
            with emulator.options(threads=1, checks="off", quantum=quantum):
                start = time.process_time()
                call()
                best[quantum] = min(best[quantum], time.process_time() - start)
    share = best[LONG_QUANTUM] / best[DEFAULT_QUANTUM]
    what = f"{name}: speed at quantum {DEFAULT_QUANTUM} / at {LONG_QUANTUM}"
    return Figure("", what, share, "", target=bound, more_is_better=True)


def gemv_rows(repeats: int) -> list[Figure]:
    """Wave-instructions per second of one thread on the GEMV, by checkers."""
    data = operands(*GEMV)

    def call() -> torch.Tensor:
        return smallm_mxfp8_gemv(*data, torch.bfloat16)

    with emulator.counters() as counted:
        call()
    rows = []
    for checks, bound in (("off", 20.0), ("memory", 10.0), ("all", 5.0)):
        with emulator.options(threads=1, checks=checks):
            rate = counted.wave_instructions / median_seconds(call, repeats) / 1e6
        what = f"GEMV {GEMV}, one thread, checks {checks}"
        rows.append(Figure("", what, rate, "M wave-instr/s", target=bound, more_is_better=True))
    return [*rows, quantum_row("GEMV", call, repeats, 0.97)]


def tile_rows(repeats: int) -> list[Figure]:
    """Wave-instructions per second of one work-group of the MX-FP8 tile kernels, memory checked, on one thread."""
    rows = []
    for tile, bound in TILES.items():
        data = operands(tile // 1000, tile % 1000, TILE_K)
        call = functools.partial(mxfp8_gemm_tiles, *data, tile=tile)
        with emulator.counters() as counted:
            call()
        with emulator.options(threads=1, checks="memory"):
            rate = counted.wave_instructions / median_seconds(call, 4 * repeats) / 1e6
        what = f"tile {tile}, K = {TILE_K}, one thread, checks memory"
        rows.append(Figure("", what, rate, "M wave-instr/s", target=bound, more_is_better=True))
    return rows


def mfma_rows(repeats: int) -> list[Figure]:
    """Microseconds of a scaled MFMA, from a loop of them in one wave."""
    payload = torch.randint(0, 100, (128, 32), dtype=torch.uint8).view(torch.int32)
    out = torch.empty(64, 4)
    with tempfile.TemporaryDirectory() as folder:
        code = emulator.CodeObject(hip_compile.device_elf(MFMA_KERNEL, Path(folder)))

        def call() -> object:
            return emulator.launch(code.kernels["mfmas"], 1, 64, [out, payload, MFMAS])

        with emulator.options(threads=1, checks="off"), emulator.uncounted():
            seconds = median_seconds(call, repeats)
            share = quantum_row("scaled MFMA", call, repeats, 0.95)
    return [Figure("", "scaled MFMA 16x16x128 fp8, loop included", seconds / MFMAS * 1e6, "us", target=4.0), share]


def gemm_rows(repeats: int) -> list[Figure]:
    """Seconds of a whole Triton MX-FP8 GEMM, on one thread and on all."""
    m, n, k = GEMM
    data = operands(m, n, k)
    config = dot_scaled.STOCK
    kernel = emulated.jit(mxfp8_dot_scaled_kernel, arch="gfx950")
    out = torch.empty(m, n, dtype=torch.bfloat16)

    arguments = (*(tensor.view(torch.uint8) for tensor in data), out, m, n, k)
    meta = {**config.constants(n, k), "num_warps": config.num_warps, "num_stages": config.num_stages}

    def call() -> object:
        return kernel[config.grid(m, n)](*arguments, **meta)

    rows = []
    for name, threads, bound in (("one thread", 1, 0.4), ("all cores", 0, None)):
        with emulator.options(threads=threads, checks="off"), emulator.uncounted():
            rows.append(Figure("", f"Triton GEMM {GEMM}, {name}", median_seconds(call, repeats), "s", target=bound))
    with emulator.uncounted():
        rows.append(quantum_row("Triton GEMM", call, repeats, 0.95))
    wrong = (out.double() - mxfp8_mm(*data).double()).norm() / out.double().norm()
    if not wrong < 3e-3:
        raise click.ClickException(f"the GEMM is wrong: relF {wrong:.2e}")
    return rows


def build_row() -> Figure:
    """Seconds that the emulator's own build took, as its manifest records."""
    entry = cache.read_entry(library.build().parent)
    assert entry is not None
    return Figure("", "emulator build (recorded)", entry.manifest.build_seconds, "s", target=60.0)


@click.command()
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "json_file", type=Output(), help="Also write the rows here.")
@PICTURE_OPTION
def main(repeats: int, json_file: Path | None, picture: Path | None) -> None:
    """Measure the emulator's speed on this machine."""
    if devices.current().kind != "emulator":
        raise click.ClickException("this bench measures the emulator: HIPFORGE_DEVICE=emulator")
    rows = [*gemv_rows(repeats), *tile_rows(repeats), *mfma_rows(repeats), *gemm_rows(repeats), build_row()]
    finish(rows, "emulator speed, medians", json_file, picture)


if __name__ == "__main__":
    main()
