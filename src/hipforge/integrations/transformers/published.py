"""Published fp8 and MXFP4 checkpoints in the transformers library: their layers become hipforge's while they load."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from hipforge.errors import ConfigError, GuardError
from hipforge.integrations.transformers.declared import METHODS, Scheme, scheme_of
from hipforge.nn import FP8Experts, FP8Linear, MXFP4Experts
from hipforge.nn.experts import Activation, Experts
from hipforge.nn.fp8_linear import scale_like
from hipforge.nn.payload import accepted_fp8
from hipforge.ops.core.formats import BLOCK, FP8_BLOCK

log = logging.getLogger("hipforge")


class PublishedConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a checkpoint that :func:`register` lets hipforge load, kept as it is declared.

    Example:
        >>> from hipforge.integrations.transformers import PublishedConfig
        >>> PublishedConfig(quant_method="fp8", weight_block_size=[128, 128]).scheme.linear
        'blocks'
    """

    def __init__(self, **declared: Any) -> None:
        self.quant_method = declared.get("quant_method")  # type: ignore[assignment]
        self.declared = declared
        found = scheme_of(declared)
        if isinstance(found, str):
            raise ConfigError(f"hipforge does not take this checkpoint: {found}")
        self.scheme: Scheme = found

    def to_dict(self) -> dict[str, Any]:
        """Return what ``config.json`` declared."""
        return dict(self.declared)


class _Configs:
    """In the library's table of configurations: ours for what is taken, its own for the rest."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def from_dict(self, declared: dict[str, Any], return_unused_kwargs: bool = False, **more: Any) -> Any:
        reason = scheme_of(declared)
        if isinstance(reason, str):
            log.warning("transformers' own quantiser takes a checkpoint that hipforge refuses: %s", reason)
            return self.theirs.from_dict(declared, return_unused_kwargs=return_unused_kwargs, **more)
        config = PublishedConfig(**declared)
        return (config, more) if return_unused_kwargs else config


def register(methods: Iterable[str] = METHODS) -> None:
    """Let ``from_pretrained`` load checkpoints of these methods with hipforge's layers, in this process.

    A checkpoint whose ``quantization_config`` hipforge does not take, int4 of compressed-tensors for example, goes to
    the library's own quantiser; the log says why. A second call changes nothing.

    Args:
        methods: names of ``quant_method``: ``fp8``, ``compressed-tensors``, ``quark`` and ``mxfp4``.

    Raises:
        ConfigError: another method.

    Example:
        >>> import hipforge.integrations.transformers
        >>> hipforge.integrations.transformers.register(["quark"])
    """
    for method in methods:
        if method not in METHODS:
            raise ConfigError(f"methods must be among {', '.join(METHODS)}; got {method!r}")
        if isinstance(auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method], _Configs):
            continue
        configs: dict[str, Any] = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
        quantizers: dict[str, Any] = auto.AUTO_QUANTIZER_MAPPING
        configs[method], quantizers[method] = _Configs(configs[method]), _choice(quantizers[method])


def _choice(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def quantizer(config: Any, **options: Any) -> Any:
        return (PublishedQuantizer if isinstance(config, PublishedConfig) else theirs)(config, **options)

    return quantizer


class _Scales(ConversionOps):
    """Scales of a weight as they are stored become float32 or e8m0 bytes, those of rows one-dimensional."""

    def __init__(self, layout: str) -> None:
        self.layout = layout

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **more: Any
    ) -> dict[str, Any]:
        return {key: self._each(value) for key, value in input_dict.items()}

    def _each(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._each(one) for one in value]
        scale = value.view(torch.uint8) if value.element_size() == 1 else value.float()
        return scale.reshape(-1) if self.layout in ("tensor", "rows") else scale

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class _First(_Scales):
    """The only tensor of a list, converted, under the name of its target."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **more: Any
    ) -> dict[str, Any]:
        (value,) = input_dict.values()
        return {target_patterns[0]: self._each(value[0] if isinstance(value, list) else value)}


