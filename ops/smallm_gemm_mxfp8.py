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

from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from hipforge.errors import GuardError
from hipforge.jit.call import torch_library
from hipforge.jit.call.signature import signature_of
from hipforge.ops.core import dispatch
from hipforge.ops.core.alignment import realigned
from hipforge.ops.core.checks import require_device, require_dtype, require_shape, require_tensor
from hipforge.ops.core.dispatch import Accepted, Decision, Refused, planned_by
from hipforge.ops.core.tuned import clear_tables
from hipforge.ops.grouped_gemm_mxfp8 import (
    grouped_gemm_mxfp8,
    grouped_mxfp8_linear,
    smallm_mxfp8_moe_grouped_gemm,
)
from hipforge.ops.reference.mxfp8 import mxfp8_mm
from hipforge.ops.smallm_mxfp8_kernels import (
    smallm_mxfp8_gemv,
    smallm_mxfp8_gemv_out,
    smallm_mxfp8_mfma,
    smallm_mxfp8_mfma_out,
    split_k_workspace,
)
from hipforge.ops.smallm_mxfp8_plan import plan_gemv
from hipforge.ops.tables import GEMV_MAX_M

__all__ = [
    "grouped_gemm_mxfp8",
    "grouped_mxfp8_linear",
    "mxfp8_gemv",
    "mxfp8_linear",
    "reload_tables",
    "smallm_mxfp8_gemv",
    "smallm_mxfp8_mfma",
    "smallm_mxfp8_moe_grouped_gemm",
]


def reload_tables() -> None:
    """Read the tuned tables and the override variables again at the next call."""
    clear_tables()
    dispatch.clear_decisions()


@dataclass(frozen=True, slots=True)
class _Launch:
    """An accepted decision in the form that a call needs: ``block_n`` 0 stands for the MFMA kernel."""

    m: int
    n: int
    device: torch.device
    block_n: int
    n_sub: int
    k_splits: int


def _launch_of(taken: Accepted, m: int, n: int, device: torch.device) -> _Launch:
    configuration = taken.configuration
    if taken.kernel == "smallm_mxfp8_gemv":
        return _Launch(m, n, device, configuration["block_n"], 0, 1)
    return _Launch(m, n, device, 0, configuration["n_sub"], configuration["k_splits"])


def _run_gemv(
    xq: torch.Tensor, x_scale: torch.Tensor, wq: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor, block_n: int
) -> None:
    if xq.size(0) > GEMV_MAX_M:
        raise GuardError(f"the GEMV kernel needs M<={GEMV_MAX_M}; got M={xq.shape[0]}")
    smallm_mxfp8_gemv_out(out, xq.contiguous(), x_scale.contiguous(), wq.contiguous(), w_scale.contiguous(), block_n)


