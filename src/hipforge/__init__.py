"""hipforge: JIT-compiled GPU ops for AMD Instinct and NVIDIA Hopper, and an emulator for machines that have none.

Names are resolved on first use: importing hipforge imports neither torch nor any compiler.
"""

from __future__ import annotations

import importlib

from hipforge.errors import ArchError as ArchError
from hipforge.errors import BuildError as BuildError
from hipforge.errors import ConfigError as ConfigError
from hipforge.errors import EmulatorFault as EmulatorFault
from hipforge.errors import GuardError as GuardError
from hipforge.errors import HipforgeError as HipforgeError
from hipforge.errors import LaunchError as LaunchError
from hipforge.errors import MissingModuleError as MissingModuleError
from hipforge.errors import OutOfMemoryError as OutOfMemoryError
from hipforge.errors import ToolchainError as ToolchainError

TYPE_CHECKING = False  # type checkers take it for typing's; importing that is most of what an import of hipforge cost
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_SUBMODULES = (
    "aiter_compat",
    "devices",
    "emulator",
    "errors",
    "integrations",
    "jit",
    "nn",
    "ops",
    "settings",
    "tuning",
    "weights",
)


def _lazy() -> dict[str, str]:
    """Return the module of each public name that is resolved on first use; the list of ops is read then, too."""
    from hipforge.ops import public_names

    jit_and_ops = {
        "batch_invariant": "hipforge.ops.core.invariance",
        "compile_ops": "hipforge.jit.compile_ops",
        "explain": "hipforge.ops.core.dispatch",
        "prepare": "hipforge.nn.prepare",
        "programmatic_launch": "hipforge.ops.core.programmatic",
        "register_operators": "hipforge.ops",
        "warmup": "hipforge.ops.core.warmup",
    }
    return {**jit_and_ops, **public_names()}


