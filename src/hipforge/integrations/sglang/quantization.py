"""SGLang's quantisation method mxfp8 with hipforge's linear layers and experts."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizeMethodBase
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod

from hipforge.integrations import serving
from hipforge.integrations.sglang.moe import HipforgeMoeQuantInfo, moe_refusal

log = logging.getLogger("hipforge")


class HipforgeMxfp8Config(Fp8Config):
    """SGLang's configuration of MX-FP8 checkpoints, whose layers are hipforge's where hipforge takes them."""

    @classmethod
    def get_min_capability(cls) -> int:
        """94: MI300X, which SGLang's own kernels do not serve in MX-FP8."""
        return 94

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return SGLang's method for a layer, or hipforge's in its place."""
        method = super().get_quant_method(layer, prefix)
        if self.use_mxfp8 and self.is_checkpoint_fp8_serialized:
            if type(method) is Fp8LinearMethod:
                return HipforgeMxfp8LinearMethod(method)
            if type(method) is Fp8MoEMethod:
                return HipforgeMxfp8MoEMethod(self)
        return method


class HipforgeMxfp8LinearMethod(LinearMethodBase):
    """Quantise the input and multiply; SGLang's method takes a layer that is refused."""

    def __init__(self, fallback: LinearMethodBase) -> None:
        self.fallback = fallback
        self.refused: str | None = None

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Create the parameters that SGLang's method creates, which the checkpoint is loaded into."""
        self.fallback.create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )
        self.refused = serving.linear_refusal(sum(output_partition_sizes), input_size_per_partition)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring weight and scales into the GPU's format, or hand the layer to SGLang's method."""
        weight, scale = layer.weight.data, layer.weight_scale_inv.data
        bias = getattr(layer, "bias", None)
        self.refused = self.refused or serving.bias_refusal(bias) or serving.scale_refusal(weight, scale)
        if self.refused is not None:
            log.warning("SGLang's method takes a linear layer that hipforge refuses: %s", self.refused)
            self.fallback.process_weights_after_loading(layer)
            return
        # The parameters stay the same objects: they carry the loaders of a later update of the weights.
        layer.weight.data, layer.weight_scale_inv.data = serving.device_weights(weight, scale)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + bias, [..., N] of x's dtype."""
        if self.refused is not None:
            return self.fallback.apply(layer, x, bias)
        return serving.linear(x, layer.weight, layer.weight_scale_inv, bias)


class HipforgeMxfp8MoEMethod(Fp8MoEMethod):
    """Experts through hipforge's MoE runner; SGLang's runner takes a layer that is refused."""

    refused: str | None = None

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: MoeRunnerConfig) -> None:
        """Make the runner of the layer."""
        self.refused = moe_refusal(moe_runner_config)
        if self.refused is not None:
            log.warning("SGLang's runner takes experts that hipforge refuses: %s", self.refused)
            super().create_moe_runner(layer, moe_runner_config)
            return
        self._owns_moe_runner = False
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(resolve_moe_runner_backend("hipforge"), moe_runner_config)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring weights and scales into the GPU's format."""
        if self.refused is not None:
            super().process_weights_after_loading(layer)
            return
        for name in ("w13", "w2"):
            weight, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale_inv")
            weight.data, scale.data = serving.device_weights(weight.data, scale.data, name)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Return the experts' weighted sum as SGLang's combine input."""
        if self.refused is not None:
            return super().apply(layer, dispatch_output)
        assert self.runner is not None
        info = HipforgeMoeQuantInfo(
            (layer.w13_weight, layer.w13_weight_scale_inv),
            (layer.w2_weight, layer.w2_weight_scale_inv),
            getattr(layer, "w13_weight_bias", None),
            getattr(layer, "w2_weight_bias", None),
        )
        return self.runner.run(dispatch_output, info)
