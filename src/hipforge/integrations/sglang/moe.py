"""SGLang's MoE runner ``hipforge``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo, MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import MoeRunnerBackendLike, resolve_moe_runner_backend

from hipforge.errors import GuardError
from hipforge.integrations import serving
from hipforge.nn.experts import Activation


@dataclass
class HipforgeMoeQuantInfo(MoeQuantInfo):
    """Weights in the format of the device.

    Attributes:
        w13: elements [E, 2·I, H] and scales, of MX-FP8 [E, 2·I, H/32].
        w2: elements [E, H, I] and scales, of MX-FP8 [E, H, I/32].
        w13_bias: [E, 2·I], or None.
        w2_bias: [E, H], or None.
        form: of both, as :func:`hipforge.integrations.serving.experts` has it.
    """

    w13: tuple[torch.Tensor, torch.Tensor]
    w2: tuple[torch.Tensor, torch.Tensor]
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    form: str = "mxfp8"


def _swiglu(config: MoeRunnerConfig) -> Activation | str:
    limit = config.swiglu_limit if config.gemm1_clamp_limit is None else config.gemm1_clamp_limit
    if config.activation != "silu" or not config.is_gated:
        return f"activation {config.activation!r} with is_gated={config.is_gated}: gated silu is taken"
    found = serving.swiglu_parameters("silu", config.gemm1_alpha, config.gemm1_beta, limit)
    if isinstance(found, str) or config.gemm1_alpha is None:
        return found
    # SGLang reads gate_up_interleaved where there is an alpha, and nowhere else.
    return Activation(found.alpha, found.beta, found.limit, config.gate_up_interleaved)


def moe_refusal(config: MoeRunnerConfig, multiple: int = 32) -> str | None:
    """Return why a layer's experts, whose widths must be multiples of a number, are not taken, or None."""
    if config.no_combine:
        return "no_combine: the sum over the choices is part of the kernels"
    widths = (config.hidden_size, config.intermediate_size_per_partition)
    if None not in widths:
        reason = serving.moe_refusal(widths[0], widths[1], config.params_dtype or torch.bfloat16, multiple)
        if reason is not None:
            return reason
    found = _swiglu(config)
    return found if isinstance(found, str) else None


class HipforgeRunnerCore(DispatchMoeRunnerCore):
    """Quantise, two grouped GEMMs, SwiGLU between them and the weighted sum."""

    def __init__(self, config: MoeRunnerConfig) -> None:
        super().__init__(config)
        reason = moe_refusal(config, 16)  # what every form needs; a method asks for more
        found = _swiglu(config)
        if reason is not None or isinstance(found, str):
            raise GuardError(f"the MoE runner hipforge does not take this layer: {reason}")
        self.swiglu = found

    @property
    def runner_backend(self) -> MoeRunnerBackendLike:
        """The registered name."""
        return resolve_moe_runner_backend("hipforge")

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: MoeQuantInfo, runner_config: MoeRunnerConfig, hooks: Any = None
    ) -> Any:
        """Return the weighted sum [T, H] as SGLang's standard combine input; ids of -1 contribute nothing."""
        if hooks is not None:
            raise GuardError("the MoE runner hipforge has no LoRA hooks; use --moe-runner-backend triton")
        assert isinstance(quant_info, HipforgeMoeQuantInfo)
        weights, ids = dispatch_output.topk_output.topk_weights, dispatch_output.topk_output.topk_ids
        out = serving.experts(
            dispatch_output.hidden_states, quant_info.w13, quant_info.w2, weights, ids, self.swiglu,
            w1_bias=quant_info.w13_bias, w2_bias=quant_info.w2_bias,
            weighted_input=runner_config.apply_router_weight_on_input, form=quant_info.form,
        )  # fmt: skip
        if runner_config.routed_scaling_factor is not None:
            out *= runner_config.routed_scaling_factor
        return StandardCombineInput(hidden_states=out)
