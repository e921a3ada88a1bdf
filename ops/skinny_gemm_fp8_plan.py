"""Which configuration the skinny fp8 GEMM runs with, or why torch computes: operands, envelope, table, default rule.

Shapes and dtypes as in :mod:`hipforge.ops.skinny_gemm_fp8`. The configuration is that of the tuned row of the shape, of
the tuned row of the next larger m, or of the default rule; a ``split_k`` of the caller's comes before each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.ops.core import dispatch
from hipforge.ops.core.checks import require_dtype, require_rank, require_shape
from hipforge.ops.core.dispatch import Accepted, Decision, Refused
from hipforge.ops.core.tuned import TunedRow, load_table
from hipforge.ops.skinny_gemm_fp8_space import Configuration, require
from hipforge.ops.tables import SKINNY_GEMM_FP8

KERNEL = "skinny_gemm_fp8"
FORMATS: Mapping[str, torch.dtype] = MappingProxyType({"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn})
K_MULTIPLE = 32
MAX_M = 32
MAX_BYTES = 2**31 - 1
ALIGNMENT = 16  # bytes, of operands and of b's pitch
MAX_SPLIT_K = 16  # of the default rule
TILE_BLOCKS = 0.25  # what the end of a tile costs there, in k blocks: its stores, most of them behind the next loads


# The default rule's tile and waves for m up to the key: few instructions, 32 to 48 KB of weights in flight in a
# work-group, at most 60 KB of LDS.
_DEFAULTS: Mapping[int, Configuration] = MappingProxyType(
    {
        8: Configuration(op_m=8, b_lanes=2, ops=8, a_producers=2, b_producers=4, consumers=2, qsize=3),
        16: Configuration(op_m=16, b_lanes=3, ops=8, a_producers=2, b_producers=6, consumers=2, qsize=3),
        32: Configuration(op_m=32, b_lanes=2, ops=8, a_producers=2, b_producers=6, consumers=2, qsize=4),
    }
)


def default_configuration(m: int, n: int, k: int, cu_count: int) -> Configuration:
    """Return the configuration for a shape: tiles as high as m asks for, and the split of k that costs least.

    Split parts fill the compute units of the last round, and add tiles and traffic: every part writes and reads fp32
    sums of its own. The cost is that of all three in units of one read of the weights by all compute units.
    """
    whole = _DEFAULTS[next((height for height in _DEFAULTS if m <= height), MAX_M)]
    tiles = whole.tiles(m, n)

    def cost(split_k: int) -> float:
        rounds = -(-tiles * split_k // cu_count)
        idle, sums = rounds * cu_count / (tiles * split_k), 2 * 4 * m * split_k * whole.consumers / k
        return idle + sums + TILE_BLOCKS * split_k / whole.blocks(k)

    splits = range(1, min(MAX_SPLIT_K, whole.blocks(k)) + 1)
    return dataclasses.replace(whole, split_k=min(splits, key=cost))


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
    decision = _decision(m, n, k, a.dtype, a.device, split_k)
    if not deterministic and n % 2 and decision.accepted is not None and decision.accepted.path == "kernel":
        raise GuardError(f"packed fp16 atomics need an even n; got {n}: pass deterministic=True")
    return decision


@dispatch.remembered
def _decision(*key: Any) -> Decision:
    """Return the decision for (m, n, k, dtype, device, split_k); raises GuardError for a split_k below 1."""
    outcome = _decide(*key)
    if isinstance(outcome, Accepted):
        return Decision(outcome, (Refused("torch", "the HIP kernel takes this shape"),))
    return Decision(Accepted("torch", "skinny_gemm", MappingProxyType({}), "the HIP kernel refused"), (outcome,))


def _decide(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, split_k: int | None
) -> Accepted | Refused:
    target = dispatch.target_of(device)
    if isinstance(target, Refused):
        return target
    arch, cu_count = target
    if arch not in FORMATS:
        return Refused("kernel", f"the kernel is for {', '.join(FORMATS)}; the device is {arch}")
    if dtype != FORMATS[arch]:
        return Refused("kernel", f"the matrix instructions of {arch} read {FORMATS[arch]}; the operands are {dtype}")
    if not 1 <= m <= MAX_M or n < 1:
        return Refused("kernel", f"m must be 1 to {MAX_M} and n at least 1; got m={m}, n={n}")
    if -(-k // ALIGNMENT) * ALIGNMENT * n > MAX_BYTES:
        return Refused("kernel", f"b must span at most 2^31 - 1 bytes; got {k * n}")
    row, reason = _tuned_row(m, n, k, arch, cu_count)
    if row is not None and row.integer("use_hip") == 0:
        return Refused("kernel", f"{reason} routes this shape to the fallback (use_hip=0)", row)
    configuration = default_configuration(m, n, k, cu_count) if row is None else configuration_of(row)
    if split_k is not None:
        # A split beyond the last block would have nothing to add.
        configuration = dataclasses.replace(configuration, split_k=min(split_k, configuration.blocks(k)))
        require(configuration, arch, k)
        reason += " with the caller's split_k"
    return Accepted("kernel", KERNEL, MappingProxyType(configuration.parameters()), reason, row)


def _tuned_row(m: int, n: int, k: int, arch: str, cu_count: int) -> tuple[TunedRow | None, str]:
    """Return the row that speaks for a shape, or None for the default rule, and what to call it."""
    table = load_table(SKINNY_GEMM_FP8)
    for rows in range(m, MAX_M + 1):
        row = table.find(arch, cu_count, rows, n, k)
        if row is not None:
            return row, "the tuned row of this shape" if rows == m else f"the tuned row of the next larger m ({rows})"
    return None, "no tuned row; the default rule"


def configuration_of(row: TunedRow) -> Configuration:
    """Return the configuration that a row of the tuned table holds."""
    return Configuration(**{field.name: row.integer(field.name) for field in dataclasses.fields(Configuration)})
