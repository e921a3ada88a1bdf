"""Small-M MX-FP8 GEMM for gfx950: Y = X @ W^T for decode batches, as a GEMV or through scaled MFMA.

Shapes and dtypes everywhere in this module: ``xq`` [M, K] and ``wq`` [N, K] hold e4m3fn elements (float8_e4m3fn, or
uint8 with the same bits), ``x_scale`` [M, K/32] and ``w_scale`` [N, K/32] hold e8m0 bytes (uint8 or
float8_e8m0fnu), the output [M, N] is bfloat16; K is a multiple of 32. Products are accumulated in float32 and
rounded once, to nearest even. A scale byte of 255 makes the outputs that it takes part in NaN.

Dispatch of :func:`mxfp8_gemv`, in this order:

1. an output dtype other than bfloat16 → None;
2. a device other than gfx950 → None;
3. a row of the tuned table for (K, N, M): ``use_hip=0`` → None, otherwise its kernel and parameters;
4. no row and M = 8 or 16 → MFMA with n_sub = 1 and k_splits the largest of 4 and 2 that divides K/128, else 1;
5. no row and any other M up to 16 → GEMV with block_n = 8;
6. no row and 16 < M < 64, M other than 32: the row of the next larger tuned M decides as in 3;
7. anything else → None.

The envelope is wider than that of the kernels whose interface this is: every K that is a multiple of 32 and every M
up to 16, none of it padded. A matrix of more than 2^31 - 1 elements → None, because the offset of a raw buffer load
is a signed 32-bit number; the raw ops raise there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops import dispatch
from hipforge.ops.dispatch import Accepted, Decision, Refused, planned_by
from hipforge.ops.reference.checks import require_dtype, require_last_multiple, require_rank, require_shape
from hipforge.ops.reference.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.reference.mxfp8 import mxfp8_mm
from hipforge.ops.tables import DEFAULT_BLOCK_N, GEMV_MAX_M, MFMA_MAX_M, MFMA_N_SUB, SMALLM_MXFP8, mfma_k_steps
from hipforge.ops.tuned import TunedRow, clear_tables, load_table

ARCH = "gfx950"
MAX_ELEMENTS = 2**31 - 1
_MAX_CACHED_DECISIONS = 1 << 16  # a server sees few shapes; this bounds one that sees all


# Past 16 rows any variant does: its guard refuses M.
_ROWS = (1, 1, 2, 4, 4, 8, 8, 8, 8, *(16,) * 8)


def gemv_rows(m: int) -> int:
    """Return how many rows the GEMV variant that serves M = ``m`` accumulates."""
    return _ROWS[m] if m <= GEMV_MAX_M else GEMV_MAX_M


def _gemv_variant(
    out: torch.Tensor, Xq: torch.Tensor, Xs: torch.Tensor, Wq: torch.Tensor, Ws: torch.Tensor, block_n: int
) -> Mapping[str, int]:
    return {"HF_ROWS": gemv_rows(Xq.shape[0])}


def _mfma_variant(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    workspace: torch.Tensor | None,
    n_sub: int,
    k_splits: int,
) -> Mapping[str, int]:
    return {"HF_N_SUB": n_sub if n_sub in MFMA_N_SUB else 1}  # the module's guard refuses any other n_sub


@compile_ops("module_smallm_mxfp8_dense", variant=_gemv_variant)
def smallm_mxfp8_gemv_out(
    out: torch.Tensor, Xq: torch.Tensor, Xs: torch.Tensor, Wq: torch.Tensor, Ws: torch.Tensor, block_n: int
) -> None:
    """Write Xq @ Wq^T into ``out`` [M, N] bf16; ``block_n`` columns per work-group."""


@compile_ops("module_smallm_mxfp8_dense_mfma", variant=_mfma_variant, mutates=("out", "workspace"))
def smallm_mxfp8_mfma_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    workspace: torch.Tensor | None,
    n_sub: int,
    k_splits: int,
) -> None:
    """Write Xq @ Wq^T into ``out`` [M, N] bf16; ``workspace`` float32 [k_splits, M, N] holds the partial sums."""


def _check_raw(xq: torch.Tensor, wq: torch.Tensor, out_dtype: torch.dtype) -> None:
    # What has to hold before an output can be allocated; the module's own guards check the rest.
    if out_dtype != torch.bfloat16:
        raise GuardError(f"out_dtype must be torch.bfloat16; got {out_dtype}")
    require_rank("Xq", xq, 2, "[M, K]")
    require_rank("Wq", wq, 2, "[N, K]")


def smallm_mxfp8_gemv(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    out_dtype: torch.dtype,
    block_n: int = DEFAULT_BLOCK_N,
) -> torch.Tensor:
    """Run the GEMV kernel on contiguous tensors; shapes and dtypes as in the module's docstring, M from 1 to 16.

    Args:
        Xq: activations [M, K].
        Xs: their scales [M, K/32].
        Wq: weights [N, K].
        Ws: their scales [N, K/32].
        out_dtype: ``torch.bfloat16``.
        block_n: columns per work-group: 4, 8, 16, 32 or 64.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    _check_raw(Xq, Wq, out_dtype)
    out = torch.empty((Xq.shape[0], Wq.shape[0]), dtype=torch.bfloat16, device=Xq.device)
    smallm_mxfp8_gemv_out(out, Xq, Xs, Wq, Ws, block_n)
    return out


