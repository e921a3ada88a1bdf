"""vLLM's MX-FP8 linear kernel: what ModelOpt, compressed-tensors and Quark checkpoints come to."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.mxfp8 import Mxfp8LinearKernel, Mxfp8LinearLayerConfig
from vllm.model_executor.utils import replace_parameter

from hipforge.integrations import serving

log = logging.getLogger("hipforge")


class HipforgeMxfp8LinearKernel(Mxfp8LinearKernel):
    """Quantise the input and multiply: two launches, for any number of tokens.

    What is only seen once the weights are loaded (a bias that is not bfloat16, scales in another layout) goes to the
    kernel that vLLM would have taken without this one; the log says why.
    """

    supports_pre_processed_weights = False

    def __init__(self, c: Mxfp8LinearLayerConfig) -> None:
        super().__init__(c)
        self.fallback: Mxfp8LinearKernel | None = None

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Whether the GPU has kernels, and the reason if not."""
        reason = serving.device_refusal()
        return reason is None, reason

    @classmethod
    def can_implement(cls, c: Mxfp8LinearLayerConfig) -> tuple[bool, str | None]:
        """Whether the shape is taken, and the reason if not."""
        if c.bmm_batch_size is not None:
            return False, f"hipforge has no batched MX-FP8 product; got bmm_batch_size={c.bmm_batch_size}"
        reason = serving.linear_refusal(*c.weight_shape)
        return reason is None, reason

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring weight and scales into the GPU's format, or hand the layer to vLLM's next kernel."""
        weight, scale = layer.weight.data, layer.weight_scale.data
        reason = serving.bias_refusal(getattr(layer, "bias", None)) or serving.scale_refusal(weight, scale)
        if reason is not None:
            self.fallback = self._next_kernel()
            log.warning("vLLM's %s takes a layer that hipforge refuses: %s", type(self.fallback).__name__, reason)
            self.fallback.process_weights_after_loading(layer)
            return
        weight, scale = serving.device_weights(weight, scale)
        replace_parameter(layer, "weight", weight)
        replace_parameter(layer, "weight_scale", scale)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + bias, [..., N] of x's dtype."""
        if self.fallback is not None:
            return self.fallback.apply_weights(layer, x, bias)
        return serving.linear(x, layer.weight, layer.weight_scale, bias)

    def _next_kernel(self) -> Mxfp8LinearKernel:
        for known in kernels._POSSIBLE_MXFP8_KERNELS.values():
            if type(self) in known:
                for other in known[known.index(type(self)) + 1 :]:
                    if other.is_supported()[0] and other.can_implement(self.config)[0]:
                        return other(self.config)
        return kernels.EmulationMxfp8LinearKernel(self.config)
