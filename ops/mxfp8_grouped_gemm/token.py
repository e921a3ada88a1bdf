"""The experts of one token on sm_90: two launches that read the chosen experts' weights, without sorted slots.

The first has the rows of gate and up of all chosen experts side by side, and all multiprocessors share them evenly.
The second makes SwiGLU of them, quantised as :func:`hipforge.swiglu_mxfp8` does, and adds the experts up in float32
with their routing weights: a sum is rounded once, where :func:`hipforge.moe_combine` adds rounded ones.

Either is a kernel in passes (:data:`PASSES`) for K up to 4096, else the dense kernel's stream of rows (:data:`ROWS`).
"""

from __future__ import annotations

import math

import torch

from hipforge import devices
from hipforge.errors import GuardError
from hipforge.ops.core import programmatic
from hipforge.ops.core.kernel import Configuration
from hipforge.ops.core.outputs import new_or_given
from hipforge.ops.core.row_stream import SHARED_BYTES
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.kernels import row_stream_made
from hipforge.ops.mxfp8_gemm.kernels.row_stream import PLANS
from hipforge.ops.mxfp8_gemm.raw import K_STEP, k_steps
from hipforge.ops.mxfp8_grouped_gemm.kernels import pass_stream
from hipforge.ops.mxfp8_grouped_gemm.kernels.row_stream import MAX_N, PASS_ROWS, WARPS

PASSES, ROWS = "module_mxfp8_grouped_gemm_token_passes", "module_mxfp8_grouped_gemm_token"
MOST_SLOTS = 32
TILES = (2,)  # rows of W in a pass over 8, of the stream of rows
GATE_UP_K, DOWN_K = 512, 256  # what its K is a multiple of: scales of a row come in pieces of 16 and 8 bytes
_SHARED = "sharers, blocks: int; programmatic: bool"

mxfp8_token_gate_up_passes_out = stub(
    "mxfp8_token_gate_up_passes_out",
    PASSES,
    f"out, Xq, Xs, W, Ws, ids: Tensor; {_SHARED}",
    "Write X @ W[ids]^T into ``out`` bf16 [S, N], K up to 4096.",
)
mxfp8_token_down_passes_out = stub(
    "mxfp8_token_down_passes_out",
    PASSES,
    f"out, gate_up, W, Ws, ids, weights: Tensor; alpha, beta, limit: float; {_SHARED}",
    "Write the weighted sum of swiglu(gate_up) @ W[ids]^T into ``out`` bf16 [1, N], K up to 4096.",
)
mxfp8_token_gate_up_out = stub(
    "mxfp8_token_gate_up_out",
    ROWS,
    f"out, Xq, Xs, W, Ws, ids: Tensor; tiles, {_SHARED}",
    "Write X @ W[ids]^T into ``out`` bf16 [S, N].",
    variant={"HF_TILES": "tiles"},
)
mxfp8_token_down_out = stub(
    "mxfp8_token_down_out",
    ROWS,
    f"out, gate_up, W, Ws, ids, weights: Tensor; alpha, beta, limit: float; tiles, {_SHARED}",
    "Write the weighted sum of swiglu(gate_up) @ W[ids]^T into ``out`` bf16 [1, N].",
    variant={"HF_TILES": "tiles"},
)


def takes_passes(n: int, k: int) -> bool:
    """Return whether the kernel in passes multiplies by experts' W [N, K]; the stream of rows does otherwise."""
    return 0 < k <= pass_stream.MOST_K and k % K_STEP == 0 and n % PASS_ROWS == 0 and n <= MAX_N


def refusal(slots: int, hidden: int, inner: int) -> str | None:
    """Return what the two launches need and a layer does not have, or None.

    Args:
        slots: experts of a token.
        hidden: H, columns of gate and up.
        inner: I, columns of down.
    """
    if not 1 <= slots <= MOST_SLOTS:
        return f"1 to {MOST_SLOTS} experts of a token; got {slots}"
    for name, k, n, multiple in (("H", hidden, 2 * inner, GATE_UP_K), ("I", inner, hidden, DOWN_K)):
        if k <= 0 or not (takes_passes(n, k) or k % multiple == 0):
            most = pass_stream.MOST_K
            return f"{name} of a multiple of {K_STEP} up to {most}, of {multiple} above; got {name}={k}"
    return None


