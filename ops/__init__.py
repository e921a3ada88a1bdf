"""GPU ops: envelope, tuned lookup, dispatch; one file per op family.

Families are imported on first use: ``hipforge.ops.reference`` works after ``import hipforge`` alone.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_FAMILIES = (
    "decode_attention_fp8",
    "fp8_linear",
    "fp8_quant",
    "grouped_gemm_mxfp8",
    "moe",
    "mx_quantize",
    "mxfp4_gemm",
    "reference",
    "rmsnorm_fp8",
    "skinny_gemm_fp8",
    "smallm_gemm_mxfp8",
    "swiglu_fp8",
)


def __getattr__(name: str) -> ModuleType:
    if name not in _FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_FAMILIES)}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FAMILIES})
