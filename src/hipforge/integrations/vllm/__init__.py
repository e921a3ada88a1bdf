"""hipforge in vLLM: linear layers and experts over MX-FP8, fp8 and MXFP4, decode attention and the write of its cache.

vLLM finds :func:`register` by the entry point group ``vllm.general_plugins`` and calls it in every process; nothing
else has to be done for linear layers and for experts over MX-FP8 and fp8. Those over MXFP4 take the place of vLLM's
emulation, which reads weights as they are loaded: ``--moe-backend emulation`` selects them. ``VLLM_PLUGINS`` chooses
among plugins, ``VLLM_DISABLED_KERNELS=HipforgeMxfp8LinearKernel`` (or HipforgeFp8LinearKernel,
HipforgeFp8BlockLinearKernel) leaves a linear kernel out, and ``--attention-backend HIPFORGE`` takes the attention
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

    from hipforge.integrations.vllm import linear as ours

    tables = {
        ours.HipforgeMxfp8LinearKernel: kernels._POSSIBLE_MXFP8_KERNELS,
        ours.HipforgeFp8LinearKernel: kernels._POSSIBLE_FP8_KERNELS,
        ours.HipforgeFp8BlockLinearKernel: kernels._POSSIBLE_FP8_BLOCK_KERNELS,
    }
    for kernel, table in tables.items():
        known = table.setdefault(platform, [])
        if kernel not in known:
            # register_linear_kernel appends, and kernels of vLLM that take everything would come first.
            known.insert(0, kernel)


def _register_experts() -> None:
    """Let vLLM's choices of experts find ours first among those that take weights as they are loaded."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp4, mxfp8

    from hipforge.integrations.vllm import moe as ours

    _put_first(mxfp8, "_mxfp8_backend_to_kernel_cls", mxfp8.Fp8MoeBackend.TRITON_MXFP8, ours.HipforgeMxfp8Experts)
    _put_first(fp8, "backend_to_kernel_cls", fp8.Fp8MoeBackend.TRITON, ours.HipforgeFp8Experts)
    _put_first(mxfp4, "backend_to_kernel_cls", mxfp4.Mxfp4MoeBackend.EMULATION, ours.HipforgeMxfp4Experts)


def _put_first(oracle: Any, name: str, place: Any, experts: type) -> None:
    theirs = getattr(oracle, name)
    if getattr(theirs, "adds_hipforge", False):
        return

    def classes(backend: Any) -> list[type]:
        found = list(theirs(backend))
        return [experts, *found] if backend == place else found

    classes.adds_hipforge = True  # type: ignore[attr-defined]
    setattr(oracle, name, classes)


def _register_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if ATTENTION_BACKEND not in AttentionBackendEnum.__members__:
        register_backend(ATTENTION_BACKEND, "hipforge.integrations.vllm.attention.HipforgeAttentionBackend")
