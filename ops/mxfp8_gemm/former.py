"""Formats that tables of the dense MX-FP8 GEMM had before: three columns whose meaning the kernel decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hipforge.ops.core.kernel import Configuration, Kernel, spelled
from hipforge.ops.core.tuned import ANY_CU, DEVICE, EVIDENCE, GEMM_SHAPE, USE_HIP, Column, Former, Value
from hipforge.ops.mxfp8_gemm.kernels.gemv import DEFAULT_BLOCK_N, GEMV
from hipforge.ops.mxfp8_gemm.kernels.group_split import GROUP_SPLIT
from hipforge.ops.mxfp8_gemm.kernels.k_packed import K_PACKED
from hipforge.ops.mxfp8_gemm.kernels.mfma import MFMA
from hipforge.ops.mxfp8_gemm.kernels.tiles import TILES
from hipforge.ops.mxfp8_gemm.kernels.wave_split import COLUMNS, WAVE_SPLIT

SHORT_BLOCK_N, SHORT_MAX_M, SHORT_MIN_K = 4, 8, 6144

# block_n, n_sub and k_splits -> what they mean
_MEANT: Mapping[str, tuple[Kernel, Callable[[int, int, int], Configuration]]] = {
    "gemv": (GEMV, lambda block_n, n_sub, k_splits: {"block_n": block_n}),
    "mfma": (MFMA, lambda block_n, n_sub, k_splits: {"n_sub": n_sub, "k_splits": k_splits}),
    "wave_split": (
        WAVE_SPLIT,
        lambda block_n, n_sub, k_splits: {"rows": 16 * n_sub, "columns": block_n or COLUMNS[0], "waves": k_splits},
    ),
    "group_split": (
        GROUP_SPLIT,
        lambda block_n, n_sub, k_splits: {"rows": 16 * n_sub, "columns": block_n, "k_splits": k_splits},
    ),
    "k_packed": (
        K_PACKED,
        lambda block_n, n_sub, k_splits: {"columns": block_n, "groups": n_sub, "waves": k_splits},
    ),
    "tiles": (TILES, lambda block_n, n_sub, k_splits: {"tile": 16000 * n_sub + block_n, "k_splits": k_splits}),
}
_UNUSED = {"gemv": ("n_sub", "k_splits"), "mfma": ("block_n",)}


def launcher_block_n(m: int, k: int) -> int:
    """Return the columns per work-group that a GEMV row without such a column was tuned with.

    The launcher that the format was written for took 4 where M was at most 8 and K long, else 8.
    """
    return SHORT_BLOCK_N if m <= SHORT_MAX_M and k >= SHORT_MIN_K else DEFAULT_BLOCK_N


def _now(values: Mapping[str, Value]) -> Mapping[str, Value]:
    former = str(values["kernel"])
    kernel, configuration = _MEANT[former]
    for name in _UNUSED.get(former, ()):
        if values[name]:
            raise ValueError(f"{former} has no {name}, which must be 0; got {values[name]}")
    given = (int(values[name] or 0) for name in ("block_n", "n_sub", "k_splits"))
    return {**values, "kernel": kernel.name, "config": spelled(configuration(*given))}


def _upstream(values: Mapping[str, Value]) -> Mapping[str, Value]:
    block_n = launcher_block_n(int(values["M"] or 0), int(values["K"] or 0)) if values["kernel"] == "gemv" else 0
    return _now({"gfx": "gfx950", "cu_num": ANY_CU, "source": "legacy", "block_n": block_n, **values})


_M, _N, _K = GEMM_SHAPE
_PARAMETERS = tuple(Column(name, int, minimum=0) for name in ("block_n", "n_sub", "k_splits"))
_KERNEL = Column("kernel", str, accepted=tuple(_MEANT))

FORMERS = (
    Former((*DEVICE, *GEMM_SHAPE, _KERNEL, *_PARAMETERS, USE_HIP, *EVIDENCE), _now),
    # Of earlier small-M kernels: always gfx950.
    Former((_K, _N, _M, _KERNEL, *_PARAMETERS[1:], USE_HIP), _upstream),
)
