"""hipforge: JIT-compiled GPU ops for AMD Instinct accelerators, and an emulator for machines that have none.

Names are resolved on first use: importing hipforge imports neither torch nor any compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hipforge.errors import (
    ArchError,
    BuildError,
    ConfigError,
    EmulatorFault,
    GuardError,
    HipforgeError,
    LaunchError,
    MissingModuleError,
    ToolchainError,
)
from hipforge.ops import public_names

__version__ = "0.1.0"

# public name -> module that defines it
_LAZY: dict[str, str] = {
    "compile_ops": "hipforge.jit",
    "explain": "hipforge.ops.core.dispatch",
    "register_operators": "hipforge.ops",
    **public_names(),
}
_SUBMODULES = ("devices", "emulator", "errors", "jit", "ops", "settings", "tuning")

__all__ = [
    "ArchError",
    "BuildError",
    "ConfigError",
    "EmulatorFault",
    "GuardError",
    "HipforgeError",
    "LaunchError",
    "MissingModuleError",
    "ToolchainError",
    "__version__",
    *_LAZY,
]

if TYPE_CHECKING:
    from hipforge.jit.compile_ops import compile_ops as compile_ops
    from hipforge.ops.core.dispatch import explain as explain
    from hipforge.ops.decode_attention import decode_attention_fp8 as decode_attention_fp8
    from hipforge.ops.decode_attention import decode_attention_splitk as decode_attention_splitk
    from hipforge.ops.fp8_linear import Float8Linear as Float8Linear
    from hipforge.ops.fp8_linear import Float8LinearConfig as Float8LinearConfig
    from hipforge.ops.fp8_linear import convert_to_float8_training as convert_to_float8_training
    from hipforge.ops.fp8_linear import disable_fp8 as disable_fp8
    from hipforge.ops.fp8_linear import scaled_mm as scaled_mm
    from hipforge.ops.fp8_quant import fp8_quant_tensorwise as fp8_quant_tensorwise
    from hipforge.ops.fp8_skinny_gemm import skinny_gemm as skinny_gemm
    from hipforge.ops.moe import fused_moe_mxfp8 as fused_moe_mxfp8
    from hipforge.ops.moe_align import moe_align_block_size as moe_align_block_size
    from hipforge.ops.moe_combine import moe_combine as moe_combine
    from hipforge.ops.mx_quantize import mxfp4_quantize as mxfp4_quantize
    from hipforge.ops.mx_quantize import mxfp8_quantize as mxfp8_quantize
    from hipforge.ops.mxfp4_gemm import mxfp4_gemm as mxfp4_gemm
    from hipforge.ops.mxfp4_gemm import mxfp4_linear as mxfp4_linear
    from hipforge.ops.mxfp8_dense import mxfp8_gemv as mxfp8_gemv
    from hipforge.ops.mxfp8_dense import mxfp8_linear as mxfp8_linear
    from hipforge.ops.mxfp8_grouped import grouped_gemm_mxfp8 as grouped_gemm_mxfp8
    from hipforge.ops.mxfp8_grouped import grouped_mxfp8_linear as grouped_mxfp8_linear
    from hipforge.ops.rmsnorm_fp8 import residual_rms as residual_rms
    from hipforge.ops.rmsnorm_fp8 import residual_rms_mxfp8 as residual_rms_mxfp8
    from hipforge.ops.rmsnorm_fp8 import rms_norm as rms_norm
    from hipforge.ops.rmsnorm_fp8 import rms_norm_fp8 as rms_norm_fp8
    from hipforge.ops.rmsnorm_fp8 import rms_norm_mxfp8 as rms_norm_mxfp8
    from hipforge.ops.rope_and_cache import rope_and_cache as rope_and_cache
    from hipforge.ops.router_gemm import router_gemm as router_gemm
    from hipforge.ops.swiglu_fp8 import swiglu_fp8 as swiglu_fp8
    from hipforge.ops.swiglu_fp8 import swiglu_mxfp8 as swiglu_mxfp8
    from hipforge.ops.topk_gating import topk_gating as topk_gating


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"hipforge.{name}")
    else:
        raise AttributeError(f"module 'hipforge' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_SUBMODULES})
