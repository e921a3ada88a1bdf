"""The experts of one token on sm_90: two launches that read the chosen experts' weights, without sorted slots.

Their experts are given, or chosen by every block of the first from the router's logits (:class:`Choice`).
The first has the rows of gate and up of all chosen experts side by side, and all multiprocessors share them evenly.
The second makes SwiGLU of them, quantised as :func:`hipforge.swiglu_mxfp8` does, and adds the experts up in float32
with their routing weights: a sum is rounded once, where :func:`hipforge.moe_combine` adds rounded ones.

Either is a kernel in passes (:data:`PASSES`) for K up to 4096, else the dense kernel's stream of rows (:data:`ROWS`).
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, field, replace

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

_CHOSEN = f"choices, shared: int; sigmoid, renormalize: bool; scale: float; {_SHARED}"

mxfp8_token_gate_up_passes_out = stub(
    "mxfp8_token_gate_up_passes_out",
    PASSES,
    f"out, Xq, Xs, W, Ws, ids: Tensor; alpha, beta, limit: float; {_SHARED}",
    "Write swiglu(X @ W[ids]^T) into ``out`` float32 [S, N/2], K up to 4096.",
)
mxfp8_token_choose_gate_up_out = stub(
    "mxfp8_token_choose_gate_up_out",
    PASSES,
    f"out, chosen, Xq, Xs, W, Ws, logits: Tensor; bias: Tensor?; alpha, beta, limit: float; {_CHOSEN}",
    "Write swiglu(X @ W[e]^T) of the experts e that ``logits`` choose into ``out`` [S, N/2], e into ``chosen``.",
    mutates=("out", "chosen"),
)
mxfp8_token_down_passes_out = stub(
    "mxfp8_token_down_passes_out",
    PASSES,
    f"out, inner, W, Ws, ids, weights: Tensor; alpha, beta, limit: float; {_SHARED}",
    "Write the weighted sum of inner @ W[ids]^T into ``out`` bf16 [1, N], K up to 4096; SwiGLU of a bf16 inner.",
)
mxfp8_token_choose_down_out = stub(
    "mxfp8_token_choose_down_out",
    PASSES,
    f"out, inner, W, Ws, chosen, logits: Tensor; bias: Tensor?; {_CHOSEN}",
    "Write the sum of inner @ W[e]^T of the experts ``chosen``, weighted by ``logits``, into ``out`` bf16 [1, N].",
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
    in_passes = makes_swiglu(hidden, inner), takes_passes(hidden, inner)
    for name, k, passes, multiple in (("H", hidden, in_passes[0], GATE_UP_K), ("I", inner, in_passes[1], DOWN_K)):
        if k <= 0 or not (passes or k % multiple == 0):
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
    plans = replace(PLANS, most_meetings=None)  # what an H100 was measured with
    return min(fit, key=lambda given: (plans.busy(n, k, rows=row_stream_made.ROWS, **given), -given["tiles"]))


@dataclass(frozen=True)
class Choice:
    """The experts of one token, chosen by the products themselves as :func:`hipforge.topk_gating` does without groups.

    Attributes:
        logits: float32 [1, E - shared_experts], contiguous.
        k: 1 to 16.
        scoring: ``softmax`` or ``sigmoid``.
        bias: float32 [E - shared_experts], added to sigmoid scores for the choice, or None.
        renormalize: whether the weights of the token sum to ``scale``.
        scale: of the weights.
        shared_experts: the last so many experts have weight 1.
        ids: int32 [k + shared_experts], where the first product leaves the experts for the second: ``ids_out``, or new.
    """

    logits: torch.Tensor
    k: int
    scoring: str = "softmax"
    bias: torch.Tensor | None = None
    renormalize: bool = True
    scale: float = 1.0
    shared_experts: int = 0
    ids_out: InitVar[torch.Tensor | None] = None
    ids: torch.Tensor = field(init=False)

    def __post_init__(self, ids_out: torch.Tensor | None) -> None:
        ids = torch.empty(self.slots, dtype=torch.int32, device=self.logits.device) if ids_out is None else ids_out
        object.__setattr__(self, "ids", ids)

    @property
    def slots(self) -> int:
        """Return how many experts there are."""
        return self.k + self.shared_experts

    @property
    def options(self) -> tuple[int, int, bool, bool, float]:
        """Return what the entries take besides tensors."""
        return self.k, self.shared_experts, self.scoring == "sigmoid", self.renormalize, self.scale


def makes_swiglu(hidden: int, inner: int) -> bool:
    """Return whether the first product of a layer makes SwiGLU, because both are in passes."""
    return takes_passes(2 * inner, hidden) and takes_passes(hidden, inner)


def choice_refusal(hidden: int, inner: int, scoring: str, has_bias: bool) -> str | None:
    """Return what products that choose experts themselves need and a layer does not have, or None."""
    if has_bias and scoring != "sigmoid":
        return "sigmoid scores where there is a bias"
    if not makes_swiglu(hidden, inner):
        most = pass_stream.MOST_K
        return f"H and I of a multiple of {K_STEP} up to {most}; got H={hidden}, I={inner}"
    return None


def new_inner(slots: int, hidden: int, inner: int, device: torch.device) -> torch.Tensor:
    """Return memory for what is between the products: float32 [slots, I], or bfloat16 [slots, 2 I] of gate and up."""
    if makes_swiglu(hidden, inner):
        return torch.empty(slots, inner, dtype=torch.float32, device=device)
    return torch.empty(slots, 2 * inner, dtype=torch.bfloat16, device=device)


def token_gate_up(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    chosen: torch.Tensor | Choice,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return SwiGLU of X @ W[e]^T of each chosen expert e, or the products, where :func:`makes_swiglu` says so.

    Args:
        xq: float8_e4m3fn or uint8 [1, H], contiguous, H a multiple of 512, or of 128 up to 4096 with N one of 16.
        x_scale: e8m0 bytes [1, H/32].
        w: float8_e4m3fn or uint8 [E, 2 I, H], contiguous: rows of the gate, then of up.
        w_scale: e8m0 bytes [E, 2 I, H/32].
        chosen: int32 [S], each an expert of ``w``: nothing checks it; S up to 32. Or a :class:`Choice`, which
            :func:`choice_refusal` takes.
        alpha: of SwiGLU, as the next two; the products do not have it.
        beta: added to up.
        limit: where gate and up are clamped, or None.
        out: what :func:`new_inner` returns, to write into.

    Returns:
        ``out``: float32 of gate and up rounded to bfloat16, or these.

    Raises:
        GuardError: operands of the wrong dtype, shape or device (ArchError: a device that is not sm_90).
        BuildError, LaunchError: the kernel could not be built or run.
    """
    (_, n, k) = w.shape
    slots = chosen.slots if isinstance(chosen, Choice) else chosen.shape[0]
    result = new_inner(slots, k, n // 2, xq.device) if out is None else out
    given, activation = (result, xq, x_scale, w, w_scale), (alpha, beta, math.inf if limit is None else limit)
    spread = pass_stream.sharers_for(k), devices.current().cu_count()
    if isinstance(chosen, Choice):
        end = *activation, *chosen.options, *spread, programmatic.active()
        mxfp8_token_choose_gate_up_out(result, chosen.ids, *given[1:], chosen.logits, chosen.bias, *end)
    elif makes_swiglu(k, n // 2):
        mxfp8_token_gate_up_passes_out(*given, chosen, *activation, *spread, programmatic.active())
    else:
        mxfp8_token_gate_up_out(*given, chosen, *_configuration(slots * n, k, 0, n).values(), programmatic.active())
    return result


def token_down(
    inner: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    chosen: torch.Tensor | Choice,
    weights: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum over the chosen experts e of weight x (SwiGLU, in MX-FP8) @ W[e]^T.

    Args:
        inner: what :func:`token_gate_up` returns: float32 [S, K], or bfloat16 [S, 2 K], of which SwiGLU is made here.
        w: float8_e4m3fn or uint8 [E, N, K], contiguous, K a multiple of 256, or of 128 up to 4096 with N one of 16.
        w_scale: e8m0 bytes [E, N, K/32].
        chosen: int32 [S], each an expert of ``w``: nothing checks it; S up to 32. Or the :class:`Choice` that the
            launch before, :func:`token_gate_up`, had, whose ``ids`` and logits a programmatic launch reads early.
        weights: float32 [S]; None with a :class:`Choice`, which has its own.
        alpha: of SwiGLU, as the next two; a float32 ``inner`` has it.
        beta: added to up.
        limit: where gate and up are clamped, or None.
        out: contiguous bfloat16 [1, N] to write into.

    Returns:
        bfloat16 [1, N], added in float32 and rounded once.

    Raises:
        GuardError: operands of the wrong dtype, shape or device (ArchError: a device that is not sm_90).
        BuildError, LaunchError: the kernel could not be built or run.
    """
    (_, n, k) = w.shape
    slots = chosen.slots if isinstance(chosen, Choice) else chosen.shape[0]
    result = new_or_given(out, (1, n), torch.bfloat16, inner.device)
    given, activation = (result, inner, w, w_scale), (alpha, beta, math.inf if limit is None else limit)
    spread = down_sharers(slots, k), devices.current().cu_count()
    if isinstance(chosen, Choice):
        end = *chosen.options, *spread, programmatic.active()
        mxfp8_token_choose_down_out(*given, chosen.ids, chosen.logits, chosen.bias, *end)
    elif takes_passes(n, k):
        mxfp8_token_down_passes_out(*given, chosen, weights, *activation, *spread, programmatic.active())
    else:
        rest = *_configuration(n, slots * k, 1, n).values(), programmatic.active()
        mxfp8_token_down_out(*given, chosen, weights, *activation, *rest)
    return result
