"""What the kernels of the MXFP4 GEMM share: the problem, a call of one of them, and the raw op."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hipforge.errors import GuardError
from hipforge.ops.core import checks
from hipforge.ops.core.alignment import packed, realigned
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE, FLOATS
from hipforge.ops.core.kernel import Configuration, Kernel

OPERANDS = "out, Xq, Xs, Wq, Ws: Tensor"  # of the kernels' entries, as stubs declare them
PAYLOADS = (torch.uint8, getattr(torch, "float4_e2m1fn_x2", None))
_SCALES = (torch.uint8, E8M0_DTYPE)


@dataclass(frozen=True)
class Problem:
    """X[M, K] @ W[N, K]^T; ``shuffled`` says in which order the weight and its scales are."""

    m: int
    n: int
    k: int
    shuffled: bool
    out_dtype: torch.dtype
    device: torch.device
    bf16: bool = False  # X is, and has no scales

    @property
    def key(self) -> tuple[int, int, int]:
        """Return M, N and K."""
        return self.m, self.n, self.k

    @classmethod
    def of(
        cls,
        xq: checks.Described,
        x_scale: checks.Described | None,
        wq: checks.Described,
        w_scale: checks.Described,
        out_dtype: torch.dtype = torch.bfloat16,
        *,
        shuffled: bool = False,
    ) -> Problem:
        """Return the problem of operands; raises GuardError for ones that are malformed."""
        checks.require_tensor(xq=xq, wq=wq, w_scale=w_scale)
        bf16 = x_scale is None and xq.dtype == torch.bfloat16
        checks.require_rank("xq", xq, 2, "[M, K]" if bf16 else "[M, K/2]")
        checks.require_rank("wq", wq, 2, "[N, K/2]")
        m, n, k = xq.shape[0], wq.shape[0], xq.shape[1] * (1 if bf16 else 2)
        if not bf16:
            checks.require_dtype("xq", xq, PAYLOADS)
            if x_scale is None:
                raise GuardError(f"x_scale may be None where xq is torch.bfloat16; got None with xq of {xq.dtype}")
        if bf16 and k % 2:
            raise GuardError(f"K must be a multiple of {BLOCK} (one e8m0 scale per {BLOCK} elements); got K={k}")
        checks.require_operand("wq", wq, PAYLOADS, (n, k // 2), "its K is that of xq")
        if k % BLOCK:
            raise GuardError(f"K must be a multiple of {BLOCK} (one e8m0 scale per {BLOCK} elements); got K={k}")
        checks.require_operand("x_scale", x_scale, _SCALES, (m, k // BLOCK), f"one byte per {BLOCK} elements of xq")
        _require_w_scale(w_scale, n, k, shuffled)
        checks.require_torch_dtype("out_dtype", out_dtype)
        return cls(m, n, k, shuffled, out_dtype, xq.device, bf16)

    @classmethod
    def of_floats(
        cls, x: checks.Described, wq: checks.Described, w_scale: checks.Described, *, shuffled: bool = False
    ) -> Problem:
        """Return the problem whose X is to be quantised; raises GuardError for operands that are malformed."""
        checks.require_tensor(x=x, wq=wq, w_scale=w_scale)
        checks.require_rank("x", x, 2, "[M, K]")
        checks.require_dtype("x", x, tuple(FLOATS))
        checks.require_rank("wq", wq, 2, "[N, K/2]")
        checks.require_last_multiple("x", x, BLOCK)
        m, n, k = x.shape[0], wq.shape[0], x.shape[1]
        checks.require_operand("wq", wq, PAYLOADS, (n, k // 2), "its K is that of x")
        _require_w_scale(w_scale, n, k, shuffled)
        return cls(m, n, k, shuffled, torch.bfloat16, x.device)


def _require_w_scale(w_scale: checks.Described, n: int, k: int, shuffled: bool) -> None:
    shape, why = (n, k // BLOCK), f"one byte per {BLOCK} elements of wq"
    if shuffled:
        if n % 16 or k % 64:
            raise GuardError(f"shuffled weights need N % 16 == 0 and K % 64 == 0; got N={n}, K={k}")
        shape = (-(-n // 256) * 256, -(-(k // BLOCK) // 8) * 8)
        why = "shuffled scales are padded to 256 rows and 8 columns"
    checks.require_operand("w_scale", w_scale, _SCALES, shape, why)


def launch(
    kernel: Kernel,
    configuration: Configuration,
    out: torch.Tensor,
    xq: torch.Tensor,
    x_scale: torch.Tensor | None,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    shuffled: bool,
    contiguous: bool = False,
) -> torch.Tensor:
    """Run a kernel into ``out``; operands off a 16-byte boundary are copied once the kernel has refused them.

    ``contiguous``: the operands are known to be, so that none is asked.
    """
    given = [x for x in (xq, x_scale, wq, w_scale) if x is not None]
    operands = given if contiguous else [packed(x, out) for x in given]

    def run(x: torch.Tensor, *others: torch.Tensor) -> None:
        scales_and_w = others if x_scale is not None else (None, *others)
        kernel.run(configuration, out.shape, out, x, *scales_and_w, shuffled)

    try:
        run(*operands)
    except GuardError:
        copies = realigned(*operands, out=out)
        if copies is None:
            raise
        run(*copies)
    return out


def run_raw(
    kernel: Kernel,
    configuration: Configuration,
    xq: torch.Tensor,
    x_scale: torch.Tensor | None,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    shuffled: bool,
) -> torch.Tensor:
    """Check a raw op's operands and parameters, allocate what it writes and launch it.

    Args:
        kernel: to launch.
        configuration: its parameters.
        xq: activations [M, K/2].
        x_scale: e8m0 bytes [M, K/32].
        wq: weights [N, K/2].
        w_scale: e8m0 bytes [N, K/32], or shuffled.
        shuffled: the weight and its scales are in the shuffled order.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    m, n, _ = Problem.of(xq, x_scale, wq, w_scale, shuffled=shuffled).key
    out = torch.empty((m, n), dtype=torch.bfloat16, device=xq.device)
    return launch(kernel, kernel.require(**configuration), out, xq, x_scale, wq, w_scale, shuffled)