class _Stored(torch.nn.Module):
    """Parameters that experts are loaded into; :class:`_Adapter` takes their place once they are."""

    def __init__(self, experts: torch.nn.Module, scheme: Scheme, activation: Activation) -> None:
        super().__init__()
        self.scheme, self.activation = scheme, activation
        interleaved = scheme.companion == "_scales"  # gpt-oss, whose plain weights are transposed
        shapes = {}
        for name in ("gate_up_proj", "down_proj"):
            count, n, k = getattr(experts, name).shape
            shapes[name] = (count, k, n) if interleaved else (count, n, k)
            bias = getattr(experts, f"{name}_bias", None)
            if bias is not None:
                self._hold(f"{name}_bias", bias.shape, torch.float32)
        for name, (count, n, k) in shapes.items():
            if scheme.experts != "mxfp4":
                scale, dtype = scale_like(scheme.experts, n, k)
                halves = 2 if name == "gate_up_proj" else 1
                if scheme.experts not in ("tensor", "rows"):
                    block = BLOCK if scheme.experts == "shared_e8m0" else FP8_BLOCK
                    if halves == 2 and n // 2 % block:
                        raise ConfigError(
                            f"experts of intermediate size {n // 2} with scales of {block} rows: gate and up must not "
                            f"share a block, so the size must be a multiple of {block}"
                        )
                self._hold(name, (count, n, k), torch.float8_e4m3fn)
                self._hold(f"{name}{scheme.companion}", (count, *((halves,) if scale == (1,) else scale)), dtype)
            elif interleaved:
                self._hold(f"{name}_blocks", (count, n, k // BLOCK, BLOCK // 2), torch.uint8)
                self._hold(f"{name}_scales", (count, n, k // BLOCK), torch.uint8)
            else:
                self._hold(name, (count, n, k // 2), torch.int8)
                self._hold(f"{name}{scheme.companion}", (count, n, k // BLOCK), torch.uint8)

    def _hold(self, name: str, shape: Iterable[int], dtype: torch.dtype) -> None:
        empty = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))

    def made(self) -> Experts:
        """Return hipforge's experts over what was loaded."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        biases: dict[str, Any] = {}
        for ours, name in (("w1", "gate_up_proj"), ("w2", "down_proj")):
            stored = f"{name}_blocks" if hasattr(self, f"{name}_blocks") else name
            elements, scale = getattr(self, stored).data, getattr(self, f"{name}{self.scheme.companion}").data
            if self.scheme.experts == "tensor":  # one for gate and one for up; rows of both in one layout
                scale = scale.repeat_interleave(elements.shape[1] // scale.shape[1], 1)
            pairs.append((elements, scale))
            bias = getattr(self, f"{name}_bias", None)
            biases[f"{ours}_bias"] = None if bias is None else bias.data
        kind = MXFP4Experts if self.scheme.experts == "mxfp4" else FP8Experts
        return kind(pairs[0], pairs[1], self.activation, **biases)


class _Adapter(torch.nn.Module):
    """hipforge's experts, called as the library's models call theirs."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts; ids of no expert here contribute nothing."""
        out: torch.Tensor = self.experts(hidden_states, top_k_weights, top_k_index)
        return out


def _activation_of(name: str, experts: torch.nn.Module, transposed: bool) -> Activation:
    """Return SwiGLU's parameters of a model's experts; raises ConfigError for another activation."""
    limit, alpha = getattr(experts, "limit", None), getattr(experts, "alpha", None)
    softcap = getattr(experts, "gate_softcap", None)
    act = getattr(experts, "act_fn", None)
    if transposed:
        return Activation(1.702 if alpha is None else alpha, 1.0, 7.0 if limit is None else limit, interleaved=True)
    if softcap is not None or type(act).__name__ not in ("SiLUActivation", "SiLU"):
        raise ConfigError(f"{name} has the activation {type(act).__name__}; experts with gated silu are taken")
    return Activation(limit=limit) if alpha is None else Activation(alpha, 1.0, limit)


class PublishedQuantizer(HfQuantizer):
    """Replaces linear layers and stacked experts before the weights are loaded; experts once more after it."""

    quantization_config: PublishedConfig

    @property
    def scheme(self) -> Scheme:
        """Return how the layers are stored."""
        return self.quantization_config.scheme

    @property
    def serialized_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        """Return what the library's converters, which stack experts, load beside a weight."""
        return {"weight": ["weight", f"weight{self.scheme.companion}"]}

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Leave elements, and scales before they are converted, as they are stored."""
        stored = param.get_dtype() if hasattr(param, "get_dtype") else str(param.dtype)
        operations = getattr(converter, "operations", ())
        if stored.startswith(("F8", "torch.float8")) or any(isinstance(each, _Scales) for each in operations):
            return None
        found: torch.dtype | None = super().get_new_dtype(converter, param, dtype)
        return found

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Return the model's converters, those of experts' scales once more, and those of linear layers' scales."""
        renamed = [WeightRenaming(source_patterns=r"^(.+)\.scale$", target_patterns=r"\1.weight_scale_inv")]
        found = super().update_weight_conversions(weight_conversions, model)
        for each in found:
            sources = getattr(each, "_original_source_patterns", None) or [""]
            if isinstance(each, WeightConverter) and sources[0].endswith(f".weight{self.scheme.companion}"):
                each.operations.insert(0, _Scales("rows" if self.scheme.experts in ("tensor", "rows") else "blocks"))
        linear = [
            WeightConverter(
                source_patterns=[f"weight{self.scheme.companion}"],
                target_patterns=["weight_scale"],
                operations=[_First(self.scheme.linear)],
            )
        ] if self.scheme.linear else []  # fmt: skip
        return (renamed if self.scheme.companion == "_scale_inv" else []) + found + linear

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        skipped = self.scheme.skipped
        plain = self.get_modules_to_not_convert(model, None if skipped is None else list(skipped))
        for name, part in list(model.named_modules()):
            if self.scheme.leaves(name) or not should_convert_module(name, plain):
                continue
            if type(part) is torch.nn.Linear and self.scheme.linear:
                _, k = part.weight.shape
                if self.scheme.linear == "shared_e8m0" and k % BLOCK:
                    raise ConfigError(f"{name} has K = {k}, which 32 x 32 blocks do not divide")
                layer = FP8Linear(
                    part.in_features, part.out_features, part.bias is not None, "meta", self.scheme.linear
                )
                layer.weight = layer.weight.view(torch.float8_e4m3fn)  # what is stored, whatever the device computes in
                model.set_submodule(name, layer)
            elif name.endswith(".experts") and hasattr(part, "gate_up_proj"):
                activation = _activation_of(name, part, self.scheme.companion == "_scales")
                model.set_submodule(name, _Stored(part, self.scheme, activation))
        # What the layers here have no use for: static scales of activations, and those of a cache.
        ignored = {r"(input|output|activation)_scale$", r"[kv]_scale$"}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ignored}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, part in list(model.named_modules()):
            if not isinstance(part, FP8Linear | _Stored):
                continue
            for key, tensor in (*part.named_buffers(recurse=False), *part.named_parameters(recurse=False)):
                if not getattr(tensor, "_is_hf_initialized", False):
                    raise ConfigError(
                        f"{name}.{key} is not in the checkpoint; its quantization_config says that the layer is "
                        "quantised, with elements and their scales"
                    )
            try:
                if isinstance(part, _Stored):
                    model.set_submodule(name, _Adapter(part.made()))
                else:
                    part.weight, part.weight_scale = accepted_fp8(part.weight, part.weight_scale, name)
            except GuardError as error:
                raise ConfigError(f"{name} of the checkpoint is not as its quantization_config says: {error}") from None
        return model

    def is_serializable(self) -> bool:
        """Never: the layers hold what the device computes in, under other names."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Never: the layers compute no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Always: one graph serves every batch."""
        return True
