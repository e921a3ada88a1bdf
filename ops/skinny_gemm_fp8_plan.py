"""Which configuration the skinny fp8 GEMM runs with, or why torch computes: operands, envelope, the default rule.

Shapes and dtypes as in :mod:`hipforge.ops.skinny_gemm_fp8`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from hipforge.errors import GuardError
from hipforge.ops import dispatch
from hipforge.ops.dispatch import Accepted, Decision, Refused
from hipforge.ops.reference.checks import require_dtype, require_rank, require_shape

FORMATS: Mapping[str, torch.dtype] = MappingProxyType({"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn})
OP_M = (8, 16, 32)
B_LANES = (1, 2, 4)
BLOCK_K: Mapping[int, int] = MappingProxyType({8: 256, 16: 256, 32: 128})
K_MULTIPLE = 32
MAX_M = 32
MAX_BYTES = 2**31 - 1
ALIGNMENT = 16  # bytes, of operands and of b's pitch
MAX_SPLIT_K = 8  # of the default rule; beyond, the partial sums cost more than the idle compute units


def default_configuration(m: int, n: int, k: int, cu_count: int) -> dict[str, int]:
    """Return the configuration for a shape: tiles as high as m asks for, k split until every compute unit has a tile.

    Two A and four or six B producers feed two consumers over four slots: at most 48 KB of LDS, ten waves.
    """
    op_m = 8 if m <= 8 else 16 if m <= 16 else 32
    b_lanes = 1 if op_m == 32 else 2
    columns = (32 if op_m == 32 else 16) * b_lanes
    tiles = -(-m // op_m) * -(-n // columns)
    blocks = -(-k // BLOCK_K[op_m])
    split_k = max(1, min(-(-cu_count // tiles), MAX_SPLIT_K, blocks))
    return {
        "split_k": split_k,
        "op_m": op_m,
        "b_lanes": b_lanes,
        "a_producers": 2,
        "b_producers": 6 if b_lanes == 2 else 4,
        "consumers": 2,
        "qsize": 4,
    }


def check_operands(
    a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, output: torch.Tensor | None
) -> tuple[int, int, int]:
    """Return (m, n, k); raises GuardError for operands that are malformed."""
    require_rank("a", a, 2, "[m, k]")
    require_rank("b", b, 2, "[k, n]")
    for name, operand in (("a", a), ("b", b)):
        require_dtype(name, operand, tuple(FORMATS.values()))
    if a.dtype != b.dtype:
        raise GuardError(f"a and b must have the same fp8 format; got {a.dtype} and {b.dtype}")
    m, k = a.shape
    n = b.shape[1]
    require_shape("b", b, (k, n), "its k is that of a")
    if k < K_MULTIPLE or k % K_MULTIPLE:
        raise GuardError(f"k must be a positive multiple of {K_MULTIPLE}; got {k}: pad both operands with zeros")
    require_dtype("scale", scale, (torch.float32,))
    if scale.numel() != 1:
        raise GuardError(f"scale must be one float32; got shape {tuple(scale.shape)}")
    tensors = {"b": b, "scale": scale}
    if output is not None:
        require_dtype("output", output, (torch.float16,))
        require_shape("output", output, (m, n), "[m, n]")
        if not output.is_contiguous():
            raise GuardError(f"output must be contiguous; got strides {output.stride()}")
        tensors["output"] = output
    for name, tensor in tensors.items():
        if tensor.device != a.device:
            raise GuardError(f"{name} must be on the device of a ({a.device}); got {tensor.device}")
    return m, n, k


def plan_skinny_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None = None,
    split_k: int | None = None,
    *,
    deterministic: bool = True,
) -> Decision:
    """Return the decision for a call; raises GuardError for operands that are malformed."""
    m, n, k = check_operands(a, b, scale, output)
    outcome = _decide(m, n, k, a)
    if isinstance(outcome, Accepted):
        if not deterministic and n % 2:
            raise GuardError(f"packed fp16 atomics need an even n; got {n}: pass deterministic=True")
        if split_k is not None:
            blocks = -(-k // BLOCK_K[outcome.configuration["op_m"]])
            if not 1 <= split_k <= blocks:
                raise GuardError(f"split_k must be 1 to {blocks}, the number of k blocks of k={k}; got {split_k}")
            configuration = MappingProxyType({**outcome.configuration, "split_k": split_k})
            outcome = Accepted("hip", outcome.kernel, configuration, "the default rule with the caller's split_k")
        return Decision(outcome, (Refused("torch", "the HIP kernel takes this shape"),))
    return Decision(Accepted("torch", "skinny_gemm", MappingProxyType({}), "the HIP kernel refused"), (outcome,))


def _decide(m: int, n: int, k: int, a: torch.Tensor) -> Accepted | Refused:
    target = dispatch.target_of(a.device)
    if isinstance(target, Refused):
        return target
    arch, cu_count = target
    if arch not in FORMATS:
        return Refused("hip", f"the kernel is for {', '.join(FORMATS)}; the device is {arch}")
    if a.dtype != FORMATS[arch]:
        return Refused("hip", f"the matrix instructions of {arch} read {FORMATS[arch]}; the operands are {a.dtype}")
    if not 1 <= m <= MAX_M or n < 1:
        return Refused("hip", f"m must be 1 to {MAX_M} and n at least 1; got m={m}, n={n}")
    if -(-k // ALIGNMENT) * ALIGNMENT * n > MAX_BYTES:
        return Refused("hip", f"b must span at most 2^31 - 1 bytes; got {k * n}")
    configuration = MappingProxyType(default_configuration(m, n, k, cu_count))
    return Accepted("hip", "skinny_gemm_fp8", configuration, "the default rule")
