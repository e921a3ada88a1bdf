"""vLLM's MX-FP8 experts."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kMxfp8Dynamic, kMxfp8Static

from hipforge.errors import GuardError
from hipforge.integrations import serving


class HipforgeMxfp8Experts(mk.FusedMoEExpertsModular):
    """Quantise, two grouped GEMMs, SwiGLU between them and the weighted sum, on gfx950 and gfx942.

    Weights are taken in the checkpoint's layout. On gfx942 the first call brings them into e4m3fnuz, in place.
    """

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, **options: Any) -> None:
        super().__init__(moe_config, quant_config, **options)
        self._converted = False
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
        cls: type[mk.FusedMoEExperts],
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
                    moe_config.hidden_dim, moe_config.intermediate_size_per_partition, moe_config.in_dtype
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

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return (weight_key, activation_key) == (kMxfp8Static, kMxfp8Dynamic)

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
        scales = self.w1_scale, self.w2_scale
        assert scales[0] is not None and scales[1] is not None
        pairs = [serving.in_device_format(w, s, self._converted) for w, s in zip((w1, w2), scales, strict=True)]
        self._converted = True
        serving.experts(
            hidden_states, pairs[0], pairs[1], topk_weights, topk_ids, self.swiglu, expert_map=expert_map,
            w1_bias=self.w1_bias, w2_bias=self.w2_bias, weighted_input=apply_router_weight_on_input, out=output,
        )  # fmt: skip


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
