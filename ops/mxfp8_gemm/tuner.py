"""The tuner of the small-M MX-FP8 GEMM: which kernel and parameters for each (M, N, K).

On a GPU candidates are timed and compared with Triton; on the emulator they are ranked by the model of
:mod:`hipforge.tuning.model` over their exact counts. Either way each candidate runs once on real data first and is
rejected if its result is wrong or its build exceeds the module's resource limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.tuned import Value
from hipforge.ops.mxfp8_gemm import group_split, k_packed, tile_kernel, wave_split
from hipforge.ops.mxfp8_gemm.family import FAMILY
from hipforge.ops.mxfp8_gemm.kernels import gemv_rows, smallm_mxfp8_gemv, smallm_mxfp8_mfma
from hipforge.ops.reference import mxfp8_mm, quantize_mxfp8
from hipforge.ops.triton import mxfp8_dot_scaled as dot_scaled
from hipforge.tuning import timing
from hipforge.tuning.cases import DECODE_M, MINIMAX_M3, Cell, cells
from hipforge.tuning.gemm import Operands, Pipeline, gemm_command, gemm_tuner, random_operands
from hipforge.tuning.tuner import Baselines

# float32 accumulation and one rounding to bf16 give 1.7e-3 (uniform rounding within half a unit of 8 bits); a single
# wrong scale byte in one block of a K of 6144 gives more than 1e-2.
MAX_ERROR = 3e-3

KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "smallm_mxfp8_gemv": smallm_mxfp8_gemv,
    "smallm_mxfp8_mfma": smallm_mxfp8_mfma,
}
# Those that add a bias have one dtype of results.
WITH_BIAS: dict[str, Callable[..., torch.Tensor]] = {
    wave_split.KERNEL: wave_split.mxfp8_wave_split,
    group_split.KERNEL: group_split.mxfp8_group_split,
    k_packed.KERNEL: k_packed.mxfp8_k_packed,
    tile_kernel.KERNEL: tile_kernel.mxfp8_gemm_tiles,
}

# What the model has to know of the kernels' pipelines.
GEMV_WAVES = 4
GEMV_STEP_BYTES = 1024  # of one weight row, per wave and step
GEMV_STEPS_AHEAD = 2
GEMV_MOST_COLUMNS = {1: 4, 2: 4, 4: 4, 8: 4, 16: 2}  # that a wave accumulates at once, by accumulated rows
MFMA_STEP_BYTES = 2048  # of 16 weight rows, per wave and step
MFMA_STEPS_AHEAD = {1: 4, 2: 4, 4: 2}  # by n_sub
TILE_BYTES_AHEAD = 3 * 2048  # of 64 x 64: three stages of four, and of each a wave's part of W


# Kernels whose waves run the loop of wave_split_kernel.h.
WAVE_LOOP = (wave_split.KERNEL, group_split.KERNEL, k_packed.KERNEL)


def operands(cell: Cell, device: torch.device) -> Operands:
    """Return (xq, x_scale, wq, w_scale) of normally distributed data, the same for a cell on every run."""
    return random_operands(cell, device, quantize_mxfp8)


def _columns(choice: Choice) -> Mapping[str, Value]:
    if choice.kernel == wave_split.KERNEL:
        tiles, waves = choice.configuration["rows"] // 16, choice.configuration["waves"]
        block_n = choice.configuration["columns"] if choice.configuration["columns"] > 16 else 0
        return {"kernel": "wave_split", "block_n": block_n, "n_sub": tiles, "k_splits": waves}
    if choice.kernel == group_split.KERNEL:
        rows, columns, k_splits = (choice.configuration[name] for name in ("rows", "columns", "k_splits"))
        return {"kernel": "group_split", "block_n": columns, "n_sub": rows // 16, "k_splits": k_splits}
    if choice.kernel == k_packed.KERNEL:
        block_n, n_sub, k_splits = (choice.configuration[name] for name in ("columns", "groups", "waves"))
        return {"kernel": "k_packed", "block_n": block_n, "n_sub": n_sub, "k_splits": k_splits}
    if choice.kernel == tile_kernel.KERNEL:
        rows, columns = divmod(choice.configuration["tile"], 1000)
        k_splits = choice.configuration["k_splits"]
        return {"kernel": "tiles", "block_n": columns, "n_sub": rows // 16, "k_splits": k_splits}
    return {"kernel": choice.kernel.rpartition("_")[2], "block_n": 0, "n_sub": 0, "k_splits": 0, **choice.configuration}


def _pipeline(choice: Choice, cell: Cell, arch: str) -> Pipeline:
    if choice.kernel in (wave_split.KERNEL, group_split.KERNEL):
        rows, columns = choice.configuration["rows"], choice.configuration["columns"]
        return Pipeline(wave_split.steps_ahead(rows, columns) * MFMA_STEP_BYTES * columns // 16)
    if choice.kernel == k_packed.KERNEL:
        return Pipeline(k_packed.STEPS_AHEAD * MFMA_STEP_BYTES)
    if choice.kernel == tile_kernel.KERNEL:
        return Pipeline(TILE_BYTES_AHEAD)
    if choice.kernel == "smallm_mxfp8_mfma":
        n_sub = choice.configuration["n_sub"]
        return Pipeline(MFMA_STEPS_AHEAD[n_sub] * MFMA_STEP_BYTES * n_sub)
    columns = choice.configuration["block_n"] // GEMV_WAVES
    at_once = min(columns, GEMV_MOST_COLUMNS[gemv_rows(cell.m)])
    return Pipeline(GEMV_STEPS_AHEAD * GEMV_STEP_BYTES * at_once, columns // at_once)


def _run(choice: Choice, parts: Operands) -> torch.Tensor:
    if choice.kernel in KERNELS:
        return KERNELS[choice.kernel](*parts, torch.bfloat16, **choice.configuration)
    return WITH_BIAS[choice.kernel](*parts, **choice.configuration)


def _baselines(cell: Cell, copies: Sequence[Operands]) -> Baselines:
    """Return microseconds of Triton in its stock configuration and in its best one; None without triton."""
    device = copies[0][0].device
    if dot_scaled.unavailable(device) is not None:
        return None
    out = torch.empty((cell.m, cell.n), dtype=torch.bfloat16, device=device)

    def time(config: dot_scaled.TileConfig) -> float:
        return timing.microseconds_per_call(lambda i: dot_scaled.mxfp8_dot_scaled(out, *copies[i], config), len(copies))

    stock = time(dot_scaled.STOCK)
    return stock, min(stock, *(time(config) for config in dot_scaled.TUNED))


TUNER = gemm_tuner(
    FAMILY,
    max_error=MAX_ERROR,
    default_cells=cells(MINIMAX_M3, DECODE_M),
    quantize=lambda x, arch: quantize_mxfp8(x),
    reference=lambda parts: mxfp8_mm(*parts, out_dtype=torch.float32),
    run=_run,
    pipeline=_pipeline,
    columns=_columns,
    baselines=_baselines,
    loop=lambda kernel: WAVE_LOOP[0] if kernel in WAVE_LOOP else kernel,
)

command = gemm_command(
    TUNER,
    "Choose kernel, block_n, n_sub and k_splits of the small-M MX-FP8 GEMM for each cell; by default the 15 weight "
    "shapes of MiniMax-M3 x M = 1 to 64. On a GPU cells are measured; elsewhere a model ranks them and rows say so.",
)
