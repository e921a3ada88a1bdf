"""vLLM's linear kernels for MX-FP8 and fp8: what ModelOpt, compressed-tensors, Quark and fp8 checkpoints come to."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear import Fp8BlockScaledMMLinearKernel, FP8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.mxfp8 import Mxfp8LinearKernel, Mxfp8LinearLayerConfig
from vllm.model_executor.utils import replace_parameter

from hipforge.integrations import serving
from hipforge.ops.core.formats import FP8_BLOCK

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


def _taken(config: Any) -> tuple[bool, str | None]:
    outputs, inputs = config.weight_shape
    reason = serving.fp8_linear_refusal(outputs, inputs, config.out_dtype or torch.bfloat16)
    return reason is None, reason


class HipforgeFp8LinearKernel(FP8ScaledMMLinearKernel):
    """fp8 with one scale of the weight, or one per row: PTPC, and static or dynamic scales of activations.

    vLLM keeps the weight as [K, N], the transpose of rows that are contiguous. Activations with a scale per token are
    quantised in hipforge; one per tensor, static or not, by vLLM.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Whether the GPU has kernels, and the reason if not."""
        reason = serving.device_refusal()
        return reason is None, reason

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Whether the scales and the shape are taken, and the reason if not."""
        weight, activation = c.weight_quant_key.scale, c.activation_quant_key.scale
        if not (weight.group_shape.is_per_tensor() or weight.group_shape.is_per_channel()):
            return False, f"scales of the weight per {weight.group_shape}: one, or one per row, is taken"
        if not (activation.group_shape.is_per_tensor() or activation.group_shape.is_per_token()):
            return False, f"scales of activations per {activation.group_shape}: one, or one per token, is taken"
        return _taken(c)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack rows that vLLM has padded for other kernels."""
        super().process_weights_after_loading(layer)
        name = self.layer_param_names[0]
        _pack(layer, name, getattr(layer, name).data.t(), transposed=True)

    def apply_weights(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + bias, [..., N]."""
        activation = self.config.activation_quant_key.scale
        if isinstance(x, torch.Tensor) and activation.group_shape.is_per_token() and not activation.static:
            weight, scale = self._get_layer_params(layer)[:2]
            dtype = self.config.out_dtype or x.dtype
            return serving.fp8_linear(x, weight.t(), scale, _in(bias, dtype), dtype=dtype)
        found: torch.Tensor = super().apply_weights(layer, x, bias)
        return found

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        """Return A B + bias of operands that vLLM has quantised."""
        return serving.fp8_linear(A, B.t(), Bs, _in(bias, out_dtype), As, out_dtype).view(*output_shape)


class HipforgeFp8BlockLinearKernel(Fp8BlockScaledMMLinearKernel):
    """fp8 with a scale per 128 x 128 weights, float32 or e8m0: x is quantised per 128 in one launch, and multiplied."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Whether the GPU has kernels, and the reason if not."""
        reason = serving.device_refusal()
        return reason is None, reason

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Whether the scales and the shape are taken, and the reason if not."""
        blocks = tuple(config.weight_quant_key.scale.group_shape), tuple(config.activation_quant_key.scale.group_shape)
        if blocks != ((FP8_BLOCK, FP8_BLOCK), (1, FP8_BLOCK)):
            return False, f"scales per {blocks[0]} and {blocks[1]}: 128 x 128 weights and 1 x 128 activations are taken"
        taken, reason = super().can_implement(config)
        return _taken(config) if taken else (taken, reason)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Let vLLM bring weight and scales into the GPU's format, and pack rows that it has padded."""
        super().process_weights_after_loading(layer)
        params = self._get_layer_params(layer)
        _pack(layer, params.WEIGHT, params.weight.data, transposed=False)

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Return x W^T + bias, [..., N]."""
        params = self._get_layer_params(layer)
        scale = params.block_scale
        scale = scale.view(torch.uint8) if scale.element_size() == 1 else scale
        dtype = self.config.out_dtype or x.dtype
        return serving.fp8_linear(x, params.weight, scale, _in(bias, dtype), dtype=dtype)

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        """Return A B^T of operands that are quantised already."""
        return serving.fp8_linear(A, B, Bs, None, As, self.config.out_dtype or torch.bfloat16)


def _pack(layer: Any, name: str, weight: torch.Tensor, *, transposed: bool) -> None:
    """Make the rows of a weight [N, K] contiguous, once, where they are not: each call would copy them."""
    if not weight.is_contiguous():
        packed = weight.contiguous()
        replace_parameter(layer, name, packed.t() if transposed else packed)


def _in(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a bias in the dtype of the result, in which the op adds it."""
    return None if bias is None else bias.to(dtype)
