"""MX-FP8 models in the transformers library: a quantiser that its ``from_pretrained`` finds.

Linear layers become :class:`hipforge.nn.MXFP8Linear`. What a model keeps in other parameters, such as stacked experts,
stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from hipforge.errors import ConfigError
from hipforge.nn import MXFP8Linear
from hipforge.nn.payload import accepted
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.core.fp8 import fp8_dtypes

METHOD = "hipforge_mxfp8"


@register_quantization_config(METHOD)
class MXFP8Config(QuantizationConfigMixin):
    """How to load a model with MX-FP8 weights: ``quantization_config=`` of ``from_pretrained``.

    The checkpoint has ``X.weight``, e4m3fn or uint8 with its bits, [N, K], beside ``X.weight_scale``, e8m0 bytes
    [N, K / 32], for each linear layer X; on gfx942 both are converted to what it computes in. Its ``config.json``
    declares ``"quant_method": "hipforge_mxfp8"``, or no quantisation. ``save_pretrained`` writes weights as blocks,
    [N, K / 32, 32]: read as a plain matrix, without scales, they would give a model of wrong numbers.

    Args:
        modules_to_not_convert: names of layers, or parts of names, whose weights are plain; by default the output head
            and what shares its weights with the embedding. Layers whose K is not a multiple of 32 are plain always.
        quantize: the checkpoint is a plain one (16 or 32 bits), whose layers are quantised after they are loaded.
        blocks: the checkpoint's weights are [N, K / 32, 32].

    Raises:
        ConfigError: while loading, a layer without scales in the checkpoint; it names the layer.

    Example:
        >>> from hipforge.integrations.transformers import MXFP8Config
        >>> MXFP8Config(modules_to_not_convert=["lm_head"]).to_dict()
        {'quant_method': 'hipforge_mxfp8', 'modules_to_not_convert': ['lm_head'], 'quantize': False, 'blocks': True}
    """

    def __init__(
        self,
        modules_to_not_convert: list[str] | None = None,
        quantize: bool = False,
        blocks: bool = False,
        **declared: Any,
    ) -> None:
        method = declared.pop("quant_method", METHOD)
        if method != METHOD or declared:
            raise ConfigError(
                f"quantization_config of {METHOD} takes modules_to_not_convert, quantize and blocks; got quant_method "
                f"{method!r}" + (f" and {', '.join(sorted(declared))}" if declared else "")
            )
        self.quant_method = METHOD  # type: ignore[assignment]  # the library annotates its own methods' enumeration
        self.modules_to_not_convert = modules_to_not_convert
        self.quantize, self.blocks = quantize, blocks

    def to_dict(self) -> dict[str, Any]:
        """Return what ``config.json`` holds; what is saved is quantised already."""
        skipped = self.modules_to_not_convert
        return {"quant_method": METHOD, "modules_to_not_convert": skipped, "quantize": False, "blocks": True}


@register_quantizer(METHOD)
class MXFP8Quantizer(HfQuantizer):
    """Replaces linear layers before the weights are loaded, or after it where the checkpoint is a plain one."""

    quantization_config: MXFP8Config

    def __init__(self, quantization_config: MXFP8Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = not quantization_config.quantize  # whether or not the checkpoint declares it

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Leave fp8 as it is stored: casting it to another fp8 type would change its values."""
        stored = param.get_dtype() if hasattr(param, "get_dtype") else str(param.dtype)
        if stored.startswith(("F8", "torch.float8")):
            return None
        found: torch.dtype | None = super().get_new_dtype(converter, param, dtype)
        return found

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.quantization_config.modules_to_not_convert is None:
            self.quantization_config.modules_to_not_convert = self.get_modules_to_not_convert(model)
        if self.pre_quantized:
            for name, part in self._linears(model).items():
                layer = MXFP8Linear(part.in_features, part.out_features, part.bias is not None, device="meta")
                # What is stored, whatever the device computes in; scales that no file has stay on the meta device.
                shape = (part.out_features, -1, BLOCK) if self.quantization_config.blocks else (part.out_features, -1)
                layer.weight = torch.empty_like(layer.weight, dtype=torch.float8_e4m3fn).view(shape)
                model.set_submodule(name, layer)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not self.pre_quantized:
            for name, part in self._linears(model).items():
                model.set_submodule(name, MXFP8Linear.from_linear(part))
            return model
        for name, part in model.named_modules():
            if isinstance(part, MXFP8Linear):
                _require_loaded(name, part)
                part.weight, part.weight_scale = accepted(part.weight.flatten(1), part.weight_scale, name)
        return model

    def _linears(self, model: Any) -> dict[str, torch.nn.Linear]:
        skipped = self.quantization_config.modules_to_not_convert
        return {
            name: part
            for name, part in model.named_modules()
            if type(part) is torch.nn.Linear and part.in_features % BLOCK == 0 and should_convert_module(name, skipped)
        }

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return what ``save_pretrained`` writes: the weights as blocks, which no plain layer takes."""
        state = model.state_dict()
        for name, part in model.named_modules():
            if isinstance(part, MXFP8Linear):
                state[f"{name}.weight"] = part.weight.view(part.out_features, -1, BLOCK)
        return state, {}

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` works: on gfx942 the weights are e4m3fnuz, which checkpoints do not hold."""
        own: torch.dtype = fp8_dtypes(torch.get_default_device())[0]
        return own == torch.float8_e4m3fn

    @property
    def is_trainable(self) -> bool:
        """Never: the layers compute no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Always: one graph serves every batch."""
        return True


def _require_loaded(name: str, layer: MXFP8Linear) -> None:
    """Refuse a layer whose tensors the library filled itself, because no file had them; it marks those that one had."""
    for part, tensor in layer.named_buffers():
        if not getattr(tensor, "_is_hf_initialized", False):
            raise ConfigError(
                f"{name}.{part} is not in the checkpoint; each MX-FP8 layer needs its elements, a weight_scale and the "
                "bias that the model has. Name layers with plain weights in modules_to_not_convert, or pass "
                "quantize=True for a checkpoint that is plain throughout"
            )
