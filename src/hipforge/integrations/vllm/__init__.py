"""hipforge in vLLM: MX-FP8 linear layers and experts, decode attention and the write of its cache, on Instinct GPUs.

vLLM finds :func:`register` by the entry point group ``vllm.general_plugins`` and calls it in every process; nothing
else has to be done for linear layers and experts. ``VLLM_PLUGINS`` chooses among plugins, ``VLLM_DISABLED_KERNELS=
HipforgeMxfp8LinearKernel`` leaves the linear kernel out, and ``--attention-backend HIPFORGE`` takes the attention
backend. Importing this module does not import vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

from hipforge.integrations import serving

__all__ = ["ATTENTION_BACKEND", "register"]

ATTENTION_BACKEND = "HIPFORGE"

log = logging.getLogger("hipforge")


def register(platform: Any = None) -> bool:
    """Register the kernels with the vLLM of this process; a second call changes nothing.

    Args:
        platform: the ``vllm.platforms.PlatformEnum`` for which the linear kernel is tried first; ROCm by default, where
            nothing is registered unless vLLM runs on it.

    Returns:
        Whether the kernels are registered. On another platform or GPU they are not, and the log says why.
    """
    from vllm.platforms import PlatformEnum, current_platform

    if platform is None:
        if not current_platform.is_rocm():
            log.debug("vLLM plugin: not registered, vLLM does not run on ROCm")
            return False
        platform = PlatformEnum.ROCM
    reason = serving.device_refusal()
    if reason is not None:
        log.warning("vLLM plugin: not registered: %s", reason)
        return False
    serving.follow_batch_invariance("VLLM_BATCH_INVARIANT")
    _register_linear(platform)
    _register_experts()
    _register_attention()
    return True


def _register_linear(platform: Any) -> None:
    from vllm.model_executor.kernels import linear as kernels

    from hipforge.integrations.vllm.linear import HipforgeMxfp8LinearKernel

    known = kernels._POSSIBLE_MXFP8_KERNELS.setdefault(platform, [])
    if HipforgeMxfp8LinearKernel not in known:
        # register_linear_kernel appends, and vLLM's emulation, which takes everything, would come first.
        known.insert(0, HipforgeMxfp8LinearKernel)


def _register_experts() -> None:
    """Let vLLM's choice of MX-FP8 experts find ours first among those that take weights as they are loaded."""
    from vllm.model_executor.layers.fused_moe.oracle import mxfp8 as oracle

    from hipforge.integrations.vllm.moe import HipforgeMxfp8Experts

    theirs = oracle._mxfp8_backend_to_kernel_cls
    if getattr(theirs, "adds_hipforge", False):
        return

    def classes(backend: Any) -> list[type]:
        found = list(theirs(backend))
        return [HipforgeMxfp8Experts, *found] if backend == oracle.Fp8MoeBackend.TRITON_MXFP8 else found

    classes.adds_hipforge = True  # type: ignore[attr-defined]
    oracle._mxfp8_backend_to_kernel_cls = classes


def _register_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if ATTENTION_BACKEND not in AttentionBackendEnum.__members__:
        register_backend(ATTENTION_BACKEND, "hipforge.integrations.vllm.attention.HipforgeAttentionBackend")
