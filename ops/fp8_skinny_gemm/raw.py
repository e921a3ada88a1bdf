"""What the kernels of the skinny fp8 GEMM share: limits, the problem, and the layout of operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from hipforge import archs
from hipforge.errors import GuardError
from hipforge.ops.core import checks
from hipforge.ops.core.alignment import require_copyable

ARCHS = ("gfx942", "gfx950")  # of the kernels for AMD GPUs
HOPPER = "sm_90"
FORMATS: Mapping[str, torch.dtype] = MappingProxyType(
    {arch: getattr(torch, archs.get(arch).fp8_e4m3) for arch in ARCHS}
)
K_MULTIPLE = 32
MAX_M = 32
MAX_BYTES = 2**31 - 1
MAX_K = 2**24  # bytes of a column of the kernel that splits k over waves, its pitch included
ALIGNMENT = 16  # bytes, of operands and of b's pitch


@dataclass(frozen=True)
class Problem:
    """[m, k] @ [k, n] in one fp8 format; ``split_k`` is the caller's, if any."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    split_k: int | None = None
    deterministic: bool = True

    @property
    def key(self) -> tuple[int, int, int]:
        """Return m, n and k."""
        return self.m, self.n, self.k

    @classmethod
    def of(
        cls,
        a: checks.Described,
        b: checks.Described,
        scale: checks.Described,
        output: checks.Described | None = None,
        split_k: int | None = None,
        *,
        deterministic: bool = True,
    ) -> Problem:
        """Return the problem of operands; raises GuardError for ones that are malformed."""
        checks.require_rank("a", a, 2, "[m, k]")
        checks.require_rank("b", b, 2, "[k, n]")
        for name, operand in (("a", a), ("b", b)):
            checks.require_dtype(name, operand, tuple(FORMATS.values()))
        if a.dtype != b.dtype:
            raise GuardError(f"a and b must have the same fp8 format; got {a.dtype} and {b.dtype}")
        m, k = a.shape
        n = b.shape[1]
        checks.require_shape("b", b, (k, n), "its k is that of a")
        if k < K_MULTIPLE or k % K_MULTIPLE:
            raise GuardError(f"k must be a positive multiple of {K_MULTIPLE}; got {k}: pad both operands with zeros")
        checks.require_one("scale", scale)
        checks.require_device("b", b, a.device)
        checks.require_device("scale", scale, a.device)
        checks.require_operand("output", output, (torch.float16,), (m, n), "[m, n]", a.device)
        if isinstance(output, torch.Tensor) and not output.is_contiguous():
            raise GuardError(f"output must be contiguous; got strides {output.stride()}")
        if split_k is not None:
            split_k = checks.require_int("split_k", split_k, minimum=1)
        if not deterministic and n % 2:
            raise GuardError(f"packed fp16 atomics need an even n; got {n}: pass deterministic=True")
        return cls(m, n, k, a.dtype, a.device, split_k, deterministic)


def row_major(a: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return a as the kernels read it: contiguous and aligned."""
    if a.is_contiguous() and a.data_ptr() % ALIGNMENT == 0:
        return a
    require_copyable(a, out)
    return a.clone(memory_format=torch.contiguous_format)


def column_major(b: torch.Tensor, out: torch.Tensor, most: int = MAX_BYTES) -> torch.Tensor:
    """Return b as the kernels read it: aligned columns, at most ``most`` bytes apart."""
    k, n = b.shape
    pitch_fits = n == 1 or (b.stride(1) % ALIGNMENT == 0 and k <= b.stride(1) <= most)
    span = k if n == 1 else (n - 1) * b.stride(1) + k
    if b.stride(0) == 1 and pitch_fits and span <= MAX_BYTES and b.data_ptr() % ALIGNMENT == 0:
        return b
    require_copyable(b, out)
    return b.t().clone(memory_format=torch.contiguous_format).t()
