"""The kernels of the scaled fp8 GEMM: those of the MX-FP8 GEMM, with other scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hipforge.ops.core.kernel import Configuration, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.few_rows import modelled_us
from hipforge.ops.mxfp8_gemm.kernels import group_split, tiles, wave_split
from hipforge.ops.mxfp8_gemm.raw import FEW_ROWS, OPERANDS

fp8_wave_split_out = stub(
    "fp8_wave_split_out",
    "module_fp8_gemm_wave_split",
    f"{OPERANDS}; scales, rows, columns, waves: int",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16 or f16; K a multiple of 16; ``scales`` as in ``Scales``.",
    variant={"HF_ROWS": "rows", "HF_SCALES": "scales"},
)


fp8_group_split_out = stub(
    "fp8_group_split_out",
    "module_fp8_gemm_group_split",
    f"{OPERANDS}; scales: int; workspace: Tensor?; rows, columns, k_splits: int",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16 or f16; ``workspace`` is what ``split_workspace`` returns.",
    variant={"HF_ROWS": "rows", "HF_SCALES": "scales"},
    mutates=("out", "workspace"),
)


fp8_tiles_out = stub(
    "fp8_tiles_out",
    "module_fp8_gemm_tiles",
    f"{OPERANDS}; scales: int; workspace: Tensor?; tile, k_splits: int",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16 or f16, with scales of kind ``Scales.ONCE``.",
    variant={"HF_TILE": "tile"},
    mutates=("out", "workspace"),
)


def _tiles_refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    # A raw call's key says nothing of scales; the entry does.
    return "block of 0" if any(key[3:]) else tiles.TILES.refusal(given, key, arch)


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    yield from wave_split.WAVE_SPLIT.default(problem, arch, cu_count)
    m, n, k = problem.key[:3]
    if arch != "gfx942" and m > FEW_ROWS:
        rows, columns = wave_split.ROWS[-1], wave_split.COLUMNS[-1]
        given = {"rows": rows, "columns": columns, "waves": wave_split.waves_by_default(rows, columns, k)}
        yield modelled_us(m, n, k, rows, columns, 1, cu_count), given


WAVE_SPLIT = replace(wave_split.WAVE_SPLIT, name="fp8_wave_split", launch=fp8_wave_split_out, default=_default)

GROUP_SPLIT = replace(group_split.GROUP_SPLIT, name="fp8_group_split", launch=fp8_group_split_out)


def _tiles_default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    if not any(problem.key[3:]):
        yield from (one for one in tiles.TILES.default(problem, arch, cu_count) if one[1]["tile"] in _TILES)


def _tiles_candidates(cell: Any, arch: str) -> Iterator[Configuration]:
    if not any(cell.key[3:]):
        yield from (given for given in tiles.TILES.candidates(cell, arch) if given["tile"] in _TILES)


_TILES = tuple(tile for tile in tiles.TILES.parameters["tile"] if tile != 128192)  # without MX scales that one spills
TILES = replace(
    tiles.TILES,
    name="fp8_tiles",
    launch=fp8_tiles_out,
    parameters={**tiles.TILES.parameters, "tile": _TILES},
    candidates=_tiles_candidates,
    refusal=_tiles_refusal,
    default=_tiles_default,
)

KERNELS = (WAVE_SPLIT, GROUP_SPLIT, TILES)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
