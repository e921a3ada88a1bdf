"""The MX-FP8 GEMM for few rows on sm_90 that makes its X in the same launch: stubs, limits and configuration."""

from __future__ import annotations

from hipforge.ops.core import row_stream
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.core.kernel import Configuration
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.raw import K_STEP, OPERANDS, k_steps

MODULE = "module_mxfp8_gemm_row_stream_made"
ROWS, TILES = 8, 2  # of X at most; rows of W in a pass over 8
WARPS, SHARERS = 16, 8  # of a block; of those that share K where they have few passes and steps: all took longer
MANY = 7  # passes of a block, or steps of each warp, from which on all warps share K: they hide the end of a round
UNITS = 132  # of an H100
THREADS, CHUNK = 512, 8  # of a block; elements of an access
MOST_CODES = 4 * 16 * THREADS  # bytes of X that a block copies
MOST_CHUNKS = 2  # of a thread that makes a norm, of all rows
MOST_SWIGLU_ROWS = 2  # every block reads gate and up of all rows from L2: for more a launch of its own takes less
_CONFIGURATION = "tiles, sharers, blocks: int; programmatic: bool"

mxfp8_row_copied_out = stub(
    "mxfp8_row_copied_out",
    MODULE,
    f"{OPERANDS}; {_CONFIGURATION}",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16, X by way of shared memory.",
    variant={"HF_TILES": "tiles"},
)
mxfp8_row_stream_norm_out = stub(
    "mxfp8_row_stream_norm_out",
    MODULE,
    "out, sum_out, x, residual, norm_weight, Wq, Ws: Tensor; bias: Tensor?; "
    f"epsilon, weight_offset: float; {_CONFIGURATION}",
    "Write norm(x + residual) @ Wq^T + bias into ``out`` [M, N] bf16, and the sum into ``sum_out`` [M, K].",
    variant={"HF_TILES": "tiles"},
    mutates=("out", "sum_out"),
)
mxfp8_row_stream_swiglu_out = stub(
    "mxfp8_row_stream_swiglu_out",
    MODULE,
    f"out, gate_up, Wq, Ws: Tensor; bias: Tensor?; alpha, beta, limit: float; {_CONFIGURATION}",
    "Write swiglu(gate_up) @ Wq^T + bias into ``out`` [M, N] bf16.",
    variant={"HF_TILES": "tiles"},
)


def shared_bytes(m: int, tiles: int, block_rows: int, k: int) -> int:
    """Return the shared memory of a block: what the stream needs, and X, whose rows are a little apart."""
    stream = row_stream.shared_bytes(ROWS, tiles, block_rows, k)
    return -(-stream // 128) * 128 + m * (k + BLOCK + k // BLOCK + 4)


def configuration(n: int, k: int, units: int) -> Configuration:
    """Return the rows of a pass over 8, how many warps share K, and how many blocks the rows of W."""
    blocks = row_stream.fewest(n, k, row_stream.blocks_for(n, k, units), TILES)
    passes = -(-n // (8 * TILES * blocks))
    steps = max(1, k_steps(k))
    # All warps have work in the only pass.
    wanted = WARPS if passes == 1 or passes >= MANY or steps >= MANY * WARPS else SHARERS
    return {"tiles": TILES, "sharers": min(wanted, 1 << (steps.bit_length() - 1)), "blocks": blocks}


def _refusal(m: int, n: int, k: int) -> str | None:
    if not 1 <= m <= ROWS or n == 0:
        return f"M of 1 to {ROWS} and N of at least 1; got M={m}, N={n}"
    if k == 0 or k % K_STEP:
        return f"K of a positive multiple of {K_STEP}; got {k}"
    if shared_bytes(m, TILES, -(-n // configuration(n, k, UNITS)["blocks"]), k) > row_stream.SHARED_BYTES:
        return f"X and a ring in {row_stream.SHARED_BYTES} bytes of shared memory; got M={m}, K={k}"
    return None


def copied_refusal(m: int, n: int, k: int) -> str | None:
    """Return what the kernel that copies X needs and [M, N, K] does not have, or None."""
    reason = _refusal(m, n, k)
    return f"X of at most {MOST_CODES} bytes; got M={m}, K={k}" if reason is None and m * k > MOST_CODES else reason


def norm_refusal(m: int, n: int, k: int) -> str | None:
    """Return what the kernel that makes a norm needs and [M, N, K] does not have, or None."""
    reason = _refusal(m, n, k)
    if reason is None and m * -(-k // (CHUNK * THREADS)) > MOST_CHUNKS:
        return f"M times the pieces of {CHUNK * THREADS} columns of a row at most {MOST_CHUNKS}; got M={m}, K={k}"
    return reason


def swiglu_refusal(m: int, n: int, k: int) -> str | None:
    """Return what the kernel that makes SwiGLU needs and [M, N, K] does not have, or None."""
    if m > MOST_SWIGLU_ROWS:
        return f"M of at most {MOST_SWIGLU_ROWS}; got {m}"
    return _refusal(m, n, k)