def _launch_kernel(
    launch: _Launch,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if launch.block_n:
        _run_gemv(xq, x_scale, wq, w_scale, out, launch.block_n)
        return
    smallm_mxfp8_mfma_out(
        out,
        xq.contiguous(),
        x_scale.contiguous(),
        wq.contiguous(),
        w_scale.contiguous(),
        split_k_workspace(launch.m, launch.n, launch.k_splits, launch.device),
        launch.n_sub,
        launch.k_splits,
    )


def _run_hip(
    launch: _Launch,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if out is None:
        out = torch.empty((launch.m, launch.n), dtype=torch.bfloat16, device=launch.device)
    try:
        _launch_kernel(launch, xq, x_scale, wq, w_scale, out)
    except AttributeError:
        require_tensor(xq=xq, x_scale=x_scale, wq=wq, w_scale=w_scale)
        raise
    except GuardError:
        copies = realigned(xq, wq)
        if copies is None:
            raise
        _launch_kernel(launch, copies[0], x_scale, copies[1], w_scale, out)
    return out


# What mxfp8_gemv launched for the shapes of xq and wq, the device and the output's dtype. A hit skips the planner's
# look at dtypes and scales, which costs a microsecond: the module's own guards check them before every launch.
_launches: dict[object, _Launch] = {}
_MAX_CACHED_LAUNCHES = 1 << 16  # a server sees few shapes; this bounds one that sees all
dispatch.on_clear(_launches.clear)


@planned_by(plan_gemv)
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
        docstring gives. ``hipforge.explain(mxfp8_gemv, ...)`` says which. Under torch.compile the decision is made
        while tracing, so a graph is for one M; :func:`mxfp8_linear` takes a dynamic M.

    Raises:
        GuardError: dtypes or shapes that are no MX-FP8 operands, or tensors on the wrong device.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    if torch.compiler.is_dynamo_compiling():
        taken = plan_gemv(xq, x_scale, wq, w_scale, out_dtype).accepted
        if taken is None:
            return None
        return _run_hip(_launch_of(taken, xq.shape[0], wq.shape[0], xq.device), xq, x_scale, wq, w_scale, None)
    try:
        device = xq.device
        key = (xq.shape, wq.shape, device, out_dtype)
    except AttributeError:
        require_tensor(xq=xq, wq=wq)
        raise
    launch = _launches.get(key)
    if launch is None:
        taken = plan_gemv(xq, x_scale, wq, w_scale, out_dtype).accepted
        if taken is None:
            return None
        if len(_launches) >= _MAX_CACHED_LAUNCHES:
            _launches.clear()
        launch = _launches[key] = _launch_of(taken, xq.shape[0], wq.shape[0], device)
    return _run_hip(launch, xq, x_scale, wq, w_scale, None)


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

    hip = plan_gemv(xq, x_scale, wq, w_scale)
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
    if torch.compiler.is_dynamo_compiling():
        result = getattr(torch.ops.hipforge, _linear_operator()).default(xq, x_scale, wq, w_scale, bias)
        return result if out is None else out.copy_(result)
    # The planner's own first step, so that a call the HIP kernel takes pays for no more.
    taken = plan_gemv(xq, x_scale, wq, w_scale).accepted or _plan_linear(xq, x_scale, wq, w_scale).accepted
    shape = (xq.shape[0], wq.shape[0])
    if out is not None:
        require_dtype("out", out, (torch.bfloat16,))
        require_shape("out", out, shape, "[M, N]")
        require_device("out", out, xq.device)
        if not out.is_contiguous():
            raise GuardError(f"out must be contiguous; got strides {out.stride()} for shape {tuple(out.shape)}")
    if bias is not None:
        require_dtype("bias", bias, (torch.bfloat16,))
        require_shape("bias", bias, shape[1:], "[N]")
        require_device("bias", bias, xq.device)
    if taken is not None and taken.path == "kernel":
        result = _run_hip(_launch_of(taken, *shape, xq.device), xq, x_scale, wq, w_scale, out)
    elif taken is not None and taken.path == "triton":
        from hipforge.ops.triton import mxfp8_dot_scaled as fallback

        result = torch.empty(shape, dtype=torch.bfloat16, device=xq.device) if out is None else out
        fallback.mxfp8_dot_scaled(result, xq, x_scale, wq, w_scale, fallback.configuration(shape[0]))
    else:
        result = mxfp8_mm(xq, x_scale, wq, w_scale)
        if out is not None:
            result = out.copy_(result)
    return result if bias is None else result.add_(bias)


def _linear_kernel(
    xq: torch.Tensor, x_scale: torch.Tensor, wq: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return mxfp8_linear(xq, x_scale, wq, w_scale, bias)


def _linear_fake(
    xq: torch.Tensor, x_scale: torch.Tensor, wq: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return xq.new_empty((xq.shape[0], wq.shape[0]), dtype=torch.bfloat16)


_linear_names: list[str] = []


def _linear_operator() -> str:
    """Return the name of the operator, registered when tracing first asks; shapes may stay symbolic in it."""
    if not _linear_names:
        signature = replace(signature_of(_linear_kernel, mutates=()), name="mxfp8_linear")
        _linear_names.append(torch_library.register(signature, _linear_kernel, _linear_fake))
    return _linear_names[0]


_linear_operator._dynamo_marked_constant = True  # type: ignore[attr-defined]