# Type checkers see these imports and no __getattr__, so that a name that does not exist is an error to them.
# .ci/public_names.py writes them; a test fails where they are not what it would write.
if TYPE_CHECKING:
    # begin generated
    from hipforge import aiter_compat as aiter_compat
    from hipforge import devices as devices
    from hipforge import emulator as emulator
    from hipforge import integrations as integrations
    from hipforge import jit as jit
    from hipforge import nn as nn
    from hipforge import ops as ops
    from hipforge import settings as settings
    from hipforge import tuning as tuning
    from hipforge import weights as weights
    from hipforge.jit.compile_ops import compile_ops as compile_ops
    from hipforge.nn.prepare import prepare as prepare
    from hipforge.ops import register_operators as register_operators
    from hipforge.ops.all_reduce import all_reduce as all_reduce
    from hipforge.ops.all_reduce import all_reduce_residual_rms as all_reduce_residual_rms
    from hipforge.ops.all_reduce import all_reduce_residual_rms_mxfp8 as all_reduce_residual_rms_mxfp8
    from hipforge.ops.argmax import argmax as argmax
    from hipforge.ops.core.dispatch import explain as explain
    from hipforge.ops.core.invariance import batch_invariant as batch_invariant
    from hipforge.ops.core.programmatic import programmatic_launch as programmatic_launch
    from hipforge.ops.core.warmup import warmup as warmup
    from hipforge.ops.decode_attention import decode_attention_fp8 as decode_attention_fp8
    from hipforge.ops.decode_attention import decode_attention_splitk as decode_attention_splitk
    from hipforge.ops.fp8_gemm import fp8_gemm as fp8_gemm
    from hipforge.ops.fp8_gemm import fp8_linear as fp8_linear
    from hipforge.ops.fp8_grouped_gemm import grouped_fp8_linear as grouped_fp8_linear
    from hipforge.ops.fp8_grouped_gemm import grouped_gemm_fp8 as grouped_gemm_fp8
    from hipforge.ops.fp8_grouped_gemm import grouped_swiglu_fp8 as grouped_swiglu_fp8
    from hipforge.ops.fp8_linear import Float8Linear as Float8Linear
    from hipforge.ops.fp8_linear import Float8LinearConfig as Float8LinearConfig
    from hipforge.ops.fp8_linear import convert_to_float8_training as convert_to_float8_training
    from hipforge.ops.fp8_linear import disable_fp8 as disable_fp8
    from hipforge.ops.fp8_linear import scaled_mm as scaled_mm
    from hipforge.ops.fp8_quant import fp8_quant_blocks as fp8_quant_blocks
    from hipforge.ops.fp8_quant import fp8_quant_rows as fp8_quant_rows
    from hipforge.ops.fp8_quant import fp8_quant_tensorwise as fp8_quant_tensorwise
    from hipforge.ops.fp8_skinny_gemm import skinny_gemm as skinny_gemm
    from hipforge.ops.moe import fused_moe_fp8 as fused_moe_fp8
    from hipforge.ops.moe import fused_moe_mxfp4 as fused_moe_mxfp4
    from hipforge.ops.moe import fused_moe_mxfp8 as fused_moe_mxfp8
    from hipforge.ops.moe_align import moe_align_block_size as moe_align_block_size
    from hipforge.ops.moe_combine import moe_combine as moe_combine
    from hipforge.ops.mx_quantize import mxfp4_quantize as mxfp4_quantize
    from hipforge.ops.mx_quantize import mxfp8_quantize as mxfp8_quantize
    from hipforge.ops.mxfp4_gemm import mxfp4_gemm as mxfp4_gemm
    from hipforge.ops.mxfp4_gemm import mxfp4_linear as mxfp4_linear
    from hipforge.ops.mxfp4_grouped_gemm import grouped_gemm_mxfp4 as grouped_gemm_mxfp4
    from hipforge.ops.mxfp4_grouped_gemm import grouped_mxfp4_linear as grouped_mxfp4_linear
    from hipforge.ops.mxfp8_gemm import mxfp8_gemm as mxfp8_gemm
    from hipforge.ops.mxfp8_gemm import mxfp8_gemv as mxfp8_gemv
    from hipforge.ops.mxfp8_gemm import mxfp8_linear as mxfp8_linear
    from hipforge.ops.mxfp8_grouped_gemm import grouped_gemm_mxfp8 as grouped_gemm_mxfp8
    from hipforge.ops.mxfp8_grouped_gemm import grouped_mxfp8_linear as grouped_mxfp8_linear
    from hipforge.ops.rmsnorm_fp8 import residual_rms as residual_rms
    from hipforge.ops.rmsnorm_fp8 import residual_rms_fp8_dynamic as residual_rms_fp8_dynamic
    from hipforge.ops.rmsnorm_fp8 import residual_rms_mxfp8 as residual_rms_mxfp8
    from hipforge.ops.rmsnorm_fp8 import rms_norm as rms_norm
    from hipforge.ops.rmsnorm_fp8 import rms_norm_fp8 as rms_norm_fp8
    from hipforge.ops.rmsnorm_fp8 import rms_norm_fp8_dynamic as rms_norm_fp8_dynamic
    from hipforge.ops.rmsnorm_fp8 import rms_norm_mxfp8 as rms_norm_mxfp8
    from hipforge.ops.rope_and_cache import rope_and_cache as rope_and_cache
    from hipforge.ops.router_gemm import router_gemm as router_gemm
    from hipforge.ops.sparse_attention import sparse_block_scores as sparse_block_scores
    from hipforge.ops.sparse_attention import sparse_topk_blocks as sparse_topk_blocks
    from hipforge.ops.swiglu_fp8 import swiglu_fp8 as swiglu_fp8
    from hipforge.ops.swiglu_fp8 import swiglu_fp8_dynamic as swiglu_fp8_dynamic
    from hipforge.ops.swiglu_fp8 import swiglu_mxfp8 as swiglu_mxfp8
    from hipforge.ops.topk_gating import topk_gating as topk_gating
    # end generated


def _public() -> list[str]:
    classes = {name: value for name, value in globals().items() if isinstance(value, type)}
    errors = [name for name, value in classes.items() if issubclass(value, HipforgeError)]
    return sorted([*errors, "__version__", *_lazy()])


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "_LAZY":
            value = _lazy()
        elif name == "__all__":
            value = _public()
        elif name in _SUBMODULES:
            value = importlib.import_module(f"hipforge.{name}")
        elif not name.startswith("__") and name in (homes := _lazy()):
            value = getattr(importlib.import_module(homes[name]), name)
        else:
            raise AttributeError(f"module 'hipforge' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*_public(), *_SUBMODULES, "__doc__", "__file__", "__name__", "__path__"})
