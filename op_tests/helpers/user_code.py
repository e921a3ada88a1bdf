"""What a user writes, as type checkers see it: lines marked ``# error`` must be refused, the others must not be."""

from __future__ import annotations

import torch

import hipforge
from hipforge import compile_ops, mxfp8_linear, ops


def uses(x: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    maybe = hipforge.mxfp8_gemv(x, x, x, x)
    maybe.float()  # error
    if maybe is not None:
        maybe.float()
    y = mxfp8_linear(x, x, x, x)
    y = hipforge.mxfp8_liner(x, x, x, x)  # error
    attended = hipforge.decode_attention_fp8(x, k, k, None, lengths)
    attended.float()
    out, lse = hipforge.decode_attention_fp8(x, k, k, None, lengths, return_lse=True)
    lse.float()
    hipforge.decode_attention_fp8(x, k, k, None, lengths, return_lse=True).float()  # error
    hipforge.rms_norm(x, factor, "1e-5")  # error
    quantised, scales = ops.reference.quantize_mxfp8(y)
    print(hipforge.explain("mxfp8_gemv", quantised, scales).reason, hipforge.settings.QUIET.get(), out)
    return y


@compile_ops("module_mine")
def mine_out(out: torch.Tensor, x: torch.Tensor, block_n: int) -> None:
    """Write x into out."""


mine_out(torch.empty(1), torch.empty(1), block_n="8")  # error
try:
    raise hipforge.GuardError("no")
except hipforge.HipforgeError as error:
    print(error)
