"""vLLM's experts over MX-FP8, fp8 with other scales, and MXFP4."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp4Static,
    kMxfp8Dynamic,
    kMxfp8Static,
)

from hipforge.errors import GuardError
from hipforge.integrations import serving

Keys = tuple[QuantKey | None, QuantKey | None]


class HipforgeExperts(mk.FusedMoEExpertsModular):
    """Quantise, two grouped GEMMs, SwiGLU between them and the weighted sum; a subclass says over which weights."""

    form: ClassVar[str]
    """As :func:`hipforge.integrations.serving.experts` has it."""

    schemes: ClassVar[tuple[Keys, ...]]
    """vLLM's keys of weights and activations that are taken."""

    multiple: ClassVar[int] = 32
    """Of both widths."""

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, **options: Any) -> None:
        super().__init__(moe_config, quant_config, **options)
        limit = quant_config.gemm1_clamp_limit
        found = serving.swiglu_parameters(
            moe_config.activation.value,
            _first(quant_config.gemm1_alpha, moe_config.swiglu_alpha),
            _first(quant_config.gemm1_beta, moe_config.swiglu_beta),
            _first(limit, moe_config.swiglu_limit),
        )
        if isinstance(found, str):
            raise GuardError(found)
        self.swiglu = found

    @property
    def expects_unquantized_inputs(self) -> bool:
        """True: activations are quantised here."""
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Tokens in their order, not batched by expert."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def is_supported_config(
        cls: type[HipforgeExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """Whether a layer is taken, and the reason if not."""
        reason = serving.device_refusal()
        if reason is None:
            taken, reason = mk.FusedMoEExperts.is_supported_config(
                cls, moe_config, weight_key, activation_key, activation_format
            )
            if taken:
                reason = serving.moe_refusal(
                    moe_config.hidden_dim,
                    moe_config.intermediate_size_per_partition,
                    moe_config.in_dtype,
                    cls.multiple,
                )
        if reason is None:
            found = serving.swiglu_parameters(
                moe_config.activation.value,
                moe_config.swiglu_alpha,
                moe_config.swiglu_beta,
                moe_config.swiglu_limit,
            )
            reason = found if isinstance(found, str) else None
        return reason is None, reason

    @staticmethod
    def _supports_current_device() -> bool:
        return serving.device_refusal() is None

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @classmethod
    def _supports_quant_scheme(cls, weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return (weight_key, activation_key) in cls.schemes

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation.value in serving.ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not moe_parallel_config.use_batched_activation_format

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Nothing is left to reduce."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspaces, and an output [M, K]."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the experts' weighted sum [M, K] into ``output``."""
        pairs = self._pairs(w1, w2)
        serving.experts(
            hidden_states, pairs[0], pairs[1], topk_weights, topk_ids, self.swiglu, expert_map=expert_map,
            w1_bias=self.w1_bias, w2_bias=self.w2_bias, weighted_input=apply_router_weight_on_input, out=output,
            form=self.form,
        )  # fmt: skip

    def _pairs(self, *weights: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return elements and scales of both weights as the op takes them."""
        scales = self.w1_scale, self.w2_scale
        assert scales[0] is not None and scales[1] is not None
        return [(weight, _bytes(scale)) for weight, scale in zip(weights, scales, strict=True)]


class HipforgeMxfp8Experts(HipforgeExperts):
    """MX-FP8 in the checkpoint's layout. On gfx942 the first call brings the weights into e4m3fnuz, in place."""

    form = "mxfp8"
    schemes = ((kMxfp8Static, kMxfp8Dynamic),)
    _converted = False

    def _pairs(self, *weights: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = [serving.in_device_format(*pair, self._converted) for pair in super()._pairs(*weights)]
        self._converted = True
        return pairs


class HipforgeFp8Experts(HipforgeExperts):
    """fp8 with scales per expert, per row or per 128 x 128, which vLLM has brought into the GPU's format.

    Activations get a scale per token where the weights have one per expert or row, per 128 where they have blocks. A
    block holds rows of the gate or of up, so I is a multiple of 128 there.
    """

    form = "fp8"
    schemes = (
        (kFp8StaticChannelSym, kFp8DynamicTokenSym),
        (kFp8StaticTensorSym, kFp8DynamicTensorSym),
        (kFp8StaticTensorSym, kFp8DynamicTokenSym),
        (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    )
    multiple = 16

    @staticmethod
    def is_supported_config(
        cls: type[HipforgeExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """Whether a layer is taken, and the reason if not."""
        inner = moe_config.intermediate_size_per_partition
        if weight_key == kFp8Static128BlockSym and inner % 128:
            return False, f"intermediate size {inner}: gate and up must not share a block of 128 rows"
        return HipforgeExperts.is_supported_config(cls, moe_config, weight_key, activation_key, activation_format)


class HipforgeMxfp4Experts(HipforgeExperts):
    """MXFP4 in the checkpoint's layout, with MX-FP8 activations, also where vLLM would leave them in 16 bits."""

    form = "mxfp4"
    schemes = ((kMxfp4Static, None), (kMxfp4Static, kMxfp8Dynamic))


def _bytes(scale: torch.Tensor) -> torch.Tensor:
    """Return e8m0 scales as bytes, others as they are."""
    return scale.view(torch.uint8) if scale.element_size() == 1 else scale


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