def down_sharers(slots: int, k: int) -> int:
    """Return how many warps share K of an expert: so many that each team has one expert, and all warps have work.

    A team that has one expert makes its activations once.
    """
    sharers = pass_stream.sharers_for(k, steps=pass_stream.MOST_STEPS)
    while 2 * slots * sharers <= WARPS and 2 * sharers <= k_steps(k):
        sharers *= 2
    return sharers


def _configuration(n: int, k: int, x_rows: int, block_rows: int) -> Configuration:
    """Return the stream of rows' with the least rough time, n and k those of all slots, for so many rows of a block."""
    found = [
        {name: given[name] for name in ("tiles", "sharers", "blocks")}
        for given in PLANS.configurations(1, n, k, devices.current().cu_count())
        if given["tiles"] in TILES and -(-n // given["blocks"]) <= block_rows
    ]
    fit = [
        given
        for given in found
        if row_stream_made.shared_bytes(x_rows, given["tiles"], -(-n // given["blocks"]), k) <= SHARED_BYTES
    ]
    if not fit:
        raise GuardError(f"no configuration has room for N={n} and K={k} of all experts")
    return min(fit, key=lambda given: (PLANS.busy(n, k, rows=row_stream_made.ROWS, **given), -given["tiles"]))


def token_gate_up(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return X @ W[e]^T of each chosen expert e.

    Args:
        xq: float8_e4m3fn or uint8 [1, K], contiguous, K a multiple of 512, or of 128 up to 4096 with N one of 16.
        x_scale: e8m0 bytes [1, K/32].
        w: float8_e4m3fn or uint8 [E, N, K], contiguous.
        w_scale: e8m0 bytes [E, N, K/32].
        ids: int32 [S], each an expert of ``w``: nothing checks it; S up to 32.
        out: contiguous bfloat16 [S, N] to write into.

    Returns:
        bfloat16 [S, N].

    Raises:
        GuardError: operands of the wrong dtype, shape or device (ArchError: a device that is not sm_90).
        BuildError, LaunchError: the kernel could not be built or run.
    """
    slots, (_, n, k) = ids.shape[0], w.shape
    result = new_or_given(out, (slots, n), torch.bfloat16, xq.device)
    given = result, xq, x_scale, w, w_scale, ids
    if takes_passes(n, k):
        sharers, blocks = pass_stream.sharers_for(k), devices.current().cu_count()
        mxfp8_token_gate_up_passes_out(*given, sharers, blocks, programmatic.active())
    else:
        mxfp8_token_gate_up_out(*given, *_configuration(slots * n, k, 0, n).values(), programmatic.active())
    return result


def token_down(
    gate_up: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum over the chosen experts e of weight x (SwiGLU of gate_up, in MX-FP8) @ W[e]^T.

    Args:
        gate_up: contiguous bfloat16 [S, 2 K], gate in its first K columns, as :func:`token_gate_up` returns it.
        w: float8_e4m3fn or uint8 [E, N, K], contiguous, K a multiple of 256, or of 128 up to 4096 with N one of 16.
        w_scale: e8m0 bytes [E, N, K/32].
        ids: int32 [S], each an expert of ``w``: nothing checks it; S up to 32.
        weights: float32 [S].
        alpha: of SwiGLU, as the next two.
        beta: added to up.
        limit: where gate and up are clamped, or None.
        out: contiguous bfloat16 [1, N] to write into.

    Returns:
        bfloat16 [1, N], added in float32 and rounded once.

    Raises:
        GuardError: operands of the wrong dtype, shape or device (ArchError: a device that is not sm_90).
        BuildError, LaunchError: the kernel could not be built or run.
    """
    slots, (_, n, k) = ids.shape[0], w.shape
    result = new_or_given(out, (1, n), torch.bfloat16, gate_up.device)
    given = result, gate_up, w, w_scale, ids, weights, alpha, beta, math.inf if limit is None else limit
    if takes_passes(n, k):
        sharers, blocks = down_sharers(slots, k), devices.current().cu_count()
        mxfp8_token_down_passes_out(*given, sharers, blocks, programmatic.active())
    else:
        mxfp8_token_down_out(*given, *_configuration(n, slots * k, 1, n).values(), programmatic.active())
    return result
