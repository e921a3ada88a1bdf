"""hipforge in SGLang: linear layers and experts over MX-FP8 and fp8, and decode attention, on Instinct GPUs.

SGLang finds :func:`register` by the entry point group ``sglang.srt.plugins`` and calls it in every process. Checkpoints
with ``quant_method`` mxfp8 or fp8 (dynamic activations) then run their linear layers and experts in hipforge;
``--attention-backend hipforge`` takes the attention backend. ``SGLANG_PLUGINS`` chooses among plugins. Importing this
module does not import SGLang.
"""

from __future__ import annotations

import logging
from typing import Any

from hipforge.integrations import serving

__all__ = ["BACKEND", "register"]

# the name of the MoE runner and of the attention backend
BACKEND = "hipforge"

log = logging.getLogger("hipforge")


def register(require_rocm: bool = True) -> bool:
    """Register the kernels with the SGLang of this process; a second call changes nothing.

    Args:
        require_rocm: register nothing unless SGLang runs on ROCm.

    Returns:
        Whether the kernels are registered. On another GPU they are not, and the log says why.
    """
    from sglang.srt.utils import is_hip

    if require_rocm and not is_hip():
        log.debug("SGLang plugin: not registered, SGLang does not run on ROCm")
        return False
    reason = serving.device_refusal()
    if reason is not None:
        log.warning("SGLang plugin: not registered: %s", reason)
        return False
    serving.follow_batch_invariance("SGLANG_ENABLE_DETERMINISTIC_INFERENCE")
    from sglang.srt.layers import quantization
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.moe.moe_runner import runner

    from hipforge.integrations.sglang.moe import HipforgeRunnerCore
    from hipforge.integrations.sglang.quantization import HipforgeFp8Config, HipforgeMxfp8Config

    for methods in (quantization.BASE_QUANTIZATION_METHODS, quantization.QUANTIZATION_METHODS):
        methods["mxfp8"], methods["fp8"] = HipforgeMxfp8Config, HipforgeFp8Config
    if BACKEND not in runner._CUSTOM_RUNNER_CORE_FACTORIES:
        runner.register_moe_runner_core(BACKEND, HipforgeRunnerCore)
    if BACKEND not in attention_registry.ATTENTION_BACKENDS:
        attention_registry.register_attention_backend(BACKEND)(_attention_backend)
        _allow_argument()
    return True


def _attention_backend(runner: Any) -> Any:
    from hipforge.integrations.sglang.attention import HipforgeAttnBackend

    return HipforgeAttnBackend(runner)


def _allow_argument() -> None:
    """Let the command line take the name."""
    from sglang.srt import server_args

    if BACKEND not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.ATTENTION_BACKEND_CHOICES.append(BACKEND)