def _workspace(m: int, n: int, k_splits: int, device: torch.device) -> torch.Tensor | None:
    return torch.empty((k_splits, m, n), dtype=torch.float32, device=device) if k_splits > 1 else None


def smallm_mxfp8_mfma(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    out_dtype: torch.dtype,
    n_sub: int = 1,
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the scaled-MFMA kernel on contiguous tensors; shapes and dtypes as in the module's docstring, M to 64.

    With ``k_splits`` > 1 float32 partial sums are added in a fixed order, so that results do not vary from run to
    run.

    Args:
        Xq: activations [M, K].
        Xs: their scales [M, K/32].
        Wq: weights [N, K].
        Ws: their scales [N, K/32].
        out_dtype: ``torch.bfloat16``.
        n_sub: 16-column tiles per wave: 1, 2 or 4.
        k_splits: parts that K is cut into: 1, 2, 4 or 8, at most ceil(K / 128).

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    _check_raw(Xq, Wq, out_dtype)
    m, n = Xq.shape[0], Wq.shape[0]
    out = torch.empty((m, n), dtype=torch.bfloat16, device=Xq.device)
    workspace = _workspace(m, n, max(1, min(k_splits, 8)), Xq.device)
    smallm_mxfp8_mfma_out(out, Xq, Xs, Wq, Ws, workspace, n_sub, k_splits)
    return out


# ---- decisions ------------------------------------------------------------------------------------------------------

_FP8_PAYLOADS = (torch.float8_e4m3fn, torch.uint8)
_SCALES = (torch.uint8, E8M0_DTYPE)


def _check_operands(xq: torch.Tensor, x_scale: torch.Tensor, wq: torch.Tensor, w_scale: torch.Tensor) -> None:
    require_rank("xq", xq, 2, "[M, K]")
    require_rank("wq", wq, 2, "[N, K]")
    require_dtype("xq", xq, _FP8_PAYLOADS)
    require_dtype("wq", wq, _FP8_PAYLOADS)
    require_dtype("x_scale", x_scale, _SCALES)
    require_dtype("w_scale", w_scale, _SCALES)
    (m, k), n = xq.shape, wq.shape[0]
    require_shape("wq", wq, (n, k), "its K is that of xq")
    require_last_multiple("xq", xq, BLOCK)
    require_shape("x_scale", x_scale, (m, k // BLOCK), f"one byte per {BLOCK} elements of xq")
    require_shape("w_scale", w_scale, (n, k // BLOCK), f"one byte per {BLOCK} elements of wq")


def _gemv(block_n: int, reason: str, row: TunedRow | None = None) -> Accepted:
    return Accepted("hip", "smallm_mxfp8_gemv", MappingProxyType({"block_n": block_n}), reason, row)


def _mfma(n_sub: int, k_splits: int, reason: str, row: TunedRow | None = None) -> Accepted:
    return Accepted("hip", "smallm_mxfp8_mfma", MappingProxyType({"n_sub": n_sub, "k_splits": k_splits}), reason, row)


def _by_row(row: TunedRow, reason: str) -> Accepted | Refused:
    if row.integer("use_hip") == 0:
        return Refused("hip", f"{reason} routes this shape to the fallback (use_hip=0)", row)
    if row.values["kernel"] == "gemv":
        block_n = row.values["block_n"]
        return _gemv(DEFAULT_BLOCK_N if block_n is None else row.integer("block_n"), reason, row)
    return _mfma(row.integer("n_sub"), row.integer("k_splits"), reason, row)


def _by_table(m: int, n: int, k: int, arch: str, cu_count: int) -> Accepted | Refused | None:
    table = load_table(SMALLM_MXFP8.family)
    row = table.find(arch, cu_count, m, n, k)
    if row is not None:
        return _by_row(row, "the tuned row of this shape")
    if GEMV_MAX_M < m < MFMA_MAX_M and m != 32:
        for larger in (32, MFMA_MAX_M):
            row = table.find(arch, cu_count, larger, n, k) if larger > m else None
            if row is not None:
                return _by_row(row, f"the tuned row of the next larger M ({larger})")
    return None


def _by_default(m: int, n: int, k: int) -> Accepted | Refused:
    if m in (8, 16):
        steps = mfma_k_steps(k)
        k_splits = next((splits for splits in (4, 2) if steps % splits == 0), 1)
        return _mfma(1, k_splits, f"no tuned row; the default for M={m} is MFMA")
    if m <= GEMV_MAX_M:
        return _gemv(DEFAULT_BLOCK_N, f"no tuned row; the default for M={m} is GEMV")
    return Refused("hip", f"M={m} needs a tuned row for (K, N)=({k}, {n}), and there is none")


def _decide_hip(xq: torch.Tensor, wq: torch.Tensor, out_dtype: torch.dtype) -> Accepted | Refused:
    if out_dtype != torch.bfloat16:
        return Refused("hip", f"the output dtype must be torch.bfloat16; got {out_dtype}")
    target = dispatch.target_of(xq.device)
    if isinstance(target, Refused):
        return target
    arch, cu_count = target
    if arch != ARCH:
        return Refused("hip", f"the kernels are for {ARCH}; the device is {arch}")
    (m, k), n = xq.shape, wq.shape[0]
    if not 1 <= m <= MFMA_MAX_M or n == 0 or k == 0:
        return Refused("hip", f"M must be 1 to {MFMA_MAX_M}, N and K at least 1; got M={m}, N={n}, K={k}")
    largest = max(m, n) * k
    if largest > MAX_ELEMENTS:
        return Refused("hip", f"M*K and N*K must be at most 2^31 - 1 (raw-buffer offsets are int32); got {largest}")
    return _by_table(m, n, k, arch, cu_count) or _by_default(m, n, k)


_decisions: dict[object, Decision] = {}


def _plan_gemv(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Decision:
    """Return the cached decision for these shapes, dtypes and device; raises GuardError for malformed operands."""
    key = (
        xq.shape, x_scale.shape, wq.shape, w_scale.shape,
        xq.dtype, x_scale.dtype, wq.dtype, w_scale.dtype, xq.device, out_dtype,
    )  # fmt: skip
    decision = _decisions.get(key)
    if decision is None:
        _check_operands(xq, x_scale, wq, w_scale)
        outcome = _decide_hip(xq, wq, out_dtype)
        decision = Decision(outcome) if isinstance(outcome, Accepted) else Decision(None, (outcome,))
        if len(_decisions) >= _MAX_CACHED_DECISIONS:
            _decisions.clear()
        _decisions[key] = decision
    return decision


def reload_tables() -> None:
    """Read the tuned tables and the override variables again at the next call."""
    clear_tables()
    dispatch.clear_decisions()


dispatch.on_clear(_decisions.clear)


# ---- ops ------------------------------------------------------------------------------------------------------------


def _run_gemv(
    xq: torch.Tensor, x_scale: torch.Tensor, wq: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor, block_n: int
) -> None:
    if xq.shape[0] > GEMV_MAX_M:
        raise GuardError(f"the GEMV kernel needs M<={GEMV_MAX_M}; got M={xq.shape[0]}")
    smallm_mxfp8_gemv_out(out, xq.contiguous(), x_scale.contiguous(), wq.contiguous(), w_scale.contiguous(), block_n)


def _run_hip(
    taken: Accepted,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    m, n = xq.shape[0], wq.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=torch.bfloat16, device=xq.device)
    configuration: Mapping[str, int] = taken.configuration
    if taken.kernel == "smallm_mxfp8_gemv":
        _run_gemv(xq, x_scale, wq, w_scale, out, configuration["block_n"])
        return out
    k_splits = configuration["k_splits"]
    smallm_mxfp8_mfma_out(
        out,
        xq.contiguous(),
        x_scale.contiguous(),
        wq.contiguous(),
        w_scale.contiguous(),
        _workspace(m, n, k_splits, xq.device),
        configuration["n_sub"],
        k_splits,
    )
    return out


@planned_by(_plan_gemv)
def mxfp8_gemv(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor | None:
    """Return X @ W^T from MX-FP8 operands, or None where the caller must use its fallback.

    Args:
        xq: activations [M, K], float8_e4m3fn or uint8, any strides.
        x_scale: e8m0 bytes [M, K/32].
        wq: weights [N, K].
        w_scale: e8m0 bytes [N, K/32].
        out_dtype: ``torch.bfloat16`` (another dtype gives None).

    Returns:
        bfloat16 [M, N]; None outside the envelope or where the tuned table says so, in the order that the module's
        docstring gives. ``hipforge.explain(mxfp8_gemv, ...)`` says which.

    Raises:
        GuardError: dtypes or shapes that are no MX-FP8 operands, or tensors on the wrong device.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    taken = _plan_gemv(xq, x_scale, wq, w_scale, out_dtype).accepted
    return None if taken is None else _run_hip(taken, xq, x_scale, wq, w_scale, None)


def _plan_linear(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Decision:
    """Return :func:`mxfp8_linear`'s decision: the HIP kernel, else Triton on a GPU, else torch."""
    from hipforge.ops.triton import mxfp8_dot_scaled as fallback

    hip = _plan_gemv(xq, x_scale, wq, w_scale)
    if hip.accepted is not None:
        unused = "the HIP kernel takes this shape"
        return Decision(hip.accepted, (Refused("triton", unused), Refused("torch", unused)))
    why_not = fallback.unavailable(xq.device)
    if why_not is None:
        configuration = fallback.configuration(xq.shape[0])
        triton = Accepted(
            "triton", "mxfp8_dot_scaled", MappingProxyType(configuration.as_dict()), "the HIP kernel refused"
        )
        return Decision(triton, (*hip.refused, Refused("torch", "Triton runs on this device")))
    torch_path = Accepted("torch", "mxfp8_mm", MappingProxyType({}), "neither HIP nor Triton applies")
    return Decision(torch_path, (*hip.refused, Refused("triton", why_not)))


@planned_by(_plan_linear)
def mxfp8_linear(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return X @ W^T + bias from MX-FP8 operands, always: HIP kernel, else Triton on a GPU, else torch.

    Args:
        xq: activations [M, K], float8_e4m3fn or uint8; any M.
        x_scale: e8m0 bytes [M, K/32].
        wq: weights [N, K].
        w_scale: e8m0 bytes [N, K/32].
        bias: bfloat16 [N], added to the rounded product.
        out: contiguous bfloat16 [M, N] to write into.

    Returns:
        bfloat16 [M, N]; ``out`` itself where it is given.

    Raises:
        GuardError: operands, ``bias`` or ``out`` of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    # The planner's own first step, so that a call the HIP kernel takes pays for no more.
    taken = _plan_gemv(xq, x_scale, wq, w_scale).accepted or _plan_linear(xq, x_scale, wq, w_scale).accepted
    shape = (xq.shape[0], wq.shape[0])
    if out is not None:
        require_dtype("out", out, (torch.bfloat16,))
        require_shape("out", out, shape, "[M, N]")
        if not out.is_contiguous() or out.device != xq.device:
            raise GuardError(f"out must be contiguous and on {xq.device}; got strides {out.stride()} on {out.device}")
    if bias is not None:
        require_dtype("bias", bias, (torch.bfloat16,))
        require_shape("bias", bias, shape[1:], "[N]")
    if taken is not None and taken.path == "hip":
        result = _run_hip(taken, xq, x_scale, wq, w_scale, out)
    elif taken is not None and taken.path == "triton":
        from hipforge.ops.triton import mxfp8_dot_scaled as fallback

        result = torch.empty(shape, dtype=torch.bfloat16, device=xq.device) if out is None else out
        fallback.mxfp8_dot_scaled(result, xq, x_scale, wq, w_scale, fallback.configuration(shape[0]))
    else:
        result = mxfp8_mm(xq, x_scale, wq, w_scale)
        if out is not None:
            result = out.copy_(result)
    return result if bias is None else result.add_(bias)
