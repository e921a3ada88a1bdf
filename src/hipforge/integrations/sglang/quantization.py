"""SGLang's quantisation methods mxfp8 and fp8 with hipforge's linear layers and experts."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizeMethodBase
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod

from hipforge.errors import GuardError
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


class HipforgeFp8Config(Fp8Config):
    """SGLang's configuration of fp8 checkpoints: one scale per tensor, or blocks, with dynamic activations."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return SGLang's method for a layer, or hipforge's in its place."""
        method = super().get_quant_method(layer, prefix)
        if self.use_mxfp8 or not self.is_checkpoint_fp8_serialized or self.activation_scheme != "dynamic":
            return method
        if self.weight_block_size not in (None, [128, 128], [32, 32]):
            return method
        if type(method) is Fp8LinearMethod:
            return HipforgeFp8LinearMethod(method)
        if type(method) is Fp8MoEMethod:
            return HipforgeFp8MoEMethod(self)
        return method


class HipforgeLinearMethod(LinearMethodBase):
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
        self.refused = self.refusal(sum(output_partition_sizes), input_size_per_partition, params_dtype)

    def refusal(self, outputs: int, inputs: int, dtype: torch.dtype) -> str | None:
        """Return why a layer [N, K] of a model of a dtype is not taken, or None."""
        raise NotImplementedError

    def _give_back(self, layer: Any) -> None:
        log.warning("SGLang's method takes a linear layer that hipforge refuses: %s", self.refused)
        self.fallback.process_weights_after_loading(layer)


class HipforgeMxfp8LinearMethod(HipforgeLinearMethod):
    """MX-FP8."""

    def refusal(self, outputs: int, inputs: int, dtype: torch.dtype) -> str | None:
        """Return why a layer [N, K] is not taken, or None."""
        return serving.linear_refusal(outputs, inputs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring weight and scales into the GPU's format, or hand the layer to SGLang's method."""
        weight, scale = layer.weight.data, layer.weight_scale_inv.data
        bias = getattr(layer, "bias", None)
        self.refused = self.refused or serving.bias_refusal(bias) or serving.scale_refusal(weight, scale)
        if self.refused is not None:
            self._give_back(layer)
            return
        # The parameters stay the same objects: they carry the loaders of a later update of the weights.
        layer.weight.data, layer.weight_scale_inv.data = serving.device_weights(weight, scale)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + bias, [..., N] of x's dtype."""
        if self.refused is not None:
            return self.fallback.apply(layer, x, bias)
        return serving.linear(x, layer.weight, layer.weight_scale_inv, bias)


class HipforgeFp8LinearMethod(HipforgeLinearMethod):
    """fp8 with a scale per shard of rows that were merged, or per 128 x 128 or 32 x 32 weights."""

    scale: torch.Tensor  # of the rows; the parameter keeps the checkpoint's, for a later update of the weights

    def refusal(self, outputs: int, inputs: int, dtype: torch.dtype) -> str | None:
        """Return why a layer [N, K] is not taken, or None."""
        return serving.fp8_linear_refusal(outputs, inputs, dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring weight and scales into the GPU's format, or hand the layer to SGLang's method."""
        weight = layer.weight.data
        block = getattr(layer, "weight_scale_inv", None)
        if block is None:  # shards of unequal widths, q beside k and v
            widths = torch.tensor(layer.logical_widths, device=weight.device)
            scale = layer.weight_scale.data.repeat_interleave(widths)
        else:
            scale = block.data
        bias = getattr(layer, "bias", None)
        if self.refused is None:
            try:
                weight, self.scale = serving.fp8_device_weights(weight, scale)
            except GuardError as error:
                self.refused = str(error)
            else:
                self.refused = serving.fp8_weight_refusal(weight, self.scale, bias)
        if self.refused is not None:
            self._give_back(layer)
            return
        layer.weight.data = weight
        if block is not None and self.scale.shape == block.shape:
            block.data = self.scale

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + bias, [..., N] of x's dtype."""
        if self.refused is not None:
            return self.fallback.apply(layer, x, bias)
        return serving.fp8_linear(x, layer.weight, self.scale, None if bias is None else bias.to(x.dtype))


class HipforgeMoEMethod(Fp8MoEMethod):
    """Experts through hipforge's MoE runner; SGLang's runner takes a layer that is refused."""

    refused: str | None = None
    multiple = 32

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: MoeRunnerConfig) -> None:
        """Make the runner of the layer."""
        self.refused = moe_refusal(moe_runner_config, self.multiple)
        if self.refused is not None:
            log.warning("SGLang's runner takes experts that hipforge refuses: %s", self.refused)
            super().create_moe_runner(layer, moe_runner_config)
            return
        self._owns_moe_runner = False
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(resolve_moe_runner_backend("hipforge"), moe_runner_config)

    def quant_info(self, layer: Any) -> HipforgeMoeQuantInfo:
        """Return the layer's weights as the runner takes them."""
        raise NotImplementedError

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Return the experts' weighted sum as SGLang's combine input."""
        if self.refused is not None:
            return super().apply(layer, dispatch_output)
        assert self.runner is not None
        return self.runner.run(dispatch_output, self.quant_info(layer))


class HipforgeMxfp8MoEMethod(HipforgeMoEMethod):
    """MX-FP8."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring weights and scales into the GPU's format."""
        if self.refused is not None:
            super().process_weights_after_loading(layer)
            return
        for name in ("w13", "w2"):
            weight, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale_inv")
            weight.data, scale.data = serving.device_weights(weight.data, scale.data, name)

    def quant_info(self, layer: Any) -> HipforgeMoeQuantInfo:
        """Return the layer's weights as the runner takes them."""
        pairs = ((getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale_inv")) for name in _NAMES)
        return HipforgeMoeQuantInfo(*pairs, *_biases(layer))


class HipforgeFp8MoEMethod(HipforgeMoEMethod):
    """fp8 with one scale for each expert's gate, up and down, or per 128 x 128 or 32 x 32 weights; MXFP4 experts.

    DeepSeek-V4's MXFP4 experts stand in fp8 checkpoints: two elements in a byte, scales that SGLang loads as float32
    or e8m0.
    """

    multiple = 16
    scales: dict[str, torch.Tensor]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring weights and scales into the GPU's format."""
        if self.refused is not None:
            super().process_weights_after_loading(layer)
            return
        self.scales = {}
        for name in _NAMES:
            weight = getattr(layer, f"{name}_weight")
            scale = getattr(layer, f"{name}_weight_scale_inv", None)
            scale = getattr(layer, f"{name}_weight_scale") if scale is None else scale
            convert = serving.mxfp4_device_weights if self.is_fp4_expert else serving.fp8_device_weights
            data, self.scales[name] = convert(weight.data, scale.data, name)
            weight.data = data.view(weight.dtype) if self.is_fp4_expert else data

    def quant_info(self, layer: Any) -> HipforgeMoeQuantInfo:
        """Return the layer's weights as the runner takes them."""
        form = "mxfp4" if self.is_fp4_expert else "fp8"
        weights = ((getattr(layer, f"{name}_weight"), self.scales[name]) for name in _NAMES)
        pairs = ((q.view(torch.uint8) if form == "mxfp4" else q, scale) for q, scale in weights)
        return HipforgeMoeQuantInfo(*pairs, *_biases(layer), form)


_NAMES = ("w13", "w2")


def _biases(layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return getattr(layer, "w13_weight_bias", None), getattr(layer, "w2_weight_bias", None)
